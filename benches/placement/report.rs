//! What do the counts say? Tables, as text and as Markdown. Never judges: it prints what was counted, ours first.

use std::fmt::Write as _;

use crate::contest::Tally;
use crate::machine::Machine;
use crate::rules::Rule;

/// One host: for each stream, each rule's counts.
pub(crate) struct Played<'a> {
    pub(crate) machine: &'a Machine,
    pub(crate) streams: Vec<Vec<Tally>>,
}

impl Played<'_> {
    fn sum(&self, rule: usize) -> Tally {
        self.streams.iter().fold(Tally::default(), |mut sum, tallies| {
            sum += tallies[rule];
            sum
        })
    }
}

/// A table, and the name of its place in the document.
pub(crate) struct Table {
    name: &'static str,
    rows: Vec<Vec<String>>,
}

/// Every table.
pub(crate) fn tables(rules: &[Box<dyn Rule>], played: &[Played<'_>]) -> Vec<Table> {
    let columns = |first: &str, from: usize| {
        let names = rules.iter().skip(from).map(|rule| rule.name().to_owned());
        [first.to_owned()].into_iter().chain(names).collect::<Vec<_>>()
    };
    let by_host = |name, from: usize, cell: &dyn Fn(&Played<'_>, usize) -> String| {
        let row = |host: &Played<'_>| {
            let cells = (from..rules.len()).map(|rule| cell(host, rule));
            [host.machine.name.to_owned()].into_iter().chain(cells).collect()
        };
        Table { name, rows: [columns("host", from)].into_iter().chain(played.iter().map(row)).collect() }
    };
    vec![
        hosts(played),
        totals(rules, played),
        same_question(rules, played),
        by_host("admitted", 0, &|host, rule| match rule {
            0 => format!("{} of {}", host.sum(0).admitted, host.sum(0).offered),
            _ => lead(&host.streams, rule, |tally| tally.admitted),
        }),
        by_host("vcpus", 0, &|host, rule| match rule {
            0 => format!("{}", host.sum(0).vcpus),
            _ => lead(&host.streams, rule, |tally| tally.vcpus),
        }),
        by_host("spans", 0, &|host, rule| {
            let tally = host.sum(rule);
            format!("{} / {}", mean(tally.nodes, tally.admitted), mean(tally.caches, tally.admitted))
        }),
        by_host("same-question-hosts", 1, &|host, rule| {
            let duel = host.sum(rule).duel;
            let more = |its: usize, ours: usize| {
                let (its, ours, both) = (its as f64, ours as f64, duel.both.max(1) as f64);
                format!("{:+.3}", (its - ours) / both)
            };
            format!("{} / {}", more(duel.nodes, duel.our_nodes), more(duel.caches, duel.our_caches))
        }),
    ]
}

fn hosts(played: &[Played<'_>]) -> Table {
    let header = ["host", "CPUs", "nodes", "LLCs", "whole cores", "of them pinnable"].map(str::to_owned).to_vec();
    let row = |host: &Played<'_>| {
        let machine = host.machine;
        let all: Vec<usize> = (0..machine.cores.len()).collect();
        let spans = machine.spans(&all);
        let counts = [machine.topology.online().len(), spans.nodes, spans.caches, all.len(), machine.offered().len()];
        [machine.name.to_owned()].into_iter().chain(counts.map(|count| count.to_string())).collect()
    };
    Table { name: "hosts", rows: [header].into_iter().chain(played.iter().map(row)).collect() }
}

fn total(played: &[Played<'_>], rule: usize) -> Tally {
    played.iter().fold(Tally::default(), |mut sum, host| {
        sum += host.sum(rule);
        sum
    })
}

fn totals(rules: &[Box<dyn Rule>], played: &[Played<'_>]) -> Table {
    let header = [
        "rule",
        "admitted",
        "of",
        "vCPUs",
        "nodes per request",
        "LLCs per request",
        "nodes, admitted by all",
        "LLCs, admitted by all",
        "cores of two classes",
    ];
    let rows = rules.iter().enumerate().map(|(index, rule)| {
        let tally = total(played, index);
        vec![
            rule.name().to_owned(),
            tally.admitted.to_string(),
            tally.offered.to_string(),
            tally.vcpus.to_string(),
            mean(tally.nodes, tally.admitted),
            mean(tally.caches, tally.admitted),
            mean(tally.common_nodes, tally.common),
            mean(tally.common_caches, tally.common),
            tally.mixed.to_string(),
        ]
    });
    Table { name: "totals", rows: [header.map(str::to_owned).to_vec()].into_iter().chain(rows).collect() }
}

fn same_question(rules: &[Box<dyn Rule>], played: &[Played<'_>]) -> Table {
    let header = [
        "rule",
        "placed by both",
        "by it alone",
        "by virt-pin alone",
        "nodes: it, virt-pin",
        "LLCs: it, virt-pin",
        "it is nearer",
        "virt-pin is nearer",
    ];
    let rows = rules.iter().enumerate().skip(1).map(|(index, rule)| {
        let duel = total(played, index).duel;
        let pair = |its, ours| format!("{}, {}", mean(its, duel.both), mean(ours, duel.both));
        vec![
            rule.name().to_owned(),
            duel.both.to_string(),
            duel.only_it.to_string(),
            duel.only_ours.to_string(),
            pair(duel.nodes, duel.our_nodes),
            pair(duel.caches, duel.our_caches),
            duel.it_nearer.to_string(),
            duel.ours_nearer.to_string(),
        ]
    });
    Table { name: "same-question", rows: [header.map(str::to_owned).to_vec()].into_iter().chain(rows).collect() }
}

fn mean(sum: usize, count: usize) -> String {
    format!("{:.3}", sum as f64 / count.max(1) as f64)
}

/// What a rule has more than ours, per 1000 of what ours has, and two standard errors of that over the streams.
fn lead(streams: &[Vec<Tally>], rule: usize, what: impl Fn(&Tally) -> usize) -> String {
    let leads = streams.iter().filter(|tallies| tallies[0].offered > 0);
    let leads: Vec<f64> = leads.map(|tallies| what(&tallies[rule]) as f64 - what(&tallies[0]) as f64).collect();
    let count = leads.len() as f64;
    let average = leads.iter().sum::<f64>() / count;
    let variance = leads.iter().map(|lead| (lead - average).powi(2)).sum::<f64>() / (count - 1.0);
    if variance == 0.0 && average == 0.0 {
        return "0".to_owned();
    }
    let unit = streams.iter().map(|tallies| what(&tallies[0])).sum::<usize>() as f64 / count / 1000.0;
    format!("{:+.1} ± {:.1}", average / unit, 2.0 * (variance / count).sqrt() / unit)
}

impl Table {
    pub(crate) fn text(&self) -> String {
        let width = |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.rows[0].len()).map(width).collect();
        let mut text = format!("{}\n", self.name);
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                write!(line, "  {cell:width$}").unwrap();
            }
            writeln!(text, "{}", line.trim_end()).unwrap();
        }
        text
    }

    fn markdown(&self) -> String {
        let mut text = String::new();
        for (index, row) in self.rows.iter().enumerate() {
            writeln!(text, "| {} |", row.join(" | ")).unwrap();
            if index == 0 {
                writeln!(text, "|---{}|", "|---:".repeat(row.len() - 1)).unwrap();
            }
        }
        text
    }

    /// Puts the table between its markers.
    pub(crate) fn replace_in(&self, document: &mut String) {
        let (start, end) = (format!("<!-- {} -->\n", self.name), format!("<!-- end of {} -->\n", self.name));
        let (before, rest) = document.split_once(&start).unwrap_or_else(|| panic!("no {start}"));
        let (_, after) = rest.split_once(&end).unwrap_or_else(|| panic!("no {end}"));
        *document = format!("{before}{start}{}{end}{after}", self.markdown());
    }
}
