//! libvirt's live XML says what the lease says.
//!
//! The threads are where they belong already; this makes `virsh dumpxml`, `vcpupin` and `emulatorpin` tell it. Only what
//! differs is set, so that a second run changes nothing and raises no event.

use crate::error::{Code, Error, Result};
use crate::host::root::Root;
use crate::libvirt::Libvirt;
use crate::lock;
use crate::lock::leases::{Holds, State};
use crate::uuid::DomainUuid;
use crate::xml::{Domain, pin, read};

/// What became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mirrored {
    /// So many pins were set.
    Set(usize),
    /// Its lease is of a kind that leaves its XML alone.
    Not(&'static str),
}

/// Brings a running domain's live XML in line with its lease.
///
/// # Errors
/// [`Code::DomainUnknown`] without a lease; [`Code::LibvirtFailed`], also where the domain does not run, or is another one
/// than the lease is of.
pub fn mirror(root: &Root, libvirt: &Libvirt, uuid: DomainUuid) -> Result<Mirrored> {
    let running = libvirt.running(uuid)?;
    let xml = running.as_ref().map(|running| running.xml()).transpose()?;
    // libvirt may have kept us waiting: the lease is read after the XML it is compared with.
    let leases = lock::read(root)?;
    let lease =
        leases.get(uuid).ok_or_else(|| Error::new(Code::DomainUnknown, format!("no lease for a domain {uuid}")))?;
    let plan = match &lease.holds {
        Holds::Dedicated(plan) => plan,
        Holds::Static(_) => return Ok(Mirrored::Not("is pinned by hand; its XML is its own")),
        Holds::Degraded { .. } => {
            return Ok(Mirrored::Not("runs without CPUs of its own (degraded); its XML is its own"));
        }
    };
    let about = |error: Error| error.in_domain(&lease.name);
    let (Some(running), Some(xml)) = (running, xml) else {
        return Err(about(Error::new(Code::LibvirtFailed, "does not run, so it has no live XML")));
    };
    let live = Domain::parse(&xml)?;
    if lease.state != State::Running || read::identity(&live)?.id != lease.domain_id {
        // Its start failed behind the hook, or it has been started anew; that start has its own turn.
        return Err(about(Error::new(Code::LibvirtFailed, "the lease is not of the VM that runs now")));
    }
    let pins = pin::unsaid(&live, plan).map_err(about)?;
    if !pins.is_empty() {
        running.pin(&pins.vcpus, pins.emulator.as_ref(), &pins.iothreads).map_err(about)?;
    }
    Ok(Mirrored::Set(pins.vcpus.len() + usize::from(pins.emulator.is_some()) + pins.iothreads.len()))
}
