//! The built command, on machines in temporary directories and on described ones: what it prints for people and for
//! programs, and its exit status.
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

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};

use machine::{Machine, Run, Shape, Vm, pins, topology};
use serde_json::{Value, json};
use virt_pin::error::Code;

/// CPUs 2 and 10 are `vm1`'s; `vm7` is pinned to CPU 6 by hand; `db` and `big` are defined.
fn machine() -> Machine {
    let machine = Machine::new("2-7,10-15");
    machine.prepare(&Vm::new(1, 2));
    machine.event(&Vm::new(7, 1).without_policy().pinned(&[6]), "prepare begin").silent();
    let db = Vm::new(2, 3).with("threads-per-core='1' emulator='isolate'").named("db");
    for vm in [db, Vm::new(3, 12).named("big")] {
        machine.put(&format!("/etc/libvirt/qemu/{}.xml", vm.name), &Vm { id: None, ..vm }.xml());
    }
    machine
}

/// The keys of an object, sorted.
fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

/// The text without its lines.
fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The error in JSON on stdout, and the same one as text on stderr.
#[track_caller]
fn json_error(run: &Run, code: Code) -> Value {
    assert_eq!(run.code, Some(code.exit().into()), "{run:?}");
    let error = serde_json::from_str::<Value>(&run.stdout).unwrap()["error"].clone();
    let keys = keys(&error);
    let common = ["causes", "code", "hint", "message", "retry"];
    assert!(common.iter().all(|key| keys.contains(key)), "{keys:?}");
    assert_eq!(error["code"], code.name());
    error
}

#[test]
fn list() {
    let machine = machine();
    assert_eq!(
        machine.cli(&["list"]).printed(),
        " Name   State      Kind        vCPUs   Node   Parked   Emulator   CPUs
-----------------------------------------------------------------------
 vm1    reserved   dedicated   2       0      -        0-1,8-9    2,10
 vm7    reserved   static      -       -      -        -          6
"
    );
    let list = machine.json(&["list"]);
    assert_eq!(list["leases"].as_array().unwrap().len(), 2);
    assert_eq!(
        list["leases"][0],
        json!({
            "name": "vm1", "uuid": "00000000-0000-0000-0000-000000000001", "state": "reserved", "kind": "dedicated",
            "cpus": "2,10", "vcpus": [2, 10], "parked": "", "emulator": "0-1,8-9", "iothreads": "0-1,8-9", "nodes": [0],
            "pid": null, "since": 1000,
        })
    );
    let empty = Machine::new("2");
    let titles = " Name   State   Kind   vCPUs   Node   Parked   Emulator   CPUs\n";
    assert_eq!(empty.cli(&["list"]).printed(), format!("{titles}{}\n", "-".repeat(titles.len())));
    assert_eq!(empty.cli(&["--json", "list"]).printed(), "{\"leases\":[]}\n");
    // Scattered CPUs: every other core is pinnable, the rest is the emulator's.
    let wide = Machine::shaped(Shape(2, 128, 2), "2-255:1/2,258-511:1/2");
    wide.prepare(&Vm::new(1, 30).with("threads-per-core='1'").named("web-12"));
    let text = wide.cli(&["list"]).printed();
    // The CPUs are told whole, below; what each is for is for `lease` to say.
    assert!(text.starts_with(" Name     State      Kind        vCPUs   Node   CPUs\n"), "{text}");
    let lease = &wide.json(&["list"])["leases"][0];
    let (first, cpus) = text
        .split_once("\n web-12   reserved   dedicated   30      ")
        .unwrap_or_else(|| panic!("{first}", first = text));
    assert!(first.lines().count() == 2 && text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let flat: String = cpus.split_whitespace().skip(1).collect();
    assert_eq!(flat, lease["cpus"].as_str().unwrap());
    assert_eq!(lease["parked"].as_str().unwrap().split(',').count(), 30);
}

#[test]
fn lease() {
    let machine = machine();
    let vm = Vm::new(1, 2);
    machine.qemu(&vm, 700, &[2, 10], "0-1,8-9");
    machine.event(&vm, "started begin").silent();
    let text = "Name:           vm1
UUID:           00000000-0000-0000-0000-000000000001
State:          running
Kind:           dedicated
Since:          0 seconds ago
CPUs held:      2,10
vCPU 0:         CPU 2
vCPU 1:         CPU 10
Parked:         -
Emulator:       0-1,8-9
I/O threads:    0-1,8-9
Nodes:          0
True topology:  1 core of 2 threads
Note:           its XML tells the guest nothing of cores and threads, not 1 core
                of 2 threads
QEMU pid:       700
";
    for domain in ["vm1", &vm.uuid, &vm.uuid.replace('-', "")] {
        assert_eq!(machine.cli(&["lease", domain]).printed(), text);
    }
    let view = machine.json(&["lease", "vm1"]);
    assert_eq!((&view["pid"], &view["state"]), (&json!(700), &json!("running")));
    assert_eq!(
        machine.cli(&["lease", "vm7"]).printed(),
        "Name:           vm7
UUID:           00000000-0000-0000-0000-000000000007
State:          reserved
Kind:           static
Since:          0 seconds ago
CPUs held:      6
"
    );
    for unknown in ["vm", "", "00000000-0000-0000-0000-000000000099"] {
        let said = machine.cli(&["lease", unknown]).refused(Code::DomainUnknown);
        assert_eq!(said, format!("no lease for a domain \"{unknown}\""));
        let run = machine.cli(&["--json", "lease", unknown]);
        assert_eq!(json_error(&run, Code::DomainUnknown)["message"], said);
    }
}

#[test]
fn capacity() {
    let machine = machine();
    assert_eq!(
        machine.cli(&["capacity"]).printed(),
        " Pool           CPUs   Cores   What for              Which
-------------------------------------------------------------------
 Pinnable       12     6       may be handed out     2-7,10-15
 Housekeeping   4      2       the host, emulators   0-1,8-9
 Shared         14     7       VMs without a lease   0-1,3-9,11-15
 Leased         3      1       held by VMs           2,6,10
 - dedicated    2      1       their vCPUs           2,10
 Free           9      4       pinnable, not held    3-5,7,11-15
 - withheld     1      0       for cores=\"thread\"    14

 Node   Cores free   CPUs free   vCPUs   Parked   Shared   Withheld   Host
---------------------------------------------------------------------------
 0      1 of 2       2 of 4      2       0        6        0          4
 1      3 of 4       7 of 8      0       0        8        1          0
"
    );
    let view = machine.json(&["capacity"]);
    let nodes = &view["nodes"];
    assert_eq!(
        (&nodes[0]["free_cores"], &nodes[1]["free_threads"], &view["withheld"]),
        (&json!(1), &json!(7), &json!("14"))
    );
    assert_eq!(view["counts"]["dedicated"], json!({ "cpus": 2, "cores": 1 }));
    assert_eq!(nodes[0]["counts"]["shared"], json!({ "cpus": 6, "cores": 3 }));
    assert_eq!((&view["llcs"][1]["node"], &view["llcs"][1]["counts"]["free"]["cpus"]), (&json!(1), &json!(7)));
    let caches = machine.cli(&["capacity", "--llc"]).printed();
    let table = " LLC   Node   Cores free   CPUs free   vCPUs   Parked   Shared   Withheld\n";
    assert!(
        caches.contains(table)
            && caches.ends_with("\n 4     1      3 of 4       7 of 8      0       0        8        1\n"),
        "{caches}"
    );
    for (policy, more) in
        [(&[][..], 2), (&["--policy", "nodes=1"], 1), (&["--policy", "numa=single emulator=isolate"], 1)]
    {
        let view = machine.json(&[&["capacity", "--for", "2x2"], policy].concat());
        assert_eq!(view["fits"], json!({ "shape": "2x2", "more": more }), "{policy:?}");
    }
    // What is set aside is for nobody else, unless the operator says so.
    machine.define(&Vm::new(9, 4).named("auto"), true);
    let more = |machine: &Machine| machine.json(&["capacity", "--for", "2x2"])["fits"]["more"].clone();
    assert_eq!(more(&machine), 1);
    machine.config("pinnable_cpus = \"2-7,10-15\"\nautostart_reserve = \"prefer\"\n");
    assert_eq!(more(&machine), 2);
    for (policy, code) in
        [("numa", Code::Usage), ("numa=x", Code::PolicyInvalid), ("cores=thread", Code::PolicyInvalid)]
    {
        machine.cli(&["capacity", "--for", "2x2", "--policy", policy]).refused(code);
    }
    machine.put("/sys/devices/system/cpu/online", "0-9,11-15\n");
    let view = machine.json(&["--pinnable", "2-3,9-11,40", "capacity"]);
    assert_eq!((&view["missing"], &view["pinnable"]), (&json!("10,40"), &json!("2-3,9-11,40")));
    let nothing = Machine::new("").cli(&["capacity"]).printed();
    assert!(nothing.contains("\n Pinnable       0      0       may be handed out     -\n"), "{nothing}");
    assert!(nothing.contains("\n Housekeeping   16     8       the host, emulators   0-15\n"), "{nothing}");
}

#[test]
fn map() {
    let machine = machine();
    machine.prepare(&Vm::new(4, 1).with("emulator='isolate'").named("a<b"));
    let text = machine.cli(&["map"]).printed();
    assert_eq!(
        text,
        " Package 0, node 0
   0  [==][==][AA][..]   LLC 0: 0-3,8-11

 Package 1, node 1
   4  [Bb][++][1-][..]   LLC 4: 4-7,12-15

     Name   State      CPUs
------------------------------------------------
 A   vm1    reserved   2,10
 B   a<b    reserved   4; parked 12; extra 5,13
 1   vm7    reserved   6

 A vCPU (3)   a parked sibling (1)   + emulator or I/O threads (2)
 1 pinned by hand (1)   . free (4)   - free but no whole core (1)
 = housekeeping (4)
"
    );
}

#[test]
fn a_map_of_what_is_only_planned() {
    let machine = machine();
    let before = machine.everything();
    let planned = machine.cli(&["map", "--for", "db"]).printed();
    assert!(planned.contains(" B   db     planned    3-5; parked 11-13; extra 7,15\n"), "{planned}");
    assert!(planned.contains(" A   vm1    reserved   2,10\n"), "{planned}");
    // As `explain` says, and the start then does.
    let plan = machine.json(&["explain", "db"])["plan"].clone();
    let view = machine.json(&["map", "--for", "db"]);
    let uuid = "00000000-0000-0000-0000-000000000002";
    assert_eq!(view["planned"], json!([{ "name": "db", "lease": uuid }]));
    let cpus = view["cpus"].as_array().unwrap();
    let vcpus: Vec<u64> = cpus
        .iter()
        .filter(|cpu| cpu["use"] == "vcpu" && cpu["lease"] == uuid)
        .map(|cpu| cpu["cpu"].as_u64().unwrap())
        .collect();
    assert_eq!(json!(vcpus), plan["vcpus"]);
    // Each finds those before it; a file without a UUID is another VM each time.
    let file = machine.path("/tmp.xml");
    let text = Vm::new(6, 2).named("one").xml();
    let (head, rest) = text.split_once("<uuid>").unwrap();
    machine.put("/tmp.xml", &format!("{head}{}", rest.split_once("</uuid>").unwrap().1));
    let file = file.to_str().unwrap();
    let twice = machine.cli(&["map", "--for", file, "--for", file]).printed();
    assert!(
        twice.contains(" B   one    planned    3,11\n") && twice.contains(" C   one    planned    4,12\n"),
        "{twice}"
    );
    let refused = machine.cli(&["map", "--for", file, "--for", "db", "--for", file, "--for", file]);
    assert!(refused.refused(Code::Shortage).starts_with("domain \"db\": needs 4 whole cores"), "{refused:?}");
    assert!(refused.stderr.contains("\"one\" 3,11"), "{refused:?}");
    // One that holds its CPUs is there already; one that asks for none has no place.
    machine.define(&Vm::new(1, 2), false);
    assert_eq!(machine.cli(&["map", "--for", "vm1"]).printed(), machine.cli(&["map"]).printed());
    machine.define(&Vm::new(8, 2).without_policy(), false);
    machine.cli(&["map", "--for", "vm8"]).refused(Code::PolicyInvalid);
    machine.cli(&["map", "--for", "nobody"]).refused(Code::DomainUnknown);
    // Whoever is pinned by hand has a place as well, unless it is another's.
    machine.define(&Vm::new(9, 1).without_policy().pinned(&[14]), false);
    let by_hand = machine.cli(&["map", "--for", "vm9"]).printed();
    assert!(by_hand.contains(" 2   vm9    planned    14\n"), "{by_hand}");
    machine.define(&Vm::new(9, 1).without_policy().pinned(&[10]), false);
    machine.cli(&["map", "--for", "vm9"]).refused(Code::StaticConflict);
    // A VM that would start without CPUs of its own is told why.
    machine.define(&Vm::new(3, 12).with("fallback='shared'").named("big"), false);
    machine.cli(&["map", "--for", "big"]).refused(Code::Shortage);
    // Nothing was granted.
    assert_eq!(machine.leases().map(String::into_bytes), before[&machine.path("/run/virt-pin/leases.json")]);
}

#[test]
fn a_configuration_that_is_not_in_place() {
    let machine = machine();
    machine.put("/other.toml", "pinnable_cpus = \"7,15\"\n[[domain]]\nmatch = \"vm*\"\npolicy = \"dedicated\"\n");
    let file = machine.path("/other.toml").to_str().unwrap().to_owned();
    machine.define(&Vm::new(8, 2).without_policy(), false);
    assert_eq!(machine.json(&["explain", "vm8"])["wish"], "shared");
    let view = machine.json(&["--config", &file, "explain", "vm8"]);
    assert_eq!((&view["wish"], &view["plan"]["vcpus"]), (&json!("dedicated"), &json!([7, 15])));
    assert!(view["steps"][0].as_str().unwrap().contains("other.toml:2: 2 vCPUs"), "{view}");
    // The allowlist of the command line counts.
    let view = machine.json(&["--config", &file, "--pinnable", "5,13", "explain", "vm8"]);
    assert_eq!(view["plan"]["vcpus"], json!([5, 13]));
    for arguments in [&["reconcile"][..], &["gather", "--state"], &["repack"], &["sync", "vm1"]] {
        let said = machine.cli(&[&["--config", &file][..], arguments].concat()).refused(Code::Usage);
        assert!(said.contains("--config"), "{said}");
    }
    machine.put("/other.toml", "pinnable_cpus = 7\n");
    let said = machine.cli(&["--config", &file, "map"]).refused(Code::ConfigInvalid);
    assert!(said.contains("other.toml:1"), "{said}");
    machine.cli(&["--config", "/nowhere", "map"]).refused(Code::Usage);
}

#[test]
fn maps_of_other_machines() {
    let shape = |shape, pinnable| Machine::shaped(shape, pinnable).cli(&["map"]).printed();
    assert_eq!(
        shape(Shape(1, 4, 1), "1-3"),
        " Package 0, node 0\n  0  [=][.][.][.]   LLC 0: 0-3\n\n . free (3)   = housekeeping (1)\n"
    );
    let big = Machine::shaped(Shape(2, 128, 2), "2-511");
    (1..=30).for_each(|number| drop(big.prepare(&Vm::new(number, 6))));
    let text = big.cli(&["map"]).printed();
    assert!(text.lines().all(|line| line.chars().count() <= 80) && text.contains("[AA AA]"), "{text}");
    assert!(text.contains(" BD   vm30 ") && text.lines().count() < 120, "{text}");
    let host = |name: &str| {
        let file = format!("{}/tests/hosts/{name}.host", env!("CARGO_MANIFEST_DIR"));
        big.cli(&["--host", &file, "--pinnable", "1-9", "map"]).printed()
    };
    let hybrid = host("hybrid-lowpower");
    assert!(hybrid.contains("  0  [=-][..]       LLC 0, performance: 0-3\n"), "{hybrid}");
    assert!(hybrid.contains("  4  [.][.][.][.]   LLC 0, efficiency: 4-7\n"), "{hybrid}");
    let offline = host("offline-siblings");
    assert!(offline.contains(" Offline\n  5   _  _            CPUs 5-6\n"), "{offline}");
    let unknown = host("broken-firmware");
    assert!(unknown.contains("  0  (=)(-)   LLC 0: 0-1\n") && unknown.contains("( ) siblings unknown"), "{unknown}");
}

#[test]
fn map_as_a_picture() {
    let machine = machine();
    machine.prepare(&Vm::new(4, 1).with("emulator='isolate'").named("a<b&c"));
    let file = machine.path("/map.svg");
    machine.cli(&["map", "--svg", file.to_str().unwrap()]).printed();
    let svg = machine.read("/map.svg");
    let document = roxmltree::Document::parse(&svg).unwrap();
    let titles: Vec<_> =
        document.descendants().filter(|node| node.has_tag_name("title")).filter_map(|t| t.text()).collect();
    assert!(titles.contains(&"virt-pin map: 16 CPUs, 3 leases"), "{titles:?}");
    assert!(titles.iter().any(|title| title.ends_with(": vCPU, a<b&c")), "{titles:?}");
    assert_eq!(titles.iter().filter(|title| title.starts_with("CPU ")).count(), 16);
    // Never overwritten.
    machine.cli(&["map", "--svg", file.to_str().unwrap()]).refused(Code::HostIo);
    assert_eq!(machine.read("/map.svg"), svg);
    let view = machine.json(&["map"]);
    assert_eq!(view["cpus"][0], json!({ "cpu": 0, "use": "housekeeping", "lease": null }));
    let holder = "00000000-0000-0000-0000-000000000001";
    assert_eq!(view["cpus"][2], json!({ "cpu": 2, "use": "vcpu", "lease": holder }));
}

#[test]
fn topology_of_the_machine() {
    let machine = machine();
    let text = machine.cli(&["topology"]).printed();
    assert!(text.contains(" 1         -     1      4     7      -       7,15\n"), "{text}");
    assert!(text.contains(" 1      64.0 GiB   57.2 GiB    -                 4-7,12-15\n"), "{text}");
    let view = machine.json(&["topology"]);
    assert_eq!((keys(&view), view["cpus"].as_array().unwrap().len()), (vec!["cpus", "losses", "nodes"], 16));
    fs::remove_dir_all(machine.path("/sys")).unwrap();
    let said = machine.cli(&["topology"]).refused(Code::TopologyUnreadable);
    assert!(said.contains("/sys/devices/system/cpu"), "{said}");
    json_error(&machine.cli(&["--json", "topology"]), Code::TopologyUnreadable);
}

#[test]
fn explain_says_every_step() {
    let machine = machine();
    assert_eq!(
        machine.cli(&["explain", "db"]).printed(),
        "Domain \"db\"
 1. dedicated by the domain's XML: 3 vCPUs on whole cores, 1 on each
 2. it has no place of its own among the defined domains
 3. pinnable and online: 2-7,10-15
 4. held by leases: 2,6,10
 5. withheld, as their core is not whole: 14
 6. needed: 3 vCPUs and 1 extra; free: 4 whole cores
 7. chosen: fewest nodes, then fewest last-level caches, then the rest most
    useful to others: CPUs 3,4,5
It would get:
  vCPU 0         CPU 3
  vCPU 1         CPU 4
  vCPU 2         CPU 5
  parked         11-13
  emulator       7,15
  I/O threads    0-1,8-9
  nodes          0-1
  true topology  3 cores of 1 thread
  NUMA cell 0    vCPU 0 on node 0, 342 MiB
  NUMA cell 1    vCPUs 1-2 on node 1, 682 MiB
  note: spans 2 nodes (0-1) where 1 is possible; it would be so once enough is
        free on one node
  note: its XML tells the guest nothing of cores and threads, not 3 cores of 1
        thread; `virt-pin define` corrects it, and so does the agent
"
    );
    let view = machine.json(&["explain", "db"]);
    assert_eq!(keys(&view), ["advice", "domain", "plan", "steps", "told", "uuid", "wish"]);
    assert_eq!(
        (&view["advice"]["spans"], &view["advice"]["possible"]),
        (&json!({ "nodes": 2, "llcs": 2 }), &json!({ "nodes": 1, "llcs": 1 }))
    );
    assert_eq!(
        view["plan"],
        json!({
            "vcpus": [3, 4, 5], "parked": "11-13", "extra": "7,15", "emulator": "7,15", "iothreads": "0-1,8-9",
            "nodes": [0, 1], "cells": [
                { "vcpus": "0", "bytes": 342 << 20, "node": 0 },
                { "vcpus": "1-2", "bytes": 682 << 20, "node": 1 },
            ],
            "topology": [1, 1, 3, 1],
        })
    );
    // By UUID, by file, from stdin: the same.
    let file = machine.path("/etc/libvirt/qemu/db.xml");
    for subject in ["00000000-0000-0000-0000-000000000002", file.to_str().unwrap()] {
        assert_eq!(machine.json(&["explain", subject]), view);
    }
    let from_stdin = machine.cli_with(&["--json", "explain", "-"], fs::read(&file).unwrap()).printed();
    assert_eq!(serde_json::from_str::<Value>(&from_stdin).unwrap(), view);
    // It is what a start gives.
    let started = machine.prepare(&Vm::new(2, 3).with("threads-per-core='1' emulator='isolate'").named("db"));
    assert_eq!((pins(&started), topology(&started)), (vec![3, 4, 5], Some([1, 1, 3, 1])));
    let again = machine.json(&["explain", "db"]);
    assert_eq!(
        (&again["plan"], &again["steps"][1]),
        (&view["plan"], &json!("the domain holds a lease that answers the request"))
    );
    assert_eq!((&again["held"], &view["held"]), (&json!(true), &Value::Null));
    let text = machine.cli(&["explain", "db"]).printed();
    assert!(text.contains("\nIt holds:\n  vCPU 0         CPU 3\n") && !text.contains("would get"), "{text}");
    // Its definition has been changed since: what it has and what it would get are told apart.
    machine.define(&Vm::new(2, 2).named("db"), false);
    let text = machine.cli(&["explain", "db"]).printed();
    let step = "it holds CPUs 3-5,7,11-13,15, which is not what is asked for now; the rest is about a new start";
    assert!(flat(&text).contains(step) && text.contains("\nIt would get:\n"), "{text}");
}

#[test]
fn explain_of_a_refusal_is_an_answer_and_a_failure() {
    let machine = machine();
    let run = machine.cli(&["explain", "big"]);
    assert_eq!(run.code, Some(20));
    let sentence = run.complaint(Code::Shortage);
    assert_eq!(sentence, "domain \"big\": needs 6 whole cores (12 vCPUs, 2 on each), 4 of the 6 pinnable are free");
    assert!(run.stdout.starts_with("Domain \"big\"\n 1. dedicated by the domain's XML: 12 vCPUs on whole cores\n"));
    // The sentence is the error's, and said once.
    assert!(run.stdout.ends_with(" 6. needed: 12 vCPUs; free: 4 whole cores\n"), "{}", run.stdout);
    assert!(run.stderr.contains("  hint: held by \"vm1\" 2,10, \"vm7\" 6; "), "{}", run.stderr);
    let view = machine.json(&["explain", "big"]);
    let refused = &view["refused"];
    assert_eq!((&refused["code"], &refused["message"]), (&json!("cpu.placement.shortage"), &json!(sentence)));
    assert_eq!((&refused["needed"], &refused["free"], &refused["unit"]), (&json!(6), &json!(4), &json!("whole core")));
    assert_eq!((&refused["retry"], &refused["retry_when"]), (&json!(true), &json!("when 6 whole cores are free")));
    let amount = |cores: u32, threads: u32| json!({ "cores": cores, "threads": threads });
    assert_eq!(
        refused["room"],
        json!({
            "needed": amount(6, 12), "free": amount(4, 9), "pinnable": amount(6, 12),
            "nodes": [
                { "node": 0, "free": amount(1, 2), "pinnable": amount(2, 4) },
                { "node": 1, "free": amount(3, 7), "pinnable": amount(4, 8) },
            ],
            "withheld": [{ "cpus": "14", "why": "sibling-leased" }],
        })
    );
    let lines = "  per node: 0 has 1 whole core, 2 threads free; 1 has 3 whole cores, 7 threads free\n  withheld: 14 (sibling leased)\n  hint: ";
    assert!(run.stderr.contains(lines), "{}", run.stderr);
    // The hook says the same.
    assert_eq!(machine.event(&Vm::new(3, 12).named("big"), "prepare begin").refused(Code::Shortage), sentence);
}

#[test]
fn explain_of_domains_without_a_policy() {
    let machine = machine();
    let shared = machine.cli_with(&["explain", "-"], Vm::new(5, 1).without_policy().xml()).printed();
    assert_eq!(shared, "Domain \"vm5\"\n 1. no policy asks for dedicated CPUs: it gets no lease\n");
    let by_hand = machine.cli_with(&["explain", "-"], Vm::new(5, 1).without_policy().pinned(&[3]).xml()).printed();
    assert_eq!(
        by_hand,
        "Domain \"vm5\"\n 1. no policy, but its XML pins it to CPUs 3: respected as a static lease while\n    it runs\n"
    );
    // Pins on somebody's CPUs are refused here as at the start.
    let vm = Vm::new(5, 1).without_policy().pinned(&[10]);
    let sentence = machine.event(&vm, "prepare begin").refused(Code::StaticConflict);
    let run = machine.cli_with(&["explain", "-"], vm.xml());
    assert_eq!((run.code, run.complaint(Code::StaticConflict)), (Some(24), sentence.clone()));
    assert_eq!(
        run.stdout,
        "Domain \"vm5\"\n 1. no policy, but its XML pins it to CPUs 10: respected as a static lease while\n    it runs\n"
    );
    let run = machine.cli_with(&["--json", "explain", "-"], vm.xml());
    let view: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!((run.code, &view["refused"]["code"]), (Some(24), &json!("cpu.static.conflict")));
    assert_eq!(view["refused"]["message"], sentence);
    // Attributes without the one that asks.
    let vain = Vm { policy: Some("numa='single' cores='thread'".to_owned()), ..Vm::new(5, 1) };
    let said = machine.cli_with(&["explain", "-"], vain.xml()).printed();
    let what = "its policy element says numa=\"single\" cores=\"thread\", but not policy=\"dedicated\", without which it asks for no CPUs";
    let expected = format!("Domain \"vm5\" 1. {what} 2. no policy asks for dedicated CPUs: it gets no lease");
    assert_eq!(flat(&said), expected);
    machine.define(&vain, false);
    let checks = machine.json(&["check"]);
    let found = |checks: &Value, check: &str| {
        let checks = checks["checks"].as_array().unwrap().clone();
        let found = checks.into_iter().find(|found| found["check"] == check).unwrap();
        (found["result"].clone(), found["message"].clone())
    };
    assert_eq!(found(&checks, "every policy says what it is"), (json!("warn"), json!(format!("\"vm5\": {what}"))));
    assert_eq!(found(&checks, "every [[domain]] says its policy").0, "pass");
    machine.config("pinnable_cpus = \"2-7\"\n[[domain]]\nmatch = \"vm5\"\ncores = \"thread\"\n");
    let (result, message) = found(&machine.json(&["check"]), "every [[domain]] says its policy");
    assert_eq!(result, "warn");
    assert!(message.as_str().unwrap().starts_with("/etc/virt-pin/virt-pin.toml:2: "), "{message}");
    // A policy from the configuration is said to be one.
    machine
        .config("pinnable_cpus = \"2-7\"\n[[domain]]\nmatch = \"vm5\"\npolicy = \"dedicated\"\ncores = \"thread\"\n");
    let said = machine.cli_with(&["explain", "-"], Vm::new(5, 1).without_policy().xml()).printed();
    assert!(said.contains(" 1. dedicated by /etc/virt-pin/virt-pin.toml:2: 1 vCPU on single threads\n"), "{said}");
}

/// What the next event would find gone counts for nothing.
#[test]
fn void_leases_do_not_stand_in_the_way() {
    let machine = Machine::new("2,10");
    let (first, second) = (Vm::new(1, 2), Vm { id: None, ..Vm::new(2, 2) });
    machine.prepare(&first);
    machine.qemu(&first, 700, &[2, 10], "0-1,3-9,11-15");
    machine.event(&first, "started begin").silent();
    assert_eq!(machine.cli_with(&["explain", "-"], second.xml()).code, Some(20));
    machine.gone(700);
    let before = machine.everything();
    assert_eq!(machine.json(&["capacity"])["free"], "2,10");
    assert_eq!(pins(&machine.cli_with(&["transform"], second.xml()).printed()), [2, 10]);
    let explained = machine.cli_with(&["explain", "-"], second.xml()).printed();
    assert!(explained.contains("  vCPU 1         CPU 10\n"), "{explained}");
    let check = machine.cli(&["check"]).stdout;
    assert!(check.contains("\"vm1\": its QEMU has ended (ended at the next event of any"), "{check}");
    assert!(machine.everything() == before, "looking changes nothing");
    assert_eq!(pins(&machine.prepare(&second)), [2, 10]);
}

#[test]
fn transform_rewrites_and_nothing_else() {
    let machine = machine();
    let db = machine.read("/etc/libvirt/qemu/db.xml");
    let file = machine.path("/etc/libvirt/qemu/db.xml");
    let before = machine.everything();
    let xml = machine.cli(&["transform", file.to_str().unwrap()]).printed();
    assert_eq!((pins(&xml), topology(&xml)), (vec![3, 4, 5], Some([1, 1, 3, 1])));
    for args in [&["transform"][..], &["transform", "-"], &["--json", "transform"]] {
        assert_eq!(machine.cli_with(args, &db).printed(), xml);
    }
    assert_eq!(machine.cli_with(&["transform"], &xml).printed(), xml, "a second time changes nothing");
    // Nobody's business: out as it came in, to the byte.
    let odd = "\u{feff}<domain>\r\n<name>x</name>\t<!-- --> <vcpu >1</vcpu ></domain>\n\n";
    assert_eq!(machine.cli_with(&["transform"], odd).printed(), odd);
    let crlf = db.replace('\n', "\r\n");
    let out = machine.cli_with(&["transform"], &crlf).printed();
    assert!(out.contains("\r\n  <cputune>\r\n") && !out.replace("\r\n", "").contains('\n'), "{out:?}");
    // Only what the guest sees: no CPU, whoever holds which, and what was there before comes back from it.
    let shape = machine.cli_with(&["transform", "--shape-only"], &db).printed();
    assert_eq!((pins(&shape), topology(&shape)), (vec![], Some([1, 1, 3, 1])));
    assert!(!shape.contains("cpuset") && shape.contains("urn:virt-pin:former:1"), "{shape}");
    assert_eq!(machine.cli_with(&["transform", "--shape-only"], &shape).printed(), shape);
    let shared = machine.cli_with(&["transform", "--shape-only"], shape.replace("'dedicated'", "'shared'")).printed();
    assert!(!shared.contains("former") && topology(&shared).is_none(), "{shared}");
    let pinned = machine.cli_with(&["transform", "--shape-only"], &xml).printed();
    assert!(pins(&pinned).is_empty() && !pinned.contains("cpuset"), "{pinned}");
    // A file that was never defined has no UUID.
    let new = db.replace("  <uuid>00000000-0000-0000-0000-000000000002</uuid>\n", "");
    assert_eq!(pins(&machine.cli_with(&["transform"], &new).printed()), [3, 4, 5]);
    for (text, code) in [
        ("", Code::DomainInvalid),
        ("<network/>", Code::DomainInvalid),
        ("<!DOCTYPE a []><domain/>", Code::DomainInvalid),
        (db.replace("isolate", "isolated").as_str(), Code::PolicyInvalid),
        (db.replace(">3<", ">13<").as_str(), Code::Unsatisfiable),
    ] {
        let said = machine.cli_with(&["transform"], text).refused(code);
        assert_eq!(json_error(&machine.cli_with(&["--json", "transform"], text), code)["message"], said);
    }
    let said = machine.cli(&["transform", "/nowhere/at/all"]).refused(Code::DomainUnknown);
    assert_eq!(said, "cannot read /nowhere/at/all: No such file or directory (os error 2)");
    machine.cli(&["transform", machine.root().to_str().unwrap()]).refused(Code::DomainInvalid);
    machine.cli_with(&["transform"], b"<domain>\xff</domain>").refused(Code::DomainInvalid);
    let long = vec![b' '; (16 << 20) + 2];
    machine.cli_with(&["transform"], &long).refused(Code::DomainInvalid);
    assert!(machine.everything() == before);
}

#[test]
fn a_description_describes_itself() {
    let hosts = fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hosts")).unwrap();
    let hosts = hosts.map(|entry| entry.unwrap().path()).filter(|path| path.extension() == Some(OsStr::new("host")));
    let machine = machine();
    let mut count = 0;
    for host in hosts {
        let host = host.to_str().unwrap();
        let once = machine.cli(&["--host", host, "gather"]).printed();
        machine.put("/once", &once);
        let file = machine.path("/once");
        let file = file.to_str().unwrap();
        assert_eq!(machine.cli(&["--host", file, "gather"]).printed(), once, "{host}");
        let topology = |host| machine.cli(&["--host", host, "--json", "topology"]).printed();
        assert_eq!(topology(host), topology(file), "{host}");
        count += 1;
    }
    assert!(count > 8);
    // The machine itself, and what it would give.
    let described = machine.path("/described");
    let (path, db) = (described.to_str().unwrap(), machine.read("/etc/libvirt/qemu/db.xml"));
    let said = machine.cli(&["gather", path]).printed();
    assert_eq!(said, format!("This machine is described in {path}; look through it before you send it to anybody.\n"));
    machine.cli(&["gather", path]).refused(Code::HostIo);
    assert_eq!(machine.cli(&["gather"]).printed(), machine.read("/described"));
    let there = machine.cli_with(&["--host", path, "--pinnable", "2-7,10-15", "transform"], &db).printed();
    // Without this machine's leases; its configuration is not that one's either.
    assert_eq!(pins(&there), [4, 5, 6]);
    machine.cli_with(&["--host", path, "transform"], &db).refused(Code::Unsatisfiable);
    assert_eq!(machine.cli(&["--host", path, "list"]).printed().lines().count(), 2);
    let check = machine.cli(&["--host", path, "--pinnable", "2", "--json", "check"]);
    assert_eq!(check.code, Some(0), "{check:?}");
    for verb in [&["install"][..], &["uninstall"], &["sync", "vm1"], &["reconcile"], &["repack"]] {
        machine.cli(&[&["--host", path], verb].concat()).refused(Code::Usage);
    }
}

#[test]
fn mistakes_in_the_command_line() {
    let machine = machine();
    let before = machine.everything();
    for args in [&["nothing"][..], &["lease"], &["list", "x"], &["--json"], &["list", "--colour"], &["--pinnable"]] {
        let run = machine.cli(args);
        assert_eq!((run.code, run.stderr.contains("help")), (Some(2), true), "{run:?}");
        if args.contains(&"--json") {
            continue;
        }
        run.refused(Code::Usage);
        let run = machine.cli(&[&["--json"], args].concat());
        json_error(&run, Code::Usage);
    }
    let passwd = machine.path("/passwd");
    machine.put("/passwd", "root:x:0:0::/:/bin/sh\n");
    machine.put("/newer", "# virt-pin host description 2\n");
    machine.put("/twice", "/a\t1\n/a\t2\n");
    for (args, part) in [
        (["--pinnable", "x"], "--pinnable \"x\": expected a CPU number"),
        (["--pinnable", "3-1"], "range runs backwards"),
        (["--host", "/nowhere/at/all"], "cannot read /nowhere/at/all"),
        (["--host", passwd.to_str().unwrap()], "line 1: no tab between path and text"),
        (["--host", machine.path("/newer").to_str().unwrap()], "line 1: format 2 is not one we read"),
        (["--host", machine.path("/twice").to_str().unwrap()], "line 2: \"/a\" is described twice"),
        (["--host", env!("CARGO_BIN_EXE_virt-pin")], "cannot read"),
    ] {
        let said = machine.cli(&[&args[..], &["capacity"]].concat()).refused(Code::Usage);
        assert!(said.contains(part), "{said}");
        let run = machine.cli(&[&args[..], &["--json", "capacity"]].concat());
        assert_eq!(json_error(&run, Code::Usage)["message"], said);
    }
    // Arguments that are not UTF-8.
    for args in [
        &[&b"lease"[..], b"\xff"][..],
        &[b"explain", b"\xff\xfe"],
        &[b"\xff"],
        &[b"transform", b"a\xff"],
        &[b"gather", b"/nowhere/\xff"],
    ] {
        let mut command = machine.cli_command(&[]);
        command.args(args.iter().map(|arg| OsStr::from_bytes(arg)));
        let run = Run::of(command, b"");
        let expected = if args[0] == b"gather" { Code::HostIo } else { Code::Usage };
        assert_eq!(run.code, Some(expected.exit().into()), "{run:?}");
    }
    let mut after = machine.everything();
    for name in ["/passwd", "/newer", "/twice"] {
        after.remove(&machine.path(name));
    }
    assert!(after == before);
    for args in [&["--help"][..], &["help"], &["help", "explain"], &["--version"]] {
        assert!(!machine.cli(args).printed().is_empty());
    }
    let run = machine.cli(&[]);
    assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{run:?}");
    assert_eq!(json_error(&machine.cli(&["--json"]), Code::Usage)["message"], "no command is given");
}

#[test]
fn a_reader_that_has_seen_enough() {
    let machine = Machine::shaped(Shape(8, 64, 2), "8-1000");
    for args in [&["topology"][..], &["--json", "topology"], &["gather"], &["list"], &["--help"]] {
        let mut command = machine.cli_command(args);
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        command.stdout(writer);
        Run::of(command, b"").silent();
    }
    let mut command = machine.cli_command(&["topology"]);
    command.stdout(fs::File::create("/dev/full").unwrap());
    Run::of(command, b"").refused(Code::HostIo);
}

#[test]
fn unknown_domains() {
    let machine = machine();
    for subject in [
        "nobody",
        "",
        "../qemu/db",
        "/etc/libvirt/qemu/nobody.xml",
        "00000000-0000-0000-0000-000000000099",
        "a\nb\u{202e}",
    ] {
        let run = machine.cli(&["explain", subject]);
        let said = run.refused(Code::DomainUnknown);
        assert!(said.starts_with("no domain and no file is named ") && said.ends_with("(looked in /etc/libvirt/qemu)"));
        assert_eq!(run.stderr.lines().count(), 2, "{}", run.stderr);
        json_error(&machine.cli(&["--json", "explain", subject]), Code::DomainUnknown);
    }
    // Somebody's broken definition is nobody else's trouble.
    machine.put("/etc/libvirt/qemu/broken.xml", "<domain");
    machine.cli(&["explain", "00000000-0000-0000-0000-000000000002"]).printed();
    machine.cli(&["explain", "broken"]).refused(Code::DomainInvalid);
}

#[test]
fn state_that_cannot_be_read() {
    let machine = machine();
    let db = machine.read("/etc/libvirt/qemu/db.xml");
    for (text, code) in [("{", Code::StateCorrupt), ("{\"version\":9}", Code::StateNewer)] {
        machine.put("/run/virt-pin/leases.json", text);
        for args in [&["list"][..], &["lease", "vm1"], &["capacity"], &["explain", "db"]] {
            let said = machine.cli(args).refused(code);
            assert!(said.contains("/run/virt-pin/leases.json "), "{said}");
            json_error(&machine.cli(&[&["--json"], args].concat()), code);
        }
        machine.cli_with(&["transform"], &db).refused(code);
        let check = machine.cli(&["check"]);
        assert_eq!(check.code, Some(3));
        assert!(check.stdout.contains("leases can be read"), "{}", check.stdout);
        assert_eq!(machine.leases().unwrap(), text);
    }
    // A newer file is its version's; a corrupt one is kept beside.
    machine.cli(&["reconcile"]).refused(Code::StateNewer);
    machine.put("/run/virt-pin/leases.json", "{");
    let said = machine.cli(&["reconcile"]).printed();
    assert!(said.contains("it is kept as ") && said.ends_with("0 leases in all.\n"), "{said}");
    assert_eq!(machine.read("/run/virt-pin/leases.json.corrupt-1000"), "{");
    assert_eq!(machine.leased().len(), 0);
    let held = machine.hold_lock();
    machine.cli(&["reconcile"]).refused(Code::StateLocked);
    drop(held);
}

#[test]
fn check_finds_what_is_wrong() {
    let machine = machine();
    let finding = |machine: &Machine, check: &str| -> (String, String) {
        let view = machine.json(&["check"]);
        let checks = view["checks"].as_array().unwrap().clone();
        let found = checks.iter().find(|found| found["check"].as_str().unwrap().starts_with(check));
        let found = found.unwrap_or_else(|| panic!("{check} is not in {view}"));
        (found["result"].as_str().unwrap().to_owned(), found["message"].as_str().unwrap_or_default().to_owned())
    };
    #[track_caller]
    fn is(found: (String, String), result: &str, part: &str) {
        assert!(found.0 == result && found.1.contains(part), "{found:?}");
    }
    let run = machine.cli(&["check"]);
    assert_eq!((run.code, run.complaint(Code::CheckFailed)), (Some(3), "1 check failed".to_owned()));
    assert!(run.stdout.lines().all(|line| line.chars().count() <= 80), "{}", run.stdout);
    is(finding(&machine, "is installed"), "fail", "virt-pin install");
    is(finding(&machine, "CPUs may be handed out"), "pass", "2-7,10-15");

    // A hook that is ours: all well, as far as a machine without a daemon can be.
    machine.cli(&["install"]).printed();
    machine.put("/usr/bin/virt-pin", "");
    fs::set_permissions(machine.path("/usr/bin/virt-pin"), fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(machine.cli(&["check"]).code, Some(0));
    is(finding(&machine, "is seen by the daemon"), "warn", "no libvirt daemon runs");
    machine.put("/run/libvirt/libvirt-sock", "");
    is(finding(&machine, "is seen by the daemon"), "warn", "no libvirt daemon runs");
    fs::create_dir_all(machine.path("/run/systemd/system")).unwrap();
    is(finding(&machine, "is seen by the daemon"), "pass", "it sleeps");
    fs::remove_dir_all(machine.path("/run/systemd")).unwrap();
    let hook = machine.path("/etc/libvirt/hooks/qemu.d/10-virt-pin");
    fs::set_permissions(&hook, fs::Permissions::from_mode(0o644)).unwrap();
    is(finding(&machine, "is executable"), "fail", "VMs would be killed");
    fs::set_permissions(&hook, fs::Permissions::from_mode(0o755)).unwrap();
    symlink(&hook, machine.path("/etc/libvirt/hooks/qemu")).unwrap();
    is(finding(&machine, "is installed once"), "warn", "also as /etc/libvirt/hooks/qemu");
    fs::rename(&hook, machine.path("/elsewhere")).unwrap();
    symlink(machine.path("/elsewhere"), &hook).unwrap();
    is(finding(&machine, "is a file of its own"), "warn", "symbolic link");

    // The configuration and the host.
    for (pinnable, check, part) in [
        ("", "CPUs may be handed out", "every dedicated VM is refused"),
        ("2-7,10-15,99", "every pinnable CPU is online", "CPUs 99 are offline or absent"),
        ("2-3,10", "every pinnable CPU is part of a whole", "CPUs 3 have a sibling"),
        ("0-15", "there are housekeeping CPUs", "none"),
    ] {
        machine.pinnable(pinnable);
        is(finding(&machine, check), "warn", part);
    }
    machine.config("pinnable_cpus = 2\n");
    is(finding(&machine, "can be understood"), "fail", "/etc/virt-pin/virt-pin.toml:1");
    machine.pinnable("2-7,10-15");
    machine.put("/proc/mounts", "cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n");
    machine.put("/sys/fs/cgroup/cpuset/cpuset.effective_cpus", "0-5,8-15\n");
    is(finding(&machine, "every pinnable CPU can be given"), "warn", "CPUs 6-7 are outside");
    is(finding(&machine, "VMs are confined before"), "pass", "cgroup v1 at /sys/fs/cgroup/cpuset, without machined");
    machine.put("/proc/mounts", "");

    // What is defined.
    is(finding(&machine, "every definition can be understood"), "pass", "");
    is(finding(&machine, "every autostart domain has its place"), "pass", "");
    machine.define(&Vm::new(8, 2).with("cores='half'"), true);
    is(finding(&machine, "every definition can be"), "warn", "/etc/libvirt/qemu/vm8.xml: unknown value \"half\"");
    machine.define(&Vm::new(8, 14), true);
    machine.define(&Vm::new(9, 12), true);
    machine.define(&Vm::new(10, 2), true);
    let (result, said) = finding(&machine, "every autostart domain has its place");
    assert_eq!(result, "warn");
    for (name, code) in [("vm8", "cpu.placement.unsatisfiable"), ("vm10", "cpu.placement.shortage")] {
        assert!(said.contains(&format!("\"{name}\": {code}: needs ")), "{said}");
    }
    for number in 8..=10 {
        fs::remove_file(machine.path(&format!("/etc/libvirt/qemu/vm{number}.xml"))).unwrap();
    }

    // The leases against reality.
    let vm = Vm::new(1, 2);
    machine.qemu(&vm, 700, &[2, 10], "0-1,8-9");
    machine.event(&vm, "started begin").silent();
    is(finding(&machine, "threads of \"vm1\""), "pass", "2,10");
    machine.thread(700, 702, "CPU 1/KVM", "0-15");
    is(finding(&machine, "threads of \"vm1\""), "fail", "\"CPU 1/KVM\" (tid 702) may run on CPUs 0-15, not 10");
    machine.gone(700);
    is(finding(&machine, "every lease has a living VM"), "warn", "\"vm1\": its QEMU has ended");

    // A dedicated VM that was started past the hook.
    is(finding(&machine, "every dedicated VM that runs"), "pass", "");
    let (past, shared) = (Vm::new(5, 2), Vm::new(6, 1).without_policy());
    machine.qemu(&past, 710, &[3, 11], "0-1,8-9");
    machine.qemu(&shared, 720, &[0], "0-1,8-9");
    let _alive = [&past, &shared].map(|vm| machine.alive(vm));
    is(finding(&machine, "every dedicated VM that runs"), "fail", "not \"vm5\": `virt-pin reconcile` gives it one if");
    machine.cli(&["reconcile"]).printed();
    is(finding(&machine, "every dedicated VM that runs"), "pass", "");

    // Whoever can write there could make leases.
    is(finding(&machine, "nobody else can change"), "pass", "/run/virt-pin");
    fs::set_permissions(machine.path("/run/virt-pin"), fs::Permissions::from_mode(0o777)).unwrap();
    is(finding(&machine, "nobody else can change"), "fail", "has mode 0777: others may write to it (`chmod 0700 ");
    fs::set_permissions(machine.path("/run/virt-pin"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::set_permissions(machine.path("/run/virt-pin/lock"), fs::Permissions::from_mode(0o666)).unwrap();
    is(finding(&machine, "nobody else can change"), "fail", "`chmod 0600 ");
}

/// A VM that runs without the CPUs it asks for, as its policy allows, shows so wherever one may look.
#[test]
fn a_degraded_domain_shows_everywhere() {
    let machine = machine();
    let vm = Vm::new(3, 12).with("fallback='shared'").named("big");
    let reason = "needs 6 whole cores (12 vCPUs, 2 on each), 4 of the 6 pinnable are free";
    machine.put("/etc/libvirt/qemu/big.xml", &Vm { id: None, ..vm.clone() }.xml());
    // Before the start.
    let text = machine.cli(&["explain", "big"]).printed();
    let end = format!(
        " 7. no room: cpu.placement.shortage: {reason} 8. fallback=\"shared\": it would start degraded, without CPUs of its own"
    );
    assert!(flat(&text).ends_with(&end), "{text}");
    let why = json!({ "code": "cpu.placement.shortage", "reason": reason });
    let view = machine.json(&["explain", "big"]);
    assert_eq!((&view["degraded"], &view["plan"], &view["runs_degraded"]), (&why, &Value::Null, &Value::Null));

    machine.prepare(&vm);
    machine.qemu(&vm, 700, &(0..12).collect::<Vec<_>>(), "0-15");
    machine.thread(700, 701, "CPU 0/KVM", "0-15");
    machine.event(&vm, "started begin").silent();
    let _alive = machine.alive(&vm);
    machine.put("/proc/uptime", "8200.00 1.00\n");
    let list = machine.cli(&["list"]).printed();
    assert!(list.contains("\n big    running    degraded    -       -      -        -          -\n"), "{list}");
    assert_eq!(
        machine.cli(&["lease", "big"]).printed(),
        format!(
            "Name:           big
UUID:           00000000-0000-0000-0000-000000000003
State:          running
Kind:           degraded
Since:          2 hours ago
CPUs held:      -
Code:           cpu.placement.shortage
Reason:         needs 6 whole cores (12 vCPUs, 2 on each), 4 of the 6 pinnable
                are free
QEMU pid:       700
"
        )
    );
    let view = machine.json(&["lease", "big"]);
    assert_eq!((&view["kind"], &view["code"], &view["reason"]), (&json!("degraded"), &why["code"], &why["reason"]));
    let checks = machine.json(&["check"])["checks"].as_array().unwrap().clone();
    let result = |check: &str| checks.iter().find(|found| found["check"] == check).unwrap().clone();
    let found = result("\"big\" has CPUs of its own");
    assert_eq!(found["result"], "warn");
    assert_eq!(
        found["message"],
        format!(
            "it has been degraded for 2 hours (cpu.placement.shortage: {reason}); stop it and start it again when \
             `virt-pin explain` finds room"
        )
    );
    assert_eq!(result("every dedicated VM that runs has a lease")["result"], "pass");
    // It owns nothing on the map.
    let map = machine.cli(&["map"]).printed();
    assert!(!map.contains("big"), "{map}");
    // Nobody takes its lease for one to be rebuilt; lost, it comes back for what it is.
    let big = || machine.leased().into_iter().find(|lease| lease["name"] == "big").unwrap();
    let before = big();
    machine.cli(&["reconcile"]).printed();
    assert_eq!(big(), before);
    machine.put("/run/virt-pin/leases.json", "");
    let said = machine.cli(&["reconcile"]).printed();
    let what = "vCPU 0 may run on CPUs 0-15, not on one of its own";
    assert!(said.contains(&format!("\"big\": degraded, without CPUs of its own: {what}\n")), "{said}");
    let lost = big();
    assert_eq!(
        (&lost["kind"], &lost["qemu"], &lost["reason"]),
        (&json!("degraded"), &json!([700, 5000]), &json!(what))
    );
    // With room, a new start is another matter.
    machine.pinnable("0-15");
    machine.put(
        "/etc/libvirt/qemu/big.xml",
        &Vm { id: None, ..vm }.xml().replace("fallback", "emulator='share' iothreads='share' fallback"),
    );
    let text = machine.cli(&["explain", "big"]).printed();
    assert!(
        text.contains(" 2. it runs degraded, without CPUs of its own (") && text.contains("\nIt would get:\n"),
        "{text}"
    );
    let view = machine.json(&["explain", "big"]);
    assert!(
        view["runs_degraded"]["code"].is_string() && view["degraded"].is_null() && view["held"].is_null(),
        "{view}"
    );
}

#[test]
fn install_and_uninstall() {
    let machine = Machine::new("2");
    let place = machine.path("/etc/libvirt/hooks/qemu.d/10-virt-pin");
    let hook = fs::read(env!("CARGO_BIN_EXE_virt-pin-hook")).unwrap();
    let installed = machine.cli(&["install"]).printed();
    assert!(installed.starts_with(&format!("Installed the hook: {}\n", place.display())), "{installed}");
    assert_eq!(fs::read(&place).unwrap(), hook);
    assert_eq!(fs::metadata(&place).unwrap().permissions().mode() & 0o777, 0o755);
    assert!(machine.cli(&["install"]).printed().starts_with("The hook is installed already: "));
    // Nothing else lies about: libvirt runs whatever it finds there.
    assert_eq!(fs::read_dir(place.parent().unwrap()).unwrap().count(), 1);
    assert_eq!(fs::read_dir(machine.path("/etc/libvirt/hooks")).unwrap().count(), 1);
    fs::set_permissions(&place, fs::Permissions::from_mode(0o600)).unwrap();
    assert!(machine.cli(&["install"]).printed().contains("It replaces an earlier one"));
    assert_eq!(fs::metadata(&place).unwrap().permissions().mode() & 0o777, 0o755);
    assert!(machine.cli(&["uninstall"]).printed().starts_with("Removed the hook: "));
    assert!(!place.parent().unwrap().exists());
    assert_eq!(machine.cli(&["uninstall"]).printed(), "The hook is not installed.\n");

    // Somebody else's scripts stay as they are, in every place.
    machine.put("/etc/libvirt/hooks/qemu", "#!/bin/sh\nexec dispatcher \"$@\"\n");
    machine.put("/etc/libvirt/hooks/qemu.d/win11/prepare/begin/start.sh", "#!/bin/sh\n");
    machine.put("/etc/libvirt/hooks/qemu.d/10-virt-pin", "#!/bin/sh\n");
    let before = machine.everything();
    let said = machine.cli(&["install"]).refused(Code::InstallConflict);
    assert!(said.ends_with("10-virt-pin is somebody else's script; it was left as it is"), "{said}");
    json_error(&machine.cli(&["--json", "install"]), Code::InstallConflict);
    assert_eq!(machine.cli(&["uninstall"]).printed(), "The hook is not installed.\n");
    machine.cli(&["install", "--hook", "/etc/passwd"]).refused(Code::Usage);
    machine.cli(&["install", "--hook", "/nowhere"]).refused(Code::HostIo);
    assert!(machine.everything() == before);
    fs::remove_file(machine.path("/etc/libvirt/hooks/qemu.d/10-virt-pin")).unwrap();
    machine.cli(&["install", "--hook", env!("CARGO_BIN_EXE_virt-pin-hook")]).printed();
    machine.cli(&["uninstall"]).printed();
    assert!(machine.path("/etc/libvirt/hooks/qemu.d/win11/prepare/begin/start.sh").exists());
}

#[test]
fn sync_without_a_domain_to_sync() {
    // Whether or not a libvirt daemon runs here, it has no such domain.
    let machine = machine();
    let before = machine.everything();
    machine.cli(&["sync", "vm1"]).refused(Code::LibvirtFailed);
    json_error(&machine.cli(&["--json", "sync", "vm1"]), Code::LibvirtFailed);
    assert!(machine.everything() == before);
}

#[test]
fn repack_makes_room_or_leaves_everything_as_it_was() {
    let machine = Machine::new("2-3,6-7,10-11,14-15");
    let near = |number, vcpus| Vm::new(number, vcpus).with("numa='single' memory='any'");
    let emulator = "0-1,4-5,8-9,12-13";
    for number in 1..=3 {
        let vm = near(number, 2);
        machine.prepare(&vm);
        machine.qemu(&vm, 100 * number, &machine.vcpus_of(&vm), emulator);
        machine.event(&vm, "started begin").silent();
    }
    let places = [1, 2, 3].map(|number| machine.vcpus_of(&near(number, 2)));
    assert_eq!(places, [vec![2, 10], vec![3, 11], vec![6, 14]]);
    machine.gone(200);
    machine.event(&near(2, 2), "release end").silent();
    machine.define(&near(1, 2), false);
    machine.define(&near(4, 4), false);
    machine.define(&Vm::new(5, 1).without_policy(), false);
    let said = machine.cli(&["repack", "--dry-run", "--for", "vm4"]).printed();
    assert_eq!(said, "Would move \"vm1\" from CPUs 2,10 to 7,15.\nThen there would be room for vm4.\n");
    let view = machine.json(&["repack", "--dry-run", "--for", "2x2", "--policy", "numa=single"]);
    assert_eq!(view["moves"], json!([{ "domain": "vm1", "from": "2,10", "to": "7,15" }]));
    assert_eq!((&view["done"], &view["message"]), (&json!(false), &json!("Then there would be room for a VM of 2x2.")));
    let said = machine.cli(&["repack", "--for", "1x2"]).printed();
    assert_eq!(said, "There is room for a VM of 1x2; nothing has to move.\n");
    let said = machine.cli(&["repack"]).printed();
    assert!(said.starts_with("Nothing is to be gained"), "{said}");
    // Nobody moves the threads of this machine, so the move cannot come to its end.
    let before = machine.leases();
    let run = machine.cli(&["repack", "--for", "vm4"]);
    assert_eq!(
        (run.code, run.stdout.as_str()),
        (Some(Code::ThreadMisplaced.exit().into()), "The rest was left as it was.\n")
    );
    let told =
        "moving \"vm1\" from CPUs 2,10 to 7,15\nvirt-pin: error[enforce.thread]: domain \"vm1\": the thread of vCPU 0";
    assert!(run.stderr.starts_with(told), "{}", run.stderr);
    assert_eq!(machine.leases(), before);
    for (subject, code) in [
        ("vm9", Code::DomainUnknown),
        ("0x2", Code::Usage),
        ("vm5", Code::PolicyInvalid),
        ("vm1", Code::StateConflict),
        ("5x2", Code::Unsatisfiable),
    ] {
        machine.cli(&["repack", "--for", subject]).refused(code);
    }
    assert_eq!(machine.cli(&["repack", "--policy", "numa=single"]).code, Some(Code::Usage.exit().into()));
    assert_eq!(machine.leases(), before);
}

#[test]
fn repack_moves_leases_off_cpus_that_are_not_pinnable_any_more() {
    let machine = Machine::new("1-3,9-11");
    for number in [1, 2] {
        let vm = Vm::new(number, 2);
        machine.prepare(&vm);
        machine.qemu(&vm, 100 * number, &machine.vcpus_of(&vm), "0,4-8,12-15");
        machine.event(&vm, "started begin").silent();
    }
    assert_eq!([1, 2].map(|number| machine.vcpus_of(&Vm::new(number, 2))), [[1, 9], [2, 10]]);
    // One finds another place, and the other cannot be moved: there is one.
    machine.pinnable("3,11");
    let said = machine.cli(&["repack", "--dry-run"]).printed();
    let end = "Then no lease that can be moved would have CPUs that are not pinnable.\n";
    assert_eq!(said, format!("Would move \"vm1\" from CPUs 1,9 to 3,11.\n{end}"));
    // Whoever holds CPUs that are still pinnable stays.
    machine.pinnable("1,3,9,11");
    let said = machine.cli(&["repack", "--dry-run"]).printed();
    assert_eq!(said, format!("Would move \"vm2\" from CPUs 2,10 to 3,11.\n{end}"));
    machine.pinnable("1-2,9-10");
    assert!(machine.cli(&["repack", "--dry-run"]).printed().starts_with("Nothing is to be gained"));
}

#[test]
fn repack_says_of_every_move_that_it_made_before_one_failed() {
    let machine = Machine::new("0-3,8-11");
    for number in [1, 2] {
        let vm = Vm::new(number, 2);
        machine.prepare(&vm);
        machine.qemu(&vm, 100 * number, &machine.vcpus_of(&vm), "4-7,12-15");
        machine.event(&vm, "started begin").silent();
    }
    machine.pinnable("2-3,10-11");
    // Nobody moves the threads of this machine: those of the first are where they are to go, those of the second are not.
    machine.qemu(&Vm::new(1, 2), 100, &[2, 10], "0,4-8,12-15");
    let run = machine.cli(&["--json", "repack"]);
    let view: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(run.code, Some(Code::ThreadMisplaced.exit().into()), "{}", run.stdout);
    assert_eq!(view["moves"], json!([{ "domain": "vm1", "from": "0,8", "to": "2,10" }]), "{view}");
    assert_eq!([1, 2].map(|number| machine.vcpus_of(&Vm::new(number, 2))), [[2, 10], [1, 9]]);
}

#[test]
fn a_partition_with_cpus_of_its_own_is_not_judged_by_libvirts() {
    let machine = Machine::new("1-3,9-11");
    let there = Vm::new(1, 2).body("<resource><partition>/rt</partition></resource>");
    for (number, vm) in [(1, &there), (2, &Vm::new(2, 2))] {
        machine.prepare(vm);
        machine.qemu(vm, 100 * number, &machine.vcpus_of(vm), "0,4-8,12-15");
        machine.event(vm, "started begin").silent();
    }
    machine.put("/proc/mounts", "cgroup /c cgroup rw,cpuset 0 0\n");
    machine.put("/c/cpuset.effective_cpus", "0-15\n");
    machine.put("/c/machine/cpuset.effective_cpus", "0,2-8,10-15\n");
    for (reach, moves) in [("0-1,8-9\n", false), ("0,2-8,10-15\n", true)] {
        machine.put("/c/rt.partition/cpuset.effective_cpus", reach);
        let said = machine.cli(&["repack", "--dry-run"]).printed();
        assert_eq!(said.starts_with("Would move \"vm1\" from CPUs 1,9 to 3,11."), moves, "{said}");
        let view = machine.json(&["check"]).to_string();
        assert_eq!(view.contains("the CPUs of \\\"vm1\\\" are pinnable"), moves, "{view}");
    }
}

#[test]
fn repack_brings_nearer_together_what_has_room_by_now() {
    let machine = Machine::new("2-3,6-7,10-11,14-15");
    let vms = [
        Vm::new(1, 2).with("nodes='0'"),
        Vm::new(2, 2).with("nodes='1'"),
        Vm::new(3, 4).with("memory='any' topology='keep'"),
        Vm::new(4, 4).with("memory='any'"),
    ];
    let run = |vm: &Vm| {
        machine.prepare(vm);
        machine.qemu(vm, 100 * vm.id.unwrap(), &machine.vcpus_of(vm), "0-1,4-5,8-9,12-13");
        machine.event(vm, "started begin").silent();
    };
    let end = |vm: &Vm| {
        machine.gone(100 * vm.id.unwrap());
        machine.event(vm, "release end").silent();
    };
    for (spread, said) in [
        (&vms[2], "Would move \"vm3\" from CPUs 3,7,11,15 to 2-3,10-11.\nThen the leases would lie nearer together.\n"),
        // Its guest has been told of two nodes.
        (
            &vms[3],
            "Nothing is to be gained: no moves are known that would bring a lease nearer\ntogether, or off CPUs that are not pinnable.\n",
        ),
    ] {
        run(&vms[0]);
        run(&vms[1]);
        run(spread);
        assert_eq!(machine.vcpus_of(spread), [3, 11, 7, 15]);
        end(&vms[0]);
        assert_eq!(machine.cli(&["repack", "--dry-run"]).printed(), said);
        end(&vms[1]);
        end(spread);
    }
}

/// A CPU of the machine goes offline; libvirt and the kernel are as they were.
fn without_cpu(machine: &Machine, cpu: u64) {
    machine.put("/sys/devices/system/cpu/online", &format!("0-{},{}-15\n", cpu - 1, cpu + 1));
    fs::remove_dir_all(machine.path(&format!("/sys/devices/system/cpu/cpu{cpu}/topology"))).unwrap();
}

#[test]
fn a_cpu_that_is_offline_is_named_everywhere() {
    let machine = Machine::new("2,10");
    let vm = Vm::new(1, 2);
    machine.prepare(&vm);
    machine.qemu(&vm, 700, &[2, 10], "0-1,3-9,11-15");
    machine.event(&vm, "started begin").silent();
    let _alive = machine.alive(&vm);
    assert!(machine.json(&["lease", "vm1"]).get("offline").is_none());
    without_cpu(&machine, 10);
    // What the hook of the restarted daemon, or reconcile, makes of the thread that has lost its CPU.
    machine.thread(700, 702, "CPU 1/KVM", "2");
    let said = machine.cli(&["reconcile"]).printed();
    assert!(said.contains("\"vm1\": CPUs 10 are offline and there is no other place"), "{said}");
    machine.event(&vm, "reconnect begin").silent();
    let list = machine.cli(&["list"]).printed();
    assert!(flat(&list).ends_with("2,10 (10 offline)"), "{list}");
    assert!(machine.cli(&["lease", "vm1"]).printed().contains("\nOffline:        10 (what ran there shares the rest;"));
    assert_eq!(machine.json(&["lease", "vm1"])["offline"], "10");
    assert_eq!(machine.json(&["list"])["leases"][0]["offline"], "10");
    let check = machine.cli(&["check"]).stdout;
    assert!(check.contains("the CPUs of \"vm1\" are online") && check.contains("CPUs 10 are offline;"), "{check}");
    // Taken out of the allowlist, it keeps what it has.
    machine.pinnable("3,11");
    let check = machine.cli(&["check"]).stdout;
    assert!(check.contains("the CPUs of \"vm1\" are pinnable"), "{check}");
    assert_eq!(machine.vcpus_of(&vm), [2, 10]);
}

#[test]
fn the_place_of_an_autostart_domain_is_no_substitute() {
    let machine = Machine::new("2-3,10-11");
    let vm = Vm::new(1, 2);
    machine.define(&Vm::new(2, 2), true);
    machine.prepare(&vm);
    assert_eq!(machine.vcpus_of(&vm), [3, 11]);
    machine.qemu(&vm, 700, &[3, 11], "0-1,4-9,12-15");
    machine.event(&vm, "started begin").silent();
    let _alive = machine.alive(&vm);
    without_cpu(&machine, 11);
    machine.thread(700, 702, "CPU 1/KVM", "3");
    let said = machine.cli(&["reconcile"]).printed();
    assert!(said.contains("there is no other place (cpu.placement."), "{said}");
    // Where it may be one it is tried, and undone: nobody moves the threads of this machine.
    machine.config("pinnable_cpus = \"2-3,10-11\"\nautostart_reserve = \"prefer\"\n");
    let said = machine.cli(&["reconcile"]).printed();
    assert!(said.contains("there is no other place (enforce.thread: "), "{said}");
    assert_eq!(machine.vcpus_of(&vm), [3, 11]);
    assert!(!machine.leases().unwrap().contains("moving"));
}

#[test]
fn reconcile_rebuilds_what_runs() {
    let machine = Machine::new("2-7,10-15");
    let (dedicated, by_hand, shared, lost) =
        (Vm::new(1, 2), Vm::new(2, 1).without_policy().pinned(&[6]), Vm::new(3, 1).without_policy(), Vm::new(4, 2));
    machine.qemu(&dedicated, 700, &[3, 11], "0-1,8-9");
    machine.qemu(&by_hand, 710, &[6], "0-15");
    machine.qemu(&shared, 720, &[0], "0-15");
    machine.qemu(&lost, 730, &[4, 12], "0-1,8-9");
    machine.thread(730, 732, "CPU 1/KVM", "0-15");
    machine.qemu(&Vm::new(5, 2), 740, &[5, 13], "0-1,8-9");
    let _alive = [&dedicated, &by_hand, &shared, &lost].map(|vm| machine.alive(vm));
    machine.put("/run/virt-pin/leases.json", "{\"version\":1,");
    let said = machine.cli(&["reconcile"]).printed();
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].contains("it is kept as ") && lines[0].ends_with("leases.json.corrupt-1000"), "{said}");
    assert_eq!(
        lines[1..],
        [
            "\"vm1\": lease on CPUs 3,11",
            "\"vm2\": lease on CPUs 6",
            "\"vm4\": no lease: vCPU 1 may run on CPUs 0-15, not on one of its own",
            "2 leases in all.",
        ]
    );
    assert_eq!(machine.vcpus_of(&dedicated), [3, 11]);
    assert_eq!(
        (machine.leased()[0]["state"].as_str(), &machine.leased()[0]["qemu"]),
        (Some("running"), &json!([700, 5000]))
    );
    let before = machine.leases();
    let again = machine.json(&["reconcile"]);
    // Those that have their lease keep it; only what is left is said again.
    let left = json!(["\"vm4\": no lease: vCPU 1 may run on CPUs 0-15, not on one of its own"]);
    assert_eq!((&again["leases"], &again["notes"]), (&json!(2), &left));
    assert_eq!(machine.leases(), before);
    // Who runs without a lease where others have one is found.
    let check = machine.json(&["check"]);
    let found =
        check["checks"].as_array().unwrap().iter().find(|found| found["check"] == "no other VM may run on leased CPUs");
    let message = found.unwrap()["message"].as_str().unwrap();
    assert!(message.contains("\"vm2\" may run on leased CPUs 3,11; \"vm3\" may run on leased CPUs 3,11"), "{message}");
}

/// Before a migration: what would another host give?
#[test]
fn explain_for_another_host_knows_its_leases_and_its_configuration() {
    let (here, there) = (Machine::new("2-3,10-11"), Machine::new("3-5,11-13"));
    let vm = Vm::new(1, 2);
    here.define(&vm, false);
    here.prepare(&vm);
    there.prepare(&Vm::new(2, 2));
    let file = here.path("there.txt");
    there.cli(&["gather", file.to_str().unwrap(), "--state"]).printed();
    let view = here.json(&["explain", "--for-host", file.to_str().unwrap(), "vm1"]);
    assert_eq!(view["plan"]["vcpus"], serde_json::json!([4, 12]), "{view}");
    assert!(view.get("held").is_none(), "{view}");
    // A description without them is a host where nothing may be handed out.
    let bare = here.path("bare.txt");
    there.cli(&["gather", bare.to_str().unwrap()]).printed();
    here.cli(&["explain", "--for-host", bare.to_str().unwrap(), "vm1"]).complaint(Code::Unsatisfiable);
}

/// A host that hands out nothing yet, by its own proposal.
#[test]
fn suggest_writes_what_nobody_has_set() {
    const CONFIG: &str = "/etc/virt-pin/virt-pin.toml";
    let machine = Machine::new("");
    machine.config("# Ours.\npinnable_cpus = \"\" # none\n");
    let said = machine.cli(&["suggest"]).printed();
    assert!(said.ends_with("\n`virt-pin suggest --write` writes that line there: none is set yet.\n"), "{said}");
    let proposed = machine.json(&["suggest"])["pinnable_cpus"].as_str().unwrap().to_owned();
    let said = machine.cli(&["suggest", "--write"]).printed();
    assert!(said.contains("\nWritten to /etc/virt-pin/virt-pin.toml."), "{said}");
    let written = format!("# Ours.\npinnable_cpus = \"{proposed}\" # none\n");
    assert_eq!(machine.read(CONFIG), written);
    assert_eq!(machine.json(&["capacity"])["pinnable"], proposed.as_str());
    // Once is enough.
    let again = machine.json(&["suggest", "--write"]);
    let why = format!("Nothing was written: pinnable_cpus is set already, to \"{proposed}\".");
    assert_eq!((&again["written"], again["message"].as_str()), (&json!(false), Some(why.as_str())));
    assert!(!machine.cli(&["suggest"]).printed().contains("--write"));
    assert_eq!(machine.read(CONFIG), written);
    let host = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hosts/xeon-2s-smt.host");
    machine.cli(&["--host", host, "suggest", "--write"]).complaint(Code::Usage);
}

/// A lock that is in demand is no reason for the agent to end: it would, at the start of a busy host, again and again.
#[test]
fn the_agent_starts_while_somebody_has_the_lock() {
    let machine = Machine::new("1");
    machine.prepare(&Vm::new(1, 1).with("cores='thread'"));
    let lock = machine.hold_lock();
    let run = machine.cli(&["agent", "--once"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    drop(lock);
    // One whose directory is not safe does end.
    fs::set_permissions(machine.path("/run/virt-pin"), PermissionsExt::from_mode(0o777)).unwrap();
    machine.cli(&["agent", "--once"]).refused(Code::StateUnsafe);
}
