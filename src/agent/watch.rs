//! What wakes the agent: files that libvirt, the hook and the operator write, the kernel's word about CPUs, the hook's reports,
//! and signals. One `poll` over all of them; nobody is asked anything in between.
//!
//! libvirt's own events are not needed: what it knows of definitions and running VMs it writes into files, by rename, before a
//! call returns. So no connection is held, and a daemon that ends when it is idle ends.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{AddressFamily, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket};

use crate::config::settings::{DROP_IN_DIR, MAIN_FILE};
use crate::error::{Code, Error, Result};
use crate::host::qemu::{DEFINITION_DIR, RUN_DIR};
use crate::host::root::Root;
use crate::lock::STATE_DIR;
use crate::report::{MAX_BYTES, Report, SOCKET};

/// What a directory's files are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum About {
    Definitions,
    Configuration,
    Leases,
    Running,
}

const DIRECTORIES: [(&str, About); 5] = [
    (DEFINITION_DIR, About::Definitions),
    ("/etc/libvirt/qemu/autostart", About::Definitions),
    (DROP_IN_DIR, About::Configuration),
    (STATE_DIR, About::Leases),
    (RUN_DIR, About::Running),
];

/// The driver's own pid file in [`RUN_DIR`]: written when a daemon starts.
const DRIVER: &str = "driver.pid";

/// Why the agent is awake.
#[derive(Debug, Default)]
pub(super) struct Wake {
    /// Definitions, or which of them start with the host.
    pub(super) definitions: bool,
    /// The operator's files.
    pub(super) configuration: bool,
    /// The leases.
    pub(super) leases: bool,
    /// Names of VMs whose runtime files have changed.
    pub(super) running: BTreeSet<String>,
    /// Whatever runs is to be looked at.
    pub(super) everybody: bool,
    /// A daemon has started.
    pub(super) daemon: bool,
    /// CPUs have come or gone.
    pub(super) cpus: bool,
    /// What the hook has said.
    pub(super) reports: Vec<Report>,
    /// A signal asks it to end.
    pub(super) end: bool,
}

impl Wake {
    /// Everything may have changed.
    pub(super) fn all() -> Wake {
        Wake {
            definitions: true,
            configuration: true,
            leases: true,
            running: BTreeSet::new(),
            everybody: true,
            daemon: true,
            cpus: true,
            reports: Vec::new(),
            end: false,
        }
    }
}

/// A directory; what its files are about, `None` for one in which another is to appear; and its handle.
type Watched = (PathBuf, Option<About>, WatchDescriptor);

/// Everything that is listened to.
#[derive(Debug)]
pub(super) struct Watch {
    root: Root,
    inotify: Inotify,
    watched: BTreeMap<i32, Watched>,
    kernel: Option<OwnedFd>,
    reports: UnixDatagram,
    signals: SignalFd,
}

impl Watch {
    /// Begins to listen. The state directory has to be there, and no other agent.
    ///
    /// # Errors
    /// [`Code::HostIo`] with the step that failed.
    pub(super) fn begin(root: &Root) -> Result<Watch> {
        let failed = |what: &str, errno: Errno| Error::new(Code::HostIo, format!("cannot {what}")).because(errno);
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)
            .map_err(|errno| failed("watch files (inotify)", errno))?;
        let mut mask = SigSet::empty();
        [Signal::SIGTERM, Signal::SIGINT].into_iter().for_each(|signal| mask.add(signal));
        mask.thread_block().map_err(|errno| failed("block signals", errno))?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
            .map_err(|errno| failed("listen to signals", errno))?;
        let path = root.resolve(STATE_DIR).join(SOCKET);
        // Of an agent that has ended: there is no other, or it would hold the lock.
        let _ = std::fs::remove_file(&path);
        let reports = UnixDatagram::bind(&path).map_err(|error| Error::io(Code::HostIo, "bind", &path, error))?;
        reports.set_nonblocking(true).map_err(|error| Error::io(Code::HostIo, "open", &path, error))?;
        let mut watch =
            Watch { root: root.clone(), inotify, watched: BTreeMap::new(), kernel: kernel().ok(), reports, signals };
        watch.attend();
        Ok(watch)
    }

    /// Whether the kernel tells of CPUs that come and go.
    pub(super) fn hears_kernel(&self) -> bool {
        self.kernel.is_some()
    }

    /// Watches what is there; of a directory that is not, the nearest one above it, where it will appear.
    fn attend(&mut self) {
        let main = Path::new(MAIN_FILE).parent().and_then(Path::to_str).map(|dir| (dir, About::Configuration));
        let mut waits = false;
        for (dir, about) in DIRECTORIES.into_iter().chain(main) {
            let wanted = self.root.resolve(dir);
            if self.watched.values().any(|(path, about, _)| *path == wanted && about.is_some()) {
                continue;
            }
            let mut changes = AddWatchFlags::IN_MOVED_TO
                | AddWatchFlags::IN_MOVED_FROM
                | AddWatchFlags::IN_CLOSE_WRITE
                | AddWatchFlags::IN_CREATE
                | AddWatchFlags::IN_DELETE
                | AddWatchFlags::IN_DELETE_SELF
                | AddWatchFlags::IN_MOVE_SELF
                | AddWatchFlags::IN_ONLYDIR;
            if about == About::Running {
                // A daemon that follows one that was killed finds [`DRIVER`] there, writes into it and keeps it open.
                changes |= AddWatchFlags::IN_MODIFY;
            }
            if let Ok(descriptor) = self.inotify.add_watch(&wanted, changes) {
                self.watched.insert(raw(descriptor), (wanted, Some(about), descriptor));
                continue;
            }
            let appears = AddWatchFlags::IN_CREATE
                | AddWatchFlags::IN_MOVED_TO
                | AddWatchFlags::IN_DELETE_SELF
                | AddWatchFlags::IN_ONLYDIR
                // One that is watched for its own sake keeps being so.
                | AddWatchFlags::from_bits_retain(nix::libc::IN_MASK_ADD);
            let above =
                wanted.ancestors().skip(1).find_map(|dir| Some((dir, self.inotify.add_watch(dir, appears).ok()?)));
            if let Some((dir, descriptor)) = above {
                self.watched.entry(raw(descriptor)).or_insert_with(|| (dir.to_owned(), None, descriptor));
                waits = true;
            }
        }
        if !waits {
            // Much happens in `/run` and `/etc` that is none of our business.
            let idle = self.watched.iter().filter(|(_, (_, about, _))| about.is_none());
            let idle: Vec<i32> = idle.map(|(wd, _)| *wd).collect();
            for (_, _, descriptor) in idle.into_iter().filter_map(|wd| self.watched.remove(&wd)) {
                let _ = self.inotify.rm_watch(descriptor);
            }
        }
    }

    /// Sleeps until something happens, or for `patience`; then what has.
    ///
    /// # Errors
    /// [`Code::HostIo`]: the kernel does not let us wait.
    pub(super) fn wait(&mut self, patience: Option<Duration>) -> Result<Wake> {
        let timeout = patience.map_or(PollTimeout::NONE, |patience| {
            // Rounded up: what is due in less than a millisecond is not waited for by turning round.
            PollTimeout::try_from(patience + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
        });
        let mut sources = vec![self.inotify.as_fd(), self.reports.as_fd(), self.signals.as_fd()];
        sources.extend(self.kernel.as_ref().map(AsFd::as_fd));
        let mut sources: Vec<PollFd<'_>> = sources.into_iter().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        match poll(&mut sources, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(Error::new(Code::HostIo, "cannot wait for events").because(errno)),
        }
        drop(sources);
        let mut wake = Wake::default();
        self.files(&mut wake);
        self.kernel(&mut wake);
        let mut bytes = [0; MAX_BYTES];
        while let Ok(length) = self.reports.recv(&mut bytes) {
            let text = bytes.get(..length).and_then(|text| std::str::from_utf8(text).ok());
            wake.reports.extend(text.and_then(Report::parse));
        }
        while let Ok(Some(_)) = self.signals.read_signal() {
            wake.end = true;
        }
        Ok(wake)
    }

    fn files(&mut self, wake: &mut Wake) {
        let mut anew = false;
        while let Ok(events) = self.inotify.read_events() {
            for event in events {
                if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                    *wake = Wake { end: wake.end, reports: std::mem::take(&mut wake.reports), ..Wake::all() };
                    continue;
                }
                let Some((_, about, _)) = self.watched.get(&raw(event.wd)) else { continue };
                let gone = AddWatchFlags::IN_IGNORED | AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_MOVE_SELF;
                if event.mask.intersects(gone) {
                    self.watched.remove(&raw(event.wd));
                    let _ = self.inotify.rm_watch(event.wd);
                    anew = true;
                    continue;
                }
                let name = event.name.as_deref().map(|name| name.to_string_lossy()).unwrap_or_default();
                anew |= about.is_none() || event.mask.contains(AddWatchFlags::IN_ISDIR);
                match about {
                    // libvirt and we replace files by rename; the temporary ones say nothing.
                    _ if name.ends_with(".new") => {}
                    Some(About::Definitions) => wake.definitions = true,
                    Some(About::Configuration) => wake.configuration = true,
                    Some(About::Leases) => wake.leases |= name == "leases.json",
                    Some(About::Running) if name == DRIVER => wake.daemon = true,
                    Some(About::Running) => {
                        let domain = name.strip_suffix(".xml").or_else(|| name.strip_suffix(".pid"));
                        wake.running.extend(domain.map(str::to_owned));
                    }
                    None => {}
                }
            }
        }
        if anew {
            let before = self.watched.values().filter(|(_, about, _)| about.is_some()).count();
            self.attend();
            if self.watched.values().filter(|(_, about, _)| about.is_some()).count() > before {
                // What was written before the watch began.
                wake.definitions = true;
                wake.configuration = true;
                wake.leases = true;
                wake.everybody = true;
            }
        }
    }

    /// "online@/devices/system/cpu/cpu3" and NUL, then variables.
    fn kernel(&self, wake: &mut Wake) {
        let Some(kernel) = &self.kernel else { return };
        let mut message = [0; 8192];
        loop {
            let flags = nix::sys::socket::MsgFlags::MSG_DONTWAIT;
            match recv(kernel.as_raw_fd(), &mut message, flags) {
                Ok(length) => {
                    let text = message.get(..length).unwrap_or_default();
                    let head = text.split(|byte| *byte == 0).next().unwrap_or_default();
                    let head = String::from_utf8_lossy(head);
                    let device = head.split_once('@').map(|(_, device)| device).unwrap_or_default();
                    wake.cpus |= device.starts_with("/devices/system/cpu/cpu");
                }
                // Messages were lost.
                Err(Errno::ENOBUFS) => wake.cpus = true,
                Err(_) => return,
            }
        }
    }
}

/// The kernel's announcements of devices.
fn kernel() -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let kernel = socket(AddressFamily::Netlink, SockType::Datagram, flags, SockProtocol::NetlinkKObjectUEvent)?;
    // Group 1 is the kernel's own; 2 is udev's.
    bind(kernel.as_raw_fd(), &NetlinkAddr::new(0, 1))?;
    Ok(kernel)
}

fn raw(descriptor: WatchDescriptor) -> i32 {
    descriptor.as_raw()
}
