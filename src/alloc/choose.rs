//! Which of the free pieces (whole cores or single threads) a request takes: steps 4 to 7 of [`super::place`].
//!
//! Knows domains (nodes, last-level caches) and counts; nothing of policies' words, refusals or threads' numbers beyond
//! the final tie-break. The search is bounded by [`MAX_SUBSETS`], counted in steps and never in time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::policy::Span;
use crate::cpuset::{CpuId, NodeId};
use crate::host::{CoreClass, CoreId, LlcId};

/// How many sets of domains of one size are compared; beyond it the sets are taken by size alone.
const MAX_SUBSETS: usize = 4096;

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

/// The best choice, or `None` if there is none. `room` says whether a set of nodes can hold the guest's memory.
pub(super) fn choose<'a>(
    pieces: &[&'a Piece],
    demand: &Demand,
    room: &dyn Fn(&BTreeSet<NodeId>) -> bool,
) -> Option<Choice<'a>> {
    // Step 4: node sets, fewest first.
    let nodes = domains(pieces, |piece| piece.node);
    sizes(&nodes, demand, demand.numa).find_map(|size| {
        subsets(&nodes, size, demand)
            .into_iter()
            .filter_map(|inside| {
                // Step 5: cache sets within these nodes, fewest first.
                let caches: Vec<_> = domains(&inside, |piece| piece.llc)
                    .into_iter()
                    // An unknown cache is never promised to be one.
                    .filter(|cache| demand.cache != Span::Single || cache.iter().all(|piece| piece.llc.is_some()))
                    .collect();
                sizes(&caches, demand, demand.cache).find_map(|size| {
                    subsets(&caches, size, demand)
                        .into_iter()
                        .filter_map(|inside| pick(inside, demand))
                        .filter(|choice| room(&choice.nodes()))
                        .map(|choice| (score(pieces, &choice), choice))
                        .min_by(|(a, _), (b, _)| a.cmp(b))
                })
            })
            .min_by(|(a, _), (b, _)| a.cmp(b))
            .map(|(_, choice)| choice)
    })
}

/// The pieces by domain, domains ascending by identity.
fn domains<'a, K: Ord>(pieces: &[&'a Piece], key: impl Fn(&Piece) -> K) -> Vec<Vec<&'a Piece>> {
    let mut domains: BTreeMap<K, Vec<&Piece>> = BTreeMap::new();
    for &piece in pieces {
        domains.entry(key(piece)).or_default().push(piece);
    }
    domains.into_values().collect()
}

/// Over how many domains to spread, in the order to try. Sizes at which even the largest domains hold too little are
/// left out.
fn sizes(domains: &[Vec<&Piece>], demand: &Demand, span: Span) -> std::ops::RangeInclusive<usize> {
    match span {
        Span::Single => 1..=1,
        Span::Any => domains.len()..=domains.len(),
        Span::Prefer => {
            let mut room: Vec<u32> = domains.iter().map(|domain| holds(domain)).collect();
            room.sort_unstable_by(|a, b| b.cmp(a));
            let mut sum = 0u32;
            let short = room.into_iter().take_while(|room| {
                sum = sum.saturating_add(*room);
                sum < demand.vcpus
            });
            short.count() + 1..=domains.len()
        }
    }
}

/// How many vCPUs the pieces hold.
fn holds(pieces: &[&Piece]) -> u32 {
    pieces.iter().map(|piece| u32::from(piece.vcpus)).sum()
}

/// The sets of `size` domains that are enough, as their pieces. All of them if there are at most [`MAX_SUBSETS`], else
/// the largest ones with the last replaced by the smallest that will do.
fn subsets<'a>(domains: &[Vec<&'a Piece>], size: usize, demand: &Demand) -> Vec<Vec<&'a Piece>> {
    let mut by_room: Vec<&Vec<&Piece>> = domains.iter().collect();
    by_room.sort_by_key(|domain| Reverse(holds(domain)));
    let join = |chosen: &[&Vec<&'a Piece>]| -> Vec<&'a Piece> {
        chosen.iter().flat_map(|domain| domain.iter().copied()).collect()
    };
    // The largest ones hold the most: if they are not enough, no set of this size is.
    let largest = by_room.get(..size).map(join).unwrap_or_default();
    if size == 0 || !enough(largest.iter().copied(), demand) {
        return Vec::new();
    }
    if combinations(domains.len(), size) > MAX_SUBSETS {
        let (most, rest) = by_room.split_at(size - 1);
        let last = rest.iter().rev().map(|last| [most, &[*last]].concat());
        return last.map(|set| join(&set)).find(|set| enough(set.iter().copied(), demand)).into_iter().collect();
    }
    let mut found = Vec::new();
    let mut chosen: Vec<usize> = (0..size).collect();
    loop {
        let set: Vec<_> = chosen.iter().filter_map(|&index| domains.get(index)).collect();
        let set = join(&set);
        if enough(set.iter().copied(), demand) {
            found.push(set);
        }
        if !next_combination(&mut chosen, domains.len()) {
            return found;
        }
    }
}

/// n choose k, saturating.
fn combinations(n: usize, k: usize) -> usize {
    (0..k.min(n - k)).try_fold(1usize, |product, i| Some(product.checked_mul(n - i)? / (i + 1))).unwrap_or(usize::MAX)
}

/// Advances `chosen` (ascending indices below `n`) to the next combination; false after the last.
fn next_combination(chosen: &mut [usize], n: usize) -> bool {
    let size = chosen.len();
    for place in (0..size).rev() {
        let Some((head, tail)) = chosen.get_mut(place..).and_then(|rest| rest.split_first_mut()) else { return false };
        if *head + (size - place) < n {
            *head += 1;
            tail.iter_mut().zip(*head + 1..).for_each(|(index, next)| *index = next);
            return true;
        }
    }
    false
}

/// Step 6: which pieces of a set that is enough. Pieces that cost no whole core first, then large before small, then from
/// the domains with the least left (their rest serves nobody as well); the last piece is the smallest that will do.
fn pick<'a>(mut pieces: Vec<&'a Piece>, demand: &Demand) -> Option<Choice<'a>> {
    let mut nodes: BTreeMap<Option<NodeId>, usize> = BTreeMap::new();
    let mut caches: BTreeMap<Option<LlcId>, usize> = BTreeMap::new();
    for piece in &pieces {
        *nodes.entry(piece.node).or_default() += 1;
        *caches.entry(piece.llc).or_default() += 1;
    }
    pieces.sort_by_key(|piece| {
        let left = (nodes.get(&piece.node), caches.get(&piece.llc));
        (!piece.lone, Reverse(piece.vcpus), left, piece.node, piece.llc, piece.core, piece.cpus.first().copied())
    });
    let mut missing = demand.vcpus;
    let mut chosen = Vec::new();
    while missing > 0 {
        let next = pieces.first()?;
        let index = if u32::from(next.vcpus) <= missing {
            0
        } else {
            let fitting = pieces.iter().enumerate().filter(|(_, piece)| u32::from(piece.vcpus) >= missing);
            fitting.min_by_key(|(index, piece)| (piece.vcpus, *index))?.0
        };
        let piece = pieces.remove(index);
        missing = missing.saturating_sub(u32::from(piece.vcpus));
        chosen.push(piece);
    }
    // What is left is sorted too; the smallest of it serve the emulator and I/O threads.
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
fn score(all: &[&Piece], choice: &Choice<'_>) -> impl Ord + use<> {
    let spanned = |key: &dyn Fn(&Piece) -> Option<u16>| choice.pieces().map(key).collect::<BTreeSet<_>>().len();
    let node = |piece: &Piece| piece.node.map(|node| node.0);
    let llc = |piece: &Piece| piece.llc.map(|llc| llc.0);
    let damage = (left(all, choice, &node), left(all, choice, &llc));
    let cpus: Vec<CpuId> = choice.pieces().flat_map(|piece| piece.cpus.iter().copied()).collect();
    (spanned(&node), spanned(&llc), damage, cpus)
}

/// (whole cores, threads) left in each domain, largest first, reversed for comparison: the larger the rest, the better.
fn left(all: &[&Piece], choice: &Choice<'_>, key: &dyn Fn(&Piece) -> Option<u16>) -> Reverse<(Vec<usize>, Vec<usize>)> {
    let taken: BTreeSet<CpuId> = choice.pieces().flat_map(|piece| piece.cpus.iter().copied()).collect();
    let broken: BTreeSet<CoreId> = choice.pieces().filter_map(|piece| piece.core).collect();
    let mut cores: BTreeMap<Option<u16>, BTreeSet<CoreId>> = BTreeMap::new();
    let mut threads: BTreeMap<Option<u16>, usize> = BTreeMap::new();
    for piece in all {
        if let Some(core) = piece.core.filter(|core| !piece.lone && !broken.contains(core)) {
            cores.entry(key(piece)).or_default().insert(core);
        }
        *threads.entry(key(piece)).or_default() += piece.cpus.iter().filter(|cpu| !taken.contains(cpu)).count();
    }
    let descending = |mut counts: Vec<usize>| {
        counts.sort_unstable_by(|a, b| b.cmp(a));
        counts
    };
    Reverse((
        descending(cores.into_values().map(|set| set.len()).collect()),
        descending(threads.into_values().collect()),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn combinations_are_counted_and_walked() {
        for (n, k, expected) in [(4, 2, 6), (5, 5, 1), (1, 1, 1), (64, 32, usize::MAX), (16, 3, 560)] {
            assert!(combinations(n, k) == expected || combinations(n, k) > MAX_SUBSETS, "{n} {k}");
        }
        let mut chosen = vec![0, 1];
        let mut seen = vec![chosen.clone()];
        while next_combination(&mut chosen, 4) {
            seen.push(chosen.clone());
        }
        assert_eq!(seen, [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]);
    }
}
