//! What a lease was asked for, in its form on disk.
//!
//! ```text
//! {"vcpus":4,"iothreads":1,"policy":[["policy","dedicated"],["numa","single"]],"memory":{"bytes":1073741824,"pages":{"huge":2048}},
//!  "cells":[{"vcpus":"0-3","bytes":1073741824}],"devices":"1"}
//! ```
//! The policy is written as its attributes, so that this file knows no more of it than XML and configuration do. What
//! does not hold of a request is for [`super::leases::Leases::check`] to say; no I/O here.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::alloc::policy::Policy;
use crate::alloc::request::{GuestCell, GuestMemory, Pages, Request};
use crate::cpuset::{CpuId, CpuSet, NodeId};

/// A request on disk.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RequestOnDisk {
    vcpus: u16,
    #[serde(default, skip_serializing_if = "is_zero")]
    iothreads: u16,
    policy: Vec<(String, String)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    memory: Option<MemoryOnDisk>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    cells: Vec<CellOnDisk>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    devices: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MemoryOnDisk {
    bytes: u64,
    #[serde(with = "PagesOnDisk")]
    pages: Pages,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Pages", rename_all = "kebab-case")]
enum PagesOnDisk {
    Ordinary,
    HugeDefault,
    Huge(u64),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CellOnDisk {
    vcpus: String,
    bytes: u64,
}

// The signature is serde's.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u16) -> bool {
    *number == 0
}

impl From<&Request> for RequestOnDisk {
    fn from(request: &Request) -> RequestOnDisk {
        let cell = |cell: &GuestCell| CellOnDisk { vcpus: cell.vcpus.to_string(), bytes: cell.bytes };
        RequestOnDisk {
            vcpus: request.vcpus,
            iothreads: request.iothreads,
            policy: request.policy.to_attributes().into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
            memory: request.memory.map(|GuestMemory { bytes, pages }| MemoryOnDisk { bytes, pages }),
            cells: request.cells.iter().map(cell).collect(),
            devices: nodes_of(&request.devices),
        }
    }
}

impl TryFrom<RequestOnDisk> for Request {
    type Error = String;

    fn try_from(file: RequestOnDisk) -> Result<Request, String> {
        let policy = file.policy.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let cell = |cell: CellOnDisk| Ok(GuestCell { vcpus: set(&cell.vcpus)?, bytes: cell.bytes, bound: None });
        Ok(Request {
            vcpus: file.vcpus,
            iothreads: file.iothreads,
            policy: Policy::from_attributes(policy)
                .map_err(|error| format!("has a request that cannot be read: {error}"))?,
            memory: file.memory.map(|MemoryOnDisk { bytes, pages }| GuestMemory { bytes, pages }),
            cells: file.cells.into_iter().map(cell).collect::<Result<_, String>>()?,
            devices: nodes(&file.devices)?,
        })
    }
}

/// The set that a kernel list on disk stands for.
pub(super) fn set(text: &str) -> Result<CpuSet, String> {
    CpuSet::parse_kernel_list(text).map_err(|error| format!("has \"{text}\": {error}"))
}

/// Nodes on disk: a list like one of CPUs.
pub(super) fn nodes(text: &str) -> Result<BTreeSet<NodeId>, String> {
    Ok(set(text)?.iter().map(|id| NodeId(id.0)).collect())
}

/// The same, for writing.
pub(super) fn nodes_of(nodes: &BTreeSet<NodeId>) -> String {
    nodes.iter().map(|node| CpuId(node.0)).collect::<CpuSet>().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU16;

    use crate::alloc::policy::{Kind, OtherThreads, Span, ThreadsPerCore};

    #[test]
    fn a_request_on_disk() {
        let policy = Policy {
            kind: Kind::Dedicated,
            numa: Span::Single,
            threads_per_core: ThreadsPerCore::Exactly(NonZeroU16::MIN),
            emulator: OtherThreads::Isolate,
            ..Policy::default()
        };
        let cell =
            |vcpus: &[u16]| GuestCell { vcpus: vcpus.iter().copied().map(CpuId).collect(), bytes: 5, bound: None };
        let request = Request {
            iothreads: 1,
            memory: Some(GuestMemory { bytes: 1 << 30, pages: Pages::Huge(2048) }),
            cells: vec![cell(&[0, 1]), cell(&[])],
            devices: [NodeId(1)].into(),
            ..Request::new(2, policy)
        };
        let text = serde_json::to_string(&RequestOnDisk::from(&request)).unwrap();
        assert_eq!(
            text,
            "{\"vcpus\":2,\"iothreads\":1,\"policy\":[[\"policy\",\"dedicated\"],[\"threads-per-core\",\"1\"],[\"numa\",\"single\"],\
             [\"emulator\",\"isolate\"]],\"memory\":{\"bytes\":1073741824,\"pages\":{\"huge\":2048}},\
             \"cells\":[{\"vcpus\":\"0-1\",\"bytes\":5},{\"vcpus\":\"\",\"bytes\":5}],\"devices\":\"1\"}"
        );
        let read = |text: &str| {
            serde_json::from_str::<RequestOnDisk>(text).map_err(|error| error.to_string()).and_then(Request::try_from)
        };
        assert_eq!(read(&text), Ok(request));
        for (what, instead) in [
            ("\"vcpus\":2", "\"vcpus\":-2"),
            ("\"vcpus\":2", "\"vcpus\":65536"),
            ("\"vcpus\":2,", ""),
            ("\"iothreads\"", "\"threads\""),
            ("\"single\"", "\"double\""),
            ("[\"numa\",\"single\"]", "[\"numa\"]"),
            ("[\"numa\",\"single\"]", "[\"colour\",\"red\"]"),
            ("[\"numa\",\"single\"]", "[\"policy\",\"dedicated\"]"),
            ("{\"huge\":2048}", "\"huge\""),
            ("\"0-1\"", "\"1-0\""),
            ("\"devices\":\"1\"", "\"devices\":\"65536\""),
        ] {
            assert!(text.contains(what) && read(&text.replacen(what, instead, 1)).is_err(), "{instead}");
        }
    }
}
