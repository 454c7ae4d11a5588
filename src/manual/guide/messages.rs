//! The message of each code as it was printed. Written by `tests/codes.rs` (`UPDATE=1`), which provokes each; never by hand.

pub(super) const INTERNAL: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[internal]: domain "db": refused to write leases: CPUs 2,10 of "web" have two owners
  hint: report it with the message and the output of `virt-pin gather`
"#;

pub(super) const USAGE: &str = r#"# virt-pin lease db --colour
virt-pin: error[usage]: unexpected argument '--colour' found
  hint: to pass '--colour' as a value, use '-- --colour'; usage: virt-pin lease <DOMAIN>; `virt-pin help` says more
"#;

pub(super) const CHECK_FAILED: &str = r#"# virt-pin check
virt-pin: error[check.failed]: 1 check failed
  hint: each FAIL line says what to do
"#;

pub(super) const DOMAIN_XML_INVALID: &str = r#"# virt-pin define /db.xml
virt-pin: error[domain.xml.invalid]: /db.xml: the document is not well-formed XML
  because: the root node was opened but never closed
  hint: correct what the message names (`virsh edit`); `virt-xml-validate FILE domain` looks at a whole file
"#;

pub(super) const DOMAIN_NOT_FOUND: &str = r#"# virt-pin lease db
virt-pin: error[domain.not-found]: no lease for a domain "db"
  hint: `virt-pin list` shows the leases; `virt-pin explain DOMAIN` says what the domain would get
"#;

pub(super) const CPU_POLICY_INVALID: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[cpu.policy.invalid]: domain "db": unknown value "one" of policy attribute "numa"
  hint: accepted: "prefer", "single", "spread", "any"
"#;

pub(super) const CPU_POLICY_UNSUPPORTED: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[cpu.policy.unsupported]: domain "db": isolation="partition" cannot be made: emulator shares CPUs 2 with other threads of the VM while others of its threads are outside the lease
  hint: set emulator and iothreads to the same value, and leave out dedicated-vcpus
"#;

pub(super) const CPU_POLICY_DENIED: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[cpu.policy.denied]: domain "db": asks for CPUs of its own for 4 of its vCPUs, /etc/virt-pin/virt-pin.toml:3 allows 2
  hint: ask for less, or change the limit named in the message
"#;

pub(super) const CPU_PLACEMENT_SHORTAGE: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[cpu.placement.shortage]: domain "db": needs 2 whole cores (4 vCPUs, 2 on each), 1 of the 2 pinnable are free
  hint: held by "web" 2,10; stop a VM that holds some, or add to pinnable_cpus
"#;

pub(super) const CPU_PLACEMENT_NEEDS_REPACK: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[cpu.placement.needs-repack]: domain "db": needs 2 whole cores on one node (4 vCPUs, 2 on each), 1 of them free; 2 whole cores and 4 threads are free in all, but scattered
  per node: 0 has 1 whole core, 2 threads free; 1 has 1 whole core, 2 threads free
  hint: moving "vm4" from CPUs 4,12 to 3,11 would make room: `virt-pin repack --for DOMAIN` does that while they run; or relax numa, cache or cores
"#;

pub(super) const CPU_PLACEMENT_UNSATISFIABLE: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[cpu.placement.unsatisfiable]: domain "db": needs 3 whole cores (6 vCPUs, 2 on each), this host has 2 of them pinnable
  hint: ask for less, or change pinnable_cpus
"#;

pub(super) const CPU_NUMA_MEMORY_SHORTAGE: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[cpu.numa.memory-shortage]: domain "db": needs 63488 MiB of memory on the nodes of its CPUs (0), 58593 MiB are free there
  hint: free memory on those nodes, or set memory="any"
"#;

pub(super) const CPU_STATIC_CONFLICT: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[cpu.static.conflict]: domain "db": its XML pins vCPUs to CPUs 10, but 10 are leased to domain "web"
  hint: change the pins, or stop the VM that holds the CPUs
"#;

pub(super) const CPU_XML_STALE_PINS: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[cpu.xml.stale-pins]: domain "db": the XML of this dedicated domain also pins vCPU 0 to CPUs 0; its lease says 2
  hint: take <vcpupin>, <emulatorpin>, <iothreadpin> and <vcpu cpuset> out of the XML (virsh edit; for a snapshot, virsh snapshot-edit): the policy chooses the CPUs at each start
"#;

pub(super) const CPU_PLACEMENT_RESERVED: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[cpu.placement.reserved]: domain "db": there is room only on CPUs set aside for autostart domains that do not run yet: "web" 2,10
  hint: set autostart_reserve = "prefer" in /etc/virt-pin/virt-pin.toml to let it take their room, start them elsewhere first, or take autostart off them (virsh autostart --disable)
"#;

pub(super) const CPU_SHARED_NO_CPUS: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[cpu.shared.no-cpus]: domain "db": no CPU would be left for VMs without a lease, and qemu-5-web is one that runs
  hint: take CPUs out of pinnable_cpus: VMs without a lease run on what is not leased
"#;

pub(super) const CPU_XML_STALE_CACHES: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[cpu.xml.stale-caches]: domain "db": its <cachetune> for vCPUs 0-1 names level 3 caches 0, but these vCPUs get CPUs that use 1
  hint: `virt-pin transform` prints the document with the right ids where there are as many, all allocated alike; otherwise name every cache of the host, or choose the CPUs with cpus or nodes in the policy
"#;

pub(super) const CPU_XML_TOPOLOGY: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[cpu.xml.topology]: domain "db": its XML tells the guest 2 sockets of 1 core of 1 thread, not 1 core of 2 threads
  hint: `virt-pin define FILE` writes the true ones into the XML, and so does the agent
"#;

pub(super) const STATE_LOCKED: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[state.locked]: /run/virt-pin/lock was held by another process (pid 812, "virt-pin") for 2000 ms
  hint: try again; if it persists, see what the process that holds it waits for (`fuser -v` on the lock file)
"#;

pub(super) const STATE_CORRUPT: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[state.corrupt]: /run/virt-pin/leases.json is not a lease file: EOF while parsing a string at line 1 column 218
  hint: `virt-pin reconcile` rebuilds it from the running VMs
"#;

pub(super) const STATE_NEWER: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[state.newer]: /run/virt-pin/leases.json has version 3; this is virt-pin 0.1.0 and reads up to 2
  hint: use that version again; nothing was changed
"#;

pub(super) const STATE_UNSAFE: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[state.unsafe]: /run/virt-pin has mode 0777: others may write to it
  hint: `chmod 0700 /run/virt-pin`: until then no lease is granted
"#;

pub(super) const STATE_CONFLICT: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[state.conflict]: domain "db": its former QEMU (pid 700) is still alive and holds CPUs 2,10
  hint: see what the message names: a process, whose lease ends with it, or what keeps the lease where it is
"#;

pub(super) const HOST_TOPOLOGY_UNREADABLE: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[host.topology.unreadable]: cannot tell the CPUs from /sys/devices/system/cpu/online: no CPU is online
  hint: look at the path in the message; `virt-pin topology` shows what can be read
"#;

pub(super) const HOST_IO: &str = r#"# virt-pin gather /host.txt
virt-pin: error[host.io]: cannot write /host.txt: File exists (os error 17)
  hint: look at the path and the reason in the message
"#;

pub(super) const HOST_ISOLATION_UNSUPPORTED: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[host.isolation.unsupported]: domain "db": isolation="partition" needs cgroup v2: the cpuset controller is that of cgroup v1 (at /sys/fs/cgroup/cpuset)
  hint: leave isolation out; isolation="slices" works on older kernels, with systemd and cgroup v2
"#;

pub(super) const CONFIG_INVALID: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[config.invalid]: /etc/virt-pin/virt-pin.toml:1: pinnable_cpus = "2-": expected the end of the range, found the end at position 3
  hint: correct it, then run `virt-pin check`
"#;

pub(super) const ENFORCE_CONFINEMENT: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[enforce.confinement]: domain "db": cannot confine the domain before its start: cannot write "0" to /sys/fs/cgroup/cpuset/machine/qemu-1-db.libvirt-qemu/cpuset.mems: No such file or directory (os error 2)
  hint: `virt-pin check` shows the cgroup mode in use; the start was refused and nothing is held
"#;

pub(super) const ENFORCE_THREAD: &str = r#"# virt-pin-hook db started begin - < db.xml
virt-pin: error[enforce.thread]: domain "db": the thread of vCPU 1 ("CPU 1/KVM", tid 702) may run on CPUs 3, its lease says 10
  hint: find out who moved the thread named in the message (a hook script, taskset, numad), or from QEMU's log why it ended; then start the VM again
"#;

pub(super) const ENFORCE_ISOLATION: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[enforce.isolation]: domain "db": irqs="away" would leave no CPU to interrupts: CPUs 0-15 are all that is online
  hint: take CPUs out of pinnable_cpus for the host
"#;

pub(super) const ENFORCE_CORE_SCHED: &str = r#"# virt-pin-hook db prepare begin - < db.xml
virt-pin: error[enforce.core-sched]: domain "db": policy core-sched="tenant": this kernel has no core scheduling (prctl PR_SCHED_CORE)
  because: Invalid argument (os error 22)
  hint: run a kernel with CONFIG_SCHED_CORE, or leave core-sched out of the policy
"#;

pub(super) const LIBVIRT_FAILED: &str = r#"# virt-pin sync web
virt-pin: error[libvirt.failed]: cannot connect to qemu:///system: Failed to connect socket to '/var/run/libvirt/libvirt-sock': No such file or directory
  hint: see what the message says of libvirt or the VM; `virsh -c qemu:///system list` shows whether it answers
"#;

pub(super) const INSTALL_CONFLICT: &str = r#"# virt-pin install
virt-pin: error[install.conflict]: /etc/libvirt/hooks/qemu.d/10-virt-pin is somebody else's script; it was left as it is
  hint: give it another name in qemu.d/; before libvirt 6.5, which has no qemu.d/, have one script call both
"#;
