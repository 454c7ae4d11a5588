//! A whole machine in a temporary directory, and the built programs run on it (`VIRT_PIN_ROOT`).
//!
//! What is promised of every run is checked in [`Run::of`], whatever the test asks: no panic, no exit status of a fault,
//! an error on stderr whose first line is complete in itself.
#![allow(dead_code, reason = "each test program uses its part")]

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::fcntl::{Flock, FlockArg};
use tempfile::TempDir;
use virt_pin::error::Code;

pub(crate) const BOOT_ID: &str = "11111111-2222-3333-4444-555555555555";

/// How many packages, cores in each and threads of each; each package is a node with 64 GiB. CPUs are numbered as Linux
/// does on x86: the first threads of all cores, then the second ones.
#[derive(Clone, Copy)]
pub(crate) struct Shape(pub(crate) u16, pub(crate) u16, pub(crate) u16);

/// Two packages of four cores of two threads: siblings are n and n + 8; node 0 has 0-3,8-11.
pub(crate) const SMALL: Shape = Shape(2, 4, 2);

pub(crate) struct Machine {
    dir: TempDir,
}

impl Machine {
    /// The small machine with these pinnable CPUs.
    pub(crate) fn new(pinnable: &str) -> Machine {
        Machine::shaped(SMALL, pinnable)
    }

    pub(crate) fn shaped(shape: Shape, pinnable: &str) -> Machine {
        let machine = Machine::bare();
        machine.put("/proc/uptime", "1000.50 4000.00\n");
        machine.put("/proc/sys/kernel/random/boot_id", &format!("{BOOT_ID}\n"));
        machine.put("/proc/mounts", "proc /proc proc rw 0 0\n");
        machine.put("/proc/meminfo", "MemTotal: 134217728 kB\nHugepagesize:       2048 kB\n");
        machine.pinnable(pinnable);
        machine.sysfs(shape);
        machine
    }

    /// An empty directory; in memory where that can be had, as /run is.
    pub(crate) fn bare() -> Machine {
        let memory = Path::new("/dev/shm");
        let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        Machine { dir: dir.unwrap() }
    }

    fn sysfs(&self, Shape(packages, cores, threads): Shape) {
        let (all, cpus) = (packages * cores, packages * cores * threads);
        let list =
            |cpus: &mut dyn Iterator<Item = u16>| cpus.map(|cpu| cpu.to_string()).collect::<Vec<_>>().join(",") + "\n";
        let in_package = |package: u16| (0..cpus).filter(move |cpu| cpu % all / cores == package);
        for file in ["online", "possible", "present"] {
            self.put(&format!("/sys/devices/system/cpu/{file}"), &format!("0-{}\n", cpus - 1));
        }
        self.put("/sys/devices/system/cpu/isolated", "\n");
        for cpu in 0..cpus {
            let package = cpu % all / cores;
            let of = format!("/sys/devices/system/cpu/cpu{cpu}");
            let siblings = list(&mut (0..threads).map(|thread| cpu % all + thread * all));
            self.put(&format!("{of}/topology/core_cpus_list"), &siblings);
            self.put(&format!("{of}/topology/core_id"), &format!("{}\n", cpu % cores));
            self.put(&format!("{of}/topology/package_cpus_list"), &list(&mut in_package(package)));
            self.put(&format!("{of}/topology/physical_package_id"), &format!("{package}\n"));
            self.put(&format!("{of}/cache/index3/level"), "3\n");
            self.put(&format!("{of}/cache/index3/type"), "Unified\n");
            self.put(&format!("{of}/cache/index3/shared_cpu_list"), &list(&mut in_package(package)));
        }
        for node in 0..packages {
            let of = format!("/sys/devices/system/node/node{node}");
            self.put(&format!("{of}/cpulist"), &list(&mut in_package(node)));
            let distances = (0..packages).map(|other| if other == node { "10" } else { "21" });
            self.put(&format!("{of}/distance"), &(distances.collect::<Vec<_>>().join(" ") + "\n"));
            let memory = format!("Node {node} MemTotal: 67108864 kB\nNode {node} MemFree: 60000000 kB\n");
            self.put(&format!("{of}/meminfo"), &memory);
        }
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path.trim_start_matches('/'))
    }

    pub(crate) fn root(&self) -> &Path {
        self.dir.path()
    }

    /// Makes a file with the directories above it. The state directory gets the mode it needs.
    pub(crate) fn put(&self, path: &str, text: &str) {
        let file = self.path(path);
        if path.starts_with("/run/virt-pin/") {
            self.make_state_dir();
        }
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        options.open(file).unwrap().write_all(text.as_bytes()).unwrap();
    }

    pub(crate) fn make_state_dir(&self) {
        use std::os::unix::fs::DirBuilderExt;
        let _ = fs::create_dir(self.path("/run"));
        let _ = fs::DirBuilder::new().mode(0o700).create(self.path("/run/virt-pin"));
    }

    pub(crate) fn read(&self, path: &str) -> String {
        fs::read_to_string(self.path(path)).unwrap()
    }

    pub(crate) fn pinnable(&self, cpus: &str) {
        self.config(&format!("pinnable_cpus = \"{cpus}\"\n"));
    }

    pub(crate) fn config(&self, text: &str) {
        self.put("/etc/virt-pin/virt-pin.toml", text);
    }

    /// Defines a domain as libvirt does: its file, and the link of one that starts with the host.
    pub(crate) fn define(&self, vm: &Vm, autostart: bool) {
        let banner = "<!--\nWARNING: THIS IS AN AUTO-GENERATED FILE.\n-->\n\n";
        let xml = Vm { id: None, ..vm.clone() }.xml();
        self.put(&format!("/etc/libvirt/qemu/{}.xml", vm.name), &format!("{banner}{xml}"));
        if autostart {
            fs::create_dir_all(self.path("/etc/libvirt/qemu/autostart")).unwrap();
            let link = self.path(&format!("/etc/libvirt/qemu/autostart/{}.xml", vm.name));
            let _ = std::os::unix::fs::symlink(format!("/etc/libvirt/qemu/{}.xml", vm.name), link);
        }
    }

    /// leases.json, or nothing.
    pub(crate) fn leases(&self) -> Option<String> {
        fs::read_to_string(self.path("/run/virt-pin/leases.json")).ok()
    }

    /// The leases that there are, in JSON.
    pub(crate) fn leased(&self) -> Vec<serde_json::Value> {
        let Some(text) = self.leases() else { return Vec::new() };
        let document: serde_json::Value = serde_json::from_str(&text).unwrap();
        document["leases"].as_array().unwrap().clone()
    }

    /// The CPUs of the domain's vCPUs in vCPU order.
    #[track_caller]
    pub(crate) fn vcpus_of(&self, vm: &Vm) -> Vec<u64> {
        let leased = self.leased();
        let lease = leased.iter().find(|lease| lease["uuid"] == vm.uuid).expect("the domain has a lease");
        lease["vcpus"].as_array().unwrap().iter().map(|cpu| cpu.as_u64().unwrap()).collect()
    }

    /// Every file with its bytes and every directory. The lock file may come into being at any event, so neither it nor
    /// the directory it is in counts.
    pub(crate) fn everything(&self) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
        let mut found = BTreeMap::new();
        let mut dirs = vec![self.root().to_owned()];
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                let kind = fs::symlink_metadata(&path).unwrap().file_type();
                if kind.is_dir() {
                    dirs.push(path.clone());
                }
                found.insert(path.clone(), kind.is_file().then(|| fs::read(&path).unwrap()));
            }
        }
        for path in ["/run", "/run/virt-pin", "/run/virt-pin/lock"] {
            found.remove(&self.path(path));
        }
        found
    }

    /// Takes the lease lock, until dropped.
    pub(crate) fn hold_lock(&self) -> Flock<File> {
        self.make_state_dir();
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = file.open(self.path("/run/virt-pin/lock")).unwrap();
        Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno).unwrap()
    }

    /// A QEMU of this domain with vCPU threads on these CPUs, as libvirt and the kernel show it: pid `pid`, vCPU n has
    /// tid `pid + 1 + n`, the emulator is on `emulator`.
    pub(crate) fn qemu(&self, vm: &Vm, pid: u32, vcpus: &[u64], emulator: &str) {
        let threads: String =
            (0..vcpus.len()).map(|vcpu| format!("<vcpu id='{vcpu}' pid='{}'/>", pid + 1 + vcpu as u32)).collect();
        let status = format!("<domstatus state='running' pid='{pid}'><vcpus>{threads}</vcpus>{}</domstatus>", vm.xml());
        self.put(&format!("/run/libvirt/qemu/{}.xml", vm.name), &status);
        self.put(&format!("/proc/{pid}/stat"), &stat(pid, 'S', 5000));
        self.put(&format!("/proc/{pid}/comm"), "qemu-system-x86\n");
        self.thread(pid, pid, "qemu-system-x86", emulator);
        for (vcpu, cpu) in vcpus.iter().enumerate() {
            self.thread(pid, pid + 1 + vcpu as u32, &format!("CPU {vcpu}/KVM"), &cpu.to_string());
        }
    }

    pub(crate) fn thread(&self, pid: u32, tid: u32, name: &str, cpus: &str) {
        let status = format!("Name:\t{name}\nState:\tS (sleeping)\nCpus_allowed_list:\t{cpus}\n");
        self.put(&format!("/proc/{pid}/task/{tid}/status"), &status);
    }

    /// Locks libvirt's pid file of the domain, as a living QEMU does: this test's process is the one that lives. Closing
    /// any other handle of the file unlocks it.
    pub(crate) fn alive(&self, vm: &Vm) -> File {
        let path = format!("/run/libvirt/qemu/{}.pid", vm.name);
        self.put(&path, "");
        let file = OpenOptions::new().read(true).write(true).open(self.path(&path)).unwrap();
        let lock = nix::libc::flock {
            l_type: nix::libc::F_WRLCK as nix::libc::c_short,
            l_whence: nix::libc::SEEK_SET as nix::libc::c_short,
            l_start: 0,
            l_len: 0,
            l_pid: 0,
        };
        nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_SETLK(&lock)).unwrap();
        file
    }

    /// The process is no more.
    pub(crate) fn gone(&self, pid: u32) {
        fs::remove_dir_all(self.path(&format!("/proc/{pid}"))).unwrap();
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C");
        command.env("VIRT_PIN_ROOT", self.root()).current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub(crate) fn hook_command(&self, args: &[&str]) -> Command {
        let mut command = self.command(env!("CARGO_BIN_EXE_virt-pin-hook"));
        command.args(args);
        command
    }

    /// The hook, as libvirt runs it.
    #[track_caller]
    pub(crate) fn hook(&self, args: &[&str], stdin: impl AsRef<[u8]>) -> Run {
        Run::of(self.hook_command(args), stdin.as_ref())
    }

    /// One event of a domain: `"prepare begin -"`.
    #[track_caller]
    pub(crate) fn event(&self, vm: &Vm, event: &str) -> Run {
        let (operation, rest) = event.split_once(' ').unwrap();
        let (sub_operation, extra) = rest.split_once(' ').unwrap_or((rest, "-"));
        self.hook(&[&vm.name, operation, sub_operation, extra], vm.xml())
    }

    /// `prepare begin`, which must grant a lease.
    #[track_caller]
    pub(crate) fn prepare(&self, vm: &Vm) -> String {
        self.event(vm, "prepare begin").printed()
    }

    pub(crate) fn cli_command(&self, args: &[&str]) -> Command {
        let mut command = self.command(env!("CARGO_BIN_EXE_virt-pin"));
        command.args(args);
        command
    }

    /// The command line.
    #[track_caller]
    pub(crate) fn cli(&self, args: &[&str]) -> Run {
        self.cli_with(args, b"")
    }

    #[track_caller]
    pub(crate) fn cli_with(&self, args: &[&str], stdin: impl AsRef<[u8]>) -> Run {
        Run::of(self.cli_command(args), stdin.as_ref())
    }

    /// The command line's answer in JSON.
    #[track_caller]
    pub(crate) fn json(&self, args: &[&str]) -> serde_json::Value {
        let run = self.cli(&[&["--json"], args].concat());
        serde_json::from_str(&run.stdout).unwrap_or_else(|error| panic!("{error}: {run:?}"))
    }
}

/// A line of `/proc/PID/stat`.
pub(crate) fn stat(pid: u32, state: char, start: u64) -> String {
    format!("{pid} (qemu-system-x86) {state} 1 {pid} {pid} 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {start} 0 0\n")
}

/// What a program did.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    /// Runs the command to its end.
    #[track_caller]
    pub(crate) fn of(mut command: Command, stdin: &[u8]) -> Run {
        let mut child = command.spawn().unwrap();
        let pipe = child.stdin.take();
        std::thread::scope(|scope| {
            // Whoever does not read all of it is not made to.
            scope.spawn(move || pipe.map(|mut pipe| pipe.write_all(stdin)));
            Run::end(child)
        })
    }

    /// Waits for the end of a running one.
    #[track_caller]
    pub(crate) fn end(child: Child) -> Run {
        let output = child.wait_with_output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let run = Run { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) };
        assert!(!run.stderr.contains("panicked") && !run.stderr.contains("fault in virt-pin"), "{run:?}");
        assert!(!matches!(run.code, None | Some(1 | 101)), "a signal, a panic or a fault: {run:?}");
        run
    }

    /// Success, and nothing said.
    #[track_caller]
    pub(crate) fn silent(&self) {
        assert_eq!((self.code, self.stdout.as_str(), self.stderr.as_str()), (Some(0), "", ""));
    }

    /// Success; what stdout has.
    #[track_caller]
    pub(crate) fn printed(self) -> String {
        assert_eq!((self.code, self.stderr.as_str()), (Some(0), ""), "stdout: {}", self.stdout);
        self.stdout
    }

    /// Failure with this code and its exit status, nothing on stdout; the sentence on stderr.
    #[track_caller]
    pub(crate) fn refused(&self, code: Code) -> String {
        assert_eq!((self.code, self.stdout.as_str()), (Some(code.exit().into()), ""), "{}", self.stderr);
        self.complaint(code)
    }

    /// Success as far as libvirt is told, with an error of this code on stderr.
    #[track_caller]
    pub(crate) fn reported(&self, code: Code) -> String {
        assert_eq!((self.code, self.stdout.as_str()), (Some(0), ""), "{}", self.stderr);
        self.complaint(code)
    }

    /// The sentence on stderr's first line.
    #[track_caller]
    pub(crate) fn complaint(&self, code: Code) -> String {
        let first = self.stderr.lines().next().unwrap_or_default();
        let sentence = first.strip_prefix(&format!("virt-pin: error[{code}]: ")).map(str::to_owned);
        let sentence = sentence.unwrap_or_else(|| panic!("not {code}: {}", self.stderr));
        let rest: Vec<_> = self.stderr.lines().skip(1).collect();
        assert!(rest.iter().all(|line| line.starts_with("  ")), "{}", self.stderr);
        assert_eq!(rest.iter().filter(|line| line.starts_with("  hint: ")).count(), 1, "{}", self.stderr);
        assert!(self.stderr.ends_with('\n') && !sentence.is_empty() && !sentence.ends_with('.'), "{}", self.stderr);
        sentence
    }
}

/// A domain.
#[derive(Clone)]
pub(crate) struct Vm {
    pub(crate) name: String,
    pub(crate) uuid: String,
    /// The content of `<vcpu>` and its attributes.
    pub(crate) vcpu: String,
    /// The attributes of the policy element; `None` = no such element.
    pub(crate) policy: Option<String>,
    /// More children of `<domain>`.
    pub(crate) body: String,
    pub(crate) id: Option<u32>,
    pub(crate) memory_kib: u64,
}

impl Vm {
    /// A dedicated domain.
    pub(crate) fn new(number: u32, vcpus: u32) -> Vm {
        Vm {
            name: format!("vm{number}"),
            uuid: format!("00000000-0000-0000-0000-{number:012}"),
            vcpu: format!("<vcpu placement='static'>{vcpus}</vcpu>"),
            policy: Some("policy='dedicated'".to_owned()),
            body: String::new(),
            id: Some(number),
            memory_kib: 1 << 20,
        }
    }

    pub(crate) fn named(self, name: &str) -> Vm {
        Vm { name: name.to_owned(), ..self }
    }

    /// More of the policy.
    pub(crate) fn with(self, attributes: &str) -> Vm {
        Vm { policy: Some(format!("policy='dedicated' {attributes}")), ..self }
    }

    pub(crate) fn without_policy(self) -> Vm {
        Vm { policy: None, ..self }
    }

    pub(crate) fn vcpu(self, vcpu: &str) -> Vm {
        Vm { vcpu: vcpu.to_owned(), ..self }
    }

    pub(crate) fn body(self, body: &str) -> Vm {
        Vm { body: body.to_owned(), ..self }
    }

    /// vCPU n pinned to the n-th of these CPUs.
    pub(crate) fn pinned(self, cpus: &[u64]) -> Vm {
        let pins = cpus.iter().enumerate().map(|(vcpu, cpu)| format!("<vcpupin vcpu='{vcpu}' cpuset='{cpu}'/>"));
        let body = format!("<cputune>{}</cputune>", pins.collect::<String>());
        self.body(&body)
    }

    pub(crate) fn memory_kib(self, memory_kib: u64) -> Vm {
        Vm { memory_kib, ..self }
    }

    pub(crate) fn xml(&self) -> String {
        let id = self.id.map(|id| format!(" id='{id}'")).unwrap_or_default();
        let name = self.name.replace('&', "&amp;").replace('<', "&lt;").replace('\t', "&#9;").replace('\n', "&#10;");
        let policy = self.policy.as_ref().map(|policy| {
            format!("  <metadata>\n    <pin:cpu xmlns:pin='urn:virt-pin:domain:1' {policy}/>\n  </metadata>\n")
        });
        let body = if self.body.is_empty() { String::new() } else { format!("  {}\n", self.body) };
        format!(
            "<domain type='kvm'{id}>\n  <name>{name}</name>\n  <uuid>{}</uuid>\n{}  \
             <memory unit='KiB'>{}</memory>\n  {}\n{body}  <os>\n    <type arch='x86_64'>hvm</type>\n  </os>\n</domain>\n",
            self.uuid,
            policy.unwrap_or_default(),
            self.memory_kib,
            self.vcpu,
        )
    }
}

/// The CPU of each `<vcpupin>`, in document order.
pub(crate) fn pins(xml: &str) -> Vec<u64> {
    let document = roxmltree::Document::parse(xml).unwrap();
    let pins = document.descendants().filter(|node| node.has_tag_name("vcpupin"));
    pins.map(|pin| pin.attribute("cpuset").unwrap().parse().unwrap()).collect()
}

/// The `<topology>` of `<cpu>`: sockets, dies, cores, threads.
pub(crate) fn topology(xml: &str) -> Option<[u32; 4]> {
    let document = roxmltree::Document::parse(xml).unwrap();
    let node = document.descendants().find(|node| node.has_tag_name("topology"))?;
    let part = |name| node.attribute(name).map_or(1, |value| value.parse().unwrap());
    Some([part("sockets"), part("dies"), part("cores"), part("threads")])
}
