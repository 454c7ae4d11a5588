//! `[[limit]]`: how much of the host the policies of VMs may take, since who writes a VM's XML need not be root. Says whether a
//! request is within its limits; grants nothing.

use std::ops::Range;

use toml::Spanned;
use toml::de::DeValue;

use super::fragment::{invalid, kind, string};
use super::keys::{Doc, Given, Key};
use crate::alloc::policy::{ATTRIBUTES, Policy};
use crate::error::{Code, Error, Result};

/// One section. Every one whose pattern matches holds, wherever it is written.
#[derive(Clone, Debug, PartialEq)]
pub struct Limit {
    /// `match = "ci-*"`: a shell pattern on the whole name; without it the section is for every VM.
    pub names: Option<glob::Pattern>,
    /// `max_vcpus`: so many vCPUs of a VM may have CPUs of their own.
    pub max_vcpus: Option<u16>,
    /// `deny`: attributes (`"cpus"`) or values of them (`"isolation=partition"`) that may not be asked for.
    pub deny: Vec<(String, Option<String>)>,
    /// `FILE:LINE`, for messages.
    pub place: String,
}

impl Limit {
    /// Reads one section; `at` makes a place of a position.
    pub(super) fn parse(section: &Spanned<DeValue<'_>>, at: &dyn Fn(&Range<usize>) -> String) -> Result<Limit> {
        let place = at(&section.span());
        let DeValue::Table(table) = section.get_ref() else {
            return Err(invalid(&place, "limit: write each one as a section [[limit]]"));
        };
        let mut limit = Limit { names: None, max_vcpus: None, deny: Vec::new(), place: place.clone() };
        for (key, value) in table {
            let (name, place) = (key.get_ref().as_ref(), at(&key.span()));
            Given { name, value, place: &place, at }.read_known(KEYS, &mut limit)?;
        }
        if limit.max_vcpus.is_none() && limit.deny.is_empty() {
            return Err(invalid(&place, "limit: limits nothing without max_vcpus or deny"));
        }
        Ok(limit)
    }

    /// Whether it is about the VM of this name.
    pub fn is_for(&self, name: &str) -> bool {
        self.names.as_ref().is_none_or(|pattern| pattern.matches(name))
    }

    /// Whether a VM that it is about, of so many vCPUs, may have what its policy asks for.
    ///
    /// # Errors
    /// [`Code::PolicyDenied`].
    pub fn check(&self, vcpus: u16, policy: &Policy) -> Result<()> {
        let own = match &policy.dedicated_vcpus {
            Some(vcpus) => u16::try_from(vcpus.len()).unwrap_or(u16::MAX),
            None => vcpus,
        };
        if let Some(most) = self.max_vcpus.filter(|most| own > *most) {
            let what = format!("asks for CPUs of its own for {own} of its vCPUs, {} allows {most}", self.place);
            return Err(Error::new(Code::PolicyDenied, what));
        }
        let asked = policy.to_attributes();
        for (name, value) in &self.deny {
            let hit =
                asked.iter().find(|(asked, told)| asked == name && value.as_ref().is_none_or(|value| value == told));
            if let Some((name, told)) = hit {
                let what = format!("asks for {name}=\"{told}\", which {} does not allow", self.place);
                return Err(Error::new(Code::PolicyDenied, what));
            }
        }
        Ok(())
    }
}

/// The keys of `[[limit]]`.
pub(super) const KEYS: &[Key<Limit>] = &[
    Key {
        doc: Doc {
            name: "match",
            value: "a string: a shell pattern",
            default: None,
            example: Some("\"ci-*\""),
            meaning: "For the VMs whose whole name matches; without it, for every VM.",
        },
        read: |limit, given| {
            let text = string(given)?;
            let pattern = glob::Pattern::new(text);
            let wrong = |error| invalid(given.place, &format!("match = \"{text}\": {error}"));
            limit.names = Some(pattern.map_err(wrong)?);
            Ok(())
        },
    },
    Key {
        doc: Doc {
            name: "max_vcpus",
            value: "a number",
            default: None,
            example: Some("4"),
            meaning: "So many vCPUs of a VM may have CPUs of their own; 0 means none at all.",
        },
        read: |limit, given| {
            let DeValue::Integer(number) = given.value.get_ref() else {
                let found = kind(given.value.get_ref());
                return Err(invalid(given.place, &format!("max_vcpus: must be a number, not {found}")));
            };
            let count = number.to_string().parse();
            let wrong = |_| invalid(given.place, &format!("max_vcpus = {number}: must be between 0 and 65535"));
            limit.max_vcpus = Some(count.map_err(wrong)?);
            Ok(())
        },
    },
    Key {
        doc: Doc {
            name: "deny",
            value: "a list of strings",
            default: None,
            example: Some("[\"cpus\", \"realtime=yes\"]"),
            meaning: "Attributes, or values of them, that may not be asked for.",
        },
        read: |limit, given| {
            let DeValue::Array(items) = given.value.get_ref() else {
                let found = kind(given.value.get_ref());
                return Err(invalid(given.place, &format!("deny: must be a list of strings, not {found}")));
            };
            for value in items.iter() {
                let place = (given.at)(&value.span());
                limit.deny.push(denied(string(&Given { value, place: &place, ..*given })?, &place)?);
            }
            Ok(())
        },
    },
];

/// `NAME` or `NAME=VALUE`.
fn denied(text: &str, place: &str) -> Result<(String, Option<String>)> {
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (text, None),
    };
    let name = name.replace('_', "-");
    let Some(attribute) = ATTRIBUTES.iter().find(|attribute| attribute.name == name) else {
        return Err(invalid(place, &format!("deny \"{text}\": no policy attribute is named \"{name}\"")));
    };
    if let Some(value) = value {
        if let Err(error) = Policy::from_attributes([(name.as_str(), value)]) {
            return Err(invalid(place, &format!("deny \"{text}\": {}", error.message)));
        }
        if attribute.values.first() == Some(&value) {
            // Nobody could leave it out.
            return Err(invalid(place, &format!("deny \"{text}\": it is the default")));
        }
    }
    Ok((name, value.map(str::to_owned)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::Settings;

    fn settings(text: &str) -> Result<Settings> {
        Settings::merge([("x", text)])
    }

    fn check(config: &str, name: &str, vcpus: u16, attributes: &[(&str, &str)]) -> Option<String> {
        let pairs = [("policy", "dedicated")].into_iter().chain(attributes.iter().copied());
        let policy = Policy::from_attributes(pairs).unwrap();
        let error = settings(config).unwrap().check(name, vcpus, &policy).err()?;
        assert_eq!(error.code, Code::PolicyDenied);
        Some(error.message)
    }

    #[test]
    fn every_limit_that_matches_holds() {
        let config = "[[limit]]\nmax_vcpus = 8\n[[limit]]\nmatch = \"ci-*\"\nmax_vcpus = 2\ndeny = [\"cpus\", \"realtime=yes\"]\n";
        let denied = |name, vcpus, attributes: &[_]| check(config, name, vcpus, attributes);
        assert_eq!(denied("db", 8, &[("cpus", "0-7")]), None);
        assert_eq!(denied("db", 9, &[]).unwrap(), "asks for CPUs of its own for 9 of its vCPUs, x:1 allows 8");
        assert_eq!(denied("ci-1", 2, &[]), None);
        assert_eq!(denied("ci-1", 3, &[("dedicated-vcpus", "0-1")]), None);
        assert_eq!(denied("ci-1", 3, &[]).unwrap(), "asks for CPUs of its own for 3 of its vCPUs, x:3 allows 2");
        assert_eq!(denied("ci-1", 1, &[("cpus", "4")]).unwrap(), "asks for cpus=\"4\", which x:3 does not allow");
        assert_eq!(
            denied("ci-1", 1, &[("realtime", "yes")]).unwrap(),
            "asks for realtime=\"yes\", which x:3 does not allow"
        );
        // None at all.
        assert!(check("[[limit]]\nmatch = \"guest-*\"\nmax_vcpus = 0", "guest-7", 1, &[]).is_some());
        assert!(check("[[limit]]\ndeny = [\"policy=dedicated\"]", "x", 1, &[]).is_some());
    }

    #[test]
    fn mistakes_are_named() {
        for (text, expected) in [
            ("limit = 1", "x:1: limit: write each one as a section [[limit]]"),
            ("[[limit]]\nmatch = \"a\"", "x:1: limit: limits nothing without max_vcpus or deny"),
            ("[[limit]]\nmax_vcpus = -1", "x:2: max_vcpus = -1: must be between 0 and 65535"),
            ("[[limit]]\nmax_vcpus = \"1\"", "x:2: max_vcpus: must be a number, not a string"),
            ("[[limit]]\ndeny = \"cpus\"", "x:2: deny: must be a list of strings, not a string"),
            ("[[limit]]\ndeny = [\"cpu\"]", "x:2: deny \"cpu\": no policy attribute is named \"cpu\""),
            ("[[limit]]\ndeny = [\"numa=many\"]", "x:2: deny \"numa=many\": unknown value"),
            ("[[limit]]\ndeny = [\"cores=whole\"]", "x:2: deny \"cores=whole\": it is the default"),
            ("[[limit]]\nmax_vcpu = 1", "x:2: max_vcpu: unknown key; known are match, max_vcpus and deny"),
            ("[[limit]]\nmax_vcpus = 1\nmatch = \"[\"", "x:3: match = \"[\": "),
        ] {
            let error = settings(text).unwrap_err();
            assert!(error.message.starts_with(expected), "{text:?} gave {:?}", error.message);
        }
    }
}
