//! What people see: `docs/screens.md` shows what the command prints (`UPDATE=1` rewrites it), no line is wider than 80 columns
//! whatever the host, its leases and their names, and a terminal gets colours and progress, nobody else.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    clippy::cast_possible_truncation,
    reason = "integration tests, which rewrite what they expect"
)]

mod machine;
mod terminal;

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::process::Stdio;

use machine::{Machine, Shape, Vm, stat};
use nix::pty::openpty;
use terminal::on_a_terminal;

const SCREENS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/screens.md");
/// Two packages of eight cores of two threads; the first two cores of each are the host's.
const SHAPE: Shape = Shape(2, 8, 2);
const PINNABLE: &str = "2-7,10-15,18-23,26-31";

/// A machine, and what has to be held for its VMs to live.
struct Running {
    machine: Machine,
    alive: Vec<File>,
    _agent: UnixDatagram,
}

impl Running {
    /// An installed virt-pin, a daemon and an agent.
    fn new(shape: Shape, config: &str) -> Running {
        let machine = Machine::shaped(shape, "");
        machine.config(config);
        machine.cli(&["install"]).printed();
        machine.put("/usr/bin/virt-pin", "");
        fs::set_permissions(machine.path("/usr/bin/virt-pin"), fs::Permissions::from_mode(0o755)).unwrap();
        machine.put("/proc/812/comm", "libvirtd\n");
        machine.put("/proc/812/stat", &stat(812, 'S', 3000));
        machine.make_state_dir();
        let agent = UnixDatagram::bind(machine.path("/run/virt-pin/agent.sock")).unwrap();
        Running { machine, alive: Vec::new(), _agent: agent }
    }

    /// Starts a VM, its threads where its lease says.
    fn start(&mut self, vm: &Vm) {
        self.machine.prepare(vm);
        let lease = self.machine.json(&["lease", &vm.uuid]);
        let text = |name: &str| lease[name].as_str().unwrap_or("0").to_owned();
        let vcpus: Vec<Option<u64>> =
            lease["vcpus"].as_array().unwrap().iter().map(serde_json::Value::as_u64).collect();
        let pid = 4000 + 100 * vm.id.unwrap();
        let cpus: Vec<u64> = vcpus.iter().map(|cpu| cpu.unwrap_or_default()).collect();
        self.machine.qemu(vm, pid, &cpus, &text("emulator"));
        for (vcpu, _) in (0..).zip(&vcpus).filter(|(_, cpu)| cpu.is_none()) {
            self.machine.thread(pid, pid + 1 + vcpu, &format!("CPU {vcpu}/KVM"), &text("shared"));
        }
        self.machine.event(vm, "started begin").silent();
        self.alive.push(self.machine.alive(vm));
    }

    /// Starts a VM that is pinned by hand to this CPU.
    fn start_by_hand(&mut self, vm: &Vm, cpu: u64) {
        self.machine.event(vm, "prepare begin").silent();
        self.machine.qemu(vm, 4000 + 100 * vm.id.unwrap(), &[cpu], &cpu.to_string());
        self.machine.event(vm, "started begin").silent();
        self.alive.push(self.machine.alive(vm));
    }

    /// A day later, on a Debian host, for who looks at it: there is no kernel here that would make cgroups.
    fn as_debian(&self) {
        let machine = &self.machine;
        machine.put("/proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n");
        machine.put("/sys/fs/cgroup/cgroup.controllers", "cpuset cpu memory\n");
        machine.put("/sys/fs/cgroup/machine.slice/cpuset.cpus", "\n");
        machine.put("/sys/fs/cgroup/machine.slice/cpuset.cpus.exclusive", "\n");
        machine.put("/usr/bin/systemctl", "");
        machine.put("/usr/share/dbus-1/system-services/org.freedesktop.machine1.service", "");
        machine.put("/proc/interrupts", "CPU0 CPU1\n");
        fs::create_dir_all(machine.path("/run/systemd/system")).unwrap();
        machine.put("/proc/uptime", "94000.00 1.00\n");
    }

    /// Ends a VM.
    fn stop(&mut self, vm: &Vm) {
        self.machine.gone(4000 + 100 * vm.id.unwrap());
        fs::remove_file(self.machine.path(&format!("/run/libvirt/qemu/{}.xml", vm.name))).unwrap();
        self.machine.event(vm, "release end").silent();
    }
}

/// The host of `docs/screens.md`.
fn screens() -> Running {
    let config = format!(
        "pinnable_cpus = \"{PINNABLE}\"\n\n[[domain]]\nmatch = \"ci-*\"\npolicy = \"dedicated\"\nthreads-per-core = 1\n"
    );
    let mut host = Running::new(SHAPE, &config);
    let near = |number, vcpus, name| Vm::new(number, vcpus).with("numa='single' memory='any'").named(name);
    let database = Vm::new(1, 6).with("numa='single' emulator='isolate'").named("database");
    let (before, web) = (near(2, 4, "before"), near(3, 4, "web"));
    let ci = Vm::new(4, 2).without_policy().named("ci-17");
    let by_hand = Vm::new(5, 1).without_policy().pinned(&[15]).named("by-hand");
    for vm in [&database, &before, &web, &ci] {
        host.start(vm);
    }
    host.start_by_hand(&by_hand, 15);
    host.stop(&before);
    let (analytics, report) = (near(6, 6, "analytics"), near(7, 2, "report"));
    for (vm, autostart) in [(&database, true), (&web, false), (&ci, false), (&analytics, false), (&report, false)] {
        host.machine.define(vm, autostart);
    }
    host.as_debian();
    host
}

/// What the command says to a terminal without colours, as on the machine itself.
fn shown(machine: &Machine, arguments: &[&str]) -> String {
    let mut command = machine.cli_command(arguments);
    command.env("NO_COLOR", "1");
    on_a_terminal(command).replace(&*machine.root().to_string_lossy(), "")
}

#[test]
fn the_screens_are_what_the_command_prints() {
    let host = screens();
    let found = fs::read_to_string(SCREENS).unwrap();
    let mut blocks = found.split("```console\n# virt-pin ");
    let mut expected = blocks.next().unwrap().to_owned();
    let mut verbs = 0;
    for block in blocks {
        let (block, after) = block.split_once("```").unwrap();
        let (command, _) = block.split_once('\n').unwrap();
        let text = shown(&host.machine, &command.split(' ').collect::<Vec<_>>());
        expected += &format!("```console\n# virt-pin {command}\n{text}```{after}");
        verbs += 1;
    }
    assert!(verbs >= 10, "{verbs}");
    if std::env::var_os("UPDATE").is_some() {
        fs::write(SCREENS, &expected).unwrap();
    } else {
        assert!(found == expected, "{SCREENS} is not up to date: run UPDATE=1 cargo test --test screens");
    }
}

/// The lines that are wider than 80 columns.
fn wide(text: &str) -> Vec<&str> {
    text.lines().filter(|line| line.chars().count() > 80 || line.ends_with(' ')).collect()
}

/// What the command shows, which is something and fits; its error as well, where it has one.
#[track_caller]
fn fits(machine: &Machine, arguments: &[&str]) -> String {
    let text = shown(machine, arguments);
    assert!(!text.is_empty() && !text.contains("panicked"), "virt-pin {arguments:?}: {text}");
    assert_eq!(wide(&text), [""; 0], "virt-pin {arguments:?}:\n{text}");
    text
}

/// Everything that is a screen, on this machine; `names` are those of its VMs.
fn all_fit(machine: &Machine, names: &[&str]) {
    for arguments in [
        &["list"][..],
        &["capacity"],
        &["capacity", "--llc", "--for", "2x2"],
        &["map"],
        &["topology"],
        &["suggest"],
        &["check"],
        &["repack", "--dry-run"],
        &["repack", "--dry-run", "--for", "1x1"],
        &["repack", "--dry-run", "--for", "900x1"],
        &["reconcile"],
        &["sync", "nobody"],
    ] {
        fits(machine, arguments);
    }
    for name in names {
        for arguments in [&["lease", name][..], &["explain", name], &["map", "--for", name]] {
            fits(machine, arguments);
        }
    }
}

#[test]
fn every_screen_of_a_small_host_fits() {
    let host = screens();
    all_fit(&host.machine, &["database", "web", "ci-17", "by-hand", "analytics", "report", "nobody"]);
    // Where nothing is, something is said all the same.
    let bare = Machine::new("");
    all_fit(&bare, &["nobody"]);
    bare.config("pinnable_cpus = 2\n");
    all_fit(&bare, &["nobody"]);
}

/// 512 CPUs, of which every other core may be handed out; names as long as a file's may be, and in the way.
#[test]
fn every_screen_of_a_large_host_fits() {
    let pinnable = "2-255:1/2,258-511:1/2";
    let mut large = Running::new(Shape(2, 128, 2), &format!("pinnable_cpus = \"{pinnable}\"\n"));
    let names = [
        "n".repeat(200),
        "a name of many words ".repeat(9),
        "x".repeat(60),
        "\u{e9}\u{4e2d} ".repeat(20) + ".",
        "db".to_owned(),
    ];
    let policies = [
        "threads-per-core='1' emulator='isolate' iothreads='isolate'",
        "numa='spread' dedicated-vcpus='0-31'",
        "cores='thread' numa='any' cache='any'",
        "numa='single' memory='any'",
        "cache='single' memory='any'",
    ];
    for (number, (name, policy)) in (1..).zip(names.iter().zip(policies)) {
        let vm = Vm::new(number, 40).with(policy).named(name);
        large.start(&vm);
        large.machine.define(&vm, false);
    }
    large.start_by_hand(&Vm::new(8, 1).without_policy().pinned(&[254]).named(&"by-hand".repeat(9)), 254);
    let refused = Vm::new(9, 900).named(&"refused".repeat(20));
    let degraded = Vm::new(10, 400).with("fallback='shared'").named(&"degraded".repeat(20));
    large.machine.define(&refused, true);
    large.machine.define(&degraded, true);
    large.start(&degraded);
    large.as_debian();
    let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
    names.extend([&*refused.name, &degraded.name]);
    all_fit(&large.machine, &names);
    // CPUs are told whole, however many.
    let list: String = large.machine.cli(&["list"]).printed().split_whitespace().collect();
    let view = large.machine.json(&["list"]);
    for lease in view["leases"].as_array().unwrap() {
        let cpus = lease["cpus"].as_str().unwrap();
        assert!(list.contains(cpus), "{cpus} is not in {list}");
    }
    // And a CPU that has gone is told beside them.
    large.machine.put("/sys/devices/system/cpu/online", "0-1,3-511\n");
    all_fit(&large.machine, &names);
}

/// The hosts and the VMs of the documents, each VM on each host.
#[test]
fn every_screen_of_described_hosts_fits() {
    let machine = Machine::new("");
    let files = |dir: &str, kind: &str| -> Vec<String> {
        let dir = format!("{}/{dir}", env!("CARGO_MANIFEST_DIR"));
        let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        let paths = paths.filter(|path| path.extension().is_some_and(|extension| extension == kind));
        paths.map(|path| path.to_str().unwrap().to_owned()).collect()
    };
    let (hosts, domains) = (files("tests/hosts", "host"), files("docs/cookbook", "xml"));
    assert!(hosts.len() > 10 && domains.len() > 5, "{hosts:?} {domains:?}");
    let events = format!("{}/docs/simulate.jsonl", env!("CARGO_MANIFEST_DIR"));
    for host in &hosts {
        let on = |arguments: &[&str]| fits(&machine, &[&["--host", host, "--pinnable", "1-63"], arguments].concat());
        for arguments in [
            &["capacity", "--llc"][..],
            &["map"],
            &["topology"],
            &["suggest"],
            &["check"],
            &["simulate", "--table", "--moves", "--events", &events],
        ] {
            on(arguments);
        }
        for domain in &domains {
            on(&["explain", domain]);
        }
    }
    let help = fits(&machine, &["--help"]);
    let verbs = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    for verb in verbs.filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).filter(|verb| !verb.is_empty()) {
        fits(&machine, &["help", verb]);
    }
}

#[test]
fn colours_are_for_terminals_that_want_them() {
    let host = screens();
    let run = |verb: &str, name: &str, value: &str| {
        let mut command = host.machine.cli_command(&[verb]);
        command.env(name, value);
        command
    };
    for verb in ["map", "check"] {
        let plain = host.machine.cli(&[verb]).printed();
        let coloured = on_a_terminal(run(verb, "NO_COLOR", ""));
        assert!(coloured.contains("\u{1b}[") && !plain.contains('\u{1b}'), "{coloured}");
        assert_eq!(without_colours(&coloured), plain);
        assert_eq!(on_a_terminal(run(verb, "NO_COLOR", "1")), plain);
        assert_eq!(machine::Run::of(run(verb, "TERM", "xterm"), b"").printed(), plain);
    }
}

fn without_colours(text: &str) -> String {
    let pieces = text.split('\u{1b}').enumerate();
    pieces.map(|(at, piece)| if at == 0 { piece } else { piece.split_once('m').unwrap().1 }).collect()
}

/// A stream of events that goes on: its answers go to a file, how far it is to the terminal, in one line that goes again.
#[test]
fn progress_is_for_a_terminal_that_shows_nothing_else() {
    let machine = Machine::new("");
    let event = |number: u32| match number % 2 {
        0 => format!(
            "{{\"op\":\"start\",\"id\":\"vm\",\"vcpus\":{},\"policy\":{{\"numa\":\"single\"}}}}\n",
            32 + number % 64
        ),
        _ => "{\"op\":\"stop\",\"id\":\"vm\"}\n".to_owned(),
    };
    machine.put("/events.jsonl", &(0..4000).map(event).collect::<String>());
    let file = machine.path("/events.jsonl").to_str().unwrap().to_owned();
    let arguments = ["simulate", "--host-shape", "2s128c2t,llc=32", "--events", &file];
    let terminal = openpty(None, None).unwrap();
    let mut command = machine.cli_command(&arguments);
    command.env("TERM", "xterm").stdout(Stdio::piped()).stderr(Stdio::from(terminal.slave));
    let mut child = command.spawn().unwrap();
    drop(command);
    let reader = std::thread::spawn(move || {
        let mut said = Vec::new();
        let _ = File::from(terminal.master).read_to_end(&mut said);
        String::from_utf8(said).unwrap()
    });
    let mut answers = String::new();
    child.stdout.take().unwrap().read_to_string(&mut answers).unwrap();
    assert!(child.wait().unwrap().success());
    let said = reader.join().unwrap();
    assert_eq!(answers.lines().count(), 4001);
    assert!(said.contains(" events, ") && said.contains("% of ") && !said.contains('\n'), "{said:?}");
    assert!(said.starts_with('\r') && said.ends_with("\r\u{1b}[K"), "{said:?}");
    let lines = said.split('\r').map(|line| line.trim_end_matches("\u{1b}[K"));
    assert!(lines.clone().all(|line| line.chars().count() < 80), "{said:?}");
    // With nobody at a terminal, nothing is said, and the answers are the same.
    assert_eq!(machine.cli(&arguments).printed(), answers);
}
