//! What kind of machine a host VM is: its packages, cores, threads and nodes, and the Debian on it.

/// A release of Debian that a host can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Debian {
    /// Debian 12: Linux 6.1, systemd 252, libvirt 9.0, QEMU 7.2.
    Bookworm,
    /// Debian 13: Linux 6.12, systemd 257, libvirt 11.3, QEMU 10.0.
    Trixie,
}

impl Debian {
    /// Its name in the archive.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Debian::Bookworm => "bookworm",
            Debian::Trixie => "trixie",
        }
    }
}

/// A kind of host. CPUs are numbered core by core: the threads of a core are neighbours, nodes are ranges.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    packages: u32,
    cores: u32,
    threads: u32,
    nodes: u32,
    cgroup_v1: bool,
    apparmor: bool,
    /// What is installed on it.
    pub(crate) debian: Debian,
}

impl Shape {
    /// Memory of each node: a host needs 0.4 GiB for itself. Only what is used exists.
    const NODE_MIB: u32 = 2048;

    /// So many packages, cores in each, and threads of each core; every package is a node.
    pub(crate) fn new(packages: u32, cores: u32, threads: u32) -> Shape {
        Shape { packages, cores, threads, nodes: packages, cgroup_v1: false, apparmor: false, debian: Debian::Trixie }
    }

    /// The same with so many NUMA nodes, which share the CPUs evenly.
    pub(crate) fn nodes(self, nodes: u32) -> Shape {
        assert!(nodes > 0 && self.cpus() % nodes == 0, "{} CPUs on {nodes} nodes", self.cpus());
        Shape { nodes, ..self }
    }

    /// The same with another Debian.
    pub(crate) fn debian(self, debian: Debian) -> Shape {
        Shape { debian, ..self }
    }

    /// The same with every controller in a cgroup hierarchy of its own, as systemd has it when the kernel's command line
    /// says so.
    pub(crate) fn cgroup_v1(self) -> Shape {
        Shape { cgroup_v1: true, ..self }
    }

    /// The same with AppArmor enforced as Debian has it: libvirt's profiles, and each VM confined.
    pub(crate) fn apparmor(self) -> Shape {
        Shape { apparmor: true, ..self }
    }

    /// What its kernel is told beside what all are.
    pub(crate) fn kernel(self) -> String {
        let cgroups = if self.cgroup_v1 {
            "systemd.unified_cgroup_hierarchy=0 systemd.legacy_systemd_cgroup_controller=1"
        } else {
            ""
        };
        // Denials are in the kernel's log then.
        let security = if self.apparmor { "apparmor=1 security=apparmor audit=1" } else { "apparmor=0 audit=0" };
        format!("{security} {cgroups}")
    }

    fn cpus(self) -> u32 {
        self.packages * self.cores * self.threads
    }

    /// In one word, for people and file names.
    pub(crate) fn name(self) -> String {
        let Shape { packages, cores, threads, nodes, cgroup_v1, apparmor, debian } = self;
        let cgroups = if cgroup_v1 { "-v1" } else { "" };
        let apparmor = if apparmor { "-aa" } else { "" };
        format!("{}-{packages}x{cores}x{threads}-{nodes}n{cgroups}{apparmor}", debian.name())
    }

    /// QEMU's arguments for it; `memory` says where the memory of a node is.
    pub(crate) fn arguments(self, memory: impl Fn(u32) -> String) -> Vec<String> {
        let Shape { packages, cores, threads, nodes, .. } = self;
        let (cpus, each) = (self.cpus(), self.cpus() / nodes);
        let mut arguments = vec![
            // As an Intel CPU the emulated one has caches shared as on real machines, and no nested KVM: a /dev/kvm that
            // does not work costs every start of a VM four seconds.
            "-cpu".to_owned(),
            "max,vendor=GenuineIntel".to_owned(),
            "-smp".to_owned(),
            format!("{cpus},sockets={packages},cores={cores},threads={threads}"),
            "-m".to_owned(),
            format!("{}M", Shape::NODE_MIB * nodes),
        ];
        for node in 0..nodes {
            let first = node * each;
            arguments.extend([
                "-object".to_owned(),
                format!("memory-backend-file,id=memory{node},size={}M,{}", Shape::NODE_MIB, memory(node)),
                "-numa".to_owned(),
                format!("node,nodeid={node},cpus={first}-{},memdev=memory{node}", first + each - 1),
            ]);
        }
        arguments
    }
}

/// Two packages of four cores of two threads, each package a node: CPUs 0-15, siblings 0-1, 2-3, ..., node 0 has 0-7.
impl Default for Shape {
    fn default() -> Shape {
        Shape::new(2, 4, 2)
    }
}
