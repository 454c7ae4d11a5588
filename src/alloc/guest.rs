//! What the guest is told of its CPUs: sockets, dies, cores and threads, and NUMA cells, as they truly are.
//!
//! A guest's topology is a grid: every socket has as many dies, every core as many threads. What the host's CPUs do not
//! fill evenly is not told at all: a level that would be false is one. Never chooses CPUs.

use std::collections::BTreeMap;

use super::plan::{GuestTopology, PlacedCell, Plan};
use super::policy::GuestView;
use super::request::{GuestMemory, Pages, Request};
use crate::cpuset::{CpuId, CpuSet, NodeId};
use crate::host::{Cpu, HugePages, Topology};

/// libvirt rounds the memory of a cell up to this, so that anything finer would change the guest's memory.
const CELL_UNIT: u64 = 1 << 20;

/// The topology and the NUMA cells for a plan whose CPUs are chosen.
pub(super) fn told(topology: &Topology, request: &Request, plan: &Plan) -> (Option<GuestTopology>, Vec<PlacedCell>) {
    let cpus: Vec<Option<&Cpu>> = plan.vcpus.iter().map(|own| own.and_then(|cpu| topology.cpu(cpu))).collect();
    let host = request.policy.topology != GuestView::Keep;
    let cells = if request.cells.is_empty() {
        if host { made_cells(topology, request, plan, &cpus) } else { Vec::new() }
    } else {
        own_cells(request, &cpus)
    };
    (host.then(|| grid(request.vcpus, &cpus)), cells)
}

/// Sockets, dies, cores and threads whose product is the number of vCPUs.
fn grid(vcpus: u16, cpus: &[Option<&Cpu>]) -> GuestTopology {
    let threads = threads(cpus);
    let whole = GuestTopology { sockets: 1, dies: 1, cores: vcpus / threads.max(1), threads };
    // Sockets first: a die is only worth telling within its own.
    let sockets = runs(cpus, threads, |cpu| cpu.package.map(|package| (package, 0))).unwrap_or(1);
    let dies = runs(cpus, threads, |cpu| Some((cpu.package?, cpu.die?))).filter(|dies| dies % sockets == 0);
    let dies = dies.map_or(1, |dies| dies / sockets);
    GuestTopology { sockets, dies, cores: whole.cores / sockets / dies, ..whole }
}

/// How many threads every guest core has: the most that divides what each host core carries in a row.
fn threads(cpus: &[Option<&Cpu>]) -> u16 {
    let mut counts: Vec<usize> = Vec::new();
    let mut last = None;
    for cpu in cpus {
        let core = cpu.and_then(|cpu| cpu.core);
        match counts.last_mut().filter(|_| core.is_some() && core == last) {
            Some(count) => *count += 1,
            None => counts.push(1),
        }
        last = core;
    }
    u16::try_from(counts.into_iter().fold(0, gcd)).unwrap_or(1).max(1)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Into how many parts of equal size the vCPUs fall one after the other, each part another value and no value twice;
/// `None` where they do not, or where a part would split a core.
fn runs<K: Ord>(cpus: &[Option<&Cpu>], threads: u16, of: impl Fn(&Cpu) -> Option<K>) -> Option<u16> {
    let values: Vec<K> = cpus.iter().map(|cpu| cpu.and_then(&of)).collect::<Option<_>>()?;
    let mut sizes: BTreeMap<&K, usize> = BTreeMap::new();
    values.iter().for_each(|value| *sizes.entry(value).or_default() += 1);
    let size = values.len() / sizes.len().max(1);
    let parts = values.chunks(size.max(1));
    let alike = parts.len() == sizes.len()
        && parts.into_iter().all(|part| part.iter().all(|value| Some(value) == part.first()));
    let count = u16::try_from(sizes.len()).ok()?;
    (alike && size % usize::from(threads) == 0).then_some(count)
}

/// The guest's own cells, each with the node of its vCPUs.
fn own_cells(request: &Request, cpus: &[Option<&Cpu>]) -> Vec<PlacedCell> {
    let cells = request.cells.iter().map(|cell| {
        let mut nodes = cell.vcpus.iter().filter_map(|vcpu| cpus.get(usize::from(vcpu.0)).copied().flatten()?.node);
        let first = nodes.next();
        let node = first.filter(|_| nodes.all(|node| Some(node) == first));
        PlacedCell { vcpus: cell.vcpus.clone(), bytes: Some(cell.bytes), node }
    });
    cells.collect()
}

/// A cell for each node that the vCPUs span; none where they lie on one, or where some of them are anywhere.
fn made_cells(topology: &Topology, request: &Request, plan: &Plan, cpus: &[Option<&Cpu>]) -> Vec<PlacedCell> {
    let mut vcpus: BTreeMap<NodeId, CpuSet> = BTreeMap::new();
    for (number, cpu) in (0..).zip(cpus) {
        let Some(node) = cpu.and_then(|cpu| cpu.node) else { return Vec::new() };
        vcpus.entry(node).or_default().insert(CpuId(number));
    }
    if vcpus.len() < 2 {
        return Vec::new();
    }
    let shares = request.memory.map(|memory| shares(topology, memory, plan, &vcpus));
    let cell = |(index, (node, vcpus)): (usize, (NodeId, CpuSet))| {
        let bytes = shares.as_ref().and_then(|shares| shares.get(index)).copied();
        PlacedCell { vcpus, bytes, node: Some(node) }
    };
    vcpus.into_iter().enumerate().map(cell).collect()
}

/// The memory of each cell: as its vCPUs, as far as its node has room; they add up to the guest's.
fn shares(topology: &Topology, memory: GuestMemory, plan: &Plan, cells: &BTreeMap<NodeId, CpuSet>) -> Vec<u64> {
    let page = match memory.pages {
        Pages::Huge(kib) => kib.saturating_mul(1024),
        Pages::Ordinary | Pages::HugeDefault => 0,
    };
    let unit = page.max(CELL_UNIT);
    let room = |node: &NodeId| {
        let node = topology.node(*node).filter(|_| plan.memory_nodes.is_some())?;
        match memory.pages {
            Pages::Huge(kib) => {
                let pages = node.huge_pages.iter().find(|pages| pages.size_kib == kib);
                Some(pages.map_or(0, HugePages::free_bytes))
            }
            Pages::Ordinary => node.available_bytes,
            Pages::HugeDefault => None,
        }
    };
    let total: u64 = cells.values().map(|vcpus| vcpus.len() as u64).sum();
    let units = memory.bytes / unit;
    let mut shares: Vec<u64> = Vec::new();
    for (node, vcpus) in cells {
        let fair = u128::from(units) * vcpus.len() as u128 / u128::from(total.max(1));
        let fair = u64::try_from(fair).unwrap_or(u64::MAX).saturating_mul(unit);
        shares.push(fair.min(room(node).map_or(u64::MAX, |room| room / unit * unit)));
    }
    // What rounding and narrow nodes have left over goes where there is room, lastly to the first cell.
    let mut left = memory.bytes.saturating_sub(shares.iter().sum());
    for (share, node) in shares.iter_mut().zip(cells.keys()) {
        let more = left.min(room(node).map_or(left, |room| room.saturating_sub(*share) / unit * unit));
        *share = share.saturating_add(more);
        left -= more;
    }
    if let Some(first) = shares.first_mut() {
        *first = first.saturating_add(left);
    }
    shares
}
