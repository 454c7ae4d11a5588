//! Which running leases to move, and in which order: to make room for a request, off CPUs that may not be handed out any more, or
//! so that one lies nearer together.
//!
//! Only moves that a running guest does not notice. What is found holds for the leases as they were read: each move is
//! checked again under the lock when it is made.

use super::Mobile;
use crate::alloc::plan::Plan;
use crate::alloc::repack::{Extent, Mover};
use crate::alloc::request::Request;
use crate::alloc::{self, Supply, quality, relocation};
use crate::cpuset::CpuSet;
use crate::decision::Situation;
use crate::error::{Code, Error, Moved, Result, printable};
use crate::host::cgroup;
use crate::host::root::Root;
use crate::lock::leases::{Holds, Lease, Leases};
use crate::uuid::DomainUuid;

/// One lease that moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Whose.
    pub uuid: DomainUuid,
    /// The domain's name.
    pub name: String,
    /// The CPUs it holds.
    pub from: CpuSet,
    /// The plan it goes to.
    pub to: Plan,
}

impl From<&Step> for Moved {
    fn from(step: &Step) -> Moved {
        Moved { domain: step.name.clone(), from: step.from.to_string(), to: step.to.exclusive().to_string() }
    }
}

/// The host, its leases, and the running ones among them that could move.
#[derive(Debug)]
pub struct Movable<'a> {
    situation: &'a Situation,
    leases: Leases,
    mobile: Vec<(DomainUuid, Mobile)>,
}

impl<'a> Movable<'a> {
    /// Looks at every lease. `situation` is the host as if there were none: in a partition that reaches other CPUs than libvirt's
    /// own nothing that it says holds, so who is there stays.
    pub fn new(root: &Root, situation: &'a Situation, leases: Leases) -> Movable<'a> {
        let usual = cgroup::reach(root, None).ok();
        let reaches_the_same = |mobile: &Mobile| {
            let own = mobile.partition.as_deref();
            own.is_none() || usual.is_some() && cgroup::reach(root, own).ok() == usual
        };
        let resting = leases.iter().filter(|lease| lease.moving.is_none());
        let mobile = resting.filter_map(|lease| Some((lease.uuid, Mobile::of(root, lease).ok()?)));
        Movable { situation, mobile: mobile.filter(|(_, mobile)| reaches_the_same(mobile)).collect(), leases }
    }

    /// The moves after which there is room for the request of a domain, which may be none yet; empty if there is already.
    ///
    /// # Errors
    /// The refusal, where no moves of running domains are known that would make room.
    pub fn make_room(&mut self, request: &Request, domain: Option<DomainUuid>) -> Result<Vec<Step>> {
        let beside = self.situation.clone().beside(&self.leases, domain);
        let taken = beside.taken.union(&beside.reserved());
        let Err(refusal) = alloc::plan(&Supply { taken: &taken, ..beside.supply() }, request) else {
            return Ok(Vec::new());
        };
        self.moves(&beside, request, domain, None)
            .and_then(|steps| self.ordered(steps))
            .ok_or_else(|| Error::from(refusal).with_hint("no moves of running VMs are known that would make room"))
    }

    /// A move of one lease off CPUs that are not pinnable any more, taken as made; `None` if none has such CPUs and another place.
    pub fn withdraw(&mut self) -> Option<Step> {
        let step = self.mobile.iter().find_map(|(uuid, mobile)| {
            let lease = self.leases.get(*uuid)?;
            let plan = lease.plan().filter(|plan| !plan.exclusive().is_subset(&self.situation.pinnable))?;
            let beside = self.situation.clone().beside(&self.leases, Some(*uuid));
            let taken = beside.taken.union(&beside.reserved());
            let supply = Supply { taken: &taken, ..beside.supply() };
            let to = relocation::anew(&supply, &mobile.request, plan, mobile.memory).ok()?;
            Some(Step { uuid: *uuid, name: lease.name.clone(), from: lease.cpus(), to })
        })?;
        made(&mut self.leases, &step);
        Some(step)
    }

    /// Moves that bring one lease nearer together and none further apart on the whole; empty if nothing is to be gained.
    /// `tell` hears the number of each lease that is looked at, and of how many.
    pub fn improve(&mut self, tell: &mut dyn FnMut(usize, usize)) -> Vec<Step> {
        for index in 0..self.mobile.len() {
            tell(index + 1, self.mobile.len());
            let before = (self.leases.clone(), self.extent());
            let steps = self.improve_one(index).and_then(|steps| self.ordered(steps)).unwrap_or_default();
            if !steps.is_empty() && self.extent() < before.1 {
                return steps;
            }
            self.leases = before.0;
        }
        Vec::new()
    }

    fn improve_one(&self, index: usize) -> Option<Vec<Step>> {
        let (uuid, mobile) = self.mobile.get(index)?;
        let lease = self.leases.get(*uuid)?;
        let plan = lease.plan()?;
        let beside = self.situation.clone().beside(&self.leases, Some(*uuid));
        let goal = quality::advise(&beside.supply(), &mobile.request, plan)?.goal();
        let near = |situation: &Situation| {
            let taken = situation.taken.union(&situation.reserved());
            let supply = Supply { taken: &taken, ..situation.supply() };
            let to = relocation::anew(&supply, &mobile.request, plan, mobile.memory).ok()?;
            let better = Extent::of(&situation.topology, &to) <= goal;
            better.then(|| Step { uuid: *uuid, name: lease.name.clone(), from: lease.cpus(), to })
        };
        if let Some(own) = near(&beside) {
            return Some(vec![own]);
        }
        let mut steps = self.moves(&beside, &mobile.request, Some(*uuid), Some(goal))?;
        let mut after = self.leases.clone();
        steps.iter().for_each(|step| made(&mut after, step));
        steps.push(near(&self.situation.clone().beside(&after, Some(*uuid)))?);
        Some(steps)
    }

    fn moves(
        &self,
        beside: &Situation,
        request: &Request,
        domain: Option<DomainUuid>,
        goal: Option<Extent>,
    ) -> Option<Vec<Step>> {
        let movers = self.mobile.iter().filter(|(uuid, _)| Some(*uuid) != domain).filter_map(|(uuid, mobile)| {
            let lease = self.leases.get(*uuid)?;
            let live = Some((lease.plan()?.clone(), mobile.memory));
            Some(Mover { request: mobile.request.clone(), live, ..beside.mover(lease)? })
        });
        let moves = beside.moves_of(request, &movers.collect::<Vec<_>>(), goal)?;
        let steps = moves.into_iter().filter_map(|one| {
            let (name, uuid) = one.id;
            Some(Step { from: self.leases.get(uuid)?.cpus(), uuid, name, to: one.plan })
        });
        Some(steps.collect())
    }

    /// The steps in an order in which each finds its CPUs free, taken as made; `None` where they wait for each other.
    fn ordered(&mut self, mut steps: Vec<Step>) -> Option<Vec<Step>> {
        let mut order = Vec::new();
        while !steps.is_empty() {
            let free = |step: &Step| self.leases.taken_from(Some(step.uuid)).is_disjoint(&step.to.exclusive());
            let next = steps.remove(steps.iter().position(free)?);
            made(&mut self.leases, &next);
            order.push(next);
        }
        Some(order)
    }

    /// Over how many nodes and caches all leases lie together.
    fn extent(&self) -> (usize, usize) {
        let each = self.leases.iter().filter_map(Lease::plan).map(|plan| Extent::of(&self.situation.topology, plan));
        each.fold((0, 0), |(nodes, llcs), extent| (nodes + extent.nodes, llcs + extent.llcs))
    }
}

/// The leases after a move.
fn made(leases: &mut Leases, step: &Step) {
    if let Some(lease) = leases.get(step.uuid).cloned() {
        leases.put(Lease { holds: Holds::Dedicated(step.to.clone()), ..lease });
    }
}

/// Makes one move, if the lease is still where it was.
///
/// # Errors
/// As [`super::relocate`].
pub fn make(root: &Root, settings: &crate::config::settings::Settings, step: &Step) -> Result<()> {
    let choose = &mut |_: &Situation, lease: &Lease, _: &Mobile| {
        if lease.cpus() == step.from {
            return Ok(step.to.clone());
        }
        let what = format!("\"{}\" holds CPUs {} by now, not {}", printable(&step.name), lease.cpus(), step.from);
        Err(Error::new(Code::StateConflict, what))
    };
    super::relocate(root, settings, step.uuid, choose).map(drop)
}
