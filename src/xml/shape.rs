//! The part of a plan that a kept definition says: what the guest sees of its cores and nodes, and no CPU.
//!
//! [`shaped`] is a function of the document as its owner wrote it ([`former::restored`]) and the plan, so that it can be run
//! on its own result, on what libvirt made of that, and on what a person changed in it since. Decides nothing: whether a
//! domain is to have a shape, and which, is its caller's to say.

use std::collections::BTreeMap;

use super::former::{self, Said};
use super::pin::{Scope, rewrite};
use super::read::{self, Pins};
use super::{Domain, numa};
use crate::alloc::plan::Plan;
use crate::cpuset::{CpuSet, NodeId};
use crate::error::Result;

/// The document in the plan's shape, with what it had before in an element of its own; without pins. The very text if it
/// says all that already, however it is spelled.
///
/// # Errors
/// As [`rewrite`].
pub fn shaped(text: &str, plan: &Plan) -> Result<String> {
    let owner = former::restored(text)?;
    let owner = Domain::parse(&owner)?;
    let shaped = rewrite(&owner, plan, Scope::Shape)?.apply(owner.text());
    unless_same(text, former::remember(&owner, &shaped)?)
}

/// Whether two documents say the same of everything that a shape is about.
///
/// # Errors
/// [`crate::error::Code::DomainInvalid`]: one of them is no domain.
pub fn same(one: &str, other: &str) -> Result<bool> {
    Ok(says(&Domain::parse(one)?) == says(&Domain::parse(other)?))
}

/// How the guest's view in this document differs from the plan's; `None` if it does not, or the plan has none.
pub fn difference(domain: &Domain<'_>, plan: &Plan) -> Option<String> {
    let guest = plan.guest?;
    let told = read::topology(domain).ok()?;
    if told != Some(guest) {
        let told = told.map_or_else(|| "nothing of cores and threads".to_owned(), |told| told.to_string());
        return Some(format!("its XML tells the guest {told}, not {guest}"));
    }
    if numa::missing(domain, plan).is_ok_and(|missing| missing.cells.is_some()) {
        return Some(format!("its XML tells the guest of no NUMA cells, not of {}", plan.cells.len()));
    }
    None
}

/// The host node that a `<numatune>` of ours binds the memory of each of the guest's cells to, by the cell's number: those of the
/// place that the document was written for. `None` where there is none, or its owner has changed it.
pub fn bound_cells(domain: &Domain<'_>) -> Option<BTreeMap<usize, NodeId>> {
    former::wrote_numatune(domain)?;
    let bound = domain.all(&["numatune", "memnode"]).into_iter().map(|memnode| {
        let nodes = memnode.attribute("nodeset").and_then(|nodes| CpuSet::parse_libvirt_cpuset(nodes).ok())?;
        let node = nodes.first().filter(|_| nodes.len() == 1)?;
        Some((memnode.attribute("cellid")?.parse().ok()?, NodeId(node.0)))
    });
    bound.collect()
}

/// How a `<numatune>` of ours binds the guest's memory to other nodes than the plan does; `None` if it does not.
pub fn bound_elsewhere(domain: &Domain<'_>, plan: &Plan) -> Option<String> {
    let bound = former::wrote_numatune(domain)?;
    let nodes = numa::tune_of(plan)?;
    (nodes != bound).then(|| "its XML binds the memory of its NUMA cells to other nodes than their vCPUs'".to_owned())
}

fn unless_same(text: &str, out: String) -> Result<String> {
    Ok(if same(text, &out)? { text.to_owned() } else { out })
}

/// All that a shape is about.
#[derive(PartialEq)]
struct Says {
    shape: Said,
    remembered: BTreeMap<String, String>,
    pins: Option<Pins>,
    cpuset: bool,
}

fn says(domain: &Domain<'_>) -> Says {
    Says {
        shape: Said::by(domain),
        remembered: former::remembered(domain),
        pins: read::pins(domain).ok(),
        cpuset: domain.first(&["vcpu"]).is_some_and(|vcpu| vcpu.has_attribute("cpuset")),
    }
}
