//! Live migration between two hosts: the VM has CPUs of its own on each side, at any time of one side at least, and failures
//! leave nothing behind.

use std::thread;

use crate::guest::{self, Guest};
use crate::host::Host;
use crate::leases::CONFIG;
use crate::shape::Shape;
use crate::vm::Output;

impl Host {
    /// Moves a VM that runs here to the host with this address.
    fn migrate(&self, name: &str, address: &str, more: &[&str]) -> Output {
        let (to, by) = (format!("qemu+tcp://{address}/system"), format!("tcp://{address}"));
        self.virsh(&[&["migrate", "--live", "--persistent", name, &to, &by], more].concat())
    }

    /// The names of those who hold leases, with their states.
    fn holders(&self) -> Vec<(String, String)> {
        let list: serde_json::Value = serde_json::from_str(&self.exec(&["virt-pin", "--json", "list"]).ok()).unwrap();
        let text = |lease: &serde_json::Value, key: &str| lease[key].as_str().unwrap().to_owned();
        let leases = list.as_array().unwrap_or_else(|| list["leases"].as_array().unwrap());
        leases.iter().map(|lease| (text(lease, "name"), text(lease, "state"))).collect()
    }

    fn runs_alone_or_with(&self, names: &[&str]) -> bool {
        self.holders() == names.iter().map(|name| ((*name).to_owned(), "running".to_owned())).collect::<Vec<_>>()
    }
}

#[test]
fn there_and_back() {
    let Some([one, two]) = Host::pair(Shape::default(), CONFIG) else { return };
    one.run(&Guest::new("mover").vcpus(2).policy("policy='dedicated'"));
    one.assert_vcpus("mover", &["2", "3"]);
    two.run(&Guest::new("load").vcpus(4).policy("policy='dedicated'"));
    two.assert_vcpus("load", &["2", "3", "4", "5"]);
    // What will happen can be asked before.
    let state = two.exec(&["virt-pin", "gather", "--state"]).ok();
    one.put("/run/two.txt", 0o600, state.as_bytes());
    let foreseen = one.exec(&["virt-pin", "--json", "explain", "--for-host", "/run/two.txt", "mover"]).ok();
    let foreseen: serde_json::Value = serde_json::from_str(&foreseen).unwrap();
    assert_eq!(foreseen["plan"]["vcpus"], serde_json::json!([6, 7]), "{foreseen}");

    one.migrate("mover", "10.9.0.2", &[]).ok();
    two.assert_vcpus("mover", &["6", "7"]);
    two.wait_for_live_pins("mover", &["6", "7"]);
    two.assert_vcpus("load", &["2", "3", "4", "5"]);
    assert!(two.runs_alone_or_with(&["load", "mover"]), "{:?}", two.holders());
    one.wait_until("the source has its CPUs back", |host| host.holders().is_empty());

    one.run(&Guest::new("next").vcpus(2).policy("policy='dedicated'"));
    let next = one.vcpus("next");
    two.migrate("mover", "10.9.0.1", &[]).ok();
    let mover = one.vcpus("mover");
    assert!(mover.iter().all(|cpu| !next.contains(cpu)) && mover.len() == 2, "{mover:?} beside {next:?}");
    one.wait_for_live_pins("mover", &mover);
    assert_eq!(one.vcpus("next"), next);
    two.wait_until("the other has its CPUs back", |host| host.runs_alone_or_with(&["load"]));
    two.assert_vcpus("load", &["2", "3", "4", "5"]);
}

#[test]
fn what_fails_leaks_nothing() {
    let Some([one, two]) = Host::pair(Shape::default(), CONFIG) else { return };
    for host in [&one, &two] {
        host.put(Guest::BUSY_FIRMWARE, 0o644, &guest::busy_firmware());
    }
    one.run(&Guest::new("mover").vcpus(2).policy("policy='dedicated'").busy());
    let stays = || {
        one.assert_vcpus("mover", &["2", "3"]);
        assert!(one.runs_alone_or_with(&["mover"]), "{:?}", one.holders());
        assert!(one.virsh(&["domstate", "mover"]).ok().starts_with("running"));
    };

    // The destination has no room: refused before anything is sent.
    two.put("/etc/virt-pin/virt-pin.toml", 0o644, b"pinnable_cpus = \"2\"\n");
    let state = two.exec(&["virt-pin", "gather", "--state"]).ok();
    one.put("/run/two.txt", 0o600, state.as_bytes());
    let foreseen = one.exec(&["virt-pin", "explain", "--for-host", "/run/two.txt", "mover"]);
    assert!(foreseen.status != 0 && foreseen.stderr.contains("error[cpu.placement."), "{foreseen:?}");
    let complaint = one.migrate("mover", "10.9.0.2", &[]).refused();
    assert!(complaint.contains("virt-pin: error[cpu.placement."), "{complaint}");
    stays();
    assert!(two.holders().is_empty(), "{:?}", two.holders());

    // The destination fails when all is prepared there.
    two.put("/etc/virt-pin/virt-pin.toml", 0o644, CONFIG.as_bytes());
    two.put("/etc/libvirt/hooks/qemu.d/zz-fails", 0o755, b"#!/bin/sh\n[ \"$2\" != started ]\n");
    one.migrate("mover", "10.9.0.2", &[]).refused();
    stays();
    two.wait_until("nothing is held", |host| host.holders().is_empty());
    two.sh("rm /etc/libvirt/hooks/qemu.d/zz-fails").ok();

    // Cancelled under way: its memory changes faster than it is sent.
    thread::scope(|scope| {
        let migration = scope.spawn(|| one.migrate("mover", "10.9.0.2", &["--bandwidth", "1"]));
        two.wait_until("it is coming", |host| host.runs_alone_or_with(&["mover"]));
        two.assert_vcpus("mover", &["2", "3"]);
        stays();
        one.wait_until("it can be cancelled", |host| host.virsh(&["domjobabort", "mover"]).status == 0);
        migration.join().unwrap().refused();
    });
    stays();
    two.wait_until("nothing is held", |host| host.holders().is_empty());

    // The VM dies at its destination.
    thread::scope(|scope| {
        let migration = scope.spawn(|| one.migrate("mover", "10.9.0.2", &["--bandwidth", "1"]));
        two.wait_until("it is coming", |host| host.runs_alone_or_with(&["mover"]));
        let qemu = two.qemu("mover");
        two.exec(&["kill", "-9", &qemu.to_string()]).ok();
        migration.join().unwrap().refused();
    });
    stays();
    two.wait_until("nothing is held", |host| host.holders().is_empty());
}
