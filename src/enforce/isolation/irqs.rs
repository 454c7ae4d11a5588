//! Device interrupts steered off leased CPUs, and back.
//!
//! Each interrupt's affinity becomes what it was without the leased CPUs, and so does the affinity that interrupts are born
//! with. The kernel refuses to move some: those it manages itself (one queue of a device for each CPU), and those of CPUs and
//! timers. They stay, and [`on`] names them. irqbalance may move what it finds; that is documented, not fought.

use std::collections::BTreeSet;

use crate::cpuset::{CpuId, CpuSet};
use crate::error::{Code, Error, Result};
use crate::host::root::Root;
use crate::lock::former::Former;

const DIR: &str = "/proc/irq";
/// What new interrupts get: a mask in hexadecimal, 32 CPUs a group.
const DEFAULT: &str = "/proc/irq/default_smp_affinity";

/// Writes down the affinities that will have to change for these CPUs to be left alone.
pub(super) fn note(root: &Root, away: &CpuSet, former: &mut Former) -> Result<()> {
    if away.is_empty() {
        return Ok(());
    }
    let numbered = root.list(DIR)?.into_iter().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
    let files = numbered.map(|number| format!("{DIR}/{number}/smp_affinity_list"));
    for file in files.chain([DEFAULT.to_owned()]) {
        if former.irqs.contains_key(&file) {
            continue;
        }
        // One that has gone meanwhile interrupts nobody.
        let Some(text) = root.read_if_exists(&file).ok().flatten() else { continue };
        if cpus_of(&file, &text).is_some_and(|cpus| !cpus.is_disjoint(away)) {
            former.irqs.insert(file, text.trim().to_owned());
        }
    }
    Ok(())
}

/// Steers what was written down off these CPUs; with none to leave alone, back to where it was, and forgets it.
pub(super) fn apply(root: &Root, away: &CpuSet, online: &CpuSet, former: &mut Former) {
    let mut refused = BTreeSet::new();
    for (file, was) in &former.irqs {
        let wanted = match cpus_of(file, was).filter(|_| !away.is_empty()) {
            Some(cpus) => {
                let kept = cpus.difference(away);
                // An interrupt that was only there goes wherever it may.
                let kept = if kept.is_empty() { online.difference(away) } else { kept };
                if file == DEFAULT { mask(&kept) } else { kept.to_string() }
            }
            None => was.clone(),
        };
        let found = root.read_if_exists(file).ok().flatten();
        let same = |found: &String| found.trim() == wanted || cpus_of(file, found) == cpus_of(file, &wanted);
        if found.is_some_and(|found| !same(&found)) {
            // The kernel has the last word; who asks where interrupts are handled asks the kernel.
            refused.extend(root.write_kernel_file(file, &format!("{wanted}\n")).is_err().then(|| file.clone()));
        }
    }
    if away.is_empty() {
        // What could not be given back is tried again.
        former.irqs.retain(|file, _| refused.contains(file));
    }
}

/// The device interrupts that are handled on these CPUs, as "27 (virtio1-req.0)".
///
/// # Errors
/// [`Code::HostIo`] when `/proc/irq` cannot be listed.
pub fn on(root: &Root, cpus: &CpuSet) -> Result<Vec<String>> {
    /// What the kernel puts beside a directory for each device that uses the interrupt.
    const FILES: &[&str] = &["affinity_hint", "node", "spurious"];
    let mut found = Vec::new();
    for number in root.list(DIR)? {
        let dir = format!("{DIR}/{number}");
        // Where it is handled now, and may be: one that was steered away moves when it next interrupts.
        let there = |file: &str| {
            let text = root.read_if_exists(&format!("{dir}/{file}")).ok().flatten();
            text.and_then(|text| CpuSet::parse_kernel_list(&text).ok()).is_some_and(|on| !on.is_disjoint(cpus))
        };
        if !there("effective_affinity_list") || !there("smp_affinity_list") {
            continue;
        }
        let device =
            root.list(&dir)?.into_iter().find(|name| !name.contains("affinity") && !FILES.contains(&name.as_str()));
        // Without a device nothing interrupts.
        found.extend(device.map(|device| (number.parse::<u32>().unwrap_or(u32::MAX), format!("{number} ({device})"))));
    }
    found.sort();
    Ok(found.into_iter().map(|(_, text)| text).collect())
}

fn cpus_of(file: &str, text: &str) -> Option<CpuSet> {
    if file == DEFAULT { parse_mask(text.trim()) } else { CpuSet::parse_kernel_list(text).ok() }
}

/// `0000000f,ffffffff`: the highest group first.
fn parse_mask(text: &str) -> Option<CpuSet> {
    let mut cpus = CpuSet::new();
    for (group, digits) in text.rsplit(',').enumerate() {
        let word = u32::from_str_radix(digits, 16).ok()?;
        let base = u16::try_from(group * 32).ok()?;
        (0..32_u16).filter(|bit| word >> bit & 1 == 1).for_each(|bit| cpus.insert(CpuId(base + bit)));
    }
    Some(cpus)
}

fn mask(cpus: &CpuSet) -> String {
    let mut words: Vec<u32> = vec![0];
    for cpu in cpus.iter() {
        let (group, bit) = (usize::from(cpu.0 / 32), cpu.0 % 32);
        if words.len() <= group {
            words.resize(group + 1, 0);
        }
        if let Some(word) = words.get_mut(group) {
            *word |= 1 << bit;
        }
    }
    words.iter().rev().map(|word| format!("{word:08x}")).collect::<Vec<_>>().join(",")
}

/// What would be left to interrupts.
///
/// # Errors
/// [`Code::IsolationFailed`] when that is nothing.
pub(super) fn check(away: &CpuSet, online: &CpuSet) -> Result<()> {
    if !away.is_empty() && online.is_subset(away) {
        let message = format!("irqs=\"away\" would leave no CPU to interrupts: CPUs {online} are all that is online");
        return Err(Error::new(Code::IsolationFailed, message).with_hint("take CPUs out of pinnable_cpus for the host"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn set(text: &str) -> CpuSet {
        CpuSet::parse_kernel_list(text).unwrap()
    }

    #[test]
    fn masks_are_as_the_kernel_writes_them() {
        for (cpus, text) in [("0-3", "0000000f"), ("0,33", "00000002,00000001"), ("64", "00000001,00000000,00000000")] {
            assert_eq!((mask(&set(cpus)).as_str(), parse_mask(text)), (text, Some(set(cpus))));
        }
        assert_eq!((parse_mask("ffff"), parse_mask("x"), parse_mask("")), (Some(set("0-15")), None, None));
    }

    #[test]
    fn interrupts_make_room_and_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::directory(dir.path());
        let files = [
            ("default_smp_affinity", "ff\n"),
            ("4/smp_affinity_list", "0-7\n"),
            ("4/effective_affinity_list", "2\n"),
            ("4/ttyS0/x", ""),
            ("5/smp_affinity_list", "2-3\n"),
            ("5/effective_affinity_list", "2\n"),
            ("6/smp_affinity_list", "0\n"),
        ];
        for (name, text) in files {
            let path = dir.path().join("proc/irq").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::File::create(&path).unwrap();
            root.write_kernel_file(&format!("/proc/irq/{name}"), text).unwrap();
        }
        assert_eq!(on(&root, &set("2")).unwrap(), ["4 (ttyS0)"]);
        let (mut former, online) = (Former::default(), set("0-7"));
        let now = || ["4", "5", "6"].map(|irq| root.read(&format!("/proc/irq/{irq}/smp_affinity_list")).unwrap());
        let mut settle = |away: &str| {
            note(&root, &set(away), &mut former).unwrap();
            apply(&root, &set(away), &online, &mut former);
            former.irqs.len()
        };
        assert_eq!(settle("2-3"), 3);
        assert_eq!(now(), ["0-1,4-7\n", "0-1,4-7\n", "0\n"]);
        assert!(root.read(DEFAULT).unwrap().starts_with("000000f3\n"));
        // A second lease, and the first one ends.
        assert_eq!(settle("2-5"), 3);
        assert_eq!(now(), ["0-1,6-7\n", "0-1,6-7\n", "0\n"].map(|text| text.to_owned()));
        assert_eq!(settle("4-5"), 3);
        assert_eq!((now()[0].as_str(), now()[1].trim_end()), ("0-3,6-7\n", "2-3"));
    }
}
