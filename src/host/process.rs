//! Which process, and whether it is still the same one: pid and start time, boot id, thread names and affinities.
//!
//! Reads `/proc` under the injected root. It starts, signals and moves nothing.

use std::ffi::OsStr;
use std::process::{Command, Stdio};

use super::root::Root;
use crate::cpuset::CpuSet;
use crate::error::{Code, Error, Result};

/// A process that a pid alone would not identify: pids are used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its pid.
    pub pid: u32,
    /// When it started, in clock ticks since boot (field 22 of `/proc/PID/stat`).
    pub start_time: u64,
}

/// One thread of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thread {
    /// Its thread id.
    pub tid: u32,
    /// Its name (`CPU 0/KVM`, `IO iothread1`), at most 15 bytes.
    pub name: String,
    /// Where the kernel lets it run: affinity and cgroup together (`Cpus_allowed_list`).
    pub allowed: CpuSet,
}

/// The process of this pid, or `None` if there is none (or only a zombie without other threads: it runs nowhere any more).
///
/// # Errors
/// [`Code::HostIo`] when that cannot be told: the file is there and cannot be read, or makes no sense.
pub fn process(root: &Root, pid: u32) -> Result<Option<Process>> {
    let path = format!("/proc/{pid}/stat");
    let Some(stat) = root.read_if_exists(&path)? else { return Ok(None) };
    let (state, start_time) = state_and_start(&stat)
        .ok_or_else(|| Error::new(Code::HostIo, format!("{} has no start time", root.resolve(&path).display())))?;
    let ended = matches!(state, 'Z' | 'X' | 'x');
    // The main thread may have ended before the others: one of them may still hang in the kernel, on its CPU.
    let hangs = ended && root.list(&format!("/proc/{pid}/task"))?.len() > 1;
    Ok((!ended || hangs).then_some(Process { pid, start_time }))
}

/// State and start time from `/proc/PID/stat`. The name (field 2) may hold spaces and parentheses, so fields are counted
/// from the last `)`.
fn state_and_start(stat: &str) -> Option<(char, u64)> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

/// The name of a process (`/proc/PID/comm`), and its parent's pid.
pub fn name_and_parent(root: &Root, pid: u32) -> Option<(String, u32)> {
    let name = root.read_if_exists(&format!("/proc/{pid}/comm")).ok()??;
    let stat = root.read_if_exists(&format!("/proc/{pid}/stat")).ok()??;
    let parent = stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some((name.trim_end_matches('\n').to_owned(), parent))
}

/// The threads of a process with their names and CPUs; empty when it has ended.
///
/// # Errors
/// [`Code::HostIo`] when a thread's status has no list of CPUs.
pub fn threads(root: &Root, pid: u32) -> Result<Vec<Thread>> {
    let dir = format!("/proc/{pid}/task");
    let mut threads = Vec::new();
    for tid in root.list(&dir)?.iter().filter_map(|name| name.parse::<u32>().ok()) {
        // A thread may end at any time; then it runs nowhere.
        let path = format!("{dir}/{tid}/status");
        let Ok(Some(status)) = root.read_if_exists(&path) else { continue };
        let Some(thread) = thread(tid, &status) else {
            return Err(Error::new(Code::HostIo, format!("{} has no list of CPUs", root.resolve(&path).display())));
        };
        threads.push(thread);
    }
    Ok(threads)
}

/// One thread, whosever it is (a process's first thread, or a kernel thread, by its pid); `None` when it has ended.
pub fn one_thread(root: &Root, tid: u32) -> Option<Thread> {
    thread(tid, &root.read_if_exists(&format!("/proc/{tid}/status")).ok()??)
}

fn thread(tid: u32, status: &str) -> Option<Thread> {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let allowed = CpuSet::parse_kernel_list(field("Cpus_allowed_list:")?).ok()?;
    Some(Thread { tid, name: field("Name:").unwrap_or_default().trim().to_owned(), allowed })
}

/// The identity of this boot (`/proc/sys/kernel/random/boot_id`): leases of another boot are void.
///
/// # Errors
/// [`Code::HostIo`] when it cannot be read.
pub fn boot_id(root: &Root) -> Result<String> {
    Ok(root.read("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Seconds since boot, sleep included (first field of `/proc/uptime`); 0 where it cannot be read.
pub fn uptime_secs(root: &Root) -> u64 {
    let text = root.read_if_exists("/proc/uptime").ok().flatten().unwrap_or_default();
    text.split(['.', ' ']).next().and_then(|seconds| seconds.parse().ok()).unwrap_or(0)
}

/// A program to be run with nothing of whoever called us: no variable, directory or stdin of theirs, and a path that is the
/// system's.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").current_dir("/").stdin(Stdio::null());
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_times_are_found_behind_hostile_names() {
        let tail = "S 1 2 3 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4711 0 0";
        for name in ["qemu", "a) S 1 (b", "x y"] {
            assert_eq!(state_and_start(&format!("12 ({name}) {tail}")), Some(('S', 4711)), "{name}");
        }
        assert_eq!(state_and_start("12 (qemu) S 1"), None);
        assert_eq!(state_and_start(""), None);
    }

    #[test]
    fn this_process_has_threads_and_is_itself() {
        let root = Root::directory("/");
        let me = process(&root, std::process::id()).unwrap().unwrap();
        assert_eq!(process(&root, me.pid).unwrap(), Some(me));
        assert!(
            threads(&root, me.pid).unwrap().iter().any(|thread| thread.tid == me.pid && !thread.allowed.is_empty())
        );
        assert_eq!(process(&root, u32::MAX).unwrap(), None);
        assert_eq!(threads(&root, u32::MAX).unwrap(), []);
        assert_eq!(boot_id(&root).unwrap().len(), 36);
    }

    #[test]
    fn a_status_is_read() {
        let status = "Name:\tCPU 0/TCG\nState:\tR\nCpus_allowed:\t2\nCpus_allowed_list:\t1,4-5\n";
        let expected =
            Thread { tid: 7, name: "CPU 0/TCG".into(), allowed: CpuSet::parse_kernel_list("1,4-5").unwrap() };
        assert_eq!(thread(7, status), Some(expected));
        assert_eq!(thread(7, "Name:\tx\n"), None);
    }
}
