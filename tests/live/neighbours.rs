//! Hooks of others beside ours: a dispatcher, further scripts in `qemu.d/`, and the shim for a libvirt without that directory.

use crate::leases::{ONE, dedicated};
use crate::libvirtd::{Libvirtd, Options};

/// A dispatcher as VFIO-Tools' is: it runs what is in the directory of a VM and an event.
const DISPATCHER: &[u8] = br#"#!/bin/bash
set -e
dir="$(dirname "$0")/qemu.d/$1/$2/$3"
if [ -f "$dir" ] && [ -x "$dir" ]; then
    "$dir" "$@"
elif [ -d "$dir" ]; then
    while read -r file; do
        [ -z "$file" ] || "$file" "$@" </dev/null
    done <<<"$(find -L "$dir" -maxdepth 1 -type f -executable -print)"
fi
"#;

const SCRIPT: &[u8] = b"#!/bin/sh\necho \"$0 $2\" >>/run/theirs\n";

#[test]
fn a_dispatcher_and_other_scripts_go_on() {
    let options = Options { cli: Options::virt_pin("").cli, ..Options::default() };
    let Some(daemon) = Libvirtd::start(&options) else { return };
    let hook = std::fs::read(env!("CARGO_BIN_EXE_virt-pin-hook")).unwrap();
    daemon.put("/usr/lib/virt-pin/virt-pin-hook", 0o755, &hook);
    daemon.put("/etc/virt-pin/virt-pin.toml", 0o644, ONE.as_bytes());
    daemon.put("/etc/libvirt/hooks/qemu", 0o755, DISPATCHER);
    for script in ["web/prepare/begin/start.sh", "web/release/end/revert.sh", "05-before", "20-after"] {
        daemon.put(&format!("/etc/libvirt/hooks/qemu.d/{script}"), 0o755, SCRIPT);
    }
    let said = daemon.exec(&["virt-pin", "install", "--reload"]).ok();
    assert!(said.contains("was told to reload, to see the hook"), "{said}");
    daemon.wait_until("libvirtd reloads", |daemon| {
        daemon.file("/var/log/libvirt/libvirtd.log").contains("Reloading configuration")
    });
    daemon.run(&dedicated("web"));
    daemon.assert_on_cpu_1("web");
    daemon.destroy("web");
    daemon.wait_for_no_lease();
    let theirs = daemon.file("/run/theirs");
    let dir = "/etc/libvirt/hooks/qemu.d";
    let expected = [
        format!("{dir}/web/prepare/begin/start.sh prepare"),
        format!("{dir}/05-before prepare"),
        format!("{dir}/20-after prepare"),
    ];
    assert_eq!(theirs.lines().take(3).collect::<Vec<_>>(), expected);
    assert!(theirs.contains(&format!("{dir}/web/release/end/revert.sh release\n")), "{theirs}");
    // Ours goes without theirs, and what is not there any more is not looked for.
    let said = daemon.exec(&["virt-pin", "uninstall", "--reload"]).ok();
    assert!(said.contains("was told to reload"), "{said}");
    for script in ["05-before", "20-after", "web/prepare/begin/start.sh"] {
        assert_eq!(daemon.file(&format!("{dir}/{script}")).as_bytes(), SCRIPT);
    }
}

#[test]
fn the_shim_calls_somebodys_script_and_ours() {
    let shim = concat!(env!("CARGO_MANIFEST_DIR"), "/hooks/qemu");
    let options = Options { hook: Some(shim.into()), ..Options::virt_pin(ONE) };
    let Some(daemon) = Libvirtd::start(&options) else { return };
    let hook = std::fs::read(env!("CARGO_BIN_EXE_virt-pin-hook")).unwrap();
    daemon.put("/etc/libvirt/hooks/virt-pin-hook", 0o755, &hook);
    daemon.put("/etc/libvirt/hooks/qemu.theirs", 0o755, SCRIPT);
    daemon.run(&dedicated("web"));
    daemon.assert_on_cpu_1("web");
    assert!(daemon.file("/run/theirs").contains("/etc/libvirt/hooks/qemu.theirs prepare\n"));
    // XML in, XML out: what was saved comes back to its CPU.
    daemon.virsh(&["managedsave", "web"]).ok();
    daemon.wait_for_no_lease();
    daemon.virsh(&["start", "web"]).ok();
    daemon.assert_on_cpu_1("web");
    // Our refusal is a refusal.
    daemon.define(&dedicated("second"));
    let complaint = daemon.virsh(&["start", "second"]).refused();
    assert!(complaint.contains("virt-pin: error[cpu.placement.shortage]"), "{complaint}");
    // A program that is missing kills nothing.
    daemon.exec(&["rm", "/etc/libvirt/hooks/virt-pin-hook"]).ok();
    daemon.restart_daemon();
    assert_eq!(daemon.virsh(&["domstate", "web"]).ok().trim(), "running");
    daemon.destroy("web");
    assert!(daemon.virsh(&["start", "web"]).refused().contains("cannot be executed"));
}
