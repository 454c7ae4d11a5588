//! The leases, and the lock on them.

use super::{Entry, messages};

pub(super) const LOCKED: Entry = Entry {
    means: "Another virt-pin process held the lock on the leases for two seconds. A hook waits no longer, because libvirt waits for \
            the hook. A holder needs about a millisecond; a search on a very large and full host may need more. A VM whose start has \
            come as far as `started` goes on all the same.",
    look: &[
        "`fuser -v /run/virt-pin/lock`: who holds it, if the message does not say; /run/virt-pin/agent.lock is the agent's own",
        "`ps -o pid,stat,wchan:20,etime,args -p PID`: what that process does; D is a wait in the kernel",
    ],
    remedies: &[
        "Start the VM again.",
        "A virt-pin process that hangs may be killed: the lock goes with it, and what it left half done is finished or undone by \
         the next event.",
    ],
    passes: "Yes, as soon as the holder is done.",
    example: messages::STATE_LOCKED,
};

pub(super) const CORRUPT: Entry = Entry {
    means: "The file of leases is damaged, or two of its leases contradict each other. It is replaced as a whole at each change, so \
            no crash of virt-pin does that; a full or broken file system, or somebody's editor, may. Until it is rebuilt dedicated VMs \
            are not started, since nobody knows what is free. VMs that run go on, and VMs without a policy start.",
    look: &["`cat /run/virt-pin/leases.json`: the file", "`virt-pin check`: what else does not hold"],
    remedies: &[
        "`virt-pin reconcile` keeps the file beside, and rebuilds the leases from where the threads of the running VMs are.",
        "A reboot clears it as well.",
    ],
    passes: "No, before the next boot.",
    example: messages::STATE_CORRUPT,
};

pub(super) const NEWER: Entry = Entry {
    means: "The file of leases was written by a later version of virt-pin than the one that reads it, after a downgrade or with a \
            hook that was left over. It is left as it is: dedicated VMs are not started, VMs that run go on.",
    look: &["`virt-pin --version`: this version", "`virt-pin check`: whether the installed hook is of this build"],
    remedies: &[
        "Install the later version again, with its hook (`virt-pin install`).",
        "Or let all leases end and reboot; see docs/upgrade.md.",
    ],
    passes: "No, before the next boot.",
    example: messages::STATE_NEWER,
};

pub(super) const UNSAFE: Entry = Entry {
    means: "The state directory or a file in it is not safely root's: another owner, writable by others, a link, or not there and \
            not to be made. Whoever can write there could hand out CPUs, so no lease is granted until that is mended.",
    look: &[
        "`ls -la /run/virt-pin`: owners and modes; they have to be root's, 0700 and 0600",
        "`virt-pin check`: the same as a finding",
        "`ausearch -m avc -ts recent`, without auditd `journalctl -k -g denied`: where uid 0 was denied, by whom",
    ],
    remedies: &[
        "Do what the hint says (`chown`, `chmod`), once it is clear who made it so.",
        "A disk that is full or read-only has to be mended first.",
    ],
    passes: "A full /run may; anything else only with the next boot.",
    example: messages::STATE_UNSAFE,
};

pub(super) const CONFLICT: Entry = Entry {
    means: "A QEMU of the same VM is still alive and has its lease. libvirt may have given it up (it did not end when it was killed), \
            and its threads can still run on those CPUs. A second one is not started beside it. Commands that move leases say the same \
            of a lease that cannot be moved now.",
    look: &[
        "`ps -o pid,stat,wchan:20,etime,args -p PID`: what that process waits for; D is a wait in the kernel, mostly for storage",
        "`virt-pin lease DOMAIN`: the CPUs that it holds",
    ],
    remedies: &[
        "End the process (`kill -9 PID`). One that waits in the kernel ends when what it waits for does: mend the storage or \
         the network it hangs on.",
    ],
    passes: "Yes, when that process ends; its lease ends with it.",
    example: messages::STATE_CONFLICT,
};
