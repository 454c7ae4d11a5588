//! `virt-pin install` and `uninstall`: the hook where libvirt looks for it, and nobody else's script harmed.
//!
//! libvirt >= 6.5 runs every executable in `/etc/libvirt/hooks/qemu.d/`; before that only `/etc/libvirt/hooks/qemu`. The
//! hook is a copy, not a link: AppArmor judges a link by its target. It is executable from its first instant there: a
//! hook that cannot be executed when the daemon reconnects to its VMs kills them.

use std::fs::{self, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::Context;
use super::replace::{Access, replace};
use crate::enforce::{isolation, scope};
use crate::error::{Code, Error, Result, counted};
use crate::host::root::Root;
use crate::host::{process, qemu};
use crate::libvirt;
use crate::lock::leases::Leases;
use crate::lock::{self, DEADLINE, StateLock};

/// Where libvirt looks.
pub(super) const HOOKS: &str = "/etc/libvirt/hooks";
/// The hook's place with libvirt >= 6.5.
pub(super) const IN_DIRECTORY: &str = "/etc/libvirt/hooks/qemu.d/10-virt-pin";
/// The hook's place before.
pub(super) const ALONE: &str = "/etc/libvirt/hooks/qemu";
/// Where packages put the program to be copied.
const PACKAGED: &str = "/usr/lib/virt-pin/virt-pin-hook";
/// In every build of the hook (its usage text), and in nobody else's script.
const MARK: &[u8] = b"usage: virt-pin-hook NAME OPERATION";
/// The first libvirt with `qemu.d/`.
const WITH_DIRECTORY: (u32, u32) = (6, 5);

pub(super) fn install(context: &Context, named: Option<&Path>, reload: bool) -> Result<String> {
    let source = match named {
        Some(file) => file.to_owned(),
        None => find_hook()?,
    };
    let hook = program(&source).map_err(|error| Error::io(Code::HostIo, "read", &source, error))?;
    if !is_ours(&hook) {
        return Err(Error::new(Code::Usage, format!("{} is not the virt-pin hook", source.display()))
            .with_hint("name the program virt-pin-hook of this build, or leave --hook out"));
    }
    let root = &context.root;
    let place = if libvirt::version()? >= WITH_DIRECTORY { IN_DIRECTORY } else { ALONE };
    let target = root.resolve(place);
    let before = match program(&target) {
        Ok(found) if !is_ours(&found) => {
            return Err(Error::new(
                Code::InstallConflict,
                format!("{} is somebody else's script; it was left as it is", target.display()),
            ));
        }
        Ok(found) => Some(found),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(Error::io(Code::HostIo, "read", &target, error)),
    };
    if before.as_deref() == Some(&hook) && is_executable(&target) {
        return Ok(format!("The hook is installed already: {}\n", target.display()));
    }
    // Beside `qemu.d`, not in it: libvirt runs every executable it finds there, whatever its name.
    let temporary = root.resolve(&format!("{HOOKS}/.virt-pin-hook.new"));
    replace(&target, &temporary, &hook, &Access::Mode(0o755))?;
    let mut out = format!("Installed the hook: {}\n", target.display());
    if before.is_some() {
        out.push_str(
            "It replaces an earlier one; libvirt runs the new one from now on, nothing has to be restarted.\n",
        );
    } else {
        out.push_str(&reloaded_or_advice(root, reload, "see the hook"));
    }
    let mut running = root.list(qemu::RUN_DIR)?.into_iter();
    let running = running.any(|name| name.strip_suffix(".xml").is_some_and(|name| qemu::lives(root, name)));
    if running && before.is_none() {
        out.push_str("VMs run already: `virt-pin reconcile` gives the dedicated and hand-pinned ones their leases.\n");
    }
    if !Path::new("/etc/virt-pin/virt-pin.toml").exists() && root.is_this_machine() {
        out.push_str(
            "Next: say which CPUs may be handed out, in /etc/virt-pin/virt-pin.toml: pinnable_cpus = \"2-7\"\n",
        );
    }
    Ok(out)
}

pub(super) fn uninstall(context: &Context, reload: bool) -> Result<String> {
    let root = &context.root;
    let mut out = String::new();
    for place in [IN_DIRECTORY, ALONE] {
        let path = root.resolve(place);
        if program(&path).is_ok_and(|found| is_ours(&found)) {
            fs::remove_file(&path).map_err(|error| Error::io(Code::HostIo, "remove", &path, error))?;
            out.push_str(&format!("Removed the hook: {}\n", path.display()));
        }
    }
    // Ours if it is empty; somebody else's otherwise.
    let _ = fs::remove_dir(root.resolve(&format!("{HOOKS}/qemu.d")));
    if out.is_empty() {
        return Ok("The hook is not installed.\n".to_owned());
    }
    out.push_str(&reloaded_or_advice(root, reload, "no longer look for it (until then every start fails)"));
    if let Err(error) = give_back(root) {
        out.push_str(&format!("What was changed for VMs is still as it was: {}\n", error.message));
    }
    let held = lock::read(root).map(|leases| leases.iter().count()).unwrap_or_default();
    if held > 0 {
        out.push_str(&format!(
            "Left in {}: {}. The VMs keep running where they are; a reboot clears it.\n",
            lock::STATE_DIR,
            counted(held as u64, "lease")
        ));
    }
    Ok(out)
}

/// Undoes what only the hook would undo later: what keeps the host's own work off leased CPUs, and what waits for VMs to start.
fn give_back(root: &Root) -> Result<()> {
    scope::remove_all(root)?;
    if !root.exists(lock::STATE_DIR) {
        return Ok(());
    }
    let mut state = StateLock::acquire(root, DEADLINE)?;
    isolation::settle(root, &mut state, &Leases::default())
}

/// The hook program beside this command, or where packages put it.
pub(super) fn find_hook() -> Result<PathBuf> {
    let exe = std::env::current_exe().ok();
    let beside = exe.as_ref().map(|exe| exe.with_file_name("virt-pin-hook"));
    // PREFIX/bin/virt-pin and PREFIX/lib/virt-pin/virt-pin-hook.
    let prefix = exe.as_ref().and_then(|exe| exe.parent()?.parent());
    let under_prefix = prefix.map(|prefix| prefix.join("lib/virt-pin/virt-pin-hook"));
    let candidates: Vec<PathBuf> = beside.into_iter().chain(under_prefix).chain([PACKAGED.into()]).collect();
    candidates.iter().find(|path| path.is_file()).cloned().ok_or_else(|| {
        let looked: Vec<_> = candidates.iter().map(|path| path.display().to_string()).collect();
        Error::new(Code::Usage, format!("cannot find virt-pin-hook (looked for {})", looked.join(", ")))
            .with_hint("name it with --hook FILE")
    })
}

/// A program that may be our hook. What is no file is not read: a pipe in its place would be waited for, a device without end.
pub(super) fn program(path: &Path) -> io::Result<Vec<u8>> {
    /// Many times ours.
    const MAX_BYTES: u64 = 256 << 20;
    let file = OpenOptions::new().read(true).custom_flags(nix::fcntl::OFlag::O_NONBLOCK.bits()).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut program = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut program)?;
    Ok(program)
}

/// Whether a file is (some build of) our hook.
pub(super) fn is_ours(program: &[u8]) -> bool {
    program.windows(MARK.len()).any(|window| window == MARK)
}

pub(super) fn is_executable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.permissions().mode() & 0o111 == 0o111)
}

/// Has the running daemons notice, or says what has to be done for that.
fn reloaded_or_advice(root: &Root, reload: bool, so_that: &str) -> String {
    if !reload {
        return reload_advice(root, so_that);
    }
    // What `systemctl reload` does, with or without systemd. The system's own daemons write these files.
    let running = ["libvirtd", "virtqemud"].into_iter().filter_map(|daemon| {
        let pid: u32 = root.read_if_exists(&format!("/run/{daemon}.pid")).ok()??.trim().parse().ok()?;
        let (name, _) = process::name_and_parent(root, pid)?;
        (name == daemon).then_some((daemon, pid))
    });
    let told =
        running.map(|(daemon, pid)| match i32::try_from(pid).map(|pid| kill(Pid::from_raw(pid), Signal::SIGHUP)) {
            Ok(Ok(())) => format!("{daemon}, pid {pid}, was told to reload, to {so_that}.\n"),
            _ => reload_advice(root, so_that),
        });
    let told: String = told.collect();
    if told.is_empty() { "No libvirt daemon runs now; it looks for hooks when it starts.\n".to_owned() } else { told }
}

/// What has to be done so that the running daemon notices.
fn reload_advice(root: &Root, so_that: &str) -> String {
    let how = if root.exists("/run/systemd/system") {
        "systemctl reload libvirtd (or virtqemud)".to_owned()
    } else if let Some((name, pid)) = daemon(root) {
        format!("kill -HUP {pid} ({name})")
    } else {
        return "No libvirt daemon runs now; it looks for hooks when it starts.\n".to_owned();
    };
    format!("The running daemon has to reload to {so_that}: {how}\n")
}

/// The libvirt daemon that runs now, by its processes' names.
pub(super) fn daemon(root: &Root) -> Option<(String, u32)> {
    let pids = root.list("/proc").ok()?;
    pids.iter().filter_map(|name| name.parse::<u32>().ok()).find_map(|pid| {
        let (name, _) = process::name_and_parent(root, pid)?;
        matches!(name.as_str(), "libvirtd" | "virtqemud").then_some((name, pid))
    })
}
