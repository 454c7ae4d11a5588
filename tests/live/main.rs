#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "integration tests"
)]
//! Real libvirtd, real QEMU: each test has a private machine with a daemon of its own.
//!
//! `machine` makes the private machine, `libvirtd` runs the daemon on it, `guest` writes domain XML, `needs` knows what
//! must be there. `leases` holds what virt-pin itself promises, `agent` what its agent does, `neighbours`, `tools` and `monitoring` what others do beside it; this file tests the test bed, with a stand-in for the hook.
//! Where a machine cannot run them they say so and pass; `VIRT_PIN_LIVE=required` makes them fail instead.

mod agent;
mod crash;
#[path = "../guest/mod.rs"]
mod guest;
mod leases;
mod libvirtd;
mod lifecycle;
mod machine;
mod monitoring;
mod needs;
mod neighbours;
#[path = "../points/mod.rs"]
mod points;
mod soak;
mod stand_in;
mod tools;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use guest::Guest;
use libvirtd::{Libvirtd, Options, PATIENCE};
use stand_in::StandIn;

#[test]
fn the_hook_sees_a_start_and_a_destroy() {
    let hook = StandIn::logging();
    let Some(daemon) = Libvirtd::start(&hook.options()) else { return };
    let guest = Guest::new("plain").vcpus(2).policy("policy='dedicated'").tuning("<iothreads>1</iothreads>");
    daemon.run(&guest);
    daemon.destroy("plain");
    assert_eq!(hook.events(&daemon, "plain"), ["prepare", "start", "started", "stopped", "release"]);
    let xml = hook.stdin(&daemon, "plain", "prepare");
    assert!(xml.contains("<domain type='qemu' id='1'>"), "{xml}");
    assert!(xml.contains(&guest.uuid()) && xml.contains("policy=\"dedicated\""), "{xml}");
}

#[test]
fn threads_are_where_the_xml_pins_them() {
    let Some(daemon) = Libvirtd::start(&Options::default()) else { return };
    let pins = "<iothreads>1</iothreads><cputune><vcpupin vcpu='0' cpuset='1'/><vcpupin vcpu='1' cpuset='0'/>\
                <emulatorpin cpuset='0'/><iothreadpin iothread='1' cpuset='1'/></cputune>";
    let topology = "<cpu><topology sockets='1' cores='2' threads='1'/></cpu>";
    daemon.run(&Guest::new("pinned").vcpus(2).tuning(pins).cpu(topology));
    let threads = daemon.threads("pinned");
    let place = |comm: &str| {
        let thread = threads.iter().find(|thread| thread.comm == comm).unwrap();
        (thread.cpus.as_str(), thread.cgroup.as_str())
    };
    assert_eq!(place("CPU 0/TCG"), ("1", "/machine/qemu-1-pinned.libvirt-qemu/vcpu0"));
    assert_eq!(place("CPU 1/TCG"), ("0", "/machine/qemu-1-pinned.libvirt-qemu/vcpu1"));
    assert_eq!(place("IO iothread1"), ("1", "/machine/qemu-1-pinned.libvirt-qemu/iothread1"));
    assert_eq!(place("qemu-system-x86"), ("0", "/machine/qemu-1-pinned.libvirt-qemu/emulator"));
    assert_eq!(threads[0].tid, daemon.qemu("pinned"));
}

#[test]
fn a_refusing_hook_is_heard_by_the_user() {
    let hook = StandIn::refusing("prepare", "no CPU for you");
    let Some(daemon) = Libvirtd::start(&hook.options()) else { return };
    daemon.define(&Guest::new("refused"));
    let complaint = daemon.start_guest("refused").refused();
    assert!(complaint.contains("prepare begin -) unexpected exit status 9: no CPU for you"), "{complaint}");
    assert_eq!(hook.events(&daemon, "refused"), ["prepare", "stopped", "release"]);
}

#[test]
fn a_guest_that_powers_itself_off_is_released() {
    let hook = StandIn::logging();
    let Some(daemon) = Libvirtd::start(&hook.options()) else { return };
    daemon.run(&Guest::new("short").powering_off());
    hook.wait_for_release(&daemon, "short");
    assert_eq!(daemon.virsh(&["domstate", "short", "--reason"]).ok().trim(), "shut off (shutdown)");
}

#[test]
fn a_crashed_guest_is_released() {
    let hook = StandIn::logging();
    let Some(daemon) = Libvirtd::start(&hook.options()) else { return };
    daemon.run(&Guest::new("victim"));
    daemon.kill_qemu("victim");
    hook.wait_for_release(&daemon, "victim");
    assert_eq!(daemon.virsh(&["domstate", "victim", "--reason"]).ok().trim(), "shut off (crashed)");
}

#[test]
fn a_start_that_fails_late_is_released() {
    let hook = StandIn::logging();
    let Some(daemon) = Libvirtd::start(&hook.options()) else { return };
    daemon.define(&Guest::new("diskless").without_its_disk());
    daemon.start_guest("diskless").refused();
    assert_eq!(hook.events(&daemon, "diskless"), ["prepare", "stopped", "release"]);
    daemon.define(&Guest::new("nowhere").tuning("<cputune><vcpupin vcpu='0' cpuset='900'/></cputune>"));
    daemon.start_guest("nowhere").refused();
    assert_eq!(hook.events(&daemon, "nowhere"), ["prepare", "start", "stopped", "release"]);
}

#[test]
fn a_hook_installed_later_is_found_by_a_reload() {
    let Some(daemon) = Libvirtd::start(&Options::default()) else { return };
    daemon.put("/etc/libvirt/hooks/qemu", 0o755, b"#!/bin/sh\nexit 1\n");
    daemon.run(&Guest::new("late"));
    daemon.destroy("late");
    daemon.reload_daemon();
    daemon.start_guest("late").refused();
}

#[test]
fn guests_outlive_their_daemon() {
    let hook = StandIn::logging();
    let Some(daemon) = Libvirtd::start(&hook.options()) else { return };
    daemon.run(&Guest::new("lasting"));
    let qemu = daemon.qemu("lasting");
    daemon.restart_daemon();
    daemon.wait_until("the guest is reconnected", |daemon| {
        hook.events(daemon, "lasting") == ["prepare", "start", "started", "reconnect"]
    });
    daemon.kill_daemon();
    daemon.signal(qemu, "KILL");
    daemon.start_daemon();
    hook.wait_for_release(&daemon, "lasting");
}

#[test]
fn the_files_of_this_build_are_on_the_machine_and_nowhere_else() {
    let before = ["/etc/virt-pin", "/usr/bin/virt-pin", "/etc/libvirt/hooks/qemu"].map(|path| Path::new(path).exists());
    let Some(daemon) = Libvirtd::start(&Options::virt_pin("pinnable_cpus = \"1\"\n")) else { return };
    assert_eq!(daemon.file("/etc/virt-pin/virt-pin.toml"), "pinnable_cpus = \"1\"\n");
    daemon.exec(&["virt-pin", "--version"]).ok();
    daemon.exec(&["test", "-x", "/etc/libvirt/hooks/qemu"]).ok();
    daemon.exec(&["touch", "/etc/libvirt/x", "/usr/bin/x", "/var/lib/x", "/run/x"]).ok();
    let after = ["/etc/virt-pin", "/usr/bin/virt-pin", "/etc/libvirt/hooks/qemu"].map(|path| Path::new(path).exists());
    assert_eq!(before, after);
    for path in ["/etc/libvirt/x", "/usr/bin/x", "/var/lib/x", "/run/x"] {
        assert!(!Path::new(path).exists(), "{path}");
    }
}

#[test]
fn nothing_survives_the_end_of_a_test() {
    let Some(daemon) = Libvirtd::start(&Options::default()) else { return };
    daemon.run(&Guest::new("orphan"));
    let (pids, cgroup) = (namespace(daemon.init()), daemon.cgroup().to_owned());
    assert!(inhabitants(&pids).len() >= 3, "PID 1, libvirtd and QEMU");
    drop(daemon);
    assert_eq!(inhabitants(&pids), Vec::<PathBuf>::new());
    assert!(!Path::new("/sys/fs/cgroup/cpuset").join(cgroup).exists());
    assert!(!fs::read_to_string("/proc/self/mountinfo").unwrap().contains("/run/bed"));
}

#[test]
fn nothing_survives_a_killed_test_process() {
    if !needs::met() {
        return;
    }
    let mut test = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", "--nocapture", "a_test_that_never_ends"])
        .env("VIRT_PIN_LIVE_VICTIM", "yes")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(test.stdout.take().unwrap()).lines();
    let pids = output.find_map(|line| Some(line.unwrap().strip_prefix("machine ")?.to_owned())).unwrap();
    assert!(inhabitants(&pids).len() >= 3, "PID 1, libvirtd and QEMU");
    test.kill().unwrap();
    test.wait().unwrap();
    // Cgroups cannot go by themselves, but a later machine sees to them.
    let theirs = format!("{}{}.", machine::PREFIX, test.id());
    let cgroups = || {
        machine::sweep();
        let all = fs::read_dir("/sys/fs/cgroup/cpuset").unwrap().flatten();
        all.filter(|cgroup| cgroup.file_name().to_str().unwrap().starts_with(&theirs)).count()
    };
    let killed = Instant::now();
    while !inhabitants(&pids).is_empty() || cgroups() != 0 {
        assert!(killed.elapsed() < PATIENCE, "{:?} are still there, and {} cgroups", inhabitants(&pids), cgroups());
    }
}

/// Not a test: the process that [`nothing_survives_a_killed_test_process`] kills.
#[test]
#[ignore = "only for the test that kills it"]
fn a_test_that_never_ends() {
    if std::env::var_os("VIRT_PIN_LIVE_VICTIM").is_none() {
        return;
    }
    let Some(daemon) = Libvirtd::start(&Options::default()) else { return };
    daemon.run(&Guest::new("orphan"));
    // On a line of its own, whatever the test runner has printed before.
    eprintln!();
    #[allow(clippy::print_stdout, reason = "read by the test that started this process")]
    {
        println!("\nmachine {}", namespace(daemon.init()));
    }
    loop {
        std::thread::park();
    }
}

/// The name of a process's PID namespace.
fn namespace(pid: u32) -> String {
    fs::read_link(format!("/proc/{pid}/ns/pid")).unwrap().to_str().unwrap().to_owned()
}

/// The processes of a PID namespace, as directories in `/proc`.
fn inhabitants(namespace: &str) -> Vec<PathBuf> {
    let processes = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    processes.filter(|process| fs::read_link(process.join("ns/pid")).is_ok_and(|n| n == Path::new(namespace))).collect()
}
