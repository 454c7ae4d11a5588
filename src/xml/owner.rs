//! What a command changes in a document for the domain's owner: the policy element, and the number of vCPUs. Knows nothing
//! of what a policy means.

use roxmltree::Node;

use super::layout::{Element, ROOT};
use super::pin::Changes;
use super::policy::NAMESPACE;
use super::{Domain, former, invalid, read};
use crate::error::Result;

/// The document with a policy element of these attributes, instead of the one it may have.
///
/// # Errors
/// [`crate::error::Code::DomainInvalid`].
pub fn with_policy(text: &str, attributes: Vec<(&'static str, String)>) -> Result<String> {
    let domain = Domain::parse(text)?;
    let all = [("xmlns:pin", NAMESPACE.to_owned())].into_iter().chain(attributes).collect();
    let element = Element::new("pin:cpu", all);
    let mut changes = Changes::of(&domain);
    match policy(&domain) {
        Some(old) => changes.replace(old, &element),
        None => changes.insert_below(&domain, "metadata", &[], vec![element]),
    }
    Ok(changes.into_edits()?.apply(text))
}

/// The document without a policy element; the very text if it has none.
///
/// # Errors
/// [`crate::error::Code::DomainInvalid`].
pub fn without_policy(text: &str) -> Result<String> {
    let domain = Domain::parse(text)?;
    let mut changes = Changes::of(&domain);
    policy(&domain).into_iter().for_each(|policy| former::take_out(&domain, policy, &mut changes));
    Ok(changes.into_edits()?.apply(text))
}

fn policy<'d, 't>(domain: &'d Domain<'t>) -> Option<Node<'d, 't>> {
    let ours = |node: &Node<'_, '_>| node.is_element() && node.tag_name().namespace() == Some(NAMESPACE);
    domain.first(&["metadata"])?.children().find(ours)
}

/// The document with so many vCPUs, all plugged in, and as many cores more or fewer in the topology it has.
///
/// # Errors
/// [`crate::error::Code::DomainInvalid`]: its topology has no room for that count, or `<vcpus>` names vCPUs one by one.
pub fn with_vcpus(text: &str, count: u16) -> Result<String> {
    let domain = Domain::parse(text)?;
    if domain.first(&["vcpus"]).is_some() {
        return Err(invalid("its XML says of each vCPU whether it is plugged in (<vcpus>)")
            .with_hint("take <vcpus> out with `virsh edit`, then try again"));
    }
    let mut changes = Changes::of(&domain);
    let old = domain.first(&["vcpu"]);
    let kept = ["placement", "cpuset"].into_iter();
    let kept = kept.filter_map(|name| Some((name, old?.attribute(name)?.to_owned()))).collect();
    let vcpu = Element::new("vcpu", kept).with_text(count.to_string());
    match old {
        Some(old) => changes.replace(old, &vcpu),
        None => changes.insert_in_order(domain.root(), ROOT, vcpu),
    }
    if let (Some(element), Some(guest)) = (domain.first(&["cpu", "topology"]), read::topology(&domain)?) {
        let rest = [guest.sockets, guest.dies, guest.threads].iter().try_fold(1u16, |all, part| all.checked_mul(*part));
        let cores = rest.filter(|rest| count % rest == 0).map(|rest| count / rest).filter(|cores| *cores > 0);
        let cores = cores.ok_or_else(|| {
            invalid(format!("its topology of {guest} cannot be made of {count} vCPUs by another number of cores"))
                .with_hint("choose another number, or take <topology> out with `virsh edit`")
        })?;
        if cores != guest.cores {
            changes.set(element, "cores", &cores.to_string(), None);
            // Counted into the cores.
            if element.has_attribute("clusters") {
                changes.set(element, "clusters", "1", None);
            }
        }
    }
    Ok(changes.into_edits()?.apply(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_come_and_go() {
        let text = "<domain>\n  <name>a</name>\n  <metadata>\n    <x:y xmlns:x='u'/>\n  </metadata>\n</domain>";
        let with = with_policy(text, vec![("policy", "dedicated".to_owned()), ("nodes", "0".to_owned())]).unwrap();
        let element = "<pin:cpu xmlns:pin='urn:virt-pin:domain:1' policy='dedicated' nodes='0'/>";
        assert!(with.contains(&format!("<metadata>\n    {element}\n    <x:y")), "{with}");
        let other = with_policy(&with, vec![("policy", "shared".to_owned())]).unwrap();
        assert_eq!(other, with.replace("dedicated' nodes='0'", "shared'"));
        assert_eq!(without_policy(&with).unwrap(), text);
        assert_eq!(without_policy(text).unwrap(), text);
        let made = with_policy("<domain><name>a</name><memory>1</memory></domain>", vec![]).unwrap();
        assert_eq!(
            made,
            "<domain><name>a</name><metadata><pin:cpu xmlns:pin='urn:virt-pin:domain:1'/></metadata><memory>1</memory></domain>"
        );
    }

    #[test]
    fn vcpus_and_cores_change_together() {
        let vcpus = |body: &str, count| {
            with_vcpus(&format!("<domain>{body}</domain>"), count)
                .map(|out| out.trim_start_matches("<domain>").trim_end_matches("</domain>").to_owned())
        };
        assert_eq!(vcpus("<vcpu current='1'>2</vcpu>", 4).unwrap(), "<vcpu>4</vcpu>");
        assert_eq!(vcpus("", 4).unwrap(), "<vcpu>4</vcpu>");
        let of = |count: u16, cores: u16| {
            format!(
                "<vcpu placement='static'>{count}</vcpu><cpu><topology sockets='1' cores='{cores}' threads='2'/></cpu>"
            )
        };
        assert_eq!(vcpus(&of(4, 2), 8).unwrap(), of(8, 4));
        assert_eq!(vcpus(&of(4, 2), 4).unwrap(), of(4, 2));
        assert!(vcpus(&of(4, 2), 3).unwrap_err().message.contains("2 cores of 2 threads cannot"));
        assert!(vcpus("<vcpu>2</vcpu><vcpus/>", 3).unwrap_err().message.contains("<vcpus>"));
    }
}
