//! A real libvirtd with real QEMU processes on a private machine.

use std::fs;
use std::io::Write as _;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tempfile::NamedTempFile;

use crate::guest::{Guest, power_off_disk};
use crate::machine::{Machine, Output};
use crate::needs;

/// How long anything that must happen may take; far more than it does, for machines under load.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// The daemon's own log.
const LOG: &str = "/var/log/libvirt/libvirtd.log";

/// Where libvirtd keeps what it found out about QEMU.
const CAPABILITIES: &str = "/var/cache/libvirt/qemu/capabilities";

/// Where this test keeps it from one machine to the next.
const KNOWN_CAPABILITIES: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/libvirt-capabilities");

/// What is installed on the machine before its libvirtd starts.
#[derive(Default)]
pub(crate) struct Options<'a> {
    /// The program to be copied to `/etc/libvirt/hooks/qemu`.
    pub(crate) hook: Option<PathBuf>,
    /// The program to be copied to `/usr/bin/virt-pin`.
    pub(crate) cli: Option<PathBuf>,
    /// The text of `/etc/virt-pin/virt-pin.toml`; no file if it is empty.
    pub(crate) config: &'a str,
}

impl<'a> Options<'a> {
    /// The hook and the CLI of this build, with a configuration.
    pub(crate) fn virt_pin(config: &'a str) -> Options<'a> {
        Options {
            hook: Some(env!("CARGO_BIN_EXE_virt-pin-hook").into()),
            cli: Some(env!("CARGO_BIN_EXE_virt-pin").into()),
            config,
        }
    }
}

/// The daemon, and the [`Machine`] it is on. Only one exists at a time in a test process.
pub(crate) struct Libvirtd {
    // Dropped in this order: the next test must not start while this machine still lives.
    machine: Machine,
    _turn: MutexGuard<'static, ()>,
}

/// One thread of a VM's QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Thread {
    /// Its id on the machine.
    pub(crate) tid: u32,
    /// Its name: `CPU 0/TCG`, `IO iothread1`, `qemu-system-x86`, ...
    pub(crate) comm: String,
    /// The CPUs it may run on, as the kernel prints them (`0-1,3`).
    pub(crate) cpus: String,
    /// Its cpuset cgroup as seen on the machine.
    pub(crate) cgroup: String,
}

impl Deref for Libvirtd {
    type Target = Machine;

    fn deref(&self) -> &Machine {
        &self.machine
    }
}

impl Libvirtd {
    /// A machine with a libvirtd that answers; `None` (and a line on the terminal) where that cannot be had.
    pub(crate) fn start(options: &Options<'_>) -> Option<Libvirtd> {
        static TURN: Mutex<()> = Mutex::new(());
        if !needs::met() {
            return None;
        }
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let machine = Machine::boot();
        let programs = [(&options.hook, "/etc/libvirt/hooks/qemu"), (&options.cli, "/usr/bin/virt-pin")];
        for (program, place) in programs {
            if let Some(program) = program {
                machine.put(place, 0o755, &fs::read(program).unwrap());
            }
        }
        if !options.config.is_empty() {
            machine.put("/etc/virt-pin/virt-pin.toml", 0o644, options.config.as_bytes());
        }
        let daemon = Libvirtd { machine, _turn: turn };
        daemon.borrow_capabilities();
        daemon.start_daemon();
        Some(daemon)
    }

    /// Runs virsh.
    pub(crate) fn virsh(&self, arguments: &[&str]) -> Output {
        self.exec(&[&["virsh", "--connect", "qemu:///system"], arguments].concat())
    }

    /// Defines a guest (again).
    #[track_caller]
    pub(crate) fn define(&self, guest: &Guest) {
        if !self.path(Guest::POWER_OFF_DISK).exists() {
            self.put(Guest::POWER_OFF_DISK, 0o644, &power_off_disk());
        }
        let file = format!("/run/{}.xml", guest.uuid());
        self.put(&file, 0o600, guest.xml().as_bytes());
        self.virsh(&["define", &file]).ok();
    }

    /// `virsh start`; for the caller to judge.
    pub(crate) fn start_guest(&self, name: &str) -> Output {
        self.virsh(&["start", name])
    }

    /// `virsh destroy`, which must succeed.
    #[track_caller]
    pub(crate) fn destroy(&self, name: &str) {
        self.virsh(&["destroy", name]).ok();
    }

    /// Defines a guest and starts it, which must succeed.
    #[track_caller]
    pub(crate) fn run(&self, guest: &Guest) {
        self.define(guest);
        self.start_guest(&guest.name).ok();
    }

    /// The pid, on the machine, of a running VM's QEMU.
    #[track_caller]
    pub(crate) fn qemu(&self, name: &str) -> u32 {
        self.file(&format!("/run/libvirt/qemu/{name}.pid")).trim().parse().unwrap()
    }

    /// SIGKILL to a VM's QEMU: it crashes.
    #[track_caller]
    pub(crate) fn kill_qemu(&self, name: &str) {
        self.signal(self.qemu(name), "KILL");
    }

    /// Every thread of a VM's QEMU, by thread id.
    #[track_caller]
    pub(crate) fn threads(&self, name: &str) -> Vec<Thread> {
        let tasks = format!("/proc/{}/task", self.qemu(name));
        let tids = fs::read_dir(self.path(&tasks)).unwrap();
        let mut threads: Vec<_> = tids
            .filter_map(|entry| {
                let tid: u32 = entry.unwrap().file_name().to_str().unwrap().parse().unwrap();
                // A worker thread may end while we read: then it is none any more.
                let read = |file: &str| fs::read_to_string(self.path(&format!("{tasks}/{tid}/{file}"))).ok();
                let (status, cgroups) = (read("status")?, read("cgroup")?);
                let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
                // Seen from out here, the path starts with the machine's own root.
                let cgroup = cgroups.lines().find_map(|line| line.split_once(":cpuset:"))?.1;
                let cgroup = cgroup.strip_prefix(&format!("/{}", self.cgroup())).unwrap_or(cgroup);
                Some(Thread {
                    tid,
                    comm: read("comm")?.trim().to_owned(),
                    cpus: cpus.trim().to_owned(),
                    cgroup: cgroup.to_owned(),
                })
            })
            .collect();
        threads.sort_by_key(|thread| thread.tid);
        threads
    }

    /// Waits until something holds.
    ///
    /// # Panics
    /// When it does not within [`PATIENCE`].
    #[track_caller]
    pub(crate) fn wait_until(&self, what: &str, mut holds: impl FnMut(&Libvirtd) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds(self) {
            assert!(Instant::now() < deadline, "still not after {} s: {what}", PATIENCE.as_secs());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Starts the daemon; returns when it answers.
    #[track_caller]
    pub(crate) fn start_daemon(&self) {
        self.exec(&["libvirtd", "--daemon"]).ok();
        self.wait_until("libvirtd answers", |daemon| daemon.virsh(&["uri"]).status.success());
    }

    /// Ends the daemon in an orderly way; VMs go on.
    #[track_caller]
    pub(crate) fn stop_daemon(&self) {
        self.end_daemon("TERM");
    }

    /// Ends the daemon by SIGKILL; VMs go on.
    #[track_caller]
    pub(crate) fn kill_daemon(&self) {
        self.end_daemon("KILL");
    }

    /// Stops the daemon and starts it again.
    #[track_caller]
    pub(crate) fn restart_daemon(&self) {
        self.stop_daemon();
        self.start_daemon();
    }

    /// Gives a new machine what an earlier one's libvirtd found out about QEMU, which takes half a second. libvirtd
    /// itself checks whether it still holds for this QEMU, libvirt and kernel.
    fn borrow_capabilities(&self) {
        for file in fs::read_dir(KNOWN_CAPABILITIES).into_iter().flatten().flatten() {
            let inside = format!("{CAPABILITIES}/{}", file.file_name().to_str().unwrap());
            self.put(&inside, 0o600, &fs::read(file.path()).unwrap());
        }
    }

    /// Keeps what this machine's libvirtd found out; by rename, as another test process may be reading.
    fn return_capabilities(&self) -> std::io::Result<()> {
        fs::create_dir_all(KNOWN_CAPABILITIES)?;
        for file in fs::read_dir(self.path(CAPABILITIES))? {
            let file = file?;
            let mut copy = NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR"))?;
            copy.write_all(&fs::read(file.path())?)?;
            copy.persist(Path::new(KNOWN_CAPABILITIES).join(file.file_name()))?;
        }
        Ok(())
    }

    /// Has the daemon look for hooks anew, as a package's installation does.
    #[track_caller]
    pub(crate) fn reload_daemon(&self) {
        let reloads = |daemon: &Libvirtd| daemon.file(LOG).matches("Reloading configuration").count();
        let before = reloads(self);
        self.signal(self.pid(), "HUP");
        self.wait_until("libvirtd reloads", |daemon| reloads(daemon) > before);
    }

    #[track_caller]
    fn pid(&self) -> u32 {
        self.file("/run/libvirtd.pid").trim().parse().unwrap()
    }

    #[track_caller]
    fn end_daemon(&self, signal: &str) {
        let pid = self.pid();
        self.signal(pid, signal);
        self.wait_until("libvirtd is gone", |daemon| !daemon.runs(pid));
    }
}

impl Drop for Libvirtd {
    /// Shows the daemon's log when a test failed; the machine's end does the rest.
    fn drop(&mut self) {
        // A convenience for the next test: there may be nothing to keep.
        let _ = self.return_capabilities();
        if std::thread::panicking() {
            let log = fs::read_to_string(self.path(LOG)).unwrap_or_default();
            // libvirtd looks at network devices that are not in its network namespace, and says so at length.
            let lines: Vec<_> = log.lines().filter(|line| !line.contains("virNetDev")).collect();
            eprintln!("libvirtd.log ends with:\n{}", lines[lines.len().saturating_sub(30)..].join("\n"));
        }
    }
}
