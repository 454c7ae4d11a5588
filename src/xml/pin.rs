//! A plan, written into a domain document: the pins under `<cputune>`, the CPUs of `<vcpu>`, `<cpu><topology>`, and the
//! guest's NUMA cells with the nodes of their memory where the document has none.
//!
//! These are the elements we own; nothing else is touched, and cells or a `<numatune>` that the document has are its own
//! (but for saying what it left to `<vcpu placement='auto'>`, which we take away), unless it came with a shape of ours: such a
//! `<numatune>` follows the plan.
//! Each pin is changed where it stands, spelled as before if it already says the right thing, so a second run changes
//! nothing. What is missing goes where libvirt itself would print it. Pins may be spread over several `<cputune>` (libvirt
//! merges them); of several `<vcpu>`, `<cpu>` or `<topology>` the first counts and the others are nobody's.

use std::collections::BTreeMap;

use roxmltree::Node;

use super::edit::{Edit, EditList};
use super::layout::{CPU, CPUTUNE, Element, Layout, ROOT, rank};
use super::read::Pins;
use super::{Domain, numa, number_attribute, read, topology};
use crate::alloc::plan::Plan;
use crate::cpuset::CpuSet;
use crate::error::{Code, Error, Result};

/// How much of a plan is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All of it.
    Everything,
    /// Not what the guest sees: on migration and restore libvirt refuses a topology and NUMA cells other than the running
    /// guest's.
    PlacementOnly,
    /// Only what the guest sees, and no number of any CPU: those that the document carries go, `<vcpu cpuset>` included. For
    /// definitions that are kept: the policy chooses the CPUs at each start.
    Shape,
}

/// The edits that make the document say the plan; none if it says it already.
///
/// # Errors
/// [`Code::DomainInvalid`]: a count, id or topology that libvirt would refuse too. [`Code::Internal`]: the plan is not
/// one for this domain (another number of vCPUs, threads without CPUs, cells of another size).
pub fn rewrite(domain: &Domain<'_>, plan: &Plan, scope: Scope) -> Result<EditList> {
    check(domain, plan)?;
    let mut changes = Changes::of(domain);
    if scope == Scope::Shape {
        take_numbers(domain, &mut changes);
    } else {
        vcpu(domain, plan, &mut changes);
        cputune(domain, plan, &mut changes)?;
        // With a shape it is made anew.
        numa::rebind(domain, plan, &mut changes);
    }
    if scope != Scope::PlacementOnly {
        guest_view(domain, plan, &mut changes)?;
    }
    changes.into_edits()
}

/// The pins of the plan that a running domain's document does not say.
///
/// # Errors
/// As [`read::pins`].
pub fn unsaid(live: &Domain<'_>, plan: &Plan) -> Result<Pins> {
    let said = read::pins(live)?;
    let vcpus = plan.vcpu_places().filter(|(vcpu, cpus)| said.vcpus.get(vcpu) != Some(cpus)).collect();
    let emulator = Some(&plan.emulator).filter(|cpus| said.emulator.as_ref() != Some(cpus)).cloned();
    let iothreads = read::iothread_ids(live)?.into_iter().filter(|id| said.iothreads.get(id) != Some(&plan.iothreads));
    let iothreads = iothreads.map(|id| (id, plan.iothreads.clone())).collect();
    Ok(Pins { vcpus, emulator, iothreads })
}

fn check(domain: &Domain<'_>, plan: &Plan) -> Result<()> {
    let fault = |message: String| Err(Error::new(Code::Internal, message));
    let (planned, count) = (plan.vcpus.len(), usize::from(read::vcpu_count(domain)?));
    if planned != count {
        return fault(format!("the plan has {planned} vCPUs, the domain {count}"));
    }
    let vcpus = plan.vcpu_cpus();
    if !plan.vcpus.iter().flatten().all(|cpu| vcpus.contains(*cpu)) {
        return fault("the plan names a CPU beyond the largest number".to_owned());
    }
    let homeless = plan.vcpu_places().any(|(_, cpus)| cpus.is_empty());
    if homeless || plan.emulator.is_empty() || plan.iothreads.is_empty() {
        return fault("the plan leaves a vCPU, the emulator or I/O threads without CPUs".to_owned());
    }
    if let Some(guest) = plan.guest {
        let parts = [guest.sockets, guest.dies, guest.cores, guest.threads];
        let product = parts.iter().try_fold(1usize, |product, part| product.checked_mul(usize::from(*part)));
        if product != Some(count) {
            return fault(format!("the plan's guest topology {guest:?} does not make {count} vCPUs"));
        }
    }
    Ok(())
}

/// `<vcpu cpuset>` is the net for threads without a pin of their own, such as those plugged in later.
fn vcpu<'d, 't>(domain: &'d Domain<'t>, plan: &Plan, changes: &mut Changes<'d, 't>) {
    let allowed = plan.allowed();
    let Some(vcpu) = domain.first(&["vcpu"]) else {
        let attributes = vec![("placement", "static".to_owned()), ("cpuset", allowed.to_string())];
        let vcpu = Element::new("vcpu", attributes).with_text("1".to_owned());
        changes.insert_in_order(domain.root(), ROOT, vcpu);
        return;
    };
    if vcpu.attribute("placement") == Some("auto") {
        changes.set(vcpu, "placement", "static", None);
        // Memory that says nothing follows the vCPUs' word; without it libvirt refuses the document.
        let memory = domain.first(&["numatune", "memory"]);
        if let Some(memory) = memory.filter(|it| !it.has_attribute("nodeset") && !it.has_attribute("placement")) {
            changes.set(memory, "placement", "auto", Some("mode"));
        }
    }
    changes.set_cpuset(vcpu, &allowed, Some("placement"));
}

/// Every pin and `<vcpu cpuset>`, out. With automatic placement libvirt disregards the latter, and drops it itself.
fn take_numbers<'d, 't>(domain: &'d Domain<'t>, changes: &mut Changes<'d, 't>) {
    for pin in ["vcpupin", "emulatorpin", "iothreadpin"] {
        domain.all(&["cputune", pin]).into_iter().for_each(|pin| changes.remove(pin));
    }
    if let Some(vcpu) = domain.first(&["vcpu"]) {
        changes.unset(vcpu, "cpuset");
    }
}

/// What the guest sees of its cores and nodes, and the host nodes behind the latter.
fn guest_view<'d, 't>(domain: &'d Domain<'t>, plan: &Plan, changes: &mut Changes<'d, 't>) -> Result<()> {
    let numa = numa::missing(domain, plan)?;
    if let Some(numatune) = numa.numatune {
        changes.insert_in_order(domain.root(), ROOT, numatune);
    }
    let topology = plan.guest.map(|guest| topology::rewrite(domain, guest, changes)).transpose()?.flatten();
    changes.insert_below(domain, "cpu", CPU, topology.into_iter().chain(numa.cells).collect());
    Ok(())
}

/// Where a child of `<cputune>` belongs: its place in [`CPUTUNE`], then the number of its vCPU or I/O thread.
type Key = (usize, u32);

fn cputune<'d, 't>(domain: &'d Domain<'t>, plan: &Plan, changes: &mut Changes<'d, 't>) -> Result<()> {
    let mut missing = wanted(plan, &read::iothread_ids(domain)?);
    let tunes = domain.all(&["cputune"]);
    let Some(first) = tunes.first() else {
        changes.insert_below(domain, "cputune", CPUTUNE, missing.into_values().map(Pin::element).collect());
        return Ok(());
    };
    let mut kept: BTreeMap<Key, Node<'_, '_>> = BTreeMap::new();
    for child in tunes.iter().flat_map(|tune| tune.children()).filter(Node::is_element) {
        let Some(rank) = rank(CPUTUNE, child) else {
            continue;
        };
        let number = match child.tag_name().name() {
            "vcpupin" => Some(number_attribute(child, "vcpu")?),
            "iothreadpin" => Some(number_attribute(child, "iothread")?),
            "emulatorpin" => Some(0),
            _ => None,
        };
        if let Some(number) = number {
            // A second pin of one thread, or a pin of a thread that does not exist, is in nobody's interest.
            let Some(pin) = missing.remove(&(rank, number)) else {
                changes.remove(child);
                continue;
            };
            changes.set_cpuset(child, &pin.cpus, pin.thread.map(|(attribute, _)| attribute));
        }
        kept.insert((rank, number.unwrap_or(0)), child);
    }
    for (key, pin) in missing {
        let after = kept.range(..=key).next_back().map(|(_, node)| *node);
        let parent = after.and_then(|after| after.parent()).unwrap_or(*first);
        changes.insert(parent, after, pin.element());
    }
    Ok(())
}

/// A pin as it should be.
struct Pin {
    name: &'static str,
    /// The attribute that says whose, and its number; the emulator needs none.
    thread: Option<(&'static str, u32)>,
    cpus: CpuSet,
}

impl Pin {
    fn element(self) -> Element {
        let thread = self.thread.map(|(attribute, number)| (attribute, number.to_string()));
        Element::new(self.name, thread.into_iter().chain([("cpuset", self.cpus.to_string())]).collect())
    }
}

fn wanted(plan: &Plan, iothreads: &[u32]) -> BTreeMap<Key, Pin> {
    let place = |name| CPUTUNE.iter().position(|known| *known == name).unwrap_or(CPUTUNE.len());
    let (vcpupin, emulatorpin, iothreadpin) = (place("vcpupin"), place("emulatorpin"), place("iothreadpin"));
    let vcpus = plan.vcpu_places().map(|(vcpu, cpus)| {
        let vcpu = u32::from(vcpu);
        ((vcpupin, vcpu), Pin { name: "vcpupin", thread: Some(("vcpu", vcpu)), cpus })
    });
    let emulator = Pin { name: "emulatorpin", thread: None, cpus: plan.emulator.clone() };
    let iothreads = iothreads.iter().map(|id| {
        let cpus = plan.iothreads.clone();
        ((iothreadpin, *id), Pin { name: "iothreadpin", thread: Some(("iothread", *id)), cpus })
    });
    vcpus.chain([((emulatorpin, 0), emulator)]).chain(iothreads).collect()
}

/// The edits so far. Insertions wait until the end: those at one place become one edit, if they come in the order of the
/// document.
pub(super) struct Changes<'d, 't> {
    layout: Layout<'t>,
    edits: Vec<Edit>,
    inserts: Vec<Insert<'d, 't>>,
}

struct Insert<'d, 't> {
    parent: Node<'d, 't>,
    after: Option<Node<'d, 't>>,
    elements: Vec<Element>,
}

impl<'d, 't> Changes<'d, 't> {
    pub(super) fn of(domain: &'d Domain<'t>) -> Changes<'d, 't> {
        Changes { layout: Layout::of(domain), edits: Vec::new(), inserts: Vec::new() }
    }

    /// Inserts after the last child that libvirt prints before such an element; after earlier insertions at that place.
    pub(super) fn insert_in_order(&mut self, parent: Node<'d, 't>, order: &[&str], element: Element) {
        let end = order.iter().position(|known| *known == element.name()).unwrap_or(order.len());
        let ranked = parent.children().filter(Node::is_element).filter_map(|child| Some((rank(order, child)?, child)));
        let after = ranked.filter(|(rank, _)| *rank < end).max_by_key(|(rank, _)| *rank);
        self.insert(parent, after.map(|(_, child)| child), element);
    }

    /// Inserts into the first child of the root that has this name, or into one made for it.
    pub(super) fn insert_below(
        &mut self,
        domain: &'d Domain<'t>,
        parent: &'static str,
        order: &[&str],
        elements: Vec<Element>,
    ) {
        match domain.first(&[parent]) {
            Some(parent) => elements.into_iter().for_each(|element| self.insert_in_order(parent, order, element)),
            None if elements.is_empty() => {}
            None => {
                let parent = Element::new(parent, Vec::new()).with_children(elements);
                self.insert_in_order(domain.root(), ROOT, parent);
            }
        }
    }

    pub(super) fn insert(&mut self, parent: Node<'d, 't>, after: Option<Node<'d, 't>>, element: Element) {
        match self.inserts.last_mut().filter(|last| last.parent == parent && last.after == after) {
            Some(last) => last.elements.push(element),
            None => self.inserts.push(Insert { parent, after, elements: vec![element] }),
        }
    }

    pub(super) fn set(&mut self, element: Node<'_, '_>, name: &str, value: &str, after: Option<&str>) {
        self.edits.push(self.layout.set(element, name, value, after));
    }

    pub(super) fn unset(&mut self, element: Node<'_, '_>, name: &str) {
        self.edits.extend(self.layout.unset(element, name));
    }

    /// Puts another element in the place of one.
    pub(super) fn replace(&mut self, element: Node<'_, '_>, by: &Element) {
        self.edits.push(self.layout.replace(element, by));
    }

    /// Another spelling of the same set is left alone.
    fn set_cpuset(&mut self, element: Node<'_, '_>, cpus: &CpuSet, after: Option<&str>) {
        let old = element.attribute("cpuset").and_then(|text| CpuSet::parse_libvirt_cpuset(text).ok());
        if old.as_ref() != Some(cpus) {
            self.set(element, "cpuset", &cpus.to_string(), after);
        }
    }

    pub(super) fn remove(&mut self, element: Node<'_, '_>) {
        self.edits.push(self.layout.remove(element));
    }

    pub(super) fn into_edits(mut self) -> Result<EditList> {
        for Insert { parent, after, elements } in &self.inserts {
            self.edits.push(self.layout.insert(*parent, *after, elements));
        }
        EditList::new(self.edits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alloc::plan::GuestTopology;
    use crate::cpuset::CpuId;

    fn plan(vcpus: &[u16]) -> Plan {
        let housekeeping: CpuSet = [CpuId(0), CpuId(1)].into_iter().collect();
        Plan::new(vcpus.iter().copied().map(CpuId), housekeeping)
    }

    fn rewritten(text: &str, plan: &Plan) -> Result<String> {
        Ok(rewrite(&Domain::parse(text)?, plan, Scope::Everything)?.apply(text))
    }

    #[test]
    fn a_plan_for_another_domain_is_our_fault() {
        let text = "<domain><vcpu>2</vcpu></domain>";
        let guest = GuestTopology { sockets: 1, dies: 1, cores: 2, threads: 2 };
        for wrong in [
            plan(&[2]),
            plan(&[2, 9000]),
            Plan { emulator: CpuSet::new(), ..plan(&[2, 3]) },
            Plan { iothreads: CpuSet::new(), ..plan(&[2, 3]) },
            Plan { guest: Some(guest), ..plan(&[2, 3]) },
        ] {
            assert_eq!(rewritten(text, &wrong).unwrap_err().code, Code::Internal, "{wrong:?}");
        }
        assert!(rewritten(text, &plan(&[2, 3])).is_ok());
    }

    #[test]
    fn blanks_around_the_equals_sign_do_not_shift_the_value() {
        let blanks = " ".repeat(300);
        let text = format!("<domain><vcpu cpuset{blanks}=\n'7'>1</vcpu></domain>");
        let out = rewritten(&text, &plan(&[2])).unwrap();
        assert!(out.starts_with(&format!("<domain><vcpu cpuset{blanks}=\n'0-2'>1</vcpu><cputune>")), "{out}");
    }

    #[test]
    fn a_large_domain_is_quick() {
        let count = 4096;
        let pins: String = (0..count).map(|vcpu| format!("<vcpupin vcpu='{vcpu}' cpuset='0'/>\n")).collect();
        let text = format!("<domain><vcpu>{count}</vcpu><cputune>\n{pins}{pins}</cputune></domain>");
        let vcpus: Vec<u16> = (0..count).collect();
        let out = rewritten(&text, &plan(&vcpus)).unwrap();
        assert_eq!(out.matches("<vcpupin").count(), usize::from(count));
    }

    #[test]
    fn the_worst_document_becomes_whole() {
        let out = rewritten("<domain/>", &plan(&[2])).unwrap();
        let expected = "<domain><vcpu placement='static' cpuset='0-2'>1</vcpu><cputune><vcpupin vcpu='0' cpuset='2'/>\
            <emulatorpin cpuset='0-1'/></cputune></domain>";
        assert_eq!(out, expected);
    }
}
