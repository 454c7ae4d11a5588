//! The host's own work, kept off the CPUs of leases that ask for that, and given back what it had: at the same events as
//! everything else, under the same lock.

use super::act::Event;
use crate::alloc::plan::Plan;
use crate::alloc::policy::Irqs;
use crate::enforce::binding;
use crate::enforce::isolation::{self, irqs, partition};
use crate::error::{Code, Error, Result};
use crate::host::qemu::Status;
use crate::lock::leases::{Lease, Leases};
use crate::lock::{StateLock, former};

impl Event<'_> {
    /// Makes the host what these leases want of it, or gives back what they no longer want. That this cannot be done is no
    /// reason to fail who is not to blame: it is recorded, and tried again at the next event.
    pub(super) fn settle_host(&self, state: &mut StateLock, leases: &Leases) {
        if let Err(error) = isolation::settle(self.root, state, leases) {
            self.record(Some(error.code), None, &error.message);
        }
    }

    /// Whether anything of the host's own is not as it was.
    pub(super) fn host_is_changed(&self) -> bool {
        former::read(self.root).map_or(true, |former| !former.is_empty())
    }

    /// The domain runs and is bound: nobody else runs on its CPUs from now on, as far as its policy asks. What cannot be moved
    /// is recorded.
    ///
    /// # Errors
    /// As [`partition::ensure`] and [`binding::bind`].
    pub(super) fn isolate(&self, lease: &Lease, status: &Status, plan: &Plan) -> Result<()> {
        if isolation::is_partition(lease) {
            partition::ensure(self.root, status, plan, None)?;
            binding::bind(self.root, status, plan)?;
        }
        if isolation::policy(lease).is_some_and(|policy| policy.irqs == Irqs::Away) {
            let staying = irqs::on(self.root, &plan.exclusive()).unwrap_or_default();
            if !staying.is_empty() {
                let message = format!("the kernel keeps interrupts on its CPUs: {}", staying.join(", "));
                self.record(None, Some(&plan.exclusive()), &message);
            }
        }
        Ok(())
    }

    /// Whether what [`Event::isolate`] did still holds.
    ///
    /// # Errors
    /// [`Code::IsolationFailed`] if not.
    pub(super) fn is_isolated(&self, lease: &Lease, status: &Status) -> Result<()> {
        let Some(plan) = lease.plan().filter(|_| isolation::is_partition(lease)) else { return Ok(()) };
        match partition::flaw(self.root, status, plan)? {
            Some(flaw) => Err(Error::new(Code::IsolationFailed, flaw)),
            None => Ok(()),
        }
    }
}
