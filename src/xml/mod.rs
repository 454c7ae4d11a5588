//! Domain text in, values and edits out: what a libvirt domain document says about CPUs, and how to make it say a plan.
//!
//! [`text_of`] turns bytes into text, [`Domain::parse`] text into a tree that still knows every byte position, [`read`]
//! the tree into what the rest of virt-pin works with, and [`pin`] a plan into an [`edit::EditList`] over the text;
//! [`realtime`] does both for what a realtime guest needs beside a plan; [`shape`] is the part of a plan that a kept definition
//! says, and [`former`] remembers what was there before. A document is never written anew from the tree:
//! what no edit touches stays identical to the byte.
//!
//! Everything is found by its path from the root, as libvirt's XPath expressions do, and numbers are read as libvirt
//! reads them; where libvirt refuses a value, so does this module. Pure: no files, clock or environment. Hostile text
//! (a DTD, millions of attributes, endless nesting) is refused in time and memory proportional to its size.

pub mod caches;
mod devices;
pub mod edit;
pub mod former;
mod layout;
mod memory;
mod numa;
pub mod owner;
pub mod pin;
mod policy;
pub mod read;
pub mod realtime;
pub mod shape;
mod topology;

use roxmltree::{Document, Node};

use crate::cpuset::CpuSet;
use crate::document::{self, Flaw};
use crate::error::{Code, Error, Result};

/// The largest document that is read: a thousand times a large domain.
pub const MAX_BYTES: usize = 16 << 20;

/// The text of a domain document.
///
/// A byte order mark stays part of the text, so that writing the text back gives the same bytes.
///
/// # Errors
/// [`Code::DomainInvalid`]: empty, larger than [`MAX_BYTES`], not UTF-8, or declared to be in another encoding while it
/// has bytes that mean something else there. libvirt refuses these as well.
pub fn text_of(bytes: Vec<u8>) -> Result<String> {
    if bytes.len() > MAX_BYTES {
        return Err(invalid(format!("the document is larger than {MAX_BYTES} bytes")));
    }
    if bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]) {
        return Err(invalid("the document is in UTF-16; libvirt reads UTF-8 only").with_hint("convert it to UTF-8"));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        invalid(format!("the document is not UTF-8 from byte {} on", error.utf8_error().valid_up_to()))
            .with_hint("convert it to UTF-8")
    })?;
    if text.trim_start_matches('\u{feff}').trim().is_empty() {
        return Err(
            invalid("the document is empty").with_hint("give it a domain's XML, such as `virsh dumpxml DOMAIN` prints")
        );
    }
    let ascii = text.trim_start_matches('\u{feff}').is_ascii();
    match declared_encoding(&text).filter(|name| !ascii && !is_utf8(name)) {
        Some(encoding) => {
            Err(invalid(format!("the document declares encoding \"{encoding}\" and has characters beyond ASCII"))
                .with_hint("convert it to UTF-8 and correct the XML declaration"))
        }
        None => Ok(text),
    }
}

fn is_utf8(encoding: &str) -> bool {
    ["utf-8", "utf8"].iter().any(|name| encoding.eq_ignore_ascii_case(name))
}

/// The value of `encoding` in the XML declaration.
fn declared_encoding(text: &str) -> Option<&str> {
    let declaration = text.trim_start_matches('\u{feff}').strip_prefix("<?xml")?.split("?>").next()?;
    let (_, rest) = declaration.split_once("encoding")?;
    let rest = rest.trim_start().strip_prefix('=')?.trim_start();
    let quote = rest.chars().next().filter(|quote| matches!(quote, '"' | '\''))?;
    rest.split(quote).nth(1)
}

/// A domain document: the text and its tree.
#[derive(Debug)]
pub struct Domain<'t> {
    text: &'t str,
    document: Document<'t>,
}

impl<'t> Domain<'t> {
    /// Parses a document whose root is `<domain>`. The root may have a prefix, as in libvirt; its children have none.
    ///
    /// # Errors
    /// [`Code::DomainInvalid`]: not well-formed, a DTD, another root, a default namespace, or absurdly many nodes,
    /// attributes or namespaces.
    pub fn parse(text: &'t str) -> Result<Domain<'t>> {
        let document = document::parse(text).map_err(|flaw| match flaw {
            Flaw::NotWellFormed(error) => invalid("the document is not well-formed XML").because(error),
            flaw @ Flaw::Dtd => invalid(flaw.to_string()).with_hint(
                "take the DOCTYPE out, and write out what it abbreviates; libvirt's own documents have none",
            ),
            flaw => invalid(flaw.to_string()),
        })?;
        let root = document.root_element();
        if root.tag_name().name() != "domain" {
            return Err(invalid(format!("the root element is <{}>, not <domain>", root.tag_name().name()))
                .with_hint("give it a domain's XML, such as `virsh dumpxml DOMAIN` prints"));
        }
        if root.default_namespace().is_some_and(|uri| !uri.is_empty()) {
            return Err(invalid("<domain> has a default namespace, so libvirt would find none of its elements")
                .with_hint("take the xmlns attribute off the root element"));
        }
        Ok(Domain { text, document })
    }

    /// The text it was parsed from.
    pub fn text(&self) -> &'t str {
        self.text
    }

    fn root(&self) -> Node<'_, 't> {
        self.document.root_element()
    }

    /// The elements below the root at a path of plain names; every match of every step.
    fn all<'d>(&'d self, path: &[&str]) -> Vec<Node<'d, 't>> {
        let mut found = vec![self.root()];
        for name in path {
            found = found.iter().flat_map(|node| children(*node, name).collect::<Vec<_>>()).collect();
        }
        found
    }

    /// The first element at a path, as `./a[1]/b[1]` selects it.
    fn first<'d>(&'d self, path: &[&str]) -> Option<Node<'d, 't>> {
        path.iter().try_fold(self.root(), |node, name| children(node, name).next())
    }
}

/// The child elements of this name that are in no namespace.
fn children<'d, 't>(node: Node<'d, 't>, name: &str) -> impl Iterator<Item = Node<'d, 't>> {
    node.children().filter(move |child| is(*child, name))
}

fn is(node: Node<'_, '_>, name: &str) -> bool {
    node.is_element() && node.tag_name().namespace().is_none() && node.tag_name().name() == name
}

/// All text inside an element, as XPath's `string()` gives it: comments do not count, CDATA does.
fn string(node: Node<'_, '_>) -> String {
    node.descendants().filter(Node::is_text).filter_map(|text| text.text()).collect()
}

/// A number as libvirt reads one: `strtoul` in base 10 over all of the text. Leading white space and zeros and a plus
/// sign are allowed, trailing white space is not.
fn number(text: &str) -> Option<u64> {
    let text = text.trim_start_matches([' ', '\t', '\n', '\r', '\x0b', '\x0c']);
    let digits = text.strip_prefix('+').unwrap_or(text);
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
}

/// An attribute that must be there and hold a number.
fn number_attribute<N: TryFrom<u64>>(node: Node<'_, '_>, name: &str) -> Result<N> {
    let element = node.tag_name().name();
    let text = node.attribute(name).ok_or_else(|| invalid(format!("<{element}> has no {name} attribute")))?;
    number(text)
        .and_then(|number| N::try_from(number).ok())
        .ok_or_else(|| invalid(format!("<{element} {name}=\"{text}\"> is not a number libvirt accepts there")))
}

/// An attribute that must be there and hold a list of CPUs, or of vCPUs.
fn cpuset_attribute(node: Node<'_, '_>, name: &str) -> Result<CpuSet> {
    let element = node.tag_name().name();
    let text = node.attribute(name).ok_or_else(|| invalid(format!("<{element}> has no {name} attribute")))?;
    CpuSet::parse_libvirt_cpuset(text)
        .map_err(|error| invalid(format!("<{element} {name}=\"{text}\"> is not a list of CPUs")).because(error))
}

fn invalid(message: impl AsRef<str>) -> Error {
    Error::new(Code::DomainInvalid, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn refused(text: &str, part: &str) {
        let error = Domain::parse(text).unwrap_err();
        assert_eq!(error.code, Code::DomainInvalid);
        assert!(error.message.contains(part), "{}", error.message);
    }

    #[test]
    fn encodings() {
        assert_eq!(text_of("\u{feff}<domain/>".into()).unwrap(), "\u{feff}<domain/>");
        let declared =
            |name: &str, text: &str| text_of(format!("<?xml version='1.0' encoding='{name}'?>{text}").into());
        assert!(declared("UTF-8", "é").is_ok() && declared("iso-8859-1", "e").is_ok());
        assert!(declared("iso-8859-1", "é").unwrap_err().message.contains("iso-8859-1"));
        for bytes in [&b""[..], b" \n", b"\xef\xbb\xbf", b"\xff\xfe<\0", b"<domain>\xe9</domain>"] {
            assert_eq!(text_of(bytes.to_vec()).unwrap_err().code, Code::DomainInvalid, "{bytes:?}");
        }
        assert!(text_of(vec![b' '; MAX_BYTES + 1]).unwrap_err().message.contains("larger"));
    }

    #[test]
    fn roots() {
        assert!(Domain::parse("<!-- banner --><lv:domain xmlns:lv='urn:x'/>").is_ok());
        refused("<network/>", "<network>");
        refused("<domain xmlns='urn:x'/>", "default namespace");
        refused("<!DOCTYPE domain [<!ENTITY a 'b'>]><domain/>", "DTD");
        refused("<domain/><domain/>", "well-formed");
        refused("\n<?xml version='1.0'?><domain/>", "well-formed");
        refused("<domain a='1' a='2'/>", "well-formed");
    }

    #[test]
    fn floods_are_refused_and_depth_is_harmless() {
        let many = |one: &dyn Fn(usize) -> String, count: usize| (0..count).map(one).collect::<String>();
        refused(&format!("<domain {}/>", many(&|i| format!("a{i}=''"), 500_000)), "attributes");
        refused(&format!("<domain {}/>", many(&|i| format!("a{i} =\n ''"), 300)), "attributes");
        refused(&format!("<domain>{}", many(&|i| format!("<a xmlns:p{i}='u{i}'>"), 100_000)), "namespace");
        refused(&format!("<domain>{}</domain>", "<a/>".repeat(2 << 20)), "well-formed");
        let deep = format!("<domain>{}{}</domain>", "<a>".repeat(400_000), "</a>".repeat(400_000));
        assert!(string(Domain::parse(&deep).unwrap().root()).is_empty());
        refused(&"<a>".repeat(100_000), "well-formed");
    }

    #[test]
    fn numbers_are_read_as_libvirt_reads_them() {
        for (text, value) in [("4", Some(4)), ("04", Some(4)), ("+4", Some(4)), ("\n 4", Some(4))] {
            assert_eq!(number(text), value, "{text:?}");
        }
        for text in ["", " ", "4 ", "-4", "4.0", "0x4", "++4", "+ 4", "٤", "99999999999999999999"] {
            assert_eq!(number(text), None, "{text:?}");
        }
    }
}
