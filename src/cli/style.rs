//! Colours for a terminal, and none elsewhere: what is printed says the same without them.

use std::io::IsTerminal;

/// How text is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    /// Characters alone.
    Plain,
    /// With colours for a terminal (SGR codes).
    Colour,
}

impl Style {
    /// That of stdout: colours for a terminal, unless it has none or its user wants none (no-color.org).
    pub(super) fn of_stdout() -> Style {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let able = std::env::var_os("TERM").is_some_and(|term| term != "dumb") && std::io::stdout().is_terminal();
        if wanted && able { Style::Colour } else { Style::Plain }
    }

    /// The text in this colour: an SGR code, such as `1;36`.
    pub(super) fn paint(self, text: &str, code: &str) -> String {
        match self {
            Style::Plain => text.to_owned(),
            Style::Colour => format!("\u{1b}[{code}m{text}\u{1b}[0m"),
        }
    }
}
