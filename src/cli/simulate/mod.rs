//! `virt-pin simulate`: what a host would do with a stream of starts and stops; the format is in `docs/simulate.md`.
//!
//! One JSON object a line in, one out, at once, and totals at the end; or a table, and the host drawn as it is then. No VM, no
//! libvirt, no state.

mod text;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader, IsTerminal, Write};

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::advice::{self, How};
use super::stderr::Progress;
use super::{Answer, Context, failure, map, to_json};
use crate::alloc::demand::Reserve;
use crate::alloc::plan::Plan;
use crate::alloc::policy::{Fallback, Kind, Policy};
use crate::alloc::refusal::Refusal;
use crate::alloc::repack::Move;
use crate::alloc::request::{GuestMemory, Pages, Request};
use crate::alloc::simulation::Simulation;
use crate::config::settings::Settings;
use crate::cpuset::{CpuId, CpuSet};
use crate::error::{Code, Error, Moved, Result};
use crate::host::{shape, sysfs};
use crate::uuid::DomainUuid;

/// No event is longer.
const MAX_LINE: usize = 1 << 20;

/// One line of the stream.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Event {
    op: Op,
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    vcpus: Option<u16>,
    #[serde(default)]
    iothreads: Option<u16>,
    #[serde(default)]
    memory_mib: Option<u64>,
    #[serde(default)]
    policy: Option<BTreeMap<String, serde_json::Value>>,
    #[serde(default)]
    cpus: Option<String>,
    #[serde(default)]
    autostart: Option<bool>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Op {
    Define,
    Undefine,
    Start,
    Stop,
    Offline,
    Online,
}

/// What has happened so far.
#[derive(Default, Serialize)]
struct Totals {
    started: usize,
    /// Started without CPUs of their own, as their policy allows.
    #[serde(skip_serializing_if = "is_zero")]
    degraded: usize,
    refused: usize,
    refused_by_code: BTreeMap<&'static str, usize>,
    /// Nodes and last-level caches spanned, summed over all starts.
    nodes_spanned: usize,
    llcs_spanned: usize,
}

/// What is asked for.
pub(super) struct Options<'a> {
    /// A file of events, or `-`.
    pub(super) events: &'a str,
    /// A host by its numbers.
    pub(super) host_shape: Option<&'a str>,
    /// What the places of autostart domains mean to others; `None` = what the configuration says of it.
    pub(super) reserve: Option<Reserve>,
    /// Whether to look for the leases that would have to move.
    pub(super) moves: bool,
    /// For people.
    pub(super) table: bool,
}

pub(super) fn simulate(context: &Context, options: &Options<'_>) -> Result<Answer> {
    let host = match options.host_shape {
        Some(text) => shape::parse(text)?,
        None => sysfs::read(&context.root)?,
    };
    // Without a word on it, everything is pinnable: this is about placement, not about one operator's allowlist.
    let settings = context.config.is_some().then(|| context.settings()).transpose()?;
    let configured = settings.as_ref().map(|settings| settings.pinnable.clone());
    let pinnable = configured.or(context.pinnable.clone()).unwrap_or_else(|| host.possible().union(host.online()));
    let reserve = options.reserve.or(settings.as_ref().map(|settings| settings.autostart_reserve)).unwrap_or_default();
    let mut run = Run {
        simulation: Simulation::new(host, pinnable).with_reserve(reserve),
        settings,
        degraded: BTreeSet::new(),
        moves: options.moves,
        defined: BTreeMap::new(),
        totals: Totals::default(),
    };
    let (input, length): (Box<dyn BufRead>, _) = if options.events == "-" {
        (Box::new(io::stdin().lock()), None)
    } else {
        let unreadable = |error| Error::io(Code::Usage, "read", options.events.as_ref(), error);
        let file = File::open(options.events).map_err(unreadable)?;
        let length = file.metadata().map_err(unreadable)?.len();
        (Box::new(BufReader::new(file)), Some(length).filter(|length| *length > 0))
    };
    let mut stdout = io::stdout().lock();
    // On a terminal the answers themselves show how far it has come.
    let (mut progress, mut read) = (Progress::new(!stdout.is_terminal()), 0);
    let mut say = |line: String| match stdout.write_all(line.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        written => {
            written.map(|()| true).map_err(|error| Error::new(Code::HostIo, "cannot write to stdout").because(error))
        }
    };
    if options.table && !say(text::head())? {
        return Ok(String::new().into());
    }
    for (number, line) in (1u64..).zip(lines(input)) {
        let wrong = |what: String| {
            Error::new(Code::Usage, format!("events, line {number}: {what}"))
                .with_hint("the format is in docs/simulate.md")
        };
        let line = line.map_err(&wrong)?;
        read += line.len() as u64;
        progress.at(|| match length {
            Some(length) => format!("{number} events, {}% of {}", read * 100 / length, options.events),
            None => format!("{number} events"),
        });
        if line.trim().is_empty() {
            continue;
        }
        let event: Event = serde_json::from_str(&line).map_err(|error| wrong(error.to_string()))?;
        let answer = run.event(event).map_err(|error| wrong(error.message))?;
        if !say(if options.table { text::row(&answer) } else { to_json(&answer)? })? {
            return Ok(String::new().into());
        }
    }
    let totals = run.totals()?;
    let end = if options.table {
        format!("\n{}\n{}", text::totals(&totals), map::simulated(&run.simulation))
    } else {
        to_json(&totals)?
    };
    say(end)?;
    Ok(String::new().into())
}

/// The lines of the input, each bounded.
fn lines(input: Box<dyn BufRead>) -> impl Iterator<Item = std::result::Result<String, String>> {
    let mut input = Some(input);
    std::iter::from_fn(move || {
        let mut line = Vec::new();
        let reader = input.as_mut()?;
        let read = io::Read::take(reader, MAX_LINE as u64 + 1).read_until(b'\n', &mut line);
        let result = match read {
            Ok(0) => return None,
            Ok(_) if line.len() > MAX_LINE => Err(format!("longer than {MAX_LINE} bytes")),
            Ok(_) => String::from_utf8(line).map_err(|_| "not UTF-8".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        if result.is_err() {
            input = None;
        }
        Some(result)
    })
}

struct Run {
    simulation: Simulation,
    /// The configuration, if one was named: whoever brings no policy has that of its section, and limits hold.
    settings: Option<Settings>,
    /// Those that run without CPUs of their own.
    degraded: BTreeSet<String>,
    /// Whether to look for the leases that would have to move.
    moves: bool,
    defined: BTreeMap<String, Event>,
    totals: Totals,
}

impl Run {
    fn event(&mut self, event: Event) -> Result<serde_json::Value> {
        let usage = |what: &str| Error::new(Code::Usage, what);
        if matches!(event.op, Op::Offline | Op::Online) {
            let list = event.cpus.as_deref().ok_or_else(|| usage("offline and online need \"cpus\""))?;
            let cpus = CpuSet::parse_kernel_list(list).map_err(|error| usage(&format!("cpus \"{list}\": {error}")))?;
            let online = event.op == Op::Online;
            let degraded = self.simulation.set_online(&cpus, online);
            return Ok(
                json!({ "op": if online { "online" } else { "offline" }, "cpus": cpus.to_string(), "degraded": degraded }),
            );
        }
        let id = event.id.clone().ok_or_else(|| usage("needs an \"id\""))?;
        match event.op {
            Op::Define => {
                let autostart = event.autostart.unwrap_or(false);
                let request = match self.request(&id, &event) {
                    Ok(request) => request,
                    // It is defined all the same, and a start of it will be refused.
                    Err(error) if error.code != Code::Usage => {
                        self.simulation.undefine(&id);
                        self.defined.insert(id.clone(), event);
                        return Ok(refused("define", &id, &error));
                    }
                    Err(error) => return Err(error),
                };
                // A shared domain asks for no place, whatever it was before.
                if request.policy.kind == Kind::Shared {
                    self.simulation.undefine(&id);
                } else {
                    self.simulation.define(&id, autostart, request);
                }
                self.defined.insert(id.clone(), event);
                Ok(json!({ "op": "define", "id": id }))
            }
            Op::Undefine => {
                self.simulation.undefine(&id);
                match self.defined.remove(&id) {
                    Some(_) => Ok(json!({ "op": "undefine", "id": id })),
                    None => Ok(refused("undefine", &id, &Error::new(Code::DomainUnknown, "it is not defined"))),
                }
            }
            Op::Stop => match self.simulation.stop(&id) {
                Some(plan) => Ok(json!({ "op": "stop", "id": id, "freed": plan.exclusive().to_string() })),
                None if self.degraded.remove(&id) => Ok(json!({ "op": "stop", "id": id, "freed": "" })),
                None => Ok(refused("stop", &id, &Error::new(Code::DomainUnknown, "it does not run"))),
            },
            Op::Start | Op::Offline | Op::Online => {
                // A start that says nothing of what it needs is one of what was defined.
                let definition = if event.vcpus.is_none() { self.defined.get(&id) } else { Some(&event) };
                let Some(definition) = definition else {
                    return Ok(
                        self.refuse(&id, Refusal::new(Code::DomainUnknown, "it is not defined, and has no \"vcpus\""))
                    );
                };
                let request = match self.request(&id, definition) {
                    Ok(request) => request,
                    Err(error) if error.code != Code::Usage => {
                        let hint = error.hint;
                        return Ok(self.refuse(&id, Refusal { hint, ..Refusal::new(error.code, error.message) }));
                    }
                    Err(error) => return Err(error),
                };
                if request.policy.kind == Kind::Shared {
                    return Ok(json!({ "op": "start", "id": id, "shared": true }));
                }
                if self.degraded.contains(&id) {
                    return Ok(self.refuse(&id, Refusal::new(Code::StateConflict, "it runs already")));
                }
                match self.simulation.start(&id, &request).cloned() {
                    Ok(plan) => Ok(self.started(&id, &request, &plan)),
                    Err(refusal) => Ok(self.refuse_start(&id, &request, refusal)),
                }
            }
        }
    }

    /// What a definition or a start asks for. Without a configuration it is dedicated unless its policy says otherwise.
    fn request(&self, id: &str, event: &Event) -> Result<Request> {
        let section = self.settings.as_ref().filter(|_| event.policy.is_none());
        let section = section.map(|settings| settings.section_for(DomainUuid::parse(id), id));
        let attributes = match section {
            Some(Some(section)) => section.attributes.clone(),
            // As on a host: nothing is asked for.
            Some(None) => vec![("policy".to_owned(), "shared".to_owned())],
            None => {
                let mut attributes = attributes(event)?;
                if !attributes.iter().any(|(name, _)| name == "policy") {
                    attributes.push(("policy".to_owned(), "dedicated".to_owned()));
                }
                attributes
            }
        };
        let policy = Policy::from_attributes(attributes.iter().map(|(name, value)| (name.as_str(), value.as_str())))?;
        let vcpus = event.vcpus.ok_or_else(|| Error::new(Code::Usage, "needs \"vcpus\""))?;
        if let Some(settings) = self.settings.as_ref().filter(|_| policy.kind == Kind::Dedicated) {
            settings.check(id, vcpus, &policy)?;
        }
        let memory =
            event.memory_mib.map(|mib| GuestMemory { bytes: mib.saturating_mul(1 << 20), pages: Pages::Ordinary });
        Ok(Request { iothreads: event.iothreads.unwrap_or(0), memory, ..Request::new(vcpus, policy) })
    }

    fn started(&mut self, id: &str, request: &Request, plan: &Plan) -> serde_json::Value {
        let llc = |cpu: CpuId| self.simulation.host().cpu(cpu).and_then(|cpu| cpu.llc).map(|llc| llc.0);
        let llcs: BTreeSet<u16> = plan.vcpus.iter().flatten().filter_map(|&cpu| llc(cpu)).collect();
        let numbers = |set: &CpuSet| set.iter().map(|cpu| cpu.0).collect::<Vec<_>>();
        self.totals.started += 1;
        self.totals.nodes_spanned += plan.nodes.len();
        self.totals.llcs_spanned += llcs.len();
        let mut answer = json!({
            "op": "start",
            "id": id,
            "cpus": plan.vcpus.iter().map(|cpu| cpu.map(|cpu| cpu.0)).collect::<Vec<_>>(),
            "parked": numbers(&plan.parked),
            "emulator": numbers(&plan.emulator),
            "iothreads": numbers(&plan.iothreads),
            "nodes": plan.nodes.iter().map(|node| node.0).collect::<Vec<_>>(),
            "llcs": llcs,
            "topology": plan.guest.map(|guest| json!([guest.sockets, guest.dies, guest.cores, guest.threads])),
        });
        if let (Some(advice), Some(object)) = (self.advice(id, request), answer.as_object_mut()) {
            object.insert("advice".to_owned(), json!(advice));
        }
        answer
    }

    fn advice(&self, id: &str, request: &Request) -> Option<advice::View> {
        let advice = self.simulation.advise(id)?;
        let moves = if self.moves { self.simulation.moves(id, request, Some(advice.goal())) } else { None };
        advice::View::new(Some((&advice, &How::Moves(moved(moves.unwrap_or_default())))), None)
    }

    fn refuse_start(&mut self, id: &str, request: &Request, refusal: Refusal) -> serde_json::Value {
        if request.policy.fallback == Fallback::Shared && refusal.code.is_about_placement() {
            self.totals.degraded += 1;
            self.degraded.insert(id.to_owned());
            return json!({ "op": "start", "id": id, "degraded": failure::value(&Error::from(refusal)) });
        }
        let scattered = self.moves && refusal.code == Code::NeedsRepack;
        let moves = if scattered { self.simulation.moves(id, request, None) } else { None };
        let error = Error::from(refusal);
        let error = match moves {
            Some(moves) => error.with_moves(moved(moves)),
            None => error,
        };
        self.refuse_with(id, error)
    }

    fn refuse(&mut self, id: &str, refusal: Refusal) -> serde_json::Value {
        self.refuse_with(id, Error::from(refusal))
    }

    fn refuse_with(&mut self, id: &str, error: Error) -> serde_json::Value {
        self.totals.refused += 1;
        *self.totals.refused_by_code.entry(error.code.name()).or_default() += 1;
        refused("start", id, &error)
    }

    /// The totals, and where the host stands at the end.
    fn totals(&self) -> Result<serde_json::Value> {
        let broken = |error| Error::new(Code::Internal, "cannot write JSON").because(error);
        let mut totals = serde_json::to_value(&self.totals).map_err(broken)?;
        if let Some(object) = totals.as_object_mut() {
            object.insert("op".to_owned(), "total".into());
            object.insert("running".to_owned(), self.simulation.running().len().into());
            object.insert("free".to_owned(), self.simulation.free().to_string().into());
        }
        Ok(totals)
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "what serde calls it with")]
fn is_zero(count: &usize) -> bool {
    *count == 0
}

fn refused(op: &str, id: &str, error: &Error) -> serde_json::Value {
    json!({ "op": op, "id": id, "refused": failure::value(error) })
}

/// The attributes that an event brings.
fn attributes(event: &Event) -> Result<Vec<(String, String)>> {
    let mut attributes: Vec<(String, String)> = Vec::new();
    for (name, value) in event.policy.iter().flatten() {
        let value = match value {
            serde_json::Value::String(text) => text.clone(),
            serde_json::Value::Number(number) => number.to_string(),
            _ => return Err(Error::new(Code::PolicyInvalid, format!("policy {name}: must be a string or a number"))),
        };
        attributes.push((name.replace('_', "-"), value));
    }
    Ok(attributes)
}

fn moved(moves: Vec<Move<String>>) -> Vec<Moved> {
    let moved = |one: Move<String>| Moved { domain: one.id, from: one.from.to_string(), to: one.to.to_string() };
    moves.into_iter().map(moved).collect()
}
