//! Who gets which CPUs: values in, a [`Plan`] or a [`Refusal`] out.
//!
//! Pure: no I/O, clock, randomness or hash order, so the same host, leases and request always give the same CPUs. A plan
//! is whole or there is none: nothing is ever approximated. The algorithm is numbered in [`place`]; [`check`] holds the
//! conditions that every plan meets and is called on each one before it leaves this module.
//!
//! ```
//! use virt_pin::alloc::{self, Supply, policy::Policy, request::Request};
//! use virt_pin::cpuset::CpuSet;
//! # use virt_pin::{cpuset::CpuId, host::{CoreId, Cpu, Topology}};
//! # let cpu = |n: u16| Cpu { cpu: CpuId(n), online: true, isolated: false, core: Some(CoreId(n / 2 * 2)), package: None,
//! #     die: None, cluster: None, node: None, llc: None, class: None };
//! // Four cores of two threads: 0-1, 2-3, 4-5, 6-7.
//! let topology = Topology::new((0..8).map(cpu).collect(), vec![], CpuSet::new(), vec![]);
//! let pinnable = CpuSet::parse_kernel_list("2-7").unwrap();
//! let taken = CpuSet::parse_kernel_list("2-3").unwrap();
//! let request = Request::new(2, Policy::from_attributes([("policy", "dedicated")]).unwrap());
//! let housekeeping = CpuSet::parse_kernel_list("0-1").unwrap();
//! let supply = Supply { topology: &topology, pinnable: &pinnable, taken: &taken, housekeeping: &housekeeping };
//! let plan = alloc::plan(&supply, &request).unwrap();
//! assert_eq!(plan.vcpu_cpus().to_string(), "4-5");
//! assert_eq!(plan.emulator.to_string(), "0-1");
//! ```

pub mod check;
mod choose;
pub mod demand;
mod diagnose;
mod domains;
mod ground;
mod groups;
mod guest;
mod impossible;
mod measure;
mod memory;
mod pick;
mod pieces;
pub mod place;
pub mod plan;
pub mod policy;
pub mod pools;
pub mod quality;
pub mod refusal;
pub mod relocation;
pub mod repack;
pub mod request;
pub mod simulation;
mod sums;

use std::fmt;

use crate::cpuset::CpuSet;
use crate::host::Topology;
use plan::Plan;
use refusal::Refusal;
use request::Request;

/// What can be handed out.
#[derive(Clone, Copy, Debug)]
pub struct Supply<'a> {
    /// The machine.
    pub topology: &'a Topology,
    /// The operator's allowlist, less what the VMs' cgroup cannot reach. May name CPUs that are absent or offline.
    pub pinnable: &'a CpuSet,
    /// CPUs that other domains have: leased (dedicated or static), or in use by their emulator threads.
    pub taken: &'a CpuSet,
    /// Where the host itself and emulator threads run.
    pub housekeeping: &'a CpuSet,
}

impl Supply<'_> {
    /// The CPUs that could be handed out if no lease existed.
    pub fn handed_out(&self) -> CpuSet {
        self.pinnable.intersection(self.topology.online())
    }
}

/// Receives the steps of a decision in words, for `virt-pin explain`. Text is only made when somebody listens.
pub type Steps<'a> = &'a mut dyn FnMut(fmt::Arguments<'_>);

/// The CPUs for one request, or why not.
///
/// # Errors
/// A [`Refusal`]: `cpu.placement.shortage`, `.needs-repack`, `.unsatisfiable`, `cpu.numa.memory-shortage`; `internal` when
/// a plan failed its own check.
pub fn plan(supply: &Supply<'_>, request: &Request) -> Result<Plan, Refusal> {
    explain(supply, request, &mut |_| {})
}

/// As [`plan()`], but a want of room is only said, not explained: for whoever has many to ask.
///
/// # Errors
/// As [`plan()`], every want of room as `cpu.placement.shortage`.
fn attempt(supply: &Supply<'_>, request: &Request) -> Result<Plan, Refusal> {
    let plan = place::place(supply, request, &mut |_| {}, false)?;
    check::check(supply, request, &plan)?;
    Ok(plan)
}

/// As [`plan()`], telling each step.
///
/// # Errors
/// As [`plan()`].
pub fn explain(supply: &Supply<'_>, request: &Request, steps: Steps<'_>) -> Result<Plan, Refusal> {
    let plan = place::place(supply, request, steps, true)?;
    check::check(supply, request, &plan)?;
    Ok(plan)
}
