//! One QEMU process: an emulated machine that one can talk to, and that ends with this value or with this process.
//!
//! QEMU runs in a PID namespace whose PID 1 waits for the end of its stdin: a pipe from this process. However a test ends
//! (returns, panics, is killed by SIGKILL), the pipe closes, PID 1 removes the machine's directory and exits, and the kernel
//! kills QEMU. What a clone writes to its disk is in a file that has no name.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::image::Image;
use crate::shape::Shape;
use crate::wire::{Wire, base64};

/// How long anything may take that is not a boot; far more than it does, for machines under load.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

/// PID 1 of the namespace: ends when its stdin does, which takes the machine's directory along, or when QEMU does.
const SUPERVISOR: &str = r#"exec 3<&0; "$@" </dev/null & { cat >/dev/null; rm -r "$0"; } <&3 & wait -n"#;

/// What the kernel is told: to be quiet, and not to measure what emulation makes slow and unsteady (`lpj` alone saves half a
/// second for each CPU).
const KERNEL: &str = "console=ttyS0 quiet lpj=8400000 tsc=reliable no_timer_check mitigations=off nokaslr \
                      random.trust_cpu=on selinux=0 systemd.show_status=0 net.ifnames=0";

/// The size of the disk on which files are brought in.
const LETTERBOX: u64 = 64 << 20;

/// A running machine.
pub(crate) struct Vm {
    supervisor: Child,
    /// Its other end is the supervisor's stdin.
    alive: Option<ChildStdin>,
    dir: TempDir,
    monitor: Mutex<Wire>,
    agent: Mutex<Wire>,
    /// One file at a time is brought in.
    letterbox: Mutex<File>,
}

/// How a command inside ended.
#[derive(Debug)]
pub(crate) struct Output {
    /// Its exit status; of one that a signal ended, 128 and the signal.
    pub(crate) status: i64,
    /// All it wrote on stdout.
    pub(crate) stdout: String,
    /// All it wrote on stderr.
    pub(crate) stderr: String,
}

impl Output {
    /// What a command that must succeed printed.
    #[track_caller]
    pub(crate) fn ok(self) -> String {
        assert!(self.status == 0, "{self:#?}");
        self.stdout
    }

    /// What a command that must fail complained about.
    #[track_caller]
    pub(crate) fn refused(self) -> String {
        assert!(self.status != 0, "{self:#?}");
        self.stderr
    }
}

impl Vm {
    /// Boots an image for the first time, to be saved: its disk and memory are in files in `state`. Returns when it answers.
    pub(crate) fn boot(qemu: &Image, image: &Image, shape: Shape, state: &Path) -> Vm {
        let disk = state.join("disk.img");
        let copied = Command::new("cp").args(["--sparse=always", &image.file("disk.img")]).arg(&disk).status().unwrap();
        assert!(copied.success());
        let memory = |node| format!("share=on,mem-path={}/memory.{node}", state.display());
        let vm = Vm::spawn(qemu, image, shape, memory, &format!("file={}", disk.display()), &[]);
        vm.agent("guest-ping", Value::Null);
        vm
    }

    /// Writes down the state of a machine that was booted, and ends it.
    pub(crate) fn save(mut self, state: &Path) {
        self.monitor("stop", Value::Null);
        self.ignore_shared();
        self.monitor("migrate", json!({ "uri": format!("file:{}/state", state.display()) }));
        self.wait_for_migration();
        self.monitor("quit", Value::Null);
        self.supervisor.wait().unwrap();
    }

    /// Goes on from where a machine was saved; the files of its state are not written to.
    pub(crate) fn clone_of(qemu: &Image, image: &Image, shape: Shape, state: &Path) -> Vm {
        let memory = |node| format!("share=off,mem-path={}/memory.{node}", state.display());
        let disk = format!("file={}/disk.img,snapshot=on", state.display());
        let vm = Vm::spawn(qemu, image, shape, memory, &disk, &["-incoming", "defer"]);
        vm.ignore_shared();
        vm.monitor("migrate-incoming", json!({ "uri": format!("file:{}/state", state.display()) }));
        vm.wait_for_migration();
        vm.monitor("cont", Value::Null);
        vm
    }

    fn spawn(
        qemu: &Image,
        image: &Image,
        shape: Shape,
        memory: impl Fn(u32) -> String,
        disk: &str,
        more: &[&str],
    ) -> Vm {
        let dir = tempfile::Builder::new().prefix("virt-pin-hostvm.").tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).into_os_string().into_string().unwrap();
        let letterbox = File::create(path("letterbox")).unwrap();
        letterbox.set_len(LETTERBOX).unwrap();
        let log = File::create(path("qemu.log")).unwrap();
        // All CPUs take turns on one thread. With a thread each, a machine boots no faster here, two side by side do less in
        // all, and now and then one of their timers is lost.
        let accelerator = "tcg,thread=single,tb-size=512";
        let (kernel, initrd) = (image.file("vmlinuz"), image.file("initrd"));
        let socket = |id: &str| format!("socket,id={id},path={},server=on,wait=off", path(id));
        let mut supervisor = Command::new("unshare")
            .args(["--pid", "--fork", "--kill-child", "bash", "-c", SUPERVISOR])
            .arg(dir.path())
            .args(qemu.qemu())
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-machine", "pc", "-accel", accelerator])
            .args(shape.arguments(memory))
            .args(["-kernel", &kernel, "-initrd", &initrd, "-append", &format!("{KERNEL} {}", shape.kernel())])
            .args(["-chardev", &format!("file,id=serial,path={}", path("serial.log")), "-serial", "chardev:serial"])
            .args(["-drive", &format!("{disk},if=virtio,format=raw,cache=unsafe")])
            .args(["-drive", &format!("file={},if=virtio,format=raw,cache=unsafe", path("letterbox"))])
            .args(["-chardev", &socket("monitor"), "-mon", "monitor,mode=control"])
            .args(["-chardev", &socket("agent"), "-device", "virtio-serial-pci"])
            .args(["-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0"])
            .args(more)
            .stdin(Stdio::piped())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let deadline = Instant::now() + PATIENCE;
        let mut wire = |name: &str| loop {
            match Wire::connect(&dir.path().join(name), PATIENCE) {
                Ok(wire) => return Mutex::new(wire),
                // If this panics, the pipe to the supervisor closes.
                Err(error) if supervisor.try_wait().unwrap().is_some() || Instant::now() > deadline => {
                    panic!("QEMU has no {name}: {error}: {}", fs::read_to_string(path("qemu.log")).unwrap_or_default())
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let (monitor, agent) = (wire("monitor"), wire("agent"));
        let alive = supervisor.stdin.take();
        let vm = Vm { supervisor, alive, dir, monitor, agent, letterbox: Mutex::new(letterbox) };
        vm.monitor("qmp_capabilities", Value::Null);
        vm
    }

    /// Where its sockets and logs are; QEMU's command line names it.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Asks QEMU.
    #[track_caller]
    fn monitor(&self, command: &str, arguments: Value) -> Value {
        self.monitor.lock().unwrap().call(command, arguments).unwrap_or_else(|error| panic!("QEMU: {error}"))
    }

    /// Asks the guest agent.
    #[track_caller]
    fn agent(&self, command: &str, arguments: Value) -> Value {
        self.agent.lock().unwrap().call(command, arguments).unwrap_or_else(|error| panic!("guest agent: {error}"))
    }

    /// Has the state saved, or read, without the memory: that is in files already.
    fn ignore_shared(&self) {
        let capability = json!({ "capability": "x-ignore-shared", "state": true });
        self.monitor("migrate-set-capabilities", json!({ "capabilities": [capability] }));
    }

    fn wait_for_migration(&self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let answer = self.monitor("query-migrate", Value::Null);
            match answer["status"].as_str() {
                Some("completed") => return,
                Some("failed") => panic!("{answer}"),
                _ => assert!(Instant::now() < deadline, "{answer}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Runs a program inside and waits for it. Several threads may do so at once.
    #[track_caller]
    pub(crate) fn exec(&self, command: &[&str]) -> Output {
        let request = json!({ "path": command[0], "arg": command[1..], "capture-output": true });
        let process = self.agent("guest-exec", request)["pid"].clone();
        let began = Instant::now();
        loop {
            // Each question costs the machine a little: those after a short while are few.
            let pause = (began.elapsed() / 8).clamp(Duration::from_millis(5), Duration::from_millis(200));
            std::thread::sleep(pause);
            let answer = self.agent("guest-exec-status", json!({ "pid": process }));
            if answer["exited"] == true {
                let text = |key: &str| {
                    let bytes = base64(answer[key].as_str().unwrap_or_default());
                    String::from_utf8_lossy(&bytes).into_owned()
                };
                let signalled = || 128 + answer["signal"].as_i64().unwrap_or_default();
                let status = answer["exitcode"].as_i64().unwrap_or_else(signalled);
                return Output { status, stdout: text("out-data"), stderr: text("err-data") };
            }
            assert!(began.elapsed() < PATIENCE, "still runs after {} s: {command:?}", PATIENCE.as_secs());
        }
    }

    /// Lays a cable between two machines: each gets a network card, the only one it has.
    pub(crate) fn connect(one: &Vm, other: &Vm) {
        let end = |vm: &Vm| vm.dir.path().join("cable").to_str().unwrap().to_owned();
        for (here, there) in [(one, other), (other, one)] {
            let socket = |path: String| json!({ "type": "unix", "path": path });
            let cable =
                json!({ "type": "dgram", "id": "cable", "local": socket(end(here)), "remote": socket(end(there)) });
            here.monitor("netdev_add", cable);
            let last = if std::ptr::eq(here, one) { 1 } else { 2 };
            let card =
                json!({ "driver": "virtio-net-pci", "netdev": "cable", "mac": format!("52:54:00:00:00:0{last}") });
            here.monitor("device_add", card);
        }
    }

    /// Restarts the machine, and waits until it answers again.
    pub(crate) fn reboot(&self) {
        self.exec(&["systemctl", "--no-block", "reboot"]).ok();
        self.monitor.lock().unwrap().event("RESET").unwrap();
        // The agent that was asked last is gone; the rest of that conversation would be in the way.
        *self.agent.lock().unwrap() = Wire::connect(&self.dir.path().join("agent"), PATIENCE).unwrap();
        self.agent("guest-ping", Value::Null);
    }

    /// Puts a file inside, with its directory: it goes through a disk that has no other use, which is faster than the agent.
    #[track_caller]
    pub(crate) fn put(&self, inside: &str, mode: u32, content: &[u8]) {
        const TAKE: &str = r#"mkdir -p "${1%/*}" && dd if=/dev/vdb iflag=direct bs=64K count="$2" status=none |
                              head -c "$3" >"$1" && chmod "$4" "$1""#;
        let letterbox = self.letterbox.lock().unwrap();
        letterbox.write_all_at(content, 0).unwrap();
        let (blocks, bytes, mode) = (content.len().div_ceil(64 << 10), content.len(), format!("{mode:o}"));
        self.exec(&["sh", "-c", TAKE, "take", inside, &blocks.to_string(), &bytes.to_string(), &mode]).ok();
    }
}

impl Drop for Vm {
    /// Ends the machine, and shows the ends of its logs when a test failed.
    fn drop(&mut self) {
        if std::thread::panicking() {
            for name in ["qemu.log", "serial.log"] {
                let log = fs::read(self.dir.path().join(name)).unwrap_or_default();
                let log = String::from_utf8_lossy(&log);
                let lines: Vec<_> = log.lines().collect();
                eprintln!("{name} ends with:\n{}", lines[lines.len().saturating_sub(30)..].join("\n"));
            }
        }
        self.alive = None;
        let _ = self.supervisor.wait();
    }
}
