//! What the start of a domain would give it, here and now, beside these leases: the hook's decision, and none of its effects.

use super::Context;
use crate::conditions::{self, Arrival};
use crate::cpuset::CpuSet;
use crate::decision::{self, Situation, Wish};
use crate::definitions;
use crate::error::{Code, Error, Result};
use crate::lock::leases::{Holds, Leases};
use crate::xml::Domain;
use crate::xml::read::{self, Identity};

/// The refusal of a domain that pins itself, if its start would be refused.
pub(super) fn by_hand(leases: &Leases, identity: &Identity, cpus: &CpuSet) -> Option<Error> {
    leases.dedicated_owner_of(cpus, identity.uuid).map(|owner| decision::static_conflict(cpus, owner))
}

/// What the domain would hold if it were started beside these leases.
///
/// # Errors
/// The refusal that the start would have, whether or not it falls back, or [`Code::PolicyInvalid`] for one that would hold nothing.
pub(super) fn holds(context: &Context, text: &str, leases: &Leases) -> Result<(Identity, Holds)> {
    let root = &context.root;
    let domain = Domain::parse(text)?;
    let identity = read::identity(&domain)?;
    let about = |error| decision::about(error, &identity.name, Some((leases, identity.uuid)));
    let wish = match decision::wish(root, &domain, &identity, &|| context.settings()).map_err(about)? {
        Wish::Dedicated(wish) => wish,
        Wish::Static(cpus) => match by_hand(leases, &identity, &cpus) {
            Some(refusal) => return Err(about(refusal)),
            None => return Ok((identity, Holds::Static(cpus))),
        },
        Wish::Shared => {
            let error = Error::new(Code::PolicyInvalid, "asks for no CPUs of its own, so it has no place");
            return Err(about(error.with_hint("give it a policy with policy=\"dedicated\"")));
        }
    };
    let definitions = definitions::read(root, &wish.settings).dedicated;
    let situation = Situation::read(root, &wish.settings, read::partition(&domain).as_deref())?;
    let situation = situation.among(definitions, identity.uuid).beside(leases, identity.uuid);
    let existing = identity.uuid.and_then(|uuid| leases.get(uuid)).and_then(|lease| lease.plan());
    let holds = conditions::before_plan(root, &domain, &wish.request)
        .and_then(|()| situation.plan(&wish, existing, false, &mut |_| {}))
        .and_then(|plan| {
            conditions::of_plan(root, (&domain, identity.uuid), &wish.request, &plan, Arrival::Start, leases)?;
            Ok(Holds::Dedicated(plan))
        })
        .map_err(|error| about(situation.with_moves(error, &wish.request, leases, identity.uuid)))?;
    Ok((identity, holds))
}
