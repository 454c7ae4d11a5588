//! Which CPUs: identifiers and sets of them, and the two list grammars they are written in.
//!
//! [`CpuSet`] has one canonical value per set, so `==` is set equality, and a set is never larger than [`MAX_CPUS`]. The
//! grammars differ, so each parser carries its dialect in its name: [`CpuSet::parse_kernel_list`] (sysfs, cgroups, our
//! configuration) and [`CpuSet::parse_libvirt_cpuset`] (domain XML, where `^N` excludes and order matters). Both check
//! every number against the bound before anything is allocated. This module does no I/O.

use std::fmt;

/// The largest number of CPUs virt-pin handles: the kernel's own maximum (`NR_CPUS` on x86 with `CONFIG_MAXSMP`).
pub const MAX_CPUS: u16 = 8192;

/// A Linux logical CPU: one hardware thread, as numbered in `/sys/devices/system/cpu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CpuId(pub u16);

/// A NUMA node, as numbered in `/sys/devices/system/node`; numbers may be sparse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u16);

impl fmt::Display for CpuId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A set of CPUs (or of any ids below [`MAX_CPUS`], such as NUMA nodes).
///
/// ```
/// use virt_pin::cpuset::CpuSet;
/// let pool = CpuSet::parse_kernel_list("2-7,10-14:2/4\n").unwrap();
/// assert_eq!(pool.to_string(), "2-7,10-11,14");
/// assert_eq!(pool.len(), 9);
/// ```
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CpuSet {
    /// Bit `i % 64` of word `i / 64` is CPU `i`. The last word is never zero: that makes the form canonical.
    words: Vec<u64>,
}

/// Why a CPU list could not be read: what is wrong and where in the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// Byte offset in the text, from 0.
    pub position: usize,
    /// What is wrong, as a fragment ("expected a CPU number").
    pub reason: String,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at position {}", self.reason, self.position + 1)
    }
}

impl std::error::Error for ParseError {}

impl CpuSet {
    /// The empty set.
    pub fn new() -> Self {
        CpuSet::default()
    }

    /// Adds a CPU. One at or above [`MAX_CPUS`] is ignored: the parsers and sysfs reader refuse those with a message.
    pub fn insert(&mut self, cpu: CpuId) {
        if cpu.0 >= MAX_CPUS {
            return;
        }
        let (word, bit) = position(cpu);
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        if let Some(word) = self.words.get_mut(word) {
            *word |= bit;
        }
    }

    /// Takes a CPU out.
    pub fn remove(&mut self, cpu: CpuId) {
        let (word, bit) = position(cpu);
        if let Some(word) = self.words.get_mut(word) {
            *word &= !bit;
        }
        self.trim();
    }

    /// Whether the CPU is in the set.
    pub fn contains(&self, cpu: CpuId) -> bool {
        let (word, bit) = position(cpu);
        self.words.get(word).is_some_and(|word| word & bit != 0)
    }

    /// How many CPUs are in the set.
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// The lowest CPU.
    pub fn first(&self) -> Option<CpuId> {
        self.iter().next()
    }

    /// The CPUs, ascending.
    pub fn iter(&self) -> impl Iterator<Item = CpuId> + '_ {
        self.words.iter().zip(0u16..).flat_map(|(&word, index)| {
            let mut rest = word;
            std::iter::from_fn(move || {
                let bit = rest.trailing_zeros();
                rest &= rest.wrapping_sub(1);
                u16::try_from(bit).ok().filter(|&bit| bit < 64).map(|bit| CpuId(index * 64 + bit))
            })
        })
    }

    /// CPUs in either set.
    #[must_use]
    pub fn union(&self, other: &CpuSet) -> CpuSet {
        let (long, short) = if self.words.len() >= other.words.len() { (self, other) } else { (other, self) };
        let mut words = long.words.clone();
        words.iter_mut().zip(&short.words).for_each(|(a, b)| *a |= b);
        CpuSet { words }
    }

    /// CPUs in both sets.
    #[must_use]
    pub fn intersection(&self, other: &CpuSet) -> CpuSet {
        let words = self.words.iter().zip(&other.words).map(|(a, b)| a & b).collect();
        CpuSet { words }.trimmed()
    }

    /// CPUs in this set and not in the other.
    #[must_use]
    pub fn difference(&self, other: &CpuSet) -> CpuSet {
        let mut words = self.words.clone();
        words.iter_mut().zip(&other.words).for_each(|(a, b)| *a &= !b);
        CpuSet { words }.trimmed()
    }

    /// Whether every CPU of this set is in the other.
    pub fn is_subset(&self, other: &CpuSet) -> bool {
        self.words.len() <= other.words.len() && self.words.iter().zip(&other.words).all(|(a, b)| a & !b == 0)
    }

    /// Whether no CPU is in both sets.
    pub fn is_disjoint(&self, other: &CpuSet) -> bool {
        self.words.iter().zip(&other.words).all(|(a, b)| a & b == 0)
    }

    fn trim(&mut self) {
        while self.words.last() == Some(&0) {
            self.words.pop();
        }
    }

    fn trimmed(mut self) -> CpuSet {
        self.trim();
        self
    }

    /// Parses the kernel's list format: `0-3,8,10-14:2/4`.
    ///
    /// An item is a CPU, a range, or a range with a stride `FIRST-LAST:USED/GROUP` (the first USED of every GROUP). An
    /// empty list is legal (sysfs writes it for "none"). White space is allowed at both ends and around commas; nowhere
    /// else. Format: the kernel's `Documentation/core-api/kernel-api` on `bitmap_parselist`; unlike the kernel we refuse
    /// empty items and the words `N` and `all`, which in a configuration are more often mistakes than wishes.
    ///
    /// # Errors
    /// [`ParseError`] for anything else: numbers of [`MAX_CPUS`] or more, backward ranges, a stride of zero, digits that
    /// are not ASCII.
    pub fn parse_kernel_list(text: &str) -> Result<CpuSet, ParseError> {
        let mut scan = Scan { text, at: 0 };
        let mut set = CpuSet::new();
        scan.skip_spaces();
        if scan.at_end() {
            return Ok(set);
        }
        loop {
            let first = scan.number("a CPU number")?;
            if scan.eat('-') {
                let last = scan.range_end(first)?;
                let (used, group) = if scan.eat(':') { scan.stride()? } else { (1, 1) };
                (first..=last).filter(|cpu| (cpu - first) % group < used).for_each(|cpu| set.insert(CpuId(cpu)));
            } else {
                set.insert(CpuId(first));
            }
            scan.skip_spaces();
            if scan.at_end() {
                return Ok(set);
            }
            if !scan.eat(',') {
                return Err(scan.error("expected \",\" or the end of the list"));
            }
            scan.skip_spaces();
        }
    }

    /// Parses libvirt's cpuset grammar as `virBitmapParse` reads it: `0-3,^1`.
    ///
    /// Items are applied in order, so `^1,0-3` keeps 1. `^` takes one CPU, no range. White space is allowed around every
    /// number, one trailing comma is tolerated, and the result must not be empty.
    ///
    /// # Errors
    /// [`ParseError`] for what libvirt refuses, and for CPUs of [`MAX_CPUS`] or more (libvirt's own bound is 16384).
    pub fn parse_libvirt_cpuset(text: &str) -> Result<CpuSet, ParseError> {
        let mut scan = Scan { text, at: 0 };
        let mut set = CpuSet::new();
        scan.skip_spaces();
        if scan.at_end() {
            return Err(scan.error("expected a CPU number"));
        }
        while !scan.at_end() {
            let exclude = scan.eat('^');
            let first = scan.number("a CPU number")?;
            scan.skip_spaces();
            if scan.peek() == Some('-') && exclude {
                return Err(scan.error("\"^\" takes one CPU, not a range"));
            }
            if scan.eat('-') {
                scan.skip_spaces();
                let last = scan.range_end(first)?;
                scan.skip_spaces();
                (first..=last).for_each(|cpu| set.insert(CpuId(cpu)));
            } else if exclude {
                set.remove(CpuId(first));
            } else {
                set.insert(CpuId(first));
            }
            if !scan.at_end() && !scan.eat(',') {
                return Err(scan.error("expected \",\" or the end of the list"));
            }
            scan.skip_spaces();
        }
        if set.is_empty() {
            return Err(ParseError { position: 0, reason: "the list selects no CPU".to_owned() });
        }
        Ok(set)
    }
}

fn position(cpu: CpuId) -> (usize, u64) {
    (usize::from(cpu.0 / 64), 1 << (cpu.0 % 64))
}

impl FromIterator<CpuId> for CpuSet {
    fn from_iter<I: IntoIterator<Item = CpuId>>(cpus: I) -> Self {
        let mut set = CpuSet::new();
        cpus.into_iter().for_each(|cpu| set.insert(cpu));
        set
    }
}

/// The kernel's list format without strides: ascending, merged ranges, empty for the empty set. libvirt reads it too.
impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.iter().peekable();
        let mut comma = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if(|next| next.0 == last.0 + 1) {
                last = next;
            }
            if first == last {
                write!(f, "{comma}{first}")?;
            } else {
                write!(f, "{comma}{first}-{last}")?;
            }
            comma = ",";
        }
        Ok(())
    }
}

impl fmt::Debug for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

/// A cursor over the text of a list. Every number it returns is below [`MAX_CPUS`].
struct Scan<'t> {
    text: &'t str,
    at: usize,
}

impl Scan<'_> {
    fn peek(&self) -> Option<char> {
        self.text.get(self.at..).and_then(|rest| rest.chars().next())
    }

    fn at_end(&self) -> bool {
        self.peek().is_none()
    }

    fn eat(&mut self, wanted: char) -> bool {
        let found = self.peek() == Some(wanted);
        if found {
            self.at += wanted.len_utf8();
        }
        found
    }

    /// Skips what C's isspace() calls a space, as the kernel and libvirt do; never Unicode spaces.
    fn skip_spaces(&mut self) {
        while self.peek().is_some_and(|c| matches!(c, ' ' | '\t' | '\n' | '\r' | '\x0b' | '\x0c')) {
            self.at += 1;
        }
    }

    fn error(&self, reason: &str) -> ParseError {
        let found = match self.peek() {
            Some(c) => format!("found \"{}\"", c.escape_default()),
            None => "found the end".to_owned(),
        };
        ParseError { position: self.at, reason: format!("{reason}, {found}") }
    }

    fn number(&mut self, what: &str) -> Result<u16, ParseError> {
        let start = self.at;
        let mut value: u16 = 0;
        while let Some(digit) = self.peek().and_then(|c| c.to_digit(10)) {
            // Bounded at every digit: no number, however long, overflows.
            value = u16::try_from(digit)
                .ok()
                .and_then(|digit| value.checked_mul(10)?.checked_add(digit))
                .filter(|&value| value < MAX_CPUS)
                .ok_or_else(|| ParseError {
                    position: start,
                    reason: format!("number too large, the highest is {}", MAX_CPUS - 1),
                })?;
            self.at += 1;
        }
        if self.at == start {
            return Err(self.error(&format!("expected {what}")));
        }
        Ok(value)
    }

    fn range_end(&mut self, first: u16) -> Result<u16, ParseError> {
        let start = self.at;
        let last = self.number("the end of the range")?;
        if last < first {
            return Err(ParseError { position: start, reason: format!("range runs backwards, {first}-{last}") });
        }
        Ok(last)
    }

    /// `USED/GROUP` of a stride, 0 < USED <= GROUP.
    fn stride(&mut self) -> Result<(u16, u16), ParseError> {
        let start = self.at;
        let used = self.number("the used size of the stride")?;
        if !self.eat('/') {
            return Err(self.error("expected \"/\" in the stride"));
        }
        let group = self.number("the group size of the stride")?;
        if used == 0 || group == 0 || used > group {
            return Err(ParseError {
                position: start,
                reason: format!("stride {used}/{group} selects nothing sensible"),
            });
        }
        Ok((used, group))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[track_caller]
    fn kernel(text: &str, expected: &str) {
        assert_eq!(CpuSet::parse_kernel_list(text).map(|set| set.to_string()), Ok(expected.to_owned()), "{text:?}");
    }

    #[track_caller]
    fn kernel_refuses(text: &str, position: usize, reason: &str) {
        let error = CpuSet::parse_kernel_list(text).unwrap_err();
        assert_eq!((error.position, error.reason.as_str()), (position, reason), "{text:?}");
    }

    #[test]
    fn kernel_lists() {
        kernel("", "");
        kernel("\n", "");
        kernel("0\n", "0");
        kernel("0-3,8,10-14:2/4", "0-3,8,10-11,14");
        kernel("0-8191:1/2", &(0..8192).step_by(2).map(|n| n.to_string()).collect::<Vec<_>>().join(","));
        kernel("3,1,2,1", "1-3");
        kernel("007", "7");
        kernel("8191", "8191");
        kernel(" 2-15, 18-31 ", "2-15,18-31");
        kernel("0 ,\t1", "0-1");
        kernel("5-5", "5");
        kernel("0-5:3/3", "0-5");
    }

    #[test]
    fn kernel_lists_refused() {
        kernel_refuses("3-1", 2, "range runs backwards, 3-1");
        kernel_refuses("8192", 0, "number too large, the highest is 8191");
        kernel_refuses("0,99999999999999999999", 2, "number too large, the highest is 8191");
        kernel_refuses("0-65536", 2, "number too large, the highest is 8191");
        kernel_refuses("0,,1", 2, "expected a CPU number, found \",\"");
        kernel_refuses("0,", 2, "expected a CPU number, found the end");
        kernel_refuses("-1", 0, "expected a CPU number, found \"-\"");
        kernel_refuses("+1", 0, "expected a CPU number, found \"+\"");
        kernel_refuses("0 1", 2, "expected \",\" or the end of the list, found \"1\"");
        kernel_refuses("0 - 1", 2, "expected \",\" or the end of the list, found \"-\"");
        kernel_refuses("0-", 2, "expected the end of the range, found the end");
        kernel_refuses("0-7:2", 5, "expected \"/\" in the stride, found the end");
        kernel_refuses("0-7:0/2", 4, "stride 0/2 selects nothing sensible");
        kernel_refuses("0-7:1/0", 4, "stride 1/0 selects nothing sensible");
        kernel_refuses("0-7:3/2", 4, "stride 3/2 selects nothing sensible");
        kernel_refuses("8:2/4", 1, "expected \",\" or the end of the list, found \":\"");
        kernel_refuses("0-3,^1", 4, "expected a CPU number, found \"^\"");
        kernel_refuses("٣", 0, "expected a CPU number, found \"\\u{663}\"");
        kernel_refuses("０-３", 0, "expected a CPU number, found \"\\u{ff10}\"");
        kernel_refuses("0–3", 1, "expected \",\" or the end of the list, found \"\\u{2013}\"");
        kernel_refuses("\u{a0}1", 0, "expected a CPU number, found \"\\u{a0}\"");
        kernel_refuses("all", 0, "expected a CPU number, found \"a\"");
        kernel_refuses("0x3", 1, "expected \",\" or the end of the list, found \"x\"");
    }

    /// libvirt 9.0.0's own verdicts, from its test driver.
    #[test]
    fn libvirt_cpusets() {
        for (text, expected) in [
            ("0", "0"),
            ("0-3,^1", "0,2-3"),
            ("^1,0-3", "0-3"),
            (" 0-3", "0-3"),
            ("0-3 ", "0-3"),
            ("0 - 3", "0-3"),
            ("0, 1 ,2", "0-2"),
            ("\n0-3\n", "0-3"),
            ("0\t-\t3", "0-3"),
            ("0,0,0", "0"),
            ("1,0", "0-1"),
            ("3-3", "3"),
            ("0,", "0"),
            ("007", "7"),
            ("1023", "1023"),
            ("0-3,^9", "0-3"),
            ("1 ,^1, 2", "2"),
            ("255,256", "255-256"),
        ] {
            assert_eq!(
                CpuSet::parse_libvirt_cpuset(text).map(|set| set.to_string()),
                Ok(expected.to_owned()),
                "{text:?}"
            );
        }
        for text in [
            "^3",
            "0-7:2",
            "0-7/2",
            "",
            "   ",
            "3-0",
            "0,,1",
            ",0",
            "0--2",
            "0..2",
            "-1",
            "+1",
            "0x3",
            "1e1",
            "4294967296",
            "2147483648",
            "all",
            "*",
            "a",
            "0-",
            "-",
            "^",
            "0-3,^1-2",
            "^^1",
            "!1",
            "0;1",
            "0 1",
            "０-３",
            "0–3",
            "0-3,^0-^3",
            "0,^0",
            "0-999999",
            "16384",
        ] {
            assert!(CpuSet::parse_libvirt_cpuset(text).is_err(), "{text:?}");
        }
    }

    fn sets() -> impl Strategy<Value = CpuSet> {
        proptest::collection::btree_set(0..300u16, 0..40).prop_map(|cpus| cpus.into_iter().map(CpuId).collect())
    }

    proptest! {
        #[test]
        fn what_is_printed_parses_back(set in sets()) {
            prop_assert_eq!(CpuSet::parse_kernel_list(&set.to_string()), Ok(set.clone()));
            if !set.is_empty() {
                prop_assert_eq!(CpuSet::parse_libvirt_cpuset(&set.to_string()), Ok(set));
            }
        }

        #[test]
        fn the_algebra_agrees_with_btree_sets(a in sets(), b in sets()) {
            use std::collections::BTreeSet;
            let (x, y): (BTreeSet<_>, BTreeSet<_>) = (a.iter().collect(), b.iter().collect());
            prop_assert_eq!(a.union(&b), x.union(&y).copied().collect());
            prop_assert_eq!(a.intersection(&b), x.intersection(&y).copied().collect());
            prop_assert_eq!(a.difference(&b), x.difference(&y).copied().collect());
            prop_assert_eq!(a.is_subset(&b), x.is_subset(&y));
            prop_assert_eq!(a.is_disjoint(&b), x.is_disjoint(&y));
            prop_assert_eq!(a.len(), x.len());
        }

        #[test]
        fn any_text_is_parsed_or_refused(text in "[-0-9,^:/ N\\n]{0,12}") {
            let _ = CpuSet::parse_kernel_list(&text);
            let _ = CpuSet::parse_libvirt_cpuset(&text);
        }
    }
}
