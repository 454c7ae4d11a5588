//! What a domain asks for, as a value. Made by `xml::read` (or by hand in tests); never changed by the allocator.

use std::collections::BTreeSet;

use super::policy::{OtherThreads, Policy};
use crate::cpuset::{CpuId, CpuSet, NodeId};

/// A domain's demand on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// vCPUs, up to the *maximum* count: a vCPU plugged in later must find its CPU.
    pub vcpus: u16,
    /// I/O threads the domain defines.
    pub iothreads: u16,
    /// The policy; [`super::policy::Kind::Dedicated`] when it comes to `alloc::plan`.
    pub policy: Policy,
    /// The guest's memory; `None` where it is not known (no check then).
    pub memory: Option<GuestMemory>,
    /// The guest's own NUMA cells, by number; empty where the document has none. Each goes to one node, no two share a core.
    pub cells: Vec<GuestCell>,
    /// The nodes of its passed-through PCI devices, as far as the host knows them.
    pub devices: BTreeSet<NodeId>,
}

impl Request {
    /// A request for so many vCPUs and nothing else.
    pub fn new(vcpus: u16, policy: Policy) -> Request {
        Request { vcpus, iothreads: 0, policy, memory: None, cells: Vec::new(), devices: BTreeSet::new() }
    }

    /// How many places beside the vCPUs' its emulator and I/O threads ask for. Without I/O threads none is set aside for them.
    pub fn isolated(&self) -> usize {
        let emulator = self.policy.emulator == OtherThreads::Isolate;
        let iothreads = self.policy.iothreads == OtherThreads::Isolate && self.iothreads > 0;
        usize::from(emulator) + usize::from(iothreads)
    }

    /// The vCPUs that get CPUs of their own, ascending.
    pub fn dedicated(&self) -> impl Iterator<Item = u16> + '_ {
        let named = self.policy.dedicated_vcpus.as_ref();
        (0..self.vcpus).filter(move |&vcpu| named.is_none_or(|named| named.contains(CpuId(vcpu))))
    }
}

/// A NUMA cell that the domain's XML defines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestCell {
    /// Its vCPUs, by number; may be empty.
    pub vcpus: CpuSet,
    /// Its memory in bytes.
    pub bytes: u64,
    /// The node that its memory comes from wherever its vCPUs are; `None` = from where they are.
    pub bound: Option<NodeId>,
}

/// How much memory, of which pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestMemory {
    /// Bytes.
    pub bytes: u64,
    /// From which pages.
    pub pages: Pages,
}

/// The pages a guest's memory is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Ordinary pages (transparent huge pages included).
    Ordinary,
    /// Huge pages of the host's default size.
    HugeDefault,
    /// Huge pages of this size in KiB.
    Huge(u64),
}
