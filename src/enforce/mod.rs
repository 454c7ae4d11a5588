//! Makes a lease physical: nobody of the domain runs outside it, from QEMU's first instruction where the host allows.
//!
//! [`confinement`] says which way this host offers. [`tree`] makes the domain's cgroup before QEMU is executed, [`scope`]
//! tells systemd to make it so; [`pool`] keeps the others off, [`isolation`] the host's own work where that is asked for;
//! [`binding`] puts each thread where the plan says once it exists, and reads back; [`cookie`] keeps tenants off each other's
//! cores; [`passage`] is the way to other CPUs; [`remains`] are what a killed process left behind. Nothing here decides who gets which CPUs, and nothing here calls libvirt.

pub mod binding;
pub mod cookie;
pub mod isolation;
pub mod passage;
pub mod pool;
pub mod remains;
pub mod scope;
pub mod tree;

use crate::alloc::plan::Plan;
use crate::error::{Code, Error, Result};
use crate::host::cgroup::{Hierarchy, has_machined, hierarchy, naming};
use crate::host::machine_name::Naming;
use crate::host::root::Root;
use crate::lock::leases::Leases;

/// How a domain is held to its CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Confinement {
    /// The domain's cgroup is made before QEMU is executed, each thread's part of it included: v1, and v2 without machined.
    Tree {
        /// Where the cpuset controller is.
        hierarchy: Hierarchy,
        /// Who names the cgroup. systemd does not manage the cpusets of v1, so there libvirt makes the directory of the name
        /// that systemd has given the scope elsewhere.
        naming: Naming,
    },
    /// A drop-in of the scope that systemd will make holds the domain as a whole before QEMU is executed; threads are
    /// bound when libvirt reports them started: v2 with machined.
    Scope,
    /// Threads are bound when libvirt reports them started: no cpuset controller.
    AtStarted,
}

/// How domains are confined on this host.
///
/// # Errors
/// As [`hierarchy`].
pub fn confinement(root: &Root) -> Result<Confinement> {
    Ok(match hierarchy(root)? {
        Some(Hierarchy::V2(_)) if has_machined(root) => Confinement::Scope,
        Some(hierarchy) => Confinement::Tree { hierarchy, naming: naming(root) },
        None => Confinement::AtStarted,
    })
}

impl Confinement {
    /// Where the domain that starts with this id is confined: the path of its cgroup or of its drop-ins; `None` where
    /// nothing can be done before it runs.
    ///
    /// # Errors
    /// As [`tree::path`].
    pub fn place(&self, partition: Option<&str>, domain_id: u32, name: &str) -> Result<Option<String>> {
        match self {
            Confinement::Tree { hierarchy, naming } => {
                tree::path(hierarchy, *naming, partition, domain_id, name).map(Some)
            }
            Confinement::Scope => Ok(Some(scope::path(domain_id, name))),
            Confinement::AtStarted => Ok(None),
        }
    }

    /// Confines the domain at `place` (from [`Confinement::place`]) to its plan.
    ///
    /// # Errors
    /// [`Code::ConfinementFailed`] with the step that failed; what was made is removed again.
    pub fn make(&self, root: &Root, place: &str, iothreads: &[u32], plan: &Plan) -> Result<()> {
        let made = match self {
            Confinement::Tree { hierarchy, .. } => tree::make(root, hierarchy, place, iothreads, plan),
            Confinement::Scope => scope::make(root, place, plan),
            Confinement::AtStarted => Ok(()),
        };
        made.map_err(|error| {
            Error::new(
                Code::ConfinementFailed,
                format!("cannot confine the domain before its start: {}", error.message),
            )
            .with_hint("`virt-pin check` shows the cgroup mode in use; the start was refused and nothing is held")
        })
    }
}

/// The places that were made for starts of a domain of this name, under whatever id: at its end libvirt names none.
pub fn places_of(root: &Root, confinement: &Confinement, partition: Option<&str>, name: &str) -> Vec<String> {
    // The same name with an id of which nothing is left but where it stands.
    let Ok(Some(pattern)) = confinement.place(partition, 0, name) else { return Vec::new() };
    let Some((dir, pattern)) = pattern.rsplit_once('/') else { return Vec::new() };
    let Some((before, after)) = pattern.split_once('0') else { return Vec::new() };
    let of_name = |found: &String| {
        let id = found.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
        id.is_some_and(|id| !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit()))
    };
    root.list(dir).unwrap_or_default().into_iter().filter(of_name).map(|found| format!("{dir}/{found}")).collect()
}

/// Removes what was made at a place, by whichever way. What has tasks stays.
pub fn remove(root: &Root, place: &str) {
    if place.starts_with(scope::RUNTIME_UNITS) { scope::remove(root, place) } else { tree::remove(root, place) }
}

/// The same unless one of these leases has the place: libvirt uses ids again, so another domain may live there by now.
pub fn remove_unless_held(root: &Root, leases: &Leases, place: &str) {
    if !leases.iter().any(|lease| lease.cgroup.as_deref() == Some(place)) {
        remove(root, place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_host_has_its_way() {
        let on = |files: &[(&str, &str)]| {
            let root =
                Root::described(files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect());
            confinement(&root).unwrap()
        };
        let v1 = ("/proc/mounts", "cgroup /c cgroup rw,cpuset 0 0\n");
        let v2 = [("/proc/mounts", "cgroup2 /c cgroup2 rw 0 0\n"), ("/c/cgroup.controllers", "cpuset\n")];
        let systemd = ("/run/systemd/system/x", "");
        let machined = ("/usr/share/dbus-1/system-services/org.freedesktop.machine1.service", "");
        let tree = |hierarchy: fn(String) -> Hierarchy, naming| {
            let hierarchy = hierarchy("/c".to_owned());
            Confinement::Tree { hierarchy, naming }
        };
        assert_eq!(on(&[v1]), tree(Hierarchy::V1, Naming::Libvirt));
        assert_eq!(on(&[v1, systemd]), tree(Hierarchy::V1, Naming::Libvirt));
        assert_eq!(on(&[v1, systemd, machined]), tree(Hierarchy::V1, Naming::Systemd));
        assert_eq!(on(&v2), tree(Hierarchy::V2, Naming::Libvirt));
        assert_eq!(on(&[v2[0], v2[1], systemd, machined]), Confinement::Scope);
        assert_eq!(on(&[("/proc/mounts", "cgroup2 /c cgroup2 rw 0 0\n")]), Confinement::AtStarted);
        assert_eq!(
            Confinement::Scope.place(None, 3, "a").unwrap().as_deref(),
            Some(r"/run/systemd/system/machine-qemu\x2d3\x2da.scope.d")
        );
        assert_eq!(Confinement::AtStarted.place(None, 3, "a").unwrap(), None);
        let names =
            ["qemu-1-a0.libvirt-qemu", "qemu-12-a0.libvirt-qemu", "qemu-3-b.libvirt-qemu", "qemu--a0.libvirt-qemu"];
        let files = names.map(|name| (format!("/c/machine/{name}/cpuset.cpus"), String::new()));
        let found = places_of(&Root::described(files.into()), &tree(Hierarchy::V2, Naming::Libvirt), None, "a0");
        assert_eq!(found, ["/c/machine/qemu-1-a0.libvirt-qemu", "/c/machine/qemu-12-a0.libvirt-qemu"]);
        let names =
            [r"machine-qemu\x2d1\x2da0.scope", r"machine-qemu\x2d20\x2da0.scope", r"machine-qemu\x2d3\x2db.scope"];
        let files = names.map(|name| (format!("/c/machine.slice/{name}/cpuset.cpus"), String::new()));
        let found = places_of(&Root::described(files.into()), &tree(Hierarchy::V1, Naming::Systemd), None, "a0");
        assert_eq!(found, names[..2].iter().map(|name| format!("/c/machine.slice/{name}")).collect::<Vec<_>>());
    }
}
