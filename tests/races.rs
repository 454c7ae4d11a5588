//! Many at once on one root: hooks, commands and the agent. An observer that shares no code with them looks all the time whether a
//! CPU has two owners.
//!
//! `VIRT_PIN_RACE_SECONDS=60` races for so long (3 without). What was measured is printed; `docs/reliability.md` quotes it.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    clippy::cast_possible_truncation,
    reason = "integration tests"
)]

mod machine;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use machine::{Machine, Run, Shape, Vm};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use virt_pin::error::Code;
use virt_pin::host::root::Root;
use virt_pin::lock::leases::Leases;
use virt_pin::lock::{DEADLINE, StateLock};

const PROCESSES: u32 = 64;

/// One race at a time: they measure.
static TURN: Mutex<()> = Mutex::new(());

fn seconds() -> Duration {
    let seconds = std::env::var_os("VIRT_PIN_RACE_SECONDS").map(|text| text.to_str().unwrap().parse().unwrap());
    Duration::from_secs(seconds.unwrap_or(3))
}

/// A process of its own that reads `leases.json` over and over until the race is over.
struct Observer {
    child: Child,
}

impl Observer {
    fn of(machine: &Machine) -> Observer {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "--ignored", "--nocapture", "the_observer"]).env("VIRT_PIN_OBSERVED", machine.root());
        Observer { child: command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap() }
    }

    /// How often it has looked, and how many different files it has seen.
    fn end(self, machine: &Machine) -> (usize, usize) {
        machine.put("/over", "");
        let output = self.child.wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        let seen = said.lines().find_map(|line| line.strip_prefix("looked ")).unwrap();
        let (looks, files) = seen.split_once(' ').unwrap();
        (looks.parse().unwrap(), files.parse().unwrap())
    }
}

/// `0-3,8` as numbers, by nobody's code but its own.
fn numbers(list: &str) -> Vec<u32> {
    let ranges =
        list.split(',').filter(|range| !range.is_empty()).map(|range| range.split_once('-').unwrap_or((range, range)));
    ranges.flat_map(|(from, to)| from.parse::<u32>().unwrap()..=to.parse().unwrap()).collect()
}

/// Not a test: the process that looks.
#[test]
#[ignore = "only for the tests that are observed"]
fn the_observer() {
    let Some(root) = std::env::var_os("VIRT_PIN_OBSERVED") else { return };
    let root = std::path::PathBuf::from(root);
    let (mut looks, mut files, mut last) = (0_usize, 0_usize, String::new());
    while !root.join("over").exists() {
        let Ok(text) = fs::read_to_string(root.join("run/virt-pin/leases.json")) else { continue };
        looks += 1;
        if text == last {
            // It must not be in the way of those that it looks at.
            std::thread::sleep(Duration::from_micros(100));
            continue;
        }
        files += 1;
        let document: serde_json::Value =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("torn: {error}: {text:?}"));
        let mut owned = BTreeSet::new();
        for lease in document["leases"].as_array().unwrap() {
            let vcpus =
                lease["vcpus"].as_array().unwrap().iter().map(|cpu| u32::try_from(cpu.as_u64().unwrap()).unwrap());
            let more = ["parked", "extra"].iter().filter_map(|key| lease[*key].as_str()).flat_map(numbers);
            for cpu in vcpus.chain(more) {
                assert!(owned.insert(cpu), "CPU {cpu} has two owners: {text}");
            }
        }
        last = text;
    }
    eprintln!("\nlooked {looks} {files}");
}

/// Where half of all values lie below, and so on.
fn distribution(mut values: Vec<Duration>) -> String {
    values.sort();
    let at = |per_mille: usize| values[(values.len() - 1) * per_mille / 1000].as_secs_f64() * 1000.0;
    format!(
        "median {:.1} ms, 90 % {:.1}, 99 % {:.1}, 99.9 % {:.1}, most {:.1}",
        at(500),
        at(900),
        at(990),
        at(999),
        at(1000)
    )
}

#[test]
fn numbers_are_read() {
    assert_eq!(numbers("0-2,7"), [0, 1, 2, 7]);
    assert_eq!(numbers(""), [0_u32; 0]);
}

#[test]
fn sixty_four_hooks_the_agent_and_the_command() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // Room for about half of them.
    let machine = Machine::shaped(Shape(2, 16, 2), "2-63");
    fs::create_dir_all(machine.path("/run/libvirt/qemu")).unwrap();
    fs::create_dir_all(machine.path("/etc/libvirt/qemu/autostart")).unwrap();
    let observer = Observer::of(&machine);
    let mut agent = machine.cli_command(&["agent"]).stderr(Stdio::null()).spawn().unwrap();
    let end = Instant::now() + seconds();
    let running = || Instant::now() < end;
    let [granted, refused, locked, events, commands] = [const { AtomicUsize::new(0) }; 5];
    let add = |to: &AtomicUsize| {
        to.fetch_add(1, Ordering::Relaxed);
    };
    let agent_ended = std::thread::scope(|scope| {
        for number in 1..=PROCESSES {
            let (machine, granted, refused, locked, events) = (&machine, &granted, &refused, &locked, &events);
            scope.spawn(move || {
                let vm = Vm::new(number, 1 + number % 3).with("numa='any' memory='any'");
                let code = |code: Code| Some(i32::from(code.exit()));
                while running() {
                    add(events);
                    let run = machine.event(&vm, "prepare begin");
                    if run.code == code(Code::StateLocked) {
                        add(locked);
                    } else if run.code == Some(0) {
                        add(granted);
                        // QEMU lives for one event, and nobody takes its CPUs.
                        let cpus = machine.vcpus_of(&vm);
                        machine.qemu(&vm, 1000 * number, &cpus, "0-1");
                        let started = machine.event(&vm, "started begin");
                        assert!(started.code == Some(0), "{started:?}");
                        assert_eq!(machine.vcpus_of(&vm), cpus);
                        machine.gone(1000 * number);
                        fs::remove_file(machine.path(&format!("/run/libvirt/qemu/{}.xml", vm.name))).unwrap();
                        add(events);
                    } else {
                        assert!(
                            [Code::Shortage, Code::NeedsRepack].iter().any(|one| run.code == code(*one)),
                            "{run:?}"
                        );
                        add(refused);
                    }
                    // What was not released for want of the lock is void, as its QEMU is gone; or it is released again.
                    while machine.event(&vm, "release end shutdown").stderr.contains("state.locked") {
                        add(locked);
                    }
                    add(events);
                }
            });
        }
        for args in [&["list"][..], &["reconcile"], &["repack"], &["capacity"]] {
            let (machine, commands) = (&machine, &commands);
            scope.spawn(move || {
                while running() {
                    let run = machine.cli(args);
                    let fine = run.code == Some(0) || run.stderr.contains("state.locked");
                    assert!(fine, "{args:?}: {run:?}");
                    add(commands);
                }
            });
        }
        while running() {
            std::thread::sleep(Duration::from_millis(50));
        }
        agent.try_wait().unwrap()
    });
    assert_eq!(agent_ended, None, "the agent has ended");
    kill(Pid::from_raw(agent.id() as i32), Signal::SIGTERM).unwrap();
    assert!(agent.wait().unwrap().success());
    let (looks, files) = observer.end(&machine);
    assert_eq!(machine.leased(), Vec::<serde_json::Value>::new());
    let [granted, refused, locked, events, commands] =
        [granted, refused, locked, events, commands].map(AtomicUsize::into_inner);
    assert!(granted > 0 && commands > 0 && files > 1, "{granted} {commands} {files}");
    eprintln!(
        "{PROCESSES} processes, {} s: {events} events, {granted} leases granted, {refused} refused for want of room, {locked} \
         for want of the lock, {commands} commands; the observer looked {looks} times and saw {files} files, no CPU with two \
         owners, none torn",
        seconds().as_secs()
    );
}

#[test]
fn how_long_the_lock_is_waited_for() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let machine = Machine::bare();
    let root = Root::directory(machine.root());
    let end = Instant::now() + seconds();
    let (waits, refused) = (Mutex::new(Vec::new()), AtomicUsize::new(0));
    let turns: Vec<usize> = std::thread::scope(|scope| {
        let contenders: Vec<_> = (0..PROCESSES)
            .map(|_| {
                scope.spawn(|| {
                    let mut turns = 0;
                    while Instant::now() < end {
                        let start = Instant::now();
                        match StateLock::acquire(&root, DEADLINE) {
                            // As long as a hook has it.
                            Ok(mut state) => {
                                let waited = start.elapsed();
                                assert!(waited < DEADLINE + Duration::from_secs(1), "{waited:?}");
                                state.replace(&Leases::default()).unwrap();
                                std::thread::sleep(Duration::from_millis(1));
                                drop(state);
                                waits.lock().unwrap().push(waited);
                                turns += 1;
                                // A hook is a new process each time.
                                std::thread::sleep(Duration::from_millis(1));
                            }
                            Err(error) => {
                                assert_eq!(error.code, Code::StateLocked);
                                refused.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                    }
                    turns
                })
            })
            .collect();
        contenders.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let (least, most) = (turns.iter().min().unwrap(), turns.iter().max().unwrap());
    let waits = waits.into_inner().unwrap();
    let (count, refused) = (waits.len(), refused.into_inner());
    // Nobody starves.
    assert!(*least > 0 && refused * 100 <= count, "{turns:?}, {refused} refused");
    eprintln!(
        "{PROCESSES} contenders who want nothing but the lock, {} s: {count} turns, {least} to {most} each, {refused} refused; \
         waits: {}",
        seconds().as_secs(),
        distribution(waits)
    );
}

#[test]
fn a_holder_that_is_stopped_makes_nobody_wait_for_ever() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let machine = Machine::new("2-7,10-15");
    machine.prepare(&Vm::new(1, 2));
    let lock = machine.path("/run/virt-pin/lock");
    // A group of its own: the program and its child are stopped, and killed, together.
    let mut holder = Command::new("flock").arg(&lock).args(["sleep", "60"]).process_group(0).spawn().unwrap();
    let group = Pid::from_raw(-(holder.id() as i32));
    let root = Root::directory(machine.root());
    while StateLock::acquire(&root, Duration::ZERO).is_ok() {
        std::thread::sleep(Duration::from_millis(5));
    }
    kill(group, Signal::SIGSTOP).unwrap();
    let before = machine.everything();
    std::thread::scope(|scope| {
        for number in 2..10 {
            let machine = &machine;
            scope.spawn(move || {
                let start = Instant::now();
                machine.event(&Vm::new(number, 2), "prepare begin").refused(Code::StateLocked);
                let took = start.elapsed();
                assert!(took >= DEADLINE && took < DEADLINE + Duration::from_secs(2), "{took:?}");
            });
        }
    });
    // Who is killed while waiting leaves nothing.
    for number in 2..6 {
        let vm = Vm::new(number, 2);
        let passes = machine.path("/passes");
        let mut command = machine.hook_command(&[&vm.name, "prepare", "begin", "-"]);
        let mut child = command.env("VIRT_PIN_PASSES", &passes).spawn().unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), vm.xml().as_bytes()).unwrap();
        while !fs::read_to_string(&passes).unwrap_or_default().contains("lock.wait") {
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        fs::remove_file(&passes).unwrap();
    }
    assert!(machine.everything() == before);
    kill(group, Signal::SIGKILL).unwrap();
    holder.wait().unwrap();
    let run: Run = machine.event(&Vm::new(2, 2), "prepare begin");
    run.printed();
}
