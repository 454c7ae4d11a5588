//! The cgroups of a running domain on its way from one plan to another.
//!
//! Its own cgroup first gets the CPUs of both plans, from the outermost level inwards; then its threads' cgroups get those of
//! the new one; then its own gives up the rest, from the innermost level outwards. So each write is one that the kernel takes
//! (v1: a child lies within its parent), and nobody of the domain is ever outside what it has. What is written is computed
//! first ([`grown`], [`seated`], [`shrunk`]); nothing here decides where the domain goes.

use std::collections::BTreeSet;

use super::{scope, tree};
use crate::alloc::plan::Plan;
use crate::cpuset::{CpuId, CpuSet, NodeId};
use crate::error::{Code, Error, Result};
use crate::host::cgroup::{self, Hierarchy};
use crate::host::machine_name::machine_of_scope;
use crate::host::process;
use crate::host::qemu::Status;
use crate::host::root::Root;

/// One cgroup and its `cpuset.cpus`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    /// Its directory.
    pub dir: String,
    /// Empty on v2 = not limited.
    pub cpus: CpuSet,
}

/// The cgroups of one running domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroups {
    /// v1: where a child's set lies within its parent's, and is never empty.
    pub v1: bool,
    /// Those above the domain's own, outermost first, without the hierarchy's root.
    pub above: Vec<Cgroup>,
    /// Its own, outermost first; the last is the parent of its threads'.
    pub own: Vec<Cgroup>,
    /// Those of its threads: `emulator`, `vcpuN`, `iothreadN`.
    pub threads: Vec<Cgroup>,
}

impl Cgroups {
    /// Those of the domain whose QEMU this is; `None` where it has none of its own. `place` is where they were made for it, if
    /// they were: on v1 the kernel takes tasks out of a cgroup that has lost its last CPU.
    ///
    /// # Errors
    /// [`Code::HostIo`].
    pub fn of(root: &Root, pid: u32, place: Option<&str>) -> Result<Option<Cgroups>> {
        let Some(hierarchy) = cgroup::hierarchy(root)? else { return Ok(None) };
        let (v1, mount) = match &hierarchy {
            Hierarchy::V1(mount) => (true, mount),
            Hierarchy::V2(mount) => (false, mount),
        };
        let made = || place.filter(|place| v1 && place.starts_with(mount.as_str()) && root.exists(place));
        let emulator = cgroup::of_thread(root, &hierarchy, pid, pid);
        let Some(emulator) = emulator.or_else(|| made().map(|place| format!("{}/emulator", tree::threads(place))))
        else {
            return Ok(None);
        };
        let mut levels = Vec::new();
        let mut at = emulator.as_str();
        while let Some((parent, _)) = at.rsplit_once('/').filter(|(parent, _)| parent.len() > mount.len()) {
            levels.push(parent.to_owned());
            at = parent;
        }
        levels.reverse();
        let is_domains = |dir: &String| {
            let name = dir.rsplit('/').next().unwrap_or_default();
            name.ends_with(".libvirt-qemu") || machine_of_scope(name).is_some()
        };
        let Some(outermost) = levels.iter().position(is_domains) else { return Ok(None) };
        let parent = levels.last().cloned().unwrap_or_default();
        let own = levels.split_off(outermost);
        let read = |dir: String| -> Result<Option<Cgroup>> {
            let Some(text) = root.read_if_exists(&format!("{dir}/cpuset.cpus"))? else { return Ok(None) };
            let cpus = CpuSet::parse_kernel_list(&text).unwrap_or_default();
            Ok(Some(Cgroup { dir, cpus }))
        };
        let all = |dirs: Vec<String>| dirs.into_iter().filter_map(|dir| read(dir).transpose()).collect::<Result<_>>();
        let threads =
            root.list(&parent)?.into_iter().filter(|name| seat(name, &Plan::new([], CpuSet::new())).is_some());
        let threads = threads.map(|name| format!("{parent}/{name}")).collect();
        Ok(Some(Cgroups { v1, above: all(levels)?, own: all(own)?, threads: all(threads)? }))
    }
}

/// Where the threads of a cgroup of this name belong; `None` if libvirt makes none of that name.
fn seat(name: &str, plan: &Plan) -> Option<CpuSet> {
    if name == "emulator" {
        return Some(plan.emulator.clone());
    }
    if name.strip_prefix("iothread").is_some_and(|id| id.parse::<u32>().is_ok()) {
        return Some(plan.iothreads.clone());
    }
    let vcpu: u16 = name.strip_prefix("vcpu")?.parse().ok()?;
    // One that the plan does not know of is no less the domain's.
    let own = plan.vcpu_places().find(|(number, _)| *number == vcpu).map(|(_, cpus)| cpus);
    Some(own.unwrap_or_else(|| plan.emulator.clone()))
}

/// What is to be written so that the domain may be on these CPUs beside those it has. On v1 a CPU that was offline is in no
/// cgroup any more, also in none above.
pub fn grown(cgroups: &Cgroups, cpus: &CpuSet) -> Vec<Cgroup> {
    let above = cgroups.above.iter().filter(|_| cgroups.v1);
    above
        .chain(&cgroups.own)
        .filter(|level| (cgroups.v1 || !level.cpus.is_empty()) && !cpus.is_subset(&level.cpus))
        .map(|level| Cgroup { dir: level.dir.clone(), cpus: level.cpus.union(cpus) })
        .collect()
}

/// What is to be written so that each thread's cgroup is where the plan says.
pub fn seated(cgroups: &Cgroups, plan: &Plan) -> Vec<Cgroup> {
    let wanted = cgroups.threads.iter().filter_map(|thread| {
        let cpus = seat(thread.dir.rsplit('/').next()?, plan)?;
        (thread.cpus != cpus && !cpus.is_empty()).then(|| Cgroup { dir: thread.dir.clone(), cpus })
    });
    wanted.collect()
}

/// What is to be written so that the domain is on these CPUs alone. `cgroups` is as it was before [`grown`].
pub fn shrunk(cgroups: &Cgroups, cpus: &CpuSet) -> Vec<Cgroup> {
    let limited =
        cgroups.own.iter().rev().filter(|level| (cgroups.v1 || !level.cpus.is_empty()) && level.cpus != *cpus);
    limited.map(|level| Cgroup { dir: level.dir.clone(), cpus: cpus.clone() }).collect()
}

/// Writes them, one after the other.
///
/// # Errors
/// [`Code::ConfinementFailed`] at the first that the kernel refuses.
pub fn write(root: &Root, all: &[Cgroup]) -> Result<()> {
    all.iter().try_for_each(|one| {
        root.write_kernel_file(&format!("{}/cpuset.cpus", one.dir), &format!("{}\n", one.cpus))
            .map_err(|error| Error::new(Code::ConfinementFailed, error.message))
    })
}

/// v1: puts threads back into their cgroups that the kernel took out when those had lost their last CPU.
///
/// # Errors
/// [`Code::ConfinementFailed`] for one that the kernel refuses, unless it has ended.
pub fn gather(root: &Root, cgroups: &Cgroups, status: &Status) -> Result<()> {
    let Some(hierarchy) = cgroup::hierarchy(root)?.filter(|_| cgroups.v1) else { return Ok(()) };
    for thread in process::threads(root, status.pid)? {
        if cgroup::of_thread(root, &hierarchy, status.pid, thread.tid).is_some() {
            continue;
        }
        let vcpu = status.vcpus.iter().find(|(_, tid)| **tid == thread.tid).map(|(vcpu, _)| format!("vcpu{vcpu}"));
        let name = vcpu.or_else(|| thread.name.strip_prefix("IO ").map(str::to_owned));
        let of_name = |name: &str| cgroups.threads.iter().find(|one| one.dir.rsplit('/').next() == Some(name));
        let Some(home) = name.as_deref().and_then(of_name).or_else(|| of_name("emulator")) else { continue };
        let put = root.write_kernel_file(&format!("{}/tasks", home.dir), &thread.tid.to_string());
        if let Err(error) = put {
            if root.exists(&format!("/proc/{}/task/{}", status.pid, thread.tid)) {
                return Err(Error::new(Code::ConfinementFailed, error.message));
            }
        }
    }
    Ok(())
}

/// Whether the memory of the domain in these cgroups can be taken to other nodes: on v2, where the scope says on which it is.
pub fn moves_memory(root: &Root, cgroups: &Cgroups) -> bool {
    let bound = |own: &Cgroup| {
        root.read_if_exists(&format!("{}/cpuset.mems", own.dir))
            .is_ok_and(|text| text.is_some_and(|text| !text.trim().is_empty()))
    };
    !cgroups.v1 && cgroups.own.first().is_some_and(bound) && !cgroups.threads.iter().any(bound)
}

/// Whether we may look where a process has its memory, as only who may trace it can: it is not moved unseen.
pub fn sees_memory(root: &Root, pid: u32) -> bool {
    root.read(&format!("/proc/{pid}/numa_maps")).is_ok_and(|text| !text.is_empty())
}

/// Takes the domain's memory to these nodes (v2: the kernel moves the pages before the write returns), and looks where it is.
///
/// # Errors
/// [`Code::ConfinementFailed`] where the kernel refuses, or pages stay behind.
pub fn move_memory(root: &Root, cgroups: &Cgroups, pid: u32, nodes: &BTreeSet<NodeId>) -> Result<()> {
    let Some(outermost) = cgroups.own.first() else { return Ok(()) };
    let list: CpuSet = nodes.iter().map(|node| CpuId(node.0)).collect();
    let file = format!("{}/cpuset.mems", outermost.dir);
    if CpuSet::parse_kernel_list(&root.read(&file)?).is_ok_and(|now| now == list) {
        return Ok(());
    }
    root.write_kernel_file(&file, &format!("{list}\n"))
        .map_err(|error| Error::new(Code::ConfinementFailed, error.message))?;
    let (there, elsewhere) = pages(&root.read(&format!("/proc/{pid}/numa_maps"))?, nodes);
    // A page that is being written to disk or held by a device stays for now; a hundredth of them is no guest's memory.
    if elsewhere > (there + elsewhere) / 100 {
        return Err(Error::new(
            Code::ConfinementFailed,
            format!(
                "{} MiB of the guest's memory stayed where they were, {} MiB went to nodes {list}",
                elsewhere >> 10,
                there >> 10
            ),
        ));
    }
    Ok(())
}

/// How much of a process's memory is on these nodes and on others, in KiB, from `/proc/PID/numa_maps`: per mapping
/// `ADDRESS POLICY key=value ...` with `N0=PAGES` and `kernelpagesize_kB=SIZE`.
fn pages(numa_maps: &str, nodes: &BTreeSet<NodeId>) -> (u64, u64) {
    let (mut there, mut elsewhere) = (0_u64, 0_u64);
    for line in numa_maps.lines() {
        let values = || line.split(' ').filter_map(|field| field.split_once('='));
        let size = values().find_map(|(key, value)| value.parse().ok().filter(|_| key == "kernelpagesize_kB"));
        let kib: u64 = size.unwrap_or(4);
        for (key, pages) in values() {
            let Some(node) = key.strip_prefix('N').and_then(|node| node.parse().ok()) else { continue };
            let bytes = pages.parse::<u64>().unwrap_or_default().saturating_mul(kib);
            let sum = if nodes.contains(&NodeId(node)) { &mut there } else { &mut elsewhere };
            *sum = sum.saturating_add(bytes);
        }
    }
    (there, elsewhere)
}

/// Has the domain's drop-in, if `place` is one of ours, say what the scope has: systemd applies it when it reads its units
/// anew.
///
/// # Errors
/// [`Code::ConfinementFailed`].
pub fn remember(root: &Root, place: Option<&str>, plan: &Plan) -> Result<()> {
    match place.filter(|place| place.starts_with(scope::RUNTIME_UNITS) && root.exists(place)) {
        Some(place) => scope::make(root, place, plan),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> CpuSet {
        CpuSet::parse_kernel_list(text).unwrap()
    }

    fn machine(files: &[(&str, &str)]) -> Root {
        Root::described(files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect())
    }

    fn written(all: &[Cgroup]) -> Vec<String> {
        all.iter().map(|one| format!("{} {}", one.dir.trim_start_matches("/c/"), one.cpus)).collect()
    }

    #[test]
    fn from_outside_in_and_back_on_v1() {
        let root = machine(&[
            ("/proc/mounts", "cgroup /c cgroup rw,cpuset 0 0\n"),
            ("/proc/7/task/7/cgroup", "3:cpuset:/machine/qemu-1-a.libvirt-qemu/emulator\n"),
            ("/c/machine/cpuset.cpus", "0-2\n"),
            ("/c/machine/qemu-1-a.libvirt-qemu/cpuset.cpus", "0-1\n"),
            ("/c/machine/qemu-1-a.libvirt-qemu/emulator/cpuset.cpus", "0\n"),
            ("/c/machine/qemu-1-a.libvirt-qemu/vcpu0/cpuset.cpus", "1\n"),
            ("/c/machine/qemu-1-a.libvirt-qemu/other/cpuset.cpus", "1\n"),
        ]);
        let cgroups = Cgroups::of(&root, 7, None).unwrap().unwrap();
        let to = Plan::new([CpuId(3)], set("0"));
        let grown = grown(&cgroups, &set("0,1,3"));
        assert_eq!(written(&grown), ["machine 0-3", "machine/qemu-1-a.libvirt-qemu 0-1,3"]);
        assert_eq!(written(&seated(&cgroups, &to)), ["machine/qemu-1-a.libvirt-qemu/vcpu0 3"]);
        assert_eq!(written(&shrunk(&cgroups, &to.allowed())), ["machine/qemu-1-a.libvirt-qemu 0,3"]);
        assert!(!moves_memory(&root, &cgroups));
    }

    #[test]
    fn a_scope_on_v2_is_the_one_limit() {
        let scope = r"machine.slice/machine-qemu\x2d1\x2da.scope";
        let path = |file: &str| format!("/c/{scope}/{file}");
        let thread = format!("0::/{scope}/libvirt/emulator\n");
        let (own, below, emulator) =
            (path("cpuset.cpus"), path("libvirt/cpuset.cpus"), path("libvirt/emulator/cpuset.cpus"));
        let mems = path("cpuset.mems");
        let root = machine(&[
            ("/proc/mounts", "cgroup2 /c cgroup2 rw 0 0\n"),
            ("/c/cgroup.controllers", "cpuset\n"),
            ("/c/machine.slice/cpuset.cpus", "\n"),
            ("/proc/7/task/7/cgroup", &thread),
            (&own, "0-1\n"),
            (&below, "\n"),
            (&emulator, "0\n"),
            (&mems, "0\n"),
        ]);
        let cgroups = Cgroups::of(&root, 7, None).unwrap().unwrap();
        assert_eq!(written(&grown(&cgroups, &set("0-2"))), [format!("{scope} 0-2")]);
        assert_eq!(written(&shrunk(&cgroups, &set("0,2"))), [format!("{scope} 0,2")]);
        assert!(moves_memory(&root, &cgroups));
    }

    /// Where no scope is the limit: libvirt's own directory on v2, whose threads have their own memory nodes; and on v1 a level
    /// within what has a scope's name, found by where it was made once the kernel has taken the threads out.
    #[test]
    fn where_systemd_does_not_manage_cpusets() {
        let root = machine(&[
            ("/proc/mounts", "cgroup2 /c cgroup2 rw 0 0\n"),
            ("/c/cgroup.controllers", "cpuset\n"),
            ("/proc/7/task/7/cgroup", "0::/machine/qemu-1-a.libvirt-qemu/emulator\n"),
            ("/c/machine/cpuset.cpus", "\n"),
            ("/c/machine/qemu-1-a.libvirt-qemu/cpuset.cpus", "0-1\n"),
            ("/c/machine/qemu-1-a.libvirt-qemu/cpuset.mems", "\n"),
            ("/c/machine/qemu-1-a.libvirt-qemu/emulator/cpuset.cpus", "0\n"),
            ("/c/machine/qemu-1-a.libvirt-qemu/vcpu0/cpuset.cpus", "1\n"),
            ("/c/machine/qemu-1-a.libvirt-qemu/vcpu0/cpuset.mems", "0\n"),
            ("/c/machine/qemu-1-a.libvirt-qemu/virt-pin-parked/cpuset.cpus", "\n"),
        ]);
        let to = Plan::new([CpuId(3)], set("0"));
        let steps = |root: &Root, place| {
            let cgroups = Cgroups::of(root, 7, place).unwrap().unwrap();
            let steps = [grown(&cgroups, &set("0-1,3")), seated(&cgroups, &to), shrunk(&cgroups, &to.allowed())];
            (steps.map(|step| written(&step).join(", ")), moves_memory(root, &cgroups))
        };
        let own = "machine/qemu-1-a.libvirt-qemu";
        let expected = [format!("{own} 0-1,3"), format!("{own}/vcpu0 3"), format!("{own} 0,3")];
        assert_eq!(steps(&root, None), (expected, false));
        let root = machine(&[
            ("/proc/mounts", "cgroup /c cgroup rw,cpuset 0 0\n"),
            ("/proc/7/task/7/cgroup", "3:cpuset:/machine.slice/machine-qemu\\x2d1\\x2da.scope\n"),
            ("/c/machine.slice/cpuset.cpus", "0-2\n"),
            ("/c/machine.slice/machine-qemu\\x2d1\\x2da.scope/cpuset.cpus", "0-1\n"),
            ("/c/machine.slice/machine-qemu\\x2d1\\x2da.scope/libvirt/cpuset.cpus", "0-1\n"),
            ("/c/machine.slice/machine-qemu\\x2d1\\x2da.scope/libvirt/emulator/cpuset.cpus", "0\n"),
            ("/c/machine.slice/machine-qemu\\x2d1\\x2da.scope/libvirt/vcpu0/cpuset.cpus", "1\n"),
        ]);
        let own = "machine.slice/machine-qemu\\x2d1\\x2da.scope";
        let expected = [
            format!("machine.slice 0-3, {own} 0-1,3, {own}/libvirt 0-1,3"),
            format!("{own}/libvirt/vcpu0 3"),
            format!("{own}/libvirt 0,3, {own} 0,3"),
        ];
        assert_eq!(steps(&root, Some(&format!("/c/{own}"))), (expected, false));
        assert_eq!(Cgroups::of(&root, 7, None).unwrap(), None);
    }

    #[test]
    fn memory_is_counted_by_node() {
        let maps = "7f00 default anon=3 N0=1 N1=2 kernelpagesize_kB=4\n7f01 bind:1 huge N0=1 kernelpagesize_kB=2048\n7f02 default\n";
        assert_eq!(pages(maps, &BTreeSet::from([NodeId(1)])), (8, 2052));
    }
}
