//! Domain XML of the smallest guests that do what a test needs.
#![allow(dead_code, reason = "each test program uses its part")]

use std::fmt::Write as _;

/// A domain to define: emulated (no KVM), 16 MiB, and by default nothing to boot from, so that it runs for ever.
#[derive(Clone)]
pub(crate) struct Guest {
    /// Its libvirt name.
    pub(crate) name: String,
    memory: u32,
    vcpus: u32,
    current: Option<u32>,
    default_cpuset: Option<String>,
    policy: Option<String>,
    tuning: String,
    cpu: String,
    disk: Option<&'static str>,
    disk_format: &'static str,
    firmware: Option<&'static str>,
}

impl Guest {
    /// Where the disk of a guest made by [`Guest::powering_off`] is.
    pub(crate) const POWER_OFF_DISK: &'static str = "/var/lib/libvirt/images/power-off.img";

    /// Where the disk of a guest made by [`Guest::with_snapshots`] is.
    pub(crate) const SNAPSHOT_DISK: &'static str = "/var/lib/libvirt/images/snapshots.qcow2";

    /// Where the firmware of a guest made by [`Guest::busy`] is.
    pub(crate) const BUSY_FIRMWARE: &'static str = "/var/lib/libvirt/images/busy.rom";

    /// A guest with one vCPU that runs for ever.
    pub(crate) fn new(name: &str) -> Guest {
        Guest {
            name: name.to_owned(),
            memory: 16,
            vcpus: 1,
            current: None,
            default_cpuset: None,
            policy: None,
            tuning: String::new(),
            cpu: String::new(),
            disk: None,
            disk_format: "raw",
            firmware: None,
        }
    }

    /// The same guest with that many vCPUs.
    pub(crate) fn vcpus(mut self, vcpus: u32) -> Guest {
        self.vcpus = vcpus;
        self
    }

    /// The same guest with so many MiB of memory.
    pub(crate) fn memory(mut self, mib: u32) -> Guest {
        self.memory = mib;
        self
    }

    /// The same guest with only so many of its vCPUs plugged in at first.
    pub(crate) fn current(mut self, vcpus: u32) -> Guest {
        self.current = Some(vcpus);
        self
    }

    /// The same guest with `<vcpu cpuset>`: where libvirt puts threads that have no pin.
    pub(crate) fn default_cpuset(mut self, cpus: &str) -> Guest {
        self.default_cpuset = Some(cpus.to_owned());
        self
    }

    /// The same guest with a `<pin:cpu>` element of these attributes.
    pub(crate) fn policy(mut self, attributes: &str) -> Guest {
        self.policy = Some(attributes.to_owned());
        self
    }

    /// The same guest with these elements beside `<vcpu>`: `<iothreads>`, `<cputune>`, `<numatune>`, ...
    pub(crate) fn tuning(mut self, elements: &str) -> Guest {
        self.tuning.push_str(elements);
        self
    }

    /// The same guest with this `<cpu>` element.
    pub(crate) fn cpu(mut self, element: &str) -> Guest {
        element.clone_into(&mut self.cpu);
        self
    }

    /// The same guest, but it powers itself off as soon as its firmware has found the disk.
    pub(crate) fn powering_off(mut self) -> Guest {
        self.disk = Some(Guest::POWER_OFF_DISK);
        self
    }

    /// The same guest with an empty disk that can keep its snapshots.
    pub(crate) fn with_snapshots(mut self) -> Guest {
        self.disk = Some(Guest::SNAPSHOT_DISK);
        self.disk_format = "qcow2";
        self
    }

    /// The same guest, but its first vCPU never rests.
    pub(crate) fn busy(mut self) -> Guest {
        self.firmware = Some(Guest::BUSY_FIRMWARE);
        self
    }

    /// The same guest, but its start fails after the hook's `prepare`: its disk does not exist.
    pub(crate) fn without_its_disk(mut self) -> Guest {
        self.disk = Some("/var/lib/libvirt/images/missing.img");
        self
    }

    /// A UUID that depends on the name alone, so that defining a guest again changes it instead of clashing.
    pub(crate) fn uuid(&self) -> String {
        // FNV-1a, 128 bits.
        let hash = self.name.bytes().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128, |hash, byte| {
            (hash ^ u128::from(byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b)
        });
        let hex = format!("{hash:032x}");
        [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
    }

    /// The document.
    pub(crate) fn xml(&self) -> String {
        let Guest { name, memory, vcpus, tuning, cpu, .. } = self;
        let mut xml = format!("<domain type='qemu'><name>{name}</name><uuid>{}</uuid>", self.uuid());
        if let Some(attributes) = &self.policy {
            write!(xml, "<metadata><pin:cpu xmlns:pin='urn:virt-pin:domain:1' {attributes}/></metadata>").unwrap();
        }
        let current = self.current.map(|current| format!(" current='{current}'")).unwrap_or_default();
        let cpuset = self.default_cpuset.as_ref().map(|cpus| format!(" cpuset='{cpus}'")).unwrap_or_default();
        let loader = self.firmware.map(|file| format!("<loader readonly='yes' type='rom'>{file}</loader>"));
        let loader = loader.unwrap_or_default();
        write!(
            xml,
            "<memory unit='MiB'>{memory}</memory><vcpu{current}{cpuset}>{vcpus}</vcpu>{tuning}\
             <os><type arch='x86_64' machine='pc'>hvm</type>{loader}</os><features><acpi/></features>{cpu}\
             <devices><controller type='usb' model='none'/><memballoon model='none'/>"
        )
        .unwrap();
        if let Some(file) = self.disk {
            write!(
                xml,
                "<disk type='file' device='disk'><driver name='qemu' type='{}'/><source file='{file}'/>\
                 <target dev='hda' bus='ide'/></disk>",
                self.disk_format
            )
            .unwrap();
        }
        xml + "</devices></domain>"
    }
}

/// An empty qcow2 image of 1 MiB: the header, the table of reference counts, the counts of the four clusters there are, and
/// the first level of a mapping that maps nothing.
pub(crate) fn snapshot_disk() -> Vec<u8> {
    const CLUSTER: u64 = 1 << 16;
    let mut disk = vec![0; 4 << 16];
    let words: [&[u8]; 12] = [
        b"QFI\xfb",
        &2u32.to_be_bytes(),
        &[0; 12],
        &16u32.to_be_bytes(),
        &(1u64 << 20).to_be_bytes(),
        &[0; 4],
        &1u32.to_be_bytes(),
        &(3 * CLUSTER).to_be_bytes(),
        &CLUSTER.to_be_bytes(),
        &1u32.to_be_bytes(),
        &[0; 4],
        &[0; 8],
    ];
    let header = words.concat();
    disk[..header.len()].copy_from_slice(&header);
    disk[1 << 16..][..8].copy_from_slice(&(2 * CLUSTER).to_be_bytes());
    disk[2 << 16..][..8].copy_from_slice(&1u16.to_be_bytes().repeat(4));
    disk
}

/// A firmware that does nothing but write to memory, 448 KiB over and over, each time something else.
pub(crate) fn busy_firmware() -> Vec<u8> {
    let mut rom = vec![0; 64 << 10];
    let code = [
        0xb8, 0x00, 0x10, // again: mov ax, 0x1000
        0x43, // inc bx
        0x8e, 0xc0, // next: mov es, ax
        0x31, 0xff, // xor di, di
        0x89, 0xc2, // mov dx, ax
        0x89, 0xd8, // mov ax, bx
        0xb9, 0x00, 0x80, // mov cx, 0x8000
        0xf3, 0xab, // rep stosw
        0x89, 0xd0, // mov ax, dx
        0x05, 0x00, 0x10, // add ax, 0x1000
        0x3d, 0x00, 0x80, // cmp ax, 0x8000
        0x75, 0xe9, // jne next
        0xeb, 0xe3, // jmp again
    ];
    let start = 0xff00;
    rom[start..start + code.len()].copy_from_slice(&code);
    // Where a CPU begins: jmp start.
    rom[0xfff0..0xfff3].copy_from_slice(&[0xe9, 0x0d, 0xff]);
    rom
}

/// A disk whose boot sector asks the ACPI hardware for S5, as an operating system does at shutdown: SLP_EN with
/// sleep type 0 into PM1a_CNT, which SeaBIOS puts at port 0x604.
pub(crate) fn power_off_disk() -> Vec<u8> {
    let mut disk = vec![0; 64 * 512];
    let code = [
        0xba, 0x04, 0x06, // mov dx, 0x604
        0xb8, 0x00, 0x20, // mov ax, 0x2000
        0xef, // out dx, ax
        0xf4, // hlt
        0xeb, 0xfd, // jmp to hlt
    ];
    disk[..code.len()].copy_from_slice(&code);
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    disk
}
