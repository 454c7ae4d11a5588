//! Why a request got no plan, told apart into classes: steps on the way back from [`super::place`].
//!
//! Places the same request again under better conditions (more memory, no leases, no bounds on nodes and caches) and sees
//! which of them helps. Never changes an answer, only explains a refusal.

use std::collections::BTreeMap;

use super::Supply;
use super::choose::{self, Demand, Piece};
use super::memory::{lacking, memory_nodes};
use super::pieces::pieces;
use super::place::by_class;
use super::policy::{Cores, Span, ThreadsPerCore};
use super::refusal::Refusal;
use super::request::Request;
use crate::cpuset::{CpuId, CpuSet, NodeId};
use crate::error::{self, Code, counted};

/// Which class of refusal: places the request again under better conditions and sees which of them helps.
pub(super) fn refuse(supply: &Supply<'_>, request: &Request, free: &[Piece], demand: &Demand) -> Refusal {
    // Without the memory's claim it fits: then memory is what is missing.
    let without_memory = by_class(free, request, demand, None);
    let nodes = without_memory.map(|choice| memory_nodes(supply.topology, &choice.nodes())).unwrap_or_default();
    if let Some((bytes, available)) = lacking(supply.topology, request, &nodes).filter(|_| !nodes.is_empty()) {
        let nodes: CpuSet = nodes.iter().map(|node| CpuId(node.0)).collect();
        let found = format!("needs {} MiB of memory on the nodes of its CPUs ({nodes})", bytes >> 20);
        // Even if nothing else used memory: waiting does not help.
        let total = request.policy.nodes.as_ref().map_or_else(
            || supply.topology.nodes().iter().map(|node| node.memory_bytes).sum::<Option<u64>>(),
            |nodes| nodes.iter().map(|id| supply.topology.node(NodeId(id.0))?.memory_bytes).sum(),
        );
        if total.is_some_and(|total| total < bytes) {
            return Refusal::new(
                Code::Unsatisfiable,
                format!("{found}; all there is is {} MiB", total.unwrap_or(0) >> 20),
            );
        }
        return Refusal::new(Code::MemoryShortage, format!("{found}, {} MiB are free there", available >> 20));
    }
    if let Some(refusal) = named_and_taken(supply, request) {
        return refusal;
    }
    let nothing = CpuSet::new();
    let all = pieces(&Supply { taken: &nothing, ..*supply }, request);
    let unit = unit(request);
    let per_piece = all.iter().map(|piece| u32::from(piece.vcpus)).max().unwrap_or(1).max(1);
    let needed = demand.groups.iter().map(|group| group.div_ceil(per_piece)).sum::<u32>()
        + u32::try_from(demand.extra).unwrap_or(u32::MAX);
    let one = match (request.policy.cache, request.policy.numa) {
        (Span::Single, _) => " in one last-level cache",
        (_, Span::Single) => " on one node",
        _ => "",
    };
    let (available, total) = (most_in_one(free, request), most_in_one(&all, request));
    let others =
        if demand.extra > 0 { format!(", {} for emulator or I/O threads", demand.extra) } else { String::new() };
    let vcpus = match request.policy.cores {
        Cores::Whole => format!("{}, {per_piece} on each", counted(request.vcpus, "vCPU")),
        Cores::Thread => counted(request.vcpus, "vCPU"),
    };
    let refusal = |code, found: String, free| Refusal {
        room: Some(error::Room { needed, free, unit }),
        ..Refusal::new(code, format!("needs {}{one} ({vcpus}{others}), {found}", counted(needed, unit)))
    };
    if let (true, ThreadsPerCore::Exactly(threads)) = (all.is_empty(), request.policy.threads_per_core) {
        let found = format!(
            "needs cores of {}, and this host has no such whole core that is pinnable",
            counted(threads.get(), "thread")
        );
        return Refusal::new(Code::Unsatisfiable, found);
    }
    // Not even with every lease gone.
    if by_class(&all, request, demand, None).is_none() {
        return refusal(Code::Unsatisfiable, format!("this host has {total} of them pinnable"), total);
    }
    // Scattered: over nodes or caches, or as lone threads of cores that leases have broken.
    let per_core = all.iter().map(|piece| piece.cpus.len()).max().unwrap_or(1);
    let threads = all.iter().flat_map(|piece| &piece.cpus).filter(|&&cpu| !supply.taken.contains(cpu)).count();
    let anywhere = Demand { numa: Span::Any, cache: Span::Any, ..*demand };
    if choose::enough(free, &anywhere) || threads >= per_core * usize::try_from(needed).unwrap_or(usize::MAX) {
        let (free, threads) = (counted(free.len() as u64, unit), counted(threads as u64, "thread"));
        let found = format!("{available} of them free; {free} and {threads} are free in all, but scattered");
        return refusal(Code::NeedsRepack, found, available);
    }
    refusal(Code::Shortage, format!("{available} of the {total} pinnable are free"), available)
}

/// Where the policy names the CPUs, others of the host are no help.
fn named_and_taken(supply: &Supply<'_>, request: &Request) -> Option<Refusal> {
    let named = request.policy.cpus.as_ref()?;
    let whole = request.policy.cores == Cores::Whole;
    let cores = named.iter().filter(|_| whole).filter_map(|cpu| supply.topology.siblings(cpu));
    let held = cores.fold(named.clone(), |all, core| all.union(core)).intersection(supply.taken);
    let of = if whole { "of their cores " } else { "" };
    let (needed, free) = (named.len(), named.difference(supply.taken).len());
    (!held.is_empty()).then(|| Refusal {
        hint: Some("stop the VM that holds them, or name other CPUs".to_owned()),
        room: Some(error::Room {
            needed: u32::try_from(needed).unwrap_or(u32::MAX),
            free: u32::try_from(free).unwrap_or(u32::MAX),
            unit: "thread",
        }),
        ..Refusal::new(Code::Shortage, format!("needs exactly CPUs {named}, but CPUs {held} {of}are not free"))
    })
}

/// How many of the pieces lie in the one domain that the request has to fit in; all of them where it may spread.
fn most_in_one(pieces: &[Piece], request: &Request) -> u32 {
    let domain = |piece: &Piece| match (request.policy.cache, request.policy.numa) {
        (Span::Single, _) => piece.llc.map(|llc| llc.0),
        (_, Span::Single) => piece.node.map(|node| node.0),
        _ => None,
    };
    let mut counts: BTreeMap<Option<u16>, u32> = BTreeMap::new();
    pieces.iter().for_each(|piece| *counts.entry(domain(piece)).or_default() += 1);
    counts.into_values().max().unwrap_or(0)
}

pub(super) fn unit(request: &Request) -> &'static str {
    match request.policy.cores {
        Cores::Whole => "whole core",
        Cores::Thread => "thread",
    }
}
