//! What `virt-pin check` has found: one line a question, PASS, WARN or FAIL, and behind it what to do. Pure.

use serde::Serialize;

use super::style::Style;
use super::table::{width_of, wrapped};
use crate::error::Error;

/// One question and its answer.
#[derive(Debug, Serialize)]
struct Finding {
    area: &'static str,
    check: String,
    result: Verdict,
    #[serde(skip_serializing_if = "String::is_empty")]
    message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    Pass,
    Warn,
    Fail,
}

/// The findings so far.
#[derive(Default, Serialize)]
pub(super) struct Findings {
    checks: Vec<Finding>,
}

impl Findings {
    /// One more.
    pub(super) fn add(
        &mut self,
        area: &'static str,
        check: impl Into<String>,
        result: Verdict,
        message: impl Into<String>,
    ) {
        self.checks.push(Finding { area, check: check.into(), result, message: message.into() });
    }

    /// One that holds.
    pub(super) fn pass(&mut self, area: &'static str, check: impl Into<String>, detail: impl Into<String>) {
        self.add(area, check, Verdict::Pass, detail);
    }

    /// PASS if nothing is there to be said, else WARN with it.
    pub(super) fn unless(&mut self, area: &'static str, check: impl Into<String>, worry: Option<String>) {
        let result = if worry.is_some() { Verdict::Warn } else { Verdict::Pass };
        self.add(area, check, result, worry.unwrap_or_default());
    }

    /// One that cannot be answered.
    pub(super) fn error(&mut self, area: &'static str, check: impl Into<String>, error: &Error) {
        let hint = error.hint.as_deref().unwrap_or(error.code.advice());
        let causes: String = error.causes().iter().map(|cause| format!(", because {cause}")).collect();
        self.add(area, check, Verdict::Fail, format!("{}{causes} ({hint})", error.message));
    }

    /// How many do not hold.
    pub(super) fn failed(&self) -> usize {
        self.checks.iter().filter(|finding| finding.result == Verdict::Fail).count()
    }

    /// For people.
    pub(super) fn render(&self, style: Style) -> String {
        const WIDTH: usize = 72;
        let mut out = String::new();
        for finding in &self.checks {
            let lines = wrapped(&format!("{:>6}: ", finding.area), &finding.check);
            let line = lines.trim_end();
            let last = line.lines().next_back().map_or(0, width_of);
            let (verdict, colour) = match finding.result {
                Verdict::Pass => ("PASS", "32"),
                Verdict::Warn => ("WARN", "33"),
                Verdict::Fail => ("FAIL", "1;31"),
            };
            // A question that needs all of a line has its answer on the next one.
            let gap = if last > WIDTH { format!("\n{:WIDTH$}", "") } else { " ".repeat(WIDTH - last) };
            out += &format!("{line}{gap}: {}\n", style.paint(verdict, colour));
            if !finding.message.is_empty() {
                out += &wrapped("        ", &finding.message);
            }
        }
        out
    }
}
