//! The state file: refused, or leases that hold together and are written as what they were read from.
#![no_main]

use libfuzzer_sys::fuzz_target;
use virt_pin::lock::leases::Leases;

fuzz_target!(|text: &str| {
    let Ok(leases) = Leases::from_json(text) else { return };
    leases.check().unwrap();
    let written = leases.to_json().unwrap();
    assert_eq!(Leases::from_json(&written).unwrap_or_else(|_| panic!("{written}")), leases, "{written}");
});
