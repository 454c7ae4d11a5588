//! Whether there is room for the guest's memory where its CPUs are.

use std::collections::BTreeSet;

use super::groups::Group;
use super::policy::Memory;
use super::request::{GuestMemory, Pages, Request};
use crate::cpuset::NodeId;
use crate::host::{HugePages, Node, Topology};

/// Whether the guest's memory has room when each group lies on these nodes; a single set is for all groups together. Memory that
/// is bound already has none elsewhere.
pub(super) fn has_room(topology: &Topology, request: &Request, groups: &[Group], nodes: &[BTreeSet<NodeId>]) -> bool {
    if !is_where_bound(groups, nodes) {
        return false;
    }
    let [_, _, ..] = nodes else {
        return nodes.iter().all(|nodes| lacking(topology, request, nodes).is_none());
    };
    // Each cell's memory is on its own node.
    let used: BTreeSet<&BTreeSet<NodeId>> = nodes.iter().collect();
    let all: BTreeSet<NodeId> = nodes.iter().flatten().copied().collect();
    lacking(topology, request, &all).is_none()
        && used.into_iter().all(|here| {
            let cells = groups.iter().zip(nodes).filter(|(_, nodes)| *nodes == here);
            let bytes = cells.map(|(group, _)| group.bytes.unwrap_or(0)).fold(0, u64::saturating_add);
            bound(request).is_none_or(|memory| lacks(topology, GuestMemory { bytes, ..memory }, here).is_none())
        })
}

/// Whether each group lies where its memory is bound to, as far as a set for all of them together tells.
pub(super) fn is_where_bound(groups: &[Group], nodes: &[BTreeSet<NodeId>]) -> bool {
    let bound = groups.iter().map(|group| group.bound);
    match nodes {
        [together] => bound.flatten().all(|bound| together.contains(&bound)),
        each => bound.zip(each).all(|(bound, nodes)| bound.is_none_or(|bound| nodes.iter().all(|node| *node == bound))),
    }
}

/// Whether memory matters at all.
pub(super) fn matters(request: &Request, groups: &[Group]) -> bool {
    request.memory.is_some() || groups.iter().any(|group| group.bound.is_some())
}

/// Where memory that follows its CPUs comes from: their nodes, a memory-less one replaced by its nearest with memory.
pub(super) fn memory_nodes(topology: &Topology, nodes: &BTreeSet<NodeId>) -> BTreeSet<NodeId> {
    let has_memory = |id: NodeId| topology.node(id).is_some_and(|node| node.memory_bytes != Some(0));
    let nearest = |id: &NodeId| {
        if has_memory(*id) {
            return Some(*id);
        }
        let distances = &topology.node(*id)?.distances;
        distances
            .iter()
            .filter(|(id, _)| has_memory(*id))
            .min_by_key(|(id, distance)| (*distance, *id))
            .map(|(id, _)| *id)
    };
    nodes.iter().filter_map(nearest).collect()
}

/// Memory that these nodes lack for the guest, as (needed, free) bytes; `None` = enough, not bound, or not known.
pub(super) fn lacking(topology: &Topology, request: &Request, nodes: &BTreeSet<NodeId>) -> Option<(u64, u64)> {
    lacks(topology, bound(request)?, nodes)
}

/// The guest's memory where it follows the CPUs.
fn bound(request: &Request) -> Option<GuestMemory> {
    request.memory.filter(|_| request.policy.memory == Memory::Follow)
}

fn lacks(topology: &Topology, memory: GuestMemory, nodes: &BTreeSet<NodeId>) -> Option<(u64, u64)> {
    let GuestMemory { bytes, pages } = memory;
    let from = memory_nodes(topology, nodes);
    // Where no node is known to have memory, nothing is bound.
    if from.is_empty() {
        return None;
    }
    let elsewhere = |node: &Node| !from.contains(&node.node) && node.memory_bytes != Some(0);
    let free = match pages {
        // Bound to all the memory there is, the guest has no less room than without a policy.
        Pages::Ordinary if !topology.nodes().iter().any(elsewhere) => return None,
        Pages::Ordinary => from.iter().map(|&id| topology.node(id)?.available_bytes).sum::<Option<u64>>()?,
        Pages::Huge(kib) => from
            .iter()
            .filter_map(|&id| topology.node(id)?.huge_pages.iter().find(|pages| pages.size_kib == kib))
            .map(HugePages::free_bytes)
            .fold(0, u64::saturating_add),
        Pages::HugeDefault => return None,
    };
    (free < bytes).then_some((bytes, free))
}
