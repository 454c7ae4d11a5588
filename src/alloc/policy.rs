//! What a domain's policy may say: every attribute, its values, its default, and whether this version does it.
//!
//! The same attributes are written in `<metadata>` and in the configuration's `[[domain]]` sections, so both come here as
//! (name, value) pairs. [`ATTRIBUTES`] is the one table: parsing, messages and documentation read it. An unknown name or
//! value is refused; unknown never means default.

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
        unsupported: &["spread"],
        meaning: "single = one node or refusal; prefer = fewest nodes; spread = evenly over nodes; any = no matter",
    },
    Attribute { name: "nodes", values: &[], unsupported: &[], meaning: "restrict to these host nodes, such as 0-1,3" },
    Attribute {
        name: "cache",
        values: &["prefer", "single", "any"],
        unsupported: &[],
        meaning: "single = one last-level cache or refusal; prefer = fewest; any = no matter",
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
        values: &["host", "keep"],
        unsupported: &[],
        meaning: "host = the guest sees its true cores and threads; keep = leave the guest's view alone",
    },
    Attribute {
        name: "locality",
        values: &["none", "devices"],
        unsupported: &["devices"],
        meaning: "devices = prefer the nodes of passed-through PCI devices",
    },
    Attribute {
        name: "isolation",
        values: &["vms", "partition"],
        unsupported: &["partition"],
        meaning: "vms = no other VM on the leased CPUs; partition = nothing else at all",
    },
    Attribute {
        name: "realtime",
        values: &["no", "yes"],
        unsupported: &["yes"],
        meaning: "yes = FIFO scheduling of the vCPUs, with the checks that need it",
    },
    Attribute {
        name: "fallback",
        values: &["refuse", "shared"],
        unsupported: &["shared"],
        meaning: "on a refusal: refuse the start, or start in the shared pool and record it as degraded",
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

/// Where the guest's memory comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Memory {
    /// From the nodes of its CPUs.
    #[default]
    Follow,
    /// From anywhere.
    Any,
}

/// What the guest is told of its cores and threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GuestView {
    /// The truth.
    #[default]
    Host,
    /// Whatever its XML says.
    Keep,
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
    /// `cache`
    pub cache: Span,
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
        Ok(policy)
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
            // "spread" is refused by the caller as unsupported.
            "prefer" | "spread" => Ok(Span::Prefer),
            "single" => Ok(Span::Single),
            "any" => Ok(Span::Any),
            _ => Err(unknown()),
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
            "nodes" => {
                let nodes = CpuSet::parse_kernel_list(value).map_err(|error| {
                    Error::new(Code::PolicyInvalid, format!("policy nodes=\"{value}\" is not a list of nodes"))
                        .because(error)
                })?;
                if nodes.is_empty() {
                    return Err(Error::new(Code::PolicyInvalid, "policy nodes=\"\" names no node"));
                }
                self.nodes = Some(nodes);
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
                let policy = Policy::from_attributes(
                    [("policy", "dedicated"), (attribute.name, value)]
                        .into_iter()
                        .skip(usize::from(attribute.name == "policy")),
                );
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
    fn a_shared_domain_may_carry_what_a_later_version_does() {
        assert!(Policy::from_attributes([("isolation", "partition")]).is_ok());
        refused(
            &[("policy", "dedicated"), ("isolation", "partition")],
            Code::PolicyUnsupported,
            "policy isolation=\"partition\" is not supported by this version",
        );
    }
}
