//! What others say about documents: libvirt's schema (through xmllint) and libvirt itself (its test driver needs no
//! daemon).
#![allow(dead_code, reason = "each test program uses its part")]

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

const SCHEMA: &str = "/usr/share/libvirt/schemas/domain.rng";

/// Somebody who accepts a document, refuses it, or is not there to ask.
pub(crate) type Oracle = fn(&[u8]) -> Option<bool>;

/// Whether libvirt's schema accepts a document; `None` where the schema or xmllint is not installed.
pub(crate) fn schema_accepts(document: &[u8]) -> Option<bool> {
    if !Path::new(SCHEMA).exists() {
        return None;
    }
    let mut xmllint = Command::new("xmllint");
    let mut child = xmllint
        .args(["--noout", "--relaxng", SCHEMA, "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    // xmllint closes its end early where the text is hopeless.
    let _ = child.stdin.take()?.write_all(document);
    Some(child.wait().ok()?.success())
}

/// Whether libvirt defines a document, as a domain of its test driver; `None` where virsh is not installed.
pub(crate) fn libvirt_accepts(document: &[u8]) -> Option<bool> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&for_test_driver(document)).unwrap();
    let mut virsh = Command::new("virsh");
    virsh.args(["-q", "-c", "test:///default", "define"]).arg(file.path());
    Some(virsh.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().ok()?.success())
}

/// The same of many documents, by one process each; `None` where there is nobody to ask.
pub(crate) type Jury = fn(&[Vec<u8>]) -> Option<Vec<bool>>;

/// Which of the documents libvirt's schema accepts.
pub(crate) fn schema_accepts_of(documents: &[Vec<u8>]) -> Option<Vec<bool>> {
    if !Path::new(SCHEMA).exists() {
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut xmllint = Command::new("xmllint");
    xmllint.args(["--noout", "--relaxng", SCHEMA]).env("LC_ALL", "C").stdout(Stdio::null());
    let files = written(dir.path(), documents);
    // Every file has its own line, whether the one before was good.
    let output = xmllint.args(&files).stdin(Stdio::null()).output().ok()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let valid: BTreeSet<&str> = said.lines().filter_map(|line| line.strip_suffix(" validates")).collect();
    Some(files.iter().map(|file| valid.contains(file.as_str())).collect())
}

/// Which of the documents libvirt defines as domains of its test driver, each in a libvirt without any other.
pub(crate) fn libvirt_accepts_of(documents: &[Vec<u8>]) -> Option<Vec<bool>> {
    let dir = tempfile::tempdir().unwrap();
    let documents: Vec<_> = documents.iter().map(|document| for_test_driver(document)).collect();
    let files = written(dir.path(), &documents);
    // The test driver forgets everything with its connection.
    let script: String = files.iter().map(|file| format!("connect test:///default\ndefine {file}\n")).collect();
    fs::File::create(dir.path().join("script")).unwrap().write_all(script.as_bytes()).unwrap();
    let mut virsh = Command::new("virsh");
    virsh.env("LC_ALL", "C").stdin(fs::File::open(dir.path().join("script")).unwrap());
    let output = virsh.output().ok()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let defined: BTreeSet<&str> = said.lines().filter_map(|line| Some(line.rsplit_once(" defined from ")?.1)).collect();
    Some(files.iter().map(|file| defined.contains(file.as_str())).collect())
}

fn written(dir: &Path, documents: &[Vec<u8>]) -> Vec<String> {
    let file = |number| dir.join(format!("{number}.xml")).into_os_string().into_string().unwrap();
    let files: Vec<String> = (0..documents.len()).map(file).collect();
    files
        .iter()
        .zip(documents)
        .for_each(|(file, document)| fs::File::create(file).unwrap().write_all(document).unwrap());
    files
}

/// What libvirt keeps of a document that it defines; `None` where virsh is not installed, or libvirt refuses.
pub(crate) fn kept_by_libvirt(document: &[u8]) -> Option<String> {
    let text = String::from_utf8(document.to_vec()).ok()?;
    let tree = roxmltree::Document::parse(&text).ok()?;
    let name = tree.root_element().children().find(|child| child.has_tag_name("name"))?.text()?;
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&for_test_driver(document)).unwrap();
    // The test driver forgets everything with its connection.
    let script = format!("define {}; dumpxml --inactive --security-info '{name}'", file.path().display());
    let output =
        Command::new("virsh").args(["-q", "-c", "test:///default", &script]).stdin(Stdio::null()).output().ok()?;
    let kept = String::from_utf8(output.stdout).ok().filter(|_| output.status.success())?;
    Some(kept.split_once("<domain").map(|(_, rest)| format!("<domain{rest}"))?.trim_end().to_owned())
}

/// The document with the root's `type` set to the only one the test driver knows.
fn for_test_driver(document: &[u8]) -> Vec<u8> {
    let change = || {
        let text = std::str::from_utf8(document).ok()?;
        let tree = roxmltree::Document::parse(text).ok()?;
        let range = tree.root_element().attribute_node("type")?.range_value();
        Some(format!("{}test{}", &text[..range.start], &text[range.end..]).into_bytes())
    };
    change().unwrap_or_else(|| {
        let text = String::from_utf8_lossy(document);
        if text.as_bytes() == document {
            text.replace("type='kvm'", "type='test'").into_bytes()
        } else {
            document.to_vec()
        }
    })
}
