#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "integration tests"
)]
//! virt-pin on whole hosts: emulated machines of chosen shapes with systemd, cgroup v2, machined, libvirt and QEMU.
//!
//! `image` builds the disk (by `image.sh`), `shape` says what the machine is, `vm` runs QEMU, `snapshot` boots it once, `host` is
//! a clone for a test, `cache` keeps what is slow, `wire` is how one talks with them, `needs` knows whether to run at all,
//! `transcript` records what documents show.
//! What virt-pin promises there: `leases`, `isolation`, `lifecycle`, `migration`, `relocate`, `agent`, `packages`; `proof` is what the kernel
//! (`trace`) has seen of it. This file tests the test bed. `make test-host` runs it; a plain `cargo test`
//! only says so.

mod agent;
mod apparmor;
mod cache;
#[path = "../guest/mod.rs"]
mod guest;
mod host;
mod image;
mod isolation;
mod leases;
mod lifecycle;
mod migration;
mod needs;
mod packages;
mod proof;
mod relocate;
mod shape;
mod snapshot;
mod trace;
mod transcript;
mod vm;
mod ways;
mod wire;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use host::Host;
use shape::Shape;

/// How many packages, nodes, cores and threads virt-pin sees.
#[track_caller]
fn counts(host: &Host) -> [usize; 4] {
    let topology: Value = serde_json::from_str(&host.exec(&["virt-pin", "--json", "topology"]).ok()).unwrap();
    ["package", "node", "core", "cpu"].map(|key| {
        let ids = topology["cpus"].as_array().unwrap().iter().map(|cpu| cpu[key].as_u64().unwrap());
        ids.collect::<BTreeSet<_>>().len()
    })
}

#[test]
fn a_host_is_what_it_is_meant_to_be() {
    let Some(host) = Host::with_virt_pin(Shape::default(), "pinnable_cpus = \"2-7,10-15\"\n") else { return };
    assert_eq!(counts(&host), [2, 2, 8, 16]);
    assert_eq!(
        host.sh("cd /sys/devices/system && cat cpu/cpu3/topology/thread_siblings_list node/node1/cpulist").ok(),
        "2-3\n8-15\n"
    );
    let check = host.exec(&["virt-pin", "check"]).ok();
    assert!(check.contains("cgroup v2 at /sys/fs/cgroup, with machined"), "{check}");
    assert!(check.contains("2-7,10-15") && !check.contains("FAIL"), "{check}");
    assert_eq!(host.exec(&["systemctl", "is-system-running"]).ok(), "running\n");
}

#[test]
fn another_shape_is_one_line() {
    let Some(host) = Host::with_virt_pin(Shape::new(1, 8, 1), "") else { return };
    assert_eq!(counts(&host), [1, 1, 8, 8]);
    drop(host);
    let Some(host) = Host::with_virt_pin(Shape::new(1, 6, 1).nodes(3), "") else { return };
    assert_eq!(counts(&host), [1, 3, 6, 6]);
}

#[test]
fn hosts_side_by_side_do_not_see_each_other() {
    let start = |name: &'static str| {
        move || {
            let host = Host::start(Shape::default())?;
            host.put("/run/name", 0o644, name.as_bytes());
            host.define(&guest::Guest::new(name));
            Some(host)
        }
    };
    // Each is started by a thread that ends before the test does.
    let [one, other] =
        ["one", "other"].map(|name| std::thread::spawn(start(name))).map(|thread| thread.join().unwrap());
    let (Some(one), Some(other)) = (one, other) else { return };
    for (host, name) in [(&one, "one"), (&other, "other")] {
        assert_eq!(host.file("/run/name"), name);
        assert_eq!(host.virsh(&["list", "--all", "--name"]).ok().trim(), name);
    }
    drop(one);
    assert_eq!(other.file("/run/name"), "other");
    drop(other);
    // What they wrote is gone with them.
    let Some(fresh) = Host::start(Shape::default()) else { return };
    assert_eq!(fresh.virsh(&["list", "--all", "--name"]).ok().trim(), "");
    fresh.exec(&["test", "!", "-e", "/run/name"]).ok();
}

#[test]
fn commands_and_files_come_through_whole() {
    let Some(host) = Host::start(Shape::default()) else { return };
    let output = host.sh("echo out; printf 'no \\303\\251nd' >&2; exit 3");
    assert_eq!((output.status, output.stdout.as_str(), output.stderr.as_str()), (3, "out\n", "no énd"));
    assert_eq!(host.sh("kill -KILL $$").status, 128 + 9);
    // Longer than the blocks it goes in, and no multiple of anything.
    let bytes: Vec<u8> = (0..300_001_u32).map(|at| at.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    host.put("/var/tmp/a/b", 0o640, &bytes);
    let sum = bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>();
    let script =
        "stat --format '%s %a' /var/tmp/a/b; od --address-radix n --format u1 --output-duplicates -w1 /var/tmp/a/b |
                  awk '{ sum += $1 } END { print sum }'";
    assert_eq!(host.sh(script).ok(), format!("300001 640\n{sum}\n"));
    // A shorter one afterwards is not followed by the rest of the longer.
    host.put("/var/tmp/a/b", 0o640, b"short");
    assert_eq!(host.file("/var/tmp/a/b"), "short");
}

#[test]
fn a_clone_answers_in_no_time() {
    let Some(host) = Host::start(Shape::default()) else { return };
    drop(host);
    let mut times: Vec<f64> = (0..5)
        .map(|_| {
            let began = Instant::now();
            Host::start(Shape::default()).unwrap().exec(&["true"]).ok();
            began.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    needs::say(&format!("from nothing to the first command, started and ended, five times: {times:.2?} s"));
    assert!(times[2] < 10.0, "{times:?}");
}

#[test]
fn nothing_survives_the_end_of_a_test() {
    let Some(host) = Host::start(Shape::default()) else { return };
    let dir = host.dir().to_owned();
    assert!(processes(&dir) >= 3, "unshare, its PID 1, QEMU");
    drop(host);
    assert_eq!((processes(&dir), dir.exists()), (0, false));
}

#[test]
fn nothing_survives_a_killed_test_process() {
    if !needs::met() {
        return;
    }
    let mut test = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", "--nocapture", "a_test_that_never_ends"])
        .env("VIRT_PIN_HOSTVM_VICTIM", "yes")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(test.stdout.take().unwrap()).lines();
    let dir = output.find_map(|line| Some(line.unwrap().strip_prefix("host ")?.to_owned()));
    let killed = Instant::now();
    test.kill().unwrap();
    test.wait().unwrap();
    let Some(dir) = dir else { return };
    while processes(Path::new(&dir)) > 0 || Path::new(&dir).exists() {
        assert!(killed.elapsed() < Duration::from_secs(20), "{} processes of {dir}", processes(Path::new(&dir)));
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Not a test: the process that [`nothing_survives_a_killed_test_process`] kills.
#[test]
#[ignore = "only for the test that kills it"]
fn a_test_that_never_ends() {
    if std::env::var_os("VIRT_PIN_HOSTVM_VICTIM").is_none() {
        return;
    }
    let Some(host) = Host::start(Shape::default()) else { return };
    #[allow(clippy::print_stdout, reason = "read by the test that started this process")]
    {
        println!("\nhost {}", host.dir().display());
    }
    loop {
        std::thread::park();
    }
}

/// How many processes have a machine's directory on their command line.
fn processes(dir: &Path) -> usize {
    let lines =
        fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    let dir = dir.as_os_str().as_bytes();
    lines.filter(|line| line.windows(dir.len()).any(|part| part == dir)).count()
}
