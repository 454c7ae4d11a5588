//! What the documents say is what the code does: the README's reference tables are the code's, and every transcript that begins
//! with `$ virt-pin` is what the command prints. `UPDATE=1 cargo test --test documents` rewrites both.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "integration tests"
)]

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

use virt_pin::alloc::policy::ATTRIBUTES;
use virt_pin::error::Code;

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
        std::fs::File::create(path).unwrap().write_all(expected.as_bytes()).unwrap();
    } else {
        assert!(found == expected, "{} is not up to date: run UPDATE=1 cargo test --test documents", path.display());
    }
}

/// What a command prints, seen from the root of the source. One that fails says why after what it has printed.
fn printed(command: &str) -> String {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_virt-pin"))
        .args(command.split(' '))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
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
            let text = match block.strip_prefix("$ virt-pin ").and_then(|block| block.split_once('\n')) {
                Some((command, _)) => {
                    transcripts += 1;
                    format!("$ virt-pin {command}\n{}", printed(command))
                }
                None => block.to_owned(),
            };
            expected = format!("{expected}```console\n{text}```{after}");
        }
        agree(&path, &found, &expected);
    }
    assert!(transcripts >= 4, "{transcripts}");
}
