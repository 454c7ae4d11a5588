//! Which running leases would have to move so that a request fits, or lies nearer together? Pure.
//!
//! 1. *Sets.* Of one lease, then of two, then of three; of as many leases first those with the fewest CPUs, then by id.
//! 2. *Sums.* A set is passed over when the CPUs that would be free do not even add up: on each node and in each
//!    last-level cache, for the request and for every lease of the set. This never rules out a set that would do.
//! 3. *Plans.* What is left is really planned, every lease of the set taken away: first the request, then the leases, the
//!    most constrained first; and the other orders, as far as they differ.
//!
//! The answer is a smallest set, or none: where the bounds (`MAX_SETS`, `MAX_PLANS`; steps, never time) end the search,
//! nothing is claimed. A moved guest is asked to find its memory beside what it uses now, so a claim is never too bold.
//! Nothing is moved here.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::plan::Plan;
use super::policy::OtherThreads;
use super::relocation::{self, MemoryOfMoved};
use super::request::Request;
use super::sums::{MOST_GONE, NOBODY, Party, Set, Sums, Within};
use super::{Supply, plan};
use crate::cpuset::CpuSet;
use crate::host::Topology;

/// How many sets are summed up. Of those of three the last may go unseen: the answer is then one of the smallest all the same.
const MAX_SETS: usize = 20_000;

/// How many plans are made.
const MAX_PLANS: usize = 100;

/// A running lease that could be placed anew.
#[derive(Clone, Debug)]
pub struct Mover<K> {
    /// Whose.
    pub id: K,
    /// What it asked for.
    pub request: Request,
    /// What would be free if it went.
    pub cpus: CpuSet,
    /// The plan by which it runs, and what its memory does, where it has to move without a restart.
    pub live: Option<(Plan, MemoryOfMoved)>,
}

/// One lease that moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move<K> {
    /// Whose.
    pub id: K,
    /// The CPUs it holds.
    pub from: CpuSet,
    /// The CPUs it would hold.
    pub to: CpuSet,
    /// The plan by which it would hold them.
    pub plan: Plan,
}

/// Over how much of the machine vCPUs are spread; fewer nodes go before fewer caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extent {
    /// Nodes.
    pub nodes: usize,
    /// Last-level caches.
    pub llcs: usize,
}

impl Extent {
    /// That of a plan. What the machine does not tell apart is one.
    pub fn of(topology: &Topology, plan: &Plan) -> Extent {
        let cpus = || plan.vcpus.iter().flatten().filter_map(|&cpu| topology.cpu(cpu));
        let nodes: BTreeSet<_> = cpus().map(|cpu| cpu.node).collect();
        let llcs: BTreeSet<_> = cpus().map(|cpu| cpu.llc).collect();
        Extent { nodes: nodes.len(), llcs: llcs.len() }
    }
}

/// A smallest set of moves after which the request has a plan, with a `goal` one that is spread no wider. `None` = there is
/// none of three moves or fewer, or it was not found within the bounds. `supply.taken` includes the movers' CPUs.
pub fn moves<K: Ord + Clone>(
    supply: &Supply<'_>,
    request: &Request,
    movers: &[Mover<K>],
    goal: Option<Extent>,
) -> Option<Vec<Move<K>>> {
    Search::new(supply, request, movers, goal).run()
}

struct Search<'a, K> {
    supply: &'a Supply<'a>,
    goal: Option<Extent>,
    request: &'a Request,
    asker: Party,
    /// By size, then by id.
    movers: Vec<(&'a Mover<K>, Party)>,
    sums: Sums,
    plans: usize,
}

impl<'a, K: Ord + Clone> Search<'a, K> {
    fn new(
        supply: &'a Supply<'a>,
        request: &'a Request,
        movers: &'a [Mover<K>],
        goal: Option<Extent>,
    ) -> Search<'a, K> {
        let mut movers: Vec<&Mover<K>> = movers.iter().filter(|mover| !mover.cpus.is_empty()).collect();
        movers.sort_by_key(|mover| (mover.cpus.len(), &mover.id));
        let mut sums = Sums::of(supply, movers.iter().map(|mover| &mover.cpus));
        let mut asker = sums.party(supply, request);
        if let Some(goal) = goal {
            // Only the vCPUs have to lie that near together.
            let mut bare = request.clone();
            (bare.policy.emulator, bare.policy.iothreads) = (OtherThreads::Share, OtherThreads::Share);
            asker = sums.party(supply, &bare);
            let near = if goal.llcs == 1 { Within::Cache } else { Within::Node };
            asker.within = asker.within.min(if goal.nodes == 1 { near } else { Within::Machine });
        }
        let movers = movers.into_iter().map(|mover| (mover, sums.party(supply, &mover.request))).collect();
        Search { supply, goal, request, asker, movers, sums, plans: MAX_PLANS }
    }

    fn run(&mut self) -> Option<Vec<Move<K>>> {
        let mut sets = 0;
        for size in 1..=MOST_GONE {
            let seen = subsets(self.movers.len(), size).take(MAX_SETS - sets).inspect(|_| sets += 1);
            let mut hopeful: Vec<Set> = seen.filter(|set| self.adds_up(set)).collect();
            hopeful.sort_by_cached_key(|set| {
                let cpus: usize = self.of(set).map(|(mover, _)| mover.cpus.len()).sum();
                let mut ids: Vec<K> = self.of(set).map(|(mover, _)| mover.id.clone()).collect();
                ids.sort();
                (cpus, ids)
            });
            for set in hopeful {
                let found = self.settle(&set);
                if found.is_some() || self.plans == 0 {
                    return found;
                }
            }
            // What was not seen may do: no larger set is a smallest one.
            if sets == MAX_SETS {
                return None;
            }
        }
        None
    }

    fn of(&self, set: &Set) -> impl Iterator<Item = &(&'a Mover<K>, Party)> {
        set.iter().filter_map(|&index| self.movers.get(index))
    }

    /// Step 2.
    fn adds_up(&self, set: &Set) -> bool {
        self.sums.may_fit(set, self.of(set).map(|(_, party)| party).chain([&self.asker]))
    }

    /// Step 3.
    fn settle(&mut self, set: &Set) -> Option<Vec<Move<K>>> {
        let freed = self.of(set).fold(CpuSet::new(), |freed, (mover, _)| freed.union(&mover.cpus));
        let mut indices: Vec<usize> = set.iter().copied().filter(|&index| index != NOBODY).collect();
        indices
            .sort_by_key(|&index| self.movers.get(index).map(|(_, party)| (party.within, Reverse(party.needs), index)));
        let order: Vec<Option<usize>> = std::iter::once(None).chain(indices.into_iter().map(Some)).collect();
        let mut moves = self.in_some_order(&self.supply.taken.difference(&freed), &order)?;
        moves.sort_by(|a, b| a.id.cmp(&b.id));
        Some(moves)
    }

    /// Plans all of these, the request (`None`) and movers, one after the other in some order; the moves of the movers.
    fn in_some_order(&mut self, taken: &CpuSet, those: &[Option<usize>]) -> Option<Vec<Move<K>>> {
        if those.is_empty() {
            return Some(Vec::new());
        }
        for (place, &one) in those.iter().enumerate() {
            self.plans = self.plans.checked_sub(1)?;
            let mover = one.and_then(|index| self.movers.get(index)).map(|(mover, _)| *mover);
            let request = mover.map_or(self.request, |mover| &mover.request);
            // Whoever finds no place now will find none when more is taken.
            let supply = Supply { taken, ..*self.supply };
            let plan = match mover.and_then(|mover| mover.live.as_ref()) {
                Some((now, memory)) => relocation::anew(&supply, request, now, *memory).ok()?,
                None => plan(&supply, request).ok()?,
            };
            if mover.is_none() && self.goal.is_some_and(|goal| Extent::of(self.supply.topology, &plan) > goal) {
                return None;
            }
            let to = plan.exclusive();
            if mover.is_some_and(|mover| mover.cpus == to) {
                continue;
            }
            let others: Vec<_> = those.iter().take(place).chain(those.iter().skip(place + 1)).copied().collect();
            if let Some(mut moves) = self.in_some_order(&taken.union(&to), &others) {
                moves.extend(mover.map(|mover| Move { id: mover.id.clone(), from: mover.cpus.clone(), to, plan }));
                return Some(moves);
            }
        }
        None
    }
}

/// Every set of so many of `count`, in lexicographic order.
fn subsets(count: usize, size: usize) -> impl Iterator<Item = Set> {
    let mut next: Option<Set> =
        (size <= count).then(|| std::array::from_fn(|place| if place < size { place } else { NOBODY }));
    std::iter::from_fn(move || {
        let set = next?;
        // The last place that can still go up does, and those behind it follow.
        let rising = (0..size).rev().find_map(|place| {
            let up = set.get(place)? + 1;
            (up + (size - 1 - place) < count).then_some((place, up))
        });
        next = rising.map(|(place, up)| {
            let head = set.iter().take(place).copied();
            let mut whole = head.chain((up..).take(size - place)).chain(std::iter::repeat(NOBODY));
            std::array::from_fn(|_| whole.next().unwrap_or(NOBODY))
        });
        Some(set)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subsets_are_all_and_each_once() {
        for (count, size, expected) in [(0, 1, 0), (1, 1, 1), (4, 1, 4), (4, 2, 6), (5, 3, 10), (2, 3, 0), (7, 3, 35)] {
            let all: BTreeSet<Set> = subsets(count, size).collect();
            assert_eq!((all.len(), subsets(count, size).count()), (expected, expected));
            for set in all {
                assert!(set[..size].is_sorted_by(|a, b| a < b) && set[..size].iter().all(|&index| index < count));
                assert!(set[size..].iter().all(|&index| index == NOBODY));
            }
        }
    }
}
