//! How much memory the guest has and of which pages. Never says where it comes from: that is `<numatune>`.

use roxmltree::Node;

use super::{Domain, children, invalid, number, string};
use crate::alloc::request::{GuestMemory, Pages};
use crate::error::{Error, Result};

/// Pages of this size in KiB are nobody's huge pages.
const ORDINARY_PAGE_KIB: u64 = 4;

/// The largest size in bytes that libvirt counts with.
const MAX_BYTES: u64 = i64::MAX.unsigned_abs();

/// The guest's memory; `None` where the document does not say.
pub(super) fn of(domain: &Domain<'_>) -> Result<Option<GuestMemory>> {
    // An empty element says nothing, to libvirt too.
    let Some(memory) = domain.first(&["memory"]).filter(|memory| !string(*memory).is_empty()) else {
        return Ok(None);
    };
    let bytes = size(&string(memory), memory.attribute("unit"), "memory")?;
    Ok(Some(GuestMemory { bytes, pages: pages(domain)? }))
}

/// `<hugepages/>` alone means the host's default size. A `<page>` with a `nodeset` is for some guest nodes only, so one
/// without comes first.
fn pages(domain: &Domain<'_>) -> Result<Pages> {
    let Some(hugepages) = domain.first(&["memoryBacking", "hugepages"]) else {
        return Ok(Pages::Ordinary);
    };
    let all: Vec<Node<'_, '_>> = children(hugepages, "page").collect();
    let Some(page) = all.iter().find(|page| !page.has_attribute("nodeset")).or(all.first()) else {
        return Ok(Pages::HugeDefault);
    };
    let size = page.attribute("size").ok_or_else(|| invalid("<page> in <hugepages> has no size attribute"))?;
    let kib = scaled(size, page.attribute("unit"), "page")?.div_ceil(1024);
    Ok(if kib <= ORDINARY_PAGE_KIB { Pages::Ordinary } else { Pages::Huge(kib) })
}

/// The bytes of an amount of memory. libvirt keeps whole KiB, rounded up, and so do we: what is divided among NUMA cells has
/// to add up to what the guest gets.
pub(super) fn size(text: &str, unit: Option<&str>, element: &str) -> Result<u64> {
    let bytes = scaled(text, unit, element)?.checked_next_multiple_of(1024);
    bytes.filter(|bytes| *bytes <= MAX_BYTES).ok_or_else(|| too_large(text, unit.unwrap_or_default(), element))
}

fn too_large(text: &str, unit: &str, element: &str) -> Error {
    invalid(format!("<{element}> size {text} {unit} is out of range"))
}

/// Bytes from a number and its unit (KiB when there is none), as libvirt's `virScaleInteger` reads them.
fn scaled(text: &str, unit: Option<&str>, element: &str) -> Result<u64> {
    let number = number(text).ok_or_else(|| invalid(format!("<{element}> size \"{text}\" is not a number")))?;
    let unit = unit.filter(|unit| !unit.is_empty()).unwrap_or("KiB");
    let scale = scale(unit).ok_or_else(|| {
        invalid(format!("<{element} unit=\"{unit}\"> is not a unit libvirt knows"))
            .with_hint("units are bytes, KB, KiB, MB, MiB, GB, GiB, TB, TiB, PB, PiB, EB, EiB")
    })?;
    number.checked_mul(scale).ok_or_else(|| too_large(text, unit, element))
}

fn scale(unit: &str) -> Option<u64> {
    let unit = unit.to_ascii_lowercase();
    if matches!(unit.as_str(), "b" | "byte" | "bytes") {
        return Some(1);
    }
    let mut letters = unit.chars();
    let power = "kmgtpe".find(letters.next()?)?;
    let base: u64 = match letters.as_str() {
        "" | "ib" => 1024,
        "b" => 1000,
        _ => return None,
    };
    base.checked_pow(u32::try_from(power).ok()? + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Option<GuestMemory>> {
        of(&Domain::parse(&format!("<domain>{text}</domain>")).unwrap())
    }

    #[test]
    fn units() {
        for (text, bytes) in [
            ("<memory>4</memory>", 4096),
            ("<memory unit='b'>1024</memory>", 1024),
            ("<memory unit='b'>1025</memory>", 2048),
            ("<memory unit='Bytes'>5</memory>", 1024),
            ("<memory unit='KB'>5</memory>", 5120),
            ("<memory unit='k'>5</memory>", 5120),
            ("<memory unit='MB'>5</memory>", 5_000_192),
            ("<memory unit='MiB'>5</memory>", 5 << 20),
            ("<memory unit='G'>+05</memory>", 5 << 30),
            ("<memory unit='gib'>5</memory>", 5 << 30),
            ("<memory unit='T'>5</memory>", 5 << 40),
            ("<memory unit='E'>7</memory>", 7 << 60),
            ("<memory>9007199254740991</memory>", (1 << 63) - 1024),
        ] {
            assert_eq!(read(text).unwrap().map(|memory| memory.bytes), Some(bytes), "{text}");
        }
        for text in [
            "<memory> </memory>",
            "<memory unit='x'>1</memory>",
            "<memory unit='Kb i'>1</memory>",
            "<memory>1 </memory>",
        ] {
            assert!(read(text).is_err(), "{text}");
        }
        for size in [
            "unit='E'>8",
            "unit='E'>16",
            ">9007199254740992",
            "unit='b'>9223372036854775807",
            "unit='b'>9223372036854775808",
        ] {
            assert!(read(&format!("<memory {size}</memory>")).unwrap_err().message.contains("out of range"), "{size}");
        }
        assert_eq!(read("").unwrap(), None);
        assert_eq!(read("<memory/>").unwrap(), None);
    }

    #[test]
    fn huge_pages() {
        for (text, pages) in [
            ("", Pages::Ordinary),
            ("<hugepages/>", Pages::HugeDefault),
            ("<hugepages><page size='2048'/></hugepages>", Pages::Huge(2048)),
            ("<hugepages><page size='1' unit='G'/></hugepages>", Pages::Huge(1 << 20)),
            ("<hugepages><page size='4'/></hugepages>", Pages::Ordinary),
            (
                "<hugepages><page size='1' unit='G' nodeset='0'/><page size='2' unit='M'/></hugepages>",
                Pages::Huge(2048),
            ),
            ("<hugepages><page size='1' unit='G' nodeset='0'/></hugepages>", Pages::Huge(1 << 20)),
        ] {
            let memory = read(&format!("<memory>4</memory><memoryBacking>{text}</memoryBacking>")).unwrap().unwrap();
            assert_eq!(memory.pages, pages, "{text}");
        }
    }
}
