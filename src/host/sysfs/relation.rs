//! Which CPUs belong together, from what each of them says: groups that everybody in them agrees on.
//!
//! The kernel writes such a relation as one list per CPU ("my siblings"). Firmware and hypervisors get it wrong: CPU 0
//! names CPU 1 and CPU 1 does not name CPU 0, a CPU is missing from its own list, two lists overlap. Of lists that
//! touch each other and are not the same list, none is believed. Pure: how a CPU is asked is the caller's business.

use std::collections::BTreeMap;

use crate::cpuset::{CpuId, CpuSet};
use crate::host::CoreId;

/// Whom to ask. A CPU that is not asked is believed to say what the list that names it says.
#[derive(Clone, Copy)]
pub(super) enum Ask<'c> {
    /// Every CPU: nothing is taken on trust.
    Everybody,
    /// One thread of each core, and every thread that the answer leaves out (a POWER core may have two caches).
    OnePerCore(&'c BTreeMap<CpuId, CoreId>),
    /// The lowest CPU of each group.
    OnePerGroup,
}

/// What came of asking.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Groups {
    /// The groups, disjoint, ascending by their lowest CPU.
    pub(super) sets: Vec<CpuSet>,
    /// CPUs whose lists contradict each other.
    pub(super) contradicted: CpuSet,
    /// CPUs that no list names and that say nothing themselves.
    pub(super) silent: CpuSet,
}

/// The groups of the CPUs online, each answer being a CPU's list or `None`.
pub(super) fn groups(online: &CpuSet, ask: Ask<'_>, mut answer: impl FnMut(CpuId) -> Option<CpuSet>) -> Groups {
    let mut silent = CpuSet::new();
    let mut said: BTreeMap<CpuId, CpuSet> = BTreeMap::new();
    let mut named = CpuSet::new();
    for cpu in online.iter() {
        let trusted = match ask {
            Ask::Everybody => false,
            Ask::OnePerCore(cores) => {
                cores.get(&cpu).and_then(|core| said.get(&CpuId(core.0))).is_some_and(|set| set.contains(cpu))
            }
            Ask::OnePerGroup => named.contains(cpu),
        };
        if trusted {
            continue;
        }
        match answer(cpu) {
            // Offline CPUs are nobody's neighbours.
            Some(set) => {
                let set = set.intersection(online);
                named = named.union(&set);
                said.insert(cpu, set);
            }
            None => silent.insert(cpu),
        }
    }
    agreed(said, silent)
}

/// Keeps the lists that touch no other list. Whoever says nothing, yet is named, disagrees.
fn agreed(said: BTreeMap<CpuId, CpuSet>, mut silent: CpuSet) -> Groups {
    let mut speakers: BTreeMap<CpuSet, CpuSet> = BTreeMap::new();
    for (cpu, set) in said {
        speakers.entry(set).or_default().insert(cpu);
    }
    let mut touched = silent.clone();
    let mut touched_twice = CpuSet::new();
    for (set, speakers) in &speakers {
        let all = set.union(speakers);
        touched_twice = touched_twice.union(&touched.intersection(&all));
        touched = touched.union(&all);
    }
    let mut sets = Vec::new();
    let mut contradicted = CpuSet::new();
    for (set, speakers) in speakers {
        if speakers.is_subset(&set) && set.is_disjoint(&touched_twice) {
            sets.push(set);
        } else {
            contradicted = contradicted.union(&set).union(&speakers);
        }
    }
    silent = silent.difference(&contradicted);
    sets.sort_by_key(CpuSet::first);
    Groups { sets, contradicted, silent }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> CpuSet {
        CpuSet::parse_kernel_list(text).unwrap()
    }

    /// `said`: each CPU's list, `-` for one that says nothing.
    #[track_caller]
    fn check(ask: Ask<'_>, said: &[&str], sets: &str, contradicted: &str, silent: &str) {
        let online = (0..said.len()).map(|cpu| CpuId(u16::try_from(cpu).unwrap())).collect();
        let groups = groups(&online, ask, |cpu| Some(said[usize::from(cpu.0)]).filter(|&text| text != "-").map(list));
        let found: Vec<_> = groups.sets.iter().map(ToString::to_string).collect();
        assert_eq!(
            (found.join(" ").as_str(), groups.contradicted, groups.silent),
            (sets, list(contradicted), list(silent)),
            "{said:?}"
        );
    }

    #[test]
    fn everybody_asked() {
        let check = |said: &[&str], sets, contradicted, silent| check(Ask::Everybody, said, sets, contradicted, silent);
        check(&["0", "1"], "0 1", "", "");
        check(&["0,2", "1,3", "0,2", "1,3"], "0,2 1,3", "", "");
        check(&["0-1,9", "0-1", "2"], "0-1 2", "", "");
        check(&["0-1", "1", "2"], "2", "0-1", "");
        check(&["0", "0-1", "2"], "2", "0-1", "");
        check(&["0-1", "0-2", "2", "3"], "3", "0-2", "");
        check(&["1", "0", "2"], "2", "0-1", "");
        check(&["", "1"], "1", "0", "");
        check(&["0-1", "-", "2"], "2", "0-1", "");
        check(&["-", "-", "2"], "2", "", "0-1");
        check(&["0-3", "1", "2", "3"], "", "0-3", "");
        check(&[], "", "", "");
    }

    #[test]
    fn few_asked() {
        check(Ask::OnePerGroup, &["0-1", "garbage is not looked at", "2-3", "-"], "0-1 2-3", "", "");
        check(Ask::OnePerGroup, &["0-1", "-", "1-2"], "", "0-2", "");
        let cores = [(0, 0), (1, 0), (2, 2), (3, 2)].map(|(cpu, core)| (CpuId(cpu), CoreId(core))).into();
        check(Ask::OnePerCore(&cores), &["0-3", "-", "0-3", "-"], "0-3", "", "");
        check(Ask::OnePerCore(&cores), &["0-3", "-", "2-3", "-"], "", "0-3", "");
        check(Ask::OnePerCore(&cores), &["0", "1", "2-3", "-"], "0 1 2-3", "", "");
    }
}
