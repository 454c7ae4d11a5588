//! Which VMs come and go? Streams of starts and stops, the same for every rule: drawn once, from a fixed seed, knowing the
//! machine's size and nothing of any placement.
//!
//! VMs come until the next one would lift the load over its target; then VMs go, each as likely as any other, until there
//! is room for it by count. So no request is ever refused because too few cores are free: what is refused, is refused
//! because of where the free cores are.

use std::collections::BTreeMap;

use crate::machine::{Demand, Machine};

/// Loads in percent: cores asked for, of those offered.
pub(crate) const LOADS: [usize; 3] = [70, 85, 95];

/// Starts in each stream.
const STARTS: usize = 400;

/// What kind of VMs: sizes in vCPUs with their weights, and how many in a hundred ask for one node.
pub(crate) struct Mix {
    sizes: &'static [(usize, u64)],
    single: u64,
}

pub(crate) const MIXES: [Mix; 4] = [
    // A small cloud.
    Mix { sizes: &[(1, 2), (2, 4), (4, 3), (8, 1)], single: 0 },
    // Network functions.
    Mix { sizes: &[(4, 3), (8, 4), (12, 2), (16, 1)], single: 100 },
    // Desktops and build machines.
    Mix { sizes: &[(2, 3), (4, 4), (6, 1), (8, 3), (16, 1)], single: 30 },
    // Databases.
    Mix { sizes: &[(8, 3), (16, 4), (24, 1), (32, 2)], single: 50 },
];

/// A VM is named by its number in the stream.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    Start(usize, Demand),
    Stop(usize),
}

/// The stream of one mix at one load; empty where the machine is too small for it.
pub(crate) fn stream(machine: &Machine, mix: &Mix, load: usize, seed: u64) -> Vec<Event> {
    let target = machine.holds(machine.offered()) * load / 100;
    let sizes = [false, true].map(|single| possible(machine, mix, single));
    let mut chance = Chance(seed);
    let mut present: BTreeMap<usize, usize> = BTreeMap::new();
    let mut events = Vec::new();
    for number in 0..STARTS {
        let Some(demand) = draw(&sizes, mix, &mut chance) else { return Vec::new() };
        let cost = machine.cost(&demand);
        while present.values().sum::<usize>() + cost > target {
            let (&leaver, _) = present.iter().nth(chance.below(present.len() as u64)).unwrap();
            present.remove(&leaver);
            events.push(Event::Stop(leaver));
        }
        present.insert(number, cost);
        events.push(Event::Start(number, demand));
    }
    events
}

/// The sizes of the mix that this machine can serve when it is empty, without one VM being more than half of it.
fn possible(machine: &Machine, mix: &Mix, single: bool) -> Vec<(usize, u64)> {
    let mut nodes: BTreeMap<u16, usize> = BTreeMap::new();
    for core in machine.offered() {
        *nodes.entry(machine.cores[core].node).or_default() += machine.threads(core);
    }
    let half = nodes.values().sum::<usize>() / 2;
    let most = if single { half.min(nodes.values().copied().max().unwrap_or(0)) } else { half };
    let hybrid = machine.cores.iter().any(|core| core.cpus.len() != machine.threads(0));
    let fits = |vcpus: usize| machine.cost(&Demand { vcpus, single }) <= most && !(hybrid && vcpus % 2 == 1);
    mix.sizes.iter().copied().filter(|&(vcpus, _)| fits(vcpus)).collect()
}

/// The next VM; `None` where the machine is too small for the mix.
fn draw(sizes: &[Vec<(usize, u64)>; 2], mix: &Mix, chance: &mut Chance) -> Option<Demand> {
    let single = (chance.below(100) as u64) < mix.single;
    let sizes = &sizes[usize::from(single)];
    let all: u64 = sizes.iter().map(|(_, weight)| weight).sum();
    if all == 0 {
        return None;
    }
    let mut at = chance.below(all) as u64;
    let size = sizes.iter().find(|(_, weight)| {
        let here = at < *weight;
        at = at.saturating_sub(*weight);
        here
    });
    Some(Demand { vcpus: size?.0, single })
}

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From 0 to `count` - 1.
    fn below(&mut self, count: u64) -> usize {
        usize::try_from(self.next() % count).unwrap()
    }
}
