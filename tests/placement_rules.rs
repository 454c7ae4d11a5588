//! The rules that `cargo bench --bench placement` compares ours with answer as their authors' algorithms do, worked out by
//! hand on small hosts; streams keep what they promise; and the document names what is compared.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    dead_code,
    reason = "integration tests of a part of a benchmark, which has no test harness of its own"
)]

#[path = "../benches/placement/hosts.rs"]
mod hosts;
#[path = "../benches/placement/machine.rs"]
mod machine;
#[path = "../benches/placement/rules/mod.rs"]
mod rules;
#[path = "../benches/placement/streams.rs"]
mod streams;

use std::collections::BTreeMap;

use machine::{Demand, Machine};
use rules::Rule;
use rules::first_fit::FirstFit;
use rules::kubelet::Kubelet;
use rules::nova::Nova;
use rules::ours::Ours;
use rules::ovirt::Ovirt;
use streams::Event;
use virt_pin::host::shape;

/// A question: a host of which only some cores are free. Where a core has two threads, its lowest is its number.
struct Question {
    machine: Machine,
    free: Vec<usize>,
}

fn on(shape: &str, free: &[usize]) -> Question {
    let topology = shape::parse(shape).unwrap();
    let pinnable = topology.online().clone();
    Question { machine: Machine::new("test", topology, pinnable), free: free.to_vec() }
}

impl Question {
    fn answer(&self, rule: &dyn Rule, vcpus: usize, single: bool) -> Option<Vec<usize>> {
        let free = self.free.iter().copied().collect();
        let mut cores = rule.place(&self.machine, &free, &Demand { vcpus, single })?;
        cores.sort_unstable();
        Some(cores)
    }

    #[track_caller]
    fn gives(&self, rule: &dyn Rule, vcpus: usize, single: bool, cores: &[usize]) {
        assert_eq!(self.answer(rule, vcpus, single).as_deref(), Some(cores));
    }

    #[track_caller]
    fn refuses(&self, rule: &dyn Rule, vcpus: usize, single: bool) {
        assert_eq!(self.answer(rule, vcpus, single), None);
    }
}

/// Two sockets, each one node and one cache, of four cores with two threads: 0-3 and 4-7.
const TWO_SOCKETS: &str = "2s4c2t";

#[test]
fn first_fit_counts_upwards() {
    let question = on(TWO_SOCKETS, &[1, 3, 4, 5, 6, 7]);
    question.gives(&FirstFit, 6, false, &[1, 3, 4]);
    question.gives(&FirstFit, 5, false, &[1, 3, 4]);
    question.gives(&FirstFit, 6, true, &[4, 5, 6]);
    question.refuses(&FirstFit, 14, false);
    question.refuses(&FirstFit, 10, true);
}

#[test]
fn nova_gives_each_guest_cell_a_host_cell() {
    let (pack, spread) = (Nova { pack: true }, Nova { pack: false });
    let question = on(TWO_SOCKETS, &[1, 3, 4, 5, 6]);
    // Pack: the cell with less left; spread: the one with more.
    question.gives(&pack, 4, false, &[1, 3]);
    question.gives(&spread, 4, false, &[4, 5]);
    question.gives(&pack, 6, false, &[4, 5, 6]);
    // Of equals the first.
    on(TWO_SOCKETS, &[0, 1, 4, 5]).gives(&spread, 2, false, &[0]);
    // A node could hold eight vCPUs: one guest cell, though no node can now.
    question.refuses(&pack, 8, false);
    // No node could ever hold ten: guest cells of six and four; the first fits on the second node only.
    question.gives(&pack, 10, false, &[1, 3, 4, 5, 6]);
    question.refuses(&pack, 10, true);
    question.refuses(&pack, 12, false);
}

#[test]
fn kubelet_takes_whole_units_and_then_the_fullest_that_fits() {
    let (hints, none) = (Kubelet { affinity: true }, Kubelet { affinity: false });
    // Caches of two cores: 0-1, 2-3, 4-5, 6-7.
    let shape = "2s4c2t,llc=4";
    // A part of a cache comes from the one with least free; a whole one only from one that is free.
    let question = on(shape, &[0, 2, 3]);
    question.gives(&hints, 2, false, &[0]);
    question.gives(&hints, 4, false, &[2, 3]);
    question.gives(&hints, 6, false, &[0, 2, 3]);
    // No cache has it: cores in the order of nodes and numbers.
    on(shape, &[0, 2, 5, 7]).gives(&hints, 4, true, &[0, 2]);
    // A whole node.
    on(shape, &[0, 4, 5, 6, 7]).gives(&none, 8, false, &[4, 5, 6, 7]);
    // The hint keeps it on one node; without, a whole cache is taken first, and the rest where least is free.
    let question = on(shape, &[0, 4, 5, 6]);
    question.gives(&hints, 6, false, &[4, 5, 6]);
    question.gives(&none, 6, false, &[0, 4, 5]);
    question.gives(&none, 6, true, &[4, 5, 6]);
    question.gives(&hints, 8, false, &[0, 4, 5, 6]);
    question.refuses(&hints, 8, true);
    question.refuses(&hints, 10, false);
    // Odd requests are refused by full-pcpus-only: they ask for the next even number here.
    question.gives(&hints, 5, false, &[4, 5, 6]);
}

#[test]
fn kubelet_hints_are_the_smallest_of_the_narrowest_masks() {
    let hints = Kubelet { affinity: true };
    // Four nodes of three cores: nodes 0 and 2 (mask 5) before 1 and 2 (6) and 2 and 3 (12).
    let question = on("4s3c1t", &[0, 3, 6, 7, 8, 9]);
    question.gives(&hints, 4, false, &[0, 6, 7, 8]);
    question.gives(&hints, 1, false, &[0]);
    question.gives(&hints, 2, true, &[6, 7]);
}

#[test]
fn ovirt_goes_to_the_emptiest_socket() {
    let question = on(TWO_SOCKETS, &[0, 1, 4, 5, 6]);
    question.gives(&Ovirt, 4, false, &[4, 5]);
    question.gives(&Ovirt, 8, false, &[0, 4, 5, 6]);
    question.refuses(&Ovirt, 8, true);
    question.refuses(&Ovirt, 12, false);
    // Of equals the first.
    on(TWO_SOCKETS, &[1, 2, 5, 6]).gives(&Ovirt, 2, false, &[1]);
    // It knows sockets, not nodes: 0-1 and 2-3 are two.
    let question = on("1s4c1t,numa=2", &[1, 2, 3]);
    question.gives(&Ovirt, 2, false, &[1, 2]);
    question.refuses(&Ovirt, 2, true);
}

#[test]
fn ours_is_the_allocator() {
    let question = on("2s4c2t,llc=4", &[0, 2, 3, 4, 5, 6, 7]);
    question.gives(&Ours::new(), 2, false, &[0]);
    question.gives(&Ours::new(), 4, true, &[2, 3]);
    question.refuses(&Ours::new(), 10, true);
    question.refuses(&Ours::new(), 16, false);
}

#[test]
fn what_may_not_be_handed_out_is_never_free() {
    let hosts = hosts::all();
    let host = hosts.iter().find(|host| host.name == "half cores missing").unwrap();
    assert_eq!((host.cores.len(), host.offered().len()), (32, 24));
    for rule in rules::all() {
        let cores = rule.place(host, &host.offered(), &Demand { vcpus: 8, single: true }).unwrap();
        assert!(cores.iter().all(|&core| host.cores[core].cpus.is_subset(&host.pinnable)), "{}", rule.name());
    }
}

#[test]
fn streams_keep_their_load() {
    for machine in hosts::all() {
        let capacity = machine.holds(machine.offered());
        for mix in &streams::MIXES {
            let stream = streams::stream(&machine, mix, 85, 1);
            let mut present = BTreeMap::new();
            let mut most = 0;
            for event in &stream {
                match event {
                    Event::Start(vm, demand) => assert_eq!(present.insert(*vm, machine.cost(demand)), None),
                    Event::Stop(vm) => assert!(present.remove(vm).is_some()),
                }
                most = most.max(present.values().sum::<usize>());
            }
            assert!(most <= capacity * 85 / 100, "{}: {most} of {capacity}", machine.name);
            assert!(stream.is_empty() || most + 32 > capacity * 85 / 100, "{}: {most} of {capacity}", machine.name);
        }
    }
}

#[test]
fn the_document_names_every_rule_and_host() {
    let document = include_str!("../docs/placement.md");
    for host in hosts::all() {
        assert!(document.contains(&format!("| {} |", host.name)), "docs/placement.md has no host {}", host.name);
    }
    for rule in rules::all() {
        assert!(document.contains(&format!("| {} |", rule.name())), "docs/placement.md has no rule {}", rule.name());
    }
}
