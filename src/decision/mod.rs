//! What a domain would get on this host, here and now: its text, the configuration, the machine and the leases together.
//!
//! Shared by the hook and the command line, so that `virt-pin explain` says exactly what a start would do. Reads the host;
//! takes no lock, changes nothing.

mod wish;

use std::collections::{BTreeMap, BTreeSet};

use crate::alloc::demand::{Definition, Demand, Reserve, Settled};
use crate::alloc::plan::Plan;
use crate::alloc::refusal::Refusal;
use crate::alloc::repack::{self, Extent, Move, Mover};
use crate::alloc::request::Request;
use crate::alloc::{self, Steps, Supply, check};
use crate::config::settings::Settings;
use crate::cpuset::{CpuId, CpuSet};
use crate::error::{Code, Error, Moved, Result, listed, printable};
use crate::host::foreign::{self, Foreign};
use crate::host::root::Root;
use crate::host::{Topology, cache_id, cgroup};
use crate::lock::former;
use crate::lock::leases::{Lease, Leases, State};
use crate::lock::survey::{self, Survey};
use crate::uuid::DomainUuid;
use crate::xml::Domain;
use crate::xml::caches::{self, CacheIds};
use crate::xml::read::Pins;
pub use wish::{Dedicated, Wish, in_vain, wish};

/// The host as a dedicated request meets it, with what other domains have.
#[derive(Clone, Debug)]
pub struct Situation {
    /// The machine.
    pub topology: Topology,
    /// The pinnable CPUs that a domain's cgroup can be given.
    pub pinnable: CpuSet,
    /// Pinnable CPUs outside the reach of a domain's cgroup.
    pub out_of_reach: CpuSet,
    /// Of these, who has them for itself alone.
    pub foreign: Vec<Foreign>,
    /// What others have: leased, or in use by their emulator, I/O and shared vCPU threads.
    pub taken: CpuSet,
    /// For the host itself and emulator threads: online, in reach, neither pinnable nor leased nor isolated by the kernel
    /// (an isolated CPU that is not pinnable was set aside for something else).
    pub housekeeping: CpuSet,
    /// Others' threads without CPUs of their own, on CPUs that have become pinnable since they started: (domain, CPUs).
    seats: Vec<(String, CpuSet)>,
    /// What any of the VMs can be given at all: online, and in reach of their cgroup.
    usable: CpuSet,
    /// The pinnable CPUs that any domain can be given: those that places are found on. Fewer for a domain in a narrower
    /// partition, which may then have to look elsewhere.
    common: CpuSet,
    /// What is defined on this host; `None` = nothing that matters here.
    demand: Option<Demand<DomainUuid>>,
    /// The domain that is asked about.
    domain: Option<DomainUuid>,
    /// The others that hold leases.
    running: BTreeSet<DomainUuid>,
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
        let everything = || topology.online().union(&settings.pinnable);
        // Where what was before our changes cannot be read, that can matter in an unusual partition alone.
        let former = former::read(root).unwrap_or_default().exclusive;
        let mut foreign = foreign::exclusive(root, partition, &former);
        let of = |foreign: &[Foreign]| foreign.iter().fold(CpuSet::new(), |all, one| all.union(&one.cpus));
        let theirs = of(&foreign);
        // What another has for itself within the VMs' own cgroup is not in their reach, although that has it from above.
        let reach = cgroup::reach(root, partition)?.unwrap_or_else(everything).difference(&theirs);
        foreign.retain(|one| !one.cpus.is_disjoint(&settings.pinnable));
        // An offline CPU is in nobody's reach; that is not the cgroup's doing.
        let beyond = |reach: &CpuSet| settings.pinnable.difference(reach).intersection(topology.online());
        let out_of_reach = beyond(&reach);
        let common = match partition {
            None => out_of_reach.clone(),
            Some(_) => {
                let theirs = of(&foreign::exclusive(root, None, &former));
                beyond(&cgroup::reach(root, None)?.unwrap_or_else(everything).difference(&theirs))
            }
        };
        Ok(Situation {
            usable: topology.online().intersection(&reach),
            common: settings.pinnable.difference(&common),
            demand: None,
            domain: None,
            running: BTreeSet::new(),
            pinnable: settings.pinnable.difference(&out_of_reach),
            out_of_reach,
            foreign,
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

    /// The same machine with these domains defined on it, of which `domain` may be one. Finds their places, which may take
    /// a while: to be called with no lock held, and before [`Situation::beside`].
    #[must_use]
    pub fn among(mut self, definitions: Vec<Definition<DomainUuid>>, domain: Option<DomainUuid>) -> Situation {
        let demand = Demand::new(&Supply { pinnable: &self.common, ..self.supply() }, definitions);
        demand.foresee(domain.as_ref());
        self.demand = Some(demand);
        self
    }

    /// The same machine beside the leases of all domains but this one.
    #[must_use]
    pub fn beside(mut self, leases: &Leases, domain: Option<DomainUuid>) -> Situation {
        let others = || leases.iter().filter(|lease| Some(lease.uuid) != domain);
        self.domain = domain;
        self.running = others().map(|lease| lease.uuid).collect();
        self.taken = leases.taken_from(domain);
        for plan in others().flat_map(Lease::plans) {
            self.taken = self.taken.union(&plan.held(&self.topology));
            self.housekeeping = self.housekeeping.difference(&plan.exclusive());
        }
        let seats = others().filter_map(|lease| {
            let allowed = lease.plans().fold(CpuSet::new(), |all, plan| all.union(&plan.allowed()));
            let cpus = allowed.intersection(&self.pinnable).difference(&lease.cpus());
            (!cpus.is_empty()).then(|| (lease.name.clone(), cpus))
        });
        self.seats = seats.collect();
        self.taken = self.seats.iter().fold(self.taken, |all, (_, cpus)| all.union(cpus));
        self
    }

    /// Where VMs without a lease run beside these leases.
    pub fn shared_pool(&self, leases: &Leases) -> CpuSet {
        leases
            .iter()
            .flat_map(Lease::plans)
            .fold(self.usable.clone(), |pool, plan| pool.difference(&plan.held(&self.topology)))
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
        let request = &*wish.asked(entering);
        let existing = existing.filter(|plan| check::check(&supply, request, plan).is_ok());
        let pins = Some(&wish.pins).filter(|pins| !entering && !pins.is_empty());
        let reserve = wish.settings.autostart_reserve;
        let runs = |uuid: &DomainUuid| self.running.contains(uuid);
        let demand = self.demand.as_ref().filter(|_| existing.is_none());
        let settled = demand.map(|demand| demand.settle(&supply, &runs, self.domain.as_ref()));
        let anew = |steps: Steps<'_>| {
            let plan = match &settled {
                Some(settled) => settled.plan(&supply, request, reserve, steps),
                None => alloc::explain(&supply, request, steps),
            };
            plan.map_err(|refusal| wish.confined(self.seated(refusal), entering))
        };
        let plan = match (existing, pins) {
            (Some(plan), _) => {
                steps(format_args!("the domain holds a lease that answers the request"));
                plan.clone()
            }
            (None, Some(pins)) => {
                steps(format_args!("the XML carries pins of its own: trying exactly those CPUs"));
                let reserved = settled.as_ref().filter(|_| reserve == Reserve::Strict).map(Settled::reserved);
                let taken = supply.taken.union(&reserved.unwrap_or_default());
                match exactly(&Supply { taken: &taken, ..supply }, request, pins) {
                    Some(plan) => plan,
                    // Say what the policy alone would get: if nothing, that is the better message.
                    None => anew(steps)?,
                }
            }
            (None, None) => anew(steps)?,
        };
        if !entering {
            agree(wish, &plan)?;
        }
        Ok(plan)
    }

    /// Each defined domain's place on the idle host, or why it has none beside the others; none before [`Situation::among`].
    pub fn places(&self) -> BTreeMap<DomainUuid, Result<Plan>> {
        let places = self.demand.as_ref().map(Demand::places).into_iter().flatten();
        places.map(|(one, plan)| (one.key, plan.clone().map_err(Error::from))).collect()
    }

    /// What a request gets on the idle host, where nobody else is defined.
    ///
    /// # Errors
    /// The allocator's refusal.
    pub fn alone(&self, request: &Request) -> Result<Plan> {
        let topology = self.topology.idle();
        Ok(alloc::plan(&Supply { topology: &topology, taken: &CpuSet::new(), ..self.supply() }, request)?)
    }

    /// The CPUs set aside for other domains, that start with the host and do not run.
    pub fn reserved(&self) -> CpuSet {
        let runs = |uuid: &DomainUuid| self.running.contains(uuid);
        let settled = self.demand.as_ref().map(|demand| demand.settle(&self.supply(), &runs, self.domain.as_ref()));
        settled.map(|settled| settled.reserved()).unwrap_or_default()
    }

    /// The moves of leases after which the request has a plan, or one spread no wider than `goal`; `None` = none are known.
    /// A search that takes its time (a tenth of a second on a large host): nobody may wait for it with the lease lock held.
    pub fn moves(
        &self,
        request: &Request,
        leases: &Leases,
        domain: Option<DomainUuid>,
        goal: Option<Extent>,
    ) -> Option<Vec<Moved>> {
        // Who only may come in cannot be moved.
        let others = leases.iter().filter(|lease| Some(lease.uuid) != domain && lease.state != State::Provisional);
        let movers = others.filter_map(|lease| self.mover(lease));
        let moves = self.moves_of(request, &movers.collect::<Vec<_>>(), goal)?;
        let moved =
            moves.into_iter().map(|one| Moved { domain: one.id.0, from: one.from.to_string(), to: one.to.to_string() });
        Some(moved.collect())
    }

    /// A lease as one that could be placed anew.
    pub fn mover(&self, lease: &Lease) -> Option<Mover<(String, DomainUuid)>> {
        let plan = lease.plan().filter(|_| lease.moving.is_none())?;
        let id = (lease.name.clone(), lease.uuid);
        Some(Mover { id, request: lease.request.clone()?, cpus: plan.held(&self.topology), live: None })
    }

    /// As [`Situation::moves`], of these leases alone.
    pub fn moves_of<K: Ord + Clone>(
        &self,
        request: &Request,
        movers: &[Mover<K>],
        goal: Option<Extent>,
    ) -> Option<Vec<Move<K>>> {
        // Nobody is told to move to where an autostart domain will be.
        let taken = self.taken.union(&self.reserved());
        repack::moves(&Supply { taken: &taken, ..self.supply() }, request, movers, goal)
    }

    /// The refusal, with the moves that would make room where enough is free, but scattered. As long a search as
    /// [`Situation::moves`].
    pub fn with_moves(&self, refusal: Error, request: &Request, leases: &Leases, domain: Option<DomainUuid>) -> Error {
        let scattered = refusal.code == Code::NeedsRepack;
        match scattered.then(|| self.moves(request, leases, domain, None)).flatten() {
            Some(moves) => refusal.with_moves(moves),
            None => refusal,
        }
    }

    /// The refusal, with what an allowlist that has changed has to do with it, and who else has pinnable CPUs.
    fn seated(&self, refusal: Refusal) -> Error {
        let error = Error::from(refusal);
        let scarce = matches!(error.code, Code::Shortage | Code::NeedsRepack);
        let seat = self.seats.first().filter(|_| scarce).map(|(name, cpus)| {
            let name = printable(name);
            format!(
                "CPUs {cpus} have become pinnable while \"{name}\" has shared threads there: they are free once it has been \
                 started anew"
            )
        });
        let reasons: Vec<String> = self.foreign.iter().map(Foreign::to_string).chain(seat).collect();
        let says_nothing = reasons.is_empty() || !error.code.is_about_placement();
        if says_nothing { error } else { error.because(reasons.join("; ")) }
    }
}

/// A plan on exactly the CPUs that the XML's pins name, in their order, or `None` if the policy has no such plan.
fn exactly(supply: &Supply<'_>, request: &Request, pins: &Pins) -> Option<Plan> {
    let order: Vec<CpuId> = (0..request.vcpus)
        .map(|vcpu| pins.vcpus.get(&vcpu).filter(|cpus| cpus.len() == 1).and_then(CpuSet::first))
        .collect::<Option<_>>()?;
    let named: CpuSet = order.iter().copied().collect();
    let cores = supply.topology.with_siblings(&named.union(&pins.all()));
    // Everything else counts as taken, so that only these CPUs are left.
    let taken = supply.taken.union(&supply.pinnable.difference(&cores));
    let mut plan = alloc::plan(&Supply { taken: &taken, ..*supply }, request).ok()?;
    plan.vcpus = order.into_iter().map(Some).collect();
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
        let own = plan.vcpus.get(usize::from(vcpu)).map(|own| own.map(|cpu| CpuSet::from_iter([cpu])));
        match own {
            Some(Some(own)) if own != *cpus => return stale(format!("vCPU {vcpu}"), cpus, own.to_string()),
            Some(None) if !cpus.is_subset(&plan.shared) => {
                return stale(format!("vCPU {vcpu}"), cpus, plan.shared.to_string());
            }
            _ => {}
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
    let held = leases.iter().filter(|lease| Some(lease.uuid) != except && !lease.cpus().is_empty());
    listed(held.map(|lease| (lease.name.as_str(), lease.cpus())))
}

/// The same error, its sentence about this domain, and for a lack of room the holders as a hint.
pub fn about(error: Error, name: &str, leases: Option<(&Leases, Option<DomainUuid>)>) -> Error {
    // Whoever has to move is a holder that is named.
    let moves = error.room.as_ref().is_some_and(|room| !room.moves.is_empty());
    let holders = leases
        .filter(|_| matches!(error.code, Code::Shortage | Code::NeedsRepack) && !moves)
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

/// The host's names of the caches that the domain allocates.
///
/// # Errors
/// [`Code::DomainInvalid`], [`Code::HostIo`].
pub fn cache_ids(root: &Root, domain: &Domain<'_>) -> Result<CacheIds> {
    cache_id::read(root, &caches::levels(domain)?)
}
