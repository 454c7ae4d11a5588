//! CPUs that others on the host have: cpuset partitions and reservations of other services, and services that are confined. What
//! docs/neighbours.md shows of it is written here (`UPDATE=1`).

use std::io::Write as _;

use virt_pin::cpuset::CpuSet;

use crate::guest::Guest;
use crate::host::{Host, set};
use crate::isolation::EXCLUSIVE;
use crate::leases::CONFIG;
use crate::shape::{Debian, Shape};

const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/neighbours.md");

/// A service that makes a partition of its slice, as a container runtime would; and one below the VMs' own slice, which cannot be
/// beside cgroups of VMs: Linux 6.12 takes a partition for invalid if their `cpuset.cpus` name its CPUs.
const PARTITIONS: &str = r"
    systemd-run --quiet --unit=pods --slice=pods.slice --property=AllowedCPUs=0-15 sleep infinity &&
    systemd-run --quiet --unit=guest --slice=machine-guest.slice --property=AllowedCPUs=0-15 sleep infinity &&
    cd /sys/fs/cgroup &&
    echo 4-5 >pods.slice/cpuset.cpus.exclusive && echo root >pods.slice/cpuset.cpus.partition &&
    echo 6-7 >machine.slice/cpuset.cpus.exclusive && cd machine.slice/machine-guest.slice &&
    echo 6-7 >cpuset.cpus.exclusive && echo 6-7 >guest.service/cpuset.cpus.exclusive &&
    echo root >guest.service/cpuset.cpus.partition && cd /sys/fs/cgroup &&
    cat {pods.slice,machine.slice/machine-guest.slice/guest.service}/cpuset.cpus.partition cpuset.cpus.effective";

impl Host {
    /// The lines of `virt-pin check` about who else has pinnable CPUs.
    fn others(&self) -> String {
        let check = self.exec(&["virt-pin", "check"]).stdout;
        let from = check.find("  host: every pinnable CPU can be given").unwrap_or_else(|| panic!("{check}"));
        let to = check.find("  host: every pinnable CPU is part of").unwrap_or_else(|| panic!("{check}"));
        check[from..to].to_owned()
    }

    fn partitions(&self) -> String {
        let guest = "machine.slice/machine-guest.slice/guest.service";
        self.sh(&format!("cd /sys/fs/cgroup && cat {{pods.slice,{guest}}}/cpuset.cpus.partition")).ok()
    }
}

#[test]
fn what_others_have_for_themselves_is_never_leased() {
    let Some(host) = Host::with_virt_pin(Shape::default(), CONFIG) else { return };
    assert!(!host.others().contains("WARN"), "{}", host.others());
    host.run(&Guest::new("shared").vcpus(2));
    assert_eq!(host.sh(PARTITIONS).ok(), "root\nroot\n0-3,8-15\n");
    host.sh("systemd-run --quiet --unit=web --property=AllowedCPUs=10-11 sleep infinity").ok();
    agree(&host.others());
    // Four of the eight pinnable cores' CPUs are theirs.
    let free: serde_json::Value = serde_json::from_str(&host.exec(&["virt-pin", "--json", "capacity"]).ok()).unwrap();
    assert_eq!((&free["out_of_reach"], &free["free"]), (&"4-7".into(), &"2-3,10-15".into()));
    host.define(&Guest::new("large").vcpus(10).policy("policy='dedicated'"));
    let said = host.virsh(&["start", "large"]).refused();
    let because = "because: cgroup /pods.slice has CPUs 4-5 for itself (a cpuset partition); cgroup \
                   /machine.slice/machine-guest.slice has CPUs 6-7 for itself (cpuset.cpus.exclusive)";
    assert!(said.contains(because), "{said}");
    // What fits comes and goes beside them, with a partition of its own as well, and leaves theirs as they were.
    host.run(&Guest::new("alone").vcpus(4).policy("policy='dedicated' isolation='partition'"));
    host.run(&Guest::new("plain").vcpus(4).policy("policy='dedicated'"));
    let leased = host.leased("alone").union(&host.leased("plain"));
    assert_eq!(leased, set("2-3,10-15"));
    assert_eq!(host.partitions(), "root\nroot\n");
    assert!(host.check_line("nothing but \"alone\" runs on its CPUs").ends_with("PASS"));
    assert!(host.check_line("threads of \"plain\" are where").ends_with("PASS"));
    assert_eq!(
        host.sh("cat /sys/fs/cgroup/machine.slice/cpuset.cpus.exclusive").ok().trim(),
        set("6-7").union(&host.leased("alone")).to_string()
    );
    // What is a partition of ours nobody can take.
    let takes = format!(
        "mkdir /sys/fs/cgroup/x.slice; echo {} >/sys/fs/cgroup/x.slice/cpuset.cpus.exclusive",
        host.leased("alone")
    );
    assert!(host.sh(&takes).refused().contains("Invalid argument"));
    host.exec(&["rmdir", "/sys/fs/cgroup/x.slice"]).ok();
    // Nobody has written their CPUs into a cgroup beside them.
    let beside = host.sh("cat /sys/fs/cgroup/machine.slice/machine-qemu*shared.scope/cpuset.cpus").ok();
    assert!(set(&beside).is_disjoint(&set("4-7")), "{beside}");
    host.virsh(&["destroy", "alone"]).ok();
    host.virsh(&["destroy", "plain"]).ok();
    assert_eq!(host.partitions(), "root\nroot\n");
    assert_eq!(host.file(EXCLUSIVE), "6-7\n");
    // Reserved, but no partition (any more).
    host.sh("echo member >/sys/fs/cgroup/pods.slice/cpuset.cpus.partition").ok();
    assert!(host.others().contains("/pods.slice has CPUs 4-5 for itself (cpuset.cpus.exclusive)"), "{}", host.others());
    // Given back.
    host.exec(&["systemctl", "stop", "pods", "pods.slice", "guest", "machine-guest.slice", "web"]).ok();
    host.sh(&format!("echo >{EXCLUSIVE}")).ok();
    assert!(!host.others().contains("WARN"), "{}", host.others());
    // One that takes what is leased: a core of two, and another is free beside it.
    host.virsh(&["start", "plain"]).ok();
    let had = host.leased("plain");
    let stolen: CpuSet = had.iter().take(2).collect();
    let steals = format!(
        "mkdir /sys/fs/cgroup/thief.slice && cd /sys/fs/cgroup/thief.slice && echo {stolen} >cpuset.cpus.exclusive &&
         echo root >cpuset.cpus.partition"
    );
    host.sh(&steals).ok();
    let check = host.exec(&["virt-pin", "check"]).stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    let lost = format!(
        "the CPUs of \"plain\" are pinnable : WARN {stolen} are not any more (cgroup /thief.slice has CPUs {stolen} for itself"
    );
    assert!(check.contains(&lost), "{check}");
    let said = host.exec(&["virt-pin", "repack"]).ok();
    assert!(said.contains("Moved \"plain\""), "{said}");
    assert!(host.leased("plain").is_disjoint(&stolen));
    assert!(host.check_line("threads of \"plain\" are where").ends_with("PASS"));
    // VMs' own slice narrowed by systemd.
    host.sh("rmdir /sys/fs/cgroup/thief.slice").ok();
    host.virsh(&["destroy", "plain"]).ok();
    host.exec(&["systemctl", "set-property", "--runtime", "machine.slice", "AllowedCPUs=0-7"]).ok();
    assert!(host.others().contains("CPUs 10-15 are outside the cgroup of VMs: never handed out"), "{}", host.others());
    let complaints = host.sh("dmesg | grep -E 'WARNING:|BUG:|cut here' || true").ok();
    assert_eq!(complaints, "", "the kernel complains");
}

#[test]
fn exclusive_cpusets_of_version_1_are_never_leased() {
    let Some(host) = Host::with_virt_pin(Shape::default().debian(Debian::Bookworm).cgroup_v1(), CONFIG) else { return };
    // Such a cpuset can only be made of what VMs' does not have.
    host.sh("cd /sys/fs/cgroup/cpuset && mkdir -p theirs machine.slice && cat cpuset.mems >machine.slice/cpuset.mems &&
             echo 0-3,6-15 >machine.slice/cpuset.cpus && echo 4-5 >theirs/cpuset.cpus && echo 1 >theirs/cpuset.cpu_exclusive")
        .ok();
    assert!(
        host.others().contains("cgroup /theirs has CPUs 4-5 for itself (cpuset.cpu_exclusive)"),
        "{}",
        host.others()
    );
    host.run(&Guest::new("large").vcpus(10).policy("policy='dedicated'"));
    assert_eq!(host.leased("large"), set("2-3,6-7,10-15"));
}

/// Fails unless the document shows this; with `UPDATE` makes it so.
#[track_caller]
fn agree(said: &str) {
    let document = std::fs::read_to_string(DOCUMENT).unwrap();
    let (before, rest) = document.split_once("<!-- check -->\n").unwrap();
    let (_, after) = rest.split_once("<!-- end of check -->").unwrap();
    let expected = format!(
        "{before}<!-- check -->\n```console\n# virt-pin check\n...\n{said}...\n```\n<!-- end of check -->{after}"
    );
    if std::env::var_os("UPDATE").is_some() {
        std::fs::File::create(DOCUMENT).unwrap().write_all(expected.as_bytes()).unwrap();
    } else {
        assert!(document == expected, "{DOCUMENT} does not show:\n{said}");
    }
}
