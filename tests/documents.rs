//! What the documents say is what the code does: the README's reference tables are the code's, every transcript that begins
//! with `$ virt-pin` is what the command shows on a terminal, and what the cookbook quotes is in its files. `UPDATE=1 cargo test --test
//! documents` rewrites the first two.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "integration tests, which rewrite what they expect"
)]

mod terminal;

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use virt_pin::alloc::policy::ATTRIBUTES;
use virt_pin::error::Code;

use terminal::on_a_terminal;

const README: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md");

fn attributes() -> String {
    let mut table = "| attribute | values | meaning |\n|---|---|---|\n".to_owned();
    for attribute in ATTRIBUTES {
        let mut values: Vec<String> = attribute.values.iter().map(|value| (*value).to_owned()).collect();
        for value in values.iter_mut().filter(|value| attribute.unsupported.contains(&value.as_str())) {
            value.push('°');
        }
        match attribute.name {
            "nodes" | "cpus" | "dedicated-vcpus" => values.push("a list".to_owned()),
            "tenant" => values.push("a name".to_owned()),
            "threads-per-core" => values.push("1, 2, ...".to_owned()),
            _ => {}
        }
        writeln!(table, "| `{}` | {} | {} |", attribute.name, values.join(", "), attribute.meaning).unwrap();
    }
    table
}

fn codes() -> String {
    let mut table = "| exit | code | meaning | what to do |\n|---|---|---|---|\n".to_owned();
    for code in Code::all() {
        let retry = if code.retry() { " ↻" } else { "" };
        let (exit, name, meaning, advice) = (code.exit(), code.name(), code.meaning(), code.advice());
        writeln!(table, "| {exit} | `{name}`{retry} | {meaning} | {advice} |").unwrap();
    }
    table
}

#[test]
fn the_tables_are_those_of_the_code() {
    let readme = std::fs::read_to_string(README).unwrap();
    let mut expected = readme.clone();
    for (name, table) in [("attributes", attributes()), ("codes", codes())] {
        let (before, rest) = expected.split_once(&format!("<!-- {name} -->\n")).unwrap();
        let (_, after) = rest.split_once(&format!("<!-- end of {name} -->\n")).unwrap();
        expected = format!("{before}<!-- {name} -->\n{table}<!-- end of {name} -->\n{after}");
    }
    agree(Path::new(README), &readme, &expected);
}

/// Fails unless a document is as it should be; with `UPDATE` makes it so.
fn agree(path: &Path, found: &str, expected: &str) {
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(path, expected).unwrap();
    } else {
        assert!(found == expected, "{} is not up to date: run UPDATE=1 cargo test --test documents", path.display());
    }
}

/// What a command shows on a terminal without colours, seen from the root of the source.
fn shown(arguments: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_virt-pin"));
    command.args(arguments.split_whitespace().filter(|word| *word != "\\"));
    command.env("NO_COLOR", "1").current_dir(env!("CARGO_MANIFEST_DIR"));
    on_a_terminal(command)
}

/// A command, which goes on in the next line where one ends in a backslash, and what follows it.
fn command_of(block: &str) -> Option<(&str, &str)> {
    let ends = block.match_indices('\n').map(|(at, _)| at);
    let end = ends.into_iter().find(|at| !block.get(..*at).unwrap_or_default().ends_with('\\'))?;
    Some((block.get(..end)?, block.get(end + 1..)?))
}

#[test]
fn transcripts_are_what_the_command_prints() {
    let docs = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/docs")).unwrap();
    let docs = docs.map(|entry| entry.unwrap().path()).filter(|path| path.extension().is_some_and(|name| name == "md"));
    let mut transcripts = 0;
    for path in docs.chain([README.into()]) {
        let found = std::fs::read_to_string(&path).unwrap();
        let mut blocks = found.split("```console\n");
        let mut expected = blocks.next().unwrap().to_owned();
        for block in blocks {
            let (block, after) = block.split_once("```").unwrap();
            // Those with `$` run on any machine, on descriptions of hosts; those with `#` are of a machine of their own.
            let text = match block.strip_prefix("$ virt-pin ").and_then(command_of) {
                Some((command, _)) => {
                    transcripts += 1;
                    format!("$ virt-pin {command}\n{}", shown(command))
                }
                None => block.to_owned(),
            };
            expected = format!("{expected}```console\n{text}```{after}");
        }
        agree(&path, &found, &expected);
    }
    assert!(transcripts >= 4, "{transcripts}");
}

/// The elements and the configuration that the cookbook shows are those of the files that its transcripts are made from.
#[test]
fn what_the_cookbook_quotes_is_in_its_files() {
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/docs");
    // Comments are for who reads the file.
    let flat = |text: &str| -> String {
        let lines = text.lines().filter(|line| !line.starts_with('#')).flat_map(str::split_whitespace);
        lines.collect::<Vec<_>>().join(" ")
    };
    let files = std::fs::read_dir(format!("{docs}/cookbook")).unwrap();
    let files: String = files.map(|file| flat(&std::fs::read_to_string(file.unwrap().path()).unwrap())).collect();
    let cookbook = std::fs::read_to_string(format!("{docs}/cookbook.md")).unwrap();
    let quoted: Vec<String> = ["```xml\n", "```toml\n"]
        .iter()
        .flat_map(|kind| cookbook.split(kind).skip(1).map(|block| flat(block.split_once("```").unwrap().0)))
        .collect();
    assert!(quoted.len() >= 7, "{quoted:?}");
    for quoted in quoted {
        assert!(files.contains(&quoted), "{quoted}");
    }
}
