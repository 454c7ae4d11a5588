//! What a start pays for the hook: wall time and instructions of `prepare`, beside an empty Rust program in the same run.
//!
//! `cargo bench --bench hook`. Both programs are started in turn, so that whatever else the machine does hits them alike;
//! the figure that counts is the ratio of the medians. The machine is this one, copied into a temporary root, so that
//! each `prepare` takes a real lease and no real state is touched. Where cgroup v1 can be had (as root), the VM's cgroup is
//! really made, too, below one of our own.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "a benchmark"
)]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use virt_pin::host::description;
use virt_pin::host::root::Root;

const RUNS: usize = 300;
const HOOK: &str = env!("CARGO_BIN_EXE_virt-pin-hook");

const DOMAIN: &str = "<domain type='kvm' id='1'><name>bench</name><uuid>0123abcd-89ab-cdef-0123-456789abcdef</uuid>\
    <metadata><pin:cpu xmlns:pin='urn:virt-pin:domain:1' policy='dedicated' cores='thread'/></metadata>\
    <memory>65536</memory><vcpu>1</vcpu><os><type>hvm</type></os></domain>";

fn main() {
    // tmpfs, like /run and /sys.
    let dir = tempfile::tempdir_in(if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" }).unwrap();
    let root = dir.path().join("root");
    copy_machine(&root);
    let cgroup = Cgroup::make(&root);
    let empty = empty_program(dir.path());
    let hook = |operation: &str, sub_operation: &str| {
        let mut command = Command::new(HOOK);
        command.args(["bench", operation, sub_operation, "-"]).env("VIRT_PIN_ROOT", &root);
        command
    };
    let (mut prepares, mut empties) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        empties.push(time(&mut Command::new(&empty)));
        prepares.push(time(&mut hook("prepare", "begin")));
        time(&mut hook("release", "end"));
    }
    let (prepare, empty_time) = (median(&mut prepares), median(&mut empties));
    println!("median of {RUNS} runs in turn, {} the VM's cgroup:", if cgroup.is_some() { "with" } else { "without" });
    println!("  empty Rust program  {:>7.3} ms", empty_time.as_secs_f64() * 1e3);
    println!("  hook, prepare       {:>7.3} ms", prepare.as_secs_f64() * 1e3);
    println!("  ratio               {:>7.2}", prepare.as_secs_f64() / empty_time.as_secs_f64());
    let instructions = instructions(&mut Command::new(&empty)).zip(instructions(&mut hook("prepare", "begin")));
    time(&mut hook("release", "end"));
    match instructions {
        Some((empty, hook)) => println!("instructions (callgrind): empty {empty}, prepare {hook}"),
        None => println!("instructions: valgrind is not installed"),
    }
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

fn put(root: &Path, path: &str, text: &str) {
    let file = root.join(path.trim_start_matches('/'));
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::File::create(file).unwrap().write_all(text.as_bytes()).unwrap();
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
fn time(command: &mut Command) -> Duration {
    command.stdin(Stdio::piped()).stdout(Stdio::null());
    let start = Instant::now();
    let mut child = command.spawn().unwrap();
    // The empty program may have ended by now.
    let _ = child.stdin.take().unwrap().write_all(DOMAIN.as_bytes());
    assert!(child.wait().unwrap().success());
    start.elapsed()
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Instructions executed, as callgrind counts them.
fn instructions(command: &mut Command) -> Option<u64> {
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(command.get_program());
    valgrind.args(command.get_args());
    valgrind.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    valgrind.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = valgrind.spawn().ok()?;
    let _ = child.stdin.take()?.write_all(DOMAIN.as_bytes());
    let output = child.wait_with_output().ok()?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    text.lines().find_map(|line| line.split_once("Collected : ")?.1.trim().parse().ok())
}
