//! Why a request got no plan, told apart into classes: steps on the way back from [`super::place`].
//!
//! Places the same request again under better conditions (more memory, no leases, no bounds on nodes and caches) and sees
//! which of them helps. Never changes an answer, only explains a refusal.

use std::collections::BTreeSet;

use super::Supply;
use super::choose::{self, Demand, Piece};
use super::groups::Group;
use super::measure::{Measure, small};
use super::memory::{has_room, is_where_bound, lacking, matters, memory_nodes};
use super::pieces::pieces;
use super::place::by_class;
use super::policy::{Cores, Span, ThreadsPerCore};
use super::refusal::Refusal;
use super::request::{Pages, Request};
use crate::cpuset::{CpuId, CpuSet, NodeId};
use crate::error::{Amount, Code, Room, counted};
use crate::host::{CoreClass, Topology};

/// Which class of refusal: places the request again under better conditions and sees which of them helps.
pub(super) fn refuse(
    supply: &Supply<'_>,
    request: &Request,
    groups: &[Group],
    free: &[Piece],
    demand: &Demand<'_>,
) -> Refusal {
    let nothing = CpuSet::new();
    let all = pieces(&Supply { taken: &nothing, ..*supply }, request);
    if let (true, ThreadsPerCore::Exactly(threads)) = (all.is_empty(), request.policy.threads_per_core) {
        let found = format!(
            "needs cores of {}, and this host has no such whole core that is pinnable",
            counted(threads.get(), "thread")
        );
        let hint =
            Some("set threads-per-core to what `virt-pin topology` shows of this host, or leave it out".to_owned());
        return Refusal { hint, ..Refusal::new(Code::Unsatisfiable, found) };
    }
    // Not even with every lease gone, and nobody else's memory in use.
    let idle = supply.topology.idle();
    let room = |nodes: &[BTreeSet<NodeId>]| has_room(&idle, request, groups, nodes);
    let room = matters(request, groups).then_some(&room as choose::Room<'_>);
    let never = by_class(&all, request, demand, room).is_none();
    // But for the amount of memory: where it is bound already, there it is.
    let bound = |nodes: &[BTreeSet<NodeId>]| is_where_bound(groups, nodes);
    let bound = groups.iter().any(|group| group.bound.is_some()).then_some(&bound as choose::Room<'_>);
    let enough_cpus = |pieces| by_class(pieces, request, demand, bound);
    if let Some(choice) = if never { enough_cpus(&all) } else { enough_cpus(free) } {
        // Without the memory's claim it fits: then memory is what is missing.
        return memory_shortage(supply.topology, request, &choice.nodes(), never.then_some(&idle));
    }
    if let Some(refusal) = if never { named_apart(request) } else { named_and_taken(supply, request) } {
        return refusal;
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
    if never {
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

/// Too little memory where the CPUs would be: `nodes`. With `idle`, the host as if nobody used any, there never is enough.
fn memory_shortage(host: &Topology, request: &Request, nodes: &BTreeSet<NodeId>, idle: Option<&Topology>) -> Refusal {
    let nodes = memory_nodes(host, nodes);
    let bytes = request.memory.map_or(0, |memory| memory.bytes);
    let what = match request.memory.map(|memory| memory.pages) {
        Some(Pages::Huge(kib)) => format!("{} MiB of huge pages of {kib} KiB", bytes >> 20),
        _ => format!("{} MiB of memory", bytes >> 20),
    };
    let list: CpuSet = nodes.iter().map(|node| CpuId(node.0)).collect();
    let found = format!("needs {what} on the nodes of its CPUs ({list})");
    let lie = "but not as its vCPUs and NUMA cells can lie";
    let Some(idle) = idle else {
        let free = match lacking(host, request, &nodes) {
            Some((_, free)) => format!("{} MiB are free there", free >> 20),
            None => format!("so much is free there, {lie}"),
        };
        return Refusal {
            retry_when: Some(format!("when {what} are free on the nodes of its CPUs ({list})")),
            ..Refusal::new(Code::MemoryShortage, format!("{found}, {free}"))
        };
    };
    let named = request.policy.nodes.as_ref();
    let allowed = idle.nodes().iter().map(|node| node.node);
    let allowed = allowed.filter(|node| named.is_none_or(|named| named.contains(CpuId(node.0))));
    let has = |nodes: BTreeSet<NodeId>| lacking(idle, request, &nodes).map(|(_, free)| free >> 20);
    let sentence = if request.policy.numa == Span::Single {
        let most = allowed.filter_map(|node| has(BTreeSet::from([node]))).max();
        most.map(|most| format!("no node has more than {most} MiB"))
    } else {
        has(allowed.collect()).map(|total| format!("all there is is {total} MiB"))
    };
    let sentence = sentence.unwrap_or_else(|| format!("there is so much, {lie}"));
    let hint =
        Some("give the guest less memory, reserve more huge pages if it has those, or set memory=\"any\"".to_owned());
    Refusal { hint, ..Refusal::new(Code::Unsatisfiable, format!("{found}; {sentence}")) }
}

/// Where the policy names CPUs that cannot be had as it wants them to lie.
fn named_apart(request: &Request) -> Option<Refusal> {
    let named = request.policy.cpus.as_ref()?;
    let reason = format!("cpus=\"{named}\" do not lie as numa, cache and the other attributes want them to");
    let hint = Some("let cpus, numa, cache and isolated threads agree, or leave cpus out".to_owned());
    Some(Refusal { hint, ..Refusal::new(Code::Unsatisfiable, reason) })
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
    let bound: CpuSet = request.cells.iter().filter_map(|cell| cell.bound).map(|node| CpuId(node.0)).collect();
    let nodes = Some(&bound).filter(|bound| !bound.is_empty()).or(policy.nodes.as_ref());
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
    let all = if whole { supply.topology.with_siblings(named) } else { named.clone() };
    let held = all.intersection(supply.taken);
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
