//! Where a new element goes and how it is indented: like its neighbours, or not at all in a document of one line.

use std::ops::Range;

use roxmltree::{Attribute, Node};

use super::Domain;
use super::edit::Edit;

/// The children of `<domain>` in libvirt's own order, as far as something of ours has to follow them.
pub(super) const ROOT: &[&str] = &[
    "name",
    "uuid",
    "genid",
    "title",
    "description",
    "metadata",
    "maxMemory",
    "memory",
    "currentMemory",
    "blkiotune",
    "memtune",
    "memoryBacking",
    "vcpu",
    "vcpus",
    "iothreads",
    "iothreadids",
    "defaultiothread",
    "cputune",
    "numatune",
    "resource",
    "sysinfo",
    "bootloader",
    "bootloader_args",
    "os",
    "idmap",
    "features",
    "cpu",
];

/// The children of `<cpu>` likewise.
pub(super) const CPU: &[&str] = &["arch", "model", "vendor", "topology", "cache", "maxphysaddr", "feature", "numa"];

/// The children of `<cputune>` likewise.
pub(super) const CPUTUNE: &[&str] = &[
    "shares",
    "period",
    "quota",
    "global_period",
    "global_quota",
    "emulator_period",
    "emulator_quota",
    "iothread_period",
    "iothread_quota",
    "vcpupin",
    "emulatorpin",
    "iothreadpin",
    "emulatorsched",
    "vcpusched",
];

/// The children of `<memoryBacking>` likewise.
pub(super) const MEMORY_BACKING: &[&str] = &["hugepages", "nosharepages", "locked"];

/// The place of an element in one of the orders above. An element that is in no namespace of libvirt's has none.
pub(super) fn rank(order: &[&str], element: Node<'_, '_>) -> Option<usize> {
    let tag = element.tag_name();
    order.iter().position(|name| tag.namespace().is_none() && *name == tag.name())
}

/// How a document is laid out.
pub(super) struct Layout<'t> {
    text: &'t str,
    /// Whether the document has lines at all.
    lines: bool,
    newline: &'static str,
    /// One step of indentation.
    unit: String,
    /// What attributes are quoted with.
    quote: char,
}

impl<'t> Layout<'t> {
    pub(super) fn of(domain: &Domain<'t>) -> Layout<'t> {
        let text = domain.text();
        let root = domain.root();
        let outer = indentation(text, root.range().start).unwrap_or_default();
        let inner = root.children().filter(Node::is_element).find_map(|child| indentation(text, child.range().start));
        let unit = inner.and_then(|inner| inner.strip_prefix(outer)).filter(|unit| !unit.is_empty()).unwrap_or("  ");
        let newline = if text.contains("\r\n") { "\r\n" } else { "\n" };
        let lines = text.get(root.range()).is_some_and(|root| root.contains('\n'));
        let quote = root.attributes().next().map_or('\'', |attribute| quote_of(text, &attribute));
        Layout { text, lines, newline, unit: unit.to_owned(), quote }
    }

    /// What stands before an element on a line of its own, line break included; empty where it shares its line.
    fn before(&self, element: Node<'_, '_>) -> String {
        let indent = indentation(self.text, element.range().start).filter(|_| self.lines);
        indent.map_or_else(String::new, |indent| format!("{}{indent}", self.newline))
    }

    /// The same for the children of an element: as those it has, else one step deeper than itself.
    fn before_children(&self, parent: Node<'_, '_>) -> String {
        if let Some(child) = parent.children().find(Node::is_element) {
            return self.before(child);
        }
        let own = self.before(parent);
        if own.is_empty() { own } else { own + &self.unit }
    }

    /// New elements below `parent`, right after the child `after` or else first.
    pub(super) fn insert(&self, parent: Node<'_, '_>, after: Option<Node<'_, '_>>, elements: &[Element]) -> Edit {
        let lead = after.map_or_else(|| self.before_children(parent), |after| self.before(after));
        let mut text: String = elements.iter().map(|element| element.render(&lead, self)).collect();
        if let Some(after) = after {
            let end = self.after_comments(after.range().end);
            return Edit { range: end..end, text };
        }
        let start_tag = self.start_tag(parent);
        if let Some(open) = self.text.get(start_tag.clone()).and_then(|tag| tag.strip_suffix("/>")) {
            let name = self.tag_name(parent);
            let range = start_tag.start + open.trim_end().len()..start_tag.end;
            let before = if lead.is_empty() { String::new() } else { self.before(parent) };
            return Edit { range, text: format!(">{text}{before}</{name}>") };
        }
        if !parent.has_children() && !lead.is_empty() {
            text.push_str(&self.before(parent));
        }
        Edit { range: start_tag.end..start_tag.end, text }
    }

    /// Takes an element out, with its line if it has one to itself.
    pub(super) fn remove(&self, element: Node<'_, '_>) -> Edit {
        let range = element.range();
        Edit { range: self.own_lines(range.clone()).unwrap_or(range), text: String::new() }
    }

    /// The range with the line break and blanks before it and the blanks after it, if nothing else is on its lines.
    fn own_lines(&self, range: Range<usize>) -> Option<Range<usize>> {
        let indent = indentation(self.text, range.start)?;
        let before = self.text.get(..range.start - indent.len())?.strip_suffix('\n')?;
        let rest = self.text.get(range.end..)?;
        let rest_of_line = rest.trim_start_matches([' ', '\t']);
        let start = before.strip_suffix('\r').unwrap_or(before).len();
        let end = range.end + rest.len() - rest_of_line.len();
        rest_of_line.starts_with(['\n', '\r']).then_some(start..end)
    }

    /// Gives an attribute a value, in the quotes it has; a missing one is added after `after`, else first.
    pub(super) fn set(&self, element: Node<'_, '_>, name: &str, value: &str, after: Option<&str>) -> Edit {
        let value = quick_xml::escape::escape(value);
        if let Some(attribute) = element.attribute_node(name) {
            // Not range_value(): it miscounts where hundreds of blanks stand around "=".
            let range = attribute.range();
            let source = self.text.get(range.clone()).unwrap_or_default();
            let opening = source.find(['"', '\'']).map_or(range.end, |at| range.start + at + 1);
            return Edit { range: opening..range.end - 1, text: value.into_owned() };
        }
        let neighbour = after.and_then(|after| element.attribute_node(after));
        let at = match neighbour {
            Some(attribute) => attribute.range().end,
            None => element.range().start + 1 + self.tag_name(element).len(),
        };
        let model = neighbour.or(element.attributes().next());
        let quote = model.map_or(self.quote, |attribute| quote_of(self.text, &attribute));
        Edit { range: at..at, text: format!(" {name}={quote}{value}{quote}") }
    }

    /// Takes an attribute out, with the blanks before it; `None` if it is not there.
    pub(super) fn unset(&self, element: Node<'_, '_>, name: &str) -> Option<Edit> {
        let range = element.attribute_node(name)?.range();
        let before = self.text.get(..range.start)?;
        Some(Edit { range: before.trim_end().len()..range.end, text: String::new() })
    }

    /// Another element in the place of one, on the same line.
    pub(super) fn replace(&self, element: Node<'_, '_>, by: &Element) -> Edit {
        let lead = self.before(element);
        let text = by.render(&lead, self);
        Edit { range: element.range(), text: text.strip_prefix(&lead).unwrap_or(&text).to_owned() }
    }

    /// The name in an element's tags, prefix included.
    fn tag_name(&self, element: Node<'_, '_>) -> &'t str {
        let tag = self.text.get(element.range().start + 1..).unwrap_or_default();
        tag.split([' ', '\t', '\r', '\n', '/', '>']).next().unwrap_or_default()
    }

    /// The range of an element's start tag. A ">" may stand inside quotes.
    fn start_tag(&self, element: Node<'_, '_>) -> Range<usize> {
        let start = element.range().start;
        let mut quote = None;
        for (at, byte) in self.text.bytes().enumerate().skip(start) {
            match (quote, byte) {
                (None, b'>') => return start..at + 1,
                (None, b'"' | b'\'') => quote = Some(byte),
                (Some(open), _) if open == byte => quote = None,
                _ => {}
            }
        }
        element.range()
    }

    /// The end of the comments that follow on the same line: they speak of what stands before them.
    fn after_comments(&self, mut end: usize) -> usize {
        while let Some(rest) = self.text.get(end..) {
            let comment = rest.trim_start_matches([' ', '\t']);
            let Some(length) = comment.starts_with("<!--").then(|| comment.find("-->")).flatten() else {
                break;
            };
            if comment.get(..length).is_none_or(|comment| comment.contains('\n')) {
                break;
            }
            end += rest.len() - comment.len() + length + "-->".len();
        }
        end
    }
}

/// The quotation mark around an attribute's value.
fn quote_of(text: &str, attribute: &Attribute<'_, '_>) -> char {
    if text.get(..attribute.range().end).is_some_and(|text| text.ends_with('"')) { '"' } else { '\'' }
}

/// The blanks between the start of the line and this position; `None` if something else stands there.
fn indentation(text: &str, at: usize) -> Option<&str> {
    let before = text.get(..at)?;
    let outer = before.trim_end_matches([' ', '\t']);
    (outer.is_empty() || outer.ends_with('\n')).then(|| before.get(outer.len()..)).flatten()
}

/// An element to insert.
pub(super) struct Element {
    name: &'static str,
    attributes: Vec<(&'static str, String)>,
    content: Content,
}

enum Content {
    Empty,
    Text(String),
    Children(Vec<Element>),
}

impl Element {
    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    pub(super) fn new(name: &'static str, attributes: Vec<(&'static str, String)>) -> Element {
        Element { name, attributes, content: Content::Empty }
    }

    pub(super) fn with_text(self, text: String) -> Element {
        Element { content: Content::Text(text), ..self }
    }

    pub(super) fn with_children(self, children: Vec<Element>) -> Element {
        Element { content: Content::Children(children), ..self }
    }

    fn render(&self, lead: &str, layout: &Layout<'_>) -> String {
        let escape = |text: &str| quick_xml::escape::escape(text).into_owned();
        let mut tag = format!("{lead}<{}", self.name);
        let quote = layout.quote;
        for (name, value) in &self.attributes {
            tag.push_str(&format!(" {name}={quote}{}{quote}", escape(value)));
        }
        match &self.content {
            Content::Empty => tag + "/>",
            Content::Text(text) => format!("{tag}>{}</{}>", escape(text), self.name),
            Content::Children(children) => {
                let inner = if lead.is_empty() { String::new() } else { format!("{lead}{}", layout.unit) };
                let children: String = children.iter().map(|child| child.render(&inner, layout)).collect();
                format!("{tag}>{children}{lead}</{}>", self.name)
            }
        }
    }
}
