//! What the last reading of sysfs found out about CPUs, so that a start of a VM need not read it again.
//!
//! On 512 CPUs the files that say which CPUs share a core, a cache, a package are more than a thousand, and make a start wait
//! longer than all the rest of it. They say the same as long as the machine runs and the same CPUs are online. So a hook that
//! has had to read them leaves `topology.json` beside the leases:
//!
//! ```text
//! {"version":1,"program":"0.1.0","boot_id":"...","online":"0-3","present":"0-3",
//!  "core":[0,0,2,2],"llc":[0,0,0,0],"package":[0,0,0,0],"die":[0,0,0,0],"cluster":[null,null,null,null]}
//! ```
//! One number for each CPU online, ascending; cores and caches are named by their lowest CPU.
//!
//! It answers only for the boot, the program and the CPUs online and present that it was made for, and only where it is
//! well-formed and nobody else's work; otherwise sysfs is read as if it were not there. It can make a start slower, never
//! fail it. What may change meanwhile is not in it: nodes, memory, huge pages, which CPUs are isolated. Nor is a machine that
//! contradicts itself or leaves anything unsaid (so that is found at each reading), nor one with cores of several classes
//! (a CPU's capacity may change with its driver; such machines are small).
//!
//! One change goes unseen: processors replaced by others of the same numbers, in a running machine, between two starts. Linux
//! gives a CPU that comes back its old number, and most machines cannot do it; `virt-pin topology` always reads sysfs.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{STATE_DIR, StateLock, replace, text_of_ours};
use crate::cpuset::{CpuId, CpuSet};
use crate::error::Result;
use crate::host::root::Root;
use crate::host::sysfs::{self, Relations};
use crate::host::{CoreId, LlcId, Topology, process};

/// The form this code writes, and the only one it reads.
const VERSION: u32 = 1;
const FILE: &str = "topology.json";
/// 8192 CPUs take less than 256 KiB.
const MAX_BYTES: u64 = 1 << 20;

/// The file's text, to be kept for the next start.
#[derive(Clone, Debug)]
pub struct Survey(String);

/// The machine's topology, its CPUs' relations as last surveyed if that still holds. With it the survey to keep, if this was
/// a new one and the machine gave answers that can be kept. Writes nothing.
///
/// # Errors
/// As [`sysfs::read`].
pub fn topology(root: &Root) -> Result<(Topology, Option<Survey>)> {
    // No process of a description will ask again.
    if root.is_description() {
        return Ok((sysfs::read(root)?, None));
    }
    let boot_id = process::boot_id(root).ok();
    let mut recalled = false;
    let topology = sysfs::read_knowing(root, |online, present| {
        let relations = recall(&root.resolve(STATE_DIR).join(FILE), boot_id.as_deref()?, online, present);
        recalled = relations.is_some();
        relations
    })?;
    let survey = boot_id.filter(|_| !recalled).and_then(|boot_id| survey(boot_id, &topology));
    Ok((topology, survey))
}

impl StateLock {
    /// Keeps a survey for later starts. That it cannot be kept is nobody's failure: they will read what this one has read.
    pub fn keep(&mut self, survey: &Survey) {
        let _ = replace::replace(&self.dir, FILE, survey.0.as_bytes());
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileV1 {
    version: u32,
    program: String,
    boot_id: String,
    online: String,
    present: String,
    core: Vec<u16>,
    llc: Vec<u16>,
    package: Vec<u16>,
    die: Vec<Option<u16>>,
    cluster: Vec<Option<u16>>,
}

/// The survey of a machine that says everything of every CPU; `None` for one that does not.
fn survey(boot_id: String, topology: &Topology) -> Option<Survey> {
    let present: CpuSet = topology.cpus().iter().map(|cpu| cpu.cpu).collect();
    let cpus = || topology.cpus().iter().filter(|cpu| cpu.online);
    if !topology.losses().is_empty() || cpus().any(|cpu| cpu.class.is_some()) {
        return None;
    }
    let file = FileV1 {
        version: VERSION,
        program: env!("CARGO_PKG_VERSION").to_owned(),
        boot_id,
        online: topology.online().to_string(),
        present: present.to_string(),
        core: cpus().map(|cpu| cpu.core.map(|core| core.0)).collect::<Option<_>>()?,
        llc: cpus().map(|cpu| cpu.llc.map(|llc| llc.0)).collect::<Option<_>>()?,
        package: cpus().map(|cpu| cpu.package).collect::<Option<_>>()?,
        die: cpus().map(|cpu| cpu.die).collect(),
        cluster: cpus().map(|cpu| cpu.cluster).collect(),
    };
    serde_json::to_string(&file).ok().map(|text| Survey(text + "\n"))
}

/// What the file says, if it is about this boot and these CPUs.
fn recall(path: &Path, boot_id: &str, online: &CpuSet, present: &CpuSet) -> Option<Relations> {
    let text = text_of_ours(path, MAX_BYTES).ok()??;
    let file: FileV1 = serde_json::from_str(&text).ok()?;
    let same = file.version == VERSION
        && file.program == env!("CARGO_PKG_VERSION")
        && file.boot_id == boot_id
        && CpuSet::parse_kernel_list(&file.online).as_ref() == Ok(online)
        && CpuSet::parse_kernel_list(&file.present).as_ref() == Ok(present);
    let count = online.len();
    let lengths = [file.core.len(), file.llc.len(), file.package.len(), file.die.len(), file.cluster.len()];
    let whole = lengths.iter().all(|&length| length == count)
        && are_groups(online, &file.core)
        && are_groups(online, &file.llc);
    let known = |numbers: Vec<Option<u16>>| online.iter().zip(numbers).filter_map(|(cpu, number)| Some((cpu, number?)));
    (same && whole).then(|| Relations {
        core: online.iter().zip(file.core.into_iter().map(CoreId)).collect(),
        llc: online.iter().zip(file.llc.into_iter().map(LlcId)).collect(),
        package: online.iter().zip(file.package).collect(),
        die: known(file.die).collect(),
        cluster: known(file.cluster).collect(),
        class: Default::default(),
    })
}

/// Whether each number is that of the lowest CPU with the same number.
fn are_groups(online: &CpuSet, numbers: &[u16]) -> bool {
    let mut named = CpuSet::new();
    online.iter().zip(numbers).all(|(cpu, &number)| {
        if cpu.0 == number {
            named.insert(cpu);
        }
        named.contains(CpuId(number))
    })
}
