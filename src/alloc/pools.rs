//! Where the host's CPUs stand: which of them are whose, and which of those lie on which node and in which cache. Pure.

use std::collections::BTreeMap;

use super::Supply;
use super::plan::Plan;
use super::request::Request;
use crate::cpuset::{CpuSet, NodeId};
use crate::host::{LlcId, Topology};

/// The online CPUs by what they are for. Every online CPU is in exactly one of `housekeeping`, `isolated`, `leased` and
/// `free`, except leased ones that are no longer pinnable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pools {
    /// May be handed out, whether free or not.
    pub pinnable: CpuSet,
    /// For the host and emulator threads.
    pub housekeeping: CpuSet,
    /// Neither pinnable nor housekeeping: the kernel keeps tasks off them, and they were set aside for something else.
    pub isolated: CpuSet,
    /// Held by leases, or in use by their emulator threads.
    pub leased: CpuSet,
    /// Of the leased ones: vCPUs of dedicated domains.
    pub dedicated: CpuSet,
    /// Their siblings, used by nobody.
    pub parked: CpuSet,
    /// Their emulator and I/O threads'.
    pub extra: CpuSet,
    /// Where domains without a lease may run: online, and neither dedicated nor parked nor extra.
    pub shared: CpuSet,
    /// Pinnable and held by nobody.
    pub free: CpuSet,
    /// Of the free ones: no part of a whole free core, so only `cores="thread"` requests can have them.
    pub withheld: CpuSet,
    /// Pinnable by configuration, but offline or absent.
    pub missing: CpuSet,
    /// The online CPUs of each node; one entry with `None` where the host has no nodes.
    pub nodes: BTreeMap<Option<NodeId>, CpuSet>,
    /// Those of each last-level cache, by the node that its lowest CPU is on.
    pub llcs: BTreeMap<(Option<NodeId>, Option<LlcId>), CpuSet>,
}

/// The pools of this host now; `plans` are those of the dedicated domains.
pub fn pools<'p>(supply: &Supply<'_>, plans: impl IntoIterator<Item = &'p Plan>) -> Pools {
    let topology = supply.topology;
    let pinnable = supply.handed_out();
    let free = pinnable.difference(supply.taken);
    let in_whole = |cpu| topology.siblings(cpu).is_some_and(|core| core.is_subset(&free));
    let (mut dedicated, mut parked, mut extra) = (CpuSet::new(), CpuSet::new(), CpuSet::new());
    for plan in plans {
        dedicated = dedicated.union(&plan.vcpu_cpus());
        extra = extra.union(&plan.extra);
        // What it holds and does not use.
        parked = parked.union(&plan.held(topology));
    }
    let parked = parked.difference(&dedicated).difference(&extra);
    let (mut nodes, mut llcs) = (BTreeMap::new(), BTreeMap::new());
    let mut node_of: BTreeMap<Option<LlcId>, Option<NodeId>> = BTreeMap::new();
    for cpu in topology.cpus().iter().filter(|cpu| cpu.online) {
        let node = match cpu.llc {
            Some(_) => *node_of.entry(cpu.llc).or_insert(cpu.node),
            None => cpu.node,
        };
        nodes.entry(cpu.node).or_insert_with(CpuSet::new).insert(cpu.cpu);
        llcs.entry((node, cpu.llc)).or_insert_with(CpuSet::new).insert(cpu.cpu);
    }
    Pools {
        housekeeping: supply.housekeeping.clone(),
        isolated: topology.isolated().difference(supply.pinnable).difference(supply.taken),
        leased: supply.taken.clone(),
        shared: topology.online().difference(&dedicated).difference(&parked).difference(&extra),
        withheld: free.iter().filter(|&cpu| !in_whole(cpu)).collect(),
        missing: supply.pinnable.difference(topology.online()),
        dedicated,
        parked,
        extra,
        pinnable,
        free,
        nodes,
        llcs,
    }
}

/// How many whole cores lie within these CPUs.
pub fn whole_cores(topology: &Topology, within: &CpuSet) -> usize {
    topology.cores().values().filter(|core| core.is_subset(within)).count()
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
