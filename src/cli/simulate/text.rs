//! The answers of a simulation for people: a table that grows with the events, and how many there were. Pure.

use serde_json::Value;

use crate::cli::table::{width_of, wrapped};
use crate::cpuset::{CpuId, CpuSet};
use crate::error::printable;

/// The widest event.
const EVENT: usize = 8;
/// A longer id has a line of its own.
const ID: usize = 16;

/// The head of the table.
pub(super) fn head() -> String {
    line("Event", "VM", "Answer") + &"-".repeat(80) + "\n"
}

/// The line of an answer.
pub(super) fn row(answer: &Value) -> String {
    let word = |name: &str| printable(answer.get(name).and_then(Value::as_str).unwrap_or_default());
    let id = word("id");
    line(&word("op"), if id.is_empty() { "-" } else { &id }, &said(answer))
}

fn line(event: &str, id: &str, text: &str) -> String {
    let text = if text.is_empty() { "-" } else { text };
    let first = format!(" {event:<EVENT$}   ");
    if width_of(id) <= ID {
        return wrapped(&format!("{first}{id:<ID$}   "), text);
    }
    wrapped(&first, id) + &wrapped(&" ".repeat(width_of(&first) + ID + 3), text)
}

/// What an answer says, but for whom.
fn said(answer: &Value) -> String {
    let why = |error: &Value| {
        let word = |name: &str| error.get(name).and_then(Value::as_str).unwrap_or_default();
        format!("{}: {}", word("code"), printable(word("message")))
    };
    if let Some(error) = answer.get("refused") {
        return format!("refused: {}", why(error));
    }
    if let Some(error) = answer.get("degraded").filter(|degraded| degraded.is_object()) {
        return format!("degraded: {}", why(error));
    }
    if answer.get("shared").is_some() {
        return "shared: no CPUs of its own".to_owned();
    }
    let list = |name: &str| answer.get(name).map(set).filter(|cpus| !cpus.is_empty());
    let mut parts: Vec<String> = Vec::new();
    for (name, word) in [("cpus", "CPUs"), ("parked", "parked"), ("freed", "free again:")] {
        parts.extend(list(name).map(|cpus| format!("{word} {cpus}")));
    }
    let nodes = list("nodes");
    parts.extend(nodes.map(|nodes| format!("node{} {nodes}", if nodes.contains([',', '-']) { "s" } else { "" })));
    let without: Vec<String> = strings(answer.get("degraded")).map(printable).collect();
    if !without.is_empty() {
        parts.push(format!("taken from {}", without.join(", ")));
    }
    let advice = answer.get("advice").and_then(|advice| advice.get("message")).and_then(Value::as_str);
    parts.extend(advice.map(printable));
    parts.join("; ")
}

/// A list in the kernel's syntax, or numbers.
fn set(value: &Value) -> String {
    match value.as_str() {
        Some(list) => list.to_owned(),
        None => {
            let numbers = value.as_array().into_iter().flatten().filter_map(Value::as_u64);
            numbers.filter_map(|number| u16::try_from(number).ok()).map(CpuId).collect::<CpuSet>().to_string()
        }
    }
}

fn strings(value: Option<&Value>) -> impl Iterator<Item = &str> {
    value.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
}

/// The totals.
pub(super) fn totals(totals: &Value) -> String {
    let count = |name: &str| totals.get(name).and_then(Value::as_u64).unwrap_or_default();
    let codes = totals.get("refused_by_code").and_then(Value::as_object);
    let codes: Vec<String> = codes.into_iter().flatten().map(|(code, count)| format!("{code}: {count}")).collect();
    let mut said = format!("Started {}", count("started"));
    if count("degraded") > 0 {
        said += &format!(", {} without CPUs of their own", count("degraded"));
    }
    said += &format!("; refused {}", count("refused"));
    if !codes.is_empty() {
        said += &format!(" ({})", codes.join(", "));
    }
    wrapped(" ", &format!("{said}; with CPUs of their own at the end: {}", count("running")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_answer_is_a_line_that_fits() {
        let start = json!({ "op": "start", "id": "db", "cpus": [2, 10, 3], "parked": [11], "nodes": [0], "llcs": [0] });
        assert_eq!(row(&start), " start      db                 CPUs 2-3,10; parked 11; node 0\n");
        let stop = json!({ "op": "stop", "id": "db", "freed": "2-3,10-11" });
        assert_eq!(row(&stop), " stop       db                 free again: 2-3,10-11\n");
        let offline = json!({ "op": "offline", "cpus": "3", "degraded": ["db", "web"] });
        assert_eq!(row(&offline), " offline    -                  CPUs 3; taken from db, web\n");
        assert_eq!(row(&json!({ "op": "define", "id": "e" })), " define     e                  -\n");
        let refused = json!({ "code": "cpu.placement.shortage", "message": "needs ".repeat(30) });
        let text = row(&json!({ "op": "start", "id": "n".repeat(90), "refused": refused }));
        assert!(text.lines().count() > 4 && text.lines().all(|line| width_of(line) <= 80), "{text}");
    }
}
