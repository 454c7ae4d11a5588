//! Kubernetes' kubelet: CPU manager policy `static` with `full-pcpus-only` and `prefer-align-cpus-by-uncorecache`, and
//! the topology manager before it.
//!
//! Read: `cpu_assignment.go` (`takeByTopologyNUMAPacked`) as it is copied in kubernetes-sigs/dra-driver-cpu,
//! `pkg/cpumanager/`, at commit 01a255c8f5d1 (from kubernetes/kubernetes at fd5b2efa76e4);
//! `pkg/kubelet/cm/cpumanager/policy_static.go` (`generateCPUTopologyHints`, `allocateCPUs`) at commit 0083b964bdb8;
//! `pkg/kubelet/cm/topologymanager/policy.go` at 09690029935f and `bitmask/bitmask.go` at 5a430f48eace; KEP-4800.
//!
//! 1. *Hint.* The narrowest set of nodes with enough free CPUs; of several the one with the smallest bit mask. For `single`
//!    it must be one node (`single-numa-node`), otherwise any number will do (`best-effort`).
//! 2. *Whole nodes and sockets*, then *whole caches*, as long as at least so much is missing; the larger of node and socket
//!    first. Only those of which every CPU is free: one that holds a CPU of the host's own never is.
//! 3. *Part of a cache*: the first cache in which all that is missing fits.
//! 4. *Whole cores*, wherever they are.
//!
//! Everything is walked by free CPUs, ascending, then by number: nodes within sockets (or sockets within nodes), then
//! caches, then cores.
//!
//! A kubelet has one topology manager policy for all pods; here each request has the one that serves it best. Without
//! `affinity` the hint is left out where the request may spread (policy `none`).

use std::collections::{BTreeMap, BTreeSet};

use super::Rule;
use crate::machine::{Core, Demand, Free, Machine};

pub(crate) struct Kubelet {
    pub(crate) affinity: bool,
}

impl Rule for Kubelet {
    fn name(&self) -> &'static str {
        if self.affinity { "kubelet, best-effort" } else { "kubelet, no hints" }
    }

    fn place(&self, machine: &Machine, free: &Free, demand: &Demand) -> Option<Vec<usize>> {
        let needed = machine.cost(demand);
        if machine.holds(free.iter().copied()) < needed {
            return None;
        }
        let mut available = free.clone();
        if self.affinity || demand.single {
            let nodes = hint(machine, free, needed)?;
            if demand.single && nodes.len() > 1 {
                return None;
            }
            available.retain(|&core| nodes.contains(&machine.cores[core].node));
        }
        let mut accumulator = Accumulator { machine, available, needed, taken: Vec::new() };
        accumulator.take();
        Some(accumulator.taken)
    }
}

/// The narrowest set of nodes with enough free CPUs, then the smallest mask.
fn hint(machine: &Machine, free: &Free, needed: usize) -> Option<BTreeSet<u16>> {
    let mut room: BTreeMap<u16, usize> = machine.cores.iter().map(|core| (core.node, 0)).collect();
    for &core in free {
        *room.entry(machine.cores[core].node).or_default() += machine.threads(core);
    }
    let nodes: Vec<(u16, usize)> = room.into_iter().collect();
    (1..=nodes.len()).find_map(|count| narrowest(&nodes, count, needed))
}

/// Of the sets of `count` of these nodes that have enough, the one with the smallest mask: that of the lowest highest node.
fn narrowest(nodes: &[(u16, usize)], count: usize, needed: usize) -> Option<BTreeSet<u16>> {
    if count == 0 {
        return (needed == 0).then(BTreeSet::new);
    }
    (count - 1..nodes.len()).find_map(|highest| {
        let (node, room) = nodes[highest];
        let mut chosen = narrowest(&nodes[..highest], count - 1, needed.saturating_sub(room))?;
        chosen.insert(node);
        Some(chosen)
    })
}

/// The kubelet's bookkeeping of one allocation.
struct Accumulator<'a> {
    machine: &'a Machine,
    available: Free,
    /// In CPUs.
    needed: usize,
    taken: Vec<usize>,
}

/// What cores are grouped by.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Level {
    Node,
    Package,
    Cache,
}

impl Level {
    fn of(self, core: &Core) -> u16 {
        match self {
            Level::Node => core.node,
            Level::Package => core.package,
            Level::Cache => core.cache,
        }
    }
}

impl Accumulator<'_> {
    fn take(&mut self) {
        let count = |level: Level| self.machine.cores.iter().map(|core| level.of(core)).collect::<BTreeSet<_>>().len();
        // As many sockets as nodes, or more: nodes are the larger unit.
        let [large, small] = if count(Level::Package) >= count(Level::Node) {
            [Level::Node, Level::Package]
        } else {
            [Level::Package, Level::Node]
        };
        self.take_full(&[large]);
        self.take_full(&[large, small]);
        // Caches are sorted within nodes, whichever is larger.
        let to_caches: &[Level] = match large {
            Level::Node => &[Level::Node, Level::Cache],
            _ => &[Level::Package, Level::Node, Level::Cache],
        };
        for cache in self.sorted(to_caches) {
            if self.needed >= self.size(Level::Cache, cache) {
                self.take_full(to_caches);
            }
            self.take_part(cache);
        }
        for core in self.sorted_cores(&[large, small]) {
            if self.needed >= self.machine.threads(core) {
                self.claim(&[core]);
            }
        }
        // Single threads at last: here the core goes with them.
        for core in self.sorted_cores(&[large, small]) {
            if self.needed > 0 {
                self.claim(&[core]);
            }
        }
    }

    /// Every group of the last level of which all CPUs are free, as long as at least so many are missing.
    fn take_full(&mut self, levels: &[Level]) {
        let Some(&level) = levels.last() else { return };
        for group in self.sorted(levels) {
            let inside = self.inside(level, group);
            let size = self.size(level, group);
            if self.machine.holds(inside.iter().copied()) == size && self.needed >= size {
                self.claim(&inside);
            }
        }
    }

    /// What is missing, if this cache alone has it.
    fn take_part(&mut self, cache: u16) {
        if self.needed > 0 {
            if let Some(cores) = self.machine.fill(self.inside(Level::Cache, cache), self.needed) {
                self.claim(&cores);
            }
        }
    }

    fn claim(&mut self, cores: &[usize]) {
        for &core in cores {
            self.available.remove(&core);
            self.needed = self.needed.saturating_sub(self.machine.threads(core));
            self.taken.push(core);
        }
    }

    /// All CPUs of the group, free or not.
    fn size(&self, level: Level, group: u16) -> usize {
        self.machine.cores.iter().filter(|core| level.of(core) == group).map(|core| core.cpus.len()).sum()
    }

    /// The group's cores that are still available.
    fn inside(&self, level: Level, group: u16) -> Vec<usize> {
        self.available.iter().copied().filter(|&core| level.of(&self.machine.cores[core]) == group).collect()
    }

    /// The groups of the last level: each level sorted by free CPUs, then by number, within the level before.
    fn sorted(&self, levels: &[Level]) -> Vec<u16> {
        let Some((&last, before)) = levels.split_last() else { return Vec::new() };
        let Some(&outer) = before.last() else { return self.sorted_among(last, self.available.iter().copied()) };
        let groups = self.sorted(before).into_iter();
        groups.flat_map(|group| self.sorted_among(last, self.inside(outer, group))).collect()
    }

    /// The groups that have one of these cores, by all their free CPUs, then by number.
    fn sorted_among(&self, level: Level, cores: impl IntoIterator<Item = usize>) -> Vec<u16> {
        let groups: BTreeSet<u16> = cores.into_iter().map(|core| level.of(&self.machine.cores[core])).collect();
        let mut groups: Vec<u16> = groups.into_iter().collect();
        groups.sort_by_cached_key(|&group| self.machine.holds(self.inside(level, group)));
        groups
    }

    /// The cores of the last level's groups, each group's by free CPUs, then by number.
    fn sorted_cores(&self, levels: &[Level]) -> Vec<usize> {
        let Some(&last) = levels.last() else { return Vec::new() };
        let groups = self.sorted(levels).into_iter();
        groups
            .flat_map(|group| {
                let mut cores = self.inside(last, group);
                cores.sort_by_key(|&core| self.machine.threads(core));
                cores
            })
            .collect()
    }
}
