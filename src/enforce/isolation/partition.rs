//! A running domain's CPUs made cpuset partitions: no other task of the host, of systemd or of another VM runs there.
//!
//! Which cgroups of the domain become partitions is in [`seats`](super::seats), what those above pass on to them in
//! [`exclusive`](super::exclusive).
//!
//! Not libvirt's own cgroups become partitions, but one of ours within each, into which the threads are moved. Linux 6.12
//! takes a partition beside which somebody writes the same CPUs into a `cpuset.cpus` (libvirt, when a vCPU is pinned or
//! plugged in) for invalid, but keeps it in its list of partitions when its cgroup goes, and crashes later (measured). Beside
//! ours nobody writes.
//!
//! The type is always `root`: writing `isolated` while a task is moved between cgroups deadlocks Linux 6.12.

use std::fs;
use std::io;

use super::exclusive::{EXCLUSIVE, failed, pass_on, set, take_back, write};
use super::seats::{PARKED, Seat, seats};
use crate::alloc::plan::Plan;
use crate::cpuset::CpuSet;
use crate::error::{Code, Error, Result};
use crate::failpoint::step;
use crate::host::cgroup::{self, Hierarchy, INNER, has_machined, hierarchy};
use crate::host::process;
use crate::host::qemu::Status;
use crate::host::root::Root;
use crate::lock::StateLock;

const STATE: &str = "cpuset.cpus.partition";
/// How often to go over the partitions of one domain: a CPU that one gives up is free for another only then.
const ROUNDS: usize = 2;

/// Whether this host can.
///
/// # Errors
/// [`Code::IsolationUnsupported`] with what is missing.
pub fn able(root: &Root) -> Result<String> {
    let missing = match hierarchy(root)? {
        Some(Hierarchy::V2(mount)) if passes_on(root, &mount)? => return Ok(mount),
        Some(Hierarchy::V2(mount)) => {
            format!("the kernel has no {EXCLUSIVE} below {mount} (Linux 6.7 and later have it where cpuset is enabled)")
        }
        Some(Hierarchy::V1(mount)) => format!("the cpuset controller is that of cgroup v1 (at {mount})"),
        None => "there is no cpuset controller".to_owned(),
    };
    let error = Error::new(Code::IsolationUnsupported, format!("isolation=\"partition\" needs cgroup v2: {missing}"));
    Err(error.with_hint("leave isolation out; isolation=\"slices\" works on older kernels, with systemd and cgroup v2"))
}

/// Any cgroup with a cpuset tells; where the controller is not enabled yet, the root of a kernel that tells what partitions
/// have isolated (6.8).
fn passes_on(root: &Root, mount: &str) -> Result<bool> {
    let below = root.list(mount)?;
    let mut cpusets = below.iter().filter(|name| root.exists(&format!("{mount}/{name}/cpuset.cpus"))).peekable();
    if cpusets.peek().is_some() {
        return Ok(cpusets.any(|name| root.exists(&format!("{mount}/{name}/{EXCLUSIVE}"))));
    }
    Ok(root.exists(&format!("{mount}/cpuset.cpus.isolated")))
}

/// The cgroup in which the cgroups of a domain's threads are.
fn base(root: &Root, status: &Status) -> Result<(String, String)> {
    let mount = able(root)?;
    let kind = Hierarchy::V2(mount.clone());
    let threads = status.vcpus.values();
    let of_vcpu = threads.filter_map(|tid| cgroup::of_thread(root, &kind, status.pid, *tid)).find_map(|dir| {
        let (base, name) = dir.rsplit_once('/')?;
        name.starts_with("vcpu").then(|| base.to_owned())
    });
    let base = of_vcpu.ok_or_else(|| {
        failed("its vCPUs have no cgroups of their own; is cpuset among cgroup_controllers in qemu.conf?".to_owned())
    })?;
    Ok((mount, base))
}

/// Makes the partitions of a running domain, or makes them valid again; does nothing to those that are right. Its threads are
/// bound already. What is others' as well is changed under the lock, the caller's (`held`) or one for that alone: a partition
/// takes the kernel its time.
///
/// # Errors
/// [`Code::IsolationFailed`] with the cgroup and what it says; [`Code::IsolationUnsupported`]; those of the lock.
pub fn ensure(root: &Root, status: &Status, plan: &Plan, mut held: Option<&mut StateLock>) -> Result<()> {
    let (mount, base) = base(root, status)?;
    let seats = taken(root, &base, plan)?;
    let (had, wanted) = (set(root, &base)?, plan.exclusive());
    pass_on(root, &mount, &base, &wanted, held.as_deref_mut())?;
    let mut outcome = Ok(());
    for _ in 0..ROUNDS {
        outcome = seats.iter().map(|(name, cpus)| seat(root, status, &base, name, cpus)).fold(Ok(()), Result::and);
        if outcome.is_ok() {
            break;
        }
    }
    outcome?;
    if had.is_subset(&wanted) {
        return Ok(());
    }
    // It has moved: what it had is passed on no longer.
    write(root, &base, &wanted)?;
    take_back(root, held)
}

/// Takes the partitions of a running domain apart, so that it can be bound elsewhere: its threads are in libvirt's cgroups, and
/// nothing is passed on to them. Does what it can; a cgroup of ours that stays means nothing by itself.
///
/// # Errors
/// As [`ensure`].
pub fn dissolve(root: &Root, status: &Status, held: Option<&mut StateLock>) -> Result<()> {
    let (_, base) = base(root, status)?;
    for name in root.list(&base)? {
        let (outer, inner) = (format!("{base}/{name}"), place(&base, &name));
        if !root.exists(&inner) {
            continue;
        }
        member(root, &inner)?;
        move_threads(root, status, &inner, &outer)?;
        let _ = remove(root, &inner);
        member(root, &outer)?;
        if name == PARKED {
            let _ = remove(root, &outer);
        }
    }
    member(root, &base)?;
    take_back(root, held)
}

/// A cgroup that is no partition, and passes nothing on.
fn member(root: &Root, dir: &str) -> Result<()> {
    if state_of(root, dir)?.0 != "member" {
        root.write_kernel_file(&format!("{dir}/{STATE}"), "member\n").map_err(|error| failed(error.message))?;
    }
    if set(root, dir)?.is_empty() { Ok(()) } else { write(root, dir, &CpuSet::new()) }
}

/// The seats as far as their cgroups exist. A vCPU that is not plugged in has none, and its CPU is in no partition: it could not
/// be plugged in then. Parked CPUs of which none is online make no partition, and harm nobody.
fn taken(root: &Root, base: &str, plan: &Plan) -> Result<Vec<Seat>> {
    let names = root.list(base)?;
    let iothreads: Vec<u32> = names.iter().filter_map(|name| name.strip_prefix("iothread")?.parse().ok()).collect();
    let mut seats = seats(plan, &iothreads)?;
    alone(root, &seats)?;
    seats.retain(|(name, _)| name.is_empty() || name == PARKED || names.contains(name));
    let online = super::online(root)?;
    for (_, cpus) in seats.iter_mut().filter(|(name, cpus)| name == PARKED && cpus.is_disjoint(&online)) {
        *cpus = CpuSet::new();
    }
    Ok(seats)
}

/// Whether nobody else writes beside the partitions: a whole VM's is within its scope, but without machined libvirt has the
/// cgroups of other VMs beside it.
///
/// # Errors
/// [`Code::IsolationUnsupported`] where that is so.
pub(super) fn alone(root: &Root, seats: &[Seat]) -> Result<()> {
    if has_machined(root) || seats.iter().all(|(name, _)| !name.is_empty()) {
        return Ok(());
    }
    let message = "isolation=\"partition\" of a VM with all its threads on CPUs of its own needs systemd-machined: without it \
                   other VMs' cgroups are beside its own";
    Err(Error::new(Code::IsolationUnsupported, message)
        .with_hint("leave emulator and iothreads at housekeeping, or install systemd-container"))
}

/// Where the partition of a seat is: within the cgroup of its threads, never that itself.
fn place(base: &str, name: &str) -> String {
    if name.is_empty() { base.to_owned() } else { format!("{base}/{name}/{INNER}") }
}

/// One partition; no CPUs: none, and its cgroup goes if it is ours.
fn seat(root: &Root, status: &Status, base: &str, name: &str, cpus: &CpuSet) -> Result<()> {
    let (outer, dir) = (format!("{base}/{name}"), place(base, name));
    if name == PARKED && cpus.is_empty() {
        return [&dir, &outer].into_iter().try_for_each(|dir| remove(root, dir));
    }
    if !name.is_empty() {
        if name == PARKED {
            make(root, &outer)?;
        }
        root.write_kernel_file(&format!("{outer}/cgroup.subtree_control"), "+cpuset\n")
            .map_err(|error| failed(error.message))?;
        make(root, &dir)?;
        move_threads(root, status, &outer, &dir)?;
        if set(root, &outer)? != *cpus {
            // What its partition has now is passed on for as long as it has it.
            write(root, &outer, &cpus.union(&set(root, &dir)?))?;
        }
    }
    if set(root, &dir)? != *cpus {
        write(root, &dir, cpus)?;
    }
    if !state_of(root, &dir)?.is_valid() {
        let file = format!("{dir}/{STATE}");
        root.write_kernel_file(&file, "root\n").map_err(|error| failed(error.message))?;
    }
    let State(text) = state_of(root, &dir)?;
    if !State(text.clone()).is_valid() {
        return Err(failed(format!("{dir}/{STATE} of CPUs {cpus} says \"{text}\", not \"root\"")));
    }
    if !name.is_empty() && set(root, &outer)? != *cpus {
        write(root, &outer, cpus)?;
    }
    Ok(())
}

/// A cgroup for threads.
fn make(root: &Root, dir: &str) -> Result<()> {
    let path = root.resolve(dir);
    match step("partition.create").and_then(|()| fs::create_dir(&path)) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Error::io(Code::IsolationFailed, "create", &path, error));
        }
        _ => {}
    }
    // Among cgroups of threads it is nothing before it is one.
    let file = format!("{dir}/cgroup.type");
    if root.read_if_exists(&file)?.is_some_and(|kind| kind.trim() == "domain invalid") {
        root.write_kernel_file(&file, "threaded\n").map_err(|error| failed(error.message))?;
    }
    Ok(())
}

fn remove(root: &Root, dir: &str) -> Result<()> {
    let path = root.resolve(dir);
    match step("partition.remove").and_then(|()| fs::remove_dir(&path)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::io(Code::IsolationFailed, "remove", &path, error))
        }
        _ => Ok(()),
    }
}

/// Moves QEMU's threads between a cgroup of libvirt's and ours within it. (KVM has a kernel thread in libvirt's as well, which
/// stays.)
fn move_threads(root: &Root, status: &Status, from: &str, to: &str) -> Result<()> {
    let there = root.read_if_exists(&format!("{from}/cgroup.threads"))?.unwrap_or_default();
    let there: Vec<u32> = there.lines().filter_map(|line| line.trim().parse().ok()).collect();
    if there.is_empty() {
        return Ok(());
    }
    for thread in process::threads(root, status.pid)?.into_iter().filter(|thread| there.contains(&thread.tid)) {
        let moved = root.write_kernel_file(&format!("{to}/cgroup.threads"), &format!("{}\n", thread.tid));
        // One that has ended is nowhere.
        if let Err(error) = moved {
            if root.exists(&format!("/proc/{}/task/{}", status.pid, thread.tid)) {
                return Err(failed(error.message));
            }
        }
    }
    Ok(())
}

/// What the kernel says of a partition.
struct State(String);

impl State {
    /// `root invalid (...)` says why not; `isolated` would do as well, but is never ours.
    fn is_valid(&self) -> bool {
        matches!(self.0.as_str(), "root" | "isolated")
    }
}

fn state_of(root: &Root, dir: &str) -> Result<State> {
    let text = root.read(&format!("{dir}/{STATE}")).map_err(|error| failed(error.message))?;
    Ok(State(text.trim().to_owned()))
}

/// Why the partitions of a running domain are not what its plan asks for; `None` = they are.
///
/// # Errors
/// As [`ensure`].
pub fn flaw(root: &Root, status: &Status, plan: &Plan) -> Result<Option<String>> {
    let (_, base) = base(root, status)?;
    for (name, cpus) in taken(root, &base, plan)? {
        let dir = place(&base, &name);
        if cpus.is_empty() {
            continue;
        }
        if !root.exists(&dir) {
            return Ok(Some(format!("{dir} does not exist")));
        }
        let State(text) = state_of(root, &dir)?;
        if !State(text.clone()).is_valid() {
            return Ok(Some(format!("{dir}/{STATE} says \"{text}\"")));
        }
        let has = set(root, &dir)?;
        if has != cpus {
            return Ok(Some(format!("{dir} has CPUs {has}, not {cpus}")));
        }
    }
    Ok(None)
}
