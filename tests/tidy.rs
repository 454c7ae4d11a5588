//! What the code promises about itself: who may use whom, what is pure, what every file says first, what the hook is linked
//! with, what the documentation lists. Reads the sources as text; see ARCHITECTURE.md for the reasons.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    clippy::cast_possible_truncation,
    reason = "integration tests"
)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use virt_pin::alloc::policy::ATTRIBUTES;
use virt_pin::error::Code;

/// Which parts of the library a part may use.
const MAY_USE: &[(&str, &[&str])] = &[
    ("cpuset", &[]),
    ("error", &[]),
    ("failpoint", &[]),
    ("uuid", &[]),
    ("document", &[]),
    ("host", &["cpuset", "document", "error", "failpoint"]),
    ("alloc", &["cpuset", "error", "host"]),
    ("xml", &["alloc", "cpuset", "document", "error", "host", "uuid"]),
    ("config", &["alloc", "cpuset", "error", "host", "uuid"]),
    ("lock", &["alloc", "cpuset", "error", "failpoint", "host", "uuid"]),
    ("enforce", &["alloc", "cpuset", "error", "failpoint", "host", "lock", "uuid"]),
    ("decision", &["alloc", "config", "cpuset", "enforce", "error", "host", "lock", "uuid", "xml"]),
    ("conditions", &["alloc", "decision", "enforce", "error", "host", "lock", "uuid", "xml"]),
    ("definitions", &["alloc", "config", "decision", "error", "host", "uuid", "xml"]),
    ("kept", &["alloc", "config", "decision", "definitions", "error", "host", "uuid", "xml"]),
    ("log", &["cpuset", "error", "host", "uuid"]),
    (
        "relocate",
        &[
            "alloc",
            "config",
            "cpuset",
            "decision",
            "definitions",
            "enforce",
            "error",
            "failpoint",
            "host",
            "lock",
            "log",
            "uuid",
            "xml",
        ],
    ),
    ("report", &["error", "host", "lock"]),
    // The tables that it makes pages of, and the names of files.
    ("manual", &["alloc", "config", "error", "hook", "lock"]),
    ("libvirt", &["cpuset", "error", "host", "uuid"]),
    (
        "agent",
        &[
            "alloc", "config", "cpuset", "decision", "enforce", "error", "host", "kept", "libvirt", "lock", "log",
            "relocate", "report", "uuid", "xml",
        ],
    ),
    (
        "hook",
        &[
            "alloc",
            "conditions",
            "config",
            "cpuset",
            "decision",
            "definitions",
            "enforce",
            "error",
            "failpoint",
            "host",
            "lock",
            "log",
            "relocate",
            "report",
            "uuid",
            "xml",
        ],
    ),
    (
        "cli",
        &[
            "agent",
            "alloc",
            "conditions",
            "config",
            "cpuset",
            "decision",
            "definitions",
            "enforce",
            "error",
            "failpoint",
            "host",
            "kept",
            "libvirt",
            "lock",
            "log",
            "manual",
            "relocate",
            "report",
            "uuid",
            "xml",
        ],
    ),
];

/// Of a part that may be used, only what begins with one of these.
const ONLY: &[(&str, &str, &[&str])] = &[
    // The topology as a value; nothing that reads the machine.
    ("alloc", "host", &["Topology", "CoreId", "LlcId", "CoreClass", "Cpu", "Node", "HugePages", "Core"]),
    ("xml", "host", &["PciAddress"]),
    ("lock", "alloc", &["plan", "policy", "request"]),
    ("config", "alloc", &["demand", "policy"]),
    ("config", "host", &["root"]),
    ("manual", "alloc", &["policy"]),
    ("manual", "config", &["keys", "settings"]),
    ("manual", "hook", &["call"]),
];

/// Where each code is provoked: file and test.
const PROVOKED: &[(&str, &str, &str)] = &[
    ("Usage", "cli.rs", "mistakes_in_the_command_line"),
    ("CheckFailed", "cli.rs", "check_finds_what_is_wrong"),
    ("DomainInvalid", "hook.rs", "input_that_is_no_domain"),
    ("DomainUnknown", "hook.rs", "no_room"),
    ("PolicyInvalid", "hook.rs", "errors_in_the_policy_name_what_is_accepted"),
    ("PolicyUnsupported", "hook.rs", "every_kind_of_refusal_changes_nothing"),
    ("PolicyDenied", "hook.rs", "what_the_operator_does_not_allow_is_refused"),
    ("Shortage", "hook.rs", "no_room"),
    ("NeedsRepack", "hook.rs", "every_kind_of_refusal_changes_nothing"),
    ("Unsatisfiable", "hook.rs", "every_kind_of_refusal_changes_nothing"),
    ("MemoryShortage", "hook.rs", "every_kind_of_refusal_changes_nothing"),
    ("StaticConflict", "hook.rs", "every_kind_of_refusal_changes_nothing"),
    ("StalePins", "hook.rs", "every_kind_of_refusal_changes_nothing"),
    ("SharedPoolEmpty", "hook.rs", "nobody_is_left_without_a_cpu"),
    ("TopologyOtherwise", "hook.rs", "a_guest_that_would_be_told_otherwise"),
    ("StaleCaches", "hook.rs", "allocated_caches_follow_the_vcpus"),
    ("CoreSched", "live/leases.rs", "tenants_share_cores_with_nobody_else_or_do_not_start"),
    ("Reserved", "hook.rs", "what_is_set_aside_for_autostart_domains"),
    ("StateLocked", "hook.rs", "the_lock_is_waited_for_and_not_for_ever"),
    ("StateCorrupt", "hook.rs", "leases_that_cannot_be_read"),
    ("StateNewer", "hook.rs", "leases_that_cannot_be_read"),
    ("StateUnsafe", "hook.rs", "a_state_directory_that_is_not_safely_ours"),
    ("StateConflict", "hook.rs", "what_may_be_alive_keeps_its_lease"),
    ("TopologyUnreadable", "hook.rs", "a_machine_that_cannot_be_read"),
    ("HostIo", "hook.rs", "a_machine_that_cannot_be_read"),
    ("ConfigInvalid", "hook.rs", "a_configuration_that_cannot_be_read"),
    ("ConfinementFailed", "hook.rs", "a_confinement_that_cannot_be_made_takes_the_lease_back"),
    ("ThreadMisplaced", "hook.rs", "threads_that_are_elsewhere"),
    ("IsolationUnsupported", "isolation.rs", "a_host_that_cannot_says_so_before_qemu"),
    ("IsolationFailed", "isolation.rs", "the_host_always_keeps_a_cpu"),
    ("LibvirtFailed", "cli.rs", "sync_without_a_domain_to_sync"),
    ("InstallConflict", "cli.rs", "install_and_uninstall"),
];

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A source file: its path below `src/`, the whole text, and the part before its tests.
struct Source {
    path: String,
    text: String,
}

impl Source {
    fn code(&self) -> &str {
        self.text.split("\n#[cfg(test)]\nmod tests").next().unwrap()
    }

    /// The code without comments.
    fn statements(&self) -> String {
        self.code()
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"))
            .map(|line| format!("{line}\n"))
            .collect()
    }

    /// The part of the library it belongs to.
    fn part(&self) -> &str {
        self.path.split('/').next().unwrap().trim_end_matches(".rs")
    }
}

fn sources() -> Vec<Source> {
    let mut dirs = vec![repository().join("src")];
    let mut paths: Vec<PathBuf> = Vec::new();
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { dirs.push(path) } else { paths.push(path) }
        }
    }
    paths.sort();
    let relative = |path: &PathBuf| path.strip_prefix(repository().join("src")).unwrap().to_str().unwrap().to_owned();
    let sources: Vec<_> =
        paths.iter().map(|path| Source { path: relative(path), text: fs::read_to_string(path).unwrap() }).collect();
    assert!(sources.len() > 40 && sources.iter().all(|source| source.path.ends_with(".rs")));
    sources
}

/// Every `crate::A::B` as (A, B), those in braces as well; B is empty for `crate::A` alone.
fn uses(text: &str) -> Vec<(String, String)> {
    let word = |text: &str| text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let mut found = Vec::new();
    for rest in text.split("crate::").skip(1) {
        if let Some(list) = rest.strip_prefix('{') {
            // `crate::{a, b::c}`: one level is all that rustfmt and we use.
            let list = list.split('}').next().unwrap();
            found.extend(list.split(',').map(|item| (word(item.trim()), String::new())));
            continue;
        }
        let part = word(rest);
        match rest[part.len()..].strip_prefix("::") {
            None => found.push((part, String::new())),
            Some(below) => match below.strip_prefix('{') {
                None => found.push((part, word(below))),
                Some(list) => {
                    let (mut depth, mut item) = (1, String::new());
                    for c in list.chars() {
                        match c {
                            '{' => depth += 1,
                            '}' => depth -= 1,
                            _ => {}
                        }
                        if depth == 0 || (depth == 1 && c == ',') {
                            found.push((part.clone(), word(item.trim())));
                            item.clear();
                        } else {
                            item.push(c);
                        }
                        if depth == 0 {
                            break;
                        }
                    }
                }
            },
        }
    }
    found
}

#[test]
fn uses_are_found() {
    let text = "use crate::a::{self, B, c::{D, E}, f};\nuse crate::g;\nx(crate::h::i::J)";
    let found = uses(text);
    let found: Vec<(&str, &str)> = found.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
    assert_eq!(found, [("a", "self"), ("a", "B"), ("a", "c"), ("a", "f"), ("g", ""), ("h", "i")]);
}

#[test]
fn dependencies_point_one_way() {
    let mut seen = BTreeSet::new();
    for source in sources() {
        let part = source.part();
        if matches!(part, "lib" | "bin") {
            continue;
        }
        let (_, allowed) =
            MAY_USE.iter().find(|(of, _)| *of == part).unwrap_or_else(|| panic!("{part}: not in the table"));
        for (used, item) in uses(&source.statements()) {
            if used == part {
                continue;
            }
            assert!(allowed.contains(&used.as_str()), "src/{}: {part} may not use {used}", source.path);
            let only = ONLY.iter().find(|(of, what, _)| (*of, *what) == (part, used.as_str()));
            if let Some((_, _, only)) = only {
                assert!(only.contains(&item.as_str()), "src/{}: {part} may not use {used}::{item}", source.path);
            }
            seen.insert(part.to_owned());
        }
    }
    assert!(seen.len() > 8, "{seen:?}");
}

#[test]
fn allocation_and_xml_are_pure() {
    for source in sources().iter().filter(|source| matches!(source.part(), "alloc" | "xml")) {
        let text = source.statements();
        for banned in [
            "std::fs",
            "std::env",
            "std::io",
            "std::process",
            "std::time",
            "std::thread",
            "std::net",
            "std::os",
            "HashMap",
            "HashSet",
            "serde",
            "tracing",
            "nix::",
            "println!",
            "print!",
            "static mut",
            "thread_local",
        ] {
            assert!(!text.contains(banned), "src/{}: {banned} in a pure module", source.path);
        }
        // Nested imports: `use std::{fs, ...}`.
        for list in text.split("use std::{").skip(1) {
            let list = list.split(';').next().unwrap();
            for word in ["fs", "env", "io", "process", "time", "thread", "net"] {
                assert!(!list.split(|c: char| !c.is_alphanumeric()).any(|part| part == word), "src/{}", source.path);
            }
        }
    }
}

#[test]
fn every_file_says_what_it_is_and_is_not_too_long() {
    const MOST_LINES: usize = 500;
    for source in sources() {
        assert!(source.text.starts_with("//! "), "src/{}: does not open with //!", source.path);
        let lines = source.code().lines().count();
        let doc: String = source.text.lines().take_while(|line| line.starts_with("//!")).collect();
        let excused = doc.contains("long because") || doc.contains("longer than");
        assert!(lines <= MOST_LINES || excused, "src/{}: {lines} lines, and its doc does not say why", source.path);
    }
    for entry in fs::read_dir(repository().join("tests")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            assert!(fs::read_to_string(&path).unwrap().starts_with("//! "), "{}", path.display());
        }
    }
}

#[test]
fn one_file_names_the_libvirt_crate() {
    for source in sources() {
        let text = source.statements();
        let names = text
            .match_indices("virt::")
            .any(|(at, _)| !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'));
        assert_eq!(names, source.path == "libvirt.rs", "src/{}", source.path);
    }
}

#[test]
fn one_file_parses_xml() {
    for source in sources() {
        let parses = source.statements().contains("Document::parse");
        assert_eq!(parses, source.path == "document.rs", "src/{}", source.path);
    }
}

/// The libraries a program asks for, from the dynamic section of its ELF file (64 bits, little-endian).
fn needed(file: &[u8]) -> Vec<String> {
    let number =
        |at: usize, size: usize| file[at..at + size].iter().rev().fold(0, |sum, byte| sum << 8 | *byte as usize);
    assert!(file.starts_with(b"\x7fELF\x02\x01"), "not an ELF file of this kind");
    let (sections, size, count) = (number(40, 8), number(58, 2), number(60, 2));
    let field = |section: usize, at: usize, bytes: usize| number(sections + section * size + at, bytes);
    let dynamic = (0..count).find(|&section| field(section, 4, 4) == 6).expect("a dynamic section");
    let strings = field(field(dynamic, 40, 4), 24, 8);
    let (start, length) = (field(dynamic, 24, 8), field(dynamic, 32, 8));
    let entries = (start..start + length).step_by(16).filter(|&at| number(at, 8) == 1);
    let name = |at: usize| file[strings + number(at + 8, 8)..].iter().take_while(|byte| **byte != 0).copied().collect();
    entries.map(|at| String::from_utf8(name(at)).unwrap()).collect()
}

#[test]
fn the_hook_needs_no_libvirt() {
    let hook = needed(&fs::read(env!("CARGO_BIN_EXE_virt-pin-hook")).unwrap());
    assert!(hook.iter().any(|name| name.starts_with("libc.")), "{hook:?}");
    for name in &hook {
        let known = ["libc.so", "libgcc_s.so", "ld-linux"].iter().any(|known| name.starts_with(known));
        assert!(known, "the hook needs {name}: each library costs every start of a VM its loading");
    }
    // The reader can see a libvirt where there is one.
    let command = needed(&fs::read(env!("CARGO_BIN_EXE_virt-pin")).unwrap());
    assert!(command.iter().any(|name| name.starts_with("libvirt.so")), "{command:?}");
}

#[test]
fn the_readme_lists_every_code_and_attribute() {
    let Ok(readme) = fs::read_to_string(repository().join("README.md")) else {
        eprintln!("skipped: there is no README.md yet");
        return;
    };
    for code in Code::all() {
        assert!(readme.contains(&format!("`{code}`")), "README.md has no `{code}`");
    }
    for attribute in ATTRIBUTES {
        assert!(readme.contains(&format!("`{}`", attribute.name)), "README.md has no `{}`", attribute.name);
    }
}

#[test]
fn every_code_is_provoked_by_a_test() {
    for code in Code::all() {
        // A fault of ours: every run of a program in these tests checks that there was none.
        if code == Code::Internal {
            continue;
        }
        let variant = format!("{code:?}");
        let row = PROVOKED.iter().find(|(of, _, _)| *of == variant);
        let (_, file, test) = row.unwrap_or_else(|| panic!("{code} ({variant}) is provoked by no test"));
        let text = fs::read_to_string(repository().join("tests").join(file)).unwrap();
        let body = text.split_once(&format!("\nfn {test}()")).unwrap_or_else(|| panic!("{file} has no test {test}")).1;
        let body = body.split("\n}\n").next().unwrap();
        assert!(body.contains(&format!("Code::{variant}")), "{file}: {test} does not provoke {code}");
    }
    assert_eq!(PROVOKED.len() + 1, Code::all().count());
}

#[test]
fn every_dependency_has_its_reason() {
    let manifest = fs::read_to_string(repository().join("Cargo.toml")).unwrap();
    let family = |line: &str| line.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_owned();
    let (mut section, mut before, mut count) = ("", "", 0);
    for line in manifest.lines() {
        if line.starts_with('[') {
            section = line;
        } else if section.ends_with("dependencies]") && line.contains('=') && !line.starts_with('#') {
            // One reason may do for a family: serde and serde_json.
            let reasoned = before.starts_with("# ") || (before.contains('=') && family(before) == family(line));
            assert!(reasoned, "Cargo.toml: no reason above {line}");
            count += 1;
        }
        before = line;
    }
    assert!(count > 10, "{count}");
}
