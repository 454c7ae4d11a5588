//! How a request gets its CPUs.
//!
//! 1. *Pieces.* What can be taken: whole free cores (every online thread pinnable and free), or single free threads,
//!    on the nodes and of the core class asked for. A core of unknown siblings is no whole core.
//! 2. *Demand.* vCPUs up to the maximum count; an extra piece each for isolated emulator and I/O threads.
//! 3. *One class.* On hybrid machines cores of one class are tried first; mixed ones only when no class alone is enough.
//! 4. *Nodes.* As few as the policy allows; every set of that many nodes that is enough.
//! 5. *Last-level caches.* The same within each such set.
//! 6. *Pick.* Lone threads first, then pieces of the domains with the least left.
//! 7. *Score.* Nodes, caches, then the damage to the largest requests still to come; ties by CPU number.
//! 8. *Order.* vCPUs in the order node, cache, core, thread, so that the guest's siblings are siblings of the host.
//!
//! Step 4 also asks for room for the guest's memory. Steps 4 to 7 are in [`super::choose`]. When nothing is found,
//! [`super::diagnose`] tells the classes of refusal apart by placing the same request under better conditions.

use std::collections::BTreeSet;

use super::choose::{self, Choice, Demand, Piece, Room};
use super::diagnose::{refuse, unit};
use super::plan::{GuestTopology, Plan};
use super::policy::{Cores, GuestView, Memory, OtherThreads, Span, ThreadsPerCore};
use super::refusal::Refusal;
use super::request::{GuestMemory, Pages, Request};
use super::{Steps, Supply};
use crate::cpuset::{CpuId, CpuSet, NodeId};
use crate::error::{Code, counted};
use crate::host::{Cpu, Topology};

/// The plan for a request, or why not.
///
/// # Errors
/// A [`Refusal`]; see [`super::plan()`].
pub(super) fn place(supply: &Supply<'_>, request: &Request, steps: Steps<'_>) -> Result<Plan, Refusal> {
    impossible(supply, request)?;
    // Steps 1 and 2.
    let pieces = pieces(supply, request);
    let demand = demand(request);
    steps(format_args!("pinnable and online: {}", or_none(&supply.handed_out())));
    steps(format_args!("held by leases: {}", or_none(&supply.taken.intersection(&supply.handed_out()))));
    let withheld = withheld(supply, request);
    if !withheld.is_empty() {
        steps(format_args!("withheld, as their core is not whole: {withheld}"));
    }
    let extra = if demand.extra > 0 { format!(" and {} extra", demand.extra) } else { String::new() };
    let free = counted(pieces.len() as u64, unit(request));
    steps(format_args!("needed: {}{extra}; free: {free}", counted(demand.vcpus, "vCPU")));
    let room = |nodes: &BTreeSet<NodeId>| lacking(supply.topology, request, nodes).is_none();
    let room = request.memory.is_some().then_some(&room as Room<'_>);
    let Some(choice) = by_class(&pieces, request, &demand, room) else {
        let refusal = refuse(supply, request, &pieces, &demand);
        steps(format_args!("refused: {}: {}", refusal.code, refusal.reason));
        return Err(refusal);
    };
    let plan = order(supply, request, &choice);
    steps(format_args!(
        "chosen: fewest nodes, then fewest last-level caches, then the rest most useful to others: vCPUs {}",
        plan.vcpus.iter().flatten().map(ToString::to_string).collect::<Vec<_>>().join(",")
    ));
    Ok(plan)
}

/// Requests that no state of this host could honour, told before any search.
fn impossible(supply: &Supply<'_>, request: &Request) -> Result<(), Refusal> {
    let never = |reason: String, hint: &str| {
        let hint = Some(hint.to_owned());
        Err(Refusal { hint, ..Refusal::new(Code::Unsatisfiable, reason) })
    };
    let policy = &request.policy;
    if request.vcpus == 0 {
        return Err(Refusal::new(Code::PolicyInvalid, "the domain has no vCPU"));
    }
    if supply.handed_out().is_empty() {
        return never(
            "no CPU of this host may be handed out: pinnable_cpus is empty or names no CPU that is online".to_owned(),
            "set pinnable_cpus in /etc/virt-pin/virt-pin.toml",
        );
    }
    if let ThreadsPerCore::Exactly(threads) = policy.threads_per_core {
        if request.vcpus % threads != 0 {
            let reason =
                format!("{} are not a multiple of threads-per-core=\"{threads}\"", counted(request.vcpus, "vCPU"));
            return Err(Refusal::new(Code::PolicyInvalid, reason));
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
    let others = [policy.emulator, policy.iothreads];
    if others.contains(&OtherThreads::Housekeeping) && supply.housekeeping.is_empty() {
        return never(
            "emulator and I/O threads need a housekeeping CPU, but every online CPU is pinnable or leased".to_owned(),
            "take a core out of pinnable_cpus, or set emulator and iothreads to \"isolate\" or \"share\"",
        );
    }
    Ok(())
}

/// Step 1.
pub(super) fn pieces(supply: &Supply<'_>, request: &Request) -> Vec<Piece> {
    let free = supply.handed_out().difference(supply.taken);
    let piece = |cpu: &Cpu, cpus: Vec<CpuId>, vcpus, lone| Piece {
        cpus,
        vcpus,
        core: cpu.core,
        node: cpu.node,
        llc: cpu.llc,
        class: cpu.class,
        lone,
    };
    let hybrid = supply.topology.cpus().iter().any(|cpu| cpu.class.is_some());
    let numa = !supply.topology.nodes().is_empty();
    let wanted = |cpu: &&Cpu| {
        let policy = &request.policy;
        // What is unknown is no match; where nothing is told apart, everything is.
        if numa && policy.numa == Span::Single && cpu.node.is_none() {
            return false;
        }
        let node = policy.nodes.as_ref().is_none_or(|nodes| cpu.node.is_some_and(|node| nodes.contains(CpuId(node.0))));
        node && policy.core_class.is_none_or(|class| !hybrid || cpu.class == Some(class))
    };
    let cpus = free.iter().filter_map(|cpu| supply.topology.cpu(cpu)).filter(wanted);
    match request.policy.cores {
        Cores::Thread => cpus
            .map(|cpu| {
                let siblings = supply.topology.siblings(cpu.cpu);
                let lone = siblings.is_none_or(|core| !core.is_subset(&free));
                piece(cpu, vec![cpu.cpu], 1, lone)
            })
            .collect(),
        Cores::Whole => cpus
            .filter_map(|cpu| {
                let core = supply.topology.siblings(cpu.cpu)?;
                // One piece per core: at its first thread.
                let whole = core.first() == Some(cpu.cpu) && core.is_subset(&free);
                let threads = u16::try_from(core.len()).ok().filter(|_| whole)?;
                let vcpus = match request.policy.threads_per_core {
                    ThreadsPerCore::Auto => threads,
                    ThreadsPerCore::Exactly(count) => Some(count.get()).filter(|&count| count <= threads)?,
                };
                // A core of several caches (POWER10) is in none of them as a whole.
                let llc = cpu
                    .llc
                    .filter(|_| core.iter().all(|one| supply.topology.cpu(one).is_some_and(|one| one.llc == cpu.llc)));
                Some(Piece { llc, ..piece(cpu, core.iter().collect(), vcpus, false) })
            })
            .collect(),
    }
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

/// Step 2.
fn demand(request: &Request) -> Demand {
    let emulator = request.policy.emulator == OtherThreads::Isolate;
    let iothreads = request.policy.iothreads == OtherThreads::Isolate && request.iothreads > 0;
    Demand {
        vcpus: u32::from(request.vcpus),
        extra: usize::from(emulator) + usize::from(iothreads),
        numa: request.policy.numa,
        cache: request.policy.cache,
    }
}

/// Step 3.
pub(super) fn by_class<'a>(
    pieces: &'a [Piece],
    request: &Request,
    demand: &Demand,
    room: Option<Room<'_>>,
) -> Option<Choice<'a>> {
    // The unknown class last.
    let classes: BTreeSet<_> = pieces.iter().map(|piece| (piece.class.is_none(), piece.class)).collect();
    let all: Vec<_> = pieces.iter().collect();
    if classes.len() > 1 && request.policy.core_class.is_none() {
        let alone = classes.iter().find_map(|&(_, class)| {
            let pieces: Vec<_> = all.iter().copied().filter(|piece| piece.class == class).collect();
            choose::choose(&pieces, demand, room)
        });
        if alone.is_some() {
            return alone;
        }
    }
    choose::choose(&all, demand, room)
}

/// Step 8.
fn order(supply: &Supply<'_>, request: &Request, choice: &Choice<'_>) -> Plan {
    let mut pieces = choice.vcpus.clone();
    pieces.sort_by_key(|piece| (piece.node, piece.llc, piece.core, piece.cpus.first().copied()));
    let mut missing = usize::from(request.vcpus);
    let mut vcpus = Vec::new();
    let mut counts: Vec<usize> = Vec::new();
    let mut core = None;
    for piece in pieces {
        // The last core may have threads to spare.
        let count = usize::from(piece.vcpus).min(missing);
        missing -= count;
        vcpus.extend(piece.cpus.iter().take(count));
        // Single threads of one core make one guest core.
        match counts.last_mut().filter(|_| piece.core.is_some() && piece.core == core) {
            Some(last) => *last += count,
            None => counts.push(count),
        }
        core = piece.core;
    }
    let all = |pieces: &[&Piece]| pieces.iter().flat_map(|piece| piece.cpus.iter().copied()).collect::<CpuSet>();
    let vcpu_cpus: CpuSet = vcpus.iter().copied().collect();
    let mut extra = choice.extra.iter();
    let mut seat = |others, isolated: &CpuSet| match others {
        OtherThreads::Housekeeping => supply.housekeeping.clone(),
        OtherThreads::Share => vcpu_cpus.clone(),
        OtherThreads::Isolate => extra.next().map_or_else(|| isolated.clone(), |piece| all(&[*piece])),
    };
    let emulator = seat(request.policy.emulator, &CpuSet::new());
    let iothreads = seat(request.policy.iothreads, &emulator);
    let nodes = choice.nodes();
    let memory_nodes = match request.policy.memory {
        Memory::Follow if !nodes.is_empty() => {
            Some(memory_nodes(supply.topology, &nodes)).filter(|nodes| !nodes.is_empty())
        }
        Memory::Follow | Memory::Any => None,
    };
    let guest = match request.policy.topology {
        GuestView::Keep => None,
        GuestView::Host => {
            // Every guest core has the same number of threads: the most that divides what each host core carries.
            let threads = counts.iter().copied().fold(0, gcd).max(1);
            let threads = u16::try_from(threads).unwrap_or(1);
            Some(GuestTopology { sockets: 1, dies: 1, cores: request.vcpus / threads, threads })
        }
    };
    let parked = all(&choice.vcpus).difference(&vcpu_cpus);
    let whole = request.policy.cores == Cores::Whole;
    let vcpus = vcpus.into_iter().map(Some).collect();
    let (shared, extra, cells) = (CpuSet::new(), all(&choice.extra), Vec::new());
    Plan { vcpus, shared, whole, parked, extra, emulator, iothreads, nodes, memory_nodes, guest, cells }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
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
    let elsewhere = |node: &crate::host::Node| !from.contains(&node.node) && node.memory_bytes != Some(0);
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
