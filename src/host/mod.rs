//! The machine as a value: [`Topology`], and the readers and writers at its edge.
//!
//! [`Topology`] answers which CPUs exist, which of them share a core, a last-level cache, a node. It is made once by
//! [`sysfs::read`] from a [`root::Root`] and never changes; it knows nothing of leases or policies. What could not be
//! read is `None` and named in [`Topology::losses`]: an unknown relation is never guessed.

pub mod cache_id;
pub mod cgroup;
pub mod description;
pub mod foreign;
pub mod machine_name;
pub mod pci;
pub mod process;
pub mod qemu;
pub mod root;
pub mod shape;
pub mod sysfs;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use pci::PciAddress;

use crate::cpuset::{CpuId, CpuSet, NodeId};

/// A physical core, named by its lowest online CPU: the kernel's `core_id` repeats on real machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CoreId(pub u16);

/// A last-level cache domain, named by its lowest online CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LlcId(pub u16);

/// What kind of core, on machines that have more than one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CoreClass {
    /// The machine's fast cores.
    Performance,
    /// Its slow ones.
    Efficiency,
}

/// One logical CPU. `None` = the machine does not say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// Its number.
    pub cpu: CpuId,
    /// Whether it is online; the relations of an offline CPU are mostly unknown.
    pub online: bool,
    /// Whether the kernel keeps ordinary tasks off it (`isolcpus=`).
    pub isolated: bool,
    /// The core it is a hardware thread of.
    pub core: Option<CoreId>,
    /// The kernel's package number; unique per package.
    pub package: Option<u16>,
    /// The kernel's die number; unique within its package only.
    pub die: Option<u16>,
    /// The kernel's cluster number; unique within its package only.
    pub cluster: Option<u16>,
    /// Its NUMA node.
    pub node: Option<NodeId>,
    /// Its last-level cache: the highest unified cache level of this CPU.
    pub llc: Option<LlcId>,
    /// Its core's class; `None` on machines where all cores are alike.
    pub class: Option<CoreClass>,
}

/// Huge pages of one size on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HugePages {
    /// Size of a page in KiB.
    pub size_kib: u64,
    /// Pages reserved.
    pub total: u64,
    /// Pages not in use.
    pub free: u64,
}

impl HugePages {
    /// Memory reserved for them, in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.total.saturating_mul(self.size_kib).saturating_mul(1024)
    }

    /// What is free of them in bytes.
    pub fn free_bytes(&self) -> u64 {
        self.free.saturating_mul(self.size_kib).saturating_mul(1024)
    }
}

/// One NUMA node; it may lack CPUs or memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its number; numbers may be sparse.
    pub node: NodeId,
    /// Its online CPUs.
    pub cpus: CpuSet,
    /// Its memory in bytes; zero for a memory-less node.
    pub memory_bytes: Option<u64>,
    /// Memory a new guest could get in bytes: free, or reclaimable file cache.
    pub available_bytes: Option<u64>,
    /// Its huge pages, by size.
    pub huge_pages: Vec<HugePages>,
    /// Distance to each node that the kernel lists (10 = itself); empty where unknown.
    pub distances: Vec<(NodeId, u32)>,
}

/// A machine's CPUs and nodes: immutable, and cheap to copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    processors: Arc<Processors>,
    /// Ascending by number, each once.
    nodes: Vec<Node>,
}

/// The part of a topology that stays as it is while memory comes and goes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Processors {
    /// Ascending by number, each once.
    cpus: Vec<Cpu>,
    losses: Vec<String>,
    online: CpuSet,
    possible: CpuSet,
    /// Online threads of each known core; disjoint.
    cores: BTreeMap<CoreId, CpuSet>,
    /// See [`Topology::keeps_vms_in_one_class`].
    one_class: bool,
}

impl Topology {
    /// A topology of these CPUs (those present, online or not) and nodes. `possible` may name more CPUs than exist;
    /// `losses` says in sentences what could not be read and how it was modelled.
    pub fn new(mut cpus: Vec<Cpu>, nodes: Vec<Node>, possible: CpuSet, losses: Vec<String>) -> Topology {
        cpus.sort_by_key(|cpu| cpu.cpu);
        cpus.dedup_by_key(|cpu| cpu.cpu);
        let mut cores: BTreeMap<CoreId, CpuSet> = BTreeMap::new();
        for cpu in cpus.iter().filter(|cpu| cpu.online) {
            if let Some(core) = cpu.core {
                cores.entry(core).or_default().insert(cpu.cpu);
            }
        }
        let online = cpus.iter().filter(|cpu| cpu.online).map(|cpu| cpu.cpu).collect();
        let processors = Arc::new(Processors { cpus, losses, online, possible, cores, one_class: false });
        Topology { processors, nodes: Vec::new() }.with_nodes(nodes)
    }

    /// The same machine, saying whether it is one that [keeps VMs in one class](Topology::keeps_vms_in_one_class).
    #[must_use]
    pub fn keeping_vms_in_one_class(self, one_class: bool) -> Topology {
        let processors = Processors { one_class, ..Arc::unwrap_or_clone(self.processors) };
        Topology { processors: Arc::new(processors), ..self }
    }

    /// The same CPUs beside these nodes.
    #[must_use]
    pub fn with_nodes(&self, mut nodes: Vec<Node>) -> Topology {
        nodes.sort_by_key(|node| node.node);
        nodes.dedup_by_key(|node| node.node);
        Topology { processors: Arc::clone(&self.processors), nodes }
    }

    /// The same machine with all its memory and huge pages unused.
    #[must_use]
    pub fn idle(&self) -> Topology {
        let idle = self.nodes.iter().cloned().map(|node| {
            let huge_pages = node.huge_pages.iter().map(|pages| HugePages { free: pages.total, ..*pages });
            let huge_pages: Vec<_> = huge_pages.collect();
            // What huge pages are made of is no ordinary memory.
            let reserved = huge_pages.iter().map(HugePages::total_bytes).fold(0, u64::saturating_add);
            let available_bytes = node.memory_bytes.map(|bytes| bytes.saturating_sub(reserved));
            Node { available_bytes, huge_pages, ..node }
        });
        self.with_nodes(idle.collect())
    }

    /// The CPUs present, ascending.
    pub fn cpus(&self) -> &[Cpu] {
        &self.processors.cpus
    }

    /// The NUMA nodes, ascending; empty where the kernel has no NUMA support.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// What could not be read and how it was modelled, one sentence each.
    pub fn losses(&self) -> &[String] {
        &self.processors.losses
    }

    /// The CPUs online.
    pub fn online(&self) -> &CpuSet {
        &self.processors.online
    }

    /// The CPUs that could ever come online.
    pub fn possible(&self) -> &CpuSet {
        &self.processors.possible
    }

    /// The online CPUs that the kernel keeps ordinary tasks off.
    pub fn isolated(&self) -> CpuSet {
        self.processors.cpus.iter().filter(|cpu| cpu.online && cpu.isolated).map(|cpu| cpu.cpu).collect()
    }

    /// Whether the machine has cores of more than one class.
    pub fn is_hybrid(&self) -> bool {
        self.processors.cpus.iter().any(|cpu| cpu.class.is_some())
    }

    /// Whether a VM's vCPUs and its emulator have to stay on cores of one class. KVM on Arm makes a vCPU for the kind of
    /// core that its maker runs on, and refuses to initialise it on another (`KVM_ARM_PREFERRED_TARGET` and
    /// `KVM_ARM_VCPU_INIT` in the kernel's Documentation/virt/kvm/api.rst).
    pub fn keeps_vms_in_one_class(&self) -> bool {
        self.processors.one_class
    }

    /// One CPU, if it is present.
    pub fn cpu(&self, cpu: CpuId) -> Option<&Cpu> {
        self.processors
            .cpus
            .binary_search_by_key(&cpu, |cpu| cpu.cpu)
            .ok()
            .and_then(|index| self.processors.cpus.get(index))
    }

    /// One node, if it exists.
    pub fn node(&self, node: NodeId) -> Option<&Node> {
        self.nodes.binary_search_by_key(&node, |node| node.node).ok().and_then(|index| self.nodes.get(index))
    }

    /// The known cores with their online threads, ascending.
    pub fn cores(&self) -> &BTreeMap<CoreId, CpuSet> {
        &self.processors.cores
    }

    /// These CPUs, and all online threads of their cores as far as those are known.
    pub fn with_siblings(&self, cpus: &CpuSet) -> CpuSet {
        cpus.iter().filter_map(|cpu| self.siblings(cpu)).fold(cpus.clone(), |all, core| all.union(core))
    }

    /// The online threads of the CPU's core, itself included; `None` where its core is unknown or it is offline.
    pub fn siblings(&self, cpu: CpuId) -> Option<&CpuSet> {
        self.cpu(cpu).filter(|cpu| cpu.online)?.core.and_then(|core| self.processors.cores.get(&core))
    }
}
