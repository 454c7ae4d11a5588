//! `virt-pin repack`: running VMs are moved to other CPUs, to make room for one that is to start, off CPUs that are not pinnable
//! any more, or to lie nearer together.
//!
//! The moves are those that the allocator's refusals and advice name. One lease moves at a time, each crash-safe (see
//! `relocate`); what goes wrong is undone and ends it. libvirt's live XML follows each move.

use super::stderr::{self, Progress};
use super::table::wrapped;
use super::{Answer, Context, capacity, failure, subject, sync, to_json};
use crate::alloc::request::Request;
use crate::config::settings::Settings;
use crate::decision::{self, Situation, Wish};
use crate::definitions;
use crate::error::{Code, Error, Moved, Result, printable};
use crate::relocate::moves::{self, Movable, Step};
use crate::uuid::DomainUuid;
use crate::xml::{Domain, read};

/// What is to be done.
pub(super) struct Options<'a> {
    /// Only say which moves.
    pub(super) dry_run: bool,
    /// For whom room is made: a domain, a file, or a shape; without it, leases are brought onto pinnable CPUs and nearer together.
    pub(super) subject: Option<&'a str>,
    /// With a shape: attributes of the policy.
    pub(super) policy: &'a [String],
}

/// Who is to have room.
struct Asker {
    /// In words.
    name: String,
    uuid: Option<DomainUuid>,
    request: Request,
    partition: Option<String>,
}

pub(super) fn repack(context: &Context, options: &Options<'_>) -> Result<Answer> {
    let settings = context.settings()?;
    let Some(subject) = options.subject else { return improve(context, &settings, options.dry_run) };
    let asker = asker(context, &settings, subject, options.policy)?;
    let about = |error: Error| if asker.uuid.is_some() { error.in_domain(&asker.name) } else { error };
    let leases = context.leases()?;
    if let Some(lease) = asker.uuid.and_then(|uuid| leases.get(uuid)) {
        let what = format!(
            "holds CPUs {} already, so it needs no room; `virt-pin repack` alone brings leases nearer together",
            lease.cpus()
        );
        return Err(about(
            Error::new(Code::StateConflict, what).with_hint("leave --for out, or name a VM that does not run"),
        ));
    }
    let definitions = definitions::read(&context.root, &settings).dedicated;
    let situation =
        Situation::read(&context.root, &settings, asker.partition.as_deref())?.among(definitions, asker.uuid);
    let steps = Movable::new(&context.root, &situation, leases).make_room(&asker.request, asker.uuid).map_err(about)?;
    let name = printable(&asker.name);
    if steps.is_empty() {
        return said(context, &[], options.dry_run, &format!("There is room for {name}; nothing has to move."));
    }
    let end = if options.dry_run { "Then there would be room" } else { "Now there is room" };
    perform(context, &settings, &[], &steps, options.dry_run)?
        .map_or_else(|| said(context, &steps, options.dry_run, &format!("{end} for {name}.")), Ok)
}

/// Without anybody to make room for.
fn improve(context: &Context, settings: &Settings, dry_run: bool) -> Result<Answer> {
    let definitions = definitions::read(&context.root, settings).dedicated;
    let mut all = Vec::new();
    let situation = Situation::read(&context.root, settings, None)?.among(definitions, None);
    let leases = context.leases()?;
    let most = leases.iter().count();
    let mut movable = Movable::new(&context.root, &situation, leases);
    let mut withdrawn = false;
    let mut progress = Progress::new(!context.json);
    // Each lease once for either.
    for round in 1..=2 * most {
        let withdraws = movable.withdraw();
        withdrawn |= withdraws.is_some();
        let steps = match withdraws {
            Some(step) => vec![step],
            None => movable.improve(&mut |looked_at, of| {
                progress.at(|| format!("looking for moves, round {round}: VM {looked_at} of {of}"));
            }),
        };
        progress.clear();
        if steps.is_empty() {
            break;
        }
        if let Some(answer) = perform(context, settings, &all, &steps, dry_run)? {
            return Ok(answer);
        }
        all.extend(steps);
    }
    let end = match (all.is_empty(), withdrawn, dry_run) {
        (true, ..) => {
            "Nothing is to be gained: no moves are known that would bring a lease nearer together, or off CPUs that are not \
             pinnable."
        }
        (_, true, true) => "Then no lease that can be moved would have CPUs that are not pinnable.",
        (_, true, false) => "No lease that can be moved has CPUs that are not pinnable.",
        (_, false, true) => "Then the leases would lie nearer together.",
        (_, false, false) => "The leases lie nearer together.",
    };
    said(context, &all, dry_run, end)
}

/// Makes the moves, telling each on stderr; the answer if one fails, of those made `before` as well.
fn perform(
    context: &Context,
    settings: &Settings,
    before: &[Step],
    steps: &[Step],
    dry_run: bool,
) -> Result<Option<Answer>> {
    for (index, step) in steps.iter().enumerate().filter(|_| !dry_run) {
        let tell = |text: String| {
            if !context.json {
                stderr::say(&(text + "\n"));
            }
        };
        let which = if steps.len() > 1 { format!(" ({} of {})", index + 1, steps.len()) } else { String::new() };
        tell(format!("moving {}{which}", in_words(step)));
        if let Err(error) = moves::make(&context.root, settings, step) {
            let done = [before, steps.get(..index).unwrap_or_default()].concat();
            let answer = told(context, &done, false, "The rest was left as it was.", Some(&error))?;
            return Ok(Some(Answer { failed: Some(error), ..answer }));
        }
        if let Some(error) = sync::after_move(context, step.uuid) {
            tell(format!("\"{}\": {}", printable(&step.name), error.message));
        }
    }
    Ok(None)
}

fn in_words(step: &Step) -> String {
    format!("\"{}\" from CPUs {} to {}", printable(&step.name), step.from, step.to.exclusive())
}

fn said(context: &Context, steps: &[Step], dry_run: bool, end: &str) -> Result<Answer> {
    told(context, steps, dry_run, end, None)
}

fn told(context: &Context, steps: &[Step], dry_run: bool, end: &str, failed: Option<&Error>) -> Result<Answer> {
    if context.json {
        let moved: Vec<Moved> = steps.iter().map(Moved::from).collect();
        let mut value = serde_json::json!({ "moves": failure::moves(&moved), "done": !dry_run, "message": end });
        if let (Some(object), Some(error)) = (value.as_object_mut(), failed) {
            object.insert("error".to_owned(), failure::value(error));
        }
        return Ok(to_json(&value)?.into());
    }
    let verb = if dry_run { "Would move" } else { "Moved" };
    let lines = steps.iter().map(|step| wrapped(&format!("{verb} "), &format!("{}.", in_words(step))));
    Ok((lines.collect::<String>() + &wrapped("", end)).into())
}

/// A defined domain, a file, or a shape.
fn asker(context: &Context, settings: &Settings, subject: &str, policy: &[String]) -> Result<Asker> {
    let text = match subject::xml(&context.root, subject) {
        Ok(text) => text,
        Err(error) if error.code == Code::DomainUnknown => {
            let request = capacity::request(subject, policy)
                .map_err(|shape| if subject.contains('x') { shape } else { error })?;
            return Ok(Asker { name: format!("a VM of {subject}"), uuid: None, request, partition: None });
        }
        Err(error) => return Err(error),
    };
    let domain = Domain::parse(&text)?;
    let identity = read::identity(&domain)?;
    match decision::wish(&context.root, &domain, &identity, &|| Ok(settings.clone()))
        .map_err(|error| error.in_domain(&identity.name))?
    {
        Wish::Dedicated(wish) => Ok(Asker {
            name: identity.name,
            uuid: identity.uuid,
            request: wish.asked(false).into_owned(),
            partition: read::partition(&domain),
        }),
        Wish::Shared | Wish::Static(_) => {
            let what = "asks for no CPUs of its own, so nothing is to be moved for it";
            Err(Error::new(Code::PolicyInvalid, what)
                .in_domain(&identity.name)
                .with_hint("give it a policy with policy=\"dedicated\""))
        }
    }
}
