//! A machine as one text file that people can read before they send it: what `virt-pin gather` prints.
//!
//! ```text
//! # virt-pin host description 1
//! # kernel 6.12.9
//! /sys/devices/system/cpu/cpu0/topology/core_cpus_list<TAB>0,64
//! ```
//!
//! One line per file: path, tab, text. Newlines at the text's end are left out; `\n`, `\t` and `\\` stand for a
//! newline, a tab and a backslash in it. Lines are in the natural order of their paths (cpu2 before cpu10); lines that
//! begin with `#` are comments. There is in it what the readers of the topology, of the cgroup mode and of the
//! nodes of PCI devices look at on that machine and nothing else: no name of the machine, no serial number, no process, no
//! mount but cgroups, of PCI devices the addresses alone.
//!
//! Describing a description gives the same text again, and both have the topology of the machine itself.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use super::pci;
use super::root::Root;
use super::sysfs::{self, MEMINFO_KEYS, meminfo_key};
use crate::error::{Code, Error, Result, printable};

/// The first line up to its version.
const HEADER: &str = "# virt-pin host description ";
/// The version of the format that we write and read.
const VERSION: &str = "1";
/// A description has at most this much text (8192 CPUs in full take less than a tenth of it) ...
pub const MAX_BYTES: usize = 64 << 20;
/// ... and this many files ...
const MAX_FILES: usize = 1 << 18;
/// ... with no longer path than the kernel's own limit.
const MAX_PATH: usize = 4096;

const KERNEL: &str = "/proc/sys/kernel/osrelease";
const MEMINFO: &str = "/proc/meminfo";
const MOUNTS: &str = "/proc/mounts";
/// Read beside what the topology needs: the size of huge pages, and where and of which version the cgroups are.
const OTHERS: [&str; 4] = [KERNEL, MEMINFO, MOUNTS, "/sys/fs/cgroup/cgroup.controllers"];

/// The description of the machine under `root`.
///
/// A machine whose topology cannot be read is described as far as it can be: such descriptions are the ones most
/// needed.
///
/// # Errors
/// [`Code::TopologyUnreadable`] where there is nothing to describe.
pub fn gather(root: &Root) -> Result<String> {
    gather_with(root, &[])
}

/// The same with the texts of these files, where they are there.
///
/// # Errors
/// As [`gather`].
pub fn gather_with(root: &Root, also: &[String]) -> Result<String> {
    let (mut files, topology) = sysfs::record(root);
    if files.is_empty() {
        topology?;
    }
    for path in OTHERS.into_iter().chain(also.iter().map(String::as_str)) {
        // One that cannot be read is one that the readers cannot read either.
        if let Ok(Some(text)) = root.read_if_exists(path) {
            files.insert(path.to_owned(), text);
        }
    }
    files.extend(pci::record(root));
    let mut lines: Vec<(String, String)> = Vec::with_capacity(files.len());
    for (path, text) in files {
        let text = escaped(&reduced(&path, &text));
        lines.push((path, text));
    }
    lines.sort_by(|(a, _), (b, _)| natural(a, b));

    let kernel = lines.iter().find(|(path, _)| path == KERNEL).map_or("unknown", |(_, text)| text);
    let mut description = format!("{HEADER}{VERSION}\n# kernel {}\n", printable(kernel));
    for (path, text) in &lines {
        description.push_str(path);
        description.push('\t');
        description.push_str(text);
        description.push('\n');
    }
    Ok(description)
}

/// The machine that a description describes; it can be read and not written.
///
/// # Errors
/// [`Code::TopologyUnreadable`] with the number of the first line that is not one of ours: no tab, a path that is not
/// absolute and normal or occurs twice, an unknown escape, a newer format, too much text.
pub fn parse(text: &str) -> Result<Root> {
    if text.len() > MAX_BYTES {
        return Err(Error::new(Code::TopologyUnreadable, format!("host description: longer than {MAX_BYTES} bytes")));
    }
    let mut files = BTreeMap::new();
    for (line, number) in text.split('\n').zip(1usize..) {
        parse_line(line, &mut files).map_err(|reason| {
            Error::new(Code::TopologyUnreadable, format!("host description, line {number}: {reason}"))
                .with_hint("each line is a path, a tab and the file's text; `virt-pin gather` writes such files")
        })?;
    }
    Ok(Root::described(files))
}

fn parse_line(line: &str, files: &mut BTreeMap<String, String>) -> Result<(), String> {
    if let Some(version) = line.strip_prefix(HEADER) {
        let known = version.trim_end() == VERSION;
        return if known { Ok(()) } else { Err(format!("format {version} is not one we read ({VERSION})")) };
    }
    if line.is_empty() || line.starts_with('#') {
        return Ok(());
    }
    let (path, text) = line.split_once('\t').ok_or("no tab between path and text")?;
    check_path(path)?;
    if files.len() == MAX_FILES {
        return Err(format!("more than {MAX_FILES} files"));
    }
    match files.insert(path.to_owned(), unescaped(text)?) {
        Some(_) => Err(format!("\"{path}\" is described twice")),
        None => Ok(()),
    }
}

fn check_path(path: &str) -> Result<(), String> {
    let relative = path.strip_prefix('/').ok_or_else(|| format!("\"{path}\" is not an absolute path"))?;
    if path.len() > MAX_PATH {
        return Err(format!("a path longer than {MAX_PATH} bytes"));
    }
    if path.contains(|c: char| c.is_control()) || relative.split('/').any(|name| matches!(name, "" | "." | "..")) {
        return Err(format!("\"{path}\" is not a normal path"));
    }
    Ok(())
}

/// What of a file's text belongs into a description.
fn reduced(path: &str, text: &str) -> String {
    let keep: fn(&str) -> bool = match path {
        MEMINFO => |line| has_key(line, &["Hugepagesize"]),
        MOUNTS => |line| matches!(line.split(' ').nth(2), Some("cgroup" | "cgroup2")),
        _ if path.ends_with("/meminfo") => |line| has_key(line, &MEMINFO_KEYS),
        _ => return text.trim_end_matches('\n').to_owned(),
    };
    text.split('\n').filter(|line| keep(line)).collect::<Vec<_>>().join("\n")
}

fn has_key(line: &str, keys: &[&str]) -> bool {
    line.split_once(':').is_some_and(|(name, _)| keys.contains(&meminfo_key(name)))
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('\n', "\\n").replace('\t', "\\t")
}

fn unescaped(text: &str) -> Result<String, String> {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        out.push(match (c, if c == '\\' { chars.next() } else { None }) {
            ('\\', Some('n')) => '\n',
            ('\\', Some('t')) => '\t',
            ('\\', Some('\\')) => '\\',
            ('\\', _) => return Err("a backslash that is not part of \\n, \\t or \\\\".to_owned()),
            (c, _) => c,
        });
    }
    Ok(out)
}

/// Byte order, but runs of digits by their value; equal values by their length, so that different paths never tie.
fn natural(a: &str, b: &str) -> Ordering {
    let (mut a, mut b) = (a.as_bytes(), b.as_bytes());
    loop {
        let (digits_a, digits_b) = (digits(a), digits(b));
        let order = if digits_a.is_empty() || digits_b.is_empty() {
            match (a.split_first(), b.split_first()) {
                (Some((first_a, rest_a)), Some((first_b, rest_b))) => {
                    (a, b) = (rest_a, rest_b);
                    first_a.cmp(first_b)
                }
                _ => return a.len().cmp(&b.len()),
            }
        } else {
            a = a.strip_prefix(digits_a).unwrap_or_default();
            b = b.strip_prefix(digits_b).unwrap_or_default();
            let (value_a, value_b) = (significant(digits_a), significant(digits_b));
            let by_value = value_a.len().cmp(&value_b.len()).then_with(|| value_a.cmp(value_b));
            by_value.then(digits_a.len().cmp(&digits_b.len()))
        };
        if order != Ordering::Equal {
            return order;
        }
    }
}

fn digits(text: &[u8]) -> &[u8] {
    text.split(|byte| !byte.is_ascii_digit()).next().unwrap_or_default()
}

fn significant(digits: &[u8]) -> &[u8] {
    let zeros = digits.iter().take_while(|&&digit| digit == b'0').count();
    digits.get(zeros..).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_back_as_files() {
        let root = parse("# virt-pin host description 1\n\n# note\n/a/b\t1\\n2\\t\\\\\n/a/c\t\n").unwrap();
        assert_eq!(root.read("/a/b").unwrap(), "1\n2\t\\");
        assert_eq!(root.read("/a/c").unwrap(), "");
        assert_eq!(unescaped(&escaped("\\n\n\t\\\\t é")).unwrap(), "\\n\n\t\\\\t é");
    }

    #[test]
    fn lines_refused() {
        for (text, reason) in [
            ("/a", "line 1: no tab between path and text"),
            ("# x\na\t1", "line 2: \"a\" is not an absolute path"),
            ("/a/../b\t1", "line 1: \"/a/../b\" is not a normal path"),
            ("/a//b\t1", "line 1: \"/a//b\" is not a normal path"),
            ("/a/\t1", "line 1: \"/a/\" is not a normal path"),
            ("/\t1", "line 1: \"/\" is not a normal path"),
            ("/./a\t1", "line 1: \"/./a\" is not a normal path"),
            ("/a\r\t1", "line 1: \"/a\\r\" is not a normal path"),
            ("/a\t1\n/b\t\n/a\t1\n", "line 3: \"/a\" is described twice"),
            ("/a\t\\r", "line 1: a backslash that is not part of \\n, \\t or \\\\"),
            ("/a\t\\", "line 1: a backslash that is not part of \\n, \\t or \\\\"),
            ("# virt-pin host description 2", "line 1: format 2 is not one we read (1)"),
        ] {
            let error = parse(text).unwrap_err();
            assert_eq!((error.code, error.message), (Code::TopologyUnreadable, format!("host description, {reason}")));
        }
        assert!(parse(&format!("/{}\t1", "a".repeat(MAX_PATH))).is_err());
    }

    #[test]
    fn natural_order() {
        let mut paths =
            ["/cpu10/x", "/cpu2/x", "/cpu/online", "/cpu2", "/cpu02", "/cpu1/b", "/cpu1/a10", "/cpu1/a9", "/a"];
        paths.sort_by(|a, b| natural(a, b));
        assert_eq!(
            paths,
            ["/a", "/cpu/online", "/cpu1/a9", "/cpu1/a10", "/cpu1/b", "/cpu2", "/cpu2/x", "/cpu02", "/cpu10/x"]
        );
    }

    #[test]
    fn private_lines_stay_at_home() {
        let mounts = "/dev/sda1 /home/jane ext4 rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n";
        assert_eq!(reduced(MOUNTS, mounts), "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0");
        assert_eq!(reduced(MEMINFO, "MemTotal: 1 kB\nHugepagesize:  2048 kB\n"), "Hugepagesize:  2048 kB");
        let node = "Node 0 MemTotal:  9 kB\nNode 0 Dirty:  1 kB\nNode 0 Active(file):  2 kB\n";
        assert_eq!(
            reduced("/sys/devices/system/node/node0/meminfo", node),
            "Node 0 MemTotal:  9 kB\nNode 0 Active(file):  2 kB"
        );
    }

    #[test]
    fn a_description_describes_itself() {
        let text = "# virt-pin host description 1\n# kernel 6.1\n/proc/mounts\tcgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n\
            /proc/sys/kernel/osrelease\t6.1\n/sys/bus/pci/devices/0000:65:00.0/numa_node\t1\n\
            /sys/devices/system/cpu/online\t0\n";
        assert_eq!(gather(&parse(text).unwrap()).unwrap(), text);
        assert_eq!(gather(&parse("").unwrap()).unwrap_err().code, Code::TopologyUnreadable);
    }
}
