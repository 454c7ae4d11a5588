//! Which PCI devices of the host the document passes through. Knows nothing of where they are.

use std::collections::BTreeSet;

use roxmltree::Node;

use super::{Domain, children, invalid};
use crate::error::Result;
use crate::host::PciAddress;

/// Each device once, whatever the spelling of its address.
pub(super) fn pci(domain: &Domain<'_>) -> Result<BTreeSet<PciAddress>> {
    let devices = domain.all(&["devices"]).into_iter().flat_map(|devices| devices.children());
    let addresses = devices.filter_map(passed_through).map(address);
    addresses.collect()
}

/// The host's address of a device that is passed through. One without an address is none that could be looked for.
fn passed_through<'d, 't>(device: Node<'d, 't>) -> Option<Node<'d, 't>> {
    let tag = device.tag_name();
    if !device.is_element() || tag.namespace().is_some() {
        return None;
    }
    let source = children(device, "source").next()?;
    let address = children(source, "address").next()?;
    let is_pci = match (tag.name(), device.attribute("type")?) {
        ("hostdev", "pci") => device.attribute("mode").is_none_or(|mode| mode == "subsystem"),
        // Here the kind of device is said by the address.
        ("interface", "hostdev") => address.attribute("type") == Some("pci"),
        ("disk", "nvme") => source.attribute("type") == Some("pci"),
        _ => false,
    };
    is_pci.then_some(address)
}

fn address(address: Node<'_, '_>) -> Result<PciAddress> {
    Ok(PciAddress {
        domain: part(address, "domain", u32::MAX)?,
        bus: part(address, "bus", u8::MAX)?,
        slot: part(address, "slot", 0x1f)?,
        function: part(address, "function", 7)?,
    })
}

/// A part of an address; 0 where it is not given.
fn part<N: TryFrom<u64> + PartialOrd>(address: Node<'_, '_>, name: &str, largest: N) -> Result<N> {
    let text = address.attribute(name).unwrap_or("0");
    let number = number(text).and_then(|number| N::try_from(number).ok()).filter(|number| *number <= largest);
    number.ok_or_else(|| invalid(format!("<address {name}=\"{text}\"> is not part of a PCI address")))
}

/// A number as libvirt reads one that may be hexadecimal: `strtoul` in base 0, where a leading zero means octal.
fn number(text: &str) -> Option<u64> {
    let text = text.trim_start_matches([' ', '\t', '\n', '\r', '\x0b', '\x0c']);
    let digits = text.strip_prefix('+').unwrap_or(text);
    let (digits, radix) = match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        Some(digits) => (digits, 16),
        None if digits.starts_with('0') => (digits, 8),
        None => (digits, 10),
    };
    // from_str_radix would read a second sign.
    u64::from_str_radix(digits, radix).ok().filter(|_| !digits.starts_with('+'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    fn read(devices: &str) -> Result<Vec<String>> {
        let text = format!("<domain><devices>{devices}</devices></domain>");
        Ok(pci(&Domain::parse(&text)?)?.iter().map(ToString::to_string).collect())
    }

    fn hostdev(address: &str) -> String {
        format!("<hostdev mode='subsystem' type='pci' managed='yes'><source><address {address}/></source></hostdev>")
    }

    #[test]
    fn numbers_in_three_bases() {
        for (bus, expected) in
            [("0x0a", "0a"), ("10", "0a"), ("010", "08"), ("0XA", "0a"), (" 0x1", "01"), ("+1", "01"), ("0", "00")]
        {
            assert_eq!(read(&hostdev(&format!("bus='{bus}'"))).unwrap(), [format!("0000:{expected}:00.0")], "{bus}");
        }
        let many = "9".repeat(1 << 20);
        for bus in ["a", "0x1 ", "-1", "", "0x", "256", "0x100", "4294967297", "08", "++1", "0x+1", "٤", &many] {
            let error = read(&hostdev(&format!("bus='{bus}'"))).unwrap_err();
            assert_eq!(error.code, Code::DomainInvalid, "{bus}");
        }
    }

    #[test]
    fn parts_and_their_bounds() {
        for (address, expected) in [
            ("", "0000:00:00.0"),
            ("domain='0x0001' bus='0x65' slot='0x1f' function='0x7'", "0001:65:1f.7"),
            ("domain='0xffffffff' bus='0xff'", "ffffffff:ff:00.0"),
        ] {
            assert_eq!(read(&hostdev(address)).unwrap(), [expected]);
        }
        for address in ["domain='0x100000000'", "slot='0x20'", "function='8'"] {
            assert!(read(&hostdev(address)).is_err(), "{address}");
        }
    }

    #[test]
    fn what_is_passed_through() {
        let source = "<source><address bus='1'/></source>";
        let typed = "<source><address type='pci' bus='1'/></source>";
        for (device, name, source) in [
            ("hostdev type='pci'", "hostdev", source),
            ("hostdev mode='subsystem' type='pci'", "hostdev", typed),
            ("interface type='hostdev'", "interface", typed),
            ("disk type='nvme'", "disk", "<source type='pci' namespace='1'><address bus='1'/></source>"),
            (
                "hostdev type='pci'",
                "hostdev",
                "<address bus='9'/><source><x/><address bus='1'/><address bus='2'/></source>",
            ),
        ] {
            assert_eq!(read(&format!("<{device}>{source}</{name}>")).unwrap(), ["0000:01:00.0"], "{device} {source}");
        }
        for (device, name, source) in [
            ("hostdev mode='capabilities' type='pci'", "hostdev", source),
            ("hostdev type='usb'", "hostdev", "<source><address bus='1' device='2'/></source>"),
            ("hostdev type='mdev' model='vfio-pci'", "hostdev", "<source><address uuid='x'/></source>"),
            ("hostdev", "hostdev", source),
            ("hostdev type='pci'", "hostdev", "<source/>"),
            ("hostdev type='pci'", "hostdev", "<address type='pci' bus='1'/>"),
            ("interface type='network'", "interface", typed),
            ("interface type='hostdev'", "interface", source),
            ("x:hostdev xmlns:x='u' type='pci'", "x:hostdev", source),
            ("controller type='pci'", "controller", typed),
        ] {
            assert_eq!(read(&format!("<{device}>{source}</{name}>")).unwrap(), [""; 0], "{device} {source}");
        }
        let twice =
            format!("{}</devices><devices>{}{}", hostdev("bus='16'"), hostdev("bus='0x10'"), hostdev("bus='1'"));
        assert_eq!(read(&twice).unwrap(), ["0000:01:00.0", "0000:10:00.0"]);
    }

    #[test]
    fn a_flood_is_read_in_time() {
        assert_eq!(read(&hostdev("bus='1'").repeat(100_000)).unwrap().len(), 1);
    }
}
