//! An answer: which CPU each vCPU gets, what is held beside them, and what the guest is told.

use std::collections::BTreeSet;

use crate::cpuset::{CpuId, CpuSet, NodeId};

/// The CPUs of one domain. Made by `alloc::plan`, kept in a lease, written into XML.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Index = vCPU number. In an order in which the guest's siblings are the host's siblings; never sorted afterwards.
    pub vcpus: Vec<CpuId>,
    /// Whether it was made of whole cores: then a sibling that comes online later is nobody else's either.
    pub whole: bool,
    /// Siblings held by the lease and used by nobody.
    pub parked: CpuSet,
    /// Extra CPUs of the lease for emulator or I/O threads (`isolate`).
    pub extra: CpuSet,
    /// Where the emulator's threads run: housekeeping CPUs, extra ones, or the vCPUs'. Never empty.
    pub emulator: CpuSet,
    /// Where I/O threads run, those plugged in later included. Never empty.
    pub iothreads: CpuSet,
    /// The nodes of the vCPUs; empty on a machine without NUMA.
    pub nodes: BTreeSet<NodeId>,
    /// Nodes that the guest's memory is bound to; `None` = not bound.
    pub memory_nodes: Option<BTreeSet<NodeId>>,
    /// What the guest is told; `None` = its XML is left alone (`topology="keep"`).
    pub guest: Option<GuestTopology>,
}

/// `<cpu><topology>`: the product of all parts is the maximum vCPU count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestTopology {
    /// Sockets.
    pub sockets: u16,
    /// Dies in each socket.
    pub dies: u16,
    /// Cores in each die.
    pub cores: u16,
    /// Threads of each core.
    pub threads: u16,
}

impl Plan {
    /// The CPUs of the vCPUs.
    pub fn vcpu_cpus(&self) -> CpuSet {
        self.vcpus.iter().copied().collect()
    }

    /// The CPUs that nobody else may have.
    pub fn exclusive(&self) -> CpuSet {
        self.vcpu_cpus().union(&self.parked).union(&self.extra)
    }

    /// The CPUs that any thread of the domain may run on: the confinement of its cgroup. Parked CPUs are not among them.
    pub fn allowed(&self) -> CpuSet {
        self.vcpu_cpus().union(&self.emulator).union(&self.iothreads)
    }
}
