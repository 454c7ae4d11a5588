//! Proofs from outside: the kernel's own records of who ran where, against what leases say.

use std::collections::BTreeSet;

use crate::guest::{self, Guest};
use crate::host::{Host, set};
use crate::leases::CONFIG;
use crate::needs::say;
use crate::shape::Shape;
use crate::trace::Run;

impl Host {
    /// Everything about CPUs that the host's cgroups, interrupts and units say, a line each.
    fn fingerprint(&self) -> BTreeSet<String> {
        let script = "cd / && find sys/fs/cgroup -name 'cpuset.*' -o -name cgroup.subtree_control | sort |
                          xargs grep --no-messages --with-filename '' --
                      grep --with-filename '' proc/irq/*/smp_affinity_list proc/irq/default_smp_affinity
                      find run/systemd/system run/systemd/system.control run/systemd/transient 2>/dev/null";
        let own = |line: &&str| !line.contains("qemu-guest-agent");
        self.sh(script).stdout.lines().filter(own).map(str::to_owned).collect()
    }
}

/// How often these ran.
fn count(runs: &[&Run]) -> u64 {
    runs.iter().map(|run| run.count).sum()
}

/// One way to have CPUs of one's own.
struct Way {
    name: &'static str,
    guest: fn(Guest) -> Guest,
    vcpus: &'static [u16],
    parked: &'static [u16],
    emulator: &'static str,
    iothreads: &'static str,
}

const WAYS: [Way; 5] = [
    Way {
        name: "whole",
        guest: |guest| guest.vcpus(4).policy("policy='dedicated'"),
        vcpus: &[2, 3, 4, 5],
        parked: &[],
        emulator: "0-1,8-9",
        iothreads: "",
    },
    Way {
        name: "one-thread",
        guest: |guest| guest.vcpus(2).policy("policy='dedicated' threads-per-core='1'"),
        vcpus: &[2, 4],
        parked: &[3, 5],
        emulator: "0-1,8-9",
        iothreads: "",
    },
    Way {
        name: "emulator-isolated",
        guest: |guest| guest.vcpus(2).policy("policy='dedicated' emulator='isolate' iothreads='isolate'"),
        vcpus: &[2, 3],
        parked: &[],
        emulator: "4-5",
        iothreads: "4-5",
    },
    Way {
        name: "emulator-beside",
        guest: |guest| guest.vcpus(2).policy("policy='dedicated' emulator='share' iothreads='share'"),
        vcpus: &[2, 3],
        parked: &[],
        emulator: "2-3",
        iothreads: "2-3",
    },
    Way {
        name: "io-isolated",
        guest: |guest| {
            guest.vcpus(2).tuning("<iothreads>1</iothreads>").policy("policy='dedicated' iothreads='isolate'")
        },
        vcpus: &[2, 3],
        parked: &[],
        emulator: "0-1,8-9",
        iothreads: "4-5",
    },
];

fn cpus(list: &str) -> BTreeSet<u16> {
    set(list).iter().map(|cpu| cpu.0).collect()
}

/// From QEMU's first instruction to its end, beside a VM that keeps its vCPU busy.
#[test]
fn nobody_is_ever_where_he_does_not_belong() {
    let Some(host) = Host::with_virt_pin(Shape::default(), CONFIG) else { return };
    host.put(Guest::BUSY_FIRMWARE, 0o644, &guest::busy_firmware());
    host.run(&Guest::new("neighbour").busy());
    let neighbour = host.qemu("neighbour");
    for way in WAYS {
        let name = way.name;
        // The guest's own view of its CPUs comes from here.
        host.put("/run/plain.xml", 0o600, (way.guest)(Guest::new(name)).xml().as_bytes());
        let shaped = host.exec(&["virt-pin", "transform", "/run/plain.xml"]).ok();
        let cores = if way.parked.is_empty() { way.vcpus.len() / 2 } else { way.vcpus.len() };
        let topology = format!("cores='{cores}' threads='{}'", way.vcpus.len() / cores);
        assert!(shaped.contains(&topology), "{topology}: {shaped}");
        host.define(&(way.guest)(Guest::new(name)));
        host.trace();
        host.virsh(&["start", name]).ok();
        let qemu = host.qemu(name);
        host.trace_until_the_end_of(qemu);
        let own: Vec<String> = way.vcpus.iter().map(u16::to_string).collect();
        assert_eq!(host.vcpus(name), own);
        for thread in host.threads(name).iter().filter(|thread| !thread.name.starts_with("CPU ")) {
            let expected = if thread.name.starts_with("IO iothread") { way.iothreads } else { way.emulator };
            assert_eq!(thread.cpus, expected, "{name}: {thread:?}");
        }
        host.virsh(&["destroy", name]).ok();
        let trace = host.traced();
        // What stays defined keeps its place.
        host.virsh(&["undefine", name]).ok();

        // Before it is executed, QEMU is a child of libvirtd that waits.
        let runs: Vec<&Run> = trace.of(qemu).into_iter().filter(|run| !run.comm.contains("libvirtd")).collect();
        let leased: BTreeSet<u16> = way.vcpus.iter().chain(way.parked).copied().chain(cpus(way.iothreads)).collect();
        let leased = if way.emulator.starts_with('0') { leased } else { &leased | &cpus(way.emulator) };
        let allowed = &leased | &cpus(way.emulator);
        let outside: Vec<_> = runs.iter().filter(|run| !allowed.contains(&run.cpu)).collect();
        assert!(outside.is_empty(), "{name} ran outside its lease: {outside:#?}");
        let others = trace.of(neighbour);
        let inside: Vec<_> = others.iter().filter(|run| leased.contains(&run.cpu)).collect();
        assert!(inside.is_empty(), "the neighbour ran on the lease of {name}: {inside:#?}");
        let on_parked: Vec<_> = runs.iter().filter(|run| way.parked.contains(&run.cpu)).collect();
        assert!(!others.is_empty() && !runs.is_empty());
        assert!(on_parked.is_empty(), "{name} ran on its parked siblings: {on_parked:#?}");
        let host_there: Vec<_> = trace.of_others(qemu).into_iter().filter(|run| leased.contains(&run.cpu)).collect();
        say(&format!(
            "{name}: QEMU came to run or went {} times, 0 of them outside its lease; none on parked siblings; the busy neighbour \
             {} times, 0 of them there; tasks of the host there {}",
            count(&runs),
            count(&others),
            count(&host_there)
        ));
    }
}

#[test]
fn eight_at_once_and_nothing_stays_behind() {
    let Some(host) = Host::with_virt_pin(Shape::default(), CONFIG) else { return };
    // What the first VM of a boot leaves in the host's cgroups is systemd's own.
    host.run(&Guest::new("first").policy("policy='dedicated'"));
    host.virsh(&["destroy", "first"]).ok();
    let before = (host.fingerprint(), host.exec(&["virt-pin", "--json", "capacity"]).ok());
    let guests = [
        ("a", Some((2, "policy='dedicated'")), ""),
        ("b", Some((1, "policy='dedicated' emulator='share'")), ""),
        ("c", Some((2, "policy='dedicated' cores='thread'")), ""),
        ("d", Some((1, "policy='dedicated' cores='thread' numa='single'")), ""),
        ("e", Some((1, "policy='dedicated' threads-per-core='1'")), ""),
        ("f", Some((1, "policy='dedicated' cores='thread' memory='any'")), ""),
        ("pinned", None, "<cputune><vcpupin vcpu='0' cpuset='8'/></cputune>"),
        ("plain", None, ""),
    ];
    for (name, policy, tuning) in guests {
        let guest = Guest::new(name).tuning(tuning);
        host.define(&match policy {
            Some((vcpus, policy)) => guest.vcpus(vcpus).policy(policy),
            None => guest,
        });
    }
    // Eight hooks wait for one lock on an emulated machine: who gives up may try again, and nobody fails for another reason.
    host.sh(
        "start() { virsh start $1 2>/tmp/$1 || { grep -q 'state.locked' /tmp/$1 && virsh start $1; } || { cat /tmp/$1 >&2; false; }; }
         for vm in a b c d e f pinned plain; do start $vm & done
         for job in $(jobs -p); do wait $job || failed=yes; done
         [ -z \"$failed\" ]",
    )
    .ok();
    let mut taken = BTreeSet::new();
    for (name, policy, _) in guests {
        let own = host.vcpus(name);
        match policy {
            Some((vcpus, _)) => {
                assert_eq!(own.len(), vcpus as usize, "{name}: {own:?}");
                let new: Vec<_> = own.into_iter().filter(|cpu| !taken.insert(cpu.clone())).collect();
                assert!(new.is_empty(), "{name} has CPUs of another: {new:?}");
            }
            None if name == "pinned" => assert_eq!(own, ["8"]),
            None => {
                assert!(cpus(&own[0]).is_disjoint(&taken.iter().map(|cpu| cpu.parse().unwrap()).collect()), "{own:?}")
            }
        }
    }
    host.sh("for vm in d plain a f pinned b; do virsh destroy $vm & done; wait $(jobs -p); virsh destroy c; virsh destroy e")
        .ok();
    let after = (host.fingerprint(), host.exec(&["virt-pin", "--json", "capacity"]).ok());
    let changed: Vec<_> = before.0.symmetric_difference(&after.0).collect();
    assert!(changed.is_empty(), "{changed:#?}");
    assert_eq!(before.1, after.1);
    say(&format!("eight VMs came and went: {} files and values of the host are as before", after.0.len()));
}

/// Which VM starts before which says nothing about where they are; neither does a reboot.
#[test]
fn every_order_of_starts_gives_the_same_cpus() {
    let names = ["big", "narrow", "small"];
    let mut found = Vec::new();
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let Some(host) = Host::with_virt_pin(Shape::default(), CONFIG) else { return };
        host.define(&Guest::new("big").vcpus(4).policy("policy='dedicated'"));
        host.define(&Guest::new("narrow").vcpus(2).policy("policy='dedicated' threads-per-core='1' nodes='0'"));
        host.define(&Guest::new("small").vcpus(2).policy("policy='dedicated'"));
        names.iter().for_each(|name| drop(host.virsh(&["autostart", name]).ok()));
        for index in order {
            host.virsh(&["start", names[index]]).ok();
        }
        found.push(names.map(|name| host.vcpus(name)));
        if found.len() == 3 {
            host.reboot();
            let running = |host: &Host| host.exec(&["virt-pin", "list"]).ok().matches(" running ").count();
            host.wait_until("all run again", |host| running(host) == 3);
            found.push(names.map(|name| host.vcpus(name)));
        }
    }
    assert!(found.windows(2).all(|pair| pair[0] == pair[1]), "{found:#?}");
    say(&format!("three orders of starts and a reboot: {:?} each time", found[0]));
}

#[test]
fn pins_by_hand_and_leases_refuse_each_other() {
    let Some(host) = Host::with_virt_pin(Shape::default(), CONFIG) else { return };
    let by_hand = Guest::new("by-hand").tuning("<cputune><vcpupin vcpu='0' cpuset='3'/></cputune>");
    host.run(&Guest::new("web").vcpus(2).policy("policy='dedicated'"));
    host.assert_vcpus("web", &["2", "3"]);
    host.define(&by_hand);
    let complaint = host.virsh(&["start", "by-hand"]).refused();
    assert!(
        complaint.contains("error[cpu.static.conflict]") && complaint.contains("leased to domain \"web\""),
        "{complaint}"
    );
    host.virsh(&["destroy", "web"]).ok();
    host.virsh(&["start", "by-hand"]).ok();
    host.assert_vcpus("by-hand", &["3"]);
    // The other core of the node is free: it goes there. Exactly that one it cannot have.
    host.virsh(&["start", "web"]).ok();
    host.assert_vcpus("web", &["4", "5"]);
    host.assert_vcpus("by-hand", &["3"]);
    host.define(&Guest::new("there").vcpus(2).policy("policy='dedicated' cpus='2-3'"));
    let complaint = host.virsh(&["start", "there"]).refused();
    assert!(complaint.contains("virt-pin: error[cpu."), "{complaint}");
    let shown = host.exec(&["virt-pin", "list"]).ok();
    assert!(shown.contains("by-hand") && !shown.contains("there"), "{shown}");
}

#[test]
fn huge_pages_come_from_the_node_of_the_lease() {
    let Some(host) = Host::with_virt_pin(Shape::default(), CONFIG) else { return };
    host.sh("echo 32 | tee /sys/devices/system/node/node*/hugepages/hugepages-2048kB/nr_hugepages").ok();
    let guest = Guest::new("huge").vcpus(2).memory(32).policy("policy='dedicated' nodes='1'");
    host.run(&guest.tuning("<memoryBacking><hugepages/></memoryBacking>"));
    host.assert_vcpus("huge", &["10", "11"]);
    let maps =
        host.sh(&format!("grep 'huge ' /proc/{}/numa_maps | grep kernelpagesize_kB=2048", host.qemu("huge"))).ok();
    assert!(maps.contains("N1=") && !maps.contains("N0="), "{maps}");
    let left = host.file("/sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages");
    assert_eq!(left, "32\n", "pages of another node are in use");
}
