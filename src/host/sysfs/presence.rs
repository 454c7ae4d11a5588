//! Which CPUs there are: online, present, possible, isolated.
//!
//! - `/sys/devices/system/cpu/{online,present,possible}` (2.6.26): CPU lists. Older kernels: the directories `cpuN` are
//!   the CPUs present, and `cpuN/online` holds 0 or 1; a CPU without that file cannot be taken offline, so it is
//!   online.
//! - `/sys/devices/system/cpu/isolated` (4.2): CPU list, empty for none: `isolcpus=` and isolated cpuset partitions.
//!
//! CPU 0 may be offline or absent like any other.

use super::{CPU_DIR, Reader, is_number};
use crate::cpuset::{CpuId, CpuSet, MAX_CPUS};
use crate::error::{Code, Error, Result};

/// The CPUs that exist in one way or another.
pub(super) struct Presence {
    /// Never empty.
    pub(super) online: CpuSet,
    /// All of `online`, and the CPUs that could be taken online now.
    pub(super) present: CpuSet,
    /// All of `present`, and the slots where a CPU could be plugged in.
    pub(super) possible: CpuSet,
    pub(super) isolated: CpuSet,
}

pub(super) fn read(reader: &mut Reader<'_>) -> Result<Presence> {
    let (online, present) = match (list(reader, "online")?, list(reader, "present")?) {
        (Some(online), Some(present)) => (online, present),
        (online, present) => {
            let (found_online, found_present) = directories(reader)?;
            (online.unwrap_or(found_online), present.unwrap_or(found_present))
        }
    };
    if online.is_empty() {
        return Err(unreadable(reader, "online", "no CPU is online"));
    }
    let present = present.union(&online);
    let possible = optional_list(reader, "possible").unwrap_or_default().union(&present);
    let isolated = optional_list(reader, "isolated").unwrap_or_default();
    Ok(Presence { online, present, possible, isolated })
}

/// A list without which nothing can be said.
fn list(reader: &mut Reader<'_>, file: &str) -> Result<Option<CpuSet>> {
    let text = reader
        .try_text(&format!("{CPU_DIR}/{file}"))
        .map_err(|error| Error::new(Code::TopologyUnreadable, &error.message))?;
    text.map(|text| {
        CpuSet::parse_kernel_list(&text)
            .map_err(|error| unreadable(reader, file, &format!("{error} in \"{}\"", text.trim())))
    })
    .transpose()
}

fn optional_list(reader: &mut Reader<'_>, file: &'static str) -> Option<CpuSet> {
    reader.cpus(CPU_DIR, &[(file, CpuSet::parse_kernel_list)])
}

/// The CPUs with a directory: (those online, all).
fn directories(reader: &mut Reader<'_>) -> Result<(CpuSet, CpuSet)> {
    let mut online = CpuSet::new();
    let mut present = CpuSet::new();
    for name in reader.names(CPU_DIR) {
        let Some(digits) = name.strip_prefix("cpu").filter(|rest| is_number(rest)) else { continue };
        let cpu =
            digits.parse().ok().filter(|&cpu| cpu < MAX_CPUS).ok_or_else(|| {
                unreadable(reader, &name, &format!("CPU numbers above {} are not handled", MAX_CPUS - 1))
            })?;
        present.insert(CpuId(cpu));
        let path = format!("{CPU_DIR}/{name}/online");
        let text = reader.text(&path);
        if text.is_none() {
            // A directory without files leaves no trace in a description: it gets the file that says the same.
            reader.note(&path, "1\n");
        }
        if text.is_none_or(|text| text.trim() != "0") {
            online.insert(CpuId(cpu));
        }
    }
    Ok((online, present))
}

fn unreadable(reader: &Reader<'_>, file: &str, reason: &str) -> Error {
    let path = reader.root.resolve(&format!("{CPU_DIR}/{file}"));
    Error::new(Code::TopologyUnreadable, format!("cannot tell the CPUs from {}: {reason}", path.display()))
}
