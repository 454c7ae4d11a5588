//! Which cores are fast and which are slow, on machines that have both.
//!
//! - x86: `/sys/devices/cpu_core/cpus`, `cpu_atom/cpus` (5.13), `cpu_lowpower/cpus` (6.9): the online CPUs that each
//!   performance-counter unit counts; CPU lists. These names exist on hybrid processors only.
//! - Elsewhere: `cpuN/cpu_capacity` (4.15 on Arm), the fastest core having 1024. Frequencies are not looked at: turbo
//!   limits differ between equal cores.

use std::collections::{BTreeMap, BTreeSet};

use super::{Reader, cpu_dir, named};
use crate::cpuset::{CpuId, CpuSet};
use crate::host::{CoreClass, CoreId};

/// Two capacities are of different classes when the lower one is at most this much of the higher one. Cores of one
/// design differ by a few percent (binning, a favoured core, a cluster with a larger cache); designs differ by a third
/// or more.
const STEP_PERCENT: u64 = 80;

/// The class of every online CPU, on a machine with more than one; otherwise nothing. And whether it is an Arm machine (or
/// one like it) that told so, where [a VM stays in one class](crate::host::Topology::keeps_vms_in_one_class).
pub(super) fn read(
    reader: &mut Reader<'_>,
    online: &CpuSet,
    cores: &BTreeMap<CpuId, CoreId>,
) -> (BTreeMap<CpuId, CoreClass>, bool) {
    let mut unit = |name| {
        let list = reader.cpus(&format!("/sys/devices/{name}"), &[("cpus", CpuSet::parse_kernel_list)]);
        list.map(|cpus| cpus.intersection(online))
    };
    let (fast, slow, slowest) = (unit("cpu_core"), unit("cpu_atom"), unit("cpu_lowpower"));
    if fast.is_none() && slow.is_none() && slowest.is_none() {
        let classes = by_capacity(&capacities(reader, online, cores));
        let one_class = !classes.is_empty();
        return (classes, one_class);
    }
    let fast = fast.unwrap_or_default();
    let slow = slow.unwrap_or_default().union(&slowest.unwrap_or_default());
    let both = fast.intersection(&slow);
    let unknown = online.difference(&fast.union(&slow)).union(&both);
    if !unknown.is_empty() {
        reader.lose(format!("{}: the kernel does not say whether their cores are fast or slow", named(&unknown)));
    }
    let fast = fast.difference(&both).iter().map(|cpu| (cpu, CoreClass::Performance)).collect::<Vec<_>>();
    let slow = slow.difference(&both).iter().map(|cpu| (cpu, CoreClass::Efficiency)).collect::<Vec<_>>();
    (fast.into_iter().chain(slow).collect(), false)
}

/// The capacity of each CPU: one file per core, and none after the first where the kernel has no such files.
fn capacities(reader: &mut Reader<'_>, online: &CpuSet, cores: &BTreeMap<CpuId, CoreId>) -> BTreeMap<CpuId, u32> {
    let mut capacity_of: BTreeMap<CpuId, u32> = BTreeMap::new();
    for cpu in online.iter() {
        let known = cores.get(&cpu).and_then(|core| capacity_of.get(&CpuId(core.0))).copied();
        match known.or_else(|| reader.number(&format!("{}/cpu_capacity", cpu_dir(cpu)))) {
            Some(capacity) => drop(capacity_of.insert(cpu, capacity)),
            None if capacity_of.is_empty() => break,
            None => {}
        }
    }
    capacity_of
}

/// Divides at the widest step between neighbouring capacities, if there is one wide enough: whatever lies above it is
/// fast, so the middle cores of a three-tier processor go where they are nearer.
fn by_capacity(capacity_of: &BTreeMap<CpuId, u32>) -> BTreeMap<CpuId, CoreClass> {
    let distinct: BTreeSet<u32> = capacity_of.values().copied().collect();
    let steps = distinct.iter().zip(distinct.iter().skip(1)).map(|(&low, &high)| (u64::from(low), u64::from(high)));
    // Widest first: low/high compared as fractions, in whole numbers.
    let Some((low, high)) = steps.min_by(|a, b| (a.0 * b.1).cmp(&(b.0 * a.1))) else { return BTreeMap::new() };
    if low * 100 > high * STEP_PERCENT {
        return BTreeMap::new();
    }
    let class = |capacity| if u64::from(capacity) >= high { CoreClass::Performance } else { CoreClass::Efficiency };
    capacity_of.iter().map(|(&cpu, &capacity)| (cpu, class(capacity))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `expected`: P or E per CPU, empty for a machine of one class.
    #[track_caller]
    fn check(capacities: &[u32], expected: &str) {
        let capacity_of = (0u16..).map(CpuId).zip(capacities.iter().copied()).collect();
        let classes: String = by_capacity(&capacity_of)
            .values()
            .map(|class| if *class == CoreClass::Performance { 'P' } else { 'E' })
            .collect();
        assert_eq!(classes, expected, "{capacities:?}");
    }

    #[test]
    fn classes_by_capacity() {
        check(&[], "");
        check(&[1024, 1024], "");
        check(&[446, 446, 1024, 1024], "EEPP");
        // Equal cores: one favoured, one binned lower.
        check(&[1024, 1009, 980], "");
        check(&[1024, 830, 820], "");
        check(&[1024, 819], "PE");
        // GB10: two clusters of five slow and five fast cores, each with its own small spread.
        check(&[718, 997, 731, 1017, 1024], "EPEPP");
        // Little, middle, big.
        check(&[250, 870, 1024], "EPP");
        check(&[160, 498, 1024], "EPP");
        check(&[0, 0, 1024], "EEP");
        check(&[0, u32::MAX], "EP");
    }
}
