//! The built hook, run as libvirt runs it, on a machine in a temporary directory: every event with every input and every
//! state it may meet. Exit status, stdout to the byte, the first line of stderr, and what is on disk afterwards.
//!
//! What users of such hooks have reported is in `reports.rs`.
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

use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use machine::{Machine, Run, Shape, Vm, pins};
use virt_pin::error::Code;

/// Puts something into a machine.
type Place<'a> = &'a dyn Fn(&Machine);

/// What libvirt may be told of a failure.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Manner {
    /// By the exit status.
    Refuses,
    /// Not at all: stderr has it, the exit status is 0.
    Reports,
    /// Nothing is done, so nothing fails.
    Silent,
}
use Manner::{Refuses, Reports, Silent};

/// Every event of a domain: operation, sub-operation, how it fails.
const EVENTS: [(&str, &str, Manner); 10] = [
    ("prepare", "begin", Refuses),
    ("start", "begin", Silent),
    ("started", "begin", Refuses),
    ("stopped", "end", Silent),
    ("release", "end", Reports),
    ("migrate", "begin", Refuses),
    ("restore", "begin", Reports),
    ("reconnect", "begin", Reports),
    ("attach", "begin", Silent),
    ("foretell", "begin", Silent),
];

/// Runs every event with this input on this machine, of which nothing may change.
#[track_caller]
fn every_event_fails(machine: &Machine, xml: &[u8], code: Code, part: &str) {
    let before = machine.everything();
    for (operation, sub_operation, manner) in EVENTS {
        let run = machine.hook(&["vm1", operation, sub_operation, "-"], xml);
        let sentence = match manner {
            Refuses => run.refused(code),
            Reports => run.reported(code),
            Silent => {
                run.silent();
                continue;
            }
        };
        assert!(sentence.contains(part), "{operation}: {sentence}");
    }
    assert!(machine.everything() == before, "something has changed");
}

/// A machine with a lease of `vm9`, which has no QEMU yet.
fn machine() -> Machine {
    let machine = Machine::new("2-3,10-11");
    machine.prepare(&Vm::new(9, 2));
    machine
}

#[test]
fn the_whole_life_of_a_domain() {
    let machine = Machine::new("2-3,10-11");
    let vm = Vm::new(1, 2);
    let prepared = "<domain type='kvm' id='1'>
  <name>vm1</name>
  <uuid>00000000-0000-0000-0000-000000000001</uuid>
  <metadata>
    <pin:cpu xmlns:pin='urn:virt-pin:domain:1' policy='dedicated'/>
  </metadata>
  <memory unit='KiB'>1048576</memory>
  <vcpu placement='static' cpuset='0-2,4-10,12-15'>2</vcpu>
  <cputune>
    <vcpupin vcpu='0' cpuset='2'/>
    <vcpupin vcpu='1' cpuset='10'/>
    <emulatorpin cpuset='0-1,4-9,12-15'/>
  </cputune>
  <os>
    <type arch='x86_64'>hvm</type>
  </os>
  <cpu>
    <topology sockets='1' cores='1' threads='2'/>
  </cpu>
</domain>
";
    assert_eq!(machine.prepare(&vm), prepared);
    let lease = |state: &str, qemu: &str| {
        format!(
            "{{\"version\":2,\"boot_id\":\"{}\",\"leases\":[{{\"uuid\":\"{}\",\"name\":\"vm1\",\"state\":\"{state}\",\
             \"kind\":\"dedicated\",\"vcpus\":[2,10],\"whole\":true,\"emulator\":\"0-1,4-9,12-15\",\"iothreads\":\"0-1,4-9,12-15\",\
             \"nodes\":\"0\",\"memory_nodes\":\"0\",\"guest\":[1,1,1,2],\
             \"request\":{{\"vcpus\":2,\"policy\":[[\"policy\",\"dedicated\"]],\"memory\":{{\"bytes\":1073741824,\"pages\":\"ordinary\"}}}},\
             \"domain_id\":1{qemu},\"since\":1000}}]}}\n",
            machine::BOOT_ID,
            vm.uuid
        )
    };
    assert_eq!(machine.leases().unwrap(), lease("reserved", ""));
    machine.event(&vm, "start begin").silent();
    assert_eq!(machine.leases().unwrap(), lease("reserved", ""));
    machine.qemu(&vm, 700, &[2, 10], "0-1,4-9,12-15");
    machine.event(&vm, "started begin").silent();
    assert_eq!(machine.leases().unwrap(), lease("running", ",\"qemu\":[700,5000]"));
    machine.event(&vm, "reconnect begin").silent();
    assert_eq!(machine.leases().unwrap(), lease("running", ",\"qemu\":[700,5000]"));
    machine.event(&vm, "stopped end").silent();
    // Its QEMU has ended: the lease does at release, not before.
    machine.gone(700);
    assert_eq!(machine.leased().len(), 1);
    machine.event(&vm, "release end shutdown").silent();
    let none = format!("{{\"version\":2,\"boot_id\":\"{}\",\"leases\":[]}}\n", machine::BOOT_ID);
    assert_eq!(machine.leases().unwrap(), none);
    assert_eq!(fs::metadata(machine.path("/run/virt-pin")).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(fs::metadata(machine.path("/run/virt-pin/leases.json")).unwrap().permissions().mode() & 0o777, 0o600);
    let names = fs::read_dir(machine.path("/run/virt-pin")).unwrap().count();
    assert_eq!(names, 3, "the lock, the leases and the survey, nothing else");
}

#[test]
fn a_shared_domain_passes_and_leaves_no_trace() {
    let machine = Machine::new("2-3");
    let before = machine.everything();
    for (operation, sub_operation, _) in EVENTS {
        let xml = Vm::new(1, 2).without_policy().xml();
        machine.hook(&["vm1", operation, sub_operation, "-"], xml).silent();
        let shared = Vm { policy: Some("policy='shared' isolation='partition'".to_owned()), ..Vm::new(1, 2) };
        machine.hook(&["vm1", operation, sub_operation, "-"], shared.xml()).silent();
    }
    assert!(machine.everything() == before);
    assert!(!machine.path("/run").exists(), "not even the lock");
}

#[test]
fn no_arguments_no_event() {
    let machine = machine();
    let run = machine.hook(&[], "");
    assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""));
    assert!(
        run.stderr.starts_with("usage: virt-pin-hook NAME OPERATION SUB-OPERATION EXTRA < DOMAIN.xml\n"),
        "{run:?}"
    );
    // Events that are not ours, of the daemon, or no events at all.
    for args in [
        &["-", "start", "-", "start"][..],
        &["-", "reload", "begin", "SIGHUP"],
        &["-", "shutdown", "-", "shutdown"],
        &["vm1", "prepare", "end", "-"],
        &["vm1", "prepare"],
        &["--help"],
        &["--version"],
        &[""],
        &["", "", "", ""],
        &["vm1", "PREPARE", "BEGIN", "-"],
    ] {
        machine.hook(args, "not read").silent();
    }
}

#[test]
fn no_room() {
    let machine = machine();
    let vm = Vm::new(1, 4);
    let before = machine.everything();
    let sentence = "domain \"vm1\": needs 2 whole cores (4 vCPUs, 2 on each), 1 of the 2 pinnable are free";
    for event in ["prepare begin", "migrate begin"] {
        let run = machine.event(&vm, event);
        assert_eq!(run.refused(Code::Shortage), sentence);
        let hint = "  hint: held by \"vm9\" 2,10; stop a VM that holds some, or add to pinnable_cpus\n";
        assert!(run.stderr.ends_with(hint), "{}", run.stderr);
    }
    assert_eq!(machine.event(&vm, "restore begin").reported(Code::Shortage), sentence);
    for event in ["started begin", "reconnect begin"] {
        let run = machine.event(&vm, event);
        let what = "domain \"vm1\": has a dedicated policy, but no lease";
        let said =
            if event == "started begin" { run.refused(Code::DomainUnknown) } else { run.reported(Code::DomainUnknown) };
        assert_eq!(said, what);
    }
    machine.event(&vm, "release end failed").silent();
    assert!(machine.everything() == before);
}

/// `fallback='shared'`: from the start that finds no room to the one that does.
#[test]
fn a_domain_that_can_do_without() {
    let machine = machine();
    let vm = Vm::new(1, 4).with("fallback='shared'");
    let reason = "needs 2 whole cores (4 vCPUs, 2 on each), 1 of the 2 pinnable are free";
    // Those that only ask get no lease; the XML is left alone at all of them.
    for event in ["migrate begin", "restore begin", "prepare begin"] {
        assert_eq!(machine.leased().len(), 1, "{event}");
        assert_eq!(machine.event(&vm, event).printed(), vm.xml());
    }
    let lease = |state: &str, qemu: &str| {
        let text = format!(
            "{{\"uuid\":\"{}\",\"name\":\"vm1\",\"state\":\"{state}\",\"kind\":\"degraded\",\"cpus\":\"\",\
             \"code\":\"cpu.placement.shortage\",\"reason\":\"{reason}\",\"domain_id\":1{qemu},\"since\":1000}}",
            vm.uuid
        );
        serde_json::from_str::<serde_json::Value>(&text).unwrap()
    };
    assert_eq!(machine.leased()[0], lease("reserved", ""));
    // The same event again, and another attempt.
    let before = machine.everything();
    assert_eq!(machine.prepare(&vm), vm.xml());
    assert!(machine.everything() == before);
    machine.event(&vm, "start begin").silent();
    machine.qemu(&vm, 700, &[0, 1, 3, 11], "0-15");
    for event in ["started begin", "reconnect begin"] {
        machine.event(&vm, event).silent();
        assert_eq!(machine.leased()[0], lease("running", ",\"qemu\":[700,5000]"));
    }
    // It has nothing that others could not have, and its lease is that of a living domain all the same.
    machine.prepare(&Vm::new(2, 2));
    machine.event(&vm, "prepare begin").refused(Code::StateConflict);
    assert_eq!(machine.leased().len(), 3);
    machine.gone(700);
    machine.event(&vm, "release end shutdown").silent();
    assert_eq!(machine.leased().len(), 2);
    // With room it is a domain like others.
    machine.event(&Vm::new(9, 2), "release end shutdown").silent();
    machine.event(&Vm::new(2, 2), "release end shutdown").silent();
    assert_eq!(pins(&machine.prepare(&vm)), [2, 10, 3, 11]);
    assert_eq!(machine.leased()[0]["kind"], "dedicated");
    // One that has ended unnoticed is reclaimed like others.
    let machine = Machine::new("2,10");
    machine.prepare(&vm);
    machine.qemu(&vm, 700, &[0, 1, 3, 11], "0-15");
    machine.event(&vm, "started begin").silent();
    machine.gone(700);
    machine.prepare(&Vm::new(2, 2));
    assert_eq!(machine.leased().len(), 1);
}

#[test]
fn doing_without_is_for_want_of_room_alone() {
    let fallback = |more: &str| format!("fallback='shared' {more}");
    let machine = Machine::new("1-3,9-11,4-6");
    machine.prepare(&Vm::new(9, 2).with("nodes='0'"));
    machine.event(&Vm::new(8, 1).without_policy().pinned(&[6]), "prepare begin").silent();
    let before = machine.everything();
    for (vm, code) in [
        (Vm::new(1, 6).with(&fallback("")), Code::Shortage),
        (Vm::new(1, 14).with(&fallback("")), Code::Unsatisfiable),
        (Vm::new(1, 5).with(&fallback("cores='thread' numa='single'")), Code::NeedsRepack),
        (Vm::new(1, 2).memory_kib(62 << 20).with(&fallback("")), Code::MemoryShortage),
    ] {
        assert_eq!(machine.prepare(&vm), vm.xml());
        let lease = &machine.leased()[0];
        assert_eq!((lease["kind"].as_str(), lease["code"].as_str()), (Some("degraded"), Some(code.name())));
        machine.event(&vm, "release end failed").silent();
    }
    assert!(machine.everything() == before);
    for (vm, code) in [
        (Vm::new(1, 3).with(&fallback("threads-per-core='2'")), Code::PolicyInvalid),
        (Vm::new(1, 2).with(&fallback("isolation='partition'")), Code::IsolationUnsupported),
        (Vm::new(1, 2).with(&fallback("")).pinned(&[0, 8]), Code::StalePins),
        (Vm::new(1, 0).with(&fallback("")), Code::DomainInvalid),
    ] {
        machine.event(&vm, "prepare begin").refused(code);
        assert!(machine.everything() == before);
    }
    machine.config("pinnable = 1\n");
    machine.event(&Vm::new(1, 2).with(&fallback("")), "prepare begin").refused(Code::ConfigInvalid);
    machine.pinnable("2");
    machine.put("/run/virt-pin/leases.json", "");
    machine.event(&Vm::new(1, 2).with(&fallback("")), "prepare begin").refused(Code::StateCorrupt);
}

#[test]
fn pins_of_a_domain_that_does_without() {
    let machine = Machine::new("2-3,10-11");
    machine.prepare(&Vm::new(9, 2));
    // libvirt would put its threads on the CPUs of vm9, whichever way it comes in.
    let vm = Vm::new(1, 4).with("fallback='shared'").pinned(&[0, 1, 4, 10]);
    let before = machine.everything();
    for event in ["prepare begin", "migrate begin", "restore begin"] {
        let run = machine.event(&vm, event);
        let said = if event == "restore begin" {
            run.reported(Code::StaticConflict)
        } else {
            run.refused(Code::StaticConflict)
        };
        assert_eq!(said, "domain \"vm1\": its XML pins vCPUs to CPUs 0-1,4,10, but 10 are leased to domain \"vm9\"");
        assert!(run.stderr.contains("  because: needs 2 whole cores (4 vCPUs, 2 on each)"), "{}", run.stderr);
        assert!(
            run.stderr.contains("  hint: fallback=\"shared\" starts it without CPUs of its own, but"),
            "{}",
            run.stderr
        );
    }
    assert!(machine.everything() == before);
    // On CPUs of nobody they are respected like those by hand: nobody else gets those.
    let vm = Vm::new(1, 4).with("fallback='shared'").pinned(&[0, 1, 4, 11]);
    assert_eq!(machine.prepare(&vm), vm.xml());
    assert_eq!((&machine.leased()[0]["kind"], &machine.leased()[0]["cpus"]), (&"degraded".into(), &"0-1,4,11".into()));
    machine.event(&Vm::new(2, 2), "prepare begin").refused(Code::Shortage);
}

/// A vCPU without a CPU of its own is `null` in the file, and stays in its place.
#[test]
fn a_partly_dedicated_domain() {
    let machine = Machine::new("2-3,10-11");
    let vm = Vm::new(1, 3).with("dedicated-vcpus='0,2'");
    machine.prepare(&vm);
    let lease = &machine.leased()[0];
    let (vcpus, shared) = (&lease["vcpus"], lease["shared"].as_str().unwrap());
    assert_eq!((vcpus, shared), (&serde_json::json!([2, null, 10]), "0-1,4-9,12-15"));
    machine.qemu(&vm, 700, &[2, 0, 10], shared);
    machine.event(&vm, "started begin").silent();
    assert_eq!((&machine.leased()[0]["vcpus"], &machine.leased()[0]["state"]), (vcpus, &"running".into()));
    let text = machine.cli(&["lease", "vm1"]).printed();
    assert!(text.contains(&format!("vCPU 1:         shared CPUs {shared}\n")), "{text}");
    // Its shared vCPU is on CPUs that become pinnable: they are nobody's own while it runs.
    let machine = Machine::new("2-5,10-13");
    machine.prepare(&vm.with("dedicated-vcpus='0,2' emulator='isolate' iothreads='isolate'"));
    machine.pinnable("2-6,10-14");
    machine.prepare(&Vm::new(2, 4));
    let run = machine.event(&Vm::new(3, 2), "prepare begin");
    run.refused(Code::Shortage);
    assert!(run.stderr.contains("CPUs 6,14 have become pinnable while \"vm1\" has shared threads"), "{}", run.stderr);
}

/// leases.json as version 1 had it, with a domain that runs and one that is being started.
#[test]
fn an_upgrade_under_running_domains() {
    let machine = Machine::new("2-3,10-11");
    let (first, second) = (Vm::new(1, 2), Vm::new(2, 2));
    machine.prepare(&first);
    machine.qemu(&first, 700, &[2, 10], "0-1,4-9,12-15");
    machine.event(&first, "started begin").silent();
    machine.prepare(&second);
    // What version 1 wrote is this without the requests.
    let mut text = machine.leases().unwrap().replace("\"version\":2", "\"version\":1");
    let request = ",\"request\":{\"vcpus\":2,\"policy\":[[\"policy\",\"dedicated\"]],\
                   \"memory\":{\"bytes\":1073741824,\"pages\":\"ordinary\"}}";
    assert_eq!(text.matches(request).count(), 2);
    text = text.replace(request, "");
    machine.put("/run/virt-pin/leases.json", &text);
    machine.event(&first, "reconnect begin").silent();
    machine.event(&Vm::new(3, 2), "prepare begin").refused(Code::Shortage);
    assert_eq!(machine.leases().unwrap(), text, "looked at, not written");
    machine.qemu(&second, 710, &[3, 11], "0-1,4-9,12-15");
    machine.event(&second, "started begin").silent();
    let now = machine.leases().unwrap();
    assert!(now.starts_with("{\"version\":2,") && !now.contains("request"), "{now}");
    assert_eq!((machine.vcpus_of(&first), machine.vcpus_of(&second)), (vec![2, 10], vec![3, 11]));
    // A new start has its request; a running domain gets its own from `reconcile`.
    machine.gone(710);
    machine.event(&second, "release end shutdown").silent();
    machine.prepare(&second);
    assert_eq!((&machine.leased()[0]["request"], &machine.leased()[1]["request"]["vcpus"]), (&().into(), &2.into()));
    let _alive = machine.alive(&first);
    machine.cli(&["reconcile"]).printed();
    assert_eq!(machine.leased()[0]["request"]["policy"], serde_json::json!([["policy", "dedicated"]]));
    assert_eq!(machine.leased()[0]["qemu"], serde_json::json!([700, 5000]));
}

#[test]
fn what_is_set_aside_for_autostart_domains() {
    // Cores 1-9, 2-10 and 3-11.
    let machine = Machine::new("1-3,9-11");
    let (auto, merely, other) = (Vm::new(1, 2), Vm::new(2, 2), Vm::new(3, 2));
    machine.define(&auto, true);
    machine.define(&merely, false);
    // What cannot be used is in nobody's way.
    machine.put("/etc/libvirt/qemu/broken.xml", "<domain xmlns:pin='urn:virt-pin:domain:1'>");
    // One that is not defined takes nobody's place while it can.
    machine.prepare(&other);
    assert_eq!(machine.vcpus_of(&other), [3, 11]);
    machine.prepare(&merely);
    assert_eq!(machine.vcpus_of(&merely), [2, 10]);
    let before = machine.everything();
    let last = Vm::new(4, 2);
    for event in ["prepare begin", "migrate begin"] {
        let run = machine.event(&last, event);
        let sentence = "domain \"vm4\": there is room only on CPUs set aside for autostart domains that do not run yet: \
                        \"vm1\" 1,9";
        assert_eq!(run.refused(Code::Reserved), sentence);
        assert!(run.stderr.contains("hint: set autostart_reserve = \"prefer\" in /etc/virt-pin/virt-pin.toml"));
    }
    // What has no room anyway is told so, and who holds it.
    let run = machine.event(&Vm::new(5, 4), "prepare begin");
    run.refused(Code::Shortage);
    assert!(run.stderr.contains("held by \"vm2\" 2,10, \"vm3\" 3,11"), "{}", run.stderr);
    // Pins are no way in.
    machine.event(&last.clone().pinned(&[1, 9]), "prepare begin").refused(Code::Reserved);
    assert!(machine.everything() == before);
    machine.prepare(&auto);
    assert_eq!(machine.vcpus_of(&auto), [1, 9]);
    // A second event finds the lease, whatever is defined by now.
    machine.define(&Vm::new(6, 6), true);
    machine.prepare(&auto);
    assert_eq!(machine.vcpus_of(&auto), [1, 9]);

    machine.event(&auto, "release end shutdown").silent();
    machine.config("pinnable_cpus = \"1-3,9-11\"\nautostart_reserve = \"prefer\"\n");
    machine.prepare(&last);
    assert_eq!(machine.vcpus_of(&last), [1, 9]);
}

#[test]
fn places_do_not_depend_on_who_starts_first() {
    let vms: Vec<_> = (1..=3).map(|number| Vm::new(number, 2)).collect();
    let run = |order: [usize; 3]| {
        let machine = Machine::new("1-3,9-11");
        vms.iter().for_each(|vm| machine.define(vm, false));
        order.iter().for_each(|&index| drop(machine.prepare(&vms[index])));
        vms.iter().map(|vm| machine.vcpus_of(vm)).collect::<Vec<_>>()
    };
    let places = [[1, 9], [2, 10], [3, 11]];
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        assert_eq!(run(order), places);
    }
}

#[test]
fn every_kind_of_refusal_changes_nothing() {
    let machine = Machine::new("1-3,9-11,4-6");
    machine.prepare(&Vm::new(9, 2).with("nodes='0'"));
    machine.prepare(&Vm::new(8, 1).without_policy().pinned(&[6]));
    let before = machine.everything();
    let huge = "<memoryBacking><hugepages/></memoryBacking>";
    for (vm, code, part) in [
        (Vm::new(1, 6), Code::Shortage, "needs 3 whole cores"),
        (Vm::new(1, 14), Code::Unsatisfiable, "needs 7 whole cores"),
        (Vm::new(1, 5).with("cores='thread' numa='single'"), Code::NeedsRepack, "scattered"),
        (Vm::new(1, 2).with("nodes='7'"), Code::Unsatisfiable, "node 7 does not exist"),
        (Vm::new(1, 2).memory_kib(62 << 20), Code::MemoryShortage, ""),
        (Vm::new(1, 2).body(huge), Code::Unsatisfiable, "1024 MiB of huge pages of 2048 KiB"),
        (Vm::new(1, 3).with("threads-per-core='2'"), Code::PolicyInvalid, "3 vCPUs are not a multiple"),
        (
            Vm::new(1, 2).with("isolation='partition' emulator='share' dedicated-vcpus='0'"),
            Code::PolicyUnsupported,
            "isolation=\"partition\" cannot be made: emulator shares CPUs",
        ),
        (Vm::new(1, 2).pinned(&[0, 8]), Code::StalePins, "pins vCPU 0 to CPUs 0; its lease says"),
        (Vm::new(1, 1).without_policy().pinned(&[9]), Code::StaticConflict, "9 are leased to domain \"vm9\""),
        (Vm::new(1, 0), Code::DomainInvalid, "0 vCPUs"),
        (Vm::new(1, 70000), Code::DomainInvalid, "70000 vCPUs"),
    ] {
        for event in ["prepare begin", "migrate begin", "restore begin"] {
            // What comes in is given pins of ours, so those it has do not matter.
            if code == Code::StalePins && event != "prepare begin" {
                continue;
            }
            let run = machine.event(&vm, event);
            let said = if event == "restore begin" { run.reported(code) } else { run.refused(code) };
            assert!(said.starts_with("domain \"vm1\": ") && said.contains(part), "{said}");
            // After a refused start libvirt reports an end; that ends nobody else's lease.
            machine.event(&vm, "stopped end").silent();
            machine.event(&vm, "release end failed").silent();
            assert!(machine.everything() == before, "{code} at {event}");
        }
    }
}

/// Enough is free, but scattered: the refusal says who would have to move.
#[test]
fn a_refusal_names_the_moves_that_would_make_room() {
    // Two nodes with two pinnable cores each.
    let machine = Machine::new("2-5,10-13");
    machine.prepare(&Vm::new(7, 2).with("nodes='1'"));
    machine.prepare(&Vm::new(6, 2).with("nodes='1'"));
    machine.prepare(&Vm::new(8, 2).with("nodes='0'"));
    machine.event(&Vm::new(6, 2), "release end shutdown").silent();
    // Each has to stay on its node.
    let vm = Vm::new(1, 4).with("numa='single'");
    let run = machine.event(&vm, "prepare begin");
    let sentence = "domain \"vm1\": needs 2 whole cores on one node (4 vCPUs, 2 on each), 1 of them free; 2 whole cores and \
                    4 threads are free in all, but scattered";
    assert_eq!(run.refused(Code::NeedsRepack), sentence);
    let free = "  per node: 0 has 1 whole core, 2 threads free; 1 has 1 whole core, 2 threads free\n";
    assert!(run.stderr.contains(&format!("{free}  hint: held by \"vm7\" 4,12, \"vm8\" 2,10; ")), "{}", run.stderr);
    // One that may be on either.
    machine.prepare(&Vm::new(6, 2).with("nodes='1'"));
    machine.event(&Vm::new(8, 2), "release end shutdown").silent();
    machine.prepare(&Vm::new(8, 2).named("b"));
    machine.event(&Vm::new(6, 2), "release end shutdown").silent();
    let before = machine.everything();
    for event in ["prepare begin", "migrate begin", "restore begin"] {
        let run = machine.event(&vm, event);
        let said =
            if event == "restore begin" { run.reported(Code::NeedsRepack) } else { run.refused(Code::NeedsRepack) };
        assert_eq!(said, sentence);
        let hint = "  hint: moving \"b\" from CPUs 2,10 to 5,13 would make room: `virt-pin repack --for DOMAIN` does that while they run; \
                    or relax numa, cache or cores\n";
        assert!(run.stderr.ends_with(&format!("{free}{hint}")), "{}", run.stderr);
    }
    assert!(machine.everything() == before);
    // It is true.
    machine.event(&Vm::new(8, 2).named("b"), "release end shutdown").silent();
    machine.prepare(&vm);
    machine.prepare(&Vm::new(8, 2).named("b"));
    assert_eq!((machine.vcpus_of(&vm), machine.vcpus_of(&Vm::new(8, 2).named("b"))), (vec![2, 10, 3, 11], vec![5, 13]));
}

#[test]
fn a_guest_that_would_be_told_otherwise() {
    let machine = machine();
    let before = machine.everything();
    let vm = |policy: &str, cpu: &str| Vm {
        policy: Some(format!("policy='dedicated' {policy}")),
        body: format!("<cpu>{cpu}</cpu>"),
        ..Vm::new(1, 2)
    };
    let (wrong, right) =
        ("<topology sockets='2' cores='1' threads='1'/>", "<topology sockets='1' cores='1' threads='2'/>");
    for (cpu, told) in [(wrong, "2 sockets of 1 core of 1 thread"), ("", "nothing of cores and threads")] {
        let run = machine.event(&vm("topology='require'", cpu), "prepare begin");
        let refusal = format!("domain \"vm1\": its XML tells the guest {told}, not 1 core of 2 threads");
        assert_eq!(run.refused(Code::TopologyOtherwise), refusal);
        assert_eq!(machine.everything(), before);
    }
    machine.event(&vm("topology='require'", right), "prepare begin").printed();
    machine.event(&vm("topology='require'", right), "release end");
    // Without the demand it starts.
    machine.event(&vm("", wrong), "prepare begin").printed();
}

/// A definition that virt-pin shaped binds each of the guest's cells to a node, and libvirt carries that out whatever the hook
/// says: so the lease is there, or the start is refused. What is migrated is bound anew.
#[test]
fn memory_that_a_shape_has_bound() {
    let machine = Machine::shaped(Shape(4, 4, 2), "1-15,17-31");
    let wide = Vm::new(1, 12).memory_kib(2 << 20);
    machine.put("/wide.xml", &Vm { id: None, ..wide.clone() }.xml());
    let file = machine.path("/wide.xml");
    let shaped = machine.cli(&["transform", "--shape-only", file.to_str().unwrap()]).printed();
    let bound = "<memory mode='strict' nodeset='0-1'/>";
    assert!(shaped.contains(bound), "{shaped}");
    machine.put("/shaped.xml", &shaped);
    let shaped = shaped.replace("<domain type='kvm'>", "<domain type='kvm' id='1'>");

    // It is where its memory is, and there is room for that.
    machine.hook(&["vm1", "prepare", "begin", "-"], &shaped).printed();
    let lease = &machine.leased()[0];
    assert_eq!((lease["nodes"].as_str(), lease["memory_nodes"].as_str()), (Some("0-1"), Some("0-1")));
    machine.hook(&["vm1", "release", "end", "-"], &shaped).silent();
    let full = "Node 1 MemTotal: 67108864 kB\nNode 1 MemFree: 1000 kB\n";
    let node = "/sys/devices/system/node/node1/meminfo";
    let meminfo = machine.read(node);
    machine.put(node, full);
    machine.hook(&["vm1", "prepare", "begin", "-"], &shaped).refused(Code::MemoryShortage);
    machine.put(node, &meminfo);

    // Two other nodes are free, and no good.
    machine.prepare(&Vm::new(2, 8).with("nodes='1'"));
    let before = machine.everything();
    let refused = machine.hook(&["vm1", "prepare", "begin", "-"], &shaped);
    let sentence =
        "domain \"vm1\": needs 6 whole cores on nodes 0-1, each guest NUMA cell on one node (12 vCPUs, 2 on each)";
    let said = refused.refused(Code::NeedsRepack);
    assert!(said.starts_with(sentence), "{said}");
    let why = "its XML binds the memory of its NUMA cells to nodes 0-1, as virt-pin wrote it for the domain's place, so it can \
               start there alone";
    assert!(refused.stderr.contains(why), "{}", refused.stderr);
    assert!(machine.everything() == before);
    let explained = machine.cli(&["explain", machine.path("/shaped.xml").to_str().unwrap()]);
    assert_eq!(explained.code, Some(Code::NeedsRepack.exit().into()));
    assert!(explained.stderr.contains(why), "{}", explained.stderr);
    // A policy that says otherwise is not what it gets; one that may do without gets nothing.
    let elsewhere = shaped.replace("policy='dedicated'", "policy='dedicated' nodes='2-3'");
    machine.hook(&["vm1", "prepare", "begin", "-"], &elsewhere).refused(Code::Unsatisfiable);
    let without = shaped.replace("policy='dedicated'", "policy='dedicated' fallback='shared'");
    machine.hook(&["vm1", "prepare", "begin", "-"], &without).printed();
    assert!(machine.leases().unwrap().contains("\"degraded\""));
    machine.hook(&["vm1", "release", "end", "-"], &without).silent();

    // Cells of unlike size, the other way round than they would be without that: each is where its memory is.
    machine.event(&Vm::new(2, 8), "release end shutdown").silent();
    let swapped = shaped.replace("0:strict:0 1:strict:1", "0:strict:1 1:strict:0");
    let swapped = swapped.replace("cellid='0' mode='strict' nodeset='0'", "cellid='0' mode='strict' nodeset='1'");
    let swapped = swapped.replace("cellid='1' mode='strict' nodeset='1'", "cellid='1' mode='strict' nodeset='0'");
    let started = machine.hook(&["vm1", "prepare", "begin", "-"], &swapped).printed();
    assert_eq!(pins(&started), [4, 20, 5, 21, 6, 22, 1, 17, 2, 18, 3, 19]);
    machine.hook(&["vm1", "release", "end", "-"], &swapped).silent();

    // From elsewhere: the memory goes where the vCPUs do.
    machine.prepare(&Vm::new(2, 8).with("nodes='1'"));
    let entered = machine.hook(&["vm1", "migrate", "begin", "-"], &shaped).printed();
    assert!(!entered.contains(bound) && entered.contains("<memory mode='strict' nodeset='0,2'/>"), "{entered}");
    assert!(entered.contains("wrote-numatune='strict 0,2 0:strict:0 1:strict:2'"), "{entered}");
}

#[test]
fn errors_in_the_policy_name_what_is_accepted() {
    let machine = machine();
    let before = machine.everything();
    let names = "\"policy\", \"cores\", \"threads-per-core\", \"numa\", \"nodes\", \"cache\", \"memory\", \"emulator\", \
                 \"iothreads\", \"core-class\", \"topology\", \"locality\", \"isolation\", \"realtime\", \"core-sched\", \"tenant\", \"fallback\"";
    for (policy, sentence, accepted) in [
        ("polcy='dedicated'", "unknown policy attribute \"polcy\"", names),
        (
            "policy='Dedicated'",
            "unknown value \"Dedicated\" of policy attribute \"policy\"",
            "\"shared\", \"dedicated\"",
        ),
        (
            "policy='dedicated' cores='half'",
            "unknown value \"half\" of policy attribute \"cores\"",
            "\"whole\", \"thread\"",
        ),
        (
            "policy='dedicated' numa=''",
            "unknown value \"\" of policy attribute \"numa\"",
            "\"prefer\", \"single\", \"any\"",
        ),
        (
            "policy='dedicated' emulator='x'",
            "unknown value \"x\" of policy attribute \"emulator\"",
            "\"housekeeping\", \"isolate\", \"share\"",
        ),
    ] {
        let run = machine.event(&Vm { policy: Some(policy.to_owned()), ..Vm::new(1, 2) }, "prepare begin");
        assert_eq!(run.refused(Code::PolicyInvalid), format!("domain \"vm1\": {sentence}"));
        let hint = run.stderr.lines().last().unwrap();
        assert!(accepted.split(", ").all(|word| hint.contains(word)), "{hint}");
    }
    for element in [
        "<pin:cpus xmlns:pin='urn:virt-pin:domain:1' policy='dedicated'/>",
        "<pin:cpu xmlns:pin='urn:virt-pin:domain:1' policy='dedicated'/><pin:cpu xmlns:pin='urn:virt-pin:domain:1'/>",
        "<pin:cpu xmlns:pin='urn:virt-pin:domain:1' pin:policy='dedicated'/>",
        "<pin:cpu xmlns:pin='urn:virt-pin:domain:1'>dedicated</pin:cpu>",
    ] {
        let vm = Vm::new(1, 2).without_policy().body(&format!("<metadata>{element}</metadata>"));
        machine.event(&vm, "prepare begin").refused(Code::PolicyInvalid);
    }
    assert!(machine.everything() == before);
}

#[test]
fn a_realtime_domain_brings_what_it_needs() {
    let machine = machine();
    let bare = Vm::new(1, 2).with("realtime='yes'");
    let lacks = "domain \"vm1\": policy realtime=\"yes\": its XML lacks <vcpusched vcpus=\"0-1\" scheduler=\"fifo\" \
                 priority=\"1\"/> in <cputune> and <locked/> in <memoryBacking>";
    let before = machine.everything();
    for event in ["prepare begin", "migrate begin"] {
        let run = machine.event(&bare, event);
        assert_eq!(run.refused(Code::PolicyInvalid), lacks);
        assert!(run.stderr.contains("virt-pin transform"), "{}", run.stderr);
    }
    machine.event(&bare, "restore begin").reported(Code::PolicyInvalid);
    let explained = machine.cli_with(&["explain", "-"], bare.xml());
    assert_eq!(explained.complaint(Code::PolicyInvalid), lacks);
    assert!(machine.everything() == before);

    let xml = machine.cli_with(&["transform"], bare.xml()).printed();
    assert_eq!(machine.cli_with(&["transform"], &xml).printed(), xml, "a second time changes nothing");
    let printed = machine.hook(&["vm1", "prepare", "begin", "-"], &xml).printed();
    assert!(printed.contains("<vcpusched vcpus='0-1' scheduler='fifo' priority='1'/>"), "{printed}");
}

#[test]
fn allocated_caches_follow_the_vcpus() {
    let machine = machine();
    for cpu in 0..16 {
        // The kernel's numbers are its own: here those of the package are 1.
        machine.put(&format!("/sys/devices/system/cpu/cpu{cpu}/cache/index3/id"), "1\n");
    }
    let tune = |id: u16| {
        let cache =
            format!("<cachetune vcpus='0-1'><cache id='{id}' level='3' type='both' size='3' unit='MiB'/></cachetune>");
        let node = format!("<memorytune vcpus='0-1'><node id='{id}' bandwidth='60'/></memorytune>");
        Vm::new(1, 2).body(&format!("<cputune>{cache}{node}</cputune>"))
    };
    let before = machine.everything();
    let run = machine.event(&tune(0), "prepare begin");
    let said =
        "domain \"vm1\": its <cachetune> for vCPUs 0-1 names level 3 caches 0, but these vCPUs get CPUs that use 1";
    assert_eq!(run.refused(Code::StaleCaches), said);
    assert_eq!(machine.cli_with(&["explain", "-"], tune(0).xml()).complaint(Code::StaleCaches), said);
    assert!(machine.everything() == before);
    // Where libvirt takes the document back they are made to follow, and nothing else is.
    let printed = machine.cli_with(&["transform"], tune(0).xml()).printed();
    for part in ["<cache id='1' level='3' type='both' size='3' unit='MiB'/>", "<node id='1' bandwidth='60'/>"] {
        assert!(printed.contains(part), "{printed}");
    }
    let migrated = machine.event(&tune(0), "migrate begin").printed();
    assert!(migrated.contains("<cache id='1' ") && migrated.contains("<node id='1' "), "{migrated}");
    machine.event(&tune(1), "prepare begin").printed();
}

#[test]
fn leases_that_cannot_be_read() {
    let old = machine().leases().unwrap();
    let newer = "{\"version\":3,\"leases\":{\"a\":1}}\n";
    let nuls = "\0".repeat(4096);
    let twice = old.replace("]}", &format!(",{}", old.split_once('[').unwrap().1));
    let overlapping = twice.replacen("000000000009", "000000000008", 1);
    let halved = &old[..old.len() / 2];
    let bom = format!("\u{feff}{old}");
    let (tail, two, after) = (format!("{old}}}\"}}}}"), format!("{old}{old}"), format!("{old}\0\0"));
    let unknown = old.replace("\"since\"", "\"until\":1,\"since\"");
    for (text, code, part) in [
        ("", Code::StateCorrupt, "is not a lease file"),
        (nuls.as_str(), Code::StateCorrupt, "is not a lease file"),
        (halved, Code::StateCorrupt, "is not a lease file"),
        (&bom, Code::StateCorrupt, "is not a lease file"),
        (&tail, Code::StateCorrupt, "trailing characters"),
        (&two, Code::StateCorrupt, "trailing characters"),
        (&after, Code::StateCorrupt, "trailing characters"),
        (&unknown, Code::StateCorrupt, "unknown field `until`"),
        ("[]", Code::StateCorrupt, "is not a lease file"),
        ("{\"version\":-1}", Code::StateCorrupt, "is not a lease file"),
        (&twice, Code::StateCorrupt, "two leases"),
        (&overlapping, Code::StateCorrupt, "have two owners"),
        (newer, Code::StateNewer, "has version 3; this is virt-pin"),
    ] {
        let machine = Machine::new("2-3,10-11");
        machine.put("/run/virt-pin/leases.json", text);
        every_event_fails(&machine, Vm::new(1, 2).xml().as_bytes(), code, part);
        assert_eq!(machine.leases().unwrap(), text);
        // Who wants no CPUs of his own is not affected.
        machine.event(&Vm::new(2, 2).without_policy(), "prepare begin").silent();
    }
    // Windows line ends are no damage.
    let machine = Machine::new("2-3,10-11");
    machine.put("/run/virt-pin/leases.json", &old.replace('\n', "\r\n"));
    machine.prepare(&Vm::new(1, 2));
    assert_eq!(machine.leased().len(), 2);
}

#[test]
fn a_state_directory_that_is_not_safely_ours() {
    let vm = Vm::new(1, 2);
    let cases: [(Place<'_>, &str); 10] = [
        (&|machine| machine.put("/run", ""), "/run"),
        (&|machine| machine.put("/run/virt-pin.d/x", ""), ""),
        (&|machine| symlink("/nowhere", machine.path("/run/virt-pin")).unwrap(), "is not a directory"),
        (&|machine| machine.put("/run/virt-pin/leases.json.new/x", ""), "cannot remove"),
        (&|machine| fs::create_dir(machine.path("/run/virt-pin/lock")).unwrap(), "cannot open"),
        (&|machine| symlink("/nowhere", machine.path("/run/virt-pin/lock")).unwrap(), "cannot open"),
        (&|machine| symlink("/dev/null", machine.path("/run/virt-pin/leases.json")).unwrap(), "cannot open"),
        (&|machine| fs::create_dir(machine.path("/run/virt-pin/leases.json")).unwrap(), "is not a regular file"),
        (
            &|machine| {
                fs::set_permissions(machine.path("/run/virt-pin"), fs::Permissions::from_mode(0o777)).unwrap();
            },
            "mode 0777: others may write to it",
        ),
        (&|machine| chown(machine.path("/run/virt-pin"), Some(65534), None).unwrap(), "belongs to uid 65534"),
    ];
    for (number, (damage, part)) in cases.into_iter().enumerate() {
        let machine = Machine::new("2-3,10-11");
        match number {
            0 => {}
            1 => {
                // A file where the directory should be.
                damage(&machine);
                fs::File::create(machine.path("/run/virt-pin")).unwrap();
            }
            2 => fs::create_dir(machine.path("/run")).unwrap(),
            _ => machine.make_state_dir(),
        }
        if number != 1 {
            damage(&machine);
        }
        let before = machine.everything();
        let said = machine.event(&vm, "prepare begin").refused(Code::StateUnsafe);
        assert!(said.contains(part) && said.contains("/run"), "{said}");
        assert_eq!(machine.event(&vm, "restore begin").reported(Code::StateUnsafe), said);
        assert!(machine.everything() == before, "{said}");
        // Events that may not fail a VM do not.
        for event in ["release end shutdown", "reconnect begin"] {
            assert_eq!(machine.event(&vm, event).code, Some(0));
        }
    }
}

#[test]
fn a_read_only_run() {
    // As root, permissions say nothing; a mount of its own does.
    let machine = machine();
    let script =
        "mount --bind -o ro \"$1/run\" \"$1/run\" && mount -o remount,bind,ro \"$1/run\" && shift && exec \"$@\"";
    let hook = env!("CARGO_BIN_EXE_virt-pin-hook");
    let run = |event: [&str; 2]| {
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", script, "sh"]).arg(machine.root()).arg(hook).arg("vm1").args(event).arg("-");
        command.env("VIRT_PIN_ROOT", machine.root());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Run::of(command, Vm::new(1, 2).xml().as_bytes())
    };
    let probe = Command::new("unshare").args(["-m", "sh", "-c", script, "sh"]).arg(machine.root()).arg("true").output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        eprintln!("skipped: no mount namespace of our own here");
        return;
    }
    let before = machine.everything();
    let said = run(["prepare", "begin"]).refused(Code::StateUnsafe);
    assert!(said.contains("Read-only file system"), "{said}");
    assert_eq!(run(["restore", "begin"]).code, Some(0));
    assert_eq!(run(["release", "end"]).code, Some(0));
    assert!(machine.everything() == before);
}

#[test]
fn the_lock_is_waited_for_and_not_for_ever() {
    // Whoever waits waits asleep: all at once.
    std::thread::scope(|scope| {
        for (operation, sub_operation, manner) in EVENTS {
            scope.spawn(move || {
                let (machine, vm) = (machine(), Vm::new(9, 2));
                machine.qemu(&vm, 700, &[2, 10], "0-1,4-9,12-15");
                let before = machine.everything();
                let held = machine.hold_lock();
                let start = Instant::now();
                let run = machine.hook(&["vm9", operation, sub_operation, "-"], vm.xml());
                let waited = start.elapsed();
                let sentence = match manner {
                    // Every thread is right by then: not knowing the pid is no reason to end the domain.
                    Refuses if operation == "started" => {
                        run.silent();
                        return;
                    }
                    Refuses => run.refused(Code::StateLocked),
                    Reports => run.reported(Code::StateLocked),
                    Silent => {
                        run.silent();
                        return;
                    }
                };
                let lock = machine.path("/run/virt-pin/lock");
                assert!(
                    sentence.ends_with(&format!("{} was held by another process for 2000 ms", lock.display())),
                    "{sentence}"
                );
                assert!(waited > Duration::from_secs(2) && waited < Duration::from_secs(8), "{operation}: {waited:?}");
                assert!(machine.everything() == before);
                drop(held);
                // Nothing of the failure is left.
                assert_eq!(machine.hook(&["vm9", operation, sub_operation, "-"], vm.xml()).code, Some(0));
            });
        }
        // One that is let go in time is no failure.
        scope.spawn(|| {
            let machine = machine();
            let held = machine.hold_lock();
            let child = machine.hook_command(&["vm1", "prepare", "begin", "-"]);
            std::thread::scope(|scope| {
                let run = scope.spawn(|| Run::of(child, Vm::new(1, 2).xml().as_bytes()));
                std::thread::sleep(Duration::from_millis(300));
                drop(held);
                assert_eq!(pins(&run.join().unwrap().printed()), [3, 11]);
            });
        });
    });
}

#[test]
fn input_that_is_no_domain() {
    let machine = machine();
    let vm = Vm::new(1, 2).xml();
    let utf16: Vec<u8> = vm.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let dtd = format!("<!DOCTYPE domain [<!ENTITY a \"2\">]>\n{}", vm.replace(">2<", ">&a;<"));
    let bomb = "<!DOCTYPE domain [<!ENTITY a \"aaaa\"><!ENTITY b \"&a;&a;&a;&a;\">]><domain><name>&b;</name></domain>";
    let external = "<!DOCTYPE domain SYSTEM \"file:///etc/passwd\"><domain><name>a</name></domain>";
    let no_uuid = vm.replace("uuid>", "uuuid>");
    let (truncated, doubled) = (&vm[..vm.len() - 10], format!("{vm}{vm}"));
    for (xml, part) in [
        (&b""[..], "the document is empty"),
        (b" \n\t\n", "the document is empty"),
        (b"\xef\xbb\xbf", "the document is empty"),
        (b"garbage", "not well-formed"),
        (b"\0\0\0\0", "not well-formed"),
        (b"<", "not well-formed"),
        (b"<domain>", "not well-formed"),
        (b"<domain/>", "no <name>"),
        (b"<network><name>vm1</name></network>", "the root element is <network>"),
        (b"\xff\xfe<\0d\0", "UTF-16"),
        (b"<domain><name>\xff</name></domain>", "not UTF-8 from byte 14 on"),
        (&utf16, "not well-formed"),
        (truncated.as_bytes(), "not well-formed"),
        (doubled.as_bytes(), "not well-formed"),
        (dtd.as_bytes(), "has a DTD"),
        (bomb.as_bytes(), "has a DTD"),
        (external.as_bytes(), "has a DTD"),
        (no_uuid.as_bytes(), "domain \"vm1\": the domain XML on stdin has no <uuid>"),
        (b"<domain><name>a</name><uuid>x</uuid></domain>", "not a UUID"),
        (b"<domain id='x'><name>a</name></domain>", "not a domain id"),
        (b"<domain xmlns='urn:x'><name>a</name></domain>", "default namespace"),
    ] {
        every_event_fails(&machine, xml, Code::DomainInvalid, part);
    }
}

#[test]
fn input_that_is_too_much() {
    let machine = machine();
    let start = Instant::now();
    // 50 MB; libvirt is not made to wait until all of it is read.
    let long = format!("{}<!-- {} -->", Vm::new(1, 2).xml(), "x".repeat(50 << 20));
    every_event_fails(&machine, long.as_bytes(), Code::DomainInvalid, "longer than 16 MiB");
    for (xml, part) in [
        (format!("<domain>{}", "<a>".repeat(300_000)), "not well-formed"),
        (format!("<domain>{}{}</domain>", "<a>".repeat(300_000), "</a>".repeat(300_000)), "no <name>"),
        (format!("<domain><name>a</name>{}</domain>", "<a/>".repeat(2_000_000)), "not well-formed"),
        (format!("<domain {}/>", (0..100_000).map(|n| format!("a{n}='' ")).collect::<String>()), "attributes"),
    ] {
        let run = machine.hook(&["vm1", "prepare", "begin", "-"], &xml);
        let said = run.refused(Code::DomainInvalid);
        assert!(said.contains(part), "{said}");
        assert_eq!(machine.hook(&["vm1", "reconnect", "begin", "-"], &xml).reported(Code::DomainInvalid), said);
    }
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    // Deep nesting inside what nobody reads is no obstacle.
    let deep = format!("<a xmlns='urn:x'>{}{}</a>", "<b>".repeat(50_000), "</b>".repeat(50_000));
    let vm = Vm::new(1, 2).body(&format!("<description>{}</description>", deep));
    assert_eq!(pins(&machine.prepare(&vm)), [3, 11]);
}

#[test]
fn closed_descriptors() {
    let machine = machine();
    let sh = |redirect: &str, operation: &str| {
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("exec \"$0\" \"$@\" {redirect}")).arg(env!("CARGO_BIN_EXE_virt-pin-hook"));
        command.args(["vm1", operation, if operation == "release" { "end" } else { "begin" }, "-"]);
        command.env("VIRT_PIN_ROOT", machine.root());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Run::of(command, Vm::new(1, 2).xml().as_bytes())
    };
    let before = machine.everything();
    for redirect in ["<&-", "</dev/null", "<&- >&-", "0>/dev/null"] {
        sh(redirect, "prepare").refused(Code::DomainInvalid);
        sh(redirect, "started").refused(Code::DomainInvalid);
        sh(redirect, "reconnect").reported(Code::DomainInvalid);
        sh(redirect, "restore").reported(Code::DomainInvalid);
        sh(redirect, "release").reported(Code::DomainInvalid);
    }
    assert_eq!(sh("<&- 2>&-", "prepare").code, Some(10));
    assert_eq!(sh("<&- 2>&-", "reconnect").code, Some(0));
    assert_eq!(sh("<&- >&- 2>&-", "prepare").code, Some(10));
    assert!(machine.everything() == before);
    // Nobody reads what prepare prints, so nobody misses it.
    sh(">&-", "prepare").silent();
    assert_eq!(machine.leased().len(), 2);
}

#[test]
fn a_stdout_that_takes_nothing() {
    for (operation, manner) in [("prepare", Silent), ("migrate", Refuses), ("restore", Reports)] {
        for full in [true, false] {
            let (machine, vm) = (machine(), Vm::new(1, 2));
            let mut command = machine.hook_command(&["vm1", operation, "begin", "-"]);
            if full {
                command.stdout(fs::File::create("/dev/full").unwrap());
            } else {
                let (reader, writer) = std::io::pipe().unwrap();
                drop(reader);
                command.stdout(writer);
            }
            let run = Run::of(command, vm.xml().as_bytes());
            match manner {
                // libvirt drops what prepare prints.
                Silent => run.silent(),
                Refuses => drop(run.refused(Code::HostIo)),
                Reports => drop(run.reported(Code::HostIo)),
            }
            // Either way what was granted is known, and found again.
            assert_eq!(machine.vcpus_of(&vm), [3, 11]);
            let prepared = machine.prepare(&vm);
            assert_eq!(pins(&prepared), [3, 11]);
        }
    }
}

/// The one slow test: ten seconds, most of them asleep.
#[test]
fn stdin_that_does_not_end() {
    let machine = machine();
    let before = machine.everything();
    std::thread::scope(|scope| {
        for (operation, drip) in [("prepare", false), ("prepare", true), ("reconnect", false), ("restore", true)] {
            let machine = &machine;
            scope.spawn(move || {
                let start = Instant::now();
                let mut child = machine.hook_command(&["vm1", operation, "begin", "-"]).spawn().unwrap();
                let mut stdin = child.stdin.take().unwrap();
                let _ = stdin.write_all(b"<domain>");
                while child.try_wait().unwrap().is_none() {
                    std::thread::sleep(Duration::from_millis(200));
                    // One byte at a time is no reason to wait longer.
                    if drip {
                        let _ = stdin.write_all(b" ");
                    }
                    assert!(start.elapsed() < Duration::from_secs(30));
                }
                let run = Run::end(child);
                let said = match operation {
                    "prepare" => run.refused(Code::DomainInvalid),
                    _ => run.reported(Code::DomainInvalid),
                };
                assert_eq!(said, "no domain XML on stdin within 10 s");
            });
        }
    });
    // Where nothing is done nothing is read.
    for event in [["start", "begin"], ["stopped", "end"], ["attach", "begin"], ["foo", "begin"]] {
        let start = Instant::now();
        let child = machine.hook_command(&["vm1", event[0], event[1], "-"]).stdin(Stdio::piped()).spawn().unwrap();
        let mut child = child;
        let stdin = child.stdin.take();
        Run::end(child).silent();
        assert!(start.elapsed() < Duration::from_secs(5));
        drop(stdin);
    }
    assert!(machine.everything() == before);
}

#[test]
fn a_machine_that_cannot_be_read() {
    let vm = Vm::new(1, 2);
    for (damage, code, part) in [
        ("/sys", Code::TopologyUnreadable, "/sys/devices/system/cpu"),
        ("/proc", Code::HostIo, "/proc/sys/kernel/random/boot_id"),
    ] {
        let machine = Machine::new("2-3,10-11");
        fs::remove_dir_all(machine.path(damage)).unwrap();
        let before = machine.everything();
        let said = machine.event(&vm, "prepare begin").refused(code);
        assert!(said.contains(part), "{said}");
        machine.event(&vm, "restore begin").reported(code);
        machine.event(&vm.clone().without_policy(), "prepare begin").silent();
        assert!(machine.everything() == before);
    }
    // Without any file system at all: no configuration, so no CPU may be handed out.
    let machine = Machine::bare();
    machine.event(&vm, "prepare begin").refused(Code::TopologyUnreadable);
    machine.event(&vm, "release end shutdown").silent();
    assert!(!machine.path("/run/virt-pin/leases.json").exists());
}

#[test]
fn a_configuration_that_cannot_be_read() {
    let vm = Vm::new(1, 2);
    for (text, part) in [
        ("pinnable_cpus = \"2-\"\n", "/etc/virt-pin/virt-pin.toml:1: pinnable_cpus = \"2-\": "),
        ("\npinnable = 1\n", "/etc/virt-pin/virt-pin.toml:2: pinnable: unknown key"),
        ("pinnable_cpus = 2\n", "must be a string, not a number"),
        (
            "[[domain]]\nmatch = \"*\"\npolicy = \"exclusive\"\n",
            ":3: policy: unknown value \"exclusive\" of policy attribute",
        ),
        ("\0", "not TOML"),
    ] {
        let machine = machine();
        machine.config(text);
        let before = machine.everything();
        for vm in [&vm, &vm.clone().without_policy()] {
            let said = machine.event(vm, "prepare begin").refused(Code::ConfigInvalid);
            assert!(said.contains(part), "{said}");
            machine.event(vm, "migrate begin").refused(Code::ConfigInvalid);
            machine.event(vm, "restore begin").reported(Code::ConfigInvalid);
            // What runs is let run.
            machine.event(vm, "started begin").silent();
            machine.event(vm, "reconnect begin").silent();
        }
        assert!(machine.everything() == before);
        machine.event(&Vm::new(9, 2), "release end shutdown").silent();
        assert_eq!(machine.leased().len(), 0);
    }
    // A link to nothing among the files is no reason to go on without what it was to say.
    for path in ["/etc/virt-pin/virt-pin.toml", "/etc/virt-pin/virt-pin.toml.d/50-more.toml"] {
        let machine = machine();
        fs::create_dir_all(machine.path("/etc/virt-pin/virt-pin.toml.d")).unwrap();
        let _ = fs::remove_file(machine.path(path));
        symlink("/nowhere/at/all", machine.path(path)).unwrap();
        let said = machine.event(&vm, "prepare begin").refused(Code::ConfigInvalid);
        assert!(said.ends_with(&format!("{path}: there is nothing where this link points to")), "{said}");
        machine.event(&vm, "reconnect begin").silent();
    }
    // Fail closed: no file, no key, no value.
    for text in [None, Some(""), Some("pinnable_cpus = \"\"\n")] {
        let machine = Machine::new("");
        match text {
            Some(text) => machine.config(text),
            None => fs::remove_dir_all(machine.path("/etc/virt-pin")).unwrap(),
        }
        machine.event(&vm, "prepare begin").refused(Code::Unsatisfiable);
    }
}

#[test]
fn a_confinement_that_cannot_be_made_takes_the_lease_back() {
    // A directory gets no cgroup's files here, so the first write fails, as with a kernel that says no.
    let machine = Machine::new("2-3,10-11");
    machine.put("/proc/mounts", "cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n");
    for file in ["cpuset.cpus", "cpuset.mems", "cpuset.effective_cpus"] {
        let value = if file == "cpuset.mems" { "0-1\n" } else { "0-15\n" };
        machine.put(&format!("/sys/fs/cgroup/cpuset/{file}"), value);
        machine.put(&format!("/sys/fs/cgroup/cpuset/machine/{file}"), value);
    }
    let run = machine.event(&Vm::new(1, 2), "prepare begin");
    let said = run.refused(Code::ConfinementFailed);
    assert!(said.starts_with("domain \"vm1\": cannot confine the domain before its start: cannot write"), "{said}");
    assert_eq!(machine.leased().len(), 0);
    assert!(!machine.path("/sys/fs/cgroup/cpuset/machine/qemu-1-vm1.libvirt-qemu").exists());
    // Only what the VMs' cgroup can reach is handed out.
    machine.put("/sys/fs/cgroup/cpuset/machine/cpuset.effective_cpus", "0-2,10\n");
    let said = machine.event(&Vm::new(1, 4), "prepare begin").refused(Code::Unsatisfiable);
    assert!(said.contains("this host has 1 of them pinnable"), "{said}");
    // A migration confines nothing yet.
    assert_eq!(pins(&machine.event(&Vm::new(1, 2), "migrate begin").printed()), [2, 10]);
}

/// With machined on cgroup v2 the scope does not exist yet: systemd is told what it may have.
#[test]
fn a_scope_is_confined_by_a_drop_in_that_goes_with_the_lease() {
    let machine = Machine::new("2-3,10-11");
    machine.put("/proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n");
    machine.put("/sys/fs/cgroup/cgroup.controllers", "cpuset cpu memory\n");
    machine.put("/sys/fs/cgroup/cpuset.cpus.effective", "0-15\n");
    machine.put("/usr/share/dbus-1/system-services/org.freedesktop.machine1.service", "");
    let vm = Vm::new(1, 2);
    // A machine whose systemd has no place for it.
    machine.put("/run/systemd/system", "");
    machine.event(&vm, "prepare begin").refused(Code::ConfinementFailed);
    assert_eq!(machine.leased().len(), 0);
    fs::remove_file(machine.path("/run/systemd/system")).unwrap();
    fs::create_dir(machine.path("/run/systemd/system")).unwrap();
    let units = || {
        let found = fs::read_dir(machine.path("/run/systemd/system")).unwrap();
        let mut names: Vec<_> = found.map(|unit| unit.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    machine.prepare(&vm);
    let unit = r"machine-qemu\x2d1\x2dvm1.scope.d";
    assert_eq!(units(), [unit]);
    let text = machine.read(&format!("/run/systemd/system/{unit}/50-virt-pin.conf"));
    assert!(text.contains("[Scope]\nAllowedCPUs=0-2,4-10,12-15\nAllowedMemoryNodes=0\n"), "{text}");
    // The same event again, as of a second copy of the hook, changes nothing; the next attempt has another id.
    machine.prepare(&vm);
    assert_eq!(units(), [unit]);
    machine.prepare(&Vm { id: Some(2), ..vm.clone() });
    assert_eq!(units(), [r"machine-qemu\x2d2\x2dvm1.scope.d"]);
    // A VM without a lease that gets the id of one whose end went unreported does not inherit its CPUs.
    let shared = Vm { id: Some(2), ..Vm::new(7, 1).without_policy().named("vm1") };
    fs::remove_file(machine.path("/run/virt-pin/leases.json")).unwrap();
    machine.event(&shared, "prepare begin").silent();
    let text = machine.read(r"/run/systemd/system/machine-qemu\x2d2\x2dvm1.scope.d/50-virt-pin.conf");
    assert!(text.ends_with("[Scope]\nAllowedCPUs=0-15\n"), "{text}");
    machine.event(&Vm { id: None, ..shared }, "release end shutdown").silent();
    assert_eq!(units(), [""; 0]);
    machine.prepare(&vm);
    machine.event(&vm, "release end shutdown").silent();
    assert_eq!(units(), [""; 0]);
    // A migration asks only.
    machine.event(&vm, "migrate begin").printed();
    assert_eq!(units(), [""; 0]);
}

/// A machine with machined on cgroup v2, and scopes of domains that run there.
fn with_scopes(pinnable: &str, scopes: &[&str]) -> Machine {
    let machine = Machine::new(pinnable);
    machine.put("/proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n");
    machine.put("/sys/fs/cgroup/cgroup.controllers", "cpuset cpu memory\n");
    machine.put("/sys/fs/cgroup/cpuset.cpus.effective", "0-15\n");
    machine.put("/usr/share/dbus-1/system-services/org.freedesktop.machine1.service", "");
    fs::create_dir_all(machine.path("/run/systemd/system")).unwrap();
    for scope in scopes {
        machine.put(&format!("/sys/fs/cgroup/machine.slice/{scope}/cpuset.cpus"), "\n");
    }
    machine
}

#[test]
fn others_make_room_for_a_lease_and_get_it_back() {
    let scopes = [
        r"machine-qemu\x2d5\x2dshared.scope",
        r"machine-qemu\x2d6\x2dby\x2dhand.scope",
        r"machine-lxc\x2d7\x2dx.scope",
    ];
    let machine = with_scopes("2-3,10-11", &scopes);
    // A kernel's file has nothing behind the line that was written last.
    let cpus = |scope: &str| {
        let text = machine.read(&format!("/sys/fs/cgroup/machine.slice/{scope}/cpuset.cpus"));
        text.lines().next().unwrap().to_owned()
    };
    let drop_in = |unit: &str| machine.read(&format!("/run/systemd/system/{unit}.d/50-virt-pin.conf"));
    let by_hand = Vm { id: Some(6), ..Vm::new(6, 1).without_policy().pinned(&[11]).named("by-hand") };
    machine.event(&by_hand, "prepare begin").silent();
    // One that is about to run: its scope is not there yet.
    let coming = Vm { id: Some(8), ..Vm::new(8, 1).without_policy().named("coming") };
    machine.event(&coming, "prepare begin").silent();
    let unit = r"machine-qemu\x2d8\x2dcoming.scope";
    assert!(drop_in(unit).ends_with("AllowedCPUs=0-15\n"), "{}", drop_in(unit));
    let vm = Vm::new(1, 2);
    machine.prepare(&vm);
    assert_eq!(machine.vcpus_of(&vm), [2, 10]);
    let shared = "0-1,3-9,11-15";
    assert_eq!([cpus(scopes[0]), cpus(scopes[1]), cpus(scopes[2])], [shared, shared, ""]);
    assert!(drop_in(unit).ends_with(&format!("AllowedCPUs={shared}\n")), "{}", drop_in(unit));
    // Its own scope is nobody's business here.
    machine.put(&format!("/sys/fs/cgroup/machine.slice/{}/cpuset.cpus", r"machine-qemu\x2d1\x2dvm1.scope"), "2,10\n");
    let second = Vm { id: Some(2), ..Vm::new(2, 1).with("cores='thread'") };
    machine.event(&second, "prepare begin").printed();
    assert_eq!(cpus(r"machine-qemu\x2d1\x2dvm1.scope"), "2,10");
    assert_eq!(cpus(scopes[0]), "0-1,4-9,11-15");
    machine.event(&second, "release end shutdown").silent();
    assert_eq!(cpus(scopes[0]), shared);
    machine.event(&vm, "release end shutdown").silent();
    assert_eq!([cpus(scopes[0]), cpus(scopes[1])], ["0-15", "0-15"]);
    assert!(drop_in(unit).ends_with("AllowedCPUs=0-15\n"), "{}", drop_in(unit));
    machine.event(&Vm { id: None, ..coming }, "release end shutdown").silent();
    assert_eq!(fs::read_dir(machine.path("/run/systemd/system")).unwrap().count(), 0);
}

#[test]
fn nobody_is_left_without_a_cpu() {
    let scope = r"machine-qemu\x2d5\x2dshared.scope";
    let machine = with_scopes("0-15", &[scope]);
    let all = Vm::new(1, 16).with("emulator='share' iothreads='share'");
    let said = machine.event(&all, "prepare begin").refused(Code::SharedPoolEmpty);
    assert!(
        said.contains("no CPU would be left for VMs without a lease, and qemu-5-shared is one that runs"),
        "{said}"
    );
    assert_eq!(machine.leased().len(), 0);
    assert_eq!(machine.read(&format!("/sys/fs/cgroup/machine.slice/{scope}/cpuset.cpus")).trim(), "0-15");
    assert_eq!(fs::read_dir(machine.path("/run/systemd/system")).unwrap().count(), 0);
    // Alone it may have them all; then the other does not start.
    fs::remove_dir_all(machine.path("/sys/fs/cgroup/machine.slice")).unwrap();
    machine.prepare(&all);
    let shared = Vm { id: Some(6), ..Vm::new(6, 1).without_policy() };
    machine.event(&shared, "prepare begin").refused(Code::SharedPoolEmpty);
}

#[test]
fn threads_that_are_elsewhere() {
    let emulator = "0-1,4-9,12-15";
    let vm = Vm::new(1, 2);
    let cases: [(Place<'_>, &str); 6] = [
        (&|_| {}, "its threads cannot be found: libvirt has no /run/libvirt/qemu/vm1.xml"),
        (
            &|machine| machine.qemu(&vm, 700, &[2, 3], emulator),
            "the thread of vCPU 1 (\"CPU 1/KVM\", tid 702) may run on CPUs 3, its lease says 10",
        ),
        (
            &|machine| machine.qemu(&vm, 700, &[2, 10], "0-15"),
            "an emulator thread (\"qemu-system-x86\", tid 700) may run on CPUs 0-15",
        ),
        (&|machine| machine.qemu(&vm, 700, &[2, 10, 3], emulator), "vCPU 2 runs, but the lease has 2 vCPUs"),
        (&|machine| machine.qemu(&vm, 700, &[], emulator), "libvirt knows no vCPU thread"),
        (
            &|machine| {
                machine.qemu(&vm, 700, &[2, 10], emulator);
                machine.gone(700);
            },
            "QEMU (pid 700) has no threads: it has ended",
        ),
    ];
    for (place, part) in cases {
        let machine = Machine::new("2-3,10-11");
        machine.prepare(&vm);
        place(&machine);
        let said = machine.event(&vm, "started begin").refused(Code::ThreadMisplaced);
        assert!(said.starts_with("domain \"vm1\": ") && said.contains(part), "{said}");
        // At reconnect the VM lives on, and so does its lease.
        let said = machine.event(&vm, "reconnect begin").reported(Code::ThreadMisplaced);
        assert!(said.contains(part), "{said}");
        assert_eq!(machine.vcpus_of(&vm), [2, 10]);
    }
    for (status, part) in [("", "not XML"), ("<domain/>", "not a domain's status"), ("<domstatus/>", "no pid")] {
        let machine = Machine::new("2-3,10-11");
        machine.prepare(&vm);
        machine.put("/run/libvirt/qemu/vm1.xml", status);
        let said = machine.event(&vm, "started begin").refused(Code::HostIo);
        assert!(said.contains(part), "{said}");
        machine.event(&vm, "reconnect begin").reported(Code::HostIo);
    }
}

#[test]
fn what_may_be_alive_keeps_its_lease() {
    let machine = Machine::new("2-3,10-11");
    let vm = Vm::new(1, 4);
    machine.prepare(&vm);
    machine.qemu(&vm, 700, &[2, 10, 3, 11], "0-1,4-9,12-15");
    machine.event(&vm, "started begin").silent();
    let before = machine.everything();
    for event in ["prepare begin", "migrate begin"] {
        let said = machine.event(&vm, event).refused(Code::StateConflict);
        assert_eq!(said, "domain \"vm1\": its former QEMU (pid 700) is still alive and holds CPUs 2-3,10-11");
    }
    machine.event(&vm, "restore begin").reported(Code::StateConflict);
    // The release of that refused start comes at once.
    machine.event(&vm, "release end failed").silent();
    machine.event(&Vm::new(2, 2), "prepare begin").refused(Code::Shortage);
    assert!(machine.everything() == before);
    // A zombie runs nowhere; neither does a process that has the pid by now.
    for stat in [machine::stat(700, 'Z', 5000), machine::stat(700, 'S', 5001)] {
        let machine = Machine::new("2-3,10-11");
        machine.put("/run/virt-pin/leases.json", &fs::read_to_string(path_in(&before, "leases.json")).unwrap());
        machine.put("/proc/700/stat", &stat);
        assert_eq!(pins(&machine.prepare(&Vm::new(2, 4))).len(), 4);
    }
}

fn path_in<T>(files: &std::collections::BTreeMap<std::path::PathBuf, T>, name: &str) -> std::path::PathBuf {
    files.keys().find(|path| path.ends_with(name)).unwrap().clone()
}

#[test]
fn what_is_gone_makes_room() {
    let machine = Machine::new("2,10");
    let (first, second) = (Vm::new(1, 2), Vm::new(2, 2));
    // A migration that was never followed up expires.
    machine.event(&first, "migrate begin").printed();
    machine.event(&second, "prepare begin").refused(Code::Shortage);
    machine.put("/proc/uptime", "1300.00 1\n");
    machine.event(&second, "prepare begin").refused(Code::Shortage);
    machine.put("/proc/uptime", "1301.00 1\n");
    machine.prepare(&second);
    assert_eq!(machine.leased().len(), 1);
    // Another boot: nothing of the former one holds.
    machine.put("/proc/sys/kernel/random/boot_id", "99999999-2222-3333-4444-555555555555\n");
    machine.prepare(&first);
    assert_eq!(machine.vcpus_of(&first), [2, 10]);
    assert_eq!(machine.leased().len(), 1);
}

/// A QEMU that libvirt has just forked is in no status file yet; the lock on its pid file shows that it lives.
#[test]
fn a_lock_on_the_pid_file_is_life() {
    let machine = Machine::new("2,10");
    let vm = Vm::new(1, 2);
    machine.prepare(&vm);
    let alive = machine.alive(&vm);
    let said = machine.event(&vm, "prepare begin").refused(Code::StateConflict);
    assert!(said.contains(&format!("its former QEMU (pid {})", std::process::id())), "{said}");
    machine.event(&vm, "release end failed").silent();
    machine.event(&Vm::new(2, 2), "prepare begin").refused(Code::Shortage);
    drop(alive);
    machine.event(&vm, "release end failed").silent();
    machine.prepare(&Vm::new(2, 2));
}

#[test]
fn killed_at_any_instant() {
    let machine = Machine::new("2-7,10-15");
    let mut killed = 0;
    for round in 0..120_u64 {
        let vm = Vm::new(1 + round as u32 % 6, 2);
        let event = if round % 3 == 2 { ["release", "end"] } else { ["prepare", "begin"] };
        let mut child = machine.hook_command(&[&vm.name, event[0], event[1], "-"]).spawn().unwrap();
        child.stdin.take().unwrap().write_all(vm.xml().as_bytes()).unwrap();
        std::thread::sleep(Duration::from_micros(round * 97 % 9000));
        child.kill().unwrap();
        killed += usize::from(child.wait().unwrap().code().is_none());
        // Old or new, never torn, and nothing in anybody's way.
        machine.leased();
        assert_eq!(machine.cli(&["list"]).code, Some(0));
    }
    assert!(killed > 10, "{killed}");
    for number in 1..=6 {
        machine.prepare(&Vm::new(number, 2));
    }
    assert_eq!(fs::read_dir(machine.path("/run/virt-pin")).unwrap().count(), 3, "no remains");
}

#[test]
fn a_session_daemon_is_not_ours() {
    use std::os::unix::process::CommandExt;
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: only root can become somebody else");
        return;
    }
    let machine = Machine::bare();
    fs::set_permissions(machine.root(), fs::Permissions::from_mode(0o755)).unwrap();
    let hook = machine.path("/hook");
    // By a process of its own: a file that we had open for writing would be busy in what other tests have just forked.
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_virt-pin-hook")).arg(&hook).status().unwrap().success());
    for root in [None, Some("/"), Some("//"), Some("")] {
        let mut command = Command::new(&hook);
        command.args(["vm1", "prepare", "begin", "-"]).env_clear().uid(65534).gid(65534).current_dir("/");
        command.envs(root.map(|root| ("VIRT_PIN_ROOT", root)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Run::of(command, Vm::new(1, 2).xml().as_bytes()).silent();
    }
}

#[test]
fn a_name_that_is_no_text() {
    use std::os::unix::ffi::OsStrExt;
    let machine = machine();
    for name in [&b"\xff\xfe"[..], b"vm\xe9", b""] {
        let mut command = machine.hook_command(&[]);
        command.arg(std::ffi::OsStr::from_bytes(name)).args(["prepare", "begin", "-"]);
        assert_eq!(pins(&Run::of(command, Vm::new(1, 2).xml().as_bytes()).printed()), [3, 11]);
    }
}

/// A file that is not one makes nobody wait.
#[test]
fn pipes_in_place_of_files() {
    for path in [
        "/etc/virt-pin/virt-pin.toml",
        "/proc/mounts",
        "/sys/devices/system/cpu/online",
        "/proc/sys/kernel/random/boot_id",
        "/run/virt-pin/leases.json",
        "/run/virt-pin/lock",
        "/run/libvirt/qemu/vm9.pid",
        "/run/libvirt/qemu/vm9.xml",
    ] {
        let machine = machine();
        let file = machine.path(path);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&file);
        nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for event in ["prepare begin", "started begin", "release end shutdown"] {
            let start = Instant::now();
            machine.event(&Vm::new(9, 2), event);
            assert!(start.elapsed() < Duration::from_secs(5), "{path}");
        }
    }
}

/// Who may define a VM is not always who owns the host.
#[test]
fn what_the_operator_does_not_allow_is_refused() {
    let machine = Machine::new("2-5,10-13");
    let config =
        "pinnable_cpus = \"2-5,10-13\"\n[[limit]]\nmatch = \"vm*\"\nmax_vcpus = 2\ndeny = [\"cores=thread\"]\n";
    machine.config(config);
    let (small, big) = (Vm::new(1, 2), Vm::new(2, 4));
    let complaint = machine.event(&big, "prepare begin").refused(Code::PolicyDenied);
    assert!(complaint.contains("for 4 of its vCPUs, /etc/virt-pin/virt-pin.toml:2 allows 2"), "{complaint}");
    machine.event(&small.clone().with("cores='thread'"), "migrate begin").refused(Code::PolicyDenied);
    machine.prepare(&small);
    machine.prepare(&big.named("db"));
    // What runs by the rules of its time stays.
    machine.config(&config.replace("max_vcpus = 2", "max_vcpus = 1"));
    machine.qemu(&small, 700, &machine.vcpus_of(&small), "0-1,6-9,14-15");
    machine.event(&small, "started begin").silent();
    machine.event(&small, "reconnect begin").silent();
    assert_eq!(machine.leased().len(), 2);
}

/// Two threads of a running VM, and a lease that says it was on its way elsewhere when its mover died.
fn on_its_way(vm: &Vm, threads: &[u64]) -> Machine {
    let machine = Machine::new("2-3,10-11");
    machine.prepare(vm);
    machine.qemu(vm, 700, &[2, 10], "0-1,4-9,12-15");
    machine.event(vm, "started begin").silent();
    let to = "{\"vcpus\":[3,11],\"whole\":true,\"emulator\":\"0-1,4-9,12-15\",\"iothreads\":\"0-1,4-9,12-15\",\"nodes\":\"0\",\
              \"memory_nodes\":\"0\",\"guest\":[1,1,1,2]}";
    let leases = machine.leases().unwrap();
    let moving = format!("\"moving\":{{\"by\":[4713,99],\"to\":{to}}},\"since\"");
    machine.put("/run/virt-pin/leases.json", &leases.replace("\"since\"", &moving));
    machine.qemu(vm, 700, threads, "0-1,4-9,12-15");
    machine
}

#[test]
fn a_move_whose_mover_has_died_is_ended_by_the_next_event() {
    let (vm, next) = (Vm::new(1, 2), Vm::new(2, 2));
    for (threads, left) in [([3, 11], [2, 10]), ([2, 10], [3, 11])] {
        let machine = on_its_way(&vm, &threads);
        // Both places are its until then; nobody moves a thread of this machine, so it ends where they are.
        let said = machine.event(&next, "prepare begin").refused(Code::Shortage);
        assert!(said.contains("domain \"vm2\""), "{said}");
        assert_eq!(machine.vcpus_of(&vm), threads);
        assert!(!machine.leases().unwrap().contains("moving"), "{:?}", machine.leases());
        machine.prepare(&next);
        assert_eq!(machine.vcpus_of(&next), left);
    }
    let machine = on_its_way(&vm, &[3, 11]);
    machine.event(&vm, "reconnect begin").silent();
    assert_eq!(machine.vcpus_of(&vm), [3, 11]);
    // Threads that are in neither place keep both.
    let machine = on_its_way(&vm, &[4, 5]);
    machine.event(&next, "prepare begin").refused(Code::Shortage);
    assert!(machine.leases().unwrap().contains("moving"));
    // The end of the VM is the end of its move.
    machine.gone(700);
    machine.event(&vm, "release end").silent();
    machine.prepare(&next);
}
