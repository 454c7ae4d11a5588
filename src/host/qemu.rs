//! What libvirt's own runtime files say of a running domain: QEMU's pid, its vCPU threads, whether it lives.
//!
//! `/run/libvirt/qemu/NAME.xml` (status) and `NAME.pid`. Reading them needs no libvirt call, so a hook may do it while
//! libvirt holds the domain's lock. Nothing here writes.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;

use super::root::{Root, is_missing};
use crate::document;
use crate::error::{Code, Error, Result};

/// Where libvirt keeps the state of running domains.
pub const RUN_DIR: &str = "/run/libvirt/qemu";
/// Persistent definitions.
pub const DEFINITION_DIR: &str = "/etc/libvirt/qemu";

/// The part of a status file that matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// QEMU's pid, which is its main thread's id.
    pub pid: u32,
    /// vCPU number -> thread id; only vCPUs that are plugged in.
    pub vcpus: BTreeMap<u16, u32>,
}

/// A file of libvirt's that is named after a domain; `None` for names that cannot be one's.
pub fn file_of(dir: &str, name: &str, suffix: &str) -> Option<String> {
    // libvirt refuses these in names, so such a name is not from libvirt.
    (!name.is_empty() && !name.contains(['/', '\0', '\n'])).then(|| format!("{dir}/{name}{suffix}"))
}

/// The status of a running domain; `None` if libvirt has none.
///
/// # Errors
/// [`Code::HostIo`] when the file cannot be read or understood.
pub fn status(root: &Root, name: &str) -> Result<Option<Status>> {
    let Some(path) = file_of(RUN_DIR, name, ".xml") else { return Ok(None) };
    let Some(text) = root.read_if_exists(&path)? else { return Ok(None) };
    let status = parse_status(&text).map_err(|what| Error::new(Code::HostIo, format!("{path}: {what}")))?;
    Ok(Some(status))
}

/// Parses `<domstatus pid='P'><vcpus><vcpu id='0' pid='T'/>...`.
fn parse_status(text: &str) -> std::result::Result<Status, String> {
    let document = document::parse(text).map_err(|flaw| flaw.to_string())?;
    let status = document.root_element();
    if !status.has_tag_name("domstatus") {
        return Err("not a domain's status".to_owned());
    }
    let number = |node: roxmltree::Node<'_, '_>, name| node.attribute(name)?.parse::<u32>().ok();
    let pid = number(status, "pid").filter(|&pid| pid > 0).ok_or("no pid")?;
    let vcpus = status.children().filter(|node| node.has_tag_name("vcpus"));
    let vcpus = vcpus.flat_map(|node| node.children()).filter(|node| node.has_tag_name("vcpu"));
    let vcpus = vcpus.filter_map(|node| {
        let id = number(node, "id").and_then(|id| u16::try_from(id).ok())?;
        Some((id, number(node, "pid").filter(|&tid| tid > 0)?))
    });
    Ok(Status { pid, vcpus: vcpus.collect() })
}

/// The live `<domain>` document inside the text of a status file.
pub fn live_domain(status: &str) -> Option<String> {
    let document = document::parse(status).ok()?;
    let domain = document.root_element().children().find(|node| node.has_tag_name("domain"))?;
    status.get(domain.range()).map(str::to_owned)
}

/// The pid of the domain's QEMU if it lives: it holds a POSIX lock on its pid file from before its exec until its end.
/// `None` if nobody holds it, or there is no such file. The pid is 0 or negative if the holder is in another PID namespace.
///
/// # Errors
/// [`Code::HostIo`] when that cannot be told: the file is there and cannot be opened or asked.
pub fn living_pid(root: &Root, name: &str) -> Result<Option<i32>> {
    let Some(path) = file_of(RUN_DIR, name, ".pid").filter(|_| !root.is_description()) else { return Ok(None) };
    let path = root.resolve(&path);
    let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(&path) {
        Ok(file) => file,
        Err(error) if is_missing(&error) => {
            return Ok(None);
        }
        Err(error) => return Err(Error::io(Code::HostIo, "open", &path, error)),
    };
    let lock_kind = |kind: libc::c_int| libc::c_short::try_from(kind).unwrap_or_default();
    let mut lock = libc::flock {
        l_type: lock_kind(libc::F_WRLCK),
        l_whence: lock_kind(libc::SEEK_SET),
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    fcntl(&file, FcntlArg::F_GETLK(&mut lock))
        .map_err(|errno| Error::io(Code::HostIo, "ask for locks on", &path, errno.into()))?;
    Ok((lock.l_type != lock_kind(libc::F_UNLCK)).then_some(lock.l_pid))
}

/// The running domains: (name, text of the status file).
///
/// # Errors
/// [`Code::HostIo`].
pub fn running(root: &Root) -> Result<Vec<(String, String)>> {
    let mut running = Vec::new();
    for name in root.list(RUN_DIR)?.iter().filter_map(|name| name.strip_suffix(".xml")) {
        if living_pid(root, name)?.is_some() {
            let text = root.read_if_exists(&format!("{RUN_DIR}/{name}.xml"))?;
            running.extend(text.map(|text| (name.to_owned(), text)));
        }
    }
    Ok(running)
}

/// Whether the domain's QEMU lives, for those who only report.
pub fn lives(root: &Root, name: &str) -> bool {
    living_pid(root, name).is_ok_and(|pid| pid.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_read() {
        let text = "<domstatus state='running' reason='booted' pid='4711'><vcpus><vcpu id='0' pid='4712'/>\
                    <vcpu id='1' pid='4713'/><vcpu id='2'/></vcpus><domain id='1'><vcpus><vcpu id='9' pid='9'/></vcpus></domain></domstatus>";
        assert_eq!(parse_status(text), Ok(Status { pid: 4711, vcpus: [(0, 4712), (1, 4713)].into() }));
        for bad in ["", "<domain/>", "<domstatus/>", "<domstatus pid='0'/>", "<domstatus pid='-1'/>"] {
            assert!(parse_status(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_cannot_leave_the_directory() {
        assert_eq!(file_of("/d", "..", ".xml"), Some("/d/...xml".to_owned()));
        for name in ["../x", "/etc/passwd", "", "a\0b", "a\nb"] {
            assert_eq!(file_of("/d", name, ".xml"), None);
        }
    }

    #[test]
    fn a_lock_on_the_pid_file_is_a_sign_of_life() {
        use std::io::Write;
        let dir = tempfile::tempdir().unwrap();
        let root = Root::directory(dir.path());
        std::fs::create_dir_all(dir.path().join("run/libvirt/qemu")).unwrap();
        let path = dir.path().join("run/libvirt/qemu/vm.pid");
        std::fs::File::create(&path).unwrap().write_all(b"1\n").unwrap();
        assert_eq!(living_pid(&root, "vm").unwrap(), None);
        // POSIX locks of our own process do not conflict with it; one of an open file does, and has no pid.
        let held = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let kind = |kind: libc::c_int| libc::c_short::try_from(kind).unwrap();
        let whole =
            libc::flock { l_type: kind(libc::F_WRLCK), l_whence: kind(libc::SEEK_SET), l_start: 0, l_len: 0, l_pid: 0 };
        fcntl(&held, FcntlArg::F_OFD_SETLK(&whole)).unwrap();
        assert_eq!(living_pid(&root, "vm").unwrap(), Some(-1));
        drop(held);
        assert_eq!(living_pid(&root, "vm").unwrap(), None);
    }
}
