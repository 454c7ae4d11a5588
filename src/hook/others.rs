//! VMs without CPUs of their own: confined to the shared pool at their start, and held to it whenever a lease comes or goes.
//!
//! The pool is what the leases leave. Who runs there is never recorded: it is found anew each time.

use super::act::Event;
use crate::alloc::plan::Plan;
use crate::config::settings::Settings;
use crate::decision::Situation;
use crate::enforce::{self, Confinement, pool};
use crate::error::{Code, Error, Result};
use crate::lock::leases::{Lease, Leases};
use crate::xml::read;

impl Event<'_> {
    /// Holds the others to what these leases leave them. To be called with the lock held.
    ///
    /// # Errors
    /// As [`pool::hold`].
    pub(super) fn hold_others(&self, situation: &Situation, leases: &Leases) -> Result<()> {
        pool::hold(self.root, leases, &situation.shared_pool(leases))
    }

    /// The same where it is no reason to fail: it is recorded, and tried again at the next event.
    pub(super) fn settle_others(&self, leases: &Leases) {
        let situation = Settings::read(self.root).and_then(|settings| Situation::read(self.root, &settings, None));
        if let Err(error) = situation.and_then(|situation| self.hold_others(&situation, leases)) {
            self.record(Some(error.code), None, &error.message);
        }
    }

    /// Whether a VM without a policy is to be confined before it runs: where that can be done, and CPUs may be handed out
    /// or are.
    pub(super) fn has_pool(&self, leases: &Leases) -> bool {
        enforce::confinement(self.root).is_ok_and(|how| how != Confinement::AtStarted)
            && (freed(leases.iter()) || Settings::read(self.root).is_ok_and(|settings| !settings.pinnable.is_empty()))
    }

    /// Confines this domain, which starts without CPUs of its own, to the shared pool before it runs. To be called with the
    /// lock held, so that no lease is granted meanwhile. Where that cannot be done it starts all the same, and is held to
    /// the pool once it runs.
    ///
    /// # Errors
    /// [`Code::SharedPoolEmpty`].
    pub(super) fn confine_to_pool(&self, leases: &Leases) -> Result<()> {
        match self.make_place_in_pool(leases) {
            Err(error) if error.code != Code::SharedPoolEmpty => {
                self.record(Some(error.code), None, &error.message);
                Ok(())
            }
            made => made,
        }
    }

    fn make_place_in_pool(&self, leases: &Leases) -> Result<()> {
        let partition = read::partition(self.domain);
        let situation = Situation::read(self.root, &Settings::read(self.root)?, partition.as_deref())?;
        let pool = situation.shared_pool(leases);
        if pool.is_empty() {
            let message = "starts without CPUs of its own, and every CPU is leased to other VMs";
            return Err(Error::new(Code::SharedPoolEmpty, message));
        }
        // What libvirt is told to put threads on has to be there when it does; such a domain is narrowed once it runs.
        let default = read::default_cpuset(self.domain)?;
        if read::placement_is_auto(self.domain) || default.is_some_and(|cpus| !cpus.is_subset(&pool)) {
            return Ok(());
        }
        let confinement = enforce::confinement(self.root)?;
        let Some(id) = self.identity.id else { return Ok(()) };
        let Some(place) = confinement.place(partition.as_deref(), id, &self.identity.name)? else { return Ok(()) };
        let vcpus = usize::from(read::vcpu_count(self.domain)?);
        let plan = Plan { vcpus: vec![None; vcpus], shared: pool.clone(), ..Plan::new([], pool) };
        confinement.make(self.root, &place, &read::iothread_ids(self.domain)?, &plan)
    }

    /// Removes what was made for a start of this domain and is nobody's now.
    pub(super) fn remove_places(&self, leases: &Leases) {
        let Ok(confinement) = enforce::confinement(self.root) else { return };
        let partition = read::partition(self.domain);
        for place in enforce::places_of(self.root, &confinement, partition.as_deref(), &self.identity.name) {
            self.remove_cgroup(leases, Some(place));
        }
    }
}

/// Whether any of these held CPUs that nobody else might run on.
pub(super) fn freed<'l>(mut ended: impl Iterator<Item = &'l Lease>) -> bool {
    ended.any(|lease| lease.plan().is_some())
}
