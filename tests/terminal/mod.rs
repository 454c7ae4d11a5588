//! A terminal for a program to talk to.

use std::fs::File;
use std::io::Read;
use std::process::{Command, Stdio};

use nix::pty::openpty;

/// What a program leaves on a terminal, stdout and stderr together; lines that it has taken away again are gone.
pub(crate) fn on_a_terminal(mut command: Command) -> String {
    let terminal = openpty(None, None).unwrap();
    let ours = || Stdio::from(terminal.slave.try_clone().unwrap());
    command.env("TERM", "xterm").stdin(Stdio::null()).stdout(ours()).stderr(ours());
    let mut child = command.spawn().unwrap();
    // The other side has to be closed when the child's end is, or nobody would see that.
    drop((command, terminal.slave));
    let mut text = Vec::new();
    // The end is an error (EIO).
    let _ = File::from(terminal.master).read_to_end(&mut text);
    child.wait().unwrap();
    let text = String::from_utf8(text).unwrap().replace("\r\n", "\n");
    let left = |line: &str| line.rsplit("\r\u{1b}[K").next().unwrap_or_default().to_owned();
    text.split_inclusive('\n').map(left).collect()
}
