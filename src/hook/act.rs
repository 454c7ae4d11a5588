//! What is done at each event: one match over [`Operation`], one function each.
//!
//! The shape is always the same: read (domain, configuration, machine), lock, load, decide, commit, unlock, report.

use std::cell::Cell;

use super::call::Operation;
use super::others;
use crate::alloc::quality;
use crate::conditions::{self, Arrival};
use crate::config::settings::Settings;
use crate::cpuset::CpuSet;
use crate::decision::{self, Dedicated, Situation, Wish};
use crate::definitions;
use crate::enforce::{self, isolation};
use crate::error::{Code, Error, Result};
use crate::host::process::{self, Process};
use crate::host::qemu;
use crate::host::root::Root;
use crate::lock::leases::{Holds, Lease, Leases, State};
use crate::lock::reclaim::{self, reclaim};
use crate::lock::{self, DEADLINE, StateLock};
use crate::log::Journal;
use crate::uuid::DomainUuid;
use crate::xml::Domain;
use crate::xml::pin::{self, Scope};
use crate::xml::{caches, read};

/// A lease that is no more, and why.
type Void = (Lease, &'static str);

/// One event: whose, and what stdin said.
pub(super) struct Event<'a> {
    pub(super) root: &'a Root,
    operation: Operation,
    pub(super) domain: &'a Domain<'a>,
    pub(super) uuid: DomainUuid,
    pub(super) identity: read::Identity,
    pub(super) journal: Journal,
    /// Whether a lease was seen on its way to other CPUs.
    pub(super) moves: Cell<bool>,
}

/// Does what the event asks for. Returns the XML for stdout; `None` = the domain's own is unchanged.
///
/// # Errors
/// Any [`Code`]; nothing is left half done.
pub(super) fn act(root: &Root, operation: Operation, text: &str) -> Result<Option<String>> {
    let domain = Domain::parse(text)?;
    let identity = read::identity(&domain)?;
    let uuid = identity.uuid.ok_or_else(|| {
        Error::new(Code::DomainInvalid, "the domain XML on stdin has no <uuid>")
            .with_hint("hand on what libvirt wrote, or `virsh dumpxml DOMAIN`: leases belong to UUIDs")
            .in_domain(&identity.name)
    })?;
    let event = Event {
        root,
        operation,
        domain: &domain,
        uuid,
        identity,
        journal: Journal::open(root),
        moves: Cell::new(false),
    };
    let result = match operation {
        Operation::Prepare | Operation::Migrate | Operation::Restore => event.enter(),
        Operation::Started => event.started().map(|()| None),
        Operation::Release => event.release().map(|()| None),
        Operation::Reconnect => event.reconnect().map(|()| None),
        Operation::Start | Operation::Stopped => Ok(None),
    };
    if event.moves.get() {
        event.recover();
    }
    if let Err(error) = &result {
        event.record(Some(error.code), None, &error.message);
    }
    event.journal.flush();
    result
}

impl Event<'_> {
    /// What the domain wants.
    pub(super) fn wish(&self) -> Result<Wish> {
        let wish = decision::wish(self.root, self.domain, &self.identity, &|| Settings::read(self.root));
        wish.map_err(|error| if error.code == Code::ConfigInvalid { error } else { self.named(error) })
    }

    /// The error, its sentence about this domain.
    pub(super) fn named(&self, error: Error) -> Error {
        error.in_domain(&self.identity.name)
    }

    /// Prepare, migrate, restore: the domain wants to come in.
    fn enter(&self) -> Result<Option<String>> {
        let wish = self.wish()?;
        if let (Some(said), Operation::Prepare) = (decision::in_vain(self.domain), self.operation) {
            self.record(None, None, &said);
        }
        match wish {
            Wish::Dedicated(wish) => self.lease(&wish).map(Some),
            Wish::Static(cpus) => self.hold_static(cpus).map(|()| None),
            Wish::Shared if self.operation == Operation::Prepare => self.hold_nothing().map(|()| None),
            Wish::Shared => Ok(None),
        }
    }

    /// Takes or finds the lease of a dedicated domain and confines the domain to it; or records that it starts without.
    fn lease(&self, wish: &Dedicated) -> Result<String> {
        conditions::before_plan(self.root, self.domain, &wish.request).map_err(|error| self.named(error))?;
        let preparing = self.operation == Operation::Prepare;
        let partition = read::partition(self.domain);
        let definitions = definitions::read(self.root, &wish.settings).dedicated;
        let mut situation = Situation::read(self.root, &wish.settings, partition.as_deref())?;
        let survey = situation.survey.take();
        let situation = situation.among(definitions, Some(self.uuid));
        let mut state = StateLock::acquire(self.root, DEADLINE)?;
        let mut leases = state.load()?;
        self.see_moves(&leases);
        let void = reclaim(self.root, &mut leases)?;
        self.refuse_beside_living(&leases)?;
        let existing = leases.get(self.uuid).cloned();
        let situation = situation.beside(&leases, Some(self.uuid));
        let held = existing.as_ref().and_then(Lease::plan);
        let plan = match situation.plan(wish, held, !preparing, &mut |_| {}) {
            Ok(plan) => plan,
            Err(refusal) => match wish.fall_back(refusal, &leases, Some(self.uuid)) {
                Ok(holds) => {
                    self.hold(state, leases, void, holds)?;
                    // Nothing of ours is in the XML, and nothing in it is taken away.
                    return Ok(self.domain.text().to_owned());
                }
                Err(refusal) => {
                    // A refusal changes nothing, and nobody waits for it to be explained.
                    drop(state);
                    let refusal = situation.with_moves(refusal, &wish.asked(!preparing), &leases, Some(self.uuid));
                    return Err(decision::about(refusal, &self.identity.name, Some((&leases, Some(self.uuid)))));
                }
            },
        };
        let arrival = if preparing { Arrival::Start } else { Arrival::Entry };
        let domain = (self.domain, Some(self.uuid));
        let told = conditions::of_plan(self.root, domain, &wish.request, &plan, arrival, &leases)
            .map_err(|error| self.named(error))?;
        let scope = if preparing { Scope::Everything } else { Scope::PlacementOnly };
        let edits = pin::rewrite(self.domain, &plan, scope).map_err(|error| self.named(error))?;
        let mut output = edits.apply(self.domain.text());
        if !preparing {
            let ids = decision::cache_ids(self.root, self.domain).map_err(|error| self.named(error))?;
            let edits = Domain::parse(&output).and_then(|domain| caches::rewrite(&domain, &plan, &ids));
            output = edits.map_err(|error| self.named(error))?.apply(&output);
        }
        if !preparing && existing.as_ref().is_some_and(|lease| lease.state != State::Provisional) {
            // The domain is being started, or runs: this event may belong to another attempt, and takes nothing away.
            return Ok(output);
        }

        // Nothing was changed up to here. From here on the lease is written first, then made physical: a crash between
        // leaves a lease without effect, never an effect without a lease.
        let confinement = enforce::confinement(self.root)?;
        let place = match self.identity.id {
            Some(id) if preparing => confinement.place(partition.as_deref(), id, &self.identity.name)?,
            _ => None,
        };
        let state_now = if preparing { State::Reserved } else { State::Provisional };
        let lease = Lease {
            cgroup: place.clone(),
            request: Some(wish.request.clone()),
            ..self.new_lease(state_now, Holds::Dedicated(plan.clone()))
        };
        let same = existing.as_ref().is_some_and(|old| Lease { since: lease.since, ..old.clone() } == lease);
        if !same {
            leases.put(lease);
            state.replace(&leases)?;
        }
        if let Some(survey) = survey {
            state.keep(&survey);
        }
        self.clean_up(&leases, void);
        // A former attempt had another id of libvirt's, and so another cgroup.
        self.remove_cgroup(&leases, existing.and_then(|former| former.cgroup));
        if preparing {
            let held = self.hold_others(&situation, &leases);
            let held = held.and_then(|()| isolation::settle(self.root, &mut state, &leases));
            let made = held.and_then(|()| match &place {
                Some(place) => {
                    read::iothread_ids(self.domain).and_then(|ids| confinement.make(self.root, place, &ids, &plan))
                }
                None => Ok(()),
            });
            if let Err(error) = made {
                leases.remove(self.uuid);
                let error = match state.replace(&leases) {
                    Ok(()) => error,
                    Err(also) => error.because(also),
                };
                self.settle_others(&leases);
                self.settle_host(&mut state, &leases);
                return Err(self.named(error));
            }
        }
        drop(state);
        let advice = quality::advise(&situation.supply(), &wish.request, &plan);
        let advice = advice.map(|advice| format!("; it {}", advice.sentence())).unwrap_or_default();
        let told =
            told.map(|told| format!("; {told} (`virt-pin define` or the agent corrects it)")).unwrap_or_default();
        self.record(None, Some(&plan.exclusive()), &format!("lease granted{advice}{told}"));
        Ok(output)
    }

    /// A running domain's lease is never overwritten: libvirt would not start a UUID that runs.
    fn refuse_beside_living(&self, leases: &Leases) -> Result<()> {
        let Some(lease) = leases.get(self.uuid) else { return Ok(()) };
        let Some(pid) = self.living_qemu(lease)? else { return Ok(()) };
        Err(Error::new(
            Code::StateConflict,
            format!("its former QEMU (pid {pid}) is still alive and holds CPUs {}", lease.cpus()),
        )
        .in_domain(&self.identity.name))
    }

    fn living_qemu(&self, lease: &Lease) -> Result<Option<i32>> {
        if let Some(qemu) = lease.qemu {
            let pid = i32::try_from(qemu.pid).unwrap_or_default();
            return Ok(reclaim::is_alive(self.root, qemu)?.then_some(pid));
        }
        qemu::living_pid(self.root, &lease.name)
    }

    /// Records the CPUs that a domain without a policy pins itself to, unless they belong to somebody.
    fn hold_static(&self, cpus: CpuSet) -> Result<()> {
        let state = StateLock::acquire(self.root, DEADLINE)?;
        let mut leases = state.load()?;
        let void = reclaim(self.root, &mut leases)?;
        if let Some(owner) = leases.dedicated_owner_of(&cpus, Some(self.uuid)) {
            return Err(self.named(decision::static_conflict(&cpus, owner)));
        }
        self.hold(state, leases, void, Holds::Static(cpus))
    }

    /// Records a domain that comes in without a plan.
    fn hold(&self, mut state: StateLock, mut leases: Leases, void: Vec<Void>, holds: Holds) -> Result<()> {
        // A migration or restore only asks; the lease comes with prepare.
        if self.operation != Operation::Prepare {
            return Ok(());
        }
        self.refuse_beside_living(&leases)?;
        let former = leases.get(self.uuid).and_then(|former| former.cgroup.clone());
        if matches!(&holds, Holds::Degraded { pins, .. } if pins.is_empty()) {
            self.confine_to_pool(&leases).map_err(|error| self.named(error))?;
        } else {
            self.remove_cgroup_in_its_place(&leases);
        }
        let lease = self.new_lease(State::Reserved, holds);
        leases.put(lease.clone());
        state.replace(&leases)?;
        self.clean_up(&leases, void);
        self.remove_cgroup(&leases, former);
        self.settle_host(&mut state, &leases);
        drop(state);
        match &lease.holds {
            Holds::Degraded { code, reason, .. } => {
                let message = format!("starts without CPUs of its own, as its policy allows: {reason}");
                self.journal.warn((&self.identity.name, self.uuid), *code, &message);
            }
            _ => self.record(None, Some(&lease.cpus()), "static pins recorded"),
        }
        Ok(())
    }

    /// A shared domain holds nothing, and runs in the shared pool: a lease from a start that libvirt never reported the end
    /// of is void, and so is a cgroup that waits under its name with somebody else's CPUs. On a host where nothing is handed
    /// out the lock is not touched, and damaged state refuses no such start.
    fn hold_nothing(&self) -> Result<()> {
        let Ok(leases) = lock::read(self.root) else { return Ok(()) };
        self.remove_cgroup_in_its_place(&leases);
        let holds = leases.get(self.uuid).is_some();
        if !holds && !self.has_pool(&leases) && !self.host_is_changed() {
            return Ok(());
        }
        let locked = StateLock::acquire(self.root, DEADLINE).and_then(|state| Ok((state.load()?, state)));
        let (mut leases, mut state) = match locked {
            Ok(locked) => locked,
            // It is held to the pool when it is reported started.
            Err(error) if !holds => return self.only_record(&error),
            Err(error) => return Err(error),
        };
        self.refuse_beside_living(&leases)?;
        if let Some(former) = leases.remove(self.uuid) {
            state.replace(&leases)?;
            let freed = others::freed([&former].into_iter());
            self.clean_up(&leases, vec![(former, "the domain starts without one")]);
            if freed {
                self.settle_others(&leases);
            }
        }
        self.settle_host(&mut state, &leases);
        self.confine_to_pool(&leases).map_err(|error| self.named(error))
    }

    fn new_lease(&self, state: State, holds: Holds) -> Lease {
        Lease {
            uuid: self.uuid,
            name: self.identity.name.clone(),
            state,
            holds,
            request: None,
            domain_id: self.identity.id,
            cgroup: None,
            daemon: daemon(self.root),
            qemu: None,
            moving: None,
            since: process::uptime_secs(self.root),
        }
    }

    /// The domain has ended: so does its lease, whatever the reason given.
    fn release(&self) -> Result<()> {
        let leases = lock::read(self.root)?;
        if leases.get(self.uuid).is_none() {
            self.remove_places(&leases);
        }
        if leases.iter().next().is_none() && !self.host_is_changed() {
            return Ok(());
        }
        let mut state = StateLock::acquire(self.root, DEADLINE)?;
        let mut leases = state.load()?;
        self.see_moves(&leases);
        let mut ended = Vec::new();
        if let Some(lease) = leases.get(self.uuid) {
            if let Some(pid) = self.living_qemu(lease)? {
                // libvirt gave up on a QEMU that would not die (a start refused beside it ends here, too).
                let message = format!("keeps its lease: its QEMU (pid {pid}) is still alive");
                self.record(Some(Code::StateConflict), Some(&lease.cpus()), &message);
            } else {
                ended.extend(leases.remove(self.uuid).map(|lease| (lease, "the domain has ended")));
            }
        }
        // Others that are void go with it; that they cannot be told is no reason to keep this one.
        ended.extend(reclaim(self.root, &mut leases).unwrap_or_default());
        if !ended.is_empty() {
            state.replace(&leases)?;
        }
        let freed = others::freed(ended.iter().map(|(lease, _)| lease));
        self.clean_up(&leases, ended);
        if freed {
            self.settle_others(&leases);
        }
        self.settle_host(&mut state, &leases);
        Ok(())
    }

    /// What ended leases leave behind, once they are off the books.
    fn clean_up(&self, leases: &Leases, ended: Vec<Void>) {
        for (lease, reason) in ended {
            self.remove_cgroup(leases, lease.cgroup.clone());
            let message = format!("lease ended: {reason}");
            self.journal.record((&lease.name, lease.uuid), None, Some(&lease.cpus()), &message);
        }
    }

    /// Removes what was made for a start, unless a lease has it.
    pub(super) fn remove_cgroup(&self, leases: &Leases, place: Option<String>) {
        if let Some(place) = place {
            enforce::remove_unless_held(self.root, leases, &place);
        }
    }

    /// Removes the cgroup that libvirt would take for this domain's, with a stranger's CPUs.
    fn remove_cgroup_in_its_place(&self, leases: &Leases) {
        if let (Ok(confinement), Some(id)) = (enforce::confinement(self.root), self.identity.id) {
            // A partition that makes no path is libvirt's to refuse.
            let place = confinement.place(read::partition(self.domain).as_deref(), id, &self.identity.name);
            self.remove_cgroup(leases, place.ok().flatten());
        }
    }

    pub(super) fn record(&self, code: Option<Code>, cpus: Option<&CpuSet>, message: &str) {
        self.journal.record((&self.identity.name, self.uuid), code, cpus, message);
    }
}

/// The libvirt daemon above us, however many dispatcher scripts lie between.
fn daemon(root: &Root) -> Option<Process> {
    /// A chain of scripts is never this long.
    const MAX_ANCESTORS: usize = 16;
    let mut pid = u32::try_from(nix::unistd::getppid().as_raw()).ok()?;
    for _ in 0..MAX_ANCESTORS {
        let (name, parent) = process::name_and_parent(root, pid)?;
        if matches!(name.as_str(), "libvirtd" | "virtqemud") {
            return process::process(root, pid).ok()?;
        }
        pid = parent;
    }
    None
}
