//! The cpuset cgroups of this host: which kind there is, what they can reach, and which one a thread is in.
//!
//! Only reads. What is written to cgroups, and why, is in `enforce`.

use std::collections::BTreeMap;

use super::machine_name::Naming;
use super::root::Root;
use crate::cpuset::CpuSet;
use crate::error::{Code, Error, Result};

/// The cpuset controller's version and mount point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hierarchy {
    /// cgroup v1 (or hybrid): a hierarchy of its own.
    V1(String),
    /// cgroup v2: the unified hierarchy.
    V2(String),
}

impl Hierarchy {
    /// Where it is mounted.
    pub fn mount(&self) -> &str {
        let (Hierarchy::V1(mount) | Hierarchy::V2(mount)) = self;
        mount
    }

    /// The file that lists a cgroup's threads, and takes one in.
    pub fn threads_file(&self) -> &'static str {
        match self {
            Hierarchy::V1(_) => "tasks",
            Hierarchy::V2(_) => "cgroup.threads",
        }
    }
}

/// Where the cpuset controller is; `None` where there is none.
///
/// Reads `/proc/mounts` (device, mount point, type, options; a space in a path is `\040`).
///
/// # Errors
/// [`Code::HostIo`] when it cannot be read.
pub fn hierarchy(root: &Root) -> Result<Option<Hierarchy>> {
    let mounts = root.read_if_exists("/proc/mounts")?.unwrap_or_default();
    let mut unified = None;
    for line in mounts.lines() {
        let mut fields = line.split(' ');
        let (Some(_), Some(mount), Some(kind), Some(options)) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let mount = mount.replace("\\040", " ");
        if kind == "cgroup" && options.split(',').any(|option| option == "cpuset") {
            return Ok(Some(Hierarchy::V1(mount)));
        }
        if kind == "cgroup2" {
            let controllers = root.read_if_exists(&format!("{mount}/cgroup.controllers"))?.unwrap_or_default();
            if controllers.split_whitespace().any(|controller| controller == "cpuset") {
                unified = Some(Hierarchy::V2(mount));
            }
        }
    }
    Ok(unified)
}

/// Whether libvirt will ask systemd-machined for the domain's cgroup: systemd runs and machined can be activated.
pub fn has_machined(root: &Root) -> bool {
    root.exists("/run/systemd/system")
        && root.exists("/usr/share/dbus-1/system-services/org.freedesktop.machine1.service")
}

/// Who names the cgroups of domains on this host.
pub fn naming(root: &Root) -> Naming {
    if has_machined(root) { Naming::Systemd } else { Naming::Libvirt }
}

/// The CPUs that a domain's cgroup can be given at all: what its parent (or the nearest ancestor that exists) has.
/// `None` = no restriction known.
///
/// v1: `cpuset.effective_cpus`; v2: `cpuset.cpus.effective` with `cpuset.cpus.exclusive.effective`. Kernel list; missing where the controller is not enabled.
///
/// # Errors
/// [`Code::HostIo`] when such a file exists and makes no sense.
pub fn reach(root: &Root, partition: Option<&str>) -> Result<Option<CpuSet>> {
    let Some(hierarchy) = hierarchy(root)? else { return Ok(None) };
    let (mount, file) = match &hierarchy {
        Hierarchy::V1(mount) => (mount, "cpuset.effective_cpus"),
        Hierarchy::V2(mount) => (mount, "cpuset.cpus.effective"),
    };
    let mut path = format!("{mount}{}", parent_path(naming(root), partition)?);
    loop {
        if let Some(text) = root.read_if_exists(&format!("{path}/{file}"))? {
            let mut cpus = CpuSet::parse_kernel_list(&text)
                .map_err(|error| Error::new(Code::HostIo, format!("{path}/{file} is no CPU list")).because(error))?;
            // CPUs of partitions below are not among its own, and can be given to those below all the same.
            let passed_on = root.read_if_exists(&format!("{path}/cpuset.cpus.exclusive.effective"))?;
            cpus.add(&passed_on.and_then(|text| CpuSet::parse_kernel_list(&text).ok()).unwrap_or_default());
            return Ok(Some(cpus));
        }
        match path.rsplit_once('/') {
            Some((parent, _)) if path.len() > mount.len() => path = parent.to_owned(),
            _ => return Ok(None),
        }
    }
}

/// The path of a `<resource><partition>` below the hierarchy's mount point; `None` = `/machine`.
///
/// # Errors
/// [`Code::DomainInvalid`] when it is no absolute path.
pub fn parent_path(naming: Naming, partition: Option<&str>) -> Result<String> {
    let partition = partition.unwrap_or("/machine");
    naming.partition_path(partition).ok_or_else(|| {
        Error::new(
            Code::DomainInvalid,
            format!("<partition>{partition}</partition> is not an absolute path of a cgroup"),
        )
        .with_hint("write one such as /machine/db into <resource>, or leave it out for libvirt's own")
    })
}

/// Our cgroup within one of libvirt's for threads, where these are moved that are to have a cpuset partition.
pub const INNER: &str = "virt-pin";

/// The cgroup directory of a thread in the cpuset hierarchy (that around it, if it is in one of ours), if it is one of those that libvirt makes for a domain's
/// threads (`emulator`, `vcpuN`, `iothreadN`): the only ones that may be written to.
pub fn of_thread(root: &Root, hierarchy: &Hierarchy, pid: u32, tid: u32) -> Option<String> {
    // `/proc/PID/task/TID/cgroup`: lines of ID:CONTROLLERS:PATH; v2 is `0::PATH`.
    let text = root.read_if_exists(&format!("/proc/{pid}/task/{tid}/cgroup")).ok().flatten().unwrap_or_default();
    let by_controller: BTreeMap<&str, &str> =
        text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':')).collect();
    let (mount, path) = match hierarchy {
        Hierarchy::V1(mount) => {
            let found = by_controller.iter().find(|(controllers, _)| controllers.split(',').any(|one| one == "cpuset"));
            (mount, found.map(|(_, path)| *path))
        }
        Hierarchy::V2(mount) => (mount, by_controller.get("").copied()),
    };
    let numbered =
        |name: &str, prefix: &str| name.strip_prefix(prefix).is_some_and(|number| number.parse::<u32>().is_ok());
    path.and_then(|path| {
        let path = path.strip_suffix(INNER).and_then(|path| path.strip_suffix('/')).unwrap_or(path);
        let last = path.rsplit('/').next()?;
        let ours = last == "emulator" || numbered(last, "vcpu") || numbered(last, "iothread");
        (ours && !path.split('/').any(|part| part == "..")).then(|| format!("{mount}{path}"))
    })
}

/// The threads in a cgroup, of whatever process: none if it is gone.
pub fn threads_in(root: &Root, hierarchy: &Hierarchy, dir: &str) -> Vec<u32> {
    let text = root.read_if_exists(&format!("{dir}/{}", hierarchy.threads_file())).ok().flatten().unwrap_or_default();
    text.lines().filter_map(|line| line.trim().parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> CpuSet {
        CpuSet::parse_kernel_list(text).unwrap()
    }

    fn described(files: &[(&str, &str)]) -> Root {
        Root::described(files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect())
    }

    #[test]
    fn hierarchies_are_told_apart() {
        let v1 = ("/proc/mounts", "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /a\\040b cgroup rw,cpuset,cpu 0 0\n");
        assert_eq!(hierarchy(&described(&[v1])).unwrap(), Some(Hierarchy::V1("/a b".to_owned())));
        let v2 = [("/proc/mounts", "cgroup2 /cg cgroup2 rw 0 0\n"), ("/cg/cgroup.controllers", "cpuset cpu\n")];
        assert_eq!(hierarchy(&described(&v2)).unwrap(), Some(Hierarchy::V2("/cg".to_owned())));
        assert_eq!(hierarchy(&described(&v2[..1])).unwrap(), None);
        assert_eq!(hierarchy(&described(&[])).unwrap(), None);
    }

    #[test]
    fn reach_is_that_of_the_nearest_ancestor() {
        let mounts = ("/proc/mounts", "cgroup /c cgroup rw,cpuset 0 0\n");
        let root = ("/c/cpuset.effective_cpus", "0-7\n");
        let machine = ("/c/machine/cpuset.effective_cpus", "2-3\n");
        assert_eq!(reach(&described(&[mounts]), None).unwrap(), None);
        assert_eq!(reach(&described(&[mounts, root]), None).unwrap(), Some(set("0-7")));
        assert_eq!(reach(&described(&[mounts, root, machine]), None).unwrap(), Some(set("2-3")));
        assert_eq!(reach(&described(&[mounts, root, machine]), Some("/machine/x")).unwrap(), Some(set("2-3")));
        assert_eq!(reach(&described(&[mounts, root]), Some("../x")).unwrap_err().code, Code::DomainInvalid);
    }

    #[test]
    fn only_libvirts_own_thread_cgroups_are_named() {
        let find = |cgroup: &str| {
            of_thread(&described(&[("/proc/7/task/8/cgroup", cgroup)]), &Hierarchy::V1("/c".to_owned()), 7, 8)
        };
        assert_eq!(
            find("3:cpuset:/machine/qemu-1-a.libvirt-qemu/vcpu0\n0::/\n"),
            Some("/c/machine/qemu-1-a.libvirt-qemu/vcpu0".into())
        );
        assert_eq!(find("3:cpuset:/m/vcpu0/virt-pin\n"), Some("/c/m/vcpu0".into()));
        assert_eq!(find("3:cpuset:/m/virt-pin\n"), None);
        assert_eq!(find("3:cpu,cpuset:/m/emulator\n"), Some("/c/m/emulator".into()));
        assert_eq!(find("3:cpuset:/system.slice\n"), None);
        assert_eq!(find("3:cpuset:/../vcpu0\n"), None);
        assert_eq!(find("3:cpuset:/m/vcpux\n"), None);
        assert_eq!(find(""), None);
    }
}
