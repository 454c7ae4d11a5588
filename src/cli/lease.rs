//! `virt-pin list` and `virt-pin lease`: who holds which CPUs.

use serde::Serialize;

use super::table::{columns, fits, wrapped};
use super::{Context, subject, to_json};
use crate::alloc::plan::Plan;
use crate::cpuset::{CpuId, CpuSet};
use crate::error::{Result, counted, printable};
use crate::host::{process, qemu};
use crate::lock;
use crate::lock::leases::{Holds, Lease, State};
use crate::lock::survey;
use crate::xml::{Domain, shape};

/// A lease in JSON. Sets are kernel lists; `vcpus[i]` is the CPU of vCPU `i`; `since` is seconds of the host's uptime at the
/// last change of state; `isolation` and `irqs` are there where the policy does not have their defaults; `code` and `reason` say why a degraded one got no CPUs.
#[derive(Serialize)]
struct View<'l> {
    name: &'l str,
    uuid: String,
    state: State,
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant: Option<&'l str>,
    cpus: String,
    /// Those of its own that it uses and that are offline.
    #[serde(skip_serializing_if = "String::is_empty")]
    offline: String,
    /// The CPUs it is being moved to; they are among `cpus`.
    #[serde(skip_serializing_if = "Option::is_none")]
    moving_to: Option<String>,
    vcpus: Vec<Option<u16>>,
    #[serde(skip_serializing_if = "String::is_empty")]
    shared: String,
    parked: String,
    emulator: String,
    iothreads: String,
    nodes: Vec<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    isolation: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    irqs: Option<String>,
    pid: Option<u32>,
    since: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'l str>,
}

impl<'l> View<'l> {
    fn of(lease: &'l Lease, online: Option<&CpuSet>) -> View<'l> {
        let plan = lease.plan();
        let set = |of: &dyn Fn(&Plan) -> CpuSet| plan.map(|plan| of(plan).to_string()).unwrap_or_default();
        let why = match &lease.holds {
            Holds::Degraded { code, reason, .. } => Some((code.name(), reason.as_str())),
            Holds::Dedicated(_) | Holds::Static(_) => None,
        };
        let attributes = lease.request.as_ref().map(|request| request.policy.to_attributes()).unwrap_or_default();
        let asked = |name: &str| attributes.iter().find(|(found, _)| *found == name).map(|(_, value)| value.clone());
        View {
            name: &lease.name,
            uuid: lease.uuid.to_string(),
            state: lease.state,
            kind: kind(lease),
            tenant: lease.request.as_ref().and_then(|request| request.policy.tenant.as_deref()),
            cpus: lease.cpus().to_string(),
            offline: online.map(|online| set(&|plan| plan.missing(online))).unwrap_or_default(),
            moving_to: lease.moving.as_ref().map(|moving| moving.to.exclusive().to_string()),
            vcpus: plan.map(|plan| plan.vcpus.iter().map(|cpu| cpu.map(|cpu| cpu.0)).collect()).unwrap_or_default(),
            shared: set(&|plan| plan.shared.clone()),
            parked: set(&|plan| plan.parked.clone()),
            emulator: set(&|plan| plan.emulator.clone()),
            iothreads: set(&|plan| plan.iothreads.clone()),
            nodes: plan.map(|plan| plan.nodes.iter().map(|node| node.0).collect()).unwrap_or_default(),
            isolation: asked("isolation"),
            irqs: asked("irqs"),
            pid: lease.qemu.map(|qemu| qemu.pid),
            since: lease.since,
            code: why.map(|(code, _)| code),
            reason: why.map(|(_, reason)| reason),
        }
    }
}

#[derive(Serialize)]
struct ListView<'l> {
    leases: Vec<View<'l>>,
}

pub(super) fn list(context: &Context) -> Result<String> {
    let leases = lock::read(&context.root)?;
    let online = online(context);
    if context.json {
        return to_json(&ListView { leases: leases.iter().map(|lease| View::of(lease, online.as_ref())).collect() });
    }
    let mut rows: Vec<_> = leases.iter().map(|lease| row(lease, online.as_ref())).collect();
    rows.sort();
    let titles = ["Name", "State", "Kind", "vCPUs", "Node", "Parked", "Emulator", "CPUs"];
    if fits(&titles, &rows) {
        return Ok(columns(&titles, rows));
    }
    // What each CPU is for, `virt-pin lease` says; here each VM's CPUs are told whole.
    rows.iter_mut().for_each(|row| drop(row.drain(DETAILS)));
    let titles: Vec<&str> =
        titles.iter().enumerate().filter(|(at, _)| !DETAILS.contains(at)).map(|(_, title)| *title).collect();
    Ok(columns(&titles, rows))
}

/// The columns of the list that go where the table would be too wide.
const DETAILS: std::ops::Range<usize> = 5..7;

/// The CPUs that are online, where that can be told.
fn online(context: &Context) -> Option<CpuSet> {
    survey::topology(&context.root).ok().map(|(topology, _)| topology.online().clone())
}

fn row(lease: &Lease, online: Option<&CpuSet>) -> Vec<String> {
    let view = View::of(lease, online);
    let vcpus = if view.vcpus.is_empty() { String::new() } else { view.vcpus.len().to_string() };
    let offline = if view.offline.is_empty() { String::new() } else { format!(" ({} offline)", view.offline) };
    vec![
        printable(&lease.name),
        state(lease).to_owned(),
        view.kind.to_owned(),
        dash(vcpus),
        dash(list_of(&view.nodes)),
        dash(view.parked),
        dash(view.emulator),
        dash(view.cpus) + &offline,
    ]
}

pub(super) fn lease(context: &Context, domain: &str) -> Result<String> {
    let leases = lock::read(&context.root)?;
    let lease = subject::lease(&leases, domain)?;
    let view = View::of(lease, online(context).as_ref());
    if context.json {
        return to_json(&view);
    }
    let mut out = String::new();
    let mut line = |title: &str, value: &str| {
        out.push_str(&wrapped(&format!("{:<15} ", format!("{title}:")), &dash(value.to_owned())))
    };
    line("Name", &printable(&lease.name));
    line("UUID", &view.uuid);
    line("State", state(lease));
    line("Kind", view.kind);
    if let Some(tenant) = view.tenant {
        line("Tenant", tenant);
    }
    let age = process::uptime_secs(&context.root).saturating_sub(lease.since);
    line("Since", &format!("{} ago", duration(age)));
    line("CPUs held", &view.cpus);
    if !view.offline.is_empty() {
        line("Offline", &format!("{} (what ran there shares the rest; see `virt-pin check`)", view.offline));
    }
    if let Some(to) = &view.moving_to {
        line("Moving to", to);
    }
    if let (Some(code), Some(reason)) = (view.code, view.reason) {
        line("Code", code);
        line("Reason", &printable(reason));
    }
    if let Some(plan) = lease.plan() {
        for (vcpus, place) in places(plan) {
            line(&vcpus, &place);
        }
        line("Parked", &view.parked);
        line("Emulator", &view.emulator);
        line("I/O threads", &view.iothreads);
        line("Nodes", &list_of(&view.nodes));
        for (title, value) in [("Isolation", &view.isolation), ("Interrupts", &view.irqs)] {
            value.iter().for_each(|value| line(title, value));
        }
        if let Some(guest) = plan.guest {
            line("True topology", &guest.to_string());
        }
        if let Some(told) = told_otherwise(context, lease, plan) {
            line("Note", &told);
        }
        for (number, cell) in plan.cells.iter().enumerate() {
            line(&format!("NUMA cell {number}"), &cell.to_string());
        }
    }
    if let Some(qemu) = lease.qemu {
        line("QEMU pid", &qemu.pid.to_string());
    }
    Ok(out)
}

/// How the guest's view in the live XML differs from the lease.
fn told_otherwise(context: &Context, lease: &Lease, plan: &Plan) -> Option<String> {
    let status = context.root.read_if_exists(&qemu::file_of(qemu::RUN_DIR, &lease.name, ".xml")?).ok()??;
    let live = qemu::live_domain(&status)?;
    shape::difference(&Domain::parse(&live).ok()?, plan)
}

/// Where each vCPU is, in words; those on the shared CPUs that follow each other are together.
pub(super) fn places(plan: &Plan) -> Vec<(String, String)> {
    let runs = plan.vcpus.chunk_by(|one, next| one.is_none() && next.is_none());
    let mut first = 0;
    let places = runs.map(|run| {
        let (from, to) = (first, first + run.len() - 1);
        first += run.len();
        match run.first().copied().flatten() {
            Some(cpu) => (format!("vCPU {from}"), format!("CPU {cpu}")),
            None if from == to => (format!("vCPU {from}"), format!("shared CPUs {}", plan.shared)),
            None => (format!("vCPUs {from}-{to}"), format!("shared CPUs {}", plan.shared)),
        }
    });
    places.collect()
}

pub(super) fn kind(lease: &Lease) -> &'static str {
    match lease.holds {
        Holds::Dedicated(_) => "dedicated",
        Holds::Static(_) => "static",
        Holds::Degraded { .. } => "degraded",
    }
}

pub(super) fn state(lease: &Lease) -> &'static str {
    match lease.state {
        State::Provisional => "provisional",
        State::Reserved => "reserved",
        State::Running => "running",
    }
}

/// A time in the unit that has a number one can read.
pub(super) fn duration(seconds: u64) -> String {
    let units = [(24 * 3600, "day"), (3600, "hour"), (60, "minute")];
    let unit = units.into_iter().find(|(size, _)| seconds >= 2 * size);
    unit.map_or_else(|| counted(seconds, "second"), |(size, name)| counted(seconds / size, name))
}

fn list_of(numbers: &[u16]) -> String {
    numbers.iter().map(|&number| CpuId(number)).collect::<CpuSet>().to_string()
}

fn dash(text: String) -> String {
    if text.is_empty() { "-".to_owned() } else { text }
}
