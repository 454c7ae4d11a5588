//! Leases that are not where they should be, seen at an event: CPUs that went offline while the daemon was away, and moves whose
//! mover has died. Only what takes no time is done here: memory stays on its nodes, the rest is `virt-pin reconcile`'s.

use super::act::Event;
use super::sync;
use crate::alloc::relocation::MemoryOfMoved;
use crate::config::settings::Settings;
use crate::decision;
use crate::error::{Error, Result};
use crate::lock::leases::Leases;
use crate::relocate::{self, Done};

impl Event<'_> {
    /// Remembers whether any of these is on its way to other CPUs.
    pub(super) fn see_moves(&self, leases: &Leases) {
        self.moves.set(leases.iter().any(|lease| lease.moving.is_some()));
    }

    /// Brings moves whose mover has died to an end. To be called with no lock held.
    pub(super) fn recover(&self) {
        let Ok(settings) = Settings::read(self.root) else { return };
        let recovered = relocate::recover(self.root, &settings, MemoryOfMoved::Stays);
        for (lease, outcome) in recovered.unwrap_or_default() {
            let (code, message) = match outcome {
                Ok(plan) => {
                    // The live XML may say either.
                    let _ = sync::start(self.root, &settings.command, lease.uuid);
                    (None, format!("its move that nobody ended has ended on CPUs {}", plan.exclusive()))
                }
                Err(error) => (Some(error.code), error.message),
            };
            self.journal.record((&lease.name, lease.uuid), code, Some(&lease.cpus()), &message);
        }
    }

    /// Its threads could not be bound: a CPU of its own may have gone offline, or its cgroup have lost one. Or they are no longer
    /// alone there.
    ///
    /// # Errors
    /// That error, or what else could not be done.
    pub(super) fn put_right(&self, error: Error) -> Result<()> {
        let about = |error: Error| decision::about(error, &self.identity.name, None);
        let settings = Settings::read(self.root).map_err(about)?;
        let repaired = relocate::repair_one(self.root, &settings, self.uuid, MemoryOfMoved::Stays).map_err(about)?;
        match repaired.map(|repair| repair.done) {
            None => Err(about(error)),
            Some(Done::Failed(error)) => Err(error),
            Some(Done::Moved { .. }) => {
                // Waits for our end, as libvirt has the VM until then.
                let _ = sync::start(self.root, &settings.command, self.uuid);
                Ok(())
            }
            Some(Done::Back(_) | Done::Isolated(_) | Done::Degraded { .. }) => Ok(()),
        }
    }
}
