//! What went wrong, in a form for people, for programs and for the shell.
//!
//! Every failure of the library is an [`Error`]: a stable [`Code`], one sentence that says what was asked, what was
//! found and where, an optional hint that says what to do, and the causes below it. [`Code::all`] lists the one table of
//! codes: the exit status, the README's reference and the tests are read from it; `manual::guide` says more about each. This module does no I/O; it never
//! decides whether an error may stop a VM (that is `hook::Operation`'s knowledge). It is long because the table is one.

mod room;
mod words;

use std::error::Error as StdError;
use std::fmt;

pub use room::{Amount, Moved, Part, Room, Withheld, said};
pub use words::{counted, listed, printable};

/// The result of everything in the library that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why something could not be done: stable, machine-readable, one exit status each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Code {
    /// A fault in virt-pin itself: a caught panic or a failed post-condition.
    Internal,
    /// The command line could not be understood.
    Usage,
    /// `virt-pin check` found something that does not hold.
    CheckFailed,
    /// The text on stdin or in a file is not a libvirt domain document we can work on.
    DomainInvalid,
    /// No such domain, or no lease for it.
    DomainUnknown,
    /// The policy has an unknown attribute or value, or contradicts itself or the domain.
    PolicyInvalid,
    /// The policy asks for something this version does not do yet.
    PolicyUnsupported,
    /// The policy asks for something that the operator does not allow this VM.
    PolicyDenied,
    /// Not enough free CPUs of the kind asked for exist now.
    Shortage,
    /// Enough is free, but not in the shape asked for; moving other VMs would make room.
    NeedsRepack,
    /// This host can never honour the request, even when empty.
    Unsatisfiable,
    /// The nodes of the chosen CPUs have too little free memory for the guest.
    MemoryShortage,
    /// CPUs pinned by hand in one VM's XML are leased to another VM.
    StaticConflict,
    /// A dedicated domain's XML also carries pins, and they are not CPUs its lease can have.
    StalePins,
    /// The XML tells the guest another topology than its lease's, and the policy demands the true one.
    TopologyOtherwise,
    /// The domain's XML allocates caches that its CPUs do not use.
    StaleCaches,
    /// The only room for a domain is set aside for autostart domains that do not run yet.
    Reserved,
    /// VMs without a lease would be left without any CPU.
    SharedPoolEmpty,
    /// The host's CPU topology could not be read.
    TopologyUnreadable,
    /// The kernel refused an operation on a file.
    HostIo,
    /// The lease lock was not obtained before the deadline.
    StateLocked,
    /// The lease file cannot be read as one of ours, or contradicts itself.
    StateCorrupt,
    /// The lease file was written by a newer version.
    StateNewer,
    /// The state directory or a file in it is not safely ours.
    StateUnsafe,
    /// A former QEMU of the same domain is still alive and holds its lease.
    StateConflict,
    /// The configuration is wrong: file, line and key are in the message.
    ConfigInvalid,
    /// The VM's cgroup could not be confined to its lease.
    ConfinementFailed,
    /// A thread of the VM is not where its lease says, and could not be moved there.
    ThreadMisplaced,
    /// This host has no means for the isolation asked for.
    IsolationUnsupported,
    /// The host's own work could not be kept off the VM's CPUs.
    IsolationFailed,
    /// The VM's threads cannot be given the core scheduling cookie of its tenant.
    CoreSched,
    /// libvirt refused or could not be reached (CLI only).
    LibvirtFailed,
    /// Installing would destroy somebody else's hook script.
    InstallConflict,
}

/// One row of the table of codes.
struct Row {
    code: Code,
    name: &'static str,
    exit: u8,
    retry: bool,
    meaning: &'static str,
    advice: &'static str,
}

/// The one table. Names and exit statuses are a public contract: rows are added, never changed.
const TABLE: &[Row] = &[
    Row {
        code: Code::Internal,
        name: "internal",
        exit: 1,
        retry: false,
        meaning: "a fault in virt-pin itself",
        advice: "report it with the message and the output of `virt-pin gather`",
    },
    Row {
        code: Code::Usage,
        name: "usage",
        exit: 2,
        retry: false,
        meaning: "the command line could not be understood",
        advice: "`virt-pin help COMMAND` shows its arguments and options",
    },
    Row {
        code: Code::CheckFailed,
        name: "check.failed",
        exit: 3,
        retry: false,
        meaning: "`virt-pin check` found something that does not hold",
        advice: "each FAIL line says what to do",
    },
    Row {
        code: Code::DomainInvalid,
        name: "domain.xml.invalid",
        exit: 10,
        retry: false,
        meaning: "not a libvirt domain document (missing, not well-formed, too large, a DTD, no uuid)",
        advice: "correct what the message names (`virsh edit`); `virt-xml-validate FILE domain` looks at a whole file",
    },
    Row {
        code: Code::DomainUnknown,
        name: "domain.not-found",
        exit: 11,
        retry: false,
        meaning: "no domain, file or lease of that name or UUID",
        advice: "see `virt-pin list` and `virsh list --all`",
    },
    Row {
        code: Code::PolicyInvalid,
        name: "cpu.policy.invalid",
        exit: 12,
        retry: false,
        meaning: "the policy has an unknown attribute or value, or contradicts itself or the domain",
        advice: "correct the attribute named in the message",
    },
    Row {
        code: Code::PolicyUnsupported,
        name: "cpu.policy.unsupported",
        exit: 13,
        retry: false,
        meaning: "the policy asks for something this version does not do yet",
        advice: "leave the attribute out, or use one of the values the message lists",
    },
    Row {
        code: Code::PolicyDenied,
        name: "cpu.policy.denied",
        exit: 14,
        retry: false,
        meaning: "the policy asks for more than a [[limit]] of the configuration allows this VM",
        advice: "ask for less, or change the limit named in the message",
    },
    Row {
        code: Code::Shortage,
        name: "cpu.placement.shortage",
        exit: 20,
        retry: true,
        meaning: "not enough free CPUs of the kind asked for",
        advice: "stop a VM that holds some, or add to pinnable_cpus",
    },
    Row {
        code: Code::NeedsRepack,
        name: "cpu.placement.needs-repack",
        exit: 21,
        retry: true,
        meaning: "enough CPUs are free, but not in the shape asked for",
        advice: "`virt-pin repack --for DOMAIN` moves running VMs out of the way where that helps; or relax numa, cache or cores",
    },
    Row {
        code: Code::Unsatisfiable,
        name: "cpu.placement.unsatisfiable",
        exit: 22,
        retry: false,
        meaning: "this host cannot honour the request even with every pinnable CPU free",
        advice: "ask for less, or change pinnable_cpus",
    },
    Row {
        code: Code::MemoryShortage,
        name: "cpu.numa.memory-shortage",
        exit: 23,
        retry: true,
        meaning: "the nodes of the chosen CPUs have too little free memory for the guest",
        advice: "free memory on those nodes, or set memory=\"any\"",
    },
    Row {
        code: Code::StaticConflict,
        name: "cpu.static.conflict",
        exit: 24,
        retry: true,
        meaning: "CPUs pinned by hand in the domain's XML are leased to another VM",
        advice: "change the pins, or stop the VM that holds the CPUs",
    },
    Row {
        code: Code::StalePins,
        name: "cpu.xml.stale-pins",
        exit: 25,
        retry: false,
        meaning: "a dedicated domain's XML also carries pins, to CPUs its lease cannot have",
        advice: "take <vcpupin>, <emulatorpin> and <iothreadpin> out of the persistent XML",
    },
    Row {
        code: Code::Reserved,
        name: "cpu.placement.reserved",
        exit: 26,
        retry: true,
        meaning: "there is room only where it is set aside for autostart domains that do not run yet",
        advice: "set autostart_reserve = \"prefer\", or take autostart off a VM named in the message",
    },
    Row {
        code: Code::SharedPoolEmpty,
        name: "cpu.shared.no-cpus",
        exit: 27,
        retry: true,
        meaning: "leases would leave VMs without a lease no CPU to run on",
        advice: "take CPUs out of pinnable_cpus: VMs without a lease run on what is not leased",
    },
    Row {
        code: Code::StaleCaches,
        name: "cpu.xml.stale-caches",
        exit: 28,
        retry: false,
        meaning: "the domain's XML allocates caches (<cachetune>, <memorytune>) that its CPUs do not use",
        advice: "define the domain from what `virt-pin transform` prints, or name every cache of the host",
    },
    Row {
        code: Code::TopologyOtherwise,
        name: "cpu.xml.topology",
        exit: 29,
        retry: false,
        meaning: "the XML tells the guest of other cores than its lease has, and its policy says topology=\"require\"",
        advice: "`virt-pin define FILE` writes the true ones into the XML, and so does the agent",
    },
    Row {
        code: Code::StateLocked,
        name: "state.locked",
        exit: 30,
        retry: true,
        meaning: "another virt-pin process held the lease lock until the deadline",
        advice: "try again; if it persists, see what the process that holds it waits for (`fuser -v` on the lock file)",
    },
    Row {
        code: Code::StateCorrupt,
        name: "state.corrupt",
        exit: 31,
        retry: false,
        meaning: "leases.json cannot be read, or contradicts itself",
        advice: "`virt-pin reconcile` rebuilds it from the running VMs",
    },
    Row {
        code: Code::StateNewer,
        name: "state.newer",
        exit: 32,
        retry: false,
        meaning: "leases.json was written by a newer version of virt-pin",
        advice: "use that version again; nothing was changed",
    },
    Row {
        code: Code::StateUnsafe,
        name: "state.unsafe",
        exit: 33,
        retry: false,
        meaning: "the state directory or a file in it is missing, unwritable, or not safely ours",
        advice: "the directory must belong to root with mode 0700, its files be regular ones with mode 0600",
    },
    Row {
        code: Code::StateConflict,
        name: "state.conflict",
        exit: 34,
        retry: true,
        meaning: "a former QEMU of the same domain is still alive and holds its lease, or a lease cannot be moved now",
        advice: "see what the message names: a process, whose lease ends with it, or what keeps the lease where it is",
    },
    Row {
        code: Code::TopologyUnreadable,
        name: "host.topology.unreadable",
        exit: 40,
        retry: false,
        meaning: "the host's CPU topology could not be read",
        advice: "look at the path in the message; `virt-pin topology` shows what can be read",
    },
    Row {
        code: Code::HostIo,
        name: "host.io",
        exit: 41,
        retry: false,
        meaning: "the kernel refused an operation on a file",
        advice: "look at the path and the reason in the message",
    },
    Row {
        code: Code::IsolationUnsupported,
        name: "host.isolation.unsupported",
        exit: 42,
        retry: false,
        meaning: "this host has no means to keep its own work off a VM's CPUs in the way asked for",
        advice: "leave isolation out, or use a value that `virt-pin check` says this host can do",
    },
    Row {
        code: Code::ConfigInvalid,
        name: "config.invalid",
        exit: 50,
        retry: false,
        meaning: "the configuration is wrong; file, line and key are in the message",
        advice: "correct it, then run `virt-pin check`",
    },
    Row {
        code: Code::ConfinementFailed,
        name: "enforce.confinement",
        exit: 60,
        retry: false,
        meaning: "the VM's cgroup could not be confined to its lease",
        advice: "`virt-pin check` shows the cgroup mode in use",
    },
    Row {
        code: Code::ThreadMisplaced,
        name: "enforce.thread",
        exit: 61,
        retry: false,
        meaning: "a thread of the VM is not where its lease says and could not be moved there",
        advice: "find out who moved the thread named in the message (a hook script, taskset, numad), or from QEMU's log why it ended; then start the VM again",
    },
    Row {
        code: Code::IsolationFailed,
        name: "enforce.isolation",
        exit: 62,
        retry: false,
        meaning: "the host's own work could not be kept off the VM's CPUs",
        advice: "mend the cgroup, unit or file named in the message, or take CPUs out of pinnable_cpus",
    },
    Row {
        code: Code::CoreSched,
        name: "enforce.core-sched",
        exit: 63,
        retry: false,
        meaning: "the kernel has no core scheduling, or did not give the VM's threads what those of its tenant have",
        advice: "run a kernel with CONFIG_SCHED_CORE, or leave core-sched out of the policy",
    },
    Row {
        code: Code::LibvirtFailed,
        name: "libvirt.failed",
        exit: 70,
        retry: true,
        meaning: "libvirt refused the call or could not be reached",
        advice: "see what the message says of libvirt or the VM; `virsh -c qemu:///system list` shows whether it answers",
    },
    Row {
        code: Code::InstallConflict,
        name: "install.conflict",
        exit: 71,
        retry: false,
        meaning: "installing would destroy somebody else's hook script",
        advice: "give it another name in qemu.d/; before libvirt 6.5, which has no qemu.d/, have one script call both",
    },
];

impl Code {
    /// Every code, in the order of the documentation.
    pub fn all() -> impl Iterator<Item = Code> {
        TABLE.iter().map(|row| row.code)
    }

    fn row(self) -> Option<&'static Row> {
        TABLE.iter().find(|row| row.code == self)
    }

    /// The stable name, such as `cpu.placement.shortage`.
    pub fn name(self) -> &'static str {
        self.row().map_or("internal", |row| row.name)
    }

    /// The code of this name.
    pub fn from_name(name: &str) -> Option<Code> {
        TABLE.iter().find(|row| row.name == name).map(|row| row.code)
    }

    /// Whether it says that a request is in order and there is no place for it.
    pub fn is_about_placement(self) -> bool {
        self == Code::MemoryShortage || self.name().starts_with("cpu.placement.")
    }

    /// The exit status of both binaries for this code.
    pub fn exit(self) -> u8 {
        self.row().map_or(1, |row| row.exit)
    }

    /// Whether the same request can succeed later with nobody editing anything.
    pub fn retry(self) -> bool {
        self.row().is_some_and(|row| row.retry)
    }

    /// One sentence for the reference documentation.
    pub fn meaning(self) -> &'static str {
        self.row().map_or("", |row| row.meaning)
    }

    /// What to do about it in general; an [`Error`] may carry a more particular hint.
    pub fn advice(self) -> &'static str {
        self.row().map_or("", |row| row.advice)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A failure: code, one sentence, optionally a hint and a cause.
#[derive(Debug)]
pub struct Error {
    /// The stable code.
    pub code: Code,
    /// What was asked, what was found and where: one line, no full stop.
    pub message: String,
    /// What to do, when that is more particular than [`Code::advice`].
    pub hint: Option<String>,
    /// When the same request can be honoured with nobody editing anything: "when 2 whole cores are free".
    pub retry_when: Option<String>,
    /// Where it is about room: how much was needed, how much there was.
    pub room: Option<Box<Room>>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// A failure with its code and sentence. Control characters in `message` (a hostile VM name) are escaped.
    pub fn new(code: Code, message: impl AsRef<str>) -> Self {
        Error { code, message: printable(message.as_ref()), hint: None, retry_when: None, room: None, source: None }
    }

    /// The same failure with what to do about it.
    #[must_use]
    pub fn with_hint(mut self, hint: impl AsRef<str>) -> Self {
        self.hint = Some(printable(hint.as_ref()));
        self
    }

    /// The same failure with what caused it.
    #[must_use]
    pub fn because(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// The same lack of room with the moves that would make it.
    #[must_use]
    pub fn with_moves(mut self, moves: Vec<Moved>) -> Self {
        self = self.with_hint(format!("moving {} would make room: `virt-pin repack --for DOMAIN` does that while they run; or relax numa, cache or cores", said(&moves)));
        self.room.iter_mut().for_each(|room| room.moves.clone_from(&moves));
        self
    }

    /// The same failure, its sentence about this domain.
    #[must_use]
    pub fn in_domain(mut self, name: &str) -> Self {
        self.message = format!("domain \"{}\": {}", printable(name), self.message);
        self
    }

    /// A refused file operation: the verb ("read", "write", ...), the path and the kernel's reason in one sentence.
    pub fn io(code: Code, verb: &str, path: &std::path::Path, source: std::io::Error) -> Self {
        Error::new(code, format!("cannot {verb} {}: {source}", path.display()))
    }

    /// The causes, outermost first, without this error's own sentence.
    pub fn causes(&self) -> Vec<String> {
        let mut causes = Vec::new();
        let mut next: Option<&(dyn StdError + 'static)> =
            self.source.as_deref().map(|source| source as &(dyn StdError + 'static));
        while let Some(cause) = next {
            causes.push(printable(&cause.to_string()));
            next = cause.source();
        }
        causes
    }

    /// The text both binaries print on stderr. The first line is complete in itself: libvirt pastes it into its error.
    pub fn render(&self) -> String {
        let mut text = format!("virt-pin: error[{}]: {}\n", self.code, self.message);
        for cause in self.causes() {
            text.push_str("  because: ");
            text.push_str(&cause);
            text.push('\n');
        }
        for line in self.room.iter().flat_map(|room| room.lines(self.code)) {
            text.push_str(&format!("  {line}\n"));
        }
        text.push_str("  hint: ");
        text.push_str(self.hint.as_deref().unwrap_or(self.code.advice()));
        text.push('\n');
        text
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn StdError + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_and_exits_are_unique_and_every_row_is_complete() {
        let names: BTreeSet<_> = TABLE.iter().map(|row| row.name).collect();
        let exits: BTreeSet<_> = TABLE.iter().map(|row| row.exit).collect();
        assert_eq!((names.len(), exits.len()), (TABLE.len(), TABLE.len()));
        for row in TABLE {
            assert!(!row.meaning.is_empty() && !row.advice.is_empty(), "{}", row.name);
            assert!(row.exit != 0 && row.exit < 126, "{}", row.name);
        }
    }

    #[test]
    fn every_variant_has_a_row() {
        // A variant without a row would answer to "internal" twice.
        for code in [Code::InstallConflict, Code::Internal, Code::StateUnsafe, Code::HostIo] {
            assert_eq!(TABLE.iter().filter(|row| row.code == code).count(), 1, "{code:?}");
        }
        assert_eq!(Code::all().count(), Code::InstallConflict as usize + 1);
        assert!(Code::all().all(|code| Code::from_name(code.name()) == Some(code)));
    }

    #[test]
    fn placement_is_not_policy() {
        for code in [Code::Shortage, Code::NeedsRepack, Code::Unsatisfiable, Code::MemoryShortage] {
            assert!(code.is_about_placement(), "{code}");
        }
        for code in [Code::PolicyInvalid, Code::StaticConflict, Code::StalePins, Code::StateLocked, Code::ConfigInvalid]
        {
            assert!(!code.is_about_placement(), "{code}");
        }
    }

    #[test]
    fn the_first_line_is_whole_and_hostile_names_stay_on_it() {
        let error = Error::new(Code::Shortage, "domain \"a\nb\u{1b}[31m\" needs 2 cores").because("x\ny".to_owned());
        let text = error.render();
        assert_eq!(
            text.lines().next(),
            Some("virt-pin: error[cpu.placement.shortage]: domain \"a\\nb\\u{1b}[31m\" needs 2 cores")
        );
        assert_eq!(text.lines().count(), 3);
    }
}
