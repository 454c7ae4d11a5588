//! Errors as JSON, with a refusal's numbers; what the fields mean is in `docs/simulate.md`. Pure.

use serde_json::json;

use crate::error::{Amount, Error, Moved, Part, Room};

/// `{"error":{"code","message","causes","hint"}}`
pub(super) fn json(error: &Error) -> String {
    json!({ "error": value(error) }).to_string()
}

/// An error as JSON, with its numbers where it is about room; see docs/simulate.md.
pub(super) fn value(error: &Error) -> serde_json::Value {
    let mut value = json!({
        "code": error.code.name(),
        "message": error.message,
        "causes": error.causes(),
        "hint": error.hint.as_deref().unwrap_or(error.code.advice()),
        "retry": error.code.retry(),
    });
    let Some(object) = value.as_object_mut() else { return value };
    if let Some(when) = &error.retry_when {
        object.insert("retry_when".to_owned(), when.as_str().into());
    }
    if let Some(room) = &error.room {
        object.insert("needed".to_owned(), room.needed.count().into());
        object.insert("free".to_owned(), room.free.count().into());
        object.insert("unit".to_owned(), room.unit.into());
        object.insert("room".to_owned(), numbers(room));
        if !room.moves.is_empty() {
            object.insert("moves".to_owned(), moves(&room.moves));
        }
    }
    value
}

fn numbers(room: &Room) -> serde_json::Value {
    let amount = |amount: Amount| match amount.cores {
        Some(cores) => json!({ "cores": cores, "threads": amount.threads }),
        None => json!({ "threads": amount.threads }),
    };
    let parts = |name: &str, parts: &[Part]| -> Vec<serde_json::Value> {
        let part = |part: &Part| json!({ name: part.id, "free": amount(part.free), "pinnable": amount(part.pinnable) });
        parts.iter().map(part).collect()
    };
    let withheld = room.withheld.iter().map(|some| json!({ "cpus": some.cpus, "why": some.why }));
    let mut value = json!({
        "needed": amount(room.needed),
        "free": amount(room.free),
        "pinnable": amount(room.pinnable),
        "nodes": parts("node", &room.nodes),
        "withheld": withheld.collect::<Vec<_>>(),
    });
    if let Some(object) = value.as_object_mut().filter(|_| !room.llcs.is_empty()) {
        object.insert("llcs".to_owned(), parts("llc", &room.llcs).into());
    }
    value
}

pub(super) fn moves(moves: &[Moved]) -> serde_json::Value {
    let one = |one: &Moved| json!({ "domain": one.domain, "from": one.from, "to": one.to });
    moves.iter().map(one).collect::<Vec<_>>().into()
}
