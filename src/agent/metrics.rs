//! What the agent counts, as a file in Prometheus' text format for the textfile collector of node_exporter.
//!
//! Counters count from the agent's start. The file is replaced as a whole, and only when something in it has changed; what is
//! in it is found out at most once a second, however often the agent is woken.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::drift::Drift;
use super::errands::Done;
use super::voice::Voice;
use crate::alloc::pools::pools;
use crate::config::settings::Settings;
use crate::cpuset::CpuSet;
use crate::decision::Situation;
use crate::error::{Code, Error, Result};
use crate::host::root::Root;
use crate::lock;
use crate::lock::leases::{Holds, Lease, Leases, State};
use crate::report::Report;

/// Upper ends of the buckets of the hook's durations, in milliseconds.
const BUCKETS_MS: [u32; 9] = [1, 2, 5, 10, 25, 50, 100, 500, 2000];

/// The counts, and where they go.
#[derive(Debug)]
pub(super) struct Metrics {
    file: Option<PathBuf>,
    done: Arc<Done>,
    refusals: BTreeMap<String, u64>,
    failures: BTreeMap<(String, String), u64>,
    durations: BTreeMap<String, Durations>,
    /// Leases ended because their VMs were gone.
    pub(super) reclaimed: u64,
    /// Leases that were put right after CPUs had come or gone.
    pub(super) repaired: u64,
    written: String,
    /// What was said of a file that cannot be written.
    said: String,
    /// When it was last found out what is to be written, and whether something may have changed since.
    last: Option<Instant>,
    stale: bool,
}

/// Collectors ask every few seconds.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct Durations {
    buckets: [u64; BUCKETS_MS.len()],
    count: u64,
    sum: Duration,
}

impl Metrics {
    pub(super) fn new(file: Option<&Path>, done: Arc<Done>) -> Metrics {
        Metrics {
            file: file.map(Path::to_owned),
            done,
            refusals: BTreeMap::new(),
            failures: BTreeMap::new(),
            durations: BTreeMap::new(),
            reclaimed: 0,
            repaired: 0,
            written: String::new(),
            said: String::new(),
            last: None,
            stale: false,
        }
    }

    /// Counts what the hook has said.
    pub(super) fn count(&mut self, report: &Report) {
        if let Some(code) = &report.code {
            if report.refused {
                *self.refusals.entry(code.clone()).or_default() += 1;
            } else {
                *self.failures.entry((report.operation.clone(), code.clone())).or_default() += 1;
            }
        }
        let durations = self.durations.entry(report.operation.clone()).or_default();
        durations.count += 1;
        durations.sum += report.took;
        for (bucket, end) in durations.buckets.iter_mut().zip(BUCKETS_MS) {
            *bucket += u64::from(report.took <= Duration::from_millis(end.into()));
        }
    }

    /// When to write what could not be written yet; `None` if nothing has to be.
    pub(super) fn patience(&self) -> Option<Duration> {
        let last = self.last.filter(|_| self.stale)?;
        Some(PAUSE.saturating_sub(last.elapsed()))
    }

    /// Writes the file if there is to be one, now or when it is time to.
    pub(super) fn write(&mut self, root: &Root, drift: &Drift, voice: &Voice) {
        self.stale = self.file.is_some();
        if self.last.is_none_or(|last| last.elapsed() >= PAUSE) {
            self.write_now(root, drift, voice);
        }
    }

    pub(super) fn write_now(&mut self, root: &Root, drift: &Drift, voice: &Voice) {
        let Some(file) = self.file.clone() else { return };
        (self.last, self.stale) = (Some(Instant::now()), false);
        let written = self.render(root, drift).and_then(|text| {
            if text != self.written {
                replace(&file, &text)?;
                self.written = text;
            }
            Ok(())
        });
        match written {
            Ok(()) => self.said.clear(),
            Err(error) if self.said == error.message => {}
            Err(error) => {
                voice.fail(&error);
                self.said = error.message;
            }
        }
    }

    fn render(&self, root: &Root, drift: &Drift) -> Result<String> {
        let leases = lock::read(root)?;
        let situation = Situation::read(root, &Settings::read(root)?, None)?.beside(&leases, None);
        let mut page = Page::default();
        page.family("virt_pin_build_info", "gauge", "The agent's version.");
        page.sample("virt_pin_build_info", &[("version", env!("CARGO_PKG_VERSION"))], 1);
        let found = pools(&situation.supply(), leases.iter().filter_map(Lease::plan));
        page.family("virt_pin_cpus", "gauge", "Online CPUs of each node, by pool; one may be in several.");
        for (node, online) in &found.nodes {
            let node = node.map_or_else(|| "none".to_owned(), |node| node.0.to_string());
            for (pool, cpus) in [
                ("pinnable", &found.pinnable),
                ("free", &found.free),
                ("dedicated", &found.dedicated),
                ("parked", &found.parked),
                ("extra", &found.extra),
                ("shared", &situation.shared_pool(&leases)),
                ("withheld", &found.withheld),
                ("housekeeping", &found.housekeeping),
            ] {
                let count = CpuSet::intersection(cpus, online).len() as u64;
                page.sample("virt_pin_cpus", &[("node", &node), ("pool", pool)], count);
            }
        }
        page.family("virt_pin_cpus_missing", "gauge", "Pinnable by configuration, but offline or absent.");
        page.sample("virt_pin_cpus_missing", &[], found.missing.len() as u64);
        leases_by_kind(&leases, &mut page);
        self.counters(drift, &mut page);
        self.histogram(&mut page);
        Ok(page.0)
    }

    fn counters(&self, drift: &Drift, page: &mut Page) {
        let name = "virt_pin_refusals_total";
        page.family(name, "counter", "Starts, migrations and restores that the hook refused, by code.");
        for (code, count) in &self.refusals {
            page.sample(name, &[("code", code)], *count);
        }
        let name = "virt_pin_hook_failures_total";
        page.family(name, "counter", "Failures of the hook that libvirt was not told of, by event and code.");
        for ((operation, code), count) in &self.failures {
            page.sample(name, &[("operation", operation), ("code", code)], *count);
        }
        let done = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
        for (name, kind, help, value) in [
            ("virt_pin_drift_total", "counter", "Times threads were found astray.", drift.found),
            ("virt_pin_drift_repairs_total", "counter", "Times threads were moved back.", drift.repaired),
            ("virt_pin_drifted_domains", "gauge", "VMs with threads astray now.", drift.astray() as u64),
            (
                "virt_pin_leases_repaired_total",
                "counter",
                "Leases put right after CPUs had come or gone.",
                self.repaired,
            ),
            ("virt_pin_leases_reclaimed_total", "counter", "Leases ended because their VM was gone.", self.reclaimed),
            (
                "virt_pin_live_xml_updates_total",
                "counter",
                "Live XML brought in line with a lease.",
                done(&self.done.mirrored),
            ),
            ("virt_pin_definitions_rewritten_total", "counter", "Definitions changed.", done(&self.done.rewritten)),
            ("virt_pin_definitions_left_alone", "gauge", "Definitions given up.", done(&self.done.given_up)),
        ] {
            page.family(name, kind, help);
            page.sample(name, &[], value);
        }
    }

    fn histogram(&self, page: &mut Page) {
        let name = "virt_pin_hook_duration_seconds";
        page.family(name, "histogram", "How long the hook took, by event.");
        let (buckets, sum, count) = (format!("{name}_bucket"), format!("{name}_sum"), format!("{name}_count"));
        for (operation, durations) in &self.durations {
            for (end, bucket) in BUCKETS_MS.iter().zip(durations.buckets) {
                let end = (f64::from(*end) / 1000.0).to_string();
                page.sample(&buckets, &[("operation", operation), ("le", &end)], bucket);
            }
            page.sample(&buckets, &[("operation", operation), ("le", "+Inf")], durations.count);
            page.sample(&sum, &[("operation", operation)], durations.sum.as_secs_f64());
            page.sample(&count, &[("operation", operation)], durations.count);
        }
    }
}

fn leases_by_kind(leases: &Leases, page: &mut Page) {
    let kind = |lease: &Lease| match lease.holds {
        Holds::Dedicated(_) => "dedicated",
        Holds::Static(_) => "static",
        Holds::Degraded { .. } => "degraded",
    };
    let states = [(State::Provisional, "provisional"), (State::Reserved, "reserved"), (State::Running, "running")];
    page.family("virt_pin_leases", "gauge", "Leases by kind and state.");
    for of in ["dedicated", "static", "degraded"] {
        for (state, word) in states {
            let count = leases.iter().filter(|lease| kind(lease) == of && lease.state == state).count();
            page.sample("virt_pin_leases", &[("kind", of), ("state", word)], count as u64);
        }
    }
}

/// A page in the text format.
#[derive(Default)]
struct Page(String);

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    /// No label of ours needs escaping: they are words of ours, numbers and codes.
    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        let labels: Vec<String> = labels.iter().map(|(name, value)| format!("{name}=\"{value}\"")).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(self.0, "{name}{labels} {value}");
    }
}

/// Replaces the file, readable for everybody. The collector reads `*.prom` only, so a half-written one is never read.
fn replace(file: &Path, text: &str) -> Result<()> {
    let failed = |verb: &str, error| Error::io(Code::HostIo, verb, file, error);
    let temporary = file.with_extension("prom.new");
    let _ = fs::remove_file(&temporary);
    let open = fs::OpenOptions::new().write(true).create_new(true).mode(0o644).open(&temporary);
    let mut open = open.map_err(|error| failed("write beside", error))?;
    // Whatever the umask says.
    let readable = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    open.set_permissions(readable).map_err(|error| failed("write beside", error))?;
    open.write_all(text.as_bytes()).map_err(|error| failed("write beside", error))?;
    fs::rename(&temporary, file).map_err(|error| failed("replace", error))
}
