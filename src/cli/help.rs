//! `virt-pin help`: how a command is used, and what a code means. Pure.

use clap::error::ErrorKind;
use serde_json::json;

use super::table::{columns, wrapped};
use super::{grammar, to_json};
use crate::error::{Code, Error, Result, printable};
use crate::manual::guide::entry;

/// The text for a topic: a command, a code, the exit status of one, `codes`; without one, the commands.
pub(super) fn help(topic: Option<&str>, as_json: bool) -> Result<String> {
    let text = match topic {
        Some("codes") => all(),
        Some(topic) => match code_of(topic) {
            Some(code) if as_json => return to_json(&value(code)),
            Some(code) => about(code),
            None => usage(Some(topic))?,
        },
        None => usage(None)?,
    };
    if as_json { to_json(&json!({ "message": text })) } else { Ok(text) }
}

/// A mistake in the command line, as clap tells it, in our form: its sentence, and what it proposes as the hint.
pub(super) fn mistake(error: &clap::Error) -> Error {
    if matches!(error.kind(), ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand) {
        return Error::new(Code::Usage, "no command is given").with_hint("`virt-pin help` lists them");
    }
    let text = error.to_string();
    let mut paragraphs = text.split("\n\n").map(|lines| lines.split_whitespace().collect::<Vec<_>>().join(" "));
    let sentence = paragraphs.next().unwrap_or_default();
    let hints: Vec<_> = paragraphs
        .filter(|line| !line.is_empty() && !line.starts_with("For more information"))
        .map(|line| line.trim_start_matches("tip: ").replacen("Usage: ", "usage: ", 1))
        .chain(["`virt-pin help` says more".to_owned()])
        .collect();
    Error::new(Code::Usage, sentence.trim_start_matches("error: ")).with_hint(hints.join("; "))
}

fn code_of(topic: &str) -> Option<Code> {
    let by_exit = || topic.parse().ok().and_then(|exit: u8| Code::all().find(|code| code.exit() == exit));
    Code::from_name(topic).or_else(by_exit)
}

fn usage(verb: Option<&str>) -> Result<String> {
    let mut grammar = grammar();
    grammar.build();
    let command = match verb {
        None => &mut grammar,
        Some(verb) => grammar.find_subcommand_mut(verb).ok_or_else(|| {
            let what = format!("neither a command nor a code is named \"{}\"", printable(verb));
            Error::new(Code::Usage, what).with_hint(
                "`virt-pin help` lists the commands, `virt-pin help codes` the codes with their exit statuses",
            )
        })?,
    };
    let text = command.render_long_help().to_string();
    // clap indents empty lines as well.
    Ok(text.lines().map(|line| line.trim_end().to_owned() + "\n").collect())
}

/// Every code in a line.
fn all() -> String {
    let row = |code: Code| vec![code.exit().to_string(), code.name().to_owned()];
    columns(&["Exit", "Code"], Code::all().map(row).collect())
        + "\n`virt-pin help CODE` says what one means and what to do.\n"
}

fn about(code: Code) -> String {
    let entry = entry(code);
    let mut out = wrapped("", &format!("{code} (exit status {}): {}.", code.exit(), code.meaning()));
    out.push('\n');
    let (command, lines) = entry.message();
    for line in [command].into_iter().chain(lines) {
        out += &wrapped("  ", line);
    }
    out.push('\n');
    out += &wrapped("", entry.means);
    for (title, points) in [("To find out more:", entry.look), ("What to do:", entry.remedies)] {
        out += &format!("\n{title}\n");
        points.iter().for_each(|point| out += &wrapped(" - ", point));
    }
    out + "\n" + &wrapped("", &format!("Does it go away by itself? {}", entry.passes))
}

fn value(code: Code) -> serde_json::Value {
    let entry = entry(code);
    json!({
        "code": code.name(),
        "exit": code.exit(),
        "retry": code.retry(),
        "meaning": code.meaning(),
        "advice": code.advice(),
        "example": entry.example,
        "means": entry.means,
        "look": entry.look,
        "remedies": entry.remedies,
        "passes": entry.passes,
    })
}
