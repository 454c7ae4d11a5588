//! `virt-pin agent`: what no hook can do, because libvirt does not call one, or waits for it.
//!
//! It keeps definitions in the shape of their places ([`keep`]), has libvirt's live XML say the leases ([`mirror`]), ends the
//! leases of VMs that died unseen, says when threads are not where they should be, and writes metrics. It sleeps until a file,
//! the kernel, the hook or a signal wakes it ([`watch`]). Nothing depends on it: every start is right without it, and what it
//! has missed it does when it is started again.

mod allowlist;
mod drift;
mod ended;
mod errands;
mod keep;
mod metrics;
pub mod mirror;
mod ready;
mod voice;
mod watch;

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use nix::fcntl::{Flock, FlockArg, OFlag};

use crate::alloc::plan::Plan;
use crate::config::settings::Settings;
use crate::error::{Code, Error, Result};
use crate::host::process::Process;
use crate::host::root::Root;
use crate::lock::leases::{Lease, Leases, State};
use crate::lock::{self, DEADLINE, STATE_DIR, StateLock};
use crate::relocate::{self, Done};
use crate::uuid::DomainUuid;
use allowlist::Withdrawn;
use drift::Drift;
use errands::{Errand, Errands};
use metrics::Metrics;
use voice::Voice;
use watch::{Wake, Watch};

/// Runs until a signal ends it, or with `once` does what there is to do now.
///
/// # Errors
/// [`Code::StateLocked`] if another agent runs; [`Code::StateUnsafe`], [`Code::HostIo`].
pub fn run(root: &Root, metrics: Option<&Path>, once: bool) -> Result<()> {
    // Makes the state directory, or says what is wrong with it. One whose lock is in demand is there.
    match StateLock::acquire(root, DEADLINE) {
        Err(error) if error.code != Code::StateLocked => return Err(error),
        _ => {}
    }
    let _alone = alone(root)?;
    let mut watch = Watch::begin(root)?;
    let voice = Voice::of(root);
    let done = Arc::new(errands::Done::default());
    let (errands, received) = channel();
    let worker = Errands::new(root, Arc::clone(&done));
    let mut agent = Agent {
        root: root.clone(),
        voice,
        errands,
        mirrored: BTreeMap::new(),
        withdrawn: Withdrawn::default(),
        drift: Drift::default(),
        metrics: Metrics::new(metrics, Arc::clone(&done)),
    };
    if once {
        agent.act(&Wake::all());
        worker.once(&received);
        agent.metrics.write_now(&agent.root, &agent.drift, &agent.voice);
        return Ok(());
    }
    let worker = std::thread::spawn(move || worker.run(&received));
    if !watch.hears_kernel() {
        agent.voice.say(Some(Code::HostIo), "the kernel does not say when CPUs come and go");
    }
    agent.act(&Wake::all());
    agent.voice.say(None, &format!("the agent runs, version {}", env!("CARGO_PKG_VERSION")));
    ready::notify("READY=1");
    loop {
        let patience = [agent.drift.patience(), agent.metrics.patience()].into_iter().flatten().min();
        let wake = watch.wait(patience)?;
        if wake.end {
            // A daemon that hangs is no reason to stay.
            ready::notify("STOPPING=1");
            return Ok(());
        }
        if worker.is_finished() {
            return Err(Error::new(Code::Internal, "the agent's thread that speaks to libvirt has ended"));
        }
        agent.act(&wake);
    }
}

/// The lock that one agent holds as long as it runs.
fn alone(root: &Root) -> Result<Flock<File>> {
    let path = root.resolve(STATE_DIR).join("agent.lock");
    let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(flags)
        .open(&path)
        .map_err(|error| Error::io(Code::StateUnsafe, "open", &path, error))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|_| {
        Error::new(Code::StateLocked, format!("another agent runs: it holds {}", path.display()))
            .with_hint("one is enough; `systemctl status virt-pin-agent` shows it")
    })
}

struct Agent {
    root: Root,
    voice: Voice,
    errands: Sender<Errand>,
    /// What libvirt was told of: each running VM's plan and its QEMU.
    mirrored: BTreeMap<DomainUuid, (Plan, Option<Process>)>,
    withdrawn: Withdrawn,
    drift: Drift,
    metrics: Metrics,
}

impl Agent {
    fn act(&mut self, wake: &Wake) {
        wake.reports.iter().for_each(|report| self.metrics.count(report));
        // First, for whoever defines a VM starts it next.
        if wake.definitions || wake.configuration || wake.cpus || wake.daemon {
            self.send(Errand::Keep);
        }
        let all = wake.everybody || wake.daemon;
        if wake.leases || all || !wake.running.is_empty() {
            match ended::end(&self.root, &self.voice) {
                Ok(count) => self.metrics.reclaimed += count as u64,
                Err(error) => self.voice.fail(&error),
            }
        }
        if wake.cpus {
            self.after_cpus_changed();
        }
        let leases = match lock::read(&self.root) {
            Ok(leases) => leases,
            Err(error) => {
                self.drift.forget();
                return self.voice.fail(&error);
            }
        };
        if wake.leases || wake.daemon {
            self.mirror(&leases);
        }
        if wake.leases || wake.configuration {
            self.withdrawn.look(&self.root, &leases, &self.voice);
        }
        let all = all || wake.leases || wake.cpus || wake.configuration;
        let which = |lease: &Lease| all || wake.running.contains(&lease.name);
        for uuid in self.drift.look(&self.root, &leases, &which, &self.voice) {
            self.send(Errand::Mirror(uuid));
        }
        self.metrics.write(&self.root, &self.drift, &self.voice);
    }

    /// Leases that are new, or have changed, are shown in the live XML.
    fn mirror(&mut self, leases: &Leases) {
        let running = leases.iter().filter(|lease| lease.state == State::Running);
        let running: BTreeMap<_, _> =
            running.filter_map(|lease| Some((lease.uuid, (lease.plan()?.clone(), lease.qemu)))).collect();
        for (uuid, now) in &running {
            if self.mirrored.get(uuid) != Some(now) {
                self.send(Errand::Mirror(*uuid));
            }
        }
        self.mirrored = running;
    }

    /// CPUs have come or gone: the one place where running VMs are put right after that. (What becomes of each lease is in the
    /// journal, and one that was moved is a change of the leases.)
    fn after_cpus_changed(&mut self) {
        match Settings::read(&self.root).and_then(|settings| relocate::repair(&self.root, &settings)) {
            Ok(repairs) => {
                let put_right = |done: &Done| matches!(done, Done::Moved { .. } | Done::Back(_) | Done::Isolated(_));
                let made = repairs.iter().filter(|repair| put_right(&repair.done));
                self.metrics.repaired += made.count() as u64;
            }
            Err(error) => self.voice.fail(&error),
        }
    }

    fn send(&self, errand: Errand) {
        // That the thread has ended is found out by who waits for events.
        let _ = self.errands.send(errand);
    }
}
