//! `virt-pin sync`: libvirt's live XML says what the lease says.
//!
//! The threads are where they belong already; this makes `virsh dumpxml`, `vcpupin` and `emulatorpin` tell it. Only what
//! differs is set, so that a second run changes nothing and raises no event.

use std::collections::BTreeMap;
use std::io::Read;

use super::{Context, subject};
use crate::alloc::plan::Plan;
use crate::cpuset::CpuSet;
use crate::error::{Code, Error, Result, counted, printable};
use crate::libvirt::Libvirt;
use crate::lock;
use crate::lock::leases::{Holds, State};
use crate::uuid::DomainUuid;
use crate::xml::{Domain, read};

/// No call to a libvirt that hangs is waited for longer.
const PATIENCE_SECS: u32 = 60;

pub(super) fn sync(context: &Context, domain: &str, after_stdin: bool) -> Result<String> {
    // libvirt's calls have no time limit of their own; this ends the process.
    nix::unistd::alarm::set(PATIENCE_SECS);
    if after_stdin {
        // Out of the daemon's session: it is not for us to end with it.
        let _ = nix::unistd::setsid();
    }
    if !after_stdin {
        subject::lease(&lock::read(&context.root)?, domain)?;
    }
    // Connecting takes a while and needs no domain: it overlaps with the end of the hook.
    let libvirt = Libvirt::connect()?;
    if after_stdin {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
    }
    let uuid = subject::lease(&lock::read(&context.root)?, domain)?.uuid;
    let running = libvirt.running(uuid)?;
    let xml = running.as_ref().map(|running| running.xml()).transpose()?;
    // libvirt may have kept us waiting: the lease is read after the XML it is compared with.
    let leases = lock::read(&context.root)?;
    let lease = subject::lease(&leases, &uuid.to_string())?;
    let name = printable(&lease.name);
    let plan = match &lease.holds {
        Holds::Dedicated(plan) => plan,
        Holds::Static(_) => return Ok(format!("Domain \"{name}\" is pinned by hand; its XML is its own.\n")),
        Holds::Degraded { .. } => {
            return Ok(format!("Domain \"{name}\" runs without CPUs of its own (degraded); its XML is its own.\n"));
        }
    };
    let about = |error: Error| error.in_domain(&lease.name);
    let (Some(running), Some(xml)) = (running, xml) else {
        return Err(about(Error::new(Code::LibvirtFailed, "does not run, so it has no live XML")));
    };
    let live = Domain::parse(&xml)?;
    if lease.state != State::Running || read::identity(&live)?.id != lease.domain_id {
        // Its start failed behind the hook, or it has been started anew; that start has its own sync.
        return Err(about(Error::new(Code::LibvirtFailed, "the lease is not of the VM that runs now")));
    }
    let changes = changes(&live, plan).map_err(about)?;
    let count = changes.vcpus.len() + usize::from(changes.emulator.is_some()) + changes.iothreads.len();
    if count == 0 {
        return Ok(format!("Domain \"{name}\": its live XML says what its lease says already.\n"));
    }
    running.pin(&changes.vcpus, changes.emulator.as_ref(), &changes.iothreads).map_err(about)?;
    Ok(format!("Domain \"{name}\": {} of its live XML set.\n", counted(count as u64, "pin")))
}

/// The same once a lease has been moved; the error if libvirt's live XML could not be told, which is no reason to fail.
pub(super) fn after_move(context: &Context, uuid: DomainUuid) -> Option<Error> {
    if !context.root.is_this_machine() {
        return None;
    }
    let told = sync(context, &uuid.to_string(), false);
    // What comes next takes the time it takes.
    let _ = nix::unistd::alarm::cancel();
    told.err().map(|error| {
        Error::new(
            error.code,
            format!("its live XML does not say so (`virt-pin sync {uuid}` tries again): {}", error.message),
        )
    })
}

#[derive(Debug, PartialEq, Eq)]
struct Changes {
    vcpus: BTreeMap<u16, CpuSet>,
    emulator: Option<CpuSet>,
    iothreads: BTreeMap<u32, CpuSet>,
}

/// What the live XML does not say yet.
fn changes(live: &Domain<'_>, plan: &Plan) -> Result<Changes> {
    let pins = read::pins(live)?;
    let vcpus = plan.vcpu_places().filter(|(vcpu, cpus)| pins.vcpus.get(vcpu) != Some(cpus)).collect();
    let emulator = Some(&plan.emulator).filter(|cpus| pins.emulator.as_ref() != Some(cpus)).cloned();
    let iothreads = read::iothread_ids(live)?.into_iter().filter(|id| pins.iothreads.get(id) != Some(&plan.iothreads));
    let iothreads = iothreads.map(|id| (id, plan.iothreads.clone())).collect();
    Ok(Changes { vcpus, emulator, iothreads })
}
