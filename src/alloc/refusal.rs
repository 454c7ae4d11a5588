//! Why not, in numbers.

use crate::error::{Code, Error, Room};

/// A request that gets no plan. Nothing was changed; the numbers say what would change the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The class of the refusal.
    pub code: Code,
    /// What was asked and what was found, as a sentence without the domain's name.
    pub reason: String,
    /// What would change the answer, if more particular than the code's general advice.
    pub hint: Option<String>,
    /// When the same request will be honoured, if waiting can help: "when 2 whole cores are free on one node".
    pub retry_when: Option<String>,
    /// Where it is about room: how much is needed, how much there is and where.
    pub room: Option<Box<Room>>,
}

impl Refusal {
    /// A refusal that is not about room.
    pub fn new(code: Code, reason: impl Into<String>) -> Refusal {
        Refusal { code, reason: reason.into(), hint: None, retry_when: None, room: None }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Error {
        let mut error = Error::new(refusal.code, &refusal.reason);
        error.room = refusal.room;
        error.retry_when = refusal.retry_when;
        match refusal.hint {
            Some(hint) => error.with_hint(hint),
            None => error,
        }
    }
}
