//! Domain documents that others wrote, kept outside the repository: those that people really use (`../shared/domains`) and
//! those of libvirt's own test-suite (`scripts/corpus`). Each is rewritten with every invariant checked, or refused with a
//! reason, and what libvirt's schema or libvirt accepted before, it accepts after. Without the documents there is nothing to do.
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

use std::collections::BTreeMap;
use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

use virt_pin::alloc::plan::{GuestTopology, PlacedCell, Plan};
use virt_pin::alloc::policy::Policy;
use virt_pin::alloc::request::Request;
use virt_pin::cpuset::{CpuId, CpuSet, NodeId};
use virt_pin::error::{Code, Result};
use virt_pin::xml::pin::Scope;
use virt_pin::xml::{Domain, read, text_of};

/// The documents of a directory beside the repository.
fn shared(directory: &str) -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/domains").join(directory);
    if !directory.is_dir() {
        eprintln!("skipped: no documents in {}", directory.display());
        return Vec::new();
    }
    documents(&directory, false)
}

/// The domains of a tree of documents of all kinds, as `scripts/corpus` makes one.
fn corpus() -> Vec<PathBuf> {
    let Some(directory) = std::env::var_os("VIRT_PIN_CORPUS").filter(|directory| !directory.is_empty()) else {
        eprintln!("skipped: VIRT_PIN_CORPUS names no directory; `make corpus` fills one from libvirt's test-suite");
        return Vec::new();
    };
    if !Path::new(&directory).is_dir() {
        eprintln!("skipped: there is no {}", Path::new(&directory).display());
        return Vec::new();
    }
    let mut paths = documents(Path::new(&directory), true);
    paths.retain(|path| {
        let text = String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned();
        // What no parser takes is somebody's idea of a domain if it says so.
        roxmltree::Document::parse(&text).map_or_else(
            |_| text.contains("<domain ") || text.contains("<domain>"),
            |document| document.root_element().has_tag_name("domain"),
        )
    });
    paths
}

fn documents(directory: &Path, deep: bool) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        if kind.is_dir() && deep {
            paths.extend(documents(&path, deep));
        } else if kind.is_file() && path.extension().is_some_and(|extension| extension == "xml") {
            // A link is another name of a document that is there.
            paths.push(path);
        }
    }
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

/// Rewrites each document or has a reason not to; what was accepted before is accepted after.
fn rewrites_or_refuses(paths: &[PathBuf]) {
    let (mut before, mut after, mut names) = (Vec::new(), Vec::new(), Vec::new());
    let (mut pinned, mut named, mut broken) = (0, 0, Vec::new());
    let mut refusals: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for path in paths {
        let bytes = fs::read(path).unwrap();
        let Ok(outcome) = catch_unwind(|| rewritten(bytes.clone())) else {
            broken.push(path);
            continue;
        };
        match outcome {
            Ok(output) => {
                let text = text_of(bytes.clone()).unwrap();
                let domain = Domain::parse(&text).unwrap();
                pinned += usize::from(read::pins(&domain).is_ok_and(|pins| !pins.is_empty()));
                named += usize::from(read::identity(&domain).is_ok());
                names.push(path);
                before.push(bytes);
                after.push(output.into_bytes());
            }
            Err(error) => {
                assert_eq!(error.code, Code::DomainInvalid, "{}: {error}", path.display());
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                let reason = format!("{error} {}", error.causes().join("; "));
                refusals.entry(reason).or_default().push(name);
            }
        }
    }
    let done = names.len();
    eprintln!("{} documents: {done} rewritten ({pinned} had pins, {named} an identity), refused:", paths.len());
    refusals.iter().for_each(|(reason, names)| eprintln!("  {reason}: {}", names.join(", ")));
    assert_eq!(broken, Vec::<&PathBuf>::new(), "see above why");
    let juries: [(&str, oracle::Jury); 2] =
        [("libvirt's schema", oracle::schema_accepts_of), ("libvirt", oracle::libvirt_accepts_of)];
    for (who, accepts) in juries {
        let (Some(was), Some(is)) = (accepts(&before), accepts(&after)) else {
            eprintln!("{who} is not here to be asked");
            continue;
        };
        let accepted = was.iter().filter(|accepted| **accepted).count();
        eprintln!("{who} accepts {accepted} of these before");
        let no_more = names.iter().zip(was.iter().zip(&is)).filter(|(_, (was, is))| **was && !**is);
        assert_eq!(no_more.map(|(name, _)| name).collect::<Vec<_>>(), Vec::<&&PathBuf>::new(), "{who}, after");
    }
}

#[test]
fn real_documents_are_rewritten_or_refused_with_a_reason() {
    rewrites_or_refuses(&[shared("."), shared("malformed")].concat());
}

#[test]
fn documents_of_libvirts_own_tests() {
    rewrites_or_refuses(&corpus());
}
