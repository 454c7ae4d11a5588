//! A private machine: the real kernel and programs, but `/etc`, `/usr`, `/var`, `/run`, `/dev`, the process ids, the
//! network and the cpuset cgroup tree are its own.
//!
//! Everything lives in namespaces whose PID 1 is `init.sh`, which waits for the end of its stdin: a pipe from this
//! process. However a test ends (returns, panics, is killed by SIGKILL), the pipe closes, PID 1 exits, and the kernel
//! kills every process and drops every mount in there. Only empty cgroup directories need a hand: the machine's
//! [`Drop`] removes its own, and the next machine those of test processes that are gone.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::needs;

/// The cgroup trees a machine has of its own (where they are mounted).
const TREES: [&str; 2] = ["/sys/fs/cgroup/cpuset", "/sys/fs/cgroup/unified"];

/// Cgroups of machines are named so, then the test process's pid, then a number.
pub(crate) const PREFIX: &str = "virt-pin-live.";

/// Moves the shell into the machine's root cgroups, then becomes the command: entering a cgroup *namespace* alone
/// leaves a process where it was, outside of what the namespace shows.
const JOIN: &str = r#"for tree in /sys/fs/cgroup/{cpuset,unified}; do
    [ ! -e "$tree$0/cgroup.procs" ] || echo $$ >"$tree$0/cgroup.procs"
done
exec "$@""#;

/// A private machine; it ends when this value is dropped.
pub(crate) struct Machine {
    unshare: Child,
    /// Its other end is PID 1's stdin.
    alive: Option<ChildStdin>,
    /// PID 1's pid out here.
    init: u32,
    cgroup: String,
}

/// How a command inside a [`Machine`] ended.
#[derive(Debug)]
pub(crate) struct Output {
    /// Its exit status.
    pub(crate) status: ExitStatus,
    /// All it wrote on stdout.
    pub(crate) stdout: String,
    /// All it wrote on stderr.
    pub(crate) stderr: String,
}

impl Output {
    /// What a command that must succeed printed.
    #[track_caller]
    pub(crate) fn ok(self) -> String {
        assert!(self.status.success(), "{self:#?}");
        self.stdout
    }

    /// What a command that must fail complained about.
    #[track_caller]
    pub(crate) fn refused(self) -> String {
        assert!(!self.status.success(), "{self:#?}");
        self.stderr
    }
}

impl Machine {
    /// Makes the machine; nothing runs in it yet but its PID 1.
    pub(crate) fn boot() -> Machine {
        sweep();
        let cgroup = make_cgroups();
        let init = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/live/init.sh");
        let mut unshare = Command::new("bash")
            .args(["-c", JOIN, &format!("/{cgroup}"), "unshare", "--mount", "--propagation", "private"])
            .args(["--pid", "--net", "--cgroup", "--fork", "--kill-child", "bash", init, &cgroup])
            .env("PATH", needs::PATH)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let alive = unshare.stdin.take();
        let mut line = String::new();
        BufReader::new(unshare.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let mut machine = Machine { unshare, alive, init: 0, cgroup };
        match line.trim().strip_prefix("ready ").map(str::parse) {
            Some(Ok(init)) => machine.init = init,
            _ => {
                machine.alive = None;
                let mut complaint = String::new();
                machine.unshare.stderr.take().unwrap().read_to_string(&mut complaint).unwrap();
                panic!("init.sh failed: {complaint}");
            }
        }
        machine
    }

    /// PID 1's pid in the test's own view.
    pub(crate) fn init(&self) -> u32 {
        self.init
    }

    /// The name of the machine's root cgroup in the real trees.
    pub(crate) fn cgroup(&self) -> &str {
        &self.cgroup
    }

    /// Where a file of the machine is seen from out here. Absolute symbolic links would lead out of the machine.
    pub(crate) fn path(&self, inside: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{inside}", self.init))
    }

    /// The text of a file inside.
    #[track_caller]
    pub(crate) fn file(&self, inside: &str) -> String {
        fs::read_to_string(self.path(inside)).unwrap_or_else(|error| panic!("{inside} in the machine: {error}"))
    }

    /// Puts a file inside, with its directory.
    pub(crate) fn put(&self, inside: &str, mode: u32, content: &[u8]) {
        let path = self.path(inside);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        File::create(&path).unwrap().write_all(content).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
    }

    /// Runs a command inside and waits for it; after a minute it is killed (status 124), so that no test hangs.
    pub(crate) fn exec(&self, command: &[&str]) -> Output {
        let output = Command::new("nsenter")
            .args(["--target", &self.init.to_string(), "--mount", "--pid", "--net", "--cgroup", "--wd=/"])
            .args(["bash", "-c", JOIN, "", "timeout", "--kill-after=1", "60"])
            .args(command)
            .env_clear()
            .envs([("PATH", needs::PATH), ("HOME", "/root"), ("LC_ALL", "C")])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        Output {
            status: output.status,
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Sends a signal (`TERM`, `KILL`, ...) to a process by the pid it has inside.
    #[track_caller]
    pub(crate) fn signal(&self, pid: u32, signal: &str) {
        self.exec(&["bash", "-c", &format!("kill -{signal} {pid}")]).ok();
    }

    /// Whether a process lives, by the pid it has inside.
    pub(crate) fn runs(&self, pid: u32) -> bool {
        self.path(&format!("/proc/{pid}")).exists()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.alive = None;
        let deadline = Instant::now() + Duration::from_secs(5);
        while let Ok(None) = self.unshare.try_wait() {
            if Instant::now() > deadline {
                // unshare's --kill-child passes it on to PID 1.
                let _ = self.unshare.kill();
                let _ = self.unshare.wait();
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        for tree in TREES {
            remove_tree(&Path::new(tree).join(&self.cgroup));
        }
    }
}

/// Makes an empty cgroup in each tree; its name. A cpuset takes processes only when it has CPUs and memory nodes.
fn make_cgroups() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("{PREFIX}{}.{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    for tree in TREES.map(Path::new).into_iter().filter(|tree| tree.join("cgroup.procs").exists()) {
        let ours = tree.join(&name);
        fs::create_dir(&ours).unwrap();
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if let Ok(all) = fs::read(tree.join(file)) {
                File::options().write(true).open(ours.join(file)).unwrap().write_all(&all).unwrap();
            }
        }
    }
    name
}

/// Removes the cgroups of machines whose test process was killed.
pub(crate) fn sweep() {
    for tree in TREES {
        for entry in fs::read_dir(tree).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let owner = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('.').next());
            if owner.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
                remove_tree(&entry.path());
            }
        }
    }
}

/// Removes a cgroup and those below it; what is still in use stays.
fn remove_tree(cgroup: &Path) {
    for entry in fs::read_dir(cgroup).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            remove_tree(&entry.path());
        }
    }
    let _ = fs::remove_dir(cgroup);
}
