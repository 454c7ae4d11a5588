//! Killed at every failpoint, and every write failing at each: what the next event finds, and that nothing is left of it.
//!
//! A story is told to a described host with systemd, machined and cgroup v2: VMs of every kind start, run, are found again,
//! end. For each program that runs in it, and each failpoint that it passes, the story is told up to there and the program
//! killed, or its step made to fail. Then libvirt does what it does after that, somebody else's event is next, `reconcile` runs,
//! and in the end the whole host can be had again and is as it was before. `live/crash.rs` does the same to real libvirt.
//! `VIRT_PIN_CRASH=all` tries each error at each of the writes, any other value one failpoint alone.
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
mod points;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use machine::{Machine, Run, Vm};
use virt_pin::cpuset::CpuSet;
use virt_pin::failpoint::{POINTS, Step};
use virt_pin::lock::leases::Leases;

const CGROUP: &str = "/sys/fs/cgroup";
const ALL: &str = "1-7,9-15";

/// Stands in for systemd's: does what it is told at once, and leaves the drop-in that systemd would.
const SYSTEMCTL: &str = r#"#!/bin/sh
root=${0%/usr/bin/systemctl}
cpus=${6#AllowedCPUs=}
mkdir -p "$root/run/systemd/system.control/$5.d"
echo "[Slice]
AllowedCPUs=
AllowedCPUs=$cpus" >"$root/run/systemd/system.control/$5.d/50-AllowedCPUs.conf"
[ -z "$cpus" ] || echo "$cpus" >"$root/sys/fs/cgroup/$5/cpuset.cpus"
"#;

/// CPUs 0 and 8 are the host's.
fn host() -> Machine {
    let machine = Machine::new(ALL);
    machine.put("/proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n");
    machine.put(&format!("{CGROUP}/cgroup.controllers"), "cpuset cpu memory\n");
    machine.put(&format!("{CGROUP}/cpuset.cpus.effective"), "0-15\n");
    for (unit, cpus) in [("system.slice", "\n"), ("user.slice", "0-9\n"), ("machine.slice", "\n")] {
        machine.put(&format!("{CGROUP}/{unit}/cpuset.cpus"), cpus);
        machine.put(&format!("{CGROUP}/{unit}/cpuset.cpus.exclusive"), "\n");
    }
    machine.put("/run/systemd/system.control/user.slice.d/50-AllowedCPUs.conf", "[Slice]\nAllowedCPUs=0-9\n");
    machine.put("/usr/share/dbus-1/system-services/org.freedesktop.machine1.service", "");
    machine.put("/usr/bin/systemctl", SYSTEMCTL);
    fs::set_permissions(machine.path("/usr/bin/systemctl"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir_all(machine.path("/run/systemd/system")).unwrap();
    machine.put("/proc/irq/default_smp_affinity", "ffff\n");
    machine.put("/proc/irq/4/smp_affinity_list", "0-15\n");
    fs::create_dir_all(machine.path("/run/libvirt/qemu")).unwrap();
    // A VM without a policy that runs for the whole story.
    machine.put(&format!("{OTHER}/cpuset.cpus"), "0-15\n");
    machine
}

/// The cgroup of the VM that has no policy.
const OTHER: &str = "/sys/fs/cgroup/machine.slice/machine-qemu\\x2d99\\x2dother.scope";

fn scope(vm: &Vm) -> String {
    format!("/machine.slice/machine-qemu\\x2d{}\\x2d{}.scope", vm.id.unwrap(), vm.name)
}

fn pid(vm: &Vm) -> u32 {
    700 + 100 * vm.id.unwrap()
}

fn parent(path: &str) -> &str {
    path.rsplit_once('/').unwrap().0
}

/// QEMU has been executed: threads, and the cgroups that systemd and libvirt have made for them.
fn born(machine: &Machine, vm: &Vm) {
    let cpus = machine.vcpus_of(vm);
    let pid = pid(vm);
    machine.qemu(vm, pid, &cpus, "0,8");
    let base = format!("{}/libvirt", scope(vm));
    for (vcpu, cpu) in cpus.iter().enumerate() {
        let tid = pid + 1 + vcpu as u32;
        machine.put(&format!("/proc/{pid}/task/{tid}/cgroup"), &format!("0::{base}/vcpu{vcpu}\n"));
        let cgroup = format!("{CGROUP}{base}/vcpu{vcpu}");
        machine.put(&format!("{cgroup}/cpuset.cpus"), &format!("{cpu}\n"));
        machine.put(&format!("{cgroup}/cgroup.subtree_control"), "\n");
        machine.put(&format!("{cgroup}/cgroup.threads"), &format!("{tid}\n"));
        machine.put(&format!("{cgroup}/cpuset.cpus.exclusive"), "\n");
        machine.put(&format!("{cgroup}/virt-pin/cpuset.cpus.exclusive"), "\n");
        machine.put(&format!("{cgroup}/virt-pin/cpuset.cpus.partition"), "member\n");
        machine.put(&format!("{cgroup}/virt-pin/cgroup.threads"), "");
    }
    for dir in [base.as_str(), parent(&base)] {
        machine.put(&format!("{CGROUP}{dir}/cpuset.cpus.exclusive"), "\n");
    }
}

/// QEMU has ended, and its cgroup with it.
fn dies(machine: &Machine, vm: &Vm) {
    let _ = fs::remove_dir_all(machine.path(&format!("/proc/{}", pid(vm))));
    for end in ["xml", "pid"] {
        let _ = fs::remove_file(machine.path(&format!("/run/libvirt/qemu/{}.{end}", vm.name)));
    }
    let _ = fs::remove_dir_all(machine.path(&format!("{CGROUP}{}", scope(vm))));
}

/// Every QEMU that runs has its pid file locked, for as long as this is kept (and nobody closes another handle of it).
fn living(machine: &Machine) -> Vec<fs::File> {
    vms().iter().filter(|vm| is_born(machine, vm)).map(|vm| machine.alive(vm)).collect()
}

fn is_born(machine: &Machine, vm: &Vm) -> bool {
    machine.path(&format!("/proc/{}", pid(vm))).exists()
}

/// Everything but what virt-pin keeps for itself and what time does.
fn outside(machine: &Machine) -> BTreeMap<PathBuf, Option<String>> {
    let found = machine.everything().into_iter();
    let found = found
        .filter(|(path, _)| !path.starts_with(machine.path("/run/virt-pin")) && *path != machine.path("/proc/uptime"));
    found
        .map(|(path, text)| {
            (
                path.strip_prefix(machine.root()).unwrap().to_owned(),
                text.map(|text| String::from_utf8(text).unwrap().trim().to_owned()),
            )
        })
        .collect()
}

/// Something that happens on the host.
enum Happens {
    /// The hook runs.
    Event(&'static str, fn() -> Vm),
    /// The command runs.
    Command(&'static [&'static str]),
    /// Something of the world.
    World(fn(&Machine)),
}

/// Keeps services and interrupts away.
fn quiet() -> Vm {
    Vm::new(1, 2).with("isolation='slices' irqs='away'")
}

/// Has partitions.
fn apart() -> Vm {
    Vm::new(2, 2).with("isolation='partition'")
}

/// Has no policy.
fn plain() -> Vm {
    Vm::new(3, 1).without_policy()
}

/// Pins itself.
fn by_hand() -> Vm {
    Vm::new(4, 1).without_policy().pinned(&[7])
}

/// Comes from elsewhere.
fn coming() -> Vm {
    Vm::new(5, 2)
}

fn vms() -> [Vm; 5] {
    [quiet(), apart(), plain(), by_hand(), coming()]
}

use Happens::{Command, Event, World};

const STORY: &[Happens] = &[
    Event("prepare begin", plain),
    Event("prepare begin", quiet),
    World(|machine| born(machine, &quiet())),
    Event("started begin", quiet),
    Event("prepare begin", apart),
    World(|machine| born(machine, &apart())),
    Event("started begin", apart),
    Event("reconnect begin", apart),
    Event("prepare begin", by_hand),
    Event("release end shutdown", by_hand),
    Event("migrate begin", coming),
    Event("prepare begin", coming),
    Event("restore begin", coming),
    Event("release end failed", coming),
    Command(&["reconcile"]),
    World(|machine| machine.put("/run/virt-pin/leases.json", "{\"version\":2,\"leases\":[{")),
    Command(&["reconcile"]),
    World(|machine| dies(machine, &quiet())),
    Event("release end shutdown", quiet),
    World(|machine| dies(machine, &apart())),
    Event("release end shutdown", apart),
    Event("release end shutdown", plain),
];

fn command(machine: &Machine, happens: &Happens) -> Option<(std::process::Command, String)> {
    match happens {
        Event(event, vm) => {
            let (vm, mut args) = (vm(), event.split(' ').collect::<Vec<_>>());
            args.insert(0, &vm.name);
            args.resize(4, "-");
            Some((machine.hook_command(&args), vm.xml()))
        }
        Command(args) => Some((machine.cli_command(args), String::new())),
        World(_) => None,
    }
}

/// What happens, untroubled.
fn happen(machine: &Machine, happens: &Happens) {
    let _living = living(machine);
    match (command(machine, happens), happens) {
        (Some((command, stdin)), _) => {
            let run = Run::of(command, stdin.as_bytes());
            assert_eq!(run.code, Some(0), "{run:?}");
        }
        (None, World(change)) => change(machine),
        _ => unreachable!(),
    }
}

/// The whole of a directory tree in another place.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    fs::set_permissions(to, fs::metadata(from).unwrap().permissions()).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to)
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

fn copied(machine: &Machine) -> Machine {
    let copy_of = Machine::bare();
    copy(machine.root(), copy_of.root());
    copy_of
}

/// What has to hold at any time, whoever was killed: the file is whole, nobody owns another's CPU.
fn check(machine: &Machine) {
    if let Some(text) = machine.leases().filter(|text| !text.ends_with("[{")) {
        Leases::from_json(&text).unwrap().check().unwrap();
    }
}

/// After a lease was granted nobody else is on its CPUs.
fn check_granted(machine: &Machine) {
    let other = CpuSet::parse_kernel_list(&machine.read(&format!("{OTHER}/cpuset.cpus"))).unwrap();
    for lease in Leases::from_json(&machine.leases().unwrap()).unwrap().iter().filter(|lease| lease.plan().is_some()) {
        assert!(other.is_disjoint(&lease.cpus()), "{other} and {}", lease.cpus());
    }
}

/// Long enough for what waits for something to give up.
fn time_passes(machine: &Machine) {
    machine.put("/proc/uptime", "5000.00 1.00\n");
    let before = SystemTime::now() - Duration::from_secs(4000);
    for entry in fs::read_dir(machine.path("/run/systemd/system")).unwrap() {
        fs::File::open(entry.unwrap().path()).unwrap().set_modified(before).unwrap();
    }
}

/// What libvirt does when the hook has failed at this event (or has been killed, which is the same to it).
fn libvirt_after(machine: &Machine, happens: &Happens, failed: bool) {
    let Event(event, vm) = happens else { return };
    let vm = vm();
    if failed && !event.starts_with("release") && !event.starts_with("migrate") && !event.starts_with("restore") {
        dies(machine, &vm);
        machine.event(&vm, "release end failed").silent();
    }
}

/// Whose event comes next.
fn somebody(machine: &Machine, happens: &Happens, which: usize) {
    let after = Vm::new(9, 1);
    let same = match happens {
        Event(_, vm) if !is_born(machine, &vm()) => Some(vm()),
        _ => None,
    };
    match (which % 4, same) {
        (0, Some(vm)) => {
            let run = machine.event(&vm, "prepare begin");
            assert_eq!(run.code, Some(0), "the same VM is refused: {run:?}");
            if vm.policy.is_some() {
                check_granted(machine);
            }
            machine.event(&vm, "release end failed").silent();
        }
        (1, _) => {
            // Not where the file was torn before.
            if machine.leases().is_none_or(|text| !text.ends_with("[{")) {
                machine.prepare(&after);
                check_granted(machine);
                machine.event(&after, "release end failed").silent();
            }
        }
        (2, _) => assert_eq!(machine.event(&after, "release end shutdown").code, Some(0)),
        _ => assert_eq!(machine.cli(&["reconcile"]).code, Some(0)),
    }
    check(machine);
}

/// Every VM ends, and then the host can be had as a whole, and is as it was.
fn everything_ends(machine: &Machine, before: &BTreeMap<PathBuf, Option<String>>) {
    time_passes(machine);
    let said = machine.cli(&["reconcile"]).printed();
    assert!(!said.contains("cannot"), "{said}");
    check(machine);
    for vm in vms() {
        if is_born(machine, &vm) {
            // Its lease was kept or found again.
            assert!(machine.leased().iter().any(|lease| lease["uuid"] == vm.uuid), "{} has lost its lease", vm.name);
            dies(machine, &vm);
            machine.event(&vm, "release end shutdown").silent();
        }
    }
    assert_eq!(machine.leased(), Vec::<serde_json::Value>::new(), "nobody runs");
    let kept: Vec<_> =
        fs::read_dir(machine.path("/run/virt-pin")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    let ours = |name: &str| {
        ["lock", "leases.json", "topology.json"].contains(&name) || name.starts_with("leases.json.corrupt")
    };
    assert!(kept.iter().all(|name| ours(name.to_str().unwrap())), "{kept:?}");
    let (now, then) = (outside(machine), before);
    for (path, text) in &now {
        // All CPUs is what an empty list means, and what is written where the kernel does not take that.
        let all = |text: &Option<String>| path.ends_with("cpuset.cpus") && text.as_deref() == Some("0-15");
        let same = Some(text) == then.get(path) || (all(text) && then.get(path) == Some(&Some(String::new())));
        assert!(same, "{} is not as it was: {text:?}, not {:?}", path.display(), then.get(path));
    }
    assert_eq!(now.len(), then.len(), "something is missing");
    let whole = Vm::new(8, 14).with("numa='any' memory='any'");
    machine.prepare(&whole);
    machine.event(&whole, "release end shutdown").silent();
}

/// A program run with a failpoint, and what became of it.
fn troubled(machine: &Machine, happens: &Happens, crash_at: &str) -> (bool, Run) {
    let (mut command, stdin) = command(machine, happens).unwrap();
    command.env("VIRT_PIN_CRASH_AT", crash_at);
    let mut child = command.spawn().unwrap();
    let pipe = child.stdin.take();
    let output = std::thread::scope(|scope| {
        scope.spawn(move || pipe.map(|mut pipe| std::io::Write::write_all(&mut pipe, stdin.as_bytes())));
        child.wait_with_output().unwrap()
    });
    let killed = output.status.signal() == Some(nix::libc::SIGABRT);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let run = Run { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) };
    assert!(!run.stderr.contains("panicked") && !run.stderr.contains("fault in virt-pin"), "{run:?}");
    (killed, run)
}

/// The points that a program passes here, in order, each with how often it has come by.
fn passes(machine: &Machine, happens: &Happens) -> Vec<(String, usize)> {
    let Some((mut command, stdin)) = command(machine, happens) else { return Vec::new() };
    let _living = living(machine);
    let file = machine.path("/passes");
    command.env("VIRT_PIN_PASSES", &file);
    Run::of(command, stdin.as_bytes());
    let text = fs::read_to_string(file).unwrap_or_default();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    text.lines()
        .map(|name| {
            assert!(!name.starts_with("unknown"), "{name} is in no table: src/failpoint.rs");
            let count = counts.entry(name).or_default();
            *count += 1;
            (name.to_owned(), *count)
        })
        .collect()
}

/// One way to trouble a program: which step of the story, and the value of the variable.
struct Trouble {
    step: usize,
    crash_at: String,
}

/// Whether every error is to be tried at every step.
fn thorough() -> bool {
    std::env::var_os("VIRT_PIN_CRASH").is_some_and(|how| how == "all")
}

/// The story up to each of its steps, and every point that is passed at each.
fn told() -> (Vec<Machine>, Vec<(usize, String, usize)>) {
    let (mut machine, mut until, mut all) = (host(), Vec::new(), Vec::new());
    for (step, happens) in STORY.iter().enumerate() {
        until.push(copied(&machine));
        all.extend(passes(&copied(&machine), happens).into_iter().map(|(name, nth)| (step, name, nth)));
        happen(&machine, happens);
        check(&machine);
        machine = copied(&machine);
    }
    (until, all)
}

/// Does this to all of them, on as many threads as there are CPUs.
fn each(troubles: &[Trouble], done: impl Fn(usize, &Trouble) + Sync) {
    let only = std::env::var_os("VIRT_PIN_CRASH").and_then(|only| only.into_string().ok()).filter(|only| only != "all");
    let wanted = |trouble: &&Trouble| only.as_ref().is_none_or(|only| trouble.crash_at.starts_with(only.as_str()));
    let troubles: Vec<&Trouble> = troubles.iter().filter(wanted).collect();
    let next = AtomicUsize::new(0);
    let failures = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().unwrap().get() {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::SeqCst);
                    let Some(trouble) = troubles.get(number) else { return };
                    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| done(number, trouble)));
                    if result.is_err() {
                        eprintln!("at step {} with {}", trouble.step, trouble.crash_at);
                        failures.lock().unwrap().push(format!("step {}, {}", trouble.step, trouble.crash_at));
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{} of {}: {failures:#?}", failures.len(), troubles.len());
}

#[test]
fn killed_at_every_point() {
    let before = outside(&host());
    let (until, points) = told();
    // All that exist are walked over, here or elsewhere.
    let here: BTreeSet<&str> = points.iter().map(|(_, name, _)| name.as_str()).collect();
    let elsewhere: BTreeSet<&str> = points::LIVE.iter().chain(points::HOST).copied().collect();
    let missed: Vec<_> =
        POINTS.iter().map(|(name, _)| *name).filter(|name| !here.contains(name) && !elsewhere.contains(name)).collect();
    assert!(missed.is_empty(), "never reached: {missed:?}");
    let troubles: Vec<Trouble> =
        points.iter().map(|(step, name, nth)| Trouble { step: *step, crash_at: format!("{name}:{nth}") }).collect();
    each(&troubles, |number, Trouble { step, crash_at, .. }| {
        let (machine, happens) = (copied(&until[*step]), &STORY[*step]);
        let _living = living(&machine);
        let (killed, run) = troubled(&machine, happens, crash_at);
        assert!(killed, "{run:?}");
        check(&machine);
        libvirt_after(&machine, happens, true);
        somebody(&machine, happens, number);
        everything_ends(&machine, &before);
    });
    eprintln!("killed at {} points of {} names; nothing lost", troubles.len(), here.len());
}

#[test]
fn every_write_fails() {
    let before = outside(&host());
    let (until, points) = told();
    let can_fail = |name: &str| POINTS.iter().any(|(known, step)| *known == name && *step == Step::Fails);
    let mut troubles = Vec::new();
    for (step, name, nth) in points.iter().filter(|(_, name, _)| can_fail(name)) {
        // One error after the other, unless all are asked for.
        let errors = ["ENOSPC", "EROFS", "EIO", "EMFILE"];
        let some = if thorough() { &errors[..] } else { std::slice::from_ref(&errors[troubles.len() % errors.len()]) };
        for error in some {
            troubles.push(Trouble { step: *step, crash_at: format!("{name}:{nth}={error}") });
        }
        if *nth > 1 && !thorough() {
            continue;
        }
        // And a disk that stays full for as long as the program runs.
        troubles.push(Trouble { step: *step, crash_at: format!("{name}:{nth}=ENOSPC+") });
    }
    let told = AtomicUsize::new(0);
    each(&troubles, |number, Trouble { step, crash_at, .. }| {
        let (machine, happens) = (copied(&until[*step]), &STORY[*step]);
        let _living = living(&machine);
        let (killed, run) = troubled(&machine, happens, crash_at);
        assert!(!killed && !matches!(run.code, None | Some(1 | 101)), "{run:?}");
        let may_refuse = matches!(happens, Event(event, _) if ["prepare", "started", "migrate"].iter().any(|one| event.starts_with(one)));
        let failed = run.code != Some(0);
        if matches!(happens, Event(..)) {
            assert!(may_refuse || !failed, "a failure here ends a VM or loses its image: {run:?}");
        }
        if failed {
            // Which file, and why.
            told.fetch_add(1, Ordering::SeqCst);
            let why = ["No space left", "Read-only file system", "Input/output error", "Too many open files"];
            assert!(
                why.iter().any(|why| run.stderr.contains(why))
                    && (run.stderr.contains(machine.root().to_str().unwrap())
                        || run.stderr.contains("set-property --runtime")),
                "{run:?}"
            );
            assert_eq!(run.stdout, "", "{run:?}");
        } else if matches!(happens, Event("prepare begin", vm) if vm().policy.is_some()) {
            check_granted(&machine);
        }
        check(&machine);
        libvirt_after(&machine, happens, failed);
        somebody(&machine, happens, number);
        everything_ends(&machine, &before);
    });
    eprintln!("{} steps failed, {} programs said so; nothing lost", troubles.len(), told.load(Ordering::SeqCst));
}

/// No failpoint, but a state directory that is full, or that nobody may write to, and a process that may open no more files.
#[test]
fn what_the_kernel_itself_refuses() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: only root can mount a file system of its own");
        return;
    }
    let machine = host();
    let vm = Vm::new(1, 2);
    machine.make_state_dir();
    let state = machine.path("/run/virt-pin").display().to_string();
    let tmpfs = format!("mount -t tmpfs -o size=8k,mode=700 tmpfs {state}");
    let fill = format!("{{ head -c 65536 /dev/zero >{state}/filler || true; }} 2>/dev/null");
    let cases = [
        (format!("{tmpfs} && touch {state}/lock && chmod 600 {state}/lock && {fill}"), "No space left on device"),
        (format!("mount --bind {state} {state} && mount -o remount,ro,bind {state}"), "Read-only file system"),
        ("ulimit -n 4".to_owned(), "Too many open files"),
    ];
    let before = outside(&machine);
    for (before_it, why) in cases {
        let mut command = std::process::Command::new("unshare");
        let script = format!("{before_it} && exec \"$@\"");
        command.args(["--mount", "--propagation", "private", "bash", "-c", &script, "sh"]);
        command.arg(env!("CARGO_BIN_EXE_virt-pin-hook")).args(["vm1", "prepare", "begin", "-"]);
        command.env("VIRT_PIN_ROOT", machine.root());
        command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
        command.stderr(std::process::Stdio::piped());
        let run = Run::of(command, vm.xml().as_bytes());
        assert!(run.code.is_some_and(|code| code > 1) && run.stderr.contains(why), "{why}: {run:?}");
        assert!(run.stderr.contains(machine.root().to_str().unwrap()), "{run:?}");
        assert_eq!(run.stdout, "");
        assert!(outside(&machine) == before && machine.leases().is_none(), "something was done");
    }
    machine.prepare(&vm);
}
