//! What the definition that libvirt keeps of a domain should say: the shape of its place if the domain is dedicated, and what
//! its owner wrote if it is not.
//!
//! The shape follows from the place that the domain has among all definitions, or, if there is none, from what it would get
//! alone: never from who runs, so that it does not change from one start to the next. Reads the host; changes nothing.

use std::collections::BTreeMap;

use crate::alloc::demand::Definition;
use crate::alloc::plan::Plan;
use crate::config::settings::Settings;
use crate::decision::{self, Dedicated, Situation, Wish};
use crate::definitions;
use crate::error::Result;
use crate::host::root::Root;
use crate::uuid::DomainUuid;
use crate::xml::{Domain, former, read, shape};

/// A document as it should be kept.
#[derive(Debug)]
pub struct Kept {
    /// The document; the very text if it is as it should be.
    pub text: String,
    /// The plan behind its shape; `None` for a domain that is not dedicated.
    pub plan: Option<Plan>,
    /// What the domain wants, if it is dedicated.
    pub wish: Option<Box<Dedicated>>,
}

/// The places of all definitions on a host, found once for many documents.
#[derive(Debug)]
pub struct Places {
    settings: Settings,
    situation: Situation,
    found: BTreeMap<DomainUuid, Result<Plan>>,
}

impl Places {
    /// Those of the definitions on this host.
    ///
    /// # Errors
    /// As [`Situation::read`].
    pub fn read(root: &Root, settings: &Settings) -> Result<Places> {
        Places::of(root, settings, definitions::read(root, settings).dedicated)
    }

    fn of(root: &Root, settings: &Settings, definitions: Vec<Definition<DomainUuid>>) -> Result<Places> {
        let situation = Situation::read(root, settings, None)?.among(definitions, None);
        Ok(Places { settings: settings.clone(), found: situation.places(), situation })
    }

    /// How the document of a definition among these should be kept.
    ///
    /// # Errors
    /// What is wrong with its policy, or the refusal of a domain that this host has no place for.
    pub fn kept(&self, root: &Root, text: &str) -> Result<Kept> {
        let owner = former::restored(text)?;
        let domain = Domain::parse(&owner)?;
        let identity = read::identity(&domain)?;
        let wish = decision::wish(root, &domain, &identity, &|| Ok(self.settings.clone()));
        let about = |error| decision::about(error, &identity.name, None);
        let Wish::Dedicated(wish) = wish.map_err(about)? else {
            return Ok(Kept { text: owner, plan: None, wish: None });
        };
        let place = identity.uuid.and_then(|uuid| self.found.get(&uuid));
        let plan = match place {
            Some(Ok(plan)) if plan.vcpus.len() == usize::from(wish.request.vcpus) => plan.clone(),
            _ => self.situation.alone(&wish.request).map_err(about)?,
        };
        Ok(Kept { text: shape::shaped(text, &plan).map_err(about)?, plan: Some(plan), wish: Some(wish) })
    }
}

/// How a document should be kept that is about to be defined, whatever is defined under its UUID now.
///
/// # Errors
/// As [`Places::kept`].
pub fn kept(root: &Root, settings: &Settings, text: &str) -> Result<Kept> {
    let owner = former::restored(text)?;
    let domain = Domain::parse(&owner)?;
    let identity = read::identity(&domain)?;
    let mut all = definitions::read(root, settings).dedicated;
    if let Some(key) = identity.uuid {
        let autostart = all.iter().any(|one| one.key == key && one.autostart);
        all.retain(|one| one.key != key);
        if let Wish::Dedicated(wish) = decision::wish(root, &domain, &identity, &|| Ok(settings.clone()))
            .map_err(|error| decision::about(error, &identity.name, None))?
        {
            all.push(Definition { key, name: identity.name.clone(), autostart, request: wish.request });
        }
    }
    Places::of(root, settings, all)?.kept(root, text)
}
