//! Who: the UUID that identifies a domain. Names are hostile and change silently; the UUID is libvirt's own key.

use std::fmt;

/// A domain's UUID. Prints in libvirt's form (lower case, hyphens).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainUuid([u8; 16]);

impl DomainUuid {
    /// Parses what libvirt's `virUUIDParse` accepts: 32 hex digits, hyphens and spaces allowed between pairs. `None` for
    /// anything else.
    pub fn parse(text: &str) -> Option<DomainUuid> {
        let mut bytes = [0; 16];
        let mut rest = text.trim_ascii();
        for byte in &mut bytes {
            rest = rest.trim_start_matches(['-', ' ']);
            let pair = rest.get(..2).filter(|pair| pair.bytes().all(|digit| digit.is_ascii_hexdigit()))?;
            *byte = u8::from_str_radix(pair, 16).ok()?;
            rest = rest.get(2..)?;
        }
        rest.is_empty().then_some(DomainUuid(bytes))
    }
}

impl fmt::Display for DomainUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::with_capacity(36);
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                text.push('-');
            }
            text.extend([byte >> 4, byte & 15].into_iter().filter_map(|digit| char::from_digit(digit.into(), 16)));
        }
        f.write_str(&text)
    }
}

impl fmt::Debug for DomainUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids() {
        let text = "0123abcd-89ab-cdef-0123-456789abcdef";
        for spelling in [text, "0123ABCD89ABCDEF0123456789ABCDEF", " 0123abcd 89ab-cdef-0123-456789abcdef\n"] {
            assert_eq!(DomainUuid::parse(spelling).map(|uuid| uuid.to_string()), Some(text.to_owned()), "{spelling}");
        }
        for bad in ["", "0123", &text[1..], &format!("{text}0"), "+123abcd-89ab-cdef-0123-456789abcdef", "é123abcd"] {
            assert_eq!(DomainUuid::parse(bad), None, "{bad}");
        }
    }
}
