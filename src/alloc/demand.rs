//! Which CPUs a domain gets on a host where others are defined too: the plan over the demand set.
//!
//! The *demand set* is every definition of a dedicated domain, running or not. Each has a *place* that follows from the
//! host and the set alone, so that the same definitions get the same CPUs in whatever order they are defined, started and
//! stopped. Pure, like all of [`super`]; never stores a place, and never asks who runs: the caller says so.
//!
//! Places, on the host as if nobody ran and nothing used its memory:
//! 1. *Order.* Autostart domains first, as a tier of their own, so that what is merely defined never moves one of them;
//!    within each of the two tiers the most constrained first; ties by key.
//! 2. *One after the other.* Each beside the places before it, and beside the memory that goes with them.
//! 3. *Again.* Who found no room goes to the front of its tier, and the tier is placed anew; so it is in the order of the
//!    keys. The round that placed most counts, of equals the first. The number of rounds is bounded, so a set that a
//!    better order could have placed may be short of places.
//!
//! A start, beside the leases of those who run. What the domain asks for now may differ from its definition (a snapshot);
//! places follow from definitions all the same:
//! 4. *Settling.* Who does not run keeps its place, if no lease is in the way; else it gets another one beside the leases
//!    and all other places. An autostart domain may push a merely defined one off its place for that.
//! 5. *Home.* The domain that starts is placed on exactly its own place;
//! 6. *beside all*: else anywhere beside the places of all others;
//! 7. *beside the reserved*: else beside those of autostart domains only, for a merely defined domain's place is a
//!    preference and no reservation;
//! 8. *beside leases alone*: else anywhere, where the operator prefers a start to a reservation; where not, this refusal
//!    is the one that names the places in the way.
//!
//! In 6 and 7 the memory that goes with the places of autostart domains counts as used.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::ground::Ground;
use super::plan::Plan;
use super::policy::{Cores, Span, ThreadsPerCore};
use super::refusal::Refusal;
use super::request::Request;
use super::{Steps, Supply};
use crate::cpuset::CpuSet;
use crate::error::{Code, counted, listed};
use crate::host::Topology;

/// How often the allocator may be asked in step 3, for each tier and beyond its first round: a bound on work, never on
/// time. Of five domains nearly always as many find a place as in the best of all orders (one in some thousand sets is
/// short of one); of a hundred, as many as one round places.
const MAX_PLANS: usize = 60;

/// A persistent definition of a dedicated domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Definition<K> {
    /// Whose; unique in the set.
    pub key: K,
    /// Its name, for people.
    pub name: String,
    /// Whether it is started with the host.
    pub autostart: bool,
    /// What it asks for.
    pub request: Request,
}

/// What the places of autostart domains that do not run yet mean to a domain that starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reserve {
    /// It is refused rather than given their CPUs.
    #[default]
    Strict,
    /// It may have them where nothing else is left.
    Prefer,
}

impl Reserve {
    /// The words for it.
    pub const WORDS: [(&'static str, Reserve); 2] = [("strict", Reserve::Strict), ("prefer", Reserve::Prefer)];

    /// What the word means; `None` for any other.
    pub fn parse(word: &str) -> Option<Reserve> {
        Reserve::WORDS.iter().find(|(name, _)| *name == word).map(|(_, reserve)| *reserve)
    }
}

/// The definitions of a host, and the host as if nobody ran.
#[derive(Clone, Debug)]
pub struct Demand<K> {
    host: Topology,
    pinnable: CpuSet,
    housekeeping: CpuSet,
    /// In the order of step 1.
    definitions: Vec<Definition<K>>,
    /// One for each definition; found when they are first asked for.
    places: OnceCell<Vec<Result<Plan, Refusal>>>,
}

impl<K: Ord> Demand<K> {
    /// The demand of these definitions on this host. What is taken or in use there now does not matter.
    pub fn new(supply: &Supply<'_>, mut definitions: Vec<Definition<K>>) -> Demand<K> {
        let host = supply.topology.idle();
        let threads = host.cores().values().map(CpuSet::len).max().unwrap_or(1);
        let rank = |one: &Definition<K>| (!one.autostart, constraints(&one.request, host.nodes().len(), threads));
        definitions.sort_by(|a, b| rank(a).cmp(&rank(b)).then_with(|| a.key.cmp(&b.key)));
        let (pinnable, housekeeping) = (supply.pinnable.clone(), supply.housekeeping.clone());
        Demand { host, pinnable, housekeeping, definitions, places: OnceCell::new() }
    }

    /// Finds the places now, where settling them will take them for sure: not for a domain that is alone.
    pub fn foresee(&self, key: Option<&K>) {
        if self.has_others(key) {
            self.found();
        }
    }

    /// Whether anybody but this domain is defined.
    fn has_others(&self, key: Option<&K>) -> bool {
        self.definitions.iter().any(|one| Some(&one.key) != key)
    }

    /// Each definition with its place on the empty host, or why it has none beside the others: steps 1 to 3. Found once.
    pub fn places(&self) -> impl Iterator<Item = (&Definition<K>, &Result<Plan, Refusal>)> {
        self.definitions.iter().zip(self.found())
    }

    fn found(&self) -> &[Result<Plan, Refusal>] {
        self.places.get_or_init(|| self.place())
    }

    /// The places as they stand beside what `supply` says is taken: step 4. `running` are those that have their CPUs among
    /// the taken ones; `key` is the domain that starts, which is not among them.
    pub fn settle<'a>(
        &'a self,
        supply: &Supply<'_>,
        running: &dyn Fn(&K) -> bool,
        key: Option<&'a K>,
    ) -> Settled<'a, K> {
        // Alone on the host a domain's place is where it is put: nothing to find first.
        if !self.has_others(key) && supply.taken.is_empty() {
            return Settled { key, places: Vec::new() };
        }
        let waits = |one: &Definition<K>| Some(&one.key) == key || !running(&one.key);
        let waiting = self.places().filter(|(one, _)| waits(one));
        let mut places: Vec<Place<'_, K>> = waiting
            .filter_map(|(of, plan)| {
                let plan = plan.as_ref().ok()?;
                let free = plan.exclusive().is_disjoint(supply.taken);
                Some(Place { of, plan: free.then_some(Cow::Borrowed(plan)) })
            })
            .collect();
        for index in 0..places.len() {
            let Some(Place { of, plan: None }) = places.get(index) else { continue };
            let of = *of;
            let among = |all: bool| {
                let others = places.iter().filter(|place| place.of.autostart || all);
                super::attempt(&beside(supply, others).supply(supply), &of.request).ok()
            };
            let plan = among(true).or_else(|| if of.autostart { among(false) } else { None });
            let Some(plan) = plan else { continue };
            let cpus = plan.exclusive();
            for place in &mut places {
                // Only merely defined ones can be hit; they come later, and look for another place then.
                place.plan.take_if(|other| !other.exclusive().is_disjoint(&cpus));
            }
            if let Some(place) = places.get_mut(index) {
                place.plan = Some(Cow::Owned(plan));
            }
        }
        Settled { key, places }
    }

    /// Steps 2 and 3.
    fn place(&self) -> Vec<Result<Plan, Refusal>> {
        let nothing = CpuSet::new();
        let host = Supply {
            topology: &self.host,
            pinnable: &self.pinnable,
            taken: &nothing,
            housekeeping: &self.housekeeping,
        };
        let (autostart, merely) = self.definitions.split_at(self.definitions.partition_point(|one| one.autostart));
        let mut ground = Ground::new(&host);
        let mut places = tier(autostart, &ground.supply(&host));
        for (one, place) in autostart.iter().zip(&places) {
            if let Ok(plan) = place {
                ground.take(&one.request, plan, true);
            }
        }
        places.extend(tier(merely, &ground.supply(&host)));
        places
    }
}

/// The definitions of one tier, each with its place: the best of several rounds.
fn tier<K: Ord>(tier: &[Definition<K>], supply: &Supply<'_>) -> Vec<Result<Plan, Refusal>> {
    let mut budget = MAX_PLANS;
    let mut by_key: Vec<usize> = (0..tier.len()).collect();
    let mut last = round(tier, supply, by_key.clone(), None);
    by_key.sort_by_key(|&index| tier.get(index).map(|one| &one.key));
    let mut seen = BTreeSet::from([last.order.clone()]);
    let mut next = Some(by_key).filter(|order| !seen.contains(order));
    let mut best = last.clone();
    while best.found.iter().any(could_have_room) {
        let order = next.take().or_else(|| last.next_orders().find(|order| !seen.contains(order)));
        let Some(order) = order else { break };
        let Some(left) = budget.checked_sub(order.len() - last.same(&order)) else { break };
        budget = left;
        seen.insert(order.clone());
        last = round(tier, supply, order, Some(&last));
        if last.placed() > best.placed() {
            best = last.clone();
        }
    }
    let mut places: Vec<_> = best.order.into_iter().zip(best.found).collect();
    places.sort_by_key(|(index, _)| *index);
    places.into_iter().map(|(_, found)| found).collect()
}

/// All of a tier placed in this order; what begins like the former round ends up like it so far.
fn round<K>(tier: &[Definition<K>], supply: &Supply<'_>, order: Vec<usize>, former: Option<&Round>) -> Round {
    let mut known = former.map(|former| former.found.iter().take(former.same(&order))).into_iter().flatten();
    let mut ground = Ground::new(supply);
    let mut found = Vec::new();
    let mut refused: Vec<(&Request, Refusal)> = Vec::new();
    for request in order.iter().filter_map(|&index| Some(&tier.get(index)?.request)) {
        // Room only shrinks: what was refused once is refused again, as in a fleet of equals larger than its host.
        let again = || refused.iter().find(|(other, _)| *other == request).map(|(_, refusal)| Err(refusal.clone()));
        let result = known.next().cloned().or_else(again);
        let result = result.unwrap_or_else(|| super::attempt(&ground.supply(supply), request));
        match &result {
            Ok(plan) => ground.take(request, plan, true),
            Err(refusal) => refused.push((request, refusal.clone())),
        }
        found.push(result);
    }
    Round { order, found }
}

/// How constrained a request is, the most constrained first: by exact CPUs, nodes, one node, one cache, core class; then
/// the largest, in CPUs and then in memory.
fn constraints(request: &Request, nodes: usize, threads: usize) -> impl Ord + use<> {
    let policy = &request.policy;
    let allowed = policy.nodes.as_ref().map_or(nodes, CpuSet::len).min(nodes);
    let one_node = policy.numa == Span::Single || !request.cells.is_empty();
    let extra = request.isolated();
    let vcpus = request.dedicated().count();
    let cpus = match (policy.cores, policy.threads_per_core) {
        (Cores::Thread, _) => vcpus + extra,
        (Cores::Whole, ThreadsPerCore::Auto) => (vcpus.div_ceil(threads) + extra) * threads,
        (Cores::Whole, ThreadsPerCore::Exactly(count)) => (vcpus.div_ceil(usize::from(count.get())) + extra) * threads,
    };
    let free = (policy.cpus.is_none(), allowed, !one_node, policy.cache != Span::Single, policy.core_class.is_none());
    (free, Reverse(cpus), Reverse(request.memory.map(|memory| memory.bytes)))
}

/// Whether the refusal was for want of room, so that another order might do.
fn could_have_room(found: &Result<Plan, Refusal>) -> bool {
    found.as_ref().is_err_and(|refusal| refusal.code.retry())
}

/// One pass over the definitions of a tier.
#[derive(Clone, Debug)]
struct Round {
    /// Definitions by index.
    order: Vec<usize>,
    /// What each got, in this order.
    found: Vec<Result<Plan, Refusal>>,
}

impl Round {
    /// How many got a place.
    fn placed(&self) -> usize {
        self.found.iter().filter(|found| found.is_ok()).count()
    }

    /// How many of these begin as this round does.
    fn same(&self, order: &[usize]) -> usize {
        self.order.iter().zip(order).take_while(|(a, b)| a == b).count()
    }

    /// For each that found no room, the order with it at the front.
    fn next_orders(&self) -> impl Iterator<Item = Vec<usize>> {
        let refused = self.found.iter().enumerate().filter(|(_, found)| could_have_room(found));
        refused.map(|(from, _)| {
            let mut order = self.order.clone();
            if let Some(moved) = order.get_mut(..=from) {
                moved.rotate_right(1);
            }
            order
        })
    }
}

/// A domain that does not run, and where it will if it starts now; `None` = nowhere.
#[derive(Clone, Debug)]
struct Place<'a, K> {
    of: &'a Definition<K>,
    plan: Option<Cow<'a, Plan>>,
}

/// The places of those who do not run, settled beside the leases of those who do.
#[derive(Clone, Debug)]
pub struct Settled<'a, K> {
    key: Option<&'a K>,
    places: Vec<Place<'a, K>>,
}

impl<K: Ord> Settled<'_, K> {
    /// The CPUs set aside for other autostart domains.
    pub fn reserved(&self) -> CpuSet {
        self.others().filter(|place| place.of.autostart).fold(CpuSet::new(), |all, place| all.union(&place.cpus()))
    }

    /// A plan for the domain that starts: steps 5 to 8.
    ///
    /// # Errors
    /// As [`super::plan()`], and [`Code::Reserved`].
    pub fn plan(
        &self,
        supply: &Supply<'_>,
        request: &Request,
        reserve: Reserve,
        steps: Steps<'_>,
    ) -> Result<Plan, Refusal> {
        let own = self.places.iter().find(|place| Some(&place.of.key) == self.key);
        if let Some(own) = own.and_then(|place| place.plan.as_deref()) {
            let cpus = own.exclusive();
            let domains = counted(self.places.len() as u64, "defined domain");
            steps(format_args!("its place among {domains} not running: {cpus}"));
            // Everything else counts as taken, so that only these CPUs are left.
            let taken = supply.taken.union(&supply.pinnable.difference(&cpus));
            let there = super::plan(&Supply { taken: &taken, ..*supply }, request);
            if told(&there, "there", steps) {
                return there;
            }
        } else if !self.places.is_empty() {
            steps(format_args!("it has no place of its own among the defined domains"));
        }
        let reserved = self.list(|place| place.of.autostart);
        if let Some(reserved) = &reserved {
            steps(format_args!("set aside for autostart domains not running: {reserved}"));
        }
        if self.others().any(|place| !place.of.autostart) {
            let plan = super::plan(&beside(supply, self.others()).supply(supply), request);
            if told(&plan, "beside the places of all defined domains", steps) {
                return plan;
            }
        }
        if reserved.is_none() {
            return super::explain(supply, request, steps);
        }
        let autostart = self.others().filter(|place| place.of.autostart);
        let plan = super::plan(&beside(supply, autostart).supply(supply), request);
        if told(&plan, "beside what is set aside", steps) {
            return plan;
        }
        steps(format_args!("as if nothing were set aside:"));
        let plan = super::explain(supply, request, steps)?;
        match reserve {
            Reserve::Prefer => Ok(plan),
            Reserve::Strict => Err(self.refusal(supply, request, &plan)),
        }
    }

    /// The places of the others.
    fn others(&self) -> impl Iterator<Item = &Place<'_, K>> {
        self.places.iter().filter(|place| place.plan.is_some() && Some(&place.of.key) != self.key)
    }

    /// Some of the others by name, with their CPUs; `None` if there is none.
    fn list(&self, which: impl Fn(&Place<'_, K>) -> bool) -> Option<String> {
        listed(self.others().filter(|place| which(place)).map(|place| (place.of.name.as_str(), place.cpus())))
    }

    /// Why the domain does not get this plan.
    fn refusal(&self, supply: &Supply<'_>, request: &Request, plan: &Plan) -> Refusal {
        let taken = supply.taken.union(&self.reserved());
        let only_memory = super::attempt(&Supply { taken: &taken, ..*supply }, request).is_ok();
        let cpus = plan.exclusive();
        let in_the_way = |place: &Place<'_, K>| place.of.autostart && (only_memory || !place.cpus().is_disjoint(&cpus));
        let reason = format!(
            "{} set aside for autostart domains that do not run yet: {}",
            if only_memory { "there is too little memory beside what is" } else { "there is room only on CPUs" },
            self.list(in_the_way).unwrap_or_default()
        );
        let hint = "set autostart_reserve = \"prefer\" in /etc/virt-pin/virt-pin.toml to let it take their room, start them \
                    elsewhere first, or take autostart off them (virsh autostart --disable)";
        Refusal { hint: Some(hint.to_owned()), ..Refusal::new(Code::Reserved, reason) }
    }
}

impl<K> Place<'_, K> {
    fn cpus(&self) -> CpuSet {
        self.plan.as_ref().map(|plan| plan.exclusive()).unwrap_or_default()
    }
}

/// Tells what became of an attempt; whether it is the answer.
fn told(result: &Result<Plan, Refusal>, whither: &str, steps: Steps<'_>) -> bool {
    match result {
        Ok(plan) => {
            let vcpus: Vec<_> = plan.vcpus.iter().flatten().map(ToString::to_string).collect();
            steps(format_args!("chosen {whither}: vCPUs {}", vcpus.join(",")));
        }
        Err(refusal) => steps(format_args!("no room {whither}: {}", refusal.reason)),
    }
    result.is_ok()
}

/// The host beside these places.
fn beside<'p, K: 'p>(supply: &Supply<'_>, places: impl Iterator<Item = &'p Place<'p, K>>) -> Ground {
    let mut ground = Ground::new(supply);
    for place in places {
        if let Some(plan) = &place.plan {
            // Only what is reserved holds memory, too: a preference may be given up.
            ground.take(&place.of.request, plan, place.of.autostart);
        }
    }
    ground
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alloc::policy::Policy;
    use crate::host::shape;

    fn request(vcpus: u16, policy: &[(&str, &str)]) -> Request {
        let policy =
            [("policy", "dedicated"), ("emulator", "share"), ("iothreads", "share")].iter().chain(policy).copied();
        Request::new(vcpus, Policy::from_attributes(policy).unwrap())
    }

    fn define(key: u8, autostart: bool, request: Request) -> Definition<u8> {
        Definition { key, name: format!("d{key}"), autostart, request }
    }

    /// All of a machine is pinnable, nothing is for housekeeping or taken.
    fn demand(shape: &str, definitions: Vec<Definition<u8>>) -> Demand<u8> {
        let (host, none) = (shape::parse(shape).unwrap(), CpuSet::new());
        let supply = Supply { topology: &host, pinnable: host.online(), taken: &none, housekeeping: &none };
        Demand::new(&supply, definitions)
    }

    #[test]
    fn the_most_constrained_come_first() {
        let definitions = vec![
            define(1, false, request(4, &[])),
            define(2, true, request(2, &[])),
            define(3, false, request(2, &[("cache", "single")])),
            define(4, false, request(8, &[])),
            define(5, false, request(2, &[("nodes", "1")])),
            define(6, false, request(2, &[("nodes", "0-1"), ("numa", "single")])),
            define(7, false, request(4, &[("threads-per-core", "1")])),
        ];
        let demand = demand("2s4c2t", definitions);
        let order: Vec<u8> = demand.definitions.iter().map(|one| one.key).collect();
        assert_eq!(order, [2, 5, 6, 3, 4, 7, 1]);
    }

    #[test]
    fn who_found_no_room_is_tried_first() {
        // Largest first, 4 cores leave two for one of the others; together the others fit.
        let three = |key| define(key, false, request(3, &[]));
        let demand = demand("1s6c1t", vec![define(1, false, request(4, &[])), three(2), three(3)]);
        let placed: Vec<_> = demand.places().map(|(one, place)| (one.key, place.is_ok())).collect();
        assert_eq!(placed, [(1, false), (2, true), (3, true)]);
    }
}
