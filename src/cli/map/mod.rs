//! `virt-pin map`: the host as a picture, each hardware thread with the lease that holds it.
//!
//! Here is the edge: reading the host, whether the terminal gets colours, the file. What is drawn ([`model`]) and how
//! ([`text`], [`svg`]) are pure. Nothing that is there is ever overwritten.

mod model;
mod role;
mod svg;
mod text;

use std::io::IsTerminal;
use std::path::Path;

use serde::Serialize;

use super::{Context, to_json, write_new};
use crate::alloc::pools::pools;
use crate::decision::Situation;
use crate::error::Result;
use crate::lock::leases::Lease;
use model::Map;
use text::Style;

#[derive(Serialize)]
struct View {
    cpus: Vec<CpuView>,
}

/// `lease` is the UUID of the domain that holds the CPU.
#[derive(Serialize)]
struct CpuView {
    cpu: u16,
    r#use: &'static str,
    lease: Option<String>,
}

pub(super) fn map(context: &Context, file: Option<&Path>) -> Result<String> {
    let leases = context.leases()?;
    let situation = Situation::read(&context.root, &context.settings()?, None)?.beside(&leases, None);
    let map =
        Map::new(&situation.topology, &leases, &pools(&situation.supply(), leases.iter().filter_map(Lease::plan)));
    if let Some(file) = file {
        write_new(file, &svg::render(&map))?;
    }
    match file {
        _ if context.json => to_json(&view(&map)),
        Some(file) => Ok(format!("The map is drawn in {}\n", file.display())),
        None => Ok(text::render(&map, style())),
    }
}

/// Colours for a terminal, unless it has none or its user wants none (no-color.org).
fn style() -> Style {
    let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let able = std::env::var_os("TERM").is_some_and(|term| term != "dumb") && std::io::stdout().is_terminal();
    if wanted && able { Style::Colour } else { Style::Plain }
}

fn view(map: &Map<'_>) -> View {
    let mut cpus: Vec<_> = map
        .cells()
        .map(|cell| CpuView {
            cpu: cell.cpu.0,
            r#use: cell.role.name(),
            lease: cell.lease.map(|(lease, _)| lease.uuid.to_string()),
        })
        .collect();
    cpus.sort_by_key(|view| view.cpu);
    View { cpus }
}
