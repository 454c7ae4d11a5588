//! `virt-pin capacity`: how many CPUs and whole cores are free, leased and withheld.

use std::num::NonZeroU16;

use serde::Serialize;

use super::table::{columns, wrapped};
use super::{Context, to_json};
use crate::alloc::policy::{Kind, OtherThreads, Policy, ThreadsPerCore};
use crate::alloc::pools::{Pools, how_many_fit, pools};
use crate::alloc::request::Request;
use crate::cpuset::CpuSet;
use crate::decision::Situation;
use crate::error::{Code, Error, Result, counted};

#[derive(Serialize)]
struct View {
    pinnable: String,
    housekeeping: String,
    isolated: String,
    leased: String,
    free: String,
    withheld: String,
    missing: String,
    out_of_reach: String,
    nodes: Vec<NodeView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fits: Option<FitView>,
}

/// How many more VMs of a shape would fit.
#[derive(Serialize)]
struct FitView {
    shape: String,
    more: usize,
}

#[derive(Serialize)]
struct NodeView {
    node: Option<u16>,
    pinnable_cores: usize,
    free_cores: usize,
    pinnable_threads: usize,
    free_threads: usize,
}

pub(super) fn capacity(context: &Context, shape: Option<&str>) -> Result<String> {
    let request = shape.map(|shape| request(shape).map(|request| (shape, request))).transpose()?;
    let settings = context.settings()?;
    let situation = Situation::read(&context.root, &settings, None)?.beside(&context.leases()?, None);
    let pools = pools(&situation.supply());
    let fits = request
        .map(|(shape, request)| FitView { shape: shape.to_owned(), more: how_many_fit(&situation.supply(), &request) });
    if context.json {
        return to_json(&view(&pools, &settings.pinnable, &situation.out_of_reach, fits));
    }
    let mut out = String::new();
    let mut line = |title: &str, cpus: &CpuSet, meaning: &str| {
        let list = if cpus.is_empty() { "none".to_owned() } else { cpus.to_string() };
        out.push_str(&wrapped(&format!(" {title:<13} "), &format!("{list}   {meaning}")));
    };
    line("Pinnable", &settings.pinnable, "(may be handed out)");
    line("Housekeeping", &pools.housekeeping, "(the host, and emulator threads)");
    line("Leased", &pools.leased, "");
    line("Free", &pools.free, "");
    if !pools.withheld.is_empty() {
        line("Withheld", &pools.withheld, "(free, but no whole core: for cores=\"thread\" only)");
    }
    if !pools.isolated.is_empty() {
        line("Isolated", &pools.isolated, "(by the kernel, not pinnable)");
    }
    if !pools.missing.is_empty() {
        line("Missing", &pools.missing, "(pinnable, but offline or absent)");
    }
    if !situation.out_of_reach.is_empty() {
        line("Out of reach", &situation.out_of_reach, "(pinnable, but not for the VMs' cgroup)");
    }
    let rows = pools.nodes.iter().map(|node| {
        vec![
            node.node.map_or_else(|| "-".to_owned(), |node| node.to_string()),
            format!("{} of {}", node.free_cores, node.pinnable_cores),
            format!("{} of {}", node.free_threads, node.pinnable_threads),
        ]
    });
    let rows: Vec<_> = rows.collect();
    if !rows.is_empty() {
        out.push('\n');
        out.push_str(&columns(&["Node", "Whole cores free", "Threads free"], rows));
    }
    if let Some(fits) = fits {
        let vms = counted(fits.more as u64, "more VM");
        out.push_str(&format!("\n{vms} of {} (cores x threads on each) would fit now.\n", fits.shape));
    }
    Ok(out)
}

/// A VM of so many whole cores with so many vCPUs on each: `4x2`.
fn request(shape: &str) -> Result<Request> {
    let counts = shape.split_once('x').and_then(|(cores, threads)| {
        let (cores, threads): (u16, NonZeroU16) = (cores.parse().ok()?, threads.parse().ok()?);
        Some((cores.checked_mul(threads.get()).filter(|&vcpus| vcpus > 0)?, threads))
    });
    let (vcpus, threads) = counts.ok_or_else(|| {
        Error::new(Code::Usage, format!("--for \"{shape}\": not CORESxTHREADS, such as 4x2 for 8 vCPUs on 4 cores"))
    })?;
    let policy = Policy {
        kind: Kind::Dedicated,
        threads_per_core: ThreadsPerCore::Exactly(threads),
        // Only the vCPUs' cores are asked about.
        emulator: OtherThreads::Share,
        iothreads: OtherThreads::Share,
        ..Policy::default()
    };
    Ok(Request::new(vcpus, policy))
}

fn view(pools: &Pools, pinnable: &CpuSet, out_of_reach: &CpuSet, fits: Option<FitView>) -> View {
    let nodes = pools.nodes.iter().map(|node| NodeView {
        node: node.node.map(|node| node.0),
        pinnable_cores: node.pinnable_cores,
        free_cores: node.free_cores,
        pinnable_threads: node.pinnable_threads,
        free_threads: node.free_threads,
    });
    View {
        pinnable: pinnable.to_string(),
        housekeeping: pools.housekeeping.to_string(),
        isolated: pools.isolated.to_string(),
        leased: pools.leased.to_string(),
        free: pools.free.to_string(),
        withheld: pools.withheld.to_string(),
        missing: pools.missing.to_string(),
        out_of_reach: out_of_reach.to_string(),
        nodes: nodes.collect(),
        fits,
    }
}
