//! Keeps the host's own work off the CPUs of leases whose policy asks for that, and gives it back its CPUs afterwards.
//!
//! [`partition`] makes a VM's CPUs cpuset partitions, [`slices`] has systemd keep services and sessions elsewhere, [`irqs`]
//! steers device interrupts away. What is to hold follows from the leases alone ([`Wanted`]); what the host had before is
//! written down before it is changed. So [`settle`] is the same call when a lease comes, when it goes and after a crash, and
//! who has all it should have is not touched. VMs are kept off each other's CPUs elsewhere (`enforce::pool`).

mod exclusive;
pub mod irqs;
pub mod partition;
mod seats;
pub mod slices;

use crate::alloc::plan::Plan;
use crate::alloc::policy::{Irqs, Isolation, Policy};
use crate::cpuset::CpuSet;
use crate::error::{Code, Error, Result};
use crate::host::root::Root;
use crate::lock::StateLock;
use crate::lock::former::Former;
use crate::lock::leases::{Lease, Leases, State};
use crate::uuid::DomainUuid;

/// The CPUs that leases want for themselves, by whom they are to be left alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// By every other task.
    pub partitions: CpuSet,
    /// By services and sessions of the host.
    pub slices: CpuSet,
    /// By device interrupts.
    pub irqs: CpuSet,
}

impl Wanted {
    /// What these leases want, but for this domain's; those of VMs that may never be started left out. One that moves wants
    /// it in both places.
    pub fn of(leases: &Leases, except: Option<DomainUuid>) -> Wanted {
        let mut wanted = Wanted::default();
        for lease in leases.iter().filter(|lease| lease.state != State::Provisional && Some(lease.uuid) != except) {
            if let Some(policy) = policy(lease) {
                lease.plans().for_each(|plan| wanted.add(policy, plan));
            }
        }
        wanted
    }

    fn add(&mut self, policy: &Policy, plan: &Plan) {
        let cpus = plan.exclusive();
        match policy.isolation {
            Isolation::Partition => self.partitions.add(&cpus),
            Isolation::Slices => self.slices.add(&cpus),
            Isolation::Vms => {}
        }
        if policy.irqs == Irqs::Away {
            self.irqs.add(&cpus);
        }
    }
}

/// The policy that a lease answers, where that is known.
pub fn policy(lease: &Lease) -> Option<&Policy> {
    lease.request.as_ref().map(|request| &request.policy)
}

/// Whether the lease's CPUs are to be partitions.
pub fn is_partition(lease: &Lease) -> bool {
    policy(lease).is_some_and(|policy| policy.isolation == Isolation::Partition)
}

/// Whether this host can keep its own work off this plan's CPUs as the policy asks, beside these other leases. Changes nothing.
///
/// # Errors
/// [`Code::PolicyUnsupported`] for a combination that has no partition, [`Code::IsolationUnsupported`] where the host has not
/// the means, [`Code::IsolationFailed`] where nothing would be left to the host.
pub fn check(root: &Root, policy: &Policy, plan: &Plan, iothreads: &[u32], others: &Wanted) -> Result<()> {
    match policy.isolation {
        Isolation::Vms if policy.irqs == Irqs::Stay => return Ok(()),
        Isolation::Vms => {}
        Isolation::Partition => {
            let seats = seats::seats(plan, iothreads)?;
            means(root, partition::able)?;
            if !root.is_description() {
                partition::alone(root, &seats)?;
            }
        }
        Isolation::Slices => means(root, slices::able)?,
    }
    let mut wanted = others.clone();
    wanted.add(policy, plan);
    let online = online(root)?;
    irqs::check(&wanted.irqs, &online)?;
    if policy.isolation != Isolation::Vms && online.is_subset(&wanted.partitions.union(&wanted.slices)) {
        let message = format!("isolation would leave the host no CPU: CPUs {online} are all that is online");
        return Err(Error::new(Code::IsolationFailed, message).with_hint("take CPUs out of pinnable_cpus for the host"));
    }
    Ok(())
}

/// A description of a machine does not say what its cgroups can.
fn means(root: &Root, able: fn(&Root) -> Result<String>) -> Result<()> {
    if root.is_description() { Ok(()) } else { able(root).map(drop) }
}

/// Makes the host what these leases want, and restores what nobody wants any more. Partitions of VMs are not made here, but
/// what is left above those that have gone is cleaned up. Costs a look at one file where nothing was ever changed.
///
/// # Errors
/// The first of what could not be done, [`Code::IsolationFailed`] mostly; the rest is done. Those of the former values.
pub fn settle(root: &Root, state: &mut StateLock, leases: &Leases) -> Result<()> {
    let wanted = Wanted::of(leases, None);
    let mut former = state.former()?;
    if former.is_empty() && wanted.slices.is_empty() && wanted.irqs.is_empty() {
        return Ok(());
    }
    let online = online(root)?;
    let possible = possible(root).unwrap_or_else(|_| online.clone());
    let mut kept = former.clone();
    let noted = slices::note(root, &wanted.slices, &online, &mut former)
        .and_then(|()| irqs::note(root, &wanted.irqs, &mut former));
    if noted.is_ok() {
        keep(state, &mut kept, &former)?;
        irqs::apply(root, &wanted.irqs, &online, &mut former);
    }
    let moved = noted.and_then(|()| slices::apply(root, &wanted.slices, &possible, &mut former));
    let pruned = exclusive::prune(root, &mut former);
    keep(state, &mut kept, &former)?;
    moved.and(pruned)
}

fn keep(state: &mut StateLock, kept: &mut Former, former: &Former) -> Result<()> {
    if kept != former {
        state.keep_former(former)?;
        kept.clone_from(former);
    }
    Ok(())
}

/// What was changed on the host that none of these leases wants, in words: the remains of a crash.
pub fn remains(former: &Former, leases: &Leases) -> Vec<String> {
    let wanted = Wanted::of(leases, None);
    let mut remains = Vec::new();
    let mut tell = |what: Vec<&String>, unwanted: bool, title: &str| {
        if unwanted && !what.is_empty() {
            let names: Vec<&str> = what.into_iter().map(String::as_str).collect();
            remains.push(format!("{title} {}", names.join(", ")));
        }
    };
    tell(former.exclusive.keys().collect(), wanted.partitions.is_empty(), "cpuset.cpus.exclusive of");
    tell(former.units.keys().collect(), wanted.slices.is_empty(), "the CPUs of");
    tell(former.irqs.keys().collect(), wanted.irqs.is_empty(), "interrupts:");
    remains
}

fn online(root: &Root) -> Result<CpuSet> {
    list(root, "/sys/devices/system/cpu/online")
}

fn possible(root: &Root) -> Result<CpuSet> {
    list(root, "/sys/devices/system/cpu/possible")
}

fn list(root: &Root, file: &str) -> Result<CpuSet> {
    CpuSet::parse_kernel_list(&root.read(file)?)
        .map_err(|error| Error::new(Code::HostIo, format!("{file} is no CPU list")).because(error))
}
