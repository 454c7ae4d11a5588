//! Whom a command is about: a name, a UUID, a file or stdin, and the domain XML behind it.
//!
//! Definitions are read from libvirt's own files, not from its daemon: it may hang, and the answer is the same.

use std::io::Read;

use crate::error::{Code, Error, Result, printable};
use crate::host::qemu::{self, DEFINITION_DIR};
use crate::host::root::Root;
use crate::lock::leases::{Lease, Leases};
use crate::uuid::DomainUuid;
use crate::xml::{self, Domain, read};

/// The lease of a domain by name or UUID.
///
/// # Errors
/// [`Code::DomainUnknown`].
pub(super) fn lease<'l>(leases: &'l Leases, domain: &str) -> Result<&'l Lease> {
    let uuid = DomainUuid::parse(domain);
    // A name may look like a UUID; then the name is meant only if no lease has that UUID.
    let by_uuid = uuid.and_then(|uuid| leases.get(uuid));
    by_uuid.or_else(|| leases.iter().find(|lease| lease.name == domain)).ok_or_else(|| {
        Error::new(Code::DomainUnknown, format!("no lease for a domain \"{}\"", printable(domain)))
            .with_hint("`virt-pin list` shows the leases; `virt-pin explain DOMAIN` says what the domain would get")
    })
}

/// The XML of a defined domain (name or UUID), of a file, or of stdin (`-`).
///
/// # Errors
/// [`Code::DomainUnknown`], or [`Code::DomainInvalid`] when what is found is no text of a domain.
pub(super) fn xml(root: &Root, subject: &str) -> Result<String> {
    if subject == "-" {
        return file("-");
    }
    if let Some(text) = definition(root, subject)? {
        return Ok(text);
    }
    if std::path::Path::new(subject).is_file() {
        return file(subject);
    }
    Err(Error::new(
        Code::DomainUnknown,
        format!("no domain and no file is named \"{}\" (looked in {DEFINITION_DIR})", printable(subject)),
    )
    .with_hint("transient domains have no definition: give a file, or `virsh dumpxml DOMAIN | virt-pin explain -`"))
}

/// The text of an XML file; `-` is stdin.
///
/// # Errors
/// [`Code::DomainUnknown`] for a file that is not there, [`Code::DomainInvalid`] for one that is no text of a domain.
pub(super) fn file(path: &str) -> Result<String> {
    let limit = u64::try_from(xml::MAX_BYTES).unwrap_or(u64::MAX) + 1;
    let mut bytes = Vec::new();
    let read = if path == "-" {
        std::io::stdin().lock().take(limit).read_to_end(&mut bytes)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes))
    };
    read.map_err(|error| {
        let (code, hint) = if error.kind() == std::io::ErrorKind::NotFound {
            (Code::DomainUnknown, "name an XML file, or - for stdin")
        } else {
            (Code::DomainInvalid, "look at the path and the reason in the message")
        };
        Error::io(code, "read", path.as_ref(), error).with_hint(hint)
    })?;
    let text = xml::text_of(bytes).and_then(|text| Domain::parse(&text).map(drop).map(|()| text));
    text.map_err(|mut error| {
        let place = if path == "-" { "stdin" } else { path };
        error.message = format!("{}: {}", printable(place), error.message);
        error
    })
}

/// libvirt's persistent definition of a domain.
fn definition(root: &Root, subject: &str) -> Result<Option<String>> {
    if let Some(path) = qemu::file_of(DEFINITION_DIR, subject, ".xml") {
        if let Some(text) = root.read_if_exists(&path)? {
            return Ok(Some(text));
        }
    }
    let Some(uuid) = DomainUuid::parse(subject) else { return Ok(None) };
    for text in definitions(root)? {
        let same = Domain::parse(&text).and_then(|domain| read::identity(&domain));
        if same.is_ok_and(|identity| identity.uuid == Some(uuid)) {
            return Ok(Some(text));
        }
    }
    Ok(None)
}

/// Every persistent definition.
fn definitions(root: &Root) -> Result<Vec<String>> {
    let names = root.list(DEFINITION_DIR)?;
    let paths = names.iter().filter(|name| name.ends_with(".xml")).map(|name| format!("{DEFINITION_DIR}/{name}"));
    paths.filter_map(|path| root.read_if_exists(&path).transpose()).collect()
}
