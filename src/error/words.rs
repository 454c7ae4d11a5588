//! How numbers, names and lists are said to people: no text of a stranger can forge a line or drive a terminal.

use std::fmt;

/// A number and its noun: "1 whole core", "2 whole cores".
pub fn counted(number: impl Into<u64>, noun: &str) -> String {
    let number = number.into();
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

/// The text with every control character escaped, so that a VM's name cannot forge log lines or drive a terminal; and
/// those that a reader does not see, or that reorder what he sees. What nobody would read to its end is cut off.
pub fn printable(text: &str) -> String {
    /// A megabyte of somebody's attribute does not get into the logs of all.
    const MOST: usize = 4096;
    let mut out = String::with_capacity(text.len().min(2 * MOST));
    for (index, c) in text.chars().enumerate() {
        if index == MOST {
            out.push_str(&format!("... ({} characters)", text.chars().count()));
            break;
        }
        let unseen = matches!(c, '\u{200b}'..='\u{200f}' | '\u{61c}' | '\u{2060}' | '\u{feff}');
        let reorders = matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if c.is_control() || unseen || reorders {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

/// Who has what, the first of many: `"a" 2-3, "b" 4-5, 7 more`; `None` where there is nobody.
pub fn listed<'n>(all: impl Iterator<Item = (&'n str, impl fmt::Display)>) -> Option<String> {
    const SHOWN: usize = 8;
    let mut all = all;
    let mut named: Vec<_> =
        all.by_ref().take(SHOWN).map(|(name, what)| format!("\"{}\" {what}", printable(name))).collect();
    let more = all.count();
    if more > 0 {
        named.push(format!("{more} more"));
    }
    (!named.is_empty()).then(|| named.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_seen_is_spelled_out() {
        assert_eq!(printable(&"é".repeat(4096)), "é".repeat(4096));
        assert_eq!(printable(&"é".repeat(4097)), "é".repeat(4096) + "... (4097 characters)");
        assert_eq!(printable("a\u{202e}b\u{200d}c é 虚 😀\t"), "a\\u{202e}b\\u{200d}c é 虚 😀\\t");
    }
}
