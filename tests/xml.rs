//! Golden pairs: `tests/xml/<case>/in.xml` and `plan.txt` give `out.xml` or `refusal.txt`.
//!
//! `plan.txt` has one `key value` a line: `vcpus` (a CPU for each, `-` for one that runs on the `shared` CPUs), `shared`,
//! `emulator`, `iothreads` (CPU lists), `guest` (sockets dies cores threads; without it the topology is left alone),
//! `memory-nodes` (a list), for each NUMA cell a `cell` (vCPUs, KiB and node, `-` for none), `scope placement-only` or `shape`,
//! `caches` (for each level 3 cache of the host, from id 0, its CPUs: then cache ids follow), `realtime yes` (what such a domain
//! lacks is written as well), and `schema refuses` or `libvirt refuses` where the *input*
//! is not to the liking of libvirt's schema or of libvirt: both are asked where they are installed, and what they accept as
//! input they must accept as output. `UPDATE=1 cargo test --test xml` writes the
//! outcomes anew; read the difference before committing it.
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
use std::io::Write as _;
use std::path::{Path, PathBuf};

use virt_pin::alloc::plan::{GuestTopology, PlacedCell, Plan};
use virt_pin::alloc::policy::{Kind, Policy};
use virt_pin::alloc::request::Request;
use virt_pin::cpuset::{CpuId, CpuSet, NodeId};
use virt_pin::error::{Error, Result};
use virt_pin::xml::caches::CacheIds;
use virt_pin::xml::pin::Scope;
use virt_pin::xml::{Domain, caches, shape, text_of};

struct Case {
    plan: Plan,
    scope: Scope,
    realtime: bool,
    caches: CacheIds,
    schema_refuses: bool,
    libvirt_refuses: bool,
}

fn parse_case(text: &str) -> Case {
    let mut case = Case {
        plan: Plan::new([], CpuSet::new()),
        scope: Scope::Everything,
        realtime: false,
        caches: CacheIds::new(),
        schema_refuses: false,
        libvirt_refuses: false,
    };
    for line in text.lines() {
        let (key, value) = line.split_once(' ').unwrap();
        let numbers = || value.split(' ').map(|number| number.parse::<u16>().unwrap());
        let cpu = |cpu: &str| (cpu != "-").then(|| CpuId(cpu.parse().unwrap()));
        match (key, value) {
            ("vcpus", _) => case.plan.vcpus = value.split(' ').map(cpu).collect(),
            ("shared", _) => case.plan.shared = CpuSet::parse_kernel_list(value).unwrap(),
            ("memory-nodes", _) => {
                let nodes = CpuSet::parse_kernel_list(value).unwrap();
                case.plan.memory_nodes = Some(nodes.iter().map(|node| NodeId(node.0)).collect());
            }
            ("cell", _) => {
                let [vcpus, kib, node] = value.split(' ').collect::<Vec<_>>().try_into().unwrap();
                case.plan.cells.push(PlacedCell {
                    vcpus: CpuSet::parse_kernel_list(vcpus.trim_matches('-')).unwrap(),
                    bytes: (kib != "-").then(|| kib.parse::<u64>().unwrap() * 1024),
                    node: (node != "-").then(|| NodeId(node.parse().unwrap())),
                });
            }
            ("caches", _) => {
                for (id, cpus) in (0..).zip(value.split(' ')) {
                    let cpus = CpuSet::parse_kernel_list(cpus).unwrap();
                    case.caches.extend(cpus.iter().map(|cpu| ((3, cpu), id)));
                }
            }
            ("realtime", "yes") => case.realtime = true,
            ("emulator", _) => case.plan.emulator = CpuSet::parse_kernel_list(value).unwrap(),
            ("iothreads", _) => case.plan.iothreads = CpuSet::parse_kernel_list(value).unwrap(),
            ("guest", _) => {
                let [sockets, dies, cores, threads] = numbers().collect::<Vec<_>>().try_into().unwrap();
                case.plan.guest = Some(GuestTopology { sockets, dies, cores, threads });
            }
            ("scope", "placement-only") => case.scope = Scope::PlacementOnly,
            ("scope", "shape") => case.scope = Scope::Shape,
            ("schema", "refuses") => case.schema_refuses = true,
            ("libvirt", "refuses") => case.libvirt_refuses = true,
            _ => panic!("plan.txt: {line}"),
        }
    }
    case
}

fn rewritten(input: Vec<u8>, case: &Case) -> Result<String> {
    if case.scope == Scope::Shape {
        return invariants::shaped(&text_of(input)?, &case.plan);
    }
    let mut out = invariants::rewritten(&text_of(input)?, &case.plan, case.scope)?;
    if !case.caches.is_empty() {
        let rewritten = |text: &str| {
            let domain = Domain::parse(text)?;
            Ok::<_, Error>(caches::rewrite(&domain, &case.plan, &case.caches)?.apply(text))
        };
        out = rewritten(&out)?;
        assert_eq!(rewritten(&out)?, out, "a second time changes nothing");
        assert!(caches::check(&Domain::parse(&out)?, &case.plan, &case.caches).is_ok());
    }
    if !case.realtime {
        return Ok(out);
    }
    let vcpus = (0..).zip(&case.plan.vcpus).filter(|(_, own)| own.is_some()).map(|(vcpu, _)| CpuId(vcpu));
    let dedicated_vcpus = Some(vcpus.collect());
    let policy = Policy { kind: Kind::Dedicated, realtime: true, dedicated_vcpus, ..Policy::default() };
    invariants::made_realtime(&out, &Request::new(case.plan.vcpus.len().try_into().unwrap(), policy))
}

fn cases() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/xml");
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut cases: Vec<PathBuf> = entries.filter(|path| path.is_dir()).collect();
    cases.sort();
    cases
}

/// Compares a file with what it should hold, or writes it; `None` = it should not be there.
fn expect(path: &Path, content: Option<&str>) {
    if std::env::var_os("UPDATE").is_some() {
        match content {
            Some(content) => fs::File::create(path).unwrap().write_all(content.as_bytes()).unwrap(),
            None => drop(fs::remove_file(path)),
        }
    }
    let expected = fs::read(path).ok().map(|bytes| String::from_utf8(bytes).unwrap());
    assert!(expected.as_deref() == content, "{}: expected {expected:?}, got {content:?}", path.display());
}

#[test]
fn every_case_comes_out_as_written() {
    let cases = cases();
    assert!(cases.len() >= 35, "only {} cases", cases.len());
    for path in cases {
        let case = parse_case(&fs::read_to_string(path.join("plan.txt")).unwrap());
        let input = fs::read(path.join("in.xml")).unwrap();
        let (out, refusal) = match rewritten(input, &case) {
            Ok(out) => (Some(out), None),
            Err(error) => (None, Some(error.render())),
        };
        expect(&path.join("out.xml"), out.as_deref());
        expect(&path.join("refusal.txt"), refusal.as_deref());
    }
}

#[test]
fn every_document_can_be_shaped_and_restored() {
    let mut shaped = 0;
    for path in cases() {
        let case = parse_case(&fs::read_to_string(path.join("plan.txt")).unwrap());
        let Ok(input) = text_of(fs::read(path.join("in.xml")).unwrap()) else { continue };
        if case.libvirt_refuses || invariants::rewritten(&input, &case.plan, Scope::Everything).is_err() {
            continue;
        }
        invariants::shaped(&input, &case.plan).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        shaped += 1;
    }
    assert!(shaped > 60, "{shaped}");
}

/// libvirt spells much of a definition in its own way, and that must not be taken for a change.
#[test]
fn what_libvirt_makes_of_a_shape_is_the_same_shape() {
    let mut asked = 0;
    for path in cases() {
        let case = parse_case(&fs::read_to_string(path.join("plan.txt")).unwrap());
        let Ok(input) = text_of(fs::read(path.join("in.xml")).unwrap()) else { continue };
        if case.libvirt_refuses || invariants::rewritten(&input, &case.plan, Scope::Everything).is_err() {
            continue;
        }
        let out = invariants::shaped(&input, &case.plan).unwrap();
        let Some(mut kept) = oracle::kept_by_libvirt(out.as_bytes()) else { continue };
        let mut again = shape::shaped(&kept, &case.plan).unwrap();
        if again != kept {
            // What libvirt drops (an empty <numatune>) may make room for something of ours, once.
            kept = oracle::kept_by_libvirt(again.as_bytes()).unwrap();
            again = shape::shaped(&kept, &case.plan).unwrap();
        }
        assert_eq!(again, kept, "{}", path.display());
        asked += 1;
    }
    if asked == 0 {
        eprintln!("skipped: no virsh");
    }
}

#[test]
fn libvirt_and_its_schema_accept_what_they_accepted_before() {
    let mut skipped = [0, 0];
    let mut complaints = Vec::new();
    for path in cases() {
        let case = parse_case(&fs::read_to_string(path.join("plan.txt")).unwrap());
        let input = fs::read(path.join("in.xml")).unwrap();
        let output = rewritten(input.clone(), &case).ok();
        let oracles: [(&str, oracle::Oracle, bool); 2] = [
            ("libvirt's schema", oracle::schema_accepts, case.schema_refuses),
            ("libvirt", oracle::libvirt_accepts, case.libvirt_refuses),
        ];
        for (index, (name, accepts, refuses)) in oracles.into_iter().enumerate() {
            let Some(accepted) = accepts(&input) else {
                skipped[index] += 1;
                continue;
            };
            let name = format!("{name} about {}", path.file_name().unwrap().to_string_lossy());
            if accepted == refuses {
                complaints.push(format!("{name}: plan.txt says otherwise of in.xml, which it accepts: {accepted}"));
            }
            if accepted && output.as_ref().is_some_and(|output| accepts(output.as_bytes()) != Some(true)) {
                complaints.push(format!("{name}: the outcome is refused, in.xml is not"));
            }
        }
    }
    if skipped != [0, 0] {
        eprintln!("skipped: {} cases without libvirt's schema, {} without virsh", skipped[0], skipped[1]);
    }
    assert!(complaints.is_empty(), "{complaints:#?}");
}
