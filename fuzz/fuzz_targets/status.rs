//! libvirt's status file of a running domain, and the definitions beside it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use virt_pin::host::qemu::{self, DEFINITION_DIR, RUN_DIR};
use virt_pin::host::root::Root;
use virt_pin::xml::{Domain, read};

fuzz_target!(|text: &str| {
    let files = [format!("{RUN_DIR}/vm.xml"), format!("{DEFINITION_DIR}/vm.xml")];
    let root = Root::described(files.map(|path| (path, text.to_owned())).into());
    if let Ok(Some(status)) = qemu::status(&root, "vm") {
        assert!(status.pid > 0 && status.vcpus.values().all(|tid| *tid > 0));
    }
    if let Some(live) = qemu::live_domain(text) {
        if let Ok(domain) = Domain::parse(&live) {
            let _ = read::identity(&domain);
        }
    }
    let _ = qemu::running(&root);
});
