//! A host as text: refused, or a machine whose topology is read without a fault, and whose description is described by itself.
//! (Files that no reader asks for are left out the first time, and with them what their mere names would say.)
#![no_main]

use libfuzzer_sys::fuzz_target;
use virt_pin::host::{description, sysfs};

fuzz_target!(|text: &str| {
    let Ok(root) = description::parse(text) else { return };
    let _ = sysfs::read(&root);
    let Ok(again) = description::gather(&root) else { return };
    let described = description::parse(&again).unwrap();
    assert_eq!(description::gather(&described).unwrap(), again);
    let _ = sysfs::read(&described);
});
