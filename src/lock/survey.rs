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
pub(super) const FILE: &str = "topology.json";
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
        // No machine with cores of several classes is surveyed.
        class: Default::default(),
        one_class: false,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::DEADLINE;
    use std::fs;
    use std::io::Write;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use tempfile::TempDir;

    const KEPT: &str = "run/virt-pin/topology.json";

    fn put(dir: &TempDir, path: &str, text: &str) {
        let file = dir.path().join(path);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::File::create(file).unwrap().write_all(text.as_bytes()).unwrap();
    }

    /// Two cores of two threads on one node, siblings n and n + 2.
    fn machine() -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        put(&dir, "proc/sys/kernel/random/boot_id", "this boot\n");
        for (file, text) in [("online", "0-3"), ("present", "0-3"), ("possible", "0-7"), ("isolated", "")] {
            put(&dir, &format!("sys/devices/system/cpu/{file}"), text);
        }
        for cpu in 0..4 {
            let of = format!("sys/devices/system/cpu/cpu{cpu}");
            put(&dir, &format!("{of}/topology/core_cpus_list"), if cpu % 2 == 0 { "0,2" } else { "1,3" });
            put(&dir, &format!("{of}/topology/package_cpus_list"), "0-3");
            put(&dir, &format!("{of}/topology/physical_package_id"), "0");
            put(&dir, &format!("{of}/topology/die_cpus_list"), "0-3");
            put(&dir, &format!("{of}/topology/die_id"), "0");
            put(&dir, &format!("{of}/cache/index3/level"), "3");
            put(&dir, &format!("{of}/cache/index3/type"), "Unified");
            put(&dir, &format!("{of}/cache/index3/shared_cpu_list"), "0-3");
        }
        put(&dir, "sys/devices/system/node/node0/cpulist", "0-3");
        put(&dir, "sys/devices/system/node/node0/distance", "10");
        put(&dir, "sys/devices/system/node/node0/meminfo", "Node 0 MemFree: 1 kB\n");
        dir
    }

    fn ask(dir: &TempDir) -> (Topology, Option<Survey>) {
        topology(&Root::directory(dir.path())).unwrap()
    }

    fn keep(dir: &TempDir, survey: &Survey) {
        StateLock::acquire(&Root::directory(dir.path()), DEADLINE).unwrap().keep(survey);
    }

    /// From here on sysfs says that every CPU is a core of its own.
    fn split_cores(dir: &TempDir) {
        for cpu in 0..4 {
            put(dir, &format!("sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list"), &cpu.to_string());
        }
    }

    /// A machine whose survey is kept, and which has changed unseen.
    fn surveyed() -> TempDir {
        let dir = machine();
        keep(&dir, &ask(&dir).1.unwrap());
        split_cores(&dir);
        dir
    }

    #[test]
    fn what_is_kept_is_the_same_machine() {
        let dir = machine();
        let (before, survey) = ask(&dir);
        assert!(!dir.path().join("run").exists(), "asking writes nothing");
        keep(&dir, &survey.unwrap());
        let found = fs::metadata(dir.path().join(KEPT)).unwrap();
        assert_eq!(found.mode() & 0o777, 0o600);
        split_cores(&dir);
        let (after, survey) = ask(&dir);
        assert_eq!(after, before);
        assert!(survey.is_none(), "there is nothing new to keep");
    }

    #[test]
    fn what_changes_by_itself_is_always_read() {
        let dir = surveyed();
        put(&dir, "sys/devices/system/node/node0/meminfo", "Node 0 MemFree: 7 kB\n");
        put(&dir, "sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages", "3");
        put(&dir, "sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages", "2");
        put(&dir, "sys/devices/system/cpu/isolated", "3");
        put(&dir, "sys/devices/system/cpu/possible", "0-9");
        let (topology, _) = ask(&dir);
        let node = &topology.nodes()[0];
        assert_eq!((node.available_bytes, node.huge_pages[0].free), (Some(7 << 10), 2));
        assert_eq!((topology.isolated().to_string(), topology.possible().len()), ("3".to_owned(), 10));
        assert_eq!(topology.cores().len(), 2, "and the cores are as surveyed");
    }

    #[test]
    fn what_does_not_hold_is_not_believed() {
        let text = |dir: &TempDir| fs::read_to_string(dir.path().join(KEPT)).unwrap();
        let replaced = |from: &'static str, to: &'static str| {
            move |dir: &TempDir| {
                let before = text(dir);
                assert!(before.contains(from), "{before}");
                put(dir, KEPT, &before.replace(from, to));
            }
        };
        let moved = |what: &'static str| move |dir: &TempDir| put(dir, what, "0-2");
        let cut = |dir: &TempDir| put(dir, KEPT, text(dir).get(..40).unwrap());
        let open_to_all = |dir: &TempDir| {
            fs::set_permissions(dir.path().join(KEPT), fs::Permissions::from_mode(0o666)).unwrap();
        };
        let foreign = |dir: &TempDir| {
            if nix::unistd::geteuid().is_root() {
                std::os::unix::fs::chown(dir.path().join(KEPT), Some(1), None).unwrap();
            } else {
                cut(dir);
            }
        };
        let link = |dir: &TempDir| {
            fs::rename(dir.path().join(KEPT), dir.path().join("elsewhere")).unwrap();
            symlink(dir.path().join("elsewhere"), dir.path().join(KEPT)).unwrap();
        };
        let directory = |dir: &TempDir| {
            fs::remove_file(dir.path().join(KEPT)).unwrap();
            fs::create_dir(dir.path().join(KEPT)).unwrap();
        };
        type Change<'a> = &'a dyn Fn(&TempDir);
        let cases: &[(&str, Change<'_>)] = &[
            ("fewer online", &moved("sys/devices/system/cpu/online")),
            ("more present", &|dir| put(dir, "sys/devices/system/cpu/present", "0-4")),
            ("another boot", &|dir| put(dir, "proc/sys/kernel/random/boot_id", "that boot\n")),
            ("newer", &replaced("\"version\":1", "\"version\":2")),
            ("another program", &replaced("\"program\":\"", "\"program\":\"9")),
            ("a field too many", &replaced("\"version\":1", "\"version\":1,\"colour\":\"red\"")),
            ("a CPU too few", &replaced("\"core\":[0,1,", "\"core\":[0,")),
            ("a core named by none of its CPUs", &replaced("\"core\":[0,1,0,1]", "\"core\":[0,1,0,3000]")),
            ("a core named by its second CPU", &replaced("\"core\":[0,1,0,1]", "\"core\":[0,3,0,3]")),
            ("a cache of nobody", &replaced("\"llc\":[0,0,0,0]", "\"llc\":[4,4,4,4]")),
            ("cut off", &cut),
            ("empty", &|dir| put(dir, KEPT, "")),
            ("no text", &|dir| drop(fs::File::create(dir.path().join(KEPT)).unwrap().write_all(&[0xff; 9]))),
            ("open to all", &open_to_all),
            ("somebody else's", &foreign),
            ("a link", &link),
            ("a directory", &directory),
            ("gone", &|dir| fs::remove_file(dir.path().join(KEPT)).unwrap()),
        ];
        for (name, change) in cases {
            let dir = surveyed();
            assert_eq!(ask(&dir).0.cores().len(), 2, "{name}: as surveyed");
            change(&dir);
            let (topology, survey) = ask(&dir);
            assert_eq!(topology.cores().len(), topology.online().len(), "{name}: read anew");
            // What is not believed does not stay for good, and what cannot be replaced harms nobody.
            keep(&dir, &survey.unwrap());
            assert_eq!(ask(&dir).1.is_some(), *name == "a directory", "{name}: known from now on");
        }
    }

    #[test]
    fn what_is_doubtful_is_read_each_time() {
        let doubtful = |change: &dyn Fn(&TempDir)| {
            let dir = machine();
            change(&dir);
            assert!(ask(&dir).1.is_none());
        };
        doubtful(&|dir| put(dir, "sys/devices/system/cpu/cpu0/topology/core_cpus_list", "0-1"));
        doubtful(&|dir| fs::remove_dir_all(dir.path().join("sys/devices/system/cpu/cpu0/cache")).unwrap());
        doubtful(&|dir| put(dir, "sys/devices/system/node/node0/distance", "10 21"));
        doubtful(&|dir| put(dir, "sys/devices/cpu_atom/cpus", "1,3"));
        doubtful(&|dir| fs::remove_file(dir.path().join("proc/sys/kernel/random/boot_id")).unwrap());
    }
}
