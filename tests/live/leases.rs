//! What virt-pin promises, on real libvirt: a dedicated VM has its CPUs from start to end, and nobody else has them.
//!
//! The machine has two CPUs; most tests hand out CPU 1 and keep CPU 0 for the host.

use std::collections::BTreeSet;

use virt_pin::error::Code;

use crate::guest::Guest;
use crate::libvirtd::{Libvirtd, Options, Thread};

/// CPU 1 may be handed out.
pub(crate) const ONE: &str = "pinnable_cpus = \"1\"\n";

pub(crate) fn dedicated(name: &str) -> Guest {
    Guest::new(name).policy("policy='dedicated'")
}

impl Libvirtd {
    /// The places of the VM's vCPU threads, in vCPU order, and those of all its other threads.
    #[track_caller]
    pub(crate) fn places(&self, name: &str) -> (Vec<String>, BTreeSet<String>) {
        let threads = self.threads(name);
        let (mut vcpus, others): (Vec<Thread>, Vec<Thread>) =
            threads.into_iter().partition(|thread| thread.comm.starts_with("CPU "));
        vcpus.sort_by(|a, b| a.comm.cmp(&b.comm));
        (vcpus.into_iter().map(|thread| thread.cpus).collect(), others.into_iter().map(|thread| thread.cpus).collect())
    }

    #[track_caller]
    pub(crate) fn assert_on_cpu_1(&self, name: &str) {
        assert_eq!(self.places(name), (vec!["1".to_owned()], BTreeSet::from(["0".to_owned()])));
    }

    /// Whether every thread of the VM may run on these CPUs and no others.
    fn is_held_to(&self, name: &str, cpus: &str) -> bool {
        let (vcpus, others) = self.places(name);
        !vcpus.is_empty() && vcpus.iter().chain(&others).all(|place| place == cpus)
    }

    #[track_caller]
    pub(crate) fn assert_held_to(&self, name: &str, cpus: &str) {
        assert!(self.is_held_to(name, cpus), "{name}: {:?}", self.places(name));
    }

    pub(crate) fn leases(&self) -> String {
        self.file("/run/virt-pin/leases.json")
    }

    #[track_caller]
    pub(crate) fn wait_for_no_lease(&self) {
        self.wait_until("no lease is left", |daemon| daemon.leases().contains("\"leases\":[]"));
        self.wait_until("no cgroup of a VM is left", |daemon| {
            let machine = std::fs::read_dir(daemon.path("/sys/fs/cgroup/cpuset/machine"));
            !machine.into_iter().flatten().flatten().any(|entry| entry.path().is_dir())
        });
    }
}

#[test]
fn a_dedicated_vm_has_its_cpu_and_says_so() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    daemon.run(&dedicated("web"));
    daemon.assert_on_cpu_1("web");
    let cgroup = "/sys/fs/cgroup/cpuset/machine/qemu-1-web.libvirt-qemu";
    let cpuset = |dir: &str| daemon.file(&format!("{cgroup}/{dir}cpuset.cpus")).trim().to_owned();
    assert_eq!([cpuset(""), cpuset("vcpu0/"), cpuset("emulator/")], ["0-1", "1", "0"]);
    let leases = daemon.leases();
    assert!(leases.contains("\"state\":\"running\"") && leases.contains(&dedicated("web").uuid()), "{leases}");
    // The live XML follows; the persistent one carries no CPU numbers.
    daemon.wait_until("the live XML shows the lease", |daemon| {
        let xml = daemon.virsh(&["dumpxml", "web"]).ok();
        xml.contains("<vcpupin vcpu='0' cpuset='1'/>") && xml.contains("<emulatorpin cpuset='0'/>")
    });
    assert!(daemon.virsh(&["vcpupin", "web"]).ok().contains(" 0      1"));
    assert!(daemon.virsh(&["emulatorpin", "web"]).ok().contains("*: 0"));
    assert!(!daemon.virsh(&["dumpxml", "--inactive", "web"]).ok().contains("vcpupin"));
    daemon.assert_on_cpu_1("web");
    let list = daemon.exec(&["virt-pin", "list"]).ok();
    assert!(list.contains(" web    running   dedicated   1"), "{list}");
    daemon.destroy("web");
    daemon.wait_for_no_lease();
}

#[test]
fn the_second_one_is_refused_in_plain_words() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    daemon.run(&dedicated("first"));
    daemon.define(&dedicated("second"));
    let complaint = daemon.start_guest("second").refused();
    for part in [
        "unexpected exit status 20: virt-pin: error[cpu.placement.shortage]: domain \"second\": needs 1 whole core",
        "0 of the 1 pinnable are free",
        "hint: held by \"first\" 1; stop a VM that holds some",
    ] {
        assert!(complaint.contains(part), "{part:?} is not in: {complaint}");
    }
    daemon.assert_on_cpu_1("first");
    // The release of the refused one has not ended the other's lease.
    assert!(daemon.leases().contains("\"name\":\"first\""));
    daemon.destroy("first");
    daemon.run(&dedicated("second").powering_off());
    daemon.wait_for_no_lease();
}

#[test]
fn vms_without_a_lease_make_room_and_get_it_back() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    daemon.run(&Guest::new("before").vcpus(2));
    daemon.assert_held_to("before", "0-1");
    daemon.run(&dedicated("leased"));
    daemon.assert_on_cpu_1("leased");
    daemon.assert_held_to("before", "0");
    // One that starts beside the lease; one that libvirt is told to put everywhere; one whose start fails.
    daemon.run(&Guest::new("during"));
    daemon.assert_held_to("during", "0");
    daemon.run(&Guest::new("anywhere").default_cpuset("0-1"));
    daemon.assert_held_to("anywhere", "0");
    daemon.define(&Guest::new("broken").without_its_disk());
    daemon.start_guest("broken").refused();
    daemon.destroy("during");
    daemon.destroy("leased");
    for name in ["before", "anywhere"] {
        daemon.wait_until("it has its CPUs back", |daemon| daemon.is_held_to(name, "0-1"));
    }
    daemon.destroy("before");
    daemon.destroy("anywhere");
    daemon.wait_for_no_lease();
}

#[test]
fn a_vm_that_can_do_without_starts_all_the_same() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    daemon.run(&dedicated("first"));
    let second = Guest::new("second").policy("policy='dedicated' fallback='shared'");
    daemon.run(&second);
    daemon.assert_held_to("second", "0");
    daemon.assert_on_cpu_1("first");
    let lease = daemon.exec(&["virt-pin", "--json", "lease", "second"]).ok();
    for part in
        ["\"kind\":\"degraded\"", "\"state\":\"running\"", "\"code\":\"cpu.placement.shortage\"", "\"cpus\":\"\""]
    {
        assert!(lease.contains(part), "{part} is not in {lease}");
    }
    let list = daemon.exec(&["virt-pin", "list"]).ok();
    assert!(list.contains(" second   running   degraded    -       -"), "{list}");
    let said = daemon.exec(&["virt-pin", "sync", "second"]).ok();
    assert_eq!(said, "Domain \"second\" runs without CPUs of its own (degraded); its XML is its own.\n");
    let said = daemon.exec(&["virt-pin", "check"]).ok();
    assert!(said.contains("\"second\" has CPUs of its own") && said.contains("it has been degraded for"), "{said}");
    daemon.restart_daemon();
    assert_eq!(daemon.virsh(&["domstate", "second"]).ok().trim(), "running");
    // Stopped and started when there is room it is a VM like others.
    daemon.destroy("first");
    daemon.destroy("second");
    daemon.wait_for_no_lease();
    daemon.start_guest("second").ok();
    daemon.assert_on_cpu_1("second");
    // And its saved image, on a host that has no room, goes on without.
    daemon.wait_until("the live XML shows the lease", |daemon| {
        daemon.virsh(&["dumpxml", "second"]).ok().contains("<vcpupin vcpu='0' cpuset='1'/>")
    });
    let said = daemon.exec(&["virt-pin", "sync", "second"]).ok();
    assert_eq!(said, "Domain \"second\": its live XML says what its lease says already.\n");
    daemon.virsh(&["managedsave", "second"]).ok();
    daemon.run(&dedicated("first"));
    // The image says CPU 1, which is another's by now.
    let complaint = daemon.start_guest("second").refused();
    assert!(
        complaint.contains("error[cpu.static.conflict]") && complaint.contains("fallback=\"shared\""),
        "{complaint}"
    );
    assert!(daemon.virsh(&["dominfo", "second"]).ok().contains("Managed save:   yes"));
    daemon.assert_on_cpu_1("first");
    daemon.destroy("first");
    daemon.start_guest("second").ok();
    daemon.assert_on_cpu_1("second");
}

#[test]
fn the_place_of_an_autostart_vm_is_kept_for_it() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    daemon.define(&dedicated("boots"));
    daemon.define(&dedicated("other"));
    daemon.virsh(&["autostart", "boots"]).ok();
    let complaint = daemon.start_guest("other").refused();
    let sentence = "virt-pin: error[cpu.placement.reserved]: domain \"other\": there is room only on CPUs set aside for autostart \
                    domains that do not run yet: \"boots\" 1";
    assert!(complaint.contains(sentence), "{complaint}");
    daemon.start_guest("boots").ok();
    daemon.assert_on_cpu_1("boots");
    daemon.destroy("boots");
    // Either way out that the hint names.
    daemon.virsh(&["autostart", "--disable", "boots"]).ok();
    daemon.start_guest("other").ok();
    daemon.destroy("other");
    daemon.virsh(&["autostart", "boots"]).ok();
    daemon.put("/etc/virt-pin/virt-pin.toml", 0o644, format!("{ONE}autostart_reserve = \"prefer\"\n").as_bytes());
    daemon.start_guest("other").ok();
    daemon.assert_on_cpu_1("other");
}

#[test]
fn the_cpu_is_free_after_every_kind_of_end() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    daemon.run(&dedicated("off").powering_off());
    daemon.wait_for_no_lease();
    daemon.run(&dedicated("crash"));
    daemon.kill_qemu("crash");
    daemon.wait_for_no_lease();
    daemon.define(&dedicated("late").without_its_disk());
    daemon.start_guest("late").refused();
    daemon.wait_for_no_lease();
    daemon.run(&dedicated("last"));
    daemon.assert_on_cpu_1("last");
    daemon.kill_daemon();
    daemon.signal(daemon.qemu("last"), "KILL");
    daemon.start_daemon();
    daemon.wait_for_no_lease();
}

#[test]
fn odd_names_go_all_the_way() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    let long = "n".repeat(240);
    for name in
        ["with space", "--help", "...", "it's", "a&quot;b", "tab&#9;in", "虚拟机 😀", "$(id)", "*", "%s", long.as_str()]
    {
        let guest = dedicated(name);
        daemon.define(&guest);
        // virsh by UUID: it would take some of these names for options.
        daemon.virsh(&["start", &guest.uuid()]).ok();
        let lease = daemon.exec(&["virt-pin", "--json", "lease", &guest.uuid()]).ok();
        assert!(lease.contains("\"vcpus\":[1]") && lease.contains("\"state\":\"running\""), "{name}: {lease}");
        daemon.exec(&["virt-pin", "list"]).ok();
        daemon.virsh(&["destroy", &guest.uuid()]).ok();
        daemon.wait_for_no_lease();
    }
}

#[test]
fn iothreads_and_late_vcpus_are_where_the_lease_says() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin("pinnable_cpus = \"0-1\"\n")) else { return };
    let policy = "policy='dedicated' cores='thread' emulator='share' iothreads='share'";
    let guest = Guest::new("late").vcpus(2).current(1).policy(policy).tuning("<iothreads>1</iothreads>");
    daemon.run(&guest);
    let lease = daemon.exec(&["virt-pin", "--json", "lease", "late"]).ok();
    assert!(lease.contains("\"vcpus\":[0,1]"), "both vCPUs are leased for: {lease}");
    assert_eq!(daemon.places("late").0, ["0"]);
    daemon.wait_until("the live XML shows the lease", |daemon| {
        let xml = daemon.virsh(&["dumpxml", "late"]).ok();
        xml.contains("<vcpupin vcpu='1' cpuset='1'/>") && xml.contains("<iothreadpin iothread='1' cpuset='0-1'/>")
    });
    daemon.virsh(&["setvcpus", "late", "2", "--live"]).ok();
    assert_eq!(daemon.places("late").0, ["0", "1"]);
}

#[test]
fn late_threads_are_where_the_lease_says() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    daemon.run(&dedicated("late").tuning("<iothreads>1</iothreads>"));
    daemon.wait_until("the live XML shows the lease", |daemon| {
        daemon.virsh(&["dumpxml", "late"]).ok().contains("<iothreadpin iothread='1' cpuset='0'/>")
    });
    let place = |daemon: &Libvirtd, name: &str| {
        let thread = daemon.threads("late").into_iter().find(|thread| thread.comm == name).unwrap();
        (thread.cpus, thread.cgroup.rsplit('/').next().unwrap().to_owned())
    };
    // Until libvirt is told of it, an I/O thread that was not there at the start may run wherever its VM may.
    daemon.virsh(&["iothreadadd", "late", "7"]).ok();
    assert_eq!(place(&daemon, "IO iothread7"), ("0-1".to_owned(), "iothread7".to_owned()));
    daemon.exec(&["virt-pin", "sync", "late"]).ok();
    assert_eq!(place(&daemon, "IO iothread7"), ("0".to_owned(), "iothread7".to_owned()));
    // A thread of QEMU's that a vCPU's has made lives on that one's CPU: it is taken to the others, and the vCPU stays.
    let others = daemon.threads("late").into_iter().find(|thread| thread.comm == "IO mon_iothread").unwrap();
    let vcpu = "/sys/fs/cgroup/cpuset/machine/qemu-1-late.libvirt-qemu/vcpu0/tasks";
    daemon.exec(&["bash", "-c", &format!("echo {} >{vcpu}", others.tid)]).ok();
    assert_eq!(place(&daemon, "IO mon_iothread"), ("1".to_owned(), "vcpu0".to_owned()));
    daemon.restart_daemon();
    daemon
        .wait_until("it is back", |daemon| place(daemon, "IO mon_iothread") == ("0".to_owned(), "emulator".to_owned()));
    daemon.assert_on_cpu_1("late");
}

#[test]
fn tenants_share_cores_with_nobody_else_or_do_not_start() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    let guest = Guest::new("theirs").policy("policy='dedicated' core-sched='tenant' tenant='acme'");
    daemon.define(&guest);
    let started = daemon.start_guest("theirs");
    // Whether this kernel can is its own business; that it is asked is ours.
    let mut probe = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let scope = rustix::thread::CoreSchedulingScope::Thread;
    let pid = rustix::thread::Pid::from_raw(probe.id().try_into().unwrap()).unwrap();
    let answer = rustix::thread::core_scheduling_cookie(pid, scope);
    probe.kill().unwrap();
    probe.wait().unwrap();
    if matches!(answer, Ok(_) | Err(rustix::io::Errno::NODEV)) {
        started.ok();
        daemon.assert_on_cpu_1("theirs");
        let lease = daemon.exec(&["virt-pin", "--json", "lease", "theirs"]).ok();
        assert!(lease.contains("\"tenant\":\"acme\""), "{lease}");
        return;
    }
    let complaint = started.refused();
    let code = Code::CoreSched;
    // What the manual shows beside the code is what libvirt's user is told.
    let said = virt_pin::manual::guide::entry(code).message().1.next().unwrap().replace("\"db\"", "\"theirs\"");
    assert!(said.contains(&format!("error[{code}]: ")), "{said}");
    assert!(complaint.contains(&format!("exit status {}", code.exit())) && complaint.contains(&said), "{complaint}");
    assert!(!daemon.path("/var/log/libvirt/qemu/theirs.log").exists(), "QEMU was executed");
    let explained = daemon.exec(&["virt-pin", "explain", "theirs"]);
    assert!(format!("{explained:?}").contains("enforce.core-sched"), "{explained:?}");
    assert!(!daemon.path("/run/virt-pin/leases.json").exists(), "a refusal writes nothing");
}

#[test]
fn hand_written_pins_are_respected_both_ways() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    let by_hand = Guest::new("hand").tuning("<cputune><vcpupin vcpu='0' cpuset='1'/></cputune>");
    daemon.run(&by_hand);
    daemon.define(&dedicated("web"));
    let complaint = daemon.start_guest("web").refused();
    assert!(complaint.contains("cpu.placement.shortage") && complaint.contains("held by \"hand\" 1"), "{complaint}");
    daemon.destroy("hand");
    daemon.start_guest("web").ok();
    let complaint = daemon.start_guest("hand").refused();
    assert!(
        complaint.contains("error[cpu.static.conflict]") && complaint.contains("leased to domain \"web\""),
        "{complaint}"
    );
    daemon.assert_on_cpu_1("web");
}

#[test]
fn pins_beside_a_policy_are_taken_or_refused_with_the_way_out() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    let pinned = |cpu: u32| dedicated("both").tuning(&format!("<cputune><vcpupin vcpu='0' cpuset='{cpu}'/></cputune>"));
    daemon.run(&pinned(1));
    daemon.assert_on_cpu_1("both");
    daemon.destroy("both");
    daemon.define(&pinned(0));
    let complaint = daemon.start_guest("both").refused();
    assert!(complaint.contains("error[cpu.xml.stale-pins]") && complaint.contains("take <vcpupin>"), "{complaint}");
    daemon.wait_for_no_lease();
}

#[test]
fn a_lease_outlives_the_daemon_and_a_broken_state_file_kills_nobody() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    daemon.run(&dedicated("lasting"));
    let before = daemon.leases();
    daemon.restart_daemon();
    assert_eq!(daemon.virsh(&["domstate", "lasting"]).ok().trim(), "running");
    assert!(daemon.leases().contains(&dedicated("lasting").uuid()), "{before}");
    daemon.assert_on_cpu_1("lasting");
    daemon.put("/run/virt-pin/leases.json", 0o600, b"{\"version\":1,");
    daemon.restart_daemon();
    assert_eq!(daemon.virsh(&["domstate", "lasting"]).ok().trim(), "running");
    // New leases are refused, and the file is left alone, until somebody rebuilds it.
    daemon.define(&dedicated("new"));
    let complaint = daemon.start_guest("new").refused();
    assert!(complaint.contains("error[state.corrupt]") && complaint.contains("virt-pin reconcile"), "{complaint}");
    assert_eq!(daemon.leases(), "{\"version\":1,");
    let said = daemon.exec(&["virt-pin", "reconcile"]).ok();
    assert!(said.contains("\"lasting\": lease on CPUs 1"), "{said}");
    let complaint = daemon.start_guest("new").refused();
    assert!(complaint.contains("held by \"lasting\" 1"), "{complaint}");
    daemon.destroy("lasting");
    daemon.wait_for_no_lease();
}

#[test]
fn a_saved_vm_comes_back_to_its_cpu() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    daemon.run(&dedicated("saved"));
    daemon.virsh(&["managedsave", "saved"]).ok();
    daemon.wait_for_no_lease();
    daemon.start_guest("saved").ok();
    daemon.assert_on_cpu_1("saved");
    daemon.virsh(&["managedsave", "saved"]).ok();
    daemon.run(&dedicated("other"));
    // Refused at prepare: the image stays.
    let complaint = daemon.start_guest("saved").refused();
    assert!(complaint.contains("error[cpu.placement.shortage]"), "{complaint}");
    assert!(daemon.virsh(&["dominfo", "saved"]).ok().contains("Managed save:   yes"));
    daemon.destroy("other");
    daemon.start_guest("saved").ok();
    daemon.assert_on_cpu_1("saved");
}

#[test]
fn a_policy_may_come_from_the_configuration() {
    let config = "pinnable_cpus = \"1\"\n[[domain]]\nmatch = \"db-*\"\npolicy = \"dedicated\"\n";
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(config)) else { return };
    daemon.run(&Guest::new("db-1"));
    daemon.run(&Guest::new("web"));
    daemon.assert_on_cpu_1("db-1");
    daemon.put("/etc/virt-pin/virt-pin.toml", 0o644, b"pinnable_cpus = \"1\"\npinnable = 1\n");
    daemon.destroy("db-1");
    let complaint = daemon.start_guest("db-1").refused();
    assert!(complaint.contains("error[config.invalid]: /etc/virt-pin/virt-pin.toml:2: pinnable"), "{complaint}");
}

#[test]
fn a_transient_vm_has_its_lease_too() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    daemon.put("/run/transient.xml", 0o600, dedicated("gone").xml().as_bytes());
    daemon.virsh(&["create", "/run/transient.xml"]).ok();
    daemon.assert_on_cpu_1("gone");
    daemon.destroy("gone");
    daemon.wait_for_no_lease();
}

#[test]
fn install_check_uninstall() {
    let options = Options { cli: Options::virt_pin("").cli, ..Options::default() };
    let Some(daemon) = Libvirtd::start(&options) else { return };
    let hook = std::fs::read(env!("CARGO_BIN_EXE_virt-pin-hook")).unwrap();
    daemon.put("/usr/lib/virt-pin/virt-pin-hook", 0o755, &hook);
    daemon.put("/etc/virt-pin/virt-pin.toml", 0o644, ONE.as_bytes());
    let script = b"#!/bin/sh\ntouch /run/theirs\n";
    daemon.put("/etc/libvirt/hooks/qemu", 0o755, script);
    let said = daemon.exec(&["virt-pin", "install"]).ok();
    assert!(said.contains("/etc/libvirt/hooks/qemu.d/10-virt-pin") && said.contains("kill -HUP"), "{said}");
    assert_eq!(daemon.file("/etc/libvirt/hooks/qemu").as_bytes(), script);
    let said = daemon.exec(&["virt-pin", "install"]).ok();
    assert!(said.contains("installed already"), "{said}");
    daemon.reload_daemon();
    daemon.run(&dedicated("web"));
    daemon.assert_on_cpu_1("web");
    daemon.exec(&["test", "-e", "/run/theirs"]).ok();
    let said = daemon.exec(&["virt-pin", "check"]).ok();
    assert!(!said.contains("FAIL") && said.contains("threads of \"web\" are where its lease says"), "{said}");
    // Somebody moves the thread by hand: the check sees it, the next event of the daemon repairs it.
    let vcpu = daemon.threads("web").into_iter().find(|thread| thread.comm.starts_with("CPU ")).unwrap();
    let cgroup = format!("/sys/fs/cgroup/cpuset{}/cpuset.cpus", vcpu.cgroup);
    daemon.exec(&["bash", "-c", &format!("echo 0 >{cgroup}")]).ok();
    let check = daemon.exec(&["virt-pin", "check"]);
    assert_eq!(check.status.code(), Some(3));
    assert!(check.stdout.contains("may run on CPUs 0, not 1"), "{}", check.stdout);
    daemon.restart_daemon();
    daemon.wait_until("the thread is back", |daemon| daemon.places("web").0 == ["1"]);
    let said = daemon.exec(&["virt-pin", "uninstall"]).ok();
    assert!(said.contains("Removed the hook") && said.contains("Left in /run/virt-pin: 1 lease"), "{said}");
    assert_eq!(daemon.file("/etc/libvirt/hooks/qemu").as_bytes(), script);
    daemon.exec(&["test", "!", "-e", "/etc/libvirt/hooks/qemu.d"]).ok();
}

#[test]
fn the_qemu_driver_takes_what_transform_writes() {
    let Some(daemon) = Libvirtd::start(&Options::default()) else { return };
    let cases = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/xml"));
    let mut accepted = 0;
    for case in std::fs::read_dir(cases).unwrap() {
        let case = case.unwrap().path();
        let Ok(output) = std::fs::read(case.join("out.xml")) else { continue };
        let defines = |document: &[u8]| {
            // There is no KVM here.
            let text = String::from_utf8_lossy(document);
            let text = text.replacen("type='kvm'", "type='qemu'", 1).replacen("type=\"kvm\"", "type=\"qemu\"", 1);
            daemon.put("/run/case.xml", 0o600, text.as_bytes());
            let defined = daemon.virsh(&["define", "/run/case.xml"]);
            let name = defined.stdout.split('\'').nth(1).unwrap_or_default();
            if defined.status.success() {
                daemon.virsh(&["undefine", "--domain", name]).ok();
            }
            defined
        };
        if defines(&std::fs::read(case.join("in.xml")).unwrap()).status.success() {
            let defined = defines(&output);
            assert!(defined.status.success(), "{}: {}", case.display(), defined.stderr);
            accepted += 1;
        }
    }
    assert!(accepted > 50, "libvirt took only {accepted} of the inputs: the test says little");
}

#[test]
fn every_decision_is_in_the_journal() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    std::fs::create_dir_all(daemon.path("/run/systemd/journal")).unwrap();
    let journal = std::os::unix::net::UnixDatagram::bind(daemon.path("/run/systemd/journal/socket")).unwrap();
    journal.set_nonblocking(true).unwrap();
    let mut seen: Vec<String> = Vec::new();
    let mut record_with = |parts: &[&str]| {
        let mut datagram = vec![0; 64 << 10];
        while let Ok(length) = journal.recv(&mut datagram) {
            seen.push(fields(&datagram[..length]));
        }
        assert!(seen.iter().any(|record| parts.iter().all(|part| record.contains(part))), "{parts:?} not in {seen:#?}");
    };
    daemon.run(&dedicated("web"));
    let uuid = format!("UUID={}", dedicated("web").uuid());
    record_with(&["SYSLOG_IDENTIFIER=virt-pin\n", "DOMAIN=web\n", &uuid, "CPUS=1\n", "lease granted"]);
    record_with(&["DOMAIN=web\n", "every thread is where the lease says"]);
    daemon.define(&dedicated("second"));
    daemon.start_guest("second").refused();
    record_with(&["DOMAIN=second\n", "CODE=cpu.placement.shortage\n", "PRIORITY=3\n"]);
    daemon.run(&Guest::new("third").policy("policy='dedicated' fallback='shared'"));
    record_with(&["DOMAIN=third\n", "CODE=cpu.placement.shortage\n", "PRIORITY=4\n", "starts without CPUs of its own"]);
    daemon.destroy("web");
    record_with(&["DOMAIN=web\n", "lease ended: the domain has ended"]);
}

/// A record of the journal's native protocol, every field as `NAME=value` on a line: some come as a name, a length of
/// eight bytes and a value.
fn fields(mut datagram: &[u8]) -> String {
    let mut record = String::new();
    while let Some(end) = datagram.iter().position(|&byte| byte == b'\n') {
        let line = String::from_utf8_lossy(&datagram[..end]).into_owned();
        datagram = &datagram[end + 1..];
        if line.contains('=') || datagram.len() < 8 {
            record += &format!("{line}\n");
        } else {
            let (length, rest) = datagram.split_at(8);
            let length = usize::try_from(u64::from_le_bytes(length.try_into().unwrap())).unwrap();
            record += &format!("{line}={}\n", String::from_utf8_lossy(&rest[..length]));
            datagram = &rest[length + 1..];
        }
    }
    record
}

impl Libvirtd {
    /// The machine says that only these CPUs are online; the kernel goes on as before.
    pub(crate) fn pretend_online(&self, cpus: &str) {
        self.put("/run/online", 0o644, format!("{cpus}\n").as_bytes());
        self.exec(&["mount", "--bind", "/run/online", "/sys/devices/system/cpu/online"]).ok();
    }

    pub(crate) fn no_longer_pretend(&self) {
        self.exec(&["umount", "/sys/devices/system/cpu/online"]).ok();
    }
}

#[test]
fn a_running_vm_moves_to_the_other_cpu_when_its_own_has_gone() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin("pinnable_cpus = \"0-1\"\n")) else { return };
    let policy = "policy='dedicated' cores='thread' emulator='share' iothreads='share'";
    daemon.run(&Guest::new("web").policy(policy).tuning("<iothreads>1</iothreads>"));
    let (vcpus, _) = daemon.places("web");
    let (own, other) = if vcpus == ["0"] { ("0", "1") } else { ("1", "0") };
    daemon.assert_held_to("web", own);
    for (gone, left) in [(own, other), (other, own)] {
        daemon.pretend_online(left);
        let said = daemon.exec(&["virt-pin", "reconcile"]).ok();
        assert_eq!(said, format!("\"web\": moved from CPUs {gone} to {left}\n1 lease in all.\n"));
        daemon.assert_held_to("web", left);
        for group in ["", "/emulator", "/vcpu0", "/iothread1"] {
            let file = format!("/sys/fs/cgroup/cpuset/machine/qemu-1-web.libvirt-qemu{group}/cpuset.cpus");
            assert_eq!(daemon.file(&file), format!("{left}\n"), "{file}");
        }
        let xml = daemon.virsh(&["dumpxml", "web"]).ok();
        for pin in ["<vcpupin vcpu='0' ", "<emulatorpin ", "<iothreadpin iothread='1' "] {
            assert!(xml.contains(&format!("{pin}cpuset='{left}'/>")), "{xml}");
        }
        daemon.no_longer_pretend();
        assert_eq!(daemon.exec(&["virt-pin", "reconcile"]).ok(), "1 lease in all.\n");
    }
    daemon.destroy("web");
    daemon.wait_for_no_lease();
}

#[test]
fn without_another_cpu_a_vm_stays_off_everybody_elses_and_goes_back() {
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    daemon.run(&dedicated("web"));
    daemon.pretend_online("0");
    let said = daemon.exec(&["virt-pin", "reconcile"]).ok();
    assert!(said.contains("\"web\": CPUs 1 are offline and there is no other place"), "{said}");
    daemon.assert_held_to("web", "0");
    assert!(daemon.exec(&["virt-pin", "list"]).ok().contains("1 (1 offline)"));
    // What the kernel does on v1 besides: the CPU is in no cgroup any more, and tasks leave one that has no other.
    let tree = "/sys/fs/cgroup/cpuset/machine";
    let vm = format!("{tree}/qemu-1-web.libvirt-qemu");
    let steps =
        format!("cat {vm}/vcpu0/tasks >{vm}/tasks && echo >{vm}/vcpu0/cpuset.cpus && echo 0 >{tree}/cpuset.cpus");
    daemon.exec(&["bash", "-c", &steps]).ok();
    daemon.no_longer_pretend();
    let said = daemon.exec(&["virt-pin", "reconcile"]).ok();
    assert!(said.contains("\"web\": its threads are where its lease says again, on CPUs 1"), "{said}");
    daemon.assert_on_cpu_1("web");
    assert_eq!(daemon.file(&format!("{tree}/cpuset.cpus")), "0-1\n");
    let vcpu = daemon.threads("web").into_iter().find(|thread| thread.comm.starts_with("CPU ")).unwrap();
    assert_eq!(vcpu.cgroup, "/machine/qemu-1-web.libvirt-qemu/vcpu0");
}
