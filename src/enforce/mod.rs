//! Makes a lease physical: nobody of the domain runs outside it, from QEMU's first instruction where the host allows.
//!
//! [`confinement`] says which way this host offers. [`tree`] makes the domain's cgroup before QEMU is executed;
//! [`binding`] puts each thread where the plan says once it exists, and reads back. Nothing here decides who gets which
//! CPUs, and nothing here calls libvirt.

pub mod binding;
pub mod tree;

use crate::error::Result;
use crate::host::cgroup::{Hierarchy, has_machined, hierarchy};
use crate::host::root::Root;

/// How a domain is held to its CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Confinement {
    /// The domain's cgroup is made before QEMU is executed: v1 without machined.
    BeforeExec {
        /// Mount point of the cpuset hierarchy.
        mount: String,
    },
    /// Threads are bound when libvirt reports them started.
    AtStarted,
}

/// How domains are confined on this host.
///
/// # Errors
/// As [`hierarchy`].
pub fn confinement(root: &Root) -> Result<Confinement> {
    Ok(match hierarchy(root)? {
        Some(Hierarchy::V1(mount)) if !has_machined(root) => Confinement::BeforeExec { mount },
        _ => Confinement::AtStarted,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn v1_without_machined_confines_before_exec() {
        let on = |files: &[(&str, &str)]| {
            let root =
                Root::described(files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect());
            confinement(&root).unwrap()
        };
        let v1 = ("/proc/mounts", "cgroup /c cgroup rw,cpuset 0 0\n");
        let systemd = ("/run/systemd/system/x", "");
        let machined = ("/usr/share/dbus-1/system-services/org.freedesktop.machine1.service", "");
        assert_eq!(on(&[v1]), Confinement::BeforeExec { mount: "/c".to_owned() });
        assert_eq!(on(&[v1, systemd]), Confinement::BeforeExec { mount: "/c".to_owned() });
        assert_eq!(on(&[v1, systemd, machined]), Confinement::AtStarted);
        assert_eq!(on(&[("/proc/mounts", "cgroup2 /c cgroup2 rw 0 0\n")]), Confinement::AtStarted);
    }
}
