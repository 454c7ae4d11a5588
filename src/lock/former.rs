//! What was changed on the host for leases, as it was before: `host.json` beside the leases, for as long as anything is.
//!
//! ```text
//! {"version":1,"exclusive":{"/sys/fs/cgroup/machine.slice":""},"irqs":{"/proc/irq/24/smp_affinity_list":"0-15"},
//!  "units":{"system.slice":{"cpus":"","drop_in":null}}}
//! ```
//! A value is written down before the first change to it, and taken out once it is as it was: a crash in between leaves a
//! value that is written once more, never one that nobody knows. Only the lock's holder writes. What is to be changed, and
//! when it is restored, is not known here.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{STATE_DIR, StateLock, denied, replace, text_of_ours};
use crate::error::{Code, Error, Result};
use crate::failpoint::{passed, step};
use crate::host::root::Root;

const VERSION: u32 = 1;
pub(super) const FILE: &str = "host.json";
/// Ten thousand interrupts take less than a megabyte.
const MAX_BYTES: u64 = 4 << 20;

/// Former values of the host. Values are the text of their file without its line's end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Former {
    /// `cpuset.cpus.exclusive` of cgroups that hold VMs, by directory.
    pub exclusive: BTreeMap<String, String>,
    /// Affinities of interrupts, by file.
    pub irqs: BTreeMap<String, String>,
    /// systemd's units, by name.
    pub units: BTreeMap<String, FormerUnit>,
}

/// What a unit had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FormerUnit {
    /// Its `cpuset.cpus`; `None` where it had no such file.
    pub cpus: Option<String>,
    /// The drop-in that systemd had for its CPUs until the next boot.
    pub drop_in: Option<String>,
}

impl Former {
    /// Whether the host is as it was.
    pub fn is_empty(&self) -> bool {
        self.exclusive.is_empty() && self.irqs.is_empty() && self.units.is_empty()
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileV1 {
    version: u32,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    exclusive: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    irqs: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    units: BTreeMap<String, FormerUnit>,
}

impl StateLock {
    /// The former values; none where nothing is changed.
    ///
    /// # Errors
    /// As [`read`].
    pub fn former(&self) -> Result<Former> {
        read_file(&self.dir.join(FILE))
    }

    /// Keeps these former values instead; after it returns they survive a crash. None: the file goes.
    ///
    /// # Errors
    /// [`Code::StateUnsafe`] when a file operation fails.
    pub fn keep_former(&mut self, former: &Former) -> Result<()> {
        let path = self.dir.join(FILE);
        if former.is_empty() {
            return match step("former.remove").and_then(|()| fs::remove_file(&path)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(denied("remove", &path, error)),
                _ => {
                    passed("former.removed");
                    Ok(())
                }
            };
        }
        let Former { exclusive, irqs, units } = former.clone();
        let text = serde_json::to_string(&FileV1 { version: VERSION, exclusive, irqs, units })
            .map_err(|error| Error::new(Code::Internal, "cannot write former values as JSON").because(error))?;
        replace::replace(&self.dir, FILE, (text + "\n").as_bytes())
    }
}

/// The former values without the lock, for those who only look.
///
/// # Errors
/// [`Code::StateCorrupt`], [`Code::StateNewer`] or [`Code::StateUnsafe`].
pub fn read(root: &Root) -> Result<Former> {
    if root.is_description() {
        return Ok(Former::default());
    }
    read_file(&root.resolve(STATE_DIR).join(FILE))
}

fn read_file(path: &Path) -> Result<Former> {
    let Some(text) = text_of_ours(path, MAX_BYTES)? else { return Ok(Former::default()) };
    /// A newer file may have any other field.
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    if let Ok(Version { version }) = serde_json::from_str(&text) {
        if version > VERSION {
            let ours = env!("CARGO_PKG_VERSION");
            let found =
                format!("{} has version {version}; this is virt-pin {ours} and reads up to {VERSION}", path.display());
            return Err(Error::new(Code::StateNewer, found));
        }
    }
    let file: FileV1 = serde_json::from_str(&text).map_err(|error| {
        Error::new(Code::StateCorrupt, format!("{} does not say what was changed on the host", path.display()))
            .because(error)
            .with_hint("`virt-pin reconcile` takes it away; what it was to restore is restored by a reboot")
    })?;
    Ok(Former { exclusive: file.exclusive, irqs: file.irqs, units: file.units })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::DEADLINE;

    #[test]
    fn what_is_kept_is_read_and_nothing_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::directory(dir.path());
        let mut state = StateLock::acquire(&root, DEADLINE).unwrap();
        assert!(state.former().unwrap().is_empty());
        let unit = FormerUnit { cpus: Some(String::new()), drop_in: None };
        let former = Former {
            exclusive: [("/c/machine.slice".to_owned(), String::new())].into(),
            irqs: [("/proc/irq/1/smp_affinity_list".to_owned(), "0-3".to_owned())].into(),
            units: [("system.slice".to_owned(), unit)].into(),
        };
        state.keep_former(&former).unwrap();
        assert_eq!(
            root.read("/run/virt-pin/host.json").unwrap(),
            "{\"version\":1,\"exclusive\":{\"/c/machine.slice\":\"\"},\"irqs\":{\"/proc/irq/1/smp_affinity_list\":\"0-3\"},\
             \"units\":{\"system.slice\":{\"cpus\":\"\",\"drop_in\":null}}}\n"
        );
        assert_eq!((state.former().unwrap(), read(&root).unwrap()), (former.clone(), former));
        state.keep_former(&Former::default()).unwrap();
        state.keep_former(&Former::default()).unwrap();
        assert_eq!(root.list("/run/virt-pin").unwrap(), ["lock"]);
        for (text, code) in [
            ("{\"version\":2,\"more\":1}", Code::StateNewer),
            ("{\"version\":1,\"more\":1}", Code::StateCorrupt),
            ("", Code::StateCorrupt),
        ] {
            replace::replace(&state.dir, FILE, text.as_bytes()).unwrap();
            assert_eq!(state.former().unwrap_err().code, code);
        }
    }
}
