//! The lock, and the only way to change the leases.
//!
//! `/run/virt-pin/` holds `lock` and `leases.json`, and what [`survey`] and [`former`] keep. [`StateLock`] is a flock on `lock`, waited for with a deadline (libvirt
//! holds a VM's own lock meanwhile): the file is created once and never renamed, truncated or removed, so that two
//! processes never hold two locks. Only a [`StateLock`] can replace the leases. Nobody may call libvirt while holding it.

pub mod former;
mod holder;
pub mod leases;
mod plan;
pub mod reclaim;
mod replace;
mod request;
pub mod survey;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};

use crate::error::{Code, Error, Result};
use crate::failpoint;
use crate::host::root::Root;
use leases::Leases;

/// Where the state lives.
pub const STATE_DIR: &str = "/run/virt-pin";
/// The leases, in it.
pub const LEASES_FILE: &str = "/run/virt-pin/leases.json";
/// How long a hook waits for the lock. Other holders need about a millisecond; a `virsh define` of the same VM freezes
/// the whole libvirt daemon while we wait.
pub const DEADLINE: Duration = Duration::from_secs(2);
/// A file of leases is never longer: 8192 CPUs in as many leases are below 8 MiB.
const MAX_LEASES_BYTES: u64 = 16 << 20;

/// The lease lock, held until dropped.
#[derive(Debug)]
pub struct StateLock {
    dir: PathBuf,
    _lock: Flock<File>,
}

impl StateLock {
    /// Takes the lock, making the state directory if need be.
    ///
    /// # Errors
    /// [`Code::StateUnsafe`] when the directory or the lock file is not ours or cannot be made; [`Code::StateLocked`]
    /// when somebody else held the lock all the time until `deadline` had passed.
    pub fn acquire(root: &Root, deadline: Duration) -> Result<StateLock> {
        if root.is_description() {
            return Err(Error::new(Code::StateUnsafe, "a machine description has no state to lock"));
        }
        let dir = root.resolve(STATE_DIR);
        ensure_directory(&dir)?;
        let path = dir.join("lock");
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        options.custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits());
        let opened = failpoint::step("lock.open").and_then(|()| options.open(&path));
        let file = opened.map_err(|error| denied("open", &path, error))?;
        ours(&path, &file)?;
        let found = file.metadata().map_err(|error| denied("look at", &path, error))?;
        failpoint::passed("lock.wait");
        let locked = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Err((file, Errno::EWOULDBLOCK | Errno::EINTR)) => wait(file, deadline),
            locked => locked.map_err(|(_, errno)| errno.into()),
        };
        match locked {
            Ok(lock) => {
                failpoint::passed("lock.taken");
                Ok(StateLock { dir, _lock: lock })
            }
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                let who = holder::holder(root, &found).map(|who| format!(" ({who})")).unwrap_or_default();
                let (path, waited) = (path.display(), deadline.as_millis());
                Err(Error::new(Code::StateLocked, format!("{path} was held by another process{who} for {waited} ms")))
            }
            Err(error) => Err(denied("lock", &path, error)),
        }
    }

    /// The leases as they are; none if there is no file yet.
    ///
    /// # Errors
    /// As [`read`].
    pub fn load(&self) -> Result<Leases> {
        read_file(&self.dir.join("leases.json"))
    }

    /// Replaces the leases: after it returns they survive a crash, before that the old ones do.
    ///
    /// # Errors
    /// [`Code::StateUnsafe`] when a file operation fails; [`Code::Internal`] when the leases contradict themselves.
    pub fn replace(&mut self, leases: &Leases) -> Result<()> {
        leases.check().map_err(|what| Error::new(Code::Internal, format!("refused to write leases: {what}")))?;
        replace::replace(&self.dir, "leases.json", leases.to_json()?.as_bytes())
    }

    /// Removes what writers left that were killed: with the lock held, nobody is writing.
    pub fn sweep(&mut self) {
        for name in [LEASES_FILE, former::FILE, survey::FILE] {
            replace::sweep(&self.dir, name.rsplit('/').next().unwrap_or(name));
        }
    }
}

/// Waits in the kernel's queue for the lock, where whoever asks again and again does not get ahead of those who wait. A thread
/// does, as flock(2) knows no deadline: what it gets too late, nobody receives, and that unlocks it.
fn wait(mut file: File, deadline: Duration) -> io::Result<Flock<File>> {
    let (sender, receiver) = mpsc::channel();
    let waiting = move || loop {
        match Flock::lock(file, FlockArg::LockExclusive) {
            Err((back, Errno::EINTR)) => file = back,
            locked => {
                let _ = sender.send(locked.map_err(|(_, errno)| io::Error::from(errno)));
                return;
            }
        }
    };
    thread::Builder::new().spawn(waiting)?;
    receiver.recv_timeout(deadline).unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// The leases without the lock, for those who only look: a replacement is atomic, so they are whole, if maybe outdated.
///
/// # Errors
/// [`Code::StateCorrupt`], [`Code::StateNewer`] or [`Code::StateUnsafe`].
pub fn read(root: &Root) -> Result<Leases> {
    if root.is_description() {
        let Some(text) = root.read_if_exists(LEASES_FILE)? else { return Ok(Leases::default()) };
        return Leases::from_json(&text).map_err(|error| error.in_file(LEASES_FILE.as_ref()));
    }
    read_file(&root.resolve(LEASES_FILE))
}

/// Whether directory and lock are ours alone, as taking the lock demands ([`read`] looks at the leases themselves). What
/// is not there yet is safe; nothing is made.
///
/// # Errors
/// [`Code::StateUnsafe`] with the way out.
pub fn check_safety(root: &Root) -> Result<()> {
    let dir = root.resolve(STATE_DIR);
    for (path, is_dir) in [(dir.clone(), true), (dir.join("lock"), false)] {
        match fs::symlink_metadata(&path) {
            Ok(found) if found.is_dir() != is_dir => {
                let what = if is_dir { "is not a directory" } else { "is not a regular file" };
                return Err(not_ours(&path, what));
            }
            Ok(found) => ours_alone(&path, &found)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(denied("look at", &path, error)),
        }
    }
    Ok(())
}

fn read_file(path: &Path) -> Result<Leases> {
    let Some(text) = text_of_ours(path, MAX_LEASES_BYTES)? else { return Ok(Leases::default()) };
    Leases::from_json(&text).map_err(|error| error.in_file(path))
}

/// The first `most` bytes of a file that has to be ours; `None` if there is none.
fn text_of_ours(path: &Path, most: u64) -> Result<Option<String>> {
    let open = OpenOptions::new().read(true).custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits()).open(path);
    let file = match open {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(denied("open", path, error)),
    };
    ours(path, &file)?;
    let mut text = String::new();
    let read = file.take(most).read_to_string(&mut text);
    match read {
        Ok(_) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            Err(Error::new(Code::StateCorrupt, format!("{} is not text", path.display())))
        }
        Err(error) => Err(denied("read", path, error)),
    }
}

/// Makes the directory, or checks that the one that is there is ours alone to write.
fn ensure_directory(dir: &Path) -> Result<()> {
    if let Some(parent) = dir.parent() {
        fs::create_dir_all(parent).map_err(|error| denied("create", parent, error))?;
    }
    match failpoint::step("state.directory").and_then(|()| DirBuilder::new().mode(0o700).create(dir)) {
        Ok(()) => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(denied("create", dir, error)),
    }
    let found = fs::symlink_metadata(dir).map_err(|error| denied("look at", dir, error))?;
    if !found.is_dir() {
        return Err(not_ours(dir, "is not a directory"));
    }
    ours_alone(dir, &found)
}

/// Checks that an open file is a regular one that belongs to us.
fn ours(path: &Path, file: &File) -> Result<()> {
    let found = file.metadata().map_err(|error| denied("look at", path, error))?;
    if !found.is_file() {
        return Err(not_ours(path, "is not a regular file"));
    }
    ours_alone(path, &found)
}

/// Checks that it belongs to us and nobody else may write to it.
fn ours_alone(path: &Path, found: &fs::Metadata) -> Result<()> {
    let (us, path_text) = (nix::unistd::geteuid().as_raw(), path.display());
    if found.uid() != us {
        let error = not_ours(path, &format!("belongs to uid {}", found.uid()));
        return Err(error.with_hint(format!("`chown {us} {path_text}`, once it is clear who made it")));
    }
    if found.mode() & 0o022 != 0 {
        let mode = if found.is_dir() { "0700" } else { "0600" };
        let error = not_ours(path, &format!("has mode {:04o}: others may write to it", found.mode() & 0o7777));
        return Err(error.with_hint(format!("`chmod {mode} {path_text}`: until then no lease is granted")));
    }
    Ok(())
}

fn not_ours(path: &Path, what: &str) -> Error {
    Error::new(Code::StateUnsafe, format!("{} {what}", path.display()))
}

fn denied(verb: &str, path: &Path, source: io::Error) -> Error {
    let hint = match source.kind() {
        io::ErrorKind::PermissionDenied if !nix::unistd::geteuid().is_root() => Some("run it as root"),
        io::ErrorKind::PermissionDenied => {
            Some("uid 0 was denied: look for SELinux or AppArmor messages in the audit log")
        }
        _ => None,
    };
    let error = Error::io(Code::StateUnsafe, verb, path, source);
    match hint {
        Some(hint) => error.with_hint(hint),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn the_lock_excludes_and_has_a_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::directory(dir.path());
        let held = StateLock::acquire(&root, SHORT).unwrap();
        assert_eq!(StateLock::acquire(&root, SHORT).unwrap_err().code, Code::StateLocked);
        drop(held);
        let inode = || fs::metadata(dir.path().join("run/virt-pin/lock")).unwrap().ino();
        let before = inode();
        StateLock::acquire(&root, SHORT).unwrap().replace(&Leases::default()).unwrap();
        assert_eq!(inode(), before);
        assert_eq!(fs::metadata(dir.path().join("run/virt-pin")).unwrap().mode() & 0o777, 0o700);
        assert_eq!(fs::metadata(dir.path().join("run/virt-pin/leases.json")).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn what_is_not_safely_ours_is_refused_and_left_alone() {
        let refused = |prepare: &dyn Fn(&Path), expected: &str| {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir_all(dir.path().join("run")).unwrap();
            prepare(&dir.path().join("run/virt-pin"));
            let root = Root::directory(dir.path());
            let result = StateLock::acquire(&root, SHORT).and_then(|lock| lock.load().map(|_| ()));
            let error = result.unwrap_err();
            assert_eq!(error.code, Code::StateUnsafe);
            assert!(error.message.contains(expected), "{}", error.message);
        };
        let make = |dir: &Path| DirBuilder::new().mode(0o700).create(dir).unwrap();
        refused(&|dir| drop(File::create(dir).unwrap()), "run/virt-pin is not a directory");
        refused(&|dir| symlink("/tmp", dir).unwrap(), "is not a directory");
        refused(
            &|dir| {
                make(dir);
                fs::set_permissions(dir, fs::Permissions::from_mode(0o777)).unwrap();
            },
            "mode 0777: others may write to it",
        );
        refused(
            &|dir| {
                make(dir);
                symlink("/nowhere", dir.join("lock")).unwrap();
            },
            "cannot open",
        );
        refused(
            &|dir| {
                make(dir);
                fs::create_dir(dir.join("lock")).unwrap();
            },
            "cannot open",
        );
        refused(
            &|dir| {
                make(dir);
                symlink("/etc/passwd", dir.join("leases.json")).unwrap();
            },
            "cannot open",
        );
        refused(
            &|dir| {
                make(dir);
                fs::create_dir(dir.join("leases.json")).unwrap();
            },
            "is not a regular file",
        );
    }
}
