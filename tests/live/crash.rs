//! The hook and the mover killed in the middle of what they do on real libvirt, with the kernel's own cgroups.
//!
//! The hook is run by a script that hands it a failpoint at the event that a test asks for: libvirt passes no variables on.
//! `tests/crash.rs` walks over the rest of the failpoints.

use std::collections::BTreeSet;
use std::io::Write as _;

use tempfile::NamedTempFile;

use crate::guest::Guest;
use crate::leases::{ONE, dedicated};
use crate::libvirtd::{Libvirtd, Options};
use crate::points::LIVE;

const SCRIPT: &str = r#"#!/bin/sh
# /run/crash-at: EVENT FAILPOINT, for the first such event.
if read -r event point 2>/dev/null </run/crash-at && [ "$event" = "$2" ]; then
    rm /run/crash-at
    export VIRT_PIN_CRASH_AT="$point"
fi
[ ! -e /run/passes ] || export VIRT_PIN_PASSES="/run/passes/$2"
exec /usr/lib/virt-pin/virt-pin-hook "$@"
"#;

/// A thread of a core for itself, everything of QEMU on it: two such VMs fit on two CPUs.
pub(crate) fn small(name: &str) -> Guest {
    Guest::new(name).policy("policy='dedicated' cores='thread' emulator='share' iothreads='share'")
}

impl Libvirtd {
    /// A machine whose hook can be killed by name.
    pub(crate) fn start_killable(config: &str) -> Option<Libvirtd> {
        let mut script = NamedTempFile::new().unwrap();
        script.write_all(SCRIPT.as_bytes()).unwrap();
        let options = Options { hook: Some(script.path().to_owned()), ..Options::virt_pin(config) };
        let daemon = Libvirtd::start(&options)?;
        let hook = std::fs::read(env!("CARGO_BIN_EXE_virt-pin-hook")).unwrap();
        daemon.put("/usr/lib/virt-pin/virt-pin-hook", 0o755, &hook);
        Some(daemon)
    }

    /// The next hook of this event meets this failpoint.
    pub(crate) fn crash_at(&self, event: &str, point: &str) {
        self.put("/run/crash-at", 0o600, format!("{event} {point}\n").as_bytes());
    }

    /// Whether a hook has met what [`Libvirtd::crash_at`] asked for; if not, none will any more.
    pub(crate) fn was_met(&self) -> bool {
        let file = self.path("/run/crash-at");
        let met = !file.exists();
        let _ = std::fs::remove_file(file);
        met
    }

    /// The failpoints of [`LIVE`] that hooks of this event have passed.
    fn passed(&self, event: &str) -> Vec<&'static str> {
        let text = std::fs::read_to_string(self.path(&format!("/run/passes/{event}"))).unwrap_or_default();
        LIVE.iter().copied().filter(|name| text.lines().any(|line| line == *name)).collect()
    }

    /// Runs the command and has it killed at this failpoint.
    #[track_caller]
    fn killed_at(&self, point: &str, command: &str) {
        let run = self.exec(&["env", &format!("VIRT_PIN_CRASH_AT={point}"), "virt-pin", command]);
        assert!(!run.status.success() && !run.stderr.contains("error["), "{point}: {run:?}");
    }
}

#[test]
fn killed_at_every_point_of_a_life() {
    let Some(daemon) = Libvirtd::start_killable("pinnable_cpus = \"0-1\"\n") else { return };
    daemon.exec(&["mkdir", "/run/passes"]).ok();
    let (web, rival) = (small("web").tuning("<iothreads>1</iothreads>"), small("rival"));
    daemon.run(&web);
    daemon.define(&rival);
    daemon.destroy("web");
    daemon.wait_for_no_lease();
    let mut reached: BTreeSet<&str> = BTreeSet::new();
    for event in ["prepare", "started", "release"] {
        for point in daemon.passed(event).into_iter().chain(["replace.rename", "replace.done", "answered"]) {
            reached.insert(point);
            if event == "release" {
                daemon.start_guest("web").ok();
                daemon.crash_at(event, point);
                daemon.destroy("web");
            } else {
                daemon.crash_at(event, point);
                daemon.start_guest("web").refused();
            }
            assert!(daemon.was_met(), "{event} {point}");
            // Whatever it has left, both can have their CPUs, each its own.
            daemon.start_guest("rival").ok();
            daemon.start_guest("web").ok();
            let places = ["rival", "web"].map(|name| daemon.places(name).0);
            assert!(places == [["0"], ["1"]] || places == [["1"], ["0"]], "{event} {point}: {places:?}");
            daemon.destroy("rival");
            daemon.destroy("web");
            daemon.wait_for_no_lease();
        }
    }
    // A move: its CPU has gone.
    daemon.exec(&["rm", "-r", "/run/passes"]).ok();
    daemon.start_guest("web").ok();
    let mover = ["recorded", "begun", "grown", "seated", "bound", "shrunk", "settled", "committed", "kernel.passage"];
    for point in mover {
        reached.insert(point);
        let own = daemon.places("web").0[0].clone();
        let other = if own == "0" { "1" } else { "0" };
        daemon.pretend_online(other);
        daemon.killed_at(point, "reconcile");
        let held = daemon.exec(&["virt-pin", "--json", "lease", "web"]).ok();
        assert!(held.contains(other), "{point}: {held}");
        daemon.exec(&["virt-pin", "reconcile"]).ok();
        assert_eq!(daemon.places("web").0, [other], "{point}");
        daemon.no_longer_pretend();
    }
    daemon.destroy("web");
    daemon.wait_for_no_lease();
    drop(daemon);

    // Threads that are elsewhere, and have to be brought back.
    let Some(daemon) = Libvirtd::start_killable(ONE) else { return };
    daemon.run(&dedicated("web"));
    for point in ["kernel.binding", "affinity"] {
        reached.insert(point);
        // Where that fails, the VM goes on and is brought back later.
        daemon.virsh(&["vcpupin", "web", "0", "0", "--live"]).ok();
        daemon.crash_at("reconnect", &format!("{point}:1=EIO+"));
        daemon.restart_daemon();
        daemon.wait_until("it has been looked at", |daemon| daemon.was_met());
        assert_eq!(daemon.virsh(&["domstate", "web"]).ok().trim(), "running");
        daemon.exec(&["virt-pin", "reconcile"]).ok();
        daemon.assert_on_cpu_1("web");
        // libvirt ends a VM whose hook is killed here. That is not ours to prevent; what it held is free.
        daemon.virsh(&["vcpupin", "web", "0", "0", "--live"]).ok();
        daemon.crash_at("reconnect", point);
        daemon.restart_daemon();
        daemon.wait_for_no_lease();
        assert!(daemon.was_met(), "{point}");
        daemon.start_guest("web").ok();
        daemon.assert_on_cpu_1("web");
    }
    let missed: Vec<_> = LIVE.iter().filter(|name| !reached.contains(*name)).collect();
    assert!(missed.is_empty(), "never reached: {missed:?}");
}
