//! What a lease's plan looks like in `leases.json`: sets as kernel lists, vCPUs in their order; and what must hold of one.

use serde::{Deserialize, Serialize};

use super::request::{nodes, nodes_of, set};
use crate::alloc::plan::{GuestTopology, PlacedCell, Plan};
use crate::cpuset::{CpuId, CpuSet, NodeId};

/// Whether these are numbers of vCPUs of which there are so many.
pub(super) fn exist(vcpus: &CpuSet, count: usize) -> bool {
    vcpus.iter().all(|vcpu| usize::from(vcpu.0) < count)
}

/// What must hold of a plan by itself.
pub(super) fn check(plan: &Plan) -> Result<(), &'static str> {
    let (count, own) = (plan.vcpus.len(), plan.vcpus.iter().flatten().count());
    // A set keeps one of a kind and none that is too high.
    if own == 0 || plan.vcpu_cpus().len() != own || (own < count) == plan.shared.is_empty() {
        return Err("has impossible vCPUs");
    }
    if !plan.cells.iter().all(|cell| exist(&cell.vcpus, count)) {
        return Err("has cells of impossible vCPUs");
    }
    let threads = |guest: GuestTopology| {
        [guest.sockets, guest.dies, guest.cores, guest.threads].into_iter().map(u64::from).product::<u64>()
    };
    if plan.guest.is_some_and(|guest| usize::try_from(threads(guest)) != Ok(count)) {
        return Err("tells the guest of other vCPUs than it has");
    }
    Ok(())
}

/// A plan on disk. A lease has its own plan's fields among its own; the plan that it moves to is written like this.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PlanOnDisk {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) vcpus: Vec<Option<u16>>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) shared: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) whole: bool,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) parked: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) extra: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) emulator: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) iothreads: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) nodes: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) memory_nodes: Option<String>,
    /// Sockets, dies, cores, threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) guest: Option<(u16, u16, u16, u16)>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) cells: Vec<CellOnDisk>,
}

/// A cell of the guest on disk.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CellOnDisk {
    vcpus: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    node: Option<u16>,
}

impl From<&Plan> for PlanOnDisk {
    fn from(plan: &Plan) -> PlanOnDisk {
        let emulator = plan.emulator.to_string();
        let cell = |cell: &PlacedCell| CellOnDisk {
            vcpus: cell.vcpus.to_string(),
            bytes: cell.bytes,
            node: cell.node.map(|node| node.0),
        };
        PlanOnDisk {
            vcpus: plan.vcpus.iter().map(|own| own.map(|cpu| cpu.0)).collect(),
            shared: plan.shared.to_string(),
            whole: plan.whole,
            parked: plan.parked.to_string(),
            extra: plan.extra.to_string(),
            // Mostly both are the housekeeping CPUs, the longest of the lists.
            iothreads: if plan.iothreads == plan.emulator { emulator.clone() } else { plan.iothreads.to_string() },
            emulator,
            nodes: nodes_of(&plan.nodes),
            memory_nodes: plan.memory_nodes.as_ref().map(nodes_of),
            guest: plan.guest.map(|guest| (guest.sockets, guest.dies, guest.cores, guest.threads)),
            cells: plan.cells.iter().map(cell).collect(),
        }
    }
}

impl PlanOnDisk {
    /// What the form on disk stands for, or what is wrong with it.
    pub(super) fn read(self) -> Result<Plan, String> {
        let guest = |(sockets, dies, cores, threads)| GuestTopology { sockets, dies, cores, threads };
        let cell = |cell: CellOnDisk| {
            let node = cell.node.map(NodeId);
            Ok(PlacedCell { vcpus: set(&cell.vcpus)?, bytes: cell.bytes, node })
        };
        let emulator = set(&self.emulator)?;
        Ok(Plan {
            vcpus: self.vcpus.into_iter().map(|own| own.map(CpuId)).collect(),
            shared: set(&self.shared)?,
            whole: self.whole,
            parked: set(&self.parked)?,
            extra: set(&self.extra)?,
            iothreads: if self.iothreads == self.emulator { emulator.clone() } else { set(&self.iothreads)? },
            emulator,
            nodes: nodes(&self.nodes)?,
            memory_nodes: self.memory_nodes.as_deref().map(nodes).transpose()?,
            guest: self.guest.map(guest),
            cells: self.cells.into_iter().map(cell).collect::<Result<_, String>>()?,
        })
    }
}
