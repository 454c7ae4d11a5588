//! `virt-pin agent` on real libvirt: definitions get the shape of their places and give it back, live XML follows leases, and
//! nothing is lost, looped or left behind.
//!
//! `VIRT_PIN_RACES=200` runs the race between `virsh define`, `virsh start` and the agent that often (20 without).

use std::time::{Duration, Instant};

use crate::guest::Guest;
use crate::libvirtd::{Libvirtd, Options};

const ONE: &str = "pinnable_cpus = \"1\"\n";
const METRICS: &str = "/run/virt-pin.prom";
const LOG: &str = "/run/agent.log";

/// Two vCPUs, of which the first has CPU 1: the guest is to be told of two cores, and its owner says two sockets.
fn dedicated(name: &str) -> Guest {
    owned(name).policy("policy='dedicated' dedicated-vcpus='0'")
}

fn owned(name: &str) -> Guest {
    Guest::new(name).vcpus(2).cpu("<cpu><topology sockets='2' cores='1' threads='1'/></cpu>")
}

const TRUE: &str = "sockets='1' dies='1' cores='2' threads='1'";
const OWN: &str = "sockets='2' dies='1' cores='1' threads='1'";

impl Libvirtd {
    /// Starts the agent in the background; its pid.
    #[track_caller]
    fn start_agent(&self) -> u32 {
        let start = format!("virt-pin agent --metrics {METRICS} </dev/null >>{LOG} 2>&1 & echo $!");
        let pid = self.exec(&["bash", "-c", &start]).ok().trim().parse().unwrap();
        self.wait_until("the agent runs", |daemon| daemon.log().matches("the agent runs").count() > 0);
        pid
    }

    #[track_caller]
    fn stop_agent(&self, pid: u32) {
        self.signal(pid, "TERM");
        self.wait_until("the agent has ended", |daemon| !daemon.runs(pid));
        self.exec(&["bash", "-c", &format!("mv {LOG} {LOG}.old")]).ok();
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.path(LOG)).unwrap_or_default()
    }

    #[track_caller]
    fn inactive(&self, name: &str) -> String {
        self.virsh(&["dumpxml", "--inactive", "--security-info", name]).ok()
    }

    #[track_caller]
    fn wait_for_topology(&self, name: &str, topology: &str) {
        let wanted = format!("<topology {topology}/>");
        self.wait_until(&format!("{name} is told of {topology}"), |daemon| daemon.inactive(name).contains(&wanted));
    }

    /// One value of the metrics file.
    fn metric(&self, sample: &str) -> Option<f64> {
        let text = std::fs::read_to_string(self.path(METRICS)).ok()?;
        text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' ')?.parse().ok())
    }

    /// How often the threads of a process have been run, and for how long.
    #[track_caller]
    fn activity(&self, pid: u32) -> Vec<String> {
        let tasks = std::fs::read_dir(self.path(&format!("/proc/{pid}/task"))).unwrap();
        let paths = tasks.map(|task| task.unwrap().path().join("status"));
        let status = |path: &std::path::Path| std::fs::read_to_string(path).unwrap();
        let mut lines: Vec<String> = paths
            .flat_map(|path| status(&path).lines().map(str::to_owned).collect::<Vec<_>>())
            .filter(|line| line.starts_with("Pid:") || line.starts_with("voluntary_ctxt_switches"))
            .collect();
        lines.sort();
        lines
    }
}

#[test]
fn definitions_have_the_shape_of_their_places_and_give_it_back() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    // One that was there before the agent, and one that is none of its business.
    daemon.define(&dedicated("early"));
    daemon.define(&owned("other"));
    let other = daemon.inactive("other");
    let agent = daemon.start_agent();
    daemon.wait_for_topology("early", TRUE);
    daemon.define(&dedicated("web"));
    daemon.wait_for_topology("web", TRUE);
    let shaped = daemon.inactive("web");
    assert!(
        shaped.contains("topology=\"sockets=2 dies=1 cores=1 threads=1\"") || shaped.contains("urn:virt-pin:former:1")
    );
    assert!(!shaped.contains("vcpupin") && !shaped.contains("cpuset"), "{shaped}");

    // What nobody has changed is left alone, whoever defines it again.
    let rewritten = || daemon.metric("virt_pin_definitions_rewritten_total").unwrap();
    daemon.wait_until("both are counted", |_| rewritten() == 2.0);
    daemon.put("/run/again.xml", 0o600, shaped.as_bytes());
    for _ in 0..5 {
        daemon.virsh(&["define", "/run/again.xml"]).ok();
    }
    daemon.define(&dedicated("third"));
    daemon.wait_for_topology("third", TRUE);
    daemon.wait_until("the third is counted", |_| rewritten() >= 3.0);
    assert_eq!((rewritten(), daemon.inactive("web")), (3.0, shaped.clone()));

    // The guest starts with it, its live XML shows the lease, and its definition no CPU.
    daemon.start_guest("web").ok();
    daemon.wait_until("the live XML shows the lease", |daemon| {
        let xml = daemon.virsh(&["dumpxml", "web"]).ok();
        xml.contains("<vcpupin vcpu='0' cpuset='1'/>") && xml.contains("<emulatorpin cpuset='0'/>")
    });
    assert!(daemon.virsh(&["dumpxml", "web"]).ok().contains(TRUE));
    assert_eq!(daemon.inactive("web"), shaped);
    let lease = daemon.exec(&["virt-pin", "lease", "web"]).ok();
    assert!(lease.contains("True topology:  2 cores of 1 thread") && !lease.contains("Note:"), "{lease}");
    // Pins in a definition go, while it runs.
    daemon.put("/run/pins.xml", 0o600, daemon.virsh(&["dumpxml", "web", "--migratable"]).ok().as_bytes());
    daemon.virsh(&["define", "/run/pins.xml"]).ok();
    daemon.wait_until("the definition has no pins", |daemon| !daemon.inactive("web").contains("vcpupin"));

    // An owner's edit is the new truth behind the shape.
    let edited = daemon.inactive("web").replace(TRUE, "sockets='2' cores='1' threads='1'");
    daemon.put("/run/edited.xml", 0o600, edited.as_bytes());
    daemon.virsh(&["define", "/run/edited.xml"]).ok();
    daemon.wait_for_topology("web", TRUE);

    // Without the policy the owner's topology is back, and nothing of ours.
    daemon.virsh(&["metadata", "web", "urn:virt-pin:domain:1", "--remove", "--config"]).ok();
    daemon
        .wait_for_topology("web", "sockets='2' cores='1' threads='1'".replace("' cores", "' dies='1' cores").as_str());
    daemon.wait_until("nothing of ours is left", |daemon| !daemon.inactive("web").contains("virt-pin"));
    // A shared policy is none.
    let shared = owned("early").policy("policy='shared'");
    daemon.put(
        "/run/early.xml",
        0o600,
        daemon.inactive("early").replace("'dedicated'", "'shared'").replace("\"dedicated\"", "\"shared\"").as_bytes(),
    );
    daemon.virsh(&["define", "/run/early.xml"]).ok();
    daemon.wait_for_topology("early", OWN);
    assert_eq!(shared.name, "early");

    assert_eq!(daemon.inactive("other"), other);
    daemon.virsh(&["undefine", "third"]).ok();
    daemon.destroy("web");
    daemon.stop_agent(agent);
    let names = daemon.virsh(&["list", "--all", "--name"]).ok();
    assert!(!names.contains("third"), "{names}");
}

#[test]
fn the_agent_sleeps_and_is_alone() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    let agent = daemon.start_agent();
    daemon.define(&dedicated("web"));
    daemon.wait_for_topology("web", TRUE);
    let second = daemon.exec(&["virt-pin", "agent"]).refused();
    assert!(second.contains("state.locked") && second.contains("another agent runs"), "{second}");
    // The connection lingers for two seconds; after that nothing runs any more.
    std::thread::sleep(Duration::from_secs(4));
    let before = daemon.activity(agent);
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(daemon.activity(agent), before);
    let sockets = daemon.exec(&["bash", "-c", &format!("ls -l /proc/{agent}/fd | grep -c socket")]).stdout;
    assert_eq!(sockets.trim(), "2", "reports and the kernel's announcements, no libvirt");
    daemon.stop_agent(agent);
    daemon.exec(&["virt-pin", "agent", "--once"]).ok();
}

#[test]
fn drift_is_reported_and_repaired_where_that_is_wanted() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    let agent = daemon.start_agent();
    daemon.run(&dedicated("web"));
    let shows = |daemon: &Libvirtd, cpu: &str| {
        daemon.virsh(&["dumpxml", "web"]).ok().contains(&format!("<vcpupin vcpu='0' cpuset='{cpu}'/>"))
    };
    daemon.wait_until("the live XML shows the lease", |daemon| shows(daemon, "1"));
    let place = |daemon: &Libvirtd| {
        let threads = daemon.threads("web");
        threads.iter().find(|thread| thread.comm == "CPU 0/TCG").unwrap().cpus.clone()
    };
    daemon.virsh(&["vcpupin", "web", "0", "0", "--live"]).ok();
    daemon.wait_until("it is said", |daemon| daemon.log().contains("may run on CPUs 0, its lease says 1"));
    daemon.wait_until("it is counted", |daemon| daemon.metric("virt_pin_drifted_domains") == Some(1.0));
    // Said once, and nobody is moved.
    daemon.virsh(&["emulatorpin", "web", "0", "--live"]).ok();
    assert_eq!((place(&daemon).as_str(), daemon.log().matches("its lease says 1").count()), ("0", 1));
    assert!(shows(&daemon, "0"));

    daemon.put("/etc/virt-pin/virt-pin.toml", 0o644, format!("{ONE}repair_drift = true\n").as_bytes());
    daemon.wait_until("it is moved back", |daemon| place(daemon) == "1");
    daemon.wait_until("the live XML shows the lease again", |daemon| shows(daemon, "1"));
    daemon.wait_until("it is counted", |daemon| daemon.metric("virt_pin_drift_repairs_total") == Some(1.0));
    daemon.wait_until("nobody is astray", |daemon| daemon.metric("virt_pin_drifted_domains") == Some(0.0));
    daemon.destroy("web");
    daemon.stop_agent(agent);
}

#[test]
fn daemons_may_come_and_go() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    let agent = daemon.start_agent();
    daemon.run(&dedicated("web"));
    daemon.wait_for_topology("web", TRUE);
    daemon.kill_daemon();
    daemon.start_daemon();
    daemon.define(&dedicated("late"));
    daemon.wait_for_topology("late", TRUE);
    // One that appears while there is no daemon to ask.
    let file =
        daemon.inactive("late").replace("late", "found").replace(&dedicated("late").uuid(), &dedicated("found").uuid());
    let unshaped = file.replace(TRUE, "sockets='2' cores='1' threads='1'");
    daemon.stop_daemon();
    daemon.put("/etc/libvirt/qemu/found.xml", 0o600, unshaped.as_bytes());
    std::thread::sleep(Duration::from_millis(300));
    daemon.start_daemon();
    daemon.wait_for_topology("found", TRUE);
    assert!(daemon.runs(agent), "{}", daemon.log());
    daemon.stop_agent(agent);

    // A VM that dies when nobody looks has its lease ended as soon as somebody does, daemon or not.
    daemon.kill_daemon();
    daemon.kill_qemu("web");
    daemon.wait_until("it is dead", |daemon| !daemon.exec(&["pgrep", "qemu-system"]).status.success());
    let agent = daemon.start_agent();
    daemon.wait_until("its lease has ended", |daemon| {
        daemon.file("/run/virt-pin/leases.json").contains("\"leases\":[]")
            && daemon.log().contains("its QEMU has ended")
    });
    daemon.start_daemon();
    daemon.stop_agent(agent);
}

/// A thread that comes to life later is bound without anybody's wish, and libvirt is told of it.
#[test]
fn who_comes_late_is_bound() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    let agent = daemon.start_agent();
    daemon.run(&dedicated("web"));
    daemon.wait_until("the live XML shows the lease", |daemon| {
        daemon.virsh(&["dumpxml", "web"]).ok().contains("<vcpupin vcpu='0' cpuset='1'/>")
    });
    daemon.virsh(&["iothreadadd", "web", "7"]).ok();
    let place = |daemon: &Libvirtd| {
        let threads = daemon.threads("web");
        threads.into_iter().find(|thread| thread.comm == "IO iothread7").map(|thread| thread.cpus)
    };
    daemon.wait_until("it is bound", |daemon| place(daemon).as_deref() == Some("0"));
    daemon.wait_until("the live XML shows it", |daemon| {
        daemon.virsh(&["dumpxml", "web"]).ok().contains("<iothreadpin iothread='7' cpuset='0'/>")
    });
    let log = daemon.log();
    assert!(log.contains("its lease says 0: put right") && !log.contains("thread.misplaced"), "{log}");
    assert_eq!(daemon.metric("virt_pin_drift_total"), Some(0.0));
    daemon.destroy("web");
    daemon.stop_agent(agent);
}

/// Nobody has to be stopped for an allowlist that changes.
#[test]
fn cpus_that_are_not_pinnable_any_more_are_named_and_given_back() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    let agent = daemon.start_agent();
    daemon.run(&dedicated("web"));
    daemon.wait_until("the live XML shows the lease", |daemon| {
        daemon.virsh(&["dumpxml", "web"]).ok().contains("<vcpupin vcpu='0' cpuset='1'/>")
    });
    daemon.put("/etc/virt-pin/virt-pin.toml", 0o644, b"pinnable_cpus = \"0\"\n");
    daemon.wait_until("the agent names them", |daemon| {
        daemon.log().contains("domain \"web\": its lease has CPUs 1, which are not pinnable any more")
    });
    assert!(daemon.leases().contains("\"vcpus\":[1,null]"), "{}", daemon.leases());
    let said = daemon.exec(&["virt-pin", "repack"]).ok();
    assert!(said.starts_with("Moved \"web\" from CPUs 1 to 0."), "{said}");
    daemon.wait_until("the live XML shows the move", |daemon| {
        daemon.virsh(&["dumpxml", "web"]).ok().contains("<vcpupin vcpu='0' cpuset='0'/>")
    });
    daemon.wait_until("the agent says so", |daemon| daemon.log().contains("every CPU of its lease is pinnable again"));
    daemon.destroy("web");
    daemon.stop_agent(agent);
}

/// libvirt reports no end of a start in which its daemon dies, and no QEMU ever follows.
#[test]
fn a_daemon_that_dies_inside_prepare_leaves_no_lease() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    let hangs = "#!/bin/sh\n[ \"$2\" != prepare ] || { echo $$ >/run/hangs; exec sleep 600; }\n";
    daemon.put("/etc/libvirt/hooks/qemu.d/90-hangs", 0o755, hangs.as_bytes());
    daemon.reload_daemon();
    let agent = daemon.start_agent();
    daemon.define(&dedicated("web"));
    daemon.exec(&["bash", "-c", "virsh start web </dev/null >/dev/null 2>&1 &"]).ok();
    let pid = |daemon: &Libvirtd| std::fs::read_to_string(daemon.path("/run/hangs")).ok()?.trim().parse::<u32>().ok();
    daemon.wait_until("its start hangs", |daemon| pid(daemon).is_some());
    assert!(daemon.leases().contains("\"reserved\""), "{}", daemon.leases());
    daemon.kill_daemon();
    daemon.signal(pid(&daemon).unwrap(), "KILL");
    daemon.exec(&["rm", "/etc/libvirt/hooks/qemu.d/90-hangs"]).ok();
    daemon.start_daemon();
    daemon.wait_for_no_lease();
    let log = daemon.log();
    assert!(log.contains("the libvirt daemon that was starting it has ended"), "{log}");
    daemon.run(&dedicated("web"));
    daemon.destroy("web");
    daemon.stop_agent(agent);
}

#[test]
fn metrics_are_in_the_text_format() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    let agent = daemon.start_agent();
    daemon.run(&dedicated("web"));
    daemon.define(&dedicated("second"));
    daemon.start_guest("second").refused();
    daemon.wait_until("the refusal is counted", |daemon| {
        daemon.metric("virt_pin_refusals_total{code=\"cpu.placement.shortage\"}") == Some(1.0)
    });
    daemon.wait_until("the lease is counted", |daemon| {
        daemon.metric("virt_pin_leases{kind=\"dedicated\",state=\"running\"}") == Some(1.0)
    });
    let text = daemon.file(METRICS);
    let mut families: Vec<(&str, &str)> = Vec::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            families.push(rest.split_once(' ').unwrap());
            continue;
        }
        if line.starts_with("# HELP ") {
            continue;
        }
        let (sample, value) = line.rsplit_once(' ').unwrap();
        assert!(value.parse::<f64>().is_ok_and(|value| value >= 0.0), "{line}");
        let (name, labels) = sample.split_once('{').map_or((sample, ""), |(name, labels)| (name, labels));
        let (family, kind) = families.last().unwrap();
        assert!(name == *family || (*kind == "histogram" && name.starts_with(family)), "{line} below {family}");
        assert!(*kind != "counter" || name.ends_with("_total"), "{line}");
        assert!(labels.is_empty() || labels.ends_with("\"}"), "{line}");
        for label in labels.trim_end_matches('}').split(',').filter(|label| !label.is_empty()) {
            let (label, value) = label.split_once('=').unwrap();
            assert!(label.bytes().all(|byte| byte.is_ascii_lowercase()), "{line}");
            assert!(value.len() >= 3 && value.starts_with('"') && value.ends_with('"'), "{line}");
        }
    }
    assert!(families.len() >= 10, "{text}");
    let mut names: Vec<&str> = families.iter().map(|(name, _)| *name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), families.len(), "each family once");
    for sample in ["prepare", "started"] {
        let count = daemon.metric(&format!("virt_pin_hook_duration_seconds_count{{operation=\"{sample}\"}}")).unwrap();
        let all =
            daemon.metric(&format!("virt_pin_hook_duration_seconds_bucket{{operation=\"{sample}\",le=\"+Inf\"}}"));
        assert!(count >= 1.0 && all == Some(count), "{text}");
    }
    assert_eq!(daemon.metric("virt_pin_cpus{node=\"0\",pool=\"dedicated\"}"), Some(1.0));
    let mode = daemon.exec(&["stat", "-c", "%a", METRICS]).ok();
    assert_eq!(mode.trim(), "644");
    daemon.destroy("web");
    daemon.stop_agent(agent);
}

/// Whatever the agent is in the middle of: a VM starts with the true topology, or its hook says that it does not.
#[test]
fn define_and_start_race_with_the_agent() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    let agent = daemon.start_agent();
    let rounds: u32 = std::env::var_os("VIRT_PIN_RACES").map_or(20, |rounds| rounds.to_str().unwrap().parse().unwrap());
    daemon.define(&dedicated("web"));
    let file = format!("/run/{}.xml", dedicated("web").uuid());
    let (mut won, begun) = (0, Instant::now());
    for round in 0..rounds {
        // One process defines and starts as fast as can be, another with a process in between.
        let script = format!("define {file}; start web");
        let both = ["virsh", "-q", "-c", "qemu:///system", &script];
        let apart = format!("virsh -q define {file} && virsh -q start web");
        let started = if round % 2 == 0 { daemon.exec(&both) } else { daemon.exec(&["bash", "-c", &apart]) };
        started.ok();
        let live = daemon.virsh(&["dumpxml", "web"]).ok();
        let lease = daemon.exec(&["virt-pin", "lease", "web"]).ok();
        if live.contains(TRUE) {
            won += 1;
            assert!(!lease.contains("its XML tells the guest"), "{lease}");
        } else {
            assert!(live.contains(OWN) && lease.contains("its XML tells the guest 2 sockets of"), "{live}\n{lease}");
        }
        daemon.destroy("web");
    }
    daemon.wait_for_topology("web", TRUE);
    daemon.wait_until("no lease is left", |daemon| daemon.file("/run/virt-pin/leases.json").contains("\"leases\":[]"));
    let rewritten = daemon.metric("virt_pin_definitions_rewritten_total").unwrap();
    assert!(rewritten <= f64::from(rounds + 1), "{rewritten} definitions were changed in {rounds} rounds");
    let zombies = daemon.exec(&["bash", "-c", "ps -eo stat,comm | grep '^Z' | grep virt-pin"]).stdout;
    assert_eq!(zombies, "");
    assert!(daemon.runs(agent) && !daemon.log().contains("left alone"), "{}", daemon.log());
    eprintln!("{won} of {rounds} starts had the true topology at once; {:.1} s", begun.elapsed().as_secs_f64());
    daemon.stop_agent(agent);
}

#[test]
fn commands_change_definitions() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    daemon.define(&owned("web"));
    let before = daemon.inactive("web");
    let said = daemon.exec(&["virt-pin", "enable", "web", "--dedicated-vcpus", "0"]).ok();
    assert!(
        said.contains("will have CPUs of its own; the guest is told of 2 cores of 1 thread. It takes effect"),
        "{said}"
    );
    let enabled = daemon.inactive("web");
    assert!(enabled.contains(TRUE) && enabled.contains("dedicated-vcpus"), "{enabled}");
    daemon.start_guest("web").ok();
    assert!(daemon.exec(&["virt-pin", "list"]).ok().contains(" web "));
    // What virsh cannot do once a topology is there.
    assert!(daemon.virsh(&["setvcpus", "web", "4", "--maximum", "--config"]).refused().contains("topology"));
    daemon.exec(&["virt-pin", "set-vcpus", "web", "4"]).ok();
    assert!(daemon.inactive("web").contains("cores='4'") && daemon.inactive("web").contains(">4</vcpu>"));
    daemon.exec(&["virt-pin", "set-vcpus", "web", "2"]).ok();
    assert_eq!(daemon.inactive("web"), enabled);
    let refused = daemon.exec(&["virt-pin", "enable", "web", "--numa", "sideways"]).refused();
    assert!(refused.contains("unknown value \"sideways\""), "{refused}");
    let said = daemon.exec(&["virt-pin", "disable", "web"]).ok();
    assert!(said.contains("asks for no CPUs of its own any more; the guest is told of 2 sockets of 1 core"), "{said}");
    assert_eq!(daemon.inactive("web"), before);
    daemon.destroy("web");

    let text = dedicated("new").policy("policy='dedicated' dedicated-vcpus='0' topology='require'").xml();
    daemon.put("/run/new.xml", 0o600, text.as_bytes());
    daemon.virsh(&["define", "/run/new.xml"]).ok();
    let complaint = daemon.start_guest("new").refused();
    let part = "its XML tells the guest 2 sockets of 1 core of 1 thread, not 2 cores of 1 thread";
    assert!(complaint.contains("cpu.xml.topology") && complaint.contains(part), "{complaint}");
    daemon.exec(&["virt-pin", "define", "/run/new.xml"]).ok();
    daemon.start_guest("new").ok();
    daemon.destroy("new");
}

/// As virt-install prints it: another order of elements, its own metadata, devices and clocks that are not ours.
const AS_INSTALLED: &str = "<domain type='qemu'>
  <name>tool</name>
  <uuid>5b1c6f0e-36c6-4f0e-9d4b-3d8b1f2a7c11</uuid>
  <metadata>
    <libosinfo:libosinfo xmlns:libosinfo='http://libosinfo.org/xmlns/libvirt/domain/1.0'>
      <libosinfo:os id='http://debian.org/debian/12'/>
    </libosinfo:libosinfo>
    <pin:cpu xmlns:pin='urn:virt-pin:domain:1' policy='dedicated' dedicated-vcpus='0'/>
  </metadata>
  <memory>16384</memory>
  <currentMemory>16384</currentMemory>
  <vcpu>2</vcpu>
  <os>
    <type arch='x86_64' machine='pc'>hvm</type>
    <boot dev='hd'/>
  </os>
  <features>
    <acpi/>
    <apic/>
  </features>
  <clock offset='utc'>
    <timer name='rtc' tickpolicy='catchup'/>
  </clock>
  <on_reboot>destroy</on_reboot>
  <devices>
    <controller type='usb' model='none'/>
    <serial type='null'/>
    <memballoon model='none'/>
  </devices>
</domain>
";

/// What tools do to definitions: one starts what it has defined in the same breath, one writes back the whole of what it was
/// shown with a change of its own (virt-manager), one writes its own document over what stands there each time (Terraform).
#[test]
fn tools_keep_policy_and_shape() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    let agent = daemon.start_agent();
    let define = |xml: &str| {
        daemon.put("/run/tool.xml", 0o600, xml.as_bytes());
        daemon.virsh(&["define", "/run/tool.xml"]).ok();
    };
    daemon.put("/run/tool.xml", 0o600, AS_INSTALLED.as_bytes());
    daemon.exec(&["virsh", "-q", "-c", "qemu:///system", "define /run/tool.xml; start tool"]).ok();
    let leased =
        |daemon: &Libvirtd| daemon.exec(&["virt-pin", "--json", "lease", "tool"]).ok().contains("\"vcpus\":[1,");
    assert!(leased(&daemon));
    daemon.wait_for_topology("tool", TRUE);
    daemon.destroy("tool");

    let shown = daemon.inactive("tool");
    assert!(shown.contains("libosinfo:os ") && shown.contains("<on_reboot>destroy</on_reboot>"), "{shown}");
    define(&shown.replace("<on_reboot>destroy", "<on_reboot>restart"));
    daemon.wait_for_topology("tool", TRUE);
    let edited = daemon.inactive("tool");
    assert!(edited.contains("policy=\"dedicated\"") || edited.contains("policy='dedicated'"), "{edited}");
    assert_eq!(edited, shown.replace("<on_reboot>destroy", "<on_reboot>restart"), "nothing but the edit");

    for _ in 0..3 {
        define(AS_INSTALLED);
        daemon.wait_for_topology("tool", TRUE);
        daemon.virsh(&["start", "tool"]).ok();
        assert!(leased(&daemon) && daemon.virsh(&["dumpxml", "tool"]).ok().contains(TRUE));
        daemon.destroy("tool");
    }
    assert_eq!(daemon.inactive("tool"), shown, "the same document, the same definition");
    // Without the element it is the tool's own again.
    let plain = AS_INSTALLED.lines().filter(|line| !line.contains("pin:cpu")).collect::<Vec<_>>().join("\n");
    define(&plain);
    daemon.wait_until("nothing of ours is left", |daemon| {
        let xml = daemon.inactive("tool");
        !xml.contains("virt-pin") && !xml.contains("<topology")
    });
    daemon.stop_agent(agent);
}
