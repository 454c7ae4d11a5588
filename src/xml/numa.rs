//! The guest's NUMA cells: which ones the document defines, and what a plan has to add to it. Never changes cells that the
//! document has, nor a `<numatune>` that is its owner's.

use std::collections::BTreeMap;

use roxmltree::Node;

use super::layout::Element;
use super::pin::Changes;
use super::{Domain, children, cpuset_attribute, former, invalid, memory, number_attribute};
use crate::alloc::plan::{PlacedCell, Plan};
use crate::alloc::request::GuestCell;
use crate::cpuset::{CpuId, CpuSet, NodeId};
use crate::error::{Code, Error, Result};

/// The cells of the document by number, for a guest of so many vCPUs; none where it defines none. vCPUs that no cell names
/// are in cell 0, where libvirt puts them when it starts QEMU.
pub(super) fn cells(domain: &Domain<'_>, vcpus: u16) -> Result<Vec<GuestCell>> {
    let Some(elements) = elements(domain) else {
        return Ok(Vec::new());
    };
    if elements.is_empty() {
        return Err(invalid("<numa> has no <cell>"));
    }
    let mut named = CpuSet::new();
    let mut cells = BTreeMap::new();
    for (position, element) in elements.iter().enumerate() {
        let id = if element.has_attribute("id") { number_attribute(*element, "id")? } else { position };
        if id >= elements.len() {
            let count = elements.len();
            return Err(invalid(format!(
                "<cell id=\"{id}\">: the numbers of {count} cells begin with 0 and have no gaps"
            )));
        }
        let cell = cell(*element)?;
        if let Some(vcpu) = cell.vcpus.iter().find(|vcpu| vcpu.0 >= vcpus) {
            return Err(invalid(format!("NUMA cell {id} has vCPU {vcpu}, which the domain does not have")));
        }
        if !cell.vcpus.is_disjoint(&named) {
            let both = cell.vcpus.intersection(&named);
            return Err(invalid(format!("NUMA cell {id} has vCPUs {both}, which another cell has already")));
        }
        named = named.union(&cell.vcpus);
        if cells.insert(id, cell).is_some() {
            return Err(invalid(format!("NUMA cell {id} is defined twice")));
        }
    }
    if let Some(first) = cells.get_mut(&0) {
        let all: CpuSet = (0..vcpus).map(CpuId).collect();
        first.vcpus = first.vcpus.union(&all.difference(&named));
    }
    Ok(cells.into_values().collect())
}

/// The `<cell>` elements as libvirt finds them: those of the first `<numa>` of every `<cpu>`; `None` without any `<numa>`.
fn elements<'d, 't>(domain: &'d Domain<'t>) -> Option<Vec<Node<'d, 't>>> {
    let numas = domain.all(&["cpu"]).into_iter().filter_map(|cpu| children(cpu, "numa").next());
    let numas: Vec<_> = numas.collect();
    (!numas.is_empty()).then(|| numas.into_iter().flat_map(|numa| children(numa, "cell").collect::<Vec<_>>()).collect())
}

fn cell(element: Node<'_, '_>) -> Result<GuestCell> {
    let size = element.attribute("memory").ok_or_else(|| invalid("<cell> has no memory attribute"))?;
    let named = element.has_attribute("cpus");
    Ok(GuestCell {
        vcpus: if named { cpuset_attribute(element, "cpus")? } else { CpuSet::new() },
        bytes: memory::size(size, element.attribute("unit"), "cell")?,
        bound: None,
    })
}

/// What a plan adds to a document.
pub(super) struct Missing {
    /// `<numa>`, where the plan makes cells for the guest.
    pub(super) cells: Option<Element>,
    /// `<numatune>`, where the plan binds the memory of the guest's cells.
    pub(super) numatune: Option<Element>,
}

/// The elements that the document lacks of what the plan says about cells.
///
/// # Errors
/// [`Code::Internal`]: the plan's cells are not for this document.
pub(super) fn missing(domain: &Domain<'_>, plan: &Plan) -> Result<Missing> {
    let own = elements(domain).map(|elements| elements.len());
    if plan.cells.is_empty() || (own.is_none() && !may_have_cells(domain, plan)) {
        return Ok(Missing { cells: None, numatune: None });
    }
    let fits = match own {
        Some(count) => count == plan.cells.len(),
        None => fits(domain, plan)?,
    };
    if !fits {
        let message = format!("the plan's {} NUMA cells are not those of the domain", plan.cells.len());
        return Err(Error::new(Code::Internal, message));
    }
    let cells = own.is_none().then(|| {
        let cells = (0..).zip(&plan.cells).map(|(id, cell)| cell_element(id, cell));
        Element::new("numa", Vec::new()).with_children(cells.collect())
    });
    let unbound = domain.first(&["numatune"]).is_none();
    Ok(Missing { cells, numatune: if unbound { numatune(plan) } else { None } })
}

/// Cells are part of what `topology="host"` tells the guest, and need sizes. `<memory>` includes memory devices, which are
/// no part of a cell's size, and libvirt has them only in guests whose cells are defined.
fn may_have_cells(domain: &Domain<'_>, plan: &Plan) -> bool {
    plan.guest.is_some()
        && plan.cells.iter().all(|cell| cell.bytes.is_some())
        && domain.all(&["devices", "memory"]).is_empty()
}

/// Whether the plan's cells, of whole KiB each, make up exactly `<memory>`, and have each of the domain's vCPUs once at
/// the most.
fn fits(domain: &Domain<'_>, plan: &Plan) -> Result<bool> {
    let bytes = plan.cells.iter().try_fold(0u64, |sum, cell| sum.checked_add(cell.bytes?));
    let whole = plan.cells.iter().all(|cell| cell.bytes.is_some_and(|bytes| bytes % 1024 == 0));
    let vcpus = plan.cells.iter().fold(CpuSet::new(), |all, cell| all.union(&cell.vcpus));
    let once = plan.cells.iter().map(|cell| cell.vcpus.len()).sum::<usize>() == vcpus.len();
    let exist = vcpus.iter().all(|vcpu| usize::from(vcpu.0) < plan.vcpus.len());
    Ok(whole && once && exist && bytes == memory::of(domain)?.map(|memory| memory.bytes))
}

fn cell_element(id: u32, cell: &PlacedCell) -> Element {
    let vcpus = Some(&cell.vcpus).filter(|vcpus| !vcpus.is_empty()).map(|vcpus| ("cpus", vcpus.to_string()));
    let size = [("memory", (cell.bytes.unwrap_or(0) / 1024).to_string()), ("unit", "KiB".to_owned())];
    Element::new("cell", [("id", id.to_string())].into_iter().chain(vcpus).chain(size).collect())
}

/// The memory of each cell bound to the cell's node; `None` where the plan does not bind memory, or leaves a cell anywhere.
fn numatune(plan: &Plan) -> Option<Element> {
    let nodes = plan.memory_nodes.as_ref().filter(|nodes| !nodes.is_empty())?;
    let bind = |name, cell: Option<u32>, nodes: CpuSet| {
        let rest = [("mode", "strict".to_owned()), ("nodeset", nodes.to_string())];
        Element::new(name, cell.map(|id| ("cellid", id.to_string())).into_iter().chain(rest).collect())
    };
    let with_memory = (0..).zip(&plan.cells).filter(|(_, cell)| cell.bytes != Some(0));
    let each = with_memory.map(|(id, cell)| Some(bind("memnode", Some(id), set([&cell.node?]))));
    let each: Vec<Element> = each.collect::<Option<_>>()?;
    let all = bind("memory", None, set(nodes));
    Some(Element::new("numatune", Vec::new()).with_children([all].into_iter().chain(each).collect()))
}

/// Binds the memory of cells to the plan's nodes in a `<numatune>` of ours, and remembers that as ours. The cells stay: the guest
/// sees them.
pub(super) fn rebind<'d, 't>(domain: &'d Domain<'t>, plan: &Plan, changes: &mut Changes<'d, 't>) {
    let Some(wanted) =
        tune_of(plan).filter(|wanted| former::wrote_numatune(domain).is_some_and(|bound| bound != *wanted))
    else {
        return;
    };
    let memory = domain.first(&["numatune", "memory"]).zip(plan.memory_nodes.as_ref().map(set));
    let memnodes = domain.all(&["numatune", "memnode"]).into_iter().map(|memnode| {
        let cell = plan.cells.get(number_attribute::<usize>(memnode, "cellid").ok()?)?;
        Some((memnode, set([&cell.node?])))
    });
    let Some(memnodes) = memnodes.collect::<Option<Vec<_>>>() else { return };
    if memnodes.len() != plan.cells.iter().filter(|cell| cell.bytes != Some(0)).count() {
        return;
    }
    for (element, nodes) in memory.into_iter().chain(memnodes) {
        changes.set(element, "nodeset", &nodes.to_string(), None);
    }
    if let Some(remembers) = former::element(domain) {
        changes.set(remembers, former::WROTE_NUMATUNE, &wanted, None);
    }
}

/// What the cells of the document say, in one spelling: vCPUs and KiB of each; `None` without any that can be understood.
pub(super) fn cells_said(domain: &Domain<'_>) -> Option<String> {
    let elements = elements(domain).filter(|elements| !elements.is_empty())?;
    let mut cells: Vec<(usize, String)> = Vec::new();
    for (position, element) in elements.iter().enumerate() {
        let id = element.attribute("id").map_or(Some(position), |id| id.parse().ok())?;
        let cell = cell(*element).ok()?;
        cells.push((id, format!("{}:{}", cell.vcpus, cell.bytes / 1024)));
    }
    cells.sort();
    Some(cells.into_iter().map(|(_, cell)| cell).collect::<Vec<_>>().join(" "))
}

/// What `<numatune>` says, in one spelling: mode and nodes of all, then of each cell; `None` where it says nothing.
pub(super) fn tune_said(domain: &Domain<'_>) -> Option<String> {
    let nodes = |node: Node<'_, '_>| {
        let nodes = node.attribute("nodeset").map(CpuSet::parse_libvirt_cpuset).and_then(std::result::Result::ok);
        (
            node.attribute("mode").unwrap_or("strict").to_owned(),
            nodes.map(|nodes| nodes.to_string()).unwrap_or_default(),
        )
    };
    let all = domain.first(&["numatune", "memory"]).map(|memory| {
        let (mode, nodes) = nodes(memory);
        format!("{mode} {nodes}")
    });
    let mut each: Vec<(u32, String)> = Vec::new();
    for memnode in domain.all(&["numatune", "memnode"]) {
        let (id, (mode, nodes)) = (number_attribute(memnode, "cellid").ok()?, nodes(memnode));
        each.push((id, format!("{id}:{mode}:{nodes}")));
    }
    each.sort();
    let said: Vec<String> = all.into_iter().chain(each.into_iter().map(|(_, one)| one)).collect();
    (!said.is_empty()).then(|| said.join(" "))
}

/// The same of the `<numatune>` that binds each of the plan's cells to the node it lies on; `None` where the plan binds no memory,
/// or one lies anywhere.
pub(super) fn tune_of(plan: &Plan) -> Option<String> {
    let all = plan.memory_nodes.as_ref().filter(|nodes| !nodes.is_empty())?;
    let with_memory = (0u32..).zip(&plan.cells).filter(|(_, cell)| cell.bytes != Some(0));
    let each = with_memory.map(|(id, cell)| Some(format!(" {id}:strict:{}", cell.node?.0)));
    Some(format!("strict {}{}", set(all), each.collect::<Option<String>>()?))
}

fn set<'n>(nodes: impl IntoIterator<Item = &'n NodeId>) -> CpuSet {
    nodes.into_iter().map(|node| CpuId(node.0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(cpu: &str) -> Result<Vec<(String, u64)>> {
        let text = format!("<domain>{cpu}</domain>");
        let cells = cells(&Domain::parse(&text)?, 4)?;
        Ok(cells.into_iter().map(|cell| (cell.vcpus.to_string(), cell.bytes >> 10)).collect())
    }

    fn numa(cells: &[&str]) -> String {
        let cells: String = cells.iter().map(|cell| format!("<cell {cell}/>")).collect();
        format!("<cpu><numa>{cells}</numa></cpu>")
    }

    #[test]
    fn cells_are_numbered_as_libvirt_numbers_them() {
        for (cells, expected) in [
            (&["memory='5' cpus='0-3'"][..], &[("0-3", 5)][..]),
            (&["memory='5' cpus='0-1'", "memory='6' cpus='2-3'"], &[("0-1", 5), ("2-3", 6)]),
            (&["id='1' memory='5' cpus='0-1'", "id=' +0' memory='+6' cpus='2-3'"], &[("2-3", 6), ("0-1", 5)]),
            (&["memory='5' unit='MiB' cpus='0-3,^1,1'", "memory='0'"], &[("0-3", 5 << 10), ("", 0)]),
            (&["memory='5' unit='b' cpus='0-3'", "memory='5' unit='MB'"], &[("0-3", 1), ("", 4883)]),
            // Cell 0 takes what is left.
            (&["memory='5' cpus='0'", "memory='5' cpus='1'"], &[("0,2-3", 5), ("1", 5)]),
            (&["memory='5'", "memory='5' cpus='1'"], &[("0,2-3", 5), ("1", 5)]),
            (
                &["memory='9007199254740991'", "memory='9007199254740991'"],
                &[("0-3", (1 << 53) - 1), ("", (1 << 53) - 1)],
            ),
        ] {
            let expected: Vec<_> = expected.iter().map(|(vcpus, kib)| ((*vcpus).to_owned(), *kib)).collect();
            assert_eq!(read(&numa(cells)).unwrap(), expected, "{cells:?}");
        }
    }

    #[test]
    fn the_first_numa_of_every_cpu_counts() {
        let cell = |cpus: &str| format!("<numa><cell memory='1' cpus='{cpus}'/></numa>");
        assert_eq!(read(&format!("<cpu>{}{}</cpu>", cell("0-3"), cell("0-3"))).unwrap().len(), 1);
        assert_eq!(read(&format!("<cpu/><cpu>{}</cpu>", cell("0-3"))).unwrap().len(), 1);
        assert_eq!(read(&format!("<cpu>{}</cpu><cpu>{}</cpu>", cell("0"), cell("1-3"))).unwrap().len(), 2);
        assert!(read(&format!("<cpu>{}</cpu><cpu>{}</cpu>", cell("0"), cell("0"))).is_err());
        for none in ["", "<cpu/>", "<metadata><cpu><numa/></cpu></metadata>", "<cpu><x:numa xmlns:x='u'/></cpu>"] {
            assert_eq!(read(none).unwrap(), [], "{none}");
        }
    }

    #[test]
    fn cells_that_libvirt_refuses() {
        for (cells, part) in [
            (&[][..], "no <cell>"),
            (&["id='1' memory='5'"], "no gaps"),
            (&["id='1' memory='5'", "memory='5'"], "twice"),
            (&["id='18446744073709551615' memory='5'"], "no gaps"),
            (&["id='18446744073709551616' memory='5'"], "not a number"),
            (&["id='' memory='5'"], "not a number"),
            (&["id='-0' memory='5'"], "not a number"),
            (&["id='0x0' memory='5'"], "not a number"),
            (&["cpus='0-3'"], "no memory"),
            (&["memory=''"], "not a number"),
            (&["memory='5 '"], "not a number"),
            (&["memory='5' unit='x'"], "not a unit"),
            (&["memory='9007199254740992'"], "out of range"),
            (&["memory='99999999999999999999'"], "not a number"),
            (&["memory='5' cpus=''"], "not a list"),
            (&["memory='5' cpus='junk'"], "not a list"),
            (&["memory='5' cpus='0-4'"], "vCPU 4"),
            (&["memory='5' cpus='9999'"], "not a list"),
            (&["memory='5' cpus='0'", "memory='5' cpus='1,0'"], "vCPUs 0"),
        ] {
            let error = read(&numa(cells)).unwrap_err();
            assert_eq!(error.code, Code::DomainInvalid);
            assert!(error.message.contains(part), "{cells:?}: {}", error.message);
        }
    }

    #[test]
    fn a_flood_is_read_in_time() {
        assert_eq!(read(&numa(&["memory='1'"; 100_000])).unwrap().len(), 100_000);
        assert!(read(&numa(&["memory='1' cpus='0'"; 100_000])).is_err());
        assert!(read(&numa(&["id='0' memory='1'"; 100_000])).is_err());
    }
}
