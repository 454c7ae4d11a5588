//! Replaces a file of the operator's or of libvirt's as a whole: whoever reads it meanwhile finds the old one or the new one.
//! The state has its own way of doing that, under its lock.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::Path;

use crate::error::{Code, Error, Result};

/// Who may do what with a new file.
pub(super) enum Access {
    /// As with any that is written: what the umask leaves of 0644.
    Usual,
    /// Exactly this mode, whatever the umask.
    Mode(u32),
    /// As with this one: its mode, and as far as we may its owner and its group.
    Of(fs::Metadata),
}

/// Writes `content` to `temporary`, syncs it and renames it over `target`. Both are in one file system.
///
/// # Errors
/// `host.io` with the step that failed; the target is as it was.
pub(super) fn replace(target: &Path, temporary: &Path, content: &[u8], access: &Access) -> Result<()> {
    let dir = target.parent().unwrap_or(target);
    fs::create_dir_all(dir).map_err(failed("create", dir))?;
    match fs::remove_file(temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed("remove", temporary)(error)),
        _ => {}
    }
    let written = write_and_rename(target, temporary, content, access);
    if written.is_err() {
        // Best effort: a full disk is not helped by the half-written file.
        let _ = fs::remove_file(temporary);
    }
    written?;
    // Everybody reads the new one by now: that it may not outlast a crash is no reason to say that it is not there.
    let _ = File::open(dir).and_then(|dir| dir.sync_all());
    Ok(())
}

fn write_and_rename(target: &Path, temporary: &Path, content: &[u8], access: &Access) -> Result<()> {
    let mode = match access {
        Access::Usual => 0o644,
        Access::Mode(mode) => *mode,
        Access::Of(former) => former.mode() & 0o7777,
    };
    // create_new is O_EXCL: it follows no link and takes over nobody's file.
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(mode);
    let mut file = options.open(temporary).map_err(failed("create", temporary))?;
    if let Access::Of(former) = access {
        // Who may not give it away keeps it.
        let _ = fchown(&file, Some(former.uid()), Some(former.gid()));
    }
    if !matches!(access, Access::Usual) {
        // The umask may have taken bits away, and so may another owner.
        file.set_permissions(Permissions::from_mode(mode)).map_err(failed("set the mode of", temporary))?;
    }
    file.write_all(content).map_err(failed("write", temporary))?;
    file.sync_all().map_err(failed("sync", temporary))?;
    // A program that is open for writing cannot be executed.
    drop(file);
    fs::rename(temporary, target).map_err(failed("rename to", target))
}

fn failed(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |error| {
        let denied = error.kind() == io::ErrorKind::PermissionDenied && !nix::unistd::geteuid().is_root();
        let error = Error::io(Code::HostIo, verb, path, error);
        if denied { error.with_hint("run it as root") } else { error }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_or_new_and_nothing_left_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let [target, temporary] = ["below/x", "x.new"].map(|name| dir.path().join(name));
        replace(&target, &temporary, b"one", &Access::Mode(0o777)).unwrap();
        let former = fs::metadata(&target).unwrap();
        assert_eq!(former.mode() & 0o777, 0o777);
        // Remains of a crash, and a trap.
        std::os::unix::fs::symlink("/nowhere/at/all", &temporary).unwrap();
        replace(&target, &temporary, b"two", &Access::Of(former)).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"two");
        assert_eq!(fs::metadata(&target).unwrap().mode() & 0o777, 0o777);
        // Only root may give a file away.
        if std::os::unix::fs::chown(&target, Some(7), Some(8)).is_ok() {
            let former = fs::metadata(&target).unwrap();
            replace(&target, &temporary, b"three", &Access::Of(former)).unwrap();
            let now = fs::metadata(&target).unwrap();
            assert_eq!((now.uid(), now.gid(), now.mode() & 0o777), (7, 8, 0o777));
        }
        let below = dir.path().join("below");
        let error = replace(&below, &temporary, b"", &Access::Usual).unwrap_err();
        assert!(error.message.contains("rename") && target.exists(), "{}", error.message);
        assert!(!fs::exists(&temporary).unwrap());
    }
}
