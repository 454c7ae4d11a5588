//! Replaces a file as a whole: after a crash at any instant it has either its old content or its new one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::denied;
use crate::error::Result;
use crate::failpoint::{passed, step};

/// Writes `content` to a new file beside `dir/name`, syncs it, renames it over `name` and syncs the directory. Called
/// with the lock held, so that a temporary file found there is the remains of a crash.
///
/// # Errors
/// `state.unsafe` with the step that failed; `name` then has its old content.
pub(super) fn replace(dir: &Path, name: &str, content: &[u8]) -> Result<()> {
    let temporary = temporary(dir, name);
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(denied("remove", &temporary, error)),
        _ => {}
    }
    let result = write_and_rename(dir, name, &temporary, content);
    if result.is_err() {
        // Best effort: a full disk is not helped by the half-written file.
        let _ = fs::remove_file(&temporary);
    }
    result
}

fn temporary(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.new"))
}

/// Removes the remains of a crash, if there are any.
pub(super) fn sweep(dir: &Path, name: &str) {
    let _ = fs::remove_file(temporary(dir, name));
}

fn write_and_rename(dir: &Path, name: &str, temporary: &Path, content: &[u8]) -> Result<()> {
    // create_new is O_EXCL: it follows no link and takes over nobody's file.
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let mut file = step("replace.create")
        .and_then(|()| options.open(temporary))
        .map_err(|error| denied("create", temporary, error))?;
    step("replace.write").and_then(|()| file.write_all(content)).map_err(|error| denied("write", temporary, error))?;
    step("replace.sync").and_then(|()| file.sync_all()).map_err(|error| denied("sync", temporary, error))?;
    let parent =
        step("replace.directory").and_then(|()| File::open(dir)).map_err(|error| denied("open", dir, error))?;
    let target = dir.join(name);
    step("replace.rename")
        .and_then(|()| fs::rename(temporary, &target))
        .map_err(|error| denied("rename to", &target, error))?;
    // Everybody reads the new content by now: what fails from here on is no reason to tell the caller that it has the old one.
    let _ = parent.sync_all();
    passed("replace.done");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_or_new_never_a_mix() {
        let dir = tempfile::tempdir().unwrap();
        replace(dir.path(), "x", b"a longer text").unwrap();
        replace(dir.path(), "x", b"short").unwrap();
        assert_eq!(fs::read(dir.path().join("x")).unwrap(), b"short");
        // Remains of a crash, and a trap.
        std::os::unix::fs::symlink("/nowhere/at/all", dir.path().join("x.new")).unwrap();
        replace(dir.path(), "x", b"again").unwrap();
        assert_eq!(fs::read(dir.path().join("x")).unwrap(), b"again");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        fs::create_dir(dir.path().join("y")).unwrap();
        assert!(replace(dir.path(), "y", b"").unwrap_err().message.contains("rename"));
        assert!(!dir.path().join("y.new").exists());
    }
}
