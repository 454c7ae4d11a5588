//! Which dedicated domains are defined on this host, and which of them start with it.
//!
//! Read from libvirt's own files, `/etc/libvirt/qemu/NAME.xml` and `autostart/NAME.xml` (a link), which libvirt replaces
//! as a whole and keeps current: a hook may read them while libvirt holds a domain's lock. Never asks libvirt, writes
//! nothing, and never fails: a file that cannot be used leaves its domain without a place set aside, which is no reason to
//! refuse another domain's start.

use std::collections::{BTreeMap, BTreeSet};

use crate::alloc::demand::Definition;
use crate::config::settings::Settings;
use crate::decision::{self, Wish};
use crate::error::{Code, Error, Result, printable};
use crate::host::qemu::DEFINITION_DIR;
use crate::host::root::Root;
use crate::uuid::DomainUuid;
use crate::xml::{Domain, former, read};

/// Links to the definitions of the domains that start with the host.
const AUTOSTART_DIR: &str = "/etc/libvirt/qemu/autostart";
/// What every policy names; a document without it can only be dedicated by the configuration.
const NAMESPACES: &str = "urn:virt-pin:";

/// The definitions found.
#[derive(Debug, Default)]
pub struct Definitions {
    /// Those of dedicated domains, each UUID once.
    pub dedicated: Vec<Definition<DomainUuid>>,
    /// Files that could not be used, and why.
    pub unusable: Vec<(String, Error)>,
}

/// The definitions under `root`, with the policies that `settings` have for domains that bring none.
pub fn read(root: &Root, settings: &Settings) -> Definitions {
    let mut found = Definitions::default();
    let mut list = |dir: &str| {
        let names = root.list(dir);
        names.unwrap_or_else(|error| {
            found.unusable.push((dir.to_owned(), error));
            Vec::new()
        })
    };
    let names = list(DEFINITION_DIR);
    // Only looked at where there is something to be started.
    let autostart: BTreeSet<String> =
        if names.is_empty() { BTreeSet::new() } else { list(AUTOSTART_DIR).into_iter().collect() };
    let mut files: BTreeMap<DomainUuid, String> = BTreeMap::new();
    for name in names.iter().filter(|name| name.ends_with(".xml")) {
        let path = format!("{DEFINITION_DIR}/{name}");
        match definition(root, settings, &path, autostart.contains(name)) {
            Ok(None) => {}
            Ok(Some(definition)) => match files.get(&definition.key) {
                None => {
                    files.insert(definition.key, path);
                    found.dedicated.push(definition);
                }
                Some(first) => {
                    let message = format!("has the same UUID as {}", printable(first));
                    found.unusable.push((path, Error::new(Code::DomainInvalid, message)));
                }
            },
            Err(error) => found.unusable.push((path, error)),
        }
    }
    found
}

/// Definitions whose policy element asks for nothing, and what it says.
pub fn in_vain(root: &Root) -> Vec<(String, String)> {
    let names = root.list(DEFINITION_DIR).unwrap_or_default();
    let said = names.iter().filter(|name| name.ends_with(".xml")).filter_map(|name| {
        let text = root.read_if_exists(&format!("{DEFINITION_DIR}/{name}")).ok()??;
        let domain = Domain::parse(Some(&text).filter(|text| text.contains(NAMESPACES))?).ok()?;
        Some((read::identity(&domain).ok()?.name, decision::in_vain(&domain)?))
    });
    said.collect()
}

/// The definition in one file; `None` if its domain is not dedicated, or no more.
fn definition(root: &Root, settings: &Settings, path: &str, autostart: bool) -> Result<Option<Definition<DomainUuid>>> {
    let Some(text) = root.read_if_exists(path)? else { return Ok(None) };
    if !settings.has_sections() && !text.contains(NAMESPACES) {
        return Ok(None);
    }
    // As its owner has it: what we made of a place must not decide where the place is.
    let text = former::restored(&text)?;
    let domain = Domain::parse(&text)?;
    let identity = read::identity(&domain)?;
    let Wish::Dedicated(wish) = decision::wish(root, &domain, &identity, &|| Ok(settings.clone()))? else {
        return Ok(None);
    };
    let key = identity.uuid.ok_or_else(|| Error::new(Code::DomainInvalid, "the domain has no <uuid>"))?;
    Ok(Some(Definition { key, name: identity.name, autostart, request: wish.request }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BANNER: &str = "<!--\nWARNING: THIS IS AN AUTO-GENERATED FILE. CHANGES TO IT ARE LIKELY TO BE\nOVERWRITTEN AND \
                          LOST. Changes to this xml configuration should be made using:\n  virsh edit a\nor other \
                          application using the libvirt API.\n-->\n\n";

    fn domain(name: &str, number: u8, policy: &str) -> String {
        format!(
            "{BANNER}<domain type='kvm'><name>{name}</name><uuid>00000000-0000-0000-0000-0000000000{number:02}</uuid><metadata>{policy}\
             </metadata><memory>1</memory><vcpu>{number}</vcpu></domain>\n"
        )
    }

    fn dedicated(attributes: &str) -> String {
        format!("<pin:cpu xmlns:pin='urn:virt-pin:domain:1' policy='dedicated' {attributes}/>")
    }

    fn found(settings: &str, files: &[(&str, String)]) -> (Vec<(String, bool, u16)>, Vec<String>) {
        let files = files.iter().map(|(name, text)| (format!("{DEFINITION_DIR}/{name}"), text.clone()));
        let found = read(&Root::described(files.collect()), &Settings::merge([("x", settings)]).unwrap());
        let dedicated = found.dedicated.into_iter().map(|one| (one.name, one.autostart, one.request.vcpus));
        let unusable = found.unusable.into_iter().map(|(path, error)| format!("{path}: {error}"));
        (dedicated.collect(), unusable.collect())
    }

    #[test]
    fn dedicated_domains_are_found_with_their_autostart() {
        let files = [
            ("a.xml", domain("a", 1, &dedicated(""))),
            ("-é &.xml", domain("-é &amp;", 2, &dedicated("cores='thread'"))),
            ("shared.xml", domain("shared", 3, &dedicated("").replace("dedicated", "shared"))),
            ("plain.xml", domain("plain", 4, "")),
            ("b.xml~", domain("b", 5, &dedicated(""))),
            ("autostart/-é &.xml", String::new()),
            ("autostart/gone.xml", String::new()),
            ("networks/default.xml", "<network/>".to_owned()),
        ];
        let (one, two) = (("a".to_owned(), false, 1), ("-é &".to_owned(), true, 2));
        assert_eq!(found("", &files), (vec![two.clone(), one.clone()], vec![]));
        let section = "[[domain]]\nmatch = \"pl*\"\npolicy = \"dedicated\"";
        assert_eq!(found(section, &files).0, [two, one, ("plain".to_owned(), false, 4)]);
        assert_eq!(found("", &[]), (vec![], vec![]));
    }

    #[test]
    fn what_cannot_be_used_is_said_and_stands_in_nobodys_way() {
        let files = [
            ("a.xml", domain("a", 1, &dedicated(""))),
            ("b.xml", domain("b", 1, &dedicated(""))),
            ("c.xml", domain("c", 3, &dedicated("cores='half'"))),
            ("d.xml", domain("d", 4, &dedicated("")).replace("</domain>", "")),
            ("e.xml", "rubbish".to_owned()),
        ];
        let (dedicated, unusable) = found("", &files);
        assert_eq!(dedicated, [("a".to_owned(), false, 1)]);
        assert_eq!(unusable.len(), 3);
        assert_eq!(unusable[0], "/etc/libvirt/qemu/b.xml: has the same UUID as /etc/libvirt/qemu/a.xml");
        assert!(unusable[1].contains("unknown value \"half\""), "{unusable:?}");
        assert!(unusable[2].starts_with("/etc/libvirt/qemu/d.xml: "), "{unusable:?}");
    }
}
