//! `virt-pin map`: the host as a picture, each hardware thread with the lease that holds it.
//!
//! Here is the edge: reading the host, the VMs that are only planned, the file. What is drawn ([`model`]) and how
//! ([`text`], [`svg`]) are pure. Nothing that is there is ever overwritten.

mod model;
mod role;
mod svg;
mod text;

use std::path::Path;

use serde::Serialize;

use super::files::write_new;
use super::style::Style;
use super::{Context, start, subject, to_json};
use crate::alloc::pools::pools;
use crate::alloc::simulation::Simulation;
use crate::decision::Situation;
use crate::error::Result;
use crate::lock::leases::{Holds, Lease, Leases, State};
use crate::uuid::DomainUuid;
use model::Map;

#[derive(Serialize)]
struct View<'a> {
    cpus: Vec<CpuView>,
    /// Those of `--for`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    planned: Vec<PlannedView<'a>>,
}

/// `lease` is the UUID of the domain that holds the CPU.
#[derive(Serialize)]
struct CpuView {
    cpu: u16,
    r#use: &'static str,
    lease: Option<String>,
}

/// A domain that is only planned. The UUID of a file that has none is made up.
#[derive(Serialize)]
struct PlannedView<'a> {
    name: &'a str,
    lease: String,
}

/// What is asked for beside the map.
pub(super) struct Options<'a> {
    /// A picture, in this file.
    pub(super) svg: Option<&'a Path>,
    /// VMs that do not run, each where a start would put it beside those before it.
    pub(super) planned: &'a [String],
}

pub(super) fn map(context: &Context, options: &Options<'_>) -> Result<String> {
    let mut leases = context.leases()?;
    let mut planned = Vec::new();
    for subject in options.planned {
        planned.extend(plan(context, subject, &mut leases)?);
    }
    let situation = Situation::read(&context.root, &context.settings()?, None)?.beside(&leases, None);
    let pools = pools(&situation.supply(), leases.iter().filter_map(Lease::plan));
    let map = Map::new(&situation.topology, &leases, &planned, &pools);
    if let Some(file) = options.svg {
        write_new(file, &svg::render(&map))?;
    }
    match options.svg {
        _ if context.json => to_json(&view(&map, &leases, &planned)),
        Some(file) => Ok(format!("The map is drawn in {}\n", file.display())),
        None => Ok(text::render(&map, Style::of_stdout())),
    }
}

/// The map of a simulated host, with the VMs that run there.
pub(super) fn simulated(simulation: &Simulation) -> String {
    let mut leases = Leases::default();
    for (name, plan) in simulation.running() {
        put(&mut leases, None, name, Holds::Dedicated(plan.clone()));
    }
    let pools = simulation.pools();
    text::render(&Map::new(simulation.host(), &leases, &[], &pools), Style::of_stdout())
}

/// Adds what the start of this domain would give it. Nothing, if it holds that already.
fn plan(context: &Context, subject: &str, leases: &mut Leases) -> Result<Option<DomainUuid>> {
    let (identity, holds) = start::holds(context, &subject::xml(&context.root, subject)?, leases)?;
    // A file without a UUID is another VM each time.
    let held = identity.uuid.and_then(|uuid| leases.get(uuid)).is_some_and(|lease| !lease.cpus().is_empty());
    Ok(if held { None } else { put(leases, identity.uuid, &identity.name, holds) })
}

/// Adds a lease that nobody has been granted.
fn put(leases: &mut Leases, uuid: Option<DomainUuid>, name: &str, holds: Holds) -> Option<DomainUuid> {
    // Those at the end, which nobody is given.
    let made_up = || {
        let mut candidates = (0..).map(|number| DomainUuid::parse(&format!("{:032x}", u128::MAX - number)));
        candidates.find_map(|uuid| uuid.filter(|uuid| leases.get(*uuid).is_none()))
    };
    let uuid = uuid.or_else(made_up)?;
    leases.put(Lease {
        uuid,
        name: name.to_owned(),
        state: State::Running,
        holds,
        request: None,
        domain_id: None,
        cgroup: None,
        daemon: None,
        qemu: None,
        moving: None,
        since: 0,
    });
    Some(uuid)
}

fn view<'a>(map: &Map<'_>, leases: &'a Leases, planned: &[DomainUuid]) -> View<'a> {
    let mut cpus: Vec<_> = map
        .cells()
        .map(|cell| CpuView {
            cpu: cell.cpu.0,
            r#use: cell.role.name(),
            lease: cell.lease.map(|(lease, _)| lease.uuid.to_string()),
        })
        .collect();
    cpus.sort_by_key(|view| view.cpu);
    let planned = planned.iter().filter_map(|uuid| leases.get(*uuid));
    let planned = planned.map(|lease| PlannedView { name: &lease.name, lease: lease.uuid.to_string() });
    View { cpus, planned: planned.collect() }
}
