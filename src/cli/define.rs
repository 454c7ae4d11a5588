//! `virt-pin define`, `enable`, `disable` and `set-vcpus`: definitions changed through libvirt, for those who do not edit XML.
//!
//! Each reads a definition, changes its text and has libvirt define it; a VM that runs goes on as it is. With the agent
//! running nothing is different: what it would write is what is written here.

use super::{Context, options, subject, transform};
use crate::alloc::policy::{ATTRIBUTES, Policy};
use crate::decision::{self, Wish};
use crate::error::{Code, Error, Result, printable};
use crate::libvirt::Libvirt;
use crate::xml::{Domain, former, owner, read};

/// No call to a libvirt that hangs is waited for longer.
const PATIENCE_SECS: u32 = 60;

pub(super) fn define(context: &Context, file: &str) -> Result<String> {
    let text = transform::shaped(context, &subject::file(file)?)?;
    connect()?.define(&text)?;
    say(context, &text, "defined")
}

pub(super) fn enable(context: &Context, domain: &str, options: &options::Policy) -> Result<String> {
    let libvirt = connect()?;
    let text = definition(&libvirt, domain)?;
    let former = former::restored(&text)?;
    let had = read::policy_attributes(&Domain::parse(&former)?)?.unwrap_or_default();
    let attributes: Vec<(&'static str, String)> = ATTRIBUTES
        .iter()
        .filter_map(|attribute| {
            let given = options.0.iter().find(|(name, _)| *name == attribute.name).map(|(_, value)| value);
            let had = had.iter().find(|(name, _)| name == attribute.name).map(|(_, value)| value);
            match attribute.name {
                "policy" => Some((attribute.name, "dedicated".to_owned())),
                name => Some((name, given.or(had)?.clone())),
            }
        })
        .collect();
    Policy::from_attributes(attributes.iter().map(|(name, value)| (*name, value.as_str())))?;
    let text = transform::shaped(context, &owner::with_policy(&former, attributes)?)?;
    libvirt.define(&text)?;
    say(context, &text, "will have CPUs of its own")
}

pub(super) fn disable(context: &Context, domain: &str) -> Result<String> {
    let libvirt = connect()?;
    let text = definition(&libvirt, domain)?;
    let text = owner::without_policy(&former::restored(&text)?)?;
    let text = transform::shaped(context, &text)?;
    libvirt.define(&text)?;
    let mut said = say(context, &text, "its definition asks for no CPUs of its own any more")?;
    if text.contains("<vcpusched") || text.contains("<locked") {
        said.push_str("Its realtime scheduler and locked memory are still in its XML: take <vcpusched> and <locked/> out with `virsh edit`.\n");
    }
    Ok(said)
}

pub(super) fn set_vcpus(context: &Context, domain: &str, count: u16) -> Result<String> {
    if count == 0 {
        return Err(Error::new(Code::Usage, "0 vCPUs: a VM needs one at least")
            .with_hint("give the number that the VM is to have"));
    }
    let libvirt = connect()?;
    let text = definition(&libvirt, domain)?;
    let text = transform::shaped(context, &owner::with_vcpus(&former::restored(&text)?, count)?)?;
    libvirt.define(&text)?;
    say(context, &text, &format!("has {count} vCPUs"))
}

fn connect() -> Result<Libvirt> {
    // libvirt's calls have no time limit of their own; this ends the process.
    nix::unistd::alarm::set(PATIENCE_SECS);
    Libvirt::connect()
}

fn definition(libvirt: &Libvirt, domain: &str) -> Result<String> {
    libvirt.definition(domain)?.ok_or_else(|| {
        Error::new(Code::DomainUnknown, format!("no domain \"{}\" is defined", printable(domain)))
            .with_hint("`virsh list --all` shows them; a transient VM has no definition to change")
    })
}

/// What was done, and what the guest is told from now on.
fn say(context: &Context, text: &str, what: &str) -> Result<String> {
    let domain = Domain::parse(text)?;
    let identity = read::identity(&domain)?;
    let told = read::topology(&domain)?.map(|guest| format!("; the guest is told of {guest}")).unwrap_or_default();
    let mut said =
        format!("Domain \"{}\": {what}{told}. It takes effect at the next start.\n", printable(&identity.name));
    let own = read::policy_attributes(&domain)?;
    let wish = decision::wish(&context.root, &domain, &identity, &|| context.settings())?;
    if let (None, Wish::Dedicated(wish)) = (own, wish) {
        said.push_str(&format!("It is dedicated all the same, by {}.\n", wish.policy_from));
    }
    Ok(said)
}
