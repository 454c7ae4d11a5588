//! The host: what cannot be read of it, or what it cannot do.

use super::{Entry, messages};

pub(super) const TOPOLOGY_UNREADABLE: Entry = Entry {
    means: "Which CPUs there are, or which of them are online, could not be read from /sys. Nothing is handed out by guess, so \
            dedicated VMs are refused. (What is merely incomplete, such as caches that the firmware does not tell of, is no error: \
            `virt-pin topology` lists it as not known.)",
    look: &[
        "`virt-pin topology`: what can be read",
        "`ls /sys/devices/system/cpu`: whether /sys is mounted where libvirtd runs",
    ],
    remedies: &[
        "Mount /sys. In a container it has to be the host's.",
        "Otherwise report it, with what `virt-pin gather` writes.",
    ],
    passes: "No.",
    example: messages::HOST_TOPOLOGY_UNREADABLE,
};

pub(super) const IO: Entry = Entry {
    means: "The kernel refused an operation on a file, or what is in one of its files or libvirt's is not what it should be. The \
            message has the path and the reason.",
    look: &[
        "The path in the message: `ls -l` it, `cat` it",
        "`ausearch -m avc -ts recent`, without auditd `journalctl -k -g denied`: where root was denied, by SELinux or AppArmor",
    ],
    remedies: &[
        "No space, read-only, too many open files: mend that first.",
        "A file that is there already is never overwritten: name another one.",
    ],
    passes: "If its reason does.",
    example: messages::HOST_IO,
};

pub(super) const ISOLATION_UNSUPPORTED: Entry = Entry {
    means: "The policy wants the host's own work kept off the VM's CPUs (`isolation`), and this host lacks what that needs. It is \
            refused before QEMU is executed, with `fallback=\"shared\"` too: a VM that was promised silence does not get noise.",
    look: &[
        "`virt-pin check`: its line about the host's own work says which values this host can do, and what is missing for the others",
        "docs/isolation.md: what each value needs",
    ],
    remedies: &[
        "Leave `isolation` out (no other VM is on the CPUs all the same), or use a value that the host can do.",
        "Boot with cgroup v2 (`systemd.unified_cgroup_hierarchy=1`), or a newer kernel, as the message says.",
    ],
    passes: "No.",
    example: messages::HOST_ISOLATION_UNSUPPORTED,
};

pub(super) const CONFIG_INVALID: Entry = Entry {
    means: "A file of the configuration cannot be read or understood. Until it is corrected no VM is started that the configuration \
            may be about: dedicated ones, and those whose XML has no policy. VMs that run keep what they have, and a VM whose XML says \
            `policy=\"shared\"` starts.",
    look: &[
        "The file, line and key in the message",
        "`virt-pin check`: whether it can be understood now; `man virt-pin.toml`: every key",
    ],
    remedies: &["Correct the line. Nothing has to be restarted: the files are read at each event."],
    passes: "No.",
    example: messages::CONFIG_INVALID,
};
