//! The host's own work kept off leased CPUs: what the hook changes on a described host, and that it is as before afterwards.
//!
//! What the kernel and systemd make of it only a real host shows: `hostvm/isolation.rs`.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    reason = "integration tests"
)]

mod machine;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;

use machine::{Machine, Vm};
use virt_pin::error::Code;

const CGROUP: &str = "/sys/fs/cgroup";

/// Something done to a host.
type Change<'a> = &'a dyn Fn(&Machine);

/// Stands in for systemd's: does what it is told at once, and leaves the drop-in that systemd would.
const SYSTEMCTL: &str = r#"#!/bin/sh
[ "$*" = "--no-ask-password --runtime set-property -- $5 ${6}" ] || exit 64
root=${0%/usr/bin/systemctl}
cpus=${6#AllowedCPUs=}
mkdir -p "$root/run/systemd/system.control/$5.d"
echo "[Slice]
AllowedCPUs=
AllowedCPUs=$cpus" >"$root/run/systemd/system.control/$5.d/50-AllowedCPUs.conf"
[ -z "$cpus" ] || echo "$cpus" >"$root/sys/fs/cgroup/$5/cpuset.cpus"
[ ! -e "$root/kill-the-hook" ] || kill -9 $PPID
"#;

/// A host with systemd, machined and cgroup v2 whose kernel knows remote partitions; CPUs 0 and 8 are the host's.
fn host() -> Machine {
    let machine = Machine::new("1-7,9-15");
    machine.put("/proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n");
    machine.put(&format!("{CGROUP}/cgroup.controllers"), "cpuset cpu memory\n");
    machine.put(&format!("{CGROUP}/cpuset.cpus.effective"), "0-15\n");
    for (unit, cpus) in [("system.slice", "\n"), ("user.slice", "0-9\n"), ("init.scope", "\n"), ("machine.slice", "\n")]
    {
        machine.put(&format!("{CGROUP}/{unit}/cpuset.cpus"), cpus);
        machine.put(&format!("{CGROUP}/{unit}/cpuset.cpus.exclusive"), "\n");
    }
    machine.put(&format!("{CGROUP}/dev-hugepages.mount/cpuset.cpus"), "\n");
    machine.put("/run/systemd/system.control/user.slice.d/50-AllowedCPUs.conf", "[Slice]\nAllowedCPUs=0-9\n");
    machine.put("/usr/share/dbus-1/system-services/org.freedesktop.machine1.service", "");
    machine.put("/usr/bin/systemctl", SYSTEMCTL);
    fs::set_permissions(machine.path("/usr/bin/systemctl"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir_all(machine.path("/run/systemd/system")).unwrap();
    machine.put("/proc/irq/default_smp_affinity", "ffff\n");
    for (irq, cpus) in [(4, "0-15"), (5, "1,9"), (6, "0")] {
        machine.put(&format!("/proc/irq/{irq}/smp_affinity_list"), &format!("{cpus}\n"));
    }
    machine
}

/// Everything but what virt-pin keeps for itself.
fn outside(machine: &Machine) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
    let mut found = machine.everything();
    found.retain(|path, _| !path.starts_with(machine.path("/run/virt-pin")));
    found
}

fn units(machine: &Machine) -> [String; 3] {
    ["system.slice", "user.slice", "init.scope"].map(|unit| machine.read(&format!("{CGROUP}/{unit}/cpuset.cpus")))
}

/// The domain's QEMU runs: threads, and the cgroups that libvirt has made for them.
fn runs(machine: &Machine, vm: &Vm, pid: u32) -> String {
    let cpus = machine.vcpus_of(vm);
    machine.qemu(vm, pid, &cpus, "0,8");
    let base = format!("/machine.slice/machine-qemu\\x2d{0}\\x2d{1}.scope/libvirt", vm.id.unwrap(), vm.name);
    for (vcpu, cpu) in cpus.iter().enumerate() {
        machine.put(&format!("/proc/{pid}/task/{}/cgroup", pid + 1 + vcpu as u32), &format!("0::{base}/vcpu{vcpu}\n"));
        let cgroup = format!("{CGROUP}{base}/vcpu{vcpu}");
        machine.put(&format!("{cgroup}/cpuset.cpus"), &format!("{cpu}\n"));
        machine.put(&format!("{cgroup}/cgroup.subtree_control"), "\n");
        machine.put(&format!("{cgroup}/cgroup.threads"), &format!("{}\n", pid + 1 + vcpu as u32));
        // As the kernel has them in a new cgroup.
        machine.put(&format!("{cgroup}/cpuset.cpus.exclusive"), "\n");
        machine.put(&format!("{cgroup}/virt-pin/cpuset.cpus.exclusive"), "\n");
        machine.put(&format!("{cgroup}/virt-pin/cpuset.cpus.partition"), "member\n");
        machine.put(&format!("{cgroup}/virt-pin/cgroup.threads"), "");
    }
    for dir in [base.as_str(), base.rsplit_once('/').unwrap().0] {
        machine.put(&format!("{CGROUP}{dir}/cpuset.cpus.exclusive"), "\n");
    }
    base
}

/// The domain has ended, and its cgroup with it.
fn ends(machine: &Machine, vm: &Vm, pid: u32, base: &str) {
    machine.gone(pid);
    fs::remove_file(machine.path(&format!("/run/libvirt/qemu/{}.xml", vm.name))).unwrap();
    fs::remove_dir_all(machine.path(&format!("{CGROUP}{}", base.rsplit_once('/').unwrap().0))).unwrap();
    machine.event(vm, "release end shutdown").silent();
}

#[test]
fn a_host_that_cannot_says_so_before_qemu() {
    let cases: [(&str, Change<'_>, &str); 5] = [
        (
            "partition",
            &|machine| machine.put("/proc/mounts", "proc /proc proc rw 0 0\n"),
            "there is no cpuset controller",
        ),
        (
            "partition",
            &|machine| machine.put("/proc/mounts", "cgroup /c cgroup rw,cpuset 0 0\n"),
            "the cpuset controller is that of cgroup v1 (at /c)",
        ),
        (
            "partition",
            &|machine| {
                for unit in ["system.slice", "user.slice", "init.scope", "machine.slice"] {
                    fs::remove_file(machine.path(&format!("{CGROUP}/{unit}/cpuset.cpus.exclusive"))).unwrap();
                }
            },
            "the kernel has no cpuset.cpus.exclusive below /sys/fs/cgroup",
        ),
        (
            "slices",
            &|machine| machine.put("/proc/mounts", "cgroup /c cgroup rw,cpuset 0 0\n"),
            "the cpuset controller is that of cgroup v1 (at /c)",
        ),
        (
            "slices",
            &|machine| fs::remove_file(machine.path("/usr/bin/systemctl")).unwrap(),
            "/usr/bin/systemctl is missing",
        ),
    ];
    for (value, spoil, reason) in cases {
        let machine = host();
        spoil(&machine);
        let vm = Vm::new(1, 2).with(&format!("isolation='{value}'"));
        machine.put("/vm.xml", &vm.xml());
        let before = machine.everything();
        for event in ["prepare begin", "migrate begin"] {
            let said = machine.event(&vm, event).refused(Code::IsolationUnsupported);
            assert!(
                said.contains(&format!("isolation=\"{value}\" needs cgroup v2")) && said.contains(reason),
                "{said}"
            );
        }
        let said = machine.cli(&["explain", machine.path("/vm.xml").to_str().unwrap()]);
        assert_eq!(said.code, Some(Code::IsolationUnsupported.exit().into()), "{said:?}");
        assert!(machine.everything() == before);
        let check = machine.cli(&["check"]).stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(check.contains(reason), "{check}");
    }
}

#[test]
fn the_host_always_keeps_a_cpu() {
    let machine = host();
    machine.pinnable("0-15");
    let before = machine.everything();
    for (attributes, what) in [
        ("isolation='partition'", "isolation would leave the host no CPU"),
        ("isolation='slices'", "isolation would leave the host no CPU"),
        ("irqs='away'", "irqs=\"away\" would leave no CPU to interrupts"),
    ] {
        let vm = Vm::new(1, 16).with(&format!("emulator='share' iothreads='share' {attributes}"));
        let said = machine.event(&vm, "prepare begin").refused(Code::IsolationFailed);
        assert!(said.contains(what) && said.contains("CPUs 0-15 are all that is online"), "{said}");
    }
    assert!(machine.everything() == before);
    // A unit that has only CPUs of the lease: nothing is left changed.
    machine.put(&format!("{CGROUP}/user.slice/cpuset.cpus"), "1-2,9\n");
    machine.pinnable("1-2,9-10");
    let before = outside(&machine);
    let vm = Vm::new(1, 4).with("isolation='slices'");
    let said = machine.event(&vm, "prepare begin").refused(Code::IsolationFailed);
    assert!(said.contains("would leave user.slice no CPU that is online"), "{said}");
    assert_eq!(machine.leased().len(), 0);
    assert!(outside(&machine) == before && !machine.path("/run/virt-pin/host.json").exists());
}

#[test]
fn slices_and_interrupts_make_room_and_get_it_back() {
    let machine = host();
    let before = outside(&machine);
    let vm = |number, attributes: &str| Vm::new(number, 2).with(attributes);
    let (first, second) = (vm(1, "isolation='slices' irqs='away'"), vm(2, "isolation='slices'"));
    machine.prepare(&first);
    assert_eq!(machine.vcpus_of(&first), [1, 9]);
    assert_eq!(units(&machine), ["0,2-8,10-15\n", "0,2-8\n", "0,2-8,10-15\n"]);
    let irqs = || [4, 5, 6].map(|irq| machine.read(&format!("/proc/irq/{irq}/smp_affinity_list")));
    assert_eq!(irqs(), ["0,2-8,10-15\n", "0,2-8,10-15\n", "0\n"]);
    assert_eq!(machine.read("/proc/irq/default_smp_affinity"), "0000fdfd\n");
    assert_eq!(machine.read(&format!("{CGROUP}/machine.slice/cpuset.cpus")), "\n");
    let lease = machine.json(&["lease", "vm1"]);
    assert_eq!((lease["isolation"].as_str(), lease["irqs"].as_str()), (Some("slices"), Some("away")));
    // The same event again changes nothing; a second VM takes more, and the first gives back its part.
    let with_one = machine.everything();
    machine.prepare(&first);
    assert!(machine.everything() == with_one);
    machine.prepare(&second);
    assert_eq!(units(&machine)[0], "0,3-8,11-15\n");
    assert_eq!(irqs()[0], "0,2-8,10-15\n");
    let shared = Vm::new(7, 1).without_policy();
    machine.event(&shared, "prepare begin").silent();
    machine.event(&shared, "release end shutdown").silent();
    machine.event(&first, "release end shutdown").silent();
    assert_eq!(units(&machine), ["0-1,3-9,11-15\n", "0-1,3-9\n", "0-1,3-9,11-15\n"]);
    assert_eq!(irqs(), ["0-15\n", "1,9\n", "0\n"]);
    machine.event(&second, "release end shutdown").silent();
    assert!(outside(&machine) == before);
    // A start that fails after it was isolated, too.
    fs::remove_dir(machine.path("/run/systemd/system")).unwrap();
    machine.put("/run/systemd/system", "");
    let before = outside(&machine);
    machine.event(&first, "prepare begin").refused(Code::ConfinementFailed);
    assert!(outside(&machine) == before);
}

/// Between any two of its writes the hook may be killed; the next event of any VM, or `reconcile`, restores.
#[test]
fn a_hook_killed_in_the_middle_leaves_what_the_next_event_restores() {
    let shared = Vm::new(7, 1).without_policy();
    let vm = Vm::new(1, 2).with("isolation='slices' irqs='away'");
    let ways: [(&str, Change<'_>); 3] = [
        ("its own end", &|machine| machine.event(&vm, "release end failed").silent()),
        ("another's start", &|machine| {
            // The daemon has gone with it, so the lease is void.
            let leases = machine.leases().unwrap();
            machine.put("/run/virt-pin/leases.json", &leases.replace(machine::BOOT_ID, "another"));
            machine.event(&Vm::new(2, 2), "prepare begin").printed();
            machine.event(&Vm::new(2, 2), "release end shutdown").silent();
        }),
        ("reconcile", &|machine| {
            machine.put("/run/virt-pin/leases.json", "{\"version\":2,\"boot_id\":\"\",\"leases\":[]}");
            let check = machine.cli(&["check"]).stdout;
            assert!(check.contains("the CPUs of init.scope, system.slice, user.slice; interrupts:"), "{check}");
            let said = machine.cli(&["reconcile"]).printed();
            assert!(said.contains("restored on the host: the CPUs of init.scope"), "{said}");
        }),
    ];
    for (how, restore) in ways {
        let machine = host();
        let before = outside(&machine);
        machine.put("/kill-the-hook", "");
        let mut hook = machine.hook_command(&["vm1", "prepare", "begin", "-"]).spawn().unwrap();
        hook.stdin.take().unwrap().write_all(vm.xml().as_bytes()).unwrap();
        assert_eq!(hook.wait_with_output().unwrap().status.signal(), Some(9));
        // Those it had told systemd of may be a moment late.
        std::thread::sleep(std::time::Duration::from_millis(200));
        fs::remove_file(machine.path("/kill-the-hook")).unwrap();
        assert!(outside(&machine) != before, "nothing was changed");
        assert!(machine.read("/run/virt-pin/host.json").contains("\"system.slice\":{\"cpus\":\"\""));
        restore(&machine);
        assert!(outside(&machine) == before, "{how}");
        assert!(!machine.path("/run/virt-pin/host.json").exists());
        machine.event(&shared, "prepare begin").silent();
    }
}

#[test]
fn former_values_that_cannot_be_read_refuse_and_can_be_given_up() {
    let machine = host();
    machine.put("/run/virt-pin/host.json", "{\"version\":1,\"colour\":\"red\"}");
    let vm = Vm::new(1, 2).with("irqs='away'");
    machine.event(&vm, "prepare begin").refused(Code::StateCorrupt);
    assert_eq!(machine.leased().len(), 0);
    let said = machine.cli(&["reconcile"]).printed();
    assert!(said.contains("does not say what was changed on the host; it is gone now"), "{said}");
    machine.prepare(&vm);
}

#[test]
fn partitions_come_with_the_threads_and_what_is_above_is_as_before() {
    let machine = host();
    // Somebody else passes CPUs on there.
    machine.put(&format!("{CGROUP}/machine.slice/cpuset.cpus.exclusive"), "15\n");
    let before = outside(&machine);
    let above = || machine.read(&format!("{CGROUP}/machine.slice/cpuset.cpus.exclusive"));
    let (first, second) = (Vm::new(1, 2).with("isolation='partition'"), Vm::new(2, 2).with("isolation='partition'"));
    machine.prepare(&first);
    assert!(above() == "15\n" && !machine.path("/run/virt-pin/host.json").exists());
    let base = runs(&machine, &first, 4000);
    let alive = machine.alive(&first);
    machine.event(&first, "started begin").silent();
    let of = |base: &str, file: &str| machine.read(&format!("{CGROUP}{base}/{file}"));
    assert_eq!(above(), "1,9,15\n");
    assert_eq!(of(&base, "cpuset.cpus.exclusive"), "1,9\n");
    for (vcpu, cpu) in [(0, "1\n"), (1, "9\n")] {
        let cgroup = format!("vcpu{vcpu}");
        assert_eq!(of(&base, &format!("{cgroup}/cpuset.cpus.exclusive")), cpu);
        assert_eq!(of(&base, &format!("{cgroup}/virt-pin/cpuset.cpus.exclusive")), cpu);
        assert_eq!(of(&base, &format!("{cgroup}/virt-pin/cpuset.cpus.partition")), "root\n");
        assert_eq!(of(&base, &format!("{cgroup}/virt-pin/cgroup.threads")), format!("{}\n", 4001 + vcpu));
    }
    machine.prepare(&second);
    let other = runs(&machine, &second, 5000);
    let alive_as_well = machine.alive(&second);
    machine.event(&second, "started begin").silent();
    assert_eq!(above(), "1-2,9-10,15\n");
    // The kernel has given up a partition: seen, and made again.
    machine.put(
        &format!("{CGROUP}{other}/vcpu1/virt-pin/cpuset.cpus.partition"),
        "root invalid (No cpu available due to hotplug)\n",
    );
    let check = machine.cli(&["check"]).stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(check.contains("says \"root invalid (No cpu available due to") && check.contains("FAIL"), "{check}");
    let said = machine.cli(&["reconcile"]).printed();
    assert!(said.contains("\"vm2\": its partition is valid again"), "{said}");
    assert_eq!(of(&other, "vcpu1/virt-pin/cpuset.cpus.partition"), "root\n");
    // So does the agent.
    let partition = format!("{CGROUP}{other}/vcpu0/virt-pin/cpuset.cpus.partition");
    machine.put(&partition, "root invalid (No cpu available due to hotplug)\n");
    machine.cli(&["agent", "--once"]).printed();
    assert_eq!(machine.read(&partition), "root\n");
    drop(alive);
    ends(&machine, &first, 4000, &base);
    assert_eq!(above(), "2,10,15\n");
    // One whose end nobody reported.
    drop(alive_as_well);
    machine.gone(5000);
    fs::remove_dir_all(machine.path(&format!("{CGROUP}/machine.slice/machine-qemu\\x2d2\\x2dvm2.scope"))).unwrap();
    machine.event(&Vm::new(7, 1).without_policy(), "prepare begin").silent();
    machine.event(&Vm::new(3, 2), "prepare begin").printed();
    machine.event(&Vm::new(3, 2), "release end shutdown").silent();
    assert_eq!(above(), "15\n");
    assert!(!machine.path("/run/virt-pin/host.json").exists());
    let mut after = outside(&machine);
    after.retain(|path, _| before.contains_key(path));
    assert!(after == before);
}

/// Without machined, cgroups of other VMs are beside a VM's own.
#[test]
fn a_whole_vm_is_a_partition_only_within_a_scope() {
    let machine = host();
    let file = "/usr/share/dbus-1/system-services/org.freedesktop.machine1.service";
    let whole = Vm::new(1, 2).with("isolation='partition' emulator='share' iothreads='share'");
    machine.prepare(&whole);
    machine.event(&whole, "release end failed").silent();
    fs::remove_file(machine.path(file)).unwrap();
    let said = machine.event(&whole, "prepare begin").refused(Code::IsolationUnsupported);
    assert!(said.contains("needs systemd-machined"), "{said}");
}

#[test]
fn a_partition_that_the_kernel_refuses_stops_the_start() {
    let machine = host();
    let vm = Vm::new(1, 2).with("isolation='partition'");
    machine.prepare(&vm);
    let base = runs(&machine, &vm, 4000);
    let file = machine.path(&format!("{CGROUP}{base}/vcpu1/virt-pin/cpuset.cpus.partition"));
    fs::rename(&file, machine.path("/member")).unwrap();
    symlink(machine.path("/member"), &file).unwrap();
    let said = machine.event(&vm, "started begin").refused(Code::IsolationFailed);
    assert!(
        said.starts_with("domain \"vm1\": cannot write \"root")
            && said.contains("vcpu1/virt-pin/cpuset.cpus.partition"),
        "{said}"
    );
    // At reconnect it is only reported: the VM runs.
    machine.event(&vm, "reconnect begin").reported(Code::IsolationFailed);
    ends(&machine, &vm, 4000, &base);
    assert_eq!(machine.read(&format!("{CGROUP}/machine.slice/cpuset.cpus.exclusive")), "\n");
}
