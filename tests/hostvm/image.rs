//! The disk, kernel and QEMU of a host, by `image.sh`.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache;
use crate::shape::Debian;

/// The status of `image.sh` where an image cannot be made at all.
const CANNOT: i32 = 77;

/// A Debian as installed, never booted.
pub(crate) struct Image {
    dir: PathBuf,
}

impl Image {
    /// The image of a release; why not, where it cannot be had.
    pub(crate) fn of(debian: Debian) -> Result<Image, String> {
        let effort = "building its image from Debian's packages, which takes a minute or two";
        let recipe = (debian.name(), include_str!("image.sh"));
        let dir = cache::entry(debian.name(), recipe, effort, |dir| build(debian, dir))?;
        Ok(Image { dir })
    }

    /// One of its files: `disk.img`, `vmlinuz`, `initrd`.
    pub(crate) fn file(&self, name: &str) -> String {
        self.dir.join(name).into_os_string().into_string().unwrap()
    }

    /// The image's own QEMU, to be run on the machine outside with the image's own libraries.
    pub(crate) fn qemu(&self) -> Vec<String> {
        let root = self.file("root");
        vec![
            format!("{root}/lib64/ld-linux-x86-64.so.2"),
            "--library-path".to_owned(),
            format!("{root}/usr/lib/x86_64-linux-gnu"),
            format!("{root}/usr/bin/qemu-system-x86_64"),
            "-L".to_owned(),
            format!("{root}/usr/share/qemu"),
            "-L".to_owned(),
            format!("{root}/usr/share/seabios"),
        ]
    }
}

fn build(debian: Debian, dir: &Path) -> Result<(), String> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hostvm/image.sh");
    let output = Command::new("bash").args([script, debian.name()]).arg(dir).output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    match output.status.code() {
        Some(0) => Ok(()),
        Some(CANNOT) => Err(complaint.trim().to_owned()),
        _ => panic!("image.sh failed ({}): {complaint}", output.status),
    }
}
