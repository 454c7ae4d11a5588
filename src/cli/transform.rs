//! `virt-pin transform`: domain XML for the CPUs this host would give now. A domain without a policy comes out unchanged.

use super::{Context, subject};
use crate::decision::{self, Situation, Wish};
use crate::definitions;
use crate::error::{Error, Result};
use crate::kept;
use crate::xml::pin::{self, Scope};
use crate::xml::{Domain, caches, read, realtime};

pub(super) fn transform(context: &Context, file: &str) -> Result<String> {
    let text = subject::file(file)?;
    let domain = Domain::parse(&text)?;
    let identity = read::identity(&domain)?;
    let about = |error: Error| decision::about(error, &identity.name, None);
    let Wish::Dedicated(wish) =
        decision::wish(&context.root, &domain, &identity, &|| context.settings()).map_err(about)?
    else {
        return Ok(text);
    };
    let situation = Situation::read(&context.root, &wish.settings, read::partition(&domain).as_deref())?;
    let definitions = definitions::read(&context.root, &wish.settings).dedicated;
    let leases = context.leases()?;
    let existing = identity.uuid.and_then(|uuid| leases.get(uuid)).and_then(|lease| lease.plan());
    let plan = situation
        .among(definitions, identity.uuid)
        .beside(&leases, identity.uuid)
        .plan(&wish, existing, true, &mut |_| {})
        .map_err(|error| decision::about(error, &identity.name, Some((&leases, identity.uuid))))?;
    let pinned = pin::rewrite(&domain, &plan, Scope::Everything).map_err(about)?.apply(&text);
    let ids = decision::cache_ids(&context.root, &domain)?;
    let pinned = caches::rewrite(&Domain::parse(&pinned)?, &plan, &ids).map_err(about)?.apply(&pinned);
    // What a realtime guest needs is no part of a plan: it is the same on every host.
    let edits = realtime::rewrite(&Domain::parse(&pinned)?, &wish.request).map_err(about)?;
    Ok(edits.apply(&pinned))
}

/// The document as a definition should say it: in the shape of the domain's place, with what a realtime guest needs.
pub(super) fn shape(context: &Context, file: &str) -> Result<String> {
    shaped(context, &subject::file(file)?)
}

pub(super) fn shaped(context: &Context, text: &str) -> Result<String> {
    let kept = kept::kept(&context.root, &context.settings()?, text)?;
    let Some(wish) = kept.wish else { return Ok(kept.text) };
    let domain = Domain::parse(&kept.text)?;
    let name = read::identity(&domain)?.name;
    let edits = realtime::rewrite(&domain, &wish.request).map_err(|error| decision::about(error, &name, None))?;
    Ok(edits.apply(&kept.text))
}
