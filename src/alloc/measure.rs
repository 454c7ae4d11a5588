//! What is free for a request, where, and what is not for it and why: the numbers of a refusal. Pure; decides nothing.

use std::collections::{BTreeMap, BTreeSet};

use super::Supply;
use super::choose::Piece;
use super::pieces::is_wanted;
use super::policy::{Cores, Span, ThreadsPerCore};
use super::request::Request;
use crate::cpuset::{CpuId, CpuSet};
use crate::error::{Amount, Part, Withheld};
use crate::host::Cpu;

/// The pieces for a request: those that are free, and those there would be with every lease gone.
pub(super) struct Measure<'a> {
    pub(super) supply: &'a Supply<'a>,
    pub(super) request: &'a Request,
    pub(super) free: &'a [Piece],
    pub(super) all: &'a [Piece],
}

impl Measure<'_> {
    fn whole(&self) -> bool {
        self.request.policy.cores == Cores::Whole
    }

    /// Free threads of any of its pieces, whether whole or not.
    pub(super) fn free_threads(&self) -> usize {
        self.threads(|_| true, self.supply.taken)
    }

    fn threads(&self, here: impl Fn(&Piece) -> bool, taken: &CpuSet) -> usize {
        let cpus = self.all.iter().filter(|piece| here(piece)).flat_map(|piece| &piece.cpus);
        cpus.filter(|&&cpu| !taken.contains(cpu)).count()
    }

    /// So many pieces, and all the threads of so many.
    pub(super) fn pieces(&self, count: u32) -> Amount {
        let largest = self.all.iter().map(|piece| piece.cpus.len()).max().unwrap_or(1);
        let threads = count.saturating_mul(small(largest));
        Amount { cores: self.whole().then_some(count), threads }
    }

    fn amounts(&self, here: impl Fn(&Piece) -> bool) -> (Amount, Amount) {
        let count = |pieces: &[Piece]| {
            self.whole().then(|| small(pieces.iter().filter(|piece| piece.vcpus > 0 && here(piece)).count()))
        };
        let (free, all) = (self.threads(&here, self.supply.taken), self.threads(&here, &CpuSet::new()));
        (
            Amount { cores: count(self.free), threads: small(free) },
            Amount { cores: count(self.all), threads: small(all) },
        )
    }

    fn parts(&self, domain: impl Fn(&Piece) -> Option<u16>) -> Vec<Part> {
        let ids: BTreeSet<u16> = self.all.iter().filter_map(&domain).collect();
        let part = |id| {
            let (free, pinnable) = self.amounts(|piece| domain(piece) == Some(id));
            Part { id, free, pinnable }
        };
        ids.into_iter().map(part).collect()
    }

    pub(super) fn nodes(&self) -> Vec<Part> {
        self.parts(|piece| piece.node.map(|node| node.0))
    }

    /// Empty where the request may be in more than one.
    pub(super) fn llcs(&self) -> Vec<Part> {
        match self.request.policy.cache {
            Span::Single => self.parts(|piece| piece.llc.map(|llc| llc.0)),
            Span::Prefer | Span::Any | Span::Spread => Vec::new(),
        }
    }

    /// What is free, and what is pinnable, where the request has to be: in the one domain that has the most, or all of it.
    pub(super) fn in_one(&self) -> (Amount, Amount) {
        let parts = match (self.request.policy.cache, self.request.policy.numa) {
            (Span::Single, _) => self.llcs(),
            (_, Span::Single) if !self.supply.topology.nodes().is_empty() => self.nodes(),
            _ => return self.amounts(|_| true),
        };
        let nothing = Amount { cores: self.whole().then_some(0), threads: 0 };
        let most = |amount: fn(&Part) -> Amount| parts.iter().map(amount).max().unwrap_or(nothing);
        (most(|part| part.free), most(|part| part.pinnable))
    }

    /// CPUs that are not for this request although they are pinnable and not taken.
    pub(super) fn withheld(&self, taken: &CpuSet) -> Vec<Withheld> {
        let supply = self.supply;
        let free = supply.handed_out().difference(taken);
        let pieces = if taken.is_empty() { self.all } else { self.free };
        let known = |piece: &&Piece| self.request.policy.cache != Span::Single || piece.llc.is_some();
        let usable: CpuSet = pieces.iter().filter(known).flat_map(|piece| piece.cpus.iter().copied()).collect();
        let mut reasons: BTreeMap<Why, CpuSet> = BTreeMap::new();
        let is_wanted = is_wanted(supply.topology, self.request);
        for cpu in free.difference(&usable).iter().filter_map(|cpu| supply.topology.cpu(cpu)) {
            let why = if is_wanted(cpu) { self.why(cpu, &free) } else { self.why_unwanted(cpu) };
            reasons.entry(why).or_default().insert(cpu.cpu);
        }
        let withheld =
            |(why, cpus): (Why, CpuSet)| Withheld { cpus: cpus.to_string(), why: why.name(), meaning: why.meaning() };
        reasons.into_iter().map(withheld).collect()
    }

    fn why_unwanted(&self, cpu: &Cpu) -> Why {
        let named = self.request.policy.nodes.as_ref();
        match cpu.node {
            // Where there are no nodes, they tell nothing apart.
            None if self.supply.topology.nodes().is_empty() => Why::OtherClass,
            None => Why::NodeUnknown,
            Some(node) if named.is_none_or(|nodes| nodes.contains(CpuId(node.0))) => Why::OtherClass,
            Some(_) => Why::OtherNode,
        }
    }

    /// The first reason that this free CPU is in no piece, or in none that the request can have.
    fn why(&self, cpu: &Cpu, free: &CpuSet) -> Why {
        let core = self.supply.topology.siblings(cpu.cpu);
        let threads = match self.request.policy.threads_per_core {
            ThreadsPerCore::Exactly(count) => usize::from(count.get()),
            ThreadsPerCore::Auto => 0,
        };
        match core {
            None if self.whole() => Why::SiblingsUnknown,
            Some(core) if self.whole() && !core.is_subset(self.supply.pinnable) => Why::SiblingNotPinnable,
            Some(core) if self.whole() && !core.is_subset(free) => Why::SiblingLeased,
            Some(core) if self.whole() && core.len() < threads => Why::TooFewThreads,
            _ if self.request.policy.cache == Span::Single => Why::CacheUnknown,
            _ => Why::NoEmulator,
        }
    }
}

/// Why a free CPU is not for a request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Why {
    OtherNode,
    NodeUnknown,
    OtherClass,
    SiblingsUnknown,
    SiblingNotPinnable,
    SiblingLeased,
    TooFewThreads,
    CacheUnknown,
    NoEmulator,
}

impl Why {
    fn name(self) -> &'static str {
        match self {
            Why::OtherNode => "other-node",
            Why::NodeUnknown => "node-unknown",
            Why::OtherClass => "other-class",
            Why::SiblingsUnknown => "siblings-unknown",
            Why::SiblingNotPinnable => "sibling-not-pinnable",
            Why::SiblingLeased => "sibling-leased",
            Why::TooFewThreads => "too-few-threads",
            Why::CacheUnknown => "cache-unknown",
            Why::NoEmulator => "no-emulator-cpu",
        }
    }

    /// Nodes and classes the request names itself.
    fn meaning(self) -> Option<&'static str> {
        match self {
            Why::OtherNode | Why::OtherClass => None,
            Why::NodeUnknown => Some("node unknown"),
            Why::SiblingsUnknown => Some("siblings unknown"),
            Why::SiblingNotPinnable => Some("sibling not pinnable"),
            Why::SiblingLeased => Some("sibling leased"),
            Why::TooFewThreads => Some("core of too few online threads"),
            Why::CacheUnknown => Some("last-level cache unknown"),
            Why::NoEmulator => Some("no housekeeping CPU of their class for the emulator"),
        }
    }
}

pub(super) fn small(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
