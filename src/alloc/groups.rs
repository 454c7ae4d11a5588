//! Which vCPUs belong together: step 2 of [`super::place`].
//!
//! One group as a rule; one per guest NUMA cell; or even shares. On which node each ends is [`super::choose`]'s question.

use std::collections::BTreeSet;

use super::Supply;
use super::pieces::pieces;
use super::policy::{Span, ThreadsPerCore};
use super::refusal::Refusal;
use super::request::Request;
use crate::cpuset::{CpuId, CpuSet, MAX_CPUS, NodeId};
use crate::error::{Code, counted};

/// vCPUs that lie together on one node, unless they are the only group.
pub(super) struct Group {
    /// Their numbers, ascending; those of even shares are given out again when the nodes are known.
    pub(super) vcpus: Vec<u16>,
    /// The memory of the guest's cell that they are.
    pub(super) bytes: Option<u64>,
    /// Where that memory is bound to, so that they have to be there.
    pub(super) bound: Option<NodeId>,
}

/// The groups of the vCPUs that get CPUs.
///
/// # Errors
/// A [`Refusal`] where no host has such groups.
pub(super) fn groups(supply: &Supply<'_>, request: &Request) -> Result<Vec<Group>, Refusal> {
    let dedicated: Vec<u16> = request.dedicated().collect();
    if has_cells(request) {
        return cells(supply, request, &dedicated);
    }
    let nodes = nodes_to_use(supply, request).len();
    if request.policy.numa != Span::Spread || nodes < 2 {
        return Ok(vec![Group { vcpus: dedicated, bytes: None, bound: None }]);
    }
    // Evenly in whole cores; where there are fewer of them than nodes, in vCPUs.
    let nothing = CpuSet::new();
    let all = pieces(&Supply { taken: &nothing, ..*supply }, request);
    let per_core = usize::from(all.iter().map(|piece| piece.vcpus).max().unwrap_or(1).max(1));
    let fixed = request.policy.threads_per_core != ThreadsPerCore::Auto;
    let step = if fixed || dedicated.len().div_ceil(per_core) >= nodes { per_core } else { 1 };
    let steps = dedicated.len().div_ceil(step);
    // The core that is not filled is one of the largest share.
    let spare = steps * step - dedicated.len();
    if steps < nodes {
        let what = counted(dedicated.len() as u64, "vCPU");
        let hint = Some("name fewer nodes in the nodes attribute, or give the domain more vCPUs".to_owned());
        let reason = format!("numa=\"spread\": {what} cannot be spread over {nodes} nodes");
        return Err(Refusal { hint, ..Refusal::new(Code::PolicyInvalid, reason) });
    }
    let mut left = dedicated.as_slice();
    let groups = (0..nodes).map(|node| {
        let share = (steps / nodes + usize::from(node < steps % nodes)) * step;
        let share = share - if node == 0 { spare } else { 0 };
        let (group, rest) = left.split_at(share.min(left.len()));
        left = rest;
        Group { vcpus: group.to_vec(), bytes: None, bound: None }
    });
    Ok(groups.collect())
}

/// Whether the guest's own NUMA cells bind its vCPUs: a single one promises nothing.
pub(super) fn has_cells(request: &Request) -> bool {
    request.cells.len() > 1 && request.policy.numa != Span::Any
}

/// One group per guest cell that has vCPUs to place.
fn cells(supply: &Supply<'_>, request: &Request, dedicated: &[u16]) -> Result<Vec<Group>, Refusal> {
    // A document may have hundreds of thousands of cells: no walk through all vCPUs for each.
    let all: CpuSet = dedicated.iter().copied().map(CpuId).collect();
    let groups = request.cells.iter().map(|cell| Group {
        vcpus: cell.vcpus.intersection(&all).iter().map(|vcpu| vcpu.0).collect(),
        bytes: Some(cell.bytes),
        bound: cell.bound,
    });
    let groups: Vec<_> = groups.filter(|group| !group.vcpus.is_empty()).collect();
    let seated: usize = groups.iter().map(|group| group.vcpus.len()).sum();
    if dedicated.len() > usize::from(MAX_CPUS) {
        let reason = format!("{} are more than any host has CPUs", counted(dedicated.len() as u64, "vCPU"));
        return Err(Refusal::new(Code::Unsatisfiable, reason));
    }
    if seated != dedicated.len() {
        let hint = Some("name each vCPU in one <cell> of <numa> (`virsh edit`)".to_owned());
        return Err(Refusal {
            hint,
            ..Refusal::new(Code::PolicyInvalid, "the guest's NUMA cells do not hold each vCPU once")
        });
    }
    if let ThreadsPerCore::Exactly(count) = request.policy.threads_per_core {
        if let Some(odd) = groups.iter().find(|group| group.vcpus.len() % usize::from(count.get()) != 0) {
            let vcpus = counted(odd.vcpus.len() as u64, "vCPU");
            let reason = format!("a guest NUMA cell has {vcpus}, not a multiple of threads-per-core=\"{count}\"");
            let hint = Some("give each cell a multiple, or leave threads-per-core out".to_owned());
            return Err(Refusal { hint, ..Refusal::new(Code::PolicyInvalid, reason) });
        }
    }
    let nodes = nodes_to_use(supply, request).len();
    if request.policy.numa == Span::Spread && groups.len() > nodes {
        let cells = counted(groups.len() as u64, "guest NUMA cell");
        let reason = format!("numa=\"spread\" puts {cells} on a node each, but there are {nodes} nodes to use");
        let hint = Some("give the guest fewer NUMA cells, or set numa=\"prefer\"".to_owned());
        return Err(Refusal { hint, ..Refusal::new(Code::Unsatisfiable, reason) });
    }
    Ok(groups)
}

/// The nodes over which numa="spread" spreads: those named, or all that have CPUs to hand out.
fn nodes_to_use(supply: &Supply<'_>, request: &Request) -> BTreeSet<NodeId> {
    match &request.policy.nodes {
        Some(nodes) => nodes.iter().map(|node| NodeId(node.0)).collect(),
        None => supply.handed_out().iter().filter_map(|cpu| supply.topology.cpu(cpu)?.node).collect(),
    }
}
