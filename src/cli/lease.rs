//! `virt-pin list` and `virt-pin lease`: who holds which CPUs.

use serde::Serialize;

use super::table::columns;
use super::{Context, subject, to_json};
use crate::cpuset::{CpuId, CpuSet};
use crate::error::{Result, counted, printable};
use crate::lock;
use crate::lock::leases::{Holds, Lease, State};

/// A lease in JSON. Sets are kernel lists; `vcpus[i]` is the CPU of vCPU `i`.
#[derive(Serialize)]
struct View<'l> {
    name: &'l str,
    uuid: String,
    state: State,
    kind: &'static str,
    cpus: String,
    vcpus: Vec<Option<u16>>,
    #[serde(skip_serializing_if = "String::is_empty")]
    shared: String,
    parked: String,
    emulator: String,
    iothreads: String,
    nodes: String,
    pid: Option<u32>,
}

impl<'l> From<&'l Lease> for View<'l> {
    fn from(lease: &'l Lease) -> View<'l> {
        let plan = lease.plan();
        let set = |of: &dyn Fn(&crate::alloc::plan::Plan) -> CpuSet| {
            plan.map(|plan| of(plan).to_string()).unwrap_or_default()
        };
        View {
            name: &lease.name,
            uuid: lease.uuid.to_string(),
            state: lease.state,
            kind: kind(lease),
            cpus: lease.cpus().to_string(),
            vcpus: plan.map(|plan| plan.vcpus.iter().map(|cpu| cpu.map(|cpu| cpu.0)).collect()).unwrap_or_default(),
            shared: set(&|plan| plan.shared.clone()),
            parked: set(&|plan| plan.parked.clone()),
            emulator: set(&|plan| plan.emulator.clone()),
            iothreads: set(&|plan| plan.iothreads.clone()),
            nodes: set(&|plan| plan.nodes.iter().map(|node| CpuId(node.0)).collect()),
            pid: lease.qemu.map(|qemu| qemu.pid),
        }
    }
}

#[derive(Serialize)]
struct ListView<'l> {
    leases: Vec<View<'l>>,
}

pub(super) fn list(context: &Context) -> Result<String> {
    let leases = lock::read(&context.root)?;
    if context.json {
        return to_json(&ListView { leases: leases.iter().map(View::from).collect() });
    }
    let mut rows: Vec<_> = leases.iter().map(row).collect();
    rows.sort();
    Ok(columns(&["Name", "State", "Kind", "vCPUs", "Node", "Parked", "Emulator", "CPUs"], rows))
}

fn row(lease: &Lease) -> Vec<String> {
    let view = View::from(lease);
    let vcpus = if view.vcpus.is_empty() { String::new() } else { view.vcpus.len().to_string() };
    let name = printable(&lease.name);
    vec![
        name,
        state(lease).to_owned(),
        view.kind.to_owned(),
        dash(vcpus),
        dash(view.nodes),
        dash(view.parked),
        dash(view.emulator),
        dash(view.cpus),
    ]
}

pub(super) fn lease(context: &Context, domain: &str) -> Result<String> {
    let leases = lock::read(&context.root)?;
    let lease = subject::lease(&leases, domain)?;
    if context.json {
        return to_json(&View::from(lease));
    }
    let view = View::from(lease);
    let mut out = String::new();
    let mut line =
        |title: &str, value: &str| out.push_str(&format!("{:<15} {}\n", format!("{title}:"), dash(value.to_owned())));
    line("Name", &printable(&lease.name));
    line("UUID", &view.uuid);
    line("State", state(lease));
    line("Kind", view.kind);
    line("CPUs held", &view.cpus);
    if let Some(plan) = lease.plan() {
        for (vcpu, own) in plan.vcpus.iter().enumerate() {
            let place = own.map_or_else(|| format!("shared CPUs {}", plan.shared), |cpu| format!("CPU {cpu}"));
            line(&format!("vCPU {vcpu}"), &place);
        }
        line("Parked", &view.parked);
        line("Emulator", &view.emulator);
        line("I/O threads", &view.iothreads);
        line("Nodes", &view.nodes);
        if let Some(guest) = plan.guest {
            let (cores, threads) = (counted(guest.cores, "core"), counted(guest.threads, "thread"));
            line("True topology", &format!("{cores} of {threads}"));
        }
    }
    if let Some(qemu) = lease.qemu {
        line("QEMU pid", &qemu.pid.to_string());
    }
    Ok(out)
}

fn kind(lease: &Lease) -> &'static str {
    match lease.holds {
        Holds::Dedicated(_) => "dedicated",
        Holds::Static(_) => "static",
    }
}

pub(super) fn state(lease: &Lease) -> &'static str {
    match lease.state {
        State::Provisional => "provisional",
        State::Reserved => "reserved",
        State::Running => "running",
    }
}

fn dash(text: String) -> String {
    if text.is_empty() { "-".to_owned() } else { text }
}
