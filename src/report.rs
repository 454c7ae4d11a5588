//! What the hook tells the agent, if there is one: that an event was handled, how it went, and how long it took.
//!
//! One datagram to `/run/virt-pin/agent.sock`, lost where nobody listens: an agent that has ended leaves a socket that
//! refuses, so that the same look tells whether one lives. Never waits.

use std::io;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use crate::error::Code;
use crate::host::root::Root;
use crate::lock::STATE_DIR;

/// The agent's socket, below the state directory, which is root's alone.
pub const SOCKET: &str = "agent.sock";
/// A report is never longer.
pub const MAX_BYTES: usize = 256;

/// The events that are reported.
pub const OPERATIONS: [&str; 6] = ["prepare", "started", "release", "migrate", "restore", "reconnect"];

/// One event that the hook has handled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The event: `prepare`, `started`, ...
    pub operation: String,
    /// What went wrong.
    pub code: Option<String>,
    /// Whether libvirt was told so.
    pub refused: bool,
    /// From the hook's first instruction to its last.
    pub took: Duration,
}

impl Report {
    /// An event's report.
    pub fn new(operation: &str, failure: Option<Code>, may_refuse: bool, took: Duration) -> Report {
        let code = failure.map(|code| code.name().to_owned());
        Report { operation: operation.to_owned(), refused: code.is_some() && may_refuse, code, took }
    }

    fn render(&self) -> String {
        let code = self.code.as_deref().unwrap_or("-");
        format!("{} {code} {} {}", self.operation, if self.refused { "refused" } else { "-" }, self.took.as_micros())
    }

    /// Reads one; `None` for anything else.
    pub fn parse(text: &str) -> Option<Report> {
        let fields: Vec<&str> = text.split(' ').collect();
        let [operation, code, refused, micros] = fields[..] else { return None };
        // Nobody else's words become names of metrics, however many there are.
        let known = OPERATIONS.contains(&operation) && (code == "-" || Code::all().any(|known| known.name() == code));
        known.then_some(())?;
        Some(Report {
            operation: operation.to_owned(),
            code: (code != "-").then(|| code.to_owned()),
            refused: refused == "refused",
            took: Duration::from_micros(micros.parse().ok()?),
        })
    }

    /// Tells the agent, if there is one.
    pub fn send(&self, root: &Root) {
        if let Ok(socket) = connect(root) {
            let _ = socket.send(self.render().as_bytes());
        }
    }
}

/// Wakes the agent, if there is one, with nothing to say.
pub fn wake(root: &Root) {
    if let Ok(socket) = connect(root) {
        let _ = socket.send(b"-");
    }
}

/// Whether an agent lives.
pub fn agent_lives(root: &Root) -> bool {
    connect(root).is_ok()
}

fn connect(root: &Root) -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    // Nobody waits for an agent that hangs.
    socket.set_nonblocking(true)?;
    socket.connect(root.resolve(STATE_DIR).join(SOCKET))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_arrive_as_they_were() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::directory(dir.path());
        std::fs::create_dir_all(dir.path().join("run/virt-pin")).unwrap();
        let report = Report::new("prepare", Some(Code::Shortage), true, Duration::from_micros(1834));
        report.send(&root);
        assert!(!agent_lives(&root));
        let socket = UnixDatagram::bind(dir.path().join("run/virt-pin/agent.sock")).unwrap();
        assert!(agent_lives(&root));
        report.send(&root);
        let mut bytes = [0; MAX_BYTES];
        let length = socket.recv(&mut bytes).unwrap();
        let text = std::str::from_utf8(&bytes[..length]).unwrap();
        assert_eq!(text, "prepare cpu.placement.shortage refused 1834");
        assert_eq!(Report::parse(text), Some(report));
        drop(socket);
        assert!(!agent_lives(&root));
        let fine = Report::new("started", None, true, Duration::from_secs(1));
        assert_eq!(Report::parse(&fine.render()), Some(fine));
        for bad in ["", "a b", "prepared - - 1", "prepare cpu.red - 1", "prepare - - x", "prepare \" - 1", " - - 1"] {
            assert_eq!(Report::parse(bad), None, "{bad}");
        }
    }
}
