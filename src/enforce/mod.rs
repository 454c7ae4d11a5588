//! Makes a lease physical: nobody of the domain runs outside it, from QEMU's first instruction where the host allows.
//!
//! [`confinement`] says which way this host offers. [`tree`] makes the domain's cgroup before QEMU is executed, [`scope`]
//! tells systemd to make it so; [`pool`] keeps the others off, [`isolation`] the host's own work where that is asked for; [`binding`] puts each thread where the plan says once it exists, and reads back. Nothing
//! here decides who gets which CPUs, and nothing here calls libvirt.

pub mod binding;
pub mod isolation;
pub mod passage;
pub mod pool;
pub mod scope;
pub mod tree;

use crate::alloc::plan::Plan;
use crate::error::{Code, Error, Result};
use crate::host::cgroup::{Hierarchy, has_machined, hierarchy};
use crate::host::root::Root;

/// How a domain is held to its CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Confinement {
    /// The domain's cgroup is made before QEMU is executed, each thread's part of it included: v1 without machined.
    Tree {
        /// Mount point of the cpuset hierarchy.
        mount: String,
    },
    /// A drop-in of the scope that systemd will make holds the domain as a whole before QEMU is executed; threads are
    /// bound when libvirt reports them started: v2 with machined.
    Scope,
    /// Threads are bound when libvirt reports them started.
    AtStarted,
}

/// How domains are confined on this host.
///
/// # Errors
/// As [`hierarchy`].
pub fn confinement(root: &Root) -> Result<Confinement> {
    Ok(match hierarchy(root)? {
        Some(Hierarchy::V1(mount)) if !has_machined(root) => Confinement::Tree { mount },
        Some(Hierarchy::V2(_)) if has_machined(root) => Confinement::Scope,
        _ => Confinement::AtStarted,
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
            Confinement::Tree { mount } => tree::path(mount, partition, domain_id, name).map(Some),
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
            Confinement::Tree { mount } => tree::make(root, mount, place, iothreads, plan),
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
        let tree = Confinement::Tree { mount: "/c".to_owned() };
        assert_eq!(on(&[v1]), tree);
        assert_eq!(on(&[v1, systemd]), tree);
        assert_eq!(on(&[v1, systemd, machined]), Confinement::AtStarted);
        assert_eq!(on(&v2), Confinement::AtStarted);
        assert_eq!(on(&[v2[0], v2[1], systemd, machined]), Confinement::Scope);
        assert_eq!(on(&[("/proc/mounts", "cgroup2 /c cgroup2 rw 0 0\n")]), Confinement::AtStarted);
        assert_eq!(
            Confinement::Scope.place(None, 3, "a").unwrap().as_deref(),
            Some(r"/run/systemd/system/machine-qemu\x2d3\x2da.scope.d")
        );
        assert_eq!(Confinement::AtStarted.place(None, 3, "a").unwrap(), None);
        let tree = Confinement::Tree { mount: "/c".to_owned() };
        let names =
            ["qemu-1-a0.libvirt-qemu", "qemu-12-a0.libvirt-qemu", "qemu-3-b.libvirt-qemu", "qemu--a0.libvirt-qemu"];
        let files = names.map(|name| (format!("/c/machine/{name}/cpuset.cpus"), String::new()));
        let found = places_of(&Root::described(files.into()), &tree, None, "a0");
        assert_eq!(found, ["/c/machine/qemu-1-a0.libvirt-qemu", "/c/machine/qemu-12-a0.libvirt-qemu"]);
    }
}
