//! `virt-pin manuals`: the generated files of a package.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use crate::error::{Code, Error, Result, counted};
use crate::manual;

pub(super) fn write(grammar: &clap::Command, directory: &Path) -> Result<String> {
    let files = manual::files(grammar);
    for (name, text) in &files {
        let file = directory.join(name);
        let dir = file.parent().unwrap_or(directory);
        fs::create_dir_all(dir).map_err(|error| Error::io(Code::HostIo, "create", dir, error))?;
        let written = File::create(&file).and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(|error| Error::io(Code::HostIo, "write", &file, error))?;
    }
    Ok(format!("Wrote {} to {}.\n", counted(files.len() as u64, "file"), directory.display()))
}
