//! What was asked for: the command line, domain XML, policies.

use super::{Entry, messages};

pub(super) const USAGE: Entry = Entry {
    means: "An option, an argument or a file named on the command line is not what the command takes. Nothing was done.",
    look: &["`virt-pin help`: every command", "`virt-pin help COMMAND`: its arguments and options"],
    remedies: &["Correct the word that the message names."],
    passes: "No.",
    example: messages::USAGE,
};

pub(super) const CHECK_FAILED: Entry = Entry {
    means: "`virt-pin check` looked at the configuration, the hook, the state, the leases and the VMs that run, and something does \
            not hold. Each such line says FAIL, and below it what was found and what to do. A WARN is no failure. The check itself \
            changes nothing, and VMs run on.",
    look: &["`virt-pin check`: the lines themselves", "`virt-pin --json check`: the same for programs"],
    remedies: &["Do what each FAIL line says, and run `virt-pin check` again."],
    passes: "Some of it: a lease whose VM has died is ended at the next start or stop of any VM.",
    example: messages::CHECK_FAILED,
};

pub(super) const DOMAIN_INVALID: Entry = Entry {
    means: "What was read is not a libvirt domain document that can be worked on: it is empty, not well-formed, longer than 16 MiB, \
            has a DTD, another root element or no `<uuid>`, or a number in it that libvirt would refuse too. libvirt itself never \
            hands such a document to the hook; scripts that call the hook, and files given to the command, may.",
    look: &[
        "`virt-xml-validate FILE domain`: what libvirt's schema says of it",
        "`virsh dumpxml DOMAIN`: a document that is in order",
    ],
    remedies: &[
        "Correct the file at the place the message names.",
        "A dispatcher of hook scripts has to hand its stdin on unchanged, and to each script anew.",
    ],
    passes: "No.",
    example: messages::DOMAIN_XML_INVALID,
};

pub(super) const DOMAIN_UNKNOWN: Entry = Entry {
    means: "There is no VM, no file or no lease of that name or UUID. At `started` and `reconnect` it means a VM with a dedicated \
            policy that was not given a lease at its `prepare`: the hook was not installed then, or the daemon did not know of it.",
    look: &[
        "`virt-pin list`: the leases",
        "`virsh list --all`: the VMs that are defined or run",
        "`virt-pin check`: whether the hook is installed and seen, and which dedicated VMs run without a lease",
    ],
    remedies: &[
        "Correct the name. A VM without a definition (`virsh create`) is looked at by its XML: \
         `virsh dumpxml DOMAIN | virt-pin explain -`.",
        "A dedicated VM that runs without a lease: `virt-pin reconcile` gives it one if its vCPUs are on CPUs of their own; \
         otherwise stop it and start it again.",
    ],
    passes: "No.",
    example: messages::DOMAIN_NOT_FOUND,
};

pub(super) const POLICY_INVALID: Entry = Entry {
    means: "The policy has an attribute or a value that does not exist, or attributes that contradict each other or the VM. It is \
            never guessed what was meant: the start is refused, with `fallback=\"shared\"` too.",
    look: &[
        "`man virt-pin-policy`: every attribute and value",
        "`virt-pin explain DOMAIN`: whether it would be in order now, without a start",
    ],
    remedies: &[
        "Correct the attribute named in the message: `virsh edit DOMAIN`, or `virt-pin enable DOMAIN` with options, or the \
         [[domain]] section of the configuration that the message names.",
        "`realtime=\"yes\"` needs elements in the XML; `virt-pin define FILE` and `virt-pin enable DOMAIN` write them.",
    ],
    passes: "No.",
    example: messages::CPU_POLICY_INVALID,
};

pub(super) const POLICY_UNSUPPORTED: Entry = Entry {
    means: "What the policy asks for is understood, and this version does not do it: not at all, or not in this combination.",
    look: &["`virt-pin explain DOMAIN`: the same answer without a start", "`man virt-pin-policy`: what there is"],
    remedies: &["Leave the attribute out, or follow the hint."],
    passes: "No; a later version may do it.",
    example: messages::CPU_POLICY_UNSUPPORTED,
};

pub(super) const POLICY_DENIED: Entry = Entry {
    means: "The operator of this host has limited what policies may ask for, and this one asks for more. VMs that run by the rules \
            of their time stay.",
    look: &[
        "The file and line that the message names: a [[limit]] section",
        "`virt-pin explain DOMAIN`: what the VM asks for",
    ],
    remedies: &["Ask for less, or have the operator change the limit."],
    passes: "No.",
    example: messages::CPU_POLICY_DENIED,
};

pub(super) const STALE_PINS: Entry = Entry {
    means: "The VM has a dedicated policy, and its XML also pins it to CPUs by hand. libvirt applies such pins before any hook can, \
            so they would have to be exactly the CPUs of the lease, and they cannot be: these CPUs are another's, are not pinnable, \
            or do not fit the policy. Mostly the definition was made from the XML of a running VM (`virsh dumpxml` without \
            `--inactive`), or a snapshot was reverted to.",
    look: &[
        "`virsh dumpxml --inactive DOMAIN`: the pins in `<cputune>` and in `<vcpu cpuset>`",
        "`virt-pin map`: whose these CPUs are",
    ],
    remedies: &[
        "Take `<vcpupin>`, `<emulatorpin>`, `<iothreadpin>` and the `cpuset` of `<vcpu>` out: `virsh edit DOMAIN`, for a snapshot \
         `virsh snapshot-edit`.",
        "The agent takes them out of definitions by itself: `systemctl enable --now virt-pin-agent`.",
    ],
    passes: "Only if the pins happen to name CPUs that become free and that the policy can have.",
    example: messages::CPU_XML_STALE_PINS,
};

pub(super) const TOPOLOGY_OTHERWISE: Entry = Entry {
    means: "The policy says `topology=\"require\"`: the guest must be told the cores and threads that it really has, and its XML \
            tells it others. libvirt takes no XML back from a hook at a start, so this has to be right in the definition. Without \
            `require` the VM starts, and the journal says so. (One is refused in any case whose guest's memory virt-pin has bound to \
            a node that its policy does not name any more.)",
    look: &[
        "`virt-pin explain DOMAIN`: the true topology",
        "`virsh dumpxml --inactive DOMAIN`: what its `<cpu><topology>` says",
    ],
    remedies: &[
        "`virt-pin define FILE` defines the VM with its true topology.",
        "The agent does so for every definition a moment after it was made. A VM that is defined and started by one process is \
         faster than that: start it again.",
    ],
    passes: "With the agent running, yes: at the next start.",
    example: messages::CPU_XML_TOPOLOGY,
};

pub(super) const STALE_CACHES: Entry = Entry {
    means: "The XML allocates caches of the host by number (`<cachetune>`, `<memorytune>`), and none of those numbers belongs to the \
            CPUs that the VM would get. libvirt would allocate a part of a cache that the VM never uses.",
    look: &[
        "`virt-pin explain DOMAIN`: the CPUs that it would get",
        "`cat /sys/devices/system/cpu/cpu*/cache/index3/id`: the number of each CPU's last-level cache",
    ],
    remedies: &[
        "Define the VM from what `virt-pin transform FILE` prints: there the numbers follow the CPUs.",
        "Or allocate in every cache of the host alike, so that it does not matter where the VM is.",
    ],
    passes: "Only if other CPUs become free.",
    example: messages::CPU_XML_STALE_CACHES,
};
