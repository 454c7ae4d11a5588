//! A domain's own cgroup, made before libvirt needs it.
//!
//! Where systemd does not manage the cpuset controller for libvirt, libvirt keeps a cgroup that already exists, with its
//! cpuset (measured: v1 without machined on 9.0, 11.3 and 12.8, v1 with machined on 9.0, v2 without machined on 11.3). So the
//! tree made here at `prepare` binds every QEMU thread from its birth: `emulator/`, `vcpuN/`, `iothreadN/` under the domain's
//! directory. What libvirt made, and what has processes, is never removed.

use std::fs;
use std::io;

use crate::alloc::plan::Plan;
use crate::cpuset::{CpuId, CpuSet};
use crate::error::{Code, Error, Result};
use crate::failpoint::step;
use crate::host::cgroup::{Hierarchy, parent_path};
use crate::host::machine_name::Naming;
use crate::host::root::Root;

/// How many cgroup levels a domain's tree may have below its own directory; libvirt makes at most two.
const MAX_DEPTH: usize = 3;

/// Where libvirt will put the domain. `partition` is its `<resource><partition>`; `None` = `/machine`.
///
/// # Errors
/// [`Code::DomainInvalid`] for a partition that is no absolute path.
pub fn path(
    hierarchy: &Hierarchy,
    naming: Naming,
    partition: Option<&str>,
    domain_id: u32,
    name: &str,
) -> Result<String> {
    let parent = parent_path(naming, partition)?;
    Ok(format!("{}{parent}/{}", hierarchy.mount(), naming.directory(domain_id, name)))
}

/// Makes the tree at `path` (from [`path`]), every thread's cpuset as the plan says. Remains of a former domain of the
/// same id and name are replaced.
///
/// # Errors
/// [`Code::ConfinementFailed`] with the step that failed; what was made is removed again.
pub fn make(root: &Root, hierarchy: &Hierarchy, path: &str, iothreads: &[u32], plan: &Plan) -> Result<()> {
    make_tree(root, hierarchy, path, iothreads, plan).inspect_err(|_| remove(root, path))
}

fn make_tree(root: &Root, hierarchy: &Hierarchy, path: &str, iothreads: &[u32], plan: &Plan) -> Result<()> {
    let mount = hierarchy.mount();
    let parent = path.rsplit_once('/').map_or(mount, |(parent, _)| parent);
    // The parents are libvirt's; like libvirt, make those that are missing with all that their own parent has.
    let mut at = mount.to_owned();
    for component in parent.strip_prefix(mount).unwrap_or_default().split('/').filter(|part| !part.is_empty()) {
        let next = format!("{at}/{component}");
        make_ancestor(root, hierarchy, &at, &next)?;
        at = next;
    }
    remove(root, path);
    if root.exists(path) {
        // The kernel keeps a cgroup that has tasks: another daemon's domain of the same id and name.
        return Err(Error::new(Code::ConfinementFailed, format!("{path} has processes of another domain")));
    }
    let threads = threads(path);
    let mut sets: Vec<(String, CpuSet)> = vec![(format!("{threads}/emulator"), plan.emulator.clone())];
    sets.extend(plan.vcpu_places().map(|(vcpu, cpus)| (format!("{threads}/vcpu{vcpu}"), cpus)));
    sets.extend(iothreads.iter().map(|id| (format!("{threads}/iothread{id}"), plan.iothreads.clone())));
    let nodes = plan.memory_nodes.as_ref();
    let nodes = nodes.map(|nodes| nodes.iter().map(|node| CpuId(node.0)).collect::<CpuSet>().to_string());
    match hierarchy {
        Hierarchy::V1(_) => {
            let mems = match nodes {
                Some(nodes) => nodes,
                None => root.read(&format!("{parent}/cpuset.mems"))?.trim().to_owned(),
            };
            let above = if threads == path { vec![threads] } else { vec![path.to_owned(), threads] };
            for (dir, cpus) in above.into_iter().map(|dir| (dir, plan.allowed())).chain(sets) {
                make_directory(root, &dir)?;
                // v1 wants memory nodes before it takes a task; a child's sets must lie in its parent's, so the parent is
                // first.
                root.write_kernel_file(&format!("{dir}/cpuset.mems"), &mems)?;
                root.write_kernel_file(&format!("{dir}/cpuset.cpus"), &cpus.to_string())?;
            }
        }
        Hierarchy::V2(_) => {
            // An ancestor, too: it passes the controller on.
            make_ancestor(root, hierarchy, parent, path)?;
            let all = plan.allowed();
            root.write_kernel_file(&format!("{path}/cpuset.cpus"), &all.to_string())?;
            for (dir, _) in &sets {
                make_directory(root, dir)?;
                root.write_kernel_file(&format!("{dir}/cgroup.type"), "threaded")?;
            }
            enable_cpuset(root, path)?;
            for (dir, cpus) in sets {
                // What is empty follows the domain's own set, whatever becomes of it.
                if cpus != all {
                    root.write_kernel_file(&format!("{dir}/cpuset.cpus"), &cpus.to_string())?;
                }
                // Not above: there a daemon that restarts writes all of the machine's nodes.
                if let Some(nodes) = &nodes {
                    root.write_kernel_file(&format!("{dir}/cpuset.mems"), nodes)?;
                }
            }
        }
    }
    Ok(())
}

/// The parent of the cgroups of a domain's threads. In a scope libvirt keeps a level to itself: systemd's processes are not to
/// be beside its cgroups.
pub(super) fn threads(path: &str) -> String {
    if path.ends_with(".scope") { format!("{path}/libvirt") } else { path.to_owned() }
}

/// Makes `dir` in `parent`, unless it is there, with all that its parent has.
fn make_ancestor(root: &Root, hierarchy: &Hierarchy, parent: &str, dir: &str) -> Result<()> {
    if let Hierarchy::V2(_) = hierarchy {
        enable_cpuset(root, parent)?;
    }
    if make_directory(root, dir)? && matches!(hierarchy, Hierarchy::V1(_)) {
        for file in ["cpuset.cpus", "cpuset.mems"] {
            let inherited = root.read(&format!("{parent}/{file}"))?;
            root.write_kernel_file(&format!("{dir}/{file}"), inherited.trim())?;
        }
    }
    Ok(())
}

/// v2: gives the children of a cgroup cpusets. systemd does not take it back while a child passes it on in its turn.
fn enable_cpuset(root: &Root, dir: &str) -> Result<()> {
    let file = format!("{dir}/cgroup.subtree_control");
    if root.read(&file)?.split_whitespace().any(|controller| controller == "cpuset") {
        return Ok(());
    }
    root.write_kernel_file(&file, "+cpuset")
}

/// Makes a directory; false if it was there.
fn make_directory(root: &Root, path: &str) -> Result<bool> {
    let real = root.resolve(path);
    match step("tree.create").and_then(|()| fs::create_dir(&real)) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(Error::io(Code::ConfinementFailed, "create", &real, error)),
    }
}

/// Removes a domain's tree, deepest first. What still has tasks stays (the kernel refuses); it is not an error.
pub fn remove(root: &Root, path: &str) {
    remove_below(root, path, MAX_DEPTH);
}

fn remove_below(root: &Root, path: &str, depth: usize) {
    for name in root.list(path).unwrap_or_default() {
        let child = format!("{path}/{name}");
        // A cgroup's directories are cgroups; symbolic links do not exist there and are not followed.
        let is_dir = fs::symlink_metadata(root.resolve(&child)).is_ok_and(|found| found.is_dir());
        if is_dir && depth > 0 {
            remove_below(root, &child, depth - 1);
        }
    }
    let _ = step("tree.remove").and_then(|()| fs::remove_dir(root.resolve(path)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::io::Write as _;

    use crate::cpuset::NodeId;

    fn set(text: &str) -> CpuSet {
        CpuSet::parse_kernel_list(text).unwrap()
    }

    /// A directory where making a cgroup gives it its files, as the kernel does, cannot be had: they are made here.
    #[test]
    fn a_tree_is_undone_when_it_cannot_be_finished() {
        let memory_nodes = Some(BTreeSet::from([NodeId(0)]));
        let plan = Plan { memory_nodes, ..Plan::new([CpuId(1)], set("0")) };
        for (hierarchy, naming, expected, missing) in [
            (Hierarchy::V1("/c".to_owned()), Naming::Libvirt, "/c/machine/qemu-1-a.libvirt-qemu", "cpuset.mems"),
            (
                Hierarchy::V1("/c".to_owned()),
                Naming::Systemd,
                r"/c/machine.slice/machine-qemu\x2d1\x2da.scope",
                "cpuset.mems",
            ),
            (Hierarchy::V2("/c".to_owned()), Naming::Libvirt, "/c/machine/qemu-1-a.libvirt-qemu", "cpuset.cpus"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let root = Root::directory(dir.path());
            for parent in ["c/machine", "c/machine.slice"] {
                fs::create_dir_all(dir.path().join(parent)).unwrap();
            }
            for file in ["c/cgroup.subtree_control", "c/machine/cgroup.subtree_control"] {
                fs::File::create(dir.path().join(file)).unwrap().write_all(b"cpuset memory\n").unwrap();
            }
            let path = path(&hierarchy, naming, None, 1, "a").unwrap();
            assert_eq!(path, expected);
            let error = make(&root, &hierarchy, &path, &[], &plan).unwrap_err();
            assert!(error.message.contains(missing), "{}", error.message);
            assert!(!root.exists(&path));
        }
    }
}
