//! `virt-pin gather`: this machine as one text file.

use std::path::Path;

use super::{Context, write_new};
use crate::error::Result;
use crate::host::description;

pub(super) fn gather(context: &Context, file: Option<&Path>) -> Result<String> {
    let text = description::gather(&context.root)?;
    let Some(file) = file else { return Ok(text) };
    write_new(file, &text)?;
    Ok(format!("This machine is described in {}; look through it before you send it to anybody.\n", file.display()))
}
