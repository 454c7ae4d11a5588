//! virt-pin(1), from the grammar of the command line: one page with every verb, its arguments and options.

use clap::{ArgAction, Command};
use clap_mangen::Man;

use super::pages::{codes, see_also};
use super::roff::Page;

/// The page.
pub(super) fn page(command: &Command) -> String {
    let command = built(command);
    let mut page = Page::new("virt-pin", "1", "give CPUs of their own to libvirt/QEMU virtual machines");
    let top = Man::new(command.clone());
    page.heading("SYNOPSIS");
    page.text("`virt-pin` [OPTIONS] COMMAND [ARGUMENTS]");
    page.heading("DESCRIPTION");
    page.text(
        "An operator says which CPUs may be handed out (virt-pin.toml(5)), a VM's owner says what the VM needs \
         (virt-pin-policy(7)). At each start the VM gets a lease: CPUs that no other dedicated VM has. The work is done by \
         virt-pin-hook(8), which libvirt runs; this command shows what it did and would do, and changes what is not done at a start.",
    );
    page.raw(&rendered(|out| top.render_options_section(out)));
    page.heading("COMMANDS");
    for verb in command.get_subcommands().filter(|verb| !verb.is_hide_set()) {
        page.subheading(&usage(verb));
        page.text(&sentence(verb));
        let arguments = rendered(|out| Man::new(verb.clone()).render_options_section(out));
        page.raw(&arguments.replace(".SH OPTIONS\n", ""));
    }
    codes(&mut page);
    page.heading("ENVIRONMENT");
    page.term("`NO_COLOR`", "No colours, on a terminal either.");
    see_also(&mut page, "virt-pin(1)");
    page.finish()
}

/// The grammar as it is once clap has built it, without what every verb repeats.
fn built(command: &Command) -> Command {
    let mut command = command.clone().disable_help_subcommand(true);
    command.build();
    command.mut_subcommands(|verb| {
        verb.mut_args(|argument| {
            let help = matches!(argument.get_action(), ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong);
            let hidden = help || argument.is_global_set() || argument.is_hide_set();
            argument.hide(hidden)
        })
    })
}

/// A verb and its operands: `explain [OPTIONS] <SUBJECT>`.
fn usage(verb: &Command) -> String {
    let mut words = vec![verb.get_name().to_owned()];
    let shown = || verb.get_arguments().filter(|argument| !argument.is_hide_set());
    if shown().any(|argument| !argument.is_positional()) {
        words.push("[OPTIONS]".to_owned());
    }
    words.extend(shown().filter(|argument| argument.is_positional()).map(|argument| {
        let name = argument.get_id().as_str().to_uppercase();
        if argument.is_required_set() { name } else { format!("[{name}]") }
    }));
    words.join(" ")
}

fn sentence(verb: &Command) -> String {
    let about = verb.get_about().map(ToString::to_string).unwrap_or_default();
    if about.ends_with('.') { about } else { about + "." }
}

/// What clap_mangen writes.
fn rendered(write: impl Fn(&mut dyn std::io::Write) -> std::io::Result<()>) -> String {
    let mut out = Vec::new();
    // Writing into memory cannot fail.
    let _ = write(&mut out);
    String::from_utf8_lossy(&out).into_owned()
}
