//! Where the host's CPUs stand: how many of them are whose, per node. Pure.

use std::collections::BTreeSet;

use super::Supply;
use super::request::Request;
use crate::cpuset::{CpuId, CpuSet, NodeId};

/// The online CPUs by what they are for. Every online CPU is in exactly one of `housekeeping`, `isolated`, `leased` and
/// `free`, except leased ones that are no longer pinnable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pools {
    /// For the host and emulator threads.
    pub housekeeping: CpuSet,
    /// Neither pinnable nor housekeeping: the kernel keeps tasks off them, and they were set aside for something else.
    pub isolated: CpuSet,
    /// Held by leases, or in use by their emulator threads.
    pub leased: CpuSet,
    /// Pinnable and held by nobody.
    pub free: CpuSet,
    /// Of the free ones: no part of a whole free core, so only `cores="thread"` requests can have them.
    pub withheld: CpuSet,
    /// Pinnable by configuration, but offline or absent.
    pub missing: CpuSet,
    /// The same by node; one entry with `None` where the host has no nodes.
    pub nodes: Vec<NodePools>,
}

/// One node's share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodePools {
    /// The node.
    pub node: Option<NodeId>,
    /// Whole cores that may be handed out.
    pub pinnable_cores: usize,
    /// Of these: free.
    pub free_cores: usize,
    /// Threads that may be handed out.
    pub pinnable_threads: usize,
    /// Of these: free.
    pub free_threads: usize,
}

/// How many more domains with this request would fit one after the other.
pub fn how_many_fit(supply: &Supply<'_>, request: &Request) -> usize {
    let mut taken = supply.taken.clone();
    let mut count = 0;
    // Every plan takes at least one CPU, so this ends.
    while let Ok(plan) = super::plan(&Supply { taken: &taken, ..*supply }, request) {
        taken = taken.union(&plan.exclusive());
        count += 1;
    }
    count
}

/// The pools of this host now.
pub fn pools(supply: &Supply<'_>) -> Pools {
    let pinnable = supply.handed_out();
    let free = pinnable.difference(supply.taken);
    let housekeeping = supply.housekeeping.clone();
    let isolated = supply.topology.isolated().difference(supply.pinnable).difference(supply.taken);
    let whole = |within: &CpuSet| -> CpuSet {
        let cores = supply.topology.cores().values().filter(|core| core.is_subset(within));
        cores.filter_map(CpuSet::first).collect()
    };
    let (whole_pinnable, whole_free) = (whole(&pinnable), whole(&free));
    let in_whole = |cpu: &CpuId| supply.topology.siblings(*cpu).is_some_and(|core| core.is_subset(&free));
    let node_of = |cpu: CpuId| supply.topology.cpu(cpu).and_then(|cpu| cpu.node);
    let ids: BTreeSet<Option<NodeId>> = pinnable.iter().map(node_of).collect();
    let nodes = ids.into_iter().map(|node| {
        let count = |set: &CpuSet| set.iter().filter(|&cpu| node_of(cpu) == node).count();
        NodePools {
            node,
            pinnable_cores: count(&whole_pinnable),
            free_cores: count(&whole_free),
            pinnable_threads: count(&pinnable),
            free_threads: count(&free),
        }
    });
    Pools {
        housekeeping,
        isolated,
        leased: supply.taken.clone(),
        withheld: free.iter().filter(|cpu| !in_whole(cpu)).collect(),
        missing: supply.pinnable.difference(supply.topology.online()),
        nodes: nodes.collect(),
        free,
    }
}
