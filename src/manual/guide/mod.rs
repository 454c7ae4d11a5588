//! The longer text about each code: what has happened and what has not, where to look, what to do, whether waiting helps.
//!
//! The one source of virt-pin-codes(7), of `virt-pin help CODE` and of docs/troubleshooting.md. A code without an entry does not
//! compile. The message beside each entry is a real one: `tests/codes.rs` provokes it and compares, and `UPDATE=1` writes it
//! down. What a code is called and means in one sentence is in [`crate::error`].

mod asked;
mod deeds;
mod host;
mod messages;
mod room;
mod state;

use crate::error::Code;

/// What is said of a code beyond its sentence. In the texts, `backticks` are what is typed.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// What has happened, and what it does to VMs.
    pub means: &'static str,
    /// Where to find out more: commands, and what they say.
    pub look: &'static [&'static str],
    /// What to do; more than one way where there is more than one cause.
    pub remedies: &'static [&'static str],
    /// Whether it goes away with nobody doing anything, and when.
    pub passes: &'static str,
    /// A command after `# `, and the message as it was printed.
    pub example: &'static str,
}

/// The entry of a code.
pub fn entry(code: Code) -> &'static Entry {
    match code {
        Code::Internal => &deeds::INTERNAL,
        Code::Usage => &asked::USAGE,
        Code::CheckFailed => &asked::CHECK_FAILED,
        Code::DomainInvalid => &asked::DOMAIN_INVALID,
        Code::DomainUnknown => &asked::DOMAIN_UNKNOWN,
        Code::PolicyInvalid => &asked::POLICY_INVALID,
        Code::PolicyUnsupported => &asked::POLICY_UNSUPPORTED,
        Code::PolicyDenied => &asked::POLICY_DENIED,
        Code::Shortage => &room::SHORTAGE,
        Code::NeedsRepack => &room::NEEDS_REPACK,
        Code::Unsatisfiable => &room::UNSATISFIABLE,
        Code::MemoryShortage => &room::MEMORY_SHORTAGE,
        Code::StaticConflict => &room::STATIC_CONFLICT,
        Code::Reserved => &room::RESERVED,
        Code::SharedPoolEmpty => &room::SHARED_POOL_EMPTY,
        Code::StalePins => &asked::STALE_PINS,
        Code::TopologyOtherwise => &asked::TOPOLOGY_OTHERWISE,
        Code::StaleCaches => &asked::STALE_CACHES,
        Code::StateLocked => &state::LOCKED,
        Code::StateCorrupt => &state::CORRUPT,
        Code::StateNewer => &state::NEWER,
        Code::StateUnsafe => &state::UNSAFE,
        Code::StateConflict => &state::CONFLICT,
        Code::TopologyUnreadable => &host::TOPOLOGY_UNREADABLE,
        Code::HostIo => &host::IO,
        Code::IsolationUnsupported => &host::ISOLATION_UNSUPPORTED,
        Code::ConfigInvalid => &host::CONFIG_INVALID,
        Code::ConfinementFailed => &deeds::CONFINEMENT,
        Code::ThreadMisplaced => &deeds::THREAD,
        Code::IsolationFailed => &deeds::ISOLATION,
        Code::CoreSched => &deeds::CORE_SCHED,
        Code::LibvirtFailed => &deeds::LIBVIRT,
        Code::InstallConflict => &deeds::INSTALL_CONFLICT,
    }
}

impl Entry {
    /// The command of the example, and the lines that it printed.
    pub fn message(&self) -> (&'static str, impl Iterator<Item = &'static str>) {
        let mut lines = self.example.lines();
        (lines.next().unwrap_or_default(), lines)
    }
}
