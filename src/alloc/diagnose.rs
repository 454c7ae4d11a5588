//! Why a request got no plan, told apart into classes: steps on the way back from [`super::place`].
//!
//! Places the same request again under better conditions (more memory, no leases, no bounds on nodes and caches) and sees
//! which of them helps. Never changes an answer, only explains a refusal.

use super::Supply;
use super::choose::{self, Demand, Piece};
use super::measure::{Measure, small};
use super::memory::{lacking, memory_nodes};
use super::pieces::pieces;
use super::place::by_class;
use super::policy::{Cores, Span, ThreadsPerCore};
use super::refusal::Refusal;
use super::request::{Pages, Request};
use crate::cpuset::{CpuId, CpuSet, NodeId};
use crate::error::{Amount, Code, Room, counted};
use crate::host::CoreClass;

/// Which class of refusal: places the request again under better conditions and sees which of them helps.
pub(super) fn refuse(supply: &Supply<'_>, request: &Request, free: &[Piece], demand: &Demand) -> Refusal {
    // Without the memory's claim it fits: then memory is what is missing.
    let without_memory = by_class(free, request, demand, None);
    let nodes = without_memory.map(|choice| memory_nodes(supply.topology, &choice.nodes())).unwrap_or_default();
    if let Some((bytes, available)) = lacking(supply.topology, request, &nodes).filter(|_| !nodes.is_empty()) {
        let nodes: CpuSet = nodes.iter().map(|node| CpuId(node.0)).collect();
        // Memory may be plenty while huge pages are not.
        let what = match request.memory.map(|memory| memory.pages) {
            Some(Pages::Huge(kib)) => format!("huge pages of {kib} KiB"),
            _ => "memory".to_owned(),
        };
        let found = format!("needs {} MiB of {what} on the nodes of its CPUs ({nodes})", bytes >> 20);
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
        return Refusal {
            retry_when: Some(format!("when {} MiB of {what} are free on the nodes of its CPUs ({nodes})", bytes >> 20)),
            ..Refusal::new(Code::MemoryShortage, format!("{found}, {} MiB are free there", available >> 20))
        };
    }
    if let Some(refusal) = named_and_taken(supply, request) {
        return refusal;
    }
    let nothing = CpuSet::new();
    let all = pieces(&Supply { taken: &nothing, ..*supply }, request);
    if let (true, ThreadsPerCore::Exactly(threads)) = (all.is_empty(), request.policy.threads_per_core) {
        let found = format!(
            "needs cores of {}, and this host has no such whole core that is pinnable",
            counted(threads.get(), "thread")
        );
        return Refusal::new(Code::Unsatisfiable, found);
    }
    let measure = Measure { supply, request, free, all: &all };
    let (available, pinnable) = measure.in_one();
    let per_piece = all.iter().map(|piece| u32::from(piece.vcpus)).max().unwrap_or(1).max(1);
    let needed = demand.groups.iter().map(|group| group.div_ceil(per_piece)).sum::<u32>() + small(demand.extra);
    let wanted = wanted(request, demand, needed);
    let refusal = |code, found: String| {
        let never = code == Code::Unsatisfiable;
        let are = if needed == 1 { "is" } else { "are" };
        let taken = if never { &nothing } else { supply.taken };
        let room = Room {
            unit: unit(request),
            needed: measure.pieces(needed),
            free: available,
            pinnable,
            nodes: measure.nodes(),
            llcs: measure.llcs(),
            withheld: measure.withheld(taken),
            moves: Vec::new(),
        };
        Refusal {
            retry_when: (!never).then(|| format!("when {} {are} free{}", wanted.what, wanted.place)),
            room: Some(Box::new(room)),
            ..Refusal::new(code, format!("needs {}{} ({}), {found}", wanted.what, wanted.place, wanted.whom(per_piece)))
        }
    };
    let (free_in_one, total) = (available.count(), pinnable.count());
    // Not even with every lease gone.
    if by_class(&all, request, demand, None).is_none() {
        let unknown = measure.withheld(&nothing).into_iter().find(|some| some.why == "cache-unknown");
        let unknown = unknown.map(|some| format!("; the last-level cache of CPUs {} is not known", some.cpus));
        let found = format!("this host has {total} of them pinnable{}", unknown.unwrap_or_default());
        return refusal(Code::Unsatisfiable, found);
    }
    // Scattered: over nodes or caches, or as lone threads of cores that leases have broken.
    let per_core = all.iter().map(|piece| piece.cpus.len()).max().unwrap_or(1);
    let threads = measure.free_threads();
    let anywhere = Demand { numa: Span::Any, cache: Span::Any, ..*demand };
    if choose::enough(free, &anywhere) || threads >= per_core * usize::try_from(needed).unwrap_or(usize::MAX) {
        let (free, threads) = (counted(free.len() as u64, unit(request)), counted(threads as u64, "thread"));
        let found = format!("{free_in_one} of them free; {free} and {threads} are free in all, but scattered");
        return refusal(Code::NeedsRepack, found);
    }
    refusal(Code::Shortage, format!("{free_in_one} of the {total} pinnable are free"))
}

/// What is asked for, in the words of a sentence.
struct Wanted<'a> {
    request: &'a Request,
    extra: usize,
    /// "4 whole performance cores"
    what: String,
    /// " on one of nodes 0-1"
    place: String,
}

fn wanted<'a>(request: &'a Request, demand: &Demand<'_>, needed: u32) -> Wanted<'a> {
    let policy = &request.policy;
    let class = policy.core_class.map(|class| match class {
        CoreClass::Performance => "performance",
        CoreClass::Efficiency => "efficiency",
    });
    let what = match (policy.cores, class) {
        (Cores::Whole, Some(class)) => counted(needed, &format!("whole {class} core")),
        (Cores::Thread, Some(class)) => format!("{} of {class} cores", counted(needed, "thread")),
        (_, None) => counted(needed, unit(request)),
    };
    let nodes = policy.nodes.as_ref();
    let on = |nodes: &CpuSet| format!(" on {} {nodes}", if nodes.len() == 1 { "node" } else { "nodes" });
    let groups = demand.groups.len();
    let place = match (policy.cache, policy.numa) {
        (Span::Single, _) => format!(" in one last-level cache{}", nodes.map(on).unwrap_or_default()),
        (_, Span::Single) => nodes.map_or_else(
            || " on one node".to_owned(),
            |nodes| if nodes.len() == 1 { on(nodes) } else { format!(" on one of nodes {nodes}") },
        ),
        (_, Span::Spread) if groups > 1 && request.cells.len() < 2 => nodes.map_or_else(
            || format!(" spread evenly over {}", counted(groups as u64, "node")),
            |nodes| format!(" spread evenly over nodes {nodes}"),
        ),
        _ if groups > 1 => format!("{}, each guest NUMA cell on one node", nodes.map(on).unwrap_or_default()),
        _ => nodes.map(on).unwrap_or_default(),
    };
    Wanted { request, extra: demand.extra, what, place }
}

impl Wanted<'_> {
    /// "8 vCPUs, 2 on each, 1 for emulator or I/O threads"
    fn whom(&self, per_piece: u32) -> String {
        let dedicated = self.request.dedicated().count();
        let some = if dedicated < usize::from(self.request.vcpus) { "dedicated vCPU" } else { "vCPU" };
        let vcpus = counted(dedicated as u64, some);
        let each = match self.request.policy.cores {
            Cores::Whole => format!(", {per_piece} on each"),
            Cores::Thread => String::new(),
        };
        let extra =
            if self.extra > 0 { format!(", {} for emulator or I/O threads", self.extra) } else { String::new() };
        vcpus + &each + &extra
    }
}

/// Where the policy names the CPUs, others of the host are no help.
fn named_and_taken(supply: &Supply<'_>, request: &Request) -> Option<Refusal> {
    let named = request.policy.cpus.as_ref()?;
    let whole = request.policy.cores == Cores::Whole;
    let cores = named.iter().filter(|_| whole).filter_map(|cpu| supply.topology.siblings(cpu));
    let held = cores.fold(named.clone(), |all, core| all.union(core)).intersection(supply.taken);
    let of = if whole { "of their cores " } else { "" };
    let amount = |threads: usize| Amount { cores: None, threads: small(threads) };
    let room = || Room {
        unit: "thread",
        needed: amount(named.len()),
        free: amount(named.difference(supply.taken).len()),
        pinnable: amount(named.len()),
        nodes: Vec::new(),
        llcs: Vec::new(),
        withheld: Vec::new(),
        moves: Vec::new(),
    };
    (!held.is_empty()).then(|| Refusal {
        hint: Some("stop the VM that holds them, or name other CPUs".to_owned()),
        retry_when: Some(format!("when CPUs {held} are free")),
        room: Some(Box::new(room())),
        ..Refusal::new(Code::Shortage, format!("needs exactly CPUs {named}, but CPUs {held} {of}are not free"))
    })
}

pub(super) fn unit(request: &Request) -> &'static str {
    match request.policy.cores {
        Cores::Whole => "whole core",
        Cores::Thread => "thread",
    }
}
