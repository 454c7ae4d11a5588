//! The command line, in virsh's manner: one file per verb, with the pure functions that render its answer.
//!
//! Tables for people on stdout, `--json` for programs, errors on stderr with the exit status of their code. Works without
//! a libvirt daemon, from the files that libvirt and the hook leave (only `sync`, what moves leases and what changes definitions talk to libvirt), so nothing here hangs
//! when libvirt does.

mod advice;
mod capacity;
mod check;
mod context;
mod define;
mod explain;
mod failure;
mod finding;
mod gather;
mod help;
mod install;
mod lease;
mod manuals;
mod map;
mod options;
mod reconcile;
mod repack;
mod replace;
mod simulate;
mod start;
mod stderr;
mod style;
mod subject;
mod suggest;
mod sync;
mod table;
pub mod topology;
mod transform;

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};

use crate::alloc::demand::Reserve;
use crate::conditions::Arrival;
use crate::error::{Code, Error, Result};
use context::{Context, described};

/// The heading of options that every verb has.
const EVERYWHERE: &str = "Options of every command";

/// CPUs of their own for libvirt/QEMU virtual machines.
#[derive(Debug, Parser)]
#[command(name = "virt-pin", version, about, arg_required_else_help = true, max_term_width = 80)]
#[command(disable_help_subcommand = true)]
struct Arguments {
    /// Use the machine described in FILE (made by `virt-pin gather`) instead of this one.
    #[arg(long, global = true, help_heading = EVERYWHERE, value_name = "FILE")]
    host: Option<PathBuf>,
    /// Use these CPUs as pinnable instead of the configured ones.
    #[arg(long, global = true, help_heading = EVERYWHERE, value_name = "LIST")]
    pinnable: Option<String>,
    /// Use the configuration in FILE instead of that in /etc/virt-pin.
    #[arg(long, global = true, help_heading = EVERYWHERE, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Answer in JSON.
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    json: bool,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List the leases: which VM holds which CPUs.
    List,
    /// Show one VM's lease: each vCPU's CPU, parked siblings, emulator and I/O threads.
    Lease {
        /// Name or UUID.
        domain: String,
    },
    /// Show how many CPUs and whole cores are free, leased and withheld.
    Capacity {
        /// Also say how many more VMs of so many cores and threads on each would fit, such as 4x2.
        #[arg(long = "for", value_name = "CORESxTHREADS")]
        shape: Option<String>,
        /// Attributes of the policy of those VMs, such as numa=single; may be given several times.
        #[arg(long, value_name = "NAME=VALUE", requires = "shape")]
        policy: Vec<String>,
        /// Also by last-level cache where each node has only one.
        #[arg(long)]
        llc: bool,
    },
    /// Draw the machine: every hardware thread, and who has it.
    Map {
        /// Write a picture to FILE, a new one, instead.
        #[arg(long, value_name = "FILE")]
        svg: Option<PathBuf>,
        /// Also draw this VM, as if it were started now: name or UUID of a defined one, or an XML file; may be given several times.
        #[arg(long = "for", value_name = "DOMAIN|FILE")]
        planned: Vec<String>,
    },
    /// Show the machine: packages, nodes, last-level caches, cores, threads.
    Topology,
    /// Say what a VM would get now, or why not, step by step.
    Explain {
        /// Name or UUID of a defined VM, an XML file, or - for stdin.
        subject: String,
        /// On another host, if it came there by migration: FILE is what `virt-pin gather --state` wrote there.
        #[arg(long, value_name = "FILE", conflicts_with = "host")]
        for_host: Option<PathBuf>,
    },
    /// Print domain XML rewritten for the CPUs this host would give now.
    Transform {
        /// An XML file, or - for stdin.
        #[arg(default_value = "-")]
        file: String,
        /// Only what the guest sees of its cores and nodes, and no CPU number: what a definition should say.
        #[arg(long)]
        shape_only: bool,
    },
    /// Define a VM from a file, its XML in the shape of the place it has on this host.
    Define {
        /// An XML file, or - for stdin.
        #[arg(default_value = "-")]
        file: String,
    },
    /// Give a defined VM CPUs of its own from its next start on.
    Enable {
        /// Name or UUID.
        domain: String,
        #[command(flatten)]
        policy: options::Policy,
    },
    /// Take that back: no CPUs of its own, and its former topology.
    Disable {
        /// Name or UUID.
        domain: String,
    },
    /// Change the number of a defined VM's vCPUs, and its topology with it.
    SetVcpus {
        /// Name or UUID.
        domain: String,
        /// The maximum number, all of them plugged in.
        count: u16,
    },
    /// Write down this machine as one text file, for --host, tests and bug reports.
    Gather {
        /// A new file; stdout without it.
        file: Option<PathBuf>,
        /// Also what is handed out here: the configuration and the leases, with the names of their VMs.
        #[arg(long)]
        state: bool,
    },
    /// Run a stream of starts and stops against a host, without any VM.
    Simulate {
        /// A file of events, one JSON object a line, or - for stdin.
        #[arg(long, value_name = "FILE", default_value = "-")]
        events: String,
        /// A host by its numbers: 2s8c2t,numa=2,llc=4.
        #[arg(long, value_name = "SHAPE", conflicts_with = "host")]
        host_shape: Option<String>,
        /// Also look for the VMs whose move would make room, or a better place. Takes its time.
        #[arg(long)]
        moves: bool,
        /// Answer in a table for people, and draw the host as it is at the end.
        #[arg(long, conflicts_with = "json")]
        table: bool,
        /// Whether a start may take the place of an autostart domain that does not run: strict = no, prefer = as a last resort.
        /// Default: what --config says, or strict.
        #[arg(long, value_name = "WORD", value_parser = reserve)]
        autostart_reserve: Option<Reserve>,
    },
    /// Propose which CPUs of this host to hand out, and say why.
    Suggest {
        /// Write them into the configuration, if none are set there yet.
        #[arg(long)]
        write: bool,
    },
    /// Check the host, the configuration, the hook and the leases against reality.
    Check,
    /// Install the hook where libvirt looks for it.
    Install {
        /// The hook program; without it, the one beside this command.
        #[arg(long, value_name = "FILE")]
        hook: Option<PathBuf>,
        /// Have the daemon that runs reload if it has to, so that it sees the hook.
        #[arg(long)]
        reload: bool,
    },
    /// Remove the hook.
    Uninstall {
        /// Have the daemon that runs reload, so that it no longer looks for the hook.
        #[arg(long)]
        reload: bool,
    },
    /// Bring libvirt's live XML in line with a running VM's lease.
    Sync {
        /// Name or UUID.
        domain: String,
        /// Wait for the end of stdin first (the hook ends, libvirt lets go of the VM).
        #[arg(long, hide = true)]
        after_stdin: bool,
    },
    /// Keep definitions and live XML in line with policies and leases, as a service.
    Agent {
        /// Write metrics to FILE, for node_exporter's textfile collector.
        #[arg(long, value_name = "FILE")]
        metrics: Option<PathBuf>,
        /// Do what there is to do now, and end.
        #[arg(long)]
        once: bool,
    },
    /// Rebuild the leases from the VMs that run, by where their threads are; repair those whose CPUs went or came back.
    Reconcile,
    /// Move running VMs to other CPUs: to make room for another, off CPUs that are not pinnable any more, or nearer together.
    Repack {
        /// Only say which moves would be made.
        #[arg(long)]
        dry_run: bool,
        /// Make room for this VM (name, UUID or XML file), or for one of so many cores and threads on each, such as 4x2.
        #[arg(long = "for", value_name = "DOMAIN|SHAPE")]
        subject: Option<String>,
        /// With a shape: attributes of the VM's policy, such as numa=single; may be given several times.
        #[arg(long, value_name = "NAME=VALUE", requires = "subject")]
        policy: Vec<String>,
    },
    /// Say how a command is used, or what a code means and what to do.
    Help {
        /// A command, a code, its exit status, or `codes` for all of them; without it, the commands.
        topic: Option<String>,
    },
    /// Write the manuals, the shells' completions and the default configuration, for packages.
    #[command(hide = true)]
    Manuals {
        /// A directory; what it has of these files is replaced.
        directory: PathBuf,
    },
}

impl Verb {
    /// Whether the answer is a sentence about what was done.
    fn only_says(&self) -> bool {
        matches!(
            self,
            Verb::Gather { file: Some(_), .. }
                | Verb::Install { .. }
                | Verb::Uninstall { .. }
                | Verb::Sync { .. }
                | Verb::Manuals { .. }
        ) || self.defines()
    }

    /// Whether the verb changes the machine or asks its libvirt, so that a description cannot stand in for it.
    fn needs_this_machine(&self) -> bool {
        matches!(
            self,
            Verb::Install { .. }
                | Verb::Uninstall { .. }
                | Verb::Sync { .. }
                | Verb::Agent { .. }
                | Verb::Reconcile
                | Verb::Repack { .. }
                | Verb::Suggest { write: true }
        ) || self.defines()
    }

    /// Whether the verb does something that holds only under the configuration that the hook and the agent read.
    fn needs_this_configuration(&self) -> bool {
        let tries = matches!(self, Verb::Repack { dry_run: true, .. });
        (self.needs_this_machine() && !tries) || matches!(self, Verb::Gather { state: true, .. })
    }

    /// Whether the verb changes a definition.
    fn defines(&self) -> bool {
        matches!(self, Verb::Define { .. } | Verb::Enable { .. } | Verb::Disable { .. } | Verb::SetVcpus { .. })
    }
}

/// What a verb answers: text for stdout, and for those that answer *and* fail (`explain` of a refusal, `check`) the error
/// behind the exit status.
struct Answer {
    text: String,
    failed: Option<Error>,
}

impl From<String> for Answer {
    fn from(text: String) -> Answer {
        Answer { text, failed: None }
    }
}

/// The grammar of the command line.
pub fn grammar() -> clap::Command {
    Arguments::command()
}

/// The command: runs one verb.
pub fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let mistake = help::mistake(&error);
            if std::env::args_os().any(|argument| argument == "--json") && error.use_stderr() {
                let _ = io::stdout().write_all((failure::json(&mistake) + "\n").as_bytes());
            }
            // Help and versions go to stdout; who gives no command is shown them all.
            if matches!(error.kind(), ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand) || !error.use_stderr() {
                let _ = error.print();
            } else {
                stderr::say(&mistake.render());
            }
            return ExitCode::from(if error.use_stderr() { Code::Usage.exit() } else { 0 });
        }
    };
    let json = arguments.json;
    let answer = run(arguments).unwrap_or_else(|error| {
        let text = if json { failure::json(&error) + "\n" } else { String::new() };
        Answer { text, failed: Some(error) }
    });
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(answer.text.as_bytes()).and_then(|()| stdout.flush());
    let unwritten = match written {
        // The reader has seen enough (`| head`).
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => None,
        Err(error) => Some(Error::new(Code::HostIo, "cannot write to stdout").because(error)),
        Ok(()) => None,
    };
    match answer.failed.or(unwritten) {
        None => ExitCode::SUCCESS,
        Some(error) => {
            stderr::say(&error.render());
            ExitCode::from(error.code.exit())
        }
    }
}

/// Runs one verb.
fn run(arguments: Arguments) -> Result<Answer> {
    let context = Context::new(&arguments)?;
    if context.root.is_description() && arguments.verb.needs_this_machine() {
        return Err(Error::new(Code::Usage, "this verb works on this machine, not on a description (--host)")
            .with_hint("leave --host out"));
    }
    if context.config.is_some() && arguments.verb.needs_this_configuration() {
        return Err(Error::new(
            Code::Usage,
            "this verb works with the configuration in /etc/virt-pin, not with another (--config)",
        )
        .with_hint("leave --config out"));
    }
    let says = arguments.verb.only_says();
    let sentences = says || matches!(arguments.verb, Verb::Reconcile);
    let text = match arguments.verb {
        Verb::Explain { subject, for_host } => {
            let text = subject::xml(&context.root, &subject)?;
            return match for_host {
                None => explain::explain(&context, &text, Arrival::Start),
                Some(file) => {
                    let there = Context { root: described(&file, "--for-host")?, ..context };
                    explain::explain(&there, &text, Arrival::Entry)
                }
            };
        }
        Verb::Check => return check::check(&context),
        Verb::Simulate { events, host_shape, moves, table, autostart_reserve: reserve } => {
            let options =
                simulate::Options { events: &events, host_shape: host_shape.as_deref(), reserve, moves, table };
            return simulate::simulate(&context, &options);
        }
        Verb::Repack { dry_run, subject, policy } => {
            return repack::repack(
                &context,
                &repack::Options { dry_run, subject: subject.as_deref(), policy: &policy },
            );
        }
        Verb::List => lease::list(&context),
        Verb::Lease { domain } => lease::lease(&context, &domain),
        Verb::Capacity { shape, policy, llc } => {
            capacity::capacity(&context, &capacity::Options { shape: shape.as_deref(), policy: &policy, llc })
        }
        Verb::Map { svg, planned } => map::map(&context, &map::Options { svg: svg.as_deref(), planned: &planned }),
        Verb::Topology => topology::topology(&context),
        Verb::Suggest { write } => suggest::suggest(&context, write),
        Verb::Transform { file, shape_only: false } => transform::transform(&context, &file),
        Verb::Transform { file, shape_only: true } => transform::shape(&context, &file),
        Verb::Define { file } => define::define(&context, &file),
        Verb::Enable { domain, policy } => define::enable(&context, &domain, &policy),
        Verb::Disable { domain } => define::disable(&context, &domain),
        Verb::SetVcpus { domain, count } => define::set_vcpus(&context, &domain, count),
        Verb::Gather { file, state } => gather::gather(&context, file.as_deref(), state),
        Verb::Install { hook, reload } => install::install(&context, hook.as_deref(), reload),
        Verb::Uninstall { reload } => install::uninstall(&context, reload),
        Verb::Sync { domain, after_stdin } => sync::sync(&context, &domain, after_stdin),
        Verb::Agent { metrics, once } => {
            crate::agent::run(&context.root, metrics.as_deref(), once).map(|()| String::new())
        }
        Verb::Reconcile => reconcile::reconcile(&context),
        Verb::Help { topic } => help::help(topic.as_deref(), context.json),
        Verb::Manuals { directory } => manuals::write(&grammar(), &directory),
    };
    let text = text?;
    // What is data already (a document, a description) stays as it is.
    Ok(if context.json && says {
        to_json(&serde_json::json!({ "message": text }))?.into()
    } else if sentences && io::stdout().is_terminal() {
        // Programs get each sentence in one line.
        text.lines().map(|line| table::wrapped("", line)).collect::<String>().into()
    } else {
        text.into()
    })
}

/// The value of --autostart-reserve.
fn reserve(word: &str) -> std::result::Result<Reserve, String> {
    Reserve::parse(word).ok_or_else(|| "must be strict or prefer".to_owned())
}

/// Writes a new file: nothing that is there is ever overwritten.
fn write_new(file: &Path, text: &str) -> Result<()> {
    std::fs::File::create_new(file)
        .and_then(|mut open| open.write_all(text.as_bytes()))
        .map_err(|error| Error::io(Code::HostIo, "write", file, error))
}

/// One line of JSON from values of this module.
fn to_json(value: &impl serde::Serialize) -> Result<String> {
    let text = serde_json::to_string(value);
    text.map(|text| text + "\n").map_err(|error| Error::new(Code::Internal, "cannot write JSON").because(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grammar_holds_together() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }
}
