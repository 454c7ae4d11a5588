//! What goes to stderr: errors, what is being done, and how far it has come.
//!
//! Programs get each sentence in one line, as libvirt does of the hook; a terminal gets lines that fit it, and a line of progress,
//! rewritten in place and gone at the end.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use super::table::{width_of, wrapped};

/// Before the first line.
const PATIENCE: Duration = Duration::from_millis(700);
/// Between two lines.
const PACE: Duration = Duration::from_millis(200);
/// A line that is wider would not be rewritten in place.
const WIDTH: usize = 79;

/// Says these lines.
pub(super) fn say(text: &str) {
    let text = if io::stderr().is_terminal() { text.lines().map(fitted).collect() } else { text.to_owned() };
    // Whoever has closed stderr does not want to know.
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

/// A line that fits. What is below an error's first line begins with a word for what it is; the rest is below the rest.
fn fitted(line: &str) -> String {
    match line.strip_prefix("  ").and_then(|line| line.split_once(": ")) {
        Some((word, text)) => wrapped(&format!("  {word}: "), text),
        None if line.is_empty() => "\n".to_owned(),
        None => wrapped("  ", line).chars().skip(2).collect(),
    }
}

/// A line of progress.
pub(super) struct Progress {
    /// When it may be written next; `None` = never.
    next: Option<Instant>,
    shown: bool,
}

impl Progress {
    /// A line on stderr, where that is a terminal and `wanted`.
    pub(super) fn new(wanted: bool) -> Progress {
        let able = std::env::var_os("TERM").is_some_and(|term| term != "dumb") && io::stderr().is_terminal();
        Progress { next: (wanted && able).then(|| Instant::now() + PATIENCE), shown: false }
    }

    /// Says how far it has come, if it is time to.
    pub(super) fn at(&mut self, text: impl FnOnce() -> String) {
        let now = Instant::now();
        if self.next.is_none_or(|next| now < next) {
            return;
        }
        let text = text();
        let cut: String = if width_of(&text) > WIDTH { text.chars().take(WIDTH).collect() } else { text };
        let mut stderr = io::stderr().lock();
        // A terminal that is gone is no reason to end.
        let _ = write!(stderr, "\r{cut}\u{1b}[K").and_then(|()| stderr.flush());
        (self.next, self.shown) = (Some(now + PACE), true);
    }

    /// Takes the line away, for what is to be read after it.
    pub(super) fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            let mut stderr = io::stderr().lock();
            let _ = write!(stderr, "\r\u{1b}[K").and_then(|()| stderr.flush());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_stays_one() {
        let text = "virt-pin: error[usage]: x\n\n  hint: y\n";
        assert_eq!(text.lines().map(fitted).collect::<String>(), text);
    }
}
