//! What was to be done and did not succeed, and faults of our own.

use super::{Entry, messages};

pub(super) const INTERNAL: Entry = Entry {
    means: "A fault in virt-pin: it found that it was about to do something that it must never do, and did not do it. A start is \
            refused; an event that must not fail (`reconnect`, `release`) does not.",
    look: &[
        "`journalctl -t virt-pin`: what was decided before",
        "`virt-pin check`: whether everything still holds together",
    ],
    remedies: &["Report it with the message and the output of `virt-pin gather --state`."],
    passes: "Do not count on it.",
    example: messages::INTERNAL,
};

pub(super) const CONFINEMENT: Entry = Entry {
    means: "The VM's cgroup, or that of another VM that has to make room, could not be given its CPUs. The lease was taken back and \
            the start refused; nothing is left of it. (For a move: the VM is where it was.)",
    look: &[
        "`virt-pin check`: the cgroup mode in use, and pinnable CPUs outside the reach of the VMs' cgroup",
        "`systemctl show -p AllowedCPUs machine.slice`: whether somebody has limited the VMs as a whole",
        "`cat /sys/fs/cgroup/machine.slice/cpuset.cpus.effective`: what they can have",
    ],
    remedies: &[
        "Take out other tools that write the cpusets of VMs: hook scripts, `cset`, units with `AllowedCPUs=` for machine.slice.",
        "The path and the kernel's reason in the message say the rest.",
    ],
    passes: "Only if somebody else's change does.",
    example: messages::ENFORCE_CONFINEMENT,
};

pub(super) const THREAD: Entry = Entry {
    means: "When libvirt reported the VM started, or the daemon came back, a thread of QEMU was not on its CPUs and could not be put \
            there, or QEMU had ended by then. At `started` libvirt ends the VM; at `reconnect` it runs on and this is only reported.",
    look: &[
        "`virt-pin check`: each VM's threads against its lease",
        "`taskset -acp PID`: where the threads may run; `journalctl -t virt-pin DOMAIN=NAME`: what happened",
        "`cat /var/log/libvirt/qemu/NAME.log`: why QEMU ended, if it did",
    ],
    remedies: &[
        "Find out who else moves threads: other hook scripts, `taskset`, numad, tuned, and keep it from VMs.",
        "If QEMU ended, its log says why: that is the error to look for.",
        "`virt-pin reconcile` repairs a VM that runs, and with `repair_drift = true` the agent does.",
    ],
    passes: "At the next start, if whoever moved the thread does not do it again.",
    example: messages::ENFORCE_THREAD,
};

pub(super) const ISOLATION: Entry = Entry {
    means: "The host can do the isolation asked for, but this time it did not succeed: it would leave the host or one of its units no \
            CPU, systemd did not do what it was told, or the kernel did not take the partition. The lease was taken back, and the host \
            has what it had.",
    look: &[
        "The unit, cgroup or file in the message",
        "`systemctl show -p AllowedCPUs system.slice user.slice init.scope`: what the host's units have",
        "`virt-pin check`: whether anything is left changed on the host",
    ],
    remedies: &[
        "Take CPUs out of `pinnable_cpus`: the host always keeps one.",
        "Take a unit's own `AllowedCPUs=` off CPUs that are handed out.",
        "docs/isolation.md says what the kernel refuses, and why.",
    ],
    passes: "When leases of other isolated VMs end, if it was for want of a CPU.",
    example: messages::ENFORCE_ISOLATION,
};

pub(super) const CORE_SCHED: Entry = Entry {
    means: "The policy says `core-sched=\"tenant\"`, and the kernel has no core scheduling or did not give the VM's threads the cookie \
            of its tenant. The VM does not run beside others on a core, as it was promised, but not at all.",
    look: &[
        "`grep SCHED_CORE /boot/config-$(uname -r)`: whether the kernel was built with it; Debian's is not",
        "`virt-pin list`: the VMs, `virt-pin lease VM`: its tenant",
    ],
    remedies: &[
        "Boot a kernel (5.14 or later) with CONFIG_SCHED_CORE.",
        "Or leave `core-sched` out, and keep `cores=\"whole\"`, the default: then no two VMs share a core anyway.",
    ],
    passes: "No.",
    example: messages::ENFORCE_CORE_SCHED,
};

pub(super) const LIBVIRT: Entry = Entry {
    means: "A command (never the hook) asked libvirt for something, and it refused or did not answer. Leases and running VMs are as \
            they were; a live XML may not show a lease yet.",
    look: &[
        "`virsh -c qemu:///system list`: whether the daemon answers at all",
        "`systemctl status libvirtd virtqemud`: which daemon there is, and whether it runs",
        "`journalctl -u libvirtd -u virtqemud`: what it says",
    ],
    remedies: &[
        "Start the daemon, then do it again: `virt-pin sync DOMAIN` brings one VM's live XML in line, and the agent all of them.",
    ],
    passes: "Yes, when libvirt answers again.",
    example: messages::LIBVIRT_FAILED,
};

pub(super) const INSTALL_CONFLICT: Entry = Entry {
    means: "Where the hook belongs there is a script that is not ours. It was left as it is, and the hook is not installed.",
    look: &[
        "`ls -l /etc/libvirt/hooks /etc/libvirt/hooks/qemu.d`: what is there",
        "`head` of the file in the message: whose it is",
    ],
    remedies: &[
        "Give that script another name in qemu.d/ (libvirt 6.5 and later runs all that are there), then `virt-pin install` again.",
        "Before libvirt 6.5: one script has to call both; see hooks/README.md.",
    ],
    passes: "No.",
    example: messages::INSTALL_CONFLICT,
};
