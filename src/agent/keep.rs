//! Definitions kept as they should be: those of dedicated domains in the shape of their places, others as their owners wrote
//! them.
//!
//! Files say which definition is not as it should be; only those are asked of libvirt, changed and defined anew. Nothing is
//! done twice in vain: what libvirt keeps of a definition of ours is looked at once more, and one that still wants changing,
//! or that somebody else changes as fast as we do, is left alone.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::voice::Voice;
use crate::config::settings::Settings;
use crate::error::{Code, Error, Result};
use crate::host::qemu::DEFINITION_DIR;
use crate::host::root::Root;
use crate::kept::Places;
use crate::libvirt::Libvirt;
use crate::uuid::DomainUuid;
use crate::xml::{Domain, read};

/// What every element of ours names.
const NAMESPACES: &str = "urn:virt-pin:";
/// More definitions of one domain within [`WHILE`] are a quarrel with somebody, and given up for as long.
const MOST: usize = 100;
const WHILE: Duration = Duration::from_secs(10);

/// What is remembered from one look to the next.
#[derive(Debug, Default)]
pub(super) struct Keeper {
    domains: BTreeMap<DomainUuid, Memory>,
    /// Definitions changed so far.
    pub(super) rewritten: u64,
}

#[derive(Debug, Default)]
struct Memory {
    /// The file as it was when it was given up.
    given_up: Option<String>,
    /// When definitions of ours were made.
    made: VecDeque<Instant>,
    /// What has been said of it.
    said: String,
}

/// Why a definition is not as it should be.
enum Trouble {
    /// libvirt cannot be asked now.
    Unreachable(Error),
    /// Something about this domain, which another attempt would not change.
    Domain(Error),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Trouble {
        Trouble::Domain(error)
    }
}

impl Keeper {
    /// How many definitions are left alone.
    pub(super) fn given_up(&self) -> usize {
        self.domains.values().filter(|memory| memory.given_up.is_some()).count()
    }

    /// Looks at every definition. `libvirt` is only asked for where one has to be changed.
    ///
    /// # Errors
    /// [`Code::LibvirtFailed`] where it cannot be reached; the other definitions have to wait, too.
    pub(super) fn look(
        &mut self,
        root: &Root,
        voice: &Voice,
        libvirt: &mut dyn FnMut() -> Result<Libvirt>,
    ) -> Result<()> {
        let settings = match Settings::read(root) {
            Ok(settings) => settings,
            // Definitions stay as they are until somebody has corrected it.
            Err(error) => {
                voice.fail(&error);
                return Ok(());
            }
        };
        let names = root.list(DEFINITION_DIR)?;
        let paths = names.iter().filter(|name| name.ends_with(".xml")).map(|name| format!("{DEFINITION_DIR}/{name}"));
        let texts = paths.filter_map(|path| root.read_if_exists(&path).ok().flatten().map(|text| (path, text)));
        let ours = |text: &str| settings.has_sections() || text.contains(NAMESPACES);
        let texts: Vec<(String, String)> = texts.filter(|(_, text)| ours(text)).collect();
        if texts.is_empty() {
            self.domains.clear();
            return Ok(());
        }
        let places = Places::read(root, &settings)?;
        let mut seen = BTreeMap::new();
        let mut outcome = Ok(());
        for (path, text) in &texts {
            let Ok(identity) = Domain::parse(text).and_then(|domain| read::identity(&domain)) else { continue };
            let Some(uuid) = identity.uuid else { continue };
            let mut memory = self.domains.remove(&uuid).unwrap_or_default();
            let domain = (identity.name.as_str(), uuid);
            match memory.keep(root, &places, (path, text), domain, voice, libvirt) {
                Ok(true) => self.rewritten += 1,
                Ok(false) => {}
                Err(Trouble::Unreachable(error)) => outcome = Err(error),
                Err(Trouble::Domain(error)) => memory.tell(voice, domain, &error),
            }
            seen.insert(uuid, memory);
        }
        self.domains = seen;
        outcome
    }
}

impl Memory {
    /// One definition; whether it was changed.
    fn keep(
        &mut self,
        root: &Root,
        places: &Places,
        (path, text): (&str, &str),
        domain: (&str, DomainUuid),
        voice: &Voice,
        libvirt: &mut dyn FnMut() -> Result<Libvirt>,
    ) -> Result<bool, Trouble> {
        if places.kept(root, text)?.text == text {
            self.said.clear();
            self.given_up = None;
            return Ok(false);
        }
        if self.given_up.as_deref() == Some(text) {
            return Ok(false);
        }
        self.given_up = None;
        while self.made.front().is_some_and(|made| made.elapsed() > WHILE) {
            self.made.pop_front();
        }
        if self.made.len() >= MOST {
            let what = format!(
                "its definition has been changed {MOST} times within {} s, and somebody changes it back: it is left alone",
                WHILE.as_secs()
            );
            self.given_up = Some(text.to_owned());
            return Err(Trouble::Domain(Error::new(Code::LibvirtFailed, what)));
        }
        let libvirt = libvirt().map_err(Trouble::Unreachable)?;
        let id = domain.1.to_string();
        // The file may be older than what libvirt has, or gone.
        let Some(current) = libvirt.definition(&id).map_err(Trouble::Unreachable)? else { return Ok(false) };
        let kept = places.kept(root, &current)?;
        if kept.text == current {
            return Ok(false);
        }
        if let Err(error) = libvirt.define(&kept.text) {
            if !libvirt.is_alive() {
                return Err(Trouble::Unreachable(error));
            }
            // What libvirt refuses once it refuses again.
            self.given_up = Some(text.to_owned());
            return Err(Trouble::Domain(error));
        }
        self.made.push_back(Instant::now());
        self.said.clear();
        let what = match kept.plan.as_ref().and_then(|plan| plan.guest) {
            Some(guest) => format!("its definition tells the guest of {guest} from its next start on"),
            None => "its definition is its owner's again".to_owned(),
        };
        voice.did(domain, &what);
        if let Some(after) = libvirt.definition(&id).map_err(Trouble::Unreachable)? {
            if places.kept(root, &after)?.text != after {
                self.given_up = root.read_if_exists(path)?;
                voice.warn(
                    domain,
                    Code::DomainInvalid,
                    "libvirt keeps its definition otherwise than it was given: it is left alone",
                );
            }
        }
        Ok(true)
    }

    /// Says it once.
    fn tell(&mut self, voice: &Voice, domain: (&str, DomainUuid), error: &Error) {
        if self.said != error.message {
            self.said.clone_from(&error.message);
            voice.warn(domain, error.code, &error.message);
        }
    }
}
