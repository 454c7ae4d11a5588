//! Puts the threads of a running QEMU where its plan says, and looks whether they are there.
//!
//! A thread's CPUs are its affinity within its cgroup's cpuset, so both are set, the cgroup first (an affinity outside it
//! is refused). Then the kernel is asked where the thread may run; its answer, not our writing, decides.
//!
//! The domain's threads are QEMU's and those that live in its cgroups beside: kernel threads that work for it (before Linux
//! 6.4 `vhost-PID`, which the kernel puts into the cgroups of the thread that asked for it), helpers that libvirt puts there.

use std::collections::BTreeSet;

use nix::sched::sched_setaffinity;
use nix::unistd::Pid;

use crate::alloc::plan::Plan;
use crate::cpuset::CpuSet;
use crate::error::{Code, Error, Result, printable};
use crate::failpoint;
use crate::host::cgroup::{self, Hierarchy};
use crate::host::process::{self, Thread};
use crate::host::qemu::{self, Status};
use crate::host::root::Root;

/// What a thread of QEMU is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Runs this vCPU.
    Vcpu(u16),
    /// An I/O thread of the domain.
    IoThread,
    /// Everything else.
    Emulator,
}

/// A thread that is not where it should be.
#[derive(Clone, Debug)]
pub struct Misplaced {
    /// The thread.
    pub thread: Thread,
    /// What it is.
    pub role: Role,
    /// Where it should be.
    pub wanted: CpuSet,
    /// The cgroup of it and its like, if libvirt has made one.
    pub cgroup: Option<String>,
    /// The file that takes it into that cgroup, where it is in another.
    entrance: Option<String>,
}

impl Misplaced {
    /// Whether it is on CPUs of its own VM all the same, as threads are that came to life after the VM was reported started.
    pub fn is_late(&self, plan: &Plan) -> bool {
        !matches!(self.role, Role::Vcpu(_)) && self.thread.allowed.is_subset(&plan.allowed())
    }
}

/// How often to look and move: QEMU makes and ends threads while we do.
const ROUNDS: usize = 3;

/// Binds what has come to life since a domain was started: plugged-in vCPUs and I/O threads, new workers. False if libvirt
/// does not know it as running (any more).
///
/// # Errors
/// As [`bind`].
pub fn bind_again(root: &Root, name: &str, plan: &Plan) -> Result<bool> {
    let Some(status) = qemu::status(root, name)? else { return Ok(false) };
    bind(root, &status, plan).map(|()| true)
}

/// Binds every thread of the domain and reads back where each is.
///
/// # Errors
/// [`Code::ThreadMisplaced`] naming the first thread that is elsewhere, or the vCPU whose thread is not known;
/// [`Code::HostIo`] when threads cannot be read.
pub fn bind(root: &Root, status: &Status, plan: &Plan) -> Result<()> {
    let mut failure = None;
    let mut wrong = misplaced(root, status, plan)?;
    for _ in 0..ROUNDS {
        for found in &wrong {
            // What cannot be done may not be needed; where the thread then is decides.
            failure = move_thread(root, found).err().or(failure);
        }
        if wrong.is_empty() {
            return Ok(());
        }
        wrong = misplaced(root, status, plan)?;
    }
    let Some(found) = wrong.into_iter().next() else { return Ok(()) };
    let what = match found.role {
        Role::Vcpu(number) => format!("the thread of vCPU {number}"),
        Role::IoThread => "an I/O thread".to_owned(),
        Role::Emulator => "an emulator thread".to_owned(),
    };
    let mut error = Error::new(
        Code::ThreadMisplaced,
        format!(
            "{what} (\"{}\", tid {}) may run on CPUs {}, its lease says {}",
            printable(&found.thread.name),
            found.thread.tid,
            found.thread.allowed,
            found.wanted
        ),
    );
    if let Some(cause) = failure {
        error = error.because(cause);
    }
    Err(error)
}

/// The threads that are not where the plan says. A vCPU is on its one CPU; others are anywhere within their set.
///
/// # Errors
/// As [`bind`].
pub fn misplaced(root: &Root, status: &Status, plan: &Plan) -> Result<Vec<Misplaced>> {
    let threads = process::threads(root, status.pid)?;
    if threads.is_empty() {
        return Err(Error::new(
            Code::ThreadMisplaced,
            format!("QEMU (pid {}) has no threads: it has ended", status.pid),
        ));
    }
    for (vcpu, tid) in &status.vcpus {
        if usize::from(*vcpu) >= plan.vcpus.len() {
            let leased = plan.vcpus.len();
            return Err(Error::new(
                Code::ThreadMisplaced,
                format!("vCPU {vcpu} runs, but the lease has {leased} vCPUs"),
            ));
        }
        if !threads.iter().any(|thread| thread.tid == *tid) {
            return Err(Error::new(
                Code::ThreadMisplaced,
                format!("the thread of vCPU {vcpu} (tid {tid}) does not exist"),
            ));
        }
    }
    if status.vcpus.is_empty() {
        return Err(Error::new(Code::ThreadMisplaced, "libvirt knows no vCPU thread of the domain"));
    }
    let hierarchy = cgroup::hierarchy(root)?;
    let members = members(root, hierarchy.as_ref(), status.pid, threads);
    let misplaced = members.into_iter().filter_map(|(thread, cgroup)| {
        let role = role(&thread, status, cgroup.as_deref());
        let wanted = match role {
            Role::Vcpu(number) => {
                let own = plan.vcpus.get(usize::from(number)).copied().flatten();
                own.map_or_else(|| plan.shared.clone(), |cpu| CpuSet::from_iter([cpu]))
            }
            Role::IoThread => plan.iothreads.clone(),
            Role::Emulator => plan.emulator.clone(),
        };
        if thread.allowed.is_subset(&wanted) {
            return None;
        }
        // A vCPU's cgroup is that of its one thread. Who was born there for something else goes to the rest of QEMU.
        let parent = cgroup.as_ref().and_then(|cgroup| cgroup.rsplit_once("/vcpu")).map(|(parent, _)| parent);
        let (cgroup, entrance) = match (role, parent, &hierarchy) {
            (Role::Emulator, Some(parent), Some(hierarchy)) => {
                let home = format!("{parent}/emulator");
                let entrance = format!("{home}/{}", hierarchy.threads_file());
                (Some(home), Some(entrance))
            }
            _ => (cgroup, None),
        };
        Some(Misplaced { thread, role, wanted, cgroup, entrance })
    });
    Ok(misplaced.collect())
}

/// The domain's threads, each with its cgroup: QEMU's, and who else is in the cgroups of these.
fn members(
    root: &Root,
    hierarchy: Option<&Hierarchy>,
    pid: u32,
    threads: Vec<Thread>,
) -> Vec<(Thread, Option<String>)> {
    let Some(hierarchy) = hierarchy else { return threads.into_iter().map(|thread| (thread, None)).collect() };
    let of_qemu: BTreeSet<u32> = threads.iter().map(|thread| thread.tid).collect();
    let mut members: Vec<_> = threads
        .into_iter()
        .map(|thread| {
            let cgroup = cgroup::of_thread(root, hierarchy, pid, thread.tid);
            (thread, cgroup)
        })
        .collect();
    let cgroups: BTreeSet<String> = members.iter().filter_map(|(_, cgroup)| cgroup.clone()).collect();
    for cgroup in cgroups {
        let others = cgroup::threads_in(root, hierarchy, &cgroup).into_iter().filter(|tid| !of_qemu.contains(tid));
        let others = others.filter_map(|tid| process::one_thread(root, tid));
        members.extend(others.map(|thread| (thread, Some(cgroup.clone()))));
    }
    members
}

/// What a thread is: a vCPU by what libvirt says; otherwise by the cgroup it lives in, since an I/O thread's workers are
/// born there under names of their own; without cgroups by its name (libvirt starts QEMU with thread names on, and its
/// monitor's `IO mon_iothread` is no I/O thread of the domain).
pub fn role(thread: &Thread, status: &Status, cgroup: Option<&str>) -> Role {
    if let Some((number, _)) = status.vcpus.iter().find(|(_, tid)| **tid == thread.tid) {
        return Role::Vcpu(*number);
    }
    let lives_in = cgroup.and_then(|path| path.rsplit('/').next()).unwrap_or_default();
    if lives_in.starts_with("iothread") || (lives_in.is_empty() && thread.name.starts_with("IO iothread")) {
        return Role::IoThread;
    }
    // A vCPU that is being plugged in: libvirt has put it there, and has not written it down yet.
    let number = lives_in.strip_prefix("vcpu").and_then(|number| number.parse().ok());
    match number {
        Some(number) if thread.name.starts_with(&format!("CPU {number}/")) => Role::Vcpu(number),
        _ => Role::Emulator,
    }
}

fn move_thread(root: &Root, found: &Misplaced) -> Result<()> {
    let moved = match &found.entrance {
        Some(file) => root.write_kernel_file(file, &found.thread.tid.to_string()),
        None => Ok(()),
    };
    let written = match &found.cgroup {
        Some(dir) => root.write_kernel_file(&format!("{dir}/cpuset.cpus"), &found.wanted.to_string()),
        None => Ok(()),
    };
    // Even if the cgroup has gone: the affinity alone holds a thread as well.
    set_affinity(root, found.thread.tid, &found.wanted).and(written).and(moved)
}

/// sched_setaffinity(2). Only on the machine itself: under another root the numbers are somebody else's threads.
fn set_affinity(root: &Root, tid: u32, cpus: &CpuSet) -> Result<()> {
    if !root.is_this_machine() {
        return Ok(());
    }
    let mut mask = nix::sched::CpuSet::new();
    for cpu in cpus.iter() {
        // The library's mask ends at CPU 1023; beyond it the cgroup alone can hold the thread.
        if mask.set(usize::from(cpu.0)).is_err() {
            return Err(Error::new(
                Code::ThreadMisplaced,
                format!("CPU {cpu} cannot be put into an affinity: too high"),
            ));
        }
    }
    let tid = i32::try_from(tid).unwrap_or(i32::MAX);
    let set = failpoint::step("affinity").and_then(|()| Ok(sched_setaffinity(Pid::from_raw(tid), &mask)?));
    set.map_err(|errno| {
        Error::new(Code::ThreadMisplaced, format!("cannot set the affinity of thread {tid} to CPUs {cpus}"))
            .because(errno)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpuset::CpuId;

    fn set(text: &str) -> CpuSet {
        CpuSet::parse_kernel_list(text).unwrap()
    }

    fn plan(vcpus: &[u16]) -> Plan {
        Plan { iothreads: set("1"), ..Plan::new(vcpus.iter().copied().map(CpuId), set("0-1")) }
    }

    fn machine(threads: &[(u32, &str, &str)]) -> Root {
        machine_with(threads, None)
    }

    fn machine_with(threads: &[(u32, &str, &str)], more: Option<(String, String)>) -> Root {
        let status = |(tid, name, cpus): &(u32, &str, &str)| {
            (format!("/proc/7/task/{tid}/status"), format!("Name:\t{name}\nCpus_allowed_list:\t{cpus}\n"))
        };
        Root::described(threads.iter().map(status).chain(more).collect())
    }

    #[test]
    fn each_thread_is_held_to_its_own_set() {
        let status = Status { pid: 7, vcpus: [(0, 8), (1, 9)].into() };
        let right =
            [(7, "qemu-system-x86", "0-1"), (8, "CPU 0/TCG", "4"), (9, "CPU 1/TCG", "5"), (10, "IO iothread1", "1")];
        assert!(bind(&machine(&right), &status, &plan(&[4, 5])).is_ok());
        for (index, wrong, expected) in [
            (0, "0-2", "an emulator thread (\"qemu-system-x86\", tid 7) may run on CPUs 0-2, its lease says 0-1"),
            (1, "4-5", "the thread of vCPU 0 (\"CPU 0/TCG\", tid 8) may run on CPUs 4-5, its lease says 4"),
            (3, "0", "an I/O thread (\"IO iothread1\", tid 10) may run on CPUs 0, its lease says 1"),
        ] {
            let mut threads = right;
            threads[index].2 = wrong;
            assert_eq!(bind(&machine(&threads), &status, &plan(&[4, 5])).unwrap_err().message, expected);
        }
        assert!(bind(&machine(&right[..2]), &status, &plan(&[4, 5])).unwrap_err().message.contains("does not exist"));
        assert!(bind(&machine(&[]), &status, &plan(&[4, 5])).unwrap_err().message.contains("has ended"));
        assert!(bind(&machine(&right), &status, &plan(&[4])).unwrap_err().message.contains("vCPU 1 runs"));
        let unknown = Status { pid: 7, vcpus: [].into() };
        assert!(bind(&machine(&right), &unknown, &plan(&[4, 5])).is_err());
        // By name, as somebody does who comes back to it: it may have ended meanwhile.
        assert!(!bind_again(&machine(&right), "a", &plan(&[4, 5])).unwrap());
        let running = "<domstatus pid='7'><vcpus><vcpu id='0' pid='8'/><vcpu id='1' pid='9'/></vcpus></domstatus>";
        let status = ("/run/libvirt/qemu/a.xml".to_owned(), running.to_owned());
        assert!(bind_again(&machine_with(&right, Some(status)), "a", &plan(&[4, 5])).unwrap());
    }

    /// A kernel thread in the emulator's cgroup, a helper born in a vCPU's, and a vCPU that libvirt is plugging in.
    #[test]
    fn who_lives_in_the_cgroups_belongs_to_the_domain() {
        let cgroup = |name: &str| format!("3:cpuset:/m/qemu-1-a.libvirt-qemu/{name}\n");
        let status = |name: &str, cpus: &str| format!("Name:\t{name}\nCpus_allowed_list:\t{cpus}\n");
        let file = |path: &str, text: String| (path.to_owned(), text);
        let files = [
            file("/proc/mounts", "cgroup /c cgroup rw,cpuset 0 0\n".to_owned()),
            file("/proc/7/task/7/status", status("qemu-system-x86", "0-1")),
            file("/proc/7/task/7/cgroup", cgroup("emulator")),
            file("/proc/7/task/8/status", status("CPU 0/KVM", "4")),
            file("/proc/7/task/8/cgroup", cgroup("vcpu0")),
            file("/proc/7/task/9/status", status("kvm-nx-lpage-re", "4")),
            file("/proc/7/task/9/cgroup", cgroup("vcpu0")),
            file("/proc/7/task/10/status", status("CPU 1/KVM", "0-1")),
            file("/proc/7/task/10/cgroup", cgroup("vcpu1")),
            file("/c/m/qemu-1-a.libvirt-qemu/emulator/tasks", "7\n11\n12\n".to_owned()),
            file("/proc/11/status", status("vhost-7", "0-15")),
        ];
        let root = Root::described(files.into());
        let running = Status { pid: 7, vcpus: [(0, 8)].into() };
        let found = misplaced(&root, &running, &plan(&[4, 5])).unwrap();
        let late: Vec<_> = found.iter().map(|found| found.is_late(&plan(&[4, 5]))).collect();
        assert_eq!(late, [false, true, false]);
        let found: Vec<_> = found
            .iter()
            .map(|found| {
                let cgroup = found.cgroup.as_deref().and_then(|path| path.rsplit('/').next()).unwrap_or_default();
                (found.thread.name.as_str(), found.role, found.wanted.to_string(), cgroup, found.entrance.as_deref())
            })
            .collect();
        let emulator = "/c/m/qemu-1-a.libvirt-qemu/emulator/tasks";
        assert_eq!(
            found,
            [
                ("CPU 1/KVM", Role::Vcpu(1), "5".to_owned(), "vcpu1", None),
                ("kvm-nx-lpage-re", Role::Emulator, "0-1".to_owned(), "emulator", Some(emulator)),
                ("vhost-7", Role::Emulator, "0-1".to_owned(), "emulator", None),
            ]
        );
    }
}
