//! Tools that define and change VMs, run for real: virt-install, virt-xml, virt-clone and virt-manager's way of editing, Cockpit,
//! Ansible. Whatever they do, policy, shape and lease are right; their lines are those of docs/neighbours.md.

use serde_json::Value;

use crate::agent::TRUE;
use crate::leases::ONE;
use crate::libvirtd::{Libvirtd, Options};
use crate::machine::Output;
use crate::needs;

const DOCUMENT: &str = include_str!("../../docs/neighbours.md");

/// A VM without anything that an emulated one would take time for.
const BARE: &str = "--connect qemu:///system --virt-type qemu --memory 16 --vcpus 2 --import --disk none --network none \
                    --graphics none --console none --serial null --controller usb,model=none \
                    --osinfo detect=on,require=off --noautoconsole";

/// The policy on virt-install's command line; and of the two vCPUs only the first, since there is one CPU to have.
const POLICY: [&str; 2] =
    ["--xml ./metadata/cpu/@xmlns=urn:virt-pin:domain:1", "--xml ./metadata/cpu/@policy=dedicated"];
const FIRST: &str = "--xml ./metadata/cpu/@dedicated-vcpus=0";

/// Two cores, as an owner would have them: sockets.
const OWN: &str = "sockets='2' dies='1' cores='1' threads='1'";

/// What is tried is what the document says, wherever its lines break.
#[track_caller]
fn assert_documented(line: &str) {
    let document = DOCUMENT.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(document.contains(line), "docs/neighbours.md does not say: {line}");
}

impl Libvirtd {
    /// Runs a line in a shell, in a locale that Python is content with.
    fn line(&self, line: &str) -> Output {
        self.exec(&["env", "LC_ALL=C.UTF-8", "bash", "-o", "pipefail", "-c", line])
    }

    #[track_caller]
    fn assert_leased(&self, name: &str) {
        let lease: Value = serde_json::from_str(&self.exec(&["virt-pin", "--json", "lease", name]).ok()).unwrap();
        assert_eq!((lease["vcpus"][0].as_u64(), lease["cpus"].as_str()), (Some(1), Some("1")), "{lease}");
        let (vcpus, _) = self.places(name);
        assert_eq!(vcpus, ["1", "0"], "{name}");
    }

    /// What the guest that runs is told.
    #[track_caller]
    fn is_told_the_truth(&self, name: &str) -> bool {
        self.virsh(&["dumpxml", name]).ok().contains(TRUE)
    }

    /// The definition has the policy, the topology and no pins.
    #[track_caller]
    fn wait_for_definition(&self, name: &str, topology: &str) {
        self.wait_for_topology(name, topology);
        self.wait_until("the definition has no pins", |daemon| !daemon.inactive(name).contains("vcpupin"));
        let xml = self.inactive(name);
        assert!(xml.contains("urn:virt-pin:domain:1") && xml.contains("policy=\"dedicated\""), "{xml}");
    }
}

#[test]
fn virt_install_and_those_who_come_with_it() {
    let Some(_) = needs::neighbour("virt-install") else { return };
    let by_name = format!("{ONE}[[domain]]\nmatch = \"named-*\"\npolicy = \"dedicated\"\ndedicated-vcpus = \"0\"\n");
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(&by_name)) else { return };
    let agent = daemon.start_agent();
    let policy = POLICY.join(" ");
    POLICY.into_iter().for_each(assert_documented);

    // Defined and started in one breath: its CPUs at once, the shape from the next start on.
    daemon.line(&format!("virt-install {BARE} --name web {policy} {FIRST}")).ok();
    daemon.assert_leased("web");
    daemon.wait_for_definition("web", TRUE);
    daemon.destroy("web");
    daemon.start_guest("web").ok();
    assert!(daemon.is_told_the_truth("web"));
    daemon.destroy("web");
    // Told the truth at once.
    daemon.line(&format!("virt-install {BARE} --name first {policy} {FIRST} --print-xml | virt-pin define -")).ok();
    daemon.start_guest("first").ok();
    daemon.assert_leased("first");
    assert!(daemon.is_told_the_truth("first"));
    // What the hook refuses virt-install says, and nothing is left of it.
    let said = daemon.line(&format!("virt-install {BARE} --name second {policy} {FIRST}")).refused();
    assert!(said.contains("error[cpu.placement.shortage]: domain \"second\": needs 1 "), "{said}");
    assert!(!daemon.virsh(&["list", "--all", "--name"]).ok().contains("second"));
    daemon.destroy("first");
    let require = "--xml ./metadata/cpu/@topology=require";
    assert_documented(require);
    let said = daemon.line(&format!("virt-install {BARE} --name second {policy} {FIRST} {require}")).refused();
    assert!(said.contains("error[cpu.xml.topology]"), "{said}");
    assert!(!daemon.virsh(&["list", "--all", "--name"]).ok().contains("second"));
    // A policy by name needs nothing of the tool. A transient VM has no definition that could be shaped.
    for (vcpus, told) in [("", false), ("--vcpus 2,sockets=1,cores=2,threads=1", true)] {
        daemon.line(&format!("virt-install {BARE} --name named-1 --transient {vcpus}")).ok();
        daemon.assert_leased("named-1");
        assert_eq!(daemon.is_told_the_truth("named-1"), told);
        daemon.destroy("named-1");
    }

    // virt-xml edits what it is shown.
    daemon.line("virt-xml web --edit --memory 24").ok();
    daemon.wait_for_definition("web", TRUE);
    assert!(daemon.inactive("web").contains("24576</memory>"));
    let said = daemon.line("virt-xml web --edit --vcpus 4").refused();
    assert!(said.contains("topology doesn't match"), "{said}");
    let four = TRUE.replace("cores='2'", "cores='4'");
    for line in ["virt-xml web --edit --vcpus 4,sockets=2,cores=2,threads=1", "virt-pin set-vcpus web 4"] {
        assert_documented(&line.replace("web", "NAME"));
        daemon.line(line).ok();
        daemon.wait_for_definition("web", &four);
    }
    daemon.line("virt-xml web --edit --vcpus 2,sockets=2,cores=1,threads=1").ok();
    daemon.wait_for_definition("web", TRUE);
    // Another policy element of the same namespace is dropped by libvirt: the first one stays.
    let before = daemon.inactive("web");
    daemon.line(&format!("virt-xml web --edit {policy} --xml ./metadata/cpu/@numa=single")).ok();
    assert_eq!(daemon.inactive("web"), before);
    // A VM without a policy is given one this way.
    daemon
        .line(&format!("virt-install {BARE} --name plain --print-xml >/run/plain.xml && virsh define /run/plain.xml"))
        .ok();
    daemon.line(&format!("virt-xml plain --edit {policy} {FIRST}")).ok();
    daemon.wait_for_definition("plain", TRUE);
    daemon.exec(&["virt-pin", "disable", "plain"]).ok();
    let xml = daemon.inactive("plain");
    assert!(!xml.contains("virt-pin") && !xml.contains("<topology"), "{xml}");

    // A clone is a VM of its own, with the same wish.
    daemon.line("virt-clone --original web --name twin --auto-clone").ok();
    daemon.wait_for_definition("twin", TRUE);
    daemon.start_guest("twin").ok();
    daemon.assert_leased("twin");
    assert!(daemon.start_guest("web").refused().contains("held by \"twin\" 1"));
    daemon.destroy("twin");
    daemon.exec(&["virt-pin", "disable", "twin"]).ok();
    let xml = daemon.inactive("twin");
    assert!(xml.contains(OWN) && !xml.contains("virt-pin"), "what web's owner had: {xml}");

    as_virt_manager(&daemon);
    daemon.stop_agent(agent);
}

/// virt-manager's `define_cpu` and `define_overview` (virtManager/object/domain.py), with the library it has them from.
fn as_virt_manager(daemon: &Libvirtd) {
    const EDIT: &str = "import sys
sys.path.insert(0, '/usr/share/virt-manager')
import libvirt
from virtinst import Guest, cli
conn = cli.getConnection('qemu:///system')
flags = libvirt.VIR_DOMAIN_XML_INACTIVE | libvirt.VIR_DOMAIN_XML_SECURE
guest = Guest(conn, parsexml=conn.lookupByName('web').XMLDesc(flags))
exec(sys.argv[1])
conn.defineXML(guest.get_xml())
";
    daemon.put("/run/edit.py", 0o644, EDIT.as_bytes());
    let edit = |what: &str| daemon.exec(&["env", "LC_ALL=C.UTF-8", "python3", "/run/edit.py", what]);
    let before = daemon.inactive("web");
    edit("guest.title = 'A title'").ok();
    daemon.wait_for_definition("web", TRUE);
    assert_eq!(daemon.inactive("web").replace("  <title>A title</title>\n", ""), before, "nothing but the edit");
    let said = edit("guest.vcpus = guest.vcpu_current = 4").refused();
    assert!(said.contains("topology doesn't match"), "{said}");
    // "Manually set CPU topology" is not ticked.
    edit("guest.vcpus = guest.vcpu_current = 4; guest.cpu.topology.clear()").ok();
    daemon.wait_for_definition("web", &TRUE.replace("cores='2'", "cores='4'"));
    edit("guest.vcpus = guest.vcpu_current = 2; t = guest.cpu.topology; t.sockets = 2; t.cores = 1; t.threads = 1")
        .ok();
    daemon.wait_for_definition("web", TRUE);
    daemon.start_guest("web").ok();
    daemon.assert_leased("web");
    assert!(daemon.is_told_the_truth("web"));
    daemon.destroy("web");
}

/// What Cockpit's page is made of, seen from a directory of programs.
const BUNDLE: &str = "../share/cockpit/machines/index.js.gz";

/// The script that Cockpit makes VMs with.
fn script_of_cockpit(bundle: &str) -> String {
    let bundle = std::process::Command::new("zcat").arg(bundle).output().unwrap();
    let bundle = String::from_utf8(bundle.stdout).unwrap();
    // A template literal of JavaScript.
    let script =
        bundle.split('`').find(|text| text.starts_with("#! /usr/bin/python3\n") && text.contains("virt-install"));
    script.expect("a script that calls virt-install").replace("\\\\", "\\")
}

/// Cockpit's calls, as in its src/libvirtApi/domain.js: libvirt-dbus and virt-xml.
#[test]
fn cockpit_makes_changes_and_ends_a_vm() {
    let needed = ["virt-xml", "dbus-daemon", "busctl", "libvirt-dbus", BUNDLE].map(needs::neighbour);
    let [Some(_), Some(_), Some(_), Some(_), Some(bundle)] = needed else { return };
    let script = script_of_cockpit(&bundle);
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    let agent = daemon.start_agent();
    daemon.line("mkdir -p /run/dbus && dbus-daemon --system --fork && ip link set lo up").ok();
    let call = |path: &str, interface: &str, method: &str, arguments: &[&str]| {
        let interface = format!("org.libvirt.{interface}");
        let method = ["busctl", "--system", "--json=short", "call", "org.libvirt", path, &interface, method];
        let output = daemon.exec(&[&method[..], arguments].concat()).ok();
        let reply: Value = serde_json::from_str(&output).unwrap_or_default();
        reply["data"][0].as_str().unwrap_or_default().to_owned()
    };
    let connect = |method: &str, arguments: &[&str]| call("/org/libvirt/QEMU", "Connect", method, arguments);

    // A VM from an image, and its policy from our command: Cockpit knows no metadata.
    daemon.put("/run/install_machine.py", 0o755, script.as_bytes());
    daemon.line("mkdir -p /var/lib/libvirt/images && truncate -s 1M /var/lib/libvirt/images/disk.img").ok();
    let arguments = r#"{"connectionName":"system","memorySize":16,"os":"linux2022","source":"/var/lib/libvirt/images/disk.img",
        "sourceType":"disk_image","startVm":false,"storagePool":"NoStorage","type":"create","unattended":false,"vmName":"web"}"#;
    daemon.exec(&["env", "LC_ALL=C.UTF-8", "python3", "/run/install_machine.py", arguments]).ok();
    daemon.exec(&["virt-pin", "enable", "web", "--dedicated-vcpus", "0"]).ok();
    // There is no network here.
    daemon.line("virt-xml -c qemu:///system web --remove-device --network 1").ok();
    daemon.wait_for_definition("web", TRUE);
    let path = connect("DomainLookupByName", &["s", "web"]);
    let domain = |method: &str, arguments: &[&str]| call(&path, "Domain", method, arguments);
    domain("Create", &["u", "0"]);
    daemon.assert_leased("web");
    assert!(daemon.is_told_the_truth("web"));
    daemon.wait_until("the live XML shows the lease", |_| {
        domain("GetXMLDesc", &["u", "0"]).contains("<vcpupin vcpu='0' cpuset='1'/>")
    });
    // Its dialogue for the maximum memory defines the live XML, pins and all.
    let live = domain("GetXMLDesc", &["u", "0"]);
    connect("DomainDefineXML", &["s", &live.replace(">16384</", ">24576</")]);
    daemon.wait_for_definition("web", TRUE);
    assert!(daemon.inactive("web").contains("24576</memory>"));
    domain("SetMemory", &["tu", "20480", "2"]);
    for line in [
        "virt-xml -c qemu:///system --vcpu 2,vcpu.current=1,sockets=2,cores=1,threads=1 web --edit",
        "virt-xml -c qemu:///system --cpu clearxml=true,mode=host-model web --edit",
        "virt-xml -c qemu:///system --memorybacking access.mode=shared,source.type=memfd web --edit",
    ] {
        daemon.line(line).ok();
        daemon.wait_for_definition("web", TRUE);
    }
    daemon.assert_leased("web");
    domain("Destroy", &["u", "0"]);
    domain("Rename", &["su", "other", "0"]);
    domain("Create", &["u", "0"]);
    let lease = daemon.exec(&["virt-pin", "lease", "other"]).ok();
    assert!(lease.contains("CPUs held:      1\n") && !lease.contains("Note:"), "{lease}");
    domain("Destroy", &["u", "0"]);
    domain("Undefine", &["u", "7"]);
    daemon.wait_for_no_lease();
    assert_eq!(daemon.virsh(&["list", "--all", "--name"]).ok().trim(), "");
    daemon.stop_agent(agent);
}

/// The playbook of docs/neighbours.md, and what happens to one that does not ask for the shape.
#[test]
fn ansible_has_nothing_to_change_the_second_time() {
    const XML: &str = "<domain type='qemu'><name>web</name><uuid>5b1c6f0e-36c6-4f0e-9d4b-3d8b1f2a7c11</uuid><metadata>\
        <pin:cpu xmlns:pin='urn:virt-pin:domain:1' policy='dedicated' dedicated-vcpus='0'/></metadata><memory>16384</memory>\
        <vcpu>2</vcpu><os><type arch='x86_64' machine='pc'>hvm</type></os><devices><controller type='usb' model='none'/>\
        <serial type='null'/><memballoon model='none'/></devices></domain>";
    let Some(_) = needs::neighbour("ansible-playbook") else { return };
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    let agent = daemon.start_agent();
    daemon.put("/run/web.xml", 0o644, XML.as_bytes());
    let (_, playbook) = DOCUMENT.split_once("```yaml\n").unwrap();
    let (playbook, _) = playbook.split_once("```").unwrap();
    assert!(playbook.contains("virt-pin transform --shape-only"), "{playbook}");
    daemon.put("/run/shaped.yml", 0o644, playbook.as_bytes());
    let unshaped = "- hosts: all\n  gather_facts: false\n  tasks:\n    - community.libvirt.virt: {command: define, xml: \
                    \"{{ lookup('file', '/run/web.xml') }}\"}\n";
    daemon.put("/run/unshaped.yml", 0o644, unshaped.as_bytes());
    // How many tasks changed something.
    let play = |file: &str| -> u32 {
        let line = format!("ansible-playbook -i localhost, -c local -e 'vm=web xml=/run/web.xml' /run/{file}");
        let output = daemon.line(&line).ok();
        let (_, changed) = output.rsplit_once("changed=").unwrap_or_else(|| panic!("{output}"));
        changed.split_whitespace().next().unwrap().parse().unwrap()
    };
    assert_eq!(play("shaped.yml"), 2, "defined and started");
    daemon.assert_leased("web");
    assert!(daemon.is_told_the_truth("web"), "at the first start");
    let before = daemon.inactive("web");
    assert_eq!(play("shaped.yml"), 0);
    assert_eq!(daemon.inactive("web"), before);
    // A change is one change.
    daemon.put("/run/web.xml", 0o644, XML.replace("16384", "24576").as_bytes());
    assert_eq!(play("shaped.yml"), 1);
    assert_eq!(play("shaped.yml"), 0);
    daemon.wait_for_definition("web", TRUE);
    // Without the shape each run finds what the agent wrote, and writes over it; the VM is as it should be all the same.
    for _ in 0..2 {
        assert_eq!(play("unshaped.yml"), 1);
        daemon.wait_for_definition("web", TRUE);
    }
    daemon.assert_leased("web");
    // Without a UUID the module takes libvirt's refusal for agreement.
    let (before, rest) = XML.split_once("<uuid>").unwrap();
    let (_, after) = rest.split_once("</uuid>").unwrap();
    daemon.put("/run/web.xml", 0o644, format!("{before}{after}").replace("16384", "32768").as_bytes());
    assert_eq!(play("unshaped.yml"), 0);
    assert!(!daemon.inactive("web").contains("32768"));
    // One that keeps its topology reads as it was written.
    daemon.put(
        "/run/web.xml",
        0o644,
        XML.replace("policy='dedicated'", "policy='dedicated' topology='keep'").as_bytes(),
    );
    assert_eq!(play("unshaped.yml"), 1);
    daemon.wait_until("the definition is its owner's", |daemon| !daemon.inactive("web").contains("<topology"));
    assert_eq!(play("unshaped.yml"), 0);
    daemon.put(
        "/run/end.yml",
        0o644,
        b"- hosts: all\n  gather_facts: false\n  tasks:\n    - community.libvirt.virt: {name: web, state: destroyed}\n    - \
          community.libvirt.virt: {name: web, command: undefine}\n",
    );
    play("end.yml");
    daemon.wait_for_no_lease();
    assert_eq!(daemon.virsh(&["list", "--all", "--name"]).ok().trim(), "");
    daemon.stop_agent(agent);
}
