//! The numbers of each CPU's package, die and cluster.
//!
//! `cpuN/topology/` holds a number and a list for each: `physical_package_id` with `package_cpus_list` (5.3; before
//! that `core_siblings_list`, or the masks), `die_id` with `die_cpus_list` (5.2), `cluster_id` with `cluster_cpus_list`
//! (5.16). -1 is "unknown" (POWER, s390, some RISC-V); a missing file means that the kernel or the architecture has no
//! such level. The lists tell who belongs together, the numbers are names only: two packages of one number are still
//! two packages.

use std::collections::{BTreeMap, BTreeSet};

use super::relation::{Ask, Groups, groups};
use super::text::parse_kernel_mask;
use super::{Reader, Spelling, cpu_dir, named};
use crate::cpuset::{CpuId, CpuSet};
use crate::host::CoreId;

const PACKAGE: [Spelling; 4] = [
    ("package_cpus_list", CpuSet::parse_kernel_list),
    ("core_siblings_list", CpuSet::parse_kernel_list),
    ("package_cpus", parse_kernel_mask),
    ("core_siblings", parse_kernel_mask),
];
const DIE: [Spelling; 2] = [("die_cpus_list", CpuSet::parse_kernel_list), ("die_cpus", parse_kernel_mask)];
const CLUSTER: [Spelling; 2] = [("cluster_cpus_list", CpuSet::parse_kernel_list), ("cluster_cpus", parse_kernel_mask)];

/// What x86 kernels write where the processor reports no clusters.
const NO_CLUSTER: u16 = u16::MAX;

/// The numbers of the online CPUs that have known ones.
pub(super) struct Numbers {
    /// Unique per package.
    pub(super) package: BTreeMap<CpuId, u16>,
    /// Unique within a package.
    pub(super) die: BTreeMap<CpuId, u16>,
    /// Unique within a package; absent where a cluster is one core.
    pub(super) cluster: BTreeMap<CpuId, u16>,
}

pub(super) fn read(reader: &mut Reader<'_>, online: &CpuSet, cores: &BTreeMap<CpuId, CoreId>) -> Numbers {
    let package = packages(reader, online, cores);
    let die = inner(reader, online, "die", &DIE, |_| true);
    // x86 makes every core without neighbours at its L2 a cluster: a group of one core says nothing that the core does
    // not.
    let core_of = |cpu: CpuId| cores.get(&cpu);
    let several_cores = |group: &CpuSet| group.iter().any(|cpu| core_of(cpu) != group.first().and_then(core_of));
    let mut cluster = inner(reader, online, "cluster", &CLUSTER, several_cores);
    cluster.retain(|_, number| *number != NO_CLUSTER);
    Numbers { package, die, cluster }
}

fn packages(reader: &mut Reader<'_>, online: &CpuSet, cores: &BTreeMap<CpuId, CoreId>) -> BTreeMap<CpuId, u16> {
    let file = "physical_package_id";
    let packages =
        groups(online, Ask::OnePerCore(cores), |cpu| reader.cpus(&format!("{}/topology", cpu_dir(cpu)), &PACKAGE));
    lose_contradicted(reader, &packages, "package");

    let mut number_of = BTreeMap::new();
    let mut unnumbered = CpuSet::new();
    for cpu in packages.silent.iter() {
        // There is no list to go by (machines made by hand), so the number is all there is.
        match topology_number(reader, cpu, file) {
            Some(Ok(number)) => drop(number_of.insert(cpu, number)),
            Some(Err(_)) | None => unnumbered.insert(cpu),
        }
    }
    let mut taken: BTreeSet<u16> = number_of.values().copied().collect();
    let mut renumbered: Vec<&CpuSet> = Vec::new();
    for package in &packages.sets {
        match package.first().and_then(|lowest| topology_number(reader, lowest, file)) {
            Some(Ok(number)) if taken.insert(number) => number_of.extend(package.iter().map(|cpu| (cpu, number))),
            Some(_) => renumbered.push(package),
            None => unnumbered = unnumbered.union(package),
        }
    }
    // Numbers of our own only after everybody else has theirs.
    let mut free = (0..=u16::MAX).filter(|number| !taken.contains(number));
    for (package, number) in renumbered.iter().zip(&mut free) {
        number_of.extend(package.iter().map(|cpu| (cpu, number)));
    }
    if !renumbered.is_empty() {
        let cpus = renumbered.iter().fold(CpuSet::new(), |all, package| all.union(package));
        reader
            .lose(format!("{}: the number of their package is not its own, so it is shown with another", named(&cpus)));
    }
    if !unnumbered.is_empty() {
        reader.lose(format!("{}: the kernel does not say which package they are in", named(&unnumbered)));
    }
    number_of
}

/// The numbers of a level between packages and cores. Few files are opened: one list and one number per die or cluster.
fn inner(
    reader: &mut Reader<'_>,
    online: &CpuSet,
    level: &str,
    lists: &[Spelling],
    numbered: impl Fn(&CpuSet) -> bool,
) -> BTreeMap<CpuId, u16> {
    let file = format!("{level}_id");
    let mut number_of = BTreeMap::new();
    let mut absent = false;
    let found = groups(online, Ask::OnePerGroup, |cpu| {
        // What the first CPU has no list of, this kernel has no lists of.
        if absent {
            return None;
        }
        let list = reader.cpus(&format!("{}/topology", cpu_dir(cpu)), lists);
        absent = list.is_none();
        list
    });
    lose_contradicted(reader, &found, level);
    for group in found.sets.iter().filter(|group| numbered(group)) {
        if let Some(Ok(number)) = group.first().and_then(|lowest| topology_number(reader, lowest, &file)) {
            number_of.extend(group.iter().map(|cpu| (cpu, number)));
        }
    }
    // Numbers without lists are names without groups; they are shown as they are, if the first CPU has one.
    for cpu in found.silent.iter() {
        let Some(number) = topology_number(reader, cpu, &file) else { break };
        number_of.extend(number.map(|number| (cpu, number)));
    }
    number_of
}

/// A CPU's number in `cpuN/topology/FILE`: `None` where unknown, `Err` where it is too large to be shown.
fn topology_number(reader: &mut Reader<'_>, cpu: CpuId, file: &str) -> Option<Result<u16, u32>> {
    let number = reader.number(&format!("{}/topology/{file}", cpu_dir(cpu)))?;
    Some(u16::try_from(number).map_err(|_| number))
}

fn lose_contradicted(reader: &mut Reader<'_>, found: &Groups, level: &str) {
    if !found.contradicted.is_empty() {
        let cpus = named(&found.contradicted);
        reader.lose(format!("{cpus}: the kernel's lists of CPUs that share a {level} contradict each other"));
    }
}
