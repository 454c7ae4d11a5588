//! `virt-pin reconcile`: the leases rebuilt from the VMs that run.
//!
//! For when `leases.json` is corrupt or lost. Each running VM with a dedicated policy whose vCPU threads are bound to one
//! CPU each gets its lease back, on exactly those CPUs; the rest is said, not guessed. A corrupt file is kept beside.

use std::fs;

use super::{Context, to_json};
use crate::alloc::plan::Plan;
use crate::alloc::{Supply, check};
use crate::cpuset::{CpuId, CpuSet, NodeId};
use crate::decision::{Dedicated, Situation, Wish, wish};
use crate::error::{Code, Error, Result, counted, printable};
use crate::host::process;
use crate::host::qemu::{self, RUN_DIR};
use crate::host::root::Root;
use crate::lock::leases::{Holds, Lease, Leases, State};
use crate::lock::reclaim::reclaim;
use crate::lock::{DEADLINE, STATE_DIR, StateLock};
use crate::xml::{Domain, read};

pub(super) fn reconcile(context: &Context) -> Result<String> {
    let root = &context.root;
    let settings = context.settings()?;
    let running = running(root)?;
    let mut out: Vec<String> = Vec::new();
    let mut state = StateLock::acquire(root, DEADLINE)?;
    let mut leases = match state.load() {
        Ok(leases) => leases,
        Err(error) if error.code == Code::StateCorrupt => {
            out.push(format!("{}; it is kept as {}", error.message, set_aside(root)?));
            Leases::default()
        }
        Err(error) => return Err(error),
    };
    for (lease, reason) in reclaim(root, &mut leases)? {
        out.push(format!("\"{}\": lease ended, {reason}", printable(&lease.name)));
    }
    for (name, text) in running {
        let found = adopt(root, context, &settings, &leases, &name, &text);
        match found {
            Ok(Adopted::Lease(lease)) => {
                out.push(format!("\"{}\": lease on CPUs {}", printable(&name), lease.cpus()));
                leases.put(*lease);
            }
            Ok(Adopted::HasOne) => out.push(format!("\"{}\": has its lease", printable(&name))),
            Ok(Adopted::NeedsNone) => {}
            Err(error) => out.push(format!("\"{}\": no lease: {}", printable(&name), error.message)),
        }
    }
    state.replace(&leases)?;
    drop(state);
    if context.json {
        return to_json(&serde_json::json!({ "leases": leases.iter().count(), "notes": out }));
    }
    out.push(format!("{} in all.", counted(leases.iter().count() as u64, "lease")));
    Ok(out.join("\n") + "\n")
}

enum Adopted {
    Lease(Box<Lease>),
    HasOne,
    NeedsNone,
}

/// The running domains: (name, text of the status file).
fn running(root: &Root) -> Result<Vec<(String, String)>> {
    let names = root.list(RUN_DIR)?;
    let names = names.iter().filter_map(|name| name.strip_suffix(".xml"));
    let found = names.filter_map(|name| {
        qemu::living_pid(root, name)?;
        let text = root.read_if_exists(&format!("{RUN_DIR}/{name}.xml"));
        text.transpose().map(|text| text.map(|text| (name.to_owned(), text)))
    });
    found.collect()
}

fn adopt(
    root: &Root,
    context: &Context,
    settings: &crate::config::settings::Settings,
    leases: &Leases,
    name: &str,
    text: &str,
) -> Result<Adopted> {
    let status = qemu::status(root, name)?.ok_or_else(|| Error::new(Code::DomainUnknown, "it has ended meanwhile"))?;
    let live =
        qemu::live_domain(text).ok_or_else(|| Error::new(Code::DomainInvalid, "its status file holds no domain"))?;
    let domain = Domain::parse(&live)?;
    let identity = read::identity(&domain)?;
    let uuid = identity.uuid.ok_or_else(|| Error::new(Code::DomainInvalid, "it has no UUID"))?;
    if leases.get(uuid).is_some() {
        return Ok(Adopted::HasOne);
    }
    let holds = match wish(root, &domain, &identity, settings)? {
        Wish::Shared => return Ok(Adopted::NeedsNone),
        Wish::Static(cpus) => Holds::Static(cpus),
        Wish::Dedicated(wish) => {
            let situation = Situation::read(&context.root, settings, read::partition(&domain).as_deref())?;
            Holds::Dedicated(observed(root, &situation, &wish, &status, leases)?)
        }
    };
    let lease = Lease {
        uuid,
        name: identity.name,
        state: State::Running,
        holds,
        domain_id: identity.id,
        cgroup: None,
        daemon: None,
        qemu: process::process(root, status.pid)?,
        since: process::uptime_secs(root),
    };
    Ok(Adopted::Lease(Box::new(lease)))
}

/// The plan that the threads' places amount to.
fn observed(
    root: &Root,
    situation: &Situation,
    wish: &Dedicated,
    status: &qemu::Status,
    leases: &Leases,
) -> Result<Plan> {
    let taken = &leases.taken_from(None);
    let elsewhere = |what: String| Error::new(Code::ThreadMisplaced, what);
    let threads = process::threads(root, status.pid)?;
    let mut order: Vec<CpuId> = Vec::new();
    for vcpu in 0..wish.request.vcpus {
        let tid = status.vcpus.get(&vcpu).ok_or_else(|| {
            elsewhere(format!(
                "vCPU {vcpu} is not plugged in, so its CPU cannot be seen; restart the VM for a new lease"
            ))
        })?;
        let allowed =
            threads.iter().find(|thread| thread.tid == *tid).map(|thread| thread.allowed.clone()).unwrap_or_default();
        match (allowed.len(), allowed.first()) {
            (1, Some(cpu)) => order.push(cpu),
            _ => return Err(elsewhere(format!("vCPU {vcpu} may run on CPUs {allowed}, not on one of its own"))),
        }
    }
    let pins = read::Pins {
        vcpus: (0..).zip(order.iter().map(|&cpu| CpuSet::from_iter([cpu]))).collect(),
        ..read::Pins::default()
    };
    let exact = Dedicated { pins, default_cpuset: None, ..wish.clone() };
    // The policy's own plan on these CPUs, if it has one: it knows the parked ones and the emulator's place.
    if let Ok(plan) = situation.plan(&exact, None, (leases, None), false, &mut |_| {}) {
        return Ok(plan);
    }
    // Otherwise what is seen, provided nobody else has it: the allowlist may have changed since the start.
    let vcpus: CpuSet = order.iter().copied().collect();
    let cores = vcpus
        .iter()
        .filter_map(|cpu| situation.topology.siblings(cpu))
        .fold(vcpus.clone(), |all, core| all.union(core));
    let whole = wish.request.policy.cores == crate::alloc::policy::Cores::Whole;
    let parked = if whole { cores.difference(&vcpus) } else { CpuSet::new() };
    let supply = Supply { topology: &situation.topology, pinnable: &situation.pinnable, taken };
    let nodes = vcpus
        .iter()
        .filter_map(|cpu| situation.topology.cpu(cpu)?.node)
        .collect::<std::collections::BTreeSet<NodeId>>();
    let housekeeping = supply.housekeeping().difference(taken);
    let seats = if housekeeping.is_empty() { vcpus.clone() } else { housekeeping };
    let plan = Plan {
        vcpus: order,
        parked,
        extra: CpuSet::new(),
        emulator: seats.clone(),
        iothreads: seats,
        nodes,
        memory_nodes: None,
        guest: None,
    };
    let conflict = plan.exclusive().intersection(taken);
    if !conflict.is_empty() || check::distinct(&plan).is_err() {
        return Err(elsewhere(format!("its vCPUs run on CPUs {vcpus}, of which {conflict} belong to another lease")));
    }
    Ok(plan)
}

/// Moves the corrupt file aside and returns its new name. Called with the lock held.
fn set_aside(root: &Root) -> Result<String> {
    let dir = root.resolve(STATE_DIR);
    let new = dir.join(format!("leases.json.corrupt-{}", process::uptime_secs(root)));
    fs::rename(dir.join("leases.json"), &new)
        .map_err(|error| Error::io(Code::StateUnsafe, "rename to", &new, error))?;
    Ok(new.display().to_string())
}
