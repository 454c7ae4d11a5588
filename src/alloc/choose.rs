//! Which of the free pieces (whole cores or single threads) a request takes: steps 4 to 7 of [`super::place`].
//!
//! Knows domains (nodes, last-level caches) and counts; nothing of policies' words, refusals or threads' numbers beyond
//! the final tie-break. The search is bounded by [`MAX_NODE_SETS`] and [`MAX_VISITS`], counted in steps and never in time:
//! within them it is exact.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::policy::Span;
use crate::cpuset::{CpuId, NodeId};
use crate::host::{CoreClass, CoreId, LlcId};

/// How many sets of nodes of one size are compared, beside the one that [`subsets`] thinks best.
const MAX_NODE_SETS: usize = 256;

/// How many pieces are looked at in all sets of caches together; beyond it only the set that [`subsets`] thinks best is.
const MAX_VISITS: usize = 100_000;

/// Something handed out as one: a whole core, or a single thread.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    /// Its CPUs, ascending.
    pub(super) cpus: Vec<CpuId>,
    /// How many vCPUs it takes.
    pub(super) vcpus: u16,
    pub(super) core: Option<CoreId>,
    pub(super) node: Option<NodeId>,
    pub(super) llc: Option<LlcId>,
    pub(super) class: Option<CoreClass>,
    /// A single thread whose siblings are already out of reach: taking it costs no whole core.
    pub(super) lone: bool,
}

/// Whether a set of nodes has room for something else that the request needs: memory.
pub(super) type Room<'a> = &'a dyn Fn(&BTreeSet<NodeId>) -> bool;

/// How much is wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demand {
    pub(super) vcpus: u32,
    /// Pieces beside those of the vCPUs, for emulator and I/O threads.
    pub(super) extra: usize,
    pub(super) numa: Span,
    pub(super) cache: Span,
}

/// The pieces taken.
#[derive(Clone, Debug)]
pub(super) struct Choice<'a> {
    pub(super) vcpus: Vec<&'a Piece>,
    pub(super) extra: Vec<&'a Piece>,
}

/// Whether the pieces, however they lie, are enough: the largest for vCPUs, `extra` others beside them.
pub(super) fn enough<'a>(pieces: impl IntoIterator<Item = &'a Piece>, demand: &Demand) -> bool {
    let mut sizes: Vec<u16> = pieces.into_iter().map(|piece| piece.vcpus).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let for_vcpus = sizes.len().saturating_sub(demand.extra);
    sizes.len() >= demand.extra
        && sizes.iter().take(for_vcpus).map(|&size| u32::from(size)).sum::<u32>() >= demand.vcpus
}

/// The best choice, or `None` if there is none. `room` says whether a set of nodes can hold the guest's memory (more
/// nodes never hold less); without it, memory does not matter.
pub(super) fn choose<'a>(pieces: &[&'a Piece], demand: &Demand, room: Option<Room<'_>>) -> Option<Choice<'a>> {
    if !enough(pieces.iter().copied(), demand) {
        return None;
    }
    let before = Left::of(pieces);
    // Nodes are alike only as far as nothing but their pieces tells them apart.
    let apart = room.is_some() || caches_span_nodes(pieces);
    let nodes = domains(pieces, |piece| piece.node, |piece| apart.then_some(piece.node));
    let has_room = |nodes: &BTreeSet<NodeId>| room.is_none_or(|room| room(nodes));
    let budget = Cell::new(MAX_VISITS);
    // Step 4: node sets, fewest first.
    let within = |numa: Span| {
        sizes(&nodes, demand, numa).find_map(|size| {
            let sets = subsets(&nodes, size, demand, &Cell::new(MAX_NODE_SETS * pieces.len()));
            let sets = sets.into_iter().filter(|set| has_room(&nodes_of(set)));
            let best = sets.filter_map(|set| within_nodes(&set, demand, &before, &has_room, &budget));
            best.min_by(|(a, _), (b, _)| a.cmp(b)).map(|(_, choice)| choice)
        })
    };
    // Where nodes do not matter for the vCPUs, they still may for memory.
    within(demand.numa).or_else(|| room.filter(|_| demand.numa == Span::Any).and_then(|_| within(Span::Prefer)))
}

/// Step 5: cache sets within these nodes, fewest first.
fn within_nodes<'a>(
    inside: &[&'a Piece],
    demand: &Demand,
    before: &Left,
    has_room: &dyn Fn(&BTreeSet<NodeId>) -> bool,
    budget: &Cell<usize>,
) -> Option<(impl Ord + use<>, Choice<'a>)> {
    let mut caches = domains(inside, |piece| piece.llc, |piece| piece.node);
    // An unknown cache is never promised to be one.
    caches.retain(|cache| demand.cache != Span::Single || cache.pieces.iter().all(|piece| piece.llc.is_some()));
    sizes(&caches, demand, demand.cache).find_map(|size| {
        let choices = subsets(&caches, size, demand, budget).into_iter().filter_map(|set| {
            let few = pick(&set, demand, None).filter(|choice| has_room(&choice.nodes()));
            // Fewer nodes than these lack the room for memory: use each of them.
            few.or_else(|| pick(&set, demand, Some(nodes_of(inside))).filter(|choice| has_room(&choice.nodes())))
        });
        choices.map(|choice| (score(before, &choice), choice)).min_by(|(a, _), (b, _)| a.cmp(b))
    })
}

fn nodes_of(pieces: &[&Piece]) -> BTreeSet<NodeId> {
    pieces.iter().filter_map(|piece| piece.node).collect()
}

/// Whether any last-level cache has pieces on more than one node (sub-NUMA clustering).
fn caches_span_nodes(pieces: &[&Piece]) -> bool {
    let mut nodes = BTreeMap::new();
    pieces.iter().any(|piece| piece.llc.is_some() && *nodes.entry(piece.llc).or_insert(piece.node) != piece.node)
}

/// Pieces that lie together: on one node, or in one last-level cache.
struct Domain<'a> {
    pieces: Vec<&'a Piece>,
    /// How many vCPUs they hold.
    holds: u32,
}

/// The domains in groups of those that are alike, for which it is the same which of them is taken: as many pieces of each
/// kind in each cache, and the same `apart`. Within a group ascending by identity.
struct Groups<'a>(Vec<Vec<Domain<'a>>>);

impl<'a> Groups<'a> {
    fn all(&self) -> impl Iterator<Item = &Domain<'a>> {
        self.0.iter().flatten()
    }

    fn retain(&mut self, keep: impl Fn(&Domain<'a>) -> bool) {
        self.0.iter_mut().for_each(|group| group.retain(&keep));
        self.0.retain(|group| !group.is_empty());
    }
}

fn domains<'a, K: Ord, A: Ord>(
    pieces: &[&'a Piece],
    key: impl Fn(&Piece) -> K,
    apart: impl Fn(&Piece) -> A,
) -> Groups<'a> {
    let mut domains: BTreeMap<K, Vec<&Piece>> = BTreeMap::new();
    for &piece in pieces {
        domains.entry(key(piece)).or_default().push(piece);
    }
    let mut groups: BTreeMap<_, Vec<Domain<'_>>> = BTreeMap::new();
    for pieces in domains.into_values() {
        // Per cache: its whole cores, and how many pieces of each kind.
        let mut caches: BTreeMap<_, (BTreeSet<_>, BTreeMap<_, usize>)> = BTreeMap::new();
        for piece in &pieces {
            let (cores, kinds) = caches.entry(piece.llc).or_default();
            cores.extend(piece.core.filter(|_| !piece.lone));
            *kinds.entry((piece.lone, piece.vcpus, piece.cpus.len())).or_default() += 1;
        }
        let mut likeness: Vec<_> = caches.into_values().map(|(cores, kinds)| (cores.len(), kinds)).collect();
        likeness.sort();
        let holds = pieces.iter().map(|piece| u32::from(piece.vcpus)).sum();
        let apart = pieces.first().map(|piece| apart(piece));
        groups.entry((apart, likeness)).or_default().push(Domain { pieces, holds });
    }
    Groups(groups.into_values().collect())
}

/// Over how many domains to spread, in the order to try. Sizes at which even the largest domains hold too little are
/// left out.
fn sizes(domains: &Groups<'_>, demand: &Demand, span: Span) -> std::ops::RangeInclusive<usize> {
    let count = domains.all().count();
    match span {
        Span::Single => 1..=1,
        Span::Any | Span::Spread => count..=count,
        Span::Prefer => {
            let mut room: Vec<u32> = domains.all().map(|domain| domain.holds).collect();
            room.sort_unstable_by(|a, b| b.cmp(a));
            let mut sum = 0u32;
            let short = room.into_iter().take_while(|room| {
                sum = sum.saturating_add(*room);
                sum < demand.vcpus
            });
            short.count() + 1..=count
        }
    }
}

/// The sets of `size` domains that are enough, as their pieces; of sets that are alike only one. First the largest
/// domains, the last of them replaced by the smallest that will do; then all others, as far as the budget of pieces lasts.
fn subsets<'a>(domains: &Groups<'a>, size: usize, demand: &Demand, budget: &Cell<usize>) -> Vec<Vec<&'a Piece>> {
    let mut by_room: Vec<&Domain<'_>> = domains.all().collect();
    by_room.sort_by_key(|domain| Reverse(domain.holds));
    if size == 0 || size > by_room.len() {
        return Vec::new();
    }
    let join = |chosen: &[&Domain<'a>]| -> Option<Vec<&'a Piece>> {
        // The sum tells most of those that are not.
        let holds = chosen.iter().map(|domain| domain.holds).fold(0, u32::saturating_add);
        let pieces = || chosen.iter().flat_map(|domain| domain.pieces.iter().copied());
        (holds >= demand.vcpus && enough(pieces(), demand)).then(|| pieces().collect())
    };
    let (most, rest) = by_room.split_at(size - 1);
    let best = rest.iter().rev().find_map(|last| join(&[most, &[*last]].concat()));
    let mut found: Vec<_> = best.into_iter().collect();
    let sizes: Vec<usize> = domains.0.iter().map(Vec::len).collect();
    let mut counts = first_counts(&sizes, size);
    while let Some(chosen) = &counts {
        let parts = domains.0.iter().zip(chosen).flat_map(|(group, &count)| group.iter().take(count));
        let parts: Vec<_> = parts.collect();
        let cost = parts.iter().map(|domain| domain.pieces.len()).sum::<usize>() + sizes.len();
        let Some(left) = budget.get().checked_sub(cost) else { break };
        budget.set(left);
        found.extend(join(&parts));
        counts = next_counts(&sizes, chosen);
    }
    found
}

/// The first way to take `total` things from groups of these sizes: as many as possible from the first ones.
fn first_counts(sizes: &[usize], total: usize) -> Option<Vec<usize>> {
    let mut left = total;
    let counts = sizes.iter().map(|&size| {
        let count = size.min(left);
        left -= count;
        count
    });
    let counts = counts.collect();
    (left == 0).then_some(counts)
}

/// The next way, or `None` after the last: lexicographically descending.
fn next_counts(sizes: &[usize], counts: &[usize]) -> Option<Vec<usize>> {
    // One less at some place, and that one with all behind it as far forward as possible.
    (0..counts.len()).rev().find_map(|place| {
        let (head, tail) = counts.split_at(place);
        let (&here, behind) = tail.split_first()?;
        let here = here.checked_sub(1)?;
        let moved = behind.iter().sum::<usize>() + 1;
        let rest = first_counts(sizes.get(place + 1..)?, moved)?;
        Some([head, &[here], &rest].concat())
    })
}

/// Step 6: which pieces of a set that is enough. Pieces that cost no whole core first, then large before small, then from
/// the domains with the least left (their rest serves nobody as well); the last piece is the smallest that will do. With
/// `each`, first one piece on each of these nodes.
fn pick<'a>(set: &[&'a Piece], demand: &Demand, each: Option<BTreeSet<NodeId>>) -> Option<Choice<'a>> {
    let mut nodes: BTreeMap<Option<NodeId>, usize> = BTreeMap::new();
    let mut caches: BTreeMap<Option<LlcId>, usize> = BTreeMap::new();
    for piece in set {
        *nodes.entry(piece.node).or_default() += 1;
        *caches.entry(piece.llc).or_default() += 1;
    }
    let mut pieces = set.to_vec();
    pieces.sort_by_cached_key(|piece| {
        let left = (nodes.get(&piece.node).copied(), caches.get(&piece.llc).copied());
        let place = (piece.node, piece.llc, piece.core, piece.cpus.first().copied());
        (!piece.lone, Reverse(piece.vcpus), left, place)
    });
    let mut missing = demand.vcpus;
    let mut chosen = Vec::new();
    for node in each.into_iter().flatten() {
        let index = pieces.iter().position(|piece| missing > 0 && piece.node == Some(node))?;
        let piece = pieces.remove(index);
        missing = missing.saturating_sub(u32::from(piece.vcpus));
        chosen.push(piece);
    }
    // As many as fit whole, from the front; then the smallest that will do.
    let mut fitting = 0;
    for piece in &pieces {
        let Some(left) = missing.checked_sub(u32::from(piece.vcpus)) else { break };
        missing = left;
        fitting += 1;
    }
    chosen.extend(pieces.drain(..fitting));
    if missing > 0 {
        let enough = pieces.iter().enumerate().filter(|(_, piece)| u32::from(piece.vcpus) >= missing);
        let (index, _) = enough.min_by_key(|(index, piece)| (piece.vcpus, *index))?;
        chosen.push(pieces.remove(index));
    }
    // The smallest of what is left serve the emulator and I/O threads.
    pieces.sort_by_key(|piece| piece.vcpus);
    let extra: Vec<_> = pieces.into_iter().take(demand.extra).collect();
    (extra.len() == demand.extra).then_some(Choice { vcpus: chosen, extra })
}

impl Choice<'_> {
    fn pieces(&self) -> impl Iterator<Item = &Piece> {
        self.vcpus.iter().chain(&self.extra).copied()
    }

    /// The nodes of the vCPUs.
    pub(super) fn nodes(&self) -> BTreeSet<NodeId> {
        self.vcpus.iter().filter_map(|piece| piece.node).collect()
    }
}

/// Step 7: smaller is better. Nodes, then caches, then what is left for the largest requests to come: in whole cores,
/// then in threads, by node, then by cache. CPU numbers only break ties.
fn score(before: &Left, choice: &Choice<'_>) -> impl Ord + use<> {
    let nodes: BTreeSet<_> = choice.pieces().map(|piece| piece.node).collect();
    let caches: BTreeSet<_> = choice.pieces().map(|piece| piece.llc).collect();
    let cpus: Vec<CpuId> = choice.pieces().flat_map(|piece| piece.cpus.iter().copied()).collect();
    (nodes.len(), caches.len(), Reverse(before.without(choice)), cpus)
}

/// What a domain has to offer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Offer {
    cores: usize,
    threads: usize,
}

/// What is free, by node and by cache.
#[derive(Clone, Debug)]
struct Left {
    nodes: BTreeMap<Option<NodeId>, Offer>,
    caches: BTreeMap<Option<LlcId>, Offer>,
}

impl Left {
    fn of(pieces: &[&Piece]) -> Left {
        let mut left = Left { nodes: BTreeMap::new(), caches: BTreeMap::new() };
        let mut cores = BTreeSet::new();
        for piece in pieces {
            let whole = usize::from(!piece.lone && piece.core.is_some_and(|core| cores.insert(core)));
            for offer in [left.nodes.entry(piece.node).or_default(), left.caches.entry(piece.llc).or_default()] {
                offer.cores += whole;
                offer.threads += piece.cpus.len();
            }
        }
        left
    }

    /// The offers after the choice, largest first: by node, then by cache.
    fn without(&self, choice: &Choice<'_>) -> (Vec<Offer>, Vec<Offer>) {
        let mut left = self.clone();
        let mut broken = BTreeSet::new();
        for piece in choice.pieces() {
            let whole = usize::from(!piece.lone && piece.core.is_some_and(|core| broken.insert(core)));
            for offer in [left.nodes.entry(piece.node).or_default(), left.caches.entry(piece.llc).or_default()] {
                offer.cores = offer.cores.saturating_sub(whole);
                offer.threads = offer.threads.saturating_sub(piece.cpus.len());
            }
        }
        let descending = |offers: Vec<Offer>| {
            let mut offers = offers;
            offers.sort_unstable_by(|a, b| b.cmp(a));
            offers
        };
        (descending(left.nodes.into_values().collect()), descending(left.caches.into_values().collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_take_some_is_walked_once() {
        let sizes = [2, 1, 3];
        let mut seen = Vec::new();
        let mut counts = first_counts(&sizes, 3);
        while let Some(these) = counts {
            counts = next_counts(&sizes, &these);
            seen.push(these);
        }
        assert_eq!(seen, [[2, 1, 0], [2, 0, 1], [1, 1, 1], [1, 0, 2], [0, 1, 2], [0, 0, 3]]);
        assert_eq!(first_counts(&sizes, 7), None);
        assert_eq!(next_counts(&[], &[]), None);
    }
}
