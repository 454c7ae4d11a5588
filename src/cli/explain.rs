//! `virt-pin explain`: what a VM would get now, or why not, step by step. Takes the same decision as the hook.

use serde::Serialize;

use super::{Answer, Context, subject, to_json};
use crate::alloc::plan::Plan;
use crate::cpuset::CpuId;
use crate::decision::{self, Situation, Wish};
use crate::definitions;
use crate::error::{Error, Result, counted, printable};
use crate::xml::{Domain, read};

#[derive(Serialize)]
struct View<'a> {
    domain: &'a str,
    uuid: Option<String>,
    wish: &'static str,
    steps: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<PlanView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<serde_json::Value>,
}

#[derive(Serialize)]
struct PlanView {
    vcpus: Vec<Option<u16>>,
    shared: String,
    parked: String,
    extra: String,
    emulator: String,
    iothreads: String,
    nodes: Vec<u16>,
    /// Sockets, dies, cores, threads.
    topology: Option<(u16, u16, u16, u16)>,
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
        }
    }
}

/// The text or JSON; a refusal is an answer that is printed, and then an error for the exit status.
pub(super) fn explain(context: &Context, what: &str) -> Result<Answer> {
    let text = subject::xml(&context.root, what)?;
    let domain = Domain::parse(&text)?;
    let identity = read::identity(&domain)?;
    let name = identity.name.as_str();
    let about = |error: Error| decision::about(error, name, None);
    let mut steps: Vec<String> = Vec::new();
    let view = |wish, steps: &[String], plan: Option<PlanView>, refused: Option<&Error>| {
        let refused = refused.map(super::error_value);
        to_json(&View { domain: name, uuid: identity.uuid.map(|uuid| uuid.to_string()), wish, steps, plan, refused })
    };
    let wish = match decision::wish(&context.root, &domain, &identity, &|| context.settings()).map_err(about)? {
        Wish::Dedicated(wish) => wish,
        Wish::Static(cpus) => {
            let leases = context.leases()?;
            steps.push(format!(
                "no policy, but its XML pins it to CPUs {cpus}: respected as a static lease while it runs"
            ));
            let owner = leases.dedicated_owner_of(&cpus, identity.uuid);
            let refusal = owner.map(|owner| decision::static_conflict(&cpus, owner));
            if let Some(error) = &refusal {
                steps.push(format!("refused: {}: {}", error.code, error.message));
            }
            let refusal = refusal.map(about);
            let text =
                if context.json { view("static", &steps, None, refusal.as_ref())? } else { render(name, &steps, None) };
            return Ok(Answer { text, failed: refusal });
        }
        Wish::Shared => {
            steps.push("no policy asks for dedicated CPUs: it gets no lease".to_owned());
            let answer = if context.json { view("shared", &steps, None, None)? } else { render(name, &steps, None) };
            return Ok(answer.into());
        }
    };
    steps.push(format!("dedicated by {}: {}", wish.policy_from, describe(&wish.request)));
    let situation = Situation::read(&context.root, &wish.settings, read::partition(&domain).as_deref())?;
    if !situation.out_of_reach.is_empty() {
        steps.push(format!("pinnable, but out of reach of the VMs' cgroup: {}", situation.out_of_reach));
    }
    let definitions = definitions::read(&context.root, &wish.settings).dedicated;
    let situation = situation.among(definitions, identity.uuid);
    let leases = context.leases()?;
    let existing = identity.uuid.and_then(|uuid| leases.get(uuid)).and_then(|lease| lease.plan());
    let situation = situation.beside(&leases, identity.uuid);
    let result = situation.plan(&wish, existing, false, &mut |step| steps.push(step.to_string()));
    let view_of_xml = read::topology(&domain)?;
    match result {
        Ok(plan) if context.json => view("dedicated", &steps, Some(PlanView::from(&plan)), None).map(Answer::from),
        Ok(plan) => {
            let mut text = render(name, &steps, Some(&plan));
            if plan.guest.is_some() && plan.guest != view_of_xml {
                text.push_str(
                    "  note: the XML tells the guest otherwise; `virt-pin transform` prints the <topology>\n",
                );
            }
            Ok(text.into())
        }
        Err(error) => {
            let error = decision::about(error, name, Some((&leases, identity.uuid)));
            let text =
                if context.json { view("dedicated", &steps, None, Some(&error))? } else { render(name, &steps, None) };
            Ok(Answer { text, failed: Some(error) })
        }
    }
}

fn describe(request: &crate::alloc::request::Request) -> String {
    use crate::alloc::policy::{Cores, ThreadsPerCore};
    let cores = match (request.policy.cores, request.policy.threads_per_core) {
        (Cores::Thread, _) => "on single threads".to_owned(),
        (Cores::Whole, ThreadsPerCore::Auto) => "on whole cores".to_owned(),
        (Cores::Whole, ThreadsPerCore::Exactly(count)) => format!("on whole cores, {count} on each"),
    };
    format!("{} {cores}", counted(request.vcpus, "vCPU"))
}

fn render(name: &str, steps: &[String], plan: Option<&Plan>) -> String {
    let mut out = format!("Domain \"{}\"\n", printable(name));
    for (number, step) in (1..).zip(steps) {
        out.push_str(&format!(" {number}. {step}\n"));
    }
    let Some(plan) = plan else { return out };
    out.push_str("It would get:\n");
    for (vcpu, own) in plan.vcpus.iter().enumerate() {
        let place = own.map_or_else(|| format!("shared CPUs {}", plan.shared), |cpu| format!("CPU {cpu}"));
        out.push_str(&format!("  vCPU {vcpu:<9} {place}\n"));
    }
    let nodes = plan.nodes.iter().map(|node| CpuId(node.0)).collect::<crate::cpuset::CpuSet>();
    for (title, cpus) in
        [("parked", &plan.parked), ("emulator", &plan.emulator), ("I/O threads", &plan.iothreads), ("nodes", &nodes)]
    {
        if !cpus.is_empty() {
            out.push_str(&format!("  {title:<14} {cpus}\n"));
        }
    }
    if let Some(guest) = plan.guest {
        let (cores, threads) = (counted(guest.cores, "core"), counted(guest.threads, "thread"));
        out.push_str(&format!("  true topology  {cores} of {threads}\n"));
        if guest.threads == 1 && !plan.parked.is_empty() && plan.parked.len() < plan.vcpus.len() {
            out.push_str("  note: an odd number of vCPUs on cores of several threads: the guest sees each as a core\n");
        }
    }
    out
}
