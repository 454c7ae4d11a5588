//! What a domain's policy may say: every attribute, its values, its default, and whether this version does it.
//!
//! The same attributes are written in `<metadata>` and in the configuration's `[[domain]]` sections, so both come here as
//! (name, value) pairs. [`ATTRIBUTES`] is the one table: parsing, messages and documentation read it. An unknown name or
//! value is refused; unknown never means default. It is longer than most files: a table, its parser and its printer, which
//! have to agree.

use std::num::NonZeroU16;

use crate::cpuset::CpuSet;
use crate::error::{Code, Error, Result};
use crate::host::CoreClass;

/// One attribute of the policy.
#[derive(Clone, Copy, Debug)]
pub struct Attribute {
    /// Its name, in XML and TOML alike.
    pub name: &'static str,
    /// The words it accepts, the default first. Empty for a free value (`nodes`), whose default is "not given".
    pub values: &'static [&'static str],
    /// Words that are valid and not done by this version yet.
    pub unsupported: &'static [&'static str],
    /// What it means, for the reference.
    pub meaning: &'static str,
}

/// The longest name of a tenant.
const MAX_TENANT: usize = 64;

/// Every attribute, in the order of the documentation.
pub const ATTRIBUTES: &[Attribute] = &[
    Attribute {
        name: "policy",
        values: &["shared", "dedicated"],
        unsupported: &[],
        meaning: "dedicated = exclusive CPUs",
    },
    Attribute {
        name: "cores",
        values: &["whole", "thread"],
        unsupported: &[],
        meaning: "whole = full physical cores; thread = single hardware threads (siblings may go to another VM)",
    },
    Attribute {
        name: "threads-per-core",
        values: &["auto"],
        unsupported: &[],
        meaning: "how many threads of each core become vCPUs (a number); the rest are parked; auto = all the core has",
    },
    Attribute {
        name: "numa",
        values: &["prefer", "single", "spread", "any"],
        unsupported: &[],
        meaning: "single = one node or refusal; prefer = fewest nodes; spread = evenly over the nodes (those in `nodes`, or all \
                  with pinnable CPUs); any = no matter",
    },
    Attribute { name: "nodes", values: &[], unsupported: &[], meaning: "restrict to these host nodes, such as 0-1,3" },
    Attribute {
        name: "cache",
        values: &["prefer", "single", "any"],
        unsupported: &[],
        meaning: "single = one last-level cache or refusal; prefer = fewest; any = no matter",
    },
    Attribute {
        name: "cpus",
        values: &[],
        unsupported: &[],
        meaning: "exactly these host CPUs, such as 4-7, or refusal: as many as the domain has dedicated vCPUs",
    },
    Attribute {
        name: "dedicated-vcpus",
        values: &[],
        unsupported: &[],
        meaning: "only these vCPUs get CPUs of their own, such as 0-1; the others run on the housekeeping CPUs",
    },
    Attribute {
        name: "memory",
        values: &["follow", "any"],
        unsupported: &[],
        meaning: "follow = guest memory on the nodes of its CPUs, checked for room before the start",
    },
    Attribute {
        name: "emulator",
        values: &["housekeeping", "isolate", "share"],
        unsupported: &[],
        meaning: "where QEMU's own threads run: housekeeping CPUs, an extra core (or thread) of the lease, or the vCPUs' CPUs",
    },
    Attribute {
        name: "iothreads",
        values: &["housekeeping", "isolate", "share"],
        unsupported: &[],
        meaning: "the same for I/O threads",
    },
    Attribute {
        name: "core-class",
        values: &["any", "performance", "efficiency"],
        unsupported: &[],
        meaning: "which cores, on hybrid machines",
    },
    Attribute {
        name: "topology",
        values: &["host", "keep", "require"],
        unsupported: &[],
        meaning: "host = the guest sees its true cores and threads; keep = leave the guest's view alone; require = as host, and a \
                  start whose XML tells the guest otherwise is refused",
    },
    Attribute {
        name: "locality",
        values: &["none", "devices"],
        unsupported: &[],
        meaning: "devices = prefer the nodes of passed-through PCI devices",
    },
    Attribute {
        name: "isolation",
        values: &["vms", "partition", "slices"],
        unsupported: &[],
        meaning: "vms = no other VM on the leased CPUs; partition = no other task at all (cgroup v2, Linux 6.7); slices = no service \
                  or session of the host (cgroup v2, systemd)",
    },
    Attribute {
        name: "irqs",
        values: &["stay", "away"],
        unsupported: &[],
        meaning: "away = device interrupts that can be moved are kept off the leased CPUs",
    },
    Attribute {
        name: "realtime",
        values: &["no", "yes"],
        unsupported: &[],
        meaning: "yes = the XML must give the dedicated vCPUs a realtime scheduler and lock the guest's memory, without what is \
                  known to hang a guest",
    },
    Attribute {
        name: "core-sched",
        values: &["none", "tenant"],
        unsupported: &[],
        meaning: "tenant = the kernel runs nobody but VMs of the same `tenant` on the threads of a core at the same time (core \
                  scheduling)",
    },
    Attribute {
        name: "tenant",
        values: &[],
        unsupported: &[],
        meaning: "whose the VM is: 1 to 64 letters, digits, `.`, `_` or `-`; needed by core-sched=\"tenant\"",
    },
    Attribute {
        name: "fallback",
        values: &["refuse", "shared"],
        unsupported: &[],
        meaning: "where there is no room: refuse the start, or start without CPUs of its own, recorded as degraded",
    },
];

/// Exclusive CPUs or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// No lease.
    #[default]
    Shared,
    /// A lease.
    Dedicated,
}

/// What is handed out as one piece.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cores {
    /// Full physical cores.
    #[default]
    Whole,
    /// Single hardware threads.
    Thread,
}

/// How many threads of each core become vCPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ThreadsPerCore {
    /// All that the core has.
    #[default]
    Auto,
    /// Exactly so many; the core's other threads are parked.
    Exactly(NonZeroU16),
}

/// How a request may spread over domains of one kind (NUMA nodes, last-level caches).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Span {
    /// As few as possible.
    #[default]
    Prefer,
    /// One, or a refusal.
    Single,
    /// Evenly over all that may be used (nodes only).
    Spread,
    /// No matter.
    Any,
}

/// Where QEMU's threads that are not vCPUs run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OtherThreads {
    /// On the housekeeping CPUs.
    #[default]
    Housekeeping,
    /// On an extra core (or thread) of the lease.
    Isolate,
    /// On the vCPUs' own CPUs.
    Share,
}

/// What of the host may run on the leased CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Isolation {
    /// No other VM; the host's own tasks are left alone.
    #[default]
    Vms,
    /// No other task: the CPUs are cpuset partitions.
    Partition,
    /// No service and no session: systemd keeps its slices elsewhere.
    Slices,
}

/// Where device interrupts are handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Irqs {
    /// Where they are.
    #[default]
    Stay,
    /// Off the leased CPUs, those that can be moved.
    Away,
}

/// Where the guest's memory comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Memory {
    /// From the nodes of its CPUs.
    #[default]
    Follow,
    /// From anywhere.
    Any,
}

/// What counts beside the CPUs themselves when nodes are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Locality {
    /// Nothing.
    #[default]
    None,
    /// The nodes of the PCI devices passed through to the guest.
    Devices,
}

/// What becomes of a start for which there is no room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fallback {
    /// It is refused.
    #[default]
    Refuse,
    /// The domain starts without CPUs of its own, recorded as degraded.
    Shared,
}

/// Who may run on a core's threads at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CoreSched {
    /// Whoever the kernel likes.
    #[default]
    None,
    /// VMs of the same tenant.
    Tenant,
}

/// What the guest is told of its cores and threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GuestView {
    /// The truth.
    #[default]
    Host,
    /// Whatever its XML says.
    Keep,
    /// The truth, or no start.
    Require,
}

/// A policy of which every part is known and done by this version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// `policy`
    pub kind: Kind,
    /// `cores`
    pub cores: Cores,
    /// `threads-per-core`
    pub threads_per_core: ThreadsPerCore,
    /// `numa`
    pub numa: Span,
    /// `nodes`: node numbers; `None` = all. Never empty.
    pub nodes: Option<CpuSet>,
    /// `cache`; never [`Span::Spread`].
    pub cache: Span,
    /// `cpus`: host CPUs; `None` = the allocator chooses. Never empty.
    pub cpus: Option<CpuSet>,
    /// `dedicated-vcpus`: vCPU numbers; `None` = all. Never empty.
    pub dedicated_vcpus: Option<CpuSet>,
    /// `memory`
    pub memory: Memory,
    /// `emulator`
    pub emulator: OtherThreads,
    /// `iothreads`
    pub iothreads: OtherThreads,
    /// `core-class`; `None` = any.
    pub core_class: Option<CoreClass>,
    /// `topology`
    pub topology: GuestView,
    /// `locality`
    pub locality: Locality,
    /// `isolation`
    pub isolation: Isolation,
    /// `irqs`
    pub irqs: Irqs,
    /// `realtime`
    pub realtime: bool,
    /// `core-sched`
    pub core_sched: CoreSched,
    /// `tenant`: letters, digits, `.`, `_` and `-`. Never empty.
    pub tenant: Option<String>,
    /// `fallback`
    pub fallback: Fallback,
}

impl Policy {
    /// The policy that these (name, value) pairs describe; what is not named has its default.
    ///
    /// # Errors
    /// [`Code::PolicyInvalid`] for an unknown name or value, a name given twice, or attributes that contradict each
    /// other; [`Code::PolicyUnsupported`] for a dedicated policy with a valid value that this version does not do.
    pub fn from_attributes<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Policy> {
        let mut policy = Policy::default();
        let mut seen: Vec<&str> = Vec::new();
        let mut unsupported = None;
        for (name, value) in pairs {
            let Some(attribute) = ATTRIBUTES.iter().find(|attribute| attribute.name == name) else {
                let names: Vec<_> = ATTRIBUTES.iter().map(|attribute| attribute.name).collect();
                return Err(invalid(format!("unknown policy attribute \"{name}\""), &names));
            };
            if seen.contains(&attribute.name) {
                return Err(Error::new(Code::PolicyInvalid, format!("policy attribute \"{name}\" is given twice")));
            }
            seen.push(attribute.name);
            policy.set(attribute, value)?;
            if attribute.unsupported.contains(&value) {
                unsupported = unsupported.or(Some((attribute, value.to_owned())));
            }
        }
        if policy.kind == Kind::Shared {
            return Ok(policy);
        }
        if let Some((attribute, value)) = unsupported {
            let done: Vec<_> = attribute.values.iter().filter(|value| !attribute.unsupported.contains(value)).collect();
            return Err(Error::new(
                Code::PolicyUnsupported,
                format!("policy {}=\"{value}\" is not supported by this version", attribute.name),
            )
            .with_hint(format!("use one of {}, or leave the attribute out", quoted(done))));
        }
        if policy.cores == Cores::Thread && policy.threads_per_core != ThreadsPerCore::Auto {
            return Err(Error::new(
                Code::PolicyInvalid,
                "policy threads-per-core needs whole cores, but cores=\"thread\" asks for single threads",
            )
            .with_hint("leave threads-per-core out, or set cores=\"whole\""));
        }
        if policy.realtime && policy.fallback == Fallback::Shared {
            return Err(Error::new(
                Code::PolicyInvalid,
                "policy realtime=\"yes\" with fallback=\"shared\": without CPUs of their own realtime vCPUs would take the shared \
                 ones from everybody, QEMU's own threads included",
            )
            .with_hint("leave fallback out"));
        }
        if policy.core_sched == CoreSched::Tenant && policy.tenant.is_none() {
            return Err(Error::new(
                Code::PolicyInvalid,
                "policy core-sched=\"tenant\" needs to know whose the VM is, and there is no tenant",
            )
            .with_hint("add tenant=\"NAME\": VMs of the same name may share cores"));
        }
        if policy.core_sched == CoreSched::Tenant && policy.fallback == Fallback::Shared {
            return Err(Error::new(
                Code::PolicyInvalid,
                "policy core-sched=\"tenant\" with fallback=\"shared\": without CPUs of its own the VM would run beside everybody",
            )
            .with_hint("leave one of the two out"));
        }
        let shares = [("emulator", policy.emulator), ("iothreads", policy.iothreads)];
        let sharing = shares.into_iter().find(|(_, place)| *place == OtherThreads::Share);
        if let Some((name, _)) = sharing.filter(|_| policy.realtime) {
            return Err(Error::new(
                Code::PolicyInvalid,
                format!(
                    "policy realtime=\"yes\" with {name}=\"share\": a realtime vCPU never yields its CPU, so QEMU's own threads \
                     there starve and the guest hangs"
                ),
            )
            .with_hint(format!("set {name} to \"housekeeping\" or \"isolate\"")));
        }
        Ok(policy)
    }

    /// The tenant whose core scheduling cookie the domain is to have, if any.
    pub fn cookie_of(&self) -> Option<&str> {
        self.tenant.as_deref().filter(|_| self.core_sched == CoreSched::Tenant)
    }

    /// The policy as (name, value) pairs, those with their default value left out: what [`Policy::from_attributes`] reads.
    pub fn to_attributes(&self) -> Vec<(&'static str, String)> {
        let threads = |place: OtherThreads| match place {
            OtherThreads::Housekeeping => "housekeeping",
            OtherThreads::Isolate => "isolate",
            OtherThreads::Share => "share",
        };
        let span = |span: Span| match span {
            Span::Prefer => "prefer",
            Span::Single => "single",
            Span::Spread => "spread",
            Span::Any => "any",
        };
        let word = |word: &str| Some(word.to_owned());
        let list = |set: &Option<CpuSet>| set.as_ref().map(ToString::to_string);
        let value = |name: &str| match name {
            "policy" => word(if self.kind == Kind::Shared { "shared" } else { "dedicated" }),
            "cores" => word(if self.cores == Cores::Whole { "whole" } else { "thread" }),
            "threads-per-core" => match self.threads_per_core {
                ThreadsPerCore::Auto => None,
                ThreadsPerCore::Exactly(count) => Some(count.to_string()),
            },
            "numa" => word(span(self.numa)),
            "nodes" => list(&self.nodes),
            "cache" => word(span(self.cache)),
            "cpus" => list(&self.cpus),
            "dedicated-vcpus" => list(&self.dedicated_vcpus),
            "memory" => word(if self.memory == Memory::Follow { "follow" } else { "any" }),
            "emulator" => word(threads(self.emulator)),
            "iothreads" => word(threads(self.iothreads)),
            "core-class" => self.core_class.and_then(|class| match class {
                CoreClass::Performance => word("performance"),
                CoreClass::Efficiency => word("efficiency"),
            }),
            "topology" => word(match self.topology {
                GuestView::Host => "host",
                GuestView::Keep => "keep",
                GuestView::Require => "require",
            }),
            "locality" => word(if self.locality == Locality::None { "none" } else { "devices" }),
            "isolation" => word(match self.isolation {
                Isolation::Vms => "vms",
                Isolation::Partition => "partition",
                Isolation::Slices => "slices",
            }),
            "irqs" => word(if self.irqs == Irqs::Stay { "stay" } else { "away" }),
            "realtime" => word(if self.realtime { "yes" } else { "no" }),
            "core-sched" => word(if self.core_sched == CoreSched::None { "none" } else { "tenant" }),
            "tenant" => self.tenant.clone(),
            "fallback" => word(if self.fallback == Fallback::Refuse { "refuse" } else { "shared" }),
            _ => None,
        };
        let told = ATTRIBUTES.iter().filter_map(|attribute| Some((attribute, value(attribute.name)?)));
        told.filter(|(attribute, value)| attribute.values.first() != Some(&value.as_str()))
            .map(|(attribute, value)| (attribute.name, value))
            .collect()
    }

    fn set(&mut self, attribute: &Attribute, value: &str) -> Result<()> {
        let unknown = || {
            invalid(format!("unknown value \"{value}\" of policy attribute \"{}\"", attribute.name), attribute.values)
        };
        let threads = || match value {
            "housekeeping" => Ok(OtherThreads::Housekeeping),
            "isolate" => Ok(OtherThreads::Isolate),
            "share" => Ok(OtherThreads::Share),
            _ => Err(unknown()),
        };
        let span = || match value {
            "prefer" => Ok(Span::Prefer),
            "single" => Ok(Span::Single),
            "spread" => Ok(Span::Spread),
            "any" => Ok(Span::Any),
            _ => Err(unknown()),
        };
        let list = |of: &str, one: &str| {
            let name = attribute.name;
            let set = CpuSet::parse_kernel_list(value).map_err(|error| {
                Error::new(Code::PolicyInvalid, format!("policy {name}=\"{value}\" is not a list of {of}"))
                    .because(error)
                    .with_hint("write a list such as 0-1,3")
            })?;
            let empty = || {
                Error::new(Code::PolicyInvalid, format!("policy {name}=\"\" names no {one}"))
                    .with_hint("write a list such as 0-1,3, or leave the attribute out")
            };
            if set.is_empty() { Err(empty()) } else { Ok(set) }
        };
        match attribute.name {
            "threads-per-core" if value != "auto" => {
                let count = Some(value).filter(|value| value.bytes().all(|byte| byte.is_ascii_digit()));
                let count = count.and_then(|value| value.parse().ok()).ok_or_else(|| {
                    Error::new(
                        Code::PolicyInvalid,
                        format!("policy threads-per-core=\"{value}\" is neither \"auto\" nor a number from 1 to 65535"),
                    )
                })?;
                self.threads_per_core = ThreadsPerCore::Exactly(count);
            }
            "nodes" => self.nodes = Some(list("nodes", "node")?),
            "cpus" => self.cpus = Some(list("CPUs", "CPU")?),
            "dedicated-vcpus" => self.dedicated_vcpus = Some(list("vCPUs", "vCPU")?),
            "tenant" => {
                let known = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
                if value.is_empty() || value.len() > MAX_TENANT || !value.bytes().all(known) {
                    return Err(Error::new(
                        Code::PolicyInvalid,
                        format!(
                            "policy tenant=\"{value}\" is not a name of 1 to {MAX_TENANT} letters, digits, \".\", \"_\" or \"-\""
                        ),
                    ));
                }
                self.tenant = Some(value.to_owned());
            }
            "numa" if attribute.values.contains(&value) => self.numa = span()?,
            "cache" if attribute.values.contains(&value) => self.cache = span()?,
            "emulator" => self.emulator = threads()?,
            "iothreads" => self.iothreads = threads()?,
            name => match (name, value) {
                ("policy", "shared") => self.kind = Kind::Shared,
                ("policy", "dedicated") => self.kind = Kind::Dedicated,
                ("cores", "whole") => self.cores = Cores::Whole,
                ("cores", "thread") => self.cores = Cores::Thread,
                ("memory", "follow") => self.memory = Memory::Follow,
                ("memory", "any") => self.memory = Memory::Any,
                ("core-class", "any") => self.core_class = None,
                ("core-class", "performance") => self.core_class = Some(CoreClass::Performance),
                ("core-class", "efficiency") => self.core_class = Some(CoreClass::Efficiency),
                ("topology", "host") => self.topology = GuestView::Host,
                ("topology", "keep") => self.topology = GuestView::Keep,
                ("topology", "require") => self.topology = GuestView::Require,
                ("locality", "none") => self.locality = Locality::None,
                ("locality", "devices") => self.locality = Locality::Devices,
                ("isolation", "vms") => self.isolation = Isolation::Vms,
                ("isolation", "partition") => self.isolation = Isolation::Partition,
                ("isolation", "slices") => self.isolation = Isolation::Slices,
                ("irqs", "stay") => self.irqs = Irqs::Stay,
                ("irqs", "away") => self.irqs = Irqs::Away,
                ("realtime", "no") => self.realtime = false,
                ("realtime", "yes") => self.realtime = true,
                ("core-sched", "none") => self.core_sched = CoreSched::None,
                ("core-sched", "tenant") => self.core_sched = CoreSched::Tenant,
                ("fallback", "refuse") => self.fallback = Fallback::Refuse,
                ("fallback", "shared") => self.fallback = Fallback::Shared,
                // Values without a field here are either the default or refused by the caller as unsupported.
                _ if attribute.values.contains(&value) => {}
                _ => return Err(unknown()),
            },
        }
        Ok(())
    }
}

fn quoted<'a>(words: impl IntoIterator<Item = &'a &'a str>) -> String {
    words.into_iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(", ")
}

fn invalid(message: String, accepted: &[&str]) -> Error {
    Error::new(Code::PolicyInvalid, message).with_hint(format!("accepted: {}", quoted(accepted)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn refused(pairs: &[(&str, &str)], code: Code, message: &str) {
        let error = Policy::from_attributes(pairs.iter().copied()).unwrap_err();
        assert_eq!((error.code, error.message.as_str()), (code, message));
    }

    #[test]
    fn every_documented_value_is_parsed_or_refused_as_unsupported() {
        for attribute in ATTRIBUTES {
            for value in attribute.values {
                // Beside what some values cannot be without.
                let beside = [("policy", "dedicated"), ("tenant", "a")].into_iter();
                let beside = beside.filter(|(name, _)| *name != attribute.name);
                let policy = Policy::from_attributes(beside.chain([(attribute.name, *value)]));
                match policy {
                    Ok(_) => assert!(!attribute.unsupported.contains(value), "{}={value}", attribute.name),
                    Err(error) => {
                        assert!(attribute.unsupported.contains(value), "{}={value}", attribute.name);
                        assert_eq!(error.code, Code::PolicyUnsupported);
                    }
                }
            }
        }
    }

    #[test]
    fn the_first_value_is_the_default() {
        let defaults = ATTRIBUTES.iter().filter_map(|attribute| Some((attribute.name, *attribute.values.first()?)));
        assert_eq!(Policy::from_attributes(defaults).unwrap(), Policy::default());
    }

    #[test]
    fn unknown_never_means_default() {
        refused(&[("polcy", "dedicated")], Code::PolicyInvalid, "unknown policy attribute \"polcy\"");
        refused(
            &[("policy", "Dedicated")],
            Code::PolicyInvalid,
            "unknown value \"Dedicated\" of policy attribute \"policy\"",
        );
        refused(&[("numa", "")], Code::PolicyInvalid, "unknown value \"\" of policy attribute \"numa\"");
        refused(&[("cache", "spread")], Code::PolicyInvalid, "unknown value \"spread\" of policy attribute \"cache\"");
        refused(
            &[("isolation", "isolated")],
            Code::PolicyInvalid,
            "unknown value \"isolated\" of policy attribute \"isolation\"",
        );
        refused(&[("nodes", "x")], Code::PolicyInvalid, "policy nodes=\"x\" is not a list of nodes");
        refused(&[("nodes", " ")], Code::PolicyInvalid, "policy nodes=\"\" names no node");
        for tenant in ["", "a b", "é", "a/b", "'", &"x".repeat(65)] {
            let message =
                format!("policy tenant=\"{tenant}\" is not a name of 1 to 64 letters, digits, \".\", \"_\" or \"-\"");
            refused(&[("tenant", tenant)], Code::PolicyInvalid, &message);
        }
        for count in ["0", "-1", "1.5", "+2", "65536", "", " 2", "٢"] {
            let message =
                format!("policy threads-per-core=\"{count}\" is neither \"auto\" nor a number from 1 to 65535");
            refused(&[("threads-per-core", count)], Code::PolicyInvalid, &message);
        }
        refused(
            &[("policy", "shared"), ("policy", "shared")],
            Code::PolicyInvalid,
            "policy attribute \"policy\" is given twice",
        );
    }

    #[test]
    fn attributes_come_back_as_they_were() {
        let free = [
            ("threads-per-core", "2"),
            ("nodes", "0-1,3"),
            ("cpus", "4-7"),
            ("dedicated-vcpus", "0-1"),
            ("tenant", "a.b_c-1"),
        ];
        for attribute in ATTRIBUTES.iter().filter(|attribute| attribute.name != "policy") {
            let values =
                attribute.values.iter().filter(|value| !attribute.unsupported.contains(value)).skip(1).copied();
            for value in values.chain(free.iter().filter(|(name, _)| *name == attribute.name).map(|(_, value)| *value))
            {
                let mut pairs = vec![("policy", "dedicated"), (attribute.name, value)];
                pairs.extend((attribute.name == "core-sched").then_some(("tenant", "a")));
                let policy = Policy::from_attributes(pairs.iter().copied()).unwrap();
                let told = policy.to_attributes();
                assert!(told.iter().map(|(name, value)| (*name, value.as_str())).eq(pairs));
                assert_eq!(
                    Policy::from_attributes(told.iter().map(|(name, value)| (*name, value.as_str()))).unwrap(),
                    policy
                );
            }
        }
    }

    #[test]
    fn what_is_known_to_hang_a_guest_is_refused() {
        for (name, value) in [("emulator", "share"), ("iothreads", "share"), ("fallback", "shared")] {
            let pairs = [("policy", "dedicated"), ("realtime", "yes"), (name, value)];
            let error = Policy::from_attributes(pairs).unwrap_err();
            assert_eq!(error.code, Code::PolicyInvalid);
            assert!(error.message.contains(&format!("with {name}=\"{value}\"")), "{}", error.message);
        }
    }

    #[test]
    fn core_scheduling_is_a_tenants_and_needs_cpus() {
        let dedicated = [("policy", "dedicated"), ("core-sched", "tenant")];
        let message = "policy core-sched=\"tenant\" needs to know whose the VM is, and there is no tenant";
        refused(&dedicated, Code::PolicyInvalid, message);
        let without = [dedicated[0], dedicated[1], ("tenant", "a"), ("fallback", "shared")];
        assert_eq!(Policy::from_attributes(without).unwrap_err().code, Code::PolicyInvalid);
        assert!(Policy::from_attributes(without[..3].iter().copied()).is_ok());
    }
}
