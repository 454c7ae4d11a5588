//! Tables in virsh's style, at most 80 columns wide unless a single word is wider. Pure.

const WIDTH: usize = 80;
/// A list that is given less room than one CPU and "..." says nothing.
const LEAST: usize = 7;

/// A table as virsh prints them; the last column may go on in further lines.
pub(super) fn columns(titles: &[&str], rows: Vec<Vec<String>>) -> String {
    let widths = widths(titles, &rows);
    let titles: Vec<String> = titles.iter().map(|&title| title.to_owned()).collect();
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

/// Cuts lists in the `last` columns, the widest first, so that the table becomes as narrow as it should be; what is left
/// out is shown as "...".
pub(super) fn shorten(titles: &[&str], rows: &mut [Vec<String>], last: usize) {
    let mut widths = widths(titles, rows);
    let lists = titles.len().saturating_sub(last);
    while 1 + widths.iter().map(|width| width + 3).sum::<usize>() > WIDTH + 3 {
        let lists = widths.iter_mut().zip(titles).skip(lists);
        let shrinkable = lists.filter(|(width, title)| **width > LEAST.max(width_of(title))).map(|(width, _)| width);
        let Some(widest) = shrinkable.max() else { break };
        *widest -= 1;
    }
    for row in rows {
        row.iter_mut().zip(&widths).skip(lists).for_each(|(cell, width)| *cell = cut(cell, *width));
    }
}

/// As many items of the list as fit.
fn cut(list: &str, width: usize) -> String {
    const MORE: &str = "...";
    if width_of(list) <= width {
        return list.to_owned();
    }
    let mut out = String::new();
    for item in list.split_inclusive(',') {
        if width_of(&out) + width_of(item) + MORE.len() > width {
            break;
        }
        out += item;
    }
    out + MORE
}

/// How wide each column is.
fn widths(titles: &[&str], rows: &[Vec<String>]) -> Vec<usize> {
    let mut widths: Vec<usize> = titles.iter().map(|title| width_of(title)).collect();
    for row in rows {
        widths.iter_mut().zip(row).for_each(|(width, cell)| *width = (*width).max(width_of(cell)));
    }
    widths
}

/// `first` and then `text`, broken after spaces and commas where a line would be too wide; further lines begin below
/// the text. Beside a `first` that leaves next to no room, breaking would not help.
pub(super) fn wrapped(first: &str, text: &str) -> String {
    let mut out = String::new();
    let mut line = first.to_owned();
    let mut empty = true;
    let helps = width_of(first) + LEAST <= WIDTH;
    for word in text.split_inclusive([' ', ',']) {
        if helps && !empty && width_of(&line) + width_of(word.trim_end()) > WIDTH {
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

    #[test]
    fn lists_are_cut_where_there_is_no_room() {
        let list = |count: u32| (0..count).map(|cpu| (2 * cpu).to_string()).collect::<Vec<_>>().join(",");
        let titles = ["Name", "Parked", "CPUs"];
        let table = |name: &str, parked: &str, cpus: &str| {
            let mut rows = vec![vec![name.to_owned(), parked.to_owned(), cpus.to_owned()]];
            shorten(&titles, &mut rows, 2);
            rows.remove(0)
        };
        // What fits is left alone.
        assert_eq!(table("a", &list(5), &list(6)), ["a", &list(5), &list(6)]);
        let cells = table("a", &list(40), &list(40));
        assert!(cells[1].ends_with(",...") && cells[2].starts_with("0,2,4,6,8,"), "{cells:?}");
        let text = columns(&titles, vec![cells]);
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(text.lines().all(|line| width_of(line) <= WIDTH), "{text}");
        // A short list keeps what it has beside a long one; a name is never cut.
        assert_eq!(table("a", "0-1", &list(40))[1], "0-1");
        let long = "n".repeat(200);
        let cells = table(&long, "0-1", &list(40));
        assert_eq!(cells, [long.as_str(), "0-1", "0,2,..."]);
        assert_eq!(columns(&titles, vec![cells]).lines().count(), 3);
    }
}
