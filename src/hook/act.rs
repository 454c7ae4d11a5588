//! What is done at each event: one match over [`Operation`], one function each.
//!
//! The shape is always the same: read (domain, configuration, machine), lock, load, decide, commit, unlock, report.

use super::call::Operation;
use super::sync;
use crate::alloc::plan::Plan;
use crate::config::settings::Settings;
use crate::cpuset::CpuSet;
use crate::decision::{self, Dedicated, Situation, Wish};
use crate::enforce::{self, Confinement, binding, tree};
use crate::error::{Code, Error, Result};
use crate::host::process::{self, Process};
use crate::host::qemu;
use crate::host::root::Root;
use crate::lock::leases::{Holds, Lease, Leases, State};
use crate::lock::reclaim::{self, reclaim};
use crate::lock::{self, DEADLINE, StateLock};
use crate::log::{Journal, Record};
use crate::uuid::DomainUuid;
use crate::xml::Domain;
use crate::xml::pin::{self, Scope};
use crate::xml::read;

/// One event: whose, and what stdin said.
struct Event<'a> {
    root: &'a Root,
    operation: Operation,
    domain: &'a Domain<'a>,
    uuid: DomainUuid,
    identity: read::Identity,
    journal: Journal,
}

/// Does what the event asks for. Returns the XML for stdout; `None` = the domain's own is unchanged.
///
/// # Errors
/// Any [`Code`]; nothing is left half done.
pub(super) fn act(root: &Root, operation: Operation, text: &str) -> Result<Option<String>> {
    let domain = Domain::parse(text)?;
    let identity = read::identity(&domain)?;
    let uuid = identity.uuid.ok_or_else(|| {
        Error::new(Code::DomainInvalid, "the domain XML on stdin has no <uuid>").in_domain(&identity.name)
    })?;
    let event = Event { root, operation, domain: &domain, uuid, identity, journal: Journal::open(root) };
    let result = match operation {
        Operation::Prepare | Operation::Migrate | Operation::Restore => event.enter(),
        Operation::Started => event.started().map(|()| None),
        Operation::Release => event.release().map(|()| None),
        Operation::Reconnect => event.reconnect().map(|()| None),
        Operation::Start | Operation::Stopped => Ok(None),
    };
    if let Err(error) = &result {
        event.record(Some(error.code), None, &error.message);
    }
    result
}

impl Event<'_> {
    /// Prepare, migrate, restore: the domain wants to come in.
    fn enter(&self) -> Result<Option<String>> {
        let settings = Settings::read(self.root)?;
        let named = |error: Error| decision::about(error, &self.identity.name, None);
        match decision::wish(self.root, self.domain, &self.identity, &settings).map_err(named)? {
            Wish::Dedicated(wish) => self.lease(&settings, &wish).map(Some),
            Wish::Static(cpus) => self.hold_static(cpus).map(|()| None),
            Wish::Shared => self.forget_former_lease().map(|()| None),
        }
    }

    /// Takes or finds the lease of a dedicated domain and confines the domain to it.
    fn lease(&self, settings: &Settings, wish: &Dedicated) -> Result<String> {
        let named = |error: Error| decision::about(error, &self.identity.name, None);
        let preparing = self.operation == Operation::Prepare;
        let partition = read::partition(self.domain);
        let situation = Situation::read(self.root, settings, partition.as_deref())?;
        let mut state = StateLock::acquire(self.root, DEADLINE)?;
        let before = state.load()?;
        let mut leases = before.clone();
        let void = reclaim(self.root, &mut leases)?;
        self.refuse_beside_living(&leases)?;
        let existing = leases.get(self.uuid).cloned();
        let plan = situation
            .plan(wish, existing.as_ref().and_then(Lease::plan), (&leases, Some(self.uuid)), !preparing, &mut |_| {})
            .map_err(|error| decision::about(error, &self.identity.name, Some((&leases, Some(self.uuid)))))?;
        let scope = if preparing { Scope::Everything } else { Scope::PlacementOnly };
        let output = pin::rewrite(self.domain, &plan, scope).map_err(named)?.apply(self.domain.text());

        // Nothing was changed up to here. From here on the lease is written first, then made physical: a crash between
        // leaves a lease without effect, never an effect without a lease.
        let lease = self
            .new_lease(if preparing { State::Reserved } else { State::Provisional }, Holds::Dedicated(plan.clone()));
        let confinement = enforce::confinement(self.root)?;
        let place = match (&confinement, self.identity.id) {
            (Confinement::BeforeExec { mount }, Some(id)) if preparing => {
                let iothreads = read::iothread_ids(self.domain)?;
                Some((mount, id, tree::path(mount, partition.as_deref(), id, &self.identity.name)?, iothreads))
            }
            _ => None,
        };
        let lease = Lease { cgroup: place.as_ref().map(|(_, _, path, _)| path.clone()), ..lease };
        let same = existing.as_ref().is_some_and(|old| Lease { since: lease.since, ..old.clone() } == lease);
        if !same {
            leases.put(lease);
            state.replace(&leases)?;
        }
        self.clean_up(&leases, void);
        if let Some((mount, _, path, iothreads)) = place {
            if let Err(error) = tree::make(self.root, mount, &path, &iothreads, &plan) {
                leases.remove(self.uuid);
                state.replace(&leases)?;
                return Err(named(error));
            }
        }
        drop(state);
        self.record(None, Some(&plan.exclusive()), "lease granted");
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

    fn living_qemu(&self, lease: &Lease) -> Result<Option<u32>> {
        if let Some(qemu) = lease.qemu {
            return Ok(reclaim::is_alive(self.root, qemu)?.then_some(qemu.pid));
        }
        Ok(qemu::living_pid(self.root, &lease.name))
    }

    /// Records the CPUs that a domain without a policy pins itself to, unless they belong to somebody.
    fn hold_static(&self, cpus: CpuSet) -> Result<()> {
        let mut state = StateLock::acquire(self.root, DEADLINE)?;
        let mut leases = state.load()?;
        let void = reclaim(self.root, &mut leases)?;
        self.refuse_beside_living(&leases)?;
        if let Some(owner) = leases.dedicated_owner_of(&cpus, Some(self.uuid)) {
            return Err(decision::static_conflict(&cpus, owner).in_domain(&self.identity.name));
        }
        // A migration or restore only asks; the lease comes with prepare.
        if self.operation == Operation::Prepare {
            leases.put(self.new_lease(State::Reserved, Holds::Static(cpus.clone())));
            state.replace(&leases)?;
            self.clean_up(&leases, void);
            self.record(None, Some(&cpus), "static pins recorded");
        }
        Ok(())
    }

    /// A shared domain holds nothing: a lease from a start that libvirt never reported the end of is void. Without one,
    /// the common case, the lock is not touched.
    fn forget_former_lease(&self) -> Result<()> {
        if !lock::read(self.root).is_ok_and(|leases| leases.get(self.uuid).is_some()) {
            return Ok(());
        }
        let mut state = StateLock::acquire(self.root, DEADLINE)?;
        let mut leases = state.load()?;
        self.refuse_beside_living(&leases)?;
        let former = leases.remove(self.uuid);
        state.replace(&leases)?;
        self.clean_up(&leases, former.map(|lease| (lease, "the domain starts without one")).into_iter().collect());
        Ok(())
    }

    fn new_lease(&self, state: State, holds: Holds) -> Lease {
        Lease {
            uuid: self.uuid,
            name: self.identity.name.clone(),
            state,
            holds,
            domain_id: self.identity.id,
            cgroup: None,
            daemon: daemon(self.root),
            qemu: None,
            since: process::uptime_secs(self.root),
        }
    }

    /// QEMU runs: bind and look, then let libvirt's XML follow.
    fn started(&self) -> Result<()> {
        let named = |error: Error| decision::about(error, &self.identity.name, None);
        let leases = lock::read(self.root)?;
        let Some(lease) = leases.get(self.uuid) else { return self.started_without_lease() };
        let status = self.status().map_err(named)?;
        if let Some(plan) = lease.plan() {
            // It takes a while to be ready, and waits for our end: started now, it costs nobody time.
            self.sync(plan);
            binding::bind(self.root, &status, plan).map_err(named)?;
        }
        self.mark_running(&status)?;
        if let Some(plan) = lease.plan() {
            self.record(None, Some(&plan.exclusive()), "every thread is where the lease says");
        }
        Ok(())
    }

    /// A dedicated domain that has come this far without a lease is not dedicated: say so while it can be stopped.
    fn started_without_lease(&self) -> Result<()> {
        // A configuration that was broken meanwhile is no reason to end a running VM: prepare has judged it.
        let Ok(settings) = Settings::read(self.root) else { return Ok(()) };
        match decision::wish(self.root, self.domain, &self.identity, &settings) {
            Ok(Wish::Dedicated(_)) => Err(Error::new(
                Code::DomainUnknown,
                "has a dedicated policy, but no lease was taken at prepare",
            )
            .with_hint("`virt-pin check` shows whether the hook is installed as it should; then start the domain again")
            .in_domain(&self.identity.name)),
            _ => Ok(()),
        }
    }

    fn status(&self) -> Result<qemu::Status> {
        qemu::status(self.root, &self.identity.name)?.ok_or_else(|| {
            let path = qemu::file_of(qemu::RUN_DIR, &self.identity.name, ".xml").unwrap_or_default();
            Error::new(Code::ThreadMisplaced, format!("its threads cannot be found: libvirt has no {path}"))
        })
    }

    fn mark_running(&self, status: &qemu::Status) -> Result<()> {
        let mut state = StateLock::acquire(self.root, DEADLINE)?;
        let mut leases = state.load()?;
        let Some(lease) = leases.get(self.uuid).cloned() else { return Ok(()) };
        let qemu = process::process(self.root, status.pid)?;
        let domain_id = self.identity.id.or(lease.domain_id);
        let running = Lease { state: State::Running, qemu, domain_id, since: process::uptime_secs(self.root), ..lease };
        leases.put(running);
        state.replace(&leases)
    }

    fn sync(&self, plan: &Plan) {
        let started =
            Settings::read(self.root).map(|settings| (sync::start(self.root, &settings.command, self.uuid), settings));
        if let Ok((Err(error), settings)) = started {
            let message = format!("the live XML will not show the lease: cannot run {}: {error}", settings.command);
            self.record(Some(Code::HostIo), Some(&plan.exclusive()), &message);
        }
    }

    /// The domain has ended: so does its lease, whatever the reason given.
    fn release(&self) -> Result<()> {
        if lock::read(self.root)?.iter().next().is_none() {
            return Ok(());
        }
        let mut state = StateLock::acquire(self.root, DEADLINE)?;
        let mut leases = state.load()?;
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
        self.clean_up(&leases, ended);
        Ok(())
    }

    /// The daemon is back and found the domain running: repair what can be repaired, say what cannot.
    fn reconnect(&self) -> Result<()> {
        let leases = lock::read(self.root)?;
        let Some(lease) = leases.get(self.uuid) else { return self.started_without_lease() };
        let status = self.status()?;
        let bound = lease.plan().map_or(Ok(()), |plan| binding::bind(self.root, &status, plan));
        // It runs, so its lease does, wherever its threads are.
        self.mark_running(&status)?;
        bound.map_err(|error| decision::about(error, &self.identity.name, None))
    }

    /// What ended leases leave behind, once they are off the books.
    fn clean_up(&self, leases: &Leases, ended: Vec<(Lease, &'static str)>) {
        for (lease, reason) in ended {
            // libvirt uses ids again: the directory may belong to a lease that lives.
            let path =
                lease.cgroup.as_ref().filter(|path| !leases.iter().any(|other| other.cgroup.as_ref() == Some(*path)));
            if let Some(path) = path {
                tree::remove(self.root, path);
            }
            self.journal.record(&Record {
                domain: &lease.name,
                uuid: lease.uuid,
                code: None,
                cpus: Some(&lease.cpus()),
                message: &format!("lease ended: {reason}"),
            });
        }
    }

    fn record(&self, code: Option<Code>, cpus: Option<&CpuSet>, message: &str) {
        let domain = &self.identity.name;
        self.journal.record(&Record { domain, uuid: self.uuid, code, cpus, message });
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
