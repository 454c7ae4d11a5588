//! Which CPUs of a host to hand out, and why the others not. Pure: a topology and counts of interrupts in, a proposal out. The
//! proposal is a start for an operator who knows more than the machine says; nothing is written down by it.

use std::collections::BTreeMap;

use crate::cpuset::{CpuId, CpuSet, NodeId};
use crate::error::counted;
use crate::host::{CoreClass, LlcId, Topology};

/// From so many cores on, a node can spare one for the host.
const LARGE_NODE: usize = 4;
/// A CPU with so many times the mean is one that devices keep busy ...
const HEAVY: u64 = 4;
/// ... and below so many nobody is.
const FEW_INTERRUPTS: u64 = 10_000;

/// What to write down, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Proposal {
    /// `pinnable_cpus`
    pub(super) pinnable: CpuSet,
    /// CPUs that stay with the host, and why; each CPU once.
    pub(super) kept: Vec<(CpuSet, String)>,
    /// Attributes that VMs on this host gain from, as (name, value, why).
    pub(super) policy: Vec<(&'static str, &'static str, String)>,
    /// What else is to be known.
    pub(super) notes: Vec<String>,
}

/// The proposal for this host; `interrupts` may be empty.
pub(super) fn propose(host: &Topology, interrupts: &BTreeMap<CpuId, u64>) -> Proposal {
    let mut left = host.online().clone();
    let mut kept: Vec<(CpuSet, String)> = Vec::new();
    let mut notes = Vec::new();
    let mut keep = |left: &mut CpuSet, cpus: &CpuSet, why: String| {
        let cpus = cpus.intersection(left);
        if !cpus.is_empty() {
            *left = left.difference(&cpus);
            kept.push((cpus, why));
        }
    };

    // 1. The host boots on its first CPU, and what asks for no other stays there.
    if let Some(first) = left.first() {
        let core = host.siblings(first).cloned().unwrap_or_else(|| CpuSet::from_iter([first]));
        keep(
            &mut left,
            &core,
            format!("the core of CPU {first}: the host's own work, and interrupts that are nobody else's"),
        );
    }
    // 2. Whole cores are what is handed out.
    let unknown: CpuSet = left.iter().filter(|&cpu| host.siblings(cpu).is_none()).collect();
    keep(&mut left, &unknown, "it is not known whose siblings they are".to_owned());

    // 3. Who isolates CPUs at boot has decided already.
    let isolated = whole(host, &host.isolated().intersection(&left));
    if !isolated.is_empty() {
        let others = left.difference(&isolated);
        keep(&mut left, &others, "not isolated: the kernel's command line leaves them to the host".to_owned());
        notes.push(format!(
            "{isolated} are isolated at boot, so nothing of the host is there by chance. If they are meant for something else than VMs, take \
             them out."
        ));
    } else {
        // 4. Slow cores are good enough for the host, if fast ones are left then.
        let of = |class| {
            left.iter().filter(|&cpu| host.cpu(cpu).and_then(|cpu| cpu.class) == Some(class)).collect::<CpuSet>()
        };
        let (fast, slow) = (of(CoreClass::Performance), of(CoreClass::Efficiency));
        if !fast.is_empty() && !slow.is_empty() {
            keep(&mut left, &slow, "efficiency cores: the host and emulator threads do well with them".to_owned());
            notes.push(
                "Efficiency cores may be handed out too; a VM gets cores of one class as long as one has enough."
                    .to_owned(),
            );
        }
        // 5. Each node has work of its own: memory, devices, emulator threads of its VMs.
        for node in host.nodes() {
            let here = host.cores().values().filter(|core| core.is_subset(&node.cpus));
            let spare = here.clone().any(|core| core.is_disjoint(&left));
            let first = here.clone().find(|core| core.is_subset(&left));
            if let Some(core) = first.filter(|_| !spare && here.count() >= LARGE_NODE) {
                let why = format!("a core of node {}: emulator threads, memory and devices there", node.node);
                keep(&mut left, core, why);
            }
        }
        // 6. Where devices interrupt, at most on a quarter of the cores.
        for core in busy(host, &left, interrupts) {
            let count: u64 = core.iter().filter_map(|cpu| interrupts.get(&cpu)).sum();
            keep(
                &mut left,
                &core,
                format!("devices interrupt there more than elsewhere: {count} times since the boot"),
            );
        }
    }

    let offline: CpuSet = host.cpus().iter().filter(|cpu| !cpu.online).map(|cpu| cpu.cpu).collect();
    if !offline.is_empty() {
        notes.push(format!(
            "{offline} are offline, and whose siblings they are is not known until they are back. A core that is handed out should be named whole: \
             `virt-pin suggest` again then."
        ));
    }
    if left.is_empty() {
        notes.push("Nothing is left to be handed out: VMs on this host share its CPUs with it.".to_owned());
    }
    let policy = policy(host, &left, interrupts);
    Proposal { pinnable: left, kept, policy, notes }
}

/// Those of these CPUs whose core is there as a whole.
fn whole(host: &Topology, cpus: &CpuSet) -> CpuSet {
    host.cores().values().filter(|core| core.is_subset(cpus)).fold(CpuSet::new(), |all, core| all.union(core))
}

/// The cores that devices keep busy, the busiest first.
fn busy(host: &Topology, left: &CpuSet, interrupts: &BTreeMap<CpuId, u64>) -> Vec<CpuSet> {
    let mean = interrupts.values().sum::<u64>() / (interrupts.len() as u64).max(1);
    let most = (mean * HEAVY).max(FEW_INTERRUPTS);
    let count = |core: &CpuSet| core.iter().filter_map(|cpu| interrupts.get(&cpu)).copied().max().unwrap_or_default();
    let cores: Vec<&CpuSet> = host.cores().values().filter(|core| core.is_subset(left)).collect();
    let mut busy: Vec<&CpuSet> = cores.iter().copied().filter(|core| count(core) > most).collect();
    busy.sort_by_key(|core| std::cmp::Reverse(count(core)));
    busy.into_iter().take(cores.len() / 4).cloned().collect()
}

fn policy(
    host: &Topology,
    pinnable: &CpuSet,
    interrupts: &BTreeMap<CpuId, u64>,
) -> Vec<(&'static str, &'static str, String)> {
    let mut nodes: BTreeMap<NodeId, usize> = BTreeMap::new();
    let mut llcs: BTreeMap<LlcId, usize> = BTreeMap::new();
    for core in host.cores().values().filter(|core| core.is_subset(pinnable)) {
        let Some(cpu) = core.first().and_then(|cpu| host.cpu(cpu)) else { continue };
        if let Some(node) = cpu.node {
            *nodes.entry(node).or_default() += 1;
        }
        if let Some(llc) = cpu.llc {
            *llcs.entry(llc).or_default() += 1;
        }
    }
    let mut policy = Vec::new();
    let most = |cores: Option<&usize>| counted(cores.copied().unwrap_or_default() as u64, "core");
    if nodes.len() > 1 {
        let cores = most(nodes.values().max());
        policy.push(("numa", "single", format!("for VMs of up to {cores}: no memory is far away from its CPU")));
    }
    if llcs.len() > nodes.len().max(1) && llcs.values().any(|cores| *cores > 1) {
        let cores = most(llcs.values().max());
        policy.push(("cache", "single", format!("for VMs of up to {cores}: their threads share one cache")));
    }
    let there: u64 = pinnable.iter().filter_map(|cpu| interrupts.get(&cpu)).sum();
    if there > 0 {
        policy.push((
            "irqs",
            "away",
            "for VMs that must not be disturbed: devices interrupt on these CPUs now".to_owned(),
        ));
    }
    policy
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{description, shape, sysfs};

    fn host(name: &str) -> Topology {
        let file = format!("{}/tests/hosts/{name}.host", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(file).unwrap();
        sysfs::read(&description::parse(&text).unwrap()).unwrap()
    }

    fn kept(proposal: &Proposal) -> Vec<String> {
        proposal.kept.iter().map(|(cpus, _)| cpus.to_string()).collect()
    }

    #[test]
    fn what_each_host_can_spare() {
        for (name, pinnable, expected) in [
            // Slow cores first: the host has CPU 0's and its like.
            ("arm-big-little", "4-5", &["0", "1-3"][..]),
            ("broken-firmware", "2-7", &["0", "1"]),
            ("cpu0-offline", "2-3", &["1"]),
            ("epyc-nps4", "1-3,5-7,9-11,13-15,17-19,21-23,25-27,29-31", &["0,16", "4,20", "8,24", "12,28"]),
            ("hybrid-lowpower", "2-3", &["0-1", "4-9"]),
            ("kernel-2.6.18", "1-2", &["0"]),
            ("memory-only-node", "1-3,5-7", &["0", "4"]),
            ("offline-siblings", "1-3,7", &["0,4"]),
            ("power-smt8", "8-16", &["0-5"]),
            ("riscv-unknown-package", "1-3", &["0"]),
            ("vm-no-caches", "1-3", &["0"]),
            // Isolated at boot.
            ("xeon-2s-smt", "6-7,14-15", &["0,8", "1-5,9-13"]),
        ] {
            let host = host(name);
            let proposal = propose(&host, &BTreeMap::new());
            assert_eq!(
                (proposal.pinnable.to_string().as_str(), kept(&proposal)),
                (pinnable, expected.iter().map(|cpus| (*cpus).to_owned()).collect()),
                "{name}: {proposal:#?}"
            );
            // Every online CPU is said something of, once.
            let all = proposal.kept.iter().fold(proposal.pinnable.clone(), |all, (cpus, _)| all.union(cpus));
            let count = proposal.kept.iter().map(|(cpus, _)| cpus.len()).sum::<usize>() + proposal.pinnable.len();
            assert_eq!((&all, count), (host.online(), host.online().len()), "{name}");
        }
    }

    #[test]
    fn nothing_is_left_of_one_core() {
        let proposal = propose(&shape::parse("1s1c2t").unwrap(), &BTreeMap::new());
        assert!(proposal.pinnable.is_empty() && proposal.notes.len() == 1, "{proposal:?}");
    }

    #[test]
    fn busy_cores_stay_with_the_host_unless_they_are_many() {
        let host = shape::parse("1s16c1t").unwrap();
        let mut interrupts: BTreeMap<CpuId, u64> = host.online().iter().map(|cpu| (cpu, 1000)).collect();
        assert_eq!(propose(&host, &interrupts).pinnable.to_string(), "1-15");
        interrupts.insert(CpuId(5), 900_000);
        let proposal = propose(&host, &interrupts);
        assert_eq!(proposal.pinnable.to_string(), "1-4,6-15");
        assert!(proposal.kept.iter().any(|(_, why)| why.contains("900000 times")), "{proposal:?}");
        assert!(proposal.policy.iter().any(|(name, value, _)| (*name, *value) == ("irqs", "away")));
        // No host gives all its CPUs to its devices.
        interrupts.extend((1..16).map(|cpu| (CpuId(cpu), if cpu < 4 { 9_000_000 } else { 0 })));
        assert_eq!(propose(&host, &interrupts).pinnable.len(), 12);
    }

    #[test]
    fn policies_are_for_hosts_that_have_something_to_choose() {
        let names =
            |name| propose(&host(name), &BTreeMap::new()).policy.into_iter().map(|(name, ..)| name).collect::<Vec<_>>();
        assert_eq!(names("vm-no-caches"), [""; 0]);
        assert_eq!(names("xeon-2s-smt"), ["numa"]);
        assert_eq!(names("epyc-nps4"), ["numa", "cache"]);
    }
}
