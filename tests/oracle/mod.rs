//! What must hold of every rewriting, whatever the document, and what others say about documents: libvirt's schema
//! (through xmllint) and libvirt itself (its test driver needs no daemon).

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use roxmltree::Node;
use virt_pin::alloc::plan::Plan;
use virt_pin::cpuset::CpuSet;
use virt_pin::error::Result;
use virt_pin::xml::pin::{Scope, rewrite};
use virt_pin::xml::{Domain, read};

const SCHEMA: &str = "/usr/share/libvirt/schemas/domain.rng";

/// Rewrites a document and checks everything that can be checked without knowing the document.
pub(crate) fn rewritten(text: &str, plan: &Plan, scope: Scope) -> Result<String> {
    let domain = Domain::parse(text)?;
    let edits = rewrite(&domain, plan, scope)?;
    let out = edits.apply(text);

    // Bytes outside the edits are identical.
    let (mut rest, mut at) = (out.as_str(), 0);
    for edit in edits.iter() {
        rest = rest.strip_prefix(&text[at..edit.range.start]).expect("bytes before an edit changed");
        rest = rest.strip_prefix(edit.text.as_str()).expect("an edit is not in the output");
        at = edit.range.end;
    }
    assert_eq!(rest, &text[at..]);

    // The output says the plan, and a second run has nothing to do.
    let after = Domain::parse(&out).unwrap_or_else(|error| panic!("{error}: {:?}\n{out}", error.causes()));
    let again = rewrite(&after, plan, scope).unwrap();
    assert!(again.is_empty(), "a second run changes {again:?} in\n{out}");
    let pins = read::pins(&after).unwrap_or_else(|error| panic!("{error}\n{out}"));
    let single = |cpu| [cpu].into_iter().collect::<CpuSet>();
    assert_eq!(pins.vcpus, (0..).zip(plan.vcpus.iter().map(|cpu| single(*cpu))).collect());
    assert_eq!(pins.emulator.as_ref(), Some(&plan.emulator));
    let ids = read::iothread_ids(&after).unwrap();
    assert_eq!(pins.iothreads, ids.iter().map(|id| (*id, plan.iothreads.clone())).collect());
    let root = roxmltree::Document::parse(&out).unwrap();
    let vcpu = root.root_element().children().find(|child| child.has_tag_name("vcpu")).unwrap();
    assert_eq!(CpuSet::parse_libvirt_cpuset(vcpu.attribute("cpuset").unwrap()).unwrap(), plan.allowed());
    assert_ne!(vcpu.attribute("placement"), Some("auto"));
    match (scope, plan.guest) {
        (Scope::Everything, Some(guest)) => assert_eq!(read::topology(&after).unwrap(), Some(guest)),
        _ => assert_eq!(read::topology(&after).ok(), read::topology(&domain).ok()),
    }

    // Nothing but what we own differs.
    let (old, new) = (skeleton(text), skeleton(&out));
    if let Some((old, new)) = old.iter().zip(&new).find(|(old, new)| old != new) {
        panic!("{old} has become {new} in\n{out}");
    }
    assert_eq!(old.len(), new.len(), "\n{out}");
    Ok(out)
}

/// Everything in a document that is not ours and not white space, in order, each with its path.
fn skeleton(text: &str) -> Vec<String> {
    let document = roxmltree::Document::parse(text).unwrap();
    document.descendants().filter(|node| !node.is_root()).filter_map(foreign).collect()
}

fn foreign(node: Node<'_, '_>) -> Option<String> {
    let mut path: Vec<&str> = node.ancestors().skip(1).map(|node| node.tag_name().name()).collect();
    path.reverse();
    let place = path.join("/");
    if !node.is_element() {
        // White space between elements is layout; the 1 may be that of a <vcpu> we inserted.
        let text = node.text().filter(|_| node.is_text()).map(str::trim);
        let ours = text == Some("") || (text == Some("1") && place == "/domain/vcpu");
        return (!ours).then(|| format!("{place} {:?}", &node.document().input_text()[node.range()]));
    }
    let name = node.tag_name().name();
    let plain = node.tag_name().namespace().is_none();
    let owned: &[&str] = match (place.as_str(), name) {
        ("/domain/cputune", "vcpupin" | "emulatorpin" | "iothreadpin") if plain => return None,
        ("/domain/cpu", "topology") if plain => &["sockets", "dies", "clusters", "cores", "threads"],
        ("/domain", "vcpu") if plain => &["placement", "cpuset"],
        _ => &[],
    };
    let mut line = format!("{place} <{:?}", node.tag_name());
    for attribute in node.attributes().filter(|attribute| !owned.contains(&attribute.name())) {
        write!(line, " {:?}={:?}", attribute.name(), attribute.value()).unwrap();
    }
    // What we insert when it is missing has no attributes of others.
    let may_be_new =
        plain && matches!((place.as_str(), name), ("/domain", "cputune" | "cpu") | ("/domain/cpu", "topology"));
    let may_be_new = may_be_new || (plain && place == "/domain" && name == "vcpu" && node.text() == Some("1"));
    let bare = !node.attributes().any(|attribute| !owned.contains(&attribute.name()));
    (!(may_be_new && bare)).then_some(line)
}

/// Somebody who accepts a document, refuses it, or is not there to ask.
pub(crate) type Oracle = fn(&[u8]) -> Option<bool>;

/// Whether libvirt's schema accepts a document; `None` where the schema or xmllint is not installed.
pub(crate) fn schema_accepts(document: &[u8]) -> Option<bool> {
    if !Path::new(SCHEMA).exists() {
        return None;
    }
    let mut xmllint = Command::new("xmllint");
    let mut child = xmllint
        .args(["--noout", "--relaxng", SCHEMA, "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    // xmllint closes its end early where the text is hopeless.
    let _ = child.stdin.take()?.write_all(document);
    Some(child.wait().ok()?.success())
}

/// Whether libvirt defines a document, as a domain of its test driver; `None` where virsh is not installed.
pub(crate) fn libvirt_accepts(document: &[u8]) -> Option<bool> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&for_test_driver(document)).unwrap();
    let mut virsh = Command::new("virsh");
    virsh.args(["-q", "-c", "test:///default", "define"]).arg(file.path());
    Some(virsh.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().ok()?.success())
}

/// The document with the root's `type` set to the only one the test driver knows.
fn for_test_driver(document: &[u8]) -> Vec<u8> {
    let change = || {
        let text = std::str::from_utf8(document).ok()?;
        let tree = roxmltree::Document::parse(text).ok()?;
        let range = tree.root_element().attribute_node("type")?.range_value();
        Some(format!("{}test{}", &text[..range.start], &text[range.end..]).into_bytes())
    };
    change().unwrap_or_else(|| {
        let text = String::from_utf8_lossy(document);
        if text.as_bytes() == document {
            text.replace("type='kvm'", "type='test'").into_bytes()
        } else {
            document.to_vec()
        }
    })
}
