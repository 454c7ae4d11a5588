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
use super::guest;
use super::plan::Plan;
use super::policy::{Cores, Locality, Memory, OtherThreads, Span, ThreadsPerCore};
use super::refusal::Refusal;
use super::request::{GuestMemory, Pages, Request};
use super::{Steps, Supply};
use crate::cpuset::{CpuId, CpuSet, NodeId};
use crate::error::{Code, counted};
use crate::host::{CoreClass, Cpu, Node, Topology};

/// The plan for a request, or why not.
///
/// # Errors
/// A [`Refusal`]; see [`super::plan()`].
pub(super) fn place(supply: &Supply<'_>, request: &Request, steps: Steps<'_>) -> Result<Plan, Refusal> {
    impossible(supply, request)?;
    // Steps 1 and 2.
    let pieces = pieces(supply, request);
    let groups = groups(supply, request)?;
    let sizes: Vec<u32> = groups.iter().map(|group| u32::try_from(group.vcpus.len()).unwrap_or(u32::MAX)).collect();
    let far = |nodes: &BTreeSet<NodeId>| far(supply.topology, &request.devices, nodes);
    let far = (request.policy.locality == Locality::Devices && !request.devices.is_empty()).then_some(&far as Far<'_>);
    let demand = demand(supply.topology, request, &sizes, far);
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
    if far.is_some() {
        steps(format_args!("its devices are on nodes {}", node_list(&request.devices)));
    }
    let room = |nodes: &[BTreeSet<NodeId>]| has_room(supply.topology, request, &groups, nodes);
    let room = request.memory.is_some().then_some(&room as Room<'_>);
    let Some(choice) = by_class(&pieces, request, &demand, room) else {
        let refusal = refuse(supply, request, &pieces, &demand);
        steps(format_args!("refused: {}: {}", refusal.code, refusal.reason));
        return Err(refusal);
    };
    let plan = order(supply, request, &groups, &choice);
    let order: Vec<_> = plan.vcpus.iter().flatten().map(ToString::to_string).collect();
    steps(format_args!(
        "chosen: fewest nodes, then fewest last-level caches, then the rest most useful to others: CPUs {}",
        order.join(",")
    ));
    Ok(plan)
}

/// Requests that no state of this host could honour, told before any search.
fn impossible(supply: &Supply<'_>, request: &Request) -> Result<(), Refusal> {
    let never = |reason: String, hint: &str| {
        let hint = Some(hint.to_owned());
        Err(Refusal { hint, ..Refusal::new(Code::Unsatisfiable, reason) })
    };
    let invalid = |reason: String| Err(Refusal::new(Code::PolicyInvalid, reason));
    let policy = &request.policy;
    let dedicated = request.dedicated().count();
    if request.vcpus == 0 {
        return invalid("the domain has no vCPU".to_owned());
    }
    if let Some(vcpu) =
        policy.dedicated_vcpus.as_ref().and_then(|vcpus| vcpus.iter().find(|vcpu| vcpu.0 >= request.vcpus))
    {
        return invalid(format!("dedicated-vcpus names vCPU {vcpu}, but the domain has vCPUs 0-{}", request.vcpus - 1));
    }
    if supply.handed_out().is_empty() {
        return never(
            "no CPU of this host may be handed out: pinnable_cpus is empty or names no CPU that is online".to_owned(),
            "set pinnable_cpus in /etc/virt-pin/virt-pin.toml",
        );
    }
    let vcpus = || {
        let some = if dedicated < usize::from(request.vcpus) { "dedicated " } else { "" };
        counted(dedicated as u64, &format!("{some}vCPU"))
    };
    if let ThreadsPerCore::Exactly(threads) = policy.threads_per_core {
        if dedicated % usize::from(threads.get()) != 0 {
            return invalid(format!("{} are not a multiple of threads-per-core=\"{threads}\"", vcpus()));
        }
    }
    let unknown = |node: &CpuId| supply.topology.node(NodeId(node.0)).is_none();
    if let Some(node) = policy.nodes.as_ref().and_then(|nodes| nodes.iter().find(unknown)) {
        let nodes: CpuSet = supply.topology.nodes().iter().map(|node| CpuId(node.node.0)).collect();
        return never(
            format!("node {node} does not exist; this host has {}", or_none(&nodes)),
            "correct the nodes attribute",
        );
    }
    if let Some(cpus) = &policy.cpus {
        if cpus.len() != dedicated {
            return invalid(format!(
                "cpus=\"{cpus}\" names {}, but {} need one each",
                counted(cpus.len() as u64, "CPU"),
                vcpus()
            ));
        }
        named_cpus(supply, request, cpus)?;
    }
    let mut others =
        vec![("emulator and I/O threads", policy.emulator), ("emulator and I/O threads", policy.iothreads)];
    if dedicated < usize::from(request.vcpus) {
        others.push(("vCPUs that are not dedicated", OtherThreads::Housekeeping));
    }
    let homeless = others.into_iter().find(|(_, place)| *place == OtherThreads::Housekeeping);
    if let Some((who, _)) = homeless.filter(|_| supply.housekeeping.is_empty()) {
        return never(
            format!("{who} need a housekeeping CPU, but every online CPU is pinnable or leased"),
            "take a core out of pinnable_cpus, or set emulator and iothreads to \"isolate\" or \"share\"",
        );
    }
    Ok(())
}

/// Whether the CPUs that the policy names can ever be had.
fn named_cpus(supply: &Supply<'_>, request: &Request, cpus: &CpuSet) -> Result<(), Refusal> {
    let topology = supply.topology;
    let offline = cpus.difference(topology.online());
    let barred = cpus.intersection(topology.online()).difference(supply.pinnable);
    let siblings = |cpu: &CpuId| topology.siblings(*cpu);
    let whole = request.policy.cores == Cores::Whole;
    let unknown: CpuSet = cpus.iter().filter(|cpu| whole && siblings(cpu).is_none()).collect();
    let cores = cpus.iter().filter(|_| whole).filter_map(|cpu| topology.siblings(cpu));
    let held = cores.fold(cpus.clone(), |all, core| all.union(core)).difference(supply.pinnable);
    let is_wanted = is_wanted(topology, request);
    let unwanted: CpuSet = cpus.iter().filter(|&cpu| !topology.cpu(cpu).is_some_and(&is_wanted)).collect();
    let wrong = [
        (offline, "are offline or absent", "bring them online, or correct the cpus attribute"),
        (barred, "are not pinnable", "correct the cpus attribute, or add them to pinnable_cpus"),
        (unknown, "are of unknown cores, so not whole ones", "set cores=\"thread\", or choose other CPUs"),
        (held, "are their siblings and not pinnable", "add the siblings to pinnable_cpus, or set cores=\"thread\""),
        (unwanted, "are not on the nodes or not of the core class asked for", "let cpus, nodes and core-class agree"),
    ];
    if let Some((which, what, hint)) = wrong.into_iter().find(|(which, ..)| !which.is_empty()) {
        return Err(Refusal {
            hint: Some(hint.to_owned()),
            ..Refusal::new(Code::Unsatisfiable, format!("cpus=\"{cpus}\": CPUs {which} {what}"))
        });
    }
    if let ThreadsPerCore::Exactly(count) = request.policy.threads_per_core {
        let mut cores = cpus.iter().filter_map(|cpu| siblings(&cpu)).map(|core| core.intersection(cpus));
        if let Some(odd) = cores.find(|named| named.len() != usize::from(count.get())) {
            let reason = format!("cpus=\"{cpus}\" names CPUs {odd} of one core, but threads-per-core=\"{count}\"");
            return Err(Refusal::new(Code::PolicyInvalid, reason));
        }
    }
    Ok(())
}

/// Whether a CPU is on the nodes and of the core class asked for. What is unknown is no match; where nothing is told apart,
/// everything is.
fn is_wanted<'a>(topology: &Topology, request: &'a Request) -> impl Fn(&Cpu) -> bool + 'a {
    let policy = &request.policy;
    let (numa, hybrid) = (!topology.nodes().is_empty(), topology.is_hybrid());
    let must_know = numa && (matches!(policy.numa, Span::Single | Span::Spread) || has_cells(request));
    move |cpu| {
        let named = policy.nodes.as_ref();
        let node = named.is_none_or(|nodes| cpu.node.is_some_and(|node| nodes.contains(CpuId(node.0))));
        let class = policy.core_class.is_none_or(|class| !hybrid || cpu.class == Some(class));
        node && class && !(must_know && cpu.node.is_none())
    }
}

/// Step 1.
pub(super) fn pieces(supply: &Supply<'_>, request: &Request) -> Vec<Piece> {
    let free = supply.handed_out().difference(supply.taken);
    let named = request.policy.cpus.as_ref();
    let is_wanted = is_wanted(supply.topology, request);
    let piece = |cpu: &Cpu, cpus: Vec<CpuId>, vcpus, lone| Piece {
        cpus,
        vcpus,
        core: cpu.core,
        node: cpu.node,
        llc: cpu.llc,
        class: cpu.class,
        lone,
    };
    let cpus = free.iter().filter_map(|cpu| supply.topology.cpu(cpu));
    let cpus = cpus.filter(|cpu| is_wanted(cpu) && can_emulate(supply, request, cpu.class));
    match request.policy.cores {
        Cores::Thread => cpus
            .map(|cpu| {
                let siblings = supply.topology.siblings(cpu.cpu);
                let lone = siblings.is_none_or(|core| !core.is_subset(&free));
                let vcpus = u16::from(named.is_none_or(|named| named.contains(cpu.cpu)));
                piece(cpu, vec![cpu.cpu], vcpus, lone)
            })
            .collect(),
        Cores::Whole => cpus
            .filter_map(|cpu| {
                let core = supply.topology.siblings(cpu.cpu)?;
                // One piece per core: at its first thread.
                let whole = core.first() == Some(cpu.cpu) && core.is_subset(&free);
                let named = named.map_or_else(|| core.clone(), |named| core.intersection(named));
                let threads = u16::try_from(named.len()).ok().filter(|_| whole)?;
                let vcpus = match request.policy.threads_per_core {
                    ThreadsPerCore::Auto => threads,
                    ThreadsPerCore::Exactly(_) if threads == 0 => 0,
                    ThreadsPerCore::Exactly(count) => Some(count.get()).filter(|&count| count <= threads)?,
                };
                // A core of several caches (POWER10) is in none of them as a whole.
                let llc = cpu
                    .llc
                    .filter(|_| core.iter().all(|one| supply.topology.cpu(one).is_some_and(|one| one.llc == cpu.llc)));
                let cpus = named.iter().chain(core.difference(&named).iter()).collect();
                Some(Piece { llc, ..piece(cpu, cpus, vcpus, false) })
            })
            .collect(),
    }
}

/// Whether the emulator finds a place beside vCPUs of this class.
fn can_emulate(supply: &Supply<'_>, request: &Request, class: Option<CoreClass>) -> bool {
    request.policy.emulator != OtherThreads::Housekeeping
        || supply.housekeeping.iter().any(|cpu| fits_class(supply.topology, cpu, class))
}

/// Whether a VM with vCPUs of this class may have its emulator on this CPU.
fn fits_class(topology: &Topology, cpu: CpuId, class: Option<CoreClass>) -> bool {
    !topology.keeps_vms_in_one_class() || topology.cpu(cpu).is_some_and(|cpu| cpu.class == class)
}

/// Free CPUs that a whole-core request cannot take because a sibling is out of reach.
fn withheld(supply: &Supply<'_>, request: &Request) -> CpuSet {
    let free = supply.handed_out().difference(supply.taken);
    let broken = |cpu: &CpuId| !supply.topology.siblings(*cpu).is_some_and(|core| core.is_subset(&free));
    match request.policy.cores {
        Cores::Thread => CpuSet::new(),
        Cores::Whole => free.iter().filter(broken).collect(),
    }
}

/// vCPUs that lie together on one node, unless they are the only group.
pub(super) struct Group {
    /// Their numbers, ascending; those of even shares are given out again when the nodes are known.
    vcpus: Vec<u16>,
    /// The memory of the guest's cell that they are.
    bytes: Option<u64>,
}

/// Step 2.
fn groups(supply: &Supply<'_>, request: &Request) -> Result<Vec<Group>, Refusal> {
    let dedicated: Vec<u16> = request.dedicated().collect();
    if has_cells(request) {
        return cells(supply, request, &dedicated);
    }
    let nodes = nodes_to_use(supply, request).len();
    if request.policy.numa != Span::Spread || nodes < 2 {
        return Ok(vec![Group { vcpus: dedicated, bytes: None }]);
    }
    // Evenly in whole cores; where there are fewer of them than nodes, in vCPUs.
    let nothing = CpuSet::new();
    let all = pieces(&Supply { taken: &nothing, ..*supply }, request);
    let per_core = usize::from(all.iter().map(|piece| piece.vcpus).max().unwrap_or(1).max(1));
    let fixed = request.policy.threads_per_core != ThreadsPerCore::Auto;
    let step = if fixed || dedicated.len().div_ceil(per_core) >= nodes { per_core } else { 1 };
    let steps = dedicated.len().div_ceil(step);
    if steps < nodes {
        let what = counted(dedicated.len() as u64, "vCPU");
        let hint = Some("name fewer nodes in the nodes attribute, or give the domain more vCPUs".to_owned());
        let reason = format!("numa=\"spread\": {what} cannot be spread over {nodes} nodes");
        return Err(Refusal { hint, ..Refusal::new(Code::PolicyInvalid, reason) });
    }
    let mut left = dedicated.as_slice();
    let groups = (0..nodes).map(|node| {
        let share = (steps / nodes + usize::from(node < steps % nodes)) * step;
        let (group, rest) = left.split_at(share.min(left.len()));
        left = rest;
        Group { vcpus: group.to_vec(), bytes: None }
    });
    Ok(groups.collect())
}

/// Whether the guest's own NUMA cells bind its vCPUs: a single one promises nothing.
fn has_cells(request: &Request) -> bool {
    request.cells.len() > 1 && request.policy.numa != Span::Any
}

/// One group per guest cell that has vCPUs to place.
fn cells(supply: &Supply<'_>, request: &Request, dedicated: &[u16]) -> Result<Vec<Group>, Refusal> {
    let groups = request.cells.iter().map(|cell| Group {
        vcpus: dedicated.iter().copied().filter(|&vcpu| cell.vcpus.contains(CpuId(vcpu))).collect(),
        bytes: Some(cell.bytes),
    });
    let groups: Vec<_> = groups.filter(|group| !group.vcpus.is_empty()).collect();
    let seated: usize = groups.iter().map(|group| group.vcpus.len()).sum();
    if seated != dedicated.len() {
        return Err(Refusal::new(Code::PolicyInvalid, "the guest's NUMA cells do not hold each vCPU once"));
    }
    if let ThreadsPerCore::Exactly(count) = request.policy.threads_per_core {
        if let Some(odd) = groups.iter().find(|group| group.vcpus.len() % usize::from(count.get()) != 0) {
            let vcpus = counted(odd.vcpus.len() as u64, "vCPU");
            let reason = format!("a guest NUMA cell has {vcpus}, not a multiple of threads-per-core=\"{count}\"");
            return Err(Refusal::new(Code::PolicyInvalid, reason));
        }
    }
    let nodes = nodes_to_use(supply, request).len();
    if request.policy.numa == Span::Spread && groups.len() > nodes {
        let cells = counted(groups.len() as u64, "guest NUMA cell");
        let reason = format!("numa=\"spread\" puts {cells} on a node each, but there are {nodes} nodes to use");
        return Err(Refusal::new(Code::Unsatisfiable, reason));
    }
    Ok(groups)
}

/// The nodes over which numa="spread" spreads: those named, or all that have CPUs to hand out.
fn nodes_to_use(supply: &Supply<'_>, request: &Request) -> BTreeSet<NodeId> {
    match &request.policy.nodes {
        Some(nodes) => nodes.iter().map(|node| NodeId(node.0)).collect(),
        None => supply.handed_out().iter().filter_map(|cpu| supply.topology.cpu(cpu)?.node).collect(),
    }
}

fn demand<'a>(topology: &Topology, request: &Request, groups: &'a [u32], far: Option<Far<'a>>) -> Demand<'a> {
    let emulator = request.policy.emulator == OtherThreads::Isolate;
    let iothreads = request.policy.iothreads == OtherThreads::Isolate && request.iothreads > 0;
    // Over one node there is nothing to spread.
    let alone = groups.len() == 1 && request.policy.numa == Span::Spread;
    Demand {
        vcpus: groups.iter().sum(),
        groups,
        extra: usize::from(emulator) + usize::from(iothreads),
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

/// Whether the guest's memory has room when each group lies on these nodes; a single set is for all groups together.
fn has_room(topology: &Topology, request: &Request, groups: &[Group], nodes: &[BTreeSet<NodeId>]) -> bool {
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
            let memory = request.memory.map(|memory| GuestMemory { bytes, ..memory });
            lacking(topology, &Request { memory, ..Request::new(1, request.policy.clone()) }, here).is_none()
        })
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
    let GuestMemory { bytes, pages } = request.memory.filter(|_| request.policy.memory == Memory::Follow)?;
    let from = memory_nodes(topology, nodes);
    let elsewhere = |node: &Node| !from.contains(&node.node) && node.memory_bytes != Some(0);
    let free = match pages {
        // Bound to all the memory there is, the guest has no less room than without a policy.
        Pages::Ordinary if !topology.nodes().iter().any(elsewhere) => return None,
        Pages::Ordinary => from.iter().map(|&id| topology.node(id)?.available_bytes).sum::<Option<u64>>()?,
        Pages::Huge(kib) => from
            .iter()
            .filter_map(|&id| topology.node(id)?.huge_pages.iter().find(|pages| pages.size_kib == kib))
            .map(|pages| pages.free.saturating_mul(kib).saturating_mul(1024))
            .fold(0, u64::saturating_add),
        Pages::HugeDefault => return None,
    };
    (free < bytes).then_some((bytes, free))
}

fn or_none(set: &CpuSet) -> String {
    if set.is_empty() { "none".to_owned() } else { set.to_string() }
}

fn node_list(nodes: &BTreeSet<NodeId>) -> CpuSet {
    nodes.iter().map(|node| CpuId(node.0)).collect()
}
