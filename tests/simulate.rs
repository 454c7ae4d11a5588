//! Streams of starts and stops: never two owners of a CPU, and what a stop frees can be had again. Through the library in
//! numbers, through the built command in form.
#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "integration tests"
)]

use std::collections::BTreeSet;
use std::io::Write;
use std::process::{Command, Stdio};

use proptest::prelude::*;
use serde_json::Value;
use virt_pin::alloc::policy::Policy;
use virt_pin::alloc::request::Request;
use virt_pin::alloc::simulation::Simulation;
use virt_pin::cpuset::CpuSet;
use virt_pin::error::Code;
use virt_pin::host::shape;

#[derive(Clone, Debug)]
enum Step {
    Start(u8, u16, usize),
    Stop(u8),
    Online(u16, bool),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..12u8, 1..9u16, 0..POLICIES.len()).prop_map(|(id, vcpus, policy)| Step::Start(id, vcpus, policy)),
        3 => (0..12u8).prop_map(Step::Stop),
        1 => (0..32u16, any::<bool>()).prop_map(|(cpu, online)| Step::Online(cpu, online)),
    ];
    proptest::collection::vec(step, 1..60)
}

const POLICIES: &[&[(&str, &str)]] = &[
    &[],
    &[("cores", "thread")],
    &[("threads-per-core", "1")],
    &[("numa", "single"), ("emulator", "isolate")],
    &[("cache", "single"), ("cores", "thread")],
    &[("numa", "any"), ("cache", "any"), ("emulator", "share"), ("iothreads", "share")],
];

fn request(vcpus: u16, policy: usize) -> Request {
    let attributes = [("policy", "dedicated")].iter().chain(POLICIES[policy]).copied();
    Request::new(vcpus, Policy::from_attributes(attributes).unwrap())
}

proptest! {
    #[test]
    fn no_cpu_ever_has_two_owners(steps in steps(), shape in prop_oneof![Just("2s8c2t,numa=2,llc=4"), Just("1s16c1t,llc=2"), Just("4s4c2t")], pinnable in prop_oneof![Just("0-31"), Just("2-15,18-31"), Just("1-30")]) {
        let host = shape::parse(shape).unwrap();
        let pinnable = CpuSet::parse_kernel_list(pinnable).unwrap();
        let mut simulation = Simulation::new(host, pinnable.clone());
        for step in steps {
            let before = simulation.running().clone();
            match step {
                Step::Start(id, vcpus, policy) => {
                    if let Err(refusal) = simulation.start(&id.to_string(), &request(vcpus, policy)) {
                        prop_assert!(refusal.code != Code::Internal, "{:?}", refusal);
                        prop_assert_eq!(simulation.running(), &before);
                    }
                }
                Step::Stop(id) => {
                    if let Some(plan) = simulation.stop(&id.to_string()) {
                        // What was just freed can be had again, if it is still online.
                        prop_assert!(plan.exclusive().intersection(simulation.host().online()).is_subset(&simulation.free()));
                    }
                }
                Step::Online(cpu, online) => {
                    let cpus = CpuSet::parse_kernel_list(&cpu.to_string()).unwrap();
                    simulation.set_online(&cpus, online);
                }
            }
            let mut owned = BTreeSet::new();
            for (id, plan) in simulation.running() {
                prop_assert!(plan.exclusive().is_subset(&pinnable));
                for cpu in plan.exclusive().iter() {
                    prop_assert!(owned.insert(cpu), "CPU {cpu} of {id} has two owners");
                }
            }
        }
    }

    #[test]
    fn the_same_stream_gives_the_same_cpus(steps in steps()) {
        let run = || {
            let host = shape::parse("2s8c2t,numa=2,llc=4").unwrap();
            let online = host.online().clone();
            let mut simulation = Simulation::new(host, online);
            for step in &steps {
                match step {
                    Step::Start(id, vcpus, policy) => drop(simulation.start(&id.to_string(), &request(*vcpus, *policy)).is_ok()),
                    Step::Stop(id) => drop(simulation.stop(&id.to_string())),
                    Step::Online(..) => {}
                }
            }
            simulation.running().clone()
        };
        prop_assert_eq!(run(), run());
    }
}

fn simulate(arguments: &[&str], events: &str) -> (Option<i32>, Vec<Value>, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_virt-pin"))
        .arg("simulate")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It may have seen enough before all is written.
    let _ = child.stdin.take().unwrap().write_all(events.as_bytes());
    let output = child.wait_with_output().unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    let lines = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (output.status.code(), lines, String::from_utf8(output.stderr).unwrap())
}

#[test]
fn one_answer_a_line_and_totals() {
    let events = "{\"op\":\"start\",\"id\":\"a\",\"vcpus\":4}\n\n{\"op\":\"start\",\"id\":\"b\",\"vcpus\":99}\n{\"op\":\"stop\",\"id\":\"a\"}\n";
    let (code, lines, stderr) = simulate(&["--host-shape", "1s4c2t", "--pinnable", "1-3,5-7"], events);
    assert_eq!((code, lines.len(), stderr.as_str()), (Some(0), 4, ""));
    assert_eq!(lines[0]["cpus"], serde_json::json!([1, 5, 2, 6]));
    assert_eq!(lines[0]["emulator"], serde_json::json!([0, 4]));
    assert_eq!(lines[1]["refused"]["code"], "cpu.placement.unsatisfiable");
    assert_eq!(lines[2]["freed"], "1-2,5-6");
    assert_eq!(
        (&lines[3]["started"], &lines[3]["refused"], &lines[3]["free"]),
        (&1.into(), &1.into(), &"1-3,5-7".into())
    );
}

#[test]
fn definitions_have_places() {
    let define = |id: &str, more: &str| format!("{{\"op\":\"define\",\"id\":\"{id}\",\"vcpus\":2{more}}}\n");
    let start = |id: &str| format!("{{\"op\":\"start\",\"id\":\"{id}\"}}\n");
    let transient = |id: &str| format!("{{\"op\":\"start\",\"id\":\"{id}\",\"vcpus\":2}}\n");
    let undefine = |id: &str| format!("{{\"op\":\"undefine\",\"id\":\"{id}\"}}\n");
    let definitions =
        define("a", "") + &define("b", ",\"autostart\":true") + &define("c", ",\"policy\":{\"policy\":\"shared\"}");
    let cpus = |line: &Value| line["cpus"].clone();
    for order in [["a", "b"], ["b", "a"]] {
        let events = definitions.clone() + &order.map(start).concat();
        let (_, lines, _) = simulate(&["--host-shape", "1s3c2t"], &events);
        let place = |id: &str| cpus(lines.iter().find(|line| line["op"] == "start" && line["id"] == id).unwrap());
        assert_eq!((place("b"), place("a")), (serde_json::json!([0, 3]), serde_json::json!([1, 4])));
    }
    let events =
        definitions + &["s", "t", "u"].map(transient).concat() + &undefine("b") + &undefine("b") + &transient("u");
    let (code, lines, _) = simulate(&["--host-shape", "1s3c2t"], &events);
    assert_eq!((code, cpus(&lines[3])), (Some(0), serde_json::json!([2, 5])));
    assert_eq!(cpus(&lines[4]), serde_json::json!([1, 4]), "a merely defined one's place is no reservation");
    assert_eq!(lines[5]["refused"]["code"], "cpu.placement.reserved");
    assert_eq!(lines[6], serde_json::json!({ "op": "undefine", "id": "b" }));
    assert_eq!(lines[7]["refused"]["code"], "domain.not-found");
    assert_eq!(cpus(&lines[8]), serde_json::json!([0, 3]));
    let (_, lines, _) = simulate(&["--host-shape", "1s3c2t", "--autostart-reserve", "prefer"], &events);
    assert_eq!(cpus(&lines[5]), serde_json::json!([0, 3]));
    let (code, _, stderr) = simulate(&["--host-shape", "1s3c2t", "--autostart-reserve", "perhaps"], "");
    assert!(code == Some(2) && stderr.contains("must be strict or prefer"), "{stderr}");
}

#[test]
fn mistakes_name_their_line() {
    for (events, part) in [
        ("{\"op\":\"stop\",\"id\":\"a\"}\nnonsense\n", "events, line 2: expected"),
        ("{\"op\":\"start\"}", "events, line 1: needs an \"id\""),
        ("{\"op\":\"start\",\"id\":\"a\",\"cpu\":1}", "unknown field `cpu`"),
        ("{\"op\":\"start\",\"id\":\"a\",\"vcpus\":-1}", "invalid value"),
        ("{\"op\":\"offline\",\"cpus\":\"3-1\"}", "range runs backwards"),
        ("{\"op\":\"offline\"}", "need \"cpus\""),
    ] {
        let (code, _, stderr) = simulate(&["--host-shape", "1s4c2t"], events);
        assert_eq!(code, Some(2), "{events}");
        assert!(stderr.starts_with("virt-pin: error[usage]: ") && stderr.contains(part), "{events}: {stderr}");
    }
    let (code, _, stderr) = simulate(&["--host-shape", "1s4c"], "");
    assert!(code == Some(2) && stderr.contains("host shape \"1s4c\""), "{stderr}");
    let long = format!("{{\"op\":\"stop\",\"id\":\"{}\"}}", "a".repeat(2 << 20));
    assert!(simulate(&["--host-shape", "1s4c2t"], &long).2.contains("longer than"));
}

#[test]
fn advice_and_moves() {
    let start = |id: &str, vcpus: u16, policy: &str| {
        format!("{{\"op\":\"start\",\"id\":\"{id}\",\"vcpus\":{vcpus},\"policy\":{{{policy}}}}}\n")
    };
    // Two nodes of four cores. In the end one core of each is free, and one VM could be on either.
    let mut events = start("a", 2, "\"nodes\":0") + &start("b", 3, "\"nodes\":1") + &start("c", 1, "\"nodes\":1");
    events += &start("any", 1, "\"cache\":\"any\"");
    events += "{\"op\":\"stop\",\"id\":\"c\"}\n";
    let wide = events.clone() + &start("e", 2, "");
    let (code, lines, stderr) = simulate(&["--host-shape", "2s4c1t"], &wide);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    let advice = &lines[lines.len() - 2]["advice"];
    assert_eq!((&advice["spans"]["nodes"], &advice["possible"]["nodes"]), (&2.into(), &1.into()), "{lines:?}");
    assert_eq!(
        advice["message"],
        "spans 2 nodes (0-1) where 1 is possible; it would be so once enough is free on one node"
    );
    assert_eq!(advice.get("moves"), None);
    let (_, lines, _) = simulate(&["--host-shape", "2s4c1t", "--moves"], &wide);
    let advice = &lines[lines.len() - 2]["advice"];
    let moved = &advice["moves"][0];
    assert_eq!(moved["domain"], "any", "{advice}");
    let (from, to) = (moved["from"].as_str().unwrap(), moved["to"].as_str().unwrap());
    assert!(advice["message"].as_str().unwrap().ends_with(&format!("if \"any\" from CPUs {from} to {to} moved")));
    // The same as a refusal.
    let narrow = events + &start("e", 2, "\"numa\":\"single\"");
    let (_, lines, _) = simulate(&["--host-shape", "2s4c1t", "--moves"], &narrow);
    let refused = &lines[lines.len() - 2]["refused"];
    assert_eq!((&refused["code"], &refused["moves"][0]), (&"cpu.placement.needs-repack".into(), moved));
    assert_eq!(refused["retry_when"], "when 2 whole cores are free on one node");
    let (_, lines, _) = simulate(&["--host-shape", "2s4c1t"], &narrow);
    assert_eq!(lines[lines.len() - 2]["refused"].get("moves"), None);
}

/// As on a real host: a place that is set aside is nobody's to move to.
#[test]
fn nobody_is_told_to_move_where_an_autostart_domain_will_be() {
    let start = |id: &str| format!("{{\"op\":\"start\",\"id\":\"{id}\",\"vcpus\":1}}\n");
    // Two caches of two cores, one core of each free; 3 is set aside.
    let before = ["a", "x", "b"].map(start).concat() + "{\"op\":\"stop\",\"id\":\"x\"}\n";
    let auto = "{\"op\":\"define\",\"id\":\"auto\",\"vcpus\":1,\"autostart\":true,\"policy\":{\"cpus\":\"3\"}}\n";
    let big = "{\"op\":\"start\",\"id\":\"big\",\"vcpus\":2,\"policy\":{\"cache\":\"single\"}}\n";
    for (events, moved) in [(before.clone() + big, true), (before + auto + big, false)] {
        let (_, lines, _) = simulate(&["--host-shape", "1s4c1t,llc=2", "--moves"], &events);
        let refused = &lines[lines.len() - 2]["refused"];
        assert_eq!((&refused["code"], refused.get("moves").is_some()), (&"cpu.placement.needs-repack".into(), moved));
    }
}

#[test]
fn a_definition_of_no_policy_has_no_place_and_does_not_start() {
    let define = |policy: &str| format!("{{\"op\":\"define\",\"id\":\"a\",\"vcpus\":1,\"policy\":{{{policy}}}}}\n");
    let events = define("") + &define("\"cache\":\"one\"") + "{\"op\":\"start\",\"id\":\"a\"}\n";
    let (code, lines, _) = simulate(&["--host-shape", "1s4c1t"], &events);
    assert_eq!((code, lines[1]["op"].as_str()), (Some(0), Some("define")));
    assert_eq!(lines[1]["refused"]["code"], "cpu.policy.invalid");
    assert_eq!(lines[2]["refused"], lines[1]["refused"]);
}

#[test]
fn who_can_do_without_runs_without() {
    let events = r#"{"op":"start","id":"a","vcpus":4}
{"op":"start","id":"b","vcpus":2,"policy":{"fallback":"shared"}}
{"op":"start","id":"b","vcpus":2,"policy":{"fallback":"shared"}}
{"op":"stop","id":"b"}
{"op":"stop","id":"a"}
{"op":"start","id":"b","vcpus":2,"policy":{"fallback":"shared"}}
{"op":"start","id":"c","vcpus":2,"policy":{"fallback":"shared","numa":"never"}}
"#;
    let (code, answers, _) = simulate(&["--host-shape", "1s2c2t"], events);
    assert_eq!(code, Some(0));
    assert_eq!(answers[1]["degraded"]["code"], "cpu.placement.shortage");
    assert_eq!(answers[2]["refused"]["code"], "state.conflict");
    assert_eq!(answers[3]["freed"], "");
    assert_eq!(answers[5]["cpus"], serde_json::json!([0, 2]));
    assert_eq!(answers[6]["refused"]["code"], "cpu.policy.invalid");
    assert_eq!(
        (&answers[7]["degraded"], &answers[7]["started"], &answers[7]["refused"]),
        (&1.into(), &2.into(), &2.into())
    );
}

/// Under a configuration each VM has the policy that one of its name has on a host.
#[test]
fn a_configuration_holds_where_one_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("virt-pin.toml");
    let config = "pinnable_cpus = \"1-3,5-7\"\nautostart_reserve = \"prefer\"\n\n[[domain]]\nmatch = \"ci-*\"\npolicy = \
                  \"dedicated\"\nthreads-per-core = 1\n\n[[limit]]\nmatch = \"ci-*\"\nmax_vcpus = 2\ndeny = [\"cpus\"]\n";
    std::fs::File::create(&file).unwrap().write_all(config.as_bytes()).unwrap();
    let start = |rest: &str| format!("{{\"op\":\"start\",{rest}}}\n");
    let events = [
        start("\"id\":\"ci-1\",\"vcpus\":2"),
        start("\"id\":\"ci-2\",\"vcpus\":3"),
        start("\"id\":\"ci-3\",\"vcpus\":1,\"policy\":{\"cpus\":\"7\"}"),
        start("\"id\":\"db\",\"vcpus\":1"),
        start("\"id\":\"db\",\"vcpus\":1,\"policy\":{\"policy\":\"dedicated\"}"),
    ]
    .concat();
    let file = file.to_str().unwrap();
    let (code, lines, stderr) = simulate(&["--host-shape", "1s4c2t", "--config", file], &events);
    assert_eq!((code, lines.len(), stderr.as_str()), (Some(0), 6, ""));
    assert_eq!((&lines[0]["cpus"], &lines[0]["parked"]), (&serde_json::json!([1, 2]), &serde_json::json!([5, 6])));
    for line in &lines[1..3] {
        assert_eq!(line["refused"]["code"], "cpu.policy.denied", "{line}");
    }
    assert_eq!((&lines[3]["shared"], &lines[4]["cpus"]), (&true.into(), &serde_json::json!([3])));
    // Its word on the places of autostart domains counts, unless the command line has one.
    let events = "{\"op\":\"define\",\"id\":\"a\",\"vcpus\":6,\"autostart\":true,\"policy\":{\"policy\":\"dedicated\"}}\n\
                  {\"op\":\"start\",\"id\":\"b\",\"vcpus\":2,\"policy\":{\"policy\":\"dedicated\"}}\n";
    let (_, lines, _) = simulate(&["--host-shape", "1s4c2t", "--config", file], events);
    assert!(lines[1]["refused"].is_null(), "{lines:?}");
    let strict = ["--host-shape", "1s4c2t", "--config", file, "--autostart-reserve", "strict"];
    assert_eq!(simulate(&strict, events).1[1]["refused"]["code"], "cpu.placement.reserved");
    assert_eq!(simulate(&["--table", "--json"], "").0, Some(Code::Usage.exit().into()));
}
