//! Topology discovery against snapshots of real machines and what hwloc reads from them.
//!
//! The snapshots lie outside of the repository, in `../shared/topologies`: `NAME.tar.bz2` (the machine's /proc and
//! /sys) and `NAME.expected.tsv`. Where they are absent, or `tar` or `bzip2` is, these tests say so and pass.
//! [`DIFFERENCES`] is every place where we mean to answer something else than hwloc, and why.
#![allow(clippy::tests_outside_test_module, reason = "this file is nothing but tests")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a test fails by panicking"
)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use virt_pin::cpuset::{CpuId, CpuSet};
use virt_pin::host::root::Root;
use virt_pin::host::{Cpu, Topology, description, sysfs};

/// What is compared; the order is that of the columns and lines of an expectation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Aspect {
    /// Which CPUs are listed at all.
    Cpus,
    Core,
    Package,
    Llc,
    /// Which nodes there are.
    Nodes,
    NodeCpus,
    NodeMemory,
}

/// (machine, what differs, why we differ).
const DIFFERENCES: &[(&str, Aspect, &str)] = &[
    (
        "256ppc-8n8s4t",
        Aspect::Package,
        "physical_package_id is -1 and core_siblings names one core: hwloc calls each core a package, to us it is unknown",
    ),
    ("2arm-2c", Aspect::Nodes, NO_NUMA),
    ("2i386-2c-nohugepage", Aspect::Nodes, NO_NUMA),
    ("2i386-2t-hugepagesizecount", Aspect::Nodes, NO_NUMA),
    (
        "64amd64-4s2n4ca2co",
        Aspect::Core,
        "two Bulldozer cores share a module (front end, FPU, L2): the kernel calls them threads of one core, which is what \
         matters to VMs that must not share one; hwloc separates them by core_id",
    ),
    (
        "8em64t-2s2ca2c-buggynuma",
        Aspect::Nodes,
        "eight nodes each claim every CPU: hwloc keeps one of them, we keep their memory and call the CPUs' node unknown",
    ),
    ("8em64t-2s2ca2c-buggynuma", Aspect::NodeCpus, "no CPU belongs to a node when each belongs to eight"),
    (
        "8ia64-2n2s2c",
        Aspect::Llc,
        "each CPU's shared_cpu_map is empty, so not even itself shares its cache: hwloc takes that for a private cache",
    ),
    ("fakeheteromemtiers", Aspect::NodeCpus, MEMORY_ONLY),
    ("fakememinitiators-1np2c+1npp+gi", Aspect::NodeCpus, MEMORY_ONLY),
];
const NO_NUMA: &str = "a kernel without NUMA has no nodes; hwloc makes one up";
const MEMORY_ONLY: &str =
    "hwloc gives memory-only nodes the CPUs nearest to them; to us they have none, as the kernel says";

#[test]
fn real_machines_are_read_as_hwloc_reads_them() {
    let mut machines = 0;
    let mut problems = Vec::new();
    for_each_machine(|name, root, expected| {
        machines += 1;
        let topology = sysfs::read(&root).unwrap();
        let found = differences(&topology, expected);
        let meant: Vec<Aspect> = DIFFERENCES.iter().filter(|row| row.0 == name).map(|row| row.1).collect();
        for (aspect, text) in found.iter().filter(|(aspect, _)| !meant.contains(aspect)) {
            problems.push(format!("{name}: {aspect:?}: {text}"));
        }
        for aspect in meant.iter().filter(|&meant| !found.iter().any(|(aspect, _)| aspect == meant)) {
            problems.push(format!("{name}: {aspect:?}: does not differ any more"));
        }

        let text = description::gather(&root).unwrap();
        let described = description::parse(&text).unwrap();
        assert_eq!(sysfs::read(&described).unwrap(), topology, "{name}: its description");
        assert_eq!(description::gather(&described).unwrap(), text, "{name}: the description of its description");
    });
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    eprintln!("{machines} machines compared");
}

fn for_each_machine(mut check: impl FnMut(&str, Root, &str)) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/topologies");
    let Ok(entries) = fs::read_dir(&dir) else {
        eprintln!("skipped: {} is not there", dir.display());
        return;
    };
    if Command::new("bzip2").arg("--version").output().is_err() {
        eprintln!("skipped: bzip2 is not installed");
        return;
    }
    let mut archives: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    archives.sort();
    for archive in archives {
        let Some(name) = archive.file_name().unwrap().to_str().unwrap().strip_suffix(".tar.bz2") else { continue };
        let temp = tempfile::tempdir().unwrap();
        // Of an archive's files we read a small part, and creating files is what takes the time.
        let rest = ["memory[0-9]*", "cpufreq", "cpuidle", "power", "hotplug", "uevent", "size", "id", "attributes"];
        let rest_of_cache = ["*_sets", "ways_*", "coherency_*", "physical_line_*", "*_policy", "core_id", "numastat"];
        let mut tar = Command::new("tar");
        tar.arg("xjf").arg(&archive).arg("-C").arg(temp.path()).arg("--wildcards");
        tar.args(rest.iter().chain(&rest_of_cache).map(|name| format!("--exclude=*/{name}")));
        // It fails for patterns that match nothing.
        let _ = tar.args(["*/sys/devices/system/*", "*/sys/devices/cpu_*", "*/proc/meminfo"]).output().unwrap();
        let machine = fs::read_dir(temp.path()).unwrap().next().expect(name).unwrap().path();
        let expected = fs::read_to_string(dir.join(format!("{name}.expected.tsv"))).unwrap();
        check(name, Root::directory(machine), &expected);
    }
}

fn differences(topology: &Topology, expected: &str) -> Vec<(Aspect, String)> {
    let mut found = Vec::new();
    let mut differ = |aspect, what: &str, expected: &str, got: &str| {
        if expected != got {
            found.push((aspect, format!("{what}: expected \"{expected}\", got \"{got}\"")));
        }
    };
    let mut listed = CpuSet::new();
    let mut nodes = Vec::new();
    for line in expected.lines().filter(|line| !line.starts_with('#')) {
        let fields: Vec<&str> = line.split('\t').collect();
        if let Some(node) = fields[0].strip_prefix("node") {
            nodes.push(node.to_owned());
            let Some(node) = topology.nodes().iter().find(|other| other.node.0.to_string() == node) else { continue };
            let cpus = if node.cpus.is_empty() { "-".to_owned() } else { node.cpus.to_string() };
            differ(Aspect::NodeCpus, fields[0], or_dash(fields[1]), &cpus);
            differ(Aspect::NodeMemory, fields[0], or_dash(fields[2]), &known(node.memory_bytes));
            continue;
        }
        let number = CpuId(fields[0].parse().unwrap());
        listed.insert(number);
        let Some(cpu) = topology.cpu(number) else { continue };
        differ(Aspect::Core, line, or_dash(fields[1]), &group(topology, cpu, |cpu| cpu.core));
        differ(Aspect::Package, line, or_dash(fields[2]), &group(topology, cpu, |cpu| cpu.package));
        let llc = fields[3].split_once(':').map_or(fields[3], |(_, cpus)| cpus);
        differ(Aspect::Llc, line, or_dash(llc), &group(topology, cpu, |cpu| cpu.llc));
    }
    differ(Aspect::Cpus, "online", &listed.to_string(), &topology.online().to_string());
    let got: Vec<_> = topology.nodes().iter().map(|node| node.node.to_string()).collect();
    differ(Aspect::Nodes, "nodes", &nodes.join(" "), &got.join(" "));
    found
}

/// The online CPUs that have the same value as this one.
fn group<T: PartialEq>(topology: &Topology, cpu: &Cpu, of: impl Fn(&Cpu) -> Option<T>) -> String {
    let Some(value) = of(cpu) else { return "-".to_owned() };
    let same = topology.cpus().iter().filter(|other| other.online && of(other).as_ref() == Some(&value));
    same.map(|cpu| cpu.cpu).collect::<CpuSet>().to_string()
}

fn or_dash(field: &str) -> &str {
    if matches!(field, "" | "?") { "-" } else { field }
}

fn known(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "-".to_owned(), |bytes| bytes.to_string())
}

#[test]
fn every_difference_is_explained_once() {
    let mut seen = BTreeMap::new();
    for (name, aspect, why) in DIFFERENCES {
        assert!(why.len() > 20, "{name} {aspect:?}");
        assert_eq!(seen.insert((name, format!("{aspect:?}")), why), None);
    }
}
