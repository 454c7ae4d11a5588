//! Threads of dedicated VMs that are not where their leases say: said, and moved back where that is wanted.
//!
//! Who came to life after the start (an I/O thread that was added, a worker of the kernel's) is nobody's doing, and is simply
//! bound; so is a partition made again that lacks somebody, or has become invalid.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::voice::Voice;
use crate::alloc::plan::Plan;
use crate::config::settings::Settings;
use crate::enforce::binding;
use crate::enforce::isolation::{self, partition};
use crate::error::{Code, Result, printable};
use crate::host::qemu;
use crate::host::root::Root;
use crate::lock::leases::{Lease, Leases, State};
use crate::lock::survey;
use crate::relocate;
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

    /// Looks at those of the VMs that run, and at suspects; the second look decides. Returns whose threads were moved.
    pub(super) fn look(
        &mut self,
        root: &Root,
        leases: &Leases,
        which: &dyn Fn(&Lease) -> bool,
        voice: &Voice,
    ) -> Vec<DomainUuid> {
        let mut repaired = Vec::new();
        let repair = || Settings::read(root).is_ok_and(|settings| settings.repair_drift);
        let runs = |uuid: &DomainUuid| leases.get(*uuid).is_some_and(|lease| lease.state == State::Running);
        self.known.retain(|uuid, _| runs(uuid));
        self.suspects.retain(|uuid, _| runs(uuid));
        // One that moves is nowhere for long.
        let running = leases.iter().filter(|lease| lease.state == State::Running && lease.moving.is_none());
        let now = Instant::now();
        let due = |suspects: &BTreeMap<DomainUuid, Instant>, uuid| suspects.get(uuid).is_some_and(|due| *due <= now);
        let mut chosen: Vec<&Lease> =
            running.filter(|lease| which(lease) || due(&self.suspects, &lease.uuid)).collect();
        if !chosen.is_empty() {
            // Whose CPUs are offline is held elsewhere.
            let online = survey::topology(root).map(|(topology, _)| topology.online().clone());
            let whole = |plan: &Plan| online.as_ref().is_ok_and(|online| plan.missing(online).is_empty());
            chosen.retain(|lease| lease.plan().is_none_or(whole));
        }
        // Who is due and is not looked at (it moves, or its CPUs are offline) would be due for ever.
        self.suspects.retain(|uuid, due| *due > now || chosen.iter().any(|lease| lease.uuid == *uuid));
        for lease in chosen {
            let what = match Found::at(root, lease) {
                Found::Right => {
                    self.suspects.remove(&lease.uuid);
                    if self.known.remove(&lease.uuid).is_some() {
                        voice.did((&lease.name, lease.uuid), "every thread is where its lease says again");
                    }
                    continue;
                }
                Found::Late(what) => {
                    self.suspects.remove(&lease.uuid);
                    repaired.extend(self.bind(root, lease, &what, voice));
                    continue;
                }
                Found::Astray(what) => what,
            };
            if self.known.get(&lease.uuid) == Some(&what) && !repair() {
                self.suspects.remove(&lease.uuid);
                continue;
            }
            let due = *self.suspects.entry(lease.uuid).or_insert_with(|| Instant::now() + SETTLES);
            if Instant::now() < due {
                continue;
            }
            self.suspects.remove(&lease.uuid);
            self.found += 1;
            if repair() && move_back(root, lease, voice) {
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

    /// Binds who came late; whose they are, if that was done.
    fn bind(&mut self, root: &Root, lease: &Lease, what: &str, voice: &Voice) -> Option<DomainUuid> {
        match hold(root, lease.uuid) {
            // It ends, is on its way elsewhere, or somebody else has done it.
            Ok(false) => None,
            Ok(true) => {
                self.known.remove(&lease.uuid);
                voice.did((&lease.name, lease.uuid), &format!("{what}: put right"));
                Some(lease.uuid)
            }
            Err(error) => {
                // Said once, whatever is seen of it.
                if self.known.insert(lease.uuid, error.message.clone()).as_ref() != Some(&error.message) {
                    voice.warn((&lease.name, lease.uuid), error.code, &error.message);
                }
                None
            }
        }
    }
}

/// Moves the threads of a running VM to where its lease says; whether they are there now.
fn move_back(root: &Root, lease: &Lease, voice: &Voice) -> bool {
    let held = hold(root, lease.uuid);
    if let Err(error) = &held {
        voice.warn((&lease.name, lease.uuid), error.code, &error.message);
    }
    held.is_ok()
}

/// Puts threads where their lease says, as it is under the lock: it may have moved since it was read.
/// Whether anything had to be done.
fn hold(root: &Root, uuid: DomainUuid) -> Result<bool> {
    let settings = Settings::read(root)?;
    relocate::hold(root, &settings, uuid).map(|done| done.is_some())
}

/// How a VM's threads are to its lease.
enum Found {
    /// As it says, or nothing can be said.
    Right,
    /// Somebody has come to life, or the kernel has given a partition up; in words.
    Late(String),
    /// Somebody has been moved; in words.
    Astray(String),
}

impl Found {
    fn at(root: &Root, lease: &Lease) -> Found {
        let (Some(plan), Ok(Some(status))) = (lease.plan(), qemu::status(root, &lease.name)) else {
            return Found::Right;
        };
        let misplaced = binding::misplaced(root, &status, plan).unwrap_or_default();
        let Some(first) = misplaced.first() else {
            let flaw = isolation::is_partition(lease).then(|| partition::flaw(root, &status, plan).ok().flatten());
            return flaw.flatten().map_or(Found::Right, Found::Late);
        };
        let (name, tid) = (printable(&first.thread.name), first.thread.tid);
        let more = match misplaced.len() - 1 {
            0 => String::new(),
            more => format!(", and {more} more"),
        };
        let (allowed, wanted) = (&first.thread.allowed, &first.wanted);
        let what = format!("\"{name}\" (tid {tid}) may run on CPUs {allowed}, its lease says {wanted}{more}");
        let late = misplaced.iter().all(|thread| thread.is_late(plan));
        if late { Found::Late(what) } else { Found::Astray(what) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpuset::{CpuId, CpuSet};
    use crate::lock::leases::Holds;

    #[test]
    fn who_is_due_and_cannot_be_looked_at_is_suspected_no_more() {
        let uuid = DomainUuid::parse("00000000-0000-0000-0000-000000000001").unwrap();
        let mut leases = Leases::default();
        leases.put(Lease {
            uuid,
            name: "a".to_owned(),
            state: State::Running,
            holds: Holds::Dedicated(Plan::new([CpuId(1)], CpuSet::new())),
            request: None,
            domain_id: None,
            cgroup: None,
            daemon: None,
            qemu: None,
            moving: None,
            since: 0,
        });
        // Which of its CPUs are online is not known here.
        let root = Root::described(BTreeMap::new());
        let voice = Voice::of(&root);
        let left_after = |due: Instant| {
            let mut drift = Drift { suspects: BTreeMap::from([(uuid, due)]), ..Drift::default() };
            assert!(drift.look(&root, &leases, &|_| false, &voice).is_empty());
            drift.patience()
        };
        assert_eq!(left_after(Instant::now()), None);
        assert!(left_after(Instant::now() + Duration::from_secs(60)).is_some());
    }
}
