//! Which CPUs share a last-level cache.
//!
//! `cpuN/cache/indexM/{level,type,shared_cpu_list|shared_cpu_map}`: one directory per cache that the CPU uses; `type`
//! is `Data`, `Instruction` or `Unified`. A CPU's last level is its highest unified one, which differs within a
//! machine: the low-power cores of some hybrid processors have no L3. Virtual machines and some Arm boards have no
//! `cache` directory.

use std::collections::BTreeMap;

use super::relation::{Ask, groups};
use super::text::parse_kernel_mask;
use super::{Reader, Spelling, cpu_dir, is_number, named};
use crate::cpuset::{CpuId, CpuSet};
use crate::host::{CoreId, LlcId};

const SHARED: [Spelling; 2] = [("shared_cpu_list", CpuSet::parse_kernel_list), ("shared_cpu_map", parse_kernel_mask)];

/// The last-level cache of every online CPU that has a known one.
pub(super) fn read(
    reader: &mut Reader<'_>,
    online: &CpuSet,
    cores: &BTreeMap<CpuId, CoreId>,
) -> BTreeMap<CpuId, LlcId> {
    // The caches found: who shares it, and under which name its CPUs list it.
    let mut found: Vec<(CpuSet, String)> = Vec::new();
    let caches = groups(online, Ask::OnePerCore(cores), |cpu| {
        let dir = format!("{}/cache", cpu_dir(cpu));
        // A CPU that confirms a cache found before need not be asked about its other caches: if it had a higher one,
        // the CPUs that share this one would have that too.
        if let Some((shared, index)) = found.iter().rev().find(|(shared, _)| shared.contains(cpu)) {
            if reader.cpus(&format!("{dir}/{index}"), &SHARED).as_ref() == Some(shared) {
                return Some(shared.clone());
            }
        }
        let (index, shared) = last_level(reader, &dir)?;
        found.push((shared.clone(), index));
        Some(shared)
    });
    if !caches.contradicted.is_empty() {
        let cpus = named(&caches.contradicted);
        reader.lose(format!("{cpus}: the kernel's lists of CPUs that share a cache contradict each other"));
    }
    if !caches.silent.is_empty() {
        reader.lose(format!("{}: the kernel does not say which last-level cache they use", named(&caches.silent)));
    }
    let mut cache_of = BTreeMap::new();
    for cache in caches.sets {
        if let Some(lowest) = cache.first() {
            cache_of.extend(cache.iter().map(|cpu| (cpu, LlcId(lowest.0))));
        }
    }
    cache_of
}

/// The highest unified cache of one CPU: (the name of its directory, the CPUs that share it).
fn last_level(reader: &mut Reader<'_>, dir: &str) -> Option<(String, CpuSet)> {
    let names = reader.names(dir).into_iter().filter(|name| name.strip_prefix("index").is_some_and(is_number));
    let mut levels: Vec<(u32, String)> =
        names.filter_map(|index| Some((reader.number(&format!("{dir}/{index}/level"))?, index))).collect();
    levels.sort();
    // From the highest level down: the types of most caches need not be read.
    let unified =
        |index: &String| reader.text(&format!("{dir}/{index}/type")).is_some_and(|kind| kind.trim() == "Unified");
    let index = levels.into_iter().rev().map(|(_, index)| index).find(unified)?;
    reader.cpus(&format!("{dir}/{index}"), &SHARED).map(|shared| (index, shared))
}
