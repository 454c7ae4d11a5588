//! Which whole cores does a request get? One answer per rule: ours, and those of others.
//!
//! The others are written anew from what their authors publish (each file names what was read) and reduced to the
//! question of this comparison: whole cores on one machine. What they do besides is left out: memory, devices, PCI,
//! the choice of the machine. Where a rule has settings, it has the best one for whole cores that stay together.
//! Nobody has a memory: the answer follows from the machine, its free cores and the demand.

pub(crate) mod first_fit;
pub(crate) mod kubelet;
pub(crate) mod nova;
pub(crate) mod ours;
pub(crate) mod ovirt;

use crate::machine::{Demand, Free, Machine};

/// A way to place.
pub(crate) trait Rule {
    fn name(&self) -> &'static str;

    /// The cores taken, or `None` for a refusal.
    fn place(&self, machine: &Machine, free: &Free, demand: &Demand) -> Option<Vec<usize>>;
}

/// Every rule of the comparison, ours first.
pub(crate) fn all() -> Vec<Box<dyn Rule>> {
    vec![
        Box::new(ours::Ours::new()),
        Box::new(first_fit::FirstFit),
        Box::new(nova::Nova { pack: true }),
        Box::new(nova::Nova { pack: false }),
        Box::new(kubelet::Kubelet { affinity: true }),
        Box::new(kubelet::Kubelet { affinity: false }),
        Box::new(ovirt::Ovirt),
    ]
}
