//! Leases whose CPUs have gone offline or have come back, and moves that nobody finished: made good as far as that can be.
//!
//! The kernel lets a thread whose only CPU has gone run anywhere, on other leases' CPUs too, and says nothing. So the lease is
//! moved: only the broken core is replaced if that can be done, else the whole is placed anew. Where there is no room the
//! vCPU is held to what is left of its own lease, and goes back when the CPU does. Nothing is written down of that: which CPUs
//! are missing follows from the lease and the machine. A partition is taken apart with a VM that is held so, and made again
//! once every CPU is there.

use super::{Mobile, Way, begin, elsewhere, finish, isolate, me, recover, settle};
use crate::alloc::Supply;
use crate::alloc::demand::Reserve;
use crate::alloc::plan::Plan;
use crate::alloc::relocation::{self, MemoryOfMoved};
use crate::config::settings::Settings;
use crate::cpuset::CpuSet;
use crate::decision::Situation;
use crate::enforce::binding;
use crate::enforce::isolation::{self, partition};
use crate::enforce::passage::{self, Cgroups};
use crate::error::{Code, Error, Result};
use crate::failpoint::passed;
use crate::host::qemu;
use crate::host::root::Root;
use crate::lock::leases::{Lease, State};
use crate::lock::reclaim::is_alive;
use crate::lock::{self, DEADLINE, StateLock};
use crate::log::Journal;
use crate::uuid::DomainUuid;

/// What was done for one lease.
#[derive(Debug)]
pub struct Repair {
    /// Whose.
    pub uuid: DomainUuid,
    /// The domain's name.
    pub name: String,
    /// What.
    pub done: Done,
}

/// What became of a lease that was not as it should be.
#[derive(Debug)]
pub enum Done {
    /// It has other CPUs; libvirt's live XML does not say so yet.
    Moved {
        /// Those it had.
        from: CpuSet,
        /// Those it has.
        to: CpuSet,
    },
    /// Threads were elsewhere and are back on these CPUs.
    Back(CpuSet),
    /// Its threads were right, but others could run there; they cannot any more. What was found before.
    Isolated(String),
    /// These CPUs are offline and there are no others for it: what ran there is held to the rest of its own.
    Degraded {
        /// Which.
        offline: CpuSet,
        /// Why there are no others.
        why: Error,
    },
    /// Nothing could be done.
    Failed(Error),
}

impl Done {
    /// In a sentence, about "it".
    pub fn sentence(&self) -> String {
        match self {
            Done::Moved { from, to } => format!("moved from CPUs {from} to {to}"),
            Done::Back(cpus) => format!("its threads are where its lease says again, on CPUs {cpus}"),
            Done::Isolated(flaw) => format!("its partition is valid again: {flaw} before"),
            Done::Degraded { offline, why } => format!(
                "CPUs {offline} are offline and there is no other place ({}: {}); until they are back its threads share the \
                 rest of its own",
                why.code, why.message
            ),
            Done::Failed(error) => error.message.clone(),
        }
    }
}

/// Makes good every running lease that is not as it should be. What was done, and what could not be; an empty list if all
/// is well. What has changed is in the journal, too.
///
/// # Errors
/// Those of the state, when the leases cannot be read.
pub fn repair(root: &Root, settings: &Settings) -> Result<Vec<Repair>> {
    let mut repairs = Vec::new();
    for (lease, outcome) in recover(root, settings, MemoryOfMoved::Follows)? {
        repairs.push(told(root, &lease, recovered(&lease, outcome)));
    }
    for uuid in lock::read(root)?.iter().map(|lease| lease.uuid).collect::<Vec<_>>() {
        repairs.extend(repair_one(root, settings, uuid, MemoryOfMoved::Follows)?);
    }
    Ok(repairs)
}

fn recovered(lease: &Lease, outcome: Result<Plan>) -> Done {
    let from = lease.plan().map(Plan::exclusive).unwrap_or_default();
    match outcome {
        Ok(plan) => Done::Moved { from, to: plan.exclusive() },
        Err(error) => Done::Failed(error),
    }
}

/// The same for one lease; with [`MemoryOfMoved::Stays`] nothing is done that could take long.
///
/// # Errors
/// As [`repair`].
pub fn repair_one(root: &Root, settings: &Settings, uuid: DomainUuid, memory: MemoryOfMoved) -> Result<Option<Repair>> {
    let leases = lock::read(root)?;
    let Some(lease) = leases.get(uuid).filter(|lease| lease.state == State::Running && lease.moving.is_none()) else {
        return Ok(None);
    };
    let Some(plan) = lease.plan() else { return Ok(None) };
    if !lease.qemu.is_some_and(|qemu| is_alive(root, qemu).unwrap_or(false)) {
        return Ok(None);
    }
    let situation = Situation::read(root, settings, None)?;
    let offline = plan.missing(situation.topology.online());
    let moved = if offline.is_empty() { None } else { Some(replace(root, settings, lease, memory)) };
    let done = match moved {
        Some(Ok(done)) => Some((done, true)),
        // It was on its way, and is neither here nor there.
        Some(Err(why)) if lock::read(root)?.get(uuid).is_some_and(|lease| lease.moving.is_some()) => {
            Some((Done::Failed(why), true))
        }
        // There is no other place: it keeps what it has.
        Some(Err(why)) => match held(root, &situation, uuid) {
            Ok(changed) => Some((Done::Degraded { offline, why }, changed.is_some())),
            Err(error) => Some((Done::Failed(error.in_domain(&lease.name)), true)),
        },
        None => match held(root, &situation, uuid) {
            Ok(done) => done.map(|done| (done, true)),
            Err(error) => Some((Done::Failed(error.in_domain(&lease.name)), true)),
        },
    };
    Ok(done.map(
        |(done, changed)| {
            if changed { told(root, lease, done) } else { Repair { uuid, name: lease.name.clone(), done } }
        },
    ))
}

/// Moves a lease off CPUs that have gone.
fn replace(root: &Root, settings: &Settings, lease: &Lease, memory: MemoryOfMoved) -> Result<Done> {
    let moving = begin(root, settings, lease.uuid, me(root)?, &mut |situation, lease, mobile| {
        let plan = lease.plan().ok_or_else(|| Error::new(Code::DomainUnknown, "has no CPUs of its own"))?;
        elsewhere_for(situation, settings.autostart_reserve, mobile, plan, memory)
    })?;
    passed("begun");
    let plan = finish(root, settings, &moving, Way::There)?;
    Ok(Done::Moved { from: lease.cpus(), to: plan.exclusive() })
}

/// Another place for a lease of which CPUs are missing.
fn elsewhere_for(
    situation: &Situation,
    reserve: Reserve,
    mobile: &Mobile,
    plan: &Plan,
    memory: MemoryOfMoved,
) -> Result<Plan> {
    let memory = if memory == MemoryOfMoved::Stays { memory } else { mobile.memory };
    let beside = |taken: &CpuSet| {
        let supply = Supply { taken, ..situation.supply() };
        match relocation::mended(&supply, &mobile.request, plan) {
            Some(mended) => Ok(mended),
            None => relocation::anew(&supply, &mobile.request, plan, memory).map_err(Error::from),
        }
    };
    // As at a start: the places of autostart domains that do not run are theirs.
    let kept = beside(&situation.taken.union(&situation.reserved()));
    if reserve == Reserve::Prefer { kept.or_else(|_| beside(&situation.taken)) } else { kept }
}

/// Sees to it that the threads of a running domain are where its lease says, alone there if its policy asks for that; moves no
/// lease. What had to be done.
///
/// # Errors
/// Those of the state; [`Code::ThreadMisplaced`], [`Code::ConfinementFailed`], [`Code::IsolationFailed`] for what could not.
pub fn hold(root: &Root, settings: &Settings, uuid: DomainUuid) -> Result<Option<Done>> {
    held(root, &Situation::read(root, settings, None)?, uuid)
}

fn held(root: &Root, situation: &Situation, uuid: DomainUuid) -> Result<Option<Done>> {
    let mut state = StateLock::acquire(root, DEADLINE)?;
    let leases = state.load()?;
    let Some((lease, plan)) =
        leases.get(uuid).filter(|lease| lease.moving.is_none()).and_then(|one| Some((one, one.plan()?)))
    else {
        return Ok(None);
    };
    let Some(status) = qemu::status(root, &lease.name)? else { return Ok(None) };
    let situation = situation.clone().beside(&leases, Some(uuid));
    let now = plan.meanwhile(situation.topology.online(), elsewhere(&situation));
    let right = binding::misplaced(root, &status, &now)?.is_empty()
        && Cgroups::of(root, status.pid, lease.cgroup.as_deref())?.is_none_or(|cgroups| {
            passage::grown(&cgroups, &now.allowed()).is_empty() && passage::seated(&cgroups, &now).is_empty()
        });
    if !right {
        settle(root, &situation, lease, plan, Some(&mut state))?;
    }
    let whole = plan.missing(situation.topology.online()).is_empty();
    let flaw = if whole && isolation::is_partition(lease) { partition::flaw(root, &status, plan)? } else { None };
    if flaw.is_some() {
        isolate(root, lease, plan, Some(&mut state))?;
    }
    Ok(if right { flaw.map(Done::Isolated) } else { Some(Done::Back(plan.exclusive())) })
}

/// Puts it into the journal.
fn told(root: &Root, lease: &Lease, done: Done) -> Repair {
    let journal = Journal::open(root);
    let domain = (lease.name.as_str(), lease.uuid);
    match &done {
        Done::Moved { to, .. } => journal.record(domain, None, Some(to), &done.sentence()),
        Done::Back(cpus) => journal.record(domain, None, Some(cpus), &done.sentence()),
        Done::Isolated(_) => journal.record(domain, None, Some(&lease.cpus()), &done.sentence()),
        Done::Degraded { why, .. } => journal.warn(domain, why.code, &done.sentence()),
        Done::Failed(error) => journal.record(domain, Some(error.code), Some(&lease.cpus()), &done.sentence()),
    }
    journal.flush();
    Repair { uuid: lease.uuid, name: lease.name.clone(), done }
}
