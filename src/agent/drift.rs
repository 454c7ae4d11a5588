//! Threads of dedicated VMs that are not where their leases say: said, and moved back where that is wanted.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::voice::Voice;
use crate::enforce::binding;
use crate::error::{Code, printable};
use crate::host::qemu;
use crate::host::root::Root;
use crate::lock::leases::{Lease, Leases, State};
use crate::lock::survey;
use crate::uuid::DomainUuid;

/// Whoever moves a VM writes its lease first and then moves its threads: what is found astray is looked at again after this
/// long before it counts.
const SETTLES: Duration = Duration::from_millis(250);

/// Who is astray.
#[derive(Debug, Default)]
pub(super) struct Drift {
    /// Found once, to be looked at again.
    suspects: BTreeMap<DomainUuid, Instant>,
    /// What has been said.
    known: BTreeMap<DomainUuid, String>,
    /// How often threads were found astray, and moved back.
    pub(super) found: u64,
    pub(super) repaired: u64,
}

impl Drift {
    /// How many VMs are astray.
    pub(super) fn astray(&self) -> usize {
        self.known.len()
    }

    /// When to look again; `None` if nobody is suspected.
    pub(super) fn patience(&self) -> Option<Duration> {
        let first = self.suspects.values().min()?;
        Some(first.saturating_duration_since(Instant::now()))
    }

    /// Nobody is suspected any more: without leases nobody can be cleared.
    pub(super) fn forget(&mut self) {
        self.suspects.clear();
    }

    /// Looks at those of the VMs that run, and at suspects; the second look decides. Returns whose threads were moved back.
    pub(super) fn look(
        &mut self,
        root: &Root,
        leases: &Leases,
        which: &dyn Fn(&Lease) -> bool,
        repair: &dyn Fn() -> bool,
        voice: &Voice,
    ) -> Vec<DomainUuid> {
        let mut repaired = Vec::new();
        let runs = |uuid: &DomainUuid| leases.get(*uuid).is_some_and(|lease| lease.state == State::Running);
        self.known.retain(|uuid, _| runs(uuid));
        self.suspects.retain(|uuid, _| runs(uuid));
        // Whose CPUs are offline is held elsewhere, and one that moves is nowhere for long.
        let online = survey::topology(root).map(|(topology, _)| topology.online().clone());
        let whole = |lease: &Lease| {
            lease.moving.is_none()
                && lease.plan().is_none_or(|plan| online.as_ref().is_ok_and(|online| plan.missing(online).is_empty()))
        };
        let running = leases.iter().filter(|lease| lease.state == State::Running && whole(lease));
        let now = Instant::now();
        let due = |suspects: &BTreeMap<DomainUuid, Instant>, uuid| suspects.get(uuid).is_some_and(|due| *due <= now);
        let chosen: Vec<&Lease> = running.filter(|lease| which(lease) || due(&self.suspects, &lease.uuid)).collect();
        for lease in chosen {
            let Some(what) = astray(root, lease) else {
                self.suspects.remove(&lease.uuid);
                if self.known.remove(&lease.uuid).is_some() {
                    voice.did((&lease.name, lease.uuid), "every thread is where its lease says again");
                }
                continue;
            };
            if self.known.get(&lease.uuid) == Some(&what) && !repair() {
                continue;
            }
            let due = *self.suspects.entry(lease.uuid).or_insert_with(|| Instant::now() + SETTLES);
            if Instant::now() < due {
                continue;
            }
            self.suspects.remove(&lease.uuid);
            self.found += 1;
            if repair() && super::move_back(root, lease, voice) {
                self.repaired += 1;
                self.known.remove(&lease.uuid);
                let message = format!("{what}: moved back (repair_drift = true)");
                voice.warn((&lease.name, lease.uuid), Code::ThreadMisplaced, &message);
                repaired.push(lease.uuid);
                continue;
            }
            if self.known.get(&lease.uuid) != Some(&what) {
                voice.warn((&lease.name, lease.uuid), Code::ThreadMisplaced, &what);
            }
            self.known.insert(lease.uuid, what);
        }
        repaired
    }
}

/// How a VM's threads differ from its lease, in words; `None` if they do not, or nothing can be said.
fn astray(root: &Root, lease: &Lease) -> Option<String> {
    let plan = lease.plan()?;
    let status = qemu::status(root, &lease.name).ok()??;
    let misplaced = binding::misplaced(root, &status, plan).ok()?;
    let first = misplaced.first()?;
    let (name, tid) = (printable(&first.thread.name), first.thread.tid);
    let more = match misplaced.len() - 1 {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    let (allowed, wanted) = (&first.thread.allowed, &first.wanted);
    Some(format!("\"{name}\" (tid {tid}) may run on CPUs {allowed}, its lease says {wanted}{more}"))
}
