//! What a domain document says: who it is, what it asks for, and which pins it already carries.
//!
//! Reads as libvirt does (measured on 9.0): of two `<vcpu>` the first counts, pins of every `<cputune>` count together,
//! a pin of a vCPU that does not exist counts nowhere. What libvirt refuses to define is refused here too.

use std::collections::{BTreeMap, BTreeSet};

use roxmltree::Node;

use super::{Domain, invalid, memory, number, number_attribute, string};
use crate::alloc::plan::GuestTopology;
use crate::alloc::policy::Policy;
use crate::alloc::request::Request;
use crate::cpuset::CpuSet;
use crate::error::Result;
use crate::uuid::DomainUuid;

/// The most I/O threads that are numbered; libvirt has no bound of its own, a document of a few bytes could ask for 2^32.
const MAX_IOTHREADS: u32 = 8192;

/// Who a domain is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The UUID; a file that was never defined may have none.
    pub uuid: Option<DomainUuid>,
    /// The name: any text.
    pub name: String,
    /// libvirt's number of the running domain.
    pub id: Option<u32>,
}

/// Who the domain is.
///
/// # Errors
/// [`Code::DomainInvalid`](crate::error::Code::DomainInvalid): no name, or a uuid or id that is none.
pub fn identity(domain: &Domain<'_>) -> Result<Identity> {
    let name = domain.first(&["name"]).map(string).filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| invalid("the domain has no <name>"))?;
    // An empty <uuid> is none: libvirt makes one up.
    let uuid = domain.first(&["uuid"]).map(string).filter(|text| !text.is_empty()).map(|text| {
        DomainUuid::parse(&text).ok_or_else(|| invalid(format!("<uuid> \"{text}\" of domain \"{name}\" is not a UUID")))
    });
    // libvirt writes no id for a domain that does not run, older tools -1.
    let id = domain.root().attribute("id").filter(|id| *id != "-1").map(|text| {
        let id = number(text).and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| invalid(format!("<domain id=\"{text}\"> is not a domain id")))
    });
    Ok(Identity { uuid: uuid.transpose()?, id: id.transpose()?, name })
}

/// The attributes of the policy element `{urn:virt-pin:domain:1}cpu` in `<metadata>`; `None` where there is none.
///
/// # Errors
/// [`Code::PolicyInvalid`](crate::error::Code::PolicyInvalid): two such elements, content inside one, a prefixed
/// attribute, or an unknown element in that namespace.
pub fn policy_attributes(domain: &Domain<'_>) -> Result<Option<Vec<(String, String)>>> {
    super::policy::attributes(domain)
}

/// What the domain asks for under this policy.
///
/// # Errors
/// [`Code::DomainInvalid`](crate::error::Code::DomainInvalid): a count or size that libvirt would refuse too, or one of
/// more vCPUs or I/O threads than virt-pin handles.
pub fn request(domain: &Domain<'_>, policy: Policy) -> Result<Request> {
    let iothreads = iothread_ids(domain)?.len();
    let iothreads = u16::try_from(iothreads).map_err(|_| invalid(format!("{iothreads} I/O threads are too many")))?;
    Ok(Request { vcpus: vcpu_count(domain)?, iothreads, policy, memory: memory::of(domain)? })
}

/// The maximum number of vCPUs: those that can be plugged in later included.
pub(super) fn vcpu_count(domain: &Domain<'_>) -> Result<u16> {
    let Some(vcpu) = domain.first(&["vcpu"]) else {
        return Ok(1);
    };
    let text = string(vcpu);
    let count = number(&text).ok_or_else(|| invalid(format!("<vcpu> \"{text}\" is not a number of vCPUs")))?;
    match u16::try_from(count) {
        Ok(0) => Err(invalid("<vcpu> says 0 vCPUs")),
        Ok(count) => Ok(count),
        Err(_) => Err(invalid(format!("<vcpu> says {count} vCPUs; at most {} can be pinned", u16::MAX))),
    }
}

/// The numbers of the domain's I/O threads, in libvirt's order: those of `<iothreadids>`, then the lowest free ones up
/// to the count in `<iothreads>`.
///
/// # Errors
/// [`Code::DomainInvalid`](crate::error::Code::DomainInvalid): a count or id that is no number, 0, or given twice.
pub fn iothread_ids(domain: &Domain<'_>) -> Result<Vec<u32>> {
    let text = domain.first(&["iothreads"]).map(string).unwrap_or_default();
    let count = match text.as_str() {
        "" => Some(0),
        text => number(text).and_then(|count| u32::try_from(count).ok()),
    };
    let count = count.ok_or_else(|| invalid(format!("<iothreads> \"{text}\" is not a number of I/O threads")))?;
    if count > MAX_IOTHREADS {
        return Err(invalid(format!("<iothreads> says {count} I/O threads; at most {MAX_IOTHREADS} are handled")));
    }
    let mut ids: Vec<u32> = Vec::new();
    let mut taken = BTreeSet::new();
    for iothread in domain.all(&["iothreadids", "iothread"]) {
        let id = number_attribute(iothread, "id")?;
        if id == 0 {
            return Err(invalid("<iothread id=\"0\">: I/O threads are numbered from 1"));
        }
        if !taken.insert(id) {
            return Err(invalid(format!("I/O thread {id} is given twice")));
        }
        ids.push(id);
    }
    let missing = usize::try_from(count).unwrap_or(0).saturating_sub(ids.len());
    ids.extend((1..).filter(|id| !taken.contains(id)).take(missing));
    Ok(ids)
}

/// Pins by hand: who is bound to which CPUs by the document itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pins {
    /// By vCPU number; only vCPUs that exist.
    pub vcpus: BTreeMap<u16, CpuSet>,
    /// QEMU's other threads.
    pub emulator: Option<CpuSet>,
    /// By I/O thread number.
    pub iothreads: BTreeMap<u32, CpuSet>,
}

impl Pins {
    /// Whether nothing is pinned.
    pub fn is_empty(&self) -> bool {
        self.vcpus.is_empty() && self.emulator.is_none() && self.iothreads.is_empty()
    }
}

/// The pins the document carries.
///
/// # Errors
/// [`Code::DomainInvalid`](crate::error::Code::DomainInvalid): a pin libvirt would refuse: without or with a malformed
/// number or cpuset, given twice, or of an I/O thread that does not exist.
pub fn pins(domain: &Domain<'_>) -> Result<Pins> {
    let count = vcpu_count(domain)?;
    let iothreads: BTreeSet<u32> = iothread_ids(domain)?.into_iter().collect();
    let mut pins = Pins::default();
    for pin in domain.all(&["cputune", "vcpupin"]) {
        let vcpu: u32 = number_attribute(pin, "vcpu")?;
        let set = cpuset(pin)?;
        // libvirt drops what a lowered <vcpu> left behind.
        let Some(vcpu) = u16::try_from(vcpu).ok().filter(|vcpu| *vcpu < count) else {
            continue;
        };
        if pins.vcpus.insert(vcpu, set).is_some() {
            return Err(invalid(format!("vCPU {vcpu} has two <vcpupin>")));
        }
    }
    for pin in domain.all(&["cputune", "emulatorpin"]) {
        if pins.emulator.replace(cpuset(pin)?).is_some() {
            return Err(invalid("the domain has two <emulatorpin>"));
        }
    }
    for pin in domain.all(&["cputune", "iothreadpin"]) {
        let id: u32 = number_attribute(pin, "iothread")?;
        if !iothreads.contains(&id) {
            return Err(invalid(format!("<iothreadpin> names I/O thread {id}, which the domain does not have")));
        }
        if pins.iothreads.insert(id, cpuset(pin)?).is_some() {
            return Err(invalid(format!("I/O thread {id} has two <iothreadpin>")));
        }
    }
    Ok(pins)
}

fn cpuset(pin: Node<'_, '_>) -> Result<CpuSet> {
    let element = pin.tag_name().name();
    let text = pin.attribute("cpuset").ok_or_else(|| invalid(format!("<{element}> has no cpuset attribute")))?;
    CpuSet::parse_libvirt_cpuset(text)
        .map_err(|error| invalid(format!("<{element} cpuset=\"{text}\"> is not a list of CPUs")).because(error))
}

/// `<vcpu cpuset=...>`: where libvirt puts the threads that have no pin of their own.
///
/// # Errors
/// [`Code::DomainInvalid`](crate::error::Code::DomainInvalid): not a list of CPUs.
pub fn default_cpuset(domain: &Domain<'_>) -> Result<Option<CpuSet>> {
    // With automatic placement libvirt disregards it.
    let vcpu = domain.first(&["vcpu"]).filter(|vcpu| vcpu.attribute("placement") != Some("auto"));
    vcpu.filter(|vcpu| vcpu.has_attribute("cpuset")).map(cpuset).transpose()
}

/// The guest's topology as `<cpu><topology>` has it, clusters counted into the cores; `None` where there is none.
///
/// # Errors
/// [`Code::DomainInvalid`](crate::error::Code::DomainInvalid): a part that is missing, no number, 0 or beyond 65535.
pub fn topology(domain: &Domain<'_>) -> Result<Option<GuestTopology>> {
    super::topology::of(domain)
}

/// The cgroup partition (`<resource><partition>`) the domain is placed in.
pub fn partition(domain: &Domain<'_>) -> Option<String> {
    domain.first(&["resource", "partition"]).map(string).filter(|partition| !partition.is_empty())
}
