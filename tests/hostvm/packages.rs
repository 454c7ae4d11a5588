//! The Debian package on whole hosts: installed, used, upgraded under a running VM, purged.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::guest::Guest;
use crate::host::Host;
use crate::needs;
use crate::shape::{Debian, Shape};
use crate::transcript::Transcript;

const HOOK: &str = "/etc/libvirt/hooks/qemu.d/10-virt-pin";
const PACKAGED_HOOK: &str = "/usr/lib/virt-pin/virt-pin-hook";

/// Every file of the disk by name: kind, mode, owner, and what is in it or where it leads; of /usr instead of what is in it when the
/// kernel last saw it change, which nobody can set, as it is most of the disk. Left out is what has to differ: logs, what dpkg keeps
/// of its former self, what libvirt keeps of a VM that has run, and empty `.wants` directories of the test bed, which Debian 12's
/// helper for units tidies away.
const FILES: &str = r#"
    set -fo pipefail
    skip="-path /var/log -o -path /var/lib/libvirt/qemu -o -path /var/lib/dpkg/*-old"
    { find / -xdev \( $skip \) -prune -o -type d -name '*.wants' -empty -o -printf '%p %y %m %u:%g %l\n'
      find /usr -type f -printf '%p since %C@\n'
      find / -xdev \( $skip -o -path /usr \) -prune -o -type f -print0 | xargs -0 --max-args=1500 sha256sum; } | sort"#;

/// Notes every moment at which the hook could not be executed.
const WATCH: &str = "setsid bash -c 'while [ ! -e /run/stop ]; do [ -x $0 ] || echo gone; done; echo end' $0 >/run/watched 2>&1 </dev/null &";

/// The package of this build, and the same as if a version later; `None` where they cannot be built.
fn packages() -> Option<&'static [PathBuf; 2]> {
    static BUILT: OnceLock<Option<[PathBuf; 2]>> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        if !Path::new("/usr/bin/dh").exists() || !Path::new("/usr/bin/dpkg-shlibdeps").exists() {
            needs::skip("debhelper and dpkg-dev are not installed");
            return None;
        }
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("packages");
        let _ = std::fs::remove_dir_all(&dir);
        let run = |command: &mut Command| {
            let output = command.output().unwrap();
            assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap()
        };
        let binaries = Path::new(env!("CARGO_BIN_EXE_virt-pin")).parent().unwrap();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/package");
        let now = PathBuf::from(run(Command::new(script).arg("deb").arg(binaries).arg(&dir)).trim());
        let later = dir.join("later.deb");
        // Another program as well, so that the copy has to be replaced: ELF does not mind what follows it.
        run(Command::new("sh").arg("-c").arg(
            "dpkg-deb --raw-extract \"$0\" \"$1.d\" && sed -i 's/^Version: .*/&+later/' \"$1.d/DEBIAN/control\" &&
             echo later >>\"$1.d/usr/lib/virt-pin/virt-pin-hook\" && dpkg-deb --root-owner-group -Zgzip --build \"$1.d\" \"$1\"",
        ).arg(&now).arg(&later));
        Some([now, later])
    });
    built.as_ref()
}

impl Host {
    /// Puts a package into /run.
    #[track_caller]
    fn bring(&self, package: &Path) -> String {
        let name = package.file_name().unwrap().to_str().unwrap();
        self.put(&format!("/run/{name}"), 0o644, &std::fs::read(package).unwrap());
        name.to_owned()
    }

    fn agent(&self, property: &str) -> String {
        self.exec(&["systemctl", "show", "--property", property, "--value", "virt-pin-agent"]).ok().trim().to_owned()
    }

    fn daemon(&self) -> String {
        self.exec(&["systemctl", "show", "--property", "MainPID", "--value", "libvirtd"]).ok()
    }
}

fn the_package_comes_and_goes(debian: Debian) {
    let Some(host) = Host::start(Shape::default().debian(debian)) else { return };
    let Some([now, later]) = packages() else { return };
    // What libvirt itself makes when a VM first starts is no trace of ours.
    let guest = Guest::new("vm").vcpus(4);
    host.run(&guest);
    host.virsh(&["destroy", "vm"]).ok();
    let definition = host.virsh(&["dumpxml", "--inactive", "vm"]).ok();
    let daemon = host.daemon();
    host.sh(&format!("{FILES} >/run/before")).ok();
    for (file, lines) in [("/usr/bin/virsh", "2\n"), ("/etc/passwd", "2\n"), ("/etc/mtab", "1\n")] {
        assert_eq!(
            host.exec(&["grep", "--count", "--extended-regexp", &format!("(^| ){file}( |$)"), "/run/before"]).ok(),
            lines,
            "{file}"
        );
    }

    let package = host.bring(now);
    let mut session = Transcript::on(&host);
    let said = session.run(&format!("dpkg --install {package}"));
    assert!(!said.contains("virt-pin:") && !said.contains("arning"), "{said}");
    assert_eq!((host.agent("ActiveState"), host.agent("UnitFileState")), ("active".to_owned(), "enabled".to_owned()));
    assert_eq!(
        host.sh("stat --format '%A %U %n' /run/virt-pin /etc/virt-pin/virt-pin.toml").ok(),
        "drwx------ root /run/virt-pin\n-rw-r--r-- root /etc/virt-pin/virt-pin.toml\n"
    );
    // Nothing is handed out before somebody says so, and whoever is refused learns how.
    let refused = host.exec(&["virt-pin", "enable", "vm"]).refused();
    assert!(refused.starts_with("virt-pin: error[cpu.placement.unsatisfiable]"), "{refused}");
    assert!(refused.contains("`virt-pin suggest --write`"), "{refused}");
    assert_eq!(host.virsh(&["dumpxml", "--inactive", "vm"]).ok(), definition);
    match debian {
        Debian::Trixie => {
            assert_eq!(session.run("virt-pin suggest | grep pinnable_cpus"), "pinnable_cpus = \"2-7,10-15\"\n");
            session.run("sed -i 's/^pinnable_cpus = .*/pinnable_cpus = \"2-7,10-15\"/' /etc/virt-pin/virt-pin.toml");
        }
        Debian::Bookworm => drop(session.run("virt-pin suggest --write")),
    }
    session.run("virt-pin enable vm");
    session.run("virsh start vm");
    let threads = host.threads("vm");
    let cpus: Vec<_> = threads.iter().take(4).map(|thread| thread.cpus.as_str()).collect();
    assert_eq!(cpus, ["2", "3", "4", "5"]);
    let map = session.run("virt-pin map");
    assert!(map.contains("vm") && map.contains("2-5"), "{map}");
    session.run("virsh vcpupin vm");
    if debian == Debian::Trixie {
        session.agrees_with("installation.md");
    }
    let check = host.exec(&["virt-pin", "check"]);
    assert!(!check.stdout.contains("FAIL"), "{}", check.stdout);

    // An upgrade under the running VM.
    let lease = host.exec(&["virt-pin", "--json", "lease", "vm"]).ok();
    let agent = host.agent("MainPID");
    host.exec(&["bash", "-c", &WATCH.replace("$0", HOOK)]).ok();
    let package = host.bring(later);
    host.exec(&["dpkg", "--install", &format!("/run/{package}")]).ok();
    host.sh("touch /run/stop; until grep --quiet end /run/watched; do sleep 0.1; done").ok();
    assert_eq!(host.file("/run/watched"), "end\n");
    assert_eq!(host.exec(&["tail", "-c", "6", HOOK]).ok(), "later\n");
    host.exec(&["cmp", HOOK, PACKAGED_HOOK]).ok();
    assert_eq!(host.file("/etc/virt-pin/virt-pin.toml").matches("pinnable_cpus = \"2-7,10-15\"").count(), 1);
    host.wait_until("the agent runs anew", |host| {
        host.agent("ActiveState") == "active" && host.agent("MainPID") != agent
    });
    assert_eq!(host.agent("NRestarts"), "0", "{}", host.sh("journalctl --unit virt-pin-agent | tail -20").stdout);
    assert_eq!(host.daemon(), daemon, "libvirt was restarted");
    assert_eq!(host.exec(&["virt-pin", "--json", "lease", "vm"]).ok(), lease);
    assert_eq!(host.threads("vm"), threads);
    host.exec(&["systemctl", "restart", "libvirtd"]).ok();
    assert_eq!(host.virsh(&["domstate", "vm"]).ok().trim(), "running");
    assert_eq!(host.threads("vm"), threads);

    // Everything goes, and the VM stays.
    host.exec(&["virt-pin", "disable", "vm"]).ok();
    host.exec(&["dpkg", "--purge", "virt-pin"]).ok();
    assert_eq!(host.virsh(&["domstate", "vm"]).ok().trim(), "running");
    assert_eq!(host.threads("vm"), threads);
    assert_eq!(host.virsh(&["dumpxml", "--inactive", "vm"]).ok(), definition);
    assert_eq!(host.sh("systemctl list-unit-files --no-legend 'virt-pin*'; pgrep virt-pin || true").ok(), "");
    host.virsh(&["destroy", "vm"]).ok();
    host.virsh(&["start", "vm"]).ok();
    assert!(host.threads("vm").iter().all(|thread| thread.cpus == "0-15"));
    host.virsh(&["destroy", "vm"]).ok();
    host.sh(&format!("rm /run/*.deb; {FILES} >/run/after")).ok();
    assert_eq!(host.sh("diff /run/before /run/after || true").ok(), "");
    assert_eq!(
        host.sh("find /run /tmp /sys/fs/cgroup -name '*virt-pin*'; grep -rl virt-pin /run/systemd || true").ok(),
        ""
    );
}

#[test]
fn the_package_on_debian_13() {
    the_package_comes_and_goes(Debian::Trixie);
}

#[test]
fn the_package_on_debian_12() {
    the_package_comes_and_goes(Debian::Bookworm);
}
