//! Is the hook where libvirt runs it, the one of this build, seen by the daemon; and is there an agent?

use std::fs;

use super::{Findings, Verdict};
use crate::cli::Context;
use crate::cli::install::{ALONE, IN_DIRECTORY, daemon, find_hook, is_executable, is_ours, program};
use crate::config::settings::Settings;
use crate::host::process;
use crate::host::root::Root;
use crate::lock;
use crate::report;

pub(super) fn hook(context: &Context, settings: Option<&Settings>, findings: &mut Findings) {
    let root = &context.root;
    let places = [IN_DIRECTORY, ALONE].map(|place| (place, root.resolve(place)));
    let ours: Vec<_> = places
        .iter()
        .filter_map(|(place, path)| Some((place, path, program(path).ok().filter(|it| is_ours(it))?)))
        .collect();
    let Some((place, path, installed)) = ours.first() else {
        return findings.add("hook", "is installed", Verdict::Fail, "not found: run `virt-pin install`");
    };
    findings.pass("hook", "is installed", **place);
    findings.unless("hook", "is installed once", (ours.len() > 1).then(|| format!("also as {ALONE}: remove one")));
    if let Ok(beside) = find_hook() {
        // A hook that is copied once stays what it was when the package is upgraded.
        let other = program(&beside).is_ok_and(|beside| beside != *installed);
        let worry = format!(
            "it is of another build than {}, which belongs to this command (`virt-pin install` replaces it; no VM is disturbed)",
            beside.display()
        );
        findings.unless("hook", "is of this build", other.then_some(worry));
    }
    if !is_executable(path) {
        let message =
            "it is not: VMs would be killed when the daemon restarts (chmod 0755 it, or `virt-pin install` again)";
        findings.add("hook", "is executable", Verdict::Fail, message);
    }
    let link = fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink());
    findings.unless(
        "hook",
        "is a file of its own",
        link.then(|| {
            "it is a symbolic link: AppArmor may deny its target (`virt-pin install` makes a copy)".to_owned()
        }),
    );
    seen_by_daemon(root, path, findings);
    if let Some(settings) = settings {
        let found = is_executable(&root.resolve(&settings.command));
        let message = format!(
            "{} is not there: live XML will not show leases (set command in the configuration)",
            settings.command
        );
        findings.unless("hook", "finds the virt-pin command", (!found).then_some(message));
    }
}

pub(super) fn agent(root: &Root, findings: &mut Findings) {
    let message = "it does not: definitions keep the topology they have (`virt-pin define` gives them the true one), threads that \
                   somebody moves stay where they are, and there are no metrics (systemctl enable --now virt-pin-agent)";
    findings.unless("agent", "runs", (!report::agent_lives(root)).then(|| message.to_owned()));
}

/// The daemon looks for hooks when it starts and when it reloads. A hook newer than the daemon is seen only if it has
/// reloaded since, which cannot be read anywhere; a lease granted under this daemon proves it.
fn seen_by_daemon(root: &Root, hook: &std::path::Path, findings: &mut Findings) {
    let check = "is seen by the daemon";
    let Some((name, pid)) = daemon(root) else {
        // systemd starts it again when somebody asks for it; it then looks for hooks.
        let sockets = ["/run/libvirt/libvirt-sock", "/run/libvirt/virtqemud-sock"];
        if root.exists("/run/systemd/system") && sockets.iter().any(|socket| root.exists(socket)) {
            return findings.pass("hook", check, "it sleeps, and will when its socket wakes it");
        }
        return findings.add("hook", check, Verdict::Warn, "no libvirt daemon runs");
    };
    let started = fs::metadata(root.resolve(&format!("/proc/{pid}"))).and_then(|found| found.modified());
    let installed = fs::metadata(hook).and_then(|found| found.created().or_else(|_| found.modified()));
    let older = started.and_then(|started| installed.map(|installed| installed < started)).unwrap_or(false);
    let daemon = process::process(root, pid).ok().flatten();
    let proven =
        daemon.is_some() && lock::read(root).is_ok_and(|leases| leases.iter().any(|lease| lease.daemon == daemon));
    if older || proven {
        return findings.pass("hook", check, format!("{name}, pid {pid}"));
    }
    let worry = format!("it was installed after {name} started: reload it if you have not (kill -HUP {pid})");
    findings.add("hook", check, Verdict::Warn, worry);
}
