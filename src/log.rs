//! The journal, where there is one; silence otherwise.
//!
//! One record per event, with the fields DOMAIN, UUID, CODE and CPUS, so that `journalctl -t virt-pin DOMAIN=db` answers
//! what happened to a VM's CPUs. Never writes to stdout or stderr: those belong to whoever called us.

use tracing::{Dispatch, Level};
use tracing_subscriber::layer::SubscriberExt;

use crate::cpuset::CpuSet;
use crate::error::{Code, printable};
use crate::host::root::Root;
use crate::uuid::DomainUuid;

/// What is recorded.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// The domain's name, hostile.
    pub domain: &'a str,
    /// Its UUID.
    pub uuid: DomainUuid,
    /// The failure's code; `None` for what went well.
    pub code: Option<Code>,
    /// The CPUs it is about.
    pub cpus: Option<&'a CpuSet>,
    /// One sentence.
    pub message: &'a str,
}

/// A connection to the journal, or none.
#[derive(Debug)]
pub struct Journal {
    dispatch: Option<Dispatch>,
}

impl Journal {
    /// Opens the journal of this machine if its socket answers.
    pub fn open(root: &Root) -> Journal {
        let layer = root.is_this_machine().then(tracing_journald::Layer::new).and_then(Result::ok);
        let dispatch = layer.map(|layer| {
            let layer = layer.with_field_prefix(None).with_syslog_identifier("virt-pin".to_owned());
            Dispatch::new(tracing_subscriber::registry().with(layer))
        });
        Journal { dispatch }
    }

    /// Writes one record. That it cannot be written is nobody's failure.
    pub fn record(&self, record: &Record<'_>) {
        let Some(dispatch) = &self.dispatch else { return };
        let domain = printable(record.domain);
        let uuid = record.uuid.to_string();
        let code = record.code.map_or("", Code::name);
        let cpus = record.cpus.map(ToString::to_string).unwrap_or_default();
        let message = printable(record.message);
        tracing::dispatcher::with_default(dispatch, || {
            if record.code.is_some() {
                tracing::event!(Level::ERROR, domain, uuid, code, cpus, "{message}");
            } else {
                tracing::event!(Level::INFO, domain, uuid, code, cpus, "{message}");
            }
        });
    }
}
