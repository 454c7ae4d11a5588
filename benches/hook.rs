//! What a start pays for the hook: wall time and instructions of `prepare`, beside an empty Rust program in the same run.
//!
//! `cargo bench --bench hook`. All programs are started in turn, so that whatever else the machine does hits them alike;
//! the figures that count are the ratios: of the medians, and of the fastest runs where the machine is busy. `prepare` is
//! measured on two machines in temporary roots, so that each run takes a real lease and no real state is touched:
//!
//! - this one, copied, without any other lease. Where cgroup v1 can be had (as root), the VM's cgroup is really made, too,
//!   below one of our own;
//! - one of 512 CPUs in 256 cores, 32 last-level caches, 8 nodes, with 200 leases of running domains. Their processes are
//!   real ones (they sleep and hold a lock, as QEMU does), seen through the real `/proc`; the files of sysfs are in memory,
//!   which makes each of them cheaper than the kernel's own (the last line of the output says by how much).
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    reason = "a benchmark"
)]

mod host;

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use host::{link, put};
use virt_pin::alloc::policy::Policy;
use virt_pin::alloc::request::Request;
use virt_pin::alloc::simulation::Simulation;
use virt_pin::host::root::Root;
use virt_pin::host::{description, process, shape};
use virt_pin::lock::leases::{Holds, Lease, State};
use virt_pin::lock::{DEADLINE, StateLock};
use virt_pin::uuid::DomainUuid;

const RUNS: usize = 300;
/// What this program is told that shall stand for a QEMU.
const HOLD: &str = "hold-lock";
const HOOK: &str = env!("CARGO_BIN_EXE_virt-pin-hook");
/// Which CPUs of the large machine are pinnable: all but eight cores, one on each node.
const LARGE: &str = "2s128c2t,numa=8,llc=32";
const LEASES: u16 = 200;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if let [_, hold, path] = args.as_slice() {
        if hold == HOLD {
            return hold_lock(path);
        }
    }
    // tmpfs, like /run and /sys.
    let dir = tempfile::tempdir_in(if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" }).unwrap();
    let small = Start { root: dir.path().join("small"), domain: domain(1, "cores='thread'") };
    let large = Start { root: dir.path().join("large"), domain: domain(4, "") };
    copy_machine(&small.root);
    let cgroup = Cgroup::make(&small.root);
    let _running = busy_machine(&large.root);
    let empty = empty_program(dir.path());
    let forget = || drop(fs::remove_file(large.root.join("run/virt-pin/topology.json")));
    let mut times: [Vec<Duration>; 4] = Default::default();
    for _ in 0..RUNS {
        times[0].push(time(&mut Command::new(&empty), ""));
        // The last one finds what the one before has left.
        forget();
        for (start, times) in [&small, &large, &large].into_iter().zip(&mut times[1..]) {
            times.push(start.prepare());
            start.release();
        }
    }
    let with = if cgroup.is_some() { "with" } else { "without" };
    let names = [
        "empty Rust program".to_owned(),
        format!("prepare on this machine, {with} the VM's cgroup"),
        format!("the first prepare on 512 CPUs beside {LEASES} leases"),
        format!("each later one on 512 CPUs beside {LEASES} leases"),
    ];
    forget();
    let counts =
        [instructions(&mut Command::new(&empty), ""), small.instructions(), large.instructions(), large.instructions()];
    times.iter_mut().for_each(|times| times.sort_unstable());
    let millis = |time: Duration| time.as_secs_f64() * 1e3;
    println!(
        "{RUNS} runs in turn: median and fastest in ms, each beside the empty program's; instructions under callgrind"
    );
    for ((name, all), count) in names.iter().zip(&times).zip(counts) {
        let count = count.map_or_else(|| "no valgrind".to_owned(), |count| count.to_string());
        let columns = [RUNS / 2, 0].map(|rank| {
            let (time, base) = (millis(all[rank]), millis(times[0][rank]));
            format!("{time:>8.3} {:>6.2} x", time / base)
        });
        println!("  {name:<50} {} {count:>12}", columns.concat());
    }
    let (in_memory, kernel) = (file_cost(&large.root), file_cost(Path::new("/")));
    println!("one file of sysfs, opened, read and closed: {in_memory:.2} us in memory, {kernel:.2} us in the kernel");
}

/// A domain that is started and ended again.
struct Start {
    root: PathBuf,
    domain: String,
}

impl Start {
    fn hook(&self, operation: &str, sub_operation: &str) -> Command {
        let mut command = Command::new(HOOK);
        command.args(["bench", operation, sub_operation, "-"]).env("VIRT_PIN_ROOT", &self.root);
        command
    }

    fn prepare(&self) -> Duration {
        time(&mut self.hook("prepare", "begin"), &self.domain)
    }

    fn release(&self) {
        time(&mut self.hook("release", "end"), &self.domain);
    }

    fn instructions(&self) -> Option<u64> {
        let count = instructions(&mut self.hook("prepare", "begin"), &self.domain);
        self.release();
        count
    }
}

fn domain(vcpus: u16, policy: &str) -> String {
    format!(
        "<domain type='kvm' id='1'><name>bench</name><uuid>0123abcd-89ab-cdef-0123-456789abcdef</uuid>\
         <metadata><pin:cpu xmlns:pin='urn:virt-pin:domain:1' policy='dedicated' {policy}/></metadata>\
         <memory>65536</memory><vcpu>{vcpus}</vcpu><os><type>hvm</type></os></domain>"
    )
}

/// The large machine with its leases. Their processes end with the result.
fn busy_machine(root: &Path) -> Running {
    let host = shape::parse(LARGE).unwrap();
    let housekeeping = "0,32,64,96,128,160,192,224,256,288,320,352,384,416,448,480";
    let housekeeping = virt_pin::cpuset::CpuSet::parse_kernel_list(housekeeping).unwrap();
    let pinnable = host.online().difference(&housekeeping);
    host::put_sysfs(root, &host);
    link(root, "/proc/sys/kernel/random/boot_id");
    link(root, "/proc/uptime");
    put(root, "/etc/virt-pin/virt-pin.toml", &format!("pinnable_cpus = \"{pinnable}\"\n"));

    let mut running = Running(Vec::new());
    let mut domains = Simulation::new(host, pinnable);
    let state = Root::directory(root);
    let mut lock = StateLock::acquire(&state, DEADLINE).unwrap();
    let mut leases = lock.load().unwrap();
    leases.boot_id = process::boot_id(&state).unwrap();
    for number in 0..LEASES {
        let policy = Policy::from_attributes([("policy", "dedicated")]).unwrap();
        let vcpus = if number % 10 == 0 { 4 } else { 2 };
        let name = format!("domain-{number}");
        let request = Request { iothreads: 1, ..Request::new(vcpus, policy) };
        let plan = domains.start(&name, &request).unwrap().clone();
        let pid_file = format!("/run/libvirt/qemu/{name}.pid");
        put(root, &pid_file, "");
        let child = qemu_like(&root.join(&pid_file[1..]));
        link(root, &format!("/proc/{}", child.id()));
        let qemu = process::process(&state, child.id()).unwrap();
        running.0.push(child);
        leases.put(Lease {
            uuid: DomainUuid::parse(&format!("{:032x}", 0x1234_5678_9abc_def0_u128 * u128::from(number + 1))).unwrap(),
            name,
            state: State::Running,
            holds: Holds::Dedicated(plan),
            request: Some(request),
            domain_id: Some(u32::from(number)),
            cgroup: None,
            daemon: qemu,
            qemu,
            moving: None,
            since: process::uptime_secs(&state),
        });
    }
    lock.replace(&leases).unwrap();
    running
}

/// A process that holds its pid file's lock as a QEMU does: this program under another name.
fn qemu_like(pid_file: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let mut child = command.arg(HOLD).arg(pid_file).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    // It says so once it does.
    let mut said = [0];
    child.stdout.take().unwrap().read_exact(&mut said).unwrap();
    child
}

/// Holds the lock on the file until stdin ends.
fn hold_lock(path: &str) {
    let file = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let lock = nix::libc::flock {
        l_type: nix::libc::F_WRLCK as nix::libc::c_short,
        l_whence: nix::libc::SEEK_SET as nix::libc::c_short,
        l_start: 0,
        l_len: 1,
        l_pid: 0,
    };
    nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_SETLK(&lock)).unwrap();
    println!("locked");
    let _ = std::io::stdin().read(&mut [0]);
}

/// Processes that stand for QEMUs.
struct Running(Vec<Child>);

impl Drop for Running {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Microseconds for one file of a CPU.
fn file_cost(root: &Path) -> f64 {
    const TIMES: u32 = 10_000;
    let root = Root::directory(root);
    let start = Instant::now();
    for _ in 0..TIMES {
        root.read("/sys/devices/system/cpu/cpu0/topology/physical_package_id").unwrap();
    }
    start.elapsed().as_secs_f64() * 1e6 / f64::from(TIMES)
}

/// This machine's description as files, one pinnable CPU: the last one online.
fn copy_machine(root: &Path) {
    let here = Root::directory("/");
    let online = virt_pin::host::sysfs::read(&here).unwrap().online().clone();
    assert!(online.len() > 1, "one CPU has to stay with the host: two are needed");
    let text = description::gather(&here).unwrap();
    for line in text.lines().filter(|line| line.starts_with("/sys/devices")) {
        let (path, value) = line.split_once('\t').unwrap();
        put(root, path, &(value.replace("\\n", "\n").replace("\\t", "\t") + "\n"));
    }
    for path in ["/proc/sys/kernel/random/boot_id", "/proc/uptime"] {
        put(root, path, &here.read(path).unwrap());
    }
    put(root, "/etc/virt-pin/virt-pin.toml", &format!("pinnable_cpus = \"{}\"\n", online.iter().last().unwrap()));
}

/// A cpuset cgroup of our own in the real hierarchy, which the copied machine takes for the whole of it.
struct Cgroup(PathBuf);

impl Cgroup {
    fn make(root: &Path) -> Option<Cgroup> {
        let tree = Path::new("/sys/fs/cgroup/cpuset");
        let ours = tree.join(format!("virt-pin-bench.{}", std::process::id()));
        fs::create_dir(&ours).ok()?;
        let cgroup = Cgroup(ours);
        for file in ["cpuset.cpus", "cpuset.mems"] {
            let all = fs::read(tree.join(file)).ok()?;
            fs::OpenOptions::new().write(true).open(cgroup.0.join(file)).ok()?.write_all(&all).ok()?;
        }
        put(root, "/proc/mounts", "cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n");
        fs::create_dir_all(root.join("sys/fs/cgroup")).ok()?;
        std::os::unix::fs::symlink(&cgroup.0, root.join("sys/fs/cgroup/cpuset")).ok()?;
        Some(cgroup)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(self.0.join("machine"));
        let _ = fs::remove_dir(&self.0);
    }
}

/// `fn main() {}`, built like our release.
fn empty_program(dir: &Path) -> PathBuf {
    let program = dir.join("empty");
    let flags = ["-Copt-level=3", "-Clto=fat", "-Ccodegen-units=1", "-Cstrip=symbols", "-"];
    let mut rustc = Command::new("rustc")
        .args(flags)
        .arg("-o")
        .arg(&program)
        .stdin(Stdio::piped())
        .spawn()
        .expect("rustc is there");
    rustc.stdin.take().unwrap().write_all(b"fn main() {}").unwrap();
    assert!(rustc.wait().unwrap().success());
    program
}

/// From the start of the program to its end, the domain on its stdin.
fn time(command: &mut Command, domain: &str) -> Duration {
    command.stdin(Stdio::piped()).stdout(Stdio::null());
    let start = Instant::now();
    let mut child = command.spawn().unwrap();
    // The empty program may have ended by now.
    let _ = child.stdin.take().unwrap().write_all(domain.as_bytes());
    assert!(child.wait().unwrap().success());
    start.elapsed()
}

/// Instructions executed, as callgrind counts them.
fn instructions(command: &mut Command, domain: &str) -> Option<u64> {
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(command.get_program());
    valgrind.args(command.get_args());
    valgrind.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    valgrind.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = valgrind.spawn().ok()?;
    let _ = child.stdin.take()?.write_all(domain.as_bytes());
    let output = child.wait_with_output().ok()?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    text.lines().find_map(|line| line.split_once("Collected : ")?.1.trim().parse().ok())
}
