//! What virt-pin promises, on whole hosts.

use crate::guest::Guest;
use crate::host::Host;
use crate::shape::Shape;

/// Cores of both nodes may be handed out; the first of each stays with the host.
const CONFIG: &str = "pinnable_cpus = \"2-7,10-15\"\n";

#[test]
fn explore() {
    let Some(host) = Host::with_virt_pin(Shape::default(), CONFIG) else { return };
    let db = Guest::new("db").vcpus(4).memory(32).policy("policy='dedicated' numa='spread'");
    host.put("/root/db.xml", 0o600, db.xml().as_bytes());
    let small = Guest::new("small")
        .vcpus(2)
        .memory(32)
        .policy("policy='dedicated' nodes='0'")
        .tuning("<memoryBacking><hugepages/></memoryBacking>");
    host.put("/root/small.xml", 0o600, small.xml().as_bytes());
    for script in [
        "virt-pin transform /root/db.xml | tee /root/db2.xml; virsh define /root/db2.xml; time virsh start db; virt-pin list; virsh dumpxml db; P=$(cat /run/libvirt/qemu/db.pid); grep bind /proc/$P/numa_maps; tr '\\0' ' ' </proc/$P/cmdline; virsh dumpxml --inactive db",
        "virt-pin check | tail -8; virsh destroy db",
        "for n in 0 1; do echo $((8 + n * 32)) > /sys/devices/system/node/node$n/hugepages/hugepages-2048kB/nr_hugepages; done; mount | grep huge; virsh define /root/small.xml; time virsh start small",
        "sed -i s/nodes=.0.// /root/small.xml; virsh define /root/small.xml; virt-pin explain small; virsh start small;  P=$(cat /run/libvirt/qemu/small.pid); grep huge /proc/$P/numa_maps; cat /sys/devices/system/node/node*/hugepages/hugepages-2048kB/free_hugepages; virsh dumpxml small",
    ] {
        let began = std::time::Instant::now();
        let output = host.sh(script);
        eprintln!("== {script} ({:.2} s)\n{}{}", began.elapsed().as_secs_f64(), output.stdout, output.stderr);
        if script.contains("start db") {
            eprintln!("{:#?}", host.threads("db"));
        }
    }
}
