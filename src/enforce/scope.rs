//! A domain's systemd scope, confined before it exists.
//!
//! With machined on cgroup v2 the domain's cgroup is a transient scope that systemd makes while libvirt starts the domain;
//! a cgroup made beforehand would be reset. A drop-in for the scope's unit, written at `prepare`, is honoured without a
//! reload (measured: systemd 252 with libvirt 9.0, 257 with 11.3), so QEMU is executed inside the lease. It goes when the
//! lease does; for a running scope it no longer matters.

use std::collections::BTreeSet;
use std::fs;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;

use crate::alloc::plan::Plan;
use crate::cpuset::{CpuId, CpuSet, NodeId};
use crate::error::{Code, Error, Result};
use crate::failpoint::step;
use crate::host::machine_name::{machine_of_scope, scope_name};
use crate::host::root::Root;

/// Where units for this boot only are kept.
pub(super) const RUNTIME_UNITS: &str = "/run/systemd/system";

/// The file in the scope's drop-in directory: an administrator's own, if there is one, is left alone.
const FILE: &str = "50-virt-pin.conf";
/// What is to become it; systemd reads only what ends in `.conf`.
const NEW: &str = "50-virt-pin.conf.new";

/// The drop-in directory of the scope that machined will make for the domain.
pub fn path(domain_id: u32, name: &str) -> String {
    format!("{RUNTIME_UNITS}/{}.d", scope_name(domain_id, name))
}

/// Writes the drop-in at `path` (from [`path`]).
///
/// # Errors
/// [`Code::ConfinementFailed`]; nothing stays behind then.
pub fn make(root: &Root, path: &str, plan: &Plan) -> Result<()> {
    let text = text(&plan.allowed(), plan.memory_nodes.as_ref());
    write(root, path, &text).inspect_err(|_| remove(root, path))
}

fn write(root: &Root, path: &str, text: &str) -> Result<()> {
    let dir = root.resolve(path);
    match step("scope.create").and_then(|()| fs::create_dir(&dir)) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Error::io(Code::ConfinementFailed, "create", &dir, error));
        }
        _ => {}
    }
    // By rename: whoever is being started meanwhile has the old one or the new one, never none. Remains of a crash go; a new
    // file is nobody else's, and no link is followed.
    let (file, new) = (dir.join(FILE), dir.join(NEW));
    let _ = fs::remove_file(&new);
    step("scope.write")
        .and_then(|()| {
            OpenOptions::new().write(true).create_new(true).mode(0o644).open(&new)?.write_all(text.as_bytes())
        })
        .and_then(|()| step("scope.rename"))
        .and_then(|()| fs::rename(&new, &file))
        .inspect_err(|_| drop(fs::remove_file(&new)))
        .map_err(|error| Error::io(Code::ConfinementFailed, "write", &file, error))
}

fn text(cpus: &CpuSet, memory_nodes: Option<&BTreeSet<NodeId>>) -> String {
    let mut text = format!(
        "# Made by virt-pin for one start of this domain, removed when it ends.\n[Scope]\nAllowedCPUs={cpus}\n"
    );
    if let Some(nodes) = memory_nodes {
        let nodes: CpuSet = nodes.iter().map(|node| CpuId(node.0)).collect();
        text.push_str(&format!("AllowedMemoryNodes={nodes}\n"));
    }
    text
}

/// The drop-ins of ours, as (machine name, directory).
pub(super) fn drop_ins(root: &Root) -> Result<Vec<(String, String)>> {
    let dirs = root.list(RUNTIME_UNITS)?.into_iter().filter_map(|name| {
        let machine = machine_of_scope(name.strip_suffix(".d")?)?;
        let dir = format!("{RUNTIME_UNITS}/{name}");
        let names = root.list(&dir).unwrap_or_default();
        // Ours was the last in it, if it is empty.
        (names.is_empty() || names.iter().any(|name| [FILE, NEW].contains(&name.as_str()))).then_some((machine, dir))
    });
    Ok(dirs.collect())
}

/// Gives every drop-in of ours that names no owner of CPUs these CPUs: `cpus` says which, by machine name, `None` = hands off.
pub(super) fn set_others(root: &Root, cpus: &dyn Fn(&str) -> Option<CpuSet>) -> Result<()> {
    for name in root.list(RUNTIME_UNITS)? {
        let machine = name.strip_suffix(".d").and_then(machine_of_scope);
        let path = format!("{RUNTIME_UNITS}/{name}");
        let Some(cpus) = machine.and_then(|machine| cpus(&machine)).filter(|_| root.exists(&format!("{path}/{FILE}")))
        else {
            continue;
        };
        let text = text(&cpus, None);
        if root.read(&format!("{path}/{FILE}"))? != text {
            write(root, &path, &text)?;
        }
    }
    Ok(())
}

/// Removes every drop-in of ours: scopes that run keep what they have.
///
/// # Errors
/// [`Code::HostIo`] when the units cannot be listed.
pub fn remove_all(root: &Root) -> Result<()> {
    let units = root.list(RUNTIME_UNITS)?;
    for name in units.iter().filter(|name| name.strip_suffix(".d").and_then(machine_of_scope).is_some()) {
        remove(root, &format!("{RUNTIME_UNITS}/{name}"));
    }
    Ok(())
}

/// Removes the drop-in, and its directory if nobody else has a file there.
pub fn remove(root: &Root, path: &str) {
    let dir = root.resolve(path);
    let _ = fs::remove_file(dir.join(NEW));
    let _ = step("scope.remove").and_then(|()| fs::remove_file(dir.join(FILE)));
    let _ = step("scope.remove").and_then(|()| fs::remove_dir(dir));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drop_in_comes_and_goes_and_leaves_others_alone() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::directory(dir.path());
        let path = path(3, "db 1-a");
        assert_eq!(path, "/run/systemd/system/machine-qemu\\x2d3\\x2ddb1\\x2da.scope.d");
        let plan = Plan {
            memory_nodes: Some(BTreeSet::from([NodeId(1)])),
            ..Plan::new([CpuId(4), CpuId(5)], [CpuId(0)].into_iter().collect())
        };
        // Without systemd's directory nothing is made up.
        assert_eq!(make(&root, &path, &plan).unwrap_err().code, Code::ConfinementFailed);
        fs::create_dir_all(dir.path().join("run/systemd/system")).unwrap();
        make(&root, &path, &plan).unwrap();
        make(&root, &path, &plan).unwrap();
        let text = root.read(&format!("{path}/{FILE}")).unwrap();
        assert!(text.ends_with("[Scope]\nAllowedCPUs=0,4-5\nAllowedMemoryNodes=1\n"), "{text}");
        fs::File::create_new(root.resolve(&path).join("10-own.conf")).unwrap();
        remove(&root, &path);
        assert_eq!(root.list(&path).unwrap(), ["10-own.conf"]);
        fs::remove_file(root.resolve(&path).join("10-own.conf")).unwrap();
        make(&root, &path, &plan).unwrap();
        remove(&root, &path);
        assert!(!root.exists(&path));
    }
}
