//! The policy element in `<metadata>`, as names and values; what they mean is `alloc::policy`'s business.

use super::{Domain, former, is, string};
use crate::error::{Code, Error, Result};

/// The namespace of our elements. A new meaning gets a new number.
pub(super) const NAMESPACE: &str = "urn:virt-pin:domain:1";
/// What all our namespaces begin with: a policy for a later version must not pass for none.
const FAMILY: &str = "urn:virt-pin:";

/// The attributes of `<cpu>` in our namespace directly in the root's `<metadata>`, in document order; `None` where there
/// is no such element.
///
/// # Errors
/// [`Code::PolicyInvalid`]: two of them, one that libvirt would drop, content inside it, an attribute with a prefix, or
/// another element in our namespace. A misspelled policy must never pass for no policy.
pub(super) fn attributes(domain: &Domain<'_>) -> Result<Option<Vec<(String, String)>>> {
    let refuse = |message: String| {
        Err(Error::new(Code::PolicyInvalid, message).with_hint(format!(
            "write one <pin:cpu xmlns:pin=\"{NAMESPACE}\" policy=\"dedicated\"/> into <metadata>, or have `virt-pin enable DOMAIN` do so"
        )))
    };
    let mut found = None;
    let metadata = domain.root().children().filter(|child| is(*child, "metadata"));
    for (index, metadata) in metadata.enumerate() {
        for element in metadata.children() {
            let namespace = element.tag_name().namespace().unwrap_or_default();
            if !namespace.starts_with(FAMILY) || namespace == former::NAMESPACE {
                continue;
            }
            if namespace != NAMESPACE {
                return refuse(format!("the policy is in namespace {namespace}; this version knows {NAMESPACE}"));
            }
            let name = element.tag_name().name();
            if name != "cpu" {
                return refuse(format!("<metadata> has an unknown element <{name}> in namespace {NAMESPACE}"));
            }
            if index > 0 {
                return refuse("the policy is in a second <metadata>, which libvirt drops".to_owned());
            }
            if found.is_some() {
                return refuse("<metadata> has two policy elements, of which libvirt drops one".to_owned());
            }
            if element.children().any(|child| child.is_element()) || !string(element).trim().is_empty() {
                return refuse("the policy element has content; only attributes are known".to_owned());
            }
            if let Some(attribute) = element.attributes().find(|attribute| attribute.namespace().is_some()) {
                return refuse(format!("policy attribute \"{}\" has a namespace prefix", attribute.name()));
            }
            let pair =
                |attribute: roxmltree::Attribute<'_, '_>| (attribute.name().to_owned(), attribute.value().to_owned());
            found = Some(element.attributes().map(pair).collect());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(metadata: &str) -> Result<Option<Vec<(String, String)>>> {
        let text = format!("<domain xmlns:pin='{NAMESPACE}'>{metadata}</domain>");
        attributes(&Domain::parse(&text).unwrap())
    }

    #[test]
    fn attributes_come_in_order_and_decoded() {
        let pairs =
            read("<metadata><x:y xmlns:x='u'/><p:cpu xmlns:p='urn:virt-pin:domain:1' b='1&amp;' a=''/></metadata>");
        assert_eq!(pairs.unwrap().unwrap(), [("b".to_owned(), "1&".to_owned()), ("a".to_owned(), String::new())]);
        assert_eq!(read("<metadata><pin:cpu> <!-- c --> </pin:cpu></metadata>").unwrap(), Some(vec![]));
    }

    #[test]
    fn only_ours_and_only_there() {
        for text in
            ["", "<metadata/>", "<metadata><cpu policy='dedicated'/></metadata>", "<pin:cpu policy='dedicated'/>"]
        {
            assert_eq!(read(text).unwrap(), None, "{text}");
        }
        assert_eq!(read("<metadata><x:a xmlns:x='u'><pin:cpu/></x:a></metadata>").unwrap(), None);
    }

    #[test]
    fn what_could_be_overlooked_is_refused() {
        for (text, part) in [
            ("<metadata><pin:cpu/><pin:cpu/></metadata>", "two policy"),
            ("<metadata/><metadata><pin:cpu/></metadata>", "second <metadata>"),
            ("<metadata><x:cpu xmlns:x='urn:virt-pin:domain:2'/></metadata>", "namespace urn:virt-pin:domain:2"),
            ("<metadata><pin:cpus/></metadata>", "unknown element <cpus>"),
            ("<metadata><pin:cpu><a/></pin:cpu></metadata>", "content"),
            ("<metadata><pin:cpu>dedicated</pin:cpu></metadata>", "content"),
            ("<metadata><pin:cpu pin:policy='dedicated'/></metadata>", "prefix"),
        ] {
            let error = read(text).unwrap_err();
            assert_eq!(error.code, Code::PolicyInvalid);
            assert!(error.message.contains(part), "{text}: {}", error.message);
        }
    }
}
