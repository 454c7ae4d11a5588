//! The allocator against tables and against a brute-force oracle on small hosts.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    reason = "integration tests"
)]

use std::collections::BTreeSet;

use proptest::prelude::*;
use virt_pin::alloc::plan::Plan;
use virt_pin::alloc::policy::Policy;
use virt_pin::alloc::refusal::Refusal;
use virt_pin::alloc::request::{GuestMemory, Pages, Request};
use virt_pin::alloc::{self, Supply};
use virt_pin::cpuset::{CpuId, CpuSet, NodeId};
use virt_pin::error::{Amount, Code};
use virt_pin::host::{CoreClass, CoreId, Cpu, HugePages, LlcId, Node, Topology};

/// One thread of a test host.
#[derive(Clone, Copy, Debug)]
struct Thread {
    core: u16,
    llc: u16,
    node: u16,
    class: Option<CoreClass>,
}

/// A host from its threads, index = CPU number; `core` and `llc` are labels.
fn host(threads: &[Thread]) -> Topology {
    let first = |same: &dyn Fn(&Thread) -> bool| threads.iter().position(same).unwrap() as u16;
    let cpus = threads.iter().zip(0..).map(|(thread, number)| Cpu {
        cpu: CpuId(number),
        online: true,
        isolated: false,
        core: Some(CoreId(first(&|other| other.core == thread.core))),
        package: Some(0),
        die: Some(0),
        cluster: None,
        node: Some(NodeId(thread.node)),
        llc: Some(LlcId(first(&|other| other.llc == thread.llc))),
        class: thread.class,
    });
    let ids: BTreeSet<u16> = threads.iter().map(|thread| thread.node).collect();
    let nodes = ids.iter().map(|&node| Node {
        node: NodeId(node),
        cpus: threads.iter().zip(0..).filter(|(thread, _)| thread.node == node).map(|(_, cpu)| CpuId(cpu)).collect(),
        memory_bytes: Some(8 << 30),
        available_bytes: Some(4 << 30),
        huge_pages: vec![HugePages { size_kib: 2048, total: 64, free: 32 }],
        distances: ids.iter().map(|&other| (NodeId(other), if other == node { 10 } else { 20 })).collect(),
    });
    Topology::new(cpus.collect(), nodes.collect(), CpuSet::new(), vec![])
}

/// `nodes` x `llcs` x `cores` x `threads`; siblings are neighbours, or half the machine apart as on most Intel hosts.
fn grid(nodes: u16, llcs: u16, cores: u16, threads: u16, apart: bool) -> Topology {
    let total = nodes * llcs * cores;
    let core_of = |cpu: u16| if apart { cpu % total } else { cpu / threads };
    let thread = |cpu: u16| {
        let core = core_of(cpu);
        Thread { core, llc: core / cores, node: core / (cores * llcs), class: None }
    };
    host(&(0..total * threads).map(thread).collect::<Vec<_>>())
}

fn set(text: &str) -> CpuSet {
    CpuSet::parse_kernel_list(text).unwrap()
}

fn request(vcpus: u16, policy: &[(&str, &str)]) -> Request {
    let policy = [("policy", "dedicated")].iter().chain(policy).copied();
    Request::new(vcpus, Policy::from_attributes(policy).unwrap())
}

/// A plan where all that is not pinnable is for housekeeping.
fn plan(topology: &Topology, pinnable: &CpuSet, taken: &CpuSet, request: &Request) -> Result<Plan, Refusal> {
    let housekeeping = topology.online().difference(pinnable);
    alloc::plan(&Supply { topology, pinnable, taken, housekeeping: &housekeeping }, request)
}

fn place(topology: &Topology, pinnable: &str, taken: &str, request: &Request) -> Result<Plan, Refusal> {
    plan(topology, &set(pinnable), &set(taken), request)
}

fn vcpus(plan: &Plan) -> Vec<u16> {
    plan.vcpus.iter().flatten().map(|cpu| cpu.0).collect()
}

#[track_caller]
fn refused(result: Result<Plan, Refusal>, code: Code, reason: &str) {
    let refusal = result.unwrap_err();
    assert_eq!((refusal.code, refusal.reason.as_str()), (code, reason));
}

#[test]
fn siblings_of_the_guest_are_siblings_of_the_host() {
    // Siblings (0,8), (1,9), ...: sorting the CPUs would split every core.
    let plan = place(&grid(1, 1, 8, 2, true), "1-7,9-15", "", &request(4, &[])).unwrap();
    assert_eq!(vcpus(&plan), [1, 9, 2, 10]);
    let guest = plan.guest.unwrap();
    assert_eq!((guest.sockets, guest.dies, guest.cores, guest.threads), (1, 1, 2, 2));
    assert_eq!(plan.emulator, set("0,8"));
}

#[test]
fn one_thread_per_core_parks_the_others() {
    let host = grid(1, 1, 4, 2, false);
    let plan = place(&host, "2-7", "", &request(2, &[("threads-per-core", "1")])).unwrap();
    assert_eq!((vcpus(&plan), plan.parked.to_string()), (vec![2, 4], "3,5".to_owned()));
    assert_eq!(plan.guest.unwrap().threads, 1);
    let power = grid(1, 1, 3, 8, false);
    let plan = place(&power, "8-23", "", &request(8, &[("threads-per-core", "4")])).unwrap();
    assert_eq!((vcpus(&plan), plan.parked.to_string()), (vec![8, 9, 10, 11, 16, 17, 18, 19], "12-15,20-23".to_owned()));
}

#[test]
fn an_odd_count_on_whole_cores_parks_the_last_sibling_and_tells_no_false_siblings() {
    let plan = place(&grid(1, 1, 4, 2, false), "2-7", "", &request(3, &[])).unwrap();
    assert_eq!((vcpus(&plan), plan.parked.to_string()), (vec![2, 3, 4], "5".to_owned()));
    let guest = plan.guest.unwrap();
    assert_eq!((guest.cores, guest.threads), (3, 1));
    let one = place(&grid(1, 1, 4, 2, false), "2-7", "", &request(1, &[])).unwrap();
    assert_eq!((vcpus(&one), one.parked.to_string()), (vec![2], "3".to_owned()));
}

#[test]
fn a_core_with_a_sibling_out_of_the_allowlist_is_no_whole_core() {
    // The reserved set of a 2x28x2 machine leaves lone threads.
    let host = grid(2, 1, 28, 2, true);
    let plan = place(&host, "1-27,29-55,57-83,85-111", "", &request(48, &[("numa", "single")])).unwrap();
    assert_eq!(plan.guest.unwrap().threads, 2);
    assert!(plan.exclusive().is_disjoint(&set("0,28,56,84")));
    refused(
        place(&grid(1, 1, 2, 2, false), "1,2", "", &request(1, &[])),
        Code::Unsatisfiable,
        "needs 1 whole core (1 vCPU, 1 on each), this host has 0 of them pinnable",
    );
    assert!(place(&grid(1, 1, 2, 2, false), "1,2", "", &request(2, &[("cores", "thread")])).is_ok());
}

#[test]
fn single_threads_take_lone_ones_before_breaking_a_core() {
    let host = grid(1, 2, 2, 2, false);
    let plan = place(&host, "1-7", "4", &request(1, &[("cores", "thread")])).unwrap();
    assert!(vcpus(&plan) == [1] || vcpus(&plan) == [5], "{plan:?}");
    let plan = place(&host, "1-7", "4", &request(2, &[("cores", "thread"), ("cache", "any")])).unwrap();
    assert_eq!(vcpus(&plan), [1, 5]);
    assert_eq!(plan.guest.unwrap().threads, 1);
}

#[test]
fn fewest_nodes_then_fewest_caches_then_best_fit() {
    let host = grid(2, 2, 4, 1, false);
    // Cache 0-3 has two left, 4-7 four: a request of two fits the smaller rest.
    assert_eq!(vcpus(&place(&host, "1-15", "1", &request(2, &[])).unwrap()), [2, 3]);
    // Six need two caches of one node; node 1 is whole.
    let plan = place(&host, "1-15", "1-3", &request(6, &[])).unwrap();
    assert_eq!(plan.nodes, BTreeSet::from([NodeId(1)]));
    // One that has to span both nodes.
    assert_eq!(place(&host, "1-15", "", &request(12, &[])).unwrap().nodes.len(), 2);
    refused(
        place(&host, "1-15", "", &request(12, &[("numa", "single")])),
        Code::Unsatisfiable,
        "needs 12 whole cores on one node (12 vCPUs, 1 on each), this host has 8 of them pinnable",
    );
    refused(
        place(&host, "1-15", "4,8,12", &request(4, &[("cache", "single")])),
        Code::NeedsRepack,
        "needs 4 whole cores in one last-level cache (4 vCPUs, 1 on each), 3 of them free; 12 whole cores and 12 \
         threads are free in all, but scattered",
    );
    refused(
        place(&host, "1-15", "1-13", &request(4, &[])),
        Code::Shortage,
        "needs 4 whole cores (4 vCPUs, 1 on each), 2 of the 15 pinnable are free",
    );
}

#[test]
fn two_vms_of_single_threads_can_break_every_core() {
    refused(
        place(&grid(1, 1, 4, 2, false), "2-7", "2,4,6", &request(2, &[])),
        Code::NeedsRepack,
        "needs 1 whole core (2 vCPUs, 2 on each), 0 of them free; 0 whole cores and 3 threads are free in all, but scattered",
    );
}

#[test]
fn emulator_and_iothreads() {
    let host = grid(1, 1, 4, 2, false);
    let isolate = [("emulator", "isolate"), ("iothreads", "isolate")];
    let plan = place(&host, "0-7", "", &Request { iothreads: 2, ..request(4, &isolate) }).unwrap();
    assert_eq!((plan.emulator.to_string(), plan.iothreads.to_string()), ("4-5".to_owned(), "6-7".to_owned()));
    assert_eq!(plan.exclusive(), set("0-7"));
    assert_eq!(plan.allowed(), set("0-7"));
    // Without I/O threads nothing is set aside for them.
    let plan = place(&host, "0-7", "", &request(4, &isolate)).unwrap();
    assert_eq!((plan.exclusive(), &plan.iothreads), (set("0-5"), &plan.emulator));
    let plan = place(&host, "0-7", "", &request(4, &[("emulator", "share"), ("iothreads", "share")])).unwrap();
    assert_eq!((plan.emulator, plan.iothreads), (set("0-3"), set("0-3")));
    refused(
        place(&host, "0-7", "", &request(4, &[])),
        Code::Unsatisfiable,
        "emulator and I/O threads need a housekeeping CPU, but every online CPU is pinnable or leased",
    );
    let plan = place(&host, "2-7", "", &request(2, &[("cores", "thread"), ("emulator", "isolate")])).unwrap();
    assert_eq!((plan.extra.len(), plan.exclusive().len()), (1, 3));
}

#[test]
fn classes_are_not_mixed_while_one_is_enough() {
    use CoreClass::{Efficiency, Performance};
    // Two performance cores of two threads, four efficiency cores of one.
    let thread = |core, class| Thread { core, llc: 0, node: 0, class: Some(class) };
    let mut threads: Vec<_> = (0..4).map(|cpu| thread(cpu / 2, Performance)).collect();
    threads.extend((4..8).map(|cpu| thread(cpu, Efficiency)));
    let host = host(&threads);
    let share: &[(&str, &str)] = &[("emulator", "share"), ("iothreads", "share")];
    let with = |class| [share, &[("core-class", class)]].concat();
    assert_eq!(vcpus(&place(&host, "0-7", "", &request(4, share)).unwrap()), [0, 1, 2, 3]);
    assert_eq!(vcpus(&place(&host, "0-7", "0-1", &request(4, share)).unwrap()), [4, 5, 6, 7]);
    assert_eq!(vcpus(&place(&host, "0-7", "", &request(4, &with("efficiency"))).unwrap()), [4, 5, 6, 7]);
    let mixed = place(&host, "0-7", "", &request(6, share)).unwrap();
    assert_eq!((mixed.vcpus.len(), mixed.guest.unwrap().threads), (6, 1));
    assert!(place(&host, "0-7", "", &request(6, &with("performance"))).is_err());
}

#[test]
fn memory_follows_or_is_refused_with_numbers() {
    let host = grid(2, 1, 4, 1, false);
    let guest = |mib: u64, pages| Request {
        memory: Some(GuestMemory { bytes: mib << 20, pages }),
        ..request(2, &[("nodes", "1")])
    };
    let plan = place(&host, "1-7", "", &guest(4096, Pages::Ordinary)).unwrap();
    assert_eq!(plan.memory_nodes, Some(BTreeSet::from([NodeId(1)])));
    refused(
        place(&host, "1-7", "", &guest(4097, Pages::Ordinary)),
        Code::MemoryShortage,
        "needs 4097 MiB of memory on the nodes of its CPUs (1), 4096 MiB are free there",
    );
    assert!(place(&host, "1-7", "", &guest(64, Pages::Huge(2048))).is_ok());
    refused(
        place(&host, "1-7", "", &guest(65, Pages::Huge(2048))),
        Code::MemoryShortage,
        "needs 65 MiB of huge pages of 2048 KiB on the nodes of its CPUs (1), 64 MiB are free there",
    );
    assert_eq!(place(&host, "1-7", "", &guest(1024, Pages::Huge(1 << 20))).unwrap_err().code, Code::MemoryShortage);
    // Two CPUs of one node would do, two of both have the memory.
    let wide = |mib: u64| Request {
        memory: Some(GuestMemory { bytes: mib << 20, pages: Pages::Huge(2048) }),
        ..request(2, &[])
    };
    assert_eq!(place(&host, "1-7", "", &wide(128)).unwrap().nodes.len(), 2);
    assert_eq!(place(&host, "1-7", "", &wide(64)).unwrap().nodes.len(), 1);
    assert_eq!(place(&host, "1-7", "", &wide(129)).unwrap_err().code, Code::MemoryShortage);
    assert_eq!(place(&host, "1-7", "", &wide(1 << 20)).unwrap_err().code, Code::Unsatisfiable);
    // Bound to all the memory there is, a guest has no less room than any other: no check.
    let wide = Request { memory: Some(GuestMemory { bytes: 9 << 30, pages: Pages::Ordinary }), ..request(5, &[]) };
    assert_eq!(place(&host, "1-7", "", &wide).unwrap().nodes.len(), 2);
}

#[test]
fn what_no_host_could_honour_is_said_first() {
    let host = grid(1, 1, 4, 2, false);
    refused(
        place(&host, "", "", &request(1, &[])),
        Code::Unsatisfiable,
        "no CPU of this host may be handed out: pinnable_cpus is empty or names no CPU that is online",
    );
    assert_eq!(place(&host, "40-50", "", &request(1, &[])).unwrap_err().code, Code::Unsatisfiable);
    refused(
        place(&host, "2-7", "", &request(3, &[("threads-per-core", "2")])),
        Code::PolicyInvalid,
        "3 vCPUs are not a multiple of threads-per-core=\"2\"",
    );
    refused(
        place(&host, "2-7", "", &request(1, &[("nodes", "0,250")])),
        Code::Unsatisfiable,
        "node 250 does not exist; this host has 0",
    );
    refused(place(&host, "2-7", "", &request(0, &[])), Code::PolicyInvalid, "the domain has no vCPU");
    assert_eq!(place(&host, "2-7", "", &request(u16::MAX, &[])).unwrap_err().code, Code::Unsatisfiable);
}

#[test]
fn unknown_siblings_are_never_a_whole_core() {
    let cpus = (0..4).map(|cpu| Cpu {
        cpu: CpuId(cpu),
        online: true,
        isolated: false,
        core: None,
        package: None,
        die: None,
        cluster: None,
        node: None,
        llc: None,
        class: None,
    });
    let host = Topology::new(cpus.collect(), vec![], CpuSet::new(), vec![]);
    assert_eq!(place(&host, "1-3", "", &request(1, &[])).unwrap_err().code, Code::Unsatisfiable);
    let plan = place(&host, "1-3", "", &request(2, &[("cores", "thread")])).unwrap();
    assert_eq!((vcpus(&plan), plan.guest.unwrap().threads), (vec![1, 2], 1));
    assert!(place(&host, "1-3", "", &request(1, &[("cores", "thread"), ("cache", "single")])).is_err());
}

/// Adversarial shapes end in an answer or a refusal.
#[test]
fn large_and_odd_hosts() {
    let lonely: Vec<_> = (0..2048).map(|cpu| Thread { core: cpu, llc: cpu, node: cpu, class: None }).collect();
    let lonely = host(&lonely);
    for count in [1, 2047, 2048] {
        let result = place(&lonely, "1-2047", "", &request(count, &[]));
        assert_eq!(result.is_ok(), count < 2048, "{count}");
    }
    let one_core = grid(1, 1, 1, 8, false);
    assert!(place(&one_core, "0-7", "", &request(8, &[("emulator", "share"), ("iothreads", "share")])).is_ok());
    assert!(place(&grid(64, 1, 4, 2, true), "4-511", "", &request(100, &[])).is_ok());
}

#[derive(Clone, Debug)]
struct Case {
    threads: Vec<Thread>,
    pinnable: BTreeSet<u16>,
    taken: BTreeSet<u16>,
    vcpus: u16,
    whole: bool,
    per_core: u16,
    numa: &'static str,
    cache: &'static str,
    isolate: bool,
}

fn cases() -> impl Strategy<Value = Case> {
    // A core: how many threads, which cache; a cache: which node. Caches lie within nodes, as in most machines.
    let cores = proptest::collection::vec((1..=2u16, 0..4u16), 1..=6);
    let spans = || prop_oneof![Just("prefer"), Just("single"), Just("any")];
    let subset = || proptest::collection::btree_set(0..12u16, 0..12);
    (
        cores,
        proptest::collection::vec(0..3u16, 4),
        subset(),
        subset(),
        1..7u16,
        any::<bool>(),
        0..3u16,
        (spans(), spans()),
        any::<bool>(),
    )
        .prop_map(|(cores, nodes, missing, taken, vcpus, whole, per_core, (numa, cache), isolate)| {
            let mut threads = Vec::new();
            for ((count, llc), core) in cores.into_iter().zip(0..) {
                threads.extend((0..count).map(|_| Thread { core, llc, node: nodes[usize::from(llc)], class: None }));
            }
            let pinnable = (0..threads.len() as u16).filter(|cpu| !missing.contains(cpu) || cpu % 3 != 0).collect();
            Case { threads, pinnable, taken, vcpus, whole, per_core, numa, cache, isolate }
        })
}

impl Case {
    fn request(&self) -> Request {
        let per_core = self.per_core.to_string();
        let mut policy = vec![("numa", self.numa), ("cache", self.cache), ("iothreads", "share")];
        policy.push(("emulator", if self.isolate { "isolate" } else { "share" }));
        policy.push(("cores", if self.whole { "whole" } else { "thread" }));
        if self.whole && self.per_core > 0 {
            policy.push(("threads-per-core", &per_core));
        }
        request(self.vcpus, &policy)
    }

    /// The smallest (nodes, caches) of any set of free pieces that would do, by looking at all of them.
    fn oracle(&self) -> Option<(usize, usize)> {
        let free: BTreeSet<u16> = self.pinnable.difference(&self.taken).copied().collect();
        let all: Vec<u16> = (0..self.threads.len() as u16).collect();
        let of_core = |core: u16| all.iter().copied().filter(move |&cpu| self.threads[usize::from(cpu)].core == core);
        // A piece: its vCPUs and one CPU that tells where it is.
        let pieces: Vec<(u16, u16)> = if self.whole {
            let cores: BTreeSet<u16> = self.threads.iter().map(|thread| thread.core).collect();
            let whole = cores.into_iter().filter(|&core| of_core(core).all(|cpu| free.contains(&cpu)));
            let sized = whole.map(|core| (of_core(core).count() as u16, of_core(core).next().unwrap()));
            sized
                .filter(|&(size, _)| size >= self.per_core)
                .map(|(size, cpu)| (if self.per_core > 0 { self.per_core } else { size }, cpu))
                .collect()
        } else {
            free.iter().map(|&cpu| (1, cpu)).collect()
        };
        if self.whole && self.per_core > 0 && self.vcpus % self.per_core != 0 {
            return None;
        }
        let extra = usize::from(self.isolate);
        let mut best = None;
        for subset in 0u32..1 << pieces.len() {
            let chosen: Vec<_> =
                pieces.iter().enumerate().filter(|(i, _)| subset & (1 << i) != 0).map(|(_, piece)| *piece).collect();
            let mut sizes: Vec<u16> = chosen.iter().map(|piece| piece.0).collect();
            sizes.sort_unstable_by(|a, b| b.cmp(a));
            if sizes.len() < extra || sizes[..sizes.len() - extra].iter().sum::<u16>() < self.vcpus {
                continue;
            }
            let nodes: BTreeSet<_> = chosen.iter().map(|piece| self.threads[usize::from(piece.1)].node).collect();
            let llcs: BTreeSet<_> = chosen.iter().map(|piece| self.threads[usize::from(piece.1)].llc).collect();
            if (self.numa == "single" && nodes.len() > 1) || (self.cache == "single" && llcs.len() > 1) {
                continue;
            }
            let span = (nodes.len(), llcs.len());
            best = Some(best.map_or(span, |best: (usize, usize)| best.min(span)));
        }
        best
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn never_a_refusal_and_never_a_wider_plan_than_brute_force_finds(case in cases()) {
        let topology = host(&case.threads);
        let pinnable: CpuSet = case.pinnable.iter().map(|&cpu| CpuId(cpu)).collect();
        let taken: CpuSet = case.taken.iter().map(|&cpu| CpuId(cpu)).collect();
        let request = case.request();
        let result = plan(&topology, &pinnable, &taken, &request);
        prop_assert_eq!(&result, &plan(&topology, &pinnable, &taken, &request));
        match (&result, case.oracle()) {
            (Ok(plan), Some((nodes, llcs))) => {
                // `alloc::check` has looked at the rest.
                let pieces = plan.vcpu_cpus().union(&plan.extra);
                let span: BTreeSet<_> = pieces.iter().map(|cpu| topology.cpu(cpu).unwrap().node).collect();
                let caches: BTreeSet<_> = pieces.iter().map(|cpu| topology.cpu(cpu).unwrap().llc).collect();
                if case.numa != "any" {
                    prop_assert_eq!(span.len(), nodes);
                    if case.cache != "any" {
                        prop_assert_eq!(caches.len(), llcs);
                    }
                }
            }
            (Err(refusal), None) => prop_assert!(refusal.code != Code::Internal, "{:?}", refusal),
            (result, oracle) => prop_assert!(false, "{:?} against {:?}", result, oracle),
        }
    }

    #[test]
    fn freeing_cpus_never_turns_a_yes_into_a_no(case in cases(), freed in 0..12u16) {
        let topology = host(&case.threads);
        let pinnable: CpuSet = case.pinnable.iter().map(|&cpu| CpuId(cpu)).collect();
        let mut taken: CpuSet = case.taken.iter().map(|&cpu| CpuId(cpu)).collect();
        let request = case.request();
        let before = plan(&topology, &pinnable, &taken, &request);
        taken.remove(CpuId(freed));
        let after = plan(&topology, &pinnable, &taken, &request);
        prop_assert!(before.is_err() || after.is_ok());
    }
}

/// The sentence names the constraint, the numbers where it fails and what stands in the way.
#[test]
fn refusals_name_the_constraint() {
    use CoreClass::{Efficiency, Performance};
    let two_nodes = grid(2, 2, 2, 2, false);
    let say = |host: &Topology, taken: &str, vcpus, policy: &[(&str, &str)]| {
        let share: &[(&str, &str)] = &[("emulator", "share"), ("iothreads", "share")];
        let everything = host.online().to_string();
        let refusal = place(host, &everything, taken, &request(vcpus, &[share, policy].concat())).unwrap_err();
        (refusal.reason.split(" (").next().unwrap().to_owned(), refusal.retry_when)
    };
    for (taken, vcpus, policy, needs) in [
        ("0,8", 8, &[("numa", "single")][..], "needs 4 whole cores on one node"),
        ("0,8", 8, &[("numa", "single"), ("nodes", "0-1")], "needs 4 whole cores on one of nodes 0-1"),
        ("0", 8, &[("numa", "single"), ("nodes", "0")], "needs 4 whole cores on node 0"),
        ("0", 8, &[("nodes", "0")], "needs 4 whole cores on node 0"),
        (
            "0,4,8,12",
            4,
            &[("cache", "single"), ("nodes", "1")],
            "needs 2 whole cores in one last-level cache on node 1",
        ),
        ("0", 8, &[("nodes", "0"), ("cores", "thread")], "needs 8 threads on node 0"),
        ("0", 16, &[("numa", "spread")], "needs 8 whole cores spread evenly over 2 nodes"),
        ("0-7", 2, &[("nodes", "0")], "needs 1 whole core on node 0"),
    ] {
        let (said, when) = say(&two_nodes, taken, vcpus, policy);
        assert_eq!(said, needs, "{policy:?}");
        // The same words: "needs 4 whole cores on one node", "when 4 whole cores are free on one node".
        let when = when.unwrap().replacen(" are free", "", 1).replacen(" is free", "", 1);
        assert_eq!(when.strip_prefix("when "), needs.strip_prefix("needs "));
    }
    let mut threads: Vec<_> =
        (0..4).map(|cpu| Thread { core: cpu / 2, llc: 0, node: 0, class: Some(Performance) }).collect();
    threads.extend((4..8).map(|cpu| Thread { core: cpu, llc: 0, node: 0, class: Some(Efficiency) }));
    let hybrid = host(&threads);
    assert_eq!(say(&hybrid, "0", 4, &[("core-class", "performance")]).0, "needs 2 whole performance cores");
    let (said, when) = say(&hybrid, "4", 4, &[("core-class", "efficiency"), ("cores", "thread")]);
    assert_eq!(
        (said.as_str(), when.unwrap().as_str()),
        ("needs 4 threads of efficiency cores", "when 4 threads of efficiency cores are free")
    );
    // What no waiting changes has no such condition.
    assert_eq!(say(&hybrid, "", 20, &[]).1, None);
}

#[test]
fn refusals_count_what_is_free_and_say_what_is_withheld() {
    let numbers = |cores: u32, threads: u32| Amount { cores: Some(cores), threads };
    let withheld = |refusal: &Refusal| -> Vec<(String, &'static str)> {
        refusal.room.iter().flat_map(|room| &room.withheld).map(|some| (some.cpus.clone(), some.why)).collect()
    };
    // Siblings are neighbours; two caches of two cores on each of two nodes.
    let host = grid(2, 2, 2, 2, false);
    let share = [("emulator", "share"), ("iothreads", "share"), ("numa", "single")];
    let refusal = place(&host, "1-15", "4,8-10", &request(8, &share)).unwrap_err();
    let room = refusal.room.as_ref().unwrap();
    assert_eq!((room.needed, room.free, room.pinnable), (numbers(4, 8), numbers(2, 5), numbers(4, 8)));
    let nodes: Vec<_> = room.nodes.iter().map(|part| (part.id, part.free, part.pinnable)).collect();
    assert_eq!(nodes, [(0, numbers(2, 5), numbers(3, 6)), (1, numbers(2, 5), numbers(4, 8))]);
    assert_eq!(withheld(&refusal), [("1".to_owned(), "sibling-not-pinnable"), ("5,11".to_owned(), "sibling-leased")]);
    assert!(room.llcs.is_empty());
    // In one cache: counted by cache.
    let refusal =
        place(&host, "0-15", "0,4,8,12", &request(4, &[&share[..2], &[("cache", "single"), ("nodes", "0")]].concat()));
    let refusal = refusal.unwrap_err();
    let room = refusal.room.as_ref().unwrap();
    assert_eq!(
        room.llcs.iter().map(|part| (part.id, part.free.cores)).collect::<Vec<_>>(),
        [(0, Some(1)), (4, Some(1))]
    );
    assert_eq!(withheld(&refusal), [("9-11,13-15".to_owned(), "other-node"), ("1,5".to_owned(), "sibling-leased")]);
    // Cores that lack a thread, and single threads.
    let threads = [0, 0, 1, 2, 2].map(|core| Thread { core, llc: 0, node: 0, class: None });
    let odd = self::host(&threads);
    let refusal =
        place(&odd, "0-4", "0", &request(4, &[&share[..2], &[("threads-per-core", "2")]].concat())).unwrap_err();
    assert_eq!(withheld(&refusal), [("1".to_owned(), "sibling-leased"), ("2".to_owned(), "too-few-threads")]);
    let refusal = place(&odd, "0-4", "0", &request(5, &[&share[..2], &[("cores", "thread")]].concat())).unwrap_err();
    let room = refusal.room.unwrap();
    assert_eq!((room.needed, room.free), (Amount { cores: None, threads: 5 }, Amount { cores: None, threads: 4 }));
}

/// A cache that is not known is not one cache, however many CPUs have none.
#[test]
fn unknown_caches_are_said_to_be_unknown() {
    let known = grid(1, 1, 4, 1, false);
    let cpus = known.cpus().iter().map(|cpu| Cpu { llc: None, ..cpu.clone() });
    let host = Topology::new(cpus.collect(), known.nodes().to_vec(), CpuSet::new(), vec![]);
    let refusal = place(&host, "1-3", "", &request(2, &[("cache", "single")])).unwrap_err();
    assert_eq!(
        (refusal.code, refusal.reason.as_str()),
        (
            Code::Unsatisfiable,
            "needs 2 whole cores in one last-level cache (2 vCPUs, 1 on each), this host has 0 of them pinnable; the \
             last-level cache of CPUs 1-3 is not known"
        )
    );
}
