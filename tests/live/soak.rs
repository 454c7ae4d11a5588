//! Random days in the life of a host: VMs start and end in every way, daemons and hooks are killed, files are torn.
//!
//! After each step the kernel is asked where every thread of every VM may run, and that is held against the leases and against
//! each other. `make soak CYCLES=300 SEED=7` takes that many steps (8 without) of that seed (the clock's without; it is printed).

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant, SystemTime};

use virt_pin::cpuset::CpuSet;

use crate::crash::small;
use crate::guest::Guest;
use crate::libvirtd::Libvirtd;
use crate::points::LIVE;

const AGENT_LOG: &str = "/run/agent.log";
/// Two CPUs for three that want one, and one that wants none.
const DEDICATED: [&str; 3] = ["a", "b", "c"];
const SHARED: &str = "s";

/// SplitMix64.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % limit as u64).unwrap()
    }

    fn one<'a, T: ?Sized>(&mut self, of: &[&'a T]) -> &'a T {
        of[self.below(of.len())]
    }
}

fn number(variable: &str) -> Option<u64> {
    let value = std::env::var_os(variable).and_then(|text| text.into_string().ok());
    value.filter(|text| !text.is_empty()).map(|text| text.parse().unwrap())
}

fn cpus(list: &str) -> CpuSet {
    CpuSet::parse_kernel_list(list).unwrap()
}

struct Host<'d> {
    daemon: &'d Libvirtd,
    dice: Dice,
    agent: Option<u32>,
    /// VMs that nobody has ended.
    running: BTreeSet<&'static str>,
    counts: BTreeMap<&'static str, usize>,
    refused: usize,
}

impl Host<'_> {
    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn start_agent(&mut self) {
        let start = format!("virt-pin agent </dev/null >>{AGENT_LOG} 2>&1 & echo $!");
        self.agent = Some(self.daemon.exec(&["bash", "-c", &start]).ok().trim().parse().unwrap());
    }

    /// Starts a VM; a refusal has to be one of ours for want of room.
    fn start(&mut self, name: &'static str) {
        let run = self.daemon.start_guest(name);
        if run.status.success() {
            self.running.insert(name);
            return;
        }
        let ours =
            ["cpu.placement.", "cpu.shared.no-cpus", "state.locked"].iter().any(|code| run.stderr.contains(code));
        assert!(ours, "{name}: {run:?}");
        self.refused += 1;
    }

    /// Ends one in some way and waits until libvirt has seen it.
    fn end(&mut self, name: &'static str, how: usize) {
        self.running.remove(name);
        if how == 0 {
            self.daemon.destroy(name);
        } else {
            self.daemon.kill_qemu(name);
        }
        self.daemon.wait_until("libvirt knows it as ended", |daemon| {
            !daemon.path(&format!("/run/libvirt/qemu/{name}.xml")).exists()
        });
    }

    fn some_running(&mut self) -> Option<&'static str> {
        let running: Vec<&'static str> = self.running.iter().copied().collect();
        (!running.is_empty()).then(|| self.dice.one(&running))
    }

    fn step(&mut self) {
        let daemon = self.daemon;
        match self.dice.below(16) {
            0..=5 => {
                let idle: Vec<&'static str> =
                    DEDICATED.into_iter().chain([SHARED]).filter(|name| !self.running.contains(name)).collect();
                if !idle.is_empty() {
                    let name = self.dice.one(&idle);
                    self.start(name);
                    self.count("start");
                }
            }
            6 | 7 => {
                if let Some(name) = self.some_running() {
                    self.end(name, 0);
                    self.count("destroy");
                }
            }
            8 => {
                if let Some(name) = self.some_running() {
                    self.end(name, 1);
                    self.count("kill of QEMU");
                }
            }
            9 => {
                daemon.kill_daemon();
                // A VM may end while nobody looks.
                if let Some(name) = self.some_running().filter(|_| self.dice.below(2) == 0) {
                    daemon.kill_qemu(name);
                    self.running.remove(name);
                }
                daemon.start_daemon();
                self.count("kill of libvirtd");
            }
            10 => {
                daemon.restart_daemon();
                self.count("restart of libvirtd");
            }
            11 => {
                if let Some(agent) = self.agent.take() {
                    daemon.signal(agent, "KILL");
                    daemon.wait_until("the agent is gone", |daemon| !daemon.runs(agent));
                }
                self.start_agent();
                self.count("kill of the agent");
            }
            12 | 13 => self.kill_a_hook(),
            14 => self.tear_a_file(),
            _ => {
                // One that has a CPU loses it, if nobody has the other.
                let dedicated: Vec<_> = DEDICATED.into_iter().filter(|name| self.running.contains(name)).collect();
                if let ([name], false) = (&dedicated[..], self.running.contains(SHARED)) {
                    let own = daemon.places(name).0[0].clone();
                    let left = if own == "0" { "1" } else { "0" };
                    daemon.pretend_online(left);
                    daemon.exec(&["virt-pin", "reconcile"]).ok();
                    assert_eq!(daemon.places(name).0, [left]);
                    daemon.no_longer_pretend();
                    daemon.exec(&["virt-pin", "reconcile"]).ok();
                    self.count("CPU offline");
                }
            }
        }
    }

    fn kill_a_hook(&mut self) {
        let more = [
            "lock.taken",
            "replace.create",
            "replace.sync",
            "replace.rename",
            "replace.done",
            "kernel.pool",
            "answered",
        ];
        let points: Vec<&str> = LIVE.iter().copied().chain(more).collect();
        let point = self.dice.one(&points);
        if let (Some(name), 0) = (self.some_running(), self.dice.below(2)) {
            self.daemon.crash_at("release", point);
            self.end(name, 0);
        } else {
            let idle: Vec<&'static str> = DEDICATED.into_iter().filter(|name| !self.running.contains(name)).collect();
            let Some(name) = (!idle.is_empty()).then(|| self.dice.one(&idle)) else { return };
            let event = self.dice.one(&["prepare", "started"]);
            self.daemon.crash_at(event, point);
            // Where the hook does not come by there it is not killed.
            let run = self.daemon.start_guest(name);
            if run.status.success() {
                self.running.insert(name);
            }
        }
        if self.daemon.was_met() {
            self.count("kill of a hook");
        }
        // What the release of one that was killed has left is found at the next.
        self.daemon.exec(&["virt-pin", "reconcile"]).ok();
    }

    fn tear_a_file(&mut self) {
        let file = self.dice.one(&["leases.json", "topology.json", "host.json"]);
        let path = format!("/run/virt-pin/{file}");
        let text = std::fs::read_to_string(self.daemon.path(&path)).unwrap_or_default();
        let torn = match self.dice.below(3) {
            0 => "",
            1 => "\0\u{fffd}{",
            _ => text.get(..text.len() / 2).unwrap_or_default(),
        };
        self.daemon.put(&path, 0o600, torn.as_bytes());
        // Nobody with a policy starts until it has been looked at, and nobody who runs is touched.
        if let (true, Some(name)) =
            (file == "leases.json", DEDICATED.iter().find(|name| !self.running.contains(**name)))
        {
            let said = self.daemon.start_guest(name).refused();
            assert!(said.contains("state.corrupt"), "{said}");
        }
        self.check_threads();
        self.daemon.exec(&["virt-pin", "reconcile"]).ok();
        self.count("torn file");
    }

    /// Where every thread of a VM may run: vCPUs and others. `None` while it is ending.
    fn places(&self, name: &str) -> (CpuSet, CpuSet) {
        let (vcpus, others) = self.daemon.places(name);
        let all =
            |lists: &mut dyn Iterator<Item = String>| lists.fold(CpuSet::new(), |all, list| all.union(&cpus(&list)));
        (all(&mut vcpus.into_iter()), all(&mut others.into_iter()))
    }

    /// No thread of one VM may run where a dedicated other has its vCPUs.
    fn check_threads(&self) {
        for name in &self.running {
            let pid = self.daemon.path(&format!("/run/libvirt/qemu/{name}.pid"));
            assert!(pid.exists() && self.daemon.runs(self.daemon.qemu(name)), "{name} has been ended by nobody of us");
        }
        let places: Vec<_> = self.running.iter().map(|name| (*name, self.places(name))).collect();
        for (name, (vcpus, _)) in places.iter().filter(|(name, _)| *name != SHARED) {
            assert_eq!(vcpus.len(), 1, "{name}: {vcpus}");
            for (other, (theirs, rest)) in places.iter().filter(|(other, _)| other != name) {
                let all = theirs.union(rest);
                assert!(vcpus.is_disjoint(&all), "{name} has CPU {vcpus}, and {other} may run on {all}");
            }
        }
    }

    /// The same, and that it is what the leases say: those of the VMs that run, and of nobody else.
    fn check(&self) {
        self.check_threads();
        let leases: serde_json::Value = match std::fs::read_to_string(self.daemon.path("/run/virt-pin/leases.json")) {
            Ok(text) => serde_json::from_str(&text).unwrap(),
            Err(_) => return,
        };
        let mut owners = BTreeSet::new();
        for lease in leases["leases"].as_array().unwrap() {
            let (name, cpu) = (lease["name"].as_str().unwrap(), lease["vcpus"][0].as_u64().unwrap());
            assert!(owners.insert(cpu), "CPU {cpu} has two owners: {leases}");
            if self.running.contains(name) {
                assert_eq!(self.places(name).0.to_string(), cpu.to_string(), "{name}: {leases}");
            }
        }
        for name in self.running.iter().filter(|name| **name != SHARED) {
            let has = leases["leases"].as_array().unwrap().iter().any(|lease| lease["name"] == **name);
            assert!(has, "{name} runs and has no lease: {leases}");
        }
    }
}

#[test]
fn soak() {
    let Some(daemon) = Libvirtd::start_killable("pinnable_cpus = \"0-1\"\n") else { return };
    let cycles = number("VIRT_PIN_SOAK_CYCLES").unwrap_or(8);
    let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let seed = number("VIRT_PIN_SOAK_SEED").unwrap_or(clock);
    eprintln!("\nsoak: SEED={seed} CYCLES={cycles}");
    let limit = number("VIRT_PIN_SOAK_SECONDS").map(Duration::from_secs);
    for name in DEDICATED {
        daemon.define(&small(name));
    }
    daemon.define(&Guest::new(SHARED));
    let mut host = Host {
        daemon: &daemon,
        dice: Dice(seed),
        agent: None,
        running: BTreeSet::new(),
        counts: BTreeMap::new(),
        refused: 0,
    };
    host.start_agent();
    let (begun, mut done) = (Instant::now(), 0);
    while done < cycles && limit.is_none_or(|limit| begun.elapsed() < limit) {
        host.step();
        host.check();
        done += 1;
    }
    // Everybody ends; nothing is left.
    for name in host.running.clone() {
        host.end(name, 0);
    }
    daemon.exec(&["virt-pin", "reconcile"]).ok();
    daemon.wait_for_no_lease();
    let pool = daemon.file("/sys/fs/cgroup/cpuset/machine/cpuset.cpus");
    assert_eq!(pool, daemon.file("/sys/fs/cgroup/cpuset/cpuset.cpus"));
    let left: Vec<_> = std::fs::read_dir(daemon.path("/run/virt-pin"))
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(!left.iter().any(|name| name.ends_with(".new") || name == "host.json"), "{left:?}");
    daemon.start_guest(SHARED).ok();
    daemon.assert_held_to(SHARED, "0-1");
    let agent = host.agent.unwrap();
    assert!(daemon.runs(agent), "the agent has ended: {}", daemon.file(AGENT_LOG));
    daemon.signal(agent, "TERM");
    daemon.wait_until("the agent has ended", |daemon| !daemon.runs(agent));
    let counts: Vec<String> = host.counts.iter().map(|(what, count)| format!("{count} {what}")).collect();
    eprintln!(
        "soak: SEED={seed}: {done} cycles in {} s: {}; {} starts refused for want of room; overlaps 0, leaks 0, VMs ended by us 0",
        begun.elapsed().as_secs(),
        counts.join(", "),
        host.refused
    );
}
