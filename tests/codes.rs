//! Every code is provoked here, through the programs as they are built, and its message is the one that the manual,
//! `virt-pin help` and docs/troubleshooting.md show beside the entry of that code.
//!
//! `UPDATE=1 cargo test --test codes` writes the messages and the document; a second run compiles the messages in. Which other
//! tests look closer at each code is in `tidy.rs`.
#![allow(
    clippy::disallowed_methods,
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    clippy::cast_possible_truncation,
    reason = "integration tests"
)]

mod machine;

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use machine::{Machine, Run, Vm};
use virt_pin::alloc::policy::Policy;
use virt_pin::cli;
use virt_pin::enforce::cookie;
use virt_pin::error::{Code, Error};
use virt_pin::host::root::Root;
use virt_pin::lock::StateLock;
use virt_pin::lock::leases::{Lease, Leases};
use virt_pin::manual::guide::{Entry, entry};

const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/troubleshooting.md");

/// A command, and what it printed on stderr.
struct Said {
    command: String,
    stderr: String,
}

/// The domains of the messages.
fn vm(name: &str, vcpus: u32) -> Vm {
    Vm::new(if name == "db" { 1 } else { 2 }, vcpus).named(name)
}

/// An event of a domain that fails with this code.
#[track_caller]
fn event(machine: &Machine, vm: &Vm, event: &str, code: Code) -> Said {
    let run = machine.event(vm, event);
    run.refused(code);
    let extra = if event.split(' ').count() == 2 { " -" } else { "" };
    let command = format!("virt-pin-hook {0} {event}{extra} < {0}.xml", vm.name);
    said(machine, command, &run)
}

/// A command that fails with this code.
#[track_caller]
fn command(machine: &Machine, words: &str, code: Code) -> Said {
    let words: Vec<_> = words.split(' ').collect();
    let run = machine.cli(&words);
    assert_eq!(run.code, Some(code.exit().into()), "{run:?}");
    run.complaint(code);
    said(machine, format!("virt-pin {}", words.join(" ")), &run)
}

/// Paths as on a machine of its own.
fn said(machine: &Machine, command: String, run: &Run) -> Said {
    let root = machine.root().display().to_string();
    Said { command: command.replace(&root, ""), stderr: run.stderr.replace(&root, "") }
}

/// An error of the library, whose way through a program needs more than a described machine.
fn rendered(command: &str, error: Error) -> Option<Said> {
    Some(Said { command: command.to_owned(), stderr: error.in_domain("db").render() })
}

/// cgroup v1 without its files: what is written there fails, as where a kernel says no.
fn with_cgroup(machine: &Machine) {
    machine.put("/proc/mounts", "cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n");
    for (file, value) in [("cpuset.cpus", "0-15\n"), ("cpuset.mems", "0-1\n"), ("cpuset.effective_cpus", "0-15\n")] {
        machine.put(&format!("/sys/fs/cgroup/cpuset/{file}"), value);
        machine.put(&format!("/sys/fs/cgroup/cpuset/machine/{file}"), value);
    }
}

/// Provokes the code. `None` where this machine cannot: the message is then what another one printed.
fn provoke(code: Code) -> Option<Said> {
    // Cores 2-10 and 3-11, on one node; "web" has the first of them.
    let machine = Machine::new("2-3,10-11");
    let web = vm("web", 2);
    let beside_web = || machine.prepare(&web);
    let prepare = |vm: &Vm| event(&machine, vm, "prepare begin", code);
    Some(match code {
        Code::Internal => {
            // The way to it is closed everywhere, so the last door is tried itself.
            beside_web();
            let root = Root::directory(machine.root());
            let lease = virt_pin::lock::read(&root).unwrap().iter().next().unwrap().clone();
            let mut twice = Leases::default();
            twice.put(lease.clone());
            twice.put(Lease { uuid: virt_pin::uuid::DomainUuid::parse(&vm("db", 2).uuid).unwrap(), ..lease });
            let error = StateLock::acquire(&root, Duration::from_secs(1)).unwrap().replace(&twice).unwrap_err();
            assert_eq!(error.code, code);
            return rendered("virt-pin-hook db prepare begin - < db.xml", error);
        }
        Code::Usage => command(&machine, "lease db --colour", code),
        Code::CheckFailed => command(&machine, "check", code),
        Code::DomainInvalid => {
            let text = vm("db", 2).xml();
            machine.put("/db.xml", &text[..text.len() - 10]);
            command(&machine, &format!("define {}", machine.path("/db.xml").display()), code)
        }
        Code::DomainUnknown => command(&machine, "lease db", code),
        Code::PolicyInvalid => prepare(&vm("db", 2).with("numa='one'")),
        Code::PolicyUnsupported => {
            prepare(&vm("db", 2).with("isolation='partition' emulator='share' dedicated-vcpus='0'"))
        }
        Code::PolicyDenied => {
            machine.config("pinnable_cpus = \"2-3,10-11\"\n\n[[limit]]\nmatch = \"d*\"\nmax_vcpus = 2\n");
            prepare(&vm("db", 4))
        }
        Code::Shortage => {
            beside_web();
            prepare(&vm("db", 4))
        }
        Code::NeedsRepack => {
            // Two cores on each of two nodes, and one of each is taken.
            machine.pinnable("2-5,10-13");
            beside_web();
            let others = [3, 4].map(|number| Vm::new(number, 2));
            others.iter().for_each(|other| drop(machine.prepare(other)));
            machine.event(&others[0], "release end shutdown").silent();
            prepare(&vm("db", 4).with("numa='single'"))
        }
        Code::Unsatisfiable => prepare(&vm("db", 6)),
        Code::MemoryShortage => prepare(&vm("db", 2).memory_kib(62 << 20)),
        Code::StaticConflict => {
            beside_web();
            prepare(&vm("db", 1).without_policy().pinned(&[10]))
        }
        Code::StalePins => prepare(&vm("db", 2).pinned(&[0, 8])),
        Code::Reserved => {
            machine.define(&web, true);
            beside_web();
            machine.event(&web, "release end shutdown").silent();
            machine.prepare(&Vm::new(3, 2));
            prepare(&vm("db", 2))
        }
        Code::SharedPoolEmpty => {
            with_cgroup(&machine);
            fs::create_dir_all(machine.path("/sys/fs/cgroup/cpuset/machine/qemu-5-web.libvirt-qemu")).unwrap();
            machine.pinnable("0-15");
            prepare(&vm("db", 16).with("emulator='share' iothreads='share'"))
        }
        Code::StaleCaches => {
            for cpu in 0..16 {
                machine.put(&format!("/sys/devices/system/cpu/cpu{cpu}/cache/index3/id"), "1\n");
            }
            let cache = "<cachetune vcpus='0-1'><cache id='0' level='3' type='both' size='3' unit='MiB'/></cachetune>";
            prepare(&vm("db", 2).body(&format!("<cputune>{cache}</cputune>")))
        }
        Code::TopologyOtherwise => {
            let told = "<cpu><topology sockets='2' cores='1' threads='1'/></cpu>";
            prepare(&vm("db", 2).with("topology='require'").body(told))
        }
        Code::StateLocked => {
            let held = machine.hold_lock();
            let lock = held.metadata().unwrap();
            let (major, minor) = (nix::libc::major(lock.dev()), nix::libc::minor(lock.dev()));
            let line = format!("1: FLOCK  ADVISORY  WRITE 812 {major:02x}:{minor:02x}:{} 0 EOF\n", lock.ino());
            machine.put("/proc/locks", &line);
            machine.put("/proc/812/comm", "virt-pin\n");
            machine.put("/proc/812/stat", "812 (virt-pin) S 1 812 812 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 300 0 0\n");
            prepare(&vm("db", 2))
        }
        Code::StateCorrupt => {
            beside_web();
            let text = machine.leases().unwrap();
            machine.put("/run/virt-pin/leases.json", &text[..text.len() / 2]);
            prepare(&vm("db", 2))
        }
        Code::StateNewer => {
            machine.put("/run/virt-pin/leases.json", "{\"version\":3,\"leases\":[]}\n");
            prepare(&vm("db", 2))
        }
        Code::StateUnsafe => {
            machine.make_state_dir();
            fs::set_permissions(machine.path("/run/virt-pin"), fs::Permissions::from_mode(0o777)).unwrap();
            prepare(&vm("db", 2))
        }
        Code::StateConflict => {
            let db = vm("db", 2);
            machine.prepare(&db);
            machine.qemu(&db, 700, &[2, 10], "0-1,4-9,12-15");
            machine.event(&db, "started begin").silent();
            prepare(&db)
        }
        Code::TopologyUnreadable => {
            fs::remove_dir_all(machine.path("/sys")).unwrap();
            prepare(&vm("db", 2))
        }
        Code::HostIo => {
            machine.put("/host.txt", "");
            command(&machine, &format!("gather {}", machine.path("/host.txt").display()), code)
        }
        Code::IsolationUnsupported => {
            with_cgroup(&machine);
            prepare(&vm("db", 2).with("isolation='partition'"))
        }
        Code::ConfigInvalid => {
            machine.config("pinnable_cpus = \"2-\"\n");
            prepare(&vm("db", 2))
        }
        Code::ConfinementFailed => {
            with_cgroup(&machine);
            prepare(&vm("db", 2))
        }
        Code::ThreadMisplaced => {
            let db = vm("db", 2);
            machine.prepare(&db);
            machine.qemu(&db, 700, &[2, 3], "0-1,4-9,12-15");
            event(&machine, &db, "started begin", code)
        }
        Code::IsolationFailed => {
            machine.pinnable("0-15");
            prepare(&vm("db", 16).with("emulator='share' iothreads='share' irqs='away'"))
        }
        Code::CoreSched => {
            let policy = [("policy", "dedicated"), ("core-sched", "tenant"), ("tenant", "acme")];
            // Asks the kernel one thing and changes nothing; live/leases.rs has the whole way through libvirt.
            let asked = cookie::check(&Root::directory("/"), &Policy::from_attributes(policy).unwrap());
            return rendered("virt-pin-hook db prepare begin - < db.xml", asked.err()?);
        }
        Code::LibvirtFailed => {
            beside_web();
            let said = command(&machine, "sync web", code);
            return Some(said).filter(|said| said.stderr.contains("'/var/run/libvirt/libvirt-sock': No such file"));
        }
        Code::InstallConflict => {
            machine.put("/etc/libvirt/hooks/qemu.d/10-virt-pin", "#!/bin/sh\n");
            command(&machine, "install", code)
        }
        code => panic!("nothing here provokes {code}"),
    })
}

fn updating() -> bool {
    std::env::var_os("UPDATE").is_some()
}

#[test]
fn every_message_is_the_one_beside_its_entry() {
    let mut source = "//! The message of each code as it was printed. Written by `tests/codes.rs` (`UPDATE=1`), which provokes each; \
                      never by hand.\n"
        .to_owned();
    let mut provoked = 0;
    for code in Code::all() {
        let example = match provoke(code) {
            Some(Said { command, stderr }) => {
                provoked += 1;
                format!("# {command}\n{stderr}")
            }
            None => {
                eprintln!("not provoked here: {code}");
                entry(code).example.to_owned()
            }
        };
        let name = code.name().replace(['.', '-'], "_").to_uppercase();
        write!(source, "\npub(super) const {name}: &str = r#\"{example}\"#;\n").unwrap();
        if !updating() {
            let advice = "run UPDATE=1 cargo test --test codes, twice";
            assert_eq!(entry(code).example, example, "the message of {code} is not as recorded: {advice}");
        }
    }
    assert!(provoked >= Code::all().count() - 2, "{provoked}");
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/src/manual/guide/messages.rs");
    if updating() {
        fs::write(file, source).unwrap();
    } else {
        assert!(fs::read_to_string(file).unwrap() == source, "{file} is not what was printed");
    }
}

/// Without what lines and their beginnings make of it.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<String>()
}

#[test]
fn help_shows_the_message_and_the_entry_together() {
    let machine = Machine::bare();
    for code in Code::all() {
        let text = machine.cli(&["help", code.name()]).printed();
        assert!(text.lines().all(|line| line.chars().count() <= 80 || !line.contains(' ')), "{text}");
        let Entry { means, look, remedies, passes, example } = entry(code);
        let meaning = code.meaning();
        let parts = [*example, means, passes, meaning].into_iter().chain(look.iter().chain(*remedies).copied());
        for part in parts {
            assert!(words(&text).contains(&words(part)), "{part} is not in {text}");
        }
        assert_eq!(machine.cli(&["help", &code.exit().to_string()]).printed(), text);
        let value = machine.json(&["help", code.name()]);
        assert_eq!((&value["code"], &value["exit"]), (&code.name().into(), &code.exit().into()));
        assert!(machine.cli(&["help", "codes"]).printed().contains(code.name()));
    }
    let run = machine.cli(&["help", "cpu.red"]);
    assert_eq!(run.refused(Code::Usage), "neither a command nor a code is named \"cpu.red\"");
    let explain = machine.cli(&["help", "explain"]).printed();
    assert!(explain.contains("Usage: virt-pin explain") && explain.contains("--for-host"), "{explain}");
}

/// The section of the document about a code.
fn section(code: Code) -> String {
    let Entry { means, look, remedies, passes, example } = entry(code);
    let meaning = code.meaning();
    let (first, rest) = meaning.split_at(1);
    let mut out = format!("### `{code}`\n\n{}{rest}. Exit status {}.\n\n", first.to_uppercase(), code.exit());
    write!(out, "```console\n{example}```\n\n{means}\n\nTo find out more:\n\n").unwrap();
    look.iter().for_each(|point| writeln!(out, "- {point}").unwrap());
    write!(out, "\nWhat to do:\n\n").unwrap();
    remedies.iter().for_each(|point| writeln!(out, "- {point}").unwrap());
    write!(out, "\nDoes it go away by itself? {passes}\n\n").unwrap();
    out
}

/// What a shell prints on this machine, with the programs in its path.
fn shell(machine: &Machine, command: &str) -> String {
    let programs = PathBuf::from(env!("CARGO_BIN_EXE_virt-pin")).parent().unwrap().display().to_string();
    let output = Command::new("sh")
        .args(["-c", command])
        .env_clear()
        .env("PATH", format!("{programs}:/usr/bin:/bin"))
        .env("LC_ALL", "C")
        .env("VIRT_PIN_ROOT", machine.root())
        .output()
        .unwrap();
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    text.replace(&machine.root().display().to_string(), "")
}

/// What the symptom of this name looks like: a machine that has it.
fn scene(name: &str) -> Machine {
    let machine = Machine::new("2-7,10-15");
    let daemon = || {
        machine.put("/proc/812/stat", "812 (libvirtd) S 1 812 812 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 300 0 0\n");
        machine.put("/proc/812/comm", "libvirtd\n");
    };
    match name {
        "not-seen" => {
            daemon();
            // A file's time is the clock's tick; the daemon is the older one.
            std::thread::sleep(Duration::from_millis(50));
            machine.cli(&["install"]).printed();
        }
        "not-executable" => {
            machine.cli(&["install"]).printed();
            let hook = machine.path("/etc/libvirt/hooks/qemu.d/10-virt-pin");
            fs::set_permissions(hook, fs::Permissions::from_mode(0o644)).unwrap();
        }
        "in-vain" => {
            let db = Vm { policy: Some("numa='single'".to_owned()), ..vm("db", 2) };
            machine.define(&db, false);
        }
        "told-otherwise" => {
            machine.define(&vm("db", 4).body("<cpu><topology sockets='4' cores='1' threads='1'/></cpu>"), false);
        }
        "withheld" => machine.pinnable("2-7"),
        "no-place" => {
            machine.define(&vm("db", 8), true);
            machine.define(&vm("web", 6), true);
            machine.cli(&["install"]).printed();
        }
        other => panic!("no scene is called {other}"),
    }
    machine
}

#[test]
fn the_document_has_every_code_and_shows_what_is_printed() {
    let found = fs::read_to_string(DOCUMENT).unwrap();
    let mut parts = found.split("<!-- scene: ");
    let mut expected = parts.next().unwrap().to_owned();
    let mut scenes = 0;
    for part in parts {
        let (name, rest) = part.split_once(" -->\n```console\n").unwrap();
        let (block, after) = rest.split_once("```\n").unwrap();
        let command = block.lines().next().unwrap().strip_prefix("# ").unwrap();
        let printed = shell(&scene(name), command);
        assert!(!printed.is_empty(), "{name}");
        write!(expected, "<!-- scene: {name} -->\n```console\n# {command}\n{printed}```\n{after}").unwrap();
        scenes += 1;
    }
    assert!(scenes >= 5, "{scenes}");
    let (before, rest) = expected.split_once("<!-- codes -->\n").unwrap();
    let (_, after) = rest.split_once("<!-- end of codes -->\n").unwrap();
    let sections: String = Code::all().map(section).collect();
    let expected = format!("{before}<!-- codes -->\n{sections}<!-- end of codes -->\n{after}");
    if updating() {
        fs::write(DOCUMENT, expected).unwrap();
    } else {
        assert!(found == expected, "docs/troubleshooting.md: run UPDATE=1 cargo test --test codes, twice");
    }
}

/// Every command of ours that a text names, as it would be typed.
fn commands(text: &str) -> Vec<Vec<&str>> {
    let code = text.split('`').skip(1).step_by(2);
    let each = code.flat_map(|code| code.split(['|', ';', '\n'])).map(|command| command.trim_start_matches(['#', ' ']));
    each.filter_map(|command| command.strip_prefix("virt-pin "))
        .map(|words| words.split_whitespace().collect())
        .collect()
}

#[test]
fn the_commands_that_are_named_exist() {
    let mut texts: Vec<String> = Code::all()
        .flat_map(|code| {
            let Entry { means, look, remedies, passes, .. } = entry(code);
            [*means, passes, code.advice(), code.meaning()]
                .into_iter()
                .chain(look.iter().chain(*remedies).copied())
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .collect();
    // Fences would count as backticks.
    texts.push(fs::read_to_string(DOCUMENT).unwrap().replace("```", "\n"));
    let mut grammar = cli::grammar();
    grammar.build();
    let mut seen = 0;
    for text in &texts {
        for words in commands(text) {
            let known = |verb: Option<&clap::Command>, option: &str| {
                let all = verb.into_iter().flat_map(clap::Command::get_arguments).chain(grammar.get_arguments());
                all.filter_map(clap::Arg::get_long).any(|long| long == option) || ["help", "version"].contains(&option)
            };
            let name = words.iter().find(|word| !word.starts_with('-'));
            let verb = name.map(|name| {
                grammar
                    .find_subcommand(name)
                    .unwrap_or_else(|| panic!("`virt-pin {}`: no such command", words.join(" ")))
            });
            for option in words.iter().filter_map(|word| word.strip_prefix("--")) {
                let option = option.split('=').next().unwrap();
                assert!(known(verb, option), "`virt-pin {}`: no such option", words.join(" "));
            }
            seen += 1;
        }
    }
    assert!(seen > 60, "{seen}");
}
