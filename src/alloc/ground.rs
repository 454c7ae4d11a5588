//! What is left of a host for the next domain when others have plans: their CPUs are taken, and so is the memory that
//! follows them. Pure; knows nothing of who they are, or whether they run.

use super::Supply;
use super::plan::Plan;
use super::policy::Memory;
use super::request::{Pages, Request};
use crate::cpuset::{CpuSet, NodeId};
use crate::host::{Node, Topology};

/// A host with some of it spoken for.
#[derive(Clone, Debug)]
pub(super) struct Ground {
    topology: Topology,
    taken: CpuSet,
}

impl Ground {
    /// What is left of this supply, by now all of it.
    pub(super) fn new(supply: &Supply<'_>) -> Ground {
        Ground { topology: supply.topology.clone(), taken: supply.taken.clone() }
    }

    /// Takes a plan's CPUs, and the memory that goes with it if that counts.
    pub(super) fn take(&mut self, request: &Request, plan: &Plan, with_memory: bool) {
        self.taken = self.taken.union(&plan.exclusive());
        if let Some(topology) = with_memory.then(|| less_memory(&self.topology, request, plan)).flatten() {
            self.topology = topology;
        }
    }

    /// This supply, with what has been taken since.
    pub(super) fn supply<'a>(&'a self, of: &Supply<'a>) -> Supply<'a> {
        Supply { topology: &self.topology, taken: &self.taken, ..*of }
    }
}

/// The host without the memory that goes with a plan; `None` where none is bound, or not known.
fn less_memory(host: &Topology, request: &Request, plan: &Plan) -> Option<Topology> {
    let memory = request.memory.filter(|_| request.policy.memory == Memory::Follow)?;
    let from = plan.memory_nodes.as_ref()?;
    let unit = match memory.pages {
        Pages::Ordinary => 1,
        Pages::Huge(kib) => kib.saturating_mul(1024).max(1),
        Pages::HugeDefault => return None,
    };
    let cells = plan.cells.iter().map(|cell| Some((cell.node.filter(|node| from.contains(node))?, cell.bytes?)));
    let by_cell = cells.collect::<Option<Vec<_>>>().filter(|cells| !cells.is_empty());
    let shares: Vec<(NodeId, u64)> = match by_cell {
        Some(cells) => cells.into_iter().map(|(node, bytes)| (node, bytes.div_ceil(unit))).collect(),
        None => {
            let nodes = from.iter().filter_map(|&id| host.node(id));
            let rooms = nodes.map(|node| (node.node, free(node, memory.pages).unwrap_or(u64::MAX)));
            evenly(rooms.collect(), memory.bytes.div_ceil(unit))
        }
    };
    let nodes = host.nodes().iter().cloned().map(|mut node| {
        let units = shares.iter().filter(|(id, _)| *id == node.node).map(|(_, units)| *units);
        let units = units.fold(0, u64::saturating_add);
        match memory.pages {
            Pages::Huge(kib) => {
                for pages in node.huge_pages.iter_mut().filter(|pages| pages.size_kib == kib) {
                    pages.free = pages.free.saturating_sub(units);
                }
            }
            _ => node.available_bytes = node.available_bytes.map(|bytes| bytes.saturating_sub(units)),
        }
        node
    });
    Some(host.with_nodes(nodes.collect()))
}

/// Free bytes, or free pages of the size; `None` = not known.
fn free(node: &Node, pages: Pages) -> Option<u64> {
    match pages {
        Pages::Huge(kib) => {
            let size = node.huge_pages.iter().find(|pages| pages.size_kib == kib);
            Some(size.map_or(0, |pages| pages.free))
        }
        _ => node.available_bytes,
    }
}

/// The same share of `need` from each as far as it has room, the rest from the others.
fn evenly(mut rooms: Vec<(NodeId, u64)>, mut need: u64) -> Vec<(NodeId, u64)> {
    rooms.sort_by_key(|(node, room)| (*room, *node));
    let mut left = rooms.len() as u64;
    for (_, room) in &mut rooms {
        *room = need.div_ceil(left.max(1)).min(*room);
        need -= *room;
        left -= 1;
    }
    rooms
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alloc::plan::PlacedCell;
    use crate::alloc::policy::Policy;
    use crate::alloc::request::GuestMemory;
    use crate::host::{HugePages, shape};
    use std::collections::BTreeSet;

    #[test]
    fn memory_goes_evenly_and_by_cell() {
        let request = Request::new(2, Policy::from_attributes([("policy", "dedicated")]).unwrap());
        let node = |number, gib: u64| Node {
            node: NodeId(number),
            cpus: CpuSet::new(),
            memory_bytes: Some(gib << 30),
            available_bytes: Some(gib << 30),
            huge_pages: vec![HugePages { size_kib: 2048, total: 100, free: 100 }],
            distances: Vec::new(),
        };
        let host = shape::parse("2s4c2t").unwrap().with_nodes(vec![node(0, 2), node(1, 8)]);
        let mut plan = Plan::new([], CpuSet::new());
        plan.memory_nodes = Some(BTreeSet::from([NodeId(0), NodeId(1)]));
        let left = |plan: &Plan, bytes: u64, pages| {
            let request = Request { memory: Some(GuestMemory { bytes, pages }), ..request.clone() };
            let host = less_memory(&host, &request, plan).unwrap();
            let nodes =
                host.nodes().iter().map(|node| (node.available_bytes.unwrap() >> 30, free(node, pages).unwrap()));
            nodes.collect::<Vec<_>>()
        };
        assert_eq!(left(&plan, 2 << 30, Pages::Ordinary)[1].0, 7);
        assert_eq!(left(&plan, 6 << 30, Pages::Ordinary).iter().map(|node| node.0).collect::<Vec<_>>(), [0, 4]);
        assert_eq!(left(&plan, 3 << 20, Pages::Huge(2048)), [(2, 99), (8, 99)]);
        assert_eq!(left(&plan, 401 << 20, Pages::Huge(2048)), [(2, 0), (8, 0)]);
        let cell = |node, bytes| PlacedCell { vcpus: CpuSet::new(), bytes: Some(bytes), node: Some(NodeId(node)) };
        plan.cells = vec![cell(0, 1 << 20), cell(1, 4 << 20)];
        assert_eq!(left(&plan, 5 << 20, Pages::Huge(2048)), [(2, 99), (8, 98)]);
        let idle = less_memory(&host, &request, &plan);
        assert_eq!(idle, None);
    }
}
