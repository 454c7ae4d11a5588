//! What must hold of every rewriting, whatever the document.
#![allow(dead_code, reason = "not every test uses all of it")]

use std::fmt::Write as _;

use roxmltree::Node;
use virt_pin::alloc::plan::{GuestTopology, Plan};
use virt_pin::alloc::policy::Policy;
use virt_pin::alloc::request::{GuestCell, GuestMemory, Request};
use virt_pin::cpuset::{CpuId, CpuSet};
use virt_pin::error::Result;
use virt_pin::xml::edit::EditList;
use virt_pin::xml::pin::{Scope, rewrite};
use virt_pin::xml::{Domain, former, read, realtime, shape};

/// Rewrites a document and checks everything that can be checked without knowing the document.
pub(crate) fn rewritten(text: &str, plan: &Plan, scope: Scope) -> Result<String> {
    let domain = Domain::parse(text)?;
    let out = applied(text, &rewrite(&domain, plan, scope)?);

    // The output says the plan, and a second run has nothing to do.
    let after = parsed(&out);
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
    says_cells(&domain, &after, plan, scope);

    // Ours where the document has none.
    let cells = scope == Scope::Everything && !plan.cells.is_empty();
    let numa = cells && !has(text, "/domain/cpu <numa");
    let numatune = cells && !has(text, "/domain <numatune");
    // What a shape of ours bound is bound anew, and remembered so.
    let rebound = shape::bound_cells(&domain).is_some();
    only_ours_differs(text, &out, |line| {
        let binds = line.starts_with("/domain/numatune <mem") || line.contains("\"wrote-numatune\"=");
        (rebound && binds)
            || (numa && ["/domain/cpu <numa", "/domain/cpu/numa <cell"].iter().any(|ours| is(line, ours)))
            || (numatune && (is(line, "/domain <numatune") || line.starts_with("/domain/numatune <mem")))
    });
    Ok(out)
}

/// Gives a document the shape of a plan and checks everything that can be checked without knowing the document.
pub(crate) fn shaped(text: &str, plan: &Plan) -> Result<String> {
    let out = shape::shaped(text, plan)?;
    assert_eq!(shape::shaped(&out, plan).unwrap(), out, "a second run changes");
    let after = parsed(&out);
    let owner = former::restored(text).unwrap();
    let before = parsed(&owner);
    assert!(read::pins(&after).is_ok_and(|pins| pins.is_empty()), "{out}");
    assert_eq!(read::default_cpuset(&after).unwrap(), None, "{out}");
    assert_eq!(read::vcpu_count(&after).unwrap(), read::vcpu_count(&before).unwrap());
    match plan.guest {
        Some(guest) => assert_eq!(read::topology(&after).unwrap(), Some(guest), "{out}"),
        None => assert_eq!(read::topology(&after).ok(), read::topology(&before).ok(), "{out}"),
    }
    // What was there comes back, to the byte but for what cannot be told: pins, and where an attribute stood.
    let restored = former::restored(&out).unwrap();
    assert!(!former::is_shaped(&parsed(&restored)), "{restored}");
    assert_eq!(former::restored(&restored).unwrap(), restored);
    let topology = |domain: &Domain<'_>| {
        let count = u32::from(read::vcpu_count(domain).unwrap());
        let parts = |guest: &GuestTopology| [guest.sockets, guest.dies, guest.cores, guest.threads].map(u32::from);
        read::topology(domain).ok().flatten().filter(|guest| parts(guest).iter().product::<u32>() == count)
    };
    assert_eq!(topology(&parsed(&restored)), topology(&before), "{restored}");
    assert_eq!(numatune(&restored), numatune(&owner));
    assert_eq!(read::policy_attributes(&parsed(&restored)).ok(), read::policy_attributes(&before).ok());
    assert!(shape::same(&shape::shaped(&restored, plan).unwrap(), &out).unwrap(), "{restored}");
    // A topology that libvirt refuses, and comments, which it drops, need not come back.
    let acceptable = topology(&before).is_some() || !owner.contains("<topology");
    let plain = !owner.contains("cpuset") && !owner.contains("<!--");
    if acceptable && plain && read::pins(&before).is_ok_and(|pins| pins.is_empty()) {
        only_ours_differs(&owner, &restored, |line| is(line, "/domain <cpu") || is(line, "/domain <metadata"));
    }
    Ok(out)
}

/// Adds what a realtime domain lacks and checks everything that can be checked without knowing the document.
pub(crate) fn made_realtime(text: &str, request: &Request) -> Result<String> {
    let domain = Domain::parse(text)?;
    let out = applied(text, &realtime::rewrite(&domain, request)?);
    let after = parsed(&out);
    assert!(realtime::rewrite(&after, request).unwrap().is_empty(), "a second run changes\n{out}");
    realtime::check(&after, request).unwrap_or_else(|error| panic!("{error} in\n{out}"));
    assert_eq!(out == text, realtime::check(&domain, request).is_ok(), "{text}");
    let (backing, locked) = (has(text, "/domain <memoryBacking"), has(text, "/domain/memoryBacking <locked"));
    only_ours_differs(text, &out, |line| {
        (is(line, "/domain/cputune <vcpusched") && line.ends_with(r#" "scheduler"="fifo" "priority"="1""#))
            || (!locked && is(line, "/domain/memoryBacking <locked"))
            || (!locked && !backing && is(line, "/domain <memoryBacking"))
    });
    Ok(out)
}

/// The text with the edits made; bytes outside of them are identical.
fn applied(text: &str, edits: &EditList) -> String {
    let out = edits.apply(text);
    let (mut rest, mut at) = (out.as_str(), 0);
    for edit in edits.iter() {
        rest = rest.strip_prefix(&text[at..edit.range.start]).expect("bytes before an edit changed");
        rest = rest.strip_prefix(edit.text.as_str()).expect("an edit is not in the output");
        at = edit.range.end;
    }
    assert_eq!(rest, &text[at..]);
    out
}

fn parsed(out: &str) -> Domain<'_> {
    Domain::parse(out).unwrap_or_else(|error| panic!("{error}: {:?}\n{out}", error.causes()))
}

/// Asserts that the guest's cells and the nodes of their memory are as before, or those of the plan where there were none.
fn says_cells(before: &Domain<'_>, after: &Domain<'_>, plan: &Plan, scope: Scope) {
    let cells = |domain: &Domain<'_>| {
        let request: Option<Request> = read::request(domain, Policy::default()).ok();
        request.map(|request| (request.memory, request.cells))
    };
    let tuning = |domain: &Domain<'_>| numatune(domain.text());
    let (was, is) = (cells(before), cells(after));
    let had_cells = was.as_ref().is_none_or(|(_, cells)| !cells.is_empty());
    let sized = plan.guest.is_some() && plan.cells.iter().all(|cell| cell.bytes.is_some());
    // Memory that says nothing follows the vCPUs: libvirt's word for what we take from those.
    let (old, new) = (memory_placement(before.text()), memory_placement(after.text()));
    let auto = Some((None, Some("auto".to_owned())));
    let follows = old == Some((None, None)) && new == auto && read::placement_is_auto(before);
    let ours = shape::bound_cells(before).is_some();
    assert!(follows || ours || old.is_none() || new == old, "{}", after.text());
    let plugged = before.text().contains("<memory model=");
    let adds = scope == Scope::Everything && !plan.cells.is_empty() && (had_cells || (sized && !plugged));
    if !adds || had_cells {
        assert_eq!(is, was, "{}", after.text());
    } else {
        let memory: Option<GuestMemory> = was.and_then(|(memory, _)| memory);
        let cells = plan.cells.iter().map(|cell| GuestCell {
            vcpus: cell.vcpus.clone(),
            bytes: cell.bytes.unwrap(),
            bound: None,
        });
        assert_eq!(is, Some((memory, cells.collect())), "{}", after.text());
    }
    let with_memory = || (0..).zip(&plan.cells).filter(|(_, cell)| cell.bytes != Some(0));
    let nodes = plan.memory_nodes.as_ref().filter(|_| with_memory().all(|(_, cell)| cell.node.is_some()));
    match nodes.filter(|_| ours || (adds && tuning(before).is_none())) {
        None => assert_eq!(tuning(after), tuning(before), "{}", after.text()),
        Some(nodes) => {
            let set = |node: u16| [CpuId(node)].into_iter().collect::<CpuSet>().to_string();
            let all: CpuSet = nodes.iter().map(|node| CpuId(node.0)).collect();
            let each = with_memory().map(|(id, cell)| (Some(id.to_string()), set(cell.node.unwrap().0)));
            let expected: Vec<(Option<String>, String)> = [(None, all.to_string())].into_iter().chain(each).collect();
            // What we bound names other cells by now: somebody has changed these, and it is left alone.
            let kept = ours && tuning(after) == tuning(before);
            assert!(kept || tuning(after) == Some(expected), "{}", after.text());
        }
    }
}

/// The guest cell, if it is for one, and the nodes of everything in `<numatune>`; `None` where there is none.
fn numatune(text: &str) -> Option<Vec<(Option<String>, String)>> {
    let document = roxmltree::Document::parse(text).unwrap();
    let numatune = document.root_element().children().find(|child| child.has_tag_name("numatune"))?;
    let bindings = numatune.children().filter(Node::is_element);
    let own = |text: Option<&str>| text.map(ToOwned::to_owned);
    Some(
        bindings
            .map(|node| (own(node.attribute("cellid")), own(node.attribute("nodeset")).unwrap_or_default()))
            .collect(),
    )
}

/// `nodeset` and `placement` of the memory in `<numatune>`.
fn memory_placement(text: &str) -> Option<(Option<String>, Option<String>)> {
    let document = roxmltree::Document::parse(text).unwrap();
    let numatune = document.root_element().children().find(|child| child.has_tag_name("numatune"))?;
    let memory = numatune.children().find(|child| child.has_tag_name("memory"))?;
    let own = |name| memory.attribute(name).map(ToOwned::to_owned);
    Some((own("nodeset"), own("placement")))
}

/// Asserts that everything of the text is in the output, in the same order, and that what is new is ours.
fn only_ours_differs(text: &str, out: &str, ours: impl Fn(&str) -> bool) {
    let (old, new) = (skeleton(text), skeleton(out));
    let mut old = old.iter().peekable();
    for line in &new {
        if old.next_if_eq(&line).is_none() {
            assert!(ours(line), "{line} is new, instead of {:?}, in\n{out}", old.peek());
            // In the place of one that said otherwise.
            old.next_if(|old| ours(old) && !new.contains(old));
        }
    }
    assert_eq!(old.next(), None, "\n{out}");
}

fn has(text: &str, element: &str) -> bool {
    skeleton(text).iter().any(|line| is(line, element))
}

/// Whether a line of a skeleton is this element, whatever its attributes.
fn is(line: &str, element: &str) -> bool {
    line.strip_prefix(element).is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
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
        // See `says_cells`.
        ("/domain/numatune", "memory") if plain => &["placement"],
        _ => &[],
    };
    let mut line = format!("{place} <{:?}", node.tag_name());
    for attribute in node.attributes().filter(|attribute| !owned.contains(&attribute.name())) {
        write!(line, " {:?}={:?}", attribute.name(), attribute.value()).unwrap();
    }
    // What we insert when it is missing has no attributes of others.
    let may_be_new = plain
        && matches!((place.as_str(), name), ("/domain", "cputune" | "cpu" | "metadata") | ("/domain/cpu", "topology"));
    let may_be_new = may_be_new || (plain && place == "/domain" && name == "vcpu" && node.text() == Some("1"));
    let bare = !node.attributes().any(|attribute| !owned.contains(&attribute.name()));
    (!(may_be_new && bare)).then_some(line)
}
