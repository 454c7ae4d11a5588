//! Domains of pieces (nodes, last-level caches), and which sets of them are worth a look.
//!
//! Knows which domains are alike, so that of the sets that differ only in names one is enough. Never decides between
//! sets: that is [`super::choose`].

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::choose::{Demand, Piece, enough};
use super::policy::Span;

/// Pieces that lie together: on one node, or in one last-level cache.
pub(super) struct Domain<'a> {
    pub(super) pieces: Vec<&'a Piece>,
    /// How many vCPUs they hold.
    holds: u32,
}

/// The domains in groups of those that are alike, for which it is the same which of them is taken: as many pieces of each
/// kind in each cache, and the same `apart`. Within a group ascending by identity.
pub(super) struct Alike<'a>(Vec<Vec<Domain<'a>>>);

impl<'a> Alike<'a> {
    pub(super) fn all(&self) -> impl Iterator<Item = &Domain<'a>> {
        self.0.iter().flatten()
    }

    pub(super) fn retain(&mut self, keep: impl Fn(&Domain<'a>) -> bool) {
        self.0.iter_mut().for_each(|group| group.retain(&keep));
        self.0.retain(|group| !group.is_empty());
    }
}

pub(super) fn domains<'a, K: Ord, A: Ord>(
    pieces: &[&'a Piece],
    key: impl Fn(&Piece) -> K,
    apart: impl Fn(&Piece) -> A,
) -> Alike<'a> {
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
    Alike(groups.into_values().collect())
}

/// Over how many domains to spread, in the order to try. Sizes at which even the largest domains hold too little are
/// left out.
pub(super) fn sizes(domains: &Alike<'_>, demand: &Demand<'_>, span: Span) -> std::ops::RangeInclusive<usize> {
    let count = domains.all().count();
    match span {
        Span::Single => 1..=1,
        Span::Any => count..=count,
        Span::Spread => demand.groups.len()..=demand.groups.len(),
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
pub(super) fn subsets<'a>(
    domains: &Alike<'a>,
    size: usize,
    demand: &Demand<'_>,
    budget: &Cell<usize>,
) -> Vec<Vec<&'a Piece>> {
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
