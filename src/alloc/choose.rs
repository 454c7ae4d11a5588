//! Which of the free pieces (whole cores or single threads) a request takes: steps 4 to 8 of [`super::place`].
//!
//! Knows nodes, last-level caches and counts; nothing of policies' words, refusals or threads' numbers beyond the final
//! tie-break. The search is bounded by [`MAX_NODE_SETS`], [`MAX_VISITS`] and [`MAX_SEATS`], counted in steps and never in
//! time: within them it is exact.

use std::cell::Cell;
use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet};

use super::domains::{domains, sizes, subsets};
use super::pick::pack;
use super::policy::Span;
use crate::cpuset::{CpuId, NodeId};
use crate::host::{CoreClass, CoreId, LlcId};

/// How many sets of nodes of one size are compared, beside the one that [`subsets`] thinks best.
const MAX_NODE_SETS: usize = 256;

/// How many pieces are looked at in all sets of caches together; beyond it only the set that [`subsets`] thinks best is.
const MAX_VISITS: usize = 100_000;

/// How often a group of vCPUs is seated on a node in trial.
const MAX_SEATS: usize = 2_000;

/// The most groups for which seats are tried out.
const MAX_SEATED: usize = 16;

/// Something handed out as one: a whole core, or a single thread.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    /// Its CPUs, those for vCPUs first.
    pub(super) cpus: Vec<CpuId>,
    /// How many vCPUs it takes; 0 = it is for other threads only.
    pub(super) vcpus: u16,
    pub(super) core: Option<CoreId>,
    pub(super) node: Option<NodeId>,
    pub(super) llc: Option<LlcId>,
    pub(super) class: Option<CoreClass>,
    /// A single thread whose siblings are already out of reach: taking it costs no whole core.
    pub(super) lone: bool,
}

/// Whether there is room for the guest's memory when each group of vCPUs lies on these nodes. More nodes never hold less.
pub(super) type Room<'a> = &'a dyn Fn(&[BTreeSet<NodeId>]) -> bool;

/// How far a set of nodes is from where the guest's devices are: less is better.
pub(super) type Far<'a> = &'a dyn Fn(&BTreeSet<NodeId>) -> u32;

/// How much is wanted.
#[derive(Clone, Copy)]
pub(super) struct Demand<'a> {
    /// How many vCPUs get pieces.
    pub(super) vcpus: u32,
    /// The same by group. A single group lies where the spans say; of several, each lies on one node, and no two share a
    /// piece.
    pub(super) groups: &'a [u32],
    /// Whether groups of as many vCPUs are equals, so that it is the same which of them lies where.
    pub(super) equals: bool,
    /// Pieces beside those of the vCPUs, for emulator and I/O threads.
    pub(super) extra: usize,
    /// Over how many nodes; [`Span::Spread`] = each group on a node of its own.
    pub(super) numa: Span,
    pub(super) cache: Span,
    /// Whether all pieces must be of one core class.
    pub(super) one_class: bool,
    /// `None` = the guest has no devices whose nodes matter.
    pub(super) far: Option<Far<'a>>,
}

/// The pieces taken.
#[derive(Clone, Debug, Default)]
pub(super) struct Choice<'a> {
    /// Of each group of the demand.
    pub(super) groups: Vec<Vec<&'a Piece>>,
    pub(super) extra: Vec<&'a Piece>,
}

impl<'a> Choice<'a> {
    /// The pieces of the vCPUs.
    pub(super) fn vcpus(&self) -> impl Iterator<Item = &'a Piece> + '_ {
        self.groups.iter().flatten().copied()
    }

    fn pieces(&self) -> impl Iterator<Item = &'a Piece> + '_ {
        self.vcpus().chain(self.extra.iter().copied())
    }

    /// The nodes of the vCPUs.
    pub(super) fn nodes(&self) -> BTreeSet<NodeId> {
        self.vcpus().filter_map(|piece| piece.node).collect()
    }

    fn nodes_by_group(&self) -> Vec<BTreeSet<NodeId>> {
        self.groups.iter().map(|group| nodes_of(group)).collect()
    }
}

/// Whether the pieces, however they lie, are enough: the largest for vCPUs, `extra` others beside them.
pub(super) fn enough<'a>(pieces: impl IntoIterator<Item = &'a Piece>, demand: &Demand<'_>) -> bool {
    let mut sizes: Vec<u16> = pieces.into_iter().map(|piece| piece.vcpus).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let for_vcpus = sizes.len().saturating_sub(demand.extra);
    sizes.len() >= demand.extra
        && sizes.iter().take(for_vcpus).map(|&size| u32::from(size)).sum::<u32>() >= demand.vcpus
}

/// Whether any last-level cache alone has enough, whatever the nodes.
fn one_cache_holds(pieces: &[&Piece], demand: &Demand<'_>) -> bool {
    let mut holds: BTreeMap<LlcId, u32> = BTreeMap::new();
    for piece in pieces {
        if let Some(llc) = piece.llc {
            *holds.entry(llc).or_default() += u32::from(piece.vcpus);
        }
    }
    holds.values().any(|&holds| holds >= demand.vcpus)
}

/// The best choice, or `None` if there is none. Without `room`, memory does not matter.
pub(super) fn choose<'a>(pieces: &[&'a Piece], demand: &Demand<'_>, room: Option<Room<'_>>) -> Option<Choice<'a>> {
    if !enough(pieces.iter().copied(), demand) || (demand.cache == Span::Single && !one_cache_holds(pieces, demand)) {
        return None;
    }
    if demand.groups.len() == 1 && room.is_some_and(|room| !room(&[nodes_of(pieces)])) {
        return None;
    }
    let (visits, seats) = (Cell::new(MAX_VISITS), Cell::new(MAX_SEATS));
    let search = Search { demand, before: Left::of(pieces), room, visits, seats };
    if demand.cache == Span::Single && demand.groups.len() > 1 {
        // Together in one cache, whatever their nodes.
        let caches: BTreeSet<LlcId> = pieces.iter().filter_map(|piece| piece.llc).collect();
        return search.best(caches.into_iter().filter_map(|llc| {
            let inside: Vec<_> = pieces.iter().copied().filter(|piece| piece.llc == Some(llc)).collect();
            choose(&inside, &Demand { cache: Span::Prefer, ..*demand }, room)
        }));
    }
    // Nodes are alike only as far as nothing but their pieces tells them apart.
    let apart = room.is_some() || demand.far.is_some() || caches_span_nodes(pieces);
    let nodes = domains(pieces, |piece| piece.node, |piece| apart.then_some(piece.node));
    // On more nodes than pieces are taken there is nobody to use the memory of the rest.
    let smallest = pieces.iter().map(|piece| u32::from(piece.vcpus)).min().unwrap_or(1).max(1);
    let most = usize::try_from(demand.vcpus.div_ceil(smallest)).unwrap_or(usize::MAX).saturating_add(demand.extra);
    // Step 4: node sets, fewest first.
    let within = |numa: Span| {
        // Several groups never lie on more nodes than there are groups.
        let few = |size: &usize| match demand.groups.len() {
            1 => numa == Span::Any || *size <= most,
            groups => *size <= groups,
        };
        sizes(&nodes, demand, numa).into_iter().filter(few).find_map(|size| {
            let sets = subsets(&nodes, size, demand, &Cell::new(MAX_NODE_SETS * pieces.len()));
            let sets = sets.into_iter().filter(|set| search.has_room(&[nodes_of(set)]));
            let choices = sets.filter_map(|set| search.in_nodes(&set));
            search.best(choices)
        })
    };
    // Where nodes do not matter for the vCPUs, they still may for memory.
    let found =
        within(demand.numa).or_else(|| room.filter(|_| demand.numa == Span::Any).and_then(|_| within(Span::Prefer)));
    let may_lie_apart = demand.groups.len() > 1 && demand.extra > 0 && demand.numa != Span::Single;
    // Other threads on a further node are better than none.
    found.or_else(|| if may_lie_apart { with_extra_elsewhere(pieces, demand, room) } else { None })
}

fn with_extra_elsewhere<'a>(pieces: &[&'a Piece], demand: &Demand<'_>, room: Option<Room<'_>>) -> Option<Choice<'a>> {
    let mut choice = choose(pieces, &Demand { extra: 0, ..*demand }, room)?;
    let taken: BTreeSet<_> = choice.vcpus().filter_map(|piece| piece.cpus.first()).collect();
    let mut rest: Vec<_> =
        pieces.iter().copied().filter(|piece| piece.cpus.first().is_some_and(|cpu| !taken.contains(cpu))).collect();
    rest.sort_by_key(|piece| piece.vcpus);
    rest.truncate(demand.extra);
    choice.extra = rest;
    (choice.extra.len() == demand.extra).then_some(choice)
}

struct Search<'s> {
    demand: &'s Demand<'s>,
    before: Left,
    room: Option<Room<'s>>,
    /// What is left of [`MAX_VISITS`] and [`MAX_SEATS`].
    visits: Cell<usize>,
    seats: Cell<usize>,
}

impl Search<'_> {
    fn has_room(&self, nodes: &[BTreeSet<NodeId>]) -> bool {
        self.room.is_none_or(|room| room(nodes))
    }

    /// The choice of the best score.
    fn best<'a>(&self, choices: impl IntoIterator<Item = Choice<'a>>) -> Option<Choice<'a>> {
        let scored = choices.into_iter().map(|choice| (self.score(&choice), choice));
        scored.min_by(|(a, _), (b, _)| a.cmp(b)).map(|(_, choice)| choice)
    }

    /// The best choice that uses all of these pieces' nodes, if need be.
    fn in_nodes<'a>(&self, inside: &[&'a Piece]) -> Option<Choice<'a>> {
        match self.demand.groups {
            [_] => self.in_caches(inside, self.demand.groups, self.demand.extra),
            groups => {
                let mut nodes: BTreeMap<Option<NodeId>, Vec<&Piece>> = BTreeMap::new();
                inside.iter().for_each(|piece| nodes.entry(piece.node).or_default().push(piece));
                let mut nodes: Vec<_> = nodes.into_values().map(Seats::new).collect();
                // The largest first: they have the fewest nodes to go to.
                let mut order: Vec<usize> = (0..groups.len()).collect();
                order.sort_by_key(|&group| Reverse(groups.get(group)));
                if groups.len() > MAX_SEATED {
                    return self.seat_tightly(nodes, &order);
                }
                let mut found = Vec::new();
                self.seat(&mut nodes, &order, None, &mut found);
                self.best(found)
            }
        }
    }

    /// Step 5: the groups to come, in every way, onto the nodes; the choices go to `found`. Beyond [`MAX_SEATED`] groups, or
    /// once the steps are used up, each goes to the tightest node only.
    /// `last` is who was seated last, how large it is and where it sits: of equals none sits before the other.
    fn seat<'a>(
        &self,
        nodes: &mut Vec<Seats<'a>>,
        order: &[usize],
        last: Option<(u32, usize)>,
        found: &mut Vec<Choice<'a>>,
    ) {
        let Some((&group, rest)) = order.split_first() else {
            // With a node left over, it is a matter of fewer nodes.
            if nodes.iter().all(|node| !node.groups.is_empty()) {
                found.extend(self.on_their_nodes(nodes));
            }
            return;
        };
        let vcpus = self.demand.groups.get(group).copied().unwrap_or(0);
        let from = last.filter(|(size, _)| self.demand.equals && *size == vcpus).map_or(0, |(_, at)| at);
        for at in self.candidates(nodes, vcpus).into_iter().filter(|&at| at >= from) {
            let Some(node) = nodes.get_mut(at) else { continue };
            let before = node.room();
            node.take(group, vcpus);
            self.seat(nodes, rest, Some((vcpus, at)), found);
            if let Some(node) = nodes.get_mut(at) {
                node.give_back(before);
            }
            let Some(left) = self.seats.get().checked_sub(1) else { return };
            self.seats.set(left);
        }
    }

    /// As [`Search::seat`], each group to the tightest node that holds it.
    fn seat_tightly<'a>(&self, mut nodes: Vec<Seats<'a>>, order: &[usize]) -> Option<Choice<'a>> {
        for &group in order {
            let vcpus = self.demand.groups.get(group).copied()?;
            let at = *self.candidates(&nodes, vcpus).first()?;
            nodes.get_mut(at)?.take(group, vcpus);
        }
        nodes.retain(|node| !node.groups.is_empty());
        self.on_their_nodes(&nodes)
    }

    /// The nodes that hold so many vCPUs, the tightest first: what is found first is good where the bound cuts the rest.
    fn candidates(&self, nodes: &[Seats<'_>], vcpus: u32) -> Vec<usize> {
        let alone = self.demand.numa == Span::Spread;
        let fits = |node: &Seats<'_>| node.holds(vcpus) && (!alone || node.groups.is_empty());
        let mut candidates: Vec<usize> = (0..nodes.len()).filter(|&at| nodes.get(at).is_some_and(fits)).collect();
        candidates.sort_by_key(|&at| nodes.get(at).map(|node| node.vcpus_left));
        candidates
    }

    /// Each node's groups in its caches; the extra pieces where that is best.
    fn on_their_nodes<'a>(&self, nodes: &[Seats<'a>]) -> Option<Choice<'a>> {
        let hosts = if self.demand.extra == 0 { 0..1 } else { 0..nodes.len().min(MAX_SEATED) };
        let choices = hosts.filter_map(|host| {
            let mut all = Choice { groups: vec![Vec::new(); self.demand.groups.len()], extra: Vec::new() };
            for (at, node) in nodes.iter().enumerate() {
                let vcpus: Vec<u32> =
                    node.groups.iter().filter_map(|&group| self.demand.groups.get(group).copied()).collect();
                let extra = if at == host { self.demand.extra } else { 0 };
                let part = self.in_caches(&node.pieces, &vcpus, extra)?;
                for (&group, pieces) in node.groups.iter().zip(part.groups) {
                    *all.groups.get_mut(group)? = pieces;
                }
                all.extra.extend(part.extra);
            }
            self.has_room(&all.nodes_by_group()).then_some(all)
        });
        self.best(choices)
    }

    /// Step 6: cache sets within these nodes, fewest first.
    fn in_caches<'a>(&self, inside: &[&'a Piece], groups: &[u32], extra: usize) -> Option<Choice<'a>> {
        let demand = Demand { vcpus: groups.iter().sum(), groups, extra, ..*self.demand };
        let mut caches = domains(inside, |piece| piece.llc, |piece| piece.node);
        // An unknown cache is never promised to be one.
        caches.retain(|cache| demand.cache != Span::Single || cache.pieces.iter().all(|piece| piece.llc.is_some()));
        let alone = self.demand.groups.len() == 1;
        let has_room = |choice: &Choice<'_>| !alone || self.has_room(&choice.nodes_by_group());
        sizes(&caches, &demand, demand.cache).into_iter().find_map(|size| {
            let choices = subsets(&caches, size, &demand, &self.visits).into_iter().filter_map(|set| {
                let few = pack(&set, groups, extra, None).filter(has_room);
                // Fewer nodes than these lack the room for memory: use each of them.
                few.or_else(|| {
                    let each = alone.then(|| nodes_of(inside))?;
                    pack(&set, groups, extra, Some(each)).filter(has_room)
                })
            });
            self.best(choices)
        })
    }

    /// Step 8: smaller is better. Nodes, then how far the devices are, then caches, then what is left for the largest
    /// requests to come: in whole cores, then in threads, by node, then by cache. CPU numbers only break ties.
    fn score(&self, choice: &Choice<'_>) -> impl Ord + use<> {
        let nodes: BTreeSet<_> = choice.pieces().map(|piece| piece.node).collect();
        let caches: BTreeSet<_> = choice.pieces().map(|piece| piece.llc).collect();
        let cpus: Vec<CpuId> = choice.pieces().flat_map(|piece| piece.cpus.iter().copied()).collect();
        let far = self.demand.far.map_or(0, |far| far(&choice.nodes()));
        (nodes.len(), far, caches.len(), Reverse(self.before.without(choice)), cpus)
    }
}

/// One node while groups are seated on it in trial.
struct Seats<'a> {
    pieces: Vec<&'a Piece>,
    vcpus_left: u32,
    pieces_left: usize,
    largest: u16,
    groups: Vec<usize>,
}

impl<'a> Seats<'a> {
    fn new(pieces: Vec<&'a Piece>) -> Seats<'a> {
        let vcpus_left = pieces.iter().map(|piece| u32::from(piece.vcpus)).sum();
        let largest = pieces.iter().map(|piece| piece.vcpus).max().unwrap_or(0);
        let pieces_left = pieces.iter().filter(|piece| piece.vcpus > 0).count();
        Seats { pieces, vcpus_left, pieces_left, largest, groups: Vec::new() }
    }

    fn room(&self) -> (u32, usize) {
        (self.vcpus_left, self.pieces_left)
    }

    /// Undoes the last [`Seats::take`].
    fn give_back(&mut self, room: (u32, usize)) {
        (self.vcpus_left, self.pieces_left) = room;
        self.groups.pop();
    }

    /// The fewest pieces that the group takes.
    fn pieces_for(&self, vcpus: u32) -> usize {
        vcpus.div_ceil(u32::from(self.largest.max(1))).try_into().unwrap_or(usize::MAX)
    }

    /// Necessary, not sufficient: whether it really fits is seen when the pieces are packed.
    fn holds(&self, vcpus: u32) -> bool {
        self.vcpus_left >= vcpus && self.pieces_left >= self.pieces_for(vcpus)
    }

    fn take(&mut self, group: usize, vcpus: u32) {
        self.pieces_left = self.pieces_left.saturating_sub(self.pieces_for(vcpus));
        self.vcpus_left = self.vcpus_left.saturating_sub(vcpus);
        self.groups.push(group);
    }
}

fn nodes_of(pieces: &[&Piece]) -> BTreeSet<NodeId> {
    pieces.iter().filter_map(|piece| piece.node).collect()
}

/// Whether any last-level cache has pieces on more than one node (sub-NUMA clustering).
fn caches_span_nodes(pieces: &[&Piece]) -> bool {
    let mut nodes = BTreeMap::new();
    pieces.iter().any(|piece| piece.llc.is_some() && *nodes.entry(piece.llc).or_insert(piece.node) != piece.node)
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

    /// How the offers after the choice differ from those before it: of nodes, then of caches.
    fn without(&self, choice: &Choice<'_>) -> (Change, Change) {
        let mut nodes: BTreeMap<Option<NodeId>, Offer> = BTreeMap::new();
        let mut caches: BTreeMap<Option<LlcId>, Offer> = BTreeMap::new();
        let mut broken = BTreeSet::new();
        for piece in choice.pieces() {
            let whole = usize::from(!piece.lone && piece.core.is_some_and(|core| broken.insert(core)));
            for offer in [nodes.entry(piece.node).or_default(), caches.entry(piece.llc).or_default()] {
                offer.cores += whole;
                offer.threads += piece.cpus.len();
            }
        }
        (Change::of(&self.nodes, nodes), Change::of(&self.caches, caches))
    }
}

/// What taking something changes in a host's offers, sorted with the largest first: how many more or fewer there are of each.
/// Of two changes of the same offers the greater is the one that leaves more of the largest offer of which they do not leave
/// as many: as if all offers were compared, at the cost of those touched.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Change(BTreeMap<Reverse<Offer>, i32>);

impl Change {
    fn of<K: Ord>(before: &BTreeMap<K, Offer>, taken: BTreeMap<K, Offer>) -> Change {
        let mut change: BTreeMap<Reverse<Offer>, i32> = BTreeMap::new();
        for (domain, Offer { cores, threads }) in taken {
            let Some(&offer) = before.get(&domain) else { continue };
            let (cores, threads) = (offer.cores.saturating_sub(cores), offer.threads.saturating_sub(threads));
            *change.entry(Reverse(offer)).or_default() -= 1;
            *change.entry(Reverse(Offer { cores, threads })).or_default() += 1;
        }
        change.retain(|_, count| *count != 0);
        Change(change)
    }
}

impl Ord for Change {
    fn cmp(&self, other: &Change) -> Ordering {
        let (mut a, mut b) = (self.0.iter(), other.0.iter());
        loop {
            // What one of them does not touch, it leaves as it is.
            return match (a.next(), b.next()) {
                (None, None) => Ordering::Equal,
                (Some((_, count)), None) => count.cmp(&0),
                (None, Some((_, count))) => 0.cmp(count),
                (Some((x, of_x)), Some((y, of_y))) => match x.cmp(y) {
                    Ordering::Less => of_x.cmp(&0),
                    Ordering::Greater => 0.cmp(of_y),
                    Ordering::Equal if of_x == of_y => continue,
                    Ordering::Equal => of_x.cmp(of_y),
                },
            };
        }
    }
}

impl PartialOrd for Change {
    fn partial_cmp(&self, other: &Change) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
