//! Cgroups and drop-ins that were made for a start and outlived it: whoever was to remove them was killed first.
//!
//! They confine nobody, until libvirt uses their name again. What a lease claims stays, and so does what has processes, and
//! what is so new that the domain may be on its way into it.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use super::pool;
use super::{Confinement, confinement, remove, scope};
use crate::error::Result;
use crate::host::cgroup::hierarchy;
use crate::host::root::Root;
use crate::lock::leases::{Leases, START_SECS};

/// How many levels below a domain's cgroup may have its tasks.
const MAX_DEPTH: usize = 3;

/// Removes what is left of starts that nobody claims. Its paths.
///
/// # Errors
/// As [`confinement`].
pub fn sweep(root: &Root, leases: &Leases) -> Result<Vec<String>> {
    let claims = pool::claims(leases);
    let living: Vec<(String, String)> = hierarchy(root)?.map(|found| pool::domains(root, &found)).unwrap_or_default();
    let made = match confinement(root)? {
        Confinement::AtStarted => Vec::new(),
        Confinement::Scope => {
            let scopes: BTreeSet<&String> = living.iter().map(|(machine, _)| machine).collect();
            let mut left = scope::drop_ins(root)?;
            left.retain(|(machine, _)| !scopes.contains(machine));
            left
        }
        Confinement::Tree { .. } => living.into_iter().filter(|(_, dir)| !has_tasks(root, dir, MAX_DEPTH)).collect(),
    };
    let unclaimed = made.into_iter().filter(|(machine, _)| !claims.contains_key(machine));
    let left: Vec<String> = unclaimed.map(|(_, place)| place).filter(|place| is_old(root, place)).collect();
    left.iter().for_each(|place| remove(root, place));
    Ok(left.into_iter().filter(|place| !root.exists(place)).collect())
}

fn is_old(root: &Root, place: &str) -> bool {
    let made = fs::symlink_metadata(root.resolve(place)).and_then(|found| found.modified());
    made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age > Duration::from_secs(START_SECS)))
}

/// Whether the cgroup or one below it has tasks, or will not say.
fn has_tasks(root: &Root, dir: &str, depth: usize) -> bool {
    let some = |file: &str| {
        root.read_if_exists(&format!("{dir}/{file}")).map_or(true, |text| text.is_some_and(|text| !text.is_empty()))
    };
    let below = || {
        let children = root.list(dir).unwrap_or_default().into_iter().map(|name| format!("{dir}/{name}"));
        let mut children =
            children.filter(|child| fs::symlink_metadata(root.resolve(child)).is_ok_and(|it| it.is_dir()));
        depth > 0 && children.any(|child| has_tasks(root, &child, depth - 1))
    };
    some("cgroup.threads") || some("tasks") || below()
}
