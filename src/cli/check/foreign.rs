//! Does anybody but VMs have the pinnable CPUs? What cgroups of others say, in words; decides nothing.

use super::{Findings, printable};
use crate::cpuset::CpuSet;
use crate::decision::Situation;
use crate::host::foreign::{self, Foreign};
use crate::host::root::Root;
use crate::lock::former;

/// More cgroups are counted, not named.
const NAMED: usize = 8;

pub(super) fn host(root: &Root, situation: &Situation, findings: &mut Findings) {
    let theirs = situation.foreign.iter().fold(CpuSet::new(), |all, one| all.union(&one.cpus));
    let outside = situation.out_of_reach.difference(&theirs);
    let mut worries: Vec<String> = situation.foreign.iter().map(|one| printable(&one.to_string())).collect();
    if !outside.is_empty() {
        worries.push(format!("CPUs {outside} are outside the cgroup of VMs"));
    }
    let worry = (!worries.is_empty()).then(|| format!("{}: never handed out", worries.join("; ")));
    findings.unless("host", "every pinnable CPU can be given to a VM's cgroup", worry);
    if root.is_description() {
        return;
    }
    // Of what VMs cannot have nobody takes anything away; and what we have kept off leased CPUs has the rest of them, for now.
    let ours = former::read(root).unwrap_or_default().units;
    let mut confined = foreign::confined(root, &situation.pinnable);
    confined.retain(|one| !ours.keys().any(|unit| one.cgroup.ends_with(&format!("/{unit}"))));
    let each = |one: &Foreign| format!("{} may use CPUs {} alone", printable(&one.cgroup), one.cpus);
    let mut named: Vec<String> = confined.iter().take(NAMED).map(each).collect();
    if confined.len() > NAMED {
        named.push(format!("and {} more", confined.len() - NAMED));
    }
    let worry = format!(
        "{}: what runs there steals time from VMs that get these CPUs (confine it elsewhere, or take them out of pinnable_cpus)",
        named.join("; ")
    );
    findings.unless("host", "nobody else is confined to pinnable CPUs", (!confined.is_empty()).then_some(worry));
}

/// Who else has the CPUs of a lease for itself; nothing, if nobody has.
pub(super) fn takers(situation: &Situation, cpus: &CpuSet) -> String {
    let takers = situation.foreign.iter().filter(|one| !one.cpus.is_disjoint(cpus));
    takers.map(|one| format!(" ({})", printable(&one.to_string()))).collect()
}
