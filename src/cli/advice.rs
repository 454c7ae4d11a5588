//! What could be better about a plan that was granted: one sentence, and the same as JSON. Pure.

use serde::Serialize;

use super::failure;
use crate::alloc::quality::{Advice, Fit};
use crate::alloc::repack::Extent;
use crate::error::{Moved, said};

/// Advice as it is printed.
#[derive(Serialize)]
pub(super) struct View {
    pub(super) message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    spans: Option<ExtentView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    possible: Option<ExtentView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    moves: Option<serde_json::Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fits: Option<FitView>,
}

#[derive(Serialize)]
struct ExtentView {
    nodes: usize,
    llcs: usize,
}

#[derive(Serialize)]
struct FitView {
    now: usize,
    at_most: usize,
}

impl From<Extent> for ExtentView {
    fn from(extent: Extent) -> ExtentView {
        ExtentView { nodes: extent.nodes, llcs: extent.llcs }
    }
}

/// How a plan would come to lie nearer together.
pub(super) enum How {
    /// By starting the domain anew.
    Anew,
    /// By these moves; none are known if empty.
    Moves(Vec<Moved>),
}

impl View {
    /// `None` where there is nothing to say.
    pub(super) fn new(advice: Option<(&Advice, &How)>, fit: Option<Fit>) -> Option<View> {
        let said = advice.as_ref().map(|(advice, how)| {
            let how = match how {
                How::Anew => "it would be so if it started anew".to_owned(),
                How::Moves(moves) if moves.is_empty() => advice.when(),
                How::Moves(moves) => format!("it would be so if {} moved", said(moves)),
            };
            format!("{}; {how}", advice.sentence())
        });
        let fits = fit.map(|Fit { now, at_most }| {
            format!("{now} more like it would fit beside it; up to {at_most}, if what is free lay together")
        });
        let message = said.into_iter().chain(fits).collect::<Vec<_>>().join("; ");
        (!message.is_empty()).then(|| View {
            message,
            spans: advice.as_ref().map(|(advice, _)| advice.spans.into()),
            possible: advice.as_ref().map(|(advice, _)| advice.possible.into()),
            moves: advice.and_then(|(_, how)| match how {
                How::Moves(moves) if !moves.is_empty() => Some(failure::moves(moves)),
                How::Moves(_) | How::Anew => None,
            }),
            fits: fit.map(|Fit { now, at_most }| FitView { now, at_most }),
        })
    }
}
