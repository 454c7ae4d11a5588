//! Which leases would have to move, against brute force: every set of leases, planned anew in every order, on small hosts.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "integration tests"
)]

use std::collections::BTreeMap;

use proptest::prelude::*;
use virt_pin::alloc::policy::Policy;
use virt_pin::alloc::repack::{Extent, Move, Mover, moves};
use virt_pin::alloc::request::Request;
use virt_pin::alloc::{self, Supply};
use virt_pin::cpuset::CpuSet;
use virt_pin::host::{Topology, shape};

/// Emulator and I/O threads beside the vCPUs, so that every CPU can be pinnable.
const SHARE: [(&str, &str); 3] = [("policy", "dedicated"), ("emulator", "share"), ("iothreads", "share")];

const POLICIES: &[&[(&str, &str)]] = &[
    &[("numa", "single")],
    &[("cache", "single")],
    &[("cores", "thread"), ("cache", "single")],
    &[("cores", "thread"), ("numa", "any"), ("cache", "any")],
    &[("threads-per-core", "1")],
    &[("nodes", "0")],
    &[],
];

fn request(vcpus: u16, policy: &[(&str, &str)]) -> Request {
    let attributes = SHARE.iter().chain(policy).copied();
    Request::new(vcpus, Policy::from_attributes(attributes).unwrap())
}

/// Without housekeeping CPUs: everything is pinnable.
struct Host {
    topology: Topology,
    nothing: CpuSet,
}

impl Host {
    fn new(text: &str) -> Host {
        Host { topology: shape::parse(text).unwrap(), nothing: CpuSet::new() }
    }

    fn supply<'a>(&'a self, taken: &'a CpuSet) -> Supply<'a> {
        Supply { topology: &self.topology, pinnable: self.topology.online(), taken, housekeeping: &self.nothing }
    }

    /// Domains start one after the other, and some of them end: the leases that are left.
    fn leases(&self, starts: &[(u16, usize, bool)]) -> Vec<Mover<usize>> {
        let mut taken = CpuSet::new();
        let mut leases = Vec::new();
        for (id, &(vcpus, policy, stays)) in starts.iter().enumerate() {
            let request = request(vcpus, POLICIES[policy]);
            if let Ok(plan) = alloc::plan(&self.supply(&taken), &request) {
                taken = taken.union(&plan.exclusive());
                leases.push((Mover { id, request, cpus: plan.exclusive(), live: None }, stays));
            }
        }
        leases.into_iter().filter(|(_, stays)| *stays).map(|(lease, _)| lease).collect()
    }

    /// Whether the request, near enough, and all of these find places in some order, each mover a new one.
    fn all_fit(&self, taken: &CpuSet, goal: Option<Extent>, asker: Option<&Request>, movers: &[&Mover<usize>]) -> bool {
        if asker.is_none() && movers.is_empty() {
            return true;
        }
        let first = asker.is_some_and(|request| {
            alloc::plan(&self.supply(taken), request).is_ok_and(|plan| {
                goal.is_none_or(|goal| Extent::of(&self.topology, &plan) <= goal)
                    && self.all_fit(&taken.union(&plan.exclusive()), goal, None, movers)
            })
        });
        first
            || movers.iter().enumerate().any(|(index, mover)| {
                let others: Vec<_> = [&movers[..index], &movers[index + 1..]].concat();
                alloc::plan(&self.supply(taken), &mover.request).is_ok_and(|plan| {
                    plan.exclusive() != mover.cpus
                        && self.all_fit(&taken.union(&plan.exclusive()), goal, asker, &others)
                })
            })
    }

    /// The smallest set of up to three that would do: how many leases, and then how many CPUs.
    fn oracle(&self, leases: &[Mover<usize>], request: &Request, goal: Option<Extent>) -> Option<(usize, usize)> {
        let sets = (1u32..1 << leases.len()).filter(|set| set.count_ones() <= 3);
        sets.filter_map(|set| {
            let (gone, rest): (Vec<_>, Vec<_>) = leases.iter().partition(|lease| {
                let index = leases.iter().position(|other| other.id == lease.id).unwrap();
                set & (1 << index) != 0
            });
            let taken = rest.iter().fold(CpuSet::new(), |taken, lease| taken.union(&lease.cpus));
            let size = (gone.len(), gone.iter().map(|lease| lease.cpus.len()).sum());
            self.all_fit(&taken, goal, Some(request), &gone).then_some(size)
        })
        .min()
    }
}

fn taken(leases: &[Mover<usize>]) -> CpuSet {
    leases.iter().fold(CpuSet::new(), |taken, lease| taken.union(&lease.cpus))
}

/// What is claimed holds, and nothing smaller would do; what takes up to three moves is found.
fn agree(
    host: &Host,
    leases: &[Mover<usize>],
    request: &Request,
    goal: Option<Extent>,
) -> Result<usize, TestCaseError> {
    let taken = taken(leases);
    let found = moves(&host.supply(&taken), request, leases, goal);
    prop_assert_eq!(&found, &moves(&host.supply(&taken), request, leases, goal));
    let size = |moves: &Vec<Move<usize>>| (moves.len(), moves.iter().map(|one| one.from.len()).sum());
    let expected = host.oracle(leases, request, goal);
    prop_assert_eq!(found.as_ref().map(size), expected, "{:?}", leases);
    let Some(found) = found else { return Ok(0) };
    // Nobody is in anybody's way, and there is room for the request in the end.
    let mut held: BTreeMap<usize, CpuSet> = leases.iter().map(|lease| (lease.id, lease.cpus.clone())).collect();
    for one in &found {
        prop_assert_eq!(held.insert(one.id, one.to.clone()), Some(one.from.clone()));
        prop_assert_ne!(&one.from, &one.to);
    }
    let mut owned = CpuSet::new();
    for cpus in held.values() {
        prop_assert!(owned.is_disjoint(cpus));
        owned = owned.union(cpus);
    }
    let free = host.topology.online().difference(&owned);
    prop_assert!(free.len() >= usize::from(request.vcpus));
    Ok(found.len())
}

fn starts() -> impl Strategy<Value = Vec<(u16, usize, bool)>> {
    proptest::collection::vec((1..4u16, 0..POLICIES.len(), proptest::bool::weighted(0.7)), 4..9)
}

fn shapes() -> impl Strategy<Value = &'static str> {
    prop_oneof![
        Just("2s4c1t,numa=2,llc=4"),
        Just("2s2c2t,numa=2,llc=4"),
        Just("1s10c1t,llc=5"),
        Just("2s4c1t,numa=4,llc=2"),
        Just("1s5c2t,llc=5"),
        Just("3s3c1t"),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn room_is_made_by_the_fewest_moves(shape in shapes(), starts in starts(), vcpus in 2..6u16, policy in 0..3usize) {
        let host = Host::new(shape);
        let leases = host.leases(&starts);
        let request = request(vcpus, POLICIES[policy]);
        if alloc::plan(&host.supply(&taken(&leases)), &request).is_err() {
            agree(&host, &leases, &request, None)?;
        }
    }

    #[test]
    fn a_nearer_place_is_made_by_the_fewest_moves(shape in shapes(), starts in starts(), vcpus in 2..6u16, nodes in 1..3usize, llcs in 1..4usize) {
        let host = Host::new(shape);
        let leases = host.leases(&starts);
        let request = request(vcpus, &[]);
        let goal = Extent { nodes, llcs };
        let now = alloc::plan(&host.supply(&taken(&leases)), &request);
        if now.is_ok_and(|plan| Extent::of(&host.topology, &plan) > goal) {
            agree(&host, &leases, &request, Some(goal))?;
        }
    }
}

/// The cases above must be of all kinds; so here is one of each.
#[test]
fn none_one_and_two() {
    let host = Host::new("1s8c1t,llc=4");
    let lease = |id, cpus: &str, policy: usize| {
        let cpus = CpuSet::parse_kernel_list(cpus).unwrap();
        Mover { id, request: request(u16::try_from(cpus.len()).unwrap(), POLICIES[policy]), cpus, live: None }
    };
    // Caches 0-1, 2-3, 4-5, 6-7; one of each pair is held.
    let scattered: Vec<_> = ["0", "2", "4", "6"].iter().zip(0..).map(|(cpus, id)| lease(id, cpus, 6)).collect();
    let two = request(2, &[("cache", "single")]);
    let supply_taken = taken(&scattered);
    let found = moves(&host.supply(&supply_taken), &two, &scattered, None).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].id, found[0].from.to_string()), (0, "0".to_owned()));
    assert_eq!(found[0].to.to_string(), "3");
    // Four beside each other, on one of two nodes: two have to go.
    let host = Host::new("2s4c1t");
    let spread: Vec<_> = ["0", "1", "4", "5"].iter().zip(0..).map(|(cpus, id)| lease(id, cpus, 6)).collect();
    let supply_taken = taken(&spread);
    let found = moves(&host.supply(&supply_taken), &request(4, &[("numa", "single")]), &spread, None).unwrap();
    assert_eq!(
        found.iter().map(|one| (one.id, one.to.to_string())).collect::<Vec<_>>(),
        [(0, "6".to_owned()), (1, "7".to_owned())]
    );
    // Nobody can go anywhere.
    let full: Vec<_> = ["0-3", "4-6"].iter().zip(0..).map(|(cpus, id)| lease(id, cpus, 0)).collect();
    let supply_taken = taken(&full);
    assert_eq!(moves(&host.supply(&supply_taken), &request(2, &[("numa", "single")]), &full, None), None);
}
