//! XML that others wrote, as a tree, in time and memory proportional to its size: who may write some of a VM's XML must not
//! make the hook of another wait. Knows nothing of what the elements mean.

use std::fmt;

use roxmltree::{Document, ParsingOptions};

/// The most nodes (elements, texts, comments) of a document.
const MAX_NODES: u32 = 1 << 20;

/// The most attributes of one element, and the most namespace declarations of a document. The parser compares them
/// pairwise, so without a bound one element of a few megabytes would take hours.
const MAX_ATTRIBUTES: usize = 256;

/// Why a text is not read.
#[derive(Clone, Debug, PartialEq)]
pub enum Flaw {
    /// It has a document type definition: entities that grow, files of others.
    Dtd,
    /// An element has absurdly many.
    Attributes,
    /// It declares absurdly many.
    Namespaces,
    /// It is no XML, or has absurdly many nodes.
    NotWellFormed(roxmltree::Error),
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Flaw::Dtd => write!(f, "the document has a DTD, which is not read"),
            Flaw::Attributes => write!(f, "an element has more than {MAX_ATTRIBUTES} attributes"),
            Flaw::Namespaces => write!(f, "the document has more than {MAX_ATTRIBUTES} namespace declarations"),
            Flaw::NotWellFormed(error) => write!(f, "not XML: {error}"),
        }
    }
}

/// The tree of a text.
///
/// # Errors
/// [`Flaw`].
pub fn parse(text: &str) -> Result<Document<'_>, Flaw> {
    refuse_floods(text)?;
    let options = ParsingOptions { allow_dtd: false, nodes_limit: MAX_NODES, ..ParsingOptions::default() };
    Document::parse_with_options(text, options).map_err(|error| match error {
        roxmltree::Error::DtdDetected => Flaw::Dtd,
        error => Flaw::NotWellFormed(error),
    })
}

/// Refuses what the parser would take quadratic time for.
fn refuse_floods(text: &str) -> Result<(), Flaw> {
    // No tag contains another "<", so each piece holds one tag at the most.
    if text.split('<').any(|piece| attributes(piece) > MAX_ATTRIBUTES) {
        return Err(Flaw::Attributes);
    }
    if text.matches("xmlns").count() > MAX_ATTRIBUTES {
        return Err(Flaw::Namespaces);
    }
    Ok(())
}

/// The quoted values of the start tag whose "<" came before this piece of text.
fn attributes(piece: &str) -> usize {
    if piece.starts_with(['!', '?', '/']) {
        return 0;
    }
    let (mut count, mut quote) = (0, None);
    for byte in piece.bytes() {
        match (quote, byte) {
            (None, b'>') => break,
            (None, b'"' | b'\'') => {
                count += 1;
                quote = Some(byte);
            }
            (Some(open), _) if open == byte => quote = None,
            _ => {}
        }
    }
    count
}
