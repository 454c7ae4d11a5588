//! Everything that is asked of libvirt, in a thread of its own: a daemon that hangs keeps nobody else waiting.
//!
//! A connection is made when there is something to ask, and given up soon after: with one open, a daemon that ends when it is
//! idle would not. What cannot be asked is tried again, later each time, and then waits for the next event: the start of a
//! daemon is one. No lock is held here, ever.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::keep::Keeper;
use super::mirror::{Mirrored, mirror};
use super::voice::Voice;
use crate::error::{Code, Error, Result, counted};
use crate::host::root::Root;
use crate::libvirt::Libvirt;
use crate::lock;
use crate::report;
use crate::uuid::DomainUuid;

/// Something to ask of libvirt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Errand {
    /// Look at every definition.
    Keep,
    /// Have a domain's live XML say its lease.
    Mirror(DomainUuid),
}

/// What the thread has done, for others to read.
#[derive(Debug, Default)]
pub(super) struct Done {
    pub(super) rewritten: AtomicU64,
    pub(super) given_up: AtomicU64,
    pub(super) mirrored: AtomicU64,
}

/// How long a connection stays open after it was last of use.
const LINGER: Duration = Duration::from_secs(2);
/// The first wait for a daemon that does not answer; each is twice the one before.
const FIRST_WAIT: Duration = Duration::from_millis(100);
/// So many waits, 25 seconds in all.
const WAITS: u32 = 8;

/// The thread's own.
pub(super) struct Errands {
    root: Root,
    voice: Voice,
    done: Arc<Done>,
    keeper: Keeper,
    keep: bool,
    mirrors: BTreeSet<DomainUuid>,
    connection: Option<Libvirt>,
    waits: u32,
}

impl Errands {
    pub(super) fn new(root: &Root, done: Arc<Done>) -> Errands {
        Errands {
            root: root.clone(),
            voice: Voice::of(root),
            done,
            keeper: Keeper::default(),
            keep: false,
            mirrors: BTreeSet::new(),
            connection: None,
            waits: 0,
        }
    }

    /// Runs errands until nobody sends any more.
    pub(super) fn run(mut self, errands: &Receiver<Errand>) {
        loop {
            let received = match self.patience() {
                Some(patience) => errands.recv_timeout(patience),
                None => errands.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match received {
                Ok(errand) => {
                    // A new reason is a new chance.
                    self.waits = 0;
                    self.note(errand);
                    errands.try_iter().for_each(|errand| self.note(errand));
                }
                Err(RecvTimeoutError::Timeout) if !self.has_work() => {
                    self.connection = None;
                    continue;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.work();
            // What was counted is to be written.
            report::wake(&self.root);
        }
    }

    /// What is there to be done, without waiting for more.
    pub(super) fn once(mut self, errands: &Receiver<Errand>) {
        errands.try_iter().for_each(|errand| self.note(errand));
        self.work();
    }

    fn note(&mut self, errand: Errand) {
        match errand {
            Errand::Keep => self.keep = true,
            Errand::Mirror(uuid) => drop(self.mirrors.insert(uuid)),
        }
    }

    fn has_work(&self) -> bool {
        self.keep || !self.mirrors.is_empty()
    }

    fn patience(&self) -> Option<Duration> {
        match (self.has_work(), &self.connection) {
            (true, _) => Some(FIRST_WAIT * 2u32.saturating_pow(self.waits.saturating_sub(1))),
            (false, Some(_)) => Some(LINGER),
            (false, None) => None,
        }
    }

    fn work(&mut self) {
        match self.attempt() {
            Ok(()) => self.waits = 0,
            Err(error) => {
                self.connection = None;
                self.waits += 1;
                if self.waits > WAITS {
                    let patience = counted(u64::from(self.waits), "attempt");
                    let what = format!("{} ({patience}); the next event is waited for", error.message);
                    self.voice.say(Some(error.code), &what);
                    self.keep = false;
                    self.mirrors.clear();
                }
            }
        }
    }

    fn attempt(&mut self) -> Result<()> {
        let connection = &mut self.connection;
        let mut connect = || {
            if let Some(open) = connection.as_ref().filter(|open| open.is_alive()) {
                return Ok(open.clone());
            }
            let open = Libvirt::connect()?;
            *connection = Some(open.clone());
            Ok(open)
        };
        while let Some(uuid) = self.mirrors.first().copied() {
            let open = connect()?;
            match mirror(&self.root, &open, uuid) {
                Ok(Mirrored::Set(count)) if count > 0 => drop(self.done.mirrored.fetch_add(1, Ordering::Relaxed)),
                Ok(_) => {}
                Err(error) if !open.is_alive() => return Err(error),
                Err(error) => tell(&self.root, &self.voice, uuid, &error),
            }
            self.mirrors.remove(&uuid);
        }
        if self.keep {
            let begun = Instant::now();
            self.keeper.look(&self.root, &self.voice, &mut connect)?;
            self.keep = false;
            self.done.rewritten.store(self.keeper.rewritten, Ordering::Relaxed);
            self.done.given_up.store(self.keeper.given_up() as u64, Ordering::Relaxed);
            if begun.elapsed() > Duration::from_secs(30) {
                let seconds = begun.elapsed().as_secs();
                self.voice.say(Some(Code::LibvirtFailed), &format!("looking at the definitions took {seconds} s"));
            }
        }
        Ok(())
    }
}

/// A VM that has ended meanwhile, or one started anew, is nobody's trouble.
fn tell(root: &Root, voice: &Voice, uuid: DomainUuid, error: &Error) {
    let leases = lock::read(root).unwrap_or_default();
    if let Some(lease) = leases.get(uuid).filter(|lease| lease.qemu.is_some()) {
        voice.warn((&lease.name, uuid), error.code, &format!("its live XML may not show its lease: {}", error.message));
    }
}
