//! Which cgroups of a domain become partitions.
//!
//! Threads that are pinned outside a partition they live in fall back to all of it (measured), so a partition is made where
//! nobody is outside: of the domain as a whole if all its threads are on its own CPUs, else within each vCPU's cgroup, with
//! an empty cgroup for the CPUs that nobody may use. Pure; what is made of it is in [`super::partition`].

use crate::alloc::plan::Plan;
use crate::cpuset::CpuSet;
use crate::error::{Code, Error, Result};

/// The cgroup for leased CPUs that no thread may use, beside those of the threads.
pub(super) const PARKED: &str = "virt-pin-parked";

/// A partition: its cgroup, below that of the domain's threads (`""`: that itself), and its CPUs.
pub(super) type Seat = (String, CpuSet);

/// Where partitions have to be for this plan. `iothreads` are the ids of the domain's I/O threads.
///
/// # Errors
/// [`Code::PolicyUnsupported`] for a plan with threads outside the lease while several share CPUs of it: no cgroup of
/// libvirt's has just those.
pub(super) fn seats(plan: &Plan, iothreads: &[u32]) -> Result<Vec<Seat>> {
    let exclusive = plan.exclusive();
    let io = (!iothreads.is_empty()).then_some(&plan.iothreads);
    let inside =
        [Some(&plan.emulator), io, Some(&plan.shared)].into_iter().flatten().all(|cpus| cpus.is_subset(&exclusive));
    if inside {
        return Ok(vec![(String::new(), exclusive)]);
    }
    let mut seats: Vec<Seat> = Vec::new();
    let mut rest = exclusive;
    for (number, cpu) in (0..).zip(&plan.vcpus) {
        let own: CpuSet = cpu.iter().copied().collect();
        rest = rest.difference(&own);
        seats.extend((!own.is_empty()).then(|| (format!("vcpu{number}"), own)));
    }
    let io = iothreads.iter().map(|id| (format!("iothread{id}"), plan.iothreads.clone()));
    for (name, cpus) in [("emulator".to_owned(), plan.emulator.clone())].into_iter().chain(io) {
        if cpus.is_disjoint(&plan.exclusive()) {
            continue;
        }
        if !cpus.is_subset(&rest) {
            return Err(Error::new(
                Code::PolicyUnsupported,
                format!(
                    "isolation=\"partition\" cannot be made: {name} shares CPUs {cpus} with other threads of the VM while \
                     others of its threads are outside the lease"
                ),
            )
            .with_hint("set emulator and iothreads to the same value, and leave out dedicated-vcpus"));
        }
        rest = rest.difference(&cpus);
        seats.push((name, cpus));
    }
    // First: what it gives up others may be waiting for.
    seats.insert(0, (PARKED.to_owned(), rest));
    Ok(seats)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpuset::CpuId;

    fn set(text: &str) -> CpuSet {
        CpuSet::parse_kernel_list(text).unwrap()
    }

    /// vCPUs on 2 and 3, 6-7 parked.
    fn plan(emulator: &str, iothreads: &str, extra: &str) -> Plan {
        let (parked, extra) = (set("6-7"), set(extra));
        Plan { parked, extra, iothreads: set(iothreads), ..Plan::new([CpuId(2), CpuId(3)], set(emulator)) }
    }

    fn of(plan: &Plan, iothreads: &[u32]) -> Vec<String> {
        let told = |(name, cpus): (String, CpuSet)| format!("{name}={cpus}");
        seats(plan, iothreads).unwrap().into_iter().map(told).collect()
    }

    #[test]
    fn one_for_all_or_one_for_each() {
        assert_eq!(of(&plan("0-1", "0-1", ""), &[1]), ["virt-pin-parked=6-7", "vcpu0=2", "vcpu1=3"]);
        assert_eq!(of(&plan("2-3", "2-3", ""), &[1, 2]), ["=2-3,6-7"]);
        assert_eq!(of(&plan("4-5", "4-5", "4-5"), &[1, 2]), ["=2-7"]);
        // Nobody runs where I/O threads would.
        assert_eq!(of(&plan("2-3", "0-1", ""), &[]), ["=2-3,6-7"]);
        assert_eq!(
            of(&plan("0-1", "4-5", "4-5"), &[7]),
            ["virt-pin-parked=6-7", "vcpu0=2", "vcpu1=3", "iothread7=4-5"]
        );
        assert_eq!(of(&plan("4-5", "0-1", "4-5"), &[1]), ["virt-pin-parked=6-7", "vcpu0=2", "vcpu1=3", "emulator=4-5"]);
        // Another vCPU on the shared CPUs.
        let partly = Plan { vcpus: vec![None, Some(CpuId(2))], shared: set("0-1"), ..plan("0-1", "0-1", "") };
        assert_eq!(of(&partly, &[]), ["virt-pin-parked=6-7", "vcpu1=2"]);
        for (plan, iothreads) in [
            (plan("0-1", "4-5", "4-5"), &[1, 2][..]),
            (plan("2-3", "0-1", ""), &[1]),
            (plan("0-1", "2-3", ""), &[1]),
            (Plan { shared: set("0-1"), ..plan("2-3", "0-1", "") }, &[]),
        ] {
            assert_eq!(seats(&plan, iothreads).unwrap_err().code, Code::PolicyUnsupported);
        }
    }
}
