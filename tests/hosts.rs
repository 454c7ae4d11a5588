//! Machines as text (`tests/hosts/NAME.host`) and the tables that are made of them (`NAME.table`).
//!
//! `UPDATE=1 cargo test --test hosts` rewrites the tables; read the difference before committing it. Each `.host` says
//! in its first lines what is special about the machine. Beside them: a machine too large to store, and machines whose
//! files hold garbage.
#![allow(clippy::tests_outside_test_module, reason = "this file is nothing but tests")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "a test fails by panicking, and rewrites its own expectations"
)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use virt_pin::cli::topology::{json, table};
use virt_pin::cpuset::{CpuId, CpuSet, NodeId};
use virt_pin::error::Code;
use virt_pin::host::root::Root;
use virt_pin::host::{CoreId, LlcId, Topology, description, sysfs};

fn hosts() -> Vec<(String, String)> {
    let mut paths: Vec<PathBuf> = fs::read_dir(dir()).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "host"));
    paths.sort();
    let name = |path: &PathBuf| path.file_stem().unwrap().to_str().unwrap().to_owned();
    paths.iter().map(|path| (name(path), fs::read_to_string(path).unwrap())).collect()
}

fn dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/hosts")
}

fn topology(description: &str) -> Topology {
    sysfs::read(&description::parse(description).unwrap()).unwrap()
}

#[test]
fn only_arm_keeps_a_vm_in_one_class() {
    let kinds = hosts().into_iter().map(|(name, text)| {
        let topology = topology(&text);
        (name, topology.is_hybrid(), topology.keeps_vms_in_one_class())
    });
    let hybrid: Vec<_> = kinds.filter(|(_, hybrid, bound)| *hybrid || *bound).collect();
    let expected = [("arm-big-little", true, true), ("desktop-hybrid", true, false), ("hybrid-lowpower", true, false)];
    assert_eq!(hybrid, expected.map(|(name, hybrid, bound)| (name.to_owned(), hybrid, bound)));
}

#[test]
fn each_host_gives_its_table() {
    let update = std::env::var_os("UPDATE").is_some();
    for (name, text) in hosts() {
        let found = table(&topology(&text));
        assert!(found.lines().all(|line| line.len() <= 80 && !line.ends_with(' ')), "{name}:\n{found}");
        let path = dir().join(format!("{name}.table"));
        if update {
            fs::write(&path, &found).unwrap();
        }
        let expected = fs::read_to_string(&path).unwrap_or_default();
        assert!(found == expected, "{name}: expected\n{expected}\nfound\n{found}");
    }
}

#[test]
fn each_host_is_what_its_description_says() {
    for (name, text) in hosts() {
        let root = description::parse(&text).unwrap();
        check(&root).unwrap();
        let document: serde_json::Value = serde_json::from_str(&json(&sysfs::read(&root).unwrap())).unwrap();
        assert!(document["cpus"].is_array() && document["nodes"].is_array(), "{name}");
    }
}

#[test]
fn a_described_host_and_the_same_files_on_disk_are_the_same() {
    for (name, text) in hosts() {
        let temp = tempfile::tempdir().unwrap();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (path, value) = line.split_once('\t').unwrap();
            let file = temp.path().join(path.trim_start_matches('/'));
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, value.replace("\\n", "\n") + "\n").unwrap();
        }
        let root = Root::directory(temp.path());
        assert_eq!(sysfs::read(&root).unwrap(), topology(&text), "{name}");
        assert_eq!(
            description::gather(&root).unwrap(),
            description::gather(&description::parse(&text).unwrap()).unwrap(),
            "{name}"
        );
        check(&root).unwrap();
    }
}

#[test]
fn what_the_tables_do_not_show() {
    let host = |name: &str| topology(&fs::read_to_string(dir().join(name)).unwrap());
    let xeon = host("xeon-2s-smt.host");
    let node = xeon.node(NodeId(0)).unwrap();
    // Free, active and inactive file pages, reclaimable slabs.
    assert_eq!(node.available_bytes, Some((48 + 2 + 4) * (1 << 30) + (1 << 29)));
    assert_eq!(node.distances, [(NodeId(0), 10), (NodeId(1), 21)]);
    let memory_only = host("memory-only-node.host");
    let distances = [(NodeId(0), 80), (NodeId(2), 120), (NodeId(250), 10)];
    assert_eq!(memory_only.node(NodeId(250)).unwrap().distances, distances);
    let hybrid = host("hybrid-lowpower.host");
    let clusters: Vec<_> = hybrid.cpus().iter().map(|cpu| cpu.cluster).collect();
    assert_eq!(clusters[..4], [None; 4]);
    assert_eq!(clusters[4..], [Some(16), Some(16), Some(16), Some(16), Some(64), Some(64)]);
    assert_eq!(host("vm-no-caches.host").possible().to_string(), "0-15");
}

#[test]
fn the_size_of_default_huge_pages() {
    let size = |text: &str| sysfs::default_hugepage_kib(&description::parse(text).unwrap()).unwrap();
    assert_eq!(size("/proc/meminfo\tMemTotal:  1 kB\\nHugepagesize:       2048 kB"), Some(2048));
    assert_eq!(size("/proc/meminfo\tMemTotal:  1 kB"), None);
    assert_eq!(size(""), None);
}

/// Two packages of 128 cores of two threads, a cache per eight cores, siblings 256 apart.
#[test]
fn five_hundred_and_twelve_cpus() {
    let mut text = String::from("/sys/devices/system/cpu/online\t0-511\n/sys/devices/system/cpu/present\t0-511\n");
    for cpu in 0..512 {
        let core = cpu % 256;
        let (package, cache) = (core / 128 * 128, core / 8 * 8);
        let dir = format!("/sys/devices/system/cpu/cpu{cpu}");
        let both =
            |first: i32, count: i32| format!("{first}-{},{}-{}", first + count - 1, first + 256, first + 255 + count);
        writeln!(text, "{dir}/topology/core_cpus_list\t{core},{}", core + 256).unwrap();
        writeln!(text, "{dir}/topology/package_cpus_list\t{}", both(package, 128)).unwrap();
        writeln!(text, "{dir}/topology/physical_package_id\t{}", package / 128).unwrap();
        writeln!(text, "{dir}/cache/index3/level\t3\n{dir}/cache/index3/type\tUnified").unwrap();
        writeln!(text, "{dir}/cache/index3/shared_cpu_list\t{}", both(cache, 8)).unwrap();
    }
    for node in 0..2 {
        let first = node * 128;
        writeln!(
            text,
            "/sys/devices/system/node/node{node}/cpulist\t{first}-{},{}-{}",
            first + 127,
            first + 256,
            first + 383
        )
        .unwrap();
    }
    let topology = topology(&text);
    assert_eq!(topology.losses(), [""; 0]);
    assert_eq!(topology.cores().len(), 256);
    let last = topology.cpu(CpuId(511)).unwrap();
    assert_eq!(
        (last.core, last.llc, last.package, last.node),
        (Some(CoreId(255)), Some(LlcId(248)), Some(1), Some(NodeId(1)))
    );
    let table = table(&topology);
    assert_eq!(table.lines().count(), 2 + 256 + 1 + 2 + 2);
    assert!(table.lines().all(|line| line.len() <= 80), "{table}");
    check(&description::parse(&text).unwrap()).unwrap();
}

#[test]
fn without_the_online_cpus_there_is_no_topology() {
    for (text, reason) in [
        ("", "/sys/devices/system/cpu/online: no CPU is online"),
        ("/sys/devices/system/cpu/online\t\n", "/sys/devices/system/cpu/online: no CPU is online"),
        ("/sys/devices/system/cpu/online\tall\n", "/sys/devices/system/cpu/online: expected a CPU number"),
        ("/sys/devices/system/cpu/online\t0-8192\n", "/sys/devices/system/cpu/online: number too large"),
        ("/sys/devices/system/cpu/cpu8192/online\t1\n", "/sys/devices/system/cpu/cpu8192: CPU numbers above 8191"),
        ("/sys/devices/system/cpu/cpu99999999999/online\t1\n", "/sys/devices/system/cpu/cpu99999999999: CPU numbers"),
        ("/sys/devices/system/cpu/cpu0/online\t0\n", "/sys/devices/system/cpu/online: no CPU is online"),
    ] {
        let error = sysfs::read(&description::parse(text).unwrap()).unwrap_err();
        assert_eq!(error.code, Code::TopologyUnreadable);
        assert!(error.message.contains(reason), "{}", error.message);
    }
    let online = topology("/sys/devices/system/cpu/online\t0,8191\n");
    assert_eq!((online.online().to_string().as_str(), online.cores().len()), ("0,8191", 0));
    assert_eq!(online.losses().len(), 3);
}

/// Groups are disjoint and named by their lowest CPU, and a description of the machine has the machine's topology.
fn check(root: &Root) -> Result<(), TestCaseError> {
    let found = sysfs::read(root);
    if let Ok(text) = description::gather(root) {
        let described = description::parse(&text).map_err(|error| TestCaseError::fail(error.to_string()))?;
        match (&found, sysfs::read(&described)) {
            (Ok(found), Ok(again)) => prop_assert_eq!(found, &again),
            (found, again) => prop_assert!(found.is_err() && again.is_err()),
        }
        prop_assert_eq!(description::gather(&described).ok(), Some(text));
    }
    let Ok(found) = found else { return Ok(()) };
    let mut groups: BTreeMap<(&str, u16), CpuSet> = BTreeMap::new();
    for cpu in found.cpus() {
        let relations = [("core", cpu.core.map(|core| core.0)), ("llc", cpu.llc.map(|llc| llc.0))];
        for (relation, group) in relations {
            let Some(group) = group else { continue };
            prop_assert!(cpu.online);
            groups.entry((relation, group)).or_default().insert(cpu.cpu);
        }
        if let Some(node) = cpu.node {
            prop_assert!(found.node(node).unwrap().cpus.contains(cpu.cpu));
        }
    }
    for ((_, lowest), cpus) in groups {
        prop_assert_eq!(cpus.first(), Some(CpuId(lowest)));
    }
    let in_nodes: usize = found.nodes().iter().map(|node| node.cpus.len()).sum();
    prop_assert_eq!(in_nodes, found.cpus().iter().filter(|cpu| cpu.node.is_some()).count());
    let (_, _) = (table(&found), json(&found));
    Ok(())
}

/// What may stand in a file: a list, a mask, a number, anything.
fn garbage() -> impl Strategy<Value = String> {
    prop_oneof![
        "[0-9]{1,2}(-[0-9]{1,2})?(,[0-9])?",
        "[0-9a-f]{1,8}(,[0-9a-f]{8})?",
        "-?[0-9]{1,20}",
        "\\PC{0,8}",
        "\\n{0,3}"
    ]
}

proptest! {
    #[test]
    fn garbage_is_survived(host in 0..64usize, changes in vec((any::<u16>(), option::of(garbage())), 1..12)) {
        let hosts = hosts();
        let (_, text) = &hosts[host % hosts.len()];
        let mut lines: Vec<(&str, String)> = text
            .lines()
            .filter(|line| !line.starts_with('#'))
            .map(|line| line.split_once('\t').map(|(path, value)| (path, value.to_owned())).unwrap())
            .collect();
        for (at, change) in changes {
            let at = usize::from(at) % lines.len();
            match change {
                Some(value) => lines[at].1 = value,
                None => drop(lines.remove(at)),
            }
        }
        check(&Root::described(lines.into_iter().map(|(path, value)| (path.to_owned(), value)).collect()))?;
    }

    #[test]
    fn any_text_is_a_description_or_refused(text in "(/[a-z./]{0,6}\t?[\\\\nt0-9]{0,4}\n?){0,4}|\\PC{0,40}") {
        if let Ok(root) = description::parse(&text) {
            check(&root)?;
        }
    }
}
