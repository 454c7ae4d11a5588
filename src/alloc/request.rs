//! What a domain asks for, as a value. Made by `xml::read` (or by hand in tests); never changed by the allocator.

use super::policy::Policy;

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
