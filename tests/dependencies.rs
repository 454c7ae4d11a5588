//! What is built in: licences, sources and doubles of every package, by the lists in `deny.toml`. `cargo deny check` says the same,
//! and what has been reported of them since; it takes minutes to build, so the part that must not slip is a test.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "integration tests"
)]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use serde::Deserialize;

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    workspace_members: Vec<String>,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    source: Option<String>,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
}

#[derive(Deserialize)]
struct Deny {
    licenses: Licenses,
}

#[derive(Deserialize)]
struct Licenses {
    allow: Vec<String>,
    exceptions: Vec<Exception>,
}

#[derive(Deserialize)]
struct Exception {
    #[serde(rename = "crate")]
    name: String,
    allow: Vec<String>,
}

/// Everything that may be part of a build for Linux, as Cargo.lock has it; nothing is fetched.
fn metadata() -> Metadata {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--format-version", "1", "--locked", "--offline"]);
    cargo.args(["--filter-platform", "x86_64-unknown-linux-gnu"]).current_dir(env!("CARGO_MANIFEST_DIR"));
    let output = cargo.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn deny() -> Deny {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("deny.toml");
    toml::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

/// Whether a licence expression can be met with these licences. `AND` binds more strongly than `OR`; parentheses are one deep.
fn is_met(expression: &str, allowed: &[String]) -> bool {
    let has = |licence: &str| allowed.iter().any(|one| one == licence.trim());
    if let Some((inner, rest)) = expression.strip_prefix('(').and_then(|rest| rest.split_once(')')) {
        let Some(rest) = rest.strip_prefix(" AND ") else { return rest.is_empty() && is_met(inner, allowed) };
        return is_met(inner, allowed) && is_met(rest, allowed);
    }
    expression.split(" OR ").any(|choice| choice.split(" AND ").all(has))
}

#[test]
fn expressions() {
    let allowed = ["MIT", "Unicode-3.0"].map(str::to_owned);
    for met in
        ["MIT", "MIT OR Apache-2.0", "Apache-2.0 OR MIT", "(MIT OR Apache-2.0) AND Unicode-3.0", "X AND Y OR MIT"]
    {
        assert!(is_met(met, &allowed), "{met}");
    }
    for not in ["", "GPL-3.0", "MIT AND GPL-3.0", "(MIT OR X) AND GPL-3.0", "Apache-2.0 WITH MIT", "(X OR Y) OR MIT"] {
        assert!(!is_met(not, &allowed), "{not}");
    }
}

#[test]
fn licences_are_on_the_list() {
    let (deny, mut used) = (deny(), BTreeSet::new());
    let packages = metadata().packages;
    assert!(packages.len() > 40, "{}", packages.len());
    for package in packages {
        let exception = deny.licenses.exceptions.iter().find(|exception| exception.name == package.name);
        used.extend(exception.map(|exception| exception.name.clone()));
        let allowed = exception.map_or(&deny.licenses.allow, |exception| &exception.allow);
        let licence = package.license.unwrap_or_default();
        assert!(is_met(&licence, allowed), "{} {}: \"{licence}\"", package.name, package.version);
    }
    assert_eq!(used.len(), deny.licenses.exceptions.len(), "an exception that nobody needs");
}

#[test]
fn packages_come_from_the_registry() {
    let metadata = metadata();
    for package in metadata.packages.iter().filter(|package| !metadata.workspace_members.contains(&package.id)) {
        let source = package.source.as_deref().unwrap_or("a directory");
        assert_eq!(source, "registry+https://github.com/rust-lang/crates.io-index", "{}", package.name);
    }
}

#[test]
fn what_is_asked_for_by_name_is_there_once() {
    let metadata = metadata();
    let ours = metadata.packages.iter().find(|package| package.name == env!("CARGO_PKG_NAME")).unwrap();
    for dependency in &ours.dependencies {
        let versions = metadata.packages.iter().filter(|package| package.name == dependency.name);
        let versions: Vec<_> = versions.map(|package| package.version.as_str()).collect();
        assert_eq!(versions.len(), 1, "{}: {versions:?}", dependency.name);
    }
}
