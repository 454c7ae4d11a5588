//! On which hosts? One of each kind that places differently: sockets, sub-NUMA nodes, many caches, SMT 1 to 8, cores of two
//! classes, uneven nodes, allowlists with holes. Nothing here is measured; shapes are those of machines that are sold.

use std::collections::BTreeMap;

use virt_pin::cpuset::{CpuId, CpuSet, NodeId};
use virt_pin::host::root::Root;
use virt_pin::host::{CoreClass, CoreId, Cpu, LlcId, Node, Topology, description, shape, sysfs};

use crate::machine::Machine;

/// Every host of the comparison.
pub(crate) fn all() -> Vec<Machine> {
    let shaped = |name, text: &str, reserved: &str| {
        let topology = shape::parse(text).unwrap();
        let pinnable = topology.online().difference(&list(reserved));
        Machine::new(name, topology, pinnable)
    };
    // The host keeps a core, where there is more than a handful.
    vec![
        shaped("desktop, 4 cores", "1s4c2t", ""),
        shaped("AMD desktop, 2 CCDs", "1s16c2t,llc=2", "0,16"),
        Machine::new("hybrid, 8P+16E", hybrid(), list("2-31")),
        described("hybrid laptop", include_str!("../../tests/hosts/hybrid-lowpower.host")),
        shaped("Xeon, 2 sockets", "2s16c2t", "0,32"),
        Machine::new("Xeon, 2 sockets, alternating", alternating(), list("2-31,34-63")),
        shaped("Xeon, SNC-2", "2s16c2t,numa=4,llc=2", "0,32"),
        shaped("Xeon, SMT off", "2s24c1t", "0,24"),
        shaped("Xeon, 4 sockets", "4s12c2t", "0,48"),
        shaped("EPYC, 8 LLCs", "1s64c2t,llc=8", "0,64"),
        shaped("EPYC, 2 sockets, 16 LLCs", "2s64c2t,numa=2,llc=16", "0,128"),
        shaped("EPYC, NPS4", "2s32c2t,numa=8,llc=16", "0,64"),
        described("EPYC, NPS4, small", include_str!("../../tests/hosts/epyc-nps4.host")),
        shaped("EPYC, a node per LLC", "2s32c2t,numa=16,llc=16", "0,64"),
        shaped("one node, 96 cores", "1s96c2t,numa=1,llc=12", "0,96"),
        Machine::new("POWER, SMT8", power(), list("8-159")),
        Machine::new("uneven nodes", uneven(), list("2-71")),
        // One thread of every fourth core stays with the host: those cores are not whole.
        shaped("half cores missing", "2s16c2t", "0,4,8,12,16,20,24,28"),
        // Each cache has lost a different number of cores.
        shaped("scattered allowlist", "1s32c2t,llc=8", "0,4-5,8-10,13,17-18,22,27-31,32,36-37,40-42,45,49-50,54,59-63"),
    ]
}

fn list(text: &str) -> CpuSet {
    CpuSet::parse_kernel_list(text).unwrap()
}

/// A machine as `virt-pin gather` wrote it down; all of it is pinnable.
fn described(name: &'static str, text: &str) -> Machine {
    let root: Root = description::parse(text).unwrap();
    let topology = sysfs::read(&root).unwrap();
    let pinnable = topology.online().clone();
    Machine::new(name, topology, pinnable)
}

/// What [`host`] needs to know of one CPU; its core and cache are named by any number.
struct Thread {
    core: u16,
    cache: u16,
    node: u16,
    class: Option<CoreClass>,
}

/// A host from its CPUs in the order of their numbers, one socket for each node.
fn host(threads: impl IntoIterator<Item = Thread>) -> Topology {
    let (mut cores, mut caches) = (BTreeMap::new(), BTreeMap::new());
    let cpus = threads.into_iter().zip(0..).map(|(thread, number)| Cpu {
        cpu: CpuId(number),
        online: true,
        isolated: false,
        core: Some(CoreId(*cores.entry(thread.core).or_insert(number))),
        package: Some(thread.node),
        die: None,
        cluster: None,
        node: Some(NodeId(thread.node)),
        llc: Some(LlcId(*caches.entry(thread.cache).or_insert(number))),
        class: thread.class,
    });
    let cpus: Vec<Cpu> = cpus.collect();
    let mut nodes: BTreeMap<NodeId, CpuSet> = BTreeMap::new();
    for cpu in &cpus {
        nodes.entry(cpu.node.unwrap()).or_default().insert(cpu.cpu);
    }
    let node = |(node, cpus)| Node {
        node,
        cpus,
        memory_bytes: None,
        available_bytes: None,
        huge_pages: Vec::new(),
        distances: Vec::new(),
    };
    let possible = cpus.iter().map(|cpu| cpu.cpu).collect();
    Topology::new(cpus, nodes.into_iter().map(node).collect(), possible, Vec::new())
}

/// 8 P-cores of two threads, neighbours in number as on Intel clients, then 16 E-cores.
fn hybrid() -> Topology {
    let thread = |number: u16| {
        let (core, class) = match number {
            0..16 => (number / 2, CoreClass::Performance),
            _ => (number, CoreClass::Efficiency),
        };
        Thread { core: 100 + core, cache: 0, node: 0, class: Some(class) }
    };
    host((0..32).map(thread))
}

/// 2 x 16 cores of two threads, the sockets taking turns in the numbering, as much firmware does it.
fn alternating() -> Topology {
    host((0..64).map(|number| Thread { core: number % 32, cache: number % 2, node: number % 2, class: None }))
}

/// 2 x 10 cores of eight threads, neighbours in number; nodes 0 and 8; each core has its own L3.
fn power() -> Topology {
    let thread = |number: u16| Thread { core: number / 8, cache: number / 8, node: number / 80 * 8, class: None };
    host((0..160).map(thread))
}

/// Nodes of 16, 8, 8 and 4 cores of two threads, a cache for each four cores.
fn uneven() -> Topology {
    let thread = |number: u16| {
        let core = number / 2;
        let node = match core {
            0..16 => 0,
            16..24 => 1,
            24..32 => 2,
            _ => 3,
        };
        Thread { core, cache: core / 4, node, class: None }
    };
    host((0..72).map(thread))
}
