//! Reads a machine's [`Topology`] from `/sys/devices/system/{cpu,node}`.
//!
//! Which CPUs share a core, a cache, a package, a node is taken from the kernel's lists of CPUs and from nothing else:
//! its *numbers* repeat (`core_id` between packages, `die_id` between packages) or are made up by firmware. A list is
//! believed only when the CPUs in it agree (`relation.rs`). What is missing, unreadable or contradictory becomes `None`
//! and one sentence in [`Topology::losses`]; only when the CPUs online cannot be told is there no topology at all.
//!
//! A start of a VM may wait for this, so few files are opened: the core's list once per CPU, the package's, the cache's and
//! the capacity once per core, everything else once per group. Hundreds of CPUs still make more than a thousand of them,
//! so whoever has read the machine before may bring its [`Relations`]: then only what changes without a CPU coming or going
//! is read ([`read_knowing`]). Nothing is written here, and nothing known of leases, cgroups or policies.

mod cache;
mod class;
mod core;
mod node;
mod package;
mod presence;
mod relation;
mod text;

use std::collections::BTreeMap;

use crate::cpuset::{CpuId, CpuSet, ParseError};
use crate::error::Result;
use crate::host::root::Root;
use crate::host::{CoreClass, CoreId, Cpu, LlcId, Topology};

pub(super) use node::MEMINFO_KEYS;
pub(super) use text::meminfo_key;

/// Where the kernel describes CPUs.
const CPU_DIR: &str = "/sys/devices/system/cpu";

/// The topology of the machine under `root`.
///
/// # Errors
/// [`Code::TopologyUnreadable`](crate::error::Code::TopologyUnreadable) with the path, when the CPUs online cannot be
/// told, or one of them has a number of 8192 or more.
pub fn read(root: &Root) -> Result<Topology> {
    read_knowing(root, |_, _| None)
}

/// As [`read`], but the relations of the CPUs are not read where `recall`, asked for those online and those present, knows
/// them. Which CPUs are online, possible and isolated is always read, and all that is said of nodes: memory comes and goes.
///
/// # Errors
/// As [`read`].
pub fn read_knowing(root: &Root, recall: impl FnOnce(&CpuSet, &CpuSet) -> Option<Relations>) -> Result<Topology> {
    topology(&mut Reader::new(root, None), recall)
}

/// Which of the CPUs online share what: all that is read of single CPUs, each map from the CPUs of which it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Relations {
    /// See [`Cpu::core`].
    pub core: BTreeMap<CpuId, CoreId>,
    /// See [`Cpu::llc`].
    pub llc: BTreeMap<CpuId, LlcId>,
    /// See [`Cpu::package`].
    pub package: BTreeMap<CpuId, u16>,
    /// See [`Cpu::die`].
    pub die: BTreeMap<CpuId, u16>,
    /// See [`Cpu::cluster`].
    pub cluster: BTreeMap<CpuId, u16>,
    /// See [`Cpu::class`].
    pub class: BTreeMap<CpuId, CoreClass>,
    /// See [`Topology::keeps_vms_in_one_class`].
    pub one_class: bool,
}

/// The files that [`read`] looks at on this machine, with their text, and how that went.
pub(super) fn record(root: &Root) -> (BTreeMap<String, String>, Result<()>) {
    let mut reader = Reader::new(root, Some(BTreeMap::new()));
    let outcome = topology(&mut reader, |_, _| None).map(|_| ());
    (reader.seen.unwrap_or_default(), outcome)
}

/// The size of the machine's default huge pages in KiB; `None` on kernels without huge pages.
///
/// `/proc/meminfo`, the line `Hugepagesize:    2048 kB`; absent on kernels built without `CONFIG_HUGETLBFS`.
///
/// # Errors
/// [`Code::HostIo`](crate::error::Code::HostIo) when `/proc/meminfo` exists and cannot be read.
pub fn default_hugepage_kib(root: &Root) -> Result<Option<u64>> {
    Ok(root.read_if_exists("/proc/meminfo")?.and_then(|meminfo| text::meminfo_kib(&meminfo, "Hugepagesize")))
}

fn topology(reader: &mut Reader<'_>, recall: impl FnOnce(&CpuSet, &CpuSet) -> Option<Relations>) -> Result<Topology> {
    let presence = presence::read(reader)?;
    let online = &presence.online;
    let known = recall(online, &presence.present);
    let known = known.unwrap_or_else(|| relations(reader, online));
    let Relations { core, llc, package, die, cluster, class, one_class } = known;
    let (nodes, node_of) = node::read(reader, online);
    let cpus = presence
        .present
        .iter()
        .map(|cpu| Cpu {
            cpu,
            online: online.contains(cpu),
            isolated: presence.isolated.contains(cpu),
            core: core.get(&cpu).copied(),
            package: package.get(&cpu).copied(),
            die: die.get(&cpu).copied(),
            cluster: cluster.get(&cpu).copied(),
            node: node_of.get(&cpu).copied(),
            llc: llc.get(&cpu).copied(),
            class: class.get(&cpu).copied(),
        })
        .collect();
    let losses = reader.take_losses();
    Ok(Topology::new(cpus, nodes, presence.possible, losses).keeping_vms_in_one_class(one_class))
}

fn relations(reader: &mut Reader<'_>, online: &CpuSet) -> Relations {
    let core = core::read(reader, online);
    let llc = cache::read(reader, online, &core);
    let package::Numbers { package, die, cluster } = package::read(reader, online, &core);
    let (class, one_class) = class::read(reader, online, &core);
    Relations { core, llc, package, die, cluster, class, one_class }
}

/// A file that holds a set of CPUs, and the grammar it is written in.
type Spelling = (&'static str, fn(&str) -> Result<CpuSet, ParseError>);

/// One pass over the machine's files. A file that cannot be used reads as one that does not exist, and is a loss.
struct Reader<'r> {
    root: &'r Root,
    /// What was read, where somebody wants to know: path -> text.
    seen: Option<BTreeMap<String, String>>,
    losses: Vec<String>,
    /// The first file that could not be used, and why.
    unusable: Option<String>,
    unusable_others: usize,
}

impl<'r> Reader<'r> {
    fn new(root: &'r Root, seen: Option<BTreeMap<String, String>>) -> Reader<'r> {
        Reader { root, seen, losses: Vec::new(), unusable: None, unusable_others: 0 }
    }

    /// The text of a file, or `None` where it does not exist.
    fn try_text(&mut self, path: &str) -> Result<Option<String>> {
        let text = self.root.read_if_exists(path)?;
        if let Some(text) = &text {
            self.note(path, text);
        }
        Ok(text)
    }

    /// Makes the recording say that `path` holds `text`.
    fn note(&mut self, path: &str, text: &str) {
        if let Some(seen) = &mut self.seen {
            seen.insert(path.to_owned(), text.to_owned());
        }
    }

    fn text(&mut self, path: &str) -> Option<String> {
        self.try_text(path).unwrap_or_else(|error| {
            self.unusable(&error.message);
            None
        })
    }

    fn names(&mut self, dir: &str) -> Vec<String> {
        self.root.list(dir).unwrap_or_else(|error| {
            self.unusable(&error.message);
            Vec::new()
        })
    }

    /// The set in the first of the files that exists; `None` where none does, or the first holds no set.
    fn cpus(&mut self, dir: &str, spellings: &[Spelling]) -> Option<CpuSet> {
        let (path, text, parse) = spellings.iter().find_map(|(file, parse)| {
            let path = format!("{dir}/{file}");
            self.text(&path).map(|text| (path, text, parse))
        })?;
        parse(&text).map_err(|error| self.unusable(&format!("{path}: {error}"))).ok()
    }

    /// The number in a file; `None` where it does not exist. `-1` and other negative numbers are the kernel's
    /// "unknown".
    fn number(&mut self, path: &str) -> Option<u32> {
        let text = self.text(path)?;
        match text.trim().parse::<i64>() {
            Ok(number) => u32::try_from(number).ok(),
            Err(_) => {
                self.unusable(&format!("{path}: expected a number"));
                None
            }
        }
    }

    fn unusable(&mut self, what: &str) {
        if self.unusable.is_none() {
            self.unusable = Some(what.to_owned());
        } else {
            self.unusable_others += 1;
        }
    }

    fn lose(&mut self, loss: String) {
        self.losses.push(loss);
    }

    fn take_losses(&mut self) -> Vec<String> {
        let mut losses = std::mem::take(&mut self.losses);
        if let Some(first) = self.unusable.take() {
            losses.push(match self.unusable_others {
                0 => format!("a file could not be used: {first}"),
                others => format!("{} files could not be used, the first: {first}", others + 1),
            });
        }
        losses
    }
}

/// The directory of a CPU.
fn cpu_dir(cpu: CpuId) -> String {
    format!("{CPU_DIR}/cpu{cpu}")
}

/// "CPU 3" or "CPUs 3-5", to begin a sentence with.
fn named(cpus: &CpuSet) -> String {
    if cpus.len() == 1 { format!("CPU {cpus}") } else { format!("CPUs {cpus}") }
}

/// Whether this is the number in a name such as `cpu7` or `index3`.
fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}
