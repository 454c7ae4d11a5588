//! How a request gets its CPUs.
//!
//! 1. *Pieces.* What can be taken: whole free cores (every online thread pinnable and free), or single free threads,
//!    on the nodes and of the core class asked for, or exactly those named. A core of unknown siblings is no whole core.
//! 2. *Groups.* The vCPUs that get CPUs, up to the maximum count: together; or by guest NUMA cell, or in even shares, each
//!    group on one node. An extra piece each for isolated emulator and I/O threads.
//! 3. *One class.* On hybrid machines cores of one class are tried first; mixed ones only when no class alone is enough,
//!    and never where a VM's threads have to stay on one.
//! 4. *Nodes.* As few as the policy allows; every set of that many nodes that is enough.
//! 5. *Seats.* Several groups onto the nodes of the set, in every way that fits.
//! 6. *Last-level caches.* As few as will do within the nodes.
//! 7. *Pick.* Lone threads first, then pieces of the domains with the least left.
//! 8. *Score.* Nodes, the way to the devices, caches, then the damage to the largest requests still to come; ties by CPU
//!    number.
//! 9. *Order.* vCPUs in the order node, cache, core, thread, so that the guest's siblings are siblings of the host.
//!
//! Steps 4 and 5 also ask for room for the guest's memory. Steps 4 to 8 are in [`super::choose`], what the guest is told in
//! [`super::guest`]. When nothing is found, [`super::diagnose`] tells the classes of refusal apart by placing the same
//! request under better conditions.

use std::collections::BTreeSet;

use super::choose::{self, Choice, Demand, Far, Piece, Room};
use super::diagnose::{refuse, unit};
use super::groups::{Group, groups, has_cells};
use super::memory::{has_room, matters, memory_nodes};
use super::pieces::{fits_class, pieces, withheld};
use super::plan::Plan;
use super::policy::{Cores, Locality, Memory, OtherThreads, Span};
use super::refusal::Refusal;
use super::request::Request;
use super::{Steps, Supply, guest, impossible};
use crate::cpuset::{CpuId, CpuSet, NodeId};
use crate::error::{Code, counted};
use crate::host::Topology;

/// The plan for a request, or why not; without `explained` every want of room is one and the same.
///
/// # Errors
/// A [`Refusal`]; see [`super::plan()`].
pub(super) fn place(
    supply: &Supply<'_>,
    request: &Request,
    steps: Steps<'_>,
    explained: bool,
) -> Result<Plan, Refusal> {
    impossible::refuse(supply, request)?;
    // Steps 1 and 2.
    let pieces = pieces(supply, request);
    let groups = groups(supply, request)?;
    let sizes: Vec<u32> = groups.iter().map(|group| u32::try_from(group.vcpus.len()).unwrap_or(u32::MAX)).collect();
    let far = |nodes: &BTreeSet<NodeId>| far(supply.topology, &request.devices, nodes);
    let far = (request.policy.locality == Locality::Devices && !request.devices.is_empty()).then_some(&far as Far<'_>);
    let demand = demand(supply.topology, request, &groups, &sizes, far);
    steps(format_args!("pinnable and online: {}", or_none(&supply.handed_out())));
    steps(format_args!("held by leases: {}", or_none(&supply.taken.intersection(&supply.handed_out()))));
    let withheld = withheld(supply, request);
    if !withheld.is_empty() {
        steps(format_args!("withheld, as their core is not whole: {withheld}"));
    }
    let extra = if demand.extra > 0 { format!(" and {} extra", demand.extra) } else { String::new() };
    let free = counted(pieces.len() as u64, unit(request));
    steps(format_args!("needed: {}{extra}; free: {free}", counted(demand.vcpus, "vCPU")));
    if let [_, _, ..] = sizes.as_slice() {
        let sizes: Vec<_> = sizes.iter().map(ToString::to_string).collect();
        steps(format_args!("each on one node, in groups of {} vCPUs", sizes.join(" + ")));
    }
    if demand.one_class && supply.topology.is_hybrid() {
        steps(format_args!("on this machine all vCPUs and the emulator stay on cores of one class"));
    }
    if far.is_some() {
        let nodes = if request.devices.len() == 1 { "node" } else { "nodes" };
        steps(format_args!("its devices are on {nodes} {}", node_list(&request.devices)));
    }
    let room = |nodes: &[BTreeSet<NodeId>]| has_room(supply.topology, request, &groups, nodes);
    let room = matters(request, &groups).then_some(&room as Room<'_>);
    let Some(choice) = by_class(&pieces, request, &demand, room) else {
        // Which want of room it is takes longer to find out than that there is one.
        let merely = || Refusal::new(Code::Shortage, "there is no room for it beside the others");
        return Err(if explained { refuse(supply, request, &groups, &pieces, &demand) } else { merely() });
    };
    let plan = order(supply, request, &groups, &choice);
    let order: Vec<_> = plan.vcpus.iter().flatten().map(ToString::to_string).collect();
    steps(format_args!(
        "chosen: fewest nodes, then fewest last-level caches, then the rest most useful to others: CPUs {}",
        order.join(",")
    ));
    Ok(plan)
}

fn demand<'a>(
    topology: &Topology,
    request: &Request,
    groups: &[Group],
    sizes: &'a [u32],
    far: Option<Far<'a>>,
) -> Demand<'a> {
    // Over one node there is nothing to spread; and the only cell with vCPUs lies on one all the same.
    let alone = groups.len() == 1 && (request.policy.numa == Span::Spread || has_cells(request));
    Demand {
        vcpus: sizes.iter().sum(),
        groups: sizes,
        equals: groups.windows(2).all(|pair| matches!(pair, [a, b] if (a.bytes, a.bound) == (b.bytes, b.bound))),
        extra: request.isolated(),
        numa: if alone { Span::Single } else { request.policy.numa },
        cache: request.policy.cache,
        one_class: topology.keeps_vms_in_one_class(),
        far,
    }
}

/// The way from these nodes to the guest's devices, summed over the devices' nodes.
fn far(topology: &Topology, devices: &BTreeSet<NodeId>, nodes: &BTreeSet<NodeId>) -> u32 {
    let distance = |device: &NodeId| {
        let to = |node: &NodeId| {
            let known = topology.node(*device).and_then(|from| from.distances.iter().find(|(to, _)| to == node));
            known.map_or(if node == device { 10 } else { 255 }, |(_, distance)| *distance)
        };
        nodes.iter().map(to).min().unwrap_or(255)
    };
    devices.iter().map(distance).fold(0, u32::saturating_add)
}

/// Step 3.
pub(super) fn by_class<'a>(
    pieces: &'a [Piece],
    request: &Request,
    demand: &Demand<'_>,
    room: Option<Room<'_>>,
) -> Option<Choice<'a>> {
    // The unknown class last.
    let classes: BTreeSet<_> = pieces.iter().map(|piece| (piece.class.is_none(), piece.class)).collect();
    let all: Vec<_> = pieces.iter().collect();
    if classes.len() > 1 && request.policy.core_class.is_none() {
        let alone = classes.iter().find_map(|&(_, class)| {
            let pieces: Vec<_> = all.iter().copied().filter(|piece| piece.class == class).collect();
            near_devices(&pieces, request, demand, room)
        });
        if alone.is_some() || demand.one_class {
            return alone;
        }
    }
    near_devices(&all, request, demand, room)
}

/// Where nodes do not matter otherwise, those of the devices alone are tried first.
fn near_devices<'a>(
    pieces: &[&'a Piece],
    request: &Request,
    demand: &Demand<'_>,
    room: Option<Room<'_>>,
) -> Option<Choice<'a>> {
    let near = || {
        let near = |piece: &&Piece| piece.node.is_some_and(|node| request.devices.contains(&node));
        let near: Vec<_> = pieces.iter().copied().filter(near).collect();
        choose::choose(&near, demand, room)
    };
    let first = (demand.far.is_some() && demand.numa == Span::Any).then(near).flatten();
    first.or_else(|| choose::choose(pieces, demand, room))
}

/// Step 9.
fn order(supply: &Supply<'_>, request: &Request, groups: &[Group], choice: &Choice<'_>) -> Plan {
    let place = |piece: &Piece| (piece.node, piece.llc, piece.core, piece.cpus.first().copied());
    let mut seated: Vec<(Vec<u16>, Vec<&Piece>)> =
        groups.iter().zip(&choice.groups).map(|(group, pieces)| (group.vcpus.clone(), pieces.clone())).collect();
    seated.iter_mut().for_each(|(_, pieces)| pieces.sort_by_key(|piece| place(piece)));
    if !has_cells(request) {
        // Even shares have no numbers of their own: by node.
        seated.sort_by_key(|(_, pieces)| pieces.first().map(|piece| place(piece)));
        let mut numbers = request.dedicated();
        seated.iter_mut().for_each(|(vcpus, _)| *vcpus = numbers.by_ref().take(vcpus.len()).collect());
    }
    let mut vcpus: Vec<Option<CpuId>> = vec![None; usize::from(request.vcpus)];
    for (numbers, pieces) in &seated {
        let mut numbers = numbers.iter();
        for piece in pieces {
            // The last core may have threads to spare.
            let threads = piece.cpus.iter().take(usize::from(piece.vcpus));
            for (&cpu, &number) in threads.zip(numbers.by_ref().take(usize::from(piece.vcpus))) {
                if let Some(own) = vcpus.get_mut(usize::from(number)) {
                    *own = Some(cpu);
                }
            }
        }
    }
    let all = |pieces: &mut dyn Iterator<Item = &Piece>| -> CpuSet {
        pieces.flat_map(|piece| piece.cpus.iter().copied()).collect()
    };
    let vcpu_cpus: CpuSet = vcpus.iter().copied().flatten().collect();
    let class = choice.vcpus().next().and_then(|piece| piece.class);
    let mut extra = choice.extra.iter();
    let mut seat = |others, isolated: &CpuSet, bound: bool| match others {
        OtherThreads::Housekeeping if bound => {
            supply.housekeeping.iter().filter(|&cpu| fits_class(supply.topology, cpu, class)).collect()
        }
        OtherThreads::Housekeeping => supply.housekeeping.clone(),
        OtherThreads::Share => vcpu_cpus.clone(),
        OtherThreads::Isolate => extra.next().map_or_else(|| isolated.clone(), |&piece| all(&mut [piece].into_iter())),
    };
    let emulator = seat(request.policy.emulator, &CpuSet::new(), true);
    let iothreads = seat(request.policy.iothreads, &emulator, false);
    let nodes = choice.nodes();
    let memory_nodes = match request.policy.memory {
        Memory::Follow if !nodes.is_empty() => {
            Some(memory_nodes(supply.topology, &nodes)).filter(|nodes| !nodes.is_empty())
        }
        Memory::Follow | Memory::Any => None,
    };
    let mut plan = Plan {
        shared: if vcpus.contains(&None) { supply.housekeeping.clone() } else { CpuSet::new() },
        whole: request.policy.cores == Cores::Whole,
        parked: all(&mut choice.vcpus()).difference(&vcpu_cpus),
        extra: all(&mut choice.extra.iter().copied()),
        iothreads,
        nodes,
        memory_nodes,
        vcpus,
        ..Plan::new([], emulator)
    };
    (plan.guest, plan.cells) = guest::told(supply.topology, request, &plan);
    plan
}

fn or_none(set: &CpuSet) -> String {
    if set.is_empty() { "none".to_owned() } else { set.to_string() }
}

fn node_list(nodes: &BTreeSet<NodeId>) -> CpuSet {
    nodes.iter().map(|node| CpuId(node.0)).collect()
}
