//! What the documents say is what the code does: the README's reference tables are the code's, its installation is what a test on a
//! whole host has recorded, every transcript that begins with `$ virt-pin` is what the command shows on a terminal, what the cookbook
//! quotes is in its files, and every link leads somewhere. `UPDATE=1 cargo test --test documents` rewrites all but links and quotations.
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
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use virt_pin::alloc::policy::ATTRIBUTES;
use virt_pin::error::Code;

use terminal::on_a_terminal;

/// Who reads documents, or rewrites them, does so alone.
static ALONE: Mutex<()> = Mutex::new(());

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

/// The README's part between `<!-- name -->` and `<!-- end of name -->`, for each of these.
#[test]
fn the_tables_are_those_of_the_code() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let recorded =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hostvm/recorded/installation.md"));
    let readme = std::fs::read_to_string(README).unwrap();
    let mut expected = readme.clone();
    for (name, table) in [("attributes", attributes()), ("codes", codes()), ("installation", recorded.unwrap())] {
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

/// The documents in a directory of the source.
fn documents(dir: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(dir)).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|name| name == "md")).collect()
}

/// What follows `#` in a link to this heading.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

#[test]
fn every_link_leads_somewhere() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (mut links, mut dead) = (0, Vec::new());
    for path in [".", "docs", "hooks"].into_iter().flat_map(documents) {
        let text = std::fs::read_to_string(&path).unwrap();
        // `[words](target)`; code, in which that means something else, is left out.
        let prose: String = text.split("```").step_by(2).collect();
        for link in prose.split("](").skip(1).map(|rest| rest.split(')').next().unwrap()) {
            if link.contains("://") {
                continue;
            }
            links += 1;
            let (file, part) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { path.clone() } else { path.with_file_name(file) };
            let there = target.exists()
                && (part.is_empty() || {
                    let text = std::fs::read_to_string(&target).unwrap();
                    text.lines()
                        .any(|line| line.starts_with('#') && anchor(line.trim_start_matches('#').trim()) == part)
                });
            if !there {
                dead.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(dead.is_empty() && links > 50, "{links} links; dead: {dead:#?}");
    // And whoever begins at their list finds all of them.
    let list = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/README.md")).unwrap();
    for path in documents("docs") {
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(name == "README.md" || list.contains(&format!("]({name})")), "docs/README.md does not list {name}");
    }
}

#[test]
fn transcripts_are_what_the_command_prints() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut transcripts = 0;
    for path in documents("docs").into_iter().chain([README.into()]) {
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
