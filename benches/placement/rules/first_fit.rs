//! The lowest-numbered free cores: what a script does that counts CPUs upwards. For `numa="single"`, those of the first
//! node that has enough. Never looks at caches, and at nodes only when it has to.

use std::collections::BTreeSet;

use super::Rule;
use crate::machine::{Demand, Free, Machine};

pub(crate) struct FirstFit;

impl Rule for FirstFit {
    fn name(&self) -> &'static str {
        "first fit"
    }

    fn place(&self, machine: &Machine, free: &Free, demand: &Demand) -> Option<Vec<usize>> {
        if !demand.single {
            return machine.fill(free.iter().copied(), demand.vcpus);
        }
        let nodes: BTreeSet<u16> = free.iter().map(|&core| machine.cores[core].node).collect();
        nodes.into_iter().find_map(|node| {
            let inside = free.iter().copied().filter(|&core| machine.cores[core].node == node);
            machine.fill(inside, demand.vcpus)
        })
    }
}
