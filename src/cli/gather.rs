//! `virt-pin gather`: this machine as one text file.

use std::path::Path;

use super::Context;
use super::files::write_new;
use crate::error::{Result, printable};
use crate::host::description;
use crate::lock::LEASES_FILE;

pub(super) fn gather(context: &Context, file: Option<&Path>, state: bool) -> Result<String> {
    let mut also = Vec::new();
    if state {
        also.push(LEASES_FILE.to_owned());
        also.extend(context.settings()?.files);
    }
    let text = description::gather_with(&context.root, &also)?;
    let Some(file) = file else { return Ok(text) };
    write_new(file, &text)?;
    Ok(format!(
        "This machine is described in {}; look through it before you send it to anybody.\n",
        printable(&file.to_string_lossy())
    ))
}
