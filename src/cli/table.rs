//! Tables in virsh's style, at most 80 columns wide unless a single word is wider. Pure.

const WIDTH: usize = 80;

/// A table as virsh prints them; the last column may go on in further lines.
pub(super) fn columns(titles: &[&str], rows: Vec<Vec<String>>) -> String {
    let titles: Vec<String> = titles.iter().map(|&title| title.to_owned()).collect();
    let mut widths: Vec<usize> = titles.iter().map(|title| width_of(title)).collect();
    for row in &rows {
        widths.iter_mut().zip(row).for_each(|(width, cell)| *width = (*width).max(width_of(cell)));
    }
    let line = |cells: &[String]| {
        let Some((last, others)) = cells.split_last() else { return String::new() };
        let padded: String = others.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}   ")).collect();
        wrapped(&format!(" {padded}"), last)
    };
    let mut out = line(&titles);
    let lines: Vec<String> = rows.iter().map(|row| line(row)).collect();
    let width = lines.iter().chain([&out]).flat_map(|line| line.lines()).map(width_of).max().unwrap_or_default();
    out += &"-".repeat((width + 1).min(WIDTH));
    out.push('\n');
    out + &lines.concat()
}

/// `first` and then `text`, broken after spaces and commas where a line would be too wide; further lines begin below
/// the text.
pub(super) fn wrapped(first: &str, text: &str) -> String {
    let mut out = String::new();
    let mut line = first.to_owned();
    let mut empty = true;
    for word in text.split_inclusive([' ', ',']) {
        if !empty && width_of(&line) + width_of(word.trim_end()) > WIDTH {
            out += line.trim_end();
            out.push('\n');
            line = " ".repeat(width_of(first));
        }
        line += word;
        empty = false;
    }
    out + line.trim_end() + "\n"
}

/// In characters; wide ones (CJK) count as one, so a table with such names is a little ragged.
fn width_of(text: &str) -> usize {
    text.chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_go_on_below() {
        let list = (0..100).step_by(2).map(|cpu| cpu.to_string()).collect::<Vec<_>>().join(",");
        let text = wrapped(" Offline: ", &list);
        assert!(text.lines().all(|line| line.len() <= WIDTH && line.starts_with(' ')), "{text}");
        assert_eq!(text.replace(['\n', ' '], ""), format!("Offline:{list}"));
        assert_eq!(wrapped(" - ", ""), " -\n");
    }
}
