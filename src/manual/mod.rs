//! The manuals, the shells' completions and the default configuration, made from what defines them: the command line's grammar,
//! the table of attributes, that of configuration keys, that of codes, the hook's events. Nothing is said twice, so nothing
//! drifts. Pure: text out; `cli` writes the files, when a package is built.

mod codes;
mod command;
mod defaults;
pub mod guide;
mod pages;
mod roff;

use clap::Command;
use clap_complete::{Shell, generate};

/// Every file: its path in the directory of generated files, and its text.
pub fn files(command: &Command) -> Vec<(String, String)> {
    let mut files = vec![
        ("man1/virt-pin.1".to_owned(), command::page(command)),
        ("man5/virt-pin.toml.5".to_owned(), pages::configuration()),
        ("man7/virt-pin-codes.7".to_owned(), codes::page()),
        ("man7/virt-pin-policy.7".to_owned(), pages::policy()),
        ("man8/virt-pin-hook.8".to_owned(), pages::hook()),
        ("virt-pin.toml".to_owned(), defaults::configuration()),
    ];
    for (shell, name) in
        [(Shell::Bash, "bash/virt-pin"), (Shell::Zsh, "zsh/_virt-pin"), (Shell::Fish, "fish/virt-pin.fish")]
    {
        let mut text = Vec::new();
        generate(shell, &mut command.clone(), "virt-pin", &mut text);
        files.push((name.to_owned(), String::from_utf8_lossy(&text).into_owned()));
    }
    files
}
