//! Moves a running VM's lease to other CPUs.
//!
//! 1. Under the lease lock the lease is written down with both plans ([`Moving`]): from here on the CPUs of both are its. Then
//!    the others are kept off all of them, and the host's own work where its policy asks for that.
//! 2. Without the lock, as memory may take its time: its partitions are taken apart; the VM's cgroup gets the new CPUs too, its
//!    threads go there, its memory follows, its cgroup gives up the old CPUs; then the kernel is asked where everything is,
//!    and the new CPUs are made partitions.
//! 3. Under the lock the lease is written down with the new plan alone, and the others get the old CPUs.
//!
//! So at no instant two leases own a CPU, and no thread may run on a CPU that its lease does not hold. What fails in step 2 is
//! undone the same way. A lease whose mover has ended holds the CPUs of both plans until somebody takes the move over
//! ([`recover`]). A process moves one lease at a time. libvirt is never called; its live XML is for the caller to bring in line.

pub mod moves;
mod repair;

use crate::alloc::check;
use crate::alloc::plan::Plan;
use crate::alloc::relocation::{MemoryOfMoved, same_guest};
use crate::alloc::request::Request;
use crate::config::settings::Settings;
use crate::cpuset::{CpuId, CpuSet};
use crate::decision::Situation;
use crate::definitions;
use crate::enforce::isolation::{self, Wanted, partition};
use crate::enforce::passage::{self, Cgroups};
use crate::enforce::{binding, pool};
use crate::error::{Code, Error, Result, printable};
use crate::failpoint::passed;
use crate::host::process::{self, Process};
use crate::host::qemu;
use crate::host::root::Root;
use crate::lock::leases::{Holds, Lease, Leases, Moving, State};
use crate::lock::reclaim::is_alive;
use crate::lock::{self, DEADLINE, StateLock};
use crate::uuid::DomainUuid;
use crate::xml::{Domain, read};

pub use repair::{Done, Repair, hold, repair, repair_one};

/// Where a lease that moves could go, and with what of its request: for whoever chooses.
#[derive(Debug)]
pub struct Mobile {
    /// What it asks for, kept to the nodes where its own `<numatune>` holds its memory.
    pub request: Request,
    /// Whether memory bound to its nodes can be taken along.
    pub memory: MemoryOfMoved,
    /// The ids of its I/O threads.
    pub iothreads: Vec<u32>,
    /// Its `<partition>`, where that is not libvirt's own.
    pub partition: Option<String>,
}

impl Mobile {
    /// What is known of a running domain with a lease.
    ///
    /// # Errors
    /// [`Code::StateConflict`] for a lease that cannot be moved now, with the reason.
    pub fn of(root: &Root, lease: &Lease) -> Result<Mobile> {
        let cannot = |what: &str| Err(Error::new(Code::StateConflict, format!("cannot be moved: {what}")));
        let (Some(plan), State::Running) = (lease.plan(), lease.state) else {
            return cannot("it does not run on CPUs of its own");
        };
        let Some(request) = &lease.request else {
            return cannot("its lease does not say what it asks for (`virt-pin reconcile` adds that)");
        };
        let Some(qemu) = lease.qemu else { return cannot("its QEMU is not known") };
        let mut request = request.clone();
        let status = qemu::file_of(qemu::RUN_DIR, &lease.name, ".xml").map(|path| root.read_if_exists(&path));
        let live = status.transpose()?.flatten().and_then(|text| qemu::live_domain(&text)).unwrap_or_default();
        // Its own <numatune> is libvirt's: memory that it binds does not move.
        let domain = Domain::parse(&live);
        if domain.as_ref().map_or(true, read::binds_memory) && !plan.nodes.is_empty() {
            let nodes = plan.nodes.iter().map(|node| CpuId(node.0)).collect();
            request.policy.nodes = Some(nodes);
        }
        let moves = Cgroups::of(root, qemu.pid, lease.cgroup.as_deref())?
            .is_some_and(|cgroups| passage::moves_memory(root, &cgroups) && passage::sees_memory(root, qemu.pid));
        let memory = if moves { MemoryOfMoved::Follows } else { MemoryOfMoved::Stays };
        let partition = domain.as_ref().ok().and_then(own_partition);
        let iothreads = domain.and_then(|domain| read::iothread_ids(&domain)).unwrap_or_default();
        Ok(Mobile { request, memory, iothreads, partition })
    }
}

/// The partition of a running domain, where that is not the one in which libvirt puts every domain that names none.
fn own_partition(domain: &Domain<'_>) -> Option<String> {
    read::partition(domain).filter(|partition| partition != "/machine")
}

/// As [`own_partition`], of the domain of a lease; `None` also where libvirt has no status file of it.
pub fn partition_of(root: &Root, lease: &Lease) -> Option<String> {
    let status = root.read_if_exists(&qemu::file_of(qemu::RUN_DIR, &lease.name, ".xml")?).ok()??;
    own_partition(&Domain::parse(&qemu::live_domain(&status)?).ok()?)
}

/// The host beside the other leases, the lease, and what can be done with it: a plan for it.
pub type Choose<'a> = &'a mut dyn FnMut(&Situation, &Lease, &Mobile) -> Result<Plan>;

/// Moves a lease to the plan that `choose` finds under the lock. Returns the CPUs it had and those it has.
///
/// # Errors
/// [`Code::StateConflict`] where it cannot be moved, what `choose` says, or what went wrong: the lease is where it was then,
/// except where that could not be done either.
pub fn relocate(root: &Root, settings: &Settings, uuid: DomainUuid, choose: Choose<'_>) -> Result<(CpuSet, CpuSet)> {
    let me = me(root)?;
    let lease = begin(root, settings, uuid, me, choose)?;
    passed("begun");
    let to = finish(root, settings, &lease, Way::There)?;
    Ok((lease.plan().map(Plan::exclusive).unwrap_or_default(), to.exclusive()))
}

/// Takes over every move whose mover has ended: to its end, or back. Those that take memory along only where `memory` says so.
///
/// # Errors
/// [`Code::StateLocked`] and others of the state; what becomes of each lease is in the list.
pub fn recover(root: &Root, settings: &Settings, memory: MemoryOfMoved) -> Result<Vec<(Lease, Result<Plan>)>> {
    let mut recovered = Vec::new();
    for lease in lock::read(root)?.iter().filter(|lease| lease.moving.is_some()) {
        if let Some((lease, way)) = take_over(root, settings, lease.uuid, memory)? {
            let outcome = finish(root, settings, &lease, way);
            recovered.push((lease, outcome));
        }
    }
    Ok(recovered)
}

/// Which plan a move that has begun comes to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The one it moves to; if that cannot be, the one it had.
    There,
    /// The one it had.
    Back,
}

/// Makes an abandoned move ours; `None` if it is none, or somebody is at it.
fn take_over(
    root: &Root,
    settings: &Settings,
    uuid: DomainUuid,
    memory: MemoryOfMoved,
) -> Result<Option<(Lease, Way)>> {
    let situation = Situation::read(root, settings, None)?;
    let mut state = StateLock::acquire(root, DEADLINE)?;
    let mut leases = state.load()?;
    let Some(lease) = leases.get(uuid).cloned() else { return Ok(None) };
    let (Some(moving), Some(plan)) = (&lease.moving, lease.plan()) else { return Ok(None) };
    let me = me(root)?;
    // One of our own that did not come to its end is taken over as well: a process moves one lease at a time.
    let at_it = moving.by != me && is_alive(root, moving.by)?;
    if at_it || (memory == MemoryOfMoved::Stays && plan.memory_nodes != moving.to.memory_nodes) {
        return Ok(None);
    }
    let lease = Lease { moving: Some(Moving { by: me, ..moving.clone() }), ..lease };
    leases.put(lease.clone());
    state.replace(&leases)?;
    // The others may not have made room yet.
    let way = if make_room(root, &situation, &mut state, &leases).is_ok() { Way::There } else { Way::Back };
    Ok(Some((lease, way)))
}

/// This process.
fn me(root: &Root) -> Result<Process> {
    let pid = std::process::id();
    // Under another root our pid is nobody's: such a move is abandoned from its beginning.
    Ok(process::process(root, pid)?.unwrap_or(Process { pid, start_time: 0 }))
}

/// Step 1.
fn begin(root: &Root, settings: &Settings, uuid: DomainUuid, me: Process, choose: Choose<'_>) -> Result<Lease> {
    let definitions = definitions::read(root, settings).dedicated;
    let situation = Situation::read(root, settings, None)?.among(definitions, Some(uuid));
    let mut state = StateLock::acquire(root, DEADLINE)?;
    let mut leases = state.load()?;
    let Some(lease) = leases.get(uuid).cloned() else {
        return Err(Error::new(Code::DomainUnknown, format!("no lease for the domain {uuid}")));
    };
    let about = |error: Error| error.in_domain(&lease.name);
    if let Some(moving) = &lease.moving {
        let what = format!("is being moved to CPUs {} by process {}", moving.to.exclusive(), moving.by.pid);
        return Err(about(Error::new(Code::StateConflict, what)));
    }
    let mobile = Mobile::of(root, &lease).map_err(about)?;
    let alive = lease.qemu.map(|qemu| is_alive(root, qemu)).transpose()?;
    let Some(from) = lease.plan().filter(|_| alive == Some(true)) else {
        return Err(about(Error::new(Code::DomainUnknown, "has ended")));
    };
    let situation = situation.beside(&leases, Some(uuid));
    let to = choose(&situation, &lease, &mobile).map_err(about)?;
    check::check(&situation.supply(), &mobile.request, &to).map_err(|refusal| about(refusal.into()))?;
    same_guest(&situation.topology, from, &to, mobile.memory).map_err(|what| {
        about(Error::new(Code::StateConflict, format!("cannot be moved to CPUs {}: {what}", to.exclusive())))
    })?;
    isolation::check(root, &mobile.request.policy, &to, &mobile.iothreads, &Wanted::of(&leases, None))
        .map_err(about)?;
    let moving = Lease { moving: Some(Moving { to, by: me }), ..lease.clone() };
    leases.put(moving.clone());
    state.replace(&leases)?;
    passed("recorded");
    if let Err(error) = make_room(root, &situation, &mut state, &leases) {
        leases.put(lease.clone());
        state.replace(&leases)?;
        let _ = make_room(root, &situation, &mut state, &leases);
        return Err(about(error));
    }
    Ok(moving)
}

/// Steps 2 and 3: to where the lease moves, or back. The plan by which it runs.
fn finish(root: &Root, settings: &Settings, lease: &Lease, way: Way) -> Result<Plan> {
    let about = |error: Error| error.in_domain(&lease.name);
    let (Some(moving), Some(from)) = (&lease.moving, lease.plan()) else {
        return Err(Error::new(Code::Internal, "finishes a move that never began"));
    };
    // Whose CPUs are nobody's to share may no longer follow from the allowlist alone.
    let situation = Situation::read(root, settings, None)?.beside(&lock::read(root)?, Some(lease.uuid));
    let there = match way {
        Way::There => {
            settle(root, &situation, lease, &moving.to, None).and_then(|()| isolate(root, lease, &moving.to, None))
        }
        Way::Back => Err(Error::new(Code::ConfinementFailed, "the others could not make room for it")),
    };
    let (plan, failure) = match there {
        Ok(()) => (&moving.to, None),
        Err(error) => match settle(root, &situation, lease, from, None) {
            // That it is not alone there is worth saying, and no reason to keep two places.
            Ok(()) => match isolate(root, lease, from, None).err() {
                None => (from, Some(error)),
                Some(also) => (from, Some(error.because(also))),
            },
            Err(also) => {
                return Err(about(error.because(also)).with_hint(
                    "it could not be put back either and keeps the CPUs of both places; `virt-pin reconcile` tries again",
                ));
            }
        },
    };
    passed("settled");
    let mut state = StateLock::acquire(root, DEADLINE)?;
    let mut leases = state.load()?;
    let Some(now) = leases.get(lease.uuid).filter(|now| now.moving == lease.moving).cloned() else {
        return Err(about(Error::new(Code::DomainUnknown, "its lease has ended while it was moved")));
    };
    leases.put(Lease { holds: Holds::Dedicated(plan.clone()), moving: None, ..now });
    state.replace(&leases)?;
    passed("committed");
    // The others only get more: what cannot be given now is given at the next event.
    let _ = make_room(root, &situation, &mut state, &leases);
    drop(state);
    match failure {
        None => Ok(plan.clone()),
        Some(error) => Err(about(error)),
    }
}

/// Holds everybody without a lease to what these leave, and the host's own work where they ask for that.
fn make_room(root: &Root, situation: &Situation, state: &mut StateLock, leases: &Leases) -> Result<()> {
    let held = pool::hold(root, leases, &situation.shared_pool(leases));
    held.and(isolation::settle(root, state, leases))
}

/// Where threads may be that the lease has nothing left for.
fn elsewhere(situation: &Situation) -> &CpuSet {
    &situation.housekeeping
}

fn status(root: &Root, lease: &Lease) -> Result<qemu::Status> {
    qemu::status(root, &lease.name)?.ok_or_else(|| {
        Error::new(Code::ThreadMisplaced, format!("libvirt has no status file of \"{}\"", printable(&lease.name)))
    })
}

/// Puts the domain where the plan says, as far as its CPUs are online, wherever among the lease's CPUs it is now; and looks. Its
/// partitions are gone then.
fn settle(root: &Root, situation: &Situation, lease: &Lease, plan: &Plan, held: Option<&mut StateLock>) -> Result<()> {
    let plan = plan.meanwhile(situation.topology.online(), elsewhere(situation));
    let status = status(root, lease)?;
    let place = lease.cgroup.as_deref();
    if isolation::is_partition(lease) {
        // What is still one holds threads back; where they then are decides.
        let _ = partition::dissolve(root, &status, held);
        passed("dissolved");
    }
    if let Some(cgroups) = Cgroups::of(root, status.pid, place)? {
        passage::write(root, &passage::grown(&cgroups, &plan.allowed()))?;
        passed("grown");
        passage::write(root, &passage::seated(&cgroups, &plan))?;
        passage::gather(root, &cgroups, &status)?;
        passed("seated");
    }
    binding::bind(root, &status, &plan)?;
    passed("bound");
    if let Some(cgroups) = Cgroups::of(root, status.pid, place)? {
        let goes = lease.moving.is_some() && lease.plans().any(|other| other.memory_nodes != plan.memory_nodes);
        if let Some(nodes) = plan.memory_nodes.as_ref().filter(|_| goes && passage::moves_memory(root, &cgroups)) {
            passage::move_memory(root, &cgroups, status.pid, nodes)?;
            passed("memory");
        }
        passage::write(root, &passage::shrunk(&cgroups, &plan.allowed()))?;
        passed("shrunk");
    }
    passage::remember(root, place, &plan)?;
    // Threads may have been born meanwhile.
    binding::bind(root, &status, &plan)
}

/// Has nobody else run where the domain is now, if its policy asks for that.
fn isolate(root: &Root, lease: &Lease, plan: &Plan, held: Option<&mut StateLock>) -> Result<()> {
    if !isolation::is_partition(lease) {
        return Ok(());
    }
    let status = status(root, lease)?;
    partition::ensure(root, &status, plan, held)?;
    passed("isolated");
    binding::bind(root, &status, plan)
}
