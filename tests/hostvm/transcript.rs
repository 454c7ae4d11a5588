//! What somebody types on a host and reads there, for a document: recorded in a file, and compared with it ever after. `UPDATE=1`
//! records it anew; `tests/documents.rs` puts it into the document.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::host::Host;

const END: &str = "```\n";

/// A session of root's on a host.
pub(crate) struct Transcript<'a> {
    host: &'a Host,
    text: String,
    took: Vec<(String, Duration)>,
}

impl Transcript<'_> {
    pub(crate) fn on(host: &Host) -> Transcript<'_> {
        Transcript { host, text: "```console\n".to_owned(), took: Vec::new() }
    }

    /// Runs a line in /run, which must succeed, and writes down what it prints.
    #[track_caller]
    pub(crate) fn run(&mut self, line: &str) -> String {
        let began = Instant::now();
        let said = self.host.sh(&format!("exec 2>&1; cd /run && {line}")).ok();
        let name = line.split(' ').take(if line.starts_with("vi") { 2 } else { 1 }).collect::<Vec<_>>().join(" ");
        self.took.push((name, began.elapsed()));
        // How many files a machine has is nobody's business.
        let lines = said.lines().filter(|line| !line.starts_with("(Reading database")).map(str::trim_end);
        writeln!(self.text, "# {line}").unwrap();
        lines.for_each(|line| writeln!(self.text, "{line}").unwrap());
        said
    }

    /// What it was when it was recorded, but for the time that it takes.
    #[track_caller]
    pub(crate) fn agrees_with(self, name: &str) {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/hostvm/recorded").join(name);
        let text = self.text + END;
        if std::env::var_os("UPDATE").is_some() {
            let seconds = |took: &Duration| format!("{:.1} s", took.as_secs_f64());
            let each: Vec<_> = self.took.iter().map(|(name, took)| format!("`{name}` {}", seconds(took))).collect();
            let all = seconds(&self.took.iter().map(|(_, took)| *took).sum());
            let mut file = std::fs::File::create(&path).unwrap();
            write!(file, "{text}\nWhat that took, measured once: {all} ({}).\n", each.join(", ")).unwrap();
        } else {
            let recorded = std::fs::read_to_string(&path).unwrap();
            let (recorded, _) = recorded.rsplit_once(END).unwrap();
            assert_eq!(format!("{recorded}{END}"), text, "{}: UPDATE=1 records it anew", path.display());
        }
    }
}
