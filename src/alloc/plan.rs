//! An answer: which CPU each vCPU gets, what is held beside them, and what the guest is told.

use std::collections::BTreeSet;
use std::fmt;

use crate::cpuset::{CpuId, CpuSet, NodeId};
use crate::error::counted;
use crate::host::Topology;

/// The CPUs of one domain. Made by `alloc::plan`, kept in a lease, written into XML.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Index = vCPU number. In an order in which the guest's siblings are the host's siblings; never sorted afterwards.
    /// `None` = this vCPU has no CPU of its own and runs on `shared`.
    pub vcpus: Vec<Option<CpuId>>,
    /// Where the vCPUs without a CPU of their own run (`dedicated-vcpus`); empty if there are none.
    pub shared: CpuSet,
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
    /// The guest's NUMA cells by number, each with its node; empty where the guest is told of none.
    pub cells: Vec<PlacedCell>,
}

/// A NUMA cell of the guest: its own, or one that the plan makes for it because the vCPUs span nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedCell {
    /// Its vCPUs, by number.
    pub vcpus: CpuSet,
    /// Its memory in bytes; `None` where the guest's memory is not known.
    pub bytes: Option<u64>,
    /// The node that its vCPUs, and with `memory="follow"` its memory, lie on; `None` for a cell that the policy leaves
    /// anywhere.
    pub node: Option<NodeId>,
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

/// As people say it: "2 sockets of 4 cores of 2 threads". What there is one of is left out, except cores and threads.
impl fmt::Display for GuestTopology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (count, noun) in [(self.sockets, "socket"), (self.dies, "die")] {
            if count > 1 {
                write!(f, "{} of ", counted(count, noun))?;
            }
        }
        write!(f, "{} of {}", counted(self.cores, "core"), counted(self.threads, "thread"))
    }
}

/// "vCPUs 0-3 on node 1, 512 MiB".
impl fmt::Display for PlacedCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.vcpus.len() {
            0 => f.write_str("no vCPU")?,
            1 => write!(f, "vCPU {}", self.vcpus)?,
            _ => write!(f, "vCPUs {}", self.vcpus)?,
        }
        self.node.map_or(Ok(()), |node| write!(f, " on node {}", node.0))?;
        self.bytes.map_or(Ok(()), |bytes| write!(f, ", {} MiB", bytes >> 20))
    }
}

impl Plan {
    /// vCPU i on the i-th of these CPUs, all other threads on `others`, and nothing else.
    pub fn new(vcpus: impl IntoIterator<Item = CpuId>, others: CpuSet) -> Plan {
        Plan {
            vcpus: vcpus.into_iter().map(Some).collect(),
            shared: CpuSet::new(),
            whole: true,
            parked: CpuSet::new(),
            extra: CpuSet::new(),
            emulator: others.clone(),
            iothreads: others,
            nodes: BTreeSet::new(),
            memory_nodes: None,
            guest: None,
            cells: Vec::new(),
        }
    }

    /// The CPUs of the vCPUs that have one of their own.
    pub fn vcpu_cpus(&self) -> CpuSet {
        self.vcpus.iter().copied().flatten().collect()
    }

    /// The CPUs that these vCPUs, by number, have of their own, in the order of the numbers.
    pub fn own_cpus<'a>(&'a self, vcpus: &'a CpuSet) -> impl Iterator<Item = CpuId> + 'a {
        vcpus.iter().filter_map(|vcpu| self.vcpus.get(usize::from(vcpu.0)).copied().flatten())
    }

    /// Where each vCPU may run, by number: on its own CPU, or on the shared ones.
    pub fn vcpu_places(&self) -> impl Iterator<Item = (u16, CpuSet)> + '_ {
        (0..)
            .zip(&self.vcpus)
            .map(|(vcpu, own)| (vcpu, own.map_or_else(|| self.shared.clone(), |cpu| [cpu].into_iter().collect())))
    }

    /// The CPUs that nobody else may have.
    pub fn exclusive(&self) -> CpuSet {
        self.vcpu_cpus().union(&self.parked).union(&self.extra)
    }

    /// What the plan keeps from others on this machine: its CPUs, and of whole cores the siblings that came online later.
    pub fn held(&self, topology: &Topology) -> CpuSet {
        let cores = if self.whole { topology.with_siblings(&self.vcpu_cpus()) } else { CpuSet::new() };
        self.exclusive().union(&cores)
    }

    /// The CPUs of its own that it uses and that are not online.
    pub fn missing(&self, online: &CpuSet) -> CpuSet {
        self.vcpu_cpus().union(&self.extra).difference(online)
    }

    /// As much of the plan as can be held while some of its CPUs are offline: whoever has none left is on what the lease has
    /// beside, a parked sibling before other vCPUs' CPUs, or where nothing is left on `elsewhere`. The plan itself while nothing
    /// is missing.
    #[must_use]
    pub fn meanwhile(&self, online: &CpuSet, elsewhere: &CpuSet) -> Plan {
        let left = [self.parked.clone(), self.vcpu_cpus(), elsewhere.clone()];
        let left = left.into_iter().map(|cpus| cpus.intersection(online)).find(|cpus| !cpus.is_empty());
        let left = left.unwrap_or_default();
        let still = |cpus: &CpuSet| {
            let still = cpus.intersection(online);
            if still.is_empty() && !cpus.is_empty() { left.clone() } else { still }
        };
        let vcpus: Vec<_> = self.vcpus.iter().map(|own| own.filter(|cpu| online.contains(*cpu))).collect();
        let more = vcpus.iter().zip(&self.vcpus).any(|(now, own)| now.is_none() && own.is_some());
        let shared = still(&self.shared);
        Plan {
            shared: if more { shared.union(&left) } else { shared },
            emulator: still(&self.emulator),
            iothreads: still(&self.iothreads),
            vcpus,
            ..self.clone()
        }
    }

    /// The CPUs that any thread of the domain may run on: the confinement of its cgroup. Parked CPUs are not among them.
    pub fn allowed(&self) -> CpuSet {
        self.vcpu_cpus().union(&self.shared).union(&self.emulator).union(&self.iothreads)
    }
}
