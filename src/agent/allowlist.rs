//! Running VMs that hold CPUs which are not pinnable any more: said once. They keep them; nobody is moved for that unasked.

use std::collections::BTreeMap;

use super::voice::Voice;
use crate::config::settings::Settings;
use crate::cpuset::CpuSet;
use crate::host::root::Root;
use crate::lock::leases::{Leases, State};
use crate::uuid::DomainUuid;

/// What has been said, of whom.
#[derive(Debug, Default)]
pub(super) struct Withdrawn(BTreeMap<DomainUuid, CpuSet>);

impl Withdrawn {
    /// Compares the leases with the allowlist as they are now. A configuration that cannot be read withdraws nothing.
    pub(super) fn look(&mut self, root: &Root, leases: &Leases, voice: &Voice) {
        let Ok(Settings { pinnable, .. }) = Settings::read(root) else { return };
        self.0.retain(|uuid, _| leases.get(*uuid).is_some());
        for lease in leases.iter().filter(|lease| lease.state == State::Running) {
            let Some(plan) = lease.plan() else { continue };
            let cpus = plan.exclusive().difference(&pinnable);
            let said = self.0.get(&lease.uuid);
            if cpus.is_empty() && said.is_some() {
                voice.did((&lease.name, lease.uuid), "every CPU of its lease is pinnable again");
                self.0.remove(&lease.uuid);
            } else if !cpus.is_empty() && said != Some(&cpus) {
                let message = format!(
                    "its lease has CPUs {cpus}, which are not pinnable any more: it keeps them until it ends, or until \
                     `virt-pin repack` finds it others"
                );
                voice.did((&lease.name, lease.uuid), &message);
                self.0.insert(lease.uuid, cpus);
            }
        }
    }
}
