//! Keeps domains without a lease off the CPUs of those that have one.
//!
//! libvirt's domains are found by their cgroups, whoever started them. What a domain may have follows from the leases alone,
//! so nothing is remembered: the same call narrows the others when a lease comes and widens them when it ends. A domain of a
//! lease is never touched here, and nobody is ever left without a CPU.

use std::collections::BTreeMap;
use std::fs;

use super::scope;
use crate::cpuset::CpuSet;
use crate::error::{Code, Error, Result};
use crate::host::cgroup::{Hierarchy, has_machined, hierarchy, naming};
use crate::host::machine_name::{Naming, machine_name};
use crate::host::root::Root;
use crate::lock::leases::{Holds, Leases};

/// How deep partitions are looked into.
const MAX_DEPTH: usize = 8;

/// What a domain with a lease has, by its machine name; whoever is not named has the shared pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// CPUs of its own, made physical elsewhere.
    Own,
    /// CPUs that its XML pins it to, beside the shared pool for its other threads.
    Pinned(CpuSet),
}

/// Which domains, by machine name, have CPUs beside the shared pool or instead of it.
pub(super) fn claims(leases: &Leases) -> BTreeMap<String, Claim> {
    let named = leases.iter().filter_map(|lease| {
        let claim = match &lease.holds {
            Holds::Dedicated(_) => Claim::Own,
            Holds::Static(cpus) | Holds::Degraded { pins: cpus, .. } => Claim::Pinned(cpus.clone()),
        };
        Some((machine_name(lease.domain_id?, &lease.name), claim))
    });
    named.collect()
}

/// Holds every domain that these leases do not give CPUs of its own to the shared pool.
///
/// # Errors
/// [`Code::SharedPoolEmpty`] where there are such domains and the pool is empty, with nothing changed;
/// [`Code::ConfinementFailed`] for the first that could not be held, the others are.
pub fn hold(root: &Root, leases: &Leases, pool: &CpuSet) -> Result<()> {
    let claims = claims(leases);
    let Some(hierarchy) = hierarchy(root)? else { return Ok(()) };
    let found = domains(root, &hierarchy);
    let others = found.into_iter().filter_map(|(machine, dir)| match claims.get(&machine) {
        Some(Claim::Own) => None,
        Some(Claim::Pinned(pins)) => Some((machine, dir, pool.union(pins))),
        None => Some((machine, dir, pool.clone())),
    });
    let others: Vec<_> = others.collect();
    if let Some((machine, ..)) = others.iter().find(|(.., cpus)| cpus.is_empty()) {
        return Err(Error::new(
            Code::SharedPoolEmpty,
            format!("no CPU would be left for VMs without a lease, and {machine} is one that runs"),
        ));
    }
    if has_machined(root) && matches!(hierarchy, Hierarchy::V2(_)) {
        // First what scopes that are about to be made will have, then those that are.
        scope::set_others(root, &|machine| match claims.get(machine) {
            Some(Claim::Own) => None,
            Some(Claim::Pinned(pins)) => Some(pool.union(pins)),
            None => Some(pool.clone()).filter(|pool| !pool.is_empty()),
        })?;
    }
    let mut outcome = Ok(());
    for (machine, dir, cpus) in others {
        let held = match &hierarchy {
            Hierarchy::V1(_) => hold_v1(root, &dir, &cpus),
            Hierarchy::V2(_) => set(root, &dir, &cpus).map(drop),
        };
        // A domain that has ended meanwhile is nowhere.
        if let Err(error) = held {
            if outcome.is_ok() && root.exists(&dir) {
                outcome = Err(Error::new(
                    Code::ConfinementFailed,
                    format!("cannot hold {machine} to the shared CPUs {cpus}: {}", error.message),
                ));
            }
        }
    }
    outcome
}

/// Sets a cgroup's CPUs if it has others; the set it had. On v2 its children follow by themselves.
fn set(root: &Root, dir: &str, cpus: &CpuSet) -> Result<Option<CpuSet>> {
    let file = format!("{dir}/cpuset.cpus");
    let Some(text) = root.read_if_exists(&file)? else { return Ok(None) };
    let former = CpuSet::parse_kernel_list(&text).unwrap_or_default();
    if former != *cpus {
        root.write_kernel_file(&file, &format!("{cpus}\n"))?;
    }
    Ok(Some(former))
}

/// v1: a child's CPUs always lie within its parent's, so a cgroup grows from above and shrinks from below. Children that had
/// all of their parent follow it; others keep what they may of theirs.
fn hold_v1(root: &Root, dir: &str, cpus: &CpuSet) -> Result<()> {
    let file = format!("{dir}/cpuset.cpus");
    let Some(text) = root.read_if_exists(&file)? else { return Ok(()) };
    let former = CpuSet::parse_kernel_list(&text).unwrap_or_default();
    set(root, dir, &former.union(cpus))?;
    for name in root.list(dir)? {
        let child = format!("{dir}/{name}");
        let Some(text) = root.read_if_exists(&format!("{child}/cpuset.cpus"))? else { continue };
        let own = CpuSet::parse_kernel_list(&text).unwrap_or_default();
        let kept = own.intersection(cpus);
        let kept = if own == former || kept.is_empty() { cpus.clone() } else { kept };
        hold_v1(root, &child, &kept)?;
    }
    set(root, dir, cpus)?;
    Ok(())
}

/// The domains that run or are being started, as (machine name, cgroup directory).
pub(super) fn domains(root: &Root, hierarchy: &Hierarchy) -> Vec<(String, String)> {
    let (mount, naming) = (hierarchy.mount(), naming(root));
    let mut found = Vec::new();
    // Partitions are cgroups of the hierarchy itself; libvirt's own have their names from libvirt.
    let is_partition = |name: &str| match naming {
        Naming::Systemd => name.ends_with(".slice"),
        Naming::Libvirt => name == "machine" || name.ends_with(".partition"),
    };
    for top in root.list(mount).unwrap_or_default().iter().filter(|name| is_partition(name)) {
        let mut step = |name: &str| match naming.machine(name) {
            Some(machine) => Step::Found(machine),
            None if naming == Naming::Systemd && !name.ends_with(".slice") => Step::Over,
            None => Step::Into,
        };
        below(root, &format!("{mount}/{top}"), MAX_DEPTH, &mut step, &mut found);
    }
    found
}

#[derive(PartialEq, Eq)]
enum Step {
    Into,
    Over,
    Found(String),
}

fn below(root: &Root, dir: &str, depth: usize, next: &mut dyn FnMut(&str) -> Step, found: &mut Vec<(String, String)>) {
    for name in root.list(dir).unwrap_or_default() {
        let step = next(&name);
        let path = format!("{dir}/{name}");
        if step == Step::Over || !fs::symlink_metadata(root.resolve(&path)).is_ok_and(|found| found.is_dir()) {
            continue;
        }
        match step {
            Step::Found(machine) => found.push((machine, path)),
            Step::Into if depth > 0 => below(root, &path, depth - 1, next, found),
            _ => {}
        }
    }
}
