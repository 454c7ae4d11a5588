//! Do the caches that the document allocates (`<cachetune>`, `<memorytune>`: resctrl) belong to the CPUs of its plan?
//!
//! They are named by the host's cache ids, which are as much this host's as CPU numbers. So where XML is rewritten they follow
//! the vCPUs, and where libvirt takes none back (a start) other caches than those of the plan are refused. Only ids are
//! changed, and only where there is one way to do it: as many caches as the vCPUs now use, all allocated alike.

use std::collections::{BTreeMap, BTreeSet};

use roxmltree::Node;

use super::edit::EditList;
use super::pin::Changes;
use super::{Domain, invalid, number_attribute};
use crate::alloc::plan::Plan;
use crate::cpuset::{CpuId, CpuSet};
use crate::error::{Code, Error, Result};

/// The id of the cache of a level that a CPU uses.
pub type CacheIds = BTreeMap<(u32, CpuId), u32>;

/// Memory bandwidth is that of last-level caches (`<memorytune><node id>`): resctrl numbers its domains alike.
const BANDWIDTH_LEVEL: u32 = 3;

/// The levels of the caches that the document allocates; empty for nearly every domain.
///
/// # Errors
/// [`Code::DomainInvalid`].
pub fn levels(domain: &Domain<'_>) -> Result<BTreeSet<u32>> {
    Ok(groups(domain)?.into_iter().map(|group| group.level).collect())
}

/// The edits that name the caches of the plan's CPUs.
///
/// # Errors
/// [`Code::StaleCaches`] where that can be done in no way, or in several; [`Code::DomainInvalid`].
pub fn rewrite(domain: &Domain<'_>, plan: &Plan, ids: &CacheIds) -> Result<EditList> {
    let mut changes = Changes::of(domain);
    for group in groups(domain)? {
        let wanted = group.wanted(plan, ids)?;
        let named: BTreeSet<u32> = group.members.keys().copied().collect();
        if wanted.is_subset(&named) {
            continue;
        }
        let kinds: BTreeSet<_> = group.members.values().map(|member| but_for_id(*member)).collect();
        if wanted.len() != named.len() || kinds.len() != 1 {
            return Err(group.stale(&wanted));
        }
        for (member, id) in group.members.values().zip(wanted) {
            changes.set(*member, "id", &id.to_string(), None);
        }
    }
    changes.into_edits()
}

/// Whether a start, at which nothing can be rewritten, allocates caches of the plan's CPUs.
///
/// # Errors
/// As [`rewrite`], and [`Code::StaleCaches`] where it would change anything.
pub fn check(domain: &Domain<'_>, plan: &Plan, ids: &CacheIds) -> Result<()> {
    for group in groups(domain)? {
        let wanted = group.wanted(plan, ids)?;
        if !wanted.iter().all(|id| group.members.contains_key(id)) {
            return Err(group.stale(&wanted));
        }
    }
    Ok(())
}

/// The caches of one level that one element gives to some vCPUs.
struct Group<'d, 't> {
    name: &'static str,
    vcpus: CpuSet,
    level: u32,
    members: BTreeMap<u32, Node<'d, 't>>,
}

impl Group<'_, '_> {
    /// The caches that its vCPUs use by this plan.
    fn wanted(&self, plan: &Plan, ids: &CacheIds) -> Result<BTreeSet<u32>> {
        let places = plan.vcpu_places().filter(|(vcpu, _)| self.vcpus.contains(CpuId(*vcpu)));
        let cpus = places.fold(CpuSet::new(), |all, (_, cpus)| all.union(&cpus));
        let id = |cpu| {
            ids.get(&(self.level, cpu)).copied().ok_or_else(|| {
                Error::new(
                    Code::StaleCaches,
                    format!(
                        "its <{}> allocates caches of level {}, and the host does not say which of them CPU {cpu} uses",
                        self.name, self.level
                    ),
                )
                .with_hint("take it out of <cputune>: without the host's numbers nobody can tell whose cache it is")
            })
        };
        cpus.iter().map(id).collect()
    }

    fn stale(&self, wanted: &BTreeSet<u32>) -> Error {
        let list = |ids: &mut dyn Iterator<Item = &u32>| ids.map(u32::to_string).collect::<Vec<_>>().join(",");
        Error::new(
            Code::StaleCaches,
            format!(
                "its <{}> for vCPUs {} names level {} caches {}, but these vCPUs get CPUs that use {}",
                self.name,
                self.vcpus,
                self.level,
                list(&mut self.members.keys()),
                list(&mut wanted.iter())
            ),
        )
        .with_hint(
            "`virt-pin transform` prints the document with the right ids where there are as many, all allocated alike; otherwise \
             name every cache of the host, or choose the CPUs with cpus or nodes in the policy",
        )
    }
}

fn groups<'d, 't>(domain: &'d Domain<'t>) -> Result<Vec<Group<'d, 't>>> {
    let mut groups = Vec::new();
    for (name, child) in [("cachetune", "cache"), ("memorytune", "node")] {
        for element in domain.all(&["cputune", name]) {
            let vcpus = element.attribute("vcpus").unwrap_or_default();
            let vcpus = CpuSet::parse_libvirt_cpuset(vcpus)
                .map_err(|error| invalid(format!("<{name} vcpus=\"{vcpus}\"> is no list of vCPUs: {error}")))?;
            let mut levels: BTreeMap<u32, BTreeMap<u32, Node<'d, 't>>> = BTreeMap::new();
            for member in element.children().filter(|node| node.has_tag_name(child)) {
                let level = if child == "cache" { number_attribute(member, "level")? } else { BANDWIDTH_LEVEL };
                levels.entry(level).or_default().insert(number_attribute(member, "id")?, member);
            }
            let of_level = |(level, members)| Group { name, vcpus: vcpus.clone(), level, members };
            groups.extend(levels.into_iter().map(of_level));
        }
    }
    Ok(groups)
}

/// How much of a cache is allocated, whichever it is.
fn but_for_id<'d>(member: Node<'d, '_>) -> BTreeSet<(&'d str, &'d str)> {
    let attributes = member.attributes().filter(|attribute| attribute.name() != "id");
    attributes.map(|attribute| (attribute.name(), attribute.value())).collect()
}
