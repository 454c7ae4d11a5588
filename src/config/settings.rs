//! All files together: the only form of the configuration that the rest of the code sees.

use super::fragment::{DomainSection, Fragment, Selector};
use super::limit::Limit;
use crate::alloc::demand::Reserve;
use crate::alloc::policy::Policy;
use crate::cpuset::CpuSet;
use crate::error::{Code, Error, Result};
use crate::host::root::Root;
use crate::uuid::DomainUuid;

/// The main file.
pub const MAIN_FILE: &str = "/etc/virt-pin/virt-pin.toml";
/// Drop-ins, read after the main file in byte order of their names.
pub const DROP_IN_DIR: &str = "/etc/virt-pin/virt-pin.toml.d";
/// Where the command is installed by the packages.
const DEFAULT_COMMAND: &str = "/usr/bin/virt-pin";

/// The validated configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// CPUs that may be handed out; may name absent or offline ones. Default: none.
    pub pinnable: CpuSet,
    /// The absolute path of the `virt-pin` command.
    pub command: String,
    /// What the places of autostart domains that do not run mean to others. Default: they are kept, since a domain that is
    /// to start with the host is one that its operator counts on, and a refused start can still be had another way.
    pub autostart_reserve: Reserve,
    /// Whether the agent moves threads of a dedicated domain back that somebody has moved by hand. Default: it only says so.
    pub repair_drift: bool,
    /// The files that were read, in order.
    pub files: Vec<String>,
    domains: Vec<DomainSection>,
    limits: Vec<Limit>,
}

impl Settings {
    /// Reads the main file and the drop-ins under `root`.
    ///
    /// # Errors
    /// [`Code::ConfigInvalid`]: a file cannot be read or understood.
    pub fn read(root: &Root) -> Result<Settings> {
        let drop_ins = root.list(DROP_IN_DIR).map_err(unreadable)?;
        let drop_ins = drop_ins.iter().filter(|name| name.ends_with(".toml") && !name.starts_with('.'));
        let paths = std::iter::once(MAIN_FILE.to_owned()).chain(drop_ins.map(|name| format!("{DROP_IN_DIR}/{name}")));
        let mut files = Vec::new();
        for path in paths {
            match root.read_if_exists(&path).map_err(unreadable)? {
                Some(text) => files.push((path, text)),
                None if is_link_to_nothing(root, &path) => {
                    let what = format!("{}: there is nothing where this link points to", root.resolve(&path).display());
                    return Err(Error::new(Code::ConfigInvalid, what)
                        .with_hint("mend the link or remove it: what the file was to say is not known"));
                }
                None => {}
            }
        }
        Settings::merge(files.iter().map(|(path, text)| (path.as_str(), text.as_str())))
    }

    /// The settings of these (path, text) files: for a key said twice the last file counts; sections add up.
    ///
    /// # Errors
    /// As [`Fragment::parse`].
    pub fn merge<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Settings> {
        let mut settings = Settings {
            pinnable: CpuSet::new(),
            command: DEFAULT_COMMAND.to_owned(),
            autostart_reserve: Reserve::default(),
            repair_drift: false,
            files: Vec::new(),
            domains: Vec::new(),
            limits: Vec::new(),
        };
        for (path, text) in files {
            let fragment = Fragment::parse(path, text)?;
            settings.pinnable = fragment.pinnable.unwrap_or(settings.pinnable);
            settings.command = fragment.command.unwrap_or(settings.command);
            settings.autostart_reserve = fragment.autostart_reserve.unwrap_or(settings.autostart_reserve);
            settings.repair_drift = fragment.repair_drift.unwrap_or(settings.repair_drift);
            settings.domains.extend(fragment.domains);
            settings.limits.extend(fragment.limits);
            settings.files.push(path.to_owned());
        }
        Ok(settings)
    }

    /// Whether a domain that brings no policy of its own can have one at all.
    pub fn has_sections(&self) -> bool {
        !self.domains.is_empty()
    }

    /// Whether the operator lets the VM of this name and of so many vCPUs have what its policy asks for.
    ///
    /// # Errors
    /// [`Code::PolicyDenied`], by the first limit that does not.
    pub fn check(&self, name: &str, vcpus: u16, policy: &Policy) -> Result<()> {
        self.limits.iter().filter(|limit| limit.is_for(name)).try_for_each(|limit| limit.check(vcpus, policy))
    }

    /// The sections for domains that bring no policy, that themselves name none: they do nothing.
    pub fn idle_sections(&self) -> impl Iterator<Item = &str> {
        let idle = |section: &&DomainSection| !section.attributes.iter().any(|(name, _)| name == "policy");
        self.domains.iter().filter(idle).map(|section| section.place.as_str())
    }

    /// The section for a domain that brings no policy of its own: one with its UUID before one with a pattern; among
    /// equals the last one written.
    pub fn section_for(&self, uuid: Option<DomainUuid>, name: &str) -> Option<&DomainSection> {
        let last =
            |matches: &dyn Fn(&Selector) -> bool| self.domains.iter().rev().find(|domain| matches(&domain.selects));
        last(&|selects| matches!(selects, Selector::Uuid(of) if Some(*of) == uuid))
            .or_else(|| last(&|selects| matches!(selects, Selector::Name(pattern) if pattern.matches(name))))
    }
}

/// A file that appears just now is no such link.
fn is_link_to_nothing(root: &Root, path: &str) -> bool {
    let path = root.resolve(path);
    !root.is_description() && path.is_symlink() && !path.exists()
}

fn unreadable(error: Error) -> Error {
    Error::new(Code::ConfigInvalid, &error.message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_said_means_no_cpu() {
        let settings = Settings::read(&Root::described(Default::default())).unwrap();
        assert_eq!((settings.pinnable.len(), settings.command.as_str()), (0, "/usr/bin/virt-pin"));
        assert_eq!((settings.autostart_reserve, settings.has_sections()), (Reserve::Strict, false));
    }

    #[test]
    fn the_last_file_counts_and_sections_add_up() {
        let uuid = "0123abcd-89ab-cdef-0123-456789abcdef";
        let main = format!(
            "pinnable_cpus = \"1-3\"\n[[domain]]\nuuid = \"{uuid}\"\npolicy = \"shared\"\n\
             [[domain]]\nmatch = \"db-*\"\npolicy = \"dedicated\""
        );
        let late = "pinnable_cpus = \"4-7\"\n[[domain]]\nmatch = \"*\"\npolicy = \"shared\"";
        let files = [
            (MAIN_FILE.to_owned(), main),
            (format!("{DROP_IN_DIR}/50-a.toml"), late.to_owned()),
            (format!("{DROP_IN_DIR}/90-b.toml~"), "rubbish".to_owned()),
        ];
        let settings = Settings::read(&Root::described(files.into())).unwrap();
        assert_eq!(settings.pinnable.to_string(), "4-7");
        let place = |uuid, name: &str| settings.section_for(uuid, name).map(|section| section.place.as_str());
        assert_eq!(place(DomainUuid::parse(uuid), "db-1"), Some("/etc/virt-pin/virt-pin.toml:2"));
        assert_eq!(place(None, "db-1"), Some("/etc/virt-pin/virt-pin.toml.d/50-a.toml:2"));
        let alone = Settings::merge([("m", "[[domain]]\nmatch = \"db-*\"\npolicy = \"dedicated\"")]).unwrap();
        assert!(alone.section_for(None, "db-\u{e9} 1/2").is_some() && alone.section_for(None, "xdb-1").is_none());
    }

    #[test]
    fn a_broken_drop_in_is_an_error() {
        let files = [(MAIN_FILE.to_owned(), String::new()), (format!("{DROP_IN_DIR}/1.toml"), "x".to_owned())];
        let error = Settings::read(&Root::described(files.into())).unwrap_err();
        assert!(error.message.starts_with("/etc/virt-pin/virt-pin.toml.d/1.toml:1: not TOML"), "{}", error.message);
    }
}
