//! What a dedicated domain needs besides room: a document and a host that can carry its plan out. The hook asks before it grants
//! a lease, and `virt-pin explain` says what the hook would say. Reads the host; changes nothing.

use crate::alloc::plan::Plan;
use crate::alloc::policy::{GuestView, Memory};
use crate::alloc::request::Request;
use crate::decision;
use crate::enforce::cookie;
use crate::enforce::isolation::{self, Wanted};
use crate::error::{Code, Error, Result};
use crate::host::root::Root;
use crate::lock::leases::Leases;
use crate::uuid::DomainUuid;
use crate::xml::{Domain, caches, read, realtime, shape};

/// How a domain comes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// By a start: libvirt takes nothing back, so its document has to say what is to be.
    Start,
    /// By a migration or out of a saved image: its document is rewritten, except for what its guest sees.
    Entry,
}

/// What holds whatever the plan will be.
///
/// # Errors
/// [`Code::PolicyInvalid`] where the document lacks what a realtime guest needs, [`Code::CoreSched`] where the kernel lacks what
/// the policy asks for.
pub fn before_plan(root: &Root, domain: &Domain<'_>, request: &Request) -> Result<()> {
    realtime::check(domain, request)?;
    cookie::check(root, &request.policy)
}

/// Whether the plan can be carried out beside the leases of the others. Returns in words what the guest is told otherwise by the
/// document that it starts with, where the policy lets that pass.
///
/// # Errors
/// Those of [`isolation::check`]; [`Code::TopologyOtherwise`]; [`Code::StaleCaches`]; [`Code::DomainInvalid`].
pub fn of_plan(
    root: &Root,
    (domain, uuid): (&Domain<'_>, Option<DomainUuid>),
    request: &Request,
    plan: &Plan,
    arrival: Arrival,
    leases: &Leases,
) -> Result<Option<String>> {
    let (iothreads, others) = (read::iothread_ids(domain)?, Wanted::of(leases, uuid));
    isolation::check(root, &request.policy, plan, &iothreads, &others)?;
    if arrival == Arrival::Entry {
        return Ok(None);
    }
    let otherwise = |what: &str| Error::new(Code::TopologyOtherwise, what);
    if let Some(bound) = shape::bound_elsewhere(domain, plan).filter(|_| request.policy.memory == Memory::Follow) {
        return Err(otherwise(&bound));
    }
    let told = shape::difference(domain, plan);
    if let Some(told) = told.as_ref().filter(|_| request.policy.topology == GuestView::Require) {
        return Err(otherwise(told));
    }
    caches::check(domain, plan, &decision::cache_ids(root, domain)?)?;
    Ok(told)
}
