//! What placing one domain costs, and how that grows with the host and with the domains on it.
//!
//! `cargo bench --bench scale`. A placement is what a start does once everything is read: the CPUs that leases hold are put
//! together, the plan is made and checked. Time is that of the fastest of many runs, as others use the machine, too;
//! instructions are those of one placement: the difference between runs of this program with n and with 2n of them, under
//! callgrind.
//!
//! 1. *Growth*: 4 vCPUs on whole cores, on hosts of 64 to 8192 CPUs (cores of two threads, 8 cores in each last-level cache,
//!    32 on each node) with 1 to 2000 domains of one core each, spread evenly, so that what is free is scattered.
//! 2. *Corners*: other requests and other states of the host, each of which asks something else of the search.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "a benchmark"
)]

use std::collections::BTreeSet;
use std::hint::black_box;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use virt_pin::alloc::plan::Plan;
use virt_pin::alloc::policy::Policy;
use virt_pin::alloc::request::{GuestMemory, Pages, Request};
use virt_pin::alloc::{self, Supply};
use virt_pin::cpuset::{CpuId, CpuSet};
use virt_pin::host::{Topology, shape};
use virt_pin::lock::leases::{Holds, Lease, Leases, State};
use virt_pin::uuid::DomainUuid;

const SIZES: [u16; 8] = [64, 128, 256, 512, 1024, 2048, 4096, 8192];
const DOMAINS: [usize; 5] = [1, 20, 200, 500, 2000];
/// What this program is told that shall only run a case so many times.
const COUNT: &str = "count";

const GIB: u64 = 1 << 30;

/// What of the host the leases leave free.
#[derive(Clone, Copy)]
enum Held {
    /// So many domains of one core each, spread evenly.
    Cores(usize),
    /// All but one core in each last-level cache.
    AllButOneInEachCache,
}

/// One placement.
struct Case {
    host: String,
    held: Held,
    vcpus: Vcpus,
    /// The guest's memory in GiB; `None` = half of one for each vCPU. Every node has 60 to give.
    memory: Option<u64>,
    /// Attributes beside `policy="dedicated"`.
    policy: &'static [(&'static str, &'static str)],
}

#[derive(Clone, Copy)]
enum Vcpus {
    Some(u16),
    /// Half of what is free.
    Half,
    /// All of it, and so many more.
    All(u16),
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let (growth, corners) = (growth(), corners());
    if let [_, count, index, times] = args.as_slice() {
        if count == COUNT {
            let case = growth.iter().chain(&corners).nth(index.parse().unwrap()).unwrap();
            let mut host = case.lay_out();
            return (0..times.parse().unwrap()).for_each(|_| drop(black_box(host.place())));
        }
    }
    println!("4 vCPUs on whole cores; microseconds (thousands of instructions); columns: domains of one core each");
    println!("{:>6} CPUs{}", "", DOMAINS.map(|domains| format!("{domains:>20}")).concat());
    for cpus in SIZES {
        let cells = growth.iter().enumerate().filter(|(_, case)| case.host == host_of(cpus)).map(|(index, case)| {
            let cost = measure(case, index);
            format!("{:>20}", format!("{} ({})", micros(cost.time), thousands(cost.instructions)))
        });
        println!("{cpus:>6} CPUs{}", cells.collect::<String>());
    }
    println!("\n{:<26} {:<22} {:<44} {:>10} {:>10}  outcome", "host", "held", "request", "us", "k instr.");
    for (index, case) in corners.iter().enumerate() {
        let Cost { time, instructions, outcome } = measure(case, growth.len() + index);
        let (time, instructions) = (micros(time), thousands(instructions));
        let held = match case.held {
            Held::Cores(0) => "nothing".to_owned(),
            Held::Cores(count) => format!("{count} domains"),
            Held::AllButOneInEachCache => "but one core a cache".to_owned(),
        };
        println!(
            "{:<26} {held:<22} {:<44} {time:>10} {instructions:>10}  {outcome}",
            case.host,
            case.request_in_words()
        );
    }
}

fn growth() -> Vec<Case> {
    let mut cases = Vec::new();
    for cpus in SIZES {
        // A tenth of the cores stays free.
        for domains in DOMAINS.into_iter().filter(|domains| *domains <= usize::from(cpus) / 2 * 9 / 10) {
            let (host, held) = (host_of(cpus), Held::Cores(domains));
            cases.push(Case { host, held, vcpus: Vcpus::Some(4), memory: None, policy: &[] });
        }
    }
    cases
}

fn host_of(cpus: u16) -> String {
    format!("2s{}c2t,numa={},llc={}", cpus / 4, (cpus / 64).max(1), cpus / 16)
}

fn corners() -> Vec<Case> {
    use Vcpus::{All, Half, Some as Just};
    let requests: [(Vcpus, &'static [(&'static str, &'static str)]); 12] = [
        (Just(4), &[]),
        (Just(1), &[]),
        (Just(1), &[("cores", "thread")]),
        (Just(16), &[("numa", "single")]),
        (Just(16), &[("numa", "any"), ("cache", "any")]),
        (Just(8), &[("cache", "single")]),
        (Just(16), &[("emulator", "isolate"), ("iothreads", "isolate")]),
        (Half, &[]),
        (Half, &[("cores", "thread")]),
        (All(0), &[]),
        (All(1), &[]),
        (All(1), &[("cores", "thread")]),
    ];
    let large = || "2s128c2t,numa=8,llc=32".to_owned();
    let mut cases = Vec::new();
    let mut add = |host: String, held, requests: &[(Vcpus, &'static [(&'static str, &'static str)])]| {
        let new =
            requests.iter().map(|&(vcpus, policy)| Case { host: host.clone(), held, vcpus, memory: None, policy });
        cases.extend(new);
    };
    for held in [Held::Cores(0), Held::Cores(200), Held::AllButOneInEachCache] {
        add(large(), held, &requests);
    }
    // The costliest of these on the largest host, and where each CPU is a node and a last-level cache of its own.
    let few = |indices: &[usize]| indices.iter().map(|&index| requests[index]).collect::<Vec<_>>();
    add(host_of(8192), Held::Cores(2000), &few(&[0, 5, 6, 8, 10]));
    add(host_of(8192), Held::AllButOneInEachCache, &few(&[0, 5, 6, 8, 10]));
    add("1s512c1t,numa=512,llc=512".to_owned(), Held::Cores(200), &few(&[0, 5, 6, 8, 10]));
    add("1s8192c1t,numa=8192,llc=8192".to_owned(), Held::Cores(2000), &few(&[0, 6, 8, 10]));
    // More memory than the nodes of so few vCPUs can have.
    for (host, memory) in [(large(), 300), (host_of(1024), 100), (host_of(1024), 300)] {
        let held = Held::Cores(200);
        cases.push(Case { host, held, vcpus: Vcpus::Some(4), memory: Some(memory), policy: &[] });
    }
    cases
}

impl Case {
    fn request_in_words(&self) -> String {
        let vcpus = match self.vcpus {
            Vcpus::Some(vcpus) => vcpus.to_string(),
            Vcpus::Half => "half".to_owned(),
            Vcpus::All(0) => "all".to_owned(),
            Vcpus::All(more) => format!("all + {more}"),
        };
        let policy = self.policy.iter().map(|(name, value)| format!(" {name}={value}"));
        let memory = self.memory.map(|gib| format!(" {gib} GiB")).unwrap_or_default();
        vcpus + &memory + &policy.collect::<String>()
    }

    fn lay_out(&self) -> Host {
        let bare = shape::parse(&self.host).unwrap();
        let nodes = bare.nodes().iter().cloned().map(|mut node| {
            (node.memory_bytes, node.available_bytes) = (Some(64 * GIB), Some(60 * GIB));
            node
        });
        let topology = Topology::new(bare.cpus().to_vec(), nodes.collect(), bare.possible().clone(), Vec::new());
        let housekeeping = topology.siblings(CpuId(0)).unwrap().clone();
        let pinnable = topology.online().difference(&housekeeping);
        let cores: Vec<CpuSet> = topology.cores().values().skip(1).cloned().collect();
        let held: Vec<CpuSet> = match self.held {
            Held::Cores(count) => (0..count).map(|index| cores[index * cores.len() / count].clone()).collect(),
            Held::AllButOneInEachCache => {
                let mut caches = BTreeSet::new();
                let cache = |core: &CpuSet| topology.cpu(core.first().unwrap()).unwrap().llc;
                cores.iter().filter(|core| !caches.insert(cache(core))).cloned().collect()
            }
        };
        let mut leases = Leases::default();
        for (number, core) in (1u128..).zip(&held) {
            leases.put(lease(number, core, &housekeeping));
        }
        let free = u16::try_from(pinnable.len() - held.iter().map(CpuSet::len).sum::<usize>()).unwrap();
        let vcpus = match self.vcpus {
            Vcpus::Some(vcpus) => vcpus,
            Vcpus::Half => free / 2,
            Vcpus::All(more) => free + more,
        };
        let attributes = [("policy", "dedicated")].into_iter().chain(self.policy.iter().copied());
        let policy = Policy::from_attributes(attributes).unwrap();
        let bytes = self.memory.map_or(u64::from(vcpus) * GIB / 2, |gib| gib * GIB);
        let memory = Some(GuestMemory { bytes, pages: Pages::Ordinary });
        let request = Request { iothreads: 1, memory, ..Request::new(vcpus, policy) };
        Host { topology, pinnable, housekeeping, leases, request }
    }
}

fn lease(number: u128, cpus: &CpuSet, housekeeping: &CpuSet) -> Lease {
    let plan = Plan::new(cpus.iter(), housekeeping.clone());
    Lease {
        uuid: DomainUuid::parse(&format!("{number:032x}")).unwrap(),
        name: format!("domain-{number}"),
        state: State::Running,
        holds: Holds::Dedicated(plan),
        request: None,
        domain_id: None,
        cgroup: None,
        daemon: None,
        qemu: None,
        moving: None,
        since: 0,
    }
}

/// A case, ready to be run.
struct Host {
    topology: Topology,
    pinnable: CpuSet,
    housekeeping: CpuSet,
    leases: Leases,
    request: Request,
}

impl Host {
    /// The plan, or the code of the refusal.
    fn place(&mut self) -> Result<Plan, String> {
        let taken = self.leases.taken_from(None);
        let supply = Supply {
            topology: &self.topology,
            pinnable: &self.pinnable,
            taken: &taken,
            housekeeping: &self.housekeeping,
        };
        alloc::plan(&supply, &self.request).map_err(|refusal| refusal.code.name().to_owned())
    }
}

struct Cost {
    time: Duration,
    instructions: Option<u64>,
    outcome: String,
}

fn measure(case: &Case, index: usize) -> Cost {
    const ENOUGH: Duration = Duration::from_millis(300);
    let mut host = case.lay_out();
    let begin = Instant::now();
    let outcome = host.place().map_or_else(|code| code, |_| "a plan".to_owned());
    let mut time = begin.elapsed();
    while begin.elapsed() < ENOUGH {
        let start = Instant::now();
        drop(black_box(host.place()));
        time = time.min(start.elapsed());
    }
    // Under callgrind everything takes fifty times as long.
    let times = match time.as_millis() {
        0..10 => 10,
        10..200 => 1,
        _ => return Cost { time, instructions: None, outcome },
    };
    let total = |times| instructions(index, times);
    let instructions = total(2 * times).zip(total(times)).map(|(two, one)| (two - one) / times);
    Cost { time, instructions, outcome }
}

/// Instructions of this program with so many placements, as callgrind counts them.
fn instructions(index: usize, times: u64) -> Option<u64> {
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(std::env::current_exe().unwrap());
    valgrind.args([COUNT.to_owned(), index.to_string(), times.to_string()]);
    let output = valgrind.stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    text.lines().find_map(|line| line.split_once("Collected : ")?.1.trim().parse().ok())
}

fn micros(time: Duration) -> String {
    format!("{:.0}", time.as_secs_f64() * 1e6)
}

fn thousands(instructions: Option<u64>) -> String {
    instructions.map_or_else(|| "-".to_owned(), |count| (count / 1000).to_string())
}
