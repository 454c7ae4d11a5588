//! The policy as options of a command: one for each attribute, from the one table of them.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use crate::alloc::policy::ATTRIBUTES;

/// What was given: attribute and value.
#[derive(Clone, Debug, Default)]
pub(super) struct Policy(pub(super) Vec<(&'static str, String)>);

/// A shorter word for `--cores whole`.
const WHOLE_CORES: &str = "whole-cores";

impl Args for Policy {
    fn augment_args(command: Command) -> Command {
        let whole = Arg::new(WHOLE_CORES).long(WHOLE_CORES).action(ArgAction::SetTrue).conflicts_with("cores");
        let command = command.arg(whole.help("The same as --cores whole"));
        ATTRIBUTES.iter().filter(|attribute| attribute.name != "policy").fold(command, |command, attribute| {
            let value = if attribute.values.is_empty() { "LIST" } else { "VALUE" };
            let values =
                if attribute.values.is_empty() { String::new() } else { format!("[{}] ", attribute.values.join(", ")) };
            let help = format!("{values}{}", attribute.meaning);
            command.arg(Arg::new(attribute.name).long(attribute.name).value_name(value).help(help))
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Policy::augment_args(command)
    }
}

impl FromArgMatches for Policy {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Policy, clap::Error> {
        let given = ATTRIBUTES.iter().filter(|attribute| attribute.name != "policy").filter_map(|attribute| {
            let value = matches.get_one::<String>(attribute.name).cloned();
            let whole = attribute.name == "cores" && matches.get_flag(WHOLE_CORES);
            Some((attribute.name, value.or_else(|| whole.then(|| "whole".to_owned()))?))
        });
        Ok(Policy(given.collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Policy::from_arg_matches(matches)?;
        Ok(())
    }
}
