//! How near together a granted plan lies, against what this host could give: advice beside an answer, never a part of it.
//! Pure.
//!
//! Says only what is certain: the best is a plan that was made with every lease gone; what would fit is counted by planning
//! it, and its bound by division.

use std::collections::{BTreeMap, BTreeSet};

use super::pieces::pieces;
use super::plan::Plan;
use super::policy::Span;
use super::pools::how_many_fit;
use super::repack::Extent;
use super::request::Request;
use super::{Supply, plan};
use crate::cpuset::{CpuId, CpuSet, NodeId};
use crate::error::counted;

/// A plan that is spread wider than it had to be on an empty host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// What the plan spans.
    pub spans: Extent,
    /// What the same request spans when nobody else is there.
    pub possible: Extent,
    nodes: BTreeSet<NodeId>,
    /// Whether caches matter to the request.
    caches: bool,
}

/// How many more like it would fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fit {
    /// Beside the plan, as everybody lies now.
    pub now: usize,
    /// No more than this, if what is free lay as it should.
    pub at_most: usize,
}

/// What there is to say about the plan's extent: nothing where it is as near together as this host allows, or where the
/// policy does not care.
pub fn advise(supply: &Supply<'_>, request: &Request, given: &Plan) -> Option<Advice> {
    let policy = &request.policy;
    let caches = matches!(policy.cache, Span::Prefer | Span::Single);
    let spans = Extent::of(supply.topology, given);
    let near = spans.nodes == 1 && (!caches || spans.llcs == 1);
    if near || !matches!(policy.numa, Span::Prefer | Span::Single) {
        return None;
    }
    let possible = Extent::of(supply.topology, &plan(&Supply { taken: &CpuSet::new(), ..*supply }, request).ok()?);
    let better = possible.nodes < spans.nodes || (caches && possible < spans);
    better.then(|| Advice { spans, possible, nodes: given.nodes.clone(), caches })
}

impl Advice {
    /// How near together a better plan would lie.
    pub fn goal(&self) -> Extent {
        Extent { nodes: self.possible.nodes, llcs: if self.caches { self.possible.llcs } else { usize::MAX } }
    }

    /// "spans 2 nodes (0-1) where 1 is possible"
    pub fn sentence(&self) -> String {
        if self.possible.nodes < self.spans.nodes {
            let nodes: CpuSet = self.nodes.iter().map(|node| CpuId(node.0)).collect();
            let spans = counted(self.spans.nodes as u64, "node");
            return format!("spans {spans} ({nodes}) where {} is possible", self.possible.nodes);
        }
        let spans = counted(self.spans.llcs as u64, "last-level cache");
        format!("spans {spans} where {} is possible", self.possible.llcs)
    }

    /// "it would be so once enough is free on one node", for when no moves are known.
    pub fn when(&self) -> String {
        let place = if self.possible.nodes < self.spans.nodes {
            (self.possible.nodes, "on", "node")
        } else {
            (self.possible.llcs, "in", "last-level cache")
        };
        match place {
            (1, at, what) => format!("it would be so once enough is free {at} one {what}"),
            (count, at, what) => format!("it would be so once enough is free {at} {count} {what}s"),
        }
    }
}

/// How many more requests like this would fit beside its plan, where that is fewer than could be: only for those that have
/// to lie on one node or in one cache of a host whose cores are alike.
pub fn fit(supply: &Supply<'_>, request: &Request, given: &Plan) -> Option<Fit> {
    let policy = &request.policy;
    let in_one = |cpu: CpuId| {
        let cpu = supply.topology.cpu(cpu)?;
        let cache = cpu.llc.map(|llc| llc.0).filter(|_| policy.cache == Span::Single);
        Some((cpu.node, cache))
    };
    if !matches!((policy.numa, policy.cache), (Span::Single, _) | (_, Span::Single)) || request.cells.len() > 1 {
        return None;
    }
    let taken = supply.taken.union(&given.exclusive());
    let left = Supply { taken: &taken, ..*supply };
    let all = pieces(&Supply { taken: &CpuSet::new(), ..*supply }, request);
    let free = pieces(&left, request);
    let per_piece = all.first()?.vcpus;
    let alike =
        all.iter().all(|piece| (piece.vcpus, piece.class) == (per_piece, all.first().and_then(|one| one.class)));
    if per_piece == 0 || !alike {
        return None;
    }
    let needs = request.dedicated().count().div_ceil(usize::from(per_piece)) + request.isolated();
    let mut domains: BTreeMap<_, usize> = BTreeMap::new();
    for cpu in all.iter().filter_map(|piece| piece.cpus.first()) {
        *domains.entry(in_one(*cpu)).or_default() += 1;
    }
    // Neither more than the free pieces give, nor more than the whole host has places for.
    let places: usize = domains.values().map(|count| count / needs).sum();
    let at_most = (free.len() / needs).min(places);
    let now = how_many_fit(&left, request);
    (now < at_most).then_some(Fit { now, at_most })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alloc::policy::Policy;
    use crate::host::shape;

    #[test]
    fn how_many_fit_and_could() {
        // Four caches of four cores. What is taken leaves 1, 1, 4 and 4 of them.
        let host = shape::parse("1s16c1t,llc=4").unwrap();
        let (nothing, taken) = (CpuSet::new(), CpuSet::parse_kernel_list("0-2,4-6").unwrap());
        let supply = Supply { topology: &host, pinnable: host.online(), taken: &taken, housekeeping: &nothing };
        let fit = |vcpus, policy: &[(&str, &str)]| {
            let share = [("policy", "dedicated"), ("emulator", "share"), ("iothreads", "share")];
            let policy = Policy::from_attributes(share.iter().chain(policy).copied()).unwrap();
            let request = Request::new(vcpus, policy);
            fit(&supply, &request, &plan(&supply, &request).unwrap())
        };
        // One takes two of four: 2, 4 and two lone ones are left, which would make a pair.
        assert_eq!(fit(2, &[("cache", "single")]), Some(Fit { now: 3, at_most: 4 }));
        // Seven are left, 1, 1, 1 and 4; but no cache holds three twice.
        assert_eq!(fit(3, &[("cache", "single")]), Some(Fit { now: 1, at_most: 2 }));
        assert_eq!(fit(4, &[("cache", "single")]), None);
        // Nothing binds it.
        assert_eq!(fit(2, &[]), None);
    }
}
