//! What is made once and kept between runs: images and snapshots, under `$XDG_CACHE_HOME/virt-pin/hostvm`.
//!
//! An entry is a directory whose name ends in the hash of all it is made from, so another recipe is another entry and nothing
//! is ever changed. Whoever needs one first makes it; other threads and processes wait.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use nix::fcntl::{Flock, FlockArg};

use crate::needs::say;

/// An entry that nobody has used for so long is removed when another is made.
const KEPT: Duration = Duration::from_secs(14 * 24 * 3600);

/// The directory of an entry, made by `make` if it is not there yet: then `effort` is announced.
pub(crate) fn entry(
    name: &str,
    recipe: impl Hash,
    effort: &str,
    make: impl FnOnce(&Path) -> Result<(), String>,
) -> Result<PathBuf, String> {
    let root = root();
    fs::create_dir_all(&root).map_err(|error| format!("{}: {error}", root.display()))?;
    let mut hasher = DefaultHasher::new();
    recipe.hash(&mut hasher);
    let dir = root.join(format!("{name}-{:016x}", hasher.finish()));
    if !dir.exists() {
        // One is made at a time: each keeps all CPUs busy.
        let lock = File::create(root.join("lock")).unwrap();
        let _lock = Flock::lock(lock, FlockArg::LockExclusive).unwrap();
        if !dir.exists() {
            make_entry(name, &dir, effort, make)?;
            sweep(&root);
        }
    }
    // Its modification time says when it was last used.
    let _ = File::open(&dir).and_then(|dir| dir.set_modified(SystemTime::now()));
    Ok(dir)
}

fn make_entry(
    name: &str,
    dir: &Path,
    effort: &str,
    make: impl FnOnce(&Path) -> Result<(), String>,
) -> Result<(), String> {
    let (began, partial) = (Instant::now(), Partial(dir.with_extension("partial")));
    say(&format!("{name}: {effort}; kept in {}", dir.display()));
    // What a killed process has left.
    let _ = fs::remove_dir_all(&partial.0);
    make(&partial.0)?;
    fs::rename(&partial.0, dir).unwrap();
    say(&format!("{name}: made in {:.0} s", began.elapsed().as_secs_f64()));
    Ok(())
}

/// An entry that is not whole yet; unless it becomes so it is removed.
struct Partial(PathBuf);

impl Drop for Partial {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn root() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let cache =
        cache.unwrap_or_else(|| PathBuf::from(std::env::var_os("HOME").unwrap_or("/root".into())).join(".cache"));
    cache.join("virt-pin/hostvm")
}

/// Removes entries of recipes that nobody uses any more. A VM that still runs from one keeps its open files.
fn sweep(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let used = entry.metadata().and_then(|metadata| metadata.modified());
        if entry.path().is_dir() && used.is_ok_and(|used| used.elapsed().is_ok_and(|unused| unused > KEPT)) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
