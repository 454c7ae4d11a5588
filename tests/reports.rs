//! What people who pin CPUs have reported of hooks, schedulers and hypervisors, each as the smallest input that shows it,
//! run through the built hook. The headings name the report.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    clippy::cast_possible_truncation,
    reason = "integration tests"
)]

mod machine;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use machine::{Machine, Run, Shape, Vm, pins, topology};
use virt_pin::error::Code;

/// PassthroughPOST/VFIO-Tools#17: the fourth argument of release is a reason.
#[test]
fn a_lease_ends_whatever_the_reason() {
    for reason in [
        "unknown",
        "shutdown",
        "destroyed",
        "crashed",
        "migrated",
        "saved",
        "failed",
        "from snapshot",
        "daemon",
        "-",
        "a word of tomorrow",
        "",
    ] {
        let machine = Machine::new("2,10");
        let vm = Vm::new(1, 2);
        machine.prepare(&vm);
        machine.event(&vm, &format!("release end {reason}")).silent();
        assert_eq!(machine.leased().len(), 0, "{reason}");
    }
}

/// VFIO-Tools#12: a script in qemu.d runs beside the main one, and so does its backup.
#[test]
fn an_event_may_come_twice() {
    let machine = Machine::new("2-3,10-11");
    let vm = Vm::new(1, 2);
    for event in ["migrate begin", "restore begin", "prepare begin"] {
        let once = machine.event(&vm, event).printed();
        let before = machine.everything();
        assert_eq!(machine.event(&vm, event).printed(), once);
        assert!(machine.everything() == before, "{event}");
        // Each script's output is the next one's input.
        let again = machine.hook(&["vm1", event.split(' ').next().unwrap(), "begin", "-"], &once).printed();
        assert_eq!(again, once);
        assert!(machine.everything() == before, "{event}");
    }
    machine.qemu(&vm, 700, &[2, 10], "0-1,4-9,12-15");
    machine.event(&vm, "started begin").silent();
    let before = machine.everything();
    machine.event(&vm, "started begin").silent();
    assert!(machine.everything() == before);
    machine.gone(700);
    machine.event(&vm, "release end shutdown").silent();
    let before = machine.everything();
    machine.event(&vm, "release end shutdown").silent();
    assert!(machine.everything() == before);
}

/// VFIO-Tools' dispatcher splits names, evaluates them, and adds a newline to stdin.
#[test]
fn dispatchers_that_break_the_arguments() {
    for (name, args) in [
        ("Windows 11", &["Windows", "11", "prepare", "begin", "-"][..]),
        ("it's", &["its", "prepare", "begin", "-"]),
        ("a$(id -u)b", &["a0b", "prepare", "begin", "-"]),
        ("a  prepare  end", &["a", "prepare", "end", "prepare", "begin", "-"]),
        ("vm", &["vm", "prepare", "begin"]),
        ("vm", &["prepare", "begin", "-"]),
        ("--help", &["--help", "prepare", "begin", "-"]),
        ("release end", &["release", "end", "prepare", "begin", "-"]),
    ] {
        let machine = Machine::new("2,10");
        let vm = Vm::new(1, 2).named(name);
        let xml = machine.hook(args, vm.xml() + "\n").printed();
        assert_eq!((pins(&xml), xml.ends_with("</domain>\n\n")), (vec![2, 10], true));
        assert_eq!(machine.leased()[0]["name"], name);
        // The reason of the release is split, too.
        let release = ["Windows", "11", "release", "end", "from", "snapshot"];
        machine.hook(&release, vm.xml() + "\n").silent();
        assert_eq!(machine.leased().len(), 0);
    }
}

/// VFIO-Tools#11: after a refused start libvirt calls release.
#[test]
fn the_end_of_a_refused_start_ends_nobody_else() {
    let machine = Machine::new("2,10");
    let (first, second) = (Vm::new(1, 2), Vm::new(2, 2));
    machine.prepare(&first);
    let before = machine.everything();
    machine.event(&second, "prepare begin").refused(Code::Shortage);
    machine.event(&second, "stopped end").silent();
    machine.event(&second, "release end failed").silent();
    // Neither does a namesake: names can change hands, UUIDs cannot.
    machine.event(&second.named("vm1"), "release end failed").silent();
    assert!(machine.everything() == before);
}

/// oVirt/vdsm#251: a saved image says yesterday's CPUs.
#[test]
fn a_restored_image_gets_todays_cpus() {
    let machine = Machine::new("2-3,10-11");
    machine.prepare(&Vm::new(2, 2));
    let image = Vm { id: None, ..Vm::new(1, 2).pinned(&[2, 10]) };
    let xml = machine.event(&image, "restore begin").printed();
    assert_eq!(pins(&xml), [3, 11]);
    assert_eq!(machine.leased()[0]["state"], "provisional");
    let prepared =
        machine.hook(&["vm1", "prepare", "begin", "-"], xml.replace("<domain ", "<domain id='5' ")).printed();
    assert_eq!(pins(&prepared), [3, 11]);
    assert_eq!(
        (machine.leased()[0]["state"].as_str(), machine.leased()[0]["domain_id"].as_u64()),
        (Some("reserved"), Some(5))
    );
    // Nothing free: the restore cannot be refused (libvirt 11.3 would delete the image), the prepare behind it can.
    let third = Vm::new(3, 2).pinned(&[2, 10]);
    machine.event(&third, "restore begin").reported(Code::Shortage);
    machine.event(&third, "prepare begin").refused(Code::Shortage);
}

/// kubevirt#6821: the target's CPU numbers differ from the source's.
#[test]
fn a_migration_gets_this_hosts_cpus() {
    let machine = Machine::new("2-3,10-11");
    machine.prepare(&Vm::new(2, 2));
    assert_eq!(machine.vcpus_of(&Vm::new(2, 2)), [2, 10]);
    let source = Machine::new("2-3,10-11").prepare(&Vm::new(1, 2));
    assert_eq!(pins(&source), [2, 10]);
    let target = machine.hook(&["vm1", "migrate", "begin", "-"], &source).printed();
    assert_eq!((pins(&target), topology(&target)), (vec![3, 11], topology(&source)));
    assert_eq!(machine.leased()[0]["state"], "provisional");
    // The definition that libvirt then starts is that one.
    let prepared = machine.hook(&["vm1", "prepare", "begin", "-"], &target).printed();
    assert_eq!(prepared, target);
    assert_eq!((machine.leased().len(), machine.leased()[0]["state"].as_str()), (2, Some("reserved")));
    machine.hook(&["vm1", "release", "end", "failed"], &target).silent();
    assert_eq!(machine.leased().len(), 1);
}

/// libvirt's ABI check: what comes in keeps its topology, whatever this host's cores look like.
#[test]
fn what_comes_in_keeps_its_topology() {
    // Lone threads only.
    let machine = Machine::new("1-7");
    let view = "<cpu mode='host-passthrough'><topology sockets='1' dies='1' cores='2' threads='2'/></cpu>";
    let vm = Vm::new(1, 4).with("cores='thread'").body(view);
    for event in ["migrate begin", "restore begin"] {
        let xml = machine.event(&vm, event).printed();
        assert_eq!((topology(&xml), pins(&xml).len()), (Some([1, 1, 2, 2]), 4));
        assert!(xml.contains(view));
    }
    // And gets none if it had none.
    let xml = machine.event(&Vm::new(2, 2).with("cores='thread'"), "migrate begin").printed();
    assert_eq!(topology(&xml), None);
}

/// siderolabs/talos#7504, scylla-operator#1265: the allowlist changes while leases live.
#[test]
fn a_changed_allowlist_breaks_no_lease() {
    let machine = Machine::new("2-3,10-11");
    let vm = Vm::new(1, 2).with("emulator='share' iothreads='share'");
    machine.prepare(&vm);
    machine.pinnable("4-5,12-13");
    machine.qemu(&vm, 700, &[2, 10], "2,10");
    machine.event(&vm, "started begin").silent();
    machine.event(&vm, "reconnect begin").silent();
    assert_eq!(machine.vcpus_of(&vm), [2, 10]);
    // CPUs that are leased are not housekeeping CPUs, though they are not pinnable any more.
    let xml = machine.prepare(&Vm::new(2, 2));
    assert!(xml.contains("<emulatorpin cpuset='0-1,3,6-9,11,14-15'/>"), "{xml}");
    machine.gone(700);
    machine.event(&vm, "release end shutdown").silent();
    assert_eq!(machine.leased().len(), 1);
    machine.prepare(&vm);
    assert_eq!(machine.vcpus_of(&vm), [5, 13]);
}

/// The other way round: CPUs become pinnable while somebody's emulator runs on them.
#[test]
fn a_grown_allowlist_gives_nobodys_seat_away() {
    let machine = Machine::new("2,10");
    let (first, second) = (Vm::new(1, 2), Vm::new(2, 2));
    assert!(machine.prepare(&first).contains("<emulatorpin cpuset='0-1,3-9,11-15'/>"));
    machine.pinnable("2-3,10-11");
    let refused = machine.event(&second, "prepare begin");
    refused.refused(Code::Shortage);
    let because = "  because: CPUs 3,11 have become pinnable while \"vm1\" has shared threads there: they are free \
                   once it has been started anew\n";
    assert!(refused.stderr.contains(because), "{}", refused.stderr);
    let capacity = machine.json(&["capacity"]);
    assert_eq!((capacity["free"].as_str(), capacity["leased"].as_str()), (Some(""), Some("2-3,10-11")));
    // Once it starts anew it is out of the way.
    machine.event(&first, "release end shutdown").silent();
    assert!(machine.prepare(&first).contains("<emulatorpin cpuset='0-1,4-9,12-15'/>"));
    assert_eq!(pins(&machine.prepare(&second)), [3, 11]);
}

/// OpenNebula#6596: the source keeps its pins after a migration.
#[test]
fn the_source_of_a_migration_is_free_again() {
    let machine = Machine::shaped(Shape(1, 13, 1), "1-12");
    let (big, small) = (Vm::new(1, 11), Vm::new(2, 1));
    machine.prepare(&big);
    machine.prepare(&small);
    machine.event(&Vm::new(3, 1), "prepare begin").refused(Code::Shortage);
    machine.event(&small, "release end migrated").silent();
    machine.prepare(&Vm::new(3, 1));
    assert_eq!(machine.leased().len(), 2);
    assert_eq!(machine.vcpus_of(&big).len(), 11);
}

/// oVirt#275: sorting a set breaks the order of vCPUs.
#[test]
fn the_order_of_vcpus_survives_the_state_file() {
    let machine = Machine::new("0-1,8-9");
    let vm = Vm::new(1, 4);
    assert_eq!(pins(&machine.prepare(&vm)), [0, 8, 1, 9]);
    assert_eq!(machine.vcpus_of(&vm), [0, 8, 1, 9]);
    machine.put("/proc/uptime", "1001.00 1\n");
    // Another event writes the file anew.
    let before = machine.leases();
    machine.event(&Vm::new(2, 1).without_policy().pinned(&[5]), "prepare begin").silent();
    assert_ne!(machine.leases(), before);
    assert_eq!(machine.vcpus_of(&vm), [0, 8, 1, 9]);
    assert_eq!(pins(&machine.prepare(&vm)), [0, 8, 1, 9]);
    let view = machine.json(&["lease", "vm1"]);
    assert_eq!(view["vcpus"], serde_json::json!([0, 8, 1, 9]));
}

/// innogames/igvm#280, kimchi#1072, OpenNebula#5293, kubevirt#16992: every vCPU that may be plugged in has its CPU.
#[test]
fn all_possible_vcpus_are_leased() {
    let big = Machine::shaped(Shape(2, 70, 2), "8-139,148-279");
    for (vcpu, count) in [
        ("<vcpu current='6'>12</vcpu>", 12),
        ("<vcpu placement='static' current='8'>240</vcpu>", 240),
        ("<vcpu current='2'>6</vcpu>", 6),
        ("<vcpu\n      cpuset='1-4,^3,6'\n>4</vcpu>", 4),
        ("<vcpu cpuset='1-4,200'>4</vcpu>", 4),
    ] {
        let vm = Vm::new(1, 1).vcpu(vcpu);
        let run = big.event(&vm, "prepare begin");
        if vcpu.contains("200") {
            // The net for other threads reaches beyond the lease: libvirt's own start would fail.
            assert!(run.refused(Code::StalePins).contains("other threads"));
            continue;
        }
        let xml = run.printed();
        let distinct: BTreeSet<u64> = pins(&xml).into_iter().collect();
        assert_eq!((pins(&xml).len(), distinct.len()), (count, count));
        assert_eq!(topology(&xml).unwrap().iter().product::<u32>(), count as u32);
        big.event(&vm, "release end shutdown").silent();
    }
    // One I/O thread is one, however many vCPUs may come.
    let vm =
        Vm::new(1, 1).vcpu("<vcpu current='2'>8</vcpu>").body("<iothreads>1</iothreads>").with("iothreads='isolate'");
    let xml = big.prepare(&vm);
    assert_eq!((pins(&xml).len(), xml.matches("<iothreadpin ").count()), (8, 1));
}

/// kubevirt#6159: a reserved set that takes one thread of some cores.
#[test]
fn lone_threads_are_no_cores() {
    // 2 x 28 x 2; CPUs 0, 28, 56 and 84 are the host's: two whole cores.
    let machine = Machine::shaped(Shape(2, 28, 2), "1-27,29-55,57-83,85-111");
    let vm = Vm::new(1, 96);
    let xml = machine.prepare(&vm);
    assert_eq!(topology(&xml), Some([1, 1, 48, 2]));
    assert!(pins(&xml).chunks(2).all(|core| core[1] == core[0] + 56), "siblings are siblings");
    machine.event(&vm, "release end shutdown").silent();
    // One thread each of two cores: neither core is handed out, and nobody sees a core of one thread.
    machine.pinnable("1-27,29-55,57-111");
    let xml = machine.prepare(&vm);
    assert_eq!(topology(&xml), Some([1, 1, 48, 2]));
    assert!(!pins(&xml).contains(&56) && !pins(&xml).contains(&84));
    machine.event(&Vm::new(2, 14), "prepare begin").refused(Code::Shortage);
}

/// QubesOS#1075, truenas#4633: two VMs race at boot.
#[test]
fn sixty_four_starts_at_once() {
    let machine = Machine::shaped(Shape(2, 8, 2), "0-31");
    let ended = AtomicBool::new(false);
    let vms: Vec<Vm> =
        (1..=64).map(|n| Vm::new(n, 1).with("cores='thread' emulator='share' iothreads='share'")).collect();
    let at_once = |event: &str| -> Vec<Run> {
        std::thread::scope(|scope| {
            let runs: Vec<_> = vms.iter().map(|vm| scope.spawn(|| machine.event(vm, event))).collect();
            runs.into_iter().map(|run| run.join().unwrap()).collect()
        })
    };
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut seen = BTreeSet::new();
            while !ended.load(Ordering::Relaxed) {
                let leased = machine.leased();
                let cpus: BTreeSet<u64> = leased.iter().map(|lease| lease["vcpus"][0].as_u64().unwrap()).collect();
                assert_eq!(cpus.len(), leased.len(), "two domains hold one CPU");
                seen.insert(leased.len());
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            seen
        });
        for _ in 0..2 {
            let runs = at_once("prepare begin");
            let mut granted = BTreeSet::new();
            for (vm, run) in vms.iter().zip(runs) {
                if run.code == Some(0) {
                    assert!(granted.insert(pins(&run.stdout)[0]), "two domains were given one CPU");
                    assert_eq!(machine.vcpus_of(vm), pins(&run.stdout), "a lease was lost");
                } else {
                    run.refused(Code::Shortage);
                }
            }
            assert_eq!((granted.len(), machine.leased().len()), (32, 32));
            at_once("release end shutdown").iter().for_each(Run::silent);
            assert_eq!(machine.leased().len(), 0);
        }
        ended.store(true, Ordering::Relaxed);
        assert!(watcher.join().unwrap().len() > 2, "the watcher saw nothing of it");
    });
}

/// gpu-passthrough-tutorial#13: pins of I/O threads that do not exist.
#[test]
fn only_iothreads_that_exist_are_pinned() {
    let machine = Machine::new("2-3,10-11");
    let pinned = |body: &str| {
        let xml = machine.event(&Vm::new(1, 2).body(body), "migrate begin").printed();
        let document = roxmltree::Document::parse(&xml).unwrap();
        let pins = document.descendants().filter(|node| node.has_tag_name("iothreadpin"));
        pins.map(|pin| pin.attribute("iothread").unwrap().parse().unwrap()).collect::<Vec<u32>>()
    };
    assert_eq!(pinned(""), [0; 0]);
    assert_eq!(pinned("<iothreads>2</iothreads>"), [1, 2]);
    let ids = "<iothreadids><iothread id='2'/><iothread id='7'/></iothreadids>";
    assert_eq!(pinned(ids), [2, 7]);
    assert_eq!(pinned(&format!("<iothreads>3</iothreads>{ids}")), [1, 2, 7]);
    let unknown = "<iothreads>1</iothreads><cputune><iothreadpin iothread='2' cpuset='2'/></cputune>";
    let said = machine.event(&Vm::new(2, 2).body(unknown), "prepare begin").refused(Code::DomainInvalid);
    assert!(said.contains("I/O thread 2, which the domain does not have"), "{said}");
}

/// canonical/lxd#14709: isolated CPUs are what people isolate them for.
#[test]
fn isolated_cpus_are_handed_out() {
    let machine = Machine::new("2-3,10-11");
    machine.put("/sys/devices/system/cpu/isolated", "2-5,10-13\n");
    let xml = machine.prepare(&Vm::new(1, 4));
    assert_eq!(pins(&xml), [2, 10, 3, 11]);
    // Isolated and not pinnable: set aside for something else, not for emulators.
    assert!(xml.contains("<emulatorpin cpuset='0-1,6-9,14-15'/>"), "{xml}");
}

/// oVirt/ovirt-web-ui#1431, virt-manager#1092: prime counts, and more vCPUs are more cores.
#[test]
fn every_count_has_a_topology() {
    let machine = Machine::shaped(Shape(2, 100, 2), "4-99,104-199,204-299,304-399");
    for count in [1, 2, 3, 5, 7, 8, 11, 13, 31, 97, 127, 191, 383] {
        let vm = Vm::new(1, count);
        let xml = machine.prepare(&vm);
        let [sockets, dies, cores, threads] = topology(&xml).unwrap();
        assert_eq!((sockets * dies * cores * threads, pins(&xml).len()), (count, count as usize), "{count}");
        assert!(threads == if count % 2 == 0 { 2 } else { 1 }, "{count} vCPUs: {threads} threads");
        if count == 8 {
            assert_eq!((sockets, cores), (1, 4));
        }
        // Of an odd count the last thread is parked, not given away.
        let held = machine.json(&["lease", "vm1"])["parked"].as_str().unwrap().to_owned();
        assert_eq!(held.is_empty(), count % 2 == 0, "{count}: parked {held}");
        machine.event(&vm, "release end shutdown").silent();
    }
}

/// virt-manager#740, vm-babysitter#1: names are any text, and nothing is ever a path, an option or a log line.
#[test]
fn names_are_only_text() {
    let long = "n".repeat(1000);
    let names = [
        long.as_str(),
        "..",
        ".",
        "../../../etc/passwd",
        "/etc/passwd",
        "--help",
        "-",
        " leading and trailing ",
        "tab\tin it",
        "line\nvirt-pin: error[internal]: forged",
        "right\u{202e}to left",
        "isolate\u{2066}d",
        "line\u{2028}separator",
        "%s%n",
        "*",
        "$(touch /tmp/x)",
        "it's \"quoted\"",
        "<b>&amp;",
        "虚拟机 😀",
        "a\u{85}b",
        "leases.json",
        "lock",
    ];
    for name in names {
        let machine = Machine::new("2,10");
        let (vm, other) = (Vm::new(1, 2).named(name), Vm::new(2, 2).named("other"));
        let before = machine.everything();
        machine.prepare(&vm);
        machine.event(&vm, "migrate begin").printed();
        machine.prepare(&vm);
        let mut after = machine.everything();
        for file in ["/run/virt-pin/leases.json", "/run/virt-pin/topology.json"] {
            assert!(after.remove(&machine.path(file)).is_some());
        }
        assert!(after == before, "{name:?}: something but the state was made");
        // Every message with this name in it has it on one line, in its own order.
        let harmless = |text: &str| {
            let odd = |c: char| {
                c.is_control() || ('\u{202a}'..='\u{202e}').contains(&c) || ('\u{2066}'..='\u{2069}').contains(&c)
            };
            assert!(!text.replace('\n', "").contains(|c| odd(c) || c == '\u{2028}'), "{text:?}");
        };
        let refused = machine.event(&other, "prepare begin");
        assert_eq!(
            refused.refused(Code::Shortage),
            "domain \"other\": needs 1 whole core (2 vCPUs, 2 on each), 0 of the 1 pinnable are free"
        );
        let complaints = [
            refused,
            machine.event(&vm, "started begin"),
            machine.event(&Vm { uuid: "x".to_owned(), ..vm.clone() }, "prepare begin"),
            machine.event(&vm.clone().with("cores='x'"), "prepare begin"),
            machine.event(&Vm::new(3, 1).named(name).without_policy().pinned(&[2]), "prepare begin"),
            machine.event(&Vm::new(4, 70000).named(name), "prepare begin"),
        ];
        for run in &complaints {
            assert_eq!(run.stderr.lines().filter(|line| line.starts_with("virt-pin:")).count(), 1, "{}", run.stderr);
            assert!(run.stderr.lines().count() <= 3, "{}", run.stderr);
            harmless(&run.stderr);
        }
        for args in [&["list"][..], &["lease", &vm.uuid]] {
            let said = machine.cli(args).printed();
            harmless(&said);
            assert!(!said.contains("\nvirt-pin: error"), "{said}");
        }
        machine.event(&vm, "release end shutdown").silent();
        assert_eq!(machine.leased().len(), 0, "{name:?}");
    }
}

/// tp-libvirt#4137, vagrant-libvirt#1465: the slice of the VMs has not all CPUs.
#[test]
fn only_what_the_slice_has_is_offered() {
    let machine = Machine::new("2-3,10-11");
    machine.put("/run/systemd/system/x", "");
    machine.put("/usr/share/dbus-1/system-services/org.freedesktop.machine1.service", "");
    machine.put("/proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n");
    machine.put("/sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory\n");
    machine.put("/sys/fs/cgroup/cpuset.cpus.effective", "0-15\n");
    assert_eq!(pins(&machine.prepare(&Vm::new(1, 2))), [2, 10]);
    machine.event(&Vm::new(1, 2), "release end shutdown").silent();
    machine.put("/sys/fs/cgroup/machine.slice/cpuset.cpus.effective", "0-1,3,8-15\n");
    assert_eq!(pins(&machine.prepare(&Vm::new(1, 2))), [3, 11]);
    machine.event(&Vm::new(2, 2), "prepare begin").refused(Code::Shortage);
    let said = machine.cli_with(&["explain", "-"], Vm::new(2, 2).xml()).stdout;
    assert!(said.contains("pinnable, but out of reach of the VMs' cgroup: 2\n"), "{said}");
    // vfio-isolate#8: a controller that is not enabled is no restriction, and no error.
    machine.put("/sys/fs/cgroup/cgroup.controllers", "cpu io memory\n");
    assert_eq!(pins(&machine.prepare(&Vm::new(2, 2))), [2, 10]);
}

/// nova's bug 1978372: minutes on hosts of many nodes.
#[test]
fn many_nodes_are_quickly_searched() {
    let machine = Machine::shaped(Shape(64, 4, 2), "8-255,264-511");
    let start = std::time::Instant::now();
    for (number, vcpus, policy) in
        [(1, 120, ""), (2, 24, "cores='thread'"), (3, 8, "numa='single'"), (4, 61, "numa='any'")]
    {
        let xml = machine.prepare(&Vm::new(number, vcpus).with(policy));
        assert_eq!(pins(&xml).len(), vcpus as usize);
    }
    machine.event(&Vm::new(5, 480), "prepare begin").refused(Code::Shortage);
    machine.event(&Vm::new(6, 10).with("numa='single'"), "prepare begin").refused(Code::Unsatisfiable);
    assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
}
