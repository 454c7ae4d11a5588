//! What does virt-pin itself answer? Calls [`alloc::plan`], as every start of a VM and `virt-pin simulate` do; adds
//! nothing to it.

use virt_pin::alloc::policy::Policy;
use virt_pin::alloc::request::Request;
use virt_pin::alloc::{self, Supply};
use virt_pin::cpuset::CpuSet;

use super::Rule;
use crate::machine::{Demand, Free, Machine};

pub(crate) struct Ours {
    prefer: Policy,
    single: Policy,
}

impl Ours {
    pub(crate) fn new() -> Ours {
        // QEMU's own threads are no part of the comparison: they share the vCPUs' CPUs and need no core.
        let policy = |numa| {
            let others = [("emulator", "share"), ("iothreads", "share")];
            Policy::from_attributes([("policy", "dedicated"), ("numa", numa)].into_iter().chain(others)).unwrap()
        };
        Ours { prefer: policy("prefer"), single: policy("single") }
    }
}

impl Rule for Ours {
    fn name(&self) -> &'static str {
        "virt-pin"
    }

    fn place(&self, machine: &Machine, free: &Free, demand: &Demand) -> Option<Vec<usize>> {
        let held = machine.cores.iter().enumerate().filter(|(core, _)| !free.contains(core));
        let taken: CpuSet = held.flat_map(|(_, core)| core.cpus.iter()).collect();
        let nothing = CpuSet::new();
        let supply =
            Supply { topology: &machine.topology, pinnable: &machine.pinnable, taken: &taken, housekeeping: &nothing };
        let policy = if demand.single { &self.single } else { &self.prefer };
        let vcpus = u16::try_from(demand.vcpus).unwrap();
        let request = Request { vcpus, iothreads: 0, policy: policy.clone(), memory: None };
        let plan = alloc::plan(&supply, &request).ok()?;
        let exclusive = plan.exclusive();
        Some(free.iter().copied().filter(|&core| machine.cores[core].cpus.is_subset(&exclusive)).collect())
    }
}
