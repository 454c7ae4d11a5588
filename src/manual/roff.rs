//! A manual page as man(7) text. `code` in backticks becomes bold. Pure; knows nothing of what it says.

/// A page in the making.
pub(super) struct Page(String);

impl Page {
    /// A page with its title and what makes it findable (`man -k`).
    pub(super) fn new(name: &str, section: &str, what: &str) -> Page {
        let version = env!("CARGO_PKG_VERSION");
        let mut page = Page(format!(".TH \"{}\" \"{section}\" \"\" \"virt-pin {version}\" \"\"\n", plain(name)));
        page.heading("NAME");
        page.0 += &format!("{} \\- {}\n", plain(name), inline(what));
        page
    }

    /// Text that is man(7) already.
    pub(super) fn raw(&mut self, text: &str) {
        self.0 += text;
    }

    pub(super) fn heading(&mut self, title: &str) {
        self.0 += &format!(".SH \"{}\"\n", plain(title));
    }

    pub(super) fn subheading(&mut self, title: &str) {
        self.0 += &format!(".SS \"{}\"\n", plain(title));
    }

    /// Text after a heading or a paragraph.
    pub(super) fn text(&mut self, text: &str) {
        self.0 += &(line(&inline(text)) + "\n");
    }

    pub(super) fn paragraph(&mut self, text: &str) {
        self.0 += ".PP\n";
        self.text(text);
    }

    /// A word and what it means.
    pub(super) fn term(&mut self, word: &str, meaning: &str) {
        self.0 += &format!(".TP\n{}\n{}\n", line(&inline(word)), line(&inline(meaning)));
    }

    /// Another paragraph about the word before.
    pub(super) fn more(&mut self, text: &str) {
        self.0 += &format!(".IP\n{}\n", line(&inline(text)));
    }

    /// Text as it is typed.
    pub(super) fn example(&mut self, text: &str) {
        // A heading begins a paragraph already.
        let headed = self.0.lines().next_back().is_some_and(|line| line.starts_with(".S"));
        self.0 += if headed { ".RS 4\n.nf\n" } else { ".PP\n.RS 4\n.nf\n" };
        self.0.extend(text.lines().map(|text| line(&plain(text)) + "\n"));
        self.0 += ".fi\n.RE\n";
    }

    /// Lines as they were printed; those that are too wide go on below.
    pub(super) fn quote<'a>(&mut self, lines: impl IntoIterator<Item = &'a str>) {
        self.0 += ".PP\n.RS 4\n";
        let lines: Vec<_> = lines.into_iter().map(|text| line(&plain(text.trim_start()))).collect();
        self.0 += &(lines.join("\n.br\n") + "\n.RE\n");
    }

    /// Points, one after the other.
    pub(super) fn list(&mut self, points: &[&str]) {
        for point in points {
            self.0 += &format!(".IP \\(bu 2\n{}\n", line(&inline(point)));
        }
    }

    pub(super) fn finish(self) -> String {
        self.0
    }
}

/// A line that begins like a request is none.
fn line(text: &str) -> String {
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text.to_owned() }
}

/// Text without markup: what roff would read otherwise is escaped.
pub(super) fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\\' => out += "\\e",
            '-' => out += "\\-",
            '"' => out += "\\(dq",
            '\'' => out += "\\(aq",
            '`' => out += "\\(ga",
            '^' => out += "\\(ha",
            '~' => out += "\\(ti",
            '\n' => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// Text with `code`.
fn inline(text: &str) -> String {
    let parts = text.split('`').map(plain).enumerate();
    parts.map(|(at, part)| if at % 2 == 1 { format!("\\fB{part}\\fR") } else { part }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_text_is_a_request() {
        let mut page = Page::new("a-b", "5", "what it is");
        page.text(".so /etc/passwd");
        page.term("`--x`", "'quoted' \\fB");
        page.example(".nf\n\"x\"");
        let page = page.finish();
        assert!(page.contains("\na\\-b \\- what it is\n\\&.so /etc/passwd\n"), "{page}");
        assert!(page.contains(".TP\n\\fB\\-\\-x\\fR\n\\(aqquoted\\(aq \\efB\n"), "{page}");
        assert!(page.contains(".nf\n\\&.nf\n\\(dqx\\(dq\n.fi\n"), "{page}");
    }
}
