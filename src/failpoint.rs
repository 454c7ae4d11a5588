//! Where a test can kill the process, or have the next step fail: at every step that touches state.
//!
//! `VIRT_PIN_CRASH_AT=NAME` ends the process there as SIGKILL would: nothing is unwound, nothing cleaned up. `NAME:3` means the
//! third time that it comes by, `NAME:3=ENOSPC` has the step fail with that error instead; after a `+` (`NAME:3=ENOSPC+`) every
//! later step of that name fails as well, as on a disk that stays full. `VIRT_PIN_PASSES=FILE` writes down each name that is
//! passed. All of it exists in builds with debug assertions alone; in others each of these functions is empty and the variables
//! are not even read (`make build` looks into the programs for their names).

use std::io;

/// Every point, and whether the step behind it can fail (or only be where the process dies).
///
/// A write into a file of the kernel's is `kernel.` and the file of the source that asks for it, so that none can be forgotten.
pub const POINTS: &[(&str, Step)] = &[
    ("state.directory", Step::Fails),
    ("lock.open", Step::Fails),
    ("lock.wait", Step::Done),
    ("lock.taken", Step::Done),
    ("replace.create", Step::Fails),
    ("replace.write", Step::Fails),
    ("replace.sync", Step::Fails),
    ("replace.rename", Step::Fails),
    ("replace.directory", Step::Fails),
    ("replace.done", Step::Done),
    ("former.remove", Step::Fails),
    ("former.removed", Step::Done),
    ("corrupt.copy", Step::Fails),
    ("tree.create", Step::Fails),
    ("tree.remove", Step::Fails),
    ("scope.create", Step::Fails),
    ("scope.write", Step::Fails),
    ("scope.rename", Step::Fails),
    ("scope.remove", Step::Fails),
    ("partition.create", Step::Fails),
    ("partition.remove", Step::Fails),
    ("slices.tell", Step::Fails),
    ("slices.forget", Step::Fails),
    ("slices.restore", Step::Fails),
    ("kernel.tree", Step::Fails),
    ("kernel.pool", Step::Fails),
    ("kernel.binding", Step::Fails),
    ("kernel.passage", Step::Fails),
    ("kernel.partition", Step::Fails),
    ("kernel.exclusive", Step::Fails),
    ("kernel.slices", Step::Fails),
    ("kernel.irqs", Step::Fails),
    ("affinity", Step::Fails),
    ("sync.start", Step::Fails),
    ("answered", Step::Done),
    // A lease that moves (`relocate`).
    ("recorded", Step::Done),
    ("begun", Step::Done),
    ("dissolved", Step::Done),
    ("grown", Step::Done),
    ("seated", Step::Done),
    ("bound", Step::Done),
    ("memory", Step::Done),
    ("shrunk", Step::Done),
    ("settled", Step::Done),
    ("isolated", Step::Done),
    ("committed", Step::Done),
];

/// What a test can do at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Something is about to be done that may fail.
    Fails,
    /// Something has been done, or is only waited for.
    Done,
}

/// A step that may fail is about to be taken.
///
/// # Errors
/// The one that a test has asked for; none otherwise.
#[inline]
pub fn step(name: &str) -> io::Result<()> {
    #[cfg(debug_assertions)]
    return on::pass(name).map_or(Ok(()), Err);
    #[cfg(not(debug_assertions))]
    {
        let _ = name;
        Ok(())
    }
}

/// Something has been done.
#[inline]
pub fn passed(name: &str) {
    #[cfg(debug_assertions)]
    on::pass(name);
    #[cfg(not(debug_assertions))]
    let _ = name;
}

/// A file of the kernel's is about to be written for the code in this file of the source.
///
/// # Errors
/// As [`step`].
#[cfg(debug_assertions)]
pub fn kernel_write(source: &str) -> io::Result<()> {
    let file = source.rsplit('/').next().unwrap_or(source);
    step(&format!("kernel.{}", file.trim_end_matches(".rs")))
}

#[cfg(debug_assertions)]
mod on {
    use std::env::var_os;
    use std::fs::OpenOptions;
    use std::io::{self, Write};
    use std::sync::atomic::{AtomicUsize, Ordering};

    use nix::errno::Errno;

    /// How often the point that is asked for was passed.
    static PASSES: AtomicUsize = AtomicUsize::new(0);

    /// The errors that a test can ask for.
    const ERRORS: [Errno; 6] = [Errno::ENOSPC, Errno::EROFS, Errno::EIO, Errno::EMFILE, Errno::EBUSY, Errno::EACCES];

    pub(super) fn pass(name: &str) -> Option<io::Error> {
        if let Some(file) = var_os("VIRT_PIN_PASSES") {
            // A point that is in no table is one that no test walks over.
            let known = super::POINTS.iter().any(|(known, _)| *known == name);
            let line = if known { format!("{name}\n") } else { format!("unknown {name}\n") };
            let open = OpenOptions::new().append(true).create(true).open(file);
            let _ = open.and_then(|mut open| open.write_all(line.as_bytes()));
        }
        let wanted = var_os("VIRT_PIN_CRASH_AT")?.into_string().ok()?;
        let (at, what) = wanted.split_once('=').unwrap_or((&wanted, ""));
        let (at, nth) = at.split_once(':').unwrap_or((at, "1"));
        if at != name {
            return None;
        }
        let (now, nth) = (PASSES.fetch_add(1, Ordering::SeqCst) + 1, nth.parse::<usize>().unwrap_or(1));
        let for_ever = what.ends_with('+');
        if now != nth && !(for_ever && now > nth) {
            return None;
        }
        let errno = ERRORS.into_iter().find(|errno| format!("{errno:?}") == what.trim_end_matches('+'));
        let Some(errno) = errno else { std::process::abort() };
        Some(errno.into())
    }
}
