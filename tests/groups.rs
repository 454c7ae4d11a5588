//! The allocator where vCPUs come in groups (guest NUMA cells, even shares), name their CPUs, or are only partly
//! dedicated: tables, and brute force on small hosts.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    reason = "integration tests"
)]

use std::collections::BTreeSet;

use proptest::prelude::*;
use virt_pin::alloc::plan::Plan;
use virt_pin::alloc::policy::Policy;
use virt_pin::alloc::refusal::Refusal;
use virt_pin::alloc::request::{GuestCell, GuestMemory, Pages, Request};
use virt_pin::alloc::{self, Supply};
use virt_pin::cpuset::{CpuId, CpuSet, NodeId};
use virt_pin::error::Code;
use virt_pin::host::{CoreClass, Cpu, HugePages, Topology, shape};

fn set(text: &str) -> CpuSet {
    CpuSet::parse_kernel_list(text).unwrap()
}

fn request(vcpus: u16, policy: &[(&str, &str)]) -> Request {
    let policy = [("policy", "dedicated"), ("emulator", "share"), ("iothreads", "share")].iter().chain(policy).copied();
    let mut last: Vec<(&str, &str)> = Vec::new();
    for (name, value) in policy {
        last.retain(|(known, _)| *known != name);
        last.push((name, value));
    }
    Request::new(vcpus, Policy::from_attributes(last).unwrap())
}

fn cells(vcpus: &[&str], policy: &[(&str, &str)]) -> Request {
    let cells: Vec<_> =
        vcpus.iter().map(|vcpus| GuestCell { vcpus: set(vcpus), bytes: 1 << 30, bound: None }).collect();
    let count = cells.iter().map(|cell| cell.vcpus.len()).sum::<usize>();
    Request { cells, ..request(count as u16, policy) }
}

fn place(host: &Topology, pinnable: &str, taken: &str, request: &Request) -> Result<Plan, Refusal> {
    let (pinnable, taken) = (set(pinnable), set(taken));
    let housekeeping = host.online().difference(&pinnable);
    alloc::plan(&Supply { topology: host, pinnable: &pinnable, taken: &taken, housekeeping: &housekeeping }, request)
}

/// vCPU order, `-` for a vCPU without a CPU of its own.
fn order(plan: &Plan) -> String {
    let cpus = plan.vcpus.iter().map(|own| own.map_or("-".to_owned(), |cpu| cpu.to_string()));
    cpus.collect::<Vec<_>>().join(" ")
}

#[track_caller]
fn refused(result: Result<Plan, Refusal>, code: Code, part: &str) {
    let refusal = result.unwrap_err();
    assert_eq!(refusal.code, code, "{}", refusal.reason);
    assert!(refusal.reason.contains(part), "{}", refusal.reason);
}

/// Two nodes of four cores of two threads: cores 0-3 on node 0 (siblings +8), 4-7 on node 1.
fn two_nodes() -> Topology {
    shape::parse("2s4c2t,numa=2,llc=2").unwrap()
}

#[test]
fn evenly_over_nodes() {
    let host = two_nodes();
    let spread = [("numa", "spread")];
    let plan = place(&host, "0-15", "", &request(8, &spread)).unwrap();
    assert_eq!(order(&plan), "0 8 1 9 4 12 5 13");
    assert_eq!(plan.cells.iter().map(|cell| cell.vcpus.to_string()).collect::<Vec<_>>(), ["0-3", "4-7"]);
    assert_eq!(plan.guest.unwrap().to_string(), "2 sockets of 2 cores of 2 threads");
    assert_eq!(plan.cells[1].to_string(), "vCPUs 4-7 on node 1");
    // Three cores: two and one; the larger share goes where the rest then serves best.
    let plan = place(&host, "0-15", "0,8", &request(6, &spread)).unwrap();
    assert_eq!(order(&plan), "1 9 2 10 4 12");
    // Fewer cores than nodes: in vCPUs, siblings parked.
    let plan = place(&host, "0-15", "", &request(2, &spread)).unwrap();
    assert_eq!((order(&plan).as_str(), plan.parked.to_string().as_str()), ("0 4", "8,12"));
    // As much as the policy names, on both; not more on one.
    refused(place(&host, "0-15", "0-2,8-10", &request(8, &spread)), Code::NeedsRepack, "");
    refused(place(&host, "0-15", "", &request(1, &spread)), Code::PolicyInvalid, "cannot be spread over 2 nodes");
    let fixed = [("numa", "spread"), ("threads-per-core", "2")];
    refused(place(&host, "0-15", "", &request(2, &fixed)), Code::PolicyInvalid, "cannot be spread over 2 nodes");
    // A core that is not filled is one of the larger share.
    for (vcpus, cells) in [(5, ["0-2", "3-4"]), (7, ["0-2", "3-6"]), (9, ["0-4", "5-8"]), (13, ["0-6", "7-12"])] {
        let plan = place(&host, "0-15", "", &request(vcpus, &spread)).unwrap();
        assert_eq!(plan.cells.iter().map(|cell| cell.vcpus.to_string()).collect::<Vec<_>>(), cells, "{vcpus}");
    }
    // Over one named node there is nothing to spread.
    let plan = place(&host, "0-15", "", &request(4, &[("numa", "spread"), ("nodes", "1")])).unwrap();
    assert_eq!(order(&plan), "4 12 5 13");
}

#[test]
fn unequal_guest_cells_on_unequal_nodes() {
    let host = two_nodes();
    // Node 0 has one core left, node 1 all four: the first cell does not fit where a loop in order would put it.
    let plan = place(&host, "0-15", "0-2,8-10", &cells(&["0-5", "6-7"], &[])).unwrap();
    assert_eq!(order(&plan), "4 12 5 13 6 14 7 15");
    // One node holds both: fewest nodes.
    assert_eq!(plan.nodes, [NodeId(1)].into());
    let plan = place(&host, "0-15", "0-2,8-10", &cells(&["0-5", "6-7"], &[("numa", "spread")])).unwrap();
    assert_eq!(order(&plan), "4 12 5 13 6 14 3 11");
    assert_eq!(plan.cells.iter().map(|cell| cell.node.unwrap().0).collect::<Vec<_>>(), [1, 0]);
    // The larger cell second, its vCPUs scattered.
    let plan = place(&host, "0-15", "4-6,12-14", &cells(&["0,7", "1-6"], &[("numa", "spread")])).unwrap();
    assert_eq!(order(&plan), "7 0 8 1 9 2 10 15");
    // Neither node holds the larger one.
    refused(place(&host, "0-15", "0-1,4-5,8-9,12-13", &cells(&["0-5", "6-7"], &[])), Code::NeedsRepack, "");
    assert!(place(&host, "0-15", "0-1,4-5,8-9,12-13", &cells(&["0-5", "6-7"], &[("numa", "any")])).is_ok());
}

#[test]
fn guest_cells_never_share_a_core() {
    let host = two_nodes();
    // Three vCPUs each: two cores each, a thread of each parked.
    let plan = place(&host, "0-15", "", &cells(&["0-2", "3-5"], &[("numa", "single")])).unwrap();
    assert_eq!((order(&plan).as_str(), plan.parked.to_string().as_str()), ("0 8 1 2 10 3", "9,11"));
    assert_eq!(plan.guest.unwrap().threads, 1);
    refused(
        place(&host, "0-15", "0,4,8,12", &cells(&["0-2", "3-5"], &[("numa", "single")])),
        Code::NeedsRepack,
        "needs 4 whole cores on one node",
    );
    let odd = cells(&["0-2", "3-5"], &[("threads-per-core", "2")]);
    refused(place(&host, "0-15", "", &odd), Code::PolicyInvalid, "a guest NUMA cell has 3 vCPUs");
    let three = cells(&["0-1", "2-3", "4-5"], &[("numa", "spread")]);
    refused(place(&host, "0-15", "", &three), Code::Unsatisfiable, "3 guest NUMA cells on a node each");
}

#[test]
fn memory_of_cells_is_on_their_nodes() {
    let memory = |mib: u64| Some(GuestMemory { bytes: mib << 20, pages: Pages::Ordinary });
    let mut nodes = two_nodes().nodes().to_vec();
    for (node, gib) in nodes.iter_mut().zip([3, 1]) {
        node.memory_bytes = Some(16 << 30);
        node.available_bytes = Some(gib << 30);
    }
    let host = two_nodes();
    let host = Topology::new(host.cpus().to_vec(), nodes, host.possible().clone(), vec![]);
    let sized = |first: u64, second: u64, policy: &[(&str, &str)]| {
        let mut request = cells(&["0-3", "4-7"], policy);
        request.cells[0].bytes = first << 30;
        request.cells[1].bytes = second << 30;
        Request { memory: memory((first + second) << 10), ..request }
    };
    // 1 + 3 GiB: only the other way round.
    let plan = place(&host, "0-15", "", &sized(1, 3, &[])).unwrap();
    assert_eq!(plan.cells.iter().map(|cell| cell.node.unwrap().0).collect::<Vec<_>>(), [1, 0]);
    refused(place(&host, "0-15", "", &sized(2, 2, &[])), Code::MemoryShortage, "");
    // Made cells share the memory as the nodes have room, and exactly.
    let plan =
        place(&host, "0-15", "", &Request { memory: memory(3584), ..request(8, &[("numa", "spread")]) }).unwrap();
    let bytes: Vec<_> = plan.cells.iter().map(|cell| cell.bytes.unwrap() >> 20).collect();
    assert_eq!(bytes, [2560, 1024]);
}

#[test]
fn memory_that_never_is_there_is_not_waited_for() {
    let mut nodes = two_nodes().nodes().to_vec();
    for node in &mut nodes {
        node.memory_bytes = Some(8 << 30);
        node.available_bytes = Some(1 << 30);
        node.huge_pages = vec![HugePages { size_kib: 2048, total: 512, free: 0 }];
    }
    let host = two_nodes().with_nodes(nodes);
    let guest = |mib: u64, pages, policy: &[(&str, &str)]| Request {
        memory: Some(GuestMemory { bytes: mib << 20, pages }),
        ..request(2, policy)
    };
    let (ordinary, huge, single) = (Pages::Ordinary, Pages::Huge(2048), [("numa", "single")]);
    let say = |request: &Request, code, part: &str| refused(place(&host, "0-15", "", request), code, part);
    say(
        &guest(6000, ordinary, &single),
        Code::MemoryShortage,
        "needs 6000 MiB of memory on the nodes of its CPUs (0), 1024",
    );
    // Huge pages are made of 1 GiB of the 8.
    say(&guest(7169, ordinary, &single), Code::Unsatisfiable, "(0); no node has more than 7168 MiB");
    say(
        &guest(1024, huge, &single),
        Code::MemoryShortage,
        "1024 MiB of huge pages of 2048 KiB on the nodes of its CPUs",
    );
    say(&guest(1025, huge, &single), Code::Unsatisfiable, "no node has more than 1024 MiB");
    say(&guest(2049, huge, &[]), Code::Unsatisfiable, "all there is is 2048 MiB");
    // Nor does it help that somebody holds the CPUs just now.
    refused(place(&host, "0-15", "0-15", &guest(1025, huge, &single)), Code::Unsatisfiable, "no node has more");
    let sized = |mib: u64| {
        let mut request = cells(&["0-3", "4-7"], &[("numa", "spread")]);
        request.cells[0].bytes = mib << 20;
        request.cells[1].bytes = (2048 - mib) << 20;
        Request { memory: Some(GuestMemory { bytes: 2 << 30, pages: huge }), ..request }
    };
    say(&sized(1024), Code::MemoryShortage, "");
    say(&sized(1025), Code::Unsatisfiable, "there is so much, but not as its vCPUs and NUMA cells can lie");
}

/// Kernels without NUMA support have no node that huge pages could be counted on.
#[test]
fn nothing_is_bound_where_no_node_has_memory() {
    let host = shape::parse("1s4c1t").unwrap();
    let cpus = host.cpus().iter().map(|cpu| Cpu { node: None, ..cpu.clone() });
    let without_nodes = Topology::new(cpus.collect(), vec![], host.possible().clone(), vec![]);
    let mut nodes = host.nodes().to_vec();
    nodes[0].memory_bytes = Some(0);
    for host in [without_nodes, host.with_nodes(nodes)] {
        let memory = Some(GuestMemory { bytes: 1 << 30, pages: Pages::Huge(2048) });
        let plan = place(&host, "0-3", "", &Request { memory, ..request(2, &[]) }).unwrap();
        assert_eq!(plan.memory_nodes, None);
    }
}

#[test]
fn groups_in_one_cache() {
    // Each cache is on one node: nothing spread over both is in one.
    let both = [("numa", "spread"), ("cache", "single")];
    refused(place(&two_nodes(), "0-15", "", &request(2, &both)), Code::Unsatisfiable, "in one last-level cache");
    // Two nodes share each of two caches.
    let host = shape::parse("2s4c1t,numa=4,llc=2").unwrap();
    assert_eq!(
        order(&place(&host, "0-7", "0", &request(4, &[("nodes", "2-3"), both[0], both[1]])).unwrap()),
        "4 5 6 7"
    );
    assert_eq!(order(&place(&host, "0-7", "0", &cells(&["0-1", "2-3"], &[both[1]])).unwrap()), "4 5 6 7");
    refused(place(&host, "0-7", "0,4", &cells(&["0-1", "2-3"], &[both[1]])), Code::NeedsRepack, "");
}

/// A cell without vCPUs does not free the only other one from lying on one node.
#[test]
fn the_only_cell_with_vcpus_is_on_one_node() {
    let mut nodes = two_nodes().nodes().to_vec();
    nodes.iter_mut().for_each(|node| {
        node.memory_bytes = Some(2 << 30);
        node.available_bytes = Some(1 << 30);
        node.huge_pages = vec![HugePages { size_kib: 2048, total: 512, free: 512 }];
    });
    let host = two_nodes().with_nodes(nodes);
    let mut request = cells(&["0-3", ""], &[]);
    request.memory = Some(GuestMemory { bytes: 2 << 30, pages: Pages::Huge(2048) });
    refused(place(&host, "0-15", "", &request), Code::Unsatisfiable, "");
    request.memory = Some(GuestMemory { bytes: 1 << 30, pages: Pages::Huge(2048) });
    assert_eq!(place(&host, "0-15", "", &request).unwrap().nodes.len(), 1);
}

#[test]
fn exactly_these_cpus() {
    let host = two_nodes();
    let named =
        |vcpus, cpus, policy: &[(&'static str, &'static str)]| request(vcpus, &[&[("cpus", cpus)], policy].concat());
    let plan = place(&host, "0-15", "", &named(4, "2-3,10-11", &[])).unwrap();
    assert_eq!(order(&plan), "2 10 3 11");
    // Siblings not named are held and parked, wherever the core starts.
    let plan = place(&host, "0-15", "", &named(2, "10-11", &[])).unwrap();
    assert_eq!((order(&plan).as_str(), plan.parked.to_string().as_str()), ("10 11", "2-3"));
    let plan = place(&host, "0-15", "2", &named(2, "10-11", &[("cores", "thread")])).unwrap();
    assert_eq!((order(&plan).as_str(), plan.parked.len()), ("10 11", 0));
    // Isolated threads come from elsewhere on the same node.
    let plan = place(&host, "0-15", "0,8", &named(2, "2,10", &[("emulator", "isolate")])).unwrap();
    assert_eq!((order(&plan).as_str(), plan.emulator.to_string().as_str()), ("2 10", "1,9"));
    refused(
        place(&host, "0-15", "", &named(3, "2-3", &[])),
        Code::PolicyInvalid,
        "names 2 CPUs, but 3 vCPUs need one each",
    );
    refused(place(&host, "2-15", "", &named(2, "1-2", &[])), Code::Unsatisfiable, "CPUs 1 are not pinnable");
    refused(place(&host, "0-9", "", &named(2, "2,3", &[])), Code::Unsatisfiable, "CPUs 10-11 are their siblings");
    refused(place(&host, "0-15", "", &named(2, "15-16", &[])), Code::Unsatisfiable, "CPUs 16 are offline or absent");
    refused(
        place(&host, "0-15", "", &named(2, "2,4", &[("nodes", "0")])),
        Code::Unsatisfiable,
        "CPUs 4 are not on the nodes",
    );
    refused(place(&host, "0-15", "", &named(2, "2,4", &[("numa", "single")])), Code::Unsatisfiable, "");
    refused(place(&host, "0-15", "11", &named(2, "2-3", &[])), Code::Shortage, "CPUs 11 of their cores are not free");
    // A lone thread that is not named is for others only, however little its loss would cost.
    let plan = place(&host, "1-15", "", &named(1, "1", &[("cores", "thread")])).unwrap();
    assert_eq!((order(&plan).as_str(), plan.exclusive().len()), ("1", 1));
    // No waiting brings together what the policy names and wants elsewhere.
    for taken in ["", "4"] {
        let apart = named(2, "3-4", &[("cores", "thread"), ("cache", "single")]);
        refused(place(&host, "0-15", taken, &apart), Code::Unsatisfiable, "cpus=\"3-4\" do not lie as numa, cache");
    }
    // A core of which fewer are named than threads-per-core asks for.
    let fixed = [("threads-per-core", "2")];
    refused(place(&host, "0-15", "", &named(2, "2-3", &fixed)), Code::PolicyInvalid, "names CPUs 2 of one core");
}

#[test]
fn some_vcpus_dedicated_the_others_shared() {
    let host = two_nodes();
    let plan = place(&host, "2-7,10-15", "", &request(6, &[("dedicated-vcpus", "1,4")])).unwrap();
    assert_eq!((order(&plan).as_str(), plan.shared.to_string().as_str()), ("- 2 - - 10 -", "0-1,8-9"));
    assert_eq!(plan.exclusive().to_string(), "2,10");
    // Nobody knows where the others run: no core is told as one of two threads.
    let guest = plan.guest.unwrap();
    assert_eq!((guest.sockets, guest.cores, guest.threads), (1, 6, 1));
    assert!(plan.cells.is_empty());
    refused(place(&host, "2-7", "", &request(4, &[("dedicated-vcpus", "3-4")])), Code::PolicyInvalid, "names vCPU 4");
    refused(
        place(&host, "0-15", "", &request(4, &[("dedicated-vcpus", "0")])),
        Code::Unsatisfiable,
        "vCPUs that are not dedicated",
    );
    assert_eq!(order(&place(&host, "0-15", "", &request(2, &[("dedicated-vcpus", "0-1")])).unwrap()), "0 8");
}

#[test]
fn near_the_devices() {
    let host = two_nodes();
    let near = |policy: &[(&str, &str)]| Request {
        devices: [NodeId(1)].into(),
        ..request(4, &[&[("locality", "devices")], policy].concat())
    };
    assert_eq!(order(&place(&host, "0-15", "", &near(&[])).unwrap()), "4 12 5 13");
    assert_eq!(order(&place(&host, "0-15", "", &near(&[("numa", "any")])).unwrap()), "4 12 5 13");
    // Fewest nodes come first; it is a preference.
    assert_eq!(place(&host, "0-15", "4-6,12-14", &near(&[])).unwrap().nodes, [NodeId(0)].into());
    let without = Request { devices: BTreeSet::new(), ..near(&[]) };
    assert_eq!(order(&place(&host, "0-15", "", &without).unwrap()), "0 8 1 9");
}

/// Cores 0-3 small, 4-7 big, one thread each.
fn big_little(one_class: bool) -> Topology {
    let host = shape::parse("1s8c1t").unwrap();
    let cpus = host.cpus().iter().cloned().map(|mut cpu| {
        cpu.class = Some(if cpu.cpu.0 < 4 { CoreClass::Efficiency } else { CoreClass::Performance });
        cpu
    });
    Topology::new(cpus.collect(), host.nodes().to_vec(), host.possible().clone(), vec![])
        .keeping_vms_in_one_class(one_class)
}

#[test]
fn where_a_vm_stays_in_one_class() {
    let housekeeping = [("emulator", "housekeeping"), ("iothreads", "housekeeping")];
    let (free, bound) = (big_little(false), big_little(true));
    // Elsewhere classes are mixed when no one alone is enough, and any CPU does for the emulator.
    assert!(place(&free, "1-7", "", &request(5, &housekeeping)).is_ok());
    refused(place(&bound, "1-7", "", &request(5, &housekeeping)), Code::Unsatisfiable, "");
    // CPU 0 is a small one: so is everything.
    let plan = place(&bound, "1-7", "", &request(2, &housekeeping)).unwrap();
    assert_eq!((order(&plan).as_str(), plan.emulator.to_string().as_str()), ("1 2", "0"));
    let plan = place(&bound, "1-3,5-7", "", &request(3, &housekeeping)).unwrap();
    assert_eq!((order(&plan).as_str(), plan.emulator.to_string().as_str()), ("5 6 7", "4"));
    assert_eq!(plan.iothreads.to_string(), "0,4");
    let big = [("core-class", "performance"), ("emulator", "isolate")];
    let plan = place(&bound, "1-7", "", &request(2, &big)).unwrap();
    assert_eq!((order(&plan).as_str(), plan.emulator.to_string().as_str()), ("4 5", "6"));
}

#[test]
fn true_sockets_and_dies() {
    let told = |host: &str, vcpus, policy: &[(&str, &str)]| {
        let host = shape::parse(host).unwrap();
        let guest = place(&host, &host.online().to_string(), "", &request(vcpus, policy)).unwrap().guest.unwrap();
        (guest.sockets, guest.dies, guest.cores, guest.threads)
    };
    assert_eq!(told("2s4c2t,numa=2", 8, &[]), (1, 1, 4, 2));
    assert_eq!(told("2s4c2t,numa=2", 16, &[]), (2, 1, 4, 2));
    // Uneven over the packages: not told.
    assert_eq!(told("2s4c2t,numa=2", 12, &[]), (1, 1, 6, 2));
    assert_eq!(told("2s4c2t,numa=2", 12, &[("numa", "spread")]), (2, 1, 3, 2));
}

#[derive(Clone, Debug)]
struct Case {
    host: Topology,
    pinnable: CpuSet,
    taken: CpuSet,
    groups: Vec<u16>,
    policy: Vec<(&'static str, &'static str)>,
}

fn cases() -> impl Strategy<Value = Case> {
    let shapes = prop_oneof![
        Just("3s2c2t,numa=3"),
        Just("1s6c2t"),
        Just("2s3c2t,numa=2"),
        Just("3s2c1t,numa=3"),
        Just("2s4c1t,numa=2,llc=4")
    ];
    let numa = prop_oneof![Just("prefer"), Just("single"), Just("spread")];
    let subset = |most| proptest::collection::btree_set(0..12u16, 0..most);
    let groups = proptest::collection::vec(1..5u16, 2..4);
    (shapes, subset(6), subset(4), subset(4), groups, numa, any::<bool>(), any::<bool>()).prop_map(
        |(shape, offline, barred, taken, groups, numa, isolate, threads)| {
            let host = shape::parse(shape).unwrap();
            let cpus = host.cpus().iter().cloned().map(|mut cpu| {
                // Cores of unequal size: some lose a thread, which is one more size for `pick` to think about.
                cpu.online = cpu.cpu.0 < 6 || !offline.contains(&cpu.cpu.0);
                cpu
            });
            let host = Topology::new(cpus.collect(), host.nodes().to_vec(), host.possible().clone(), vec![]);
            let to_set = |cpus: &BTreeSet<u16>| cpus.iter().map(|&cpu| CpuId(cpu)).collect::<CpuSet>();
            let pinnable = host.online().difference(&to_set(&barred));
            let mut policy = vec![("numa", numa), ("emulator", if isolate { "isolate" } else { "share" })];
            policy.push(("cores", if threads { "thread" } else { "whole" }));
            Case { host, pinnable, taken: to_set(&taken), groups, policy }
        },
    )
}

impl Case {
    fn says(&self, pair: (&str, &str)) -> bool {
        self.policy.contains(&pair)
    }

    fn request(&self) -> Request {
        let mut next = 0;
        let cells: Vec<_> = self
            .groups
            .iter()
            .map(|&size| {
                let vcpus = (next..next + size).map(CpuId).collect();
                next += size;
                GuestCell { vcpus, bytes: 0, bound: None }
            })
            .collect();
        Request { cells, ..request(next, &self.policy) }
    }

    /// The fewest (nodes, caches) of any way to give every group pieces of one node.
    fn oracle(&self) -> Option<(usize, usize)> {
        let free = self.pinnable.difference(&self.taken);
        // A piece: (size, node, cache).
        let at = |cpu: CpuId| self.host.cpu(cpu).unwrap();
        let pieces: Vec<(u16, u16, u16)> = if self.says(("cores", "thread")) {
            free.iter().map(|cpu| (1, at(cpu).node.unwrap().0, at(cpu).llc.unwrap().0)).collect()
        } else {
            let whole = self.host.cores().values().filter(|core| core.is_subset(&free));
            whole
                .map(|core| {
                    let cpu = at(core.first().unwrap());
                    (core.len() as u16, cpu.node.unwrap().0, cpu.llc.unwrap().0)
                })
                .collect()
        };
        let missing: Vec<i32> = self.groups.iter().map(|&size| i32::from(size)).collect();
        let mut best = None;
        self.give(&pieces, &missing, &mut vec![Vec::new(); missing.len() + 1], &mut best);
        best
    }

    fn give(
        &self,
        pieces: &[(u16, u16, u16)],
        missing: &[i32],
        given: &mut Vec<Vec<(u16, u16)>>,
        best: &mut Option<(usize, usize)>,
    ) {
        let extra = usize::from(self.says(("emulator", "isolate")));
        if missing.iter().all(|&left| left <= 0) && given.last().unwrap().len() == extra {
            let by_group: Vec<u16> = given[..missing.len()].iter().map(|group| group[0].0).collect();
            let all: BTreeSet<_> = given.iter().flatten().collect();
            let nodes: BTreeSet<_> = all.iter().map(|place| place.0).collect();
            let apart = by_group.iter().collect::<BTreeSet<_>>().len() == by_group.len();
            if (self.says(("numa", "single")) && nodes.len() > 1) || (self.says(("numa", "spread")) && !apart) {
                return;
            }
            let span = (nodes.len(), all.iter().map(|place| place.1).collect::<BTreeSet<_>>().len());
            *best = Some(best.map_or(span, |best| best.min(span)));
            return;
        }
        let Some((&(size, node, llc), rest)) = pieces.split_first() else { return };
        self.give(rest, missing, given, best);
        for group in 0..missing.len() {
            if missing[group] > 0 && given[group].first().is_none_or(|place| place.0 == node) {
                let mut missing = missing.to_vec();
                missing[group] -= i32::from(size);
                given[group].push((node, llc));
                self.give(rest, &missing, given, best);
                given[group].pop();
            }
        }
        if given.last().unwrap().len() < extra {
            given.last_mut().unwrap().push((node, llc));
            self.give(rest, missing, given, best);
            given.last_mut().unwrap().pop();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn cells_are_placed_whenever_brute_force_can_and_never_wider(case in cases()) {
        let request = case.request();
        let nothing = CpuSet::new();
        let supply = Supply { topology: &case.host, pinnable: &case.pinnable, taken: &case.taken, housekeeping: &nothing };
        let result = alloc::plan(&supply, &request);
        prop_assert_eq!(&result, &alloc::plan(&supply, &request));
        match (&result, case.oracle()) {
            (Ok(plan), Some((nodes, llcs))) => {
                let cpus = plan.vcpu_cpus().union(&plan.extra);
                let span: BTreeSet<_> = cpus.iter().map(|cpu| case.host.cpu(cpu).unwrap().node).collect();
                let caches: BTreeSet<_> = cpus.iter().map(|cpu| case.host.cpu(cpu).unwrap().llc).collect();
                prop_assert_eq!(span.len(), nodes);
                if !case.says(("emulator", "isolate")) {
                    prop_assert_eq!(caches.len(), llcs);
                }
            }
            (Err(refusal), None) => prop_assert!(refusal.code != Code::Internal, "{:?}", refusal),
            (result, oracle) => prop_assert!(false, "{:?} against {:?}", result, oracle),
        }
    }
}
