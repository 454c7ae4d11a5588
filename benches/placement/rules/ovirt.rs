//! oVirt's `dedicated` CPU pinning policy: always the socket with most free CPUs, its cores in order.
//!
//! Read: `VdsCpuUnitPinningHelper.java` of oVirt/ovirt-engine at commit 3fa3102a061a (`allocateDedicatedCpus`,
//! `getMaxFreedSocket`): while virtual sockets are left, the physical socket with most free CPUs (ties: the first) takes as
//! many virtual cores as it has room for; of a virtual socket that does not fit whole nothing is kept.
//!
//! Whole cores are `dedicated` with as many virtual threads per core as the host has; `isolate-threads` takes the same
//! cores for fewer vCPUs. The virtual topology is at its best here: sockets of one core where the request may spread
//! (every free core can be used), one socket for all cores where it must not. Only sockets keep cores together: nodes and
//! caches inside a socket are not asked for, so where a socket has several nodes a `single` request may be placed on two
//! of them; that is counted as a refusal.

use std::collections::{BTreeMap, BTreeSet};

use super::Rule;
use crate::machine::{Demand, Free, Machine};

pub(crate) struct Ovirt;

impl Rule for Ovirt {
    fn name(&self) -> &'static str {
        "oVirt"
    }

    fn place(&self, machine: &Machine, free: &Free, demand: &Demand) -> Option<Vec<usize>> {
        let mut sockets: BTreeMap<u16, Vec<usize>> = BTreeMap::new();
        for &core in free {
            sockets.entry(machine.cores[core].package).or_default().push(core);
        }
        let mut taken = Vec::new();
        let mut missing = demand.vcpus;
        while missing > 0 {
            let room = |cores: &[usize]| machine.holds(cores.iter().copied());
            // `max_by_key` keeps the last of equals.
            let most = sockets.values_mut().rev().max_by_key(|cores| room(cores)).filter(|cores| !cores.is_empty())?;
            let here = match machine.fill(most.iter().copied(), missing) {
                Some(cores) => cores,
                None if demand.single => return None,
                None => most.clone(),
            };
            missing = missing.saturating_sub(room(&here));
            most.retain(|core| !here.contains(core));
            taken.extend(here);
        }
        let nodes: BTreeSet<u16> = taken.iter().map(|&core| machine.cores[core].node).collect();
        (!demand.single || nodes.len() == 1).then_some(taken)
    }
}
