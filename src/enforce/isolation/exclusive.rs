//! What cgroups pass on to partitions below them: `cpuset.cpus.exclusive`.
//!
//! A partition deep in the tree takes its CPUs from the root only where every cgroup above it passes them on. Those of the
//! domain go with it; those above hold other VMs as well, and are written down before they are changed: what they pass on is
//! what they did before and what is passed on below them, so whoever is gone drops out (see [`prune`]). No partition is made
//! here.

use crate::cpuset::CpuSet;
use crate::error::{Code, Error, Result};
use crate::host::root::Root;
use crate::lock::former::Former;
use crate::lock::{DEADLINE, StateLock};

pub(super) const EXCLUSIVE: &str = "cpuset.cpus.exclusive";

/// Under the lock: the caller's, or one for this alone.
fn locked(root: &Root, held: Option<&mut StateLock>, act: impl FnOnce(&mut StateLock) -> Result<()>) -> Result<()> {
    match held {
        Some(state) => act(state),
        None => act(&mut StateLock::acquire(root, DEADLINE)?),
    }
}

/// Has every cgroup down to `base` pass these CPUs on, beside what it passes on to others.
pub(super) fn pass_on(root: &Root, mount: &str, base: &str, cpus: &CpuSet, held: Option<&mut StateLock>) -> Result<()> {
    locked(root, held, |state| pass_on_noted(root, state, (mount, base), cpus))
}

/// Has nothing passed on any more to who is gone, or passes on less by now.
pub(super) fn take_back(root: &Root, held: Option<&mut StateLock>) -> Result<()> {
    locked(root, held, |state| {
        let mut former = state.former()?;
        let pruned = prune(root, &mut former);
        state.keep_former(&former).and(pruned)
    })
}

fn pass_on_noted(root: &Root, state: &mut StateLock, (mount, base): (&str, &str), cpus: &CpuSet) -> Result<()> {
    let mut former = state.former()?;
    let above = above(mount, base);
    let known = former.exclusive.len();
    for dir in &above {
        let text = root.read(&format!("{dir}/{EXCLUSIVE}")).map_err(|error| failed(error.message))?;
        former.exclusive.entry(dir.clone()).or_insert_with(|| text.trim().to_owned());
    }
    if former.exclusive.len() > known {
        state.keep_former(&former)?;
    }
    for dir in above.iter().map(String::as_str).chain([base]) {
        let has = set(root, dir)?;
        if !cpus.is_subset(&has) {
            write(root, dir, &has.union(cpus))?;
        }
    }
    Ok(())
}

/// Makes every cgroup that was written down pass on what it did before, and what those below it pass on; forgets those
/// that have what they had.
///
/// # Errors
/// [`Code::IsolationFailed`] with the first that cannot be written; it stays written down.
pub(super) fn prune(root: &Root, former: &mut Former) -> Result<()> {
    let mut outcome = Ok(());
    // The deepest first: what it passes on decides about those above.
    let mut dirs: Vec<String> = former.exclusive.keys().cloned().collect();
    dirs.sort_by_key(|dir| std::cmp::Reverse(dir.matches('/').count()));
    for dir in dirs {
        let Some(was) = former.exclusive.get(&dir).cloned() else { continue };
        let done = match root.read_if_exists(&format!("{dir}/{EXCLUSIVE}")) {
            // With its last VM the cgroup itself, or its cpuset.
            Ok(None) => Ok(true),
            Ok(Some(text)) => below(root, &dir).and_then(|used| {
                let own = CpuSet::parse_kernel_list(&was).unwrap_or_default();
                let wanted = own.union(&used);
                let as_before = wanted == own;
                if CpuSet::parse_kernel_list(&text).as_ref() != Ok(&wanted) {
                    write(root, &dir, &wanted)?;
                }
                Ok(as_before)
            }),
            Err(error) => Err(error),
        };
        match done {
            Ok(true) => drop(former.exclusive.remove(&dir)),
            Ok(false) => {}
            Err(error) => outcome = outcome.and(Err(error)),
        }
    }
    outcome
}

/// What is passed on below a cgroup.
fn below(root: &Root, dir: &str) -> Result<CpuSet> {
    let mut used = CpuSet::new();
    for name in root.list(dir)? {
        let child = format!("{dir}/{name}");
        if let Some(text) = root.read_if_exists(&format!("{child}/{EXCLUSIVE}"))? {
            used.add(&CpuSet::parse_kernel_list(&text).unwrap_or_default());
        }
    }
    Ok(used)
}

/// The cgroups between the root and `base`, from above.
fn above(mount: &str, base: &str) -> Vec<String> {
    let path = base.strip_prefix(mount).unwrap_or_default().trim_start_matches('/');
    let mut dir = mount.to_owned();
    let mut above = Vec::new();
    for name in path.split('/') {
        dir = format!("{dir}/{name}");
        above.push(dir.clone());
    }
    above.pop();
    above
}

/// The CPUs a cgroup passes on.
pub(super) fn set(root: &Root, dir: &str) -> Result<CpuSet> {
    let text = root.read(&format!("{dir}/{EXCLUSIVE}")).map_err(|error| failed(error.message))?;
    CpuSet::parse_kernel_list(&text).map_err(|error| failed(format!("{dir}/{EXCLUSIVE} is no CPU list")).because(error))
}

/// Has a cgroup pass these CPUs on.
pub(super) fn write(root: &Root, dir: &str, cpus: &CpuSet) -> Result<()> {
    let file = format!("{dir}/{EXCLUSIVE}");
    root.write_kernel_file(&file, &format!("{cpus}\n")).map_err(|error| failed(error.message))
}

/// What could not be done.
pub(super) fn failed(message: String) -> Error {
    Error::new(Code::IsolationFailed, message)
}
