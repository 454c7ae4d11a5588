//! Hosts on which everything may be odd at once, and requests that ask for everything at once.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    reason = "integration tests"
)]

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use virt_pin::alloc::policy::{ATTRIBUTES, Policy};
use virt_pin::alloc::request::{GuestCell, GuestMemory, Pages, Request};
use virt_pin::alloc::{self, Supply};
use virt_pin::cpuset::{CpuId, CpuSet, NodeId};
use virt_pin::error::Code;
use virt_pin::host::{CoreClass, CoreId, Cpu, HugePages, LlcId, Node, Topology};

/// A core: its threads (online or not), cache, node and class; what is `None` the machine does not say.
type Core = (Vec<bool>, Option<u16>, Option<u16>, Option<bool>, bool);

fn host(cores: &[Core], memory: &[(u64, u64)], numa: bool, one_class: bool) -> Topology {
    let mut cpus: Vec<Cpu> = Vec::new();
    for (threads, llc, node, fast, known) in cores {
        let first = cpus.len() as u16;
        let lowest = threads.iter().position(|online| *online).map(|index| CoreId(first + index as u16));
        let class = fast.map(|fast| if fast { CoreClass::Performance } else { CoreClass::Efficiency });
        cpus.extend((first..).zip(threads).map(|(cpu, &online)| Cpu {
            cpu: CpuId(cpu),
            online,
            isolated: false,
            core: lowest.filter(|_| *known),
            package: node.map(|node| node / 2),
            die: *llc,
            cluster: None,
            node: node.filter(|_| numa).map(NodeId),
            llc: llc.map(LlcId),
            class,
        }));
    }
    let nodes = memory.iter().zip(0..).filter(|_| numa).map(|(&(total, free), node)| Node {
        node: NodeId(node),
        cpus: cpus.iter().filter(|cpu| cpu.online && cpu.node == Some(NodeId(node))).map(|cpu| cpu.cpu).collect(),
        memory_bytes: Some(total << 30),
        available_bytes: Some(total.min(free) << 30),
        huge_pages: vec![HugePages { size_kib: 2048, total: total * 16, free: free * 8 }],
        distances: vec![],
    });
    let nodes = nodes.collect();
    Topology::new(cpus, nodes, CpuSet::new(), vec![]).keeping_vms_in_one_class(one_class)
}

fn hosts() -> impl Strategy<Value = Topology> {
    let core = (
        vec(prop::bool::weighted(0.9), 1..4),
        option::weighted(0.95, 0..3u16),
        option::weighted(0.95, 0..3u16),
        option::of(any::<bool>()),
        prop::bool::weighted(0.95),
    );
    let memory = vec((0..4u64, 0..4u64), 3);
    (vec(core, 1..6), memory, prop::bool::weighted(0.9), prop::bool::weighted(0.2))
        .prop_map(|(cores, memory, numa, one_class)| host(&cores, &memory, numa, one_class))
}

fn cpus(most: usize) -> impl Strategy<Value = CpuSet> {
    vec(0..12u16, 0..most).prop_map(|cpus| cpus.into_iter().map(CpuId).collect())
}

/// One word for each attribute that has words, the default as often as not; lists now and then.
fn policies() -> impl Strategy<Value = Option<Policy>> {
    let lists = [option::weighted(0.15, cpus(4)), option::weighted(0.15, cpus(5)), option::weighted(0.15, cpus(5))];
    (vec(any::<(bool, u8)>(), ATTRIBUTES.len()), lists, option::weighted(0.3, 1..4u8)).prop_map(
        |(words, [nodes, named, dedicated], threads)| {
            let mut pairs = vec![("policy", "dedicated".to_owned())];
            for (attribute, (default, word)) in ATTRIBUTES.iter().zip(words).skip(1) {
                let words: Vec<_> =
                    attribute.values.iter().filter(|word| !attribute.unsupported.contains(word)).collect();
                if !default && words.len() > 1 {
                    pairs.push((attribute.name, (*words[usize::from(word) % words.len()]).to_owned()));
                }
            }
            for (name, list) in [("nodes", nodes), ("cpus", named), ("dedicated-vcpus", dedicated)] {
                pairs.extend(list.filter(|list| !list.is_empty()).map(|list| (name, list.to_string())));
            }
            pairs.extend(threads.map(|threads| ("threads-per-core", threads.to_string())));
            // What contradicts itself is refused, which is another test's matter.
            Policy::from_attributes(pairs.iter().map(|(name, value)| (*name, value.as_str()))).ok()
        },
    )
}

fn requests() -> impl Strategy<Value = Option<Request>> {
    let memory = option::weighted(0.5, (1..4096u64, any::<bool>()));
    (policies(), 1..8u16, 0..3u16, memory, option::weighted(0.3, 1..8u16), vec(0..3u16, 0..3)).prop_map(
        |(policy, vcpus, iothreads, memory, cut, devices)| {
            let memory = memory.map(|(mib, huge)| {
                let pages = if huge { Pages::Huge(2048) } else { Pages::Ordinary };
                GuestMemory { bytes: mib << 20, pages }
            });
            let bytes = memory.map_or(1 << 30, |memory| memory.bytes) / 2;
            let cells = cut.filter(|&cut| cut < vcpus).map(|cut| {
                let cell =
                    |from: u16, to: u16| GuestCell { vcpus: (from..to).map(CpuId).collect(), bytes, bound: None };
                vec![cell(0, cut), cell(cut, vcpus)]
            });
            let devices = devices.into_iter().map(NodeId).collect();
            let request = Request::new(vcpus, policy?);
            Some(Request { iothreads, memory, cells: cells.unwrap_or_default(), devices, ..request })
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn is_answered_the_same_way_each_time_and_never_breaks_a_rule(
        host in hosts(), request in requests(), barred in cpus(4), taken in cpus(6), stays in 0..3u16,
    ) {
        let Some(request) = request else { return Ok(()) };
        let pinnable = host.online().difference(&barred).difference(&(0..stays).map(CpuId).collect());
        let housekeeping = host.online().difference(&pinnable).difference(&taken);
        let supply = Supply { topology: &host, pinnable: &pinnable, taken: &taken, housekeeping: &housekeeping };
        let result = alloc::plan(&supply, &request);
        // Every plan has been checked against its request: that one breaks a rule would be said so.
        if let Err(refusal) = &result {
            prop_assert!(refusal.code != Code::Internal, "{}", refusal.reason);
            if refusal.code.retry() {
                // Worth waiting for: the same host without leases, its memory unused, has a place.
                let (idle, nobody) = (host.idle(), CpuSet::new());
                let empty = Supply { topology: &idle, taken: &nobody, ..supply };
                prop_assert!(alloc::plan(&empty, &request).is_ok(), "{}: {}", refusal.code, refusal.reason);
            }
        }
        // The order in which the machine lists its CPUs is nothing.
        let mut listed = host.cpus().to_vec();
        listed.reverse();
        let other = Topology::new(listed, host.nodes().to_vec(), CpuSet::new(), vec![])
            .keeping_vms_in_one_class(host.keeps_vms_in_one_class());
        prop_assert_eq!(&result, &alloc::plan(&Supply { topology: &other, ..supply }, &request));
        // Who has had these CPUs can have them again, whatever else is free. (Memory may lie elsewhere by then.)
        if let (Ok(plan), None) = (&result, request.memory) {
            let taken = taken.union(&pinnable.difference(&plan.exclusive()));
            let again = alloc::plan(&Supply { taken: &taken, ..supply }, &request);
            prop_assert_eq!(again.map(|again| again.exclusive()), Ok(plan.exclusive()));
        }
    }
}
