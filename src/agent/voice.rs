//! What the agent says: to the journal, or to stderr where there is none.

use std::io::{self, Write};

use crate::error::{Code, Error, printable};
use crate::host::root::Root;
use crate::log::Journal;
use crate::uuid::DomainUuid;

/// Where the agent speaks.
#[derive(Debug)]
pub(super) struct Voice(Journal);

impl Voice {
    pub(super) fn of(root: &Root) -> Voice {
        Voice(Journal::open(root))
    }

    /// About no domain alone.
    pub(super) fn say(&self, code: Option<Code>, message: &str) {
        self.0.say(code, message);
        self.out("", code, message);
    }

    /// About a domain: what was done.
    pub(super) fn did(&self, domain: (&str, DomainUuid), message: &str) {
        self.0.record(domain, None, None, message);
        self.out(domain.0, None, message);
    }

    /// About a domain: what is not as it should be.
    pub(super) fn warn(&self, domain: (&str, DomainUuid), code: Code, message: &str) {
        self.0.warn(domain, code, message);
        self.out(domain.0, Some(code), message);
    }

    pub(super) fn fail(&self, error: &Error) {
        self.say(Some(error.code), &error.message);
    }

    fn out(&self, domain: &str, code: Option<Code>, message: &str) {
        if self.0.is_there() {
            return self.0.flush();
        }
        if cfg!(test) {
            return;
        }
        let code = code.map(|code| format!("[{code}] ")).unwrap_or_default();
        let domain = if domain.is_empty() { String::new() } else { format!("domain \"{}\": ", printable(domain)) };
        // A terminal that has gone is nobody's failure.
        let _ = io::stderr().write_all(format!("virt-pin: {code}{domain}{}\n", printable(message)).as_bytes());
    }
}
