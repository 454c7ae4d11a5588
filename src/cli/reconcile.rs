//! `virt-pin reconcile`: the leases rebuilt from the VMs that run.
//!
//! For when `leases.json` is damaged or lost, and for VMs that ran before the hook was installed. Each running VM with a
//! dedicated policy whose vCPU threads are bound to one CPU each gets its lease, on exactly the CPUs where its threads are;
//! one that may do without, and does, is recorded as degraded; the rest is said, not guessed. A lease of a former version
//! learns what its VM asks for. What the host's own work was kept off for nobody is given back, and partitions that have become
//! invalid are made anew. Leases of CPUs that have gone offline or come back are repaired (see `relocate`). Leases whose start was
//! never followed by a QEMU are ended. A corrupt file is kept beside.

use std::fs;

use super::{Context, to_json};
use crate::alloc::plan::Plan;
use crate::alloc::policy::{Cores, Fallback};
use crate::cpuset::{CpuId, CpuSet};
use crate::decision::{Dedicated, Situation, Wish, wish};
use crate::enforce::binding::{Role, role};
use crate::enforce::isolation;
use crate::enforce::{self, pool, remains};
use crate::error::{Code, Error, Result, counted, printable};
use crate::failpoint;
use crate::host::cgroup;
use crate::host::process;
use crate::host::qemu;
use crate::host::root::Root;
use crate::lock::former::Former;
use crate::lock::leases::{Holds, Lease, Leases, State};
use crate::lock::reclaim::reclaim;
use crate::lock::{DEADLINE, STATE_DIR, StateLock};
use crate::relocate::{self, Done};
use crate::xml::{Domain, read};

pub(super) fn reconcile(context: &Context) -> Result<String> {
    let root = &context.root;
    let running = qemu::running(root)?;
    let mut notes: Vec<String> = Vec::new();
    let mut state = StateLock::acquire(root, DEADLINE)?;
    let mut leases = match state.load() {
        Ok(leases) => leases,
        Err(error) if error.code == Code::StateCorrupt => {
            notes.push(format!("{}; it is kept as {}", error.message, keep_copy(root)?));
            Leases::default()
        }
        Err(error) => return Err(error),
    };
    for (lease, reason) in reclaim(root, &mut leases)? {
        notes.push(format!("\"{}\": lease ended, {reason}", printable(&lease.name)));
    }
    let now = process::uptime_secs(root);
    let overdue =
        |lease: &&Lease| lease.is_overdue(now) && qemu::living_pid(root, &lease.name).is_ok_and(|pid| pid.is_none());
    for uuid in leases.iter().filter(overdue).map(|lease| lease.uuid).collect::<Vec<_>>() {
        if let Some(lease) = leases.remove(uuid) {
            notes.push(format!("\"{}\": lease ended, its start was never followed by a QEMU", printable(&lease.name)));
        }
    }
    for (name, text) in running {
        match adopt(context, &leases, &name, &text) {
            Ok(Some(lease)) => {
                let what = match &lease.holds {
                    Holds::Degraded { reason, .. } => format!("degraded, without CPUs of its own: {reason}"),
                    _ => format!("lease on CPUs {}", lease.cpus()),
                };
                let mut with = leases.clone();
                with.put(lease);
                // One that contradicts the others is said, and the others stand.
                match with.check() {
                    Ok(()) => {
                        notes.push(format!("\"{}\": {what}", printable(&name)));
                        leases = with;
                    }
                    Err(what) => notes.push(format!("\"{}\": no lease: {}", printable(&name), printable(&what))),
                }
            }
            Ok(None) => {}
            Err(error) => notes.push(format!("\"{}\": no lease: {}", printable(&name), error.message)),
        }
    }
    state.replace(&leases)?;
    match remains::sweep(root, &leases) {
        Ok(left) => notes.extend(left.into_iter().map(|what| format!("removed, left by a start that is over: {what}"))),
        Err(error) => notes.push(error.message),
    }
    let held = Situation::read(root, &context.settings()?, None)
        .and_then(|situation| pool::hold(root, &leases, &situation.shared_pool(&leases)));
    if let Err(error) = held {
        notes.push(format!("VMs without a lease: {}", error.message));
    }
    state.sweep();
    match state.former() {
        Ok(former) if !former.is_empty() => {
            let remains = isolation::remains(&former, &leases);
            match isolation::settle(root, &mut state, &leases) {
                Ok(()) => notes.extend(remains.into_iter().map(|what| format!("restored on the host: {what}"))),
                Err(error) => notes.push(format!("the host's own work: {}", error.message)),
            }
        }
        Ok(_) => notes.extend(isolation::settle(root, &mut state, &leases).err().map(|error| error.message)),
        Err(error) if error.code == Code::StateCorrupt => {
            notes.push(format!("{}; it is gone now, and what it was to restore is not restored", error.message));
            state.keep_former(&Former::default())?;
        }
        Err(error) => notes.push(error.message),
    }
    drop(state);
    notes.extend(repaired(context).unwrap_or_else(|error| vec![format!("leases are not repaired: {}", error.message)]));
    let count = leases.iter().count();
    if context.json {
        return to_json(&serde_json::json!({ "leases": count, "notes": notes }));
    }
    notes.push(format!("{} in all.", counted(count as u64, "lease")));
    Ok(notes.join("\n") + "\n")
}

/// Leases whose CPUs have gone or come back, and moves that nobody finished. libvirt is asked only where it has to be told.
fn repaired(context: &Context) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    for repair in relocate::repair(&context.root, &context.settings()?)? {
        let name = printable(&repair.name);
        notes.push(format!("\"{name}\": {}", repair.done.sentence()));
        if matches!(repair.done, Done::Moved { .. }) {
            notes.extend(
                super::sync::after_move(context, repair.uuid).map(|error| format!("\"{name}\": {}", error.message)),
            );
        }
    }
    Ok(notes)
}

/// The lease of a running domain that has none, or has one that can be completed; `None` if it needs nothing.
fn adopt(context: &Context, leases: &Leases, name: &str, text: &str) -> Result<Option<Lease>> {
    let root = &context.root;
    let status = qemu::status(root, name)?.ok_or_else(|| Error::new(Code::DomainUnknown, "it has ended meanwhile"))?;
    let live =
        qemu::live_domain(text).ok_or_else(|| Error::new(Code::DomainInvalid, "its status file holds no domain"))?;
    let domain = Domain::parse(&live)?;
    let identity = read::identity(&domain)?;
    let uuid = identity.uuid.ok_or_else(|| Error::new(Code::DomainInvalid, "it has no UUID"))?;
    if let Some(lease) = leases.get(uuid) {
        return Ok(with_request(context, lease, &domain, &identity));
    }
    let (holds, request) = match wish(root, &domain, &identity, &|| context.settings())? {
        Wish::Shared => return Ok(None),
        // Live pins may be those of a lease that was lost; by hand they are only if no policy asks.
        Wish::Static(cpus) => (Holds::Static(cpus), None),
        Wish::Dedicated(wish) => {
            let situation = Situation::read(root, &wish.settings, read::partition(&domain).as_deref())?;
            match observed(root, &situation.beside(leases, Some(uuid)), &wish, &status) {
                Ok(plan) => (Holds::Dedicated(plan), Some(wish.request)),
                // Where its policy allows that, it was started so.
                Err(error)
                    if error.code == Code::ThreadMisplaced && wish.request.policy.fallback == Fallback::Shared =>
                {
                    (Holds::Degraded { code: error.code, reason: error.message, pins: wish.pins.all() }, None)
                }
                Err(error) => return Err(error),
            }
        }
    };
    // What was made for its start goes when it ends.
    let confinement = enforce::confinement(root)?;
    let place = identity.id.map(|id| confinement.place(read::partition(&domain).as_deref(), id, &identity.name));
    let place = place.transpose()?.flatten().filter(|place| root.exists(place));
    Ok(Some(Lease {
        uuid,
        name: identity.name,
        state: State::Running,
        holds,
        request,
        domain_id: identity.id,
        cgroup: place,
        daemon: None,
        qemu: process::process(root, status.pid)?,
        moving: None,
        since: process::uptime_secs(root),
    }))
}

/// A lease from an earlier version does not say what it answers; the domain does. `None` if there is nothing to add.
fn with_request(context: &Context, lease: &Lease, domain: &Domain<'_>, identity: &read::Identity) -> Option<Lease> {
    let count = lease.plan().filter(|_| lease.request.is_none())?.vcpus.len();
    match wish(&context.root, domain, identity, &|| context.settings()) {
        Ok(Wish::Dedicated(wish)) if usize::from(wish.request.vcpus) == count => {
            Some(Lease { request: Some(wish.request), ..lease.clone() })
        }
        _ => None,
    }
}

/// The plan that the threads' places amount to.
fn observed(root: &Root, situation: &Situation, wish: &Dedicated, status: &qemu::Status) -> Result<Plan> {
    let elsewhere = |what: String| Error::new(Code::ThreadMisplaced, what);
    let hierarchy = cgroup::hierarchy(root)?;
    let mut vcpus: Vec<Option<CpuSet>> = vec![None; usize::from(wish.request.vcpus)];
    let (mut emulator, mut iothreads) = (CpuSet::new(), CpuSet::new());
    for thread in process::threads(root, status.pid)? {
        let lives_in = hierarchy.as_ref().and_then(|found| cgroup::of_thread(root, found, status.pid, thread.tid));
        match role(&thread, status, lives_in.as_deref()) {
            Role::Vcpu(number) => {
                if let Some(place) = vcpus.get_mut(usize::from(number)) {
                    *place = Some(thread.allowed);
                }
            }
            Role::IoThread => iothreads = iothreads.union(&thread.allowed),
            Role::Emulator => emulator = emulator.union(&thread.allowed),
        }
    }
    let mut order: Vec<CpuId> = Vec::new();
    for (vcpu, allowed) in vcpus.into_iter().enumerate() {
        match allowed {
            None => {
                let what =
                    format!("vCPU {vcpu} is not plugged in, so its CPU cannot be seen; restart the VM for a lease");
                return Err(elsewhere(what));
            }
            Some(allowed) => match allowed.first().filter(|_| allowed.len() == 1) {
                Some(cpu) => order.push(cpu),
                None => {
                    let what = format!("vCPU {vcpu} may run on CPUs {allowed}, not on one of its own");
                    return Err(elsewhere(what));
                }
            },
        }
    }
    if iothreads.is_empty() {
        iothreads = emulator.clone();
    }
    let pins = read::Pins {
        vcpus: (0..).zip(order.iter().map(|&cpu| CpuSet::from_iter([cpu]))).collect(),
        ..read::Pins::default()
    };
    let exact = Dedicated { pins, default_cpuset: None, ..wish.clone() };
    // The policy's own plan on these CPUs, if it is what is seen: it knows what the guest is told.
    if let Ok(plan) = situation.plan(&exact, None, false, &mut |_| {}) {
        if plan.emulator == emulator && plan.iothreads == iothreads {
            return Ok(plan);
        }
    }
    // Otherwise what is seen: the allowlist may have changed since the start.
    let leased: CpuSet = order.iter().copied().collect();
    let whole = wish.request.policy.cores == Cores::Whole;
    let siblings = |cpus: &CpuSet| if whole { situation.topology.with_siblings(cpus) } else { cpus.clone() };
    // QEMU's other threads on CPUs that may be handed out hold those as well.
    let extra = siblings(&emulator.union(&iothreads).intersection(&situation.pinnable)).difference(&siblings(&leased));
    if leased.len() != order.len() {
        return Err(elsewhere(format!("two of its vCPUs share one of CPUs {leased}")));
    }
    Ok(Plan {
        parked: siblings(&leased).difference(&leased),
        nodes: leased.iter().filter_map(|cpu| situation.topology.cpu(cpu)?.node).collect(),
        whole,
        extra,
        iothreads,
        ..Plan::new(order, emulator)
    })
}

/// Keeps a second name for the corrupt file, which stays where it is until it is replaced. Called with the lock held.
fn keep_copy(root: &Root) -> Result<String> {
    let dir = root.resolve(STATE_DIR);
    let copy = dir.join(format!("leases.json.corrupt-{}", process::uptime_secs(root)));
    match failpoint::step("corrupt.copy").and_then(|()| fs::hard_link(dir.join("leases.json"), &copy)) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(Error::io(Code::StateUnsafe, "link", &copy, error))
        }
        _ => Ok(copy.display().to_string()),
    }
}
