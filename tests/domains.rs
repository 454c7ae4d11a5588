//! Domain documents that people really use, kept outside the repository (`../shared/domains`): each is rewritten with
//! every invariant checked, or refused with a reason, and what libvirt's schema or libvirt accepted before, it accepts
//! after. Without the documents there is nothing to do.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "integration tests"
)]

mod invariants;
mod oracle;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use virt_pin::alloc::plan::{GuestTopology, PlacedCell, Plan};
use virt_pin::alloc::policy::Policy;
use virt_pin::alloc::request::Request;
use virt_pin::cpuset::{CpuId, CpuSet, NodeId};
use virt_pin::error::{Code, Result};
use virt_pin::xml::pin::Scope;
use virt_pin::xml::{Domain, read, text_of};

fn documents(directory: &str) -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/domains").join(directory);
    let Ok(entries) = fs::read_dir(&directory) else {
        eprintln!("skipped: no documents in {}", directory.display());
        return Vec::new();
    };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "xml"));
    paths.sort();
    paths
}

/// vCPU i on CPU i + 4, in two threads a core where that works; the cells of the document, or two, each on a node.
fn plan_for(request: &Request) -> Plan {
    let vcpus = request.vcpus;
    let threads = if vcpus % 2 == 0 { 2 } else { 1 };
    let housekeeping: CpuSet = (0..4).map(CpuId).collect();
    let guest = Some(GuestTopology { sockets: 1, dies: 1, cores: vcpus / threads, threads });
    let half = |vcpus: std::ops::Range<u16>, bytes| (vcpus.map(CpuId).collect(), bytes);
    let cells: Vec<(CpuSet, u64)> = match request.memory {
        Some(memory) if request.cells.is_empty() => {
            let first = memory.bytes / 2048 * 1024;
            vec![half(0..vcpus / 2, first), half(vcpus / 2..vcpus, memory.bytes - first)]
        }
        _ => request.cells.iter().map(|cell| (cell.vcpus.clone(), cell.bytes)).collect(),
    };
    let cells = (0..).zip(cells).map(|(node, (vcpus, bytes))| PlacedCell {
        vcpus,
        bytes: Some(bytes),
        node: Some(NodeId(node)),
    });
    let cells: Vec<_> = cells.collect();
    let memory_nodes = Some(cells.iter().filter_map(|cell| cell.node).collect());
    Plan { guest, cells, memory_nodes, ..Plan::new((4..4 + vcpus).map(CpuId), housekeeping) }
}

fn rewritten(bytes: Vec<u8>) -> Result<String> {
    let text = text_of(bytes)?;
    let domain = Domain::parse(&text)?;
    read::policy_attributes(&domain)?;
    let request = read::request(&domain, Policy::default())?;
    read::pci_devices(&domain)?;
    let plan = plan_for(&request);
    invariants::rewritten(&text, &plan, Scope::PlacementOnly)?;
    let out = invariants::rewritten(&text, &plan, Scope::Everything)?;
    // A scheduler of another kind is a contradiction, which stays.
    let realtime = Request { policy: Policy { realtime: true, ..Policy::default() }, ..request };
    match invariants::made_realtime(&out, &realtime) {
        Err(error) if error.code == Code::PolicyInvalid => Ok(out),
        made => made,
    }
}

#[test]
fn real_documents_are_rewritten_or_refused_with_a_reason() {
    let (mut done, mut pinned, mut named) = (0, 0, 0);
    let mut refusals = Vec::new();
    let paths: Vec<_> = [documents("."), documents("malformed")].concat();
    for path in &paths {
        let bytes = fs::read(path).unwrap();
        match rewritten(bytes.clone()) {
            Ok(_) => {
                let text = text_of(bytes).unwrap();
                let domain = Domain::parse(&text).unwrap();
                done += 1;
                pinned += usize::from(read::pins(&domain).is_ok_and(|pins| !pins.is_empty()));
                named += usize::from(read::identity(&domain).is_ok());
            }
            Err(error) => {
                assert_eq!(error.code, Code::DomainInvalid, "{}: {error}", path.display());
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                refusals.push(format!("{name}: {error} {}", error.causes().join("; ")));
            }
        }
    }
    eprintln!("{} documents: {done} rewritten ({pinned} had pins, {named} an identity), refused:", paths.len());
    refusals.iter().for_each(|refusal| eprintln!("  {refusal}"));
}

#[test]
fn what_was_accepted_before_is_accepted_after() {
    let work = Mutex::new(documents("."));
    let failures = Mutex::new(Vec::new());
    let counts = Mutex::new([0; 2]);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let Some(path) = work.lock().unwrap().pop() else {
                        return;
                    };
                    let input = fs::read(&path).unwrap();
                    let Ok(output) = rewritten(input.clone()) else {
                        continue;
                    };
                    let oracles: [oracle::Oracle; 2] = [oracle::schema_accepts, oracle::libvirt_accepts];
                    for (index, accepts) in oracles.into_iter().enumerate() {
                        if accepts(&input) == Some(true) {
                            counts.lock().unwrap()[index] += 1;
                            if accepts(output.as_bytes()) != Some(true) {
                                failures.lock().unwrap().push((index, path.clone()));
                            }
                        }
                    }
                }
            });
        }
    });
    let [schema, libvirt] = counts.into_inner().unwrap();
    eprintln!("accepted before and after: by the schema {schema}, by libvirt {libvirt}");
    assert_eq!(failures.into_inner().unwrap(), []);
}
