//! Where does virt-pin put VMs, and where would others? Plays the same coming and going of VMs to each rule, on each host.
//!
//! `cargo bench --bench placement` prints the figures; with `-- --write docs/placement.md` they also replace those between
//! the markers of that file, which says what they mean. There is no clock and no chance in it: the same code gives the same
//! figures. Never measures speed, and never a real machine.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "a benchmark"
)]

mod contest;
mod hosts;
mod machine;
mod report;
mod rules;
mod streams;

use std::fs;
use std::io::Write as _;
use std::thread;

use machine::Machine;
use report::Played;

/// Streams of each mix at each load on each host.
const STREAMS: u64 = 10;

fn main() {
    let hosts = hosts::all();
    // Hosts have nothing to do with each other; the order of the results is that of the hosts.
    let played: Vec<Played<'_>> = thread::scope(|scope| {
        let players: Vec<_> =
            hosts.iter().zip(0..).map(|(machine, number)| scope.spawn(move || play(machine, number))).collect();
        players.into_iter().map(|player| player.join().unwrap()).collect()
    });
    let tables = report::tables(&rules::all(), &played);
    for table in &tables {
        println!("{}", table.text());
    }
    let mut arguments = std::env::args().skip_while(|argument| argument != "--write").skip(1);
    if let Some(path) = arguments.next() {
        let mut document = fs::read_to_string(&path).unwrap();
        for table in &tables {
            table.replace_in(&mut document);
        }
        fs::File::create(&path).unwrap().write_all(document.as_bytes()).unwrap();
    }
}

/// Every stream on one host.
fn play(machine: &Machine, number: u64) -> Played<'_> {
    let rules = rules::all();
    let mut streams = Vec::new();
    for (mix, kind) in streams::MIXES.iter().zip(0..) {
        for load in streams::LOADS {
            for again in 0..STREAMS {
                let seed = number * 1_000_000 + kind * 100_000 + load as u64 * 100 + again;
                streams.push(contest::play(machine, &rules, &streams::stream(machine, mix, load, seed)));
            }
        }
    }
    Played { machine, streams }
}
