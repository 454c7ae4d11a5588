//! Requests that no state of this host could honour, or that contradict themselves: told before anything is placed.
//!
//! Looks at what may be handed out, never at what is free: a refusal from here does not go away by waiting.

use super::Supply;
use super::pieces::is_wanted;
use super::policy::{Cores, OtherThreads, ThreadsPerCore};
use super::refusal::Refusal;
use super::request::Request;
use crate::cpuset::{CpuId, CpuSet, NodeId};
use crate::error::{Code, counted};

/// # Errors
/// The [`Refusal`], [`Code::Unsatisfiable`] or [`Code::PolicyInvalid`].
pub(super) fn refuse(supply: &Supply<'_>, request: &Request) -> Result<(), Refusal> {
    let never = |reason: String, hint: &str| {
        let hint = Some(hint.to_owned());
        Err(Refusal { hint, ..Refusal::new(Code::Unsatisfiable, reason) })
    };
    let invalid = |reason: String, hint: &str| {
        let hint = Some(hint.to_owned());
        Err(Refusal { hint, ..Refusal::new(Code::PolicyInvalid, reason) })
    };
    let policy = &request.policy;
    let dedicated = request.dedicated().count();
    if request.vcpus == 0 {
        return invalid("the domain has no vCPU".to_owned(), "give it one at least");
    }
    if let Some(vcpu) =
        policy.dedicated_vcpus.as_ref().and_then(|vcpus| vcpus.iter().find(|vcpu| vcpu.0 >= request.vcpus))
    {
        return invalid(
            format!("dedicated-vcpus names vCPU {vcpu}, but the domain has vCPUs 0-{}", request.vcpus - 1),
            "name vCPUs that it has: they are numbered from 0",
        );
    }
    if supply.handed_out().is_empty() {
        return never(
            "no CPU of this host may be handed out: pinnable_cpus is empty or names no CPU that is online".to_owned(),
            "set pinnable_cpus in /etc/virt-pin/virt-pin.toml: `virt-pin suggest` proposes CPUs, `virt-pin suggest --write` writes them there; \
             with --host, --pinnable LIST tries some",
        );
    }
    let vcpus = || {
        let some = if dedicated < usize::from(request.vcpus) { "dedicated " } else { "" };
        counted(dedicated as u64, &format!("{some}vCPU"))
    };
    if let ThreadsPerCore::Exactly(threads) = policy.threads_per_core {
        if dedicated % usize::from(threads.get()) != 0 {
            return invalid(
                format!("{} are not a multiple of threads-per-core=\"{threads}\"", vcpus()),
                "give it a multiple (`virt-pin set-vcpus`), or leave threads-per-core out",
            );
        }
    }
    let unknown = |node: &CpuId| supply.topology.node(NodeId(node.0)).is_none();
    if let Some(node) = policy.nodes.as_ref().and_then(|nodes| nodes.iter().find(unknown)) {
        let nodes: CpuSet = supply.topology.nodes().iter().map(|node| CpuId(node.node.0)).collect();
        return never(format!("node {node} does not exist; this host has {}", nodes), "correct the nodes attribute");
    }
    if let Some(cpus) = &policy.cpus {
        if cpus.len() != dedicated {
            let named = counted(cpus.len() as u64, "CPU");
            return invalid(
                format!("cpus=\"{cpus}\" names {named}, but {} need one each", vcpus()),
                "name as many CPUs as it has dedicated vCPUs, or leave cpus out",
            );
        }
        named_cpus(supply, request, cpus)?;
    }
    let mut others =
        vec![("emulator and I/O threads", policy.emulator), ("emulator and I/O threads", policy.iothreads)];
    if dedicated < usize::from(request.vcpus) {
        others.push(("vCPUs that are not dedicated", OtherThreads::Housekeeping));
    }
    let homeless = others.into_iter().rfind(|(_, place)| *place == OtherThreads::Housekeeping);
    if let Some((who, _)) = homeless.filter(|_| supply.housekeeping.is_empty()) {
        let hint = if dedicated < usize::from(request.vcpus) {
            "take a core out of pinnable_cpus, or leave dedicated-vcpus out"
        } else {
            "take a core out of pinnable_cpus, or set emulator and iothreads to \"isolate\" or \"share\""
        };
        return never(
            format!(
                "{who} need a housekeeping CPU, but every online CPU is pinnable, leased or isolated by the kernel"
            ),
            hint,
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
    let held = if whole { topology.with_siblings(cpus) } else { cpus.clone() }.difference(supply.pinnable);
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
            let hint = Some("name as many CPUs of each core, or leave threads-per-core out".to_owned());
            return Err(Refusal { hint, ..Refusal::new(Code::PolicyInvalid, reason) });
        }
    }
    Ok(())
}
