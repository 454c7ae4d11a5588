//! Laboratory.
use crate::guest::Guest;
use crate::host::Host;
use crate::shape::Shape;

#[test]
#[ignore = "lab"]
fn lab_memory() {
    let Some(host) = Host::with_virt_pin(Shape::default(), "pinnable_cpus = \"2-7,10-15\"\n") else { return };
    let say = |what: &str, text: String| eprintln!("== {what}\n{text}");
    host.run(&Guest::new("web").vcpus(2).memory(64).policy("policy='dedicated'"));
    say("leases", host.file("/run/virt-pin/leases.json"));
    let scope = r"/sys/fs/cgroup/machine.slice/machine-qemu\x2d1\x2dweb.scope";
    let maps = "p=$(cat /run/libvirt/qemu/web.pid); awk '{for(i=3;i<=NF;i++){split($i,a,\"=\"); if(a[1]~/^N[0-9]+$/){s[$2\" \"a[1]]+=a[2]}}} END{for(k in s)print k, s[k]}' /proc/$p/numa_maps; sort -t= -k3 -n /proc/$p/numa_maps | grep -E 'anon=[0-9]{4}' ";
    say("before", host.sh(maps).ok());
    say("files", host.sh(&format!("cd '{scope}'; for f in cpuset.mems libvirt/cpuset.mems libvirt/emulator/cpuset.mems libvirt/vcpu0/cpuset.mems; do echo $f [$(cat $f)]; done; cat /sys/devices/system/node/node*/meminfo | grep MemFree")).ok());
    say(
        "write",
        host.sh(&format!(
            "cd '{scope}'; time echo 0-1 >cpuset.mems; time echo 1 > cpuset.mems; cat cpuset.mems.effective"
        ))
        .stderr,
    );
    say("after", host.sh(maps).ok());
    say("files", host.sh(&format!("cd '{scope}'; for f in cpuset.mems libvirt/cpuset.mems libvirt/emulator/cpuset.mems libvirt/vcpu0/cpuset.mems; do echo $f [$(cat $f)]; done; cat /sys/devices/system/node/node*/meminfo | grep MemFree")).ok());
    host.virsh(&["destroy", "web"]).ok();
    // With numatune in the XML.
    let guest = Guest::new("tuned").vcpus(2).memory(64).policy("policy='dedicated'");
    host.put("/run/db.xml", 0o600, guest.xml().as_bytes());
    let xml = host.exec(&["virt-pin", "transform", "/run/db.xml"]).ok();
    say("xml", xml.clone());
    host.define_xml(&xml);
    host.virsh(&["start", "tuned"]).ok();
    let maps = maps.replace("web", "tuned");
    let scope = r"/sys/fs/cgroup/machine.slice/machine-qemu\x2d2\x2dtuned.scope";
    say("before", host.sh(&maps).ok());
    say("files", host.sh(&format!("cd '{scope}'; for f in cpuset.mems libvirt/cpuset.mems libvirt/emulator/cpuset.mems libvirt/vcpu0/cpuset.mems; do echo $f [$(cat $f)]; done")).ok());
    say("write", host.sh(&format!("cd '{scope}'; echo 0-1 >cpuset.mems; for d in libvirt/emulator libvirt/vcpu0 libvirt/vcpu1; do echo 1 > $d/cpuset.mems;done; echo 1 > cpuset.mems; cat cpuset.mems.effective")).stderr);
    say("after", host.sh(&maps).ok());
    say("files", host.sh(&format!("cd '{scope}'; for f in cpuset.mems libvirt/cpuset.mems libvirt/emulator/cpuset.mems libvirt/vcpu0/cpuset.mems; do echo $f [$(cat $f)]; done")).ok());
    // Offline topology.
    say("offline", host.sh("echo 0 >/sys/devices/system/cpu/cpu3/online; virt-pin --json topology; ls /sys/devices/system/cpu/cpu3/; cat /run/libvirt/qemu/tuned.pid; grep -H Cpus_allowed_list /proc/$(cat /run/libvirt/qemu/tuned.pid)/task/*/status; virt-pin check; virt-pin list; echo 1 >/sys/devices/system/cpu/cpu3/online;grep -H Cpus_allowed_list /proc/$(cat /run/libvirt/qemu/tuned.pid)/task/*/status").ok());
}
