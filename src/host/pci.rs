//! Where a PCI device is: its address, and the NUMA node it is attached to. Never says whose it is.
//!
//! `/sys/bus/pci/devices/DDDD:BB:SS.F/numa_node` (2.6.20): a node's number, or -1 where the firmware does not say (most
//! machines of one node).

use std::fmt;

use super::root::Root;
use crate::cpuset::{MAX_CPUS, NodeId};
use crate::error::Result;

/// The directory of all PCI devices, by address.
const DEVICE_DIR: &str = "/sys/bus/pci/devices";

/// A PCI address of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PciAddress {
    /// The PCI domain (segment); more than 16 bits behind some controllers.
    pub domain: u32,
    /// The bus.
    pub bus: u8,
    /// The slot, up to 31.
    pub slot: u8,
    /// The function, up to 7.
    pub function: u8,
}

/// As the kernel writes it: `0000:65:00.0`.
impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.slot, self.function)
    }
}

/// The node that a device is attached to; `None` where the machine does not say or has no such device.
///
/// # Errors
/// [`Code::HostIo`](crate::error::Code::HostIo) when the file is there and cannot be read.
pub fn node_of(root: &Root, address: PciAddress) -> Result<Option<NodeId>> {
    Ok(root.read_if_exists(&path(&address.to_string()))?.and_then(|text| node(&text)))
}

/// The files that [`node_of`] reads, as far as they name a node: a machine has hundreds that do not.
pub(super) fn record(root: &Root) -> Vec<(String, String)> {
    let names = root.list(DEVICE_DIR).unwrap_or_default();
    let files = names.iter().filter_map(|name| {
        let path = path(name);
        let text = root.read_if_exists(&path).ok()??;
        node(&text).map(|_| (path, text))
    });
    files.collect()
}

fn path(name: &str) -> String {
    format!("{DEVICE_DIR}/{name}/numa_node")
}

fn node(text: &str) -> Option<NodeId> {
    text.trim_ascii().parse().ok().filter(|number| *number < MAX_CPUS).map(NodeId)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes() {
        let address = PciAddress { domain: 0, bus: 0x65, slot: 0x1f, function: 7 };
        let node = |text: &str| {
            let file = ("/sys/bus/pci/devices/0000:65:1f.7/numa_node".to_owned(), text.to_owned());
            let root = Root::described([file].into());
            assert_eq!(record(&root).len(), usize::from(node_of(&root, address).unwrap().is_some()), "{text:?}");
            node_of(&root, address).unwrap()
        };
        assert_eq!([node("0\n"), node("12")], [Some(NodeId(0)), Some(NodeId(12))]);
        for text in ["-1\n", "", "x", "8192", "99999999999999999999"] {
            assert_eq!(node(text), None, "{text:?}");
        }
        assert_eq!(node_of(&Root::described([].into()), address).unwrap(), None);
        let behind_a_controller = PciAddress { domain: 0x10000, bus: 0xe1, slot: 0, function: 0 };
        assert_eq!(behind_a_controller.to_string(), "10000:e1:00.0");
    }
}
