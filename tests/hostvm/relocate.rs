//! Running VMs that go to other CPUs: because theirs have gone offline, or to make room.

use std::collections::BTreeSet;

use virt_pin::cpuset::{CpuId, CpuSet};

use crate::guest::Guest;
use crate::host::{Host, set};
use crate::leases::CONFIG;
use crate::shape::{Debian, Shape};

impl Host {
    fn set_online(&self, cpu: u32, online: bool) {
        self.sh(&format!("echo {} >/sys/devices/system/cpu/cpu{cpu}/online", u8::from(online))).ok();
    }

    /// The scope's CPUs: its cgroup's and its drop-in's.
    fn scope(&self, machine: &str) -> (String, String) {
        let scope = format!(r"machine-{}.scope", machine.replace('-', r"\x2d"));
        let cgroup = self.file(&format!("/sys/fs/cgroup/machine.slice/{scope}/cpuset.cpus"));
        let dropin = self.file(&format!("/run/systemd/system/{scope}.d/50-virt-pin.conf"));
        let allowed = dropin.lines().find_map(|line| line.strip_prefix("AllowedCPUs=")).unwrap_or_default().to_owned();
        (cgroup.trim().to_owned(), allowed)
    }

    /// All of QEMU's memory, guest's and own, is on this node of the two.
    #[track_caller]
    fn assert_memory_on(&self, name: &str, node: u32) {
        let maps = self.sh(&format!("cat /proc/$(cat /run/libvirt/qemu/{name}.pid)/numa_maps")).ok();
        let (here, elsewhere) = (format!(" N{node}="), format!(" N{}=", 1 - node));
        assert!(maps.contains(&here) && !maps.contains(&elsewhere), "{maps}");
    }

    #[track_caller]
    fn assert_kernel_content(&self) {
        let complaints = self.sh("dmesg | grep -E 'WARNING:|BUG:|cut here' || true").ok();
        assert_eq!(complaints, "", "the kernel complains");
    }

    fn pins(&self, name: &str) -> Vec<String> {
        let xml = self.virsh(&["dumpxml", name]).ok();
        let pins = xml.split("<vcpupin ").skip(1).filter_map(|pin| pin.split("cpuset='").nth(1)?.split('\'').next());
        pins.map(str::to_owned).collect()
    }
}

#[test]
fn a_lease_whose_cpu_goes_offline_is_moved_to_a_free_core() {
    let Some(host) = Host::with_virt_pin(Shape::default(), "pinnable_cpus = \"2-7\"\n") else { return };
    host.run(&Guest::new("web").vcpus(4).policy("policy='dedicated'"));
    assert_eq!(host.vcpus("web"), ["2", "3", "4", "5"]);
    host.set_online(3, false);
    // The kernel lets it run anywhere in the scope, and says nothing.
    assert_ne!(host.vcpus("web")[1], "3");
    let check = host.exec(&["virt-pin", "check"]);
    assert!(check.stdout.contains("CPUs 3 are offline"), "{}", check.stdout);
    let said = host.exec(&["virt-pin", "reconcile"]).ok();
    assert!(said.contains("\"web\": moved from CPUs 2-5 to 4-7"), "{said}");
    assert_eq!(host.vcpus("web"), ["6", "7", "4", "5"], "the core that is whole stays");
    assert_eq!(host.pins("web"), ["6", "7", "4", "5"]);
    assert_eq!(host.scope("qemu-1-web"), ("0-1,4-15".to_owned(), "0-1,4-15".to_owned()));
    host.set_online(3, true);
    host.exec(&["systemctl", "daemon-reload"]).ok();
    host.run(&Guest::new("second").vcpus(2).policy("policy='dedicated'"));
    assert_eq!(host.vcpus("second"), ["2", "3"]);
    assert_eq!(host.vcpus("web"), ["6", "7", "4", "5"]);
    let said = host.exec(&["virt-pin", "reconcile"]).ok();
    assert_eq!(said, "2 leases in all.\n");
    let check = host.exec(&["virt-pin", "check"]).ok();
    assert!(!check.contains("FAIL"), "{check}");
    host.virsh(&["destroy", "web"]).ok();
    host.virsh(&["destroy", "second"]).ok();
    assert_eq!(host.sh("ls /run/systemd/system | grep machine-qemu || true").ok(), "");
}

#[test]
fn without_a_free_core_the_vcpu_stays_within_its_lease_and_goes_back() {
    let Some(host) = Host::with_virt_pin(Shape::default(), "pinnable_cpus = \"2-5\"\n") else { return };
    host.run(&Guest::new("web").vcpus(2).policy("policy='dedicated'"));
    host.run(&Guest::new("other").vcpus(2).policy("policy='dedicated'"));
    host.set_online(3, false);
    let said = host.exec(&["virt-pin", "reconcile"]).ok();
    assert!(said.contains("\"web\": CPUs 3 are offline and there is no other place (cpu.placement."), "{said}");
    assert_eq!(host.vcpus("web"), ["2", "2"]);
    assert_eq!(host.vcpus("other"), ["4", "5"]);
    assert_eq!(host.scope("qemu-1-web").0, "0-2,6-15");
    let list = host.exec(&["virt-pin", "list"]).ok();
    assert!(list.split_whitespace().collect::<Vec<_>>().join(" ").contains("2-3 (3 offline)"), "{list}");
    let lease = host.exec(&["virt-pin", "lease", "web"]).ok();
    assert!(lease.contains("Offline:        3 "), "{lease}");
    assert!(host.exec(&["virt-pin", "--json", "lease", "web"]).ok().contains("\"offline\":\"3\""));
    let check = host.exec(&["virt-pin", "check"]).ok();
    assert!(check.contains("CPUs 3 are offline; what ran there belongs"), "{check}");
    // Coming back is enough, and so is the daemon.
    host.set_online(3, true);
    let said = host.exec(&["virt-pin", "reconcile"]).ok();
    assert!(said.contains("\"web\": its threads are where its lease says again, on CPUs 2-3"), "{said}");
    assert_eq!(host.vcpus("web"), ["2", "3"]);
    assert_eq!(host.scope("qemu-1-web"), ("0-3,6-15".to_owned(), "0-3,6-15".to_owned()));
    host.set_online(5, false);
    host.exec(&["systemctl", "restart", "libvirtd"]).ok();
    host.wait_until("reconnect holds it", |host| host.vcpus("other") == ["4", "4"]);
    host.set_online(5, true);
    host.exec(&["systemctl", "restart", "libvirtd"]).ok();
    host.wait_until("reconnect puts it back", |host| host.vcpus("other") == ["4", "5"]);
}

/// Wherever the mover is killed, the lease holds both places, nobody is outside it, and the next one brings it to an end.
#[test]
fn a_move_may_end_anywhere() {
    let Some(host) = Host::with_virt_pin(Shape::default(), "pinnable_cpus = \"2-7\"\n") else { return };
    host.run(&Guest::new("web").vcpus(2).policy("policy='dedicated'"));
    let cpus = |host: &Host| set(&host.vcpus("web").join(","));
    for at in ["recorded", "begun", "grown", "seated", "bound", "shrunk", "settled", "committed"] {
        let before = host.vcpus("web");
        let (first, gone): (u16, u32) = (before[0].parse().unwrap(), before[1].parse().unwrap());
        host.set_online(gone, false);
        let killed = host.sh(&format!("VIRT_PIN_CRASH_AT={at} virt-pin reconcile"));
        assert_eq!(killed.status, 128 + 6, "{at}: {}{}", killed.stdout, killed.stderr);
        let lease: serde_json::Value =
            serde_json::from_str(&host.exec(&["virt-pin", "--json", "lease", "web"]).ok()).unwrap();
        let held = set(lease["cpus"].as_str().unwrap());
        // As long as nobody has done anything for it, its homeless thread is where the kernel put it.
        if !matches!(at, "recorded" | "begun" | "grown" | "seated") {
            assert!(cpus(&host).is_subset(&held), "{at}: {:?} {held:?}", cpus(&host));
        }
        if at != "committed" {
            assert_eq!(lease["moving_to"].as_str().map(|to| set(to).len()), Some(2), "{at}: {lease}");
            assert!(held.contains(CpuId(first)) && held.len() == 4, "{at}: {lease}");
        }
        let said = host.exec(&["virt-pin", "reconcile"]).ok();
        let after = host.vcpus("web");
        assert!(!after.contains(&gone.to_string()) && after[0] != after[1], "{at}: {said}{after:?}");
        let check = host.exec(&["virt-pin", "check"]).ok();
        assert!(!check.contains("FAIL"), "{at}: {check}");
        host.set_online(gone, true);
    }
}

/// A VM that is to be alone on its CPUs: wherever it goes, whoever is killed on the way, and again once its CPUs are back.
#[test]
fn a_vm_that_is_alone_moves_with_its_partitions() {
    let Some(host) = Host::with_virt_pin(Shape::default(), "pinnable_cpus = \"2-7\"\n") else { return };
    let vcpus = ["CPU 0/TCG", "CPU 1/TCG"].map(str::to_owned);
    let alone = |host: &Host, at: &str| {
        let cpus = host.leased("alone");
        let line = host.check_line("nothing but \"alone\" runs on its CPUs");
        assert!(line.ends_with("PASS"), "{at}: {line}");
        assert_eq!(host.on(&cpus), vcpus.clone().into(), "{at}");
        let exclusive = host.file("/sys/fs/cgroup/machine.slice/cpuset.cpus.exclusive");
        assert_eq!(exclusive.trim(), cpus.to_string(), "{at}");
        let check = host.exec(&["virt-pin", "check"]).ok();
        assert!(!check.contains("FAIL"), "{at}: {check}");
    };
    host.run(&Guest::new("shared"));
    host.run(&Guest::new("alone").vcpus(2).policy("policy='dedicated' isolation='partition' irqs='away'"));
    alone(&host, "started");
    // Somebody asks for the very core that it has.
    for core in [2, 4, 6] {
        let policy = format!("policy='dedicated' cpus='{core}-{}'", core + 1);
        host.define(&Guest::new(&format!("wants-{core}")).vcpus(2).policy(&policy));
    }
    for at in ["recorded", "dissolved", "seated", "isolated", "settled", "-"] {
        let before = host.vcpus("alone");
        let moved = host.sh(&format!("VIRT_PIN_CRASH_AT={at} virt-pin repack --for wants-{}", before[0]));
        assert_eq!(moved.status, if at == "-" { 0 } else { 128 + 6 }, "{at}: {}{}", moved.stdout, moved.stderr);
        let said = host.exec(&["virt-pin", "reconcile"]).ok();
        let after = host.vcpus("alone");
        assert!(after[0] != before[0] && after[1] != before[1], "{at}: {after:?} {said}");
        alone(&host, at);
        crate::needs::say(&format!("moved from {before:?} to {after:?}, killed at {at}"));
    }
    host.assert_kernel_content();
}

/// Where there is no other place it waits for its CPU, and the agent sees that it is back; services follow who moves.
#[test]
fn the_agent_sees_cpus_of_isolated_vms_come_and_go() {
    let Some(host) = Host::with_virt_pin(Shape::default(), "pinnable_cpus = \"2-7\"\n") else { return };
    host.run(&Guest::new("beside").vcpus(4).policy("policy='dedicated' isolation='slices'"));
    host.run(&Guest::new("alone").vcpus(2).policy("policy='dedicated' isolation='partition'"));
    let (gone, beside): (u32, CpuSet) = (host.vcpus("alone")[0].parse().unwrap(), host.leased("beside"));
    host.sh("setsid virt-pin agent >/run/agent.log 2>&1 </dev/null &").ok();
    host.set_online(gone, false);
    host.wait_until("it is held to the other", |host| host.vcpus("alone")[0] == host.vcpus("alone")[1]);
    host.set_online(gone, true);
    host.wait_until("it is back", |host| host.vcpus("alone")[0] == gone.to_string());
    host.wait_until("it is alone again", |host| host.check_line("nothing but \"alone\"").ends_with("PASS"));
    let services = |host: &Host| host.exec(&["systemctl", "show", "--property", "AllowedCPUs", "system.slice"]).ok();
    let kept = |cpus: &CpuSet| format!("AllowedCPUs={}\n", set("0-15").difference(cpus).to_string().replace(',', " "));
    assert_eq!(services(&host), kept(&beside));
    host.virsh(&["destroy", "alone"]).ok();
    let gone = beside.first().unwrap();
    host.set_online(gone.0.into(), false);
    host.wait_until("it has moved", |host| host.leased("beside") != beside && !host.leased("beside").contains(gone));
    host.wait_until("services follow", |host| services(host) == kept(&host.leased("beside")));
    host.assert_kernel_content();
}

/// Where libvirt makes the cgroup itself, or v1 takes CPUs that go offline out of all.
fn moves_on(shape: Shape, machined: bool) -> Option<Host> {
    let host = Host::with_virt_pin(shape, CONFIG)?;
    if !machined {
        host.without_machined();
    }
    host.run(&Guest::new("shared"));
    host.run(&Guest::new("web").vcpus(4).policy("policy='dedicated'").tuning("<iothreads>1</iothreads>"));
    host.assert_bound("web", &["2", "3", "4", "5"]);
    host.set_online(3, false);
    let said = host.exec(&["virt-pin", "reconcile"]).ok();
    assert!(said.contains("\"web\": moved from CPUs 2-5 to 4-7"), "{said}");
    host.assert_bound("web", &["6", "7", "4", "5"]);
    assert_eq!(host.pins("web"), ["6", "7", "4", "5"]);
    host.set_online(3, true);
    // On v1 nobody gives back to the cgroup above what it has lost.
    host.sh("cd /sys/fs/cgroup/cpuset/machine.slice 2>/dev/null && cat ../cpuset.cpus >cpuset.cpus; true").ok();
    host.exec(&["virt-pin", "reconcile"]).ok();
    host.exec(&["systemctl", "restart", "libvirtd"]).ok();
    assert!(host.virsh(&["list", "--name"]).ok().contains("web\n"));
    host.run(&Guest::new("second").vcpus(2).policy("policy='dedicated' cpus='2-3'"));
    host.assert_bound("second", &["2", "3"]);
    host.assert_bound("web", &["6", "7", "4", "5"]);
    let check = host.exec(&["virt-pin", "check"]).ok();
    assert!(!check.contains("FAIL"), "{check}");
    for name in ["web", "second"] {
        host.virsh(&["destroy", name]).ok();
        host.virsh(&["undefine", name]).ok();
    }
    Some(host)
}

#[test]
fn a_lease_moves_on_v2_without_machined() {
    let Some(host) = moves_on(Shape::default(), false) else { return };
    // There other VMs' cgroups are beside a partition of a whole VM: not made.
    let whole = "policy='dedicated' isolation='partition' emulator='share' iothreads='share'";
    host.define(&Guest::new("whole").vcpus(2).policy(whole));
    let said = host.virsh(&["start", "whole"]).refused();
    assert!(said.contains("host.isolation.unsupported") && said.contains("needs systemd-machined"), "{said}");
    host.virsh(&["undefine", "whole"]).ok();
    host.run(&Guest::new("alone").vcpus(2).policy("policy='dedicated' isolation='partition'"));
    host.run(&Guest::new("late").vcpus(2).policy("policy='dedicated'"));
    let partition = "nothing but \"alone\" runs on its CPUs";
    assert!(host.check_line(partition).ends_with("PASS"));
    host.virsh(&["vcpupin", "late", "0", "2"]).refused();
    assert!(host.check_line(partition).ends_with("PASS"));
    host.virsh(&["destroy", "late"]).ok();
    host.define(&Guest::new("wants").vcpus(2).policy("policy='dedicated' cpus='2-3'"));
    let said = host.exec(&["virt-pin", "repack", "--for", "wants"]).ok();
    assert!(said.contains("Moved \"alone\" from CPUs 2-3 to "), "{said}");
    assert!(host.check_line(partition).ends_with("PASS"));
    host.assert_kernel_content();
}

#[test]
fn a_lease_moves_on_v1_with_machined() {
    moves_on(Shape::default().debian(Debian::Bookworm).cgroup_v1(), true);
}

#[test]
fn running_vms_move_to_make_room() {
    let Some(host) = Host::with_virt_pin(Shape::default(), "pinnable_cpus = \"4-7,12-15\"\n") else { return };
    let dedicated =
        |name: &str, vcpus| Guest::new(name).vcpus(vcpus).memory(32).policy("policy='dedicated' numa='single'");
    host.sh("for node in 0 1; do
                 echo 32 >/sys/devices/system/node/node$node/hugepages/hugepages-2048kB/nr_hugepages
             done")
        .ok();
    host.run(&dedicated("a", 2).tuning("<memoryBacking><hugepages/></memoryBacking>"));
    host.run(&dedicated("filler", 2));
    host.run(&dedicated("b", 2));
    host.virsh(&["destroy", "filler"]).ok();
    host.run(&Guest::new("shared"));
    assert_eq!(host.vcpus("a"), ["4", "5"]);
    assert_eq!(host.vcpus("b"), ["12", "13"]);
    host.define(&dedicated("big", 4));
    let complaint = host.virsh(&["start", "big"]).refused();
    assert!(complaint.contains("cpu.placement.needs-repack"), "{complaint}");
    let explained = host.exec(&["virt-pin", "explain", "big"]);
    assert!(explained.stderr.contains("virt-pin repack --for DOMAIN"), "{}", explained.stderr);
    let planned = host.exec(&["virt-pin", "repack", "--dry-run", "--for", "big"]).ok();
    assert_eq!(planned, "Would move \"a\" from CPUs 4-5 to 14-15.\nThen there would be room for big.\n");
    // Everybody's threads, again and again; those of the VM without a lease before and after the others'.
    let script = "#!/bin/bash
pid() { cat /run/libvirt/qemu/$1.pid; }
s=$(pid shared) a=$(pid a) b=$(pid b)
echo $s $a $b
while :; do
    grep Cpus_allowed_list: /proc/$s/task/*/status /proc/$a/task/*/status /proc/$b/task/*/status /proc/$s/task/*/status
    echo =
done
";
    host.put("/run/observe.sh", 0o755, script.as_bytes());
    host.sh("setsid /run/observe.sh >/run/observed 2>/dev/null </dev/null & echo $! >/run/observer").ok();
    let moved = host.exec(&["virt-pin", "repack", "--for", "big"]);
    assert_eq!(moved.stderr, "moving \"a\" from CPUs 4-5 to 14-15\n");
    assert_eq!(moved.ok(), "Moved \"a\" from CPUs 4-5 to 14-15.\nNow there is room for big.\n");
    host.sh("kill $(cat /run/observer)").ok();
    assert_eq!(host.vcpus("a"), ["14", "15"]);
    assert_eq!(host.pins("a"), ["14", "15"]);
    host.assert_memory_on("a", 1);
    let seen = observed(&host.file("/run/observed"));
    assert!(seen > 10, "the observer saw {seen} states");
    crate::needs::say(&format!("observed {seen} times while one VM moved"));
    host.virsh(&["start", "big"]).ok();
    assert_eq!(host.vcpus("big"), ["4", "5", "6", "7"]);
    assert_eq!(host.vcpus("b"), ["12", "13"]);
    let check = host.exec(&["virt-pin", "check"]).ok();
    assert!(!check.contains("FAIL"), "{check}");
    let said = host.exec(&["virt-pin", "repack"]).ok();
    assert!(said.starts_with("Nothing is to be gained"), "{said}");
    // And back, with the mover killed when the memory has gone and the lease does not say so yet.
    host.virsh(&["destroy", "big"]).ok();
    host.virsh(&["destroy", "b"]).ok();
    host.define(&dedicated("wide", 4).policy("policy='dedicated' nodes='1'"));
    let killed = host.sh("VIRT_PIN_CRASH_AT=memory virt-pin repack --for wide");
    assert_eq!(killed.status, 128 + 6, "{}{}", killed.stdout, killed.stderr);
    let lease = host.exec(&["virt-pin", "lease", "a"]).ok();
    assert!(lease.contains("CPUs held:      4-5,14-15\nMoving to:      4-5\n"), "{lease}");
    assert!(host.exec(&["virt-pin", "check"]).ok().contains("`virt-pin reconcile` ends the move"));
    // A hook does not wait for memory.
    host.virsh(&["start", "wide"]).refused();
    let said = host.exec(&["virt-pin", "reconcile"]).ok();
    assert!(said.contains("\"a\": moved from CPUs 14-15 to 4-5"), "{said}");
    assert_eq!((host.vcpus("a"), host.pins("a")), (list_of(&["4", "5"]), list_of(&["4", "5"])));
    host.assert_memory_on("a", 0);
    host.virsh(&["start", "wide"]).ok();
    assert_eq!(host.vcpus("wide"), ["12", "13", "14", "15"]);
    let check = host.exec(&["virt-pin", "check"]).ok();
    assert!(!check.contains("FAIL"), "{check}");
}

fn list_of(items: &[&str]) -> Vec<String> {
    items.iter().map(|item| (*item).to_owned()).collect()
}

/// How many states were seen; in none of them has a leased CPU two users.
#[track_caller]
fn observed(text: &str) -> usize {
    let (pids, text) = text.split_once('\n').unwrap();
    let [shared, a, b] = pids.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let mut states = text.split("=\n").collect::<Vec<_>>();
    states.pop();
    for state in &states {
        // `/proc/PID/task/TID/status:Cpus_allowed_list:\tLIST`
        let mut groups: Vec<(&str, BTreeSet<u16>)> = Vec::new();
        for line in state.lines() {
            let (pid, cpus) = (line.split('/').nth(2).unwrap(), set(line.rsplit('\t').next().unwrap()));
            if groups.last().is_none_or(|(last, _)| *last != pid) {
                groups.push((pid, BTreeSet::new()));
            }
            groups.last_mut().unwrap().1.extend(cpus.iter().map(|cpu| cpu.0).filter(|cpu| is_pinnable(*cpu)));
        }
        let order: Vec<&str> = groups.iter().map(|(pid, _)| *pid).collect();
        assert_eq!(order, [shared, a, b, shared], "{state}");
        // What the one without a lease had both before and after the others.
        let without: BTreeSet<u16> = groups[0].1.intersection(&groups[3].1).copied().collect();
        let (a, b) = (&groups[1].1, &groups[2].1);
        assert!(a.is_disjoint(b) && a.is_disjoint(&without) && b.is_disjoint(&without), "{state}");
    }
    states.len()
}

fn is_pinnable(cpu: u16) -> bool {
    matches!(cpu, 4..=7 | 12..=15)
}
