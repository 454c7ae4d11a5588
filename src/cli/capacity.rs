//! `virt-pin capacity`: how many CPUs and whole cores are free, leased and withheld.

use std::collections::BTreeMap;
use std::num::NonZeroU16;

use serde::Serialize;

use super::table::{columns, wrapped};
use super::{Context, to_json};
use crate::alloc::Supply;
use crate::alloc::demand::Reserve;
use crate::alloc::policy::Policy;
use crate::alloc::pools::{Pools, how_many_fit, pools, whole_cores};
use crate::alloc::request::Request;
use crate::cpuset::{CpuSet, NodeId};
use crate::decision::Situation;
use crate::definitions;
use crate::error::{Code, Error, Result, counted, printable};
use crate::host::{LlcId, Topology};
use crate::lock::leases::Lease;

#[derive(Serialize)]
struct View {
    #[serde(flatten)]
    lists: BTreeMap<&'static str, String>,
    counts: Counts,
    nodes: Vec<NodeView>,
    llcs: Vec<LlcView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fits: Option<FitView>,
}

/// By use.
type Counts = BTreeMap<&'static str, Count>;

#[derive(Clone, Copy, Serialize)]
struct Count {
    cpus: usize,
    /// Whole ones, all of whose threads are counted.
    cores: usize,
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
    counts: Counts,
}

#[derive(Serialize)]
struct LlcView {
    llc: Option<u16>,
    node: Option<u16>,
    counts: Counts,
}

/// What is asked for beside the numbers.
pub(super) struct Options<'a> {
    /// Also how many more VMs of this shape would fit,
    pub(super) shape: Option<&'a str>,
    /// with these attributes.
    pub(super) policy: &'a [String],
    /// A table of last-level caches even where each node has one.
    pub(super) llc: bool,
}

pub(super) fn capacity(context: &Context, options: &Options<'_>) -> Result<String> {
    let request =
        options.shape.map(|shape| request(shape, options.policy).map(|request| (shape, request))).transpose()?;
    let settings = context.settings()?;
    let leases = context.leases()?;
    let situation = Situation::read(&context.root, &settings, None)?;
    // Who asks how many fit is told of what a start would find.
    let strict = request.is_some() && settings.autostart_reserve == Reserve::Strict;
    let definitions = if strict { definitions::read(&context.root, &settings).dedicated } else { Vec::new() };
    let situation = situation.among(definitions, None).beside(&leases, None);
    let pools = pools(&situation.supply(), leases.iter().flat_map(Lease::plans));
    let taken = situation.taken.union(&situation.reserved());
    let supply = Supply { taken: &taken, ..situation.supply() };
    let fits =
        request.map(|(shape, request)| FitView { shape: shape.to_owned(), more: how_many_fit(&supply, &request) });
    let uses = uses(&pools);
    if context.json {
        let mut lists: BTreeMap<_, _> = uses.iter().map(|(name, cpus)| (*name, cpus.to_string())).collect();
        lists.insert("pinnable", settings.pinnable.to_string());
        lists.insert("out_of_reach", situation.out_of_reach.to_string());
        return to_json(&view(&situation.topology, &pools, lists, fits));
    }
    let mut out = by_use(&situation, &settings.pinnable, &pools);
    out.push('\n');
    out.push_str(&tables(&situation.topology, &pools, options.llc));
    if let Some(fits) = fits {
        let vms = counted(fits.more as u64, "more VM");
        let said = format!("{vms} of {} (cores x threads on each) would fit now.", printable(&fits.shape));
        out += "\n";
        out += &wrapped("", &said);
    }
    Ok(out)
}

/// What the CPUs are for; a dash is before what is part of the one above.
fn by_use(situation: &Situation, pinnable: &CpuSet, pools: &Pools) -> String {
    let row = |title: &str, meaning: &str, cpus: &CpuSet| {
        let Count { cpus: count, cores } = count(&situation.topology, cpus);
        let list = if cpus.is_empty() { "-".to_owned() } else { cpus.to_string() };
        vec![title.to_owned(), count.to_string(), cores.to_string(), meaning.to_owned(), list]
    };
    // These are named even where there are none.
    let rows = [
        (true, "Pinnable", "may be handed out", pinnable),
        (true, "Housekeeping", "the host, emulators", &pools.housekeeping),
        (true, "Shared", "VMs without a lease", &pools.shared),
        (true, "Leased", "held by VMs", &pools.leased),
        (false, "- dedicated", "their vCPUs", &pools.dedicated),
        (false, "- parked", "siblings nobody uses", &pools.parked),
        (false, "- extra", "emulator, I/O threads", &pools.extra),
        (true, "Free", "pinnable, not held", &pools.free),
        (false, "- withheld", "for cores=\"thread\"", &pools.withheld),
        (false, "Isolated", "by the kernel", &pools.isolated),
        (false, "Missing", "offline or absent", &pools.missing),
        (false, "Out of reach", "not the VMs' cgroup's", &situation.out_of_reach),
    ];
    let rows = rows.into_iter().filter(|(always, _, _, cpus)| *always || !cpus.is_empty());
    let titles = ["Pool", "CPUs", "Cores", "What for", "Which"];
    columns(&titles, rows.map(|(_, title, meaning, cpus)| row(title, meaning, cpus)).collect())
}

fn uses(pools: &Pools) -> [(&'static str, &CpuSet); 11] {
    [
        ("pinnable", &pools.pinnable),
        ("housekeeping", &pools.housekeeping),
        ("isolated", &pools.isolated),
        ("leased", &pools.leased),
        ("dedicated", &pools.dedicated),
        ("parked", &pools.parked),
        ("extra", &pools.extra),
        ("shared", &pools.shared),
        ("free", &pools.free),
        ("withheld", &pools.withheld),
        ("missing", &pools.missing),
    ]
}

fn count(topology: &Topology, cpus: &CpuSet) -> Count {
    Count { cpus: cpus.len(), cores: whole_cores(topology, cpus) }
}

/// By node; and by last-level cache, where that says more.
fn tables(topology: &Topology, pools: &Pools, llc: bool) -> String {
    let row = |ids: &[Option<u16>], cpus: &CpuSet, further: &[&CpuSet]| {
        let here = |pool: &CpuSet| count(topology, &pool.intersection(cpus));
        let (free, pinnable) = (here(&pools.free), here(&pools.pinnable));
        let mut cells: Vec<String> =
            ids.iter().map(|id| id.map_or_else(|| "-".to_owned(), |id| id.to_string())).collect();
        cells.push(format!("{} of {}", free.cores, pinnable.cores));
        cells.push(format!("{} of {}", free.cpus, pinnable.cpus));
        let rest = [&pools.dedicated, &pools.parked, &pools.shared, &pools.withheld];
        cells.extend(rest.iter().chain(further).map(|pool| here(pool).cpus.to_string()));
        cells
    };
    let titles = ["Cores free", "CPUs free", "vCPUs", "Parked", "Shared", "Withheld"];
    let rows = pools.nodes.iter().map(|(node, cpus)| row(&[node.map(|node| node.0)], cpus, &[&pools.housekeeping]));
    let mut out = columns(&[&["Node"][..], &titles, &["Host"]].concat(), rows.collect());
    if llc || pools.llcs.len() > pools.nodes.len() {
        let ids = |(node, llc): &(Option<NodeId>, Option<LlcId>)| [llc.map(|llc| llc.0), node.map(|node| node.0)];
        let rows = pools.llcs.iter().map(|(place, cpus)| row(&ids(place), cpus, &[]));
        out.push('\n');
        out.push_str(&columns(&[&["LLC", "Node"][..], &titles].concat(), rows.collect()));
    }
    out
}

/// A VM of so many whole cores with so many vCPUs on each: `4x2`.
pub(super) fn request(shape: &str, words: &[String]) -> Result<Request> {
    let counts = shape.split_once('x').and_then(|(cores, threads)| {
        let (cores, threads): (u16, NonZeroU16) = (cores.parse().ok()?, threads.parse().ok()?);
        Some((cores.checked_mul(threads.get()).filter(|&vcpus| vcpus > 0)?, threads))
    });
    let (vcpus, threads) = counts.ok_or_else(|| {
        Error::new(Code::Usage, format!("--for \"{shape}\": not CORESxTHREADS, such as 4x2 for 8 vCPUs on 4 cores"))
            .with_hint("two numbers with an x between them: cores, and vCPUs on each")
    })?;
    let mut attributes = vec![("policy", "dedicated")];
    for word in words.iter().flat_map(|words| words.split_whitespace()) {
        attributes.push(word.split_once('=').ok_or_else(|| {
            Error::new(Code::Usage, format!("--policy \"{word}\": not NAME=VALUE, such as numa=single"))
                .with_hint("`man virt-pin-policy` has the attributes and their values")
        })?);
    }
    // Unless they are named, only the vCPUs' cores are asked about.
    for others in ["emulator", "iothreads"] {
        if !attributes.iter().any(|(name, _)| *name == others) {
            attributes.push((others, "share"));
        }
    }
    let threads = threads.to_string();
    attributes.push(("threads-per-core", &threads));
    let policy = Policy::from_attributes(attributes)?;
    Ok(Request::new(vcpus, policy))
}

fn view(topology: &Topology, pools: &Pools, lists: BTreeMap<&'static str, String>, fits: Option<FitView>) -> View {
    let counts = |within: &CpuSet| -> Counts {
        uses(pools).into_iter().map(|(name, cpus)| (name, count(topology, &cpus.intersection(within)))).collect()
    };
    let nodes = pools.nodes.iter().map(|(node, cpus)| {
        let here = |pool: &CpuSet| count(topology, &pool.intersection(cpus));
        let (pinnable, free) = (here(&pools.pinnable), here(&pools.free));
        NodeView {
            node: node.map(|node| node.0),
            pinnable_cores: pinnable.cores,
            free_cores: free.cores,
            pinnable_threads: pinnable.cpus,
            free_threads: free.cpus,
            counts: counts(cpus),
        }
    });
    let llcs = pools.llcs.iter().map(|((node, llc), cpus)| LlcView {
        llc: llc.map(|llc| llc.0),
        node: node.map(|node| node.0),
        counts: counts(cpus),
    });
    let all = uses(pools).into_iter().map(|(name, cpus)| (name, count(topology, cpus)));
    View { lists, counts: all.collect(), nodes: nodes.collect(), llcs: llcs.collect(), fits }
}
