//! Builds of different age on one machine: files of former versions are read, those of later ones are refused and left alone, and
//! no VM is killed or image deleted for it.
//!
//! `state/leases-N.json` was written by a build that wrote version N, and stays as it is for as long as that is read.
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
use std::io::Write as _;

use machine::{Machine, Vm};
use serde_json::Value;
use virt_pin::alloc::policy::ATTRIBUTES;
use virt_pin::error::Code;

const LEASES: &str = "/run/virt-pin/leases.json";
const HOST: &str = "/run/virt-pin/host.json";

/// What the builds that wrote `state/leases-N.json` were asked for.
fn machine(version: u32) -> Machine {
    let machine = Machine::new("1-7,9-15");
    let file = format!("{}/tests/state/leases-{version}.json", env!("CARGO_MANIFEST_DIR"));
    machine.put(LEASES, &fs::read_to_string(file).unwrap());
    machine
}

/// Each lease without what version 1 did not know.
fn known_to_all(leases: Vec<Value>) -> Vec<Value> {
    let without = |mut lease: Value| {
        lease.as_object_mut().unwrap().remove("request");
        lease
    };
    leases.into_iter().map(without).collect()
}

#[test]
fn files_of_every_version_are_read_and_written_as_the_latest() {
    let mut all = Vec::new();
    for version in [1, 2] {
        let machine = machine(version);
        let before = machine.leases().unwrap();
        assert!(before.starts_with(&format!("{{\"version\":{version},")));
        let leased = machine.leased();
        // Who only looks writes nothing.
        let list = machine.cli(&["list"]).printed();
        assert!(["vm1", "vm2", "vm3", "vm4"].iter().all(|name| list.contains(name)), "{list}");
        machine.event(&Vm::new(7, 1).without_policy(), "prepare begin").silent();
        assert_eq!(machine.leases().unwrap(), before);
        // A change keeps all that was there.
        let late = Vm::new(5, 1).with("cores='thread'");
        machine.prepare(&late);
        assert!(machine.leases().unwrap().starts_with("{\"version\":2,"));
        let now = machine.leased();
        assert_eq!((now.len(), &now[..4]), (5, &leased[..]), "version {version}");
        machine.event(&late, "release end shutdown").silent();
        assert_eq!(machine.leased(), leased);
        all.push(known_to_all(leased));
    }
    assert_eq!(all[0], all[1], "the same events, the same leases");
}

/// Whatever a later version has in it, none of it is understood, overwritten or thrown away.
#[test]
fn leases_of_a_later_version_are_left_alone() {
    let machine = machine(2);
    let vm = Vm::new(1, 2);
    machine.qemu(&vm, 700, &[1, 9], "2,10");
    let _alive = machine.alive(&vm);
    machine.put(LEASES, "{\"version\":3,\"boot_id\":\"x\",\"cpus\":[{\"colour\":\"red\"}]}\n");
    let before = machine.everything();
    for event in ["prepare begin", "migrate begin", "started begin"] {
        let said = machine.event(&vm, event).refused(Code::StateNewer);
        assert!(said.contains("has version 3; this is virt-pin"), "{event}: {said}");
    }
    // libvirt would kill a VM, or delete an image.
    for event in ["reconnect begin", "restore begin", "release end shutdown"] {
        machine.event(&vm, event).reported(Code::StateNewer);
    }
    machine.event(&vm, "stopped end").silent();
    for command in [
        &["list"][..],
        &["lease", "vm1"],
        &["capacity"],
        &["map"],
        &["explain", "-"],
        &["reconcile"],
        &["repack"],
        &["repack", "--dry-run"],
    ] {
        let run = machine.cli_with(command, vm.xml());
        let said = run.complaint(Code::StateNewer);
        assert!(run.code != Some(0) && said.contains("has version 3"), "{command:?}: {run:?}");
    }
    let check = machine.cli(&["check"]);
    assert!(check.code == Some(3) && check.stdout.contains("has version 3"), "{check:?}");
    let _ = machine.cli(&["agent", "--once"]);
    machine.cli(&["uninstall"]).printed();
    let mut after = machine.everything();
    after.retain(|path, _| !path.file_name().unwrap().to_string_lossy().starts_with("agent."));
    assert!(after == before, "something has changed");
}

#[test]
fn former_values_of_a_later_version_are_left_alone() {
    let machine = machine(2);
    let vm = Vm::new(1, 2);
    let later = "{\"version\":2,\"irqs\":{\"/proc/irq/4/smp_affinity_list\":\"0-15\"},\"more\":1}\n";
    machine.put(HOST, later);
    machine.put("/proc/irq/4/smp_affinity_list", "0\n");
    machine.event(&vm, "release end shutdown");
    machine.event(&vm, "reconnect begin");
    let refused =
        machine.event(&Vm::new(5, 1).with("cores='thread' irqs='away'"), "prepare begin").refused(Code::StateNewer);
    assert!(refused.contains("host.json has version 2"), "{refused}");
    let said = machine.cli(&["reconcile"]).printed();
    assert!(said.contains("host.json has version 2"), "{said}");
    let check = machine.cli(&["check"]);
    assert!(check.stdout.replace('\n', " ").contains("version 2"), "{check:?}");
    assert_eq!((machine.read(HOST).as_str(), machine.read("/proc/irq/4/smp_affinity_list").as_str()), (later, "0\n"));
}

/// The words that a request in a file of version 2 may have. A build that has left the house reads no others, and takes a file
/// with one for damaged: a new attribute or value takes a new version of `leases.json` (`VERSION` in src/lock/leases.rs) and a
/// list here. Before the first release they are added to this one.
const WORDS: &[&str] = &[
    "policy shared dedicated",
    "cores whole thread",
    "threads-per-core auto",
    "numa prefer single spread any",
    "nodes",
    "cache prefer single any",
    "cpus",
    "dedicated-vcpus",
    "memory follow any",
    "emulator housekeeping isolate share",
    "iothreads housekeeping isolate share",
    "core-class any performance efficiency",
    "topology host keep require",
    "locality none devices",
    "isolation vms partition slices",
    "irqs stay away",
    "realtime no yes",
    "core-sched none tenant",
    "tenant",
    "fallback refuse shared",
];

#[test]
fn new_words_take_a_new_version() {
    let words = ATTRIBUTES.iter().map(|attribute| format!("{} {}", attribute.name, attribute.values.join(" ")));
    assert_eq!(words.map(|line| line.trim_end().to_owned()).collect::<Vec<_>>(), WORDS);
}

#[test]
fn a_hook_of_another_build_is_found() {
    let machine = Machine::new("2-3,10-11");
    machine.cli(&["install"]).printed();
    let found = || {
        let view = machine.json(&["check"]);
        let checks = view["checks"].as_array().unwrap().clone();
        checks.into_iter().find(|found| found["check"] == "is of this build").unwrap()
    };
    assert_eq!(found()["result"], "pass");
    let hook = machine.path("/etc/libvirt/hooks/qemu.d/10-virt-pin");
    fs::OpenOptions::new().append(true).open(&hook).unwrap().write_all(b"of old").unwrap();
    let other = found();
    assert_eq!(other["result"], "warn");
    assert!(other["message"].as_str().unwrap().contains("`virt-pin install` replaces it"), "{other}");
    let said = machine.cli(&["install"]).printed();
    assert!(said.contains("It replaces an earlier one"), "{said}");
    assert_eq!(found()["result"], "pass");
}
