//! What may happen to a VM between its start and its end, with the libvirt of Debian 13.

use crate::guest::{Guest, snapshot_disk};
use crate::host::Host;
use crate::shape::Shape;

impl Host {
    /// The lease, the vCPU threads and (soon) the live XML agree.
    #[track_caller]
    fn assert_leased(&self, name: &str, cpus: &[&str]) {
        self.assert_vcpus(name, cpus);
        let list = self.exec(&["virt-pin", "list"]).ok();
        assert!(list.lines().any(|line| line.contains(&format!(" {name} ")) && line.contains(" running ")), "{list}");
        self.wait_for_live_pins(name, cpus);
    }

    fn wait_for_no_lease_of(&self, name: &str) {
        self.wait_until("its lease has ended", |host| !host.exec(&["virt-pin", "list"]).ok().contains(name));
    }
}

/// A lease is for one core, and there are two: what comes back from a file goes where there is room.
#[test]
fn what_was_saved_comes_back_wherever_there_is_room() {
    let Some(host) = Host::with_virt_pin(Shape::default(), "pinnable_cpus = \"2-5\"\n") else { return };
    let guest = |name: &str| Guest::new(name).vcpus(2).policy("policy='dedicated' emulator='share' iothreads='share'");
    host.run(&guest("vm"));
    host.assert_leased("vm", &["2", "3"]);
    for command in ["suspend", "resume", "reset"] {
        host.virsh(&[command, "vm"]).ok();
        host.assert_leased("vm", &["2", "3"]);
    }
    host.virsh(&["managedsave", "vm"]).ok();
    host.wait_for_no_lease_of("vm");
    // Its CPUs go to another: transient, so that no place is kept for it.
    host.put("/run/other.xml", 0o600, guest("other").xml().as_bytes());
    host.virsh(&["create", "/run/other.xml"]).ok();
    let other = host.vcpus("other");
    host.virsh(&["start", "vm"]).ok();
    let back = host.vcpus("vm");
    assert!(back.len() == 2 && back.iter().all(|cpu| !other.contains(cpu)), "{back:?} beside {other:?}");
    host.assert_leased("vm", &back.iter().map(String::as_str).collect::<Vec<_>>());

    // No room at all: this libvirt deletes the image when the restore hook fails, so the refusal comes from elsewhere.
    host.virsh(&["managedsave", "vm"]).ok();
    host.wait_for_no_lease_of("vm");
    host.put("/run/third.xml", 0o600, guest("third").xml().as_bytes());
    host.virsh(&["create", "/run/third.xml"]).ok();
    let complaint = host.virsh(&["start", "vm"]).refused();
    assert!(complaint.contains("virt-pin: error[cpu.placement.shortage]"), "{complaint}");
    assert!(host.virsh(&["dominfo", "vm"]).ok().contains("Managed save:   yes"));
    host.virsh(&["destroy", "third"]).ok();
    host.virsh(&["start", "vm"]).ok();
    assert_eq!(host.vcpus("vm"), back);
}

#[test]
fn a_snapshot_brings_its_pins_along() {
    let Some(host) = Host::with_virt_pin(Shape::default(), "pinnable_cpus = \"2-5\"\n") else { return };
    host.put(Guest::SNAPSHOT_DISK, 0o666, &snapshot_disk());
    host.run(&Guest::new("vm").vcpus(2).policy("policy='dedicated'").with_snapshots());
    host.assert_leased("vm", &["2", "3"]);
    host.virsh(&["snapshot-create-as", "vm", "then"]).ok();
    host.virsh(&["snapshot-revert", "vm", "then"]).ok();
    host.assert_leased("vm", &["2", "3"]);
    host.virsh(&["destroy", "vm"]).ok();
    host.wait_for_no_lease_of("vm");
    // Its CPUs may no longer be handed out: its pins are in the way.
    host.put("/etc/virt-pin/virt-pin.toml", 0o644, b"pinnable_cpus = \"4-5\"\n");
    let complaint = host.virsh(&["snapshot-revert", "vm", "then"]).refused();
    assert!(complaint.contains("error[cpu.xml.stale-pins]") && complaint.contains("snapshot-edit"), "{complaint}");
    host.wait_for_no_lease_of("vm");
}
