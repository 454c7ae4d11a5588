//! What a placement rule sees: a machine's whole cores, which of them are free, and a demand.
//!
//! Never decides anything. A core with a thread that may not be handed out is never free; that is the same for every rule.

use std::collections::BTreeSet;

use virt_pin::cpuset::CpuSet;
use virt_pin::host::{CoreClass, Topology};

/// A host of the comparison.
pub(crate) struct Machine {
    pub(crate) name: &'static str,
    pub(crate) topology: Topology,
    pub(crate) pinnable: CpuSet,
    /// By their lowest CPU number, ascending; a core's index is its name here.
    pub(crate) cores: Vec<Core>,
}

/// A whole core.
pub(crate) struct Core {
    pub(crate) cpus: CpuSet,
    pub(crate) node: u16,
    pub(crate) cache: u16,
    pub(crate) package: u16,
    pub(crate) class: Option<CoreClass>,
    /// Whether every thread of it may be handed out.
    pub(crate) offered: bool,
}

/// The free cores, by index.
pub(crate) type Free = BTreeSet<usize>;

/// What one VM asks for: whole cores for so many vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Demand {
    pub(crate) vcpus: usize,
    /// One NUMA node or a refusal (`numa="single"`); otherwise as few as the rule can (`numa="prefer"`).
    pub(crate) single: bool,
}

/// How far a placement reaches; smaller is nearer. Nodes count before caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Spans {
    pub(crate) nodes: usize,
    pub(crate) caches: usize,
}

impl Machine {
    pub(crate) fn new(name: &'static str, topology: Topology, pinnable: CpuSet) -> Machine {
        let core = |cpus: &CpuSet| {
            let first = topology.cpu(cpus.first().unwrap()).unwrap();
            Core {
                cpus: cpus.clone(),
                node: first.node.unwrap().0,
                cache: first.llc.unwrap().0,
                package: first.package.unwrap(),
                class: first.class,
                offered: cpus.is_subset(&pinnable),
            }
        };
        let cores = topology.cores().values().map(core).collect();
        Machine { name, topology, pinnable, cores }
    }

    /// The cores that are free when nobody runs.
    pub(crate) fn offered(&self) -> Free {
        (0..self.cores.len()).filter(|&core| self.cores[core].offered).collect()
    }

    pub(crate) fn threads(&self, core: usize) -> usize {
        self.cores[core].cpus.len()
    }

    /// The first of these cores that together hold the vCPUs, in the order given; `None` if all of them are too few.
    pub(crate) fn fill(&self, cores: impl IntoIterator<Item = usize>, vcpus: usize) -> Option<Vec<usize>> {
        let (mut taken, mut held) = (Vec::new(), 0);
        for core in cores {
            if held >= vcpus {
                break;
            }
            held += self.threads(core);
            taken.push(core);
        }
        (held >= vcpus).then_some(taken)
    }

    /// How many vCPUs these cores hold.
    pub(crate) fn holds(&self, cores: impl IntoIterator<Item = usize>) -> usize {
        cores.into_iter().map(|core| self.threads(core)).sum()
    }

    /// How many threads a demand takes, its last core taken whole. Where cores differ in size, demands are even and the
    /// cores have one thread or two: then nothing is left over.
    pub(crate) fn cost(&self, demand: &Demand) -> usize {
        let sizes: BTreeSet<usize> = (0..self.cores.len()).map(|core| self.threads(core)).collect();
        match sizes.first() {
            Some(&threads) if sizes.len() == 1 => demand.vcpus.next_multiple_of(threads),
            _ => demand.vcpus,
        }
    }

    /// Whether these cores are of more than one class.
    pub(crate) fn mixes_classes(&self, cores: &[usize]) -> bool {
        cores.iter().map(|&core| self.cores[core].class).collect::<BTreeSet<_>>().len() > 1
    }

    pub(crate) fn spans(&self, cores: &[usize]) -> Spans {
        let nodes: BTreeSet<u16> = cores.iter().map(|&core| self.cores[core].node).collect();
        let caches: BTreeSet<u16> = cores.iter().map(|&core| self.cores[core].cache).collect();
        Spans { nodes: nodes.len(), caches: caches.len() }
    }
}
