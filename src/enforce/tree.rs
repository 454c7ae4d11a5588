//! A domain's own cgroup, made before libvirt needs it.
//!
//! Where there is no machined, libvirt keeps a cgroup that already exists, with its cpuset (measured on 9.0, 11.3 and
//! 12.8). So the tree made here at `prepare` binds every QEMU thread from its birth: `emulator/`, `vcpuN/`, `iothreadN/`
//! under the domain's directory. What libvirt made, and what has processes, is never removed.

use std::fs;
use std::io;

use crate::alloc::plan::Plan;
use crate::cpuset::{CpuId, CpuSet};
use crate::error::{Code, Error, Result};
use crate::host::cgroup::parent_path;
use crate::host::machine_name::machine_name;
use crate::host::root::Root;

/// How many cgroup levels a domain's tree may have below its own directory; libvirt makes one.
const MAX_DEPTH: usize = 3;

/// Where libvirt will put the domain in the v1 hierarchy at `mount`. `partition` is its `<resource><partition>`; `None` =
/// `/machine`.
///
/// # Errors
/// [`Code::DomainInvalid`] for a partition that is no absolute path.
pub fn path(mount: &str, partition: Option<&str>, domain_id: u32, name: &str) -> Result<String> {
    Ok(format!("{mount}{}/{}.libvirt-qemu", parent_path(partition)?, machine_name(domain_id, name)))
}

/// Makes the tree at `path` (from [`path`]), every thread's cpuset as the plan says. Remains of a former domain of the
/// same id and name are replaced.
///
/// # Errors
/// [`Code::ConfinementFailed`] with the step that failed; what was made is removed again.
pub fn make(root: &Root, mount: &str, path: &str, iothreads: &[u32], plan: &Plan) -> Result<()> {
    make_tree(root, mount, path, iothreads, plan).inspect_err(|_| remove(root, path))
}

fn make_tree(root: &Root, mount: &str, path: &str, iothreads: &[u32], plan: &Plan) -> Result<()> {
    let parent = path.rsplit_once('/').map_or(mount, |(parent, _)| parent);
    // The parents are libvirt's; like libvirt, make those that are missing with all that their own parent has.
    let mut at = mount.to_owned();
    for component in parent.strip_prefix(mount).unwrap_or_default().split('/').filter(|part| !part.is_empty()) {
        let next = format!("{at}/{component}");
        if make_directory(root, &next)? {
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let inherited = root.read(&format!("{at}/{file}"))?;
                root.write_kernel_file(&format!("{next}/{file}"), inherited.trim())?;
            }
        }
        at = next;
    }
    remove(root, path);
    if root.exists(path) {
        // The kernel keeps a cgroup that has tasks: another daemon's domain of the same id and name.
        return Err(Error::new(Code::ConfinementFailed, format!("{path} has processes of another domain")));
    }
    let mems = match &plan.memory_nodes {
        Some(nodes) => nodes.iter().map(|node| CpuId(node.0)).collect::<CpuSet>().to_string(),
        None => root.read(&format!("{parent}/cpuset.mems"))?.trim().to_owned(),
    };
    let mut sets: Vec<(String, CpuSet)> = vec![(path.to_owned(), plan.allowed())];
    sets.push((format!("{path}/emulator"), plan.emulator.clone()));
    sets.extend(plan.vcpu_places().map(|(vcpu, cpus)| (format!("{path}/vcpu{vcpu}"), cpus)));
    sets.extend(iothreads.iter().map(|id| (format!("{path}/iothread{id}"), plan.iothreads.clone())));
    for (dir, cpus) in sets {
        make_directory(root, &dir)?;
        // v1 wants memory nodes before it takes a task; a child's sets must lie in its parent's, so the parent is first.
        root.write_kernel_file(&format!("{dir}/cpuset.mems"), &mems)?;
        root.write_kernel_file(&format!("{dir}/cpuset.cpus"), &cpus.to_string())?;
    }
    Ok(())
}

/// Makes a directory; false if it was there.
fn make_directory(root: &Root, path: &str) -> Result<bool> {
    let real = root.resolve(path);
    match fs::create_dir(&real) {
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
    let _ = fs::remove_dir(root.resolve(path));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    use crate::cpuset::NodeId;

    fn set(text: &str) -> CpuSet {
        CpuSet::parse_kernel_list(text).unwrap()
    }

    /// A directory where making a cgroup gives it its files, as the kernel does, cannot be had: they are made here.
    #[test]
    fn a_tree_is_undone_when_it_cannot_be_finished() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::directory(dir.path());
        fs::create_dir_all(dir.path().join("c/machine")).unwrap();
        let memory_nodes = Some(BTreeSet::from([NodeId(0)]));
        let plan = Plan { memory_nodes, ..Plan::new([CpuId(1)], set("0")) };
        let path = path("/c", None, 1, "a").unwrap();
        assert_eq!(path, "/c/machine/qemu-1-a.libvirt-qemu");
        let error = make(&root, "/c", &path, &[], &plan).unwrap_err();
        assert!(error.message.contains("cpuset.mems"), "{}", error.message);
        assert!(!root.exists(&path));
    }
}
