//! What the kernel calls a CPU's caches: `cpuN/cache/indexM/{level,type,id}` (Linux 4.11), the numbers that resctrl and so
//! libvirt's `<cachetune>` use. Read only for domains that allocate caches; it is no part of the topology.

use std::collections::{BTreeMap, BTreeSet};

use super::root::Root;
use crate::cpuset::CpuId;
use crate::error::Result;

/// The ids of the unified caches of these levels, by level and CPU.
///
/// # Errors
/// [`crate::error::Code::HostIo`].
pub fn read(root: &Root, levels: &BTreeSet<u32>) -> Result<BTreeMap<(u32, CpuId), u32>> {
    let mut ids = BTreeMap::new();
    if levels.is_empty() {
        return Ok(ids);
    }
    let dir = "/sys/devices/system/cpu";
    for name in root.list(dir)? {
        let Some(cpu) = name.strip_prefix("cpu").and_then(|number| number.parse().ok()).map(CpuId) else { continue };
        for index in root.list(&format!("{dir}/{name}/cache"))?.iter().filter(|index| index.starts_with("index")) {
            let file = |file: &str| root.read_if_exists(&format!("{dir}/{name}/cache/{index}/{file}"));
            let number = |text: Option<String>| text.and_then(|text| text.trim().parse::<u32>().ok());
            let Some(level) = number(file("level")?).filter(|level| levels.contains(level)) else { continue };
            if file("type")?.is_some_and(|kind| kind.trim() == "Unified") {
                ids.extend(number(file("id")?).map(|id| ((level, cpu), id)));
            }
        }
    }
    Ok(ids)
}
