//! The plan over the demand set: the same definitions get the same CPUs whatever happened before, what is set aside for
//! autostart domains is there when they start, and the places found are compared with every order that could be tried.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "integration tests"
)]

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::sample::subsequence;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use virt_pin::alloc::demand::{Definition, Demand, Reserve};
use virt_pin::alloc::policy::Policy;
use virt_pin::alloc::request::{GuestMemory, Pages, Request};
use virt_pin::alloc::simulation::Simulation;
use virt_pin::alloc::{self, Supply};
use virt_pin::cpuset::CpuSet;
use virt_pin::error::Code;
use virt_pin::host::{Node, Topology, shape};

const POLICIES: &[&[(&str, &str)]] = &[
    &[],
    &[],
    &[("cores", "thread")],
    &[("threads-per-core", "1")],
    &[("numa", "single"), ("emulator", "isolate")],
    &[("cache", "single"), ("cores", "thread")],
    &[("nodes", "0")],
    &[("numa", "any"), ("cache", "any")],
];

const HOSTS: &[&str] = &["2s4c2t", "1s8c2t,llc=2", "2s3c1t,llc=2", "4s2c2t,numa=2,llc=4", "1s5c2t"];

fn set(text: &str) -> CpuSet {
    CpuSet::parse_kernel_list(text).unwrap()
}

fn request(vcpus: u16, policy: &[(&str, &str)]) -> Request {
    let attributes = [("policy", "dedicated")].iter().chain(policy).copied();
    Request::new(vcpus, Policy::from_attributes(attributes).unwrap())
}

/// The host of this shape, each node with so many GiB.
fn with_memory(host: &str, gib: u64) -> Topology {
    let host = shape::parse(host).unwrap();
    let with = |node: &Node| Node { memory_bytes: Some(gib << 30), available_bytes: Some(gib << 30), ..node.clone() };
    host.with_nodes(host.nodes().iter().map(with).collect())
}

/// A host, of which CPU 0 and its siblings are for housekeeping.
#[derive(Clone, Debug)]
struct Case {
    host: Topology,
    pinnable: CpuSet,
    definitions: Vec<Definition<String>>,
}

impl Case {
    fn new(host: Topology, definitions: Vec<Definition<String>>) -> Case {
        let core = host.siblings(virt_pin::cpuset::CpuId(0)).unwrap();
        Case { pinnable: host.online().difference(core), definitions, host }
    }

    fn supply<T>(&self, taken: &CpuSet, then: impl FnOnce(&Supply<'_>) -> T) -> T {
        let housekeeping = self.host.online().difference(&self.pinnable);
        then(&Supply { topology: &self.host, pinnable: &self.pinnable, taken, housekeeping: &housekeeping })
    }

    fn demand(&self) -> Demand<String> {
        self.supply(&CpuSet::new(), |supply| Demand::new(supply, self.definitions.clone()))
    }

    /// Without those that have no place beside the others, or (of autostart domains alone) that have none.
    fn that_fits(mut self, autostart: bool) -> Case {
        loop {
            let demand = self.demand();
            let without = demand.places().filter(|(one, place)| place.is_err() && (one.autostart || !autostart));
            let without: BTreeSet<_> = without.map(|(one, _)| one.key.clone()).collect();
            if without.is_empty() {
                return self;
            }
            self.definitions.retain(|one| !without.contains(&one.key));
        }
    }

    fn places(&self) -> BTreeMap<String, CpuSet> {
        let demand = self.demand();
        demand.places().map(|(one, place)| (one.key.clone(), place.as_ref().unwrap().exclusive())).collect()
    }

    fn simulation(&self) -> Simulation {
        Simulation::new(self.host.clone(), self.pinnable.clone())
    }

    /// The definitions of one tier, in the order they are in.
    fn tier(&self, autostart: bool) -> Vec<&Definition<String>> {
        self.definitions.iter().filter(|one| one.autostart == autostart).collect()
    }

    /// How many of the tier found a place together.
    fn placed(&self, autostart: bool) -> usize {
        self.demand().places().filter(|(one, place)| one.autostart == autostart && place.is_ok()).count()
    }

    /// How many of a tier are placed one after the other in this order; merely defined ones beside the autostart ones.
    fn placed_in(&self, order: &[&Definition<String>], autostart: bool) -> usize {
        let demand = self.demand();
        let before =
            demand.places().filter(|(one, _)| one.autostart && !autostart).filter_map(|(_, place)| place.as_ref().ok());
        let mut taken = before.fold(CpuSet::new(), |taken, plan| taken.union(&plan.exclusive()));
        let mut count = 0;
        for one in order {
            if let Ok(plan) = self.supply(&taken, |supply| alloc::plan(supply, &one.request)) {
                taken = taken.union(&plan.exclusive());
                count += 1;
            }
        }
        count
    }
}

fn cases(most: usize, largest: u16) -> impl Strategy<Value = Case> {
    let definition = (1..=largest, 0..POLICIES.len(), any::<bool>());
    let definitions = proptest::collection::vec(definition, 1..=most);
    (0..HOSTS.len(), definitions).prop_map(|(host, definitions)| {
        let definitions = (0..).zip(definitions).map(|(number, (vcpus, policy, autostart))| {
            let key = format!("d{number}");
            Definition { name: key.clone(), key, autostart, request: request(vcpus, POLICIES[policy]) }
        });
        Case::new(shape::parse(HOSTS[host]).unwrap(), definitions.collect())
    })
}

#[derive(Clone, Debug)]
enum Step {
    Define(usize),
    Undefine(usize),
    Start(usize),
    /// With other vCPUs than it is defined with.
    StartOther(usize, u16),
    Stop(usize),
    /// One that is not defined.
    Transient(u8, u16, usize),
    EndTransient(u8),
    Reboot,
}

fn steps(defining: bool) -> impl Strategy<Value = Vec<Step>> {
    let defining = u32::from(defining);
    let step = prop_oneof![
        2 * defining => (0..8usize).prop_map(Step::Define),
        defining => (0..8usize).prop_map(Step::Undefine),
        6 => (0..8usize).prop_map(Step::Start),
        1 => (0..8usize, 1..9u16).prop_map(|(index, vcpus)| Step::StartOther(index, vcpus)),
        3 => (0..8usize).prop_map(Step::Stop),
        3 => (0..4u8, 1..6u16, 0..POLICIES.len()).prop_map(|(id, vcpus, policy)| Step::Transient(id, vcpus, policy)),
        2 => (0..4u8).prop_map(Step::EndTransient),
        1 => Just(Step::Reboot),
    ];
    proptest::collection::vec(step, 0..40)
}

fn reboot(simulation: &mut Simulation) {
    for id in simulation.running().keys().cloned().collect::<Vec<_>>() {
        simulation.stop(&id);
    }
}

fn define(simulation: &mut Simulation, one: &Definition<String>) {
    simulation.define(&one.key, one.autostart, one.request.clone());
}

/// Does one step; who was refused, and why.
fn step(simulation: &mut Simulation, case: &Case, step: &Step) -> Option<(String, Code)> {
    let one = |index: usize| case.definitions.get(index);
    let start = |simulation: &mut Simulation, id: &str, request: &Request| {
        simulation.start(id, request).err().map(|refusal| (id.to_owned(), refusal.code))
    };
    match *step {
        Step::Start(index) => one(index).and_then(|one| start(simulation, &one.key, &one.request)),
        Step::StartOther(index, vcpus) => {
            one(index).and_then(|one| start(simulation, &one.key, &Request { vcpus, ..one.request.clone() }))
        }
        Step::Transient(id, vcpus, policy) => start(simulation, &format!("t{id}"), &request(vcpus, POLICIES[policy])),
        Step::Define(index) => {
            one(index).iter().for_each(|one| define(simulation, one));
            None
        }
        Step::Undefine(index) => {
            one(index).map(|one| simulation.undefine(&one.key));
            None
        }
        Step::Stop(index) => {
            one(index).map(|one| simulation.stop(&one.key));
            None
        }
        Step::EndTransient(id) => {
            simulation.stop(&format!("t{id}"));
            None
        }
        Step::Reboot => {
            reboot(simulation);
            None
        }
    }
}

fn assert_no_overlap(simulation: &Simulation) {
    let mut owned = CpuSet::new();
    for (id, plan) in simulation.running() {
        let cpus = plan.exclusive();
        assert!(cpus.is_disjoint(&owned), "CPUs {cpus} of {id} have two owners");
        owned = owned.union(&cpus);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    /// Whatever was defined, started and stopped before, and in whatever order they are started now.
    #[test]
    fn the_same_definitions_get_the_same_cpus(
        case in cases(6, 4),
        before in steps(true),
        order in Just((0..8usize).collect::<Vec<_>>()).prop_shuffle(),
        defined in Just((0..8usize).collect::<Vec<_>>()).prop_shuffle(),
    ) {
        let case = case.that_fits(false);
        let places = case.places();
        let mut simulation = case.simulation();
        for one in &before {
            step(&mut simulation, &case, one);
            assert_no_overlap(&simulation);
        }
        defined.iter().for_each(|&index| drop(step(&mut simulation, &case, &Step::Define(index))));
        reboot(&mut simulation);
        for &index in &order {
            prop_assert_eq!(step(&mut simulation, &case, &Step::Start(index)), None);
        }
        let running: BTreeMap<_, _> = simulation.running().iter().map(|(id, plan)| (id.clone(), plan.exclusive())).collect();
        prop_assert_eq!(&running, &places);
        // One after the other restarted, each is where it was; so it is without the transient ones beside it.
        for one in &case.definitions {
            simulation.stop(&one.key);
            prop_assert_eq!(&simulation.start(&one.key, &one.request).unwrap().exclusive(), &places[&one.key]);
        }
    }

    /// If they fit at once, each autostart domain finds its place whatever others did and how they were defined meanwhile,
    /// as long as nobody came before the autostart ones were defined.
    #[test]
    fn what_is_set_aside_is_there(case in cases(8, 6), steps in steps(true)) {
        let case = case.that_fits(true);
        let demand = case.demand();
        let places: BTreeMap<_, _> = demand
            .places()
            .filter(|(one, _)| one.autostart)
            .map(|(one, place)| (one.key.clone(), place.as_ref().unwrap().exclusive()))
            .collect();
        let mut simulation = case.simulation();
        case.definitions.iter().for_each(|one| define(&mut simulation, one));
        for one in &steps {
            // An autostart domain that asks for something else is elsewhere, and its place free for others.
            if let Step::Undefine(index) | Step::StartOther(index, _) = one {
                if case.definitions.get(*index).is_some_and(|one| one.autostart) {
                    continue;
                }
            }
            let refused = step(&mut simulation, &case, one);
            assert_no_overlap(&simulation);
            if let Some((id, code)) = refused {
                prop_assert!(!places.contains_key(&id) || code == Code::StateConflict, "{id} was refused: {code}");
                prop_assert!(code != Code::Internal);
            }
            for (id, plan) in simulation.running() {
                let other = places.iter().find(|(other, cpus)| *other != id && !plan.exclusive().is_disjoint(cpus));
                prop_assert_eq!(other, None, "{} is in the place of another", id);
            }
        }
    }

    #[test]
    fn prefer_never_refuses_what_strict_admits(case in cases(6, 6), steps in steps(true)) {
        let mut simulation = case.simulation();
        case.definitions.iter().for_each(|one| define(&mut simulation, one));
        for one in &steps {
            let mut preferring = simulation.clone().with_reserve(Reserve::Prefer);
            let preferred = step(&mut preferring, &case, one);
            let refused = step(&mut simulation, &case, one);
            match (&refused, &preferred) {
                (None, None) => prop_assert_eq!(simulation.running(), preferring.running()),
                (Some((_, Code::Reserved)), preferred) => prop_assert_eq!(preferred, &None),
                _ => prop_assert_eq!(&refused, &preferred),
            }
        }
    }

    /// Nobody else defined: exactly what the allocator says, whatever it is.
    #[test]
    fn alone_it_is_the_allocators_plan(case in cases(1, 9), taken in subsequence((1..16u16).collect::<Vec<_>>(), 0..12)) {
        let one = &case.definitions[0];
        let taken: CpuSet = taken.into_iter().map(virt_pin::cpuset::CpuId).collect();
        for (defined, taken) in [(true, CpuSet::new()), (false, taken)] {
            let definitions = if defined { case.definitions.clone() } else { Vec::new() };
            case.supply(&taken, |supply| {
                let demand = Demand::new(supply, definitions);
                let settled = demand.settle(supply, &|_| false, Some(&one.key));
                let plan = settled.plan(supply, &one.request, Reserve::Strict, &mut |_| {});
                prop_assert_eq!(plan, alloc::plan(supply, &one.request));
                Ok(())
            })?;
        }
    }

    #[test]
    fn no_fewer_are_placed_than_by_key(case in cases(12, 8)) {
        for autostart in [true, false] {
            let mut by_key = case.tier(autostart);
            by_key.sort_by_key(|one| &one.key);
            prop_assert!(case.placed(autostart) >= case.placed_in(&by_key, autostart));
        }
    }

    /// What is merely defined moves no autostart domain.
    #[test]
    fn autostart_places_stand_by_themselves(case in cases(8, 6)) {
        let alone = Case { definitions: case.tier(true).into_iter().cloned().collect(), ..case.clone() };
        let places = |case: &Case| -> Vec<_> {
            let demand = case.demand();
            demand.places().filter(|(one, _)| one.autostart).map(|(one, place)| (one.key.clone(), place.clone())).collect()
        };
        prop_assert_eq!(places(&case), places(&alone));
    }
}

/// Always the same sets, since one in some thousand is short of one place.
#[test]
fn as_many_are_placed_as_in_the_best_of_all_orders() {
    let mut runner = TestRunner::deterministic();
    let mut short = 0;
    for _ in 0..250 {
        let case = cases(5, 8).new_tree(&mut runner).unwrap().current();
        for autostart in [true, false] {
            let mut best = 0;
            permutations(&mut case.tier(autostart), 0, &mut |order| best = best.max(case.placed_in(order, autostart)));
            short += best - case.placed(autostart);
        }
    }
    assert_eq!(short, 0);
}

/// Definitions by name, autostart or not, and what they ask for.
fn definitions(of: &[(&str, bool, Request)]) -> Vec<Definition<String>> {
    let one = |(name, autostart, request): &(&str, bool, Request)| Definition {
        key: (*name).to_owned(),
        name: (*name).to_owned(),
        autostart: *autostart,
        request: request.clone(),
    };
    of.iter().map(one).collect()
}

#[test]
fn a_place_is_kept_whoever_starts_first() {
    // Cores 1 to 3 of two threads each.
    let case = Case::new(
        shape::parse("1s4c2t").unwrap(),
        definitions(&[("a", true, request(2, &[])), ("b", false, request(2, &[]))]),
    );
    let mut simulation = case.simulation();
    case.definitions.iter().for_each(|one| define(&mut simulation, one));
    let cpus = |simulation: &mut Simulation, id: &str, vcpus: u16| {
        simulation.start(id, &request(vcpus, &[])).map(|plan| plan.vcpu_cpus().to_string())
    };
    // A transient one takes neither place, then that of the merely defined one, and never that of the autostart one.
    assert_eq!(cpus(&mut simulation, "t1", 2).unwrap(), "3,7");
    assert_eq!(cpus(&mut simulation, "t2", 2).unwrap(), "2,6");
    let refusal = cpus(&mut simulation, "t3", 2).unwrap_err();
    assert_eq!(
        (refusal.code, refusal.reason.as_str()),
        (Code::Reserved, "there is room only on CPUs set aside for autostart domains that do not run yet: \"a\" 1,5")
    );
    assert!(refusal.hint.unwrap().starts_with("set autostart_reserve = \"prefer\" in "));
    // What has no room anyway is told so.
    assert_eq!(cpus(&mut simulation, "t3", 4).unwrap_err().code, Code::Shortage);
    assert_eq!(cpus(&mut simulation, "b", 2).unwrap_err().code, Code::Reserved);
    assert_eq!(cpus(&mut simulation, "a", 2).unwrap(), "1,5");
    simulation.stop("t1");
    assert_eq!(cpus(&mut simulation, "b", 2).unwrap(), "3,7", "its own is taken, so it is given another");
    let mut simulation = simulation.with_reserve(Reserve::Prefer);
    simulation.stop("a");
    assert_eq!(cpus(&mut simulation, "t3", 2).unwrap(), "1,5");
}

#[test]
fn one_pushed_off_its_place_gets_another_and_others_keep_theirs() {
    let case = Case::new(
        shape::parse("1s6c1t").unwrap(),
        definitions(&[("a", true, request(2, &[])), ("b", true, request(1, &[])), ("c", false, request(1, &[]))]),
    );
    let places = case.places();
    assert_eq!([&places["a"], &places["b"], &places["c"]].map(ToString::to_string), ["1-2", "3", "4"]);
    let place = |taken: &str, key: &str| {
        case.supply(&set(taken), |supply| {
            let (demand, key) = (case.demand(), key.to_owned());
            let settled = demand.settle(supply, &|_| false, Some(&key));
            let one = case.definitions.iter().find(|one| one.key == key).unwrap();
            let mut steps = Vec::new();
            let plan = settled.plan(supply, &one.request, Reserve::Strict, &mut |step| steps.push(step.to_string()));
            (plan.map(|plan| plan.vcpu_cpus().to_string()).map_err(|refusal| refusal.code), steps)
        })
    };
    // Somebody who came before the definitions sits on b's.
    assert_eq!(place("3", "b").0, Ok("5".to_owned()));
    assert_eq!(place("3", "c").0, Ok("4".to_owned()));
    // On a's, while there is room elsewhere; when there is not, a pushes c off its place.
    assert_eq!(place("1", "a").0, Ok("2,5".to_owned()));
    assert_eq!(place("1", "c").0, Ok("4".to_owned()));
    assert_eq!(place("1,5", "a").0, Ok("2,4".to_owned()));
    let (result, steps) = place("1,5", "c");
    assert_eq!(result, Err(Code::Reserved));
    assert_eq!(
        steps[..3],
        [
            "it has no place of its own among the defined domains",
            "set aside for autostart domains not running: \"a\" 2,4, \"b\" 3",
            "no room beside what is set aside: needs 1 whole core (1 vCPU, 1 on each), 0 of the 5 pinnable are free",
        ]
    );
}

#[test]
fn memory_of_places_counts() {
    // Two nodes of 8 GiB and plenty of CPUs: two of 5 GiB are one on each node, a third is nowhere.
    let host = with_memory("2s8c2t", 8);
    let guest = |gib: u64| Request {
        memory: Some(GuestMemory { bytes: gib << 30, pages: Pages::Ordinary }),
        ..request(2, &[("numa", "single")])
    };
    let three = [("a", true, guest(5)), ("b", true, guest(5)), ("c", true, guest(5))];
    let case = Case::new(host.clone(), definitions(&three));
    assert_eq!(case.placed(true), 2);
    let case = Case::new(host, definitions(&three[..2]));
    let nodes: BTreeSet<_> = case.demand().places().map(|(_, place)| place.as_ref().unwrap().nodes.clone()).collect();
    assert_eq!(nodes.len(), 2);
    let mut simulation = case.simulation();
    case.definitions.iter().for_each(|one| define(&mut simulation, one));
    assert!(simulation.start("t", &guest(3)).is_ok());
    let refusal = simulation.start("t2", &guest(4)).unwrap_err();
    assert_eq!(refusal.code, Code::Reserved);
    assert!(refusal.reason.starts_with("there is too little memory beside what is set aside"), "{}", refusal.reason);
    // No node ever has as much, so nobody waits for it.
    assert_eq!(simulation.start("t2", &guest(9)).unwrap_err().code, Code::Unsatisfiable);
}

fn permutations<T>(all: &mut Vec<T>, from: usize, visit: &mut impl FnMut(&[T])) {
    if from == all.len() {
        visit(all);
    }
    for index in from..all.len() {
        all.swap(from, index);
        permutations(all, from + 1, visit);
        all.swap(from, index);
    }
}
