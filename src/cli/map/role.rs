//! What a CPU can be used for, and the name, sign and words of each use. Pure; it does not know which CPU has which.

/// What a CPU is used for; in the order of the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    /// A vCPU of a lease.
    Vcpu,
    /// Held by a lease and used by nobody.
    Parked,
    /// A lease's CPU for emulator or I/O threads.
    Extra,
    /// Pinned to by hand, by one VM.
    Static,
    /// The same, by several.
    Several,
    /// Pinnable, but emulator or I/O threads are there from before it was.
    Occupied,
    /// Pinnable and held by nobody.
    Free,
    /// Free, but no part of a whole free core.
    Withheld,
    /// For the host and emulator threads.
    Housekeeping,
    /// Set aside by the kernel and not pinnable.
    Isolated,
    /// Online, but not for the VMs' cgroup.
    OutOfReach,
    /// Present and not online.
    Offline,
}

impl Role {
    /// Its name in JSON.
    pub(super) fn name(self) -> &'static str {
        match self {
            Role::Vcpu => "vcpu",
            Role::Parked => "parked",
            Role::Extra => "extra",
            Role::Static => "static",
            Role::Several => "several",
            Role::Occupied => "occupied",
            Role::Free => "free",
            Role::Withheld => "withheld",
            Role::Housekeeping => "housekeeping",
            Role::Isolated => "isolated",
            Role::OutOfReach => "out-of-reach",
            Role::Offline => "offline",
        }
    }

    /// Its line in the key.
    pub(super) fn meaning(self) -> &'static str {
        match self {
            Role::Vcpu => "vCPU",
            Role::Parked => "parked sibling",
            Role::Extra => "emulator or I/O threads",
            Role::Static => "pinned by hand",
            Role::Several => "pinned by hand by several VMs",
            Role::Occupied => "in use since before it was pinnable",
            Role::Free => "free",
            Role::Withheld => "free but no whole core",
            Role::Housekeeping => "housekeeping",
            Role::Isolated => "isolated by the kernel",
            Role::OutOfReach => "out of the VMs' reach",
            Role::Offline => "offline",
        }
    }

    /// What stands for it; where a lease's own mark does, an example of those.
    pub(super) fn symbol(self) -> char {
        match self {
            Role::Vcpu => 'A',
            Role::Parked => 'a',
            Role::Extra => '+',
            Role::Static => '1',
            Role::Several => '*',
            Role::Occupied => '%',
            Role::Free => '.',
            Role::Withheld => '-',
            Role::Housekeeping => '=',
            Role::Isolated => '!',
            Role::OutOfReach => '?',
            Role::Offline => '_',
        }
    }
}
