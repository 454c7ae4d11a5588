//! What libvirt runs at each event of a VM: argv and stdin in, XML on stdout or one error on stderr out.
//!
//! libvirt holds the VM's lock while this runs and waits for the end of stdout and stderr without limit, so: no call to
//! libvirt, no wait without a deadline, no child that keeps our descriptors, no panic. stdout carries XML and nothing
//! else; the first line of stderr is complete in itself, since libvirt shows it to whoever started the VM.

mod act;
pub mod call;
mod isolation;
mod moves;
mod others;
mod running;
mod sync;

use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::error::{Code, Error, Result};
use crate::failpoint;
use crate::host::root::Root;
use crate::report::Report;
use crate::xml;
use call::Operation;

/// How long to wait for the next piece of the XML. libvirt writes it at once; a person at a terminal does not.
const STDIN_DEADLINE: Duration = Duration::from_secs(10);

const USAGE: &str = "usage: virt-pin-hook NAME OPERATION SUB-OPERATION EXTRA < DOMAIN.xml\n\
    libvirt runs this at each event of a VM, as /etc/libvirt/hooks/qemu or from qemu.d/ beside it.\n\
    Install it with `virt-pin install`.\n";

/// The hook binary: runs one event and reports it to libvirt.
pub fn main() -> ExitCode {
    let begun = Instant::now();
    let args: Vec<String> = std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned()).collect();
    if args.is_empty() {
        let _ = io::stderr().write_all(USAGE.as_bytes());
        return ExitCode::from(Code::Usage.exit());
    }
    let root = Root::from_environment();
    // Session daemons run the same hook as their user; their VMs are not ours.
    if root.is_this_machine() && !nix::unistd::geteuid().is_root() {
        return ExitCode::SUCCESS;
    }
    let Some(operation) = call::operation(&args) else { return ExitCode::SUCCESS };
    // The default panic message would be stderr's first line, before ours.
    panic::set_hook(Box::new(|_| {}));
    let result = panic::catch_unwind(AssertUnwindSafe(|| run(&root, operation)));
    let result = result.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Err(Error::new(Code::Internal, format!("a fault in virt-pin at {operation:?}: {text}")))
    });
    if !is_idle(operation) {
        let code = result.as_ref().err().map(|error| error.code);
        Report::new(operation.name(), code, operation.may_refuse(), begun.elapsed()).send(&root);
    }
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = io::stderr().write_all(error.render().as_bytes());
            if operation.may_refuse() { ExitCode::from(error.code.exit()) } else { ExitCode::SUCCESS }
        }
    }
}

fn run(root: &Root, operation: Operation) -> Result<()> {
    if is_idle(operation) {
        return Ok(());
    }
    let text = xml::text_of(read_stdin()?)?;
    let output = act::act(root, operation, &text)?;
    failpoint::passed("answered");
    let Some(output) = output else { return Ok(()) };
    let mut stdout = io::stdout().lock();
    match stdout.write_all(output.as_bytes()).and_then(|()| stdout.flush()) {
        // libvirt drops what prepare prints: that a dispatcher does too is no reason to refuse a start that has its lease.
        Err(error) if operation != Operation::Prepare => {
            Err(Error::new(Code::HostIo, "cannot write the domain's XML to stdout").because(error))
        }
        _ => Ok(()),
    }
}

/// Whether nothing is done at an event: its XML is not even read then, which libvirt does not mind.
fn is_idle(operation: Operation) -> bool {
    matches!(operation, Operation::Start | Operation::Stopped)
}

/// All of stdin, bounded in size and in time.
fn read_stdin() -> Result<Vec<u8>> {
    let stdin = io::stdin();
    if stdin.is_terminal() {
        return Err(Error::new(Code::DomainInvalid, "no domain XML on stdin: it is a terminal").with_hint(USAGE));
    }
    let unreadable =
        |error: io::Error| Error::new(Code::DomainInvalid, "cannot read the domain XML from stdin").because(error);
    let mut stdin = stdin.lock();
    let mut bytes = Vec::new();
    let mut piece = vec![0; 64 << 10];
    let start = Instant::now();
    loop {
        let left = STDIN_DEADLINE.saturating_sub(start.elapsed());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
        let ready = poll(&mut [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)], timeout);
        match ready {
            Ok(0) => {
                let seconds = STDIN_DEADLINE.as_secs();
                return Err(Error::new(Code::DomainInvalid, format!("no domain XML on stdin within {seconds} s"))
                    .with_hint("whoever calls the hook has to hand the domain's XML on, and then to close its stdin"));
            }
            Ok(_) => {}
            Err(nix::errno::Errno::EINTR) => continue,
            Err(errno) => return Err(unreadable(errno.into())),
        }
        match stdin.read(&mut piece) {
            Ok(0) => return Ok(bytes),
            Ok(count) => bytes.extend(piece.iter().take(count)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(unreadable(error)),
        }
        if bytes.len() > xml::MAX_BYTES {
            let limit = xml::MAX_BYTES >> 20;
            return Err(Error::new(Code::DomainInvalid, format!("the domain XML on stdin is longer than {limit} MiB")));
        }
    }
}
