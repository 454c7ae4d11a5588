//! What virt-pin promises, on whole hosts.

use crate::guest::Guest;
use crate::host::Host;
use crate::shape::{Debian, Shape};

/// Cores of both nodes may be handed out (node 0 has CPUs 0-7); the first of each stays with the host.
pub(crate) const CONFIG: &str = "pinnable_cpus = \"2-7,10-15\"\n";

/// Where the host's own work, and QEMU's, belongs then.
pub(crate) const HOUSEKEEPING: &str = "0-1,8-9";

impl Host {
    /// Each vCPU thread is on its CPU, and in its cgroup; all others of the VM are on the housekeeping CPUs.
    #[track_caller]
    pub(crate) fn assert_bound(&self, name: &str, cpus: &[&str]) {
        let threads = self.threads(name);
        let (vcpus, others) = threads.split_at(cpus.len());
        for (vcpu, (thread, cpu)) in vcpus.iter().zip(cpus).enumerate() {
            let found = (thread.name.clone(), thread.cpus.as_str(), thread.own_cgroup());
            let expected = (format!("CPU {vcpu}/TCG"), *cpu, format!("vcpu{vcpu}"));
            assert_eq!((found.0, found.1, found.2.to_owned()), expected, "{threads:#?}");
        }
        assert!(!others.is_empty(), "{threads:#?}");
        for thread in others {
            let own = if thread.name.starts_with("IO iothread") { &thread.name[3..] } else { "emulator" };
            assert_eq!((thread.cpus.as_str(), thread.own_cgroup()), (HOUSEKEEPING, own), "{threads:#?}");
        }
    }
}

/// A dedicated VM from start to end, which is the same on every host.
fn a_dedicated_vm(shape: Shape) {
    let Some(host) = Host::with_virt_pin(shape, CONFIG) else { return };
    let web = Guest::new("web").vcpus(4).policy("policy='dedicated'");
    host.run(&web);
    host.assert_bound("web", &["2", "3", "4", "5"]);
    let list = host.exec(&["virt-pin", "list"]).ok();
    assert!(list.contains(" web    running   dedicated   4       0      -        0-1,8-9    2-5\n"), "{list}");
    // The hook leaves this to a command of its own, which may still be at it.
    host.wait_until("the live XML shows the lease", |host| {
        let xml = host.virsh(&["dumpxml", "web"]).ok();
        let pins = (0..4).map(|vcpu| format!("<vcpupin vcpu='{vcpu}' cpuset='{}'/>", vcpu + 2));
        pins.into_iter().all(|pin| xml.contains(&pin)) && xml.contains("<emulatorpin cpuset='0-1,8-9'/>")
    });
    host.assert_bound("web", &["2", "3", "4", "5"]);
    let check = host.exec(&["virt-pin", "check"]).ok();
    let misplaced = check.lines().find(|line| line.contains("threads of \"web\"")).unwrap();
    assert!(misplaced.ends_with("PASS") && !check.contains("FAIL"), "{check}");
    host.virsh(&["destroy", "web"]).ok();
    host.wait_until("the lease has ended", |host| !host.exec(&["virt-pin", "list"]).ok().contains("web"));
    assert!(!host.virsh(&["dumpxml", "web"]).ok().contains("cputune"));
}

#[test]
fn a_dedicated_vm_on_debian_13() {
    a_dedicated_vm(Shape::default());
}

#[test]
fn a_dedicated_vm_on_debian_12() {
    a_dedicated_vm(Shape::default().debian(Debian::Bookworm));
}

/// The scope is confined before QEMU is executed, and the others are moved off, with and without a reload of systemd.
#[test]
fn vms_without_a_lease_make_room_and_get_it_back() {
    let Some(host) = Host::with_virt_pin(Shape::default(), CONFIG) else { return };
    let held = |name: &str, cpus: &str| {
        let threads = host.threads(name);
        assert!(!threads.is_empty() && threads.iter().all(|thread| thread.cpus == cpus), "{name}: {threads:#?}");
    };
    host.run(&Guest::new("before").vcpus(2));
    held("before", "0-15");
    host.run(&Guest::new("web-1").vcpus(4).policy("policy='dedicated'"));
    host.assert_bound("web-1", &["2", "3", "4", "5"]);
    let scope = r"/sys/fs/cgroup/machine.slice/machine-qemu\x2d2\x2dweb\x2d1.scope/cpuset.cpus";
    assert_eq!(host.file(scope), "0-5,8-9\n");
    held("before", "0-1,6-15");
    host.run(&Guest::new("during"));
    held("during", "0-1,6-15");
    host.exec(&["systemctl", "daemon-reload"]).ok();
    host.assert_bound("web-1", &["2", "3", "4", "5"]);
    held("before", "0-1,6-15");
    held("during", "0-1,6-15");
    host.virsh(&["destroy", "web-1"]).ok();
    held("before", "0-15");
    held("during", "0-15");
    host.exec(&["systemctl", "daemon-reload"]).ok();
    held("before", "0-15");
    host.virsh(&["destroy", "before"]).ok();
    host.virsh(&["destroy", "during"]).ok();
    let left = host.sh("ls /run/systemd/system | grep machine-qemu || true").ok();
    assert_eq!(left, "", "drop-ins are left behind");
}

#[test]
fn autostarted_vms_are_where_they_were_after_a_reboot() {
    let Some(host) = Host::with_virt_pin(Shape::default(), CONFIG) else { return };
    for name in ["first", "second"] {
        host.define(&Guest::new(name).vcpus(2).policy("policy='dedicated'"));
        host.virsh(&["autostart", name]).ok();
    }
    // Alone it has the place it will have beside the other, whichever starts before.
    host.virsh(&["start", "second"]).ok();
    let cpus = |host: &Host| host.threads("second")[..2].iter().map(|thread| thread.cpus.clone()).collect::<Vec<_>>();
    let (before, boot) = (cpus(&host), host.file("/proc/sys/kernel/random/boot_id"));
    host.reboot();
    assert_ne!(host.file("/proc/sys/kernel/random/boot_id"), boot);
    host.wait_until("both run again", |host| host.exec(&["virt-pin", "list"]).ok().matches(" running ").count() == 2);
    assert_eq!(cpus(&host), before);
    let both = [["2", "3"], ["4", "5"]];
    let second = both.iter().position(|place| before == place.map(str::to_owned)).unwrap();
    host.assert_bound("second", &both[second]);
    host.assert_bound("first", &both[1 - second]);
}

#[test]
fn a_vm_spread_over_the_nodes_has_its_memory_there() {
    let Some(host) = Host::with_virt_pin(Shape::default(), CONFIG) else { return };
    let spread = Guest::new("db").vcpus(4).memory(32).policy("policy='dedicated' numa='spread'");
    host.put("/run/db.xml", 0o600, spread.xml().as_bytes());
    host.define_xml(&host.exec(&["virt-pin", "transform", "/run/db.xml"]).ok());
    host.virsh(&["start", "db"]).ok();
    host.assert_bound("db", &["2", "3", "10", "11"]);
    let xml = host.virsh(&["dumpxml", "db"]).ok();
    for node in 0..2 {
        let cell = format!("<cell id='{node}' cpus='{}-{}' memory='16384' unit='KiB'", 2 * node, 2 * node + 1);
        let memory = format!("<memnode cellid='{node}' mode='strict' nodeset='{node}'/>");
        assert!(xml.contains(&cell) && xml.contains(&memory), "{xml}");
    }
    // 16 MiB each, page by page: the kernel's own word for where they are.
    let maps = host.sh("grep bind: /proc/$(cat /run/libvirt/qemu/db.pid)/numa_maps").ok();
    for place in ["bind:0 anon=", "bind:1 anon="] {
        assert!(maps.contains(place), "{maps}");
    }
    assert!(!maps.lines().any(|line| line.contains("bind:0") && line.contains("N1=")), "{maps}");
    assert!(!maps.lines().any(|line| line.contains("bind:1") && line.contains("N0=")), "{maps}");
}

#[test]
fn too_few_huge_pages_on_the_node_are_seen_before_qemu() {
    let Some(host) = Host::with_virt_pin(Shape::default(), CONFIG) else { return };
    let huge = |policy| {
        let guest = Guest::new("huge").vcpus(2).memory(32).policy(policy);
        guest.tuning("<memoryBacking><hugepages/></memoryBacking>")
    };
    // 8 pages of 2 MiB on node 0, 32 on node 1.
    host.sh("cd /sys/devices/system/node && for node in 0 1; do
                 echo $((8 + 24 * node)) >node$node/hugepages/hugepages-2048kB/nr_hugepages
             done")
        .ok();
    host.define(&huge("policy='dedicated' nodes='0'"));
    let complaint = host.virsh(&["start", "huge"]).refused();
    for part in [
        "virt-pin: error[cpu.placement.unsatisfiable]: domain \"huge\": needs 32 MiB of huge pages of 2048 KiB on",
        "all there is is 16 MiB",
    ] {
        assert!(complaint.contains(part), "{part:?} is not in: {complaint}");
    }
    let log = host.file("/var/log/libvirt/qemu/huge.log");
    assert!(!log.contains("qemu-system"), "QEMU was executed: {log}");
    // Left free to choose it goes where they are.
    host.run(&huge("policy='dedicated'"));
    host.assert_bound("huge", &["10", "11"]);
}
