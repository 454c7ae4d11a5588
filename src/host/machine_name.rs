//! What libvirt and systemd call a domain's cgroup: pure text, from their own rules.
//!
//! libvirt 9.0 to 12.8: `virDomainMachineNameAppendValid` (src/hypervisor/domain_driver.c), `virCgroupSetPartitionSuffix`
//! and `virCgroupPartitionEscape` (src/util/vircgroup.c).

/// Who names the cgroups of domains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// libvirt itself: `/machine/qemu-1-a.libvirt-qemu`.
    Libvirt,
    /// systemd, which libvirt asks through machined: `/machine.slice/machine-qemu\x2d1\x2da.scope`.
    Systemd,
}

impl Naming {
    /// The path of a `<resource><partition>` below a hierarchy's mount point; `None` for a path that is not absolute, has
    /// a `..`, or is too long for any file.
    pub fn partition_path(self, partition: &str) -> Option<String> {
        match self {
            Naming::Libvirt => partition_path(partition),
            Naming::Systemd => slice_path(partition),
        }
    }

    /// The name of a domain's cgroup in its partition.
    pub fn directory(self, domain_id: u32, name: &str) -> String {
        match self {
            Naming::Libvirt => format!("{}.libvirt-qemu", machine_name(domain_id, name)),
            Naming::Systemd => scope_name(domain_id, name),
        }
    }

    /// The machine whose processes such a cgroup holds; `None` for any other cgroup.
    pub fn machine(self, directory: &str) -> Option<String> {
        match self {
            Naming::Libvirt => directory.strip_suffix(".libvirt-qemu").map(str::to_owned),
            Naming::Systemd => machine_of_scope(directory).filter(|machine| machine.starts_with("qemu-")),
        }
    }
}

/// The longest path that the kernel takes. A partition whose path is longer is none, and is not spelled out to the end: with
/// systemd's naming that grows with the square of the depth.
const MAX_PATH: usize = 4096;

/// The longest machine name, `qemu-<id>-` included.
const MAX_MACHINE_NAME: usize = 64;

/// `qemu-<id>-<name>`, the name reduced to `[A-Za-z0-9.-]` with no leading, trailing or repeated `.` and `-`.
pub fn machine_name(domain_id: u32, name: &str) -> String {
    let mut machine = format!("qemu-{domain_id}-");
    // The dash just written counts: a dot or dash after it is dropped.
    let mut skip = true;
    for c in name.chars() {
        if machine.len() >= MAX_MACHINE_NAME {
            break;
        }
        match c {
            '.' | '-' if !skip => skip = true,
            '.' | '-' => continue,
            c if c.is_ascii_alphanumeric() => skip = false,
            _ => continue,
        }
        machine.push(c);
    }
    machine.truncate(machine.trim_end_matches(['-', '.']).len());
    machine
}

/// The unit that machined makes for the domain's processes: its machine name in `machine-NAME.scope`, escaped as
/// `unit_name_escape` does (src/basic/unit-name.c), which leaves letters, digits, `:`, `_` and inner dots as they are. Of
/// what a machine name can have, that is all but the dash.
pub fn scope_name(domain_id: u32, name: &str) -> String {
    format!("machine-{}.scope", machine_name(domain_id, name).replace('-', "\\x2d"))
}

/// The machine whose processes such a unit holds; `None` for any other unit.
pub fn machine_of_scope(unit: &str) -> Option<String> {
    Some(unit.strip_prefix("machine-")?.strip_suffix(".scope")?.replace("\\x2d", "-"))
}

/// Where systemd has the slice of a partition (`virSystemdMakeSliceName`): `/machine/prod` is `machine-prod.slice`, which is
/// in `machine.slice`. Of a component, all that is no letter, digit, `:`, `_` or dot is escaped; so is a dot at the beginning.
fn slice_path(partition: &str) -> Option<String> {
    let (mut path, mut slice) = (String::new(), String::new());
    for component in partition.strip_prefix('/')?.split('/').filter(|part| !part.is_empty()) {
        if component == ".." || component.contains('\0') {
            return None;
        }
        if !slice.is_empty() {
            slice.push('-');
        }
        for byte in component.bytes() {
            let kept =
                byte.is_ascii_alphanumeric() || matches!(byte, b':' | b'_') || (byte == b'.' && !slice.is_empty());
            if kept { slice.push(char::from(byte)) } else { slice.push_str(&format!("\\x{byte:02x}")) }
        }
        path.push_str(&format!("/{slice}.slice"));
        if path.len() > MAX_PATH {
            return None;
        }
    }
    (!path.is_empty()).then_some(path)
}

/// Where libvirt has a partition without systemd's help: `/machine` stays, every other component without a dot gets
/// `.partition`, and names that could be mistaken for kernel files are escaped.
fn partition_path(partition: &str) -> Option<String> {
    let mut path = String::new();
    for (index, component) in partition.strip_prefix('/')?.split('/').filter(|part| !part.is_empty()).enumerate() {
        if component == ".." || component.contains('\0') {
            return None;
        }
        path.push('/');
        let fixed = index == 0 && matches!(component, "machine" | "user" | "system");
        if component.starts_with(['.', '_']) || component.starts_with("cgroup.") {
            path.push('_');
        }
        path.push_str(component);
        if !fixed && !component.contains('.') {
            path.push_str(".partition");
        }
        if path.len() > MAX_PATH {
            return None;
        }
    }
    (!path.is_empty()).then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names seen from libvirt 9.0, 11.3 and 12.8.
    #[test]
    fn machine_names() {
        for (name, expected) in [
            ("facts.b_1", "qemu-1-facts.b1"),
            ("facts é-x", "qemu-1-facts-x"),
            ("facts--a", "qemu-1-facts-a"),
            (".facts", "qemu-1-facts"),
            ("FACTS+a", "qemu-1-FACTSa"),
            ("--help", "qemu-1-help"),
            ("..", "qemu-1"),
            ("虚拟机", "qemu-1"),
            ("a-.b", "qemu-1-a-b"),
            ("a.", "qemu-1-a"),
        ] {
            assert_eq!(machine_name(1, name), expected, "{name}");
        }
        assert_eq!(machine_name(12, &"a".repeat(1000)), format!("qemu-12-{}", "a".repeat(56)));
    }

    #[test]
    fn scopes() {
        assert_eq!(scope_name(7, "web.x-1"), r"machine-qemu\x2d7\x2dweb.x\x2d1.scope");
        assert_eq!(scope_name(1, "--"), r"machine-qemu\x2d1.scope");
        assert_eq!(machine_of_scope(&scope_name(7, "web.x-1")), Some(machine_name(7, "web.x-1")));
        assert_eq!(machine_of_scope("system.slice"), None);
    }

    #[test]
    fn partitions() {
        for (partition, expected) in [
            ("/machine", Some("/machine")),
            ("/machine/prod", Some("/machine/prod.partition")),
            ("/prod/db.slice", Some("/prod.partition/db.slice")),
            ("/machine/_x", Some("/machine/__x.partition")),
            ("/", None),
            ("machine", None),
            ("/machine/../..", None),
        ] {
            assert_eq!(Naming::Libvirt.partition_path(partition).as_deref(), expected, "{partition}");
        }
        for (partition, expected) in [
            ("/machine", Some("/machine.slice")),
            ("/machine/prod/", Some("/machine.slice/machine-prod.slice")),
            ("/a-b/.c d", Some(r"/a\x2db.slice/a\x2db-.c\x20d.slice")),
            ("/.a", Some(r"/\x2ea.slice")),
            ("/", None),
            ("machine", None),
            ("/machine/../..", None),
        ] {
            assert_eq!(Naming::Systemd.partition_path(partition).as_deref(), expected, "{partition}");
        }
    }
}
