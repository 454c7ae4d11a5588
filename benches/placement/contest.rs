//! Who places how many, and how near? Plays a stream to every rule and counts. Never helps a rule: an answer that is not
//! free whole cores enough for the request, on one node if it says so, ends the run as a fault of the rule's author here.
//!
//! Two questions, as no single one is fair:
//!
//! - *In the long run*: each rule lives with its own decisions. Who refuses the hard requests spans little with the rest, so
//!   spans are also counted over those requests alone that every rule admitted.
//! - *The same question*: at each request, ours is asked, too, what it would do in the other's situation: with the free
//!   cores that the other's own history has left. Its answer is counted and not carried out.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use crate::machine::{Demand, Free, Machine, Spans};
use crate::rules::Rule;
use crate::streams::Event;

/// Sums over requests.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) offered: usize,
    pub(crate) admitted: usize,
    pub(crate) vcpus: usize,
    pub(crate) nodes: usize,
    pub(crate) caches: usize,
    /// On cores of more than one class.
    pub(crate) mixed: usize,
    /// Of those requests that all rules admitted.
    pub(crate) common: usize,
    pub(crate) common_nodes: usize,
    pub(crate) common_caches: usize,
    /// Beside ours, asked the same.
    pub(crate) duel: Duel,
}

/// One rule and ours, asked the same question in the rule's situation.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Duel {
    pub(crate) both: usize,
    pub(crate) nodes: usize,
    pub(crate) caches: usize,
    pub(crate) our_nodes: usize,
    pub(crate) our_caches: usize,
    /// Placed by the rule and not by ours, and the other way round.
    pub(crate) only_it: usize,
    pub(crate) only_ours: usize,
    /// Placed by both: whose spans are smaller.
    pub(crate) it_nearer: usize,
    pub(crate) ours_nearer: usize,
}

/// What each start led to, and the sums of the duels.
struct Run {
    outcomes: Vec<Option<Spans>>,
    mixed: usize,
    duel: Duel,
}

/// Plays the stream to every rule, each alone on the machine; ours is the first rule.
pub(crate) fn play(machine: &Machine, rules: &[Box<dyn Rule>], stream: &[Event]) -> Vec<Tally> {
    let runs: Vec<Run> = rules.iter().map(|rule| run(machine, rule.as_ref(), rules[0].as_ref(), stream)).collect();
    let demands = || {
        stream.iter().filter_map(|event| match event {
            Event::Start(_, demand) => Some(demand),
            Event::Stop(_) => None,
        })
    };
    let tally = |own: &Run| {
        let mut tally = Tally { mixed: own.mixed, duel: own.duel, ..Tally::default() };
        for (index, demand) in demands().enumerate() {
            tally.offered += 1;
            let Some(spans) = own.outcomes[index] else { continue };
            tally.admitted += 1;
            tally.vcpus += demand.vcpus;
            tally.nodes += spans.nodes;
            tally.caches += spans.caches;
            if runs.iter().all(|run| run.outcomes[index].is_some()) {
                tally.common += 1;
                tally.common_nodes += spans.nodes;
                tally.common_caches += spans.caches;
            }
        }
        tally
    };
    runs.iter().map(tally).collect()
}

fn run(machine: &Machine, rule: &dyn Rule, ours: &dyn Rule, stream: &[Event]) -> Run {
    let mut free = machine.offered();
    let mut running: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    let mut run = Run { outcomes: Vec::new(), mixed: 0, duel: Duel::default() };
    for event in stream {
        match event {
            Event::Stop(vm) => free.extend(running.remove(vm).unwrap_or_default()),
            Event::Start(vm, demand) => {
                let answer = rule.place(machine, &free, demand);
                let spans = answer.as_ref().map(|cores| judge(machine, rule, &free, demand, cores));
                if rule.name() != ours.name() {
                    let our_answer = ours.place(machine, &free, demand);
                    let our_spans = our_answer.map(|cores| judge(machine, ours, &free, demand, &cores));
                    run.duel.count(spans, our_spans);
                }
                run.outcomes.push(spans);
                run.mixed += answer.iter().filter(|cores| machine.mixes_classes(cores)).count();
                for core in answer.iter().flatten() {
                    free.remove(core);
                }
                running.extend(answer.map(|cores| (*vm, cores)));
            }
        }
    }
    run
}

/// The spans of a placement that is one.
fn judge(machine: &Machine, rule: &dyn Rule, free: &Free, demand: &Demand, cores: &[usize]) -> Spans {
    let distinct: Free = cores.iter().copied().collect();
    let spans = machine.spans(cores);
    let holds = distinct.len() == cores.len()
        && distinct.is_subset(free)
        && machine.holds(cores.iter().copied()) >= demand.vcpus
        && (!demand.single || spans.nodes == 1);
    assert!(holds, "{} on {}: {demand:?} gets {cores:?}", rule.name(), machine.name);
    spans
}

impl Duel {
    fn count(&mut self, its: Option<Spans>, our: Option<Spans>) {
        match (its, our) {
            (Some(its), Some(our)) => {
                self.both += 1;
                self.nodes += its.nodes;
                self.caches += its.caches;
                self.our_nodes += our.nodes;
                self.our_caches += our.caches;
                self.it_nearer += usize::from(its < our);
                self.ours_nearer += usize::from(our < its);
            }
            (Some(_), None) => self.only_it += 1,
            (None, Some(_)) => self.only_ours += 1,
            (None, None) => {}
        }
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.offered += other.offered;
        self.admitted += other.admitted;
        self.vcpus += other.vcpus;
        self.nodes += other.nodes;
        self.caches += other.caches;
        self.mixed += other.mixed;
        self.common += other.common;
        self.common_nodes += other.common_nodes;
        self.common_caches += other.common_caches;
        self.duel += other.duel;
    }
}

impl AddAssign for Duel {
    fn add_assign(&mut self, other: Duel) {
        self.both += other.both;
        self.nodes += other.nodes;
        self.caches += other.caches;
        self.our_nodes += other.our_nodes;
        self.our_caches += other.our_caches;
        self.only_it += other.only_it;
        self.only_ours += other.only_ours;
        self.it_nearer += other.it_nearer;
        self.ours_nearer += other.ours_nearer;
    }
}
