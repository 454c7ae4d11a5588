//! A host as text: refused, or a machine that is described again by the same text, whatever its topology.
#![no_main]

use libfuzzer_sys::fuzz_target;
use virt_pin::host::{description, sysfs};

fuzz_target!(|text: &str| {
    let Ok(root) = description::parse(text) else { return };
    let topology = sysfs::topology(&root);
    let Ok(again) = description::gather(&root) else { return };
    let described = description::parse(&again).unwrap();
    assert_eq!(description::gather(&described).unwrap(), again);
    assert_eq!(sysfs::topology(&described).ok(), topology.ok());
});
