//! `virt-pin check`: does everything hold together? Host, configuration, hook, state, and the leases against reality.
//!
//! In the manner of virt-host-validate: one line per question, PASS, WARN or FAIL, and behind it what to do.

mod foreign;
mod hook;

use super::finding::{Findings, Verdict};
use super::lease::duration;
use super::style::Style;
use super::{Answer, Context, to_json};
use crate::alloc::demand::Demand;
use crate::alloc::plan::Plan;
use crate::alloc::policy::Irqs;
use crate::alloc::pools::pools;
use crate::alloc::{self, Supply};
use crate::config::settings::Settings;
use crate::cpuset::CpuSet;
use crate::decision::{self, Situation, Wish};
use crate::definitions;
use crate::enforce::isolation::{self, irqs, partition, slices};
use crate::enforce::{self, Confinement, binding};
use crate::error::{Code, Error, Result, counted, printable};
use crate::host::cgroup::{Hierarchy, has_machined, hierarchy};
use crate::host::root::Root;
use crate::host::{process, qemu};
use crate::lock;
use crate::lock::former;
use crate::lock::leases::{Holds, Lease, Leases};
use crate::lock::reclaim::reclaim;
use crate::relocate::partition_of;
use crate::xml::{Domain, read};

pub(super) fn check(context: &Context) -> Result<Answer> {
    let mut findings = Findings::default();
    let settings = match context.settings() {
        Ok(settings) => {
            let files = if settings.files.is_empty() { "no file".to_owned() } else { settings.files.join(", ") };
            findings.pass("config", "can be understood", files);
            let idle: Vec<_> = settings.idle_sections().collect();
            let worry = format!("{}: without policy = \"dedicated\" a section asks for no CPUs", idle.join(", "));
            findings.unless("config", "every [[domain]] says its policy", (!idle.is_empty()).then_some(worry));
            Some(settings)
        }
        Err(error) => {
            findings.error("config", "can be understood", &error);
            None
        }
    };
    if let Some(settings) = &settings {
        host(context, settings, &mut findings);
    }
    if !context.root.is_description() {
        if let Some(settings) = &settings {
            domains(context, settings, &mut findings);
        }
        hook::hook(context, settings.as_ref(), &mut findings);
        hook::agent(&context.root, &mut findings);
        state(&context.root, settings.as_ref(), &mut findings);
    }
    let failed = findings.failed();
    let text = if context.json { to_json(&findings)? } else { findings.render(Style::of_stdout()) };
    let failed =
        (failed > 0).then(|| Error::new(Code::CheckFailed, format!("{} failed", counted(failed as u64, "check"))));
    Ok(Answer { text, failed })
}

fn host(context: &Context, settings: &Settings, findings: &mut Findings) {
    let situation = match Situation::read(&context.root, settings, None) {
        Ok(situation) => situation,
        Err(error) => return findings.error("host", "topology can be read", &error),
    };
    let losses = situation.topology.losses();
    findings.unless("host", "topology is fully known", (!losses.is_empty()).then(|| losses.join("; ")));
    let pools = pools(&situation.supply(), []);
    if settings.pinnable.is_empty() {
        let message = "none: every dedicated VM is refused (set pinnable_cpus in /etc/virt-pin/virt-pin.toml)";
        return findings.add("host", "CPUs may be handed out", Verdict::Warn, message);
    }
    findings.pass("host", "CPUs may be handed out", settings.pinnable.to_string());
    let listed = |cpus: &CpuSet, what: &str| (!cpus.is_empty()).then(|| format!("CPUs {cpus} {what}"));
    findings.unless(
        "host",
        "every pinnable CPU is online",
        listed(&settings.pinnable.difference(situation.topology.online()), "are offline or absent: never handed out"),
    );
    foreign::host(&context.root, &situation, findings);
    findings.unless(
        "host",
        "every pinnable CPU is part of a whole pinnable core",
        listed(&pools.withheld, "have a sibling that is not pinnable: only for cores=\"thread\""),
    );
    findings.unless(
        "host",
        "there are housekeeping CPUs",
        pools
            .housekeeping
            .is_empty()
            .then(|| "none: set emulator and iothreads to \"isolate\" or \"share\"".to_owned()),
    );
    confinement(&context.root, findings);
    if !context.root.is_description() {
        isolation_means(&context.root, findings);
    }
}

/// What a policy may ask for here beside keeping other VMs away.
fn isolation_means(root: &Root, findings: &mut Findings) {
    let able = [("partition", partition::able(root)), ("slices", slices::able(root))];
    let can = able.iter().filter(|(_, able)| able.is_ok()).map(|(value, _)| format!("isolation=\"{value}\": yes"));
    let cannot = able.iter().filter_map(|(_, able)| able.as_ref().err().map(|error| error.message.clone()));
    let message = can.chain(cannot).collect::<Vec<_>>().join("; ");
    findings.pass("host", "its own work can be kept off leased CPUs where asked", message);
}

/// What was changed on the host, and whether it is as it should be.
fn isolated(root: &Root, leases: &Leases, findings: &mut Findings) {
    let check = "the host has back what no lease wants";
    match former::read(root) {
        Ok(former) => {
            let remains = isolation::remains(&former, leases);
            let worry = format!("{} (restored at the next event, or by `virt-pin reconcile`)", remains.join("; "));
            findings.unless("state", check, (!remains.is_empty()).then_some(worry));
        }
        Err(error) => findings.error("state", check, &error),
    }
    for lease in leases.iter().filter(|lease| lease.qemu.is_some()) {
        let (Some(plan), Some(policy)) = (lease.plan(), isolation::policy(lease)) else { continue };
        let name = printable(&lease.name);
        if isolation::is_partition(lease) {
            let check = format!("nothing but \"{name}\" runs on its CPUs");
            let flaw = qemu::status(root, &lease.name).and_then(|status| match status {
                Some(status) => partition::flaw(root, &status, plan),
                None => Ok(Some("libvirt has no status file of it (renamed?)".to_owned())),
            });
            match flaw {
                Ok(None) => findings.pass("lease", check, plan.exclusive().to_string()),
                Ok(Some(flaw)) => {
                    findings.add("lease", check, Verdict::Fail, format!("{flaw} (`virt-pin reconcile` makes it anew)"));
                }
                Err(error) => findings.error("lease", check, &error),
            }
        }
        if policy.irqs == Irqs::Away {
            let staying = irqs::on(root, &plan.exclusive()).unwrap_or_default();
            let worry = format!("{}: the kernel does not let them be moved, or irqbalance has", staying.join(", "));
            let check = format!("no device interrupts the CPUs of \"{name}\"");
            findings.unless("lease", check, (!staying.is_empty()).then_some(worry));
        }
    }
}

/// What is defined: whether it can be understood, and whether what starts with the host fits on it.
fn domains(context: &Context, settings: &Settings, findings: &mut Findings) {
    let found = definitions::read(&context.root, settings);
    let unusable = found.unusable.iter().map(|(path, error)| format!("{}: {}", printable(path), error.message));
    let unusable: Vec<_> = unusable.collect();
    let worry = format!("{} (no place is set aside for what a file defines)", unusable.join("; "));
    findings.unless("domain", "every definition can be understood", (!unusable.is_empty()).then_some(worry));
    let vain = definitions::in_vain(&context.root);
    let said: Vec<_> = vain.iter().map(|(name, said)| format!("\"{}\": {said}", printable(name))).collect();
    findings.unless("domain", "every policy says what it is", (!said.is_empty()).then(|| said.join("; ")));
    // That the host cannot be read is said already.
    let Ok(situation) = Situation::read(&context.root, settings, None) else { return };
    let demand = Demand::new(&situation.supply(), found.dedicated);
    let placed = demand.places().filter_map(|(_, place)| place.as_ref().ok());
    let taken = placed.fold(CpuSet::new(), |taken, plan| taken.union(&plan.exclusive()));
    let without = demand.places().filter(|(one, _)| one.autostart).filter_map(|(one, place)| {
        let refusal = place.as_ref().err()?;
        // Now in numbers: beside the places of all the others.
        let why = alloc::plan(&Supply { taken: &taken, ..situation.supply() }, &one.request).err();
        let refusal = why.as_ref().unwrap_or(refusal);
        Some(format!("\"{}\": {}: {}", printable(&one.name), refusal.code, refusal.reason))
    });
    let without: Vec<_> = without.collect();
    let worry = format!("{} (none is set aside for it beside the others)", without.join("; "));
    findings.unless("domain", "every autostart domain has its place", (!without.is_empty()).then_some(worry));
}

fn confinement(root: &Root, findings: &mut Findings) {
    let found = hierarchy(root).and_then(|found| enforce::confinement(root).map(|how| (found, how)));
    let (hierarchy, how) = match found {
        Ok(found) => found,
        Err(error) => return findings.error("host", "cgroups can be read", &error),
    };
    let machined = if has_machined(root) { "with machined" } else { "without machined" };
    let kind = match hierarchy {
        Some(Hierarchy::V1(mount)) => format!("cgroup v1 at {mount}, {machined}"),
        Some(Hierarchy::V2(mount)) => format!("cgroup v2 at {mount}, {machined}"),
        None => "no cpuset controller".to_owned(),
    };
    let check = "VMs are confined before QEMU is executed";
    match how {
        Confinement::Tree { .. } => findings.pass("host", check, format!("{kind}: each thread by its own cgroup")),
        Confinement::Scope => {
            findings.pass("host", check, format!("{kind}: all of QEMU by its scope, each thread when it is started"));
        }
        Confinement::AtStarted => {
            let message = format!("{kind}: threads are bound by affinity alone, when libvirt reports the VM started");
            findings.add("host", check, Verdict::Warn, message);
        }
    }
}

fn state(root: &Root, settings: Option<&Settings>, findings: &mut Findings) {
    match lock::check_safety(root) {
        Ok(()) => findings.pass("state", "nobody else can change the leases", lock::STATE_DIR),
        Err(error) => findings.error("state", "nobody else can change the leases", &error),
    }
    let mut leases = match lock::read(root) {
        Ok(leases) => leases,
        Err(error) => return findings.error("state", "leases can be read", &error),
    };
    findings.pass("state", "leases can be read", counted(leases.iter().count() as u64, "lease"));
    match reclaim(root, &mut leases) {
        Ok(void) => {
            let names: Vec<_> =
                void.iter().map(|(lease, why)| format!("\"{}\": {why}", printable(&lease.name))).collect();
            let worry =
                (!names.is_empty()).then(|| format!("{} (ended at the next event of any VM)", names.join("; ")));
            findings.unless("state", "every lease has a living VM", worry);
        }
        Err(error) => findings.error("state", "every lease has a living VM", &error),
    }
    let now = process::uptime_secs(root);
    let waits = |lease: &&Lease| lease.is_overdue(now) && !qemu::lives(root, &lease.name);
    let waiting: Vec<_> = leases.iter().filter(waits).map(|lease| format!("\"{}\"", printable(&lease.name))).collect();
    let worry = format!("{}: no QEMU yet; `virt-pin reconcile` ends such leases", waiting.join(", "));
    findings.unless("state", "no lease waits for its VM", (!waiting.is_empty()).then_some(worry));
    for lease in leases.iter() {
        let Holds::Degraded { code, reason, .. } = &lease.holds else { continue };
        let check = format!("\"{}\" has CPUs of its own", printable(&lease.name));
        let (age, reason) = (duration(now.saturating_sub(lease.since)), printable(reason));
        let worry = format!(
            "it has been degraded for {age} ({code}: {reason}); stop it and start it again when `virt-pin explain` finds room"
        );
        findings.add("lease", check, Verdict::Warn, worry);
    }
    if let Some(settings) = settings {
        without_lease(root, settings, &leases, findings);
    }
    let situation = settings.and_then(|settings| Situation::read(root, settings, None).ok());
    for lease in leases.iter().filter(|lease| lease.qemu.is_some()) {
        let Some(plan) = lease.plan() else { continue };
        if let Some(moving) = &lease.moving {
            let check = format!("\"{}\" is where its lease says", printable(&lease.name));
            let (to, by) = (moving.to.exclusive(), moving.by.pid);
            let worry =
                format!("process {by} moves it to CPUs {to}; `virt-pin reconcile` ends the move if that has died");
            findings.add("lease", check, Verdict::Warn, worry);
            continue;
        }
        // What may be handed out is another matter in a partition with CPUs of its own.
        let own = partition_of(root, lease);
        let own = own.and_then(|own| Situation::read(root, settings?, Some(&own)).ok());
        let plan = match own.as_ref().or(situation.as_ref()) {
            Some(situation) => cpus_of(&situation.clone().beside(&leases, Some(lease.uuid)), lease, plan, findings),
            None => plan.clone(),
        };
        let check = format!("threads of \"{}\" are where its lease says", printable(&lease.name));
        match qemu::status(root, &lease.name).and_then(|status| match status {
            Some(status) => binding::misplaced(root, &status, &plan),
            None => Err(Error::new(Code::HostIo, "libvirt has no status file of it (renamed?)")),
        }) {
            Ok(misplaced) => match misplaced.iter().min_by_key(|found| found.is_late(&plan)) {
                None => findings.pass("lease", check, plan.exclusive().to_string()),
                Some(found) => {
                    let (name, tid) = (printable(&found.thread.name), found.thread.tid);
                    let message = format!(
                        "\"{name}\" (tid {tid}) may run on CPUs {}, not {}",
                        found.thread.allowed, found.wanted
                    );
                    if found.is_late(&plan) {
                        let way = "all its VM's own; it came later: see `virt-pin sync`, or restart the daemon, which ends no VM";
                        findings.add("lease", check, Verdict::Warn, format!("{message} ({way})"));
                    } else {
                        findings.add("lease", check, Verdict::Fail, message);
                    }
                }
            },
            Err(error) => findings.error("lease", check, &error),
        }
    }
    intruders(root, &leases, findings);
    isolated(root, &leases, findings);
}

/// Whether the lease's CPUs are all there and may still be handed out; the plan as far as it can be held.
fn cpus_of(situation: &Situation, lease: &Lease, plan: &Plan, findings: &mut Findings) -> Plan {
    let (online, name) = (situation.topology.online(), printable(&lease.name));
    let missing = plan.missing(online);
    let now = plan.meanwhile(online, &situation.housekeeping);
    if !missing.is_empty() {
        let worry = format!(
            "CPUs {missing} are offline; what ran there belongs on {} until `virt-pin reconcile` finds others or they are back",
            if now.shared.is_empty() { &now.emulator } else { &now.shared }
        );
        findings.add("lease", format!("the CPUs of \"{name}\" are online"), Verdict::Warn, worry);
    }
    let unnamed = plan.exclusive().difference(&situation.pinnable).intersection(online);
    if !unnamed.is_empty() {
        let worry = format!(
            "{unnamed} are not any more{}: it keeps them until it ends, then they are nobody's to hand out",
            foreign::takers(situation, &unnamed)
        );
        findings.add("lease", format!("the CPUs of \"{name}\" are pinnable"), Verdict::Warn, worry);
    }
    now
}

/// VMs that run without the lease that their policy asks for: started before the hook was there, or past it.
fn without_lease(root: &Root, settings: &Settings, leases: &Leases, findings: &mut Findings) {
    let check = "every dedicated VM that runs has a lease";
    let running = match qemu::running(root) {
        Ok(running) => running,
        Err(error) => return findings.error("lease", check, &error),
    };
    let lacks = |status: &str| -> Result<bool> {
        let live = qemu::live_domain(status).unwrap_or_default();
        let domain = Domain::parse(&live)?;
        let identity = read::identity(&domain)?;
        if identity.uuid.is_some_and(|uuid| leases.get(uuid).is_some()) {
            return Ok(false);
        }
        let wish = decision::wish(root, &domain, &identity, &|| Ok(settings.clone()))?;
        Ok(matches!(wish, Wish::Dedicated(_)))
    };
    let without: Vec<_> = running
        .iter()
        .filter_map(|(name, status)| match lacks(status) {
            Ok(false) => None,
            Ok(true) => Some(format!("\"{}\"", printable(name))),
            Err(error) => Some(format!("\"{}\" ({})", printable(name), error.message)),
        })
        .collect();
    if without.is_empty() {
        return findings.pass("lease", check, "");
    }
    let message = format!(
        "not {}: `virt-pin reconcile` gives it one if its vCPUs are on CPUs of their own; else stop it and start it again",
        without.join(", ")
    );
    findings.add("lease", check, Verdict::Fail, message);
}

/// VMs whose threads may run on CPUs that are leased to another.
fn intruders(root: &Root, leases: &Leases, findings: &mut Findings) {
    let names = root.list(qemu::RUN_DIR).unwrap_or_default();
    let running = names.iter().filter_map(|name| name.strip_suffix(".xml"));
    let mut worries = Vec::new();
    for name in running.filter(|name| qemu::lives(root, name)) {
        let Ok(Some(status)) = qemu::status(root, name) else { continue };
        let own = leases.iter().find(|lease| lease.name == name);
        let others =
            leases.iter().filter(|lease| lease.plan().is_some() && Some(lease.uuid) != own.map(|own| own.uuid));
        let leased = others.fold(CpuSet::new(), |all, lease| all.union(&lease.cpus()));
        let threads = process::threads(root, status.pid).unwrap_or_default();
        let reach = threads.iter().fold(CpuSet::new(), |all, thread| all.union(&thread.allowed)).intersection(&leased);
        if !reach.is_empty() {
            worries.push(format!("\"{}\" may run on leased CPUs {reach}", printable(name)));
        }
    }
    let worry = (!worries.is_empty()).then(|| {
        format!(
            "{} (it came past the hook, or was moved since: `virt-pin reconcile` puts it where it belongs)",
            worries.join("; ")
        )
    });
    findings.unless("lease", "no other VM may run on leased CPUs", worry);
}
