//! libvirt, for the command line: the only file that names the `virt` crate.
//!
//! Never used by the hook (libvirt would wait for itself), and never while the lease lock is held (a hook would wait for
//! us, and libvirt for the hook).

use std::collections::BTreeMap;

use virt::connect::Connect;
use virt::domain::Domain;
use virt::enumutil::Enum;
use virt::error::ErrorNumber;
use virt::sys::{VIR_DOMAIN_AFFECT_LIVE, VIR_DOMAIN_XML_INACTIVE, VIR_DOMAIN_XML_SECURE};

use crate::cpuset::CpuSet;
use crate::error::{Code, Error, Result, printable};
use crate::host::process;
use crate::uuid::DomainUuid;

/// The daemon that runs the machine's VMs.
pub const URI: &str = "qemu:///system";

/// A connection to the machine's QEMU driver.
#[derive(Clone, Debug)]
pub struct Libvirt {
    connect: Connect,
}

/// A domain that runs.
#[derive(Debug)]
pub struct Running {
    domain: Domain,
    uuid: DomainUuid,
}

/// The version of the installed libvirt library, as (major, minor); no daemon is asked.
///
/// # Errors
/// [`Code::LibvirtFailed`].
pub fn version() -> Result<(u32, u32)> {
    let version = Connect::version().map_err(|error| failed("ask the library for its version", &error))?;
    Ok((version / 1_000_000, version / 1000 % 1000))
}

impl Libvirt {
    /// Connects.
    ///
    /// # Errors
    /// [`Code::LibvirtFailed`].
    pub fn connect() -> Result<Libvirt> {
        // Errors come back as values; the library's habit of printing them as well is turned off.
        virt::error::clear_error_callback();
        let connect = Connect::open(Some(URI)).map_err(|error| failed(&format!("connect to {URI}"), &error))?;
        Ok(Libvirt { connect })
    }

    /// Whether the daemon is still at the other end.
    pub fn is_alive(&self) -> bool {
        self.connect.is_alive().unwrap_or(false)
    }

    /// The domain if it runs.
    ///
    /// # Errors
    /// [`Code::LibvirtFailed`]; a domain that does not exist is an error, one that does not run is `None`.
    pub fn running(&self, uuid: DomainUuid) -> Result<Option<Running>> {
        let domain = self
            .connect
            .lookup_domain_by_uuid_string(&uuid.to_string())
            .map_err(|error| failed(&format!("find the domain {uuid}"), &error))?;
        let active = domain.is_active().map_err(|error| failed("ask whether the domain runs", &error))?;
        Ok(active.then_some(Running { domain, uuid }))
    }
}

impl Libvirt {
    /// The definition that libvirt keeps of a domain (name or UUID), passwords included; `None` if there is no such domain, or
    /// only a running one without a definition.
    ///
    /// # Errors
    /// [`Code::LibvirtFailed`].
    pub fn definition(&self, domain: &str) -> Result<Option<String>> {
        let absent = |error: virt::error::Error| match error.code() {
            Enum::Known(ErrorNumber::NoDomain) => Ok(None),
            _ => Err(failed(&format!("find the domain \"{}\"", printable(domain)), &error)),
        };
        let by_uuid =
            DomainUuid::parse(domain).map(|uuid| self.connect.lookup_domain_by_uuid_string(&uuid.to_string()));
        let found = match by_uuid {
            Some(Ok(found)) => Some(found),
            _ => self.connect.lookup_domain_by_name(domain).map(Some).or_else(absent)?,
        };
        let Some(found) = found else { return Ok(None) };
        if !found.is_persistent().map_err(|error| failed("ask whether the domain is defined", &error))? {
            return Ok(None);
        }
        let text = found.xml_desc(VIR_DOMAIN_XML_INACTIVE | VIR_DOMAIN_XML_SECURE);
        text.map(Some).map_err(|error| failed("read the definition", &error))
    }

    /// Defines a domain, anew or instead of its former definition. One that runs goes on as it is.
    ///
    /// # Errors
    /// [`Code::LibvirtFailed`] with what libvirt dislikes.
    pub fn define(&self, text: &str) -> Result<()> {
        let defined = self.connect.define_domain_xml(text);
        defined.map(|_| ()).map_err(|error| failed("define the domain", &error))
    }
}

impl Running {
    /// The live XML.
    ///
    /// # Errors
    /// [`Code::LibvirtFailed`].
    pub fn xml(&self) -> Result<String> {
        self.domain.xml_desc(VIR_DOMAIN_XML_SECURE).map_err(|error| failed("read the live XML", &error))
    }

    /// Sets the live pins of these vCPUs, the emulator and I/O threads.
    ///
    /// # Errors
    /// [`Code::LibvirtFailed`] at the first one that libvirt refuses.
    pub fn pin(
        &self,
        vcpus: &BTreeMap<u16, CpuSet>,
        emulator: Option<&CpuSet>,
        iothreads: &BTreeMap<u32, CpuSet>,
    ) -> Result<()> {
        for (&vcpu, cpus) in vcpus {
            let pinned = self.domain.pin_vcpu_flags(vcpu.into(), &map(cpus), VIR_DOMAIN_AFFECT_LIVE);
            pinned.map_err(|error| failed(&format!("pin vCPU {vcpu} to CPUs {cpus}"), &error))?;
        }
        if let Some(cpus) = emulator {
            let pinned = self.domain.pin_emulator(&map(cpus), VIR_DOMAIN_AFFECT_LIVE);
            pinned.map_err(|error| failed(&format!("pin the emulator to CPUs {cpus}"), &error))?;
        }
        iothreads.iter().try_for_each(|(&id, cpus)| self.pin_iothread(id, cpus))
    }

    /// The `virt` crate has no call for this one, and this package no unsafe code: virsh makes it.
    fn pin_iothread(&self, id: u32, cpus: &CpuSet) -> Result<()> {
        let refused =
            |what: &str| Error::new(Code::LibvirtFailed, format!("cannot pin I/O thread {id} to CPUs {cpus}: {what}"));
        let output = process::command("timeout")
            // libvirt's calls have no limit of their own, and ours (an alarm) would leave virsh behind.
            .args(["30", "virsh"])
            .args([
                "--connect",
                URI,
                "iothreadpin",
                &self.uuid.to_string(),
                &id.to_string(),
                &cpus.to_string(),
                "--live",
            ])
            .output()
            .map_err(|error| refused(&format!("virsh: {error}")))?;
        if output.status.success() {
            return Ok(());
        }
        Err(refused(String::from_utf8_lossy(&output.stderr).trim()))
    }
}

/// libvirt's form of a set: bit `i % 8` of byte `i / 8` is CPU `i`.
fn map(cpus: &CpuSet) -> Vec<u8> {
    let mut bytes = vec![0; cpus.iter().last().map_or(1, |last| usize::from(last.0) / 8 + 1)];
    for cpu in cpus.iter() {
        if let Some(byte) = bytes.get_mut(usize::from(cpu.0) / 8) {
            *byte |= 1 << (cpu.0 % 8);
        }
    }
    bytes
}

fn failed(what: &str, error: &virt::error::Error) -> Error {
    Error::new(Code::LibvirtFailed, format!("cannot {what}: {}", error.message()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpuset::CpuId;

    #[test]
    fn maps() {
        assert_eq!(map(&CpuSet::from_iter([CpuId(0), CpuId(9), CpuId(15)])), [1, 0b1000_0010]);
        assert_eq!(map(&CpuSet::new()), [0]);
    }
}
