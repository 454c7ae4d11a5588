//! What each CPU is used for at this moment, and where it sits: package, node, last-level cache, core. Pure.
//!
//! Both drawings are made from a [`Map`], so that they cannot disagree. It never decides anything: who may have a CPU is
//! for the allocator to say.

use std::collections::{BTreeMap, BTreeSet};

use super::role::Role;
use crate::alloc::pools::Pools;
use crate::cli::lease::state;
use crate::cpuset::{CpuId, CpuSet};
use crate::host::{CoreClass, Cpu, Topology};
use crate::lock::leases::{Holds, Lease, Leases};
use crate::uuid::DomainUuid;

/// A lease with its mark on the map: letters for dedicated ones, digits for CPUs pinned by hand.
pub(super) struct Holder<'l> {
    pub(super) lease: &'l Lease,
    pub(super) mark: String,
    /// How far it has come.
    pub(super) state: &'static str,
    /// Which colour: its number.
    pub(super) tint: usize,
    vcpus: CpuSet,
    cpus: CpuSet,
}

/// One hardware thread.
pub(super) struct Cell<'l> {
    pub(super) cpu: CpuId,
    pub(super) role: Role,
    pub(super) mark: String,
    /// The lease that holds it, and its colour.
    pub(super) lease: Option<(&'l Lease, usize)>,
}

/// One core's online threads, or a CPU whose core is not known.
pub(super) struct Core<'l> {
    pub(super) cells: Vec<Cell<'l>>,
    /// `[` and `]`; round ones where the siblings are unknown, none around what is offline.
    pub(super) brackets: (char, char),
}

/// The cores of one last-level cache, on hybrid machines those of one class.
pub(super) struct Cache<'l> {
    pub(super) title: String,
    pub(super) cores: Vec<Core<'l>>,
}

/// The caches of one node of one package.
pub(super) struct Section<'l> {
    pub(super) title: String,
    pub(super) caches: Vec<Cache<'l>>,
}

/// The whole host.
pub(super) struct Map<'l> {
    pub(super) sections: Vec<Section<'l>>,
    /// In the order of their marks.
    pub(super) holders: Vec<Holder<'l>>,
    /// How many characters each mark has.
    pub(super) mark_width: usize,
}

/// Where a core sits. More than one value where its threads differ (a POWER core may have two caches), `None` where the
/// machine does not say; what is offline comes last.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    offline: bool,
    package: BTreeSet<Option<u16>>,
    node: BTreeSet<Option<u16>>,
    cache: BTreeSet<Option<u16>>,
    class: Option<CoreClass>,
}

impl<'l> Map<'l> {
    /// The map of a host with these leases, of which some are only `planned`; `pools` are those beside all of them.
    pub(super) fn new(topology: &Topology, leases: &'l Leases, planned: &[DomainUuid], pools: &Pools) -> Map<'l> {
        let (holders, mark_width) = holders(leases, planned);
        let mut places: BTreeMap<Place, Vec<Core<'l>>> = BTreeMap::new();
        for cpu in topology.cpus() {
            let lone = CpuSet::from_iter([cpu.cpu]);
            let siblings = topology.siblings(cpu.cpu);
            if siblings.is_some_and(|core| core.first() != Some(cpu.cpu)) {
                continue;
            }
            let threads = siblings.unwrap_or(&lone);
            let threads: Vec<&Cpu> = threads.iter().filter_map(|cpu| topology.cpu(cpu)).collect();
            let core = Core {
                cells: threads.iter().map(|cpu| cell(cpu, topology, &holders, pools, mark_width)).collect(),
                brackets: match (cpu.online, siblings) {
                    (false, _) => (' ', ' '),
                    (true, None) => ('(', ')'),
                    (true, Some(_)) => ('[', ']'),
                },
            };
            places.entry(Place::of(cpu, &threads)).or_default().push(core);
        }
        let mut sections: Vec<Section<'l>> = Vec::new();
        for (place, cores) in places {
            let title = place.section();
            let cpus: CpuSet = cores.iter().flat_map(|core| &core.cells).map(|cell| cell.cpu).collect();
            let cache = Cache { title: place.cache(&cpus), cores };
            match sections.last_mut().filter(|section| section.title == title) {
                Some(section) => section.caches.push(cache),
                None => sections.push(Section { title, caches: vec![cache] }),
            }
        }
        let first = |cache: &Cache<'_>| cache.cores.first().and_then(|core| core.cells.first()).map(|cell| cell.cpu);
        sections.iter_mut().for_each(|section| section.caches.sort_by_key(first));
        Map { sections, holders, mark_width }
    }

    /// Every core, as drawn.
    pub(super) fn cores(&self) -> impl Iterator<Item = &Core<'l>> {
        self.sections.iter().flat_map(|section| &section.caches).flat_map(|cache| &cache.cores)
    }

    /// Every thread, as drawn.
    pub(super) fn cells(&self) -> impl Iterator<Item = &Cell<'l>> {
        self.cores().flat_map(|core| &core.cells)
    }

    /// The roles in use, and how many CPUs have each.
    pub(super) fn roles(&self) -> BTreeMap<Role, usize> {
        let mut roles = BTreeMap::new();
        self.cells().for_each(|cell| *roles.entry(cell.role).or_default() += 1);
        roles
    }

    /// The most cores, a power of two, that fit in a row of `most` units, each of which is `width` of its threads wide.
    pub(super) fn cores_per_row(&self, most: usize, width: impl Fn(usize) -> usize) -> usize {
        let widest = self.cores().map(|core| width(core.cells.len())).max().unwrap_or(1);
        let mut cores = 1;
        while cores < 16 && cores * 2 * widest <= most {
            cores *= 2;
        }
        cores
    }
}

impl Holder<'_> {
    /// Its CPUs by what they are for: `2,10; parked 3,11; extra 4,12`.
    pub(super) fn cpus(&self) -> String {
        let Some(plan) = self.lease.plan() else { return self.cpus.to_string() };
        let mut text = self.vcpus.to_string();
        for (title, cpus) in [("parked", &plan.parked), ("extra", &plan.extra)] {
            if !cpus.is_empty() {
                text += &format!("; {title} {cpus}");
            }
        }
        text
    }
}

impl Place {
    fn of(cpu: &Cpu, threads: &[&Cpu]) -> Place {
        let each =
            |of: &dyn Fn(&Cpu) -> Option<u16>| threads.iter().map(|cpu| of(cpu).filter(|_| cpu.online)).collect();
        Place {
            offline: !cpu.online,
            package: each(&|cpu| cpu.package),
            node: each(&|cpu| cpu.node.map(|node| node.0)),
            cache: each(&|cpu| cpu.llc.map(|llc| llc.0)),
            class: cpu.class.filter(|_| cpu.online),
        }
    }

    fn section(&self) -> String {
        if self.offline {
            return "Offline".to_owned();
        }
        let package = known(&self.package).unwrap_or_else(|| "unknown".to_owned());
        match known(&self.node) {
            Some(node) => format!("Package {package}, node {node}"),
            None => format!("Package {package}"),
        }
    }

    fn cache(&self, cpus: &CpuSet) -> String {
        if self.offline {
            return format!("CPUs {cpus}");
        }
        let cache = known(&self.cache).unwrap_or_else(|| "unknown".to_owned());
        match self.class {
            Some(CoreClass::Performance) => format!("LLC {cache}, performance: {cpus}"),
            Some(CoreClass::Efficiency) => format!("LLC {cache}, efficiency: {cpus}"),
            None => format!("LLC {cache}: {cpus}"),
        }
    }
}

/// The values, `None` if nothing is known.
fn known(values: &BTreeSet<Option<u16>>) -> Option<String> {
    values.iter().any(Option::is_some).then(|| {
        let each = values.iter().map(|value| value.map_or_else(|| "-".to_owned(), |value| value.to_string()));
        each.collect::<Vec<_>>().join(",")
    })
}

/// The leases in the order of their lowest CPUs, with marks of the same width.
fn holders<'l>(leases: &'l Leases, planned: &[DomainUuid]) -> (Vec<Holder<'l>>, usize) {
    let of = |dedicated: bool| {
        let mut some: Vec<&Lease> =
            leases.iter().filter(|lease| lease.plan().is_some() == dedicated && !lease.cpus().is_empty()).collect();
        some.sort_by_key(|lease| (lease.cpus().first(), lease.uuid));
        some
    };
    let (dedicated, by_hand) = (of(true), of(false));
    let mut width = 1;
    while 26usize.saturating_pow(width) < dedicated.len() || 10usize.saturating_pow(width) <= by_hand.len() {
        width += 1;
    }
    let letters = |mut number: usize| {
        let digits = (0..width).map(|_| {
            let letter = (b'A'..=b'Z').nth(number % 26).unwrap_or(b'?');
            number /= 26;
            char::from(letter)
        });
        digits.collect::<Vec<_>>().into_iter().rev().collect::<String>()
    };
    let width = usize::try_from(width).unwrap_or(1);
    let marks = (0..dedicated.len()).map(letters).chain((1..=by_hand.len()).map(|number| format!("{number:0width$}")));
    let all = dedicated.iter().chain(&by_hand).zip(marks).zip(0..).map(|((&lease, mark), tint)| Holder {
        lease,
        mark,
        state: if planned.contains(&lease.uuid) { "planned" } else { state(lease) },
        tint,
        vcpus: lease.plan().map(|plan| plan.vcpu_cpus()).unwrap_or_default(),
        cpus: lease.cpus(),
    });
    (all.collect(), width)
}

fn cell<'l>(cpu: &Cpu, topology: &Topology, holders: &[Holder<'l>], pools: &Pools, width: usize) -> Cell<'l> {
    let mut owners = holders.iter().filter_map(|holder| Some((holder, held_as(holder, cpu.cpu, topology)?)));
    let (holder, role) = match (owners.next(), owners.next()) {
        (Some(_), Some(_)) => (None, Role::Several),
        (Some((holder, role)), None) => (Some(holder), role),
        (None, _) => (None, unheld(cpu.cpu, pools)),
    };
    let role = if cpu.online { role } else { Role::Offline };
    let mark = match (role, holder) {
        (Role::Vcpu | Role::Static, Some(holder)) => holder.mark.clone(),
        (Role::Parked, Some(holder)) => holder.mark.to_ascii_lowercase(),
        _ => role.symbol().to_string().repeat(width),
    };
    Cell { cpu: cpu.cpu, role, mark, lease: holder.map(|holder| (holder.lease, holder.tint)) }
}

/// What a lease has a CPU for.
fn held_as(holder: &Holder<'_>, cpu: CpuId, topology: &Topology) -> Option<Role> {
    match &holder.lease.holds {
        // Who is degraded and holds CPUs all the same is pinned to them by its XML.
        Holds::Static(_) | Holds::Degraded { .. } => holder.cpus.contains(cpu).then_some(Role::Static),
        Holds::Dedicated(_) if holder.vcpus.contains(cpu) => Some(Role::Vcpu),
        Holds::Dedicated(plan) if plan.extra.contains(cpu) => Some(Role::Extra),
        Holds::Dedicated(plan) => {
            // A sibling that came online later is part of the core all the same.
            let later = plan.whole && topology.siblings(cpu).is_some_and(|core| !core.is_disjoint(&holder.vcpus));
            (plan.parked.contains(cpu) || later).then_some(Role::Parked)
        }
    }
}

fn unheld(cpu: CpuId, pools: &Pools) -> Role {
    let pools = [
        (&pools.leased, Role::Occupied),
        (&pools.withheld, Role::Withheld),
        (&pools.free, Role::Free),
        (&pools.housekeeping, Role::Housekeeping),
        (&pools.isolated, Role::Isolated),
    ];
    pools.iter().find(|(pool, _)| pool.contains(cpu)).map_or(Role::OutOfReach, |&(_, role)| role)
}
