//! The machine as a value: [`Topology`], and the readers and writers at its edge.
//!
//! [`Topology`] answers which CPUs exist, which of them share a core, a last-level cache, a node. It is made once by
//! [`sysfs::read`] from a [`root::Root`] and never changes; it knows nothing of leases or policies. What could not be
//! read is `None` and named in [`Topology::losses`]: an unknown relation is never guessed.

pub mod cgroup;
pub mod description;
pub mod machine_name;
pub mod pci;
pub mod process;
pub mod qemu;
pub mod root;
pub mod shape;
pub mod sysfs;

use std::collections::BTreeMap;

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

/// A machine's CPUs and nodes: immutable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// Ascending by number, each once.
    cpus: Vec<Cpu>,
    /// Ascending by number, each once.
    nodes: Vec<Node>,
    losses: Vec<String>,
    online: CpuSet,
    possible: CpuSet,
    /// Online threads of each known core; disjoint.
    cores: BTreeMap<CoreId, CpuSet>,
    one_class: bool,
}

impl Topology {
    /// A topology of these CPUs (those present, online or not) and nodes. `possible` may name more CPUs than exist;
    /// `losses` says in sentences what could not be read and how it was modelled.
    pub fn new(mut cpus: Vec<Cpu>, mut nodes: Vec<Node>, possible: CpuSet, losses: Vec<String>) -> Topology {
        cpus.sort_by_key(|cpu| cpu.cpu);
        cpus.dedup_by_key(|cpu| cpu.cpu);
        nodes.sort_by_key(|node| node.node);
        nodes.dedup_by_key(|node| node.node);
        let mut cores: BTreeMap<CoreId, CpuSet> = BTreeMap::new();
        for cpu in cpus.iter().filter(|cpu| cpu.online) {
            if let Some(core) = cpu.core {
                cores.entry(core).or_default().insert(cpu.cpu);
            }
        }
        let online = cpus.iter().filter(|cpu| cpu.online).map(|cpu| cpu.cpu).collect();
        Topology { cpus, nodes, losses, online, possible, cores, one_class: false }
    }

    /// The same machine, saying whether it is one that [keeps VMs in one class](Topology::keeps_vms_in_one_class).
    #[must_use]
    pub fn keeping_vms_in_one_class(self, one_class: bool) -> Topology {
        Topology { one_class, ..self }
    }

    /// The CPUs present, ascending.
    pub fn cpus(&self) -> &[Cpu] {
        &self.cpus
    }

    /// The NUMA nodes, ascending; empty where the kernel has no NUMA support.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// What could not be read and how it was modelled, one sentence each.
    pub fn losses(&self) -> &[String] {
        &self.losses
    }

    /// The CPUs online.
    pub fn online(&self) -> &CpuSet {
        &self.online
    }

    /// The CPUs that could ever come online.
    pub fn possible(&self) -> &CpuSet {
        &self.possible
    }

    /// The online CPUs that the kernel keeps ordinary tasks off.
    pub fn isolated(&self) -> CpuSet {
        self.cpus.iter().filter(|cpu| cpu.online && cpu.isolated).map(|cpu| cpu.cpu).collect()
    }

    /// Whether the machine has cores of more than one class.
    pub fn is_hybrid(&self) -> bool {
        self.cpus.iter().any(|cpu| cpu.class.is_some())
    }

    /// Whether a VM's vCPUs and its emulator have to stay on cores of one class. KVM on Arm makes a vCPU for the kind of
    /// core that its maker runs on, and refuses to initialise it on another (`KVM_ARM_PREFERRED_TARGET` and
    /// `KVM_ARM_VCPU_INIT` in the kernel's Documentation/virt/kvm/api.rst).
    pub fn keeps_vms_in_one_class(&self) -> bool {
        self.one_class
    }

    /// One CPU, if it is present.
    pub fn cpu(&self, cpu: CpuId) -> Option<&Cpu> {
        self.cpus.binary_search_by_key(&cpu, |cpu| cpu.cpu).ok().and_then(|index| self.cpus.get(index))
    }

    /// One node, if it exists.
    pub fn node(&self, node: NodeId) -> Option<&Node> {
        self.nodes.binary_search_by_key(&node, |node| node.node).ok().and_then(|index| self.nodes.get(index))
    }

    /// The known cores with their online threads, ascending.
    pub fn cores(&self) -> &BTreeMap<CoreId, CpuSet> {
        &self.cores
    }

    /// The online threads of the CPU's core, itself included; `None` where its core is unknown or it is offline.
    pub fn siblings(&self, cpu: CpuId) -> Option<&CpuSet> {
        self.cpu(cpu).filter(|cpu| cpu.online)?.core.and_then(|core| self.cores.get(&core))
    }
}
