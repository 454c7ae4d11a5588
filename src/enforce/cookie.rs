//! Core scheduling: VMs of one tenant share a cookie, and the kernel never runs two cookies on the threads of a core at once.
//!
//! A cookie has no name: it is made for a QEMU, or taken over from one that runs. Threads pass it on to those they make.
//! `prctl(PR_SCHED_CORE)`, Linux 5.14 with `CONFIG_SCHED_CORE`; without SMT the kernel says so, and there is nothing to keep
//! apart.

use std::thread;

use rustix::io::Errno;
use rustix::thread::{
    CoreSchedulingScope, Pid, core_scheduling_cookie, create_core_scheduling_cookie, pull_core_scheduling_cookie,
    push_core_scheduling_cookie,
};

use crate::alloc::policy::Policy;
use crate::error::{Code, Error, Result};
use crate::host::process;
use crate::host::root::Root;

/// What the kernel does with cookies. A seam: few kernels have any.
trait Kernel {
    /// The cookie of a thread; 0 = none.
    fn cookie(&self, tid: u32) -> Result<u64, Errno>;
    /// Gives all threads of a process a new cookie.
    fn create(&self, pid: u32) -> Result<(), Errno>;
    /// Gives all threads of a process another's cookie.
    fn share(&self, from: u32, to: u32) -> Result<(), Errno>;
}

/// The one that runs.
struct ThisKernel;

impl Kernel for ThisKernel {
    fn cookie(&self, tid: u32) -> Result<u64, Errno> {
        core_scheduling_cookie(pid_of(tid)?, CoreSchedulingScope::Thread)
    }

    fn create(&self, pid: u32) -> Result<(), Errno> {
        create_core_scheduling_cookie(pid_of(pid)?, CoreSchedulingScope::ThreadGroup)
    }

    fn share(&self, from: u32, to: u32) -> Result<(), Errno> {
        let (from, to) = (pid_of(from)?, pid_of(to)?);
        // It goes through the caller, who then has it too: a thread that ends with this.
        thread::spawn(move || {
            pull_core_scheduling_cookie(from, CoreSchedulingScope::Thread)?;
            push_core_scheduling_cookie(to, CoreSchedulingScope::ThreadGroup)
        })
        .join()
        .unwrap_or(Err(Errno::IO))
    }
}

fn pid_of(id: u32) -> Result<Pid, Errno> {
    i32::try_from(id).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)
}

/// Whether a domain with this policy can have what it says on this machine.
///
/// # Errors
/// [`Code::CoreSched`].
pub fn check(root: &Root, policy: &Policy) -> Result<()> {
    if policy.cookie_of().is_none() || !root.is_this_machine() {
        return Ok(());
    }
    judge(ThisKernel.cookie(std::process::id())).map(drop)
}

/// Whether there are cookies, by what the kernel says when asked for one; false where they have no use.
fn judge(answer: Result<u64, Errno>) -> Result<bool> {
    match answer {
        Ok(_) => Ok(true),
        Err(Errno::NODEV) => Ok(false),
        Err(errno) => {
            let message = "policy core-sched=\"tenant\": this kernel has no core scheduling (prctl PR_SCHED_CORE)";
            Err(Error::new(Code::CoreSched, message).because(errno))
        }
    }
}

/// Gives the threads of the QEMU `pid` the cookie of its tenant: that of the first of `others` (QEMUs of the same tenant)
/// that has one, or a new one. To be called with the lease lock held, or two that start at once would have one each.
///
/// # Errors
/// [`Code::CoreSched`], also when a thread does not have it afterwards.
pub fn share(root: &Root, pid: u32, others: &[u32]) -> Result<()> {
    if !root.is_this_machine() {
        return Ok(());
    }
    let threads = || Ok(process::threads(root, pid)?.into_iter().map(|thread| thread.tid).collect());
    share_by(&ThisKernel, pid, others, &threads)
}

fn share_by(kernel: &dyn Kernel, pid: u32, others: &[u32], threads: &dyn Fn() -> Result<Vec<u32>>) -> Result<()> {
    if !judge(kernel.cookie(pid))? {
        return Ok(());
    }
    let failed = |what: String, errno: Errno| {
        Error::new(Code::CoreSched, format!("cannot give QEMU (pid {pid}) {what}")).because(errno)
    };
    let tenants =
        others.iter().find_map(|&other| Some((other, kernel.cookie(other).ok().filter(|&cookie| cookie != 0)?)));
    let wanted = match tenants {
        Some((other, cookie)) => {
            kernel.share(other, pid).map_err(|errno| failed(format!("the cookie of pid {other}"), errno))?;
            cookie
        }
        None => {
            kernel.create(pid).map_err(|errno| failed("a cookie".to_owned(), errno))?;
            kernel.cookie(pid).map_err(|errno| failed("a cookie".to_owned(), errno))?
        }
    };
    for tid in threads()? {
        match kernel.cookie(tid) {
            // It has ended.
            Err(Errno::SRCH) => {}
            Ok(cookie) if cookie == wanted && cookie != 0 => {}
            found => {
                let found = found.map_or_else(|errno| errno.to_string(), |cookie| format!("{cookie:#x}"));
                return Err(Error::new(
                    Code::CoreSched,
                    format!(
                        "thread {tid} of QEMU (pid {pid}) has the core scheduling cookie {found}, its tenant {wanted:#x}"
                    ),
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    use crate::alloc::policy::CoreSched;

    /// Threads by process, each with its cookie.
    struct Described {
        threads: RefCell<BTreeMap<u32, (u32, u64)>>,
        refuses: Option<Errno>,
        /// A thread that keeps what it has.
        stubborn: u32,
    }

    impl Described {
        /// Processes 10, 20 and 30 of two threads each.
        fn new(refuses: Option<Errno>) -> Described {
            let threads = [10, 11, 20, 21, 30, 31].map(|tid| (tid, (tid / 10 * 10, 0)));
            Described { threads: RefCell::new(threads.into()), refuses, stubborn: 0 }
        }

        fn give(&self, pid: u32, cookie: u64) -> Result<(), Errno> {
            for (tid, (of, has)) in self.threads.borrow_mut().iter_mut() {
                if *of == pid && *tid != self.stubborn {
                    *has = cookie;
                }
            }
            Ok(())
        }

        fn start(&self, pid: u32, others: &[u32]) -> Result<()> {
            share_by(self, pid, others, &|| Ok(vec![pid, pid + 1, pid + 2]))
        }
    }

    impl Kernel for Described {
        fn cookie(&self, tid: u32) -> Result<u64, Errno> {
            self.refuses.map_or(Ok(()), Err)?;
            self.threads.borrow().get(&tid).map(|(_, cookie)| *cookie).ok_or(Errno::SRCH)
        }

        fn create(&self, pid: u32) -> Result<(), Errno> {
            self.give(pid, u64::from(pid) + 1000)
        }

        fn share(&self, from: u32, to: u32) -> Result<(), Errno> {
            self.give(to, self.cookie(from)?)
        }
    }

    #[test]
    fn a_tenant_has_one_cookie_and_tenants_have_different_ones() {
        let kernel = Described::new(None);
        kernel.start(10, &[]).unwrap();
        // One that has ended, one that has none, one that has.
        kernel.start(20, &[99, 30, 10]).unwrap();
        kernel.start(30, &[]).unwrap();
        let cookies: Vec<_> = kernel.threads.borrow().values().map(|(_, cookie)| *cookie).collect();
        assert_eq!(cookies, [1010, 1010, 1010, 1010, 1030, 1030]);
    }

    #[test]
    fn what_the_kernel_does_not_do_is_said() {
        assert!(Described::new(Some(Errno::NODEV)).start(10, &[]).is_ok());
        let error = Described::new(Some(Errno::INVAL)).start(10, &[]).unwrap_err();
        assert_eq!(error.code, Code::CoreSched);
        let error = Described { stubborn: 11, ..Described::new(None) }.start(10, &[]).unwrap_err();
        assert_eq!(error.message, "thread 11 of QEMU (pid 10) has the core scheduling cookie 0x0, its tenant 0x3f2");
    }

    /// Whatever this kernel has: what `check` says is what it does.
    #[test]
    fn this_kernel_is_asked() {
        let root = Root::directory("/");
        let tenant = Policy { core_sched: CoreSched::Tenant, tenant: Some("a".to_owned()), ..Policy::default() };
        assert!(check(&root, &Policy::default()).is_ok());
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let shared = share(&root, child.id(), &[]);
        assert_eq!(check(&root, &tenant).map_err(|error| error.code), shared.map_err(|error| error.code));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
