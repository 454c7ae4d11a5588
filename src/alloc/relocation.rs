//! Where a running guest can go: other CPUs of which it notices nothing. Pure.
//!
//! A guest was told its topology at its start and cannot be told another, so its plan keeps its shape ([`same_guest`]): which
//! vCPUs have CPUs of their own, which of them are siblings, which NUMA cell lies on which node. Its memory stays on its nodes,
//! unless the caller can take it along. When CPUs of a lease have gone, [`mended`] replaces those cores alone and [`anew`]
//! places the whole; a plan is found, or none.

use std::collections::{BTreeMap, BTreeSet};

use super::check::check;
use super::plan::{PlacedCell, Plan};
use super::policy::{Cores, GuestView, Locality, Memory, OtherThreads, Policy, Span, ThreadsPerCore};
use super::refusal::Refusal;
use super::request::Request;
use super::{Supply, attempt, plan};
use crate::cpuset::{CpuId, CpuSet};
use crate::error::Code;
use crate::host::{Cpu, Topology};

/// What becomes of a guest's memory when its CPUs move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryOfMoved {
    /// It stays: memory that is bound to nodes allows no plan on others.
    Stays,
    /// It can be taken along to other nodes.
    Follows,
}

/// Whether a guest that runs by one plan would notice nothing of the other.
///
/// # Errors
/// What it would notice.
pub fn same_guest(topology: &Topology, from: &Plan, to: &Plan, memory: MemoryOfMoved) -> Result<(), &'static str> {
    let owns = |plan: &Plan| plan.vcpus.iter().map(Option::is_some).collect::<Vec<_>>();
    if owns(from) != owns(to) {
        return Err("other vCPUs would have CPUs of their own");
    }
    if from.guest != to.guest {
        return Err("the guest would have to be told another topology");
    }
    let shape = |plan: &Plan| plan.cells.iter().map(|cell| (cell.vcpus.clone(), cell.bytes)).collect::<Vec<_>>();
    if shape(from) != shape(to) {
        return Err("the guest would have to be told other NUMA cells");
    }
    let lies = |cpu: CpuId, node| topology.cpu(cpu).is_some_and(|cpu| cpu.node == Some(node));
    let elsewhere =
        |cell: &PlacedCell| cell.node.is_some_and(|node| !to.own_cpus(&cell.vcpus).all(|cpu| lies(cpu, node)));
    if to.cells.iter().any(elsewhere) {
        return Err("the vCPUs of the guest's NUMA cells would not be on their nodes");
    }
    let bound = from.memory_nodes.is_some() || to.memory_nodes.is_some();
    let cells = |plan: &Plan| plan.cells.iter().map(|cell| cell.node).collect::<Vec<_>>();
    if bound && cells(from) != cells(to) {
        return Err("the memory of the guest's NUMA cells would lie on other nodes than their vCPUs");
    }
    if from.memory_nodes != to.memory_nodes && (memory == MemoryOfMoved::Stays || !from.cells.is_empty()) {
        return Err("the guest's memory would lie on other nodes than its vCPUs");
    }
    if cores(topology, from, from) != cores(topology, to, from) {
        return Err("other vCPUs would be siblings");
    }
    Ok(())
}

/// The core of each vCPU by the order in which cores come up; only of vCPUs whose core is known where they are now.
fn cores(topology: &Topology, plan: &Plan, now: &Plan) -> Vec<Option<usize>> {
    let core =
        |own: Option<CpuId>| own.and_then(|cpu| topology.cpu(cpu)).filter(|cpu| cpu.online).and_then(|cpu| cpu.core);
    let mut seen = BTreeMap::new();
    let known = plan.vcpus.iter().zip(&now.vcpus).filter(|(_, now)| core(**now).is_some());
    known
        .map(|(own, _)| {
            let next = seen.len();
            core(*own).map(|core| *seen.entry(core).or_insert(next))
        })
        .collect()
}

/// The plan with only those cores replaced of which a CPU is offline: by others of the same class, in the same cache if that
/// can be, else on the same node. `supply.taken` is what others have. `None` where that cannot be done.
pub fn mended(supply: &Supply<'_>, request: &Request, plan: &Plan) -> Option<Plan> {
    let online = supply.topology.online();
    if !plan.extra.is_subset(online) || request.policy.cpus.is_some() {
        return None;
    }
    let (broken, kept): (Vec<_>, Vec<_>) = guest_cores(supply.topology, request, plan)
        .into_iter()
        .partition(|core| core.iter().any(|(_, cpu)| !online.contains(*cpu)));
    let kept: CpuSet = kept.into_iter().flatten().map(|(_, cpu)| cpu).collect();
    // What stays, with the siblings that are parked beside it.
    let mut parked = supply.topology.with_siblings(&kept).intersection(&plan.parked);
    let mut taken = supply.taken.union(&kept).union(&parked).union(&plan.extra);
    let mut mended = plan.clone();
    for core in broken {
        let placed = replacement(&Supply { taken: &taken, ..*supply }, request, plan, &core)?;
        for ((vcpu, _), cpu) in core.iter().zip(placed.vcpus.iter().flatten()) {
            *mended.vcpus.get_mut(usize::from(*vcpu))? = Some(*cpu);
        }
        parked = parked.union(&placed.parked);
        taken = taken.union(&placed.exclusive());
    }
    mended.parked = parked;
    let others = |place: OtherThreads, cpus: &CpuSet| match place {
        OtherThreads::Share => mended.vcpu_cpus(),
        OtherThreads::Isolate => cpus.clone(),
        OtherThreads::Housekeeping => cpus.intersection(supply.housekeeping),
    };
    let emulator = others(request.policy.emulator, &plan.emulator);
    let iothreads = match request.policy.iothreads {
        // Where none is set aside for them, they are with the emulator.
        OtherThreads::Isolate if request.iothreads == 0 => emulator.clone(),
        place => others(place, &plan.iothreads),
    };
    mended.shared = plan.shared.intersection(supply.housekeeping);
    (mended.emulator, mended.iothreads) = (emulator, iothreads);
    mended.nodes = mended.vcpu_cpus().iter().filter_map(|cpu| supply.topology.cpu(cpu)?.node).collect();
    let holds = check(supply, request, &mended).is_ok()
        && same_guest(supply.topology, plan, &mended, MemoryOfMoved::Stays).is_ok()
        && (plan.memory_nodes.is_none() || mended.nodes.is_subset(&plan.nodes));
    holds.then_some(mended)
}

/// The vCPUs with CPUs of their own, by the core that the guest has them on.
fn guest_cores(topology: &Topology, request: &Request, plan: &Plan) -> Vec<Vec<(u16, CpuId)>> {
    let own: Vec<(u16, CpuId)> = (0..).zip(&plan.vcpus).filter_map(|(vcpu, cpu)| Some((vcpu, (*cpu)?))).collect();
    let mut known: BTreeMap<_, usize> = BTreeMap::new();
    for core in own.iter().filter_map(|(_, cpu)| topology.cpu(*cpu)?.core) {
        *known.entry(core).or_default() += 1;
    }
    // The core of a CPU that is offline is not known; how many vCPUs a core has is.
    let threads = match (request.policy.cores, request.policy.threads_per_core, plan.guest) {
        (Cores::Thread, ..) => 1,
        (_, ThreadsPerCore::Exactly(count), _) => usize::from(count.get()),
        (.., Some(guest)) if guest.threads > 1 => usize::from(guest.threads),
        _ => known.values().max().copied().unwrap_or(1),
    };
    own.chunks(threads.max(1)).map(<[_]>::to_vec).collect()
}

/// CPUs in place of one core's.
fn replacement(supply: &Supply<'_>, request: &Request, plan: &Plan, core: &[(u16, CpuId)]) -> Option<Plan> {
    let known = |cpus: &mut dyn Iterator<Item = CpuId>| -> Vec<&Cpu> {
        cpus.filter_map(|cpu| supply.topology.cpu(cpu)).filter(|cpu| cpu.online).collect()
    };
    // What is left of the core says where it was; if nothing is, the rest of the lease does.
    let mut near = known(&mut core.iter().map(|(_, cpu)| *cpu));
    if near.is_empty() {
        near = known(&mut plan.vcpus.iter().copied().flatten());
    }
    let class: BTreeSet<_> = near.iter().map(|cpu| cpu.class).collect();
    let caches: BTreeSet<_> = near.iter().filter_map(|cpu| cpu.llc).collect();
    let cell = plan.cells.iter().find(|cell| core.iter().any(|(vcpu, _)| cell.vcpus.contains(CpuId(*vcpu))));
    let nodes = cell.and_then(|cell| cell.node).map_or_else(|| plan.nodes.clone(), |node| BTreeSet::from([node]));
    let policy = Policy {
        numa: Span::Prefer,
        cache: Span::Prefer,
        emulator: OtherThreads::Share,
        iothreads: OtherThreads::Share,
        dedicated_vcpus: None,
        memory: Memory::Any,
        topology: GuestView::Keep,
        locality: Locality::None,
        ..request.policy.clone()
    };
    let part = Request::new(u16::try_from(core.len()).ok()?, policy);
    let rings: [&dyn Fn(&Cpu) -> bool; 3] = [
        &|cpu| cpu.llc.is_some_and(|llc| caches.contains(&llc)),
        &|cpu| nodes.is_empty() || cpu.node.is_some_and(|node| nodes.contains(&node)),
        // Memory that is bound does not come along.
        &|_| plan.memory_nodes.is_none(),
    ];
    rings.into_iter().find_map(|ring| {
        let like = |cpu: &&Cpu| (class.is_empty() || class.contains(&cpu.class)) && ring(cpu);
        let cpus: CpuSet = supply.topology.cpus().iter().filter(like).map(|cpu| cpu.cpu).collect();
        let pinnable = supply.pinnable.intersection(&cpus);
        attempt(&Supply { pinnable: &pinnable, ..*supply }, &part).ok()
    })
}

/// A plan for a guest that runs by `from`, wherever there is room: first where its memory is, then, where that can be taken
/// along, anywhere.
///
/// # Errors
/// The allocator's refusal, or one that says what the guest would notice.
pub fn anew(supply: &Supply<'_>, request: &Request, from: &Plan, memory: MemoryOfMoved) -> Result<Plan, Refusal> {
    let fits = |plan: Plan| match same_guest(supply.topology, from, &plan, memory) {
        Ok(()) => Ok(plan),
        Err(what) => Err(Refusal::new(Code::NeedsRepack, format!("there is room only where {what}"))),
    };
    if from.memory_nodes.is_none() {
        return plan(supply, request).and_then(fits);
    }
    // Its memory is there already, and needs no room beside itself.
    let nodes: CpuSet = from.nodes.iter().map(|node| CpuId(node.0)).collect();
    let mut here = request.clone();
    here.memory = None;
    here.policy.nodes =
        Some(request.policy.nodes.as_ref().map_or_else(|| nodes.clone(), |named| named.intersection(&nodes)));
    let stays = plan(supply, &here).map(|plan| Plan { cells: from.cells.clone(), ..plan }).and_then(fits);
    match memory {
        MemoryOfMoved::Follows if stays.is_err() => plan(supply, request).and_then(fits),
        _ => stays,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::shape;

    fn set(text: &str) -> CpuSet {
        CpuSet::parse_kernel_list(text).unwrap()
    }

    /// The same machine without these CPUs.
    fn without(topology: &Topology, cpus: &str) -> Topology {
        let gone = |cpu: &Cpu| {
            if !set(cpus).contains(cpu.cpu) {
                return cpu.clone();
            }
            Cpu {
                online: false,
                core: None,
                package: None,
                die: None,
                node: None,
                llc: None,
                class: None,
                ..cpu.clone()
            }
        };
        let all = topology.cpus().iter().map(gone).collect();
        Topology::new(all, topology.nodes().to_vec(), topology.possible().clone(), Vec::new())
    }

    fn request(vcpus: u16, attributes: &[(&str, &str)]) -> Request {
        let all = [("policy", "dedicated")].iter().chain(attributes).copied();
        Request::new(vcpus, Policy::from_attributes(all).unwrap())
    }

    /// The vCPUs' CPUs after these have gone while others have those.
    fn after(host: &str, gone: &str, others: &str, vcpus: u16, attributes: &[(&str, &str)]) -> Option<String> {
        let topology = shape::parse(host).unwrap();
        let housekeeping = set("0-1");
        let pinnable = topology.online().difference(&housekeeping);
        let (nobody, others) = (CpuSet::new(), set(others));
        let request = request(vcpus, attributes);
        let supply = Supply { topology: &topology, pinnable: &pinnable, taken: &nobody, housekeeping: &housekeeping };
        let before = plan(&supply, &request).unwrap();
        let topology = without(&topology, gone);
        let housekeeping = housekeeping.intersection(topology.online());
        let supply = Supply { topology: &topology, taken: &others, housekeeping: &housekeeping, ..supply };
        let mended = mended(&supply, &request, &before)?;
        assert_eq!(mended.guest, before.guest);
        assert!(mended.exclusive().is_subset(topology.online()) && mended.exclusive().is_disjoint(&others));
        Some(mended.vcpus.iter().flatten().map(ToString::to_string).collect::<Vec<_>>().join(","))
    }

    #[test]
    fn only_the_broken_core_is_replaced() {
        // Siblings are n and n + 16; four caches of four cores, two on each node.
        let host = "2s8c2t,llc=4";
        let topology = shape::parse(host).unwrap();
        let all = after(host, "", "", 4, &[("nodes", "1")]).unwrap();
        let cpus: Vec<u16> = all.split(',').map(|cpu| cpu.parse().unwrap()).collect();
        let gone = cpus[3].to_string();
        let mended = after(host, &gone, "", 4, &[("nodes", "1")]).unwrap();
        let now: Vec<u16> = mended.split(',').map(|cpu| cpu.parse().unwrap()).collect();
        assert_eq!(now[..2], cpus[..2]);
        assert!(!now.contains(&cpus[3]) && !now.contains(&cpus[2]), "{all} {mended}");
        assert_eq!(topology.siblings(CpuId(now[2])), topology.siblings(CpuId(now[3])));
        let cache = |cpu: u16| topology.cpu(CpuId(cpu)).unwrap().llc;
        assert_eq!(cache(now[2]), cache(cpus[2]));
        // Named CPUs have no substitute.
        let named = cpus.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        assert_eq!(after(host, &gone, "", 4, &[("cpus", &named)]), None);
        // Nobody else's.
        let free = topology.online().difference(&set("0-1")).difference(&cpus.iter().map(|&cpu| CpuId(cpu)).collect());
        assert_eq!(after(host, &gone, &free.to_string(), 4, &[]), None);
    }

    #[test]
    fn a_guest_notices_what_it_was_told() {
        let topology = shape::parse("1s4c2t").unwrap();
        let core = |n: usize| topology.cores().values().nth(n).unwrap().iter().collect::<Vec<_>>();
        let on = |cpus: &[CpuId]| Plan::new(cpus.iter().copied(), set("0"));
        let whole = on(&[core(1)[0], core(1)[1]]);
        let same = |to: &Plan| same_guest(&topology, &whole, to, MemoryOfMoved::Stays);
        assert_eq!(same(&on(&[core(2)[0], core(2)[1]])), Ok(()));
        assert_eq!(same(&on(&[core(2)[0], core(3)[1]])), Err("other vCPUs would be siblings"));
        let cell =
            |plan: Plan, node: u16| Plan { memory_nodes: Some(BTreeSet::from([crate::cpuset::NodeId(node)])), ..plan };
        let (here, there) = (cell(whole.clone(), 0), cell(whole.clone(), 1));
        assert!(same_guest(&topology, &here, &there, MemoryOfMoved::Stays).is_err());
        assert_eq!(same_guest(&topology, &here, &there, MemoryOfMoved::Follows), Ok(()));
    }
}
