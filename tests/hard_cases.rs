//! Hosts and requests that placement rules are known to get wrong, and those made to break one.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    reason = "integration tests"
)]

use std::collections::BTreeSet;

use virt_pin::alloc::plan::Plan;
use virt_pin::alloc::policy::Policy;
use virt_pin::alloc::refusal::Refusal;
use virt_pin::alloc::request::{GuestCell, Request};
use virt_pin::alloc::{self, Supply};
use virt_pin::cpuset::{CpuId, CpuSet, NodeId};
use virt_pin::error::Code;
use virt_pin::host::{CoreClass, CoreId, Cpu, LlcId, Node, Topology, shape};

fn set(text: &str) -> CpuSet {
    CpuSet::parse_kernel_list(text).unwrap()
}

/// Nothing runs beside the vCPUs, so that a host can be given away whole.
fn request(vcpus: u16, policy: &[(&str, &str)]) -> Request {
    let fixed = [("policy", "dedicated"), ("emulator", "share"), ("iothreads", "share")];
    Request::new(vcpus, Policy::from_attributes(fixed.iter().chain(policy).copied()).unwrap())
}

fn plan(topology: &Topology, pinnable: &CpuSet, taken: &CpuSet, request: &Request) -> Result<Plan, Refusal> {
    alloc::plan(&Supply { topology, pinnable, taken, housekeeping: &CpuSet::new() }, request)
}

/// A host of cores: (threads, cache, node); CPUs are numbered core by core.
fn cores(cores: &[(u16, u16, u16)], class: impl Fn(u16) -> Option<CoreClass>) -> Topology {
    let mut cpus: Vec<Cpu> = Vec::new();
    for &(threads, llc, node) in cores {
        let first = cpus.len() as u16;
        cpus.extend((first..first + threads).map(|cpu| Cpu {
            cpu: CpuId(cpu),
            online: true,
            isolated: false,
            core: Some(CoreId(first)),
            package: Some(0),
            die: None,
            cluster: None,
            node: Some(NodeId(node)),
            llc: Some(LlcId(llc)),
            class: class(threads),
        }));
    }
    let nodes: BTreeSet<u16> = cores.iter().map(|core| core.2).collect();
    let nodes = nodes.into_iter().map(|node| Node {
        node: NodeId(node),
        cpus: cpus.iter().filter(|cpu| cpu.node == Some(NodeId(node))).map(|cpu| cpu.cpu).collect(),
        memory_bytes: None,
        available_bytes: None,
        huge_pages: vec![],
        distances: vec![],
    });
    let nodes = nodes.collect();
    Topology::new(cpus, nodes, CpuSet::new(), vec![])
}

#[test]
fn a_cache_with_a_reserved_cpu_counts_for_what_it_has() {
    let host = shape::parse("1s8c1t,llc=2").unwrap();
    let three = plan(&host, &set("1-7"), &CpuSet::new(), &request(3, &[("cache", "single")])).unwrap();
    // The broken cache serves best: the whole one stays whole.
    assert_eq!(three.vcpu_cpus().to_string(), "1-3");
    let four = plan(&host, &set("1-7"), &CpuSet::new(), &request(4, &[("cache", "single")])).unwrap();
    assert_eq!(four.vcpu_cpus().to_string(), "4-7");
}

#[test]
fn cores_of_different_sizes_are_counted_one_by_one() {
    // Two performance cores of two threads, four efficiency cores of one.
    let class = |threads| Some(if threads == 2 { CoreClass::Performance } else { CoreClass::Efficiency });
    let hybrid = cores(&[(2, 0, 0), (2, 0, 0), (1, 0, 0), (1, 0, 0), (1, 0, 0), (1, 0, 0)], class);
    let all = hybrid.online();
    let fits = |vcpus, policy: &[(&str, &str)]| plan(&hybrid, all, &CpuSet::new(), &request(vcpus, policy));
    assert_eq!(fits(4, &[]).unwrap().vcpu_cpus().to_string(), "0-3");
    assert_eq!(fits(4, &[("core-class", "efficiency")]).unwrap().vcpu_cpus().to_string(), "4-7");
    assert_eq!(fits(8, &[]).unwrap().guest.unwrap().threads, 1);
    // An average of 8/6 threads a core would admit three of two; there are two.
    assert_eq!(fits(6, &[("threads-per-core", "2")]).unwrap_err().code, Code::Unsatisfiable);
    // A large core that lost threads is the size it has now: 8 + 5.
    let smt8 = cores(&[(8, 0, 0), (5, 0, 0)], |_| None);
    let eleven = plan(&smt8, smt8.online(), &CpuSet::new(), &request(11, &[])).unwrap();
    assert_eq!((eleven.parked.len(), eleven.vcpu_cpus().len()), (2, 11));
    let five = plan(&smt8, smt8.online(), &CpuSet::new(), &request(5, &[])).unwrap();
    assert_eq!((five.vcpu_cpus().to_string(), five.parked.len()), ("8-12".to_owned(), 0));
}

#[test]
fn equals_are_told_apart_by_number_alone() {
    let host = shape::parse("4s4c2t,numa=4,llc=8").unwrap();
    let mut reversed: Vec<Cpu> = host.cpus().to_vec();
    reversed.reverse();
    let nodes = host.nodes().iter().rev().cloned().collect();
    let reversed = Topology::new(reversed, nodes, host.possible().clone(), vec![]);
    for (vcpus, policy) in
        [(1, ("numa", "prefer")), (4, ("cache", "single")), (12, ("numa", "any")), (16, ("numa", "spread"))]
    {
        let [here, there] =
            [&host, &reversed].map(|host| plan(host, host.online(), &CpuSet::new(), &request(vcpus, &[policy])));
        assert_eq!(here, there);
        assert!(here.unwrap().vcpus.contains(&Some(CpuId(0))));
    }
}

#[test]
fn small_requests_do_not_dirty_idle_caches() {
    let host = shape::parse("1s32c2t,llc=8").unwrap();
    for (policy, fit) in [(("cores", "whole"), 4), (("cores", "thread"), 8)] {
        let mut taken = CpuSet::new();
        for started in 1..=24 {
            let plan = plan(&host, host.online(), &taken, &request(1, &[policy, ("cache", "any")])).unwrap();
            taken = taken.union(&plan.exclusive());
            let used: BTreeSet<_> = taken.iter().map(|cpu| host.cpu(cpu).unwrap().llc).collect();
            assert_eq!(used.len(), usize::div_ceil(started, fit), "{policy:?}: {started} started on {taken}");
        }
    }
}

#[test]
fn unequal_caches_are_filled_from_the_tightest() {
    // Caches of 2, 3 and 6 cores.
    let sizes = [(0, 2), (1, 3), (2, 6)];
    let list: Vec<_> = sizes.iter().flat_map(|&(llc, count)| (0..count).map(move |_| (1, llc, 0))).collect();
    let host = cores(&list, |_| None);
    let lies_on = |vcpus, taken: &str| {
        let plan = plan(&host, host.online(), &set(taken), &request(vcpus, &[])).unwrap();
        plan.vcpu_cpus().to_string()
    };
    assert_eq!(lies_on(2, ""), "0-1");
    assert_eq!(lies_on(3, ""), "2-4");
    assert_eq!(lies_on(4, ""), "5-8");
    // Two caches either way; what is left of the larger one serves best.
    assert_eq!(lies_on(7, ""), "0-1,5-9");
    assert_eq!(lies_on(1, "5-6"), "0");
}

/// What a hostile host or request gets, in steps that are bounded: the test would never end otherwise.
#[test]
fn an_answer_whatever_is_asked() {
    let ways: &[&[(&str, &str)]] = &[
        &[],
        &[("numa", "single")],
        &[("numa", "any"), ("cache", "any")],
        &[("cache", "single")],
        &[("cores", "thread")],
        &[("numa", "spread")],
    ];
    let largest = 1024;
    let lonely: Vec<_> = (0..largest).map(|cpu| (1, cpu, cpu)).collect();
    let one_core = [(8, 0, 0)];
    let one_node: Vec<_> = (0..largest / 2).map(|core| (2, core * 2, 0)).collect();
    for (list, name) in
        [(&lonely[..], "each CPU a node"), (&one_core[..], "one core"), (&one_node[..], "each core a cache")]
    {
        let host = cores(list, |_| None);
        let all = host.online().len() as u16;
        for policy in ways {
            for vcpus in [1, all / 2, all - 1, all, all + 1, u16::MAX] {
                let result = plan(&host, host.online(), &CpuSet::new(), &request(vcpus, policy));
                let spread = policy.contains(&("numa", "spread"));
                if vcpus > all {
                    assert!(result.is_err(), "{name} {policy:?} {vcpus}");
                } else if !policy.iter().any(|(_, value)| *value == "single") && !spread {
                    assert!(result.is_ok(), "{name} {policy:?} {vcpus}: {result:?}");
                }
                assert!(result.is_ok_and(|plan| plan.vcpu_cpus().len() == usize::from(vcpus)) || vcpus != 1 || spread);
            }
        }
    }
}

/// A definition that asks for this holds up every other VM's start.
#[test]
fn a_flood_of_guest_cells_is_refused_at_once() {
    let host = shape::parse("2s4c2t").unwrap();
    let mut flood = request(u16::MAX, &[]);
    flood.cells = vec![GuestCell { vcpus: CpuSet::new(), bytes: 4096, bound: None }; 900_000];
    flood.cells[0].vcpus = (0..u16::MAX).map(CpuId).collect();
    let begin = std::time::Instant::now();
    let refusal = plan(&host, host.online(), &CpuSet::new(), &flood).unwrap_err();
    assert_eq!(
        (refusal.code, refusal.reason.as_str()),
        (Code::Unsatisfiable, "65535 vCPUs are more than any host has CPUs")
    );
    assert!(begin.elapsed().as_secs() < 5, "{:?}", begin.elapsed());
}

#[test]
fn an_allowlist_that_splits_every_core() {
    let host = shape::parse("2s16c2t,numa=2").unwrap();
    let first_threads = set("0-31");
    let whole = plan(&host, &first_threads, &CpuSet::new(), &request(1, &[])).unwrap_err();
    assert_eq!(whole.code, Code::Unsatisfiable);
    let threads = plan(&host, &first_threads, &CpuSet::new(), &request(32, &[("cores", "thread")])).unwrap();
    assert_eq!(threads.guest.unwrap().threads, 1);
}
