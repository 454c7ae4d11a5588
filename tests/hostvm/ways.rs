//! Every kind of host: what confines a VM before its QEMU is executed, whoever makes its cgroup.

use crate::guest::Guest;
use crate::host::Host;
use crate::leases::{CONFIG, HOUSEKEEPING};
use crate::shape::{Debian, Shape};

/// A hook that is called before virt-pin's, and writes down at `started` where each thread is.
const LOOK: &str = r#"#!/bin/sh
[ "$2" != started ] || for task in /proc/$(cat "/run/libvirt/qemu/$1.pid")/task/*; do
    echo "$(cat $task/comm): $(sed -n 's/^Cpus_allowed_list:\t//p; s/^Mems_allowed_list:\t/nodes /p' $task/status | tr '\n' ' ')"
done >"/run/born.$1"
"#;

impl Host {
    #[track_caller]
    fn assert_held(&self, name: &str, cpus: &str) {
        let threads = self.threads(name);
        assert!(!threads.is_empty() && threads.iter().all(|thread| thread.cpus == cpus), "{name}: {threads:#?}");
    }

    /// The nodes that the threads of a VM may have memory of.
    #[track_caller]
    fn memory_nodes(&self, name: &str) -> String {
        let files = format!("/proc/$(cat /run/libvirt/qemu/{name}.pid)/task/*/status");
        self.sh(&format!("sed -n 's/^Mems_allowed_list:\\t//p' {files} | uniq")).ok()
    }
}

/// The whole life of a VM where each of its threads has its own cgroup before it exists; others make room.
fn each_thread_is_born_on_its_cpus(shape: Shape, machined: bool, kind: &str) {
    let Some(host) = Host::with_virt_pin(shape, CONFIG) else { return };
    if !machined {
        host.without_machined();
    }
    host.put("/etc/libvirt/hooks/qemu.d/05-look", 0o755, LOOK.as_bytes());
    let check = host.exec(&["virt-pin", "check"]).ok();
    let check = check.split_whitespace().collect::<Vec<_>>().join(" ");
    let says = format!("VMs are confined before QEMU is executed : PASS {kind}: each thread by its own cgroup");
    assert!(check.contains(&says), "{check}");
    host.run(&Guest::new("before").vcpus(2));
    host.assert_held("before", "0-15");
    let web = Guest::new("web-1").vcpus(4).policy("policy='dedicated'").tuning("<iothreads>1</iothreads>");
    host.run(&web);
    let born = host.file("/run/born.web-1");
    for vcpu in 0..4 {
        let line = format!("CPU {vcpu}/TCG: {} nodes 0 \n", vcpu + 2);
        assert!(born.contains(&line), "{line:?} is not in {born}");
    }
    for line in born.lines().filter(|line| !line.starts_with("CPU ")) {
        assert!(line.ends_with(&format!(": {HOUSEKEEPING} nodes 0 ")), "{born}");
    }
    host.assert_bound("web-1", &["2", "3", "4", "5"]);
    host.assert_held("before", "0-1,6-15");
    host.run(&Guest::new("during"));
    let born = host.file("/run/born.during");
    assert!(born.lines().all(|line| line.contains(": 0-1,6-15 ")), "{born}");
    host.assert_held("during", "0-1,6-15");
    // Neither systemd nor the daemon takes it back.
    host.sh("systemctl daemon-reload && systemctl set-property --runtime system.slice CPUWeight=50").ok();
    host.exec(&["systemctl", "restart", "libvirtd"]).ok();
    assert!(host.virsh(&["list", "--name"]).ok().contains("web-1\n"));
    host.assert_bound("web-1", &["2", "3", "4", "5"]);
    assert_eq!(host.memory_nodes("web-1"), "0\n");
    host.assert_held("before", "0-1,6-15");
    host.virsh(&["destroy", "web-1"]).ok();
    host.assert_held("before", "0-15");
    host.assert_held("during", "0-15");
    host.define(&Guest::new("broken").policy("policy='dedicated'").without_its_disk());
    host.virsh(&["start", "broken"]).refused();
    for name in ["before", "during"] {
        host.virsh(&["destroy", name]).ok();
    }
    // Of v1's other hierarchies libvirt loses some once systemd has taken QEMU for a part of the daemon's own unit.
    let left =
        host.sh("cd /sys/fs/cgroup/cpuset 2>/dev/null || cd /sys/fs/cgroup; find machine* -mindepth 1 -type d").ok();
    assert_eq!(left, "", "cgroups are left behind");
}

#[test]
fn cgroup_v2_without_machined() {
    each_thread_is_born_on_its_cpus(Shape::default(), false, "cgroup v2 at /sys/fs/cgroup, without machined");
}

#[test]
fn cgroup_v2_without_machined_on_debian_12() {
    let shape = Shape::default().debian(Debian::Bookworm);
    each_thread_is_born_on_its_cpus(shape, false, "cgroup v2 at /sys/fs/cgroup, without machined");
}

#[test]
fn cgroup_v1_with_machined() {
    let shape = Shape::default().debian(Debian::Bookworm).cgroup_v1();
    each_thread_is_born_on_its_cpus(shape, true, "cgroup v1 at /sys/fs/cgroup/cpuset, with machined");
}

#[test]
fn cgroup_v1_without_machined() {
    let shape = Shape::default().debian(Debian::Bookworm).cgroup_v1();
    each_thread_is_born_on_its_cpus(shape, false, "cgroup v1 at /sys/fs/cgroup/cpuset, without machined");
}

/// Hands a guest a network device whose packets the kernel carries: a thread of the kernel's own before Linux 6.4, of QEMU's since.
const VHOST: &str = r#"
    modprobe --all vhost_net tun && busybox tunctl -t tap0 &&
    printf '%s\n' 'user = "root"' 'cgroup_device_acl = ["/dev/null", "/dev/zero", "/dev/urandom", "/dev/net/tun", "/dev/vhost-net"]' \
        >>/etc/libvirt/qemu.conf && systemctl restart libvirtd"#;

fn vhost_threads_are_with_the_rest_of_qemu(shape: Shape) {
    let Some(host) = Host::with_virt_pin(shape, CONFIG) else { return };
    host.sh(VHOST).ok();
    // libvirt itself gives it to KVM guests only.
    let net = "<qemu:commandline><qemu:arg value='-netdev'/>\
               <qemu:arg value='tap,id=net,ifname=tap0,script=no,downscript=no,vhost=on,vhostforce=on'/>\
               <qemu:arg value='-device'/><qemu:arg value='virtio-net-pci,netdev=net,addr=0x10'/></qemu:commandline>";
    let xml = Guest::new("net").vcpus(2).policy("policy='dedicated'").xml();
    let xml = xml.replacen("<domain ", "<domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0' ", 1);
    host.define_xml(&xml.replace("</devices>", &format!("</devices>{net}")));
    host.virsh(&["start", "net"]).ok();
    host.assert_bound("net", &["2", "3"]);
    let find = "ps -eLo tid,comm | awk '$2 ~ /^vhost-/ { print $1 }'";
    let tid = host.sh(find).ok().trim().to_owned();
    let place = || {
        let files = format!("cd /proc/{tid} && sed -n 's/^Cpus_allowed_list:\\t//p' status && sed 's:.*/::' cgroup");
        host.sh(&files).ok()
    };
    assert_eq!(place(), format!("{HOUSEKEEPING}\nemulator\n"));
    // Had it been born on a vCPU's thread, it would be on that one's CPU: it is taken back.
    host.sh(&format!("cd /sys/fs/cgroup/machine.slice/*/libvirt && echo {tid} >vcpu1/cgroup.threads")).ok();
    assert_eq!(place(), "3\nvcpu1\n");
    let check = host.exec(&["virt-pin", "check"]);
    assert!(check.stdout.contains(&format!("(tid {tid}) may run on CPUs 3, not {HOUSEKEEPING}")), "{check:?}");
    host.exec(&["systemctl", "restart", "libvirtd"]).ok();
    host.wait_until("it is with the others", |_| place() == format!("{HOUSEKEEPING}\nemulator\n"));
    host.assert_bound("net", &["2", "3"]);
}

#[test]
fn vhost_threads_of_qemu() {
    vhost_threads_are_with_the_rest_of_qemu(Shape::default());
}

#[test]
fn vhost_threads_of_the_kernel() {
    vhost_threads_are_with_the_rest_of_qemu(Shape::default().debian(Debian::Bookworm));
}

#[test]
fn vcpus_plugged_in_later_are_on_their_cpus() {
    let Some(host) = Host::with_virt_pin(Shape::default(), CONFIG) else { return };
    host.run(&Guest::new("late").vcpus(4).current(2).policy("policy='dedicated'").tuning("<iothreads>1</iothreads>"));
    host.assert_bound("late", &["2", "3"]);
    host.wait_until("the live XML shows the lease", |host| {
        host.virsh(&["dumpxml", "late"]).ok().contains("<emulatorpin cpuset='0-1,8-9'/>")
    });
    host.virsh(&["setvcpus", "late", "4", "--live"]).ok();
    host.assert_bound("late", &["2", "3", "4", "5"]);
    // An I/O thread's number is not known before: until libvirt is told it may run wherever its VM may.
    host.virsh(&["iothreadadd", "late", "7"]).ok();
    let place =
        |host: &Host| host.threads("late").into_iter().find(|thread| thread.name == "IO iothread7").unwrap().cpus;
    assert_eq!(place(&host), "0-5,8-9");
    host.exec(&["virt-pin", "sync", "late"]).ok();
    host.assert_bound("late", &["2", "3", "4", "5"]);
}
