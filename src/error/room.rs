//! How much room a request needs and how much there is, where: what a refusal says beside its sentence, in numbers.
//!
//! Made by the allocator, printed below the sentence as far as it says something there, and whole in JSON.

use super::{Code, counted};

/// No more nodes or caches are told of in text.
const SHOWN: usize = 8;

/// A request's lack of room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// What is counted: "whole core" or "thread".
    pub unit: &'static str,
    /// What the request needs.
    pub needed: Amount,
    /// What is free where it would have to be: all together, or on the node or in the cache that has the most.
    pub free: Amount,
    /// The same with every lease gone.
    pub pinnable: Amount,
    /// By node, ascending; empty where the host has none.
    pub nodes: Vec<Part>,
    /// By last-level cache, where the request has to be in one.
    pub llcs: Vec<Part>,
    /// CPUs that are free and all the same not for this request; where the host can never honour it, those that would not be
    /// for it with every lease gone.
    pub withheld: Vec<Withheld>,
    /// Leases whose move would make room, as far as that was looked for.
    pub moves: Vec<Moved>,
}

/// So much, counted twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Amount {
    /// Whole cores; `None` where the request is for single threads.
    pub cores: Option<u32>,
    /// Threads: with whole cores all of theirs, and what is free besides of cores that are not.
    pub threads: u32,
}

impl Amount {
    /// The whole cores, or the threads where those are asked for.
    pub fn count(self) -> u32 {
        self.cores.unwrap_or(self.threads)
    }
}

/// What is free on one node or in one last-level cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The number of the node, or the lowest CPU of the cache.
    pub id: u16,
    /// Free.
    pub free: Amount,
    /// With every lease gone.
    pub pinnable: Amount,
}

/// CPUs that are not for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Withheld {
    /// Which, as a list.
    pub cpus: String,
    /// Why, as one word of JSON.
    pub why: &'static str,
    /// Why, in text; `None` where the request itself says so.
    pub meaning: Option<&'static str>,
}

/// A lease that would have to move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Whose: the domain's name.
    pub domain: String,
    /// The CPUs it holds, as a list.
    pub from: String,
    /// Those it would hold.
    pub to: String,
}

impl Room {
    /// The lines below a refusal of this code; none that would say nothing new.
    pub(super) fn lines(&self, code: Code) -> Vec<String> {
        let mut lines = Vec::new();
        let never = code == Code::Unsatisfiable;
        for (title, parts) in [("per node", &self.nodes), ("per cache", &self.llcs)] {
            // Where it has to be in one cache, the nodes are beside the point.
            if parts.len() > 1 && (title == "per cache" || self.llcs.is_empty()) {
                lines.push(format!("{title}: {}", per(parts, never)));
            }
        }
        let withheld: Vec<_> = self.withheld.iter().filter_map(|some| Some((some, some.meaning?))).collect();
        if !withheld.is_empty() {
            let each = withheld.iter().map(|(some, meaning)| format!("{} ({meaning})", some.cpus));
            lines.push(format!("withheld: {}", each.collect::<Vec<_>>().join(", ")));
        }
        lines
    }
}

/// `0 has 3 whole cores, 7 threads free; 1 has ...`
fn per(parts: &[Part], never: bool) -> String {
    let (amount, word): (fn(&Part) -> Amount, _) =
        if never { (|part| part.pinnable, "pinnable") } else { (|part| part.free, "free") };
    let mut shown: Vec<&Part> = parts.iter().collect();
    if parts.len() > SHOWN {
        shown.sort_by_key(|part| std::cmp::Reverse(amount(part)));
    }
    let each = shown.iter().take(SHOWN).map(|part| {
        let Amount { cores, threads } = amount(part);
        let cores = cores.map(|cores| counted(cores, "whole core") + ", ").unwrap_or_default();
        format!("{} has {cores}{} {word}", part.id, counted(threads, "thread"))
    });
    let mut each: Vec<_> = each.collect();
    if parts.len() > SHOWN {
        each.push(format!("and {} more", parts.len() - SHOWN));
    }
    each.join("; ")
}

/// The moves in words: `"b" from CPUs 4-5 to 8-9 and "c" from CPUs 6 to 10`.
pub fn said(moves: &[Moved]) -> String {
    let each = moves.iter().map(|one| format!("\"{}\" from CPUs {} to {}", one.domain, one.from, one.to));
    each.collect::<Vec<_>>().join(" and ")
}
