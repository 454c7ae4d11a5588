//! What the start of a domain would come to, here and now: the hook's decision with all its checks, and without its effects.

use super::Context;
use crate::alloc::Steps;
use crate::alloc::plan::Plan;
use crate::conditions::{self, Arrival};
use crate::cpuset::CpuSet;
use crate::decision::{self, Dedicated, Situation, Wish};
use crate::definitions;
use crate::error::{Code, Error, Result};
use crate::host::root::Root;
use crate::lock::leases::{Holds, Leases};
use crate::xml::Domain;
use crate::xml::read::{self, Identity};

/// The plan of a dedicated domain in this situation, and what its document tells the guest otherwise.
///
/// # Errors
/// The refusal that the start would have.
pub(super) fn plan(
    root: &Root,
    (domain, identity): (&Domain<'_>, &Identity),
    wish: &Dedicated,
    (situation, leases): (&Situation, &Leases),
    arrival: Arrival,
    steps: Steps<'_>,
) -> Result<(Plan, Option<String>)> {
    let existing = identity.uuid.and_then(|uuid| leases.get(uuid)).and_then(|lease| lease.plan());
    conditions::before_plan(root, domain, &wish.request)?;
    let plan = situation.plan(wish, existing, arrival == Arrival::Entry, steps)?;
    let told = conditions::of_plan(root, (domain, identity.uuid), &wish.request, &plan, arrival, leases)?;
    Ok((plan, told))
}

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
    let holds = plan(root, (&domain, &identity), &wish, (&situation, leases), Arrival::Start, &mut |_| {})
        .map(|(plan, _)| Holds::Dedicated(plan))
        .map_err(|error| about(situation.with_moves(error, &wish.asked(false), leases, identity.uuid)))?;
    Ok((identity, holds))
}
