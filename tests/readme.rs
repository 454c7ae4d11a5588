//! The README's reference tables are those of the code. `UPDATE=1 cargo test --test readme` rewrites them.
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
    if std::env::var_os("UPDATE").is_some() {
        std::fs::File::create(README).unwrap().write_all(expected.as_bytes()).unwrap();
    } else {
        assert!(readme == expected, "README.md is not up to date: run UPDATE=1 cargo test --test readme");
    }
}

#[test]
fn its_transcripts_are_what_the_command_prints() {
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/simulate.md");
    let texts = [README, docs].map(|path| std::fs::read_to_string(path).unwrap()).concat();
    let mut transcripts = 0;
    for block in texts.split("```console\n").skip(1) {
        let block = block.split("```").next().unwrap();
        // Those that start with `$` run on any machine.
        let Some((command, expected)) = block.strip_prefix("$ virt-pin ").and_then(|block| block.split_once('\n'))
        else {
            continue;
        };
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_virt-pin"))
            .args(command.split(' '))
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected, "virt-pin {command}");
        transcripts += 1;
    }
    assert_eq!(transcripts, 4);
}
