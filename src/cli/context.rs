//! What every verb works on: a machine, a configuration and the leases there, by the options that every verb has. Changes nothing.

use std::io::Read;
use std::path::Path;

use super::Arguments;
use crate::config::settings::Settings;
use crate::cpuset::CpuSet;
use crate::error::{Code, Error, Result, printable};
use crate::host::description;
use crate::host::root::Root;
use crate::lock;
use crate::lock::leases::Leases;
use crate::lock::reclaim::reclaim;

/// No configuration is longer, as none that the hook reads is.
const MAX_CONFIG: u64 = 16 << 20;

/// What every verb works on.
pub(super) struct Context {
    pub(super) root: Root,
    /// The file of `--config`, and its text.
    pub(super) config: Option<(String, String)>,
    pub(super) pinnable: Option<CpuSet>,
    pub(super) json: bool,
}

impl Context {
    /// As the options say that every verb has.
    ///
    /// # Errors
    /// [`Code::Usage`]: a file or a list that cannot be understood.
    pub(super) fn new(arguments: &Arguments) -> Result<Context> {
        let root = match &arguments.host {
            None => Root::from_environment(),
            Some(file) => described(file, "--host")?,
        };
        let pinnable = arguments.pinnable.as_deref().map(|list| {
            CpuSet::parse_kernel_list(list).map_err(|error| {
                Error::new(Code::Usage, format!("--pinnable \"{list}\": {error}"))
                    .with_hint("a list of CPUs, such as --pinnable 2-7,10-15")
            })
        });
        let config = match &arguments.config {
            Some(file) => {
                let text = read_bounded(file, MAX_CONFIG);
                let hint = "name a file in the form of /etc/virt-pin/virt-pin.toml";
                Some((printable(&file.to_string_lossy()), text.map_err(|error| error.with_hint(hint))?))
            }
            None => None,
        };
        Ok(Context { root, config, pinnable: pinnable.transpose()?, json: arguments.json })
    }

    /// The configuration, or that of `--config`, with `--pinnable` in place of what it says.
    pub(super) fn settings(&self) -> Result<Settings> {
        let mut settings = match &self.config {
            Some((path, text)) => Settings::merge([(path.as_str(), text.as_str())])?,
            None => Settings::read(&self.root)?,
        };
        if let Some(pinnable) = &self.pinnable {
            settings.pinnable = pinnable.clone();
        }
        Ok(settings)
    }

    /// The leases that the next event would find: without those that are void by now. The file is left as it is.
    pub(super) fn leases(&self) -> Result<Leases> {
        let mut leases = lock::read(&self.root)?;
        // Which of its VMs still run, a description does not say.
        if leases.iter().next().is_some() && !self.root.is_description() {
            reclaim(&self.root, &mut leases)?;
        }
        Ok(leases)
    }
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
