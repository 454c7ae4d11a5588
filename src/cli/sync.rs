//! `virt-pin sync`: libvirt's live XML says what the lease says.

use std::io::Read;

use super::{Context, subject};
use crate::agent::mirror::{Mirrored, mirror};
use crate::error::{Error, Result, counted, printable};
use crate::libvirt::Libvirt;
use crate::lock;
use crate::uuid::DomainUuid;

/// No call to a libvirt that hangs is waited for longer.
const PATIENCE_SECS: u32 = 60;

pub(super) fn sync(context: &Context, domain: &str, after_stdin: bool) -> Result<String> {
    // libvirt's calls have no time limit of their own; this ends the process.
    nix::unistd::alarm::set(PATIENCE_SECS);
    if after_stdin {
        // Out of the daemon's session: it is not for us to end with it.
        let _ = nix::unistd::setsid();
    }
    if !after_stdin {
        subject::lease(&lock::read(&context.root)?, domain)?;
    }
    // Connecting takes a while and needs no domain: it overlaps with the end of the hook.
    let libvirt = Libvirt::connect()?;
    if after_stdin {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
    }
    let leases = lock::read(&context.root)?;
    let lease = subject::lease(&leases, domain)?;
    let what = match mirror(&context.root, &libvirt, lease.uuid)? {
        Mirrored::Not(why) => format!(" {why}"),
        Mirrored::Set(0) => ": its live XML says what its lease says already".to_owned(),
        Mirrored::Set(count) => format!(": {} of its live XML set", counted(count as u64, "pin")),
    };
    Ok(format!("Domain \"{}\"{what}.\n", printable(&lease.name)))
}

/// The same once a lease has been moved; the error if libvirt's live XML could not be told, which is no reason to fail.
pub(super) fn after_move(context: &Context, uuid: DomainUuid) -> Option<Error> {
    if !context.root.is_this_machine() {
        return None;
    }
    let told = sync(context, &uuid.to_string(), false);
    // What comes next takes the time it takes.
    let _ = nix::unistd::alarm::cancel();
    told.err().map(|error| {
        Error::new(
            error.code,
            format!("its live XML does not say so (`virt-pin sync {uuid}` tries again): {}", error.message),
        )
    })
}
