//! A machine from a few numbers, for planning: `2s8c2t,numa=2,llc=4`. Pure.
//!
//! Sockets, cores in each socket and threads of each core; then, for the whole machine, how many NUMA nodes and last-level
//! caches (default: one of each per socket). Cores are dealt out evenly and in order. CPUs are numbered as Linux does on
//! x86: the first threads of all cores, then the second ones.

use super::{CoreId, Cpu, LlcId, Node, Topology};
use crate::cpuset::{CpuId, CpuSet, MAX_CPUS, NodeId};
use crate::error::{Code, Error, Result};

/// The machine of this shape.
///
/// # Errors
/// [`Code::Usage`]: not a shape, no CPU, more than [`MAX_CPUS`], or cores that cannot be dealt out evenly.
pub fn parse(text: &str) -> Result<Topology> {
    let wrong = |what: &str| {
        Error::new(Code::Usage, format!("host shape \"{text}\": {what}")).with_hint(
            "such as 2s8c2t,numa=2,llc=4: 2 sockets of 8 cores of 2 threads; 2 nodes and 4 last-level caches in all",
        )
    };
    let mut parts = text.split(',');
    let counts = parts.next().and_then(counts).ok_or_else(|| wrong("must begin with SOCKETSsCOREScTHREADSt"))?;
    let [sockets, cores, threads] = counts;
    let all_cores = u32::from(sockets) * u32::from(cores);
    let cpus = u64::from(all_cores) * u64::from(threads);
    if cpus == 0 || cpus > u64::from(MAX_CPUS) {
        return Err(wrong(&format!("{cpus} CPUs; from 1 to {MAX_CPUS} are possible")));
    }
    let (mut nodes, mut llcs) = (u32::from(sockets), u32::from(sockets));
    for part in parts {
        let (name, count) = part.split_once('=').ok_or_else(|| wrong(&format!("\"{part}\" is not NAME=COUNT")))?;
        let count: u32 =
            count.parse().ok().filter(|&count| count > 0).ok_or_else(|| wrong(&format!("\"{part}\" is no count")))?;
        match name {
            "numa" => nodes = count,
            "llc" => llcs = count,
            _ => return Err(wrong(&format!("\"{name}\" is not known; numa and llc are"))),
        }
    }
    for (count, what) in [(nodes, "nodes"), (llcs, "last-level caches")] {
        if all_cores % count != 0 {
            return Err(wrong(&format!("{all_cores} cores cannot be dealt out evenly to {count} {what}")));
        }
    }
    let small = |number: u32| u16::try_from(number).unwrap_or(u16::MAX);
    let cpu = |number: u32| {
        let core = number % all_cores;
        let llc = core / (all_cores / llcs) * (all_cores / llcs);
        Cpu {
            cpu: CpuId(small(number)),
            online: true,
            isolated: false,
            core: Some(CoreId(small(core))),
            package: Some(small(core / u32::from(cores))),
            die: None,
            cluster: None,
            node: Some(NodeId(small(core / (all_cores / nodes)))),
            llc: Some(LlcId(small(llc))),
            class: None,
        }
    };
    let cpus: Vec<Cpu> = (0..all_cores * u32::from(threads)).map(cpu).collect();
    let nodes = (0..small(nodes)).map(NodeId).map(|node| Node {
        node,
        cpus: cpus.iter().filter(|cpu| cpu.node == Some(node)).map(|cpu| cpu.cpu).collect(),
        memory_bytes: None,
        available_bytes: None,
        huge_pages: Vec::new(),
        distances: Vec::new(),
    });
    let nodes = nodes.collect();
    let possible: CpuSet = cpus.iter().map(|cpu| cpu.cpu).collect();
    Ok(Topology::new(cpus, nodes, possible, Vec::new()))
}

/// `2s8c2t`.
fn counts(text: &str) -> Option<[u16; 3]> {
    let (sockets, rest) = text.split_once('s')?;
    let (cores, rest) = rest.split_once('c')?;
    let threads = rest.strip_suffix('t')?;
    let count = |digits: &str| digits.parse::<u16>().ok().filter(|_| digits.bytes().all(|byte| byte.is_ascii_digit()));
    Some([count(sockets)?, count(cores)?, count(threads)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes() {
        let host = parse("2s8c2t,numa=2,llc=4").unwrap();
        assert_eq!((host.cpus().len(), host.nodes().len(), host.cores().len()), (32, 2, 16));
        let last = host.cpu(CpuId(31)).unwrap();
        assert_eq!(
            (last.core, last.package, last.node, last.llc),
            (Some(CoreId(15)), Some(1), Some(NodeId(1)), Some(LlcId(12)))
        );
        assert_eq!(host.siblings(CpuId(0)).unwrap().to_string(), "0,16");
        assert_eq!(parse("1s4c1t").unwrap().nodes().len(), 1);
        assert_eq!(parse("1s1024c8t").unwrap().cpus().len(), 8192);
        for (text, what) in [
            ("", "must begin"),
            ("2s8c", "must begin"),
            ("+2s8c2t", "must begin"),
            ("0s8c2t", "0 CPUs"),
            ("65535s65535c65535t", "CPUs; from 1"),
            ("2s8c2t,numa=3", "16 cores cannot be dealt out evenly to 3 nodes"),
            ("2s8c2t,numa=0", "no count"),
            ("2s8c2t,l3=4", "\"l3\" is not known"),
            ("2s8c2t,numa", "not NAME=COUNT"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.code == Code::Usage && error.message.contains(what), "{text}: {}", error.message);
        }
    }
}
