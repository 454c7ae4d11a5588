//! Which CPUs are threads of one core.
//!
//! `cpuN/topology/core_cpus_list` (5.3), before that `thread_siblings_list` (2.6.25), before that the masks: the online
//! threads of the CPU's core, itself included. An offline CPU has no `topology` directory. `core_id` is not looked at:
//! it has holes, and repeats between packages (and on some machines within one).

use std::collections::BTreeMap;

use super::relation::{Ask, groups};
use super::text::parse_kernel_mask;
use super::{Reader, Spelling, cpu_dir, named};
use crate::cpuset::{CpuId, CpuSet};
use crate::host::CoreId;

const THREADS: [Spelling; 4] = [
    ("core_cpus_list", CpuSet::parse_kernel_list),
    ("thread_siblings_list", CpuSet::parse_kernel_list),
    ("core_cpus", parse_kernel_mask),
    ("thread_siblings", parse_kernel_mask),
];

/// The core of every online CPU that has a known one. Every CPU is asked: on this rests that no two VMs share a core.
pub(super) fn read(reader: &mut Reader<'_>, online: &CpuSet) -> BTreeMap<CpuId, CoreId> {
    let cores = groups(online, Ask::Everybody, |cpu| reader.cpus(&format!("{}/topology", cpu_dir(cpu)), &THREADS));
    if !cores.contradicted.is_empty() {
        let cpus = named(&cores.contradicted);
        reader.lose(format!("{cpus}: the kernel's lists of threads that share a core contradict each other"));
    }
    if !cores.silent.is_empty() {
        reader.lose(format!("{}: the kernel does not say which threads share a core", named(&cores.silent)));
    }
    let mut core_of = BTreeMap::new();
    for core in cores.sets {
        if let Some(lowest) = core.first() {
            core_of.extend(core.iter().map(|cpu| (cpu, CoreId(lowest.0))));
        }
    }
    core_of
}
