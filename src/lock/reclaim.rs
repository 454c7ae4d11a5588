//! Which leases are void: those whose domain is provably gone.
//!
//! libvirt reports the end of a domain (`release`) except when its daemon dies between `prepare` and QEMU's birth, or a
//! migration is never followed up. A lease whose domain may be alive is never reclaimed.

use super::leases::{Lease, Leases, State};
use crate::error::Result;
use crate::host::process::{self, Process};
use crate::host::qemu;
use crate::host::root::Root;

/// How long a provisional lease waits for the domain to be started.
const PROVISIONAL_SECS: u64 = 300;

/// Takes the void leases out and returns them, each with the reason. Sets the boot id.
///
/// # Errors
/// [`crate::error::Code::HostIo`] when `/proc` cannot be read: then nothing is proven.
pub fn reclaim(root: &Root, leases: &mut Leases) -> Result<Vec<(Lease, &'static str)>> {
    let boot_id = process::boot_id(root)?;
    let rebooted = leases.boot_id != boot_id;
    leases.boot_id = boot_id;
    let now = process::uptime_secs(root);
    let mut void = Vec::new();
    for lease in leases.iter() {
        let reason = if rebooted { Some("the host has been rebooted") } else { void_reason(root, lease, now)? };
        void.extend(reason.map(|reason| (lease.clone(), reason)));
    }
    for (lease, _) in &void {
        leases.remove(lease.uuid);
    }
    Ok(void)
}

fn void_reason(root: &Root, lease: &Lease, now: u64) -> Result<Option<&'static str>> {
    let holder = qemu::living_pid(root, &lease.name);
    if let Some(qemu) = lease.qemu {
        // Who holds the lock lives. It is asked of every lease at every start, and costs a third of what /proc does.
        let holds_lock = holder.is_ok_and(|pid| pid.is_some_and(|pid| u32::try_from(pid) == Ok(qemu.pid)));
        return Ok((!holds_lock && !is_alive(root, qemu)?).then_some("its QEMU has ended"));
    }
    if holder?.is_some() {
        return Ok(None);
    }
    if lease.state == State::Provisional {
        let expired = now > lease.since.saturating_add(PROVISIONAL_SECS);
        return Ok(expired.then_some("no start followed the migration or restore"));
    }
    // Reserved: QEMU may be on its way. Its daemon reports the end, unless the daemon has died itself.
    match lease.daemon {
        Some(daemon) if !is_alive(root, daemon)? => Ok(Some("the libvirt daemon that was starting it has ended")),
        _ => Ok(None),
    }
}

/// Whether this very process still runs (a zombie does not).
///
/// # Errors
/// As [`process::process`].
pub fn is_alive(root: &Root, wanted: Process) -> Result<bool> {
    Ok(process::process(root, wanted.pid)? == Some(wanted))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpuset::CpuSet;
    use crate::lock::leases::Holds;
    use crate::uuid::DomainUuid;

    const ALIVE: Process = Process { pid: 7, start_time: 99 };
    const DEAD: Process = Process { pid: 7, start_time: 98 };

    fn reason(
        state: State,
        qemu: Option<Process>,
        daemon: Option<Process>,
        since: u64,
        boot: &str,
    ) -> Option<&'static str> {
        let stat = "7 (x) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 99 0 0";
        let files = [
            ("/proc/sys/kernel/random/boot_id", "this boot\n"),
            ("/proc/uptime", "1000.5 1\n"),
            ("/proc/7/stat", stat),
        ];
        let root = Root::described(files.map(|(path, text)| (path.to_owned(), text.to_owned())).into());
        let mut leases = Leases::default();
        leases.boot_id = boot.to_owned();
        leases.put(Lease {
            uuid: DomainUuid::parse(&"ab".repeat(16)).unwrap(),
            name: "vm".to_owned(),
            state,
            holds: Holds::Static(CpuSet::new()),
            request: None,
            domain_id: None,
            cgroup: None,
            daemon,
            qemu,
            moving: None,
            since,
        });
        let void = reclaim(&root, &mut leases).unwrap();
        assert_eq!(leases.iter().count(), 1 - void.len());
        assert_eq!(leases.boot_id, "this boot");
        void.first().map(|(_, reason)| *reason)
    }

    #[test]
    fn only_what_is_provably_gone() {
        let boot = "this boot";
        use State::{Provisional, Reserved, Running};
        assert_eq!(reason(Running, Some(ALIVE), Some(DEAD), 0, boot), None);
        assert_eq!(reason(Running, Some(DEAD), None, 0, boot), Some("its QEMU has ended"));
        assert_eq!(reason(Running, Some(ALIVE), None, 0, "another"), Some("the host has been rebooted"));
        assert_eq!(reason(Reserved, None, Some(ALIVE), 0, boot), None);
        assert_eq!(reason(Reserved, None, None, 0, boot), None);
        assert!(reason(Reserved, None, Some(DEAD), 0, boot).is_some());
        assert_eq!(reason(Provisional, None, Some(DEAD), 700, boot), None);
        assert!(reason(Provisional, None, Some(ALIVE), 699, boot).is_some());
    }
}
