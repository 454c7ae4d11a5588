//! The injected "/": where every file of the machine is read from and written to.
//!
//! A [`Root`] is either a directory (`/` in production, a temporary one in tests) or a machine description made by
//! `virt-pin gather`, which can only be read. Paths are given as on the real machine (`/sys/devices/system/cpu/online`).
//! Every error carries the verb and the path. This module knows nothing of what the files mean.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;

use crate::error::{Code, Error, Result};
#[cfg(debug_assertions)]
use crate::failpoint;

/// No file of the kernel, of libvirt or of ours that we read is longer; a longer one is refused, not read.
const MAX_FILE_BYTES: u64 = 16 << 20;
/// Room for all of nearly every file: then it takes one read, and one to see the end. Some of the kernel's files are written
/// anew for each.
const USUAL_BYTES: usize = 4096;

/// The root of a machine's file system.
#[derive(Clone, Debug)]
pub struct Root {
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Directory(PathBuf),
    /// Path -> text, as `gather` writes it. Directories exist by having entries.
    Described(BTreeMap<String, String>),
}

impl Root {
    /// The machine whose `/` is `dir`.
    pub fn directory(dir: impl Into<PathBuf>) -> Root {
        Root { kind: Kind::Directory(dir.into()) }
    }

    /// The machine that `VIRT_PIN_ROOT` names, for tests; `/` without it or when it is empty. libvirt passes no such
    /// variable on to hooks.
    pub fn from_environment() -> Root {
        let named = std::env::var_os("VIRT_PIN_ROOT").filter(|root| !root.is_empty());
        Root::directory(named.unwrap_or_else(|| "/".into()))
    }

    /// A machine known only by the contents of its files: absolute path -> text.
    pub fn described(files: BTreeMap<String, String>) -> Root {
        Root { kind: Kind::Described(files) }
    }

    /// Whether this is a description: nothing can be written, and no process of it is there.
    pub fn is_description(&self) -> bool {
        matches!(self.kind, Kind::Described(_))
    }

    /// Whether this is the machine we run on, seen from its own `/`.
    pub fn is_this_machine(&self) -> bool {
        matches!(&self.kind, Kind::Directory(dir) if dir == Path::new("/"))
    }

    /// Where `path` (absolute, as on the machine) really lies; for a description the path itself.
    pub fn resolve(&self, path: &str) -> PathBuf {
        match &self.kind {
            Kind::Directory(dir) => dir.join(path.trim_start_matches('/')),
            Kind::Described(_) => PathBuf::from(path),
        }
    }

    /// The text of a file, or `None` where it does not exist. Bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`Code::HostIo`] when the file exists and cannot be read, or is longer than 16 MiB.
    pub fn read_if_exists(&self, path: &str) -> Result<Option<String>> {
        let file = match &self.kind {
            Kind::Described(files) => return Ok(files.get(path).cloned()),
            Kind::Directory(_) => self.resolve(path),
        };
        match read_bounded(&file) {
            Ok(text) => Ok(Some(text)),
            Err(error) if is_missing(&error) => Ok(None),
            Err(error) => Err(Error::io(Code::HostIo, "read", &file, error)),
        }
    }

    /// The text of a file that has to be there.
    ///
    /// # Errors
    /// As [`Root::read_if_exists`], and [`Code::HostIo`] when it does not exist.
    pub fn read(&self, path: &str) -> Result<String> {
        self.read_if_exists(path)?
            .ok_or_else(|| Error::io(Code::HostIo, "read", &self.resolve(path), Errno::ENOENT.into()))
    }

    /// The names in a directory, sorted by bytes; empty where the directory does not exist. Names that are not UTF-8
    /// are left out: no file of ours or of the kernel has one.
    ///
    /// # Errors
    /// [`Code::HostIo`] when the directory exists and cannot be read.
    pub fn list(&self, dir: &str) -> Result<Vec<String>> {
        let path = match &self.kind {
            Kind::Described(files) => return Ok(described_names(files, dir)),
            Kind::Directory(_) => self.resolve(dir),
        };
        names(&path, |_| true)
    }

    /// As [`Root::list`], of what is in there only the directories: in a cgroup those below it, among dozens of files.
    ///
    /// # Errors
    /// As [`Root::list`].
    pub fn directories(&self, dir: &str) -> Result<Vec<String>> {
        match &self.kind {
            Kind::Described(files) => {
                let is_file = |name: &String| files.contains_key(&format!("{}/{name}", dir.trim_end_matches('/')));
                Ok(described_names(files, dir).into_iter().filter(|name| !is_file(name)).collect())
            }
            Kind::Directory(_) => names(&self.resolve(dir), |entry| entry.file_type().is_ok_and(|kind| kind.is_dir())),
        }
    }

    /// Whether a file or directory exists (a dangling symbolic link does not).
    pub fn exists(&self, path: &str) -> bool {
        match &self.kind {
            Kind::Described(files) => files.contains_key(path) || !described_names(files, path).is_empty(),
            Kind::Directory(_) => self.resolve(path).exists(),
        }
    }

    /// Writes one value into a file that the kernel made (cgroup, sysfs). Never creates one, never follows a link.
    ///
    /// # Errors
    /// [`Code::HostIo`] with the value, the path and the kernel's reason.
    #[cfg_attr(debug_assertions, track_caller)]
    pub fn write_kernel_file(&self, path: &str, value: &str) -> Result<()> {
        let file = self.resolve(path);
        let failed = |error| Error::io(Code::HostIo, &format!("write \"{value}\" to"), &file, error);
        if self.is_description() {
            return Err(failed(Errno::EROFS.into()));
        }
        #[cfg(debug_assertions)]
        failpoint::kernel_write(std::panic::Location::caller().file()).map_err(failed)?;
        // One write(2): the kernel takes each write as a whole value. (Its files do not mind being truncated, as a shell's
        // redirection does.)
        fs::OpenOptions::new()
            .write(true)
            .truncate(true)
            .custom_flags(nix::fcntl::OFlag::O_NOFOLLOW.bits())
            .open(&file)
            .and_then(|mut open| open.write_all(value.as_bytes()))
            .map_err(failed)
    }
}

/// Whether the error says that there is no such file (a name too long for any file system included; ESRCH is how `/proc`
/// says that a process has ended since its file was opened).
pub(super) fn is_missing(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map_or(Errno::UnknownErrno, Errno::from_raw);
    matches!(errno, Errno::ENOENT | Errno::ENOTDIR | Errno::ENAMETOOLONG | Errno::ESRCH)
}

fn read_bounded(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::with_capacity(USUAL_BYTES);
    // A pipe in a file's place has no writer to wait for.
    let file = fs::OpenOptions::new().read(true).custom_flags(nix::fcntl::OFlag::O_NONBLOCK.bits()).open(path)?;
    let read = file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    if read as u64 > MAX_FILE_BYTES {
        return Err(io::Error::other("longer than 16 MiB"));
    }
    Ok(String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

/// The names of those in a directory that are wanted.
fn names(path: &Path, wanted: impl Fn(&fs::DirEntry) -> bool) -> Result<Vec<String>> {
    let failed = |error| Error::io(Code::HostIo, "list", path, error);
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) if is_missing(&error) => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        if wanted(&entry) {
            names.extend(entry.file_name().into_string());
        }
    }
    names.sort();
    Ok(names)
}

/// The names directly under `dir` in a description.
fn described_names(files: &BTreeMap<String, String>, dir: &str) -> Vec<String> {
    let prefix = format!("{}/", dir.trim_end_matches('/'));
    let names: BTreeSet<&str> = files
        .range(prefix.clone()..)
        .map_while(|(path, _)| path.strip_prefix(&prefix))
        .filter_map(|rest| rest.split('/').next())
        .collect();
    names.into_iter().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_and_its_description_read_alike() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("sys/cpu/cpu1")).unwrap();
        fs::File::create(dir.path().join("sys/cpu/online")).unwrap().write_all(b"0-1\n").unwrap();
        fs::File::create(dir.path().join("sys/cpu/cpu1/x")).unwrap();
        let files = [("/sys/cpu/online", "0-1\n"), ("/sys/cpu/cpu1/x", "")];
        let described = Root::described(files.map(|(path, text)| (path.to_owned(), text.to_owned())).into());
        for root in [Root::directory(dir.path()), described] {
            assert_eq!(root.read("/sys/cpu/online").unwrap(), "0-1\n");
            assert_eq!(root.list("/sys/cpu").unwrap(), ["cpu1", "online"]);
            assert_eq!(root.list("/sys/nothing").unwrap(), [""; 0]);
            assert_eq!(root.directories("/sys/cpu").unwrap(), ["cpu1"]);
            assert_eq!(root.directories("/sys/nothing").unwrap(), [""; 0]);
            assert!(root.exists("/sys/cpu/cpu1") && !root.exists("/sys/cpu/cpu"));
            assert_eq!(root.read_if_exists("/sys/cpu/online/x").unwrap(), None);
            assert!(root.read("/sys/gone").unwrap_err().message.contains("/sys/gone"));
        }
    }

    #[test]
    fn kernel_files_are_neither_created_nor_reached_through_links() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::directory(dir.path());
        assert!(root.write_kernel_file("/new", "1").is_err());
        assert!(!root.exists("/new"));
        fs::File::create(dir.path().join("file")).unwrap();
        std::os::unix::fs::symlink("file", dir.path().join("link")).unwrap();
        let message = root.write_kernel_file("/link", "0-1").unwrap_err().message;
        assert!(message.starts_with("cannot write \"0-1\" to "), "{message}");
        root.write_kernel_file("/file", "0-1").unwrap();
        assert_eq!(root.read("/file").unwrap(), "0-1");
    }
}
