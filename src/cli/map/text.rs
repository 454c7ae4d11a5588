//! The map for a terminal, at most 80 columns wide: letters and signs that need no colour, and colours that help. Pure.

use super::model::{Cache, Cell, Core, Map};
use super::role::Role;
use crate::cli::style::Style;
use crate::cli::table::{columns, width_of, wrapped};
use crate::error::printable;

/// Columns for the cores of a row; the rest of the line is for the cache's title.
const CORES: usize = 48;
/// Names longer than a UUID are cut in the legend; `virt-pin list` has them whole.
const NAME: usize = 36;

/// Text and how wide it is to the eye.
#[derive(Default)]
struct Line {
    text: String,
    width: usize,
}

impl Line {
    fn push(&mut self, text: &str) {
        self.text += text;
        self.width += width_of(text);
    }

    fn paint(&mut self, text: &str, code: Option<&str>, style: Style) {
        self.text += &painted(text, code, style);
        self.width += width_of(text);
    }
}

/// The drawing, the legend of leases, and the key of the signs in use.
pub(super) fn render(map: &Map<'_>, style: Style) -> String {
    let per_row = map.cores_per_row(CORES, |threads| core_width(threads, map.mark_width));
    let digits = map.cells().map(|cell| cell.cpu.to_string().len()).max().unwrap_or(1);
    let rows = |cache: &Cache<'_>| -> Vec<Line> {
        cache.cores.chunks(per_row).map(|cores| row(cores, digits, style)).collect()
    };
    let all = map.sections.iter().flat_map(|section| &section.caches).flat_map(&rows);
    let width = all.map(|line| line.width).max().unwrap_or(0);
    let mut out = String::new();
    for section in &map.sections {
        if !out.is_empty() {
            out.push('\n');
        }
        out += &format!(" {}\n", section.title);
        section.caches.iter().for_each(|cache| out += &beside(&rows(cache), &cache.title, width + 3));
    }
    out + &legend(map, style) + "\n" + &key(map)
}

/// How wide a core of so many threads is.
fn core_width(threads: usize, mark: usize) -> usize {
    threads * mark + threads.saturating_sub(1) * usize::from(mark > 1) + 2
}

/// Cores in their brackets behind the number of the first CPU, a gap after every four.
fn row(cores: &[Core<'_>], digits: usize, style: Style) -> Line {
    let mut line = Line::default();
    let first = cores.first().and_then(|core| core.cells.first()).map(|cell| cell.cpu.to_string()).unwrap_or_default();
    line.push(&format!("  {first:>digits$} "));
    for (core, number) in cores.iter().zip(0..) {
        if number % 4 == 0 {
            line.push(" ");
        }
        line.push(&core.brackets.0.to_string());
        for (cell, number) in core.cells.iter().zip(0..) {
            if number > 0 && cell.mark.len() > 1 {
                line.push(" ");
            }
            line.paint(&cell.mark, colour(cell).as_deref(), style);
        }
        line.push(&core.brackets.1.to_string());
    }
    line
}

/// The rows with a title to their right, which may need more lines than they.
fn beside(rows: &[Line], title: &str, column: usize) -> String {
    let title = wrapped(&" ".repeat(column), title);
    let mut titles = title.lines().map(str::trim_start);
    let mut out = String::new();
    for row in rows {
        let title = titles.next().unwrap_or_default();
        let gap = " ".repeat(column.saturating_sub(row.width));
        out += format!("{}{gap}{title}", row.text).trim_end();
        out.push('\n');
    }
    titles.for_each(|title| out += &format!("{}{title}\n", " ".repeat(column)));
    out
}

fn legend(map: &Map<'_>, style: Style) -> String {
    if map.holders.is_empty() {
        return String::new();
    }
    let rows = map
        .holders
        .iter()
        .map(|holder| vec![holder.mark.clone(), short(&holder.lease.name), holder.state.to_owned(), holder.cpus()]);
    let table = columns(&["", "Name", "State", "CPUs"], rows.collect());
    let mut out = "\n".to_owned();
    for line in table.lines() {
        let holder = map
            .holders
            .iter()
            .find(|holder| line.strip_prefix(' ').is_some_and(|line| line.starts_with(&format!("{} ", holder.mark))));
        match holder {
            Some(holder) => {
                let rest = line.get(1 + holder.mark.len()..).unwrap_or_default();
                out += &format!(" {}{rest}\n", painted(&holder.mark, Some(tint(holder.tint)), style));
            }
            None => out += &format!("{line}\n"),
        }
    }
    out
}

/// The name on one line and not too long.
pub(super) fn short(name: &str) -> String {
    let name = printable(name);
    if name.chars().count() <= NAME {
        return name;
    }
    name.chars().take(NAME - 3).chain("...".chars()).collect()
}

/// The signs in use and how many CPUs have each.
fn key(map: &Map<'_>) -> String {
    let mut items: Vec<String> = map
        .roles()
        .into_iter()
        .map(|(role, count)| format!("{} {} ({count})", role.symbol(), role.meaning()))
        .collect();
    if map.cores().any(|core| core.brackets.0 == '(') {
        items.push("( ) siblings unknown".to_owned());
    }
    // Lines are broken between items, not within.
    let items: Vec<String> = items.iter().map(|item| item.replace(' ', "\u{a0}")).collect();
    wrapped(" ", &items.join("   ")).replace('\u{a0}', " ")
}

fn painted(text: &str, code: Option<&str>, style: Style) -> String {
    code.map_or_else(|| text.to_owned(), |code| style.paint(text, code))
}

fn colour(cell: &Cell<'_>) -> Option<String> {
    let tint = cell.lease.map(|(_, number)| tint(number));
    match cell.role {
        Role::Free => None,
        Role::Vcpu | Role::Extra | Role::Static => tint.map(|tint| format!("1;{tint}")),
        Role::Parked => tint.map(str::to_owned),
        Role::Several | Role::Occupied => Some("1".to_owned()),
        // Grey: not to be had.
        _ => Some("90".to_owned()),
    }
}

/// Six colours that terminals have, again and again: letters tell the leases apart.
fn tint(number: usize) -> &'static str {
    let codes = ["36", "33", "35", "32", "34", "31"];
    codes.get(number % codes.len()).copied().unwrap_or("39")
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::alloc::Supply;
    use crate::alloc::plan::Plan;
    use crate::alloc::pools::pools;
    use crate::cpuset::{CpuId, CpuSet, NodeId};
    use crate::host::{CoreId, Cpu, LlcId, Topology};
    use crate::lock::leases::{Holds, Lease, Leases, State};
    use crate::uuid::DomainUuid;

    fn cpu(number: u16, core: Option<u16>) -> Cpu {
        Cpu {
            cpu: CpuId(number),
            online: number != 3,
            isolated: number == 2,
            core: core.map(CoreId),
            package: Some(0),
            die: None,
            cluster: None,
            node: Some(NodeId(0)),
            llc: Some(LlcId(0)),
            class: None,
        }
    }

    fn set(list: &str) -> CpuSet {
        CpuSet::parse_kernel_list(list).unwrap()
    }

    fn lease(number: u8, holds: Holds) -> Lease {
        Lease {
            uuid: DomainUuid::parse(&format!("00000000-0000-0000-0000-{number:012}")).unwrap(),
            name: format!("vm{number}"),
            state: State::Running,
            holds,
            request: None,
            domain_id: None,
            cgroup: None,
            daemon: None,
            qemu: None,
            moving: None,
            since: 0,
        }
    }

    /// One CPU of almost every kind.
    fn drawn(style: Style) -> String {
        let cores = [Some(0), Some(0), None, None, Some(4), Some(4), Some(6), Some(6)];
        let cpus = (0..).zip(cores).map(|(number, core)| cpu(number, core)).collect();
        let topology = Topology::new(cpus, Vec::new(), CpuSet::new(), Vec::new());
        let plan = Plan { parked: set("1"), ..Plan::new([CpuId(0)], set("6")) };
        let mut leases = Leases::default();
        leases.put(lease(1, Holds::Dedicated(plan)));
        leases.put(lease(2, Holds::Static(set("4"))));
        leases.put(lease(3, Holds::Static(set("4-5"))));
        let (pinnable, taken, housekeeping) = (set("0-1,6"), set("0-1,4-6"), CpuSet::new());
        let supply = Supply { topology: &topology, pinnable: &pinnable, taken: &taken, housekeeping: &housekeeping };
        render(&Map::new(&topology, &leases, &[], &pools(&supply, [])), style)
    }

    #[test]
    fn every_kind_has_its_sign() {
        let expected = "\
\x20Package 0, node 0
  0  [Aa](!)[*2][%?]   LLC 0: 0-2,4-7

 Offline
  3   _                CPUs 3

     Name   State     CPUs
----------------------------------
 A   vm1    running   0; parked 1
 1   vm2    running   4
 2   vm3    running   4-5

";
        let text = drawn(Style::Plain);
        assert!(text.starts_with(expected), "{text}");
        assert!(text.lines().all(|line| line.len() <= 80), "{text}");
        assert!(text.ends_with(" _ offline (1)\n ( ) siblings unknown\n"), "{text}");
    }

    #[test]
    fn colours_change_no_character() {
        let text = drawn(Style::Colour);
        assert!(text.contains("\u{1b}[1;36mA\u{1b}[0m\u{1b}[36ma\u{1b}[0m"), "{text}");
        let pieces = text
            .split('\u{1b}')
            .map(|piece| piece.split_once('m').filter(|_| piece.starts_with('[')).map_or(piece, |(_, rest)| rest));
        assert_eq!(pieces.collect::<String>(), drawn(Style::Plain));
    }
}
