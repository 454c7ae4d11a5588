//! `virt-pin explain`: what a VM would get now, or why not, step by step. Takes the same decision as the hook.

use serde::Serialize;

use super::advice::{self, How};
use super::lease::places;
use super::start;
use super::table::wrapped;
use super::{Answer, Context, failure, to_json};
use crate::alloc::plan::{PlacedCell, Plan};
use crate::alloc::policy::Irqs;
use crate::alloc::repack::Extent;
use crate::alloc::request::Request;
use crate::alloc::{self, check, quality};
use crate::conditions::Arrival;
use crate::cpuset::{CpuId, CpuSet};
use crate::decision::{self, Dedicated, Situation, Wish};
use crate::definitions;
use crate::enforce::isolation::irqs;
use crate::error::{Error, Result, counted, printable};
use crate::lock::leases::{Holds, Lease, Leases};
use crate::uuid::DomainUuid;
use crate::xml::read::Identity;
use crate::xml::{Domain, read};

/// The answer, in JSON as it stands.
#[derive(Serialize)]
struct View<'a> {
    domain: &'a str,
    uuid: Option<String>,
    wish: &'static str,
    steps: Vec<String>,
    #[serde(serialize_with = "plan_view", skip_serializing_if = "Option::is_none")]
    plan: Option<Plan>,
    /// The plan is what the domain holds, not what it would get.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    held: bool,
    /// It runs without the CPUs it asks for.
    #[serde(skip_serializing_if = "Option::is_none")]
    runs_degraded: Option<Why>,
    /// It would start without them.
    #[serde(skip_serializing_if = "Option::is_none")]
    degraded: Option<Why>,
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<serde_json::Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<advice::View>,
    /// Device interrupts that are handled on its CPUs now, where its policy wants them away.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    interrupts: Vec<String>,
    /// How what its XML tells the guest is not what the plan has.
    #[serde(skip_serializing_if = "Option::is_none")]
    told: Option<String>,
}

fn plan_view<S: serde::Serializer>(plan: &Option<Plan>, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    plan.as_ref().map(PlanView::from).serialize(serializer)
}

/// Why a domain has no CPUs of its own.
#[derive(Serialize)]
struct Why {
    code: &'static str,
    reason: String,
}

impl Why {
    fn of(holds: &Holds) -> Option<Why> {
        match holds {
            Holds::Degraded { code, reason, .. } => Some(Why { code: code.name(), reason: reason.clone() }),
            Holds::Dedicated(_) | Holds::Static(_) => None,
        }
    }
}

#[derive(Serialize)]
struct PlanView {
    vcpus: Vec<Option<u16>>,
    #[serde(skip_serializing_if = "String::is_empty")]
    shared: String,
    parked: String,
    extra: String,
    emulator: String,
    iothreads: String,
    nodes: Vec<u16>,
    /// Sockets, dies, cores, threads.
    topology: Option<(u16, u16, u16, u16)>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cells: Vec<CellView>,
}

/// A NUMA cell of the guest.
#[derive(Serialize)]
struct CellView {
    vcpus: String,
    bytes: Option<u64>,
    node: Option<u16>,
}

impl From<&PlacedCell> for CellView {
    fn from(cell: &PlacedCell) -> CellView {
        CellView { vcpus: cell.vcpus.to_string(), bytes: cell.bytes, node: cell.node.map(|node| node.0) }
    }
}

impl From<&Plan> for PlanView {
    fn from(plan: &Plan) -> PlanView {
        PlanView {
            vcpus: plan.vcpus.iter().map(|cpu| cpu.map(|cpu| cpu.0)).collect(),
            shared: plan.shared.to_string(),
            parked: plan.parked.to_string(),
            extra: plan.extra.to_string(),
            emulator: plan.emulator.to_string(),
            iothreads: plan.iothreads.to_string(),
            nodes: plan.nodes.iter().map(|node| node.0).collect(),
            topology: plan.guest.map(|guest| (guest.sockets, guest.dies, guest.cores, guest.threads)),
            cells: plan.cells.iter().map(CellView::from).collect(),
        }
    }
}

/// The text or JSON; a refusal is an answer that is printed, and then an error for the exit status.
pub(super) fn explain(context: &Context, text: &str, arrival: Arrival) -> Result<Answer> {
    let domain = Domain::parse(text)?;
    let identity = read::identity(&domain)?;
    let wish = decision::wish(&context.root, &domain, &identity, &|| context.settings());
    let mut view = View {
        domain: &identity.name,
        uuid: identity.uuid.map(|uuid| uuid.to_string()),
        wish: "shared",
        steps: Vec::new(),
        plan: None,
        held: false,
        runs_degraded: None,
        degraded: None,
        refused: None,
        advice: None,
        interrupts: Vec::new(),
        told: None,
    };
    let wish = wish.map_err(|error| decision::about(error, &identity.name, None))?;
    view.steps.extend(decision::in_vain(&domain));
    let failed = match wish {
        Wish::Dedicated(wish) => dedicated(context, &domain, &identity, (&wish, arrival), &mut view)?,
        Wish::Static(cpus) => by_hand(context, &identity, &cpus, &mut view)?,
        Wish::Shared => {
            view.steps.push("no policy asks for dedicated CPUs: it gets no lease".to_owned());
            None
        }
    };
    view.refused = failed.as_ref().map(failure::value);
    let text = if context.json { to_json(&view)? } else { render(&view) };
    Ok(Answer { text, failed })
}

/// A domain that pins itself; the refusal of its start, if it would be refused.
fn by_hand(context: &Context, identity: &Identity, cpus: &CpuSet, view: &mut View<'_>) -> Result<Option<Error>> {
    view.wish = "static";
    let pinned = format!("no policy, but its XML pins it to CPUs {cpus}: respected as a static lease while it runs");
    view.steps.push(pinned);
    let refusal = start::by_hand(&context.leases()?, identity, cpus);
    Ok(refusal.map(|error| decision::about(error, &identity.name, None)))
}

/// A dedicated domain; the refusal of its start, if it would be refused.
fn dedicated(
    context: &Context,
    domain: &Domain<'_>,
    identity: &Identity,
    (wish, arrival): (&Dedicated, Arrival),
    view: &mut View<'_>,
) -> Result<Option<Error>> {
    view.wish = "dedicated";
    let steps = &mut view.steps;
    steps.push(format!("dedicated by {}: {}", wish.policy_from, describe(&wish.request)));
    let situation = Situation::read(&context.root, &wish.settings, read::partition(domain).as_deref())?;
    if !situation.out_of_reach.is_empty() {
        steps.push(format!("pinnable, but out of reach of the VMs' cgroup: {}", situation.out_of_reach));
    }
    let definitions = definitions::read(&context.root, &wish.settings).dedicated;
    let situation = situation.among(definitions, identity.uuid);
    let leases = context.leases()?;
    let lease = identity.uuid.and_then(|uuid| leases.get(uuid));
    view.runs_degraded = lease.and_then(|lease| Why::of(&lease.holds));
    if let Some(Why { code, reason }) = &view.runs_degraded {
        let reason = printable(reason);
        steps.push(format!(
            "it runs degraded, without CPUs of its own ({code}: {reason}); the rest is about a new start"
        ));
    }
    let existing = lease.and_then(Lease::plan);
    let situation = situation.beside(&leases, identity.uuid);
    if let Some(held) =
        existing.filter(|plan| check::check(&situation.supply(), &wish.asked(arrival == Arrival::Entry), plan).is_err())
    {
        let cpus = held.exclusive();
        steps.push(format!("it holds CPUs {cpus}, which is not what is asked for now; the rest is about a new start"));
    }
    let (who, beside) = ((domain, identity), (&situation, &leases));
    let mut step = |step: std::fmt::Arguments<'_>| steps.push(step.to_string());
    let refusal = match start::plan(&context.root, who, wish, beside, arrival, &mut step) {
        Ok((plan, told)) => {
            view.held = existing == Some(&plan);
            if wish.request.policy.irqs == Irqs::Away {
                // Those of a plan are steered when it starts; what is left with a lease cannot be.
                view.interrupts = irqs::on(&context.root, &plan.exclusive()).unwrap_or_default();
            }
            view.told = told;
            view.advice = advise(&situation, &wish.asked(arrival == Arrival::Entry), &plan, (&leases, identity.uuid));
            view.plan = Some(plan);
            return Ok(None);
        }
        Err(refusal) => refusal,
    };
    match wish.fall_back(refusal, &leases, identity.uuid) {
        Ok(holds) => {
            view.degraded = Why::of(&holds);
            if let Some(Why { code, reason }) = &view.degraded {
                steps.push(format!("no room: {code}: {reason}"));
                steps.push("fallback=\"shared\": it would start degraded, without CPUs of its own".to_owned());
            }
            Ok(None)
        }
        Err(error) => {
            let error = situation.with_moves(error, &wish.asked(arrival == Arrival::Entry), &leases, identity.uuid);
            Ok(Some(decision::about(error, &identity.name, Some((&leases, identity.uuid)))))
        }
    }
}

fn advise(
    situation: &Situation,
    request: &Request,
    plan: &Plan,
    (leases, domain): (&Leases, Option<DomainUuid>),
) -> Option<advice::View> {
    let supply = situation.supply();
    let advice = quality::advise(&supply, request, plan).map(|advice| {
        // What it holds may be from a time when the host was fuller.
        let anew = alloc::plan(&supply, request);
        if anew.is_ok_and(|anew| Extent::of(&situation.topology, &anew) < advice.spans) {
            return (advice, How::Anew);
        }
        let moves = situation.moves(request, leases, domain, Some(advice.goal()));
        (advice, How::Moves(moves.unwrap_or_default()))
    });
    let fit = quality::fit(&supply, request, plan);
    let mut view = advice::View::new(advice.as_ref().map(|(advice, how)| (advice, how)), fit);
    if let (Some(view), Some((_, How::Moves(moves)))) = (&mut view, &advice) {
        if !moves.is_empty() {
            view.message.push_str("; `virt-pin repack` moves running VMs");
        }
    }
    view
}

fn describe(request: &Request) -> String {
    use crate::alloc::policy::{Cores, ThreadsPerCore};
    let cores = match (request.policy.cores, request.policy.threads_per_core) {
        (Cores::Thread, _) => "on single threads".to_owned(),
        (Cores::Whole, ThreadsPerCore::Auto) => "on whole cores".to_owned(),
        (Cores::Whole, ThreadsPerCore::Exactly(count)) => format!("on whole cores, {count} on each"),
    };
    format!("{} {cores}", counted(request.vcpus, "vCPU"))
}

fn render(view: &View<'_>) -> String {
    let mut out = wrapped("Domain ", &format!("\"{}\"", printable(view.domain)));
    for (number, step) in (1..).zip(&view.steps) {
        out += &wrapped(&format!(" {number}. "), step);
    }
    let Some(plan) = &view.plan else { return out };
    out += if view.held { "It holds:\n" } else { "It would get:\n" };
    let mut line = |title: &str, text: &str| out += &wrapped(&format!("  {title:<14} "), text);
    for (vcpus, place) in places(plan) {
        line(&vcpus, &place);
    }
    let nodes = plan.nodes.iter().map(|node| CpuId(node.0)).collect::<CpuSet>();
    for (title, cpus) in
        [("parked", &plan.parked), ("emulator", &plan.emulator), ("I/O threads", &plan.iothreads), ("nodes", &nodes)]
    {
        if !cpus.is_empty() {
            line(title, &cpus.to_string());
        }
    }
    if let Some(guest) = plan.guest {
        line("true topology", &guest.to_string());
    }
    for (number, cell) in plan.cells.iter().enumerate() {
        line(&format!("NUMA cell {number}"), &cell.to_string());
    }
    let mut note = |text: &str| out += &wrapped("  note: ", text);
    let odd = !plan.parked.is_empty() && plan.parked.len() < plan.vcpus.len();
    if plan.guest.is_some_and(|guest| guest.threads == 1) && odd {
        note("an odd number of vCPUs on cores of several threads: the guest sees each as a core");
    }
    if let Some(advice) = &view.advice {
        note(&printable(&advice.message));
    }
    if !view.interrupts.is_empty() {
        let what = if view.held {
            "stay on its CPUs: the kernel does not let them be moved"
        } else {
            "are there now; those that can be moved will be"
        };
        note(&format!("interrupts {} {what}", printable(&view.interrupts.join(", "))));
    }
    if let Some(told) = &view.told {
        note(&format!("{}; `virt-pin define` corrects it, and so does the agent", printable(told)));
    }
    out
}
