//! The generated manuals and completions leave nothing out, and are what man and the shells take.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "integration tests"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use virt_pin::alloc::policy::ATTRIBUTES;
use virt_pin::cli;
use virt_pin::config::keys;
use virt_pin::error::Code;
use virt_pin::hook::call::Operation;
use virt_pin::manual::guide::entry;

/// The files as `make man` writes them.
fn generated() -> (tempfile::TempDir, Vec<PathBuf>) {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_virt-pin")).arg("manuals").arg(dir.path()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let names = [
        "man1/virt-pin.1",
        "man5/virt-pin.toml.5",
        "man7/virt-pin-policy.7",
        "man8/virt-pin-hook.8",
        "man7/virt-pin-codes.7",
    ];
    let pages = names.map(|name| dir.path().join(name));
    (dir, pages.to_vec())
}

/// A page as its reader's text: without fonts and escapes.
fn text(page: &Path) -> String {
    let mut text = fs::read_to_string(page).unwrap();
    for (escape, character) in [
        ("\\fB", ""),
        ("\\fI", ""),
        ("\\fR", ""),
        ("\\-", "-"),
        ("\\(aq", "'"),
        ("\\*(Aq", "'"),
        ("\\(dq", "\""),
        ("\\(ga", "`"),
        ("\\&", ""),
    ] {
        text = text.replace(escape, character);
    }
    text
}

#[track_caller]
fn says(page: &str, what: &str) {
    assert!(page.contains(what), "{what:?} is not in {page}");
}

#[test]
fn every_verb_and_option_is_in_the_manual() {
    let (_dir, pages) = generated();
    let page = text(&pages[0]);
    let mut grammar = cli::grammar().disable_help_subcommand(true);
    grammar.build();
    let mut options = 0;
    for verb in grammar.get_subcommands().filter(|verb| !verb.is_hide_set()) {
        let (_, section) = page
            .split_once(&format!("\n.SS \"{}", verb.get_name()))
            .unwrap_or_else(|| panic!("no {}", verb.get_name()));
        let section = section.split("\n.S").next().unwrap();
        for argument in verb.get_arguments().filter(|argument| !argument.is_hide_set() && !argument.is_global_set()) {
            let Some(long) = argument.get_long().filter(|long| *long != "help") else { continue };
            says(section, &format!("--{long}"));
            says(section, &argument.get_help().unwrap().to_string());
            options += 1;
        }
    }
    assert!(options > 30, "{options}");
    for argument in grammar.get_arguments() {
        says(&page, &format!("--{}", argument.get_long().unwrap()));
    }
    assert!(!page.contains("after-stdin"), "what is hidden is in the manual");
}

#[test]
fn every_key_attribute_value_code_and_event_is_in_its_manual() {
    let (_dir, pages) = generated();
    let [command, configuration, policy, hook] = [0, 1, 2, 3].map(|page| text(&pages[page]));
    for (section, docs) in keys::all() {
        let begins = if section.is_empty() { ".SH \"KEYS\"".to_owned() } else { format!(".SH \"[[{section}]]\"") };
        let (_, section) = configuration.split_once(&begins).unwrap();
        let section = section.split("\n.SH").next().unwrap();
        for doc in docs {
            let name = if doc.is_section() { format!("[[{}]]", doc.name) } else { doc.name.to_owned() };
            says(section, &format!(".TP\n{name}\n"));
            says(section, doc.default.unwrap_or_default());
        }
    }
    for attribute in ATTRIBUTES {
        let (_, section) = policy.split_once(&format!(".TP\n{}\n", attribute.name)).unwrap();
        let section = section.split(".TP").next().unwrap();
        attribute.values.iter().for_each(|value| says(section, value));
        says(section, &attribute.meaning.replace('`', ""));
        says(&configuration, attribute.name);
    }
    for code in Code::all() {
        for page in [&command, &hook] {
            says(page, &format!(".TP\n{} {code}\n{}", code.exit(), code.meaning().replace('`', "")));
        }
    }
    for operation in Operation::ALL {
        says(&hook, &format!(".TP\n{}\n", operation.name()));
    }
}

#[test]
fn each_code_is_shown_as_it_is_printed_beside_its_entry() {
    let (_dir, pages) = generated();
    // As it is read: without requests, in one line.
    let read = |text: &str| {
        let lines = text.lines().filter(|line| !line.starts_with('.')).map(|line| line.trim_start_matches("\\&"));
        lines.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ").replace('`', "")
    };
    let page = text(&pages[4]);
    for code in Code::all() {
        let (_, section) = page.split_once(&format!(".SS \"{code} (exit status {})\"\n", code.exit())).unwrap();
        let section = read(section.split("\n.SS").next().unwrap());
        let entry = entry(code);
        let parts = [entry.example, entry.means, entry.passes]
            .into_iter()
            .chain(entry.look.iter().chain(entry.remedies).copied());
        for part in parts {
            says(&section, &read(part));
        }
    }
}

/// Whether a program is there; a line on the terminal where not.
fn there(program: &str) -> bool {
    let there = Command::new("sh").args(["-c", "command -v \"$0\"", program]).output().unwrap().status.success();
    if !there {
        eprintln!("skipped: {program} is not installed");
    }
    there
}

#[test]
fn man_has_nothing_to_complain_about() {
    let (_dir, pages) = generated();
    if !there("mandoc") {
        return;
    }
    let output = Command::new("mandoc").args(["-T", "lint", "-W", "warning"]).args(&pages).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    // A date would say when a package was built.
    let said: Vec<_> = said.lines().filter(|line| !line.contains("missing date")).collect();
    assert!(said.is_empty(), "{said:#?}");
}

#[test]
fn shells_read_the_completions() {
    let (dir, _) = generated();
    for (shell, file) in [("bash", "bash/virt-pin"), ("zsh", "zsh/_virt-pin"), ("fish", "fish/virt-pin.fish")] {
        let file = dir.path().join(file);
        let text = fs::read_to_string(&file).unwrap();
        for word in ["set-vcpus", "suggest", "core-sched", "autostart-reserve"] {
            says(&text, word);
        }
        if there(shell) {
            let output = Command::new(shell).arg("-n").arg(&file).output().unwrap();
            assert!(output.status.success() && output.stderr.is_empty(), "{shell}: {output:?}");
        }
    }
    let ask = "source \"$0\"; COMP_WORDS=(virt-pin set-v); COMP_CWORD=1; _virt__pin virt-pin set-v virt-pin; echo \"${COMPREPLY[*]}\"";
    let output = Command::new("bash").arg("-c").arg(ask).arg(dir.path().join("bash/virt-pin")).output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "set-vcpus\n");
}
