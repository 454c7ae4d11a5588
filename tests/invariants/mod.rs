//! What must hold of every rewriting, whatever the document.

use std::fmt::Write as _;

use roxmltree::Node;
use virt_pin::alloc::plan::Plan;
use virt_pin::cpuset::CpuSet;
use virt_pin::error::Result;
use virt_pin::xml::pin::{Scope, rewrite};
use virt_pin::xml::{Domain, read};

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
    assert_eq!(pins.vcpus, plan.vcpu_places().collect());
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
    let nodes = document.descendants().filter(|node| !node.is_root() && !node.ancestors().any(is_pin));
    nodes.flat_map(|node| if node.is_text() { letters(node) } else { foreign(node).into_iter().collect() }).collect()
}

fn place(node: Node<'_, '_>) -> String {
    let mut path: Vec<&str> = node.ancestors().skip(1).map(|node| node.tag_name().name()).collect();
    path.reverse();
    path.join("/")
}

/// Letter by letter, because two texts become one when the element between them goes.
fn letters(text: Node<'_, '_>) -> Vec<String> {
    let place = place(text);
    let letters = text.text().unwrap().chars().filter(|letter| !letter.is_whitespace());
    // The 1 may be that of a <vcpu> we inserted.
    letters
        .filter(|letter| *letter != '1' || place != "/domain/vcpu")
        .map(|letter| format!("{place} {letter}"))
        .collect()
}

fn is_pin(node: Node<'_, '_>) -> bool {
    let tag = node.tag_name();
    tag.namespace().is_none()
        && matches!(tag.name(), "vcpupin" | "emulatorpin" | "iothreadpin")
        && place(node) == "/domain/cputune"
}

fn foreign(node: Node<'_, '_>) -> Option<String> {
    let place = place(node);
    if !node.is_element() {
        return Some(format!("{place} {:?}", &node.document().input_text()[node.range()]));
    }
    let name = node.tag_name().name();
    let plain = node.tag_name().namespace().is_none();
    let owned: &[&str] = match (place.as_str(), name) {
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
