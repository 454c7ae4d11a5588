//! OpenStack Nova: the guest has NUMA nodes ("cells"), and each goes to one node of the host, the first that has room.
//!
//! Read: `nova/virt/hardware.py` of openstack/nova, `numa_fit_instance_to_host` (the first successful permutation of host
//! cells) and `_pack_instance_onto_cores` (within a cell: of the cores with most free threads, the first ones), at commit
//! d7864fbb9c2c; `doc/source/admin/cpu-topologies.rst` at commit 00299dcaad9a and the release notes of 26.0.0 for the
//! order of the host cells (`[compute]/packing_host_numa_cells_allocation_strategy`): by free dedicated CPUs, ascending
//! ("pack") or descending ("spread", the default since 26.0.0), ties as they are numbered. Where the guest has as many
//! cells as the host, the order is that of the numbers.
//!
//! Whole cores are the thread policies `prefer` and `require` with flavors that fill their cores, as those here do. The
//! number of cells belongs to the flavor and not to the moment: a guest has one, or, if no node could ever hold it and the
//! request does not say `single`, as many as it takes, split evenly (`hw:numa_nodes`, `hw:numa_cpus.N`). "As few as there
//! is room on just now" cannot be expressed, and Nova knows no last-level caches.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::Rule;
use crate::machine::{Demand, Free, Machine};

pub(crate) struct Nova {
    pub(crate) pack: bool,
}

impl Rule for Nova {
    fn name(&self) -> &'static str {
        if self.pack { "Nova, pack" } else { "Nova, spread" }
    }

    fn place(&self, machine: &Machine, free: &Free, demand: &Demand) -> Option<Vec<usize>> {
        let cells = host_cells(machine, free);
        let guest = guest_cells(machine, demand)?;
        let mut order: Vec<&Vec<usize>> = cells.values().collect();
        if order.len() > guest.len() {
            let free = |cores: &[usize]| machine.holds(cores.iter().copied());
            // Stable in both directions.
            match self.pack {
                true => order.sort_by_key(|cores| free(cores)),
                false => order.sort_by_key(|cores| Reverse(free(cores))),
            }
        }
        permute(machine, &order, &guest)
    }
}

/// The free cores of each node.
fn host_cells(machine: &Machine, free: &Free) -> BTreeMap<u16, Vec<usize>> {
    let mut cells: BTreeMap<u16, Vec<usize>> = machine.cores.iter().map(|core| (core.node, Vec::new())).collect();
    for &core in free {
        cells.entry(machine.cores[core].node).or_default().push(core);
    }
    cells
}

/// The vCPUs of each guest cell: the fewest cells that the empty host could hold.
fn guest_cells(machine: &Machine, demand: &Demand) -> Option<Vec<usize>> {
    let mut holds: Vec<usize> =
        host_cells(machine, &machine.offered()).values().map(|cores| machine.holds(cores.iter().copied())).collect();
    holds.sort_unstable_by(|a, b| b.cmp(a));
    let most = if demand.single { 1 } else { holds.len() };
    // Cells of whole cores: the demand in its smallest units.
    let unit = (0..machine.cores.len()).map(|core| machine.threads(core)).max()?;
    (1..=most).find_map(|count| {
        let units = machine.cost(demand).div_ceil(unit);
        let shares = (0..count).map(|cell| (units / count + usize::from(cell < units % count)) * unit);
        let shares: Vec<usize> = shares.collect();
        // With one cell, exactly what was asked for.
        let shares = if count == 1 { vec![demand.vcpus] } else { shares };
        shares.iter().zip(&holds).all(|(share, room)| share <= room && *share > 0).then_some(shares)
    })
}

/// The first permutation of host cells, in lexicographic order, in which every guest cell fits.
fn permute(machine: &Machine, host: &[&Vec<usize>], guest: &[usize]) -> Option<Vec<usize>> {
    let Some((&vcpus, others)) = guest.split_first() else { return Some(Vec::new()) };
    (0..host.len()).find_map(|chosen| {
        let mut cores = pack(machine, host[chosen], vcpus)?;
        let left: Vec<_> =
            host.iter().enumerate().filter(|(cell, _)| *cell != chosen).map(|(_, cores)| *cores).collect();
        cores.extend(permute(machine, &left, others)?);
        Some(cores)
    })
}

/// Within a cell: cores with most threads first; those with fewer join only where the former are not enough.
fn pack(machine: &Machine, cell: &[usize], vcpus: usize) -> Option<Vec<usize>> {
    let most = cell.iter().map(|&core| machine.threads(core)).max()?;
    (1..=most)
        .rev()
        .find_map(|threads| machine.fill(cell.iter().copied().filter(|&core| machine.threads(core) >= threads), vcpus))
}
