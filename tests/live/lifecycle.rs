//! Everything that may happen to a VM between its start and its end, and what it means for its lease.

use crate::guest::{Guest, snapshot_disk};
use crate::leases::{ONE, dedicated};
use crate::libvirtd::{Libvirtd, Options};

impl Libvirtd {
    /// The lease, every thread and (soon) the live XML agree on CPU 1.
    #[track_caller]
    fn assert_leased_cpu_1(&self, name: &str) {
        self.assert_on_cpu_1(name);
        assert!(self.leases().contains("\"state\":\"running\""), "{}", self.leases());
        self.wait_until("the live XML shows the lease", |daemon| {
            daemon.virsh(&["dumpxml", name]).ok().contains("<vcpupin vcpu='0' cpuset='1'/>")
        });
    }
}

#[test]
fn what_happens_to_a_running_vm_leaves_its_lease_alone() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    daemon.run(&dedicated("vm"));
    daemon.assert_leased_cpu_1("vm");
    let before = daemon.leases();
    for command in ["suspend", "resume", "reset", "reboot"] {
        daemon.virsh(&[command, "vm"]).ok();
        daemon.assert_leased_cpu_1("vm");
        assert_eq!(daemon.leases(), before, "after {command}");
    }
    daemon.virsh(&["domrename", "vm", "other"]).refused();
    // Its definition goes, it stays; and with it its lease, to the end.
    daemon.virsh(&["undefine", "vm"]).ok();
    daemon.assert_leased_cpu_1("vm");
    daemon.restart_daemon();
    daemon.assert_leased_cpu_1("vm");
    assert_eq!(daemon.leases(), before);
    daemon.destroy("vm");
    daemon.wait_for_no_lease();
}

/// Whoever was to tell libvirt of the pins may end with a daemon that is restarted right after a start.
#[test]
fn a_daemon_that_was_not_told_of_a_lease_is_told_when_it_is_back() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(&format!("{ONE}command = \"/bin/true\"\n"))) else { return };
    daemon.run(&dedicated("vm"));
    daemon.assert_on_cpu_1("vm");
    assert!(!daemon.virsh(&["dumpxml", "vm"]).ok().contains("vcpupin"));
    daemon.put("/etc/virt-pin/virt-pin.toml", 0o644, ONE.as_bytes());
    daemon.restart_daemon();
    daemon.assert_leased_cpu_1("vm");
    daemon.destroy("vm");
    daemon.wait_for_no_lease();
}

#[test]
fn a_changed_definition_counts_from_the_next_start() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    daemon.run(&dedicated("vm"));
    // No policy any more: what runs, runs on.
    daemon.define(&Guest::new("vm"));
    daemon.assert_leased_cpu_1("vm");
    daemon.restart_daemon();
    daemon.assert_leased_cpu_1("vm");
    daemon.destroy("vm");
    daemon.wait_for_no_lease();
    daemon.start_guest("vm").ok();
    daemon.assert_held_to("vm", "0-1");
    // And the other way round.
    daemon.define(&dedicated("vm"));
    daemon.assert_held_to("vm", "0-1");
    daemon.destroy("vm");
    daemon.start_guest("vm").ok();
    daemon.assert_leased_cpu_1("vm");
    // More vCPUs than can be had: refused when it counts, and not before.
    daemon.define(&dedicated("vm").vcpus(2));
    daemon.assert_leased_cpu_1("vm");
    daemon.destroy("vm");
    let complaint = daemon.start_guest("vm").refused();
    assert!(complaint.contains("error[cpu.placement.unsatisfiable]"), "{complaint}");
}

#[test]
fn another_name_is_the_same_vm() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    daemon.run(&dedicated("before"));
    daemon.destroy("before");
    daemon.wait_for_no_lease();
    daemon.virsh(&["domrename", "before", "after"]).ok();
    daemon.start_guest("after").ok();
    daemon.assert_leased_cpu_1("after");
    assert!(daemon.leases().contains(&dedicated("before").uuid()));
    daemon.destroy("after");
    daemon.wait_for_no_lease();
}

#[test]
fn a_file_it_was_saved_to_brings_it_back() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    daemon.run(&dedicated("vm"));
    daemon.assert_leased_cpu_1("vm");
    daemon.virsh(&["save", "vm", "/run/saved"]).ok();
    daemon.wait_for_no_lease();
    daemon.run(&dedicated("other"));
    daemon.virsh(&["restore", "/run/saved"]).refused();
    daemon.assert_leased_cpu_1("other");
    daemon.destroy("other");
    daemon.virsh(&["restore", "/run/saved"]).ok();
    daemon.assert_leased_cpu_1("vm");
}

/// libvirt has no hook for it that could change the XML: what comes back is the VM as it was, with the pins that it ran with.
#[test]
fn a_snapshot_brings_its_pins_along() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    daemon.put(Guest::SNAPSHOT_DISK, 0o666, &snapshot_disk());
    daemon.run(&dedicated("vm").with_snapshots());
    daemon.assert_leased_cpu_1("vm");
    daemon.virsh(&["snapshot-create-as", "vm", "then"]).ok();
    daemon.virsh(&["snapshot-revert", "vm", "then"]).ok();
    daemon.assert_leased_cpu_1("vm");
    daemon.destroy("vm");
    daemon.wait_for_no_lease();
    // The CPUs it ran on are another's now: refused, nobody is hurt, and the way out is told.
    daemon.run(&dedicated("other"));
    let complaint = daemon.virsh(&["snapshot-revert", "vm", "then"]).refused();
    assert!(complaint.contains("virt-pin: error[cpu."), "{complaint}");
    daemon.assert_leased_cpu_1("other");
    daemon.destroy("other");
    // An allowlist without them: the pins are the obstacle.
    daemon.put("/etc/virt-pin/virt-pin.toml", 0o644, b"pinnable_cpus = \"0\"\n");
    let complaint = daemon.virsh(&["snapshot-revert", "vm", "then"]).refused();
    assert!(complaint.contains("error[cpu.xml.stale-pins]") && complaint.contains("snapshot-edit"), "{complaint}");
    daemon.wait_for_no_lease();
}
