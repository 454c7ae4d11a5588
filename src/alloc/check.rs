//! What holds of every plan, whoever made it. Called by `alloc::plan` on its own result, and by the tests.

use std::collections::{BTreeMap, BTreeSet};

use super::Supply;
use super::plan::{PlacedCell, Plan};
use super::policy::{Cores, GuestView, OtherThreads, Span, ThreadsPerCore};
use super::refusal::Refusal;
use super::request::{GuestCell, Request};
use crate::cpuset::{CpuId, CpuSet, NodeId};
use crate::error::Code;
use crate::host::CoreId;

/// Checks the plan against the request it answers.
///
/// # Errors
/// A [`Refusal`] with [`Code::Internal`] that names the first condition that does not hold.
pub fn check(supply: &Supply<'_>, request: &Request, plan: &Plan) -> Result<(), Refusal> {
    let broken = |what: &str| {
        let vcpus = plan.vcpu_cpus();
        let reason = format!("the plan breaks its own rule: {what} (vCPUs on {vcpus}, parked {})", plan.parked);
        Err(Refusal::new(Code::Internal, reason))
    };
    let (vcpus, exclusive) = (plan.vcpu_cpus(), plan.exclusive());
    let dedicated: Vec<u16> = request.dedicated().collect();
    let own: Vec<u16> = (0..).zip(&plan.vcpus).filter(|(_, own)| own.is_some()).map(|(vcpu, _)| vcpu).collect();
    if plan.vcpus.len() != usize::from(request.vcpus) || own != dedicated || vcpus.len() != dedicated.len() {
        return broken("each dedicated vCPU has a CPU of its own, and no other has");
    }
    let shares = own.len() < plan.vcpus.len();
    if plan.shared.is_empty() == shares || !plan.shared.is_subset(supply.housekeeping) {
        return broken("vCPUs that are not dedicated run on housekeeping CPUs");
    }
    if request.policy.cpus.as_ref().is_some_and(|named| *named != vcpus) {
        return broken("the vCPUs have exactly the CPUs that the policy names");
    }
    if exclusive.len() != vcpus.len() + plan.parked.len() + plan.extra.len() {
        return broken("vCPUs, parked and extra CPUs are disjoint");
    }
    if !exclusive.is_subset(&supply.handed_out()) {
        return broken("only online pinnable CPUs are leased");
    }
    if !exclusive.is_disjoint(supply.taken) {
        return broken("no CPU has two owners");
    }
    if plan.emulator.is_empty() || plan.iothreads.is_empty() {
        return broken("emulator and I/O threads have somewhere to run");
    }
    let wishes = [(request.policy.emulator, &plan.emulator), (request.policy.iothreads, &plan.iothreads)];
    for (index, (place, cpus)) in wishes.into_iter().enumerate() {
        let holds = match place {
            OtherThreads::Housekeeping => cpus.is_subset(supply.housekeeping),
            OtherThreads::Share => *cpus == vcpus,
            // Without I/O threads no CPU is set aside for them: those plugged in later join the emulator.
            OtherThreads::Isolate if index == 1 && request.iothreads == 0 => *cpus == plan.emulator,
            OtherThreads::Isolate => cpus.is_subset(&plan.extra),
        };
        if !holds {
            return broken("emulator and I/O threads run where the policy says");
        }
    }
    if request.policy.cores == Cores::Whole {
        let whole =
            exclusive.iter().all(|cpu| supply.topology.siblings(cpu).is_some_and(|core| core.is_subset(&exclusive)));
        if !whole {
            return broken("only whole cores are leased");
        }
        if let ThreadsPerCore::Exactly(count) = request.policy.threads_per_core {
            if per_core(supply, &vcpus).values().any(|threads| *threads != count.get()) {
                return broken("threads-per-core vCPUs on each core");
            }
        }
    } else if !plan.parked.is_empty() {
        return broken("single threads park nothing");
    }
    if request.policy.numa == Span::Single && plan.nodes.len() > 1 {
        return broken("numa=single spans one node");
    }
    if request.policy.numa != Span::Any {
        cells(supply, request, plan).or_else(|()| broken("each guest NUMA cell is on one node and splits no core"))?;
    }
    if request.policy.numa == Span::Spread && !is_spread(supply, request, plan) {
        return broken("numa=spread is even over the nodes");
    }
    let class = |cpu| supply.topology.cpu(cpu).and_then(|cpu| cpu.class);
    let bound = vcpus.iter().chain(plan.emulator.iter());
    if supply.topology.keeps_vms_in_one_class() && bound.map(class).collect::<BTreeSet<_>>().len() > 1 {
        return broken("on this machine a VM stays on cores of one class");
    }
    let llcs: BTreeSet<_> =
        plan.vcpus.iter().flatten().map(|&cpu| supply.topology.cpu(cpu).and_then(|cpu| cpu.llc)).collect();
    if request.policy.cache == Span::Single && llcs.len() > 1 {
        return broken("cache=single spans one last-level cache");
    }
    if !cells_are_the_guests(request, plan) {
        return broken("the guest's NUMA cells are all there, with all of its memory");
    }
    let policy = &request.policy;
    let elsewhere = |cpu: &CpuId| {
        let cpu = supply.topology.cpu(*cpu);
        let (node, class) = (cpu.and_then(|cpu| cpu.node), cpu.and_then(|cpu| cpu.class));
        policy.nodes.as_ref().is_some_and(|nodes| !node.is_some_and(|node| nodes.contains(CpuId(node.0))))
            || policy.core_class.is_some_and(|wanted| class.is_some_and(|class| class != wanted))
    };
    if plan.vcpus.iter().flatten().any(elsewhere) {
        return broken("vCPUs are on the nodes and of the core class asked for");
    }
    if plan.guest.is_some() != (policy.topology != GuestView::Keep) {
        return broken("the guest is told of its topology if the policy says so");
    }
    if let Some(guest) = plan.guest {
        let product = [guest.dies, guest.cores, guest.threads].into_iter().map(u32::from).product::<u32>();
        if product * u32::from(guest.sockets) != u32::from(request.vcpus) {
            return broken("the guest topology has as many threads as the guest has vCPUs");
        }
        let siblings = plan.vcpus.chunks(usize::from(guest.threads)).all(|threads| {
            let cores: Vec<_> = threads.iter().map(|own| own.and_then(|cpu| supply.topology.cpu(cpu)?.core)).collect();
            threads.len() == 1 || cores.iter().all(|core| core.is_some() && Some(core) == cores.first())
        });
        if !siblings {
            return broken("siblings of the guest are siblings of the host");
        }
    }
    Ok(())
}

/// Whether every cell of the guest is on one node, and no core carries vCPUs of two.
fn cells(supply: &Supply<'_>, request: &Request, plan: &Plan) -> Result<(), ()> {
    if request.cells.len() < 2 {
        return Ok(());
    }
    let mut cell_of_core = BTreeMap::new();
    for (number, cell) in request.cells.iter().enumerate() {
        let cpus: Vec<_> = plan.own_cpus(&cell.vcpus).filter_map(|cpu| supply.topology.cpu(cpu)).collect();
        let nodes: BTreeSet<_> = cpus.iter().map(|cpu| cpu.node).collect();
        let whole = request.policy.cores == Cores::Whole;
        let cores = cpus.iter().filter(|_| whole).filter_map(|cpu| cpu.core);
        let mut alone = true;
        cores.for_each(|core| alone &= *cell_of_core.entry(core).or_insert(number) == number);
        if nodes.len() > 1 || !alone {
            return Err(());
        }
    }
    Ok(())
}

/// Whether the plan's cells are those that the guest has, or, made for it, hold every vCPU once and its memory together.
fn cells_are_the_guests(request: &Request, plan: &Plan) -> bool {
    if !request.cells.is_empty() {
        let same = |(own, placed): (&GuestCell, &PlacedCell)| {
            let there = own.bound.is_none() || placed.node.is_none() || own.bound == placed.node;
            own.vcpus == placed.vcpus && Some(own.bytes) == placed.bytes && there
        };
        return plan.cells.len() == request.cells.len() && request.cells.iter().zip(&plan.cells).all(same);
    }
    let all = plan.cells.iter().fold(CpuSet::new(), |all, cell| all.union(&cell.vcpus));
    let count: usize = plan.cells.iter().map(|cell| cell.vcpus.len()).sum();
    let bytes: Option<u64> = plan.cells.iter().map(|cell| cell.bytes).sum();
    plan.cells.is_empty()
        || (count == plan.vcpus.len() && all.len() == count && bytes == request.memory.map(|memory| memory.bytes))
}

/// Cells on different nodes; without cells as many vCPUs on each node as on the others, give or take one core.
fn is_spread(supply: &Supply<'_>, request: &Request, plan: &Plan) -> bool {
    let node = |cpu: CpuId| supply.topology.cpu(cpu).and_then(|cpu| cpu.node);
    if request.cells.len() > 1 {
        let cells: Vec<_> =
            request.cells.iter().filter_map(|cell| plan.own_cpus(&cell.vcpus).next().map(node)).collect();
        return cells.iter().collect::<BTreeSet<_>>().len() == cells.len();
    }
    let named = request.policy.nodes.as_ref();
    let mut counts: BTreeMap<Option<NodeId>, usize> =
        named.into_iter().flat_map(CpuSet::iter).map(|node| (Some(NodeId(node.0)), 0)).collect();
    plan.vcpus.iter().flatten().for_each(|&cpu| *counts.entry(node(cpu)).or_default() += 1);
    let largest = supply.topology.cores().values().map(CpuSet::len).max();
    let core = if request.policy.cores == Cores::Whole { largest.unwrap_or(1) } else { 1 };
    counts.values().max().zip(counts.values().min()).is_none_or(|(most, least)| most - least <= core)
}

/// How many of the CPUs each known core has.
fn per_core(supply: &Supply<'_>, cpus: &CpuSet) -> BTreeMap<CoreId, u16> {
    let mut counts = BTreeMap::new();
    for core in cpus.iter().filter_map(|cpu| supply.topology.cpu(cpu)?.core) {
        *counts.entry(core).or_insert(0) += 1;
    }
    counts
}
