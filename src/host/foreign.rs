//! Which CPUs other cgroups than those of VMs have: for themselves alone, or as the only ones they may use.
//!
//! What a cgroup has for itself alone (a cpuset partition of another service, `cpuset.cpus.exclusive`, with cgroup v1
//! `cpuset.cpu_exclusive`) the kernel gives to nobody else: no VM can have it. (`cpuset.cpus.exclusive` counts without a partition as
//! well: it is written for one to come, and makes one of ours invalid.) A cgroup that is merely confined keeps nobody away from its
//! CPUs, and is only told of. Reads cgroups, never writes; what cannot be read (a cgroup that has just gone) is passed
//! over.

use std::collections::BTreeMap;
use std::fmt;

use super::cgroup::{Hierarchy, hierarchy, naming, parent_path};
use super::machine_name::Naming;
use super::root::Root;
use crate::cpuset::CpuSet;

const EXCLUSIVE: &str = "cpuset.cpus.exclusive";
/// How deep cgroups that are merely confined are looked for: a container of Kubernetes is in the fifth.
const MAX_DEPTH: usize = 8;

/// A cgroup with CPUs that VMs may want.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Foreign {
    /// Its path, from the root of the hierarchy: `/kubepods.slice`.
    pub cgroup: String,
    /// Its CPUs.
    pub cpus: CpuSet,
    /// What says so: a file of the kernel's, or "a cpuset partition".
    pub by: &'static str,
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cgroup {} has CPUs {} for itself ({})", self.cgroup, self.cpus, self.by)
    }
}

/// Who has CPUs for itself alone, beside each cgroup on the way to the one that a domain's will be in (`partition` is its
/// `<resource><partition>`), and in that. Deeper ones have them from one of these. `former` is what cgroups had passed on before
/// we changed that, by directory.
pub fn exclusive(root: &Root, partition: Option<&str>, former: &BTreeMap<String, String>) -> Vec<Foreign> {
    let Ok(Some(hierarchy)) = hierarchy(root) else { return Vec::new() };
    let (mount, naming) = (hierarchy.mount(), naming(root));
    let Ok(path) = parent_path(naming, partition) else { return Vec::new() };
    let mut found = Vec::new();
    let mut dir = mount.to_owned();
    for next in path.split('/').skip(1).map(Some).chain([None]) {
        for name in root.directories(&dir).unwrap_or_default() {
            if Some(name.as_str()) == next || naming.machine(&name).is_some() {
                continue;
            }
            let child = format!("{dir}/{name}");
            if let Some((cpus, by)) = alone(root, &hierarchy, &child, former.get(&child)) {
                found.push(Foreign { cgroup: child.strip_prefix(mount).unwrap_or(&child).to_owned(), cpus, by });
            }
        }
        dir = format!("{dir}/{}", next.unwrap_or_default());
    }
    found
}

/// The CPUs that one cgroup has for itself alone, and what says so.
fn alone(root: &Root, kind: &Hierarchy, dir: &str, former: Option<&String>) -> Option<(CpuSet, &'static str)> {
    let (cpus, by) = match kind {
        Hierarchy::V1(_) => {
            let exclusive = text(root, dir, "cpuset.cpu_exclusive")? == "1";
            (exclusive.then(|| list(root, dir, "cpuset.cpus")).flatten()?, "cpuset.cpu_exclusive")
        }
        Hierarchy::V2(_) => {
            let passed_on = match former {
                Some(former) => CpuSet::parse_kernel_list(former).ok(),
                None => list(root, dir, EXCLUSIVE),
            };
            let passed_on = passed_on.unwrap_or_default();
            // One that says `root invalid` has nothing for itself.
            if matches!(text(root, dir, "cpuset.cpus.partition").as_deref(), Some("root" | "isolated")) {
                let held =
                    list(root, dir, "cpuset.cpus.exclusive.effective").or_else(|| list(root, dir, "cpuset.cpus"));
                (passed_on.union(&held.unwrap_or_default()), "a cpuset partition")
            } else {
                (passed_on, EXCLUSIVE)
            }
        }
    };
    (!cpus.is_empty()).then_some((cpus, by))
}

/// The topmost cgroups of others that may use nothing but these CPUs: containers and services that somebody has confined.
pub fn confined(root: &Root, to: &CpuSet) -> Vec<Foreign> {
    let Ok(Some(hierarchy)) = hierarchy(root) else { return Vec::new() };
    let naming = naming(root);
    let parent = parent_path(naming, None).unwrap_or_default();
    let mut found = Vec::new();
    below(root, (hierarchy.mount(), ""), MAX_DEPTH, &mut |name, path, cpus| {
        if naming.machine(name).is_some() {
            return false;
        }
        // What holds VMs is confined for them.
        let holds_vms = path == parent || (path.starts_with(&format!("{parent}/")) && is_partition(naming, name));
        let is_one = !holds_vms && !cpus.is_empty() && cpus.is_subset(to);
        if is_one {
            found.push(Foreign { cgroup: path.to_owned(), cpus: cpus.clone(), by: "cpuset.cpus" });
        }
        !is_one
    });
    found
}

fn is_partition(naming: Naming, name: &str) -> bool {
    name.ends_with(match naming {
        Naming::Systemd => ".slice",
        Naming::Libvirt => ".partition",
    })
}

/// Shows each cgroup below one with a cpuset, and goes into those where that is wanted.
fn below(root: &Root, (mount, path): (&str, &str), depth: usize, show: &mut dyn FnMut(&str, &str, &CpuSet) -> bool) {
    for name in root.directories(&format!("{mount}{path}")).unwrap_or_default() {
        let child = format!("{path}/{name}");
        // Without the controller nobody below has it either.
        let Some(cpus) = list(root, &format!("{mount}{child}"), "cpuset.cpus") else { continue };
        if show(&name, &child, &cpus) && depth > 0 {
            below(root, (mount, &child), depth - 1, show);
        }
    }
}

fn text(root: &Root, dir: &str, file: &str) -> Option<String> {
    root.read_if_exists(&format!("{dir}/{file}")).ok().flatten().map(|text| text.trim().to_owned())
}

fn list(root: &Root, dir: &str, file: &str) -> Option<CpuSet> {
    CpuSet::parse_kernel_list(&text(root, dir, file)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(files: &[(&str, &str)]) -> Root {
        let v2 = [("/proc/mounts", "cgroup2 /cg cgroup2 rw 0 0\n"), ("/cg/cgroup.controllers", "cpuset cpu\n")];
        let systemd =
            [("/run/systemd/system/x", ""), ("/usr/share/dbus-1/system-services/org.freedesktop.machine1.service", "")];
        let all = v2.iter().chain(&systemd).chain(files);
        Root::described(all.map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect())
    }

    fn said(found: Vec<Foreign>) -> Vec<String> {
        found.into_iter().map(|one| format!("{} {} {}", one.cgroup, one.cpus, one.by)).collect()
    }

    #[test]
    fn who_has_cpus_alone_is_named() {
        let root = described(&[
            ("/cg/a.slice/cpuset.cpus.partition", "root\n"),
            ("/cg/a.slice/cpuset.cpus.exclusive", "\n"),
            ("/cg/a.slice/cpuset.cpus.exclusive.effective", "4-5\n"),
            ("/cg/b.slice/cpuset.cpus.partition", "member\n"),
            ("/cg/b.slice/cpuset.cpus.exclusive", "6\n"),
            ("/cg/c.slice/cpuset.cpus.partition", "isolated invalid (Cpu list in cpuset.cpus not exclusive)\n"),
            ("/cg/c.slice/cpuset.cpus", "7\n"),
            // Linux 6.1.
            ("/cg/d.slice/cpuset.cpus.partition", "isolated\n"),
            ("/cg/d.slice/cpuset.cpus", "8\n"),
            ("/cg/machine.slice/cpuset.cpus.exclusive", "9-15\n"),
            ("/cg/machine.slice/machine-qemu\\x2d1\\x2da.scope/cpuset.cpus.exclusive", "10\n"),
            ("/cg/machine.slice/other.service/cpuset.cpus.partition", "root\n"),
            ("/cg/machine.slice/other.service/cpuset.cpus.exclusive", "9\n"),
        ]);
        let above =
            ["/a.slice 4-5 a cpuset partition", "/b.slice 6 cpuset.cpus.exclusive", "/d.slice 8 a cpuset partition"];
        let within = "/machine.slice/other.service 9 a cpuset partition";
        assert_eq!(said(exclusive(&root, None, &BTreeMap::new())), [&above[..], &[within]].concat());
        // For a domain elsewhere what VMs have in their own is nobody's but theirs.
        let former = BTreeMap::from([("/cg/machine.slice".to_owned(), "9".to_owned())]);
        let beside = "/machine.slice 9 cpuset.cpus.exclusive";
        assert_eq!(said(exclusive(&root, Some("/x"), &former)), [&above[..], &[beside]].concat());
        assert_eq!(said(exclusive(&Root::described(BTreeMap::new()), None, &former)), [""; 0]);
    }

    #[test]
    fn version_1_has_a_flag() {
        let files = [
            ("/proc/mounts", "cgroup /cg cgroup rw,cpuset 0 0\n"),
            ("/cg/a/cpuset.cpu_exclusive", "1\n"),
            ("/cg/a/cpuset.cpus", "4-5\n"),
            ("/cg/b/cpuset.cpu_exclusive", "0\n"),
            ("/cg/b/cpuset.cpus", "6\n"),
            ("/cg/machine/cpuset.cpu_exclusive", "1\n"),
            ("/cg/machine/cpuset.cpus", "0-3\n"),
        ];
        let root = Root::described(files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect());
        assert_eq!(said(exclusive(&root, None, &BTreeMap::new())), ["/a 4-5 cpuset.cpu_exclusive"]);
        let to = CpuSet::parse_kernel_list("0-7").unwrap();
        assert_eq!(said(confined(&root, &to)), ["/a 4-5 cpuset.cpus", "/b 6 cpuset.cpus"]);
    }

    #[test]
    fn who_is_confined_is_named_at_the_top() {
        let root = described(&[
            ("/cg/system.slice/cpuset.cpus", "\n"),
            ("/cg/system.slice/docker-1.scope/cpuset.cpus", "4-5\n"),
            ("/cg/system.slice/docker-1.scope/inner/cpuset.cpus", "4\n"),
            ("/cg/system.slice/docker-2.scope/cpuset.cpus", "1-4\n"),
            ("/cg/system.slice/plain.service/memory.max", "max\n"),
            ("/cg/machine.slice/cpuset.cpus", "2-7\n"),
            ("/cg/machine.slice/machine-x.slice/cpuset.cpus", "2-3\n"),
            ("/cg/machine.slice/machine-qemu\\x2d1\\x2da.scope/cpuset.cpus", "2\n"),
            ("/cg/machine.slice/other.service/cpuset.cpus", "3\n"),
        ]);
        let to = CpuSet::parse_kernel_list("2-7").unwrap();
        let expected = ["/machine.slice/other.service 3 cpuset.cpus", "/system.slice/docker-1.scope 4-5 cpuset.cpus"];
        assert_eq!(said(confined(&root, &to)), expected);
    }
}
