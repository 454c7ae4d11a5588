//! `virt-pin gather`: this machine as one text file.

use std::io::Write;
use std::path::Path;

use super::Context;
use crate::error::{Code, Error, Result};
use crate::host::description;

pub(super) fn gather(context: &Context, file: Option<&Path>) -> Result<String> {
    let text = description::gather(&context.root)?;
    let Some(file) = file else { return Ok(text) };
    // A new file: nothing that is there is ever overwritten.
    std::fs::File::create_new(file)
        .and_then(|mut open| open.write_all(text.as_bytes()))
        .map_err(|error| Error::io(Code::HostIo, "write", file, error))?;
    Ok(format!("This machine is described in {}; look through it before you send it to anybody.\n", file.display()))
}
