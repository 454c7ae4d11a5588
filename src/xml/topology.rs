//! `<cpu><topology>`: what the guest is told of its cores. Knows nothing of its NUMA cells.

use roxmltree::Node;

use super::layout::Element;
use super::pin::Changes;
use super::{Domain, invalid, number, number_attribute};
use crate::alloc::plan::GuestTopology;
use crate::error::Result;

/// The topology of the document, clusters counted into the cores.
pub(super) fn of(domain: &Domain<'_>) -> Result<Option<GuestTopology>> {
    let Some(topology) = domain.first(&["cpu", "topology"]) else {
        return Ok(None);
    };
    let Shape { guest, clusters } = shape(topology)?;
    let cores = guest.cores.checked_mul(clusters).ok_or_else(|| invalid("<topology> has more than 65535 cores"))?;
    Ok(Some(GuestTopology { cores, ..guest }))
}

/// The attributes of `<topology>` that say how many.
pub(super) const PARTS: [&str; 5] = ["sockets", "dies", "clusters", "cores", "threads"];

/// What the topology of the document says, in one spelling; `None` where there is none that can be understood.
pub(super) fn said(domain: &Domain<'_>) -> Option<String> {
    let guest = of(domain).ok().flatten()?;
    let GuestTopology { sockets, dies, cores, threads } = guest;
    Some(format!("sockets={sockets} dies={dies} cores={cores} threads={threads}"))
}

/// The topology of the document as it is written, attribute by attribute; `None` where there is none, or nonsense in it.
pub(super) fn written(domain: &Domain<'_>) -> Option<String> {
    let topology = domain.first(&["cpu", "topology"])?;
    let there = PARTS.into_iter().filter(|name| topology.has_attribute(*name));
    let parts: Option<Vec<_>> =
        there.map(|name| Some(format!("{name}={}", number(topology.attribute(name)?)?))).collect();
    parts.map(|parts| parts.join(" "))
}

/// Corrects the topology of the document; one that says the same already stays as it is spelled. Returns the one to add
/// where there is none.
pub(super) fn rewrite<'d, 't>(
    domain: &'d Domain<'t>,
    guest: GuestTopology,
    changes: &mut Changes<'d, 't>,
) -> Result<Option<Element>> {
    let Some(topology) = domain.first(&["cpu", "topology"]) else {
        return Ok(Some(element(guest)));
    };
    let old = shape(topology)?;
    for (name, after, old, new) in [
        ("sockets", None, old.guest.sockets, guest.sockets),
        ("dies", Some("sockets"), old.guest.dies, guest.dies),
        ("clusters", Some("dies"), old.clusters, 1),
        ("cores", None, old.guest.cores, guest.cores),
        ("threads", None, old.guest.threads, guest.threads),
    ] {
        if old != new {
            changes.set(topology, name, &new.to_string(), after);
        }
    }
    Ok(None)
}

struct Shape {
    /// Without the clusters.
    guest: GuestTopology,
    clusters: u16,
}

/// Only dies and clusters may be absent: libvirt then takes one.
fn shape(topology: Node<'_, '_>) -> Result<Shape> {
    let part = |name| match number_attribute(topology, name)? {
        0 => Err(invalid(format!("<topology {name}=\"0\">: zero is not permitted"))),
        count => Ok(count),
    };
    // libvirt before 10.1 does not look at clusters, so nonsense there is no reason to refuse the domain.
    let clusters = topology.attribute("clusters").map(|text| number(text).and_then(|count| u16::try_from(count).ok()));
    Ok(Shape {
        guest: GuestTopology {
            sockets: part("sockets")?,
            dies: if topology.has_attribute("dies") { part("dies")? } else { 1 },
            cores: part("cores")?,
            threads: part("threads")?,
        },
        clusters: clusters.map_or(1, Option::unwrap_or_default),
    })
}

fn element(guest: GuestTopology) -> Element {
    let GuestTopology { sockets, dies, cores, threads } = guest;
    let parts = [("sockets", sockets), ("dies", dies), ("cores", cores), ("threads", threads)];
    // An old libvirt does not know dies; one of them need not be said.
    let parts = parts.into_iter().filter(|(name, count)| *name != "dies" || *count != 1);
    Element::new("topology", parts.map(|(name, count)| (name, count.to_string())).collect())
}
