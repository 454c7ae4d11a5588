//! What the live tests need of a machine, and what happens where it is missing.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Where programs are looked for, inside and outside: a test runner's own PATH often lacks the sbin directories.
pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Whether live tests can run here. Where they cannot, says so on the terminal, past the test runner's capture.
///
/// # Panics
/// Where they cannot and `VIRT_PIN_LIVE=required` is set: a run that must test must not pass by skipping.
pub(crate) fn met() -> bool {
    static MISSING: OnceLock<Option<String>> = OnceLock::new();
    let Some(why) = MISSING.get_or_init(missing) else { return true };
    assert!(std::env::var_os("VIRT_PIN_LIVE").is_none_or(|v| v != "required"), "live tests are required, but {why}");
    skip(why);
    false
}

/// Says that a test is skipped, on the terminal.
fn skip(why: &str) {
    let test = std::thread::current().name().unwrap_or("live test").to_owned();
    let mut terminal = std::io::stderr();
    writeln!(terminal, "skipped: {test}: {why}").unwrap();
}

/// Where `scripts/unpack` puts programs that are not installed.
const UNPACKED: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/../neighbours");

/// Where a neighbour's program is, installed or unpacked; where it is missing says so, as [`met`].
///
/// # Panics
/// Where it is missing and `VIRT_PIN_NEIGHBOURS=required` is set.
pub(crate) fn neighbour(program: &str) -> Option<String> {
    let unpacked = format!("{UNPACKED}/usr/bin");
    let mut places = PATH.split(':').chain([unpacked.as_str()]).map(|directory| format!("{directory}/{program}"));
    let found = places.find(|path| Path::new(path).exists());
    if found.is_none() {
        let required = std::env::var_os("VIRT_PIN_NEIGHBOURS").is_some_and(|value| value == "required");
        assert!(!required, "neighbours are required, but {program} is not there");
        skip(&format!("{program} is not there (`make neighbours`)"));
    }
    found
}

fn missing() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("only root can make a private libvirtd".to_owned());
    }
    for program in ["libvirtd", "virsh", "qemu-system-x86_64", "unshare", "nsenter", "mount", "timeout", "bash"] {
        if !PATH.split(':').any(|directory| Path::new(directory).join(program).exists()) {
            return Some(format!("{program} is not installed"));
        }
    }
    if !Path::new("/sys/fs/cgroup/cpuset/cpuset.cpus").exists() {
        return Some("the cpuset controller is not mounted at /sys/fs/cgroup/cpuset (cgroup v1)".to_owned());
    }
    // Nothing says beforehand whether a container may do this, so try.
    let overlay = "mount -t tmpfs tmpfs /run && mkdir /run/u /run/w && \
                   mount -t overlay -o lowerdir=/etc,upperdir=/run/u,workdir=/run/w overlay /etc";
    let tried = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "--pid", "--net", "--cgroup", "--fork", "sh", "-c", overlay])
        .env("PATH", PATH)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    if !tried.status.success() {
        return Some(format!("no namespaces to be had: {}", String::from_utf8_lossy(&tried.stderr).trim()));
    }
    if fs::metadata("/dev/pts").is_err() {
        return Some("/dev/pts is missing".to_owned());
    }
    None
}
