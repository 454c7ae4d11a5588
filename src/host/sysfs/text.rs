//! The small grammars of kernel files other than CPU lists: CPU masks and `meminfo`. Pure.

use crate::cpuset::{CpuId, CpuSet, MAX_CPUS, ParseError};

/// Parses the kernel's mask format: `00000000,0000ff00`.
///
/// Groups of 32 bits in hexadecimal, separated by commas, the most significant first; the first may be shorter. This is
/// what kernels before the `_list` files (2.6.25, and later for some files) have.
pub(super) fn parse_kernel_mask(text: &str) -> Result<CpuSet, ParseError> {
    let text = text.trim_ascii();
    let mut set = CpuSet::new();
    let mut position = text.len();
    let mut base: u32 = 0;
    for group in text.rsplit(',') {
        position = position.saturating_sub(group.len());
        let error = |reason: &str| ParseError { position, reason: reason.to_owned() };
        if group.is_empty() || group.len() > 8 || !group.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(error("expected up to 8 hexadecimal digits"));
        }
        let mut bits = u32::from_str_radix(group, 16).map_err(|_| error("expected up to 8 hexadecimal digits"))?;
        while bits != 0 {
            let cpu = u16::try_from(base.saturating_add(bits.trailing_zeros()))
                .ok()
                .filter(|&cpu| cpu < MAX_CPUS)
                .ok_or_else(|| error(&format!("number too large, the highest is {}", MAX_CPUS - 1)))?;
            set.insert(CpuId(cpu));
            bits &= bits - 1;
        }
        base = base.saturating_add(32);
        position = position.saturating_sub(1);
    }
    Ok(set)
}

/// The value of one line of `/proc/meminfo` (`MemFree:  12 kB`) or a node's `meminfo` (`Node 0 MemFree:  12 kB`).
pub(super) fn meminfo_kib(meminfo: &str, key: &str) -> Option<u64> {
    let (_, value) =
        meminfo.lines().filter_map(|line| line.split_once(':')).find(|(name, _)| meminfo_key(name) == key)?;
    value.split_ascii_whitespace().next()?.parse().ok()
}

/// The key in what comes before a line's colon.
pub(in crate::host) fn meminfo_key(name: &str) -> &str {
    name.rsplit(' ').next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks() {
        for (text, expected) in [
            ("1\n", "0"),
            ("00000000,0000ff00\n", "8-15"),
            ("80000000,00000000,00000001", "0,95"),
            ("03,ffffffff", "0-33"),
            ("0", ""),
            (&format!("00000000,{}", ["80000000"; 256].join(",")), &{
                (31..8192).step_by(32).map(|cpu| cpu.to_string()).collect::<Vec<_>>().join(",")
            }),
        ] {
            assert_eq!(parse_kernel_mask(text).map(|set| set.to_string()), Ok(expected.to_owned()), "{text:?}");
        }
        for (text, position) in
            [("", 0), (",", 1), ("1,,1", 2), ("0x1", 0), ("-1", 0), ("1,+1", 2), ("123456789", 0), ("1,é", 2), ("g", 0)]
        {
            assert_eq!(parse_kernel_mask(text).unwrap_err().position, position, "{text:?}");
        }
        assert!(parse_kernel_mask(&format!("1{}", ",00000000".repeat(256))).is_err());
    }

    #[test]
    fn meminfo_lines() {
        let node = "Node 0 MemTotal:   100 kB\nNode 0 Active:  1 kB\nNode 0 Active(file):  2 kB\nNode 0 Dirty: x kB\n";
        assert_eq!(meminfo_kib(node, "MemTotal"), Some(100));
        assert_eq!(meminfo_kib(node, "Active(file)"), Some(2));
        assert_eq!(meminfo_kib(node, "Dirty"), None);
        assert_eq!(meminfo_kib("Hugepagesize:       2048 kB\n", "Hugepagesize"), Some(2048));
        assert_eq!(meminfo_kib("", "MemFree"), None);
    }
}
