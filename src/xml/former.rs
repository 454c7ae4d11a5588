//! What the owner of a domain had written where we wrote the shape, remembered in the same document.
//!
//! ```xml
//! <metadata>
//!   <former:shape xmlns:former="urn:virt-pin:former:1" topology="none" wrote-topology="sockets=1 dies=1 cores=2 threads=2"
//!     wrote-numa="0-1:262144 2-3:262144" wrote-numatune="strict 0-1 0:strict:0 1:strict:1"/>
//! </metadata>
//! ```
//! `topology` is what was there, "none" or attributes of `<topology>`; each `wrote-` is what we put in its place (cells and
//! `<numatune>` only ever where there were none). The rule: as long as a document says what we wrote, what we wrote is ours,
//! and taking it out brings the former back. What says something else has been changed since, and that is the owner's. An
//! element that cannot be understood remembers nothing.

use std::collections::BTreeMap;

use roxmltree::Node;

use super::layout::Element;
use super::pin::Changes;
use super::{Domain, children, numa, read, topology};
use crate::error::Result;

/// The namespace: one element of each is all that libvirt keeps.
pub(super) const NAMESPACE: &str = "urn:virt-pin:former:1";
const PREFIX: &str = "xmlns:former";
const ELEMENT: &str = "former:shape";
/// What we made of `<numatune>`.
pub(super) const WROTE_NUMATUNE: &str = "wrote-numatune";
/// There was no such element.
const NONE: &str = "none";

/// The parts of a shape, as they are compared: what libvirt spells otherwise is the same.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Said {
    /// `<cpu><topology>`
    pub(super) topology: Option<String>,
    /// `<cpu><numa>`
    pub(super) numa: Option<String>,
    /// `<numatune>`
    pub(super) numatune: Option<String>,
}

impl Said {
    pub(super) fn by(domain: &Domain<'_>) -> Said {
        Said { topology: topology::said(domain), numa: numa::cells_said(domain), numatune: numa::tune_said(domain) }
    }
}

/// The element, wherever libvirt would find it.
pub(super) fn element<'d, 't>(domain: &'d Domain<'t>) -> Option<Node<'d, 't>> {
    let ours = |node: &Node<'_, '_>| node.is_element() && node.tag_name().namespace() == Some(NAMESPACE);
    domain.first(&["metadata"])?.children().find(ours)
}

/// Its attributes; none where there is no such element.
pub(super) fn remembered(domain: &Domain<'_>) -> BTreeMap<String, String> {
    let attributes = element(domain).into_iter().flat_map(|element| element.attributes());
    attributes.map(|attribute| (attribute.name().to_owned(), attribute.value().to_owned())).collect()
}

/// Whether this document carries something of ours.
pub fn is_shaped(domain: &Domain<'_>) -> bool {
    element(domain).is_some()
}

/// What the `<numatune>` says that we wrote; `None` where there is none, or its owner has changed it.
pub(super) fn wrote_numatune(domain: &Domain<'_>) -> Option<String> {
    let ours = remembered(domain).remove(WROTE_NUMATUNE)?;
    numa::tune_said(domain).filter(|said| *said == ours)
}

/// The document as its owner has it: what we wrote is out, and what was there before is back. The same text if it carries
/// nothing of ours.
///
/// # Errors
/// [`crate::error::Code::DomainInvalid`]: not a domain, or no number of vCPUs.
pub fn restored(text: &str) -> Result<String> {
    if !text.contains(NAMESPACE) {
        return Ok(text.to_owned());
    }
    let domain = Domain::parse(text)?;
    let Some(element) = element(&domain) else { return Ok(text.to_owned()) };
    let (remembered, said) = (remembered(&domain), Said::by(&domain));
    let is_ours = |wrote: &str, said: &Option<String>| said.is_some() && remembered.get(wrote) == said.as_ref();
    let mut changes = Changes::of(&domain);
    if let Some(topology) = domain.first(&["cpu", "topology"]).filter(|_| is_ours("wrote-topology", &said.topology)) {
        // A topology for another number of vCPUs cannot be defined any more.
        let count = u64::from(read::vcpu_count(&domain)?);
        match remembered.get("topology").and_then(|former| parse(former)).filter(|former| product(former) == count) {
            Some(former) => {
                for (name, count) in &former {
                    if topology.attribute(*name) != Some(count) {
                        changes.set(topology, name, count, None);
                    }
                }
                let added = topology::PARTS.into_iter().filter(|part| !former.iter().any(|(name, _)| name == part));
                added.for_each(|part| changes.unset(topology, part));
            }
            // With those behind it, which are nobody's as long as there is a first.
            None => topology
                .parent()
                .into_iter()
                .flat_map(|cpu| children(cpu, "topology"))
                .for_each(|one| changes.remove(one)),
        }
    }
    if is_ours("wrote-numa", &said.numa) {
        domain.all(&["cpu", "numa"]).into_iter().for_each(|numa| changes.remove(numa));
    }
    if is_ours(WROTE_NUMATUNE, &said.numatune) {
        domain.first(&["numatune"]).into_iter().for_each(|numatune| changes.remove(numatune));
    }
    take_out(&domain, element, &mut changes);
    Ok(changes.into_edits()?.apply(text))
}

/// Takes an element out of `<metadata>`, and that as well if nothing else is in it.
pub(super) fn take_out<'d, 't>(domain: &'d Domain<'t>, element: Node<'d, 't>, changes: &mut Changes<'d, 't>) {
    let other = |child: Node<'_, '_>| {
        child != element && !(child.is_text() && child.text().unwrap_or_default().trim().is_empty())
    };
    let empty = |metadata: &Node<'_, '_>| metadata.attributes().len() == 0 && !metadata.children().any(other);
    changes.remove(domain.first(&["metadata"]).filter(empty).unwrap_or(element));
}

/// The shaped document with what `owner`, the one it was made from, had in its place; unchanged where nothing was written.
///
/// # Errors
/// As [`restored`].
pub(super) fn remember(owner: &Domain<'_>, shaped: &str) -> Result<String> {
    let domain = Domain::parse(shaped)?;
    let (before, now) = (Said::by(owner), Said::by(&domain));
    let mut attributes = vec![(PREFIX, NAMESPACE.to_owned())];
    if let Some(wrote) = now.topology.filter(|wrote| before.topology.as_ref() != Some(wrote)) {
        // One that libvirt refuses is not worth coming back.
        let count = u64::from(read::vcpu_count(owner)?);
        let fits = |former: &String| parse(former).is_some_and(|parts| product(&parts) == count);
        attributes.push(("topology", topology::written(owner).filter(fits).unwrap_or_else(|| NONE.to_owned())));
        attributes.push(("wrote-topology", wrote));
    }
    attributes.extend(now.numa.filter(|_| before.numa.is_none()).map(|wrote| ("wrote-numa", wrote)));
    attributes.extend(now.numatune.filter(|_| before.numatune.is_none()).map(|wrote| (WROTE_NUMATUNE, wrote)));
    if attributes.len() == 1 {
        return Ok(shaped.to_owned());
    }
    let element = Element::new(ELEMENT, attributes);
    let mut changes = Changes::of(&domain);
    match domain.first(&["metadata"]) {
        Some(metadata) => {
            let last = metadata.children().rfind(Node::is_element);
            changes.insert(metadata, last, element);
        }
        None => changes.insert_below(&domain, "metadata", &[], vec![element]),
    }
    Ok(changes.into_edits()?.apply(shaped))
}

/// The attributes of a former `<topology>`; `None` for none, and for what is none of ours.
fn parse(former: &str) -> Option<Vec<(&'static str, String)>> {
    former
        .split_ascii_whitespace()
        .map(|part| {
            let (name, count) = part.split_once('=')?;
            let name = topology::PARTS.into_iter().find(|known| *known == name)?;
            let count: u16 = count.parse().ok()?;
            Some((name, count.to_string()))
        })
        .collect::<Option<Vec<_>>>()
        .filter(|parts| !parts.is_empty())
}

fn product(parts: &[(&'static str, String)]) -> u64 {
    parts.iter().filter_map(|(_, count)| count.parse::<u64>().ok()).fold(1, u64::saturating_mul)
}
