//! The arguments libvirt gives its hook: which event, of which domain.
//!
//! `NAME OPERATION SUB-OPERATION EXTRA`. The name is hostile (`--help`, spaces, anything), so it is never parsed as an
//! option and never identifies the domain: the UUID on stdin does. Dispatcher scripts that forget to quote split the name
//! into several arguments, so the operation is looked for from the end.

/// An event of libvirt's QEMU driver that has a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Before anything is set up.
    Prepare,
    /// Before QEMU is forked.
    Start,
    /// QEMU runs; so may the guest.
    Started,
    /// QEMU has ended.
    Stopped,
    /// Everything is cleaned up.
    Release,
    /// An incoming migration: XML in, XML out.
    Migrate,
    /// From a saved state: XML in, XML out.
    Restore,
    /// The daemon has restarted and found the domain running.
    Reconnect,
}

impl Operation {
    /// Every one, in the order of a VM's life.
    pub const ALL: [Operation; 8] = [
        Operation::Prepare,
        Operation::Start,
        Operation::Started,
        Operation::Stopped,
        Operation::Release,
        Operation::Migrate,
        Operation::Restore,
        Operation::Reconnect,
    ];

    /// What is done at it, for the manual.
    pub fn meaning(self) -> &'static str {
        match self {
            Operation::Prepare => {
                "Before QEMU exists: the VM's CPUs are chosen, its lease is written and its cgroup is made. A VM without a \
                 policy is kept off leased CPUs."
            }
            Operation::Start => "Nothing is done.",
            Operation::Started => {
                "QEMU runs: each of its threads is looked at, and moved where it is not where the lease says."
            }
            Operation::Stopped => "Nothing is done.",
            Operation::Release => "Everything is cleaned up: the lease ends, and others may use its CPUs again.",
            Operation::Migrate => {
                "The VM comes from another host: it gets a lease that ends by itself if no start follows, and the pins in its \
                 XML are replaced by this host's."
            }
            Operation::Restore => {
                "The VM comes from a saved state: as for a migration. Nothing is ever refused here: libvirt would delete the \
                 saved state. The start that follows may be."
            }
            Operation::Reconnect => {
                "The daemon was restarted and found the VM running: lease and threads are compared, threads that were moved \
                 are moved back, offline CPUs replaced. Nothing is ever refused here: libvirt would kill the VM."
            }
        }
    }

    /// Whether a failure of the hook may be reported to libvirt as one. Not where that would kill a running VM
    /// (reconnect), delete its saved state (restore, libvirt 11.3) or means nothing (stopped, release).
    pub fn may_refuse(self) -> bool {
        match self {
            Operation::Prepare | Operation::Start | Operation::Started | Operation::Migrate => true,
            Operation::Stopped | Operation::Release | Operation::Restore | Operation::Reconnect => false,
        }
    }

    /// What libvirt calls it.
    pub fn name(self) -> &'static str {
        match self {
            Operation::Prepare => "prepare",
            Operation::Start => "start",
            Operation::Started => "started",
            Operation::Stopped => "stopped",
            Operation::Release => "release",
            Operation::Migrate => "migrate",
            Operation::Restore => "restore",
            Operation::Reconnect => "reconnect",
        }
    }

    fn parse(operation: &str, sub_operation: &str) -> Option<Operation> {
        Some(match (operation, sub_operation) {
            ("prepare", "begin") => Operation::Prepare,
            ("start", "begin") => Operation::Start,
            ("started", "begin") => Operation::Started,
            ("stopped", "end") => Operation::Stopped,
            ("release", "end") => Operation::Release,
            ("migrate", "begin") => Operation::Migrate,
            ("restore", "begin") => Operation::Restore,
            ("reconnect", "begin") => Operation::Reconnect,
            _ => return None,
        })
    }
}

/// Finds the operation in the arguments behind argv\[0\]. `None` for events that are not ours, now or in the future.
pub fn operation(args: &[String]) -> Option<Operation> {
    // As libvirt calls us: fixed places, whatever the name looks like.
    if let [_, operation, sub_operation, _] = args {
        if let Some(found) = Operation::parse(operation, sub_operation) {
            return Some(found);
        }
    }
    args.windows(2).rev().find_map(|pair| match pair {
        [operation, sub_operation] => Operation::parse(operation, sub_operation),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_found_whatever_the_name() {
        use Operation::{Prepare, Reconnect, Release, Start};
        let cases: &[(&[&str], Option<Operation>)] = &[
            (&["vm", "prepare", "begin", "-"], Some(Prepare)),
            (&["--help", "start", "begin", "-"], Some(Start)),
            (&["vm", "reconnect", "begin", "-"], Some(Reconnect)),
            // Every reason of libvirt >= 10.5, one with a space, one unknown.
            (&["1.lux", "release", "end", "shutdown"], Some(Release)),
            (&["vm", "release", "end", "from snapshot"], Some(Release)),
            (&["vm", "release", "end", "?"], Some(Release)),
            // An unquoted dispatcher splits the name and the reason.
            (&["Windows", "11", "prepare", "begin", "-"], Some(Prepare)),
            (&["Windows", "11", "release", "end", "from", "snapshot"], Some(Release)),
            (&["prepare", "begin"], Some(Prepare)),
            // A name that looks like an operation.
            (&["prepare", "release", "end", "-"], Some(Release)),
            (&["release end", "prepare", "begin", "-"], Some(Prepare)),
            (&["prepare", "begin", "release", "end", "-"], Some(Release)),
            (&["vm", "attach", "begin", "-"], None),
            (&["vm", "prepare", "end", "-"], None),
            (&["vm", "foo", "begin", "-"], None),
            (&["-", "start", "-", "start"], None),
            (&["vm"], None),
            (&[], None),
        ];
        for (args, expected) in cases {
            let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
            assert_eq!(operation(&args), *expected, "{args:?}");
        }
    }

    #[test]
    fn the_agent_knows_every_event_that_is_reported() {
        use Operation::{Migrate, Prepare, Reconnect, Release, Restore, Start, Started, Stopped};
        for operation in [Prepare, Started, Release, Migrate, Restore, Reconnect] {
            assert!(crate::report::OPERATIONS.contains(&operation.name()), "{operation:?}");
        }
        for idle in [Start, Stopped] {
            assert!(!crate::report::OPERATIONS.contains(&idle.name()), "{idle:?}");
        }
    }
}
