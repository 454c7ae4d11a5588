//! The NUMA nodes, and which CPU belongs to which.
//!
//! `/sys/devices/system/node/nodeN/`, one directory per online node; the numbers may be sparse, and a machine whose
//! kernel has no NUMA support has none (one memory, nothing lost):
//! - `cpulist` (2.6.28; before that the mask `cpumap`): its CPUs, empty for a node of memory alone;
//! - `meminfo`: lines `Node 0 MemTotal:  1024 kB`, zero for a node of CPUs alone;
//! - `distance`: one number per online node, ascending by node, separated by spaces;
//! - `hugepages/hugepages-SIZEkB/{nr,free}_hugepages` (2.6.32): absent for a node without memory.

use std::collections::BTreeMap;

use super::text::{meminfo_kib, parse_kernel_mask};
use super::{Reader, Spelling, named};
use crate::cpuset::{CpuId, CpuSet, MAX_CPUS, NodeId};
use crate::host::{HugePages, Node};

const NODE_DIR: &str = "/sys/devices/system/node";
const CPUS: [Spelling; 2] = [("cpulist", CpuSet::parse_kernel_list), ("cpumap", parse_kernel_mask)];

/// The lines of a node's `meminfo` that are looked at: what it has, and what a new guest could get.
pub(in crate::host) const MEMINFO_KEYS: [&str; 5] =
    [MEM_TOTAL, MEM_FREE, "Active(file)", "Inactive(file)", "SReclaimable"];
const MEM_TOTAL: &str = "MemTotal";
const MEM_FREE: &str = "MemFree";

/// The nodes, ascending, and the node of every online CPU that has a known one.
pub(super) fn read(reader: &mut Reader<'_>, online: &CpuSet) -> (Vec<Node>, BTreeMap<CpuId, NodeId>) {
    let mut numbers: Vec<u16> = reader
        .names(NODE_DIR)
        .iter()
        .filter_map(|name| name.strip_prefix("node")?.parse().ok())
        .filter(|&number| number < MAX_CPUS)
        .collect();
    numbers.sort_unstable();
    numbers.dedup();
    let mut nodes: Vec<Node> = numbers.iter().map(|&number| node(reader, NodeId(number), online)).collect();

    let wrong = claimed_twice(&nodes);
    if !wrong.is_empty() {
        reader.lose(format!("{}: in more than one NUMA node", named(&wrong)));
    }
    let mut node_of = BTreeMap::new();
    let mut no_distances = CpuSet::new();
    for node in &mut nodes {
        node.cpus = node.cpus.difference(&wrong);
        node_of.extend(node.cpus.iter().map(|cpu| (cpu, node.node)));
        match distances(reader, node.node, &numbers) {
            Some(distances) => node.distances = distances,
            None => no_distances.insert(CpuId(node.node.0)),
        }
    }
    if !no_distances.is_empty() {
        reader.lose(format!("the NUMA distances (node {no_distances}) do not match the nodes that exist"));
    }
    let nowhere: CpuSet = online.difference(&wrong).iter().filter(|cpu| !node_of.contains_key(cpu)).collect();
    if !nodes.is_empty() && !nowhere.is_empty() {
        reader.lose(format!("{}: in no NUMA node", named(&nowhere)));
    }
    (nodes, node_of)
}

/// The CPUs that more than one node claims (firmware that describes each socket as the whole machine).
fn claimed_twice(nodes: &[Node]) -> CpuSet {
    let mut claimed = CpuSet::new();
    let mut twice = CpuSet::new();
    for node in nodes {
        twice = twice.union(&claimed.intersection(&node.cpus));
        claimed = claimed.union(&node.cpus);
    }
    twice
}

fn node(reader: &mut Reader<'_>, node: NodeId, online: &CpuSet) -> Node {
    let dir = format!("{NODE_DIR}/node{node}");
    let cpus = reader.cpus(&dir, &CPUS).unwrap_or_default().intersection(online);
    let meminfo = reader.text(&format!("{dir}/meminfo")).unwrap_or_default();
    let bytes = |key| meminfo_kib(&meminfo, key).and_then(|kib| kib.checked_mul(1024));
    // File pages and reclaimable slabs are given up before an allocation bound to the node fails.
    let available_bytes = bytes(MEM_FREE).map(|free| {
        let cached = MEMINFO_KEYS.iter().filter(|&&key| key != MEM_TOTAL && key != MEM_FREE);
        cached.filter_map(|key| bytes(key)).fold(free, u64::saturating_add)
    });
    let huge_pages = huge_pages(reader, &dir);
    Node { node, cpus, memory_bytes: bytes(MEM_TOTAL), available_bytes, huge_pages, distances: Vec::new() }
}

fn huge_pages(reader: &mut Reader<'_>, dir: &str) -> Vec<HugePages> {
    let mut sizes = Vec::new();
    for name in reader.names(&format!("{dir}/hugepages")) {
        let Some(size_kib) = name.strip_prefix("hugepages-").and_then(|rest| rest.strip_suffix("kB")?.parse().ok())
        else {
            continue;
        };
        let mut pages = |file| reader.text(&format!("{dir}/hugepages/{name}/{file}"))?.trim().parse().ok();
        if let (Some(total), Some(free)) = (pages("nr_hugepages"), pages("free_hugepages")) {
            sizes.push(HugePages { size_kib, total, free });
        }
    }
    sizes.sort_unstable_by_key(|pages| pages.size_kib);
    sizes
}

/// Empty where the kernel lists none; `None` where there are not as many numbers as nodes: whose is which cannot be
/// told.
fn distances(reader: &mut Reader<'_>, node: NodeId, numbers: &[u16]) -> Option<Vec<(NodeId, u32)>> {
    let Some(text) = reader.text(&format!("{NODE_DIR}/node{node}/distance")) else { return Some(Vec::new()) };
    let distances: Option<Vec<u32>> = text.split_ascii_whitespace().map(|word| word.parse().ok()).collect();
    let distances = distances.filter(|distances| distances.len() == numbers.len())?;
    Some(numbers.iter().map(|&number| NodeId(number)).zip(distances).collect())
}
