//! A machine of any shape as files, in the form that a recent kernel on x86 has them, for programs run with
//! `VIRT_PIN_ROOT`. Nothing of the machine we run on gets into it but its processes, where asked for.
#![allow(dead_code, reason = "each benchmark uses its part")]

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use virt_pin::cpuset::{CpuId, CpuSet};
use virt_pin::host::{Cpu, Topology};

/// Makes a file with the directories above it.
pub(crate) fn put(root: &Path, path: &str, text: &str) {
    let file = root.join(path.trim_start_matches('/'));
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    File::create(file).unwrap().write_all(text.as_bytes()).unwrap();
}

/// A file or directory of this machine under the same path.
pub(crate) fn link(root: &Path, path: &str) {
    let link = root.join(path.trim_start_matches('/'));
    fs::create_dir_all(link.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink(path, link).unwrap();
}

/// The machine's CPUs and nodes. Every core has an L1 and an L2 of its own, every node 64 GiB and huge pages of both sizes.
pub(crate) fn put_sysfs(root: &Path, host: &Topology) {
    let line = |set: &CpuSet| format!("{set}\n");
    let cpus = "/sys/devices/system/cpu";
    for (file, set) in [
        ("online", host.online()),
        ("present", host.possible()),
        ("possible", host.possible()),
        ("isolated", &host.isolated()),
    ] {
        put(root, &format!("{cpus}/{file}"), &line(set));
    }
    let alike = |same: &dyn Fn(&Cpu) -> bool| host.cpus().iter().filter(|cpu| same(cpu)).map(|cpu| cpu.cpu).collect();
    for cpu in host.cpus() {
        let core: CpuSet = alike(&|other| other.core == cpu.core);
        let package: CpuSet = alike(&|other| other.package == cpu.package);
        let cache: CpuSet = alike(&|other| other.llc == cpu.llc);
        let dir = format!("{cpus}/cpu{}", cpu.cpu);
        let number = cpu.package.unwrap();
        for (file, text) in [
            ("core_cpus_list", line(&core)),
            ("cluster_cpus_list", line(&core)),
            ("die_cpus_list", line(&package)),
            ("package_cpus_list", line(&package)),
            ("core_id", format!("{}\n", cpu.core.unwrap().0)),
            ("cluster_id", format!("{}\n", cpu.core.unwrap().0)),
            ("die_id", "0\n".to_owned()),
            ("physical_package_id", format!("{number}\n")),
        ] {
            put(root, &format!("{dir}/topology/{file}"), &text);
        }
        for (index, level, kind, shared) in
            [(0, 1, "Data", &core), (1, 1, "Instruction", &core), (2, 2, "Unified", &core), (3, 3, "Unified", &cache)]
        {
            let dir = format!("{dir}/cache/index{index}");
            put(root, &format!("{dir}/level"), &format!("{level}\n"));
            put(root, &format!("{dir}/type"), &format!("{kind}\n"));
            put(root, &format!("{dir}/shared_cpu_list"), &line(shared));
        }
        // Recent kernels have it on x86, too.
        put(root, &format!("{dir}/cpu_capacity"), "1024\n");
    }
    let nodes: CpuSet = host.nodes().iter().map(|node| CpuId(node.node.0)).collect();
    put(root, "/sys/devices/system/node/online", &line(&nodes));
    for node in host.nodes() {
        let dir = format!("/sys/devices/system/node/node{}", node.node);
        put(root, &format!("{dir}/cpulist"), &line(&node.cpus));
        let distances = host.nodes().iter().map(|other| if other.node == node.node { "10" } else { "21" });
        put(root, &format!("{dir}/distance"), &(distances.collect::<Vec<_>>().join(" ") + "\n"));
        put(root, &format!("{dir}/meminfo"), &meminfo(node.node.0));
        for size in ["2048", "1048576"] {
            for file in ["nr_hugepages", "free_hugepages"] {
                put(root, &format!("{dir}/hugepages/hugepages-{size}kB/{file}"), "0\n");
            }
        }
    }
}

/// As long as the kernel's.
fn meminfo(node: u16) -> String {
    let keys = "MemTotal MemFree MemUsed SwapCached Active Inactive Active(anon) Inactive(anon) Active(file) Inactive(file) \
        Unevictable Mlocked Dirty Writeback FilePages Mapped AnonPages Shmem KernelStack PageTables SecPageTables NFS_Unstable \
        Bounce WritebackTmp KReclaimable Slab SReclaimable SUnreclaim AnonHugePages ShmemHugePages ShmemPmdMapped \
        FileHugePages FilePmdMapped Unaccepted HugePages_Total HugePages_Free HugePages_Surp";
    let value = |key: &str| match key {
        "MemTotal" => 67_108_864,
        "MemFree" => 60_000_000,
        _ => 0,
    };
    keys.split_ascii_whitespace()
        .map(|key| format!("Node {node} {:<16}{:>8} kB\n", format!("{key}:"), value(key)))
        .collect()
}
