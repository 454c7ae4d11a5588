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

/// Where definitions are kept: libvirt, and in tests somebody odd.
pub(super) trait Shelf {
    /// The definition of a domain by its UUID.
    fn definition(&self, uuid: &str) -> Result<Option<String>>;
    /// Puts a definition in the place of the former one.
    fn define(&self, text: &str) -> Result<()>;
    /// Whether it can still be asked.
    fn is_alive(&self) -> bool;
}

impl Shelf for Libvirt {
    fn definition(&self, uuid: &str) -> Result<Option<String>> {
        Libvirt::definition(self, uuid)
    }

    fn define(&self, text: &str) -> Result<()> {
        Libvirt::define(self, text)
    }

    fn is_alive(&self) -> bool {
        Libvirt::is_alive(self)
    }
}

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
    pub(super) fn look<S: Shelf>(
        &mut self,
        root: &Root,
        voice: &Voice,
        libvirt: &mut dyn FnMut() -> Result<S>,
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
    fn keep<S: Shelf>(
        &mut self,
        root: &Root,
        places: &Places,
        (path, text): (&str, &str),
        domain: (&str, DomainUuid),
        voice: &Voice,
        libvirt: &mut dyn FnMut() -> Result<S>,
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
        // Working that out has taken its time; what was undefined or defined anew meanwhile raises an event of its own.
        if libvirt.definition(&id).map_err(Trouble::Unreachable)?.as_ref() != Some(&current) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::description;
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeMap;

    const UUID: &str = "00000000-0000-4000-8000-000000000001";
    const FILE: &str = "/etc/libvirt/qemu/a.xml";
    const HOST: &str = include_str!("../../tests/hosts/xeon-2s-smt.host");

    fn domain(cpu: &str) -> String {
        format!(
            "<domain type='kvm'><name>a</name><uuid>{UUID}</uuid><metadata><p:cpu xmlns:p='urn:virt-pin:domain:1' \
             policy='dedicated'/></metadata><memory>1024</memory><vcpu>4</vcpu>{cpu}</domain>"
        )
    }

    /// A libvirt that keeps what it is given after its own fashion.
    struct Odd<'a> {
        kept: &'a RefCell<String>,
        asked: &'a Cell<u32>,
        fashion: &'a dyn Fn(&str) -> Result<String>,
        alive: bool,
    }

    impl Shelf for Odd<'_> {
        fn definition(&self, uuid: &str) -> Result<Option<String>> {
            assert_eq!(uuid, UUID);
            Ok(Some(self.kept.borrow().clone()))
        }

        fn define(&self, text: &str) -> Result<()> {
            self.asked.set(self.asked.get() + 1);
            *self.kept.borrow_mut() = (self.fashion)(text)?;
            Ok(())
        }

        fn is_alive(&self) -> bool {
            self.alive
        }
    }

    fn root(text: &str) -> Root {
        let host = description::parse(HOST).unwrap();
        let mut files: BTreeMap<String, String> = BTreeMap::new();
        for line in description::gather(&host).unwrap().lines().filter(|line| !line.starts_with('#')) {
            let (path, value) = line.split_once('\t').unwrap();
            files.insert(path.to_owned(), value.to_owned() + "\n");
        }
        files.insert("/etc/virt-pin/virt-pin.toml".to_owned(), "pinnable_cpus = \"1-7,9-15\"".to_owned());
        files.insert(FILE.to_owned(), text.to_owned());
        Root::described(files)
    }

    /// So many looks at what is kept, with somebody's hand on it in between; how often something was defined, and what is
    /// kept in the end.
    fn looks(
        count: u32,
        fashion: &dyn Fn(&str) -> Result<String>,
        between: &dyn Fn(&str) -> String,
    ) -> (u32, String, Keeper) {
        let (kept, asked) = (RefCell::new(domain("")), Cell::new(0));
        let mut keeper = Keeper::default();
        for _ in 0..count {
            let root = root(&kept.borrow().clone());
            let voice = Voice::of(&root);
            keeper.look(&root, &voice, &mut || Ok(Odd { kept: &kept, asked: &asked, fashion, alive: true })).unwrap();
            let next = between(&kept.borrow());
            *kept.borrow_mut() = next;
        }
        (asked.get(), kept.into_inner(), keeper)
    }

    #[test]
    fn a_definition_is_changed_once() {
        let same = |text: &str| text.to_owned();
        let (asked, kept, keeper) = looks(5, &|text| Ok(text.to_owned()), &same);
        assert_eq!((asked, keeper.rewritten, keeper.given_up()), (1, 1, 0));
        assert!(kept.contains("cores='2' threads='2'") && kept.contains("topology='none'"), "{kept}");
        // However it is spelled.
        let respelled =
            |text: &str| Ok(text.replace("<topology sockets='1' cores", "<topology sockets=\"1\"  dies='1' cores"));
        assert_eq!(looks(5, &respelled, &same).0, 1);
    }

    #[test]
    fn who_keeps_it_otherwise_is_left_alone() {
        let forgets = |text: &str| Ok(domain("<cpu><topology sockets='4' cores='1' threads='1'/></cpu>") + &text[..0]);
        let (asked, _, keeper) = looks(20, &forgets, &|text| text.to_owned());
        assert!(asked <= 2 && keeper.given_up() == 1, "{asked}");
        let refuses = |_: &str| Err(Error::new(Code::LibvirtFailed, "no"));
        let (asked, kept, keeper) = looks(20, &refuses, &|text| text.to_owned());
        assert_eq!((asked, kept, keeper.given_up()), (1, domain(""), 1));
    }

    /// Undefined while its shape was worked out: it is not to be brought back.
    struct Vanishing<'a> {
        asked: &'a Cell<u32>,
        defined: &'a Cell<bool>,
    }

    impl Shelf for Vanishing<'_> {
        fn definition(&self, _: &str) -> Result<Option<String>> {
            self.asked.set(self.asked.get() + 1);
            Ok((self.asked.get() == 1).then(|| domain("")))
        }

        fn define(&self, _: &str) -> Result<()> {
            self.defined.set(true);
            Ok(())
        }

        fn is_alive(&self) -> bool {
            true
        }
    }

    #[test]
    fn what_has_been_undefined_meanwhile_stays_so() {
        let root = root(&domain(""));
        let (asked, defined) = (Cell::new(0), Cell::new(false));
        let mut keeper = Keeper::default();
        keeper.look(&root, &Voice::of(&root), &mut || Ok(Vanishing { asked: &asked, defined: &defined })).unwrap();
        assert_eq!((asked.get(), defined.get(), keeper.rewritten), (2, false, 0));
    }

    #[test]
    fn a_quarrel_has_an_end() {
        let (asked, _, keeper) = looks(300, &|text| Ok(text.to_owned()), &|_| domain(""));
        // Unless it takes longer than the while that counts.
        assert!(asked >= 100 && (asked == 100 || keeper.given_up() == 0), "{asked}");
    }

    #[test]
    fn who_cannot_be_asked_is_asked_again() {
        let root = root(&domain(""));
        let (kept, asked) = (RefCell::new(domain("")), Cell::new(0));
        let gone = |_: &str| Err(Error::new(Code::LibvirtFailed, "gone"));
        let mut keeper = Keeper::default();
        for _ in 0..3 {
            let mut shelf = || Ok(Odd { kept: &kept, asked: &asked, fashion: &gone, alive: false });
            assert!(keeper.look(&root, &Voice::of(&root), &mut shelf).is_err());
        }
        assert_eq!((asked.get(), keeper.given_up()), (3, 0));
    }
}
