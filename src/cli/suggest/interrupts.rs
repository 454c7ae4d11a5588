//! How busy devices keep each CPU, from `/proc/interrupts`. Pure.

use std::collections::BTreeMap;

use crate::cpuset::CpuId;

/// The number of device interrupts that each CPU has handled since the boot; empty where the text is none of the kernel's.
///
/// The first line names the CPUs online; then a line an interrupt: its number, a count for each of them, its controller and
/// its devices. Lines that begin with a word are the CPUs' own (timers, calls from each other), and so are timers with a number.
pub(super) fn parse(text: &str) -> BTreeMap<CpuId, u64> {
    let mut lines = text.lines();
    let header = lines.next().unwrap_or_default().split_whitespace();
    let cpus: Option<Vec<CpuId>> = header.map(|word| word.strip_prefix("CPU")?.parse().ok().map(CpuId)).collect();
    let mut counts: BTreeMap<CpuId, u64> = cpus.unwrap_or_default().into_iter().map(|cpu| (cpu, 0)).collect();
    for line in lines {
        let Some((name, rest)) = line.split_once(':') else { continue };
        let numbered = name.trim().bytes().all(|byte| byte.is_ascii_digit());
        let timer = rest.split_whitespace().next_back().is_some_and(|device| device.contains("timer"));
        if !numbered || timer {
            continue;
        }
        for (count, word) in counts.values_mut().zip(rest.split_whitespace()) {
            let Ok(number) = word.parse::<u64>() else { break };
            *count = count.saturating_add(number);
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_count_and_timers_do_not() {
        let text = "            CPU0       CPU2\n   0:         99          0   IO-APIC   2-edge      timer\n  \
                    24:          5      70000  PCI-MSI 65536-edge      nvme0q1\n  25:          1          0  PCI-MSI  eth0\n \
                    LOC:    1000000    1000000   Local timer interrupts\n ERR:          0\n";
        assert_eq!(parse(text), BTreeMap::from([(CpuId(0), 6), (CpuId(2), 70000)]));
        assert!(parse("").is_empty() && parse("nothing of the kind\n1: 2 3").is_empty());
    }
}
