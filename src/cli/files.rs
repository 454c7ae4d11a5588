//! Files that the command line names: read up to a bound, and written only where nothing is.

use std::io::{Read, Write};
use std::path::Path;

use crate::error::{Code, Error, Result};
use crate::host::description;
use crate::host::root::Root;

/// No configuration is longer, as none that the hook reads is.
const MAX_CONFIG: u64 = 16 << 20;

/// The text of a configuration.
pub(super) fn configuration(file: &Path) -> Result<String> {
    let hint = "name a file in the form of /etc/virt-pin/virt-pin.toml";
    read_bounded(file, MAX_CONFIG).map_err(|error| error.with_hint(hint))
}

/// The machine that a file describes.
pub(super) fn described(file: &Path, option: &str) -> Result<Root> {
    let hint = "name a file that `virt-pin gather FILE` has written";
    let text = read_bounded(file, description::MAX_BYTES as u64).map_err(|error| error.with_hint(hint))?;
    description::parse(&text).map_err(|error| {
        Error::new(Code::Usage, format!("{option} {}: {}", file.display(), error.message))
            .with_hint("make the file with `virt-pin gather FILE` on the machine it describes")
    })
}

/// The text of a file that the command line names; of a longer one a byte more than `most`.
fn read_bounded(file: &Path, most: u64) -> Result<String> {
    let mut text = String::new();
    std::fs::File::open(file)
        .and_then(|open| open.take(most + 1).read_to_string(&mut text))
        .map_err(|error| Error::io(Code::Usage, "read", file, error))?;
    Ok(text)
}

/// Writes a new file: nothing that is there is ever overwritten.
pub(super) fn write_new(file: &Path, text: &str) -> Result<()> {
    std::fs::File::create_new(file)
        .and_then(|mut open| open.write_all(text.as_bytes()))
        .map_err(|error| Error::io(Code::HostIo, "write", file, error))
}
