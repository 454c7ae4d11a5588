//! `virt-pin suggest`: which CPUs of this host to hand out, and why. Writes nothing unless it is told to (`write`).

mod choice;
mod interrupts;
mod write;

use serde_json::json;

use super::table::wrapped;
use super::{Context, to_json};
use crate::alloc::pools::whole_cores;
use crate::config::settings::{MAIN_FILE, Settings};
use crate::error::{Result, counted};
use crate::host::sysfs;

const INTERRUPTS: &str = "/proc/interrupts";

pub(super) fn suggest(context: &Context, write: bool) -> Result<String> {
    let host = sysfs::read(&context.root)?;
    let text = context.root.read_if_exists(INTERRUPTS)?;
    let mut proposal = choice::propose(&host, &interrupts::parse(text.as_deref().unwrap_or_default()));
    if text.is_none() {
        proposal.notes.push("Where devices interrupt is not known here: a description does not say.".to_owned());
    }
    let choice::Proposal { pinnable, kept, policy, notes } = proposal;
    let outcome = if write { Some(write::write(&context.root, &pinnable)?) } else { None };
    if context.json {
        let kept: Vec<_> = kept.iter().map(|(cpus, why)| json!({ "cpus": cpus.to_string(), "why": why })).collect();
        let policy: Vec<_> =
            policy.iter().map(|(name, value, why)| json!({ "attribute": name, "value": value, "why": why })).collect();
        let mut answer =
            json!({ "pinnable_cpus": pinnable.to_string(), "kept": kept, "policy": policy, "notes": notes });
        if let (Some(outcome), Some(fields)) = (outcome, answer.as_object_mut()) {
            fields.insert("written".to_owned(), outcome.written.into());
            fields.insert("message".to_owned(), outcome.message.into());
        }
        return to_json(&answer);
    }
    let (cpus, cores) =
        (counted(pinnable.len() as u64, "CPU"), counted(whole_cores(&host, &pinnable) as u64, "whole core"));
    let of = host.online().len();
    let mut out = format!("For VMs, in {MAIN_FILE} ({cpus} of {of}, {cores}):\n\n");
    out += &setting(&pinnable.to_string());
    out += "\nFor the host:\n";
    kept.iter().for_each(|(cpus, why)| out += &wrapped(" - ", &format!("{cpus}: {why}")));
    out += "\nFor a VM's policy, beside policy=\"dedicated\":\n";
    policy.iter().for_each(|(name, value, why)| out += &wrapped(" - ", &format!("{name}=\"{value}\" {why}")));
    if policy.is_empty() {
        out += " - nothing; this host leaves nothing to choose\n";
    }
    if !notes.is_empty() {
        out += "\nNote:\n";
        notes.iter().for_each(|note| out += &wrapped(" - ", note));
    }
    if let Some(outcome) = outcome {
        out += &format!("\n{}", wrapped("", &outcome.message));
    } else if !context.root.is_description()
        && Settings::read(&context.root).is_ok_and(|settings| settings.pinnable.is_empty())
    {
        out += "\n`virt-pin suggest --write` writes that line there: none is set yet.\n";
    }
    Ok(out)
}

/// The list as TOML, to be copied as it stands.
fn setting(list: &str) -> String {
    let line = format!("pinnable_cpus = \"{list}\"\n");
    if line.len() <= 80 {
        return line;
    }
    // TOML joins lines that end so. The indentation is room for their ends.
    let lines = wrapped("   ", list);
    let lines: Vec<&str> = lines.lines().map(str::trim_start).collect();
    format!("pinnable_cpus = \"\"\"\\\n{}\"\"\"\n", lines.join("\\\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::fragment::Fragment;
    use crate::cpuset::CpuSet;

    #[test]
    fn a_long_list_can_be_copied() {
        for list in ["1-3", &(0..200).step_by(2).map(|cpu| cpu.to_string()).collect::<Vec<_>>().join(",")] {
            let text = setting(list);
            assert!(text.lines().all(|line| line.len() <= 80), "{text}");
            let pinnable = Fragment::parse("", &text).unwrap().pinnable;
            assert_eq!(pinnable, Some(CpuSet::parse_kernel_list(list).unwrap()), "{text}");
        }
    }
}
