//! What a domain wants: its own policy, or that of the configuration, or its pins. Reads devices and page sizes of the host, and no
//! lease; what it gets is decided beside.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::static_conflict;
use crate::alloc::policy::{Fallback, Kind, Locality, Memory, Policy, Span};
use crate::alloc::request::{GuestMemory, Pages, Request};
use crate::config::settings::Settings;
use crate::cpuset::{CpuId, CpuSet, NodeId};
use crate::error::{Error, Result, printable};
use crate::host::root::Root;
use crate::host::{pci, sysfs};
use crate::lock::leases::{Holds, Leases};
use crate::uuid::DomainUuid;
use crate::xml::Domain;
use crate::xml::read::{self, Identity, Pins};
use crate::xml::shape;

/// What a domain wants of the host's CPUs.
#[derive(Clone, Debug)]
pub enum Wish {
    /// No lease.
    Shared,
    /// No policy, but pins written by hand: these CPUs.
    Static(CpuSet),
    /// CPUs of its own.
    Dedicated(Box<Dedicated>),
}

/// A dedicated domain's request, and what its XML says of pins all the same.
#[derive(Clone, Debug)]
pub struct Dedicated {
    /// What it asks for.
    pub request: Request,
    /// Pins in its XML.
    pub pins: Pins,
    /// `<vcpu cpuset=...>`: where libvirt would put threads that have no pin.
    pub default_cpuset: Option<CpuSet>,
    /// The host node that its document binds the memory of each guest cell to, as it was written for its place; libvirt takes no
    /// other from us at a start.
    pub bound_to: Option<BTreeMap<usize, NodeId>>,
    /// Where the policy was written: "the domain's XML" or `FILE:LINE`.
    pub policy_from: String,
    /// The configuration it was read under.
    pub settings: Settings,
}

impl Dedicated {
    /// The request as it can be answered. `entering`: the document will be replaced by ours (migrate, restore), and what it binds
    /// with it.
    pub fn asked(&self, entering: bool) -> Cow<'_, Request> {
        let Some(bound_to) = self.bound_to.as_ref().filter(|_| !entering) else { return Cow::Borrowed(&self.request) };
        let mut request = self.request.clone();
        for (number, cell) in request.cells.iter_mut().enumerate() {
            cell.bound = bound_to.get(&number).copied();
        }
        if let ([_], Some(node)) = (request.cells.as_slice(), bound_to.get(&0)) {
            // A single cell is no group of its own; what the policy names and its memory is not on has no room there.
            let there = CpuSet::from_iter([CpuId(node.0)]);
            let apart = request.policy.nodes.as_ref().is_some_and(|named| named.is_disjoint(&there));
            request.policy.nodes = if apart { request.policy.nodes } else { Some(there) };
        }
        Cow::Owned(request)
    }

    /// The refusal, with what the document has to do with it.
    pub(super) fn confined(&self, error: Error, entering: bool) -> Error {
        let Some(bound_to) = self.bound_to.as_ref().filter(|_| !entering && error.code.is_about_placement()) else {
            return error;
        };
        let nodes: CpuSet = bound_to.values().map(|node| CpuId(node.0)).collect();
        error.because(format!(
            "its XML binds the memory of its NUMA cells to nodes {nodes}, as virt-pin wrote it for the domain's place, so it can \
             start there alone"
        ))
    }

    /// How the domain starts although it gets no plan: where there is no place for it and its policy says so, degraded.
    ///
    /// # Errors
    /// The refusal itself; [`StaticConflict`](crate::error::Code::StaticConflict) when libvirt would pin the degraded domain to CPUs of another.
    pub fn fall_back(&self, refusal: Error, leases: &Leases, domain: Option<DomainUuid>) -> Result<Holds> {
        if self.request.policy.fallback == Fallback::Refuse || !refusal.code.is_about_placement() {
            return Err(refusal);
        }
        let pins = self.pins.all();
        match leases.dedicated_owner_of(&pins, domain) {
            Some(owner) => Err(static_conflict(&pins, owner).because(refusal).with_hint(
                "fallback=\"shared\" starts it without CPUs of its own, but not on those of another: take the pins out of its \
                 XML, or stop the VM that holds the CPUs",
            )),
            None => Ok(Holds::Degraded { code: refusal.code, reason: refusal.message, pins }),
        }
    }
}

/// What this domain wants: the policy in its XML, or that of the configuration, or its pins. `configured` is only asked
/// where it matters: a mistake in the configuration does not stop a domain whose own XML says that it is shared.
///
/// # Errors
/// [`PolicyInvalid`], [`PolicyUnsupported`], [`PolicyDenied`], [`DomainInvalid`], [`HostIo`], or those of `configured`.
///
/// [`PolicyInvalid`]: crate::error::Code::PolicyInvalid
/// [`PolicyUnsupported`]: crate::error::Code::PolicyUnsupported
/// [`PolicyDenied`]: crate::error::Code::PolicyDenied
/// [`DomainInvalid`]: crate::error::Code::DomainInvalid
/// [`HostIo`]: crate::error::Code::HostIo
pub fn wish(
    root: &Root,
    domain: &Domain<'_>,
    identity: &Identity,
    configured: &dyn Fn() -> Result<Settings>,
) -> Result<Wish> {
    let parse = |attributes: &[(String, String)]| {
        Policy::from_attributes(attributes.iter().map(|(name, value)| (name.as_str(), value.as_str())))
    };
    let own = read::policy_attributes(domain)?.map(|attributes| parse(&attributes)).transpose()?;
    if own.as_ref().is_some_and(|policy| policy.kind == Kind::Shared) {
        return Ok(by_hand(domain));
    }
    let settings = configured()?;
    let section = settings.section_for(identity.uuid, &identity.name);
    let (mut policy, policy_from) = match (own, section) {
        (Some(policy), _) => (policy, "the domain's XML".to_owned()),
        (None, Some(section)) => (parse(&section.attributes)?, section.place.clone()),
        (None, None) => return Ok(by_hand(domain)),
    };
    if policy.kind == Kind::Shared {
        return Ok(by_hand(domain));
    }
    let bound_to = shape::bound_cells(domain).filter(|_| policy.memory == Memory::Follow && policy.numa != Span::Any);
    if bound_to.is_none() && read::binds_memory(domain) {
        // Its own <numatune> is libvirt's to carry out; two bindings would contradict each other.
        policy.memory = Memory::Any;
    }
    let mut request = read::request(domain, policy)?;
    settings.check(&identity.name, request.vcpus, &request.policy)?;
    if let Some(memory @ GuestMemory { pages: Pages::HugeDefault, .. }) = request.memory {
        let size = sysfs::default_hugepage_kib(root)?;
        request.memory = size.map(|kib| GuestMemory { pages: Pages::Huge(kib), ..memory });
    }
    if request.policy.locality == Locality::Devices {
        for address in read::pci_devices(domain)? {
            request.devices.extend(pci::node_of(root, address)?);
        }
    }
    let (pins, default_cpuset) = (read::pins(domain)?, read::default_cpuset(domain)?);
    Ok(Wish::Dedicated(Box::new(Dedicated { request, pins, default_cpuset, bound_to, policy_from, settings })))
}

/// What a domain's policy element says to no effect: attributes, and not the one without which they ask for nothing.
pub fn in_vain(domain: &Domain<'_>) -> Option<String> {
    let attributes = read::policy_attributes(domain).ok()??;
    if attributes.iter().any(|(name, _)| name == "policy") {
        return None;
    }
    let said: Vec<_> = attributes.iter().map(|(name, value)| format!("{name}=\"{}\"", printable(value))).collect();
    let said = if said.is_empty() { "nothing".to_owned() } else { said.join(" ") };
    Some(format!("its policy element says {said}, but not policy=\"dedicated\", without which it asks for no CPUs"))
}

/// A domain that gets no CPUs from us may have pinned itself; malformed pins are libvirt's to refuse.
fn by_hand(domain: &Domain<'_>) -> Wish {
    match read::pins(domain) {
        Ok(pins) if !pins.is_empty() => Wish::Static(pins.all()),
        _ => Wish::Shared,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;
    use crate::host::description;

    #[test]
    fn the_nodes_of_devices_are_looked_up_where_they_matter() {
        let machine =
            "/sys/bus/pci/devices/0000:65:00.0/numa_node\t1\n/sys/bus/pci/devices/0000:66:00.0/numa_node\t-1\n";
        let root = description::parse(machine).unwrap();
        let hostdev = |bus: &&str| format!("<hostdev type='pci'><source><address bus='{bus}'/></source></hostdev>");
        let nodes = |locality: &str, buses: &[&str]| {
            let devices: String = buses.iter().map(hostdev).collect();
            let text = format!(
                "<domain><name>vm</name><metadata><p:cpu xmlns:p='urn:virt-pin:domain:1' policy='dedicated' \
                 locality='{locality}'/></metadata><devices>{devices}</devices></domain>"
            );
            let domain = Domain::parse(&text).unwrap();
            let identity = read::identity(&domain).unwrap();
            match wish(&root, &domain, &identity, &|| Settings::read(&root))? {
                Wish::Dedicated(wish) => Ok(wish.request.devices.into_iter().collect::<Vec<NodeId>>()),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(nodes("devices", &["0x65", "0x66", "0x67"]).unwrap(), [NodeId(1)]);
        assert_eq!(nodes("none", &["0x65", "junk"]).unwrap(), []);
        let error: Error = nodes("devices", &["junk"]).unwrap_err();
        assert_eq!(error.code, Code::DomainInvalid);
    }
}
