//! Tables in virsh's style and broken lines, never wider than 80 columns. Pure.

const WIDTH: usize = 80;
/// Between two columns.
const GAP: usize = 3;
/// A list that has less room than this beside other things goes on below them.
const LEAST: usize = 20;
/// Where what has no room beside other things begins below them.
const INDENT: usize = 8;
/// A list beside other things may have so many lines; a longer one, with less than half of the width, goes on below them.
const TALL: usize = 4;

/// A table as virsh prints them. What is in the last column may go on in further lines, and a cell of the first one that leaves no
/// room for the others has a line of its own.
pub(super) fn columns(titles: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut widths = widths(titles, &rows);
    let beside: usize = widths.iter().skip(1).rev().skip(1).map(|width| width + GAP).sum();
    if let (Some(last), Some(title)) = (widths.last().copied(), titles.first()) {
        let least = last.min(LEAST);
        let room = WIDTH.saturating_sub(1 + GAP + beside + least).max(width_of(title));
        widths.first_mut().into_iter().for_each(|first| *first = (*first).min(room));
    }
    let line = |cells: &[String]| {
        let Some((last, others)) = cells.split_last() else { return String::new() };
        let mut out = String::new();
        let mut padded = " ".to_owned();
        for (number, (cell, &width)) in others.iter().zip(&widths).enumerate() {
            let alone = number == 0 && width_of(cell) > width;
            if alone {
                out += &wrapped(" ", cell);
            }
            padded += &format!("{:<width$}{:GAP$}", if alone { "" } else { cell }, "");
        }
        out + &beside_or_below(&padded, last)
    };
    let mut out = line(&titles.iter().map(|&title| title.to_owned()).collect::<Vec<_>>());
    let lines: Vec<String> = rows.iter().map(|row| line(row)).collect();
    let width = lines.iter().chain([&out]).flat_map(|line| line.lines()).map(width_of).max().unwrap_or_default();
    out += &"-".repeat((width + 1).min(WIDTH));
    out.push('\n');
    out + &lines.concat()
}

fn beside_or_below(first: &str, text: &str) -> String {
    let beside = wrapped(first, text);
    if width_of(first) <= WIDTH / 2 || beside.lines().count() <= TALL {
        return beside;
    }
    format!("{}\n{}", first.trim_end(), wrapped(&" ".repeat(INDENT), text))
}

/// Whether each row of the table has room in one line.
pub(super) fn fits(titles: &[&str], rows: &[Vec<String>]) -> bool {
    // A space is before the first column.
    widths(titles, rows).iter().sum::<usize>() + GAP * titles.len().saturating_sub(1) < WIDTH
}

/// How wide each column is.
fn widths(titles: &[&str], rows: &[Vec<String>]) -> Vec<usize> {
    let mut widths: Vec<usize> = titles.iter().map(|title| width_of(title)).collect();
    for row in rows {
        widths.iter_mut().zip(row).for_each(|(width, cell)| *width = (*width).max(width_of(cell)));
    }
    widths
}

/// `first` and then `text`, broken after spaces and commas where a line would be too wide, and within a word that is wider than
/// a line; further lines begin below the text, or to the left of it where that leaves next to no room.
pub(super) fn wrapped(first: &str, text: &str) -> String {
    let start = width_of(first);
    let narrow = start + LEAST > WIDTH;
    let indent = if narrow { INDENT } else { start };
    let mut out = first.to_owned();
    let mut width = start;
    // Nothing of the text is in this line yet.
    let mut empty = true;
    if narrow && start + width_of(text) > WIDTH {
        (out, width) = (format!("{}\n{:indent$}", first.trim_end(), ""), indent);
    }
    for word in text.split_inclusive([' ', ',']) {
        let mut word = word;
        while width + width_of(word.trim_end()) > WIDTH {
            if empty {
                // Wider than a line: cut, a path after a slash.
                let most = word.char_indices().nth(WIDTH - width).map_or(word.len(), |(at, _)| at);
                let slash = word.get(..most).and_then(|head| head.rfind('/')).filter(|at| *at > most / 2);
                let (head, tail) = word.split_at(slash.map_or(most, |at| at + 1));
                out += head;
                word = tail;
            }
            out.truncate(out.trim_end_matches(' ').len());
            out += &format!("\n{:indent$}", "");
            (width, empty) = (indent, true);
        }
        out += word;
        width += width_of(word);
        empty = false;
    }
    out.truncate(out.trim_end().len());
    out + "\n"
}

/// In characters; wide ones (CJK) count as one, so a table with such names is a little ragged.
pub(super) fn width_of(text: &str) -> usize {
    text.chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(count: u32) -> String {
        (0..count).map(|cpu| (2 * cpu).to_string()).collect::<Vec<_>>().join(",")
    }

    #[test]
    fn long_lists_go_on_below() {
        let text = wrapped(" Offline: ", &list(50));
        assert!(text.lines().all(|line| line.len() <= WIDTH && line.starts_with(' ')), "{text}");
        assert!(text.lines().skip(1).all(|line| line.starts_with(&" ".repeat(10))), "{text}");
        assert_eq!(text.replace(['\n', ' '], ""), format!("Offline:{}", list(50)));
        assert_eq!(wrapped(" - ", ""), " -\n");
        assert_eq!(wrapped("", "a  b"), "a  b\n");
        // Where there is next to no room to the right of it, below.
        let first = format!(" {} ", "n".repeat(70));
        assert_eq!(wrapped(&first, "0-7"), format!("{first}0-7\n"));
        let text = wrapped(&first, &list(50));
        assert!(text.lines().skip(1).all(|line| line.starts_with("        ") && line.len() <= WIDTH), "{text}");
        assert_eq!(text.lines().count(), 4, "{text}");
    }

    #[test]
    fn no_word_is_too_wide() {
        for (first, word) in [("", 79), ("", 80), ("", 81), (" - ", 200), (" - ", 77), (" - ", 78)] {
            let text = wrapped(first, &format!("a {} b", "x".repeat(word)));
            assert!(text.lines().all(|line| width_of(line) <= WIDTH && !line.ends_with(' ')), "{text}");
            assert_eq!(text.matches('x').count(), word, "{text}");
            assert!(text.lines().count() <= 2 + word / 70, "{text}");
        }
        let path = format!("/sys/{}/{}", "a".repeat(60), "b".repeat(30));
        assert_eq!(wrapped("  ", &path), format!("  /sys/{}/\n  {}\n", "a".repeat(60), "b".repeat(30)));
    }

    #[test]
    fn tables_are_as_narrow_as_they_should_be() {
        let titles = ["Name", "State", "CPUs"];
        let table = |name: &str, cpus: &str| {
            let rows = vec![vec![name.to_owned(), "running".to_owned(), cpus.to_owned()]];
            (fits(&titles, &rows), columns(&titles, rows))
        };
        let (fits, text) = table("a", "0-1");
        assert_eq!(
            (fits, text.as_str()),
            (true, " Name   State     CPUs\n-----------------------\n a      running   0-1\n")
        );
        for (name, cpus) in [("a".to_owned(), list(40)), ("n".repeat(60), list(40)), ("n".repeat(200), list(2))] {
            let (fits, text) = table(&name, &cpus);
            assert!(!fits && text.lines().all(|line| width_of(line) <= WIDTH && !line.ends_with(' ')), "{text}");
            let all: String = text.lines().skip(2).collect::<String>().replace(' ', "");
            assert_eq!(all, format!("{name}running{cpus}"), "{text}");
        }
        // A list that would be a tower is laid flat.
        let (_, text) = table(&"n".repeat(46), &list(200));
        assert!(
            text.contains("   running\n        0,2,4,") && text.lines().all(|line| width_of(line) <= WIDTH),
            "{text}"
        );
        // A name that leaves room keeps its line.
        assert!(table(&"n".repeat(46), &list(20)).1.contains(&format!(" {}   running   0,2,4", "n".repeat(46))));
    }
}
