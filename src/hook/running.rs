//! A domain whose QEMU runs: its threads are bound and looked at when it is started, and again when the daemon has come back.
//!
//! A start may be refused here for what is wrong with its threads; a running domain never ends because of us.

use super::act::Event;
use super::{others, sync};
use crate::alloc::plan::Plan;
use crate::config::settings::Settings;
use crate::decision::Wish;
use crate::enforce::{binding, cookie};
use crate::error::{Code, Error, Result};
use crate::host::{process, qemu};
use crate::lock::leases::{Lease, Leases, State};
use crate::lock::reclaim;
use crate::lock::{self, DEADLINE, StateLock};
use crate::xml::pin;

impl Event<'_> {
    /// QEMU runs: bind and look, then let libvirt's XML follow.
    pub(super) fn started(&self) -> Result<()> {
        let leases = match lock::read(self.root) {
            Ok(leases) => leases,
            // Damaged state refuses new leases; it ends nobody's start who has none.
            Err(error) => return self.refuse_if_dedicated(error),
        };
        let Some(lease) = leases.get(self.uuid) else { return self.started_without_lease(&leases) };
        let Some(plan) = lease.plan() else {
            // Pins by hand are libvirt's to carry out, and who is degraded has none. Without the pid the lease is only
            // harder to end.
            let marked = self.status().and_then(|status| self.mark_running(&status));
            self.stay_in_pool(&leases);
            return marked.or_else(|error| self.only_record(&error));
        };
        let status = self.status().map_err(|error| self.named(error))?;
        // It takes a while to be ready, and waits for our end: started now, it costs nobody time.
        self.sync(plan);
        binding::bind(self.root, &status, plan).map_err(|error| self.named(error))?;
        self.isolate(lease, &status, plan).map_err(|error| self.named(error))?;
        match self.mark_running(&status) {
            Err(error) if matches!(error.code, Code::DomainUnknown | Code::CoreSched) => return Err(error),
            // Every thread is right and the lease stands, if with less than could be known of its domain.
            Err(error) => self.only_record(&error)?,
            Ok(()) => {}
        }
        self.record(None, Some(&plan.exclusive()), "every thread is where the lease says");
        Ok(())
    }

    /// Passes the error on if this domain wants CPUs of its own; else it is only recorded.
    fn refuse_if_dedicated(&self, error: Error) -> Result<()> {
        match self.wish() {
            Ok(Wish::Dedicated(_)) => Err(self.named(error)),
            _ => self.only_record(&error),
        }
    }

    pub(super) fn only_record(&self, error: &Error) -> Result<()> {
        self.record(Some(error.code), None, &error.message);
        Ok(())
    }

    /// A dedicated domain that has come this far without a lease is not dedicated: say so while it can be stopped. (A
    /// configuration that was broken meanwhile is no reason to end it: prepare has judged it.)
    fn started_without_lease(&self, leases: &Leases) -> Result<()> {
        self.stay_in_pool(leases);
        self.refuse_if_dedicated(Error::new(Code::DomainUnknown, "has a dedicated policy, but no lease").with_hint(
            "`virt-pin check` shows whether the hook is installed as it should; then start the domain again, or give a \
                 running one its lease with `virt-pin reconcile`",
        ))
    }

    /// A lease may have been granted since this domain was confined, or it could not be.
    fn stay_in_pool(&self, leases: &Leases) {
        if others::freed(leases.iter()) {
            match StateLock::acquire(self.root, DEADLINE).and_then(|state| Ok((state.load()?, state))) {
                Ok((leases, _state)) => self.settle_others(&leases),
                Err(error) => self.record(Some(error.code), None, &error.message),
            }
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
        let Some(lease) = leases.get(self.uuid).cloned() else {
            return Err(
                self.named(Error::new(Code::DomainUnknown, "its lease has been taken away while it was started"))
            );
        };
        let qemu = process::process(self.root, status.pid)?;
        if lease.state == State::Running && lease.qemu == qemu {
            return Ok(());
        }
        let tenant_of = |lease: &Lease| lease.request.as_ref()?.policy.cookie_of().map(str::to_owned);
        if let Some(tenant) = tenant_of(&lease) {
            let others =
                leases.iter().filter(|other| other.uuid != self.uuid && tenant_of(other).as_ref() == Some(&tenant));
            let others = others.filter_map(|other| other.qemu);
            let others = others.filter(|qemu| reclaim::is_alive(self.root, *qemu).unwrap_or(false));
            let others: Vec<u32> = others.map(|qemu| qemu.pid).collect();
            cookie::share(self.root, status.pid, &others).map_err(|error| self.named(error))?;
        }
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

    /// The daemon is back and found the domain running: repair what can be repaired, say what cannot.
    pub(super) fn reconnect(&self) -> Result<()> {
        let leases = lock::read(self.root)?;
        let Some(lease) = leases.get(self.uuid) else { return self.started_without_lease(&leases) };
        let status = self.status()?;
        let bound = match &lease.moving {
            None => lease
                .plan()
                .map_or(Ok(()), |plan| binding::bind(self.root, &status, plan))
                .and_then(|()| self.is_isolated(lease, &status)),
            Some(_) => {
                self.moves.set(true);
                Ok(())
            }
        };
        // It runs, so its lease does, wherever its threads are.
        self.mark_running(&status)?;
        if let Some(plan) = lease.plan().filter(|_| lease.moving.is_none()) {
            // Whoever was to tell libvirt may have ended with the daemon.
            if pin::unsaid(self.domain, plan).is_ok_and(|pins| !pins.is_empty()) {
                self.sync(plan);
            }
        }
        bound.or_else(|error| self.put_right(error))
    }
}
