//! Room: requests that are in order, and for which there is no place.

use super::{Entry, messages};

pub(super) const SHORTAGE: Entry = Entry {
    means: "The request is in order and this host could honour it, but not now: too few of the CPUs it may hand out are free. \
            The start is refused and nothing has changed. (With `fallback=\"shared\"` in the policy the VM starts without CPUs of its \
            own instead.)",
    look: &[
        "`virt-pin list`: who holds which CPUs",
        "`virt-pin capacity`: what is free, and what is withheld for want of its sibling",
        "`virt-pin explain DOMAIN`: the same decision, step by step",
    ],
    remedies: &[
        "Stop a VM that holds some; the message names them.",
        "Add CPUs to `pinnable_cpus`, if the host can spare them.",
        "Ask for less: fewer vCPUs, or `cores=\"thread\"` where siblings may go to others.",
    ],
    passes: "Yes, when enough are free: at the end of other VMs.",
    example: messages::CPU_PLACEMENT_SHORTAGE,
};

pub(super) const NEEDS_REPACK: Entry = Entry {
    means: "Enough CPUs are free in all, but not in the shape asked for: on several nodes where the policy wants one, in several \
            caches, or as lone threads of cores that are partly taken. No placement that is merely similar is ever handed out.",
    look: &[
        "`virt-pin map`: the machine drawn, with who has what",
        "`virt-pin repack --dry-run --for DOMAIN`: the moves that would make room",
        "`virt-pin explain DOMAIN`: the same decision, step by step",
    ],
    remedies: &[
        "`virt-pin repack --for DOMAIN` moves running VMs out of the way, one at a time; it undoes what goes wrong.",
        "Or stop and start the VMs that the hint names, after this one.",
        "Or ask for less: `numa=\"prefer\"` and `cache=\"prefer\"` in place of `single`.",
    ],
    passes: "Perhaps, when VMs that lie in the way end.",
    example: messages::CPU_PLACEMENT_NEEDS_REPACK,
};

pub(super) const UNSATISFIABLE: Entry = Entry {
    means: "This host cannot honour the request even with every pinnable CPU free and all its memory unused. Waiting does not help.",
    look: &[
        "`virt-pin topology`: packages, nodes, caches and cores of this host",
        "`virt-pin capacity`: which CPUs may be handed out; cores with a sibling that may not are no whole cores",
        "`virt-pin explain DOMAIN`: the same decision, step by step",
    ],
    remedies: &[
        "With nothing in `pinnable_cpus` every request is refused: `virt-pin suggest` proposes a value.",
        "Ask for less, or for a shape that this host has (fewer vCPUs on one node, another `core-class`, other `nodes`).",
        "Hand out whole cores: with each CPU in `pinnable_cpus` its siblings.",
    ],
    passes: "No. CPUs that are offline count again once they are back.",
    example: messages::CPU_PLACEMENT_UNSATISFIABLE,
};

pub(super) const MEMORY_SHORTAGE: Entry = Entry {
    means: "There are CPUs, but the guest's memory (or its huge pages) does not fit on the nodes of any set of them: with \
            `memory=\"follow\"`, the default, it has to. Memory that the host uses for its page cache counts as free.",
    look: &[
        "`virt-pin topology`: memory, what of it is available, and free huge pages of each node",
        "`virt-pin explain DOMAIN`: which nodes were tried",
    ],
    remedies: &[
        "Free memory there: stop or move a VM, or reserve more huge pages on that node.",
        "Give the guest less memory, or leave it more nodes (`numa=\"prefer\"` or `\"spread\"`).",
        "`memory=\"any\"` in the policy takes memory from wherever it is, which is slower.",
    ],
    passes: "Yes, when memory on those nodes becomes free.",
    example: messages::CPU_NUMA_MEMORY_SHORTAGE,
};

pub(super) const STATIC_CONFLICT: Entry = Entry {
    means: "The VM has no policy, but its XML pins it to CPUs by hand, and these are leased to a dedicated VM. Two VMs on a CPU that \
            one of them has for itself are what virt-pin is there to prevent.",
    look: &["`virt-pin list`: who holds the CPUs", "`virsh dumpxml --inactive DOMAIN`: the pins"],
    remedies: &[
        "Pin it to other CPUs, or to none: `virsh edit DOMAIN`.",
        "Keep CPUs for such VMs out of `pinnable_cpus`: then no lease is ever in their way.",
        "Or give the VM a policy: `virt-pin enable DOMAIN`.",
    ],
    passes: "Yes, when the VM that holds the CPUs ends.",
    example: messages::CPU_STATIC_CONFLICT,
};

pub(super) const RESERVED: Entry = Entry {
    means: "The only free CPUs are set aside for dedicated VMs that are marked autostart and do not run now: whoever is to start with \
            the host is to find its place.",
    look: &[
        "`virt-pin explain DOMAIN`: for whom which CPUs are set aside",
        "`virsh list --all --autostart`: the VMs that are marked",
    ],
    remedies: &[
        "Take the mark off a VM that does not need it: `virsh autostart --disable VM`.",
        "`autostart_reserve = \"prefer\"` in /etc/virt-pin/virt-pin.toml lets others in where nothing else is left.",
        "Or stop a VM that holds CPUs, as with any lack of room.",
    ],
    passes: "Yes, when other VMs end.",
    example: messages::CPU_PLACEMENT_RESERVED,
};

pub(super) const SHARED_POOL_EMPTY: Entry = Entry {
    means: "VMs without a lease run on the CPUs that are not leased. With this one's lease none would be left while such a VM runs; \
            or every CPU is leased already and it is such a VM that is to start.",
    look: &["`virt-pin capacity`: its line Shared", "`virt-pin list`: the leases; `virsh list`: the VMs without one"],
    remedies: &[
        "Take CPUs out of `pinnable_cpus`: those are never leased. `virt-pin suggest` proposes which to keep.",
        "Stop the VMs without a lease, or one that has a lease.",
    ],
    passes: "Yes, when leases end, or the VMs without one do.",
    example: messages::CPU_SHARED_NO_CPUS,
};
