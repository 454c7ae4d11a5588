//! Whether free CPUs could add up for several requests at once, some leases gone: arithmetic before any plan. Pure.
//!
//! Counts CPUs by node and last-level cache, in whole cores for those who want them. It may say that something fits which
//! does not (kinds of cores, memory and order are not looked at); it never denies what does.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::Supply;
use super::pieces::pieces;
use super::policy::{Cores, Policy, Span};
use super::request::Request;
use crate::cpuset::{CpuId, CpuSet, NodeId};
use crate::host::LlcId;

/// No more leases are gone at once: nobody moves four guests for one.
pub(super) const MOST_GONE: usize = 3;

/// Numbers of leases, ascending, filled up with [`NOBODY`].
pub(super) type Set = [usize; MOST_GONE];

/// The number of no lease.
pub(super) const NOBODY: usize = usize::MAX;

/// How many layouts of one set are looked at before it is taken to fit.
const MAX_LAYOUTS: usize = 64;

/// What the CPUs of one party must not be spread over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Within {
    Cache,
    Node,
    Machine,
}

/// One of those that have to find a place: what it needs at the least.
pub(super) struct Party {
    pub(super) within: Within,
    /// CPUs, siblings that it parks included.
    pub(super) needs: usize,
    whole: bool,
    terms: Rc<Terms>,
}

/// What a policy gets out of this host when nobody else is there.
struct Terms {
    /// The most vCPUs that a piece takes, and the fewest CPUs that one has.
    most: usize,
    smallest: usize,
    /// Which nodes and caches have CPUs for it.
    nodes: Vec<bool>,
    caches: Vec<bool>,
}

/// The CPUs that could be free, by who has to go for it: those of whole cores, and each for itself.
pub(super) struct Sums {
    domains: Domains,
    cores: Ledger,
    threads: Ledger,
    /// Most requests of a host have one of few policies.
    terms: Vec<(Policy, Rc<Terms>)>,
}

impl Sums {
    /// Of this supply and the CPUs of the leases that may go, by number.
    pub(super) fn of<'c>(supply: &Supply<'_>, leases: impl Iterator<Item = &'c CpuSet>) -> Sums {
        let mut holders: BTreeMap<CpuId, usize> = BTreeMap::new();
        for (number, cpus) in leases.enumerate() {
            holders.extend(cpus.iter().map(|cpu| (cpu, number)));
        }
        let pinnable = supply.handed_out();
        // Who has to go for this CPU, if anybody; the outer `None` = it will not be free.
        let holder = |cpu: CpuId| {
            let holder = holders.get(&cpu).copied();
            let free = holder.is_some() || !supply.taken.contains(cpu);
            (free && pinnable.contains(cpu)).then_some(holder)
        };
        let domains = Domains::of(supply);
        let mut sums = Sums { cores: Ledger::of(&domains), threads: Ledger::of(&domains), domains, terms: Vec::new() };
        for cpu in pinnable.iter() {
            let Some(place) = sums.domains.place(supply, cpu) else { continue };
            if let Some(holder) = holder(cpu) {
                sums.threads.add(place, holder.into_iter().collect());
            }
            let core = supply.topology.siblings(cpu);
            let holders = core.and_then(|core| core.iter().map(holder).collect::<Option<BTreeSet<_>>>());
            if let Some(holders) = holders {
                sums.cores.add(place, holders.into_iter().flatten().collect());
            }
        }
        sums
    }

    /// What this request needs.
    pub(super) fn party(&mut self, supply: &Supply<'_>, request: &Request) -> Party {
        let policy = &request.policy;
        let known = self.terms.iter().find(|(known, _)| known == policy).map(|(_, terms)| Rc::clone(terms));
        let terms = known.unwrap_or_else(|| {
            let terms = Rc::new(self.domains.terms(supply, request));
            self.terms.push((policy.clone(), Rc::clone(&terms)));
            terms
        });
        Party {
            within: match (policy.cache, policy.numa) {
                (Span::Single, _) => Within::Cache,
                (_, Span::Single) => Within::Node,
                _ => Within::Machine,
            },
            needs: (request.dedicated().count().div_ceil(terms.most) + request.isolated()) * terms.smallest,
            whole: policy.cores == Cores::Whole,
            terms,
        }
    }

    /// Whether all of these may fit beside each other once the leases of the set are gone.
    pub(super) fn may_fit<'p>(&self, gone: &Set, parties: impl Iterator<Item = &'p Party>) -> bool {
        let mut parties: Vec<&Party> = parties.collect();
        parties.sort_by_key(|party| (party.within, Reverse(party.needs)));
        let whole: Vec<&Party> = parties.iter().copied().filter(|party| party.whole).collect();
        let fit = |ledger: &Ledger, parties: &[&Party]| {
            let mut layouts = MAX_LAYOUTS;
            parties.is_empty() || ledger.without(gone).holds(parties, &self.domains.node_of, &mut layouts)
        };
        fit(&self.cores, &whole) && (whole.len() == parties.len() || fit(&self.threads, &parties))
    }
}

/// The nodes and last-level caches of the online CPUs, numbered.
struct Domains {
    nodes: Vec<Option<NodeId>>,
    caches: Vec<Option<LlcId>>,
    /// The node of each cache; one that spans several (sub-NUMA clustering) is on none.
    node_of: Vec<Option<usize>>,
}

impl Domains {
    fn of(supply: &Supply<'_>) -> Domains {
        let cpus = || supply.topology.cpus().iter().filter(|cpu| cpu.online);
        let nodes: BTreeSet<_> = cpus().map(|cpu| cpu.node).collect();
        let nodes: Vec<_> = nodes.into_iter().collect();
        let mut caches: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        for cpu in cpus() {
            caches.entry(cpu.llc).or_default().insert(cpu.node);
        }
        let node_of = caches.values().map(|on| {
            let node = on.first().filter(|_| on.len() == 1)?;
            nodes.binary_search(node).ok()
        });
        Domains { node_of: node_of.collect(), caches: caches.into_keys().collect(), nodes }
    }

    fn terms(&self, supply: &Supply<'_>, request: &Request) -> Terms {
        let nothing = CpuSet::new();
        let pieces = pieces(&Supply { taken: &nothing, ..*supply }, request);
        let mut terms = Terms {
            most: pieces.iter().map(|piece| usize::from(piece.vcpus)).max().unwrap_or(1).max(1),
            smallest: pieces.iter().map(|piece| piece.cpus.len()).min().unwrap_or(1),
            nodes: vec![false; self.nodes.len()],
            caches: vec![false; self.caches.len()],
        };
        for &cpu in pieces.iter().flat_map(|piece| &piece.cpus) {
            let Some((node, cache)) = self.place(supply, cpu) else { continue };
            terms.nodes.get_mut(node).into_iter().for_each(|allowed| *allowed = true);
            terms.caches.get_mut(cache).into_iter().for_each(|allowed| *allowed = true);
        }
        terms
    }

    /// The numbers of the CPU's node and cache.
    fn place(&self, supply: &Supply<'_>, cpu: CpuId) -> Option<(usize, usize)> {
        let cpu = supply.topology.cpu(cpu)?;
        Some((self.nodes.binary_search(&cpu.node).ok()?, self.caches.binary_search(&cpu.llc).ok()?))
    }
}

/// CPUs that are free, and those that would be.
struct Ledger {
    free: Free,
    /// Once all of these are gone: the node and cache of each CPU.
    after: BTreeMap<Set, Vec<(usize, usize)>>,
}

impl Ledger {
    fn of(domains: &Domains) -> Ledger {
        let (nodes, caches) = (vec![0; domains.nodes.len()], vec![0; domains.caches.len()]);
        Ledger { free: Free { nodes, caches, all: 0 }, after: BTreeMap::new() }
    }

    fn add(&mut self, place: (usize, usize), holders: BTreeSet<usize>) {
        if holders.is_empty() {
            self.free.add(place);
        } else if holders.len() <= MOST_GONE {
            let mut holders = holders.into_iter();
            let set = std::array::from_fn(|_| holders.next().unwrap_or(NOBODY));
            self.after.entry(set).or_default().push(place);
        }
    }

    fn without(&self, gone: &Set) -> Free {
        let mut free = self.free.clone();
        // Each part of the set frees what it holds together.
        for part in 1u32..1 << MOST_GONE {
            let mut members = gone.iter().zip(0..).filter(|(_, bit)| part & (1 << bit) != 0).map(|(&number, _)| number);
            let members: Set = std::array::from_fn(|_| members.next().unwrap_or(NOBODY));
            // A part of places that nobody is at is none.
            if members.iter().zip(0..part.count_ones()).all(|(&number, _)| number != NOBODY) {
                self.after.get(&members).into_iter().flatten().for_each(|&place| free.add(place));
            }
        }
        free
    }
}

/// How many CPUs are free where.
#[derive(Clone)]
struct Free {
    nodes: Vec<usize>,
    caches: Vec<usize>,
    all: usize,
}

impl Free {
    fn add(&mut self, (node, cache): (usize, usize)) {
        self.nodes.get_mut(node).into_iter().for_each(|free| *free += 1);
        self.caches.get_mut(cache).into_iter().for_each(|free| *free += 1);
        self.all += 1;
    }

    /// Whether these may all fit, the most constrained first.
    fn holds(&self, parties: &[&Party], node_of: &[Option<usize>], layouts: &mut usize) -> bool {
        let Some((party, others)) = parties.split_first() else { return true };
        let Some(all) = self.all.checked_sub(party.needs) else { return false };
        // Too many to look at: it may.
        let Some(left) = layouts.checked_sub(1) else { return true };
        *layouts = left;
        let rest = || Free { all, ..self.clone() };
        let take =
            |from: Option<&mut usize>| from.into_iter().for_each(|free| *free = free.saturating_sub(party.needs));
        let roomy =
            |(place, (&free, &allowed)): (usize, (&usize, &bool))| (allowed && free >= party.needs).then_some(place);
        match party.within {
            Within::Cache => self.caches.iter().zip(&party.terms.caches).enumerate().filter_map(roomy).any(|cache| {
                let mut rest = rest();
                take(rest.caches.get_mut(cache));
                take(node_of.get(cache).copied().flatten().and_then(|node| rest.nodes.get_mut(node)));
                rest.holds(others, node_of, layouts)
            }),
            Within::Node => self.nodes.iter().zip(&party.terms.nodes).enumerate().filter_map(roomy).any(|node| {
                let mut rest = rest();
                take(rest.nodes.get_mut(node));
                rest.holds(others, node_of, layouts)
            }),
            Within::Machine => {
                let mine = self.nodes.iter().zip(&party.terms.nodes).filter(|(_, allowed)| **allowed);
                mine.map(|(free, _)| free).sum::<usize>() >= party.needs && rest().holds(others, node_of, layouts)
            }
        }
    }
}
