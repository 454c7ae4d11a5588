//! What others say about documents: libvirt's schema (through xmllint) and libvirt itself (its test driver needs no
//! daemon).
#![allow(dead_code, reason = "each test program uses its part")]

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
