//! docs/json.md against what the commands print: every field that is printed is documented with its type, every documented one is
//! printed, and those that are not said to be optional always are.
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

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use machine::{Machine, Vm};
use serde_json::{Value, json};
use virt_pin::cpuset::CpuSet;

/// A field as it is documented: the words for its values, and whether it may be absent.
struct Field {
    values: Vec<String>,
    optional: bool,
}

/// The document: for each of its sections the fields by their paths.
struct Document {
    sections: BTreeMap<String, BTreeMap<String, Field>>,
    /// The fields that were met.
    seen: RefCell<BTreeSet<(String, String)>>,
}

impl Document {
    fn read() -> Document {
        let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/json.md")).unwrap();
        let mut sections = BTreeMap::new();
        for section in text.split("\n## ").skip(1) {
            let (name, body) = section.split_once('\n').unwrap();
            let mut fields = BTreeMap::new();
            for row in body.lines().filter(|line| line.starts_with("| `")) {
                let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
                let [path, values, _] = cells[..] else { panic!("{row}") };
                let (values, optional) = match values.strip_suffix(", optional") {
                    Some(values) => (values, true),
                    None => (values, false),
                };
                let values = values.split(" or ").map(str::to_owned).collect();
                fields.insert(path.trim_matches('`').to_owned(), Field { values, optional });
            }
            assert!(!fields.is_empty(), "{name}");
            sections.insert(name.to_owned(), fields);
        }
        Document { sections, seen: RefCell::default() }
    }

    /// Compares an object with a section.
    #[track_caller]
    fn describes(&self, section: &str, value: &Value) {
        self.object(section, "", value);
    }

    fn object(&self, section: &str, at: &str, value: &Value) {
        let fields = &self.sections[section];
        let below = |path: &str, name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        let any = below(at, "*");
        let object = value.as_object().unwrap_or_else(|| panic!("{section}: {at} is no object: {value}"));
        for (name, value) in object {
            let own = below(at, name);
            let path = if fields.contains_key(&any) { &any } else { &own };
            let field = fields.get(path).unwrap_or_else(|| panic!("{section}: {own} is not documented: {value}"));
            self.seen.borrow_mut().insert((section.to_owned(), path.clone()));
            self.value(section, path, field, value);
        }
        for (path, field) in fields {
            let child =
                path.strip_prefix(at).map(|rest| rest.trim_start_matches('.')).filter(|rest| below(at, rest) == *path);
            let child = child.filter(|name| !name.is_empty() && !name.contains(['.', '[', '*']));
            let missing = child.filter(|name| !field.optional && !object.contains_key(*name));
            assert!(missing.is_none(), "{section}: {path} is missing, and not said to be optional: {value}");
        }
    }

    fn value(&self, section: &str, path: &str, field: &Field, value: &Value) {
        let fits = field.values.iter().any(|word| match word.as_str() {
            "string" => value.is_string(),
            "CPUs" => value.as_str().is_some_and(|list| CpuSet::parse_kernel_list(list).is_ok()),
            "number" => value.is_u64(),
            "boolean" => value.is_boolean(),
            "list" => value.is_array(),
            "object" | "error" => value.is_object(),
            "null" => value.is_null(),
            word => panic!("{section}: {path}: what is a {word}?"),
        });
        assert!(fits, "{section}: {path} is {value}, not {:?}", field.values);
        let elements = format!("{path}[]");
        let of_objects = self.sections[section].keys().any(|known| known.starts_with(&elements));
        match value {
            Value::Object(_) if field.values.iter().any(|word| word == "error") => self.describes("Errors", value),
            // Its numbers are those of simulate.md.
            Value::Object(_) if (section, path) == ("Errors", "room") => {}
            Value::Object(_) => self.object(section, path, value),
            Value::Array(all) if of_objects => all.iter().for_each(|one| self.object(section, &elements, one)),
            Value::Array(all) if section == "list" => all.iter().for_each(|one| self.describes("lease", one)),
            Value::Array(all) => {
                assert!(all.iter().all(|one| !one.is_object()), "{section}: {path} has objects: {value}")
            }
            _ => {}
        }
    }
}

/// A document of this command's output.
#[track_caller]
fn compare(document: &Document, machine: &Machine, words: &str) -> Value {
    let value = machine.json(&words.split(' ').collect::<Vec<_>>());
    let verb = words.split(' ').find(|word| document.sections.contains_key(*word));
    document.describes(verb.unwrap_or_else(|| panic!("{words} is not documented")), &value);
    value
}

/// A VM that runs.
fn run(machine: &Machine, vm: &Vm, emulator: &str) {
    machine.define(vm, false);
    machine.prepare(vm);
    machine.qemu(vm, 100 * vm.id.unwrap(), &machine.vcpus_of(vm), emulator);
    machine.event(vm, "started begin").silent();
}

/// Every kind of lease: one with all that a policy can add, in the middle of a move, one of its CPUs offline; a static and a
/// degraded one.
fn leases() -> Machine {
    let machine = Machine::new("2-7,10-15");
    let vm = Vm::new(1, 3).with("dedicated-vcpus='0-1' tenant='acme' irqs='away'");
    machine.prepare(&vm);
    machine.event(&Vm::new(2, 1).without_policy().pinned(&[7]), "prepare begin").silent();
    machine.prepare(&Vm::new(3, 12).with("fallback='shared'").named("big"));
    machine.define(&Vm::new(3, 12).with("fallback='shared'").named("big"), false);
    machine.define(&Vm::new(4, 12).with("fallback='shared'").named("next"), false);
    machine.define(&Vm { policy: None, ..Vm::new(5, 1) }, false);
    machine.define(&Vm::new(6, 12).named("huge"), false);
    machine.define(&vm, false);
    // What only comes with a host that can, or in the middle of something.
    let mut file: Value = serde_json::from_str(&machine.leases().unwrap()).unwrap();
    let lease = &mut file["leases"][0];
    lease["state"] = "running".into();
    lease["qemu"] = json!([100, 5000]);
    lease["request"]["policy"].as_array_mut().unwrap().push(json!(["isolation", "slices"]));
    let plan = ["vcpus", "shared", "whole", "emulator", "iothreads", "nodes", "memory_nodes", "guest"];
    let mut to: serde_json::Map<String, Value> =
        plan.iter().filter_map(|name| Some(((*name).to_owned(), lease.get(*name)?.clone()))).collect();
    to.insert("vcpus".to_owned(), json!([3, 11, null]));
    lease["moving"] = json!({ "by": [4713, 99], "to": to });
    machine.qemu(&vm, 100, &[2, 10, 0], "0-1,8-9");
    machine.put("/run/virt-pin/leases.json", &format!("{file}\n"));
    machine.put("/sys/devices/system/cpu/online", "0-9,11-15\n");
    machine
}

#[test]
fn every_field_is_documented_and_every_documented_field_is_there() {
    let document = Document::read();
    let machine = leases();
    let list = compare(&document, &machine, "list");
    for lease in list["leases"].as_array().unwrap() {
        compare(&document, &machine, &format!("lease {}", lease["name"].as_str().unwrap()));
    }
    for words in [
        "capacity",
        "capacity --for 2x2",
        "map",
        "topology",
        "suggest",
        "suggest --write",
        "check",
        "reconcile",
        "explain vm1",
        "explain big",
        "explain next",
        "explain vm5",
        "explain huge",
        "help cpu.placement.shortage",
        "help codes",
    ] {
        // Of anything but a code, help is a message.
        if words == "help codes" {
            document.describes("install", &machine.json(&["help", "codes"]));
            continue;
        }
        compare(&document, &machine, words);
    }
    for host in fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hosts")).unwrap() {
        let path = host.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "host") {
            let path = path.to_str().unwrap();
            for verb in ["topology", "suggest", "capacity", "map", "check"] {
                compare(&document, &machine, &format!("--host {path} {verb}"));
            }
        }
    }
    document.describes("install", &machine.json(&["install"]));
    document.describes("Errors", &machine.json(&["lease", "nobody"])["error"]);

    // A VM that is spread wider than it had to be, and one that another could make room for.
    let machine = Machine::new("2-3,6-7,10-11,14-15");
    let emulator = "0-1,4-5,8-9,12-13";
    let near = |number, vcpus| Vm::new(number, vcpus).with("numa='single' memory='any'");
    let irqs = Vm::new(2, 2).with("numa='single' memory='any' irqs='away'");
    run(&machine, &near(1, 2), emulator);
    run(&machine, &irqs, emulator);
    run(&machine, &near(3, 2), emulator);
    for file in ["smp_affinity_list", "effective_affinity_list", "eth0/name"] {
        machine.put(&format!("/proc/irq/4/{file}"), "0-15\n");
    }
    compare(&document, &machine, "explain vm2");
    machine.gone(200);
    machine.event(&irqs, "release end").silent();
    machine.define(&near(4, 4), false);
    machine.define(&Vm::new(5, 4).with("memory='any'"), false);
    compare(&document, &machine, "explain vm4");
    compare(&document, &machine, "explain vm5");
    compare(&document, &machine, "repack --dry-run --for vm4");
    // Nobody moves the threads of this machine.
    compare(&document, &machine, "repack --for vm4");

    // One beside which fewer fit than could.
    let machine = Machine::new("1-7,9-15");
    machine.prepare(&Vm::new(1, 2).with("nodes='1'"));
    machine.define(&near(2, 4), false);
    compare(&document, &machine, "explain vm2");

    let seen = document.seen.borrow();
    let all = document.sections.iter().flat_map(|(name, fields)| fields.keys().map(move |path| (name, path)));
    let unseen: Vec<_> = all.filter(|(name, path)| !seen.contains(&((*name).clone(), (*path).clone()))).collect();
    assert!(unseen.is_empty(), "documented, and nowhere printed: {unseen:?}");
}
