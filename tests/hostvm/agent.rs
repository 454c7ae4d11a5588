//! `virt-pin agent` as a service of a whole host.

use serde_json::Value;

use crate::guest::Guest;
use crate::host::Host;
use crate::shape::Shape;

const CONFIG: &str = "pinnable_cpus = \"2-7,10-15\"\nrepair_drift = true\n";
const UNIT: &str = "/usr/lib/systemd/system/virt-pin-agent.service";

#[test]
fn the_agent_is_a_service() {
    let Some(host) = Host::with_virt_pin(Shape::default(), CONFIG) else { return };
    host.put(UNIT, 0o644, &std::fs::read("packaging/systemd/virt-pin-agent.service").unwrap());
    host.put("/etc/default/virt-pin-agent", 0o644, b"VIRT_PIN_AGENT_OPTIONS=\"--metrics /run/virt-pin.prom\"\n");
    host.exec(&["systemctl", "daemon-reload"]).ok();
    host.exec(&["systemctl", "enable", "--now", "virt-pin-agent"]).ok();
    assert_eq!(host.exec(&["systemctl", "is-active", "virt-pin-agent"]).ok(), "active\n");
    let inactive = |host: &Host, name: &str| host.virsh(&["dumpxml", "--inactive", name]).ok();

    // The shape of a place on one node, and of one on both.
    host.define(&Guest::new("web").vcpus(4).policy("policy='dedicated'"));
    host.wait_until("web has its shape", |host| inactive(host, "web").contains("cores='2' threads='2'/>"));
    host.define(&Guest::new("big").vcpus(4).memory(64).policy("policy='dedicated' numa='spread'"));
    host.wait_until("big has its cells", |host| {
        inactive(host, "big").contains("<cell id='1' cpus='2-3' memory='32768'")
    });
    let big = inactive(&host, "big");
    assert!(big.contains("<memnode cellid='1' mode='strict' nodeset='1'/>") && !big.contains("vcpupin"), "{big}");

    let leased = |host: &Host, name: &str| -> Vec<String> {
        let lease: Value = serde_json::from_str(&host.exec(&["virt-pin", "--json", "lease", name]).ok()).unwrap();
        lease["vcpus"].as_array().unwrap().iter().map(ToString::to_string).collect()
    };
    host.virsh(&["start", "web"]).ok();
    let web = leased(&host, "web");
    host.wait_for_live_pins("web", &web);
    host.virsh(&["start", "big"]).ok();
    assert_eq!((host.vcpus("web"), host.vcpus("big")), (web.clone(), leased(&host, "big")));
    let lease = host.exec(&["virt-pin", "lease", "big"]).ok();
    assert!(!lease.contains("Note:"), "{lease}");

    // A CPU that goes takes its vCPU elsewhere: the lease moves, and stays where it is when the CPU is back.
    let (gone, former) = (web[1].clone(), web);
    let online = |online: u8| format!("echo {online} >/sys/devices/system/cpu/cpu{gone}/online");
    host.sh(&online(0)).ok();
    host.wait_until("it has another CPU", |host| !leased(host, "web").contains(&gone));
    let web = leased(&host, "web");
    host.wait_until("its vCPUs are there", |host| host.vcpus("web") == web);
    host.wait_for_live_pins("web", &web);
    host.sh(&online(1)).ok();
    assert!(web != former && host.vcpus("web") == web);
    // Somebody's hand is put right.
    host.virsh(&["vcpupin", "web", "0", &web[2], "--live"]).ok();
    host.wait_until("it is moved back", |host| host.vcpus("web") == web);
    host.wait_for_live_pins("web", &web);

    // Debian's daemon ends when it is idle, and its socket starts it again.
    host.exec(&["systemctl", "stop", "libvirtd.service"]).ok();
    host.define(&Guest::new("late").vcpus(2).policy("policy='dedicated'"));
    host.wait_until("late has its shape", |host| inactive(host, "late").contains("cores='1' threads='2'/>"));
    let pid = host.sh("systemctl show --property MainPID --value virt-pin-agent").ok();
    let open =
        format!("sleep 6; ss --no-header --unix --processes | grep pid={}, | grep -c libvirt || true", pid.trim());
    assert_eq!(host.sh(&open).ok().trim(), "0", "an idle agent holds no connection");

    let check = host.exec(&["virt-pin", "check"]);
    assert!(check.stdout.lines().any(|line| line.trim_start().starts_with("agent: runs") && line.ends_with("PASS")));
    let metrics = host.file("/run/virt-pin.prom");
    let held = |first: u16, last: u16| {
        let all = ["web", "big"].map(|name| leased(&host, name)).concat();
        all.iter().filter(|cpu| (first..=last).contains(&cpu.parse::<u16>().unwrap())).count()
    };
    for sample in [
        format!("virt_pin_cpus{{node=\"0\",pool=\"dedicated\"}} {}\n", held(0, 7)),
        format!("virt_pin_cpus{{node=\"1\",pool=\"dedicated\"}} {}\n", held(8, 15)),
        "virt_pin_leases{kind=\"dedicated\",state=\"running\"} 2".to_owned(),
        "virt_pin_leases_repaired_total 1\n".to_owned(),
    ] {
        assert!(metrics.contains(&sample), "{sample} is not in\n{metrics}");
    }
    host.exec(&["systemctl", "stop", "virt-pin-agent"]).ok();
    let result = host.sh("systemctl show --property Result --value virt-pin-agent").ok();
    assert_eq!(result, "success\n");
    let denied = host.sh("journalctl --unit virt-pin-agent | grep -ci 'denied\\|not permitted' || true").ok();
    assert_eq!(denied, "0\n");
}
