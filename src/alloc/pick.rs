//! Which pieces of a set that is enough each group of vCPUs takes: step 7 of [`super::place`].
//!
//! Looks at one set of pieces only; which set, and whether the result is the best, is [`super::choose`]'s question.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::choose::{Choice, Piece};
use crate::cpuset::NodeId;
use crate::host::LlcId;

/// Up to so many groups are tried in every order; more only from large to small and the other way round.
const MAX_PERMUTED: usize = 4;

/// The pieces of each group, and `extra` others. With `each`, a single group has a piece on each of these nodes.
pub(super) fn pack<'a>(
    set: &[&'a Piece],
    groups: &[u32],
    extra: usize,
    each: Option<BTreeSet<NodeId>>,
) -> Option<Choice<'a>> {
    let sorted = sorted(set);
    let each: Vec<NodeId> = each.into_iter().flatten().collect();
    // With pieces of several sizes, what one group takes can be what another needs.
    orders(groups).into_iter().find_map(|order| {
        let mut pieces = sorted.clone();
        let mut choice = Choice { groups: vec![Vec::new(); groups.len()], extra: Vec::new() };
        for group in order {
            *choice.groups.get_mut(group)? = take(&mut pieces, groups.get(group).copied()?, &each)?;
        }
        // The nearest of what is left serve the emulator and I/O threads, of those the smallest.
        let (nodes, caches): (BTreeSet<_>, BTreeSet<_>) = choice.vcpus().map(|piece| (piece.node, piece.llc)).unzip();
        pieces.sort_by_key(|piece| (!nodes.contains(&piece.node), !caches.contains(&piece.llc), piece.vcpus));
        choice.extra = pieces.into_iter().take(extra).collect();
        (choice.extra.len() == extra).then_some(choice)
    })
}

/// Pieces that cost no whole core first, then large before small, then from the domains with the least left: their rest
/// serves nobody as well. Those that are for other threads only come last.
fn sorted<'a>(set: &[&'a Piece]) -> Vec<&'a Piece> {
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
        (piece.vcpus == 0, !piece.lone, Reverse(piece.vcpus), left, place)
    });
    pieces
}

/// Takes the pieces of one group: as many as fit whole, from the front; then the smallest that will do.
fn take<'a>(pieces: &mut Vec<&'a Piece>, vcpus: u32, each: &[NodeId]) -> Option<Vec<&'a Piece>> {
    let mut missing = vcpus;
    let mut taken = Vec::new();
    for &node in each {
        let index = pieces.iter().position(|piece| missing > 0 && piece.vcpus > 0 && piece.node == Some(node))?;
        let piece = pieces.remove(index);
        missing = missing.saturating_sub(u32::from(piece.vcpus));
        taken.push(piece);
    }
    let mut fitting = 0;
    for piece in pieces.iter() {
        let Some(left) = missing.checked_sub(u32::from(piece.vcpus)).filter(|_| missing > 0) else { break };
        missing = left;
        fitting += 1;
    }
    taken.extend(pieces.drain(..fitting));
    if missing > 0 {
        let enough = pieces.iter().enumerate().filter(|(_, piece)| u32::from(piece.vcpus) >= missing);
        let (index, _) = enough.min_by_key(|(index, piece)| (piece.vcpus, *index))?;
        taken.push(pieces.remove(index));
    }
    Some(taken)
}

/// The orders in which the groups take: from large to small first.
fn orders(groups: &[u32]) -> Vec<Vec<usize>> {
    let mut descending: Vec<usize> = (0..groups.len()).collect();
    descending.sort_by_key(|&group| Reverse(groups.get(group)));
    if groups.len() > MAX_PERMUTED {
        let ascending = descending.iter().rev().copied().collect();
        return vec![descending, ascending];
    }
    let mut orders = vec![Vec::new()];
    for _ in 0..groups.len() {
        let longer = orders.iter().flat_map(|order: &Vec<usize>| {
            let left = descending.iter().filter(|group| !order.contains(group));
            left.map(|&group| order.iter().copied().chain([group]).collect())
        });
        orders = longer.collect();
    }
    orders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_once_from_large_to_small() {
        assert_eq!(orders(&[1, 3]), [[1, 0], [0, 1]]);
        assert_eq!(orders(&[2]), [[0]]);
        assert_eq!(orders(&[1, 1, 1, 1]).len(), 24);
        assert_eq!(orders(&[1, 2, 3, 4, 5]), [[4, 3, 2, 1, 0], [0, 1, 2, 3, 4]]);
    }
}
