//! A lease on its way to other CPUs, killed after every step and brought to an end by somebody else: on a model of the kernel's
//! cgroups, with any hosts, leases and targets.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    reason = "integration tests"
)]

use proptest::prelude::*;
use virt_pin::alloc::plan::Plan;
use virt_pin::alloc::policy::Policy;
use virt_pin::alloc::relocation::{MemoryOfMoved, anew, mended, same_guest};
use virt_pin::alloc::request::Request;
use virt_pin::alloc::{self, Supply, check};
use virt_pin::cpuset::{CpuId, CpuSet};
use virt_pin::enforce::passage::{Cgroup, Cgroups, grown, seated, shrunk};
use virt_pin::host::process::Process;
use virt_pin::host::{Cpu, Topology, shape};
use virt_pin::lock::leases::{Holds, Lease, Leases, Moving, State};
use virt_pin::uuid::DomainUuid;

const SHAPES: &[&str] = &["1s8c2t", "2s4c2t", "2s4c2t,llc=4", "1s12c1t,llc=3", "2s6c2t,numa=4,llc=4"];

const POLICIES: &[&[(&str, &str)]] = &[
    &[],
    &[("threads-per-core", "1")],
    &[("cores", "thread")],
    &[("numa", "single"), ("emulator", "isolate")],
    &[("emulator", "share"), ("iothreads", "share")],
    &[("cache", "single"), ("memory", "any")],
];

fn request(vcpus: u16, policy: usize) -> Request {
    let attributes = [("policy", "dedicated")].iter().chain(POLICIES[policy]).copied();
    Request::new(vcpus, Policy::from_attributes(attributes).unwrap())
}

fn lease(number: usize, request: Request, plan: Plan) -> Lease {
    Lease {
        uuid: DomainUuid::parse(&format!("{number:032x}")).unwrap(),
        name: format!("vm{number}"),
        state: State::Running,
        holds: Holds::Dedicated(plan),
        request: Some(request),
        domain_id: Some(number as u32),
        cgroup: None,
        daemon: None,
        qemu: Some(Process { pid: 7, start_time: 1 }),
        moving: None,
        since: 0,
    }
}

/// The host's own CPUs; the rest is pinnable.
struct Host {
    topology: Topology,
    housekeeping: CpuSet,
    pinnable: CpuSet,
}

impl Host {
    fn new(text: &str) -> Host {
        let topology = shape::parse(text).unwrap();
        let housekeeping = topology.siblings(CpuId(0)).unwrap().clone();
        let pinnable = topology.online().difference(&housekeeping);
        Host { topology, housekeeping, pinnable }
    }

    fn supply<'a>(&'a self, taken: &'a CpuSet) -> Supply<'a> {
        Supply { topology: &self.topology, pinnable: &self.pinnable, taken, housekeeping: &self.housekeeping }
    }

    /// Domains start one after the other, and some of them end.
    fn leases(&self, starts: &[(u16, usize, bool)]) -> Leases {
        let (mut leases, mut taken) = (Vec::new(), CpuSet::new());
        for (number, &(vcpus, policy, stays)) in starts.iter().enumerate() {
            let request = request(vcpus, policy);
            if let Ok(plan) = alloc::plan(&self.supply(&taken), &request) {
                taken = taken.union(&plan.exclusive());
                leases.push((lease(number + 1, request, plan), stays));
            }
        }
        let mut stay = Leases::default();
        leases.into_iter().filter(|(_, stays)| *stays).for_each(|(lease, _)| stay.put(lease));
        stay
    }

    /// Where a VM without a lease may be.
    fn pool(&self, leases: &Leases) -> CpuSet {
        let held = leases.iter().flat_map(Lease::plans).map(|plan| plan.held(&self.topology));
        held.fold(self.topology.online().clone(), |pool, held| pool.difference(&held))
    }

    /// As much of a plan as can be held.
    fn now(&self, plan: &Plan) -> Plan {
        plan.meanwhile(self.topology.online(), &self.housekeeping)
    }

    fn without(&self, gone: CpuId) -> Host {
        let cpus = self.topology.cpus().iter().cloned().map(|cpu| {
            if cpu.cpu != gone {
                return cpu;
            }
            Cpu { online: false, core: None, package: None, node: None, llc: None, class: None, ..cpu }
        });
        let topology =
            Topology::new(cpus.collect(), self.topology.nodes().to_vec(), self.topology.possible().clone(), Vec::new());
        Host { topology, housekeeping: self.housekeeping.clone(), pinnable: self.pinnable.clone() }
    }
}

/// What the machine has: the file of leases, the cgroup of a VM without a lease, those of the one that moves, its threads.
#[derive(Clone)]
struct Machine {
    file: String,
    pool: CpuSet,
    cgroups: Cgroups,
    /// By the name of their cgroup.
    affinities: Vec<(String, CpuSet)>,
}

/// One thing that a mover does.
enum Step {
    Record(Leases),
    Pool,
    Write(Cgroup),
    Bind(String, CpuSet),
}

impl Machine {
    fn new(host: &Host, leases: &Leases, plan: &Plan, v1: bool) -> Machine {
        let at = |dir: &str, cpus: &CpuSet| Cgroup { dir: dir.to_owned(), cpus: cpus.clone() };
        let mut threads = vec![at("/c/m/a/emulator", &plan.emulator)];
        threads.extend(plan.vcpu_places().map(|(vcpu, cpus)| at(&format!("/c/m/a/vcpu{vcpu}"), &cpus)));
        let affinities = threads.iter().map(|thread| (thread.dir.clone(), thread.cpus.clone())).collect();
        let above = if v1 { vec![at("/c/m", host.topology.online())] } else { Vec::new() };
        let cgroups = Cgroups { v1, above, own: vec![at("/c/m/a", &plan.allowed())], threads };
        Machine { file: leases.to_json().unwrap(), pool: host.pool(leases), cgroups, affinities }
    }

    fn leases(&self) -> Leases {
        Leases::from_json(&self.file).unwrap()
    }

    /// Where the kernel lets a thread run.
    fn allowed(&self, dir: &str) -> CpuSet {
        let (_, affinity) = self.affinities.iter().find(|(of, _)| of == dir).unwrap();
        let thread = self.cgroups.threads.iter().find(|thread| thread.dir == dir).unwrap();
        let within = |cpus: CpuSet, limit: &CpuSet| {
            // v2: what has nothing left has what is above it.
            let both = cpus.intersection(limit);
            if both.is_empty() { limit.clone() } else { both }
        };
        let cgroup = within(thread.cpus.clone(), &self.cgroups.own[0].cpus);
        within(affinity.clone(), &cgroup)
    }

    /// What the kernel makes of it.
    fn take(&mut self, host: &Host, step: &Step) {
        match step {
            Step::Record(leases) => self.file = leases.to_json().unwrap(),
            Step::Pool => self.pool = host.pool(&self.leases()),
            Step::Write(new) => {
                let v1 = self.cgroups.v1;
                let own = self.cgroups.own[0].clone();
                if let Some(thread) = self.cgroups.threads.iter_mut().find(|one| one.dir == new.dir) {
                    assert!(!v1 || new.cpus.is_subset(&own.cpus), "v1 refuses {new:?} in {own:?}");
                    thread.cpus = new.cpus.clone();
                    // Its tasks get all of it until they say otherwise.
                    let (_, affinity) = self.affinities.iter_mut().find(|(of, _)| *of == new.dir).unwrap();
                    *affinity = new.cpus.clone();
                } else {
                    assert_eq!(new.dir, own.dir, "nothing above has to grow");
                    let fits = self.cgroups.threads.iter().all(|thread| thread.cpus.is_subset(&new.cpus));
                    assert!(!v1 || fits, "v1 refuses {new:?} around {:?}", self.cgroups.threads);
                    self.cgroups.own[0].cpus = new.cpus.clone();
                }
            }
            Step::Bind(dir, cpus) => {
                let thread = self.cgroups.threads.iter().find(|one| one.dir == *dir).unwrap();
                let cgroup = thread.cpus.intersection(&self.cgroups.own[0].cpus);
                assert!(!cgroup.intersection(cpus).is_empty(), "EINVAL: {cpus} of {dir} in {cgroup}");
                self.affinities.iter_mut().find(|(of, _)| of == dir).unwrap().1 = cpus.clone();
            }
        }
    }

    /// Nobody is where he must not be.
    fn check(&self, host: &Host, uuid: DomainUuid) {
        let leases = self.leases();
        assert_eq!(leases.check(), Ok(()));
        let lease = leases.get(uuid).unwrap();
        let own = lease.plans().fold(CpuSet::new(), |all, plan| all.union(&plan.allowed()).union(&plan.exclusive()));
        for (dir, _) in &self.affinities {
            let allowed = self.allowed(dir);
            assert!(allowed.is_subset(&own.union(&host.housekeeping)), "{dir} is on {allowed}, its lease holds {own}");
            if dir.contains("vcpu") {
                // A vCPU that has nothing left at all is with the host's own work.
                let apart = allowed.difference(&host.housekeeping);
                assert!(apart.is_disjoint(&self.pool), "{dir} is on {allowed}, and so are others on {}", self.pool);
            }
            assert!(allowed.is_disjoint(&leases.taken_from(Some(uuid))));
        }
    }

    /// What a mover does from here to come to this plan.
    fn steps_to(&self, host: &Host, uuid: DomainUuid, goal: &Plan) -> Vec<Step> {
        let mut steps = vec![Step::Pool];
        let plan = &host.now(goal);
        let grown = grown(&self.cgroups, &plan.allowed());
        let mut after = self.cgroups.clone();
        for one in &grown {
            after.own[0].cpus = one.cpus.clone();
        }
        steps.extend(grown.into_iter().map(Step::Write));
        steps.extend(seated(&self.cgroups, plan).into_iter().map(Step::Write));
        let vcpus = plan.vcpu_places().map(|(vcpu, cpus)| Step::Bind(format!("/c/m/a/vcpu{vcpu}"), cpus));
        steps.push(Step::Bind("/c/m/a/emulator".to_owned(), plan.emulator.clone()));
        steps.extend(vcpus);
        steps.extend(shrunk(&after, &plan.allowed()).into_iter().map(Step::Write));
        let mut leases = self.leases();
        let lease = leases.get(uuid).unwrap().clone();
        leases.put(Lease { holds: Holds::Dedicated(goal.clone()), moving: None, ..lease });
        steps.extend([Step::Record(leases), Step::Pool]);
        steps
    }
}

/// Every way in which a move from one plan to another can be broken off, and ended.
fn broken_off_anywhere(host: &Host, leases: &Leases, uuid: DomainUuid, to: &Plan, v1: bool) {
    let lease = leases.get(uuid).unwrap().clone();
    let from = lease.plan().unwrap().clone();
    let machine = Machine::new(host, leases, &host.now(&from), v1);
    let mut recorded = leases.clone();
    let by = Process { pid: 1, start_time: 1 };
    recorded.put(Lease { moving: Some(Moving { to: to.clone(), by }), ..lease });
    let begun = Machine { file: recorded.to_json().unwrap(), ..machine.clone() };
    machine.check(host, uuid);
    begun.check(host, uuid);
    let steps = begun.steps_to(host, uuid, to);
    for end in 0..=steps.len() {
        let mut killed = begun.clone();
        for step in &steps[..end] {
            killed.take(host, step);
            killed.check(host, uuid);
        }
        for goal in [to, &from] {
            if killed.leases().get(uuid).unwrap().moving.is_none() {
                continue;
            }
            let mut recovered = killed.clone();
            for step in killed.steps_to(host, uuid, goal) {
                recovered.take(host, &step);
                recovered.check(host, uuid);
            }
            let leases = recovered.leases();
            assert_eq!(leases.get(uuid).unwrap().plan(), Some(goal));
            assert_eq!(recovered.cgroups.own[0].cpus, host.now(goal).allowed());
            assert_eq!(recovered.pool, host.pool(&leases));
        }
    }
}

fn starts() -> impl Strategy<Value = Vec<(u16, usize, bool)>> {
    proptest::collection::vec((1..6u16, 0..POLICIES.len(), any::<bool>()), 2..7)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_move_to_anywhere(shape in 0..SHAPES.len(), starts in starts(), which in 0..6usize, taken in 0..40u16, v1: bool) {
        let host = Host::new(SHAPES[shape]);
        let leases = host.leases(&starts);
        prop_assume!(leases.iter().count() > 0);
        let lease = leases.iter().nth(which % leases.iter().count()).unwrap().clone();
        let (from, request) = (lease.plan().unwrap(), lease.request.clone().unwrap());
        // Some of its own CPUs are not to be had again, so that it has to go.
        let mut others = leases.taken_from(Some(lease.uuid));
        others.insert(CpuId(taken % host.topology.cpus().len() as u16));
        let others = others.union(&from.vcpus[0].into_iter().collect());
        for memory in [MemoryOfMoved::Stays, MemoryOfMoved::Follows] {
            if let Ok(to) = anew(&host.supply(&others), &request, from, memory) {
                prop_assert_eq!(same_guest(&host.topology, from, &to, memory), Ok(()));
                prop_assert!(check::check(&host.supply(&others), &request, &to).is_ok());
                prop_assert!(memory == MemoryOfMoved::Follows || to.memory_nodes == from.memory_nodes);
                broken_off_anywhere(&host, &leases, lease.uuid, &to, v1);
            }
        }
    }

    #[test]
    fn a_core_that_broke(shape in 0..SHAPES.len(), starts in starts(), which in 0..6usize, cpu in 0..6usize, v1: bool) {
        let host = Host::new(SHAPES[shape]);
        let leases = host.leases(&starts);
        prop_assume!(leases.iter().count() > 0);
        let lease = leases.iter().nth(which % leases.iter().count()).unwrap().clone();
        let (from, request) = (lease.plan().unwrap(), lease.request.clone().unwrap());
        let own: Vec<_> = from.vcpus.iter().flatten().copied().collect();
        let gone = own[cpu % own.len()];
        let others = leases.taken_from(Some(lease.uuid));
        let broken = host.without(gone);
        // Until there is another place it is held to what it has.
        let now = from.meanwhile(broken.topology.online(), &broken.housekeeping);
        prop_assert!(now.allowed().is_subset(broken.topology.online()) && now.allowed().is_disjoint(&others));
        prop_assert!(now.vcpu_places().all(|(_, cpus)| !cpus.is_empty()) && !now.emulator.is_empty());
        prop_assert_eq!(from.missing(broken.topology.online()), [gone].into_iter().collect::<CpuSet>());
        prop_assert_eq!(&from.meanwhile(host.topology.online(), &host.housekeeping), from);
        if let Some(to) = mended(&broken.supply(&others), &request, from) {
            // Of whole cores, the siblings go with it and nobody else.
            let gone_too = host.topology.with_siblings(&[gone].into_iter().collect());
            for (before, after) in from.vcpus.iter().zip(&to.vcpus) {
                prop_assert!(before == after || gone_too.contains(before.unwrap()), "{:?} {:?}", from, to);
            }
            prop_assert!(!to.exclusive().contains(gone) && to.exclusive().is_disjoint(&others));
            broken_off_anywhere(&broken, &leases, lease.uuid, &to, v1);
        }
    }
}
