//! What a start leaves for later ones to know of the machine (`topology.json`): who writes it, who believes it, and that
//! nobody's start depends on it.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    reason = "integration tests"
)]

mod machine;

use std::fs;
use std::os::unix::fs::MetadataExt;

use machine::{Machine, Vm};
use virt_pin::error::Code;

const SURVEY: &str = "/run/virt-pin/topology.json";

/// From now on sysfs says that no two CPUs share a core.
fn split_cores(machine: &Machine) {
    for cpu in 0..16 {
        machine.put(&format!("/sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list"), &format!("{cpu}\n"));
    }
}

#[test]
fn a_start_leaves_it_and_the_next_one_believes_it() {
    let machine = Machine::new("2-7,10-15");
    machine.prepare(&Vm::new(1, 2));
    assert_eq!(fs::metadata(machine.path(SURVEY)).unwrap().mode() & 0o7777, 0o600);
    split_cores(&machine);
    let vm2 = Vm::new(2, 2);
    machine.prepare(&vm2);
    assert_eq!(machine.vcpus_of(&vm2), [3, 11], "one core of two threads");
    // A CPU that goes is noticed, and with it everything else.
    machine.put("/sys/devices/system/cpu/online", "0-14\n");
    let vm3 = Vm::new(3, 2);
    machine.prepare(&vm3);
    assert_eq!(machine.vcpus_of(&vm3), [4, 5]);
    assert!(machine.read(SURVEY).contains("\"online\":\"0-14\""));
}

#[test]
fn only_a_start_that_is_granted_leaves_it() {
    let machine = Machine::new("2-3,10-11");
    machine.event(&Vm::new(1, 6), "prepare begin").refused(Code::Unsatisfiable);
    machine.prepare(&Vm::new(2, 2).without_policy());
    machine.cli(&["check"]);
    machine.cli(&["explain", "--help"]);
    machine.cli(&["capacity"]);
    assert!(!machine.path(SURVEY).exists());
    machine.prepare(&Vm::new(3, 2));
    let left = machine.read(SURVEY);
    split_cores(&machine);
    // Whoever asks for the topology itself is told what sysfs says.
    let topology = machine.json(&["topology"]);
    assert_eq!(topology["cpus"][2]["core"], 2, "{topology}");
    assert_ne!(topology["cpus"][10]["core"], 2);
    assert_eq!(machine.read(SURVEY), left);
}

#[test]
fn what_lies_in_its_place_stops_no_start() {
    for (number, text) in ["", "{}", "\0", "[1,2", "{\"version\":7}"].into_iter().enumerate() {
        let machine = Machine::new("2-7,10-15");
        machine.put(SURVEY, text);
        machine.prepare(&Vm::new(number as u32 + 1, 2));
        assert!(machine.read(SURVEY).contains("\"online\":\"0-15\""), "{text:?}: written anew");
    }
    let machine = Machine::new("2-7,10-15");
    machine.make_state_dir();
    fs::create_dir(machine.path(SURVEY)).unwrap();
    machine.prepare(&Vm::new(1, 2));
    machine.prepare(&Vm::new(2, 2));
    assert_eq!(machine.leased().len(), 2);
}

#[test]
fn many_first_starts_at_once() {
    let machine = Machine::new("1-7,9-15");
    let vms: Vec<Vm> = (1..=7).map(|number| Vm::new(number, 2)).collect();
    std::thread::scope(|scope| vms.iter().for_each(|vm| drop(scope.spawn(|| machine.prepare(vm)))));
    assert_eq!(machine.leased().len(), 7);
    let survey: serde_json::Value = serde_json::from_str(&machine.read(SURVEY)).unwrap();
    assert_eq!(survey["core"].as_array().unwrap().len(), 16);
}
