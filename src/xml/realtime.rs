//! Does the document make its vCPUs realtime, and how is it made to? (Policy `realtime="yes"`.)
//!
//! libvirt gives a vCPU its scheduler from `<cputune><vcpusched>` and QEMU its locked memory from
//! `<memoryBacking><locked>`, both before a hook could. So what is missing in the XML of a domain that starts is refused
//! ([`check`]), and written beforehand ([`rewrite`]). What the document says to the contrary is refused by both and never
//! changed: a realtime thread that nobody can displace hangs whatever shares its CPU.

use super::edit::EditList;
use super::layout::{CPUTUNE, Element, MEMORY_BACKING};
use super::pin::Changes;
use super::{Domain, cpuset_attribute, invalid};
use crate::alloc::policy::OtherThreads;
use crate::alloc::request::Request;
use crate::cpuset::{CpuId, CpuSet};
use crate::error::{Code, Error, Result};

/// The lowest of the realtime priorities: there is nobody else on the vCPU's CPU to be above.
const PRIORITY: &str = "1";

/// Whether a domain with this request has what it needs to be started, if its policy says `realtime="yes"`.
///
/// # Errors
/// [`Code::PolicyInvalid`] names what is missing, or what the policy cannot be reconciled with;
/// [`Code::DomainInvalid`] for schedulers that libvirt would refuse too.
pub fn check(domain: &Domain<'_>, request: &Request) -> Result<()> {
    let missing = missing(domain, request)?;
    let schedulers = (!missing.vcpus.is_empty()).then(|| {
        format!("<vcpusched vcpus=\"{}\" scheduler=\"fifo\" priority=\"{PRIORITY}\"/> in <cputune>", missing.vcpus)
    });
    let locked = missing.locked.then(|| "<locked/> in <memoryBacking>".to_owned());
    let all: Vec<String> = schedulers.into_iter().chain(locked).collect();
    if all.is_empty() {
        return Ok(());
    }
    Err(refusal(format!("its XML lacks {}", all.join(" and "))).with_hint(
        "`virt-pin enable` and `virt-pin define` write it, and `virt-pin transform` prints the document with it",
    ))
}

/// The edits that add what is missing; none where nothing is, or the policy is not realtime.
///
/// # Errors
/// As [`check`], but for what is missing.
pub fn rewrite(domain: &Domain<'_>, request: &Request) -> Result<EditList> {
    let missing = missing(domain, request)?;
    let locked = missing.locked.then(|| Element::new("locked", Vec::new()));
    let scheduler = (!missing.vcpus.is_empty()).then(|| {
        let vcpus = ("vcpus", missing.vcpus.to_string());
        Element::new("vcpusched", vec![vcpus, ("scheduler", "fifo".to_owned()), ("priority", PRIORITY.to_owned())])
    });
    let mut changes = Changes::of(domain);
    changes.insert_below(domain, "memoryBacking", MEMORY_BACKING, locked.into_iter().collect());
    changes.insert_below(domain, "cputune", CPUTUNE, scheduler.into_iter().collect());
    changes.into_edits()
}

#[derive(Default)]
struct Missing {
    /// The vCPUs with a CPU of their own and no scheduler.
    vcpus: CpuSet,
    /// Whether the memory is not locked: a vCPU that waits for a page has lost its deadline.
    locked: bool,
}

fn missing(domain: &Domain<'_>, request: &Request) -> Result<Missing> {
    if !request.policy.realtime {
        return Ok(Missing::default());
    }
    let schedulers = Schedulers::of(domain, request.vcpus)?;
    let dedicated: CpuSet = request.dedicated().map(CpuId).collect();
    let guests = schedulers.realtime.difference(&dedicated);
    if !guests.is_empty() {
        return Err(refusal(format!(
            "its XML gives vCPUs {guests} a realtime scheduler, but no CPU of their own: they would take the shared ones \
             from everybody"
        ))
        .with_hint("take these vCPUs out of <vcpusched>, or name them in dedicated-vcpus"));
    }
    let timid = schedulers.other.intersection(&dedicated);
    if !timid.is_empty() {
        return Err(refusal(format!("its XML gives vCPUs {timid} a scheduler that is not realtime"))
            .with_hint("set the scheduler of <vcpusched> to \"fifo\" or \"rr\", or take these vCPUs out of it"));
    }
    refuse_others_beside_vcpus(domain, request)?;
    Ok(Missing {
        vcpus: dedicated.difference(&schedulers.realtime),
        locked: domain.all(&["memoryBacking", "locked"]).is_empty(),
    })
}

/// QEMU's own threads share the housekeeping CPUs with the vCPUs that have none of their own.
fn refuse_others_beside_vcpus(domain: &Domain<'_>, request: &Request) -> Result<()> {
    if request.dedicated().count() == usize::from(request.vcpus) {
        return Ok(());
    }
    for (element, attribute, place) in [
        ("emulatorsched", "emulator", request.policy.emulator),
        ("iothreadsched", "iothreads", request.policy.iothreads),
    ] {
        let realtime =
            domain.all(&["cputune", element]).into_iter().any(|sched| is_realtime(sched.attribute("scheduler")));
        if realtime && place == OtherThreads::Housekeeping {
            return Err(refusal(format!("its XML has a realtime <{element}>, on CPUs that vCPUs run on"))
                .with_hint(format!("set {attribute} to \"isolate\", or take <{element}> out of the XML")));
        }
    }
    Ok(())
}

fn is_realtime(scheduler: Option<&str>) -> bool {
    matches!(scheduler, Some("fifo" | "rr"))
}

/// The vCPUs that `<vcpusched>` names.
struct Schedulers {
    realtime: CpuSet,
    other: CpuSet,
}

impl Schedulers {
    fn of(domain: &Domain<'_>, vcpus: u16) -> Result<Schedulers> {
        let mut found = Schedulers { realtime: CpuSet::new(), other: CpuSet::new() };
        for element in domain.all(&["cputune", "vcpusched"]) {
            let named = cpuset_attribute(element, "vcpus")?;
            if let Some(vcpu) = named.iter().find(|vcpu| vcpu.0 >= vcpus) {
                return Err(invalid(format!("<vcpusched> names vCPU {vcpu}, which the domain does not have")));
            }
            if !named.is_disjoint(&found.realtime.union(&found.other)) {
                return Err(invalid(format!("vCPUs {named} have two <vcpusched>")));
            }
            let kind = if is_realtime(element.attribute("scheduler")) { &mut found.realtime } else { &mut found.other };
            *kind = kind.union(&named);
        }
        Ok(found)
    }
}

fn refusal(message: String) -> Error {
    Error::new(Code::PolicyInvalid, format!("policy realtime=\"yes\": {message}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alloc::policy::Policy;

    const LOCKED: &str = "<memoryBacking><locked/></memoryBacking>";

    /// The code and message for a domain of four vCPUs, or what is written into it.
    fn outcome(xml: &str, policy: &[(&str, &str)]) -> Result<String> {
        let text = format!("<domain><vcpu>4</vcpu>{xml}</domain>");
        let domain = Domain::parse(&text)?;
        let pairs = [("policy", "dedicated"), ("realtime", "yes")].into_iter().chain(policy.iter().copied());
        let request = Request::new(4, Policy::from_attributes(pairs)?);
        let out = rewrite(&domain, &request)?.apply(&text);
        // What is written is what was missing.
        let after = Domain::parse(&out)?;
        check(&after, &request)?;
        assert!(rewrite(&after, &request)?.is_empty());
        assert_eq!(check(&domain, &request).is_ok(), out == text);
        check(&domain, &request).map(|()| out)
    }

    fn sched(attributes: &str) -> String {
        format!("<cputune><vcpusched {attributes}/></cputune>")
    }

    #[test]
    fn everything_there() {
        for xml in [
            sched("vcpus='0-3' scheduler='fifo' priority='1'") + LOCKED,
            "<memoryBacking/>".to_owned() + LOCKED + "<cputune/>" + &sched("vcpus='0-3' scheduler='rr' priority='99'"),
            sched("vcpus='0-2' scheduler='fifo' priority='1'")
                + &sched("vcpus='3' scheduler='rr' priority='2'")
                + LOCKED,
            // On CPUs that are nobody else's.
            sched("vcpus='0-3' scheduler='rr' priority='1'")
                + LOCKED
                + "<cputune><emulatorsched scheduler='fifo'/></cputune>",
        ] {
            outcome(&xml, &[]).unwrap();
        }
        outcome(&(sched("vcpus='0,2' scheduler='fifo' priority='1'") + LOCKED), &[("dedicated-vcpus", "0,2")]).unwrap();
        // Another policy has no say in it.
        let text = format!("<domain>{}</domain>", sched("vcpus='9' scheduler='junk'"));
        let ordinary = Request::new(4, Policy::from_attributes([("policy", "dedicated")]).unwrap());
        assert!(check(&Domain::parse(&text).unwrap(), &ordinary).is_ok());
    }

    #[test]
    fn what_is_missing_is_named() {
        let scheduler = "lacks <vcpusched vcpus=\"0-3\" scheduler=\"fifo\" priority=\"1\"/> in <cputune>";
        for (xml, messages) in [
            (String::new(), [scheduler, "and <locked/> in <memoryBacking>"]),
            (LOCKED.to_owned(), [scheduler, ""]),
            (sched("vcpus='0-3' scheduler='fifo' priority='1'"), ["lacks <locked/> in <memoryBacking>", ""]),
            (sched("vcpus='1-2' scheduler='rr' priority='1'") + LOCKED, ["lacks <vcpusched vcpus=\"0,3\"", ""]),
        ] {
            let error = outcome(&xml, &[]).unwrap_err();
            assert_eq!(error.code, Code::PolicyInvalid);
            assert!(messages.iter().all(|part| error.message.contains(part)), "{xml}: {}", error.message);
            assert!(error.hint.unwrap().contains("transform"));
        }
    }

    #[test]
    fn what_contradicts_is_refused() {
        let emulator = "<cputune><emulatorsched scheduler='rr' priority='1'/></cputune>";
        let iothreads = "<cputune><iothreadsched iothreads='1' scheduler='rr' priority='1'/></cputune>";
        let some = ("dedicated-vcpus", "0-1");
        for (xml, policy, code, part) in [
            (sched("vcpus='0' scheduler='batch'"), &[][..], Code::PolicyInvalid, "vCPUs 0 a scheduler that is not"),
            (sched("vcpus='1-2' scheduler='fifo' priority='1'"), &[some], Code::PolicyInvalid, "vCPUs 2 a realtime"),
            (emulator.to_owned(), &[some], Code::PolicyInvalid, "<emulatorsched>"),
            (iothreads.to_owned(), &[some], Code::PolicyInvalid, "<iothreadsched>"),
            (sched("vcpus='4' scheduler='fifo'"), &[], Code::DomainInvalid, "vCPU 4"),
            (sched("vcpus='9999' scheduler='fifo'"), &[], Code::DomainInvalid, "not a list"),
            (sched("vcpus='' scheduler='fifo'"), &[], Code::DomainInvalid, "not a list"),
            (sched("scheduler='fifo'"), &[], Code::DomainInvalid, "no vcpus"),
            (sched("vcpus='0-1' scheduler='rr'").repeat(2), &[], Code::DomainInvalid, "two <vcpusched>"),
        ] {
            let error = outcome(&xml, policy).unwrap_err();
            assert_eq!(error.code, code, "{xml}");
            assert!(error.message.contains(part), "{xml}: {}", error.message);
        }
        // Nobody else is there.
        let isolated = [some, ("emulator", "isolate"), ("iothreads", "isolate")];
        let error = outcome(&format!("{emulator}{iothreads}{LOCKED}"), &isolated).unwrap_err();
        assert!(error.message.contains("lacks <vcpusched vcpus=\"0-1\""), "{}", error.message);
        // A scheduler that takes nothing from anybody is the owner's choice.
        let idle = sched("vcpus='3' scheduler='idle'") + &sched("vcpus='0-1' scheduler='rr' priority='1'") + LOCKED;
        outcome(&idle, &[some]).unwrap();
    }
}
