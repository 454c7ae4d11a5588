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

    /// Adds `first` to `last`, both below [`MAX_CPUS`].
    fn insert_range(&mut self, first: u16, last: u16) {
        let words = usize::from(first / 64)..=usize::from(last / 64);
        if self.words.len() <= *words.end() {
            self.words.resize(words.end() + 1, 0);
        }
        let (low, high) = (u64::MAX << (first % 64), u64::MAX >> (63 - last % 64));
        for index in words.clone() {
            let from = if index == *words.start() { low } else { u64::MAX };
            let to = if index == *words.end() { high } else { u64::MAX };
            if let Some(word) = self.words.get_mut(index) {
                *word |= from & to;
            }
        }
    }

    /// The lowest id from `from` on that is in the set, or the lowest that is not.
    fn next(&self, from: u16, inside: bool) -> Option<u16> {
        let mut mask = u64::MAX << (from % 64);
        for index in from / 64..=MAX_CPUS / 64 {
            let word = match self.words.get(usize::from(index)) {
                Some(&word) => word,
                None if inside => return None,
                None => 0,
            };
            let bits = if inside { word } else { !word } & mask;
            if bits != 0 {
                return u16::try_from(bits.trailing_zeros()).ok().map(|bit| index * 64 + bit);
            }
            mask = u64::MAX;
        }
        None
    }

    /// How many CPUs are in the set.
    pub fn len(&self) -> usize {
        // A core's threads lie far apart: most words are empty.
        self.words.iter().filter(|word| **word != 0).map(|word| word.count_ones() as usize).sum()
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
        let mut words = self.words.iter();
        // What is left of the word last taken, and the number behind its end.
        let (mut rest, mut end) = (0u64, 0);
        std::iter::from_fn(move || {
            while rest == 0 {
                rest = *words.next()?;
                end += 64;
            }
            let bit = rest.trailing_zeros();
            rest &= rest - 1;
            u16::try_from(bit).ok().map(|bit| CpuId(end - 64 + bit))
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

    /// Adds every CPU of the other set.
    pub fn add(&mut self, other: &CpuSet) {
        if self.words.len() < other.words.len() {
            self.words.resize(other.words.len(), 0);
        }
        self.words.iter_mut().zip(&other.words).for_each(|(a, b)| *a |= b);
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
        self.words.len() <= other.words.len()
            && self.words.iter().zip(&other.words).fold(0, |beyond, (a, b)| beyond | (a & !b)) == 0
    }

    /// Whether no CPU is in both sets.
    pub fn is_disjoint(&self, other: &CpuSet) -> bool {
        self.words.iter().zip(&other.words).fold(0, |both, (a, b)| both | (a & b)) == 0
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
            if scan.eat(b'-') {
                let last = scan.range_end(first)?;
                let (used, group) = if scan.eat(b':') { scan.stride()? } else { (1, 1) };
                if used == group {
                    set.insert_range(first, last);
                } else {
                    (first..=last).filter(|cpu| (cpu - first) % group < used).for_each(|cpu| set.insert(CpuId(cpu)));
                }
            } else {
                set.insert(CpuId(first));
            }
            scan.skip_spaces();
            if scan.at_end() {
                return Ok(set);
            }
            if !scan.eat(b',') {
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
            let exclude = scan.eat(b'^');
            let first = scan.number("a CPU number")?;
            scan.skip_spaces();
            if scan.peek() == Some(b'-') && exclude {
                return Err(scan.error("\"^\" takes one CPU, not a range"));
            }
            if scan.eat(b'-') {
                scan.skip_spaces();
                let last = scan.range_end(first)?;
                scan.skip_spaces();
                set.insert_range(first, last);
            } else if exclude {
                set.remove(CpuId(first));
            } else {
                set.insert(CpuId(first));
            }
            if !scan.at_end() && !scan.eat(b',') {
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
        // Room for the CPUs of nearly every host at once.
        let mut set = CpuSet { words: Vec::with_capacity(8) };
        cpus.into_iter().for_each(|cpu| set.insert(cpu));
        set
    }
}

/// The kernel's list format without strides: ascending, merged ranges, empty for the empty set. libvirt reads it too.
impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Digit by digit into one text: a host's leases have thousands of numbers, and each start writes them all.
        let mut text = Vec::with_capacity(64);
        let mut at = 0;
        while let Some(first) = self.next(at, true) {
            let end = self.next(first, false).unwrap_or(MAX_CPUS);
            if !text.is_empty() {
                text.push(b',');
            }
            push_number(&mut text, first);
            if end - first > 1 {
                text.push(b'-');
                push_number(&mut text, end - 1);
            }
            at = end;
        }
        f.write_str(std::str::from_utf8(&text).map_err(|_| fmt::Error)?)
    }
}

/// Appends the number in decimal.
fn push_number(text: &mut Vec<u8>, number: u16) {
    if number >= 10 {
        push_number(text, number / 10);
    }
    text.extend(u8::try_from(number % 10).ok().map(|digit| b'0' + digit));
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
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn at_end(&self) -> bool {
        self.peek().is_none()
    }

    /// Steps over `wanted`, an ASCII character, if it is next.
    fn eat(&mut self, wanted: u8) -> bool {
        let found = self.peek() == Some(wanted);
        self.at += usize::from(found);
        found
    }

    /// Skips what C's isspace() calls a space, as the kernel and libvirt do; never Unicode spaces.
    fn skip_spaces(&mut self) {
        while self.peek().is_some_and(|c| matches!(c, b' ' | b'\t' | b'\n' | b'\r' | b'\x0b' | b'\x0c')) {
            self.at += 1;
        }
    }

    fn error(&self, reason: &str) -> ParseError {
        // Only ASCII is ever stepped over, so this is where a character begins.
        let found = match self.text.get(self.at..).and_then(|rest| rest.chars().next()) {
            Some(c) => format!("found \"{}\"", c.escape_default()),
            None => "found the end".to_owned(),
        };
        ParseError { position: self.at, reason: format!("{reason}, {found}") }
    }

    fn number(&mut self, what: &str) -> Result<u16, ParseError> {
        let start = self.at;
        let mut value: u16 = 0;
        while let Some(digit) = self.peek().filter(u8::is_ascii_digit) {
            // Bounded at every digit: no number, however long, overflows.
            value = value
                .checked_mul(10)
                .and_then(|value| value.checked_add(u16::from(digit - b'0')))
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
        if !self.eat(b'/') {
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
            let mut both = a.clone();
            both.add(&b);
            prop_assert_eq!(both, a.union(&b));
        }

        #[test]
        fn a_range_is_its_numbers(a in 0..MAX_CPUS, b in 0..MAX_CPUS, more in sets()) {
            let (first, last) = (a.min(b), a.max(b));
            let range = CpuSet::parse_kernel_list(&format!("{first}-{last}")).unwrap();
            prop_assert_eq!(&range, &(first..=last).map(CpuId).collect());
            let more = more.union(&CpuSet::from_iter([CpuId(0)]));
            prop_assert_eq!(CpuSet::parse_kernel_list(&format!("{more},{first}-{last}")), Ok(more.union(&range)));
        }

        #[test]
        fn any_text_is_parsed_or_refused(text in "[-0-9,^:/ N\\n]{0,12}") {
            let _ = CpuSet::parse_kernel_list(&text);
            let _ = CpuSet::parse_libvirt_cpuset(&text);
        }
    }
}
