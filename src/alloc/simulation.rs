//! A host and the domains that are defined, start and stop on it, without any VM: what `virt-pin simulate` runs. Pure.
//!
//! Every start asks the same allocator as a real one, beside the plans of the domains that run and the places of those
//! that are defined.

use std::collections::BTreeMap;

use super::demand::{Definition, Demand, Reserve};
use super::plan::Plan;
use super::policy::OtherThreads;
use super::pools::{Pools, pools};
use super::quality::Advice;
use super::refusal::Refusal;
use super::repack::{Extent, Move, Mover};
use super::request::Request;
use super::{Supply, quality, repack};
use crate::cpuset::CpuSet;
use crate::error::Code;
use crate::host::Topology;

/// The host and who runs on it.
#[derive(Clone, Debug)]
pub struct Simulation {
    host: Topology,
    pinnable: CpuSet,
    running: BTreeMap<String, Plan>,
    /// What those that run asked for.
    requests: BTreeMap<String, Request>,
    reserve: Reserve,
    defined: BTreeMap<String, Definition<String>>,
    /// Of the host and the definitions as they are; `None` when they have changed since.
    demand: Option<Demand<String>>,
}

impl Simulation {
    /// A host on which nobody runs or is defined. Where no CPU is left for housekeeping, emulator and I/O threads that ask for it are
    /// taken to run elsewhere: their place is empty in the plans.
    pub fn new(host: Topology, pinnable: CpuSet) -> Simulation {
        let (running, requests, defined) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Simulation { host, pinnable, running, requests, reserve: Reserve::default(), defined, demand: None }
    }

    /// The same, with what the places of autostart domains mean to others.
    #[must_use]
    pub fn with_reserve(self, reserve: Reserve) -> Simulation {
        Simulation { reserve, ..self }
    }

    /// The host as it is now.
    pub fn host(&self) -> &Topology {
        &self.host
    }

    /// Who runs, and where.
    pub fn running(&self) -> &BTreeMap<String, Plan> {
        &self.running
    }

    /// The pinnable CPUs that nobody has.
    pub fn free(&self) -> CpuSet {
        let taken = self.running.values().fold(CpuSet::new(), |taken, plan| taken.union(&plan.exclusive()));
        self.pinnable.intersection(self.host.online()).difference(&taken)
    }

    /// What its CPUs are for.
    pub fn pools(&self) -> Pools {
        self.with_supply(None, |supply| pools(supply, self.running.values()))
    }

    /// A dedicated domain is defined, or defined anew.
    pub fn define(&mut self, id: &str, autostart: bool, request: Request) {
        let definition = Definition { key: id.to_owned(), name: id.to_owned(), autostart, request };
        self.defined.insert(id.to_owned(), definition);
        self.demand = None;
    }

    /// A domain's definition goes, whether it runs or not; whether there was one.
    pub fn undefine(&mut self, id: &str) -> bool {
        self.demand = None;
        self.defined.remove(id).is_some()
    }

    /// A domain starts, asking for this, whatever its definition says.
    ///
    /// # Errors
    /// The allocator's refusal; [`Code::StateConflict`] for a domain that runs already. Nothing changes then.
    pub fn start(&mut self, id: &str, request: &Request) -> Result<&Plan, Refusal> {
        if self.running.contains_key(id) {
            let hint = Some("stop it first".to_owned());
            return Err(Refusal { hint, ..Refusal::new(Code::StateConflict, "it runs already") });
        }
        let (taken, housekeeping) = self.beside(Some(id));
        let supply =
            Supply { topology: &self.host, pinnable: &self.pinnable, taken: &taken, housekeeping: &housekeeping };
        let demand = self.demand.get_or_insert_with(|| {
            let definitions = self.defined.values().cloned();
            let seated = definitions.map(|one| Definition { request: seated(&one.request, &housekeeping), ..one });
            Demand::new(&supply, seated.collect())
        });
        let (asked, key) = (seated(request, &housekeeping), id.to_owned());
        let settled = demand.settle(&supply, &|other| self.running.contains_key(other), Some(&key));
        let mut plan = settled.plan(&supply, &asked, self.reserve, &mut |_| {})?;
        if asked.policy.emulator != request.policy.emulator {
            plan.emulator = CpuSet::new();
        }
        if asked.policy.iothreads != request.policy.iothreads {
            plan.iothreads = CpuSet::new();
        }
        self.requests.insert(key.clone(), request.clone());
        Ok(self.running.entry(key).or_insert(plan))
    }

    /// A domain stops; the plan it had, if it ran.
    pub fn stop(&mut self, id: &str) -> Option<Plan> {
        self.requests.remove(id);
        self.running.remove(id)
    }

    /// What could be better about the plan of a domain that runs.
    pub fn advise(&self, id: &str) -> Option<Advice> {
        let (request, plan) = self.requests.get(id).zip(self.running.get(id))?;
        self.with_supply(Some(id), |supply| quality::advise(supply, &seated(request, supply.housekeeping), plan))
    }

    /// The moves of others after which the request has a plan, or one spread no wider than `goal`; `None` = none are known.
    pub fn moves(&self, id: &str, request: &Request, goal: Option<Extent>) -> Option<Vec<Move<String>>> {
        self.with_supply(Some(id), |supply| {
            let others = self.requests.iter().filter(|(other, _)| *other != id);
            let movers = others.filter_map(|(other, request)| {
                let cpus = self.running.get(other)?.exclusive();
                Some(Mover { id: other.clone(), request: seated(request, supply.housekeeping), cpus, live: None })
            });
            // Nobody is told to move to where an autostart domain will be.
            let (runs, key) = (|other: &String| self.running.contains_key(other), id.to_owned());
            let settled = self.demand.as_ref().map(|demand| demand.settle(supply, &runs, Some(&key)));
            let taken = supply.taken.union(&settled.map(|settled| settled.reserved()).unwrap_or_default());
            let asked = seated(request, supply.housekeeping);
            repack::moves(&Supply { taken: &taken, ..*supply }, &asked, &movers.collect::<Vec<_>>(), goal)
        })
    }

    fn with_supply<T>(&self, id: Option<&str>, with: impl FnOnce(&Supply<'_>) -> T) -> T {
        let (taken, housekeeping) = self.beside(id);
        with(&Supply { topology: &self.host, pinnable: &self.pinnable, taken: &taken, housekeeping: &housekeeping })
    }

    /// What a start of this domain meets: the CPUs that others have, and those of the host's own work.
    fn beside(&self, id: Option<&str>) -> (CpuSet, CpuSet) {
        let others = self.running.iter().filter(|(other, _)| Some(other.as_str()) != id);
        let taken = others.fold(CpuSet::new(), |taken, (_, plan)| taken.union(&plan.exclusive()));
        let housekeeping = self.host.online().difference(&self.pinnable).difference(&self.host.isolated());
        let housekeeping = housekeeping.difference(&taken);
        (taken, housekeeping)
    }

    /// CPUs go offline or come online. The domains whose vCPUs or parked siblings are now (partly) offline.
    pub fn set_online(&mut self, cpus: &CpuSet, online: bool) -> Vec<&str> {
        let changed = self.host.cpus().iter().cloned().map(|mut cpu| {
            if cpus.contains(cpu.cpu) {
                cpu.online = online;
            }
            cpu
        });
        let (changed, nodes) = (changed.collect(), self.host.nodes().to_vec());
        let one_class = self.host.keeps_vms_in_one_class();
        self.host = Topology::new(changed, nodes, self.host.possible().clone(), self.host.losses().to_vec())
            .keeping_vms_in_one_class(one_class);
        self.demand = None;
        let online = self.host.online();
        let degraded = self.running.iter().filter(|(_, plan)| !plan.exclusive().is_subset(online));
        degraded.map(|(id, _)| id.as_str()).collect()
    }
}

/// The request as it can be met where there is no housekeeping CPU: threads that ask for one then take no room.
fn seated(request: &Request, housekeeping: &CpuSet) -> Request {
    let mut request = request.clone();
    for others in [&mut request.policy.emulator, &mut request.policy.iothreads] {
        if housekeeping.is_empty() && *others == OtherThreads::Housekeeping {
            *others = OtherThreads::Share;
        }
    }
    request
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alloc::policy::Policy;
    use crate::host::shape;

    fn request(vcpus: u16) -> Request {
        Request::new(vcpus, Policy::from_attributes([("policy", "dedicated")]).unwrap())
    }

    #[test]
    fn starts_stops_and_cpus_that_go() {
        let host = shape::parse("1s4c2t").unwrap();
        let mut simulation = Simulation::new(host.clone(), host.online().clone());
        let plan = simulation.start("a", &request(4)).unwrap();
        assert_eq!((plan.vcpu_cpus().to_string(), plan.emulator.len()), ("0-1,4-5".to_owned(), 0));
        assert_eq!(simulation.start("a", &request(1)).unwrap_err().code, Code::StateConflict);
        assert_eq!(simulation.start("b", &request(6)).unwrap_err().code, Code::Shortage);
        let offline = CpuSet::parse_kernel_list("0,2").unwrap();
        assert_eq!(simulation.set_online(&offline, false), ["a"]);
        // Core 2 is one thread now.
        assert_eq!(simulation.start("b", &request(3)).unwrap().vcpu_cpus().to_string(), "3,6-7");
        assert_eq!(simulation.set_online(&offline, true), [""; 0]);
        assert!(simulation.stop("a").is_some() && simulation.stop("a").is_none());
        assert_eq!(simulation.free().to_string(), "0-2,4-5");
    }
}
