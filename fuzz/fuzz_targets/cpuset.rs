//! Both grammars of CPU sets: what is read is printed in a form that is read as the same set.
#![no_main]

use libfuzzer_sys::fuzz_target;
use virt_pin::cpuset::CpuSet;

fuzz_target!(|text: &str| {
    if let Ok(set) = CpuSet::parse_kernel_list(text) {
        let printed = set.to_string();
        assert_eq!(CpuSet::parse_kernel_list(&printed).unwrap(), set, "{printed}");
        assert_eq!(set.iter().count(), set.len(), "{printed}");
    }
    if let Ok(set) = CpuSet::parse_libvirt_cpuset(text) {
        let printed = set.to_string();
        assert_eq!(CpuSet::parse_libvirt_cpuset(&printed).unwrap(), set, "{printed}");
    }
});
