//! Why not, in numbers.

use crate::error::{Code, Error};

/// A request that gets no plan. Nothing was changed; the numbers say what would change the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The class of the refusal.
    pub code: Code,
    /// What was asked and what was found, as a sentence without the domain's name.
    pub reason: String,
    /// What would change the answer, if more particular than the code's general advice.
    pub hint: Option<String>,
    /// Whole cores (or threads, see `unit`) needed, where the refusal is about room.
    pub needed: Option<u32>,
    /// How many of them are free where they would have to be.
    pub free: Option<u32>,
    /// What `needed` and `free` count: "whole core" or "thread".
    pub unit: &'static str,
}

impl Refusal {
    /// A refusal that is not about room.
    pub fn new(code: Code, reason: impl Into<String>) -> Refusal {
        Refusal { code, reason: reason.into(), hint: None, needed: None, free: None, unit: "" }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Error {
        let error = Error::new(refusal.code, &refusal.reason);
        match refusal.hint {
            Some(hint) => error.with_hint(hint),
            None => error,
        }
    }
}
