//! Leases of VMs that have ended without a word: ended, with what they leave behind.

use super::voice::Voice;
use crate::config::settings::Settings;
use crate::decision::Situation;
use crate::enforce::{self, isolation, pool};
use crate::error::Result;
use crate::host::root::Root;
use crate::lock::leases::Leases;
use crate::lock::reclaim::reclaim;
use crate::lock::{self, DEADLINE, StateLock};

/// Ends the leases that are void; how many. The lock is only taken where there are any.
///
/// # Errors
/// As [`StateLock::acquire`] and [`reclaim`].
pub(super) fn end(root: &Root, voice: &Voice) -> Result<usize> {
    let mut seen = lock::read(root)?;
    if seen.iter().next().is_none() || reclaim(root, &mut seen)?.is_empty() {
        return Ok(0);
    }
    let mut state = StateLock::acquire(root, DEADLINE)?;
    let mut leases = state.load()?;
    let void = reclaim(root, &mut leases)?;
    if void.is_empty() {
        return Ok(0);
    }
    state.replace(&leases)?;
    for (lease, _) in &void {
        if let Some(place) = &lease.cgroup {
            enforce::remove_unless_held(root, &leases, place);
        }
    }
    if void.iter().any(|(lease, _)| lease.plan().is_some()) {
        for given_back in [widen(root, &leases), isolation::settle(root, &mut state, &leases)] {
            if let Err(error) = given_back {
                voice.fail(&error);
            }
        }
    }
    drop(state);
    for (lease, reason) in &void {
        voice.did((&lease.name, lease.uuid), &format!("lease on CPUs {} ended: {reason}", lease.cpus()));
    }
    Ok(void.len())
}

/// VMs without a lease may run where nobody else does now.
fn widen(root: &Root, leases: &Leases) -> Result<()> {
    let situation = Situation::read(root, &Settings::read(root)?, None)?;
    pool::hold(root, leases, &situation.shared_pool(leases))
}
