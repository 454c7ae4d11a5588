//! Changes to a text as byte ranges and their replacements. Knows nothing of XML.

use std::ops::Range;

use crate::error::{Code, Error, Result};

/// One replacement: an empty range inserts, an empty text deletes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edit {
    /// The bytes that go.
    pub range: Range<usize>,
    /// What comes in their place.
    pub text: String,
}

/// Replacements for one text: sorted, and none reaches into another. Made for one text and meaningless for any other.
///
/// ```
/// use virt_pin::xml::edit::{Edit, EditList};
/// let text = "<vcpupin vcpu='0' cpuset='9'/>";
/// let list = EditList::new(vec![Edit { range: 26..27, text: "2".to_owned() }]).unwrap();
/// assert_eq!(list.apply(text), "<vcpupin vcpu='0' cpuset='2'/>");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EditList {
    edits: Vec<Edit>,
}

impl EditList {
    /// Sorts the edits.
    ///
    /// # Errors
    /// [`Code::Internal`]: two edits overlap, or insert at the same place (their order would be anybody's guess).
    pub fn new(mut edits: Vec<Edit>) -> Result<EditList> {
        edits.sort_by_key(|edit| (edit.range.start, edit.range.end));
        for (one, next) in edits.iter().zip(edits.iter().skip(1)) {
            if one.range.end > next.range.start || one.range == next.range {
                let message = format!("edits of bytes {:?} and {:?} overlap", one.range, next.range);
                return Err(Error::new(Code::Internal, message));
            }
        }
        Ok(EditList { edits })
    }

    /// Whether nothing changes.
    pub fn is_empty(&self) -> bool {
        self.edits.is_empty()
    }

    /// The edits, ascending.
    pub fn iter(&self) -> impl Iterator<Item = &Edit> {
        self.edits.iter()
    }

    /// The text with every edit made. An edit that lies outside the text takes nothing away.
    pub fn apply(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len() + self.edits.iter().map(|edit| edit.text.len()).sum::<usize>());
        let mut at = 0;
        for edit in &self.edits {
            out.push_str(text.get(at..edit.range.start).unwrap_or_default());
            out.push_str(&edit.text);
            at = edit.range.end;
        }
        out.push_str(text.get(at..).unwrap_or_default());
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn list(edits: &[(Range<usize>, &str)]) -> Result<EditList> {
        EditList::new(
            edits.iter().map(|(range, text)| Edit { range: range.clone(), text: (*text).to_owned() }).collect(),
        )
    }

    #[test]
    fn edits_apply_in_the_order_of_the_text() {
        let edits = list(&[(4..6, ""), (0..0, ">"), (2..4, "xyz"), (4..4, "|"), (6..6, "<")]).unwrap();
        assert_eq!(edits.apply("abcdef"), ">abxyz|<");
        assert!(list(&[]).unwrap().is_empty());
    }

    #[test]
    fn overlaps_are_refused() {
        for edits in [&[(0..2, ""), (1..3, "")][..], &[(1..1, "a"), (1..1, "b")], &[(0..3, ""), (1..2, "")]] {
            assert_eq!(list(edits).unwrap_err().code, Code::Internal);
        }
    }

    proptest! {
        #[test]
        fn bytes_outside_edits_survive(text in "[a-z]{0,40}", cuts in prop::collection::btree_set(0usize..40, 0..8)) {
            let cuts: Vec<usize> = cuts.into_iter().filter(|cut| *cut <= text.len()).collect();
            let edits: Vec<_> = cuts.chunks_exact(2).map(|pair| (pair[0]..pair[1], "#")).collect();
            let mut expected = text.clone();
            for (range, new) in edits.iter().rev() {
                expected.replace_range(range.clone(), new);
            }
            prop_assert_eq!(list(&edits).unwrap().apply(&text), expected);
        }
    }
}
