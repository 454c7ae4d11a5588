//! Attacks: names, documents, files, environments and descriptors that somebody chose to do harm, on a machine in a temporary
//! directory. `docs/security.md` says who could. `hook.rs` has what merely goes wrong.
//!
//! What is promised of every run is checked by `Run::of`: no panic, no fault, no signal. Here beside it: an end in time, no file
//! written or changed that is not ours, and no control character on a terminal or in a log.
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

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use machine::{Machine, Run, Vm, pins};
use virt_pin::error::Code;

const EVENTS: [&str; 7] = [
    "prepare begin",
    "started begin",
    "release end shutdown",
    "migrate begin",
    "restore begin",
    "reconnect begin",
    "stopped end",
];

/// Commands that look at the machine, and those that change nothing of it but the state. None of them asks libvirt here.
const COMMANDS: [&[&str]; 4] = [&["gather", "--state"], &["check"], &["explain", "vm9"], &["reconcile"]];

/// How long anything may take: far longer than it does, for machines under load, and no wait without end.
const PATIENCE: Duration = Duration::from_secs(20);

/// A machine with a lease of `vm9`, which has no QEMU yet; VMs are confined by drop-ins for their scopes.
fn machine() -> Machine {
    let machine = Machine::new("2-3,10-11");
    machine.put("/proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n");
    machine.put("/sys/fs/cgroup/cgroup.controllers", "cpuset cpu memory\n");
    machine.put("/usr/share/dbus-1/system-services/org.freedesktop.machine1.service", "");
    fs::create_dir_all(machine.path("/run/systemd/system")).unwrap();
    machine.define(&Vm::new(9, 2), true);
    machine.prepare(&Vm::new(9, 2));
    machine
}

/// The run ended in time, and nothing of it would do harm on a terminal.
#[track_caller]
fn harmless(start: Instant, run: &Run, what: &str) {
    assert!(start.elapsed() < PATIENCE, "{what}: {:?}", start.elapsed());
    for text in [&run.stdout, &run.stderr] {
        let control = text.chars().find(|c| c.is_control() && *c != '\n' && *c != '\t');
        assert_eq!(control, None, "{what}: {text:?}");
    }
}

/// The events of a VM and the commands, one after another.
#[track_caller]
fn everything_ends(machine: &Machine, vm: &Vm, what: &str) {
    for event in EVENTS {
        let start = Instant::now();
        harmless(start, &machine.event(vm, event), &format!("{what}: {event}"));
    }
    for command in COMMANDS {
        let start = Instant::now();
        harmless(start, &machine.cli(command), &format!("{what}: {command:?}"));
    }
}

/// Every file that is read or written, by whoever runs as root or as libvirt.
const FILES: [&str; 17] = [
    "/run/virt-pin/lock",
    "/run/virt-pin/leases.json",
    "/run/virt-pin/leases.json.new",
    "/run/virt-pin/host.json",
    "/run/virt-pin/topology.json",
    "/run/virt-pin/agent.sock",
    "/etc/virt-pin/virt-pin.toml",
    "/etc/virt-pin/virt-pin.toml.d/50-a.toml",
    "/etc/libvirt/qemu/vm9.xml",
    "/etc/libvirt/qemu/autostart/vm9.xml",
    "/etc/libvirt/hooks/qemu.d/10-virt-pin",
    "/etc/libvirt/hooks/qemu",
    "/run/libvirt/qemu/vm9.xml",
    "/run/libvirt/qemu/vm9.pid",
    "/proc/uptime",
    "/sys/devices/system/cpu/online",
    "/run/systemd/system",
];

/// Puts something where a file should be.
type Put<'a> = &'a dyn Fn(&Machine, &PathBuf);

#[test]
fn something_else_in_the_place_of_each_file() {
    std::thread::scope(|scope| {
        for path in FILES {
            scope.spawn(move || {
                let kinds: [(&str, Put<'_>); 3] = [
                    ("a pipe", &|_, file| nix::unistd::mkfifo(file, nix::sys::stat::Mode::S_IRWXU).unwrap()),
                    ("a directory", &|_, file| fs::create_dir(file).unwrap()),
                    ("a link to somebody's file", &|machine, file| symlink(machine.path("/victim"), file).unwrap()),
                ];
                for (kind, put) in kinds {
                    let machine = machine();
                    machine.put("/victim", "precious\n");
                    let file = machine.path(path);
                    fs::create_dir_all(file.parent().unwrap()).unwrap();
                    let _ = fs::remove_file(&file).or_else(|_| fs::remove_dir_all(&file));
                    put(&machine, &file);
                    everything_ends(&machine, &Vm::new(9, 2), &format!("{kind} as {path}"));
                    assert_eq!(machine.read("/victim"), "precious\n", "{kind} as {path}");
                    assert!(!machine.path("/victim.new").exists(), "{kind} as {path}");
                }
            });
        }
    });
}

/// Names that libvirt takes (it refuses "/" and line ends, which are here all the same) reach nobody's file and no terminal.
#[test]
fn names_stay_names() {
    let long = "n".repeat(4096);
    let names = [
        "..",
        "../../../../etc/cron.d/x",
        "/etc/passwd",
        "-n",
        "--help",
        "a\nb\n\tvirt-pin: error[x]: forged",
        "\u{1b}[2J\u{1b}]0;title\u{7}",
        "\u{202e}txt.exe",
        "%s%n%x",
        "$(reboot)`reboot`;reboot",
        "a b\u{a0}c",
        &long,
    ];
    for name in names {
        let machine = machine();
        machine.put("/etc/cron.d/keep", "");
        let before = machine.everything();
        let vm = Vm::new(1, 2).named(name);
        // XML cannot write some of them; then the document is refused.
        for event in ["prepare begin", "started begin", "reconnect begin", "release end shutdown"] {
            let start = Instant::now();
            let run = machine.hook(&["x", event.split(' ').next().unwrap(), "begin", "-"], vm.xml());
            let text = Run { stdout: String::new(), ..run };
            harmless(start, &text, name);
            assert!(text.stderr.lines().skip(1).all(|line| line.starts_with("  ")), "forged: {}", text.stderr);
            for command in [&["list"][..], &["check"], &["--json", "list"], &["lease", "--", name]] {
                harmless(start, &machine.cli(command), name);
            }
        }
        for path in machine.everything().keys().filter(|path| !before.contains_key(*path)) {
            let path = path.strip_prefix(machine.root()).unwrap();
            let ours = ["run/virt-pin", "run/systemd/system"].iter().any(|ours| path.starts_with(ours));
            assert!(ours, "{name:?} has made {}", path.display());
        }
    }
}

/// A partition is part of a path below the mount point of the cgroups, and nowhere else.
#[test]
fn partitions_stay_below_the_cgroups() {
    let deep = "/a".repeat(5000);
    for partition in ["/../../../../tmp", "relative", "/machine/../../../x", "/machine/./x", "//", "/a\nb", &deep] {
        let machine = machine();
        machine.put("/proc/mounts", "cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n");
        machine.put("/sys/fs/cgroup/cpuset/cpuset.effective_cpus", "0-15\n");
        let before = machine.everything();
        let vm = Vm::new(1, 2).body(&format!("<resource><partition>{partition}</partition></resource>"));
        for event in ["prepare begin", "started begin", "release end shutdown"] {
            let start = Instant::now();
            harmless(start, &Run { stdout: String::new(), ..machine.event(&vm, event) }, partition);
        }
        for path in machine.everything().keys().filter(|path| !before.contains_key(*path)) {
            let path = path.strip_prefix(machine.root()).unwrap();
            let ours = ["run/virt-pin", "sys/fs/cgroup/cpuset"].iter().any(|ours| path.starts_with(ours));
            assert!(ours, "{partition:?} has made {}", path.display());
        }
    }
}

#[test]
fn absurd_numbers_are_refused_in_time() {
    let machine = machine();
    let iothreadids: String = (1..100_000).map(|id| format!("<iothread id='{id}'/>")).collect();
    let plain = || Vm::new(1, 2);
    let pins: String = (0..100_000).map(|vcpu| format!("<vcpupin vcpu='{vcpu}' cpuset='0-8191'/>")).collect();
    let cells: String = (0..100_000).map(|id| format!("<cell id='{id}' memory='1'/>")).collect();
    let vms = [
        plain().vcpu("<vcpu>4294967295</vcpu>"),
        plain().vcpu("<vcpu>65535</vcpu>"),
        plain().vcpu("<vcpu>16384</vcpu>"),
        plain().vcpu("<vcpu current='1'>8192</vcpu>"),
        plain().vcpu("<vcpu cpuset='0-4294967295'>2</vcpu>"),
        plain().body("<iothreads>4294967295</iothreads>"),
        plain().body(&format!("<iothreads>9</iothreads><iothreadids>{iothreadids}</iothreadids>")),
        plain().body(&format!("<cputune>{pins}</cputune>")),
        plain().body(&format!("<cpu><numa>{cells}</numa></cpu>")),
        plain().body("<cpu><topology sockets='65535' dies='65535' cores='65535' threads='65535'/></cpu>"),
        plain().memory_kib(u64::MAX),
        plain().with("cpus='0-99999999'"),
        plain().with("nodes='0-4294967295'"),
        plain().with("dedicated-vcpus='0-4294967295'"),
        plain().with("threads-per-core='18446744073709551616'"),
        plain().with(&format!("core-sched='{}'", "t".repeat(1 << 20))),
        plain().with(&format!("cpus='{}'", "1,".repeat(1 << 20))),
    ];
    const GRANTED: [usize; 2] = [8, 9];
    let leases = machine.leases();
    for (number, vm) in vms.iter().enumerate() {
        let start = Instant::now();
        let run = machine.event(vm, "prepare begin");
        harmless(start, &run, &format!("case {number}"));
        if GRANTED.contains(&number) {
            // What is libvirt's to refuse, and a topology that is replaced.
            machine.event(vm, "release end shutdown").silent();
            continue;
        }
        assert!(run.code != Some(0), "case {number} was granted: {}", run.stdout);
        assert!(run.stderr.len() < 16 << 10, "case {number}: {} bytes of error", run.stderr.len());
        assert_eq!(machine.leases(), leases, "case {number}");
    }
}

/// Who may change a running VM's metadata must not make the hook of anybody wait.
#[test]
fn floods_in_libvirts_own_files() {
    let attributes: String = (0..150_000).map(|number| format!("a{number}='' ")).collect();
    let deep = format!("{}{}", "<a>".repeat(100_000), "</a>".repeat(100_000));
    for flood in [format!("<x {attributes}/>"), deep] {
        let machine = machine();
        let (vm, evil) = (Vm::new(9, 2), Vm::new(1, 1).without_policy());
        machine.qemu(&evil, 710, &[0], "0-15");
        machine.qemu(&vm, 700, &[3, 11], "0-1,4-9,12-15");
        let _alive = [machine.alive(&evil), machine.alive(&vm)];
        for name in ["vm1", "vm9"] {
            let path = format!("/run/libvirt/qemu/{name}.xml");
            let status = machine.read(&path);
            let flooded = status.replace("</domain>", &format!("<metadata>{flood}</metadata></domain>"));
            assert!(flooded.len() > status.len());
            machine.put(&path, &flooded);
        }
        machine
            .put("/etc/libvirt/qemu/flood.xml", &format!("<domain xmlns:p='urn:virt-pin:domain:1'>{flood}</domain>"));
        everything_ends(&machine, &vm, "a flood");
        for event in ["prepare begin", "release end shutdown"] {
            let start = Instant::now();
            harmless(start, &machine.event(&Vm::new(2, 2), event), "a flood beside");
        }
    }
}

/// What a crowd of definitions costs the start of another VM.
#[test]
fn a_crowd_of_definitions() {
    let machine = Machine::new("1-7,9-15");
    const MANY: u32 = 2000;
    for number in 100..100 + MANY {
        machine.define(&Vm::new(number, 2 + number % 6), true);
    }
    let start = Instant::now();
    let run = machine.event(&Vm::new(1, 2), "prepare begin");
    harmless(start, &Run { stdout: String::new(), ..run }, "a crowd");
    eprintln!("beside {MANY} autostart definitions a start took {:?}", start.elapsed());
}

#[test]
fn variables_of_somebody_elses_choice() {
    for (name, value) in [
        ("VIRT_PIN_CRASH_AT", "shrunk"),
        ("VIRT_PIN_ROOT", "relative/../../nowhere"),
        ("VIRT_PIN_ROOT", "/nonexistent\n\u{1b}[2J"),
        ("RUST_BACKTRACE", "full"),
        ("RUST_LOG", "trace"),
        ("NOTIFY_SOCKET", "/etc/passwd"),
        ("TERM", "\u{1b}[2J"),
        ("PATH", "/nonexistent"),
        ("LC_ALL", "\u{1b}"),
        ("COLUMNS", "18446744073709551617"),
        ("TMPDIR", "/nonexistent"),
    ] {
        let machine = machine();
        let vm = Vm::new(1, 2);
        let start = Instant::now();
        let mut hook = machine.hook_command(&["vm1", "release", "end", "-"]);
        hook.env(name, value);
        harmless(start, &Run::of(hook, vm.xml().as_bytes()), name);
        for command in [&["list"][..], &["check"], &["map"]] {
            let mut cli = machine.cli_command(command);
            cli.env(name, value);
            harmless(start, &Run::of(cli, b""), name);
        }
    }
}

#[test]
fn arguments_that_are_no_text() {
    let machine = machine();
    for bytes in [&b"\xff\xfe"[..], b"\x1b[2J", b"-\xff", b"--host=\xff", b"lease\n", &[b'x'; 100_000]] {
        for before in [&[][..], &["lease"], &["explain"], &["gather"], &["--host"], &["--pinnable"], &["transform"]] {
            let start = Instant::now();
            let mut command = machine.cli_command(before);
            command.arg(OsStr::from_bytes(bytes)).current_dir(machine.root());
            let run = Run::of(command, b"");
            harmless(start, &run, &format!("{before:?} {:?}", String::from_utf8_lossy(&bytes[..bytes.len().min(9)])));
        }
    }
}

#[test]
fn commands_with_closed_descriptors() {
    let machine = machine();
    machine.put("/victim", "precious\n");
    for redirect in ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full", ">/dev/full 2>/dev/full"] {
        for arguments in [&["list"][..], &["check"], &["lease", "nobody"], &["reconcile"], &["agent", "--once"]] {
            let start = Instant::now();
            let mut command = Command::new("sh");
            command.args(["-c", &format!("exec \"$0\" \"$@\" {redirect}")]).arg(env!("CARGO_BIN_EXE_virt-pin"));
            command.args(arguments).env("VIRT_PIN_ROOT", machine.root());
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
            harmless(start, &Run::of(command, b""), &format!("{arguments:?} {redirect}"));
        }
    }
    assert_eq!(machine.leased().len(), 1, "reconcile with nothing to write to has ended a lease");
}

/// The agent's socket is root's, and even so: what is no report is no report.
#[test]
fn datagrams_that_are_no_reports() {
    let machine = machine();
    let file = machine.path("/metrics.prom");
    let mut command = machine.cli_command(&["agent", "--metrics"]);
    command.arg(&file).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut agent = command.spawn().unwrap();
    let path = machine.path("/run/virt-pin/agent.sock");
    let start = Instant::now();
    let socket = UnixDatagram::unbound().unwrap();
    while socket.connect(&path).is_err() {
        assert!(start.elapsed() < PATIENCE, "the agent does not come up");
        std::thread::sleep(Duration::from_millis(20));
    }
    let huge = vec![b'x'; 64 << 10];
    let long = format!("prepare {} refused 1", "c".repeat(300));
    for bytes in [&huge[..], b"", b"\0\0\0\0", b"\xff\xfe \xff \xff 1", long.as_bytes(), b"prepare a\"} - 1\nfoo 1"] {
        let _ = socket.send(bytes);
    }
    for number in 0..2000 {
        let _ = socket.send(format!("made-up-{} - - 1", "z".repeat(number % 200)).as_bytes());
    }
    // One that is a report counts all the same.
    machine.event(&Vm::new(1, 64), "prepare begin").refused(Code::Unsatisfiable);
    let counted =
        || fs::read_to_string(&file).is_ok_and(|text| text.contains("_total{code=\"cpu.placement.unsatisfiable\"} 1"));
    while !counted() {
        assert!(start.elapsed() < PATIENCE, "{:?}", fs::read_to_string(&file));
        std::thread::sleep(Duration::from_millis(20));
    }
    let text = fs::read_to_string(&file).unwrap();
    assert!(!text.contains("made-up") && !text.contains("foo") && text.lines().count() < 200, "{text}");
    assert_eq!(agent.try_wait().unwrap(), None, "the agent has ended");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(agent.id() as i32), nix::sys::signal::Signal::SIGTERM).unwrap();
    assert!(agent.wait().unwrap().success());
    assert_eq!(
        fs::metadata(&path).unwrap().permissions().mode()
            & 0o777
            & fs::metadata(path.parent().unwrap()).unwrap().permissions().mode(),
        0o700
    );
}

/// Whoever can make links beside the metrics file gets no other file written.
#[test]
fn metrics_through_links() {
    let machine = machine();
    machine.put("/victim", "precious\n");
    for name in ["m.prom", "m.prom.new"] {
        fs::create_dir_all(machine.path("/dir")).unwrap();
        symlink(machine.path("/victim"), machine.path(&format!("/dir/{name}"))).unwrap();
        let mut command = machine.cli_command(&["agent", "--once", "--metrics"]);
        command.arg(machine.path("/dir/m.prom"));
        Run::of(command, b"");
        assert_eq!(machine.read("/victim"), "precious\n");
        let made = fs::symlink_metadata(machine.path("/dir/m.prom")).unwrap();
        assert!(made.is_file() && made.permissions().mode() & 0o7777 == 0o644, "{name}: {made:?}");
        fs::remove_dir_all(machine.path("/dir")).unwrap();
    }
}

/// Nothing of ours may be written by others, whatever the umask says.
#[test]
fn modes_do_not_depend_on_the_umask() {
    let machine = Machine::new("2-3,10-11");
    let mut command = Command::new("sh");
    command.args([
        "-c",
        "umask 0; exec \"$@\"",
        "sh",
        env!("CARGO_BIN_EXE_virt-pin-hook"),
        "vm1",
        "prepare",
        "begin",
        "-",
    ]);
    command.env("VIRT_PIN_ROOT", machine.root()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    assert_eq!(pins(&Run::of(command, Vm::new(1, 2).xml().as_bytes()).printed()), [2, 10]);
    let mut found = 0;
    for entry in fs::read_dir(machine.path("/run/virt-pin")).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o7777, 0o600, "{:?}", entry.path());
        found += 1;
    }
    assert!(found >= 2, "{found}");
    let dir = fs::metadata(machine.path("/run/virt-pin")).unwrap();
    assert_eq!(dir.permissions().mode() & 0o7777, 0o700);
}
