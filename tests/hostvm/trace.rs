//! Who ran where, counted by the kernel: every switch of tasks on every CPU, from the instant QEMU is executed to its end.
//!
//! Histograms of tracefs count in the kernel, so nothing is sampled and nothing is lost unnoticed.

use std::collections::{BTreeMap, BTreeSet};

use crate::host::Host;

/// Counting begins when QEMU is executed. Who was created by whom is counted from now on. All of it in an instance of its own,
/// which takes everything along when it is removed.
const ARM: &str = r#"
    mkdir /sys/kernel/tracing/instances/proof && cd /sys/kernel/tracing/instances/proof/events/sched &&
    for way in prev next; do
        echo "hist:keys=common_cpu,${way}_pid,${way}_comm:size=16384:pause" >>sched_switch/trigger
    done &&
    echo 'hist:keys=parent_pid,child_pid:size=16384' >>sched_process_fork/trigger &&
    echo 'enable_hist:sched:sched_switch if filename ~ "*/qemu-system-*"' >>sched_process_exec/trigger"#;

/// Counting ends when this process does.
const UNTIL: &str = r#"cd /sys/kernel/tracing/instances/proof/events/sched &&
    echo "disable_hist:sched:sched_switch if pid == $0" >>sched_process_exit/trigger"#;

/// Kernel threads have PF_KTHREAD among their flags (`/proc/PID/stat`, the seventh field behind the name).
const READ: &str = r#"
    cd /sys/kernel/tracing/instances/proof/events/sched && cat sched_switch/hist sched_process_fork/hist || exit
    for stat in /proc/[0-9]*/stat; do
        line=$(cat $stat 2>/dev/null) && set -- ${line##*) } && (($7 & 0x200000)) && echo "kernel ${stat//[^0-9]}"
    done
    cd / && rmdir /sys/kernel/tracing/instances/proof"#;

/// A task that ran on a CPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Run {
    /// Where.
    pub(crate) cpu: u16,
    /// Its thread id.
    pub(crate) tid: u32,
    /// What it was called then.
    pub(crate) comm: String,
    /// How often it came to run, or went.
    pub(crate) count: u64,
}

/// What was counted.
#[derive(Debug)]
pub(crate) struct Trace {
    runs: Vec<Run>,
    /// Child to parent.
    parents: BTreeMap<u32, u32>,
    kernel: BTreeSet<u32>,
}

impl Host {
    /// Counts from the next execution of QEMU.
    pub(crate) fn trace(&self) {
        self.sh(ARM).ok();
    }

    /// Counts until this process ends.
    pub(crate) fn trace_until_the_end_of(&self, pid: u32) {
        self.exec(&["bash", "-c", UNTIL, &pid.to_string()]).ok();
    }

    /// What was counted; nothing is from now on.
    pub(crate) fn traced(&self) -> Trace {
        Trace::parse(&self.sh(READ).ok())
    }
}

impl Trace {
    /// `{ common_cpu:  2, next_pid:  485, next_comm: CPU 1/TCG  } hitcount:  10`, `{ parent_pid: 1, child_pid: 2 } ...`,
    /// `Dropped: 0`, `kernel 2`.
    fn parse(text: &str) -> Trace {
        let mut trace = Trace { runs: Vec::new(), parents: BTreeMap::new(), kernel: BTreeSet::new() };
        for line in text.lines().map(str::trim) {
            if let Some(dropped) = line.strip_prefix("Dropped:") {
                assert_eq!(dropped.trim(), "0", "the kernel had no room for all that happened");
            }
            trace.kernel.extend(line.strip_prefix("kernel ").map(|tid| tid.parse::<u32>().unwrap()));
            let Some((keys, count)) = line.strip_prefix('{').and_then(|line| line.split_once("} hitcount:")) else {
                continue;
            };
            let fields: BTreeMap<&str, &str> = keys
                .splitn(3, ',')
                .map(|field| field.split_once(':').unwrap())
                .map(|(k, v)| (k.trim(), v.trim()))
                .collect();
            let number = |key: &str| fields.get(key).map(|value| value.parse::<u32>().unwrap());
            if let (Some(child), Some(parent)) = (number("child_pid"), number("parent_pid")) {
                trace.parents.insert(child, parent);
                continue;
            }
            let comm = fields.get("next_comm").or(fields.get("prev_comm")).unwrap();
            trace.runs.push(Run {
                cpu: u16::try_from(number("common_cpu").unwrap()).unwrap(),
                tid: number("next_pid").or(number("prev_pid")).unwrap(),
                comm: (*comm).to_owned(),
                count: count.trim().parse().unwrap(),
            });
        }
        assert!(!trace.runs.is_empty(), "nothing was counted: {text}");
        trace
    }

    /// Whether `tid` is `ancestor` or was created by it, directly or not.
    fn descends(&self, tid: u32, ancestor: u32) -> bool {
        tid == ancestor || self.parents.get(&tid).is_some_and(|parent| self.descends(*parent, ancestor))
    }

    /// What this process ran, with all its threads and children.
    pub(crate) fn of(&self, pid: u32) -> Vec<&Run> {
        self.runs.iter().filter(|run| self.descends(run.tid, pid)).collect()
    }

    /// What ran of user space, but for this process and its threads.
    pub(crate) fn of_others(&self, pid: u32) -> Vec<&Run> {
        /// All kernel threads are its children, those that have ended too.
        const KTHREADD: u32 = 2;
        let user = |run: &&Run| run.tid != 0 && !self.kernel.contains(&run.tid) && !self.descends(run.tid, KTHREADD);
        self.runs.iter().filter(user).filter(|run| !self.descends(run.tid, pid)).collect()
    }
}
