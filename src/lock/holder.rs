//! Who holds the lock, as the kernel lists it: for a message, when waiting for it was in vain. Decides nothing.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use crate::error::printable;
use crate::host::process;
use crate::host::root::Root;

/// The process in words: `pid 812, "virt-pin-hook"`; `None` where the kernel does not say (another PID namespace, say).
pub(super) fn holder(root: &Root, lock: &Metadata) -> Option<String> {
    let pid = pid(&root.read_if_exists("/proc/locks").ok()??, lock)?;
    let name = process::name_and_parent(root, pid).map(|(name, _)| format!(", \"{}\"", printable(&name)));
    Some(format!("pid {pid}{}", name.unwrap_or_default()))
}

/// From `1: FLOCK  ADVISORY  WRITE 812 00:1a:1234 0 EOF`; who waits has an arrow before the word.
fn pid(locks: &str, lock: &Metadata) -> Option<u32> {
    // As glibc takes a device's number apart.
    let device = lock.dev();
    let major = (device >> 8 & 0xfff) | (device >> 32 & !0xfff);
    let minor = (device & 0xff) | (device >> 12 & !0xff & 0xffff_ffff);
    let file = format!("{major:02x}:{minor:02x}:{}", lock.ino());
    locks.lines().find_map(|line| match line.split_whitespace().collect::<Vec<_>>()[..] {
        [_, "FLOCK", _, _, pid, found, ..] if found == file => pid.parse().ok().filter(|&pid| pid > 0),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::fcntl::{Flock, FlockArg};

    #[test]
    fn this_process_is_found_by_its_lock() {
        let file = tempfile::tempfile().unwrap();
        let metadata = file.metadata().unwrap();
        let locks = || std::fs::read_to_string("/proc/locks").unwrap();
        assert_eq!(pid(&locks(), &metadata), None);
        let _held = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| errno).unwrap();
        // File systems in layers show another device than they have locks of.
        let found = pid(&locks(), &metadata);
        assert!(found == Some(std::process::id()) || found.is_none(), "{found:?}: {}", locks());
        let line = |head: &str, at: &Metadata| {
            let (major, minor) = (nix::libc::major(at.dev()), nix::libc::minor(at.dev()));
            format!("1: {head}FLOCK  ADVISORY  WRITE 812 {major:02x}:{minor:02x}:{} 0 EOF\n", at.ino())
        };
        assert_eq!(pid(&line("", &metadata), &metadata), Some(812));
        assert_eq!(pid(&line("-> ", &metadata), &metadata), None);
        assert_eq!(pid(&line("", &std::fs::metadata("/").unwrap()), &metadata), None);
    }
}
