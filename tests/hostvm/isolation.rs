//! Nothing but the VM runs on its CPUs, where its policy asks for that; and the host has back what it had, afterwards.

use std::collections::{BTreeMap, BTreeSet};

use virt_pin::cpuset::CpuSet;

use crate::guest::Guest;
use crate::host::{Host, set};
use crate::leases::CONFIG;
use crate::shape::{Debian, Shape};

/// Every value that isolation may change, as `file:line`: cpusets outside domains, affinities of interrupts, what systemd was
/// told, and our own files but for the survey of the machine.
const CHANGEABLE: &str = r"
    find /sys/fs/cgroup -path '*machine-qemu*' -prune -o -name 'cpuset.*' -print0 | sort -z | xargs -0 grep -H '' 2>/dev/null
    grep -H '' /proc/irq/default_smp_affinity /proc/irq/*/smp_affinity_list
    find /run/systemd/system /run/systemd/system.control /run/virt-pin -type f ! -name topology.json ! -name leases.json \
        ! -path '*machine-qemu*' -print0 2>/dev/null | sort -z | xargs -0 grep -H ''
    true";

/// One thread of any process.
struct Task {
    name: String,
    tid: u32,
    /// Of the kernel: it has no memory of its own.
    kernel: bool,
    cpus: CpuSet,
}

impl Host {
    fn changeable(&self) -> BTreeSet<String> {
        self.sh(CHANGEABLE).ok().lines().map(str::to_owned).collect()
    }

    /// All that runs.
    fn tasks(&self) -> Vec<Task> {
        let lines = self
            .sh("grep -s -E '^(Name|Pid|VmSize|Cpus_allowed_list):' /proc/[0-9]*/task/[0-9]*/status | sed 's|^/proc/[0-9]*/task/||'; true")
            .ok();
        let mut found: BTreeMap<&str, BTreeMap<&str, &str>> = BTreeMap::new();
        for line in lines.lines() {
            let (tid, rest) = line.split_once("/status:").unwrap();
            let (key, value) = rest.split_once(':').unwrap();
            found.entry(tid).or_default().insert(key, value.trim());
        }
        let tasks = found.into_iter().filter_map(|(tid, of)| {
            Some(Task {
                name: (*of.get("Name")?).to_owned(),
                tid: tid.parse().unwrap(),
                kernel: !of.contains_key("VmSize"),
                cpus: set(of.get("Cpus_allowed_list")?),
            })
        });
        tasks.collect()
    }

    /// The user-space tasks that may run on any of these CPUs.
    pub(crate) fn on(&self, cpus: &CpuSet) -> BTreeSet<String> {
        let there = self.tasks().into_iter().filter(|task| !task.kernel && !task.cpus.is_disjoint(cpus));
        there.map(|task| task.name).collect()
    }

    /// What ran on these CPUs for a while in which the host was busy, by the kernel's own account: names of tasks that are
    /// not the kernel's.
    fn ran_on(&self, cpus: &CpuSet) -> BTreeSet<String> {
        let mask: u64 = cpus.iter().map(|cpu| 1 << cpu.0).sum();
        let script = format!(
            "cd /sys/kernel/tracing && echo {mask:x} >tracing_cpumask && echo 1 >events/sched/sched_switch/enable && echo >trace && echo 1 >tracing_on
             for round in $(seq 40); do (/bin/true & /bin/true & /bin/true & wait); done
             echo 0 >tracing_on
             sed -n 's/.*==> next_comm=\\(.*\\) next_pid=\\([0-9]*\\) .*/\\2 \\1/p' trace | sort -u"
        );
        let kernel: BTreeSet<u32> = self.tasks().iter().filter(|task| task.kernel).map(|task| task.tid).collect();
        let trace = self.sh(&script).ok();
        assert!(!trace.is_empty(), "nothing was traced");
        let ran = trace.lines().map(|line| line.split_once(' ').unwrap());
        let ran = ran.filter(|(pid, name)| {
            let pid: u32 = pid.parse().unwrap();
            // Its helpers come and go.
            pid != 0 && !kernel.contains(&pid) && !name.starts_with("kworker/")
        });
        ran.map(|(_, name)| name.to_owned()).collect()
    }

    pub(crate) fn check_line(&self, about: &str) -> String {
        let check = self.exec(&["virt-pin", "check"]).stdout;
        check.lines().find(|line| line.contains(about)).unwrap_or_else(|| panic!("{check}")).to_owned()
    }

    pub(crate) fn leased(&self, name: &str) -> CpuSet {
        let lease: serde_json::Value =
            serde_json::from_str(&self.exec(&["virt-pin", "--json", "lease", name]).ok()).unwrap();
        set(lease["cpus"].as_str().unwrap())
    }
}

pub(crate) const EXCLUSIVE: &str = "/sys/fs/cgroup/machine.slice/cpuset.cpus.exclusive";

#[test]
fn nothing_but_the_vm_runs_on_a_partition() {
    let Some(host) = Host::with_virt_pin(Shape::default(), CONFIG) else { return };
    host.run(&Guest::new("shared").vcpus(2));
    host.run(&Guest::new("plain").vcpus(2).policy("policy='dedicated'"));
    let before = host.changeable();
    // Three vCPUs on two cores: one thread is parked. Its other threads are outside, on the housekeeping CPUs.
    host.run(&Guest::new("alone").vcpus(3).policy("policy='dedicated' isolation='partition' irqs='away'"));
    let alone = host.leased("alone");
    assert_eq!(alone.len(), 4);
    let vcpus = ["CPU 0/TCG", "CPU 1/TCG", "CPU 2/TCG"].map(str::to_owned);
    assert_eq!(host.on(&alone), vcpus.clone().into());
    assert_eq!(host.ran_on(&alone), vcpus.into());
    // The same account has the host's own work, elsewhere.
    let housekeeping = host.ran_on(&set("0-1,8-9"));
    assert!(housekeeping.contains("true") && housekeeping.contains("bash"), "{housekeeping:?}");
    let threads = host.threads("alone");
    assert!(threads[3..].iter().all(|thread| thread.cpus == "0-1,8-9"), "{threads:#?}");
    assert_eq!(set(&host.file("/sys/fs/cgroup/cpuset.cpus.effective")), set("0-15").difference(&alone));
    // No interrupt may be handled there but those the kernel manages, one for each CPU; they are named.
    let irqs = host.sh("grep -H '' /proc/irq/*/smp_affinity_list").ok();
    let staying = irqs.lines().filter(|line| !set(line.rsplit_once(':').unwrap().1).is_disjoint(&alone)).count();
    let check = host.exec(&["virt-pin", "check"]).ok();
    assert!(check.contains("virtio1-req.") && !check.contains("ttyS0"), "{check}");
    assert!(staying >= 8, "{irqs}");
    let partition = "nothing but \"alone\" runs on its CPUs";
    assert!(host.check_line(partition).ends_with("PASS"), "{check}");
    // The plain one is as it was, and so are they all after reloads and restarts.
    let survives = || {
        assert!(host.check_line(partition).ends_with("PASS"));
        assert!(host.check_line("threads of \"plain\"").ends_with("PASS"));
        assert!(host.check_line("threads of \"alone\"").ends_with("PASS"));
    };
    host.exec(&["systemctl", "daemon-reload"]).ok();
    survives();
    host.exec(&["systemctl", "restart", "libvirtd"]).ok();
    host.wait_until("the daemon has found its VMs", |host| {
        host.virsh(&["list"]).stdout.matches(" running").count() == 3
    });
    survives();
    // A second one comes, all of its threads on CPUs of its own, and goes.
    assert_eq!(set(&host.file(EXCLUSIVE)), alone);
    host.run(&Guest::new("second").vcpus(2).policy("policy='dedicated' isolation='partition' emulator='share'"));
    let second = host.leased("second");
    assert_eq!(set(&host.file(EXCLUSIVE)), alone.union(&second));
    assert!(
        host.on(&second)
            .iter()
            .all(|name| name.starts_with("CPU ") || name.contains("qemu") || name.starts_with("IO "))
    );
    host.virsh(&["destroy", "second"]).ok();
    assert_eq!(set(&host.file(EXCLUSIVE)), alone);
    // The kernel gives a partition up where its CPUs are no longer passed on; that is seen and repaired.
    host.sh(&format!("echo 0 >{EXCLUSIVE}; echo {alone} >{EXCLUSIVE}")).ok();
    assert!(host.check_line(partition).ends_with("FAIL"));
    let said = host.exec(&["virt-pin", "reconcile"]).ok();
    assert!(said.contains("\"alone\": its partition is valid again"), "{said}");
    survives();
    // It does so as well where the only CPU of a partition was offline.
    let cpu = alone.first().unwrap();
    let online = format!("/sys/devices/system/cpu/cpu{cpu}/online");
    host.sh(&format!("echo 0 >{online} && echo 1 >{online}")).ok();
    assert!(host.check_line(partition).ends_with("FAIL"));
    host.exec(&["virt-pin", "reconcile"]).ok();
    survives();
    // A pin on the CPU of another vCPU is refused, and takes no partition along. (Beside libvirt's own cgroups it would, and
    // the kernel would crash at one of the next.)
    let other = alone.iter().nth(1).unwrap().to_string();
    host.virsh(&["vcpupin", "alone", "0", &other]).refused();
    host.virsh(&["emulatorpin", "alone", &other]).refused();
    assert!(host.check_line(partition).ends_with("PASS"));
    host.virsh(&["destroy", "alone"]).ok();
    let complaints = host.sh("dmesg | grep -E 'WARNING:|BUG:|cut here' || true").ok();
    assert_eq!(complaints, "", "the kernel complains");
    let after = host.changeable();
    assert!(after == before, "{:#?}", after.symmetric_difference(&before).collect::<Vec<_>>());
}

#[test]
fn the_hosts_services_are_kept_off_by_slices_on_debian_12() {
    let Some(host) = Host::with_virt_pin(Shape::default().debian(Debian::Bookworm), CONFIG) else { return };
    let guest = |isolation: &str| {
        let policy = format!("policy='dedicated' isolation='{isolation}'");
        Guest::new("web").vcpus(4).policy(&policy)
    };
    host.run(&Guest::new("shared"));
    // Linux 6.1 has no partitions below other cgroups.
    host.define(&guest("partition"));
    let said = host.virsh(&["start", "web"]).refused();
    assert!(said.contains("error[host.isolation.unsupported]") && said.contains("no cpuset.cpus.exclusive"), "{said}");
    let log = host.file("/var/log/libvirt/qemu/web.log");
    assert!(!log.contains("qemu-system"), "QEMU was executed: {log}");
    let before = host.changeable();
    host.run(&guest("slices"));
    let web = host.leased("web");
    let vcpus = ["CPU 0/TCG", "CPU 1/TCG", "CPU 2/TCG", "CPU 3/TCG"].map(str::to_owned);
    assert_eq!(host.on(&web), vcpus.into());
    let allowed = "AllowedCPUs=0-1 6-15\n";
    assert_eq!(host.exec(&["systemctl", "show", "--property", "AllowedCPUs", "system.slice"]).ok(), allowed);
    // Whoever starts later is in a slice as well.
    host.exec(&["systemctl", "daemon-reload"]).ok();
    let late =
        host.exec(&["systemd-run", "--wait", "--pipe", "--quiet", "grep", "Cpus_allowed_list", "/proc/self/status"]);
    assert_eq!(late.ok(), "Cpus_allowed_list:\t0-1,6-15\n");
    host.virsh(&["destroy", "web"]).ok();
    assert_eq!(host.exec(&["systemctl", "show", "--property", "AllowedCPUs", "system.slice"]).ok(), "AllowedCPUs=\n");
    assert_same_but_widened(&before, &host.changeable());
    assert!(host.tasks().iter().all(|task| task.kernel || task.cpus == set("0-15")));
}

/// An empty `cpuset.cpus` of a unit with tasks cannot be empty again: it has all CPUs, which means the same.
#[track_caller]
fn assert_same_but_widened(before: &BTreeSet<String>, after: &BTreeSet<String>) {
    let unit = |line: &str| line.starts_with("/sys/fs/cgroup/") && line.matches('/').count() == 5;
    let narrow = |lines: &BTreeSet<String>| -> BTreeSet<String> {
        let widened = |line: &String| match line.split_once("/cpuset.cpus:") {
            Some((dir, "0-15" | "")) if unit(line) => format!("{dir}/cpuset.cpus:"),
            _ => line.clone(),
        };
        lines.iter().map(widened).collect()
    };
    let (before, after) = (narrow(before), narrow(after));
    assert!(after == before, "{:#?}", after.symmetric_difference(&before).collect::<Vec<_>>());
}

#[test]
fn what_a_killed_hook_leaves_is_restored_at_the_next_event() {
    let Some(host) = Host::with_virt_pin(Shape::default(), CONFIG) else { return };
    host.run(&Guest::new("shared"));
    let before = host.changeable();
    // systemd is told, and then the hook is killed.
    host.put("/run/killing-systemctl", 0o755, b"#!/bin/sh\n/usr/bin/systemctl.real \"$@\"\nkill -9 $PPID\n");
    host.sh("mv /usr/bin/systemctl /usr/bin/systemctl.real && cp /run/killing-systemctl /usr/bin/systemctl").ok();
    let web = Guest::new("web").vcpus(2).policy("policy='dedicated' isolation='slices' irqs='away'");
    host.define(&web);
    // Libvirt reports the end of the failed start, and the hook that would restore then is killed as well.
    let said = host.virsh(&["start", "web"]).refused();
    assert!(said.contains("signal 9"), "{said}");
    host.sh("mv /usr/bin/systemctl.real /usr/bin/systemctl").ok();
    assert_ne!(host.changeable(), before);
    assert!(
        host.check_line("the host has back what no lease wants").contains("WARN"),
        "{}",
        host.file("/run/virt-pin/host.json")
    );
    host.virsh(&["destroy", "shared"]).ok();
    host.run(&Guest::new("shared"));
    assert_same_but_widened(&before, &host.changeable());
}
