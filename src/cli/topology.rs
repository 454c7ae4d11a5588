//! `virt-pin topology`: the machine as virt-pin sees it, for programs ([`json`]) and for people ([`table`]).
//!
//! Pure: a [`Topology`] in, text out. The JSON is a public contract: keys are added, never changed; CPUs and nodes come
//! in ascending order, a core and a last-level cache are named by their lowest online CPU, and what is unknown is
//! `null`.

use std::collections::BTreeSet;
use std::fmt::Display;

use serde::Serialize;

use super::Context;
use super::table::{columns, wrapped};
use crate::cpuset::CpuSet;
use crate::error::Result;
use crate::host::sysfs;
use crate::host::{CoreClass, Cpu, HugePages, Node, Topology};

pub(super) fn topology(context: &Context) -> Result<String> {
    let topology = sysfs::read(&context.root)?;
    Ok(if context.json { json(&topology) + "\n" } else { table(&topology) })
}

/// The JSON document.
#[derive(Serialize)]
struct View<'t> {
    cpus: Vec<CpuView>,
    nodes: Vec<NodeView>,
    losses: &'t [String],
}

#[derive(Serialize)]
struct CpuView {
    cpu: u16,
    core: Option<u16>,
    package: Option<u16>,
    die: Option<u16>,
    node: Option<u16>,
    llc: Option<u16>,
    online: bool,
    isolated: bool,
    class: Option<&'static str>,
}

#[derive(Serialize)]
struct NodeView {
    node: u16,
    cpus: String,
    memory_bytes: Option<u64>,
}

/// The topology as one line of JSON.
pub fn json(topology: &Topology) -> String {
    let view = View {
        cpus: topology.cpus().iter().map(cpu_view).collect(),
        nodes: topology.nodes().iter().map(node_view).collect(),
        losses: topology.losses(),
    };
    // Writing plain fields with string keys into memory cannot fail.
    serde_json::to_string(&view).unwrap_or_default()
}

fn cpu_view(cpu: &Cpu) -> CpuView {
    CpuView {
        cpu: cpu.cpu.0,
        core: cpu.core.map(|core| core.0),
        package: cpu.package,
        die: cpu.die,
        node: cpu.node.map(|node| node.0),
        llc: cpu.llc.map(|llc| llc.0),
        online: cpu.online,
        isolated: cpu.isolated,
        class: cpu.class.map(class_name),
    }
}

fn node_view(node: &Node) -> NodeView {
    NodeView { node: node.node.0, cpus: node.cpus.to_string(), memory_bytes: node.memory_bytes }
}

fn class_name(class: CoreClass) -> &'static str {
    match class {
        CoreClass::Performance => "performance",
        CoreClass::Efficiency => "efficiency",
    }
}

/// The topology as tables of at most 80 columns: one line per core, one per node, then what is apart or unknown.
pub fn table(topology: &Topology) -> String {
    let mut out = columns(
        &["Package", "Die", "Node", "LLC", "Core", "Class", "Threads"],
        topology.cpus().iter().filter_map(|cpu| core_row(topology, cpu)).collect(),
    );
    if !topology.nodes().is_empty() {
        out.push('\n');
        out += &columns(
            &["Node", "Memory", "Available", "Huge pages free", "CPUs"],
            topology.nodes().iter().map(node_row).collect(),
        );
    }
    let offline = topology.cpus().iter().filter(|cpu| !cpu.online).map(|cpu| cpu.cpu).collect();
    let notes = [("Offline: ", offline), ("Isolated: ", topology.isolated())];
    let mut gap = "\n";
    for (title, cpus) in notes.iter().filter(|(_, cpus)| !cpus.is_empty()) {
        out += gap;
        gap = "";
        out += &wrapped(&format!(" {title}"), &cpus.to_string());
    }
    if !topology.losses().is_empty() {
        out += "\n Not known:\n";
        topology.losses().iter().for_each(|loss| out += &wrapped(" - ", loss));
    }
    out
}

/// The line of a core at its lowest online thread, or of an online CPU whose core is unknown.
fn core_row(topology: &Topology, cpu: &Cpu) -> Option<Vec<String>> {
    if !cpu.online || cpu.core.is_some_and(|core| core.0 != cpu.cpu.0) {
        return None;
    }
    let lone = CpuSet::from_iter([cpu.cpu]);
    let threads = topology.siblings(cpu.cpu).unwrap_or(&lone);
    Some(vec![
        each(topology, threads, |cpu| cpu.package),
        each(topology, threads, |cpu| cpu.die),
        each(topology, threads, |cpu| cpu.node),
        each(topology, threads, |cpu| cpu.llc.map(|llc| llc.0)),
        known(cpu.core.map(|core| core.0)),
        each(topology, threads, |cpu| cpu.class.map(class_name)),
        threads.to_string(),
    ])
}

/// What the threads of a core have; more than one value where they differ (a POWER core may have two caches).
fn each<T: Display + Ord>(topology: &Topology, threads: &CpuSet, of: impl Fn(&Cpu) -> Option<T>) -> String {
    let values: BTreeSet<Option<T>> = threads.iter().filter_map(|cpu| topology.cpu(cpu)).map(of).collect();
    values.into_iter().map(known).collect::<Vec<_>>().join(",")
}

fn node_row(node: &Node) -> Vec<String> {
    let huge: Vec<_> = node.huge_pages.iter().filter(|pages| pages.total > 0).map(huge_pages).collect();
    vec![
        node.node.to_string(),
        known(node.memory_bytes.map(size)),
        known(node.available_bytes.map(size)),
        if huge.is_empty() { "-".to_owned() } else { huge.join(" ") },
        if node.cpus.is_empty() { "-".to_owned() } else { node.cpus.to_string() },
    ]
}

/// `3/8x1GiB`: three of eight pages of 1 GiB.
fn huge_pages(pages: &HugePages) -> String {
    let size = match pages.size_kib {
        kib if kib >= 1 << 20 && kib % (1 << 20) == 0 => format!("{}GiB", kib >> 20),
        kib if kib >= 1 << 10 && kib % (1 << 10) == 0 => format!("{}MiB", kib >> 10),
        kib => format!("{kib}KiB"),
    };
    format!("{}/{}x{size}", pages.free, pages.total)
}

/// A size in GiB or MiB with one digit after the point, rounded down.
fn size(bytes: u64) -> String {
    let (unit, name) = if bytes >= 1 << 30 { (1u64 << 30, "GiB") } else { (1 << 20, "MiB") };
    let tenths = u128::from(bytes) * 10 / u128::from(unit);
    format!("{}.{} {name}", tenths / 10, tenths % 10)
}

fn known(value: Option<impl Display>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpuset::{CpuId, NodeId};
    use crate::host::{CoreId, LlcId};

    fn cpu(number: u16, core: u16) -> Cpu {
        Cpu {
            cpu: CpuId(number),
            online: true,
            isolated: false,
            core: Some(CoreId(core)),
            package: Some(0),
            die: None,
            cluster: None,
            node: Some(NodeId(0)),
            llc: Some(LlcId(0)),
            class: Some(CoreClass::Performance),
        }
    }

    fn machine() -> Topology {
        let off = Cpu { online: false, core: None, package: None, node: None, llc: None, class: None, ..cpu(3, 0) };
        let lone = Cpu { core: None, isolated: true, class: Some(CoreClass::Efficiency), llc: None, ..cpu(2, 0) };
        let node = Node {
            node: NodeId(0),
            cpus: CpuSet::parse_kernel_list("0-2").unwrap(),
            memory_bytes: Some(8 << 30),
            available_bytes: Some(300 << 20),
            huge_pages: vec![HugePages { size_kib: 1 << 20, total: 4, free: 1 }],
            distances: Vec::new(),
        };
        let losses = vec!["CPU 2: the kernel does not say which threads share a core".to_owned()];
        Topology::new(vec![cpu(0, 0), cpu(1, 0), lone, off], vec![node], CpuSet::new(), losses)
    }

    #[test]
    fn json_is_the_contract() {
        assert_eq!(
            json(&machine()),
            concat!(
                r#"{"cpus":[{"cpu":0,"core":0,"package":0,"die":null,"node":0,"llc":0,"online":true,"#,
                r#""isolated":false,"class":"performance"},{"cpu":1,"core":0,"package":0,"die":null,"node":0,"#,
                r#""llc":0,"online":true,"isolated":false,"class":"performance"},{"cpu":2,"core":null,"#,
                r#""package":0,"die":null,"node":0,"llc":null,"online":true,"isolated":true,"#,
                r#""class":"efficiency"},{"cpu":3,"core":null,"package":null,"die":null,"node":null,"#,
                r#""llc":null,"online":false,"isolated":false,"class":null}],"nodes":[{"node":0,"#,
                r#""cpus":"0-2","memory_bytes":8589934592}],"#,
                r#""losses":["CPU 2: the kernel does not say which threads share a core"]}"#
            )
        );
    }

    #[test]
    fn the_table_fits_and_says_it_all() {
        let expected = "\
\x20Package   Die   Node   LLC   Core   Class         Threads
-----------------------------------------------------------
 0         -     0      0     0      performance   0-1
 0         -     0      -     -      efficiency    2

 Node   Memory    Available   Huge pages free   CPUs
-----------------------------------------------------
 0      8.0 GiB   300.0 MiB   1/4x1GiB          0-2

 Offline: 3
 Isolated: 2

 Not known:
 - CPU 2: the kernel does not say which threads share a core
";
        assert_eq!(table(&machine()), expected);
    }
}
