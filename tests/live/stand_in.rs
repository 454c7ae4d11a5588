//! A stand-in for the hook: a shell script that writes down what libvirt calls it with, and can refuse.

use std::io::Write as _;

use tempfile::NamedTempFile;

use crate::libvirtd::{Libvirtd, Options};

/// The script, outside of any machine, and what it wrote down on one.
pub(crate) struct StandIn {
    script: NamedTempFile,
}

impl StandIn {
    /// A hook that agrees to everything.
    pub(crate) fn logging() -> StandIn {
        StandIn::with("")
    }

    /// A hook that fails one operation with status 9 and this on stderr.
    pub(crate) fn refusing(operation: &str, message: &str) -> StandIn {
        StandIn::with(&format!("[ \"$2\" != {operation} ] || {{ echo '{message}' >&2; exit 9; }}\n"))
    }

    fn with(ending: &str) -> StandIn {
        let mut script = NamedTempFile::new().unwrap();
        let log = "#!/bin/sh\necho \"$1 $2\" >>/run/hook.log\ncat >\"/run/hook.$1.$2\"\n";
        script.write_all(format!("{log}{ending}").as_bytes()).unwrap();
        StandIn { script }
    }

    /// A machine with this hook, and nothing else of virt-pin.
    pub(crate) fn options(&self) -> Options<'static> {
        Options { hook: Some(self.script.path().to_owned()), ..Options::default() }
    }

    /// The operations libvirt has called the hook with for a domain, in order.
    #[track_caller]
    pub(crate) fn events(&self, daemon: &Libvirtd, domain: &str) -> Vec<String> {
        let log = daemon.file("/run/hook.log");
        let events = log.lines().filter_map(|line| line.rsplit_once(' '));
        events.filter(|(name, _)| *name == domain).map(|(_, operation)| operation.to_owned()).collect()
    }

    /// What stood on stdin at a domain's last call with an operation.
    #[track_caller]
    pub(crate) fn stdin(&self, daemon: &Libvirtd, domain: &str, operation: &str) -> String {
        daemon.file(&format!("/run/hook.{domain}.{operation}"))
    }

    /// Waits until libvirt has called `stopped` and `release`.
    #[track_caller]
    pub(crate) fn wait_for_release(&self, daemon: &Libvirtd, domain: &str) {
        daemon.wait_until("stopped and release", |daemon| {
            self.events(daemon, domain).ends_with(&["stopped".to_owned(), "release".to_owned()])
        });
    }
}
