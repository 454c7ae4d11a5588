//! Two owners of a CPU, or a VM ended by us: the ways in which that could come about, through the built programs.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    clippy::cast_possible_truncation,
    reason = "integration tests"
)]

mod machine;

use machine::{Machine, Vm};
use serde_json::json;
use virt_pin::error::Code;

/// A cgroup v1 machine whose VMs' cgroup reaches these CPUs.
fn reaching(machine: &Machine, cpus: &str) {
    machine.put("/proc/mounts", "cgroup /cg cgroup rw,cpuset 0 0\n");
    machine.put("/cg/machine/cpuset.effective_cpus", cpus);
}

#[test]
fn damaged_state_ends_nobody_who_holds_nothing() {
    let machine = Machine::new("2-3,10-11");
    let (shared, dedicated) = (Vm::new(1, 1).without_policy(), Vm::new(2, 2));
    let by_hand = Vm::new(3, 1).without_policy().pinned(&[6]);
    for text in ["{\"version\":1,", "{\"version\":3,\"leases\":[]}"] {
        machine.put("/run/virt-pin/leases.json", text);
        machine.event(&shared, "prepare begin").silent();
        machine.event(&shared, "started begin").silent();
        machine.event(&by_hand, "started begin").silent();
        let code = if text.contains('3') { Code::StateNewer } else { Code::StateCorrupt };
        machine.event(&dedicated, "prepare begin").refused(code);
        machine.event(&dedicated, "started begin").refused(code);
        machine.event(&dedicated, "reconnect begin").reported(code);
        assert_eq!(machine.leases().unwrap(), text);
    }
}

#[test]
fn cpus_out_of_reach_are_nobodys_housekeeping_cpus() {
    let machine = Machine::new("2-7,10-15");
    reaching(&machine, "0-5,8-13");
    let plan = machine.json(&["--pinnable", "2-7,10-15", "capacity"]);
    assert_eq!((&plan["housekeeping"], &plan["out_of_reach"]), (&json!("0-1,8-9"), &json!("6-7,14-15")));
    // And what the parent lacks of the housekeeping CPUs is not planned with.
    reaching(&machine, "1-15");
    assert_eq!(machine.json(&["capacity"])["housekeeping"], "1,8-9");
}

#[test]
fn an_event_of_another_attempt_takes_nothing_away() {
    let machine = Machine::new("2-3,10-11");
    let vm = Vm::new(1, 4);
    machine.prepare(&vm);
    let before = machine.leases();
    // A restore or migration of the same UUID has no VM object in libvirt, so nothing keeps it from coming now.
    machine.event(&vm, "restore begin").printed();
    machine.event(&vm, "migrate begin").printed();
    machine.event(&Vm::new(1, 4).without_policy(), "restore begin").silent();
    assert_eq!(machine.leases(), before);
}

#[test]
fn a_provisional_lease_with_a_living_qemu_does_not_expire() {
    let machine = Machine::new("2-3,10-11");
    let vm = Vm::new(1, 4);
    machine.event(&vm, "migrate begin").printed();
    machine.put("/proc/uptime", "2000.00 1.00\n");
    {
        let _alive = machine.alive(&vm);
        machine.event(&Vm::new(2, 4), "prepare begin").refused(Code::Shortage);
    }
    machine.prepare(&Vm::new(2, 4));
}

#[test]
fn what_cannot_be_told_is_not_taken_for_an_end() {
    let machine = Machine::new("2-3,10-11");
    let vm = Vm::new(1, 4);
    machine.prepare(&vm);
    machine.qemu(&vm, 700, &[2, 10, 3, 11], "0-1,4-9,12-15");
    machine.event(&vm, "started begin").silent();
    let before = machine.leases();
    // Something that is there and cannot be read as a process.
    std::fs::remove_file(machine.path("/proc/700/stat")).unwrap();
    std::fs::create_dir(machine.path("/proc/700/stat")).unwrap();
    machine.event(&Vm::new(2, 4), "prepare begin").refused(Code::HostIo);
    assert_eq!(machine.leases(), before);
    // A main thread that is a zombie while another thread hangs in the kernel.
    std::fs::remove_dir(machine.path("/proc/700/stat")).unwrap();
    machine.put("/proc/700/stat", &machine::stat(700, 'Z', 5000));
    machine.event(&Vm::new(2, 4), "prepare begin").refused(Code::Shortage);
    assert_eq!(machine.leases(), before);
}

#[test]
fn workers_of_an_iothread_are_at_home_with_it() {
    let machine = Machine::new("2-3,10-11");
    machine.put("/proc/mounts", "cgroup2 /cg cgroup2 rw 0 0\n");
    machine.put("/cg/cgroup.controllers", "cpuset\n");
    // With machined its cgroups are systemd's to make.
    machine.put("/run/systemd/system/machine.slice", "");
    machine.put("/usr/share/dbus-1/system-services/org.freedesktop.machine1.service", "");
    let vm = Vm::new(1, 2).with("iothreads='isolate'").body("<iothreads>1</iothreads>");
    machine.prepare(&vm);
    machine.qemu(&vm, 700, &[2, 10], "0-1,4-9,12-15");
    for (tid, name) in [(710, "IO iothread1"), (711, "worker")] {
        machine.thread(700, tid, name, "3,11");
        machine.put(&format!("/proc/700/task/{tid}/cgroup"), "0::/m/libvirt/iothread1\n");
    }
    machine.put("/cg/m/libvirt/iothread1/cpuset.cpus", "3,11\n");
    machine.event(&vm, "started begin").silent();
    assert_eq!(machine.read("/cg/m/libvirt/iothread1/cpuset.cpus"), "3,11\n");
    // The same name in the emulator's cgroup is the emulator's.
    machine.put("/proc/700/task/711/cgroup", "0::/m/libvirt/emulator\n");
    machine.put("/cg/m/libvirt/emulator/cpuset.cpus", "0\n");
    let said = machine.event(&vm, "reconnect begin").reported(Code::ThreadMisplaced);
    assert!(said.contains("an emulator thread (\"worker\", tid 711) may run on CPUs 3,11"), "{said}");
}

#[test]
fn a_sibling_that_comes_online_belongs_to_its_core() {
    let machine = Machine::new("2-3,10-11");
    let online = |cpus: &str| machine.put("/sys/devices/system/cpu/online", cpus);
    // CPU 10 is offline: core 2 is one thread.
    online("0-9,11-15\n");
    machine.put("/sys/devices/system/cpu/cpu2/topology/core_cpus_list", "2\n");
    let vm = Vm::new(1, 1);
    machine.prepare(&vm);
    assert_eq!(machine.vcpus_of(&vm), [2]);
    online("0-15\n");
    machine.put("/sys/devices/system/cpu/cpu2/topology/core_cpus_list", "2,10\n");
    let thread = Vm::new(2, 1).with("cores='thread'");
    machine.prepare(&thread);
    assert_eq!(machine.vcpus_of(&thread), [3]);
    machine.prepare(&Vm::new(3, 1).with("cores='thread'"));
    machine.event(&Vm::new(4, 1).with("cores='thread'"), "prepare begin").refused(Code::Shortage);
}

#[test]
fn every_kind_of_pin_by_hand_counts() {
    let machine = Machine::new("2-3,10-11");
    machine.prepare(&Vm::new(1, 2));
    for pin in ["<emulatorpin cpuset='2'/>", "<vcpupin vcpu='0' cpuset='10'/>"] {
        let vm = Vm::new(2, 1).without_policy().body(&format!("<cputune>{pin}</cputune>"));
        machine.event(&vm, "prepare begin").refused(Code::StaticConflict);
    }
}

#[test]
fn a_domain_that_says_it_is_shared_needs_no_configuration() {
    let machine = Machine::new("2-3");
    machine.config("pinnable_cpus = 3\n");
    let shared = Vm::new(1, 1).xml().replace("policy='dedicated'", "policy='shared'");
    machine.event(&Vm::new(2, 1), "prepare begin").refused(Code::ConfigInvalid);
    machine.event(&Vm::new(3, 1).without_policy(), "prepare begin").refused(Code::ConfigInvalid);
    machine.hook(&["vm1", "prepare", "begin", "-"], shared).silent();
}

#[test]
fn a_cgroup_left_behind_confines_no_stranger() {
    let machine = Machine::new("2-3,10-11");
    reaching(&machine, "0-15");
    // Two names that libvirt reduces to the same.
    let left = machine.path("/cg/machine/qemu-1.libvirt-qemu/vcpu0");
    std::fs::create_dir_all(&left).unwrap();
    machine.event(&Vm::new(1, 1).named("虚拟机").without_policy(), "prepare begin").silent();
    assert!(!left.exists() && machine.path("/cg/machine").exists());
    // Nor one that is pinned by hand, nor one that is degraded.
    for vm in [Vm::new(1, 1).without_policy().pinned(&[6]), Vm::new(1, 6).with("fallback='shared'")] {
        std::fs::create_dir_all(machine.path("/cg/machine/qemu-1-vm1.libvirt-qemu/vcpu0")).unwrap();
        assert_eq!(machine.event(&vm, "prepare begin").code, Some(0));
        assert!(!machine.path("/cg/machine/qemu-1-vm1.libvirt-qemu").exists() && machine.path("/cg/machine").exists());
        machine.event(&vm, "release end shutdown").silent();
    }
}

#[test]
fn a_policy_that_has_changed_is_not_answered_by_an_old_lease() {
    let machine = Machine::new("2-5,10-13");
    machine.event(&Vm::new(1, 2), "migrate begin").printed();
    assert_eq!(machine.vcpus_of(&Vm::new(1, 2)), [2, 10]);
    machine.prepare(&Vm::new(1, 2).with("nodes='1'"));
    assert_eq!(machine.vcpus_of(&Vm::new(1, 2)), [4, 12]);
}

/// cgroup v2 with machined. A partition elsewhere, CPUs passed on within the VMs' own slice, and one that has lost its CPUs.
#[test]
fn what_another_service_has_for_itself_is_nobodys() {
    let machine = Machine::new("2-7,10-15");
    machine.put("/proc/mounts", "cgroup2 /cg cgroup2 rw 0 0\n");
    machine.put("/cg/cgroup.controllers", "cpuset cpu\n");
    machine.put("/cg/cgroup.procs", "");
    machine.put("/run/systemd/system/x", "");
    machine.put("/usr/share/dbus-1/system-services/org.freedesktop.machine1.service", "");
    machine.put("/cg/machine.slice/cpuset.cpus.effective", "0-2,5-10,13-15\n");
    machine.put("/cg/machine.slice/cpuset.cpus.exclusive.effective", "3-4,11-12\n");
    machine.put("/cg/pods.slice/cpuset.cpus.partition", "isolated\n");
    machine.put("/cg/pods.slice/cpuset.cpus.exclusive.effective", "3,11\n");
    machine.put("/cg/machine.slice/other.service/cpuset.cpus.exclusive", "4,12\n");
    machine.put("/cg/invalid.slice/cpuset.cpus.partition", "root invalid (Parent is not a partition root)\n");
    machine.put("/cg/invalid.slice/cpuset.cpus", "5\n");
    machine.put("/cg/system.slice/cpuset.cpus", "");
    machine.put("/cg/system.slice/docker-1.scope/cpuset.cpus", "6-7\n");
    let capacity = machine.json(&["capacity"]);
    assert_eq!((&capacity["out_of_reach"], &capacity["housekeeping"]), (&json!("3-4,11-12"), &json!("0-1,8-9")));
    assert_eq!(capacity["free"], json!("2,5-7,10,13-15"));
    let check = machine.cli(&["check"]).complaint(Code::CheckFailed) + &machine.cli(&["check"]).stdout;
    let check = check.split_whitespace().collect::<Vec<_>>().join(" ");
    let owners = "WARN cgroup /pods.slice has CPUs 3,11 for itself (a cpuset partition); cgroup /machine.slice/other.service has \
                  CPUs 4,12 for itself (cpuset.cpus.exclusive): never handed out";
    assert!(check.contains(owners), "{check}");
    assert!(
        check.contains(
            "WARN /invalid.slice may use CPUs 5 alone; /system.slice/docker-1.scope may use CPUs 6-7 alone: what"
        ),
        "{check}"
    );
    // Who asks for more is told where the rest is.
    let run = machine.event(&Vm::new(1, 10), "prepare begin");
    run.refused(Code::Unsatisfiable);
    let because =
        "  because: cgroup /pods.slice has CPUs 3,11 for itself (a cpuset partition); cgroup /machine.slice/other";
    assert!(run.stderr.contains(because), "{}", run.stderr);
}
