//! What can be taken at all: step 1 of [`super::place`].

use super::Supply;
use super::choose::Piece;
use super::groups::has_cells;
use super::policy::{Cores, OtherThreads, Span, ThreadsPerCore};
use super::request::Request;
use crate::cpuset::{CpuId, CpuSet};
use crate::host::{CoreClass, Cpu, Topology};

/// Whether a CPU is on the nodes and of the core class asked for. What is unknown is no match; where nothing is told apart,
/// everything is.
pub(super) fn is_wanted<'a>(topology: &Topology, request: &'a Request) -> impl Fn(&Cpu) -> bool + 'a {
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
pub(super) fn fits_class(topology: &Topology, cpu: CpuId, class: Option<CoreClass>) -> bool {
    !topology.keeps_vms_in_one_class() || topology.cpu(cpu).is_some_and(|cpu| cpu.class == class)
}

/// Free CPUs that a whole-core request cannot take because a sibling is out of reach.
pub(super) fn withheld(supply: &Supply<'_>, request: &Request) -> CpuSet {
    let free = supply.handed_out().difference(supply.taken);
    let broken = |cpu: &CpuId| !supply.topology.siblings(*cpu).is_some_and(|core| core.is_subset(&free));
    match request.policy.cores {
        Cores::Thread => CpuSet::new(),
        Cores::Whole => free.iter().filter(broken).collect(),
    }
}
