//! Who holds which CPUs: the leases in memory and their form on disk.
//!
//! ```text
//! {"version":2,"boot_id":"...","leases":[
//!   {"uuid":"...","name":"db","state":"running","kind":"dedicated","vcpus":[2,10,null],"shared":"0-1","whole":true,
//!    "parked":"3,11","extra":"4,12","emulator":"0-1","iothreads":"0-1","nodes":"0","memory_nodes":"0","guest":[1,1,3,1],
//!    "cells":[{"vcpus":"0-2","bytes":1073741824,"node":0}],"request":{"vcpus":3,"policy":[["policy","dedicated"]]},
//!    "domain_id":7,"cgroup":"/sys/fs/cgroup/...","daemon":[812,3345],"qemu":[4711,998877],"since":5120}]}
//! ```
//! Sets are kernel lists; `vcpus` is in vCPU order, `null` for one on the shared CPUs; processes are [pid, start time];
//! `since` is seconds of uptime; what is empty or not known is left out. `request` is written down in `request.rs`. Those
//! who have no plan have instead of it:
//!
//! ```text
//! "kind":"static","cpus":"4-5"
//! "kind":"degraded","cpus":"","code":"cpu.placement.shortage","reason":"needs 2 whole cores ..."
//! ```
//!
//! A running lease on its way to other CPUs has both until it is there: `"moving":{"by":[4713,998901],"to":{"vcpus":[4,12,null],...}}`
//! beside its plan, with the process that moves it.
//!
//! Version 1 had no `request`, `shared`, `cells` or `null`, and nobody degraded; it is read, and written as version 2 at the
//! next change. A reader refuses a version it does not know and a field it does not know; so a new field, policy attribute or
//! value takes a new version, once a build without it is out (`docs/upgrade.md`). This module does no I/O and
//! takes no lock.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::plan::{self, CellOnDisk, PlanOnDisk};
use super::request::{RequestOnDisk, set};
use crate::alloc::plan::Plan;
use crate::alloc::policy::Kind;
use crate::alloc::request::{Pages, Request};
use crate::cpuset::CpuSet;
use crate::error::{Code, Error, Result};
use crate::host::process::Process;
use crate::uuid::DomainUuid;

/// The version this code writes. It reads those before it as well.
const VERSION: u32 = 2;

/// No start takes longer: between `prepare` and QEMU's birth libvirt sets up devices and runs other hooks, which are seconds,
/// rarely a minute.
pub const START_SECS: u64 = 120;

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
    /// What a dedicated domain asked for, by which its CPUs can be planned anew; `None` where that is not known.
    pub request: Option<Request>,
    /// libvirt's id of the running domain; its cgroup is named after it.
    pub domain_id: Option<u32>,
    /// The cgroup made for it before QEMU was started, to be removed with the lease.
    pub cgroup: Option<String>,
    /// The libvirt daemon that will report its end.
    pub daemon: Option<Process>,
    /// The domain's QEMU, once known.
    pub qemu: Option<Process>,
    /// Where it is being moved to; until it is there, the CPUs of both plans are its.
    pub moving: Option<Moving>,
    /// Seconds of uptime at the last change of state.
    pub since: u64,
}

/// A move that has begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moving {
    /// Where to.
    pub to: Plan,
    /// The process that moves it. Once that has ended, anybody may complete the move or undo it.
    pub by: Process,
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
    /// There was no room for a dedicated domain whose policy says `fallback="shared"`: it runs without CPUs of its own.
    Degraded {
        /// Why it was not given any.
        code: Code,
        /// The same as a sentence without the domain's name.
        reason: String,
        /// Pins in its XML, which libvirt carries out: as with those by hand, nobody else gets these CPUs.
        pins: CpuSet,
    },
}

impl Lease {
    /// The CPUs that no dedicated domain may have.
    pub fn cpus(&self) -> CpuSet {
        match &self.holds {
            Holds::Dedicated(_) => self.plans().fold(CpuSet::new(), |all, plan| all.union(&plan.exclusive())),
            Holds::Static(cpus) | Holds::Degraded { pins: cpus, .. } => cpus.clone(),
        }
    }

    /// Every plan whose CPUs it holds: its own, and the one that it moves to.
    pub fn plans(&self) -> impl Iterator<Item = &Plan> {
        self.plan().into_iter().chain(self.moving.iter().map(|moving| &moving.to))
    }

    /// Whether the domain's start has taken so long that its end may have gone unreported.
    pub fn is_overdue(&self, now: u64) -> bool {
        self.state == State::Reserved && now > self.since.saturating_add(START_SECS)
    }

    /// What must hold of a lease by itself: numbers that can be, and counts that agree.
    fn check(&self) -> std::result::Result<(), &'static str> {
        let Some(plan) = self.plan() else {
            return match (&self.request, &self.moving) {
                (None, None) => Ok(()),
                (Some(_), _) => Err("has a request, but no plan"),
                (None, Some(_)) => Err("moves, but has no plan"),
            };
        };
        plan::check(plan)?;
        if let Some(moving) = &self.moving {
            plan::check(&moving.to)?;
            let owns = |plan: &Plan| plan.vcpus.iter().map(Option::is_some).collect::<Vec<_>>();
            if self.state != State::Running || owns(plan) != owns(&moving.to) || plan.guest != moving.to.guest {
                return Err("moves to a plan that is not for the guest that runs");
            }
        }
        let count = plan.vcpus.len();
        let Some(request) = &self.request else { return Ok(()) };
        if usize::from(request.vcpus) != count || !request.cells.iter().all(|cell| plan::exist(&cell.vcpus, count)) {
            return Err("has a request for other vCPUs than it has");
        }
        if request.policy.kind != Kind::Dedicated {
            return Err("has a request for no CPUs");
        }
        if request.memory.is_some_and(|memory| memory.pages == Pages::Huge(0)) {
            return Err("has a request for pages of no size");
        }
        Ok(())
    }

    /// The plan of a dedicated domain.
    pub fn plan(&self) -> Option<&Plan> {
        match &self.holds {
            Holds::Dedicated(plan) => Some(plan),
            Holds::Static(_) | Holds::Degraded { .. } => None,
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

    /// What must hold: one lease a domain, each possible by itself, no CPU of a dedicated lease in any other, and no thread
    /// of another there.
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
        for lease in &self.leases {
            lease.check().map_err(|what| format!("the lease of \"{}\" {what}", lease.name))?;
        }
        // Once over all: who has a CPU exclusively, and then whether anybody else may be there.
        let mut owned = CpuSet::new();
        let mut own = Vec::new();
        for lease in &self.leases {
            let cpus = lease.plan().map(|_| lease.cpus()).unwrap_or_default();
            if !cpus.is_disjoint(&owned) {
                return Err(format!("CPUs {} of \"{}\" have two owners", cpus.intersection(&owned), lease.name));
            }
            owned.add(&cpus);
            own.push(cpus);
        }
        for (lease, own) in self.leases.iter().zip(&own) {
            // Dedicated vCPUs are on CPUs of their own.
            let elsewhere = match &lease.holds {
                Holds::Dedicated(_) => {
                    lease.plans().flat_map(|plan| [&plan.emulator, &plan.iothreads, &plan.shared]).collect()
                }
                Holds::Static(cpus) | Holds::Degraded { pins: cpus, .. } => vec![cpus],
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
        let file = FileOnDisk {
            version: VERSION,
            boot_id: self.boot_id.clone(),
            leases: self.leases.iter().map(LeaseOnDisk::from).collect(),
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
        let file = serde_json::from_str::<FileOnDisk>(text);
        let version = match &file {
            Ok(file) => Some(file.version),
            Err(_) => serde_json::from_str::<Version>(text).ok().map(|file| file.version),
        };
        if let Some(version) = version.filter(|&version| version > VERSION) {
            let ours = env!("CARGO_PKG_VERSION");
            let reason = format!("has version {version}; this is virt-pin {ours} and reads up to {VERSION}");
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
struct FileOnDisk {
    version: u32,
    boot_id: String,
    leases: Vec<LeaseOnDisk>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum KindOnDisk {
    Dedicated,
    Static,
    Degraded,
}

/// One lease on disk; one without a plan has its CPUs in `cpus`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LeaseOnDisk {
    uuid: String,
    name: String,
    state: State,
    kind: KindOnDisk,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cpus: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    code: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    vcpus: Vec<Option<u16>>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    shared: String,
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
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    cells: Vec<CellOnDisk>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    request: Option<RequestOnDisk>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    domain_id: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cgroup: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    daemon: Option<(u32, u64)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    qemu: Option<(u32, u64)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    moving: Option<MovingOnDisk>,
    since: u64,
}

/// A move on disk.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MovingOnDisk {
    by: (u32, u64),
    to: PlanOnDisk,
}

impl From<&Lease> for LeaseOnDisk {
    fn from(lease: &Lease) -> LeaseOnDisk {
        let process = |process: Process| (process.pid, process.start_time);
        let (kind, cpus, why) = match &lease.holds {
            Holds::Dedicated(_) => (KindOnDisk::Dedicated, None, None),
            Holds::Static(cpus) => (KindOnDisk::Static, Some(cpus), None),
            Holds::Degraded { code, reason, pins } => (KindOnDisk::Degraded, Some(pins), Some((code, reason))),
        };
        let plan = lease.plan().map(PlanOnDisk::from).unwrap_or_default();
        LeaseOnDisk {
            uuid: lease.uuid.to_string(),
            name: lease.name.clone(),
            state: lease.state,
            kind,
            cpus: cpus.map(ToString::to_string),
            code: why.map(|(code, _)| code.name().to_owned()),
            reason: why.map(|(_, reason)| reason.clone()),
            vcpus: plan.vcpus,
            shared: plan.shared,
            whole: plan.whole,
            parked: plan.parked,
            extra: plan.extra,
            emulator: plan.emulator,
            iothreads: plan.iothreads,
            nodes: plan.nodes,
            memory_nodes: plan.memory_nodes,
            guest: plan.guest,
            cells: plan.cells,
            request: lease.request.as_ref().map(RequestOnDisk::from),
            domain_id: lease.domain_id,
            cgroup: lease.cgroup.clone(),
            daemon: lease.daemon.map(process),
            qemu: lease.qemu.map(process),
            moving: lease
                .moving
                .as_ref()
                .map(|moving| MovingOnDisk { by: process(moving.by), to: (&moving.to).into() }),
            since: lease.since,
        }
    }
}

impl TryFrom<LeaseOnDisk> for Lease {
    type Error = String;

    fn try_from(file: LeaseOnDisk) -> std::result::Result<Lease, String> {
        let name = crate::error::printable(&file.name);
        Lease::read(file).map_err(|what| format!("is damaged: the lease of \"{name}\" {what}"))
    }
}

impl Lease {
    /// What the form on disk stands for, or what is wrong with it.
    fn read(file: LeaseOnDisk) -> std::result::Result<Lease, String> {
        let uuid = DomainUuid::parse(&file.uuid).ok_or("has no UUID")?;
        let holds = match (file.kind, file.cpus, file.code, file.reason) {
            (KindOnDisk::Static, Some(cpus), None, None) => Holds::Static(set(&cpus)?),
            (KindOnDisk::Degraded, Some(cpus), Some(code), Some(reason)) => Holds::Degraded {
                code: Code::from_name(&code).ok_or_else(|| format!("has an unknown code \"{code}\""))?,
                reason,
                pins: set(&cpus)?,
            },
            (KindOnDisk::Dedicated, None, None, None) => Holds::Dedicated(
                PlanOnDisk {
                    vcpus: file.vcpus,
                    shared: file.shared,
                    whole: file.whole,
                    parked: file.parked,
                    extra: file.extra,
                    emulator: file.emulator,
                    iothreads: file.iothreads,
                    nodes: file.nodes,
                    memory_nodes: file.memory_nodes,
                    guest: file.guest,
                    cells: file.cells,
                }
                .read()?,
            ),
            _ => return Err("mixes what only leases of different kinds have".to_owned()),
        };
        let process = |(pid, start_time)| Process { pid, start_time };
        let moving = |moving: MovingOnDisk| Ok::<_, String>(Moving { by: process(moving.by), to: moving.to.read()? });
        Ok(Lease {
            uuid,
            name: file.name,
            state: file.state,
            holds,
            request: file.request.map(Request::try_from).transpose()?,
            domain_id: file.domain_id,
            cgroup: file.cgroup,
            daemon: file.daemon.map(process),
            qemu: file.qemu.map(process),
            moving: file.moving.map(moving).transpose()?,
            since: file.since,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::alloc::plan::{GuestTopology, PlacedCell};
    use crate::alloc::policy::Policy;
    use crate::alloc::request::{GuestCell, GuestMemory};
    use crate::cpuset::{CpuId, MAX_CPUS, NodeId};
    use proptest::prelude::*;

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
            request: None,
            domain_id: Some(7),
            cgroup: Some("/x".to_owned()),
            daemon: Some(process),
            qemu: None,
            moving: None,
            since: 5,
        }
    }

    fn dedicated(vcpus: &[u16]) -> Holds {
        Holds::Dedicated(Plan {
            parked: set("30"),
            nodes: BTreeSet::from([NodeId(0), NodeId(250)]),
            memory_nodes: Some(BTreeSet::from([NodeId(0)])),
            guest: Some(GuestTopology { sockets: 1, dies: 1, cores: 1, threads: 2 }),
            ..Plan::new(vcpus.iter().copied().map(CpuId), set("0"))
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
            &text.replace("\"version\":2", "\"version\":2,\"more\":1"),
            &text.replace("\"version\":2", "\"version\":\"2\""),
        ] {
            assert_eq!(Leases::from_json(bad).map_err(|error| error.code), Err(Code::StateCorrupt), "{bad:?}");
        }
        let newer = "{\"version\":3,\"boot_id\":\"\",\"leases\":[],\"colour\":\"red\"}";
        assert_eq!(Leases::from_json(newer).unwrap_err().code, Code::StateNewer);
        assert!(Leases::from_json(&text.replace(',', ",\r\n")).is_ok());
    }

    /// Written by a hook of version 1, byte for byte: a domain that runs and one pinned by hand.
    const VERSION_1: &str = "{\"version\":1,\"boot_id\":\"1f0e2d3c-4b5a-6978-8796-a5b4c3d2e1f0\",\"leases\":[\
        {\"uuid\":\"0123abcd-89ab-cdef-0123-456789abcdef\",\"name\":\"db\",\"state\":\"running\",\"kind\":\"dedicated\",\"vcpus\":[1],\
        \"emulator\":\"1\",\"iothreads\":\"0\",\"nodes\":\"0\",\"memory_nodes\":\"0\",\"guest\":[1,1,1,1],\"domain_id\":7,\"qemu\":[700,5000],\
        \"since\":5120},{\"uuid\":\"1123abcd-89ab-cdef-0123-456789abcdef\",\"name\":\"by hand\",\"state\":\"reserved\",\
        \"kind\":\"static\",\"cpus\":\"0\",\"domain_id\":8,\"since\":5120}]}\n";

    #[test]
    fn version_1_is_read_and_written_as_version_2() {
        let leases = Leases::from_json(VERSION_1).unwrap();
        let db = leases.iter().next().unwrap();
        assert_eq!((db.plan().unwrap().vcpus.as_slice(), &db.request), (&[Some(CpuId(1))][..], &None));
        assert_eq!(db.qemu, Some(Process { pid: 700, start_time: 5000 }));
        assert_eq!(leases.iter().nth(1).unwrap().holds, Holds::Static(set("0")));
        // It had nothing that version 2 writes otherwise.
        assert_eq!(leases.to_json().unwrap(), VERSION_1.replace("\"version\":1", "\"version\":2"));
    }

    /// Two vCPUs on CPUs of their own and one on the shared ones, with all that a plan may have.
    fn full() -> Lease {
        let policy = Policy::from_attributes([("policy", "dedicated"), ("dedicated-vcpus", "0,2")]).unwrap();
        let bytes = 1 << 30;
        let plan = Plan {
            vcpus: vec![Some(CpuId(10)), None, Some(CpuId(2))],
            shared: set("0-1"),
            extra: set("4"),
            guest: Some(GuestTopology { sockets: 1, dies: 1, cores: 3, threads: 1 }),
            cells: vec![
                PlacedCell { vcpus: set("0-1"), bytes: Some(bytes), node: Some(NodeId(1)) },
                PlacedCell { vcpus: set("2"), bytes: None, node: None },
            ],
            ..Plan::new([], set("0"))
        };
        let request = Request {
            iothreads: 3,
            memory: Some(GuestMemory { bytes, pages: Pages::Huge(2048) }),
            cells: vec![GuestCell { vcpus: set("0-2"), bytes, bound: None }],
            devices: [NodeId(0), NodeId(3)].into(),
            ..Request::new(3, policy)
        };
        Lease { request: Some(request), ..lease(1, Holds::Dedicated(plan)) }
    }

    #[test]
    fn impossible_numbers_are_neither_written_nor_read() {
        let mut leases = Leases::default();
        leases.put(full());
        assert_eq!(leases.check(), Ok(()));
        let text = leases.to_json().unwrap();
        assert_eq!(Leases::from_json(&text), Ok(leases));
        for (what, instead) in [
            ("[10,null,2]", "[10,null]"),
            ("[10,null,2]", "[2,null,2]"),
            ("[10,null,2]", "[10,null,8192]"),
            ("[10,null,2]", "[10,5,2]"),
            ("[10,null,2]", "[null,null,null]"),
            ("[10,null,2]", "[10,-1,2]"),
            ("\"shared\":\"0-1\",", ""),
            ("\"cells\":[{\"vcpus\":\"0-1\"", "\"cells\":[{\"vcpus\":\"0-3\""),
            ("\"node\":1", "\"node\":-1"),
            ("\"guest\":[1,1,3,1]", "\"guest\":[1,1,0,1]"),
            ("\"request\":{\"vcpus\":3", "\"request\":{\"vcpus\":2"),
            ("\"cells\":[{\"vcpus\":\"0-2\"", "\"cells\":[{\"vcpus\":\"0-3\""),
            ("[\"policy\",\"dedicated\"],", ""),
            ("{\"huge\":2048}", "{\"huge\":0}"),
            ("\"iothreads\":3", "\"iothreads\":3,\"more\":1"),
        ] {
            assert!(text.contains(what), "{what}");
            let damaged = text.replacen(what, instead, 1);
            let error = Leases::from_json(&damaged).unwrap_err();
            assert_eq!(error.code, Code::StateCorrupt, "{instead}: {}", error.reason);
        }
        let by_hand = Lease { holds: Holds::Static(set("5")), ..full() };
        let mut leases = Leases::default();
        leases.put(by_hand);
        assert!(leases.check().unwrap_err().ends_with("has a request, but no plan"));
    }

    /// A lease of CPUs 2-3 on its way to others.
    fn moving(to: Plan) -> Lease {
        let by = Process { pid: 4713, start_time: 7 };
        Lease { moving: Some(Moving { to, by }), ..lease(1, dedicated(&[2, 3])) }
    }

    #[test]
    fn a_lease_that_moves_holds_both_places() {
        let Holds::Dedicated(to) = dedicated(&[3, 5]) else { unreachable!() };
        let mut leases = Leases::default();
        leases.put(moving(Plan { parked: set("31"), ..to.clone() }));
        assert_eq!(leases.check(), Ok(()));
        let text = leases.to_json().unwrap();
        assert_eq!(Leases::from_json(&text), Ok(leases.clone()));
        assert_eq!(leases.taken_from(None), set("2-3,5,30-31"));
        for (cpus, ours) in [("6", true), ("2", false), ("5", false), ("31", false)] {
            leases.put(lease(2, Holds::Static(set(cpus))));
            assert_eq!(leases.check().is_ok(), ours, "{cpus}");
        }
        leases.remove(uuid(2));
        // Only the guest that runs, and only while it does.
        for bad in [
            Lease { state: State::Reserved, ..moving(to.clone()) },
            moving(Plan { guest: None, ..to.clone() }),
            moving(Plan::new([CpuId(5)], set("0"))),
            moving(Plan { shared: set("0"), ..to.clone() }),
            Lease { holds: Holds::Static(set("2")), ..moving(to) },
        ] {
            let mut leases = Leases::default();
            leases.put(bad);
            assert!(leases.check().is_err() && Leases::from_json(&leases.to_json().unwrap()).is_err(), "{leases:?}");
        }
        for (what, instead) in [("\"by\":[4713,7],", ""), ("\"moving\":{", "\"moving\":{\"more\":1,")] {
            assert!(text.contains(what), "{text}");
            assert_eq!(Leases::from_json(&text.replacen(what, instead, 1)).unwrap_err().code, Code::StateCorrupt);
        }
    }

    #[test]
    fn a_degraded_lease_holds_what_its_xml_pins_and_nothing_else() {
        let degraded = |pins: &str| Holds::Degraded {
            code: Code::Shortage,
            reason: "needs 2 whole cores".to_owned(),
            pins: set(pins),
        };
        let mut leases = Leases::default();
        leases.put(lease(1, dedicated(&[2, 3])));
        leases.put(lease(2, degraded("")));
        assert!(leases.check().is_ok() && leases.get(uuid(2)).is_some_and(|lease| lease.cpus().is_empty()));
        let text = leases.to_json().unwrap();
        assert_eq!(Leases::from_json(&text), Ok(leases.clone()));
        for (what, instead) in [
            ("cpu.placement.shortage", "cpu.placement.wanting"),
            ("\"code\":\"cpu.placement.shortage\",", ""),
            ("\"cpus\":\"\",", ""),
            ("\"kind\":\"degraded\"", "\"kind\":\"static\""),
            ("\"kind\":\"degraded\"", "\"kind\":\"dedicated\""),
        ] {
            assert!(text.contains(what), "{what}");
            assert_eq!(Leases::from_json(&text.replacen(what, instead, 1)).unwrap_err().code, Code::StateCorrupt);
        }
        leases.put(lease(2, degraded("3-4")));
        assert!(leases.check().is_err());
    }

    #[test]
    fn the_shared_cpus_of_one_are_not_anothers_own() {
        let mut leases = Leases::default();
        leases.put(full());
        for (cpus, ours) in [(&[5, 6][..], true), (&[6, 1], false)] {
            leases.put(lease(2, dedicated(cpus)));
            assert_eq!(leases.check().is_ok(), ours, "{cpus:?}");
        }
        assert!(leases.check().unwrap_err().ends_with("may run on CPUs 1, which another domain owns"));
    }

    /// CPUs below `count`.
    fn some_cpus(count: u16) -> impl Strategy<Value = CpuSet> {
        proptest::collection::btree_set(0..count, 0..6).prop_map(|cpus| cpus.into_iter().map(CpuId).collect())
    }

    fn some_nodes() -> impl Strategy<Value = BTreeSet<NodeId>> {
        proptest::collection::btree_set((0..MAX_CPUS).prop_map(NodeId), 0..4)
    }

    fn some_policy() -> impl Strategy<Value = Policy> {
        let more = [
            ("cores", "thread"),
            ("numa", "spread"),
            ("nodes", "0,5-7"),
            ("cache", "any"),
            ("cpus", "4-7"),
            ("dedicated-vcpus", "1"),
            ("memory", "any"),
            ("emulator", "isolate"),
            ("core-class", "efficiency"),
            ("topology", "keep"),
            ("locality", "devices"),
            ("realtime", "yes"),
            ("fallback", "shared"),
        ];
        let some = proptest::sample::subsequence(more.to_vec(), 0..=more.len());
        some.prop_filter_map("realtime and a fallback contradict each other", |mut pairs| {
            pairs.push(("policy", "dedicated"));
            Policy::from_attributes(pairs).ok()
        })
    }

    fn some_request(vcpus: u16) -> impl Strategy<Value = Request> {
        let pages = prop_oneof![Just(Pages::Ordinary), Just(Pages::HugeDefault), (1..=u64::MAX).prop_map(Pages::Huge),];
        let memory =
            proptest::option::of((any::<u64>(), pages).prop_map(|(bytes, pages)| GuestMemory { bytes, pages }));
        let cell = (some_cpus(vcpus), any::<u64>()).prop_map(|(vcpus, bytes)| GuestCell { vcpus, bytes, bound: None });
        let cells = proptest::collection::vec(cell, 0..3);
        (any::<u16>(), some_policy(), memory, cells, some_nodes()).prop_map(
            move |(iothreads, policy, memory, cells, devices)| Request {
                iothreads,
                memory,
                cells,
                devices,
                ..Request::new(vcpus, policy)
            },
        )
    }

    /// A plan on the CPUs of one block of 64, so that those of several blocks do not meet.
    fn some_plan(block: u16) -> impl Strategy<Value = Plan> {
        let own = (proptest::collection::btree_set(0..32u16, 1..9), any::<u64>(), any::<bool>());
        let cell = (some_cpus(1), any::<Option<u64>>(), proptest::option::of(0..MAX_CPUS));
        let cells = proptest::collection::vec(cell, 0..3);
        let sets = [some_cpus(16), some_cpus(16), some_cpus(16), some_cpus(16), some_cpus(16)];
        (own, any::<bool>(), sets, some_nodes(), proptest::option::of(some_nodes()), cells, any::<bool>()).prop_map(
            move |((own, order, shares), whole, sets, nodes, memory_nodes, cells, told)| {
                let here = |from: u16, cpus: &CpuSet| cpus.iter().map(|cpu| CpuId(block * 64 + from + cpu.0)).collect();
                let mut vcpus: Vec<_> = own.into_iter().map(|cpu| Some(CpuId(block * 64 + cpu))).collect();
                let pivot = usize::try_from(order % 7).unwrap() % vcpus.len();
                vcpus.rotate_left(pivot);
                let [mut shared, parked, extra, emulator, iothreads] = sets;
                if shares && !shared.is_empty() {
                    vcpus.insert(pivot, None);
                } else {
                    shared = CpuSet::new();
                }
                let cores = u16::try_from(vcpus.len()).unwrap();
                let cell = |(vcpus, bytes, node): (CpuSet, Option<u64>, Option<u16>)| PlacedCell {
                    vcpus,
                    bytes,
                    node: node.map(NodeId),
                };
                Plan {
                    vcpus,
                    shared: here(48, &shared),
                    whole,
                    parked: here(32, &parked),
                    extra: here(32, &extra),
                    emulator: here(48, &emulator),
                    iothreads: here(48, &iothreads),
                    nodes,
                    memory_nodes,
                    guest: told.then_some(GuestTopology { sockets: 1, dies: 1, cores, threads: 1 }),
                    cells: cells.into_iter().map(cell).collect(),
                }
            },
        )
    }

    fn some_lease(number: u8) -> impl Strategy<Value = Lease> {
        let with_request = some_plan(number.into()).prop_flat_map(|plan| {
            let request = proptest::option::of(some_request(u16::try_from(plan.vcpus.len()).unwrap()));
            (Just(Holds::Dedicated(plan)), request)
        });
        let codes: Vec<Code> = Code::all().collect();
        let degraded = proptest::option::of((proptest::sample::select(codes), any::<String>()));
        let by_hand = (some_cpus(64), degraded).prop_map(move |(cpus, degraded)| {
            let pins: CpuSet = cpus.iter().map(|cpu| CpuId(u16::from(number) * 64 + cpu.0)).collect();
            match degraded {
                Some((code, reason)) => (Holds::Degraded { code, reason, pins }, None),
                None => (Holds::Static(pins), None),
            }
        });
        let state = proptest::sample::select(vec![State::Provisional, State::Reserved, State::Running]);
        let process = || any::<(u32, u64)>().prop_map(|(pid, start_time)| Process { pid, start_time });
        let facts = (
            any::<String>(),
            state,
            any::<Option<u32>>(),
            any::<Option<String>>(),
            proptest::option::of(process()),
            proptest::option::of(process()),
            any::<u64>(),
        );
        (prop_oneof![3 => with_request, 1 => by_hand], facts).prop_map(
            move |((holds, request), (name, state, domain_id, cgroup, daemon, qemu, since))| Lease {
                uuid: uuid(number),
                name,
                state,
                holds,
                request,
                domain_id,
                cgroup,
                daemon,
                qemu,
                moving: None,
                since,
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_leases_survive_the_file(some in [some_lease(1), some_lease(2), some_lease(100)], boot_id: String) {
            let mut leases = Leases { boot_id, ..Leases::default() };
            some.into_iter().for_each(|lease| leases.put(lease));
            prop_assert_eq!(leases.check(), Ok(()));
            prop_assert_eq!(Leases::from_json(&leases.to_json().unwrap()), Ok(leases));
        }
    }
}
