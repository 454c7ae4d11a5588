//! The journal, where there is one; silence otherwise.
//!
//! One record per decision, with the fields DOMAIN, UUID, CODE and CPUS, so that `journalctl -t virt-pin DOMAIN=db` answers
//! what happened to a VM's CPUs. Never writes to stdout or stderr: those belong to whoever called us. Records are kept
//! until [`Journal::flush`]: writing to a journal that hangs would block, and nobody may wait for it with a lock held.

use std::cell::RefCell;
use std::sync::mpsc;
use std::time::Duration;

use tracing::{Dispatch, Level};
use tracing_subscriber::layer::SubscriberExt;

use crate::cpuset::CpuSet;
use crate::error::{Code, printable};
use crate::host::root::Root;
use crate::uuid::DomainUuid;

/// How long to wait for the journal. It answers within microseconds, or it hangs.
const PATIENCE: Duration = Duration::from_millis(250);

/// The records of one run, and the journal to write them to, if there is one.
#[derive(Debug)]
pub struct Journal {
    dispatch: Option<Dispatch>,
    records: RefCell<Vec<Record>>,
}

#[derive(Debug)]
struct Record {
    domain: String,
    uuid: String,
    level: Level,
    code: Option<Code>,
    cpus: String,
    message: String,
}

impl Journal {
    /// Opens the journal of this machine if its socket is there.
    pub fn open(root: &Root) -> Journal {
        let layer = root.is_this_machine().then(tracing_journald::Layer::new).and_then(Result::ok);
        let dispatch = layer.map(|layer| {
            let layer = layer.with_field_prefix(None).with_syslog_identifier("virt-pin".to_owned());
            Dispatch::new(tracing_subscriber::registry().with(layer))
        });
        Journal { dispatch, records: RefCell::default() }
    }

    /// Notes what happened to a domain: `code` for what went wrong, the CPUs it is about, one sentence. The name is
    /// hostile.
    pub fn record(&self, domain: (&str, DomainUuid), code: Option<Code>, cpus: Option<&CpuSet>, message: &str) {
        let level = if code.is_some() { Level::ERROR } else { Level::INFO };
        self.note(level, domain, code, cpus, message);
    }

    /// Notes what a domain has to do without, although nothing has gone wrong.
    pub fn warn(&self, domain: (&str, DomainUuid), code: Code, message: &str) {
        self.note(Level::WARN, domain, Some(code), None, message);
    }

    /// Notes what concerns no domain alone.
    pub fn say(&self, code: Option<Code>, message: &str) {
        if self.dispatch.is_some() {
            let level = if code.is_some() { Level::WARN } else { Level::INFO };
            let (domain, uuid, cpus, message) = (String::new(), String::new(), String::new(), printable(message));
            self.records.borrow_mut().push(Record { domain, uuid, level, code, cpus, message });
        }
    }

    /// Whether there is a journal.
    pub fn is_there(&self) -> bool {
        self.dispatch.is_some()
    }

    fn note(
        &self,
        level: Level,
        (name, uuid): (&str, DomainUuid),
        code: Option<Code>,
        cpus: Option<&CpuSet>,
        message: &str,
    ) {
        if self.dispatch.is_none() {
            return;
        }
        let cpus = cpus.map(ToString::to_string).unwrap_or_default();
        let (domain, uuid, message) = (printable(name), uuid.to_string(), printable(message));
        self.records.borrow_mut().push(Record { domain, uuid, level, code, cpus, message });
    }

    /// Writes the records. Those that a hanging journal does not take in time are lost; that is nobody's failure.
    pub fn flush(&self) {
        let records = self.records.take();
        let Some(dispatch) = self.dispatch.clone().filter(|_| !records.is_empty()) else { return };
        let (done, written) = mpsc::channel();
        // The thread ends with the process, whatever it waits for.
        std::thread::spawn(move || {
            tracing::dispatcher::with_default(&dispatch, || records.iter().for_each(write));
            let _ = done.send(());
        });
        let _ = written.recv_timeout(PATIENCE);
    }
}

fn write(record: &Record) {
    let Record { domain, uuid, cpus, message, .. } = record;
    let code = record.code.map_or("", Code::name);
    // The macro makes a constant of the level.
    match record.level {
        Level::ERROR => tracing::event!(Level::ERROR, domain, uuid, code, cpus, "{message}"),
        Level::WARN => tracing::event!(Level::WARN, domain, uuid, code, cpus, "{message}"),
        _ => tracing::event!(Level::INFO, domain, uuid, code, cpus, "{message}"),
    }
}
