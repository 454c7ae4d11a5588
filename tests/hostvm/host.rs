//! A host of its own for a test: systemd, libvirt and QEMU on a machine of a chosen shape, as if just booted.
//!
//! It is a clone of a machine that was booted once, warmed up and saved (see `snapshot`), so each test starts from the same
//! state, to the last random number.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::process::Command;
use std::time::{Duration, Instant};

use virt_pin::cpuset::CpuSet;

use crate::guest::Guest;
use crate::image::Image;
use crate::needs;
use crate::shape::{Debian, Shape};
use crate::snapshot;
use crate::vm::{Output, PATIENCE, Vm};

/// The host; it ends when this value is dropped.
pub(crate) struct Host {
    vm: Vm,
}

impl Deref for Host {
    type Target = Vm;

    fn deref(&self) -> &Vm {
        &self.vm
    }
}

/// One thread of a VM's QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Thread {
    /// Its name: `CPU 0/TCG`, `qemu-system-x86`, ...
    pub(crate) name: String,
    /// The CPUs it may run on, as the kernel prints them (`0-1,3`).
    pub(crate) cpus: String,
    /// Its cpuset cgroup, below that of its VM.
    pub(crate) cgroup: String,
}

impl Thread {
    /// The last part of its cgroup's path: `emulator`, `vcpu0`, ...
    pub(crate) fn own_cgroup(&self) -> &str {
        self.cgroup.rsplit('/').next().unwrap()
    }
}

impl Host {
    /// A fresh host; `None` (and a line on the terminal) where that cannot be had.
    pub(crate) fn start(shape: Shape) -> Option<Host> {
        if !needs::met() {
            return None;
        }
        // The QEMU of an older Debian crashes now and then with many CPUs.
        let images = Image::of(Debian::Trixie).and_then(|qemu| Ok((qemu, Image::of(shape.debian)?)));
        match images
            .and_then(|(qemu, image)| Ok(Vm::clone_of(&qemu, &image, shape, &snapshot::of(&qemu, &image, shape)?)))
        {
            Ok(vm) => Some(Host { vm }),
            Err(why) => {
                needs::skip(&why);
                None
            }
        }
    }

    /// A fresh host with the virt-pin of this build, installed as the README says, and this configuration.
    pub(crate) fn with_virt_pin(shape: Shape, config: &str) -> Option<Host> {
        let host = Host::start(shape)?;
        let programs = [
            ("/usr/bin/virt-pin", env!("CARGO_BIN_EXE_virt-pin")),
            ("/usr/lib/virt-pin/virt-pin-hook", env!("CARGO_BIN_EXE_virt-pin-hook")),
        ];
        for (inside, program) in programs {
            host.put(inside, 0o755, &without_symbols(program));
        }
        host.put("/etc/virt-pin/virt-pin.toml", 0o644, config.as_bytes());
        host.exec(&["virt-pin", "install"]).ok();
        // Debian's daemon goes when nobody has asked it anything for a while; its socket would start it again.
        host.exec(&["systemctl", "reload-or-restart", "libvirtd"]).ok();
        Some(host)
    }

    /// Two of them that can reach each other, and each other's libvirt: at 10.9.0.1 and 10.9.0.2.
    pub(crate) fn pair(shape: Shape, config: &str) -> Option<[Host; 2]> {
        /// The clones take themselves for the same machine until they are told otherwise.
        const MEET: &str = r#"
            modprobe virtio_net && until [ -e /sys/class/net/eth0 ]; do sleep 0.1; done &&
            busybox ifconfig eth0 10.9.0.$0 netmask 255.255.255.0 up && hostname host$0 &&
            echo "127.0.0.1 localhost host$0" >/etc/hosts &&
            printf 'host_uuid = "0000000%s-1111-4222-8333-444444444444"\nauth_tcp = "none"\n' $0 >>/etc/libvirt/libvirtd.conf &&
            systemctl stop libvirtd && systemctl start libvirtd-tcp.socket && systemctl start libvirtd"#;
        let hosts = [Host::with_virt_pin(shape, config)?, Host::with_virt_pin(shape, config)?];
        Vm::connect(&hosts[0].vm, &hosts[1].vm);
        for (host, number) in hosts.iter().zip(["1", "2"]) {
            host.exec(&["bash", "-c", MEET, number]).ok();
        }
        Some(hosts)
    }

    /// Makes the host one without machined, as if it had never been installed.
    #[track_caller]
    pub(crate) fn without_machined(&self) {
        self.sh("rm /usr/share/dbus-1/system-services/org.freedesktop.machine1.service &&
                 systemctl mask --now systemd-machined && systemctl reload dbus && systemctl restart libvirtd")
            .ok();
    }

    /// Runs a shell script.
    #[track_caller]
    pub(crate) fn sh(&self, script: &str) -> Output {
        self.exec(&["bash", "-c", script])
    }

    /// The text of a file.
    #[track_caller]
    pub(crate) fn file(&self, path: &str) -> String {
        self.exec(&["cat", path]).ok()
    }

    /// Runs virsh.
    #[track_caller]
    pub(crate) fn virsh(&self, arguments: &[&str]) -> Output {
        self.exec(&[&["virsh", "--connect", "qemu:///system"], arguments].concat())
    }

    /// Defines a guest (again).
    #[track_caller]
    pub(crate) fn define(&self, guest: &Guest) {
        self.define_xml(&guest.xml());
    }

    /// Defines a domain by its document.
    #[track_caller]
    pub(crate) fn define_xml(&self, xml: &str) {
        self.put("/run/domain.xml", 0o600, xml.as_bytes());
        self.virsh(&["define", "/run/domain.xml"]).ok();
    }

    /// Defines a guest and starts it, which must succeed.
    #[track_caller]
    pub(crate) fn run(&self, guest: &Guest) {
        self.define(guest);
        self.virsh(&["start", &guest.name]).ok();
    }

    /// Every thread of a VM's QEMU, vCPUs first.
    #[track_caller]
    pub(crate) fn threads(&self, name: &str) -> Vec<Thread> {
        // `481/comm:CPU 0/TCG`, `481/cgroup:0::/machine.slice/...`, `481/status:Cpus_allowed_list:\t2`.
        let script = format!(
            "cd /proc/$(cat /run/libvirt/qemu/{name}.pid)/task &&
             grep --no-messages . */comm; grep --no-messages ^Cpus_allowed_list: */status
             grep --no-messages --extended-regexp '^0::|^[0-9]+:([^:]*,)?cpuset[,:]' */cgroup"
        );
        let lines = self.sh(&script).ok();
        let mut found: BTreeMap<&str, BTreeMap<&str, &str>> = BTreeMap::new();
        for line in lines.lines() {
            let (tid, rest) = line.split_once('/').unwrap();
            let (file, value) = rest.split_once(':').unwrap();
            // Where the cpuset controller has a hierarchy of its own, that comes first.
            found.entry(tid).or_default().entry(file).or_insert(value);
        }
        // A worker may end while we read: then it is none any more.
        let whole = found.values().filter(|files| files.len() == 3);
        let mut threads: Vec<Thread> = whole
            .map(|files| Thread {
                name: files["comm"].to_owned(),
                cpus: files["status"].split_once(':').unwrap().1.trim().to_owned(),
                cgroup: {
                    let ends = [".scope", ".libvirt-qemu"].into_iter();
                    let below = ends.filter_map(|end| files["cgroup"].split_once(end)).next();
                    below.map_or(files["cgroup"], |(_, below)| below).to_owned()
                },
            })
            .collect();
        threads.sort_by_key(|thread| (!thread.name.starts_with("CPU "), thread.name.clone()));
        threads
    }

    /// The process of a VM.
    #[track_caller]
    pub(crate) fn qemu(&self, name: &str) -> u32 {
        self.file(&format!("/run/libvirt/qemu/{name}.pid")).trim().parse().unwrap()
    }

    /// The CPU of each vCPU.
    #[track_caller]
    pub(crate) fn vcpus(&self, name: &str) -> Vec<String> {
        let vcpus = self.threads(name).into_iter().filter(|thread| thread.name.starts_with("CPU "));
        vcpus.map(|thread| thread.cpus).collect()
    }

    /// Each vCPU is on that CPU.
    #[track_caller]
    pub(crate) fn assert_vcpus(&self, name: &str, cpus: &[&str]) {
        assert_eq!(self.vcpus(name), cpus, "{name}");
    }

    /// Waits until libvirt's live XML pins each vCPU to that CPU: what tells it may still be at it.
    #[track_caller]
    pub(crate) fn wait_for_live_pins(&self, name: &str, cpus: &[impl AsRef<str>]) {
        self.wait_until("the live XML shows the lease", |host| {
            let xml = host.virsh(&["dumpxml", name]).ok();
            let pin = |(vcpu, cpu): (u32, &_)| {
                let cpu: &str = AsRef::as_ref(cpu);
                format!("<vcpupin vcpu='{vcpu}' cpuset='{cpu}'/>")
            };
            (0..).zip(cpus).map(pin).all(|pin| xml.contains(&pin))
        });
    }

    /// Waits until something holds.
    ///
    /// # Panics
    /// When it does not within [`PATIENCE`].
    #[track_caller]
    pub(crate) fn wait_until(&self, what: &str, mut holds: impl FnMut(&Host) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds(self) {
            assert!(Instant::now() < deadline, "still not after {} s: {what}", PATIENCE.as_secs());
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// The CPUs of a list, as the kernel prints it.
#[track_caller]
pub(crate) fn set(list: &str) -> CpuSet {
    CpuSet::parse_kernel_list(list).unwrap()
}

/// A program of this build without its debugging symbols, which are nine tenths of it.
fn without_symbols(program: &'static str) -> Vec<u8> {
    let small = tempfile::NamedTempFile::new().unwrap();
    let stripped = Command::new("strip").arg("-o").arg(small.path()).arg(program).status().unwrap();
    assert!(stripped.success(), "strip {program}");
    std::fs::read(small.path()).unwrap()
}
