//! The host's services and sessions kept off leased CPUs by systemd: its slices and scopes beside `machine.slice`.
//!
//! systemd owns those cgroups, so it is told, until the next boot, by `systemctl set-property --runtime`; it remembers that in
//! a drop-in, which goes when the last such lease does. Two things do not become what they were to the byte: the kernel
//! refuses to empty the `cpuset.cpus` of a cgroup with tasks, so one that was empty is left with every possible CPU, which
//! means the same; and the cpuset controller stays enabled until systemd finds that nobody needs it. Tasks in the root cgroup
//! (the kernel's) are in no slice and stay where they are.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::cpuset::CpuSet;
use crate::error::{Code, Error, Result};
use crate::failpoint::step;
use crate::host::cgroup::{Hierarchy, hierarchy};
use crate::host::process;
use crate::host::root::Root;
use crate::lock::former::{Former, FormerUnit};

const SYSTEMCTL: &str = "/usr/bin/systemctl";
/// Where systemd keeps what it was told until the next boot.
const CONTROL: &str = "/run/systemd/system.control";
const DROP_IN: &str = "50-AllowedCPUs.conf";
/// For all units together. systemd answers in milliseconds.
const DEADLINE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(5);

/// Whether this host can: where its cgroups are.
///
/// # Errors
/// [`Code::IsolationUnsupported`] with what is missing.
pub fn able(root: &Root) -> Result<String> {
    let missing = match hierarchy(root)? {
        Some(Hierarchy::V2(mount)) if root.exists("/run/systemd/system") && root.exists(SYSTEMCTL) => return Ok(mount),
        Some(Hierarchy::V2(_)) => format!("systemd does not run here, or {SYSTEMCTL} is missing"),
        Some(Hierarchy::V1(mount)) => format!("the cpuset controller is that of cgroup v1 (at {mount})"),
        None => "there is no cpuset controller".to_owned(),
    };
    Err(Error::new(Code::IsolationUnsupported, format!("isolation=\"slices\" needs cgroup v2 and systemd: {missing}")))
}

/// What the unit may have beside these leases.
fn allowed(was: &FormerUnit, leased: &CpuSet, possible: &CpuSet) -> CpuSet {
    let own = was.cpus.as_deref().and_then(|text| CpuSet::parse_kernel_list(text).ok()).unwrap_or_default();
    if own.is_empty() { possible.difference(leased) } else { own.difference(leased) }
}

/// Writes down what the units have that will have to make room.
///
/// # Errors
/// As [`able`]; [`Code::IsolationFailed`] when a unit would be left without a CPU.
pub(super) fn note(root: &Root, leased: &CpuSet, online: &CpuSet, former: &mut Former) -> Result<()> {
    if leased.is_empty() {
        return Ok(());
    }
    let mount = able(root)?;
    for unit in root.list(&mount)? {
        // VMs are kept apart by their own leases.
        if unit == "machine.slice" || !(unit.ends_with(".slice") || unit.ends_with(".scope")) {
            continue;
        }
        let was = match former.units.get(&unit) {
            Some(was) => was.clone(),
            None => FormerUnit {
                cpus: root.read_if_exists(&format!("{mount}/{unit}/cpuset.cpus"))?.map(|text| text.trim().to_owned()),
                drop_in: root.read_if_exists(&format!("{CONTROL}/{unit}.d/{DROP_IN}"))?,
            },
        };
        let left = allowed(&was, leased, online);
        if left.is_disjoint(online) {
            return Err(Error::new(
                Code::IsolationFailed,
                format!("isolation=\"slices\" would leave {unit} no CPU that is online"),
            )
            .with_hint("take CPUs out of pinnable_cpus for the host"));
        }
        former.units.insert(unit, was);
    }
    Ok(())
}

/// Has systemd keep the units that were written down off these CPUs; with none to keep them off, gives back what they had,
/// and forgets those that have it.
///
/// # Errors
/// [`Code::IsolationFailed`] with the first unit that is not where it should be; what was written down stays so.
pub(super) fn apply(root: &Root, leased: &CpuSet, possible: &CpuSet, former: &mut Former) -> Result<()> {
    if former.units.is_empty() {
        return Ok(());
    }
    let mount = able(root)?;
    if leased.is_empty() {
        return restore(root, &mount, possible, former);
    }
    let wanted = former.units.iter().map(|(unit, was)| (unit.clone(), allowed(was, leased, possible)));
    let wanted: Vec<_> = wanted.filter(|(unit, cpus)| !has(root, &mount, unit, cpus)).collect();
    tell(root, wanted.iter().map(|(unit, cpus)| (unit.as_str(), cpus.to_string())))?;
    // systemd answers first and writes then.
    let start = Instant::now();
    for (unit, cpus) in &wanted {
        while root.exists(&format!("{mount}/{unit}")) && !has(root, &mount, unit, cpus) {
            if start.elapsed() > DEADLINE {
                let message = format!("{unit} does not have CPUs {cpus} although systemd was told so");
                return Err(Error::new(Code::IsolationFailed, message));
            }
            std::thread::sleep(PAUSE);
        }
    }
    Ok(())
}

fn restore(root: &Root, mount: &str, possible: &CpuSet, former: &mut Former) -> Result<()> {
    let living = |unit: &&String| root.exists(&format!("{mount}/{unit}"));
    let units = former.units.iter().filter(|(unit, _)| living(unit));
    tell(root, units.map(|(unit, was)| (unit.as_str(), was.cpus.clone().unwrap_or_default())))?;
    let mut left = Ok(());
    former.units.retain(|unit, was| {
        let restored =
            restore_drop_in(root, unit, was.drop_in.as_deref()).and_then(|()| widen(root, mount, unit, was, possible));
        let failed = restored.is_err();
        left = std::mem::replace(&mut left, Ok(())).and(restored);
        failed
    });
    left
}

/// Told of no CPUs, systemd forgets what it was told before, and leaves the kernel's file alone.
fn widen(root: &Root, mount: &str, unit: &str, was: &FormerUnit, possible: &CpuSet) -> Result<()> {
    let file = format!("{mount}/{unit}/cpuset.cpus");
    let Some(found) = root.read_if_exists(&file)? else { return Ok(()) };
    let text = was.cpus.clone().unwrap_or_default();
    if found.trim() == text {
        return Ok(());
    }
    root.write_kernel_file(&file, &format!("{text}\n")).or_else(|error| {
        // Not while there are tasks in it.
        if text.is_empty() { root.write_kernel_file(&file, &format!("{possible}\n")) } else { Err(error) }
    })
}

fn restore_drop_in(root: &Root, unit: &str, text: Option<&str>) -> Result<()> {
    let dir = root.resolve(&format!("{CONTROL}/{unit}.d"));
    let file = dir.join(DROP_IN);
    let failed = |verb: &str, error| Error::io(Code::IsolationFailed, verb, &file, error);
    match step("slices.forget").and_then(|()| fs::remove_file(&file)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed("remove", error)),
        _ => {}
    }
    if let Some(text) = text {
        let made = step("slices.restore")
            .and_then(|()| OpenOptions::new().write(true).create_new(true).mode(0o644).open(&file));
        return made.and_then(|mut made| made.write_all(text.as_bytes())).map_err(|error| failed("write", error));
    }
    // Only if nobody else has anything there.
    let _ = fs::remove_dir(dir);
    let _ = fs::remove_dir(root.resolve(CONTROL));
    Ok(())
}

fn has(root: &Root, mount: &str, unit: &str, cpus: &CpuSet) -> bool {
    let text = root.read_if_exists(&format!("{mount}/{unit}/cpuset.cpus")).ok().flatten();
    text.is_some_and(|text| CpuSet::parse_kernel_list(&text).as_ref() == Ok(cpus))
}

/// Tells systemd, of all units at once, which CPUs they may use until the next boot.
fn tell<'u>(root: &Root, units: impl Iterator<Item = (&'u str, String)>) -> Result<()> {
    let failed = |unit: &str, what: String| {
        Error::new(Code::IsolationFailed, format!("`systemctl set-property --runtime {unit} AllowedCPUs=...` {what}"))
    };
    let mut outcome = Ok(());
    let mut running: Vec<(&str, Child)> = Vec::new();
    for (unit, cpus) in units {
        match start(root, unit, &cpus) {
            Ok(child) => running.push((unit, child)),
            Err(error) => outcome = Err(failed(unit, format!("cannot be run: {error}"))),
        }
    }
    let started = Instant::now();
    for (unit, mut child) in running {
        let ended = loop {
            match child.try_wait() {
                Ok(None) if started.elapsed() < DEADLINE => std::thread::sleep(PAUSE),
                ended => break ended,
            }
        };
        let what = match ended {
            Ok(Some(status)) if status.success() => continue,
            Ok(Some(status)) => format!("failed ({status}); the journal of systemd may say why"),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                format!("did not end within {} s", DEADLINE.as_secs())
            }
            Err(error) => format!("cannot be waited for: {error}"),
        };
        outcome = outcome.and(Err(failed(unit, what)));
    }
    outcome
}

fn start(root: &Root, unit: &str, cpus: &str) -> io::Result<Child> {
    step("slices.tell")?;
    process::command(root.resolve(SYSTEMCTL))
        .args(["--no-ask-password", "--runtime", "set-property", "--", unit])
        .arg(format!("AllowedCPUs={cpus}"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
}
