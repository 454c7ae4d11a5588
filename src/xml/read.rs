//! What a domain document says: who it is, what it asks for, and which pins it already carries. Never changes it.
//!
//! Reads as libvirt does (measured on 9.0): of two `<vcpu>` the first counts, pins of every `<cputune>` count together,
//! a pin of a vCPU that does not exist counts nowhere. What libvirt refuses to define is refused here too.

use std::collections::{BTreeMap, BTreeSet};

use roxmltree::Node;

use super::{Domain, devices, invalid, memory, numa, number, number_attribute, string};
use crate::alloc::plan::GuestTopology;
use crate::alloc::policy::Policy;
use crate::alloc::request::Request;
use crate::cpuset::CpuSet;
use crate::error::Result;
use crate::host::PciAddress;
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
/// [`Code::DomainInvalid`](crate::error::Code::DomainInvalid): a count, size or NUMA cell that libvirt would refuse too, or
/// more vCPUs or I/O threads than virt-pin handles.
pub fn request(domain: &Domain<'_>, policy: Policy) -> Result<Request> {
    let iothreads = iothread_ids(domain)?.len();
    let iothreads = u16::try_from(iothreads).map_err(|_| invalid(format!("{iothreads} I/O threads are too many")))?;
    let vcpus = vcpu_count(domain)?;
    let (memory, cells) = (memory::of(domain)?, numa::cells(domain, vcpus)?);
    Ok(Request { iothreads, memory, cells, ..Request::new(vcpus, policy) })
}

/// Whether libvirt is to ask numad where the domain's threads run.
pub fn placement_is_auto(domain: &Domain<'_>) -> bool {
    domain.first(&["vcpu"]).and_then(|vcpu| vcpu.attribute("placement")) == Some("auto")
}

/// The maximum number of vCPUs: those that can be plugged in later included.
///
/// # Errors
/// [`Code::DomainInvalid`](crate::error::Code::DomainInvalid): a count that libvirt would refuse too, or that is too high.
pub fn vcpu_count(domain: &Domain<'_>) -> Result<u16> {
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
    /// Every CPU that is named.
    pub fn all(&self) -> CpuSet {
        let threads = self.vcpus.values().chain(&self.emulator).chain(self.iothreads.values());
        threads.fold(CpuSet::new(), |all, cpus| all.union(cpus))
    }

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
    super::cpuset_attribute(pin, "cpuset")
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

/// The host's PCI devices that the domain is given: `<hostdev>`, `<interface type='hostdev'>` and NVMe disks. Not a mediated
/// device or one of USB, and not what a network's pool will choose.
///
/// # Errors
/// [`Code::DomainInvalid`](crate::error::Code::DomainInvalid): an address that libvirt would refuse too.
pub fn pci_devices(domain: &Domain<'_>) -> Result<BTreeSet<PciAddress>> {
    devices::pci(domain)
}

/// Whether the document binds the guest's memory to host nodes itself (`<numatune>`).
pub fn binds_memory(domain: &Domain<'_>) -> bool {
    domain.first(&["numatune", "memory"]).is_some() || domain.first(&["numatune", "memnode"]).is_some()
}

/// The cgroup partition (`<resource><partition>`) the domain is placed in.
pub fn partition(domain: &Domain<'_>) -> Option<String> {
    domain.first(&["resource", "partition"]).map(string).filter(|partition| !partition.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    fn with<T>(body: &str, read: impl FnOnce(&Domain<'_>) -> T) -> T {
        read(&Domain::parse(&format!("<domain>{body}</domain>")).unwrap())
    }

    #[track_caller]
    fn refused<T: std::fmt::Debug>(body: &str, read: impl FnOnce(&Domain<'_>) -> Result<T>, part: &str) {
        let error = with(body, read).unwrap_err();
        assert_eq!(error.code, Code::DomainInvalid);
        assert!(error.message.contains(part), "{body}: {}", error.message);
    }

    fn set(text: &str) -> CpuSet {
        CpuSet::parse_kernel_list(text).unwrap()
    }

    #[test]
    fn identities() {
        let uuid = "0123abcd-89ab-cdef-0123-456789abcdef";
        let text = format!("<domain id='7'><name> a&amp;b </name><uuid>{uuid}</uuid></domain>");
        let found = identity(&Domain::parse(&text).unwrap()).unwrap();
        assert_eq!(found, Identity { uuid: DomainUuid::parse(uuid), name: " a&b ".to_owned(), id: Some(7) });
        let bare = with("<name>a</name><name>b</name><uuid/>", identity).unwrap();
        assert_eq!(bare, Identity { uuid: None, name: "a".to_owned(), id: None });
        assert_eq!(identity(&Domain::parse("<domain id='-1'><name>a</name></domain>").unwrap()).unwrap().id, None);
        refused("<name/>", identity, "no <name>");
        refused("<devices><name>a</name></devices>", identity, "no <name>");
        refused("<name>a</name><uuid>1</uuid>", identity, "not a UUID");
        assert!(identity(&Domain::parse("<domain id='x'><name>a</name></domain>").unwrap()).is_err());
    }

    #[test]
    fn vcpus_are_the_maximum_of_the_first_element() {
        for (body, count) in [
            ("", 1),
            ("<vcpu current='2'>8</vcpu>", 8),
            ("<vcpu>2</vcpu><vcpu>4</vcpu>", 2),
            ("<vcpu><![CDATA[0]]>4<!-- x --></vcpu>", 4),
            ("<VCPU>4</VCPU><metadata><vcpu>9</vcpu></metadata>", 1),
            ("<vcpu>65535</vcpu>", 65535),
        ] {
            assert_eq!(with(body, |domain| request(domain, Policy::default())).unwrap().vcpus, count, "{body}");
        }
        for body in ["<vcpu/>", "<vcpu>4 </vcpu>", "<vcpu>4.0</vcpu>", "<vcpu>-1</vcpu>", "<vcpu>0</vcpu>"] {
            refused(body, vcpu_count, "vCPU");
        }
        refused("<vcpu>65536</vcpu>", vcpu_count, "at most 65535");
    }

    #[test]
    fn iothreads_are_numbered_as_libvirt_numbers_them() {
        let ids = |ids: &[&str]| {
            let ids: String = ids.iter().map(|id| format!("<iothread id='{id}'/>")).collect();
            format!("<iothreadids>{ids}</iothreadids>")
        };
        for (body, expected) in [
            (String::new(), &[][..]),
            ("<iothreads/>".to_owned(), &[]),
            ("<iothreads>3</iothreads>".to_owned(), &[1, 2, 3]),
            (ids(&["2", "7"]), &[2, 7]),
            ("<iothreads>1</iothreads>".to_owned() + &ids(&["2", "7"]), &[2, 7]),
            ("<iothreads>4</iothreads>".to_owned() + &ids(&["2", "7"]), &[2, 7, 1, 3]),
            ("<iothreads>1</iothreads><iothreads>3</iothreads>".to_owned() + &ids(&[]) + &ids(&["5"]), &[5]),
        ] {
            assert_eq!(with(&body, iothread_ids).unwrap(), expected, "{body}");
        }
        refused("<iothreads>2 </iothreads>", iothread_ids, "not a number");
        refused("<iothreads>4294967295</iothreads>", iothread_ids, "at most");
        refused(&ids(&["0"]), iothread_ids, "from 1");
        refused(&ids(&["2", "02"]), iothread_ids, "twice");
        refused("<iothreadids><iothread/></iothreadids>", iothread_ids, "no id");
    }

    #[test]
    fn pins_of_every_cputune_count_and_leftovers_do_not() {
        let found = with(
            "<vcpu>2</vcpu><iothreads>2</iothreads>
             <cputune><vcpupin vcpu='1' cpuset='0-3,^1'/><vcpupin vcpu='2' cpuset='9'/></cputune>
             <cputune><vcpupin vcpu='+0' cpuset='5'/><emulatorpin cpuset='0'/><iothreadpin iothread='2' cpuset='8'/></cputune>
             <metadata><cputune><vcpupin vcpu='0' cpuset='9'/></cputune></metadata>",
            pins,
        );
        let expected = Pins {
            vcpus: [(0, set("5")), (1, set("0,2-3"))].into(),
            emulator: Some(set("0")),
            iothreads: [(2, set("8"))].into(),
        };
        assert_eq!(found.unwrap(), expected);
        assert!(with("<vcpu cpuset='2'>1</vcpu><cputune><shares>1</shares></cputune>", pins).unwrap().is_empty());
        for (body, part) in [
            ("<vcpupin vcpu='0' cpuset='1'/><vcpupin vcpu='00' cpuset='1'/>", "two <vcpupin>"),
            ("<emulatorpin cpuset='1'/><emulatorpin cpuset='1'/>", "two <emulatorpin>"),
            ("<vcpupin cpuset='1'/>", "no vcpu"),
            ("<vcpupin vcpu='0-1' cpuset='1'/>", "not a number"),
            ("<vcpupin vcpu='0'/>", "no cpuset"),
            ("<vcpupin vcpu='9' cpuset='^0'/>", "not a list"),
            ("<iothreadpin iothread='1' cpuset='1'/>", "does not have"),
        ] {
            refused(&format!("<cputune>{body}</cputune>"), pins, part);
        }
    }

    #[test]
    fn topologies_and_partitions() {
        let cpu = |attributes: &str| with(&format!("<cpu><topology {attributes}/></cpu>"), topology);
        let shape = |sockets, dies, cores, threads| Some(GuestTopology { sockets, dies, cores, threads });
        assert_eq!(cpu("sockets='1' cores=' 2' threads='+02'").unwrap(), shape(1, 1, 2, 2));
        assert_eq!(cpu("sockets='1' dies='2' clusters='3' cores='2' threads='1'").unwrap(), shape(1, 2, 6, 1));
        assert_eq!(with("<cpu/><cpu><topology/></cpu>", topology).unwrap(), None);
        assert!(cpu("sockets='1' cores='2'").is_err() && cpu("sockets='1' cores='0' threads='1'").is_err());

        let inside = "<resource><partition>/machine/production</partition></resource>";
        assert_eq!(with(inside, partition).as_deref(), Some("/machine/production"));
        assert_eq!(with("<resource/>", partition), None);
    }
}
