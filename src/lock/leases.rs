//! Who holds which CPUs: the leases in memory and their form on disk.
//!
//! ```text
//! {"version":1,"boot_id":"...","leases":[
//!   {"uuid":"...","name":"db","state":"running","kind":"dedicated","vcpus":[2,10],"whole":true,"parked":"3,11","extra":"",
//!    "emulator":"0-1","iothreads":"0-1","nodes":"0","memory_nodes":"0","guest":[1,1,2,1],
//!    "domain_id":7,"cgroup":"/sys/fs/cgroup/...","daemon":[812,3345],"qemu":[4711,998877],"since":5120}]}
//! ```
//! Sets are kernel lists; `vcpus` is in vCPU order; processes are [pid, start time]; `since` is seconds of uptime. A
//! reader refuses a version it does not know and a field it does not know. This module does no I/O and takes no lock.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::alloc::plan::{GuestTopology, Plan};
use crate::cpuset::{CpuId, CpuSet, MAX_CPUS, NodeId};
use crate::error::{Code, Error, Result};
use crate::host::process::Process;
use crate::uuid::DomainUuid;

/// The version this code writes, and the only one it reads.
const VERSION: u32 = 1;

/// Every lease of this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leases {
    /// The boot they were granted in; those of another boot are void. Empty when there are none.
    pub boot_id: String,
    /// Sorted by UUID, one each.
    leases: Vec<Lease>,
}

/// One domain's CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Whose.
    pub uuid: DomainUuid,
    /// Its name when the lease was granted, for people.
    pub name: String,
    /// How far it has come.
    pub state: State,
    /// Which CPUs.
    pub holds: Holds,
    /// libvirt's id of the running domain; its cgroup is named after it.
    pub domain_id: Option<u32>,
    /// The cgroup made for it before QEMU was started, to be removed with the lease.
    pub cgroup: Option<String>,
    /// The libvirt daemon that will report its end.
    pub daemon: Option<Process>,
    /// The domain's QEMU, once known.
    pub qemu: Option<Process>,
    /// Seconds of uptime at the last change of state.
    pub since: u64,
}

/// How far a lease has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// A migration or restore asked; libvirt may never come back. Expires.
    Provisional,
    /// The domain is being started.
    Reserved,
    /// Its threads are where the lease says.
    Running,
}

/// Which CPUs a lease holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holds {
    /// Given out by the allocator.
    Dedicated(Plan),
    /// Pinned by hand in the domain's XML: respected, and shared with other such domains.
    Static(CpuSet),
}

impl Lease {
    /// The CPUs that no dedicated domain may have.
    pub fn cpus(&self) -> CpuSet {
        match &self.holds {
            Holds::Dedicated(plan) => plan.exclusive(),
            Holds::Static(cpus) => cpus.clone(),
        }
    }

    /// Whether the domain's start has taken so long that its end may have gone unreported.
    pub fn is_overdue(&self, now: u64) -> bool {
        /// Between `prepare` and QEMU's birth libvirt sets up devices and runs other hooks: seconds, rarely a minute.
        const START_SECS: u64 = 120;
        self.state == State::Reserved && now > self.since.saturating_add(START_SECS)
    }

    /// The plan of a dedicated domain.
    pub fn plan(&self) -> Option<&Plan> {
        match &self.holds {
            Holds::Dedicated(plan) => Some(plan),
            Holds::Static(_) => None,
        }
    }
}

impl Leases {
    /// The leases, by UUID.
    pub fn iter(&self) -> impl Iterator<Item = &Lease> {
        self.leases.iter()
    }

    /// The lease of a domain.
    pub fn get(&self, uuid: DomainUuid) -> Option<&Lease> {
        self.leases.iter().find(|lease| lease.uuid == uuid)
    }

    /// Adds a lease, or replaces the domain's former one.
    pub fn put(&mut self, lease: Lease) {
        self.remove(lease.uuid);
        let place = self.leases.partition_point(|other| other.uuid < lease.uuid);
        self.leases.insert(place, lease);
    }

    /// Ends a lease.
    pub fn remove(&mut self, uuid: DomainUuid) -> Option<Lease> {
        let index = self.leases.iter().position(|lease| lease.uuid == uuid)?;
        Some(self.leases.remove(index))
    }

    /// The CPUs held by every domain but this one.
    pub fn taken_from(&self, uuid: Option<DomainUuid>) -> CpuSet {
        let mut taken = CpuSet::new();
        self.leases.iter().filter(|lease| Some(lease.uuid) != uuid).for_each(|lease| taken.add(&lease.cpus()));
        taken
    }

    /// Another domain's dedicated lease with any of these CPUs.
    pub fn dedicated_owner_of(&self, cpus: &CpuSet, except: Option<DomainUuid>) -> Option<&Lease> {
        self.iter()
            .find(|lease| Some(lease.uuid) != except && lease.plan().is_some() && !lease.cpus().is_disjoint(cpus))
    }

    /// What must hold: one lease a domain, no CPU of a dedicated lease in any other, and no thread of another there.
    ///
    /// # Errors
    /// The first contradiction, in words.
    pub fn check(&self) -> std::result::Result<(), String> {
        for pair in self.leases.windows(2) {
            if let [a, b] = pair {
                if a.uuid >= b.uuid {
                    return Err(format!("domain {} has two leases, or they are not sorted", b.uuid));
                }
            }
        }
        // Once over all: who has a CPU exclusively, and then whether anybody else may be there.
        let mut owned = CpuSet::new();
        let mut own = Vec::new();
        for lease in &self.leases {
            let cpus = lease.plan().map(Plan::exclusive).unwrap_or_default();
            if !cpus.is_disjoint(&owned) {
                return Err(format!("CPUs {} of \"{}\" have two owners", cpus.intersection(&owned), lease.name));
            }
            owned.add(&cpus);
            own.push(cpus);
        }
        for (lease, own) in self.leases.iter().zip(&own) {
            // A domain's vCPUs are on CPUs of its own.
            let elsewhere = match &lease.holds {
                Holds::Dedicated(plan) => [&plan.emulator, &plan.iothreads],
                Holds::Static(cpus) => [cpus, cpus],
            };
            for cpus in elsewhere {
                let foreign = cpus.intersection(&owned).difference(own);
                if !foreign.is_empty() {
                    return Err(format!("\"{}\" may run on CPUs {foreign}, which another domain owns", lease.name));
                }
            }
        }
        Ok(())
    }

    /// The form on disk.
    ///
    /// # Errors
    /// [`Code::Internal`]; cannot happen with values of this module.
    pub fn to_json(&self) -> Result<String> {
        let file = FileV1 {
            version: VERSION,
            boot_id: self.boot_id.clone(),
            leases: self.leases.iter().map(LeaseV1::from).collect(),
        };
        let text = serde_json::to_string(&file);
        text.map(|text| text + "\n")
            .map_err(|error| Error::new(Code::Internal, "cannot write leases as JSON").because(error))
    }

    /// Reads the form on disk.
    ///
    /// # Errors
    /// [`Unreadable`]: newer than this code, or corrupt.
    pub fn from_json(text: &str) -> std::result::Result<Leases, Unreadable> {
        /// A newer file may have any other field.
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let corrupt = |reason: String| Unreadable { code: Code::StateCorrupt, reason };
        let file = serde_json::from_str::<FileV1>(text);
        let version = match &file {
            Ok(file) => Some(file.version),
            Err(_) => serde_json::from_str::<Version>(text).ok().map(|file| file.version),
        };
        if let Some(version) = version.filter(|&version| version > VERSION) {
            let reason =
                format!("has version {version}; this is virt-pin {} and reads {VERSION}", env!("CARGO_PKG_VERSION"));
            return Err(Unreadable { code: Code::StateNewer, reason });
        }
        let file = file.map_err(|error| corrupt(format!("is not a lease file: {error}")))?;
        let leases = file.leases.into_iter().map(Lease::try_from).collect::<std::result::Result<Vec<_>, _>>();
        let leases = Leases { boot_id: file.boot_id, leases: leases.map_err(corrupt)? };
        leases.check().map_err(|what| corrupt(format!("contradicts itself: {what}")))?;
        Ok(leases)
    }
}

/// Why a text is not ours to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// [`Code::StateCorrupt`] or [`Code::StateNewer`].
    pub code: Code,
    /// What it is or has, to be put behind the file's name.
    pub reason: String,
}

impl Unreadable {
    /// The error, with the file's name.
    pub(super) fn in_file(self, path: &Path) -> Error {
        Error::new(self.code, format!("{} {}", path.display(), self.reason))
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileV1 {
    version: u32,
    boot_id: String,
    leases: Vec<LeaseV1>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum KindV1 {
    Dedicated,
    Static,
}

/// One lease on disk; a static one has its CPUs in `cpus` and nothing of a plan.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LeaseV1 {
    uuid: String,
    name: String,
    state: State,
    kind: KindV1,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cpus: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    vcpus: Vec<u16>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    whole: bool,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    parked: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    extra: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    emulator: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    iothreads: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    nodes: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    memory_nodes: Option<String>,
    /// Sockets, dies, cores, threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    guest: Option<(u16, u16, u16, u16)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    domain_id: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cgroup: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    daemon: Option<(u32, u64)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    qemu: Option<(u32, u64)>,
    since: u64,
}

impl From<&Lease> for LeaseV1 {
    fn from(lease: &Lease) -> LeaseV1 {
        let process = |process: Process| (process.pid, process.start_time);
        let nodes =
            |nodes: &mut dyn Iterator<Item = &NodeId>| nodes.map(|node| CpuId(node.0)).collect::<CpuSet>().to_string();
        let mut file = LeaseV1 {
            uuid: lease.uuid.to_string(),
            name: lease.name.clone(),
            state: lease.state,
            kind: KindV1::Static,
            cpus: None,
            vcpus: Vec::new(),
            whole: false,
            parked: String::new(),
            extra: String::new(),
            emulator: String::new(),
            iothreads: String::new(),
            nodes: String::new(),
            memory_nodes: None,
            guest: None,
            domain_id: lease.domain_id,
            cgroup: lease.cgroup.clone(),
            daemon: lease.daemon.map(process),
            qemu: lease.qemu.map(process),
            since: lease.since,
        };
        match &lease.holds {
            Holds::Static(cpus) => file.cpus = Some(cpus.to_string()),
            Holds::Dedicated(plan) => {
                file.kind = KindV1::Dedicated;
                file.vcpus = plan.vcpus.iter().map(|cpu| cpu.0).collect();
                file.whole = plan.whole;
                file.parked = plan.parked.to_string();
                file.extra = plan.extra.to_string();
                file.emulator = plan.emulator.to_string();
                let alike = plan.iothreads == plan.emulator;
                file.iothreads = if alike { file.emulator.clone() } else { plan.iothreads.to_string() };
                file.nodes = nodes(&mut plan.nodes.iter());
                file.memory_nodes = plan.memory_nodes.as_ref().map(|set| nodes(&mut set.iter()));
                file.guest = plan.guest.map(|guest| (guest.sockets, guest.dies, guest.cores, guest.threads));
            }
        }
        file
    }
}

impl TryFrom<LeaseV1> for Lease {
    type Error = String;

    fn try_from(file: LeaseV1) -> std::result::Result<Lease, String> {
        let of = || format!("the lease of \"{}\"", crate::error::printable(&file.name));
        let uuid = DomainUuid::parse(&file.uuid).ok_or_else(|| format!("has no UUID in {}", of()))?;
        let set = |text: &str| {
            CpuSet::parse_kernel_list(text).map_err(|error| format!("has \"{text}\" in {}: {error}", of()))
        };
        let nodes = |text: &str| set(text).map(|set| set.iter().map(|id| NodeId(id.0)).collect());
        let holds = match (file.kind, file.cpus) {
            (KindV1::Static, Some(cpus)) => Holds::Static(set(&cpus)?),
            (KindV1::Dedicated, None) => {
                let emulator = set(&file.emulator)?;
                let plan = Plan {
                    vcpus: file.vcpus.into_iter().map(CpuId).collect(),
                    whole: file.whole,
                    parked: set(&file.parked)?,
                    extra: set(&file.extra)?,
                    // Mostly both are the housekeeping CPUs, the longest of the lists.
                    iothreads: if file.iothreads == file.emulator { emulator.clone() } else { set(&file.iothreads)? },
                    emulator,
                    nodes: nodes(&file.nodes)?,
                    memory_nodes: file.memory_nodes.as_deref().map(nodes).transpose()?,
                    guest: file.guest.map(|(sockets, dies, cores, threads)| GuestTopology {
                        sockets,
                        dies,
                        cores,
                        threads,
                    }),
                };
                let cpus = plan.vcpu_cpus();
                if plan.vcpus.is_empty()
                    || cpus.len() != plan.vcpus.len()
                    || plan.vcpus.iter().any(|cpu| cpu.0 >= MAX_CPUS)
                {
                    return Err(format!("has impossible vCPUs in {}", of()));
                }
                Holds::Dedicated(plan)
            }
            _ => return Err(format!("mixes static and dedicated in {}", of())),
        };
        let process = |(pid, start_time)| Process { pid, start_time };
        Ok(Lease {
            uuid,
            name: file.name,
            state: file.state,
            holds,
            domain_id: file.domain_id,
            cgroup: file.cgroup,
            daemon: file.daemon.map(process),
            qemu: file.qemu.map(process),
            since: file.since,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn uuid(n: u8) -> DomainUuid {
        DomainUuid::parse(&format!("{n:02x}").repeat(16)).unwrap()
    }

    fn set(text: &str) -> CpuSet {
        CpuSet::parse_kernel_list(text).unwrap()
    }

    fn lease(n: u8, holds: Holds) -> Lease {
        let process = Process { pid: 812, start_time: 99 };
        Lease {
            uuid: uuid(n),
            name: "a\"\u{1b}b".to_owned(),
            state: State::Running,
            holds,
            domain_id: Some(7),
            cgroup: Some("/x".to_owned()),
            daemon: Some(process),
            qemu: None,
            since: 5,
        }
    }

    fn dedicated(vcpus: &[u16]) -> Holds {
        Holds::Dedicated(Plan {
            vcpus: vcpus.iter().copied().map(CpuId).collect(),
            whole: true,
            parked: set("30"),
            extra: set(""),
            emulator: set("0"),
            iothreads: set("0"),
            nodes: BTreeSet::from([NodeId(0), NodeId(250)]),
            memory_nodes: Some(BTreeSet::from([NodeId(0)])),
            guest: Some(GuestTopology { sockets: 1, dies: 1, cores: 1, threads: 2 }),
        })
    }

    #[test]
    fn leases_survive_the_file_with_their_order_of_vcpus() {
        let mut leases = Leases { boot_id: "boot".to_owned(), ..Leases::default() };
        leases.put(lease(2, Holds::Static(set("8-9"))));
        leases.put(lease(3, Holds::Static(set("9"))));
        leases.put(lease(1, dedicated(&[10, 2])));
        let text = leases.to_json().unwrap();
        assert_eq!(Leases::from_json(&text), Ok(leases.clone()));
        assert_eq!(leases.taken_from(Some(uuid(2))), set("2,9-10,30"));
        assert_eq!(leases.dedicated_owner_of(&set("9-10"), Some(uuid(2))).map(|lease| lease.uuid), Some(uuid(1)));
        assert!(leases.dedicated_owner_of(&set("9-10"), Some(uuid(1))).is_none());
    }

    #[test]
    fn two_owners_are_a_contradiction() {
        let mut leases = Leases::default();
        leases.put(lease(1, dedicated(&[2, 3])));
        leases.put(lease(2, Holds::Static(set("3-4"))));
        assert_eq!(leases.check(), Err("\"a\"\u{1b}b\" may run on CPUs 3, which another domain owns".to_owned()));
        assert_eq!(Leases::from_json(&leases.to_json().unwrap()).unwrap_err().code, Code::StateCorrupt);
    }

    #[test]
    fn torn_foreign_and_newer_files_are_told_apart() {
        let good = Leases::default().to_json().unwrap();
        let text = good.trim_end();
        for bad in [
            "",
            "\0\0\0\0",
            "{}",
            "[]",
            "null",
            &text[..text.len() - 1],
            &format!("{text}}}"),
            &format!("{text}{text}"),
            &format!("{text}\0"),
            &format!("\u{feff}{text}"),
            &text.replace("leases\":[", "leases\":[{}"),
            &text.replace("boot_id", "boot"),
            &text.replace("\"version\":1", "\"version\":1,\"more\":1"),
            &text.replace("\"version\":1", "\"version\":\"1\""),
        ] {
            assert_eq!(Leases::from_json(bad).map_err(|error| error.code), Err(Code::StateCorrupt), "{bad:?}");
        }
        let newer = "{\"version\":2,\"boot_id\":\"\",\"leases\":[],\"colour\":\"red\"}";
        assert_eq!(Leases::from_json(newer).unwrap_err().code, Code::StateNewer);
        assert!(Leases::from_json(&text.replace(',', ",\r\n")).is_ok());
    }
}
