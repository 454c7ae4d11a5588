//! What a key of the configuration is: its name, its value, what it means, and how it is read. The parser, its messages, the
//! manual and the default file all read the same tables, one for each kind of section. Reads no file.

use std::ops::Range;

use toml::Spanned;
use toml::de::DeValue;

use super::fragment::{self, invalid};
use super::limit;
use crate::error::Result;

/// What is said of a key to people.
#[derive(Clone, Copy, Debug)]
pub struct Doc {
    /// Its name.
    pub name: &'static str,
    /// What its value is: "a string", say.
    pub value: &'static str,
    /// The value that it has where it is not given; `None` where that is none.
    pub default: Option<&'static str>,
    /// A value as it may be written; `None` where it cannot stand beside the examples of the other keys.
    pub example: Option<&'static str>,
    /// What it means.
    pub meaning: &'static str,
}

impl Doc {
    /// Whether it is the name of sections, `[[name]]`, and not a key with a value.
    pub fn is_section(&self) -> bool {
        self.value == SECTIONS
    }
}

/// The [`Doc::value`] of sections.
pub(super) const SECTIONS: &str = "sections";

/// A key of a part of the configuration that is read into a `T`.
pub(super) struct Key<T: 'static> {
    pub(super) doc: Doc,
    pub(super) read: fn(&mut T, &Given<'_>) -> Result<()>,
}

/// A key as somebody has written it.
pub(super) struct Given<'a> {
    pub(super) name: &'a str,
    pub(super) value: &'a Spanned<DeValue<'a>>,
    /// `FILE:LINE`
    pub(super) place: &'a str,
    /// Makes such a place of a position.
    pub(super) at: &'a dyn Fn(&Range<usize>) -> String,
}

impl Given<'_> {
    /// Reads it by its row of the table; `None` where it has none.
    pub(super) fn read<T>(&self, keys: &[Key<T>], into: &mut T) -> Option<Result<()>> {
        keys.iter().find(|key| key.doc.name == self.name).map(|key| (key.read)(into, self))
    }

    /// Reads it by its row of the table, which it must have.
    pub(super) fn read_known<T>(&self, keys: &[Key<T>], into: &mut T) -> Result<()> {
        self.read(keys, into).unwrap_or_else(|| {
            let known =
                keys.iter().map(
                    |Key { doc, .. }| {
                        if doc.is_section() { format!("[[{}]]", doc.name) } else { doc.name.to_owned() }
                    },
                );
            let known: Vec<String> = known.collect();
            let (last, others) = known.split_last().map(|(last, others)| (last.as_str(), others)).unwrap_or_default();
            let what = format!("{}: unknown key; known are {} and {last}", self.name, others.join(", "));
            Err(invalid(self.place, &what))
        })
    }
}

/// Every key: those of the file itself, then those of each kind of section, in the order of the documentation.
pub fn all() -> [(&'static str, Vec<Doc>); 3] {
    fn docs<T>(keys: &[Key<T>]) -> Vec<Doc> {
        keys.iter().map(|key| key.doc).collect()
    }
    [("", docs(fragment::KEYS)), ("domain", docs(fragment::DOMAIN_KEYS)), ("limit", docs(limit::KEYS))]
}
