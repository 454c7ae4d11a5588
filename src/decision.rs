//! What a domain would get on this host, here and now: its text, the configuration, the machine and the leases together.
//!
//! Shared by the hook and the command line, so that `virt-pin explain` says exactly what a start would do. Reads the host;
//! takes no lock, changes nothing.

use crate::alloc::plan::Plan;
use crate::alloc::policy::{Kind, Memory, Policy};
use crate::alloc::refusal::Refusal;
use crate::alloc::request::{GuestMemory, Pages, Request};
use crate::alloc::{self, Steps, Supply, check};
use crate::config::settings::Settings;
use crate::cpuset::{CpuId, CpuSet};
use crate::error::{Code, Error, Result, printable};
use crate::host::root::Root;
use crate::host::{Topology, cgroup, sysfs};
use crate::lock::leases::{Lease, Leases};
use crate::lock::survey::{self, Survey};
use crate::uuid::DomainUuid;
use crate::xml::Domain;
use crate::xml::read::{self, Identity, Pins};

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
    /// Where the policy was written: "the domain's XML" or `FILE:LINE`.
    pub policy_from: String,
    /// The configuration it was read under.
    pub settings: Settings,
}

/// What this domain wants: the policy in its XML, or that of the configuration, or its pins. `configured` is only asked
/// where it matters: a mistake in the configuration does not stop a domain whose own XML says that it is shared.
///
/// # Errors
/// [`Code::PolicyInvalid`], [`Code::PolicyUnsupported`], [`Code::DomainInvalid`], or those of `configured`.
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
    if read::binds_memory(domain) {
        // Its own <numatune> is libvirt's to carry out; two bindings would contradict each other.
        policy.memory = Memory::Any;
    }
    let mut request = read::request(domain, policy)?;
    if let Some(memory @ GuestMemory { pages: Pages::HugeDefault, .. }) = request.memory {
        let size = sysfs::default_hugepage_kib(root)?;
        request.memory = size.map(|kib| GuestMemory { pages: Pages::Huge(kib), ..memory });
    }
    let (pins, default_cpuset) = (read::pins(domain)?, read::default_cpuset(domain)?);
    Ok(Wish::Dedicated(Box::new(Dedicated { request, pins, default_cpuset, policy_from, settings })))
}

/// A domain that gets no CPUs from us may have pinned itself; malformed pins are libvirt's to refuse.
fn by_hand(domain: &Domain<'_>) -> Wish {
    match read::pins(domain) {
        Ok(pins) if !pins.is_empty() => Wish::Static(pins.all()),
        _ => Wish::Shared,
    }
}

/// The host as a dedicated request meets it, with what other domains have.
#[derive(Clone, Debug)]
pub struct Situation {
    /// The machine.
    pub topology: Topology,
    /// The pinnable CPUs that a domain's cgroup can be given.
    pub pinnable: CpuSet,
    /// Pinnable CPUs outside the reach of a domain's cgroup.
    pub out_of_reach: CpuSet,
    /// What others have: leased, or in use by their emulator and I/O threads.
    pub taken: CpuSet,
    /// For the host itself and emulator threads: online, in reach, neither pinnable nor leased nor isolated by the kernel
    /// (an isolated CPU that is not pinnable was set aside for something else).
    pub housekeeping: CpuSet,
    /// Others' emulator and I/O threads on CPUs that have become pinnable since they started: (domain, CPUs).
    seats: Vec<(String, CpuSet)>,
    /// What the next start would like to know of the machine, if nobody has kept it yet.
    pub survey: Option<Survey>,
}

impl Situation {
    /// Reads the machine, as if there were no leases. `partition` is the domain's `<resource><partition>`.
    ///
    /// # Errors
    /// [`Code::TopologyUnreadable`], [`Code::HostIo`].
    pub fn read(root: &Root, settings: &Settings, partition: Option<&str>) -> Result<Situation> {
        let (topology, survey) = survey::topology(root)?;
        let reach = cgroup::reach(root, partition)?.unwrap_or_else(|| topology.online().union(&settings.pinnable));
        // An offline CPU is in nobody's reach; that is not the cgroup's doing.
        let out_of_reach = settings.pinnable.difference(&reach).intersection(topology.online());
        Ok(Situation {
            pinnable: settings.pinnable.difference(&out_of_reach),
            out_of_reach,
            housekeeping: topology
                .online()
                .intersection(&reach)
                .difference(&settings.pinnable)
                .difference(&topology.isolated()),
            taken: CpuSet::new(),
            seats: Vec::new(),
            topology,
            survey,
        })
    }

    /// The same machine beside the leases of all domains but this one.
    #[must_use]
    pub fn beside(mut self, leases: &Leases, domain: Option<DomainUuid>) -> Situation {
        let others = || leases.iter().filter(|lease| Some(lease.uuid) != domain);
        self.taken = leases.taken_from(domain);
        for plan in others().filter_map(Lease::plan) {
            if plan.whole {
                // A sibling that came online later is part of the core all the same.
                let cores = plan.vcpus.iter().filter_map(|&cpu| self.topology.siblings(cpu));
                self.taken = cores.fold(self.taken, |all, core| all.union(core));
            }
            self.housekeeping = self.housekeeping.difference(&plan.exclusive());
        }
        let seats = others().filter_map(|lease| {
            let plan = lease.plan()?;
            let cpus = plan.emulator.union(&plan.iothreads).intersection(&self.pinnable).difference(&plan.exclusive());
            (!cpus.is_empty()).then(|| (lease.name.clone(), cpus))
        });
        self.seats = seats.collect();
        self.taken = self.seats.iter().fold(self.taken, |all, (_, cpus)| all.union(cpus));
        self
    }

    /// What the allocator works with.
    pub fn supply(&self) -> Supply<'_> {
        Supply {
            topology: &self.topology,
            pinnable: &self.pinnable,
            taken: &self.taken,
            housekeeping: &self.housekeeping,
        }
    }

    /// The domain's plan: the one it already has if that still answers its request, else a new one. `entering` tells
    /// whether the domain's XML will be replaced by ours (migrate, restore), so that pins in it do not matter.
    ///
    /// # Errors
    /// The allocator's refusal, or [`Code::StalePins`].
    pub fn plan(&self, wish: &Dedicated, existing: Option<&Plan>, entering: bool, steps: Steps<'_>) -> Result<Plan> {
        let supply = self.supply();
        let existing = existing.filter(|plan| check::check(&supply, &wish.request, plan).is_ok());
        let pins = Some(&wish.pins).filter(|pins| !entering && !pins.is_empty());
        let plan = match (existing, pins) {
            (Some(plan), _) => {
                steps(format_args!("the domain holds a lease that answers the request"));
                plan.clone()
            }
            (None, Some(pins)) => {
                steps(format_args!("the XML carries pins of its own: trying exactly those CPUs"));
                match exactly(&supply, &wish.request, pins) {
                    Some(plan) => plan,
                    // Say what the policy alone would get: if nothing, that is the better message.
                    None => alloc::explain(&supply, &wish.request, steps).map_err(|refusal| self.seated(refusal))?,
                }
            }
            (None, None) => alloc::explain(&supply, &wish.request, steps).map_err(|refusal| self.seated(refusal))?,
        };
        if !entering {
            agree(wish, &plan)?;
        }
        Ok(plan)
    }

    /// The refusal, with what an allowlist that has changed has to do with it.
    fn seated(&self, refusal: Refusal) -> Error {
        let error = Error::from(refusal);
        match self.seats.first() {
            Some((name, cpus)) if matches!(error.code, Code::Shortage | Code::NeedsRepack) => error.because(format!(
                "CPUs {cpus} have become pinnable while \"{}\" has emulator or I/O threads there: they are free once it has \
                 been started anew",
                printable(name)
            )),
            _ => error,
        }
    }
}

/// A plan on exactly the CPUs that the XML's pins name, in their order, or `None` if the policy has no such plan.
fn exactly(supply: &Supply<'_>, request: &Request, pins: &Pins) -> Option<Plan> {
    let order: Vec<CpuId> = (0..request.vcpus)
        .map(|vcpu| pins.vcpus.get(&vcpu).filter(|cpus| cpus.len() == 1).and_then(CpuSet::first))
        .collect::<Option<_>>()?;
    let named: CpuSet = order.iter().copied().collect();
    let named = named.union(&pins.all());
    let cores =
        named.iter().filter_map(|cpu| supply.topology.siblings(cpu)).fold(named.clone(), |all, core| all.union(core));
    // Everything else counts as taken, so that only these CPUs are left.
    let taken = supply.taken.union(&supply.pinnable.difference(&cores));
    let mut plan = alloc::plan(&Supply { taken: &taken, ..*supply }, request).ok()?;
    plan.vcpus = order;
    check::check(supply, request, &plan).is_ok().then_some(plan)
}

/// libvirt applies pins in the XML before any hook can: they must lie within the lease, or its start fails obscurely.
fn agree(wish: &Dedicated, plan: &Plan) -> Result<()> {
    let allowed = plan.allowed();
    let stale = |what: String, cpus: &CpuSet, lease: String| {
        Err(Error::new(
            Code::StalePins,
            format!("the XML of this dedicated domain also pins {what} to CPUs {cpus}; its lease says {lease}"),
        )
        .with_hint(
            "take <vcpupin>, <emulatorpin>, <iothreadpin> and <vcpu cpuset> out of the XML (virsh edit; for a snapshot, virsh \
             snapshot-edit): the policy chooses the CPUs at each start",
        ))
    };
    for (&vcpu, cpus) in &wish.pins.vcpus {
        if let Some(&leased) = plan.vcpus.get(usize::from(vcpu)) {
            if *cpus != CpuSet::from_iter([leased]) {
                return stale(format!("vCPU {vcpu}"), cpus, leased.to_string());
            }
        }
    }
    let others = [
        ("the emulator".to_owned(), wish.pins.emulator.as_ref()),
        ("other threads".to_owned(), wish.default_cpuset.as_ref()),
    ];
    let iothreads = wish.pins.iothreads.iter().map(|(id, cpus)| (format!("I/O thread {id}"), Some(cpus)));
    for (what, cpus) in others.into_iter().chain(iothreads) {
        if let Some(cpus) = cpus.filter(|cpus| !cpus.is_subset(&allowed)) {
            return stale(what, cpus, allowed.to_string());
        }
    }
    Ok(())
}

/// Why a domain that is pinned to `cpus` by hand is refused beside `owner`.
pub fn static_conflict(cpus: &CpuSet, owner: &Lease) -> Error {
    let both = owner.cpus().intersection(cpus);
    Error::new(
        Code::StaticConflict,
        format!("its XML pins vCPUs to CPUs {cpus}, but {both} are leased to domain \"{}\"", owner.name),
    )
}

/// Who holds CPUs, for the hint of a refusal: `"a" 2-3, "b" 4-5`.
pub fn holders(leases: &Leases, except: Option<DomainUuid>) -> Option<String> {
    const SHOWN: usize = 8;
    let held: Vec<_> = leases.iter().filter(|lease| Some(lease.uuid) != except && !lease.cpus().is_empty()).collect();
    let mut names: Vec<_> =
        held.iter().take(SHOWN).map(|lease| format!("\"{}\" {}", lease.name, lease.cpus())).collect();
    if held.len() > SHOWN {
        names.push(format!("{} more", held.len() - SHOWN));
    }
    (!names.is_empty()).then(|| names.join(", "))
}

/// The same error, its sentence about this domain, and for a lack of room the holders as a hint.
pub fn about(error: Error, name: &str, leases: Option<(&Leases, Option<DomainUuid>)>) -> Error {
    let holders = leases
        .filter(|_| matches!(error.code, Code::Shortage | Code::NeedsRepack))
        .and_then(|(leases, except)| holders(leases, except));
    let error = error.in_domain(name);
    match holders {
        Some(holders) => {
            let hint = format!("held by {holders}; {}", error.hint.as_deref().unwrap_or(error.code.advice()));
            error.with_hint(hint)
        }
        None => error,
    }
}
