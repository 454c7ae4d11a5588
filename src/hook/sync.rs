//! Starts `virt-pin sync` behind libvirt's back: libvirt's live XML is brought in line once libvirt has let go of the VM. Where
//! an agent lives, it sees the lease and does the same; one that ends in between does so when it is started again.

use std::process::Stdio;

use crate::failpoint;
use crate::host::process;
use crate::host::root::Root;
use crate::report;
use crate::uuid::DomainUuid;

/// Starts it, detached: nothing of ours stays open in it, or libvirt would wait for it. Its stdin is a pipe that ends
/// when we do, which tells it that libvirt is about to let go. That it could not be started is no reason to fail a VM
/// whose threads are right; it is returned for the log.
pub(super) fn start(root: &Root, command: &str, uuid: DomainUuid) -> Result<(), std::io::Error> {
    if !root.is_this_machine() || report::agent_lives(root) {
        return Ok(());
    }
    failpoint::step("sync.start")?;
    let child = process::command(command)
        .args(["sync", "--after-stdin", &uuid.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    // Dropping the handle would close the pipe now; it has to stay until this process ends.
    std::mem::forget(child);
    Ok(())
}
