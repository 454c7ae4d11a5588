//! One configuration file: what it may say, each value with the line it stands on.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::keys::{Doc, Given, Key, SECTIONS};
use super::limit::Limit;
use crate::alloc::demand::Reserve;
use crate::alloc::policy::Policy;
use crate::cpuset::CpuSet;
use crate::error::{Code, Error, Result, printable};
use crate::uuid::DomainUuid;

/// The contents of one file; `None` = not said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fragment {
    /// `pinnable_cpus`: the CPUs that may be handed out, in the kernel's list syntax.
    pub pinnable: Option<CpuSet>,
    /// `command`: the absolute path of the `virt-pin` command, run after a start to bring libvirt's live XML in line.
    pub command: Option<String>,
    /// `autostart_reserve`: whether the places of autostart domains that do not run are kept from others at any price.
    pub autostart_reserve: Option<Reserve>,
    /// `repair_drift`: whether the agent moves threads back that somebody has moved by hand.
    pub repair_drift: Option<bool>,
    /// `[[domain]]`: policies for domains that bring none.
    pub domains: Vec<DomainSection>,
    /// `[[limit]]`: what policies may ask for.
    pub limits: Vec<Limit>,
}

/// One `[[domain]]` section.
#[derive(Clone, Debug, PartialEq)]
pub struct DomainSection {
    /// Which domains.
    pub selects: Selector,
    /// The policy's attributes as (name, value), valid ones.
    pub attributes: Vec<(String, String)>,
    /// `FILE:LINE`, for messages.
    pub place: String,
}

/// Which domains a section is for.
#[derive(Clone, Debug, PartialEq)]
pub enum Selector {
    /// `uuid = "..."`
    Uuid(DomainUuid),
    /// `match = "db-*"`: a shell pattern on the whole name.
    Name(glob::Pattern),
}

impl Fragment {
    /// Reads one file. `path` is only used in messages.
    ///
    /// # Errors
    /// [`Code::ConfigInvalid`] with `FILE:LINE` and the key.
    pub fn parse(path: &str, text: &str) -> Result<Fragment> {
        let at = |span: &Range<usize>| format!("{path}:{}", line(text, span.start));
        let table = DeTable::parse(text).map_err(|error| {
            let place = error.span().map_or_else(|| path.to_owned(), |span| at(&span));
            invalid(&place, &format!("not TOML: {}", error.message().replace('\n', ", ")))
        })?;
        let mut fragment = Fragment::default();
        for (key, value) in table.get_ref() {
            let (name, place) = (key.get_ref().as_ref(), at(&key.span()));
            Given { name, value, place: &place, at: &at }.read_known(KEYS, &mut fragment)?;
        }
        Ok(fragment)
    }
}

/// The keys of a file.
pub(super) const KEYS: &[Key<Fragment>] = &[
    Key {
        doc: Doc {
            name: "pinnable_cpus",
            value: "a string: a list of CPUs as the kernel writes them, strides as in \"0-63:1/2\" included",
            default: Some("\"\""),
            example: Some("\"2-15\""),
            meaning: "The CPUs that may be handed out; none by default, and every dedicated VM is refused. Whole cores should be \
                      named whole: see the siblings in `virt-pin topology`. CPUs that are offline or absent are never handed out. \
                      The others are the housekeeping CPUs: the host is there, and QEMU beside its vCPUs.",
        },
        read: |fragment, given| {
            let list = string(given)?;
            let cpus = CpuSet::parse_kernel_list(list);
            let wrong = |error| invalid(given.place, &format!("pinnable_cpus = \"{list}\": {error}"));
            fragment.pinnable = Some(cpus.map_err(wrong)?);
            Ok(())
        },
    },
    Key {
        doc: Doc {
            name: "command",
            value: "a string: an absolute path",
            default: Some("\"/usr/bin/virt-pin\""),
            example: Some("\"/usr/bin/virt-pin\""),
            meaning: "The virt-pin command, run after a start so that libvirt's live XML shows the lease.",
        },
        read: |fragment, given| {
            let command = string(given)?;
            if !command.starts_with('/') {
                let what = format!("command = \"{command}\": must be an absolute path");
                return Err(invalid(given.place, &what));
            }
            fragment.command = Some(command.to_owned());
            Ok(())
        },
    },
    Key {
        doc: Doc {
            name: "autostart_reserve",
            value: "\"strict\" or \"prefer\"",
            default: Some("\"strict\""),
            example: Some("\"strict\""),
            meaning: "Dedicated VMs that are marked autostart have their CPUs set aside while they do not run. May another VM have \
                      these when nothing else is left? `strict`: no, it is refused (`cpu.placement.reserved`). `prefer`: yes.",
        },
        read: |fragment, given| {
            let word = string(given)?;
            let reserve = Reserve::parse(word).ok_or_else(|| {
                let words = Reserve::WORDS.map(|(word, _)| format!("\"{word}\"")).join(" or ");
                invalid(given.place, &format!("autostart_reserve = \"{word}\": must be {words}"))
            });
            fragment.autostart_reserve = Some(reserve?);
            Ok(())
        },
    },
    Key {
        doc: Doc {
            name: "repair_drift",
            value: "true or false",
            default: Some("false"),
            example: Some("false"),
            meaning: "Whether the agent moves threads of a dedicated VM back that somebody has moved by hand; by default it only \
                      says so.",
        },
        read: |fragment, given| {
            let DeValue::Boolean(repair) = given.value.get_ref() else {
                let what = kind(given.value.get_ref());
                return Err(invalid(given.place, &format!("repair_drift: must be true or false, not {what}")));
            };
            fragment.repair_drift = Some(*repair);
            Ok(())
        },
    },
    Key {
        doc: Doc {
            name: "domain",
            value: SECTIONS,
            default: None,
            example: None,
            meaning: "A policy for VMs that bring none. A uuid goes before a pattern; of several patterns the last one counts. Its \
                      other keys are the policy's attributes (virt-pin-policy(7)); underscores may stand for hyphens.",
        },
        read: |fragment, given| {
            for section in sections(given)? {
                fragment.domains.push(domain(section, given.at)?);
            }
            Ok(())
        },
    },
    Key {
        doc: Doc {
            name: "limit",
            value: SECTIONS,
            default: None,
            example: None,
            meaning: "What policies may ask for, since who may define a VM need not be root. Every section whose pattern matches \
                      holds.",
        },
        read: |fragment, given| {
            for section in sections(given)? {
                fragment.limits.push(Limit::parse(section, given.at)?);
            }
            Ok(())
        },
    },
];

/// Which domains a section is for, as far as it has been read.
type Selects = Option<Selector>;

/// The keys of `[[domain]]`, beside the policy's attributes.
pub(super) const DOMAIN_KEYS: &[Key<Selects>] = &[
    Key {
        doc: Doc {
            name: "match",
            value: "a string: a shell pattern",
            default: None,
            example: Some("\"db-*\""),
            meaning: "For the VMs whose whole name matches.",
        },
        read: |selects, given| {
            let text = string(given)?;
            let pattern = glob::Pattern::new(text);
            let wrong = |error| invalid(given.place, &format!("match = \"{text}\": {error}"));
            select(selects, Selector::Name(pattern.map_err(wrong)?), given.place)
        },
    },
    Key {
        doc: Doc {
            name: "uuid",
            value: "a string: a UUID",
            default: None,
            example: None,
            meaning: "For one VM; instead of match.",
        },
        read: |selects, given| {
            let text = string(given)?;
            let uuid = DomainUuid::parse(text);
            let wrong = || invalid(given.place, &format!("uuid = \"{text}\": not a UUID"));
            select(selects, Selector::Uuid(uuid.ok_or_else(wrong)?), given.place)
        },
    },
];

fn select(selects: &mut Selects, selector: Selector, place: &str) -> Result<()> {
    match selects.replace(selector) {
        Some(_) => Err(invalid(place, "domain: give either match or uuid, not both")),
        None => Ok(()),
    }
}

/// The sections of this name.
fn sections<'a>(given: &Given<'a>) -> Result<&'a [Spanned<DeValue<'a>>]> {
    let name = given.name;
    match given.value.get_ref() {
        DeValue::Array(sections) => Ok(sections),
        _ => Err(invalid(given.place, &format!("{name}: write each one as a section [[{name}]]"))),
    }
}

fn domain(section: &Spanned<DeValue<'_>>, at: &dyn Fn(&Range<usize>) -> String) -> Result<DomainSection> {
    let place = at(&section.span());
    let DeValue::Table(table) = section.get_ref() else {
        return Err(invalid(&place, "domain: write each one as a section [[domain]]"));
    };
    let mut selects = None;
    let mut attributes = Vec::new();
    let mut first = place.clone();
    for (key, value) in table {
        let (name, place) = (key.get_ref().as_ref(), at(&key.span()));
        let given = Given { name, value, place: &place, at };
        if let Some(read) = given.read(DOMAIN_KEYS, &mut selects) {
            read?;
            continue;
        }
        // In TOML the attributes may be written with underscores, like our other keys.
        let attribute = (name.replace('_', "-"), scalar(&given)?);
        let pair = [(attribute.0.as_str(), attribute.1.as_str())];
        if let Err(error) = Policy::from_attributes(pair) {
            let hint = error.hint.unwrap_or_default();
            return Err(invalid(&place, &format!("{name}: {}", error.message)).with_hint(hint));
        }
        first = place;
        attributes.push(attribute);
    }
    let selects = selects.ok_or_else(|| invalid(&place, "domain: needs match = \"PATTERN\" or uuid = \"UUID\""))?;
    // Together the attributes may contradict each other. What a later version does is refused when a domain asks for it.
    match Policy::from_attributes(attributes.iter().map(|(name, value)| (name.as_str(), value.as_str()))) {
        Err(error) if error.code != Code::PolicyUnsupported => return Err(invalid(&first, &error.message)),
        _ => {}
    }
    Ok(DomainSection { selects, attributes, place })
}

pub(super) fn string<'a>(given: &Given<'a>) -> Result<&'a str> {
    match given.value.get_ref() {
        DeValue::String(text) => Ok(text),
        other => Err(invalid(given.place, &format!("{}: must be a string, not {}", given.name, kind(other)))),
    }
}

/// A string, or a number as it is written: `threads-per-core = 1`.
fn scalar(given: &Given<'_>) -> Result<String> {
    match given.value.get_ref() {
        DeValue::Integer(number) => Ok(number.to_string()),
        _ => string(given).map(str::to_owned),
    }
}

pub(super) fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) | DeValue::Float(_) => "a number",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

fn line(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|&byte| byte == b'\n').count() + 1
}

pub(super) fn invalid(place: &str, what: &str) -> Error {
    Error::new(Code::ConfigInvalid, format!("{place}: {}", printable(what)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_file() {
        let text = "# comment\npinnable_cpus = \"2-15, 18\"\ncommand = \"/opt/virt-pin\"\nautostart_reserve = \"prefer\"\nrepair_drift = true\n[[domain]]\nmatch = \"db-*\"\n\
                    policy = \"dedicated\"\nthreads-per-core = 1\n[[domain]]\nuuid = \"0123abcd-89ab-cdef-0123-456789abcdef\"\n\
                    policy = \"dedicated\"\ncore_class = \"performance\"\n";
        let fragment = Fragment::parse("a.toml", text).unwrap();
        assert_eq!(fragment.pinnable.unwrap().to_string(), "2-15,18");
        assert_eq!(fragment.command.as_deref(), Some("/opt/virt-pin"));
        assert_eq!(fragment.autostart_reserve, Some(Reserve::Prefer));
        assert_eq!(fragment.repair_drift, Some(true));
        let [db, by_uuid] = &fragment.domains[..] else { panic!("{:?}", fragment.domains) };
        assert_eq!(db.selects, Selector::Name(glob::Pattern::new("db-*").unwrap()));
        let expected = [("policy", "dedicated"), ("threads-per-core", "1")];
        assert_eq!(db.attributes, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
        assert_eq!(db.place, "a.toml:6");
        assert!(by_uuid.attributes.contains(&("core-class".to_owned(), "performance".to_owned())));
        assert_eq!(Fragment::parse("a.toml", "").unwrap(), Fragment::default());
        assert_eq!(Fragment::parse("a.toml", "pinnable_cpus = \"\"").unwrap().pinnable, Some(CpuSet::new()));
    }

    #[test]
    fn errors_name_file_line_and_key() {
        for (text, expected) in [
            ("\npinnable_cpus = \"3-1\"", "x:2: pinnable_cpus = \"3-1\": range runs backwards, 3-1 at position 3"),
            ("pinnable_cpus = 3", "x:1: pinnable_cpus: must be a string, not a number"),
            ("pinnable_cpus = \"0\u{1}\"", "x:1: not TOML: "),
            (
                "a = 1\npinnable_cpu = \"1\"",
                "x:1: a: unknown key; known are pinnable_cpus, command, autostart_reserve, repair_drift, [[domain]] and [[limit]]",
            ),
            (
                "\nautostart_reserve = \"Strict\"",
                "x:2: autostart_reserve = \"Strict\": must be \"strict\" or \"prefer\"",
            ),
            ("repair_drift = \"true\"", "x:1: repair_drift: must be true or false, not a string"),
            ("autostart_reserve = true", "x:1: autostart_reserve: must be a string, not true or false"),
            ("pinnable_cpus = \"1\"\npinnable_cpus = \"2\"", "x:2: not TOML: duplicate key"),
            ("pinnable_cpus = ", "x:1: not TOML: "),
            ("command = \"virt-pin\"", "x:1: command = \"virt-pin\": must be an absolute path"),
            ("[domain]\nmatch = \"a\"", "x:1: domain: write each one as a section [[domain]]"),
            ("[[domain]]\npolicy = \"dedicated\"", "x:1: domain: needs match = \"PATTERN\" or uuid = \"UUID\""),
            ("[[domain]]\nmatch = \"[\"", "x:2: match = \"[\": "),
            ("[[domain]]\nuuid = \"1\"", "x:2: uuid = \"1\": not a UUID"),
            (
                "[[domain]]\nmatch = \"a\"\nuuid = \"0123abcd89abcdef0123456789abcdef\"",
                "x:3: domain: give either match or uuid",
            ),
            ("[[domain]]\nmatch = \"a\"\n\npolcy = \"dedicated\"", "x:4: polcy: unknown policy attribute \"polcy\""),
            ("[[domain]]\nmatch = \"a\"\npolicy = true", "x:3: policy: must be a string, not true or false"),
            (
                "[[domain]]\nmatch = \"a\"\npolicy = \"Dedicated\"",
                "x:3: policy: unknown value \"Dedicated\" of policy attribute \"policy\"",
            ),
        ] {
            let error = Fragment::parse("x", text).unwrap_err();
            assert_eq!(error.code, Code::ConfigInvalid);
            assert!(error.message.starts_with(expected), "{text:?} gave {:?}", error.message);
        }
    }
}
