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
    /// Where it is about room: whole cores (or threads) needed, and free where they would have to be.
    pub room: Option<Room>,
}

impl Refusal {
    /// A refusal that is not about room.
    pub fn new(code: Code, reason: impl Into<String>) -> Refusal {
        Refusal { code, reason: reason.into(), hint: None, room: None }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Error {
        let mut error = Error::new(refusal.code, &refusal.reason);
        error.room = refusal.room;
        match refusal.hint {
            Some(hint) => error.with_hint(hint),
            None => error,
        }
    }
}
