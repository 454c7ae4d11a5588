//! Metrics on their way: node_exporter reads the agent's file and shows what is in it; the dashboard and the alerts name nothing
//! that is not there; promtool has tried the alerts.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::agent::METRICS;
use crate::leases::{ONE, dedicated};
use crate::libvirtd::{Libvirtd, Options};
use crate::needs;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const DASHBOARD: &str = include_str!("../../packaging/grafana/virt-pin.json");
const RULES: &str = include_str!("../../packaging/prometheus/virt-pin.rules.yml");

/// The samples of a page in the text format, and its HELP and TYPE lines; ours alone.
fn ours(page: &str) -> (BTreeMap<String, f64>, BTreeSet<String>) {
    let (mut samples, mut families) = (BTreeMap::new(), BTreeSet::new());
    for line in page.lines().filter(|line| line.trim_start_matches(['#', ' ']).contains("virt_pin_")) {
        match line.rsplit_once(' ') {
            _ if line.starts_with('#') => drop(families.insert(line.to_owned())),
            Some((sample, value)) if line.starts_with("virt_pin_") => {
                // The order of labels is nobody's.
                let (name, labels) = sample.split_once('{').unwrap_or((sample, ""));
                let mut labels: Vec<&str> = labels.trim_end_matches('}').split(',').collect();
                labels.sort_unstable();
                samples.insert(format!("{name}{labels:?}"), value.parse().unwrap());
            }
            _ => {}
        }
    }
    (samples, families)
}

/// Every metric of ours that a text names.
fn named(text: &str) -> BTreeSet<&str> {
    let of_a_name = |byte: char| byte.is_ascii_lowercase() || byte == '_';
    text.split(|byte| !of_a_name(byte)).filter(|word| word.starts_with("virt_pin_")).collect()
}

#[test]
fn node_exporter_shows_what_the_agent_writes() {
    let Some(exporter) = needs::neighbour("prometheus-node-exporter") else { return };
    let Some(daemon) = Libvirtd::start(&Options::virt_pin(ONE)) else { return };
    let agent = daemon.start_agent();
    daemon.run(&dedicated("web"));
    daemon.define(&dedicated("second"));
    daemon.start_guest("second").refused();
    daemon.wait_until("lease and refusal are counted", |daemon| {
        let text = std::fs::read_to_string(daemon.path(METRICS)).unwrap_or_default();
        text.contains("virt_pin_refusals_total{") && text.contains("kind=\"dedicated\",state=\"running\"} 1")
    });
    let start = format!(
        "ip link set lo up && {{ {exporter} --collector.disable-defaults --collector.textfile --collector.textfile.directory={} \
         --web.listen-address=127.0.0.1:9100 </dev/null >/run/exporter.log 2>&1 & }}",
        Path::new(METRICS).parent().unwrap().display()
    );
    daemon.exec(&["bash", "-c", &start]).ok();
    let get = "exec 3<>/dev/tcp/127.0.0.1/9100 && printf 'GET /metrics HTTP/1.0\\r\\n\\r\\n' >&3 && cat <&3";
    daemon.wait_until("node_exporter answers", |daemon| daemon.exec(&["bash", "-c", get]).status.success());
    // The file may change between two looks.
    let mut found = (BTreeMap::new(), BTreeSet::new());
    daemon.wait_until("both say the same", |daemon| {
        let page = daemon.exec(&["bash", "-c", get]).ok();
        assert!(page.contains("node_textfile_scrape_error 0\n"), "{page}");
        assert!(page.contains(&format!("node_textfile_mtime_seconds{{file=\"{METRICS}\"}}")), "{page}");
        found = ours(&page);
        found.0 == ours(&daemon.file(METRICS)).0
    });
    let written = ours(&daemon.file(METRICS));
    assert!(found.0.len() >= 30, "{found:?}");
    // Families without a sample are not shown; nothing else is lost or changed.
    assert!(found.1.is_subset(&written.1), "{:?}", found.1.difference(&written.1));
    let lost = written.1.difference(&found.1).filter(|line| !line.contains("virt_pin_hook_failures_total"));
    assert_eq!(lost.count(), 0, "{found:?}");

    // What others ask for is there.
    let families: BTreeSet<&str> =
        written.1.iter().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    for (text, least) in [(DASHBOARD, 12), (RULES, 7)] {
        let names = named(text);
        assert!(names.len() >= least, "{names:?}");
        for name in names {
            let family = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
            assert!(families.contains(family), "{name} is not among {families:?}");
        }
    }
    daemon.destroy("web");
    daemon.stop_agent(agent);
}

/// What Grafana needs of a dashboard that is imported.
#[test]
fn the_dashboard_is_one() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    assert_eq!((dashboard["uid"].as_str(), dashboard["title"].as_str()), (Some("virt-pin"), Some("virt-pin")));
    assert!(dashboard["schemaVersion"].as_u64().unwrap() >= 36 && dashboard["id"].is_null());
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    let variable = |name: &str| variables.iter().find(|one| one["name"] == name).unwrap();
    assert_eq!(
        (&variable("datasource")["type"], &variable("datasource")["query"]),
        (&"datasource".into(), &"prometheus".into())
    );
    assert_eq!(variable("instance")["datasource"]["uid"], "${datasource}");
    let panels = dashboard["panels"].as_array().unwrap();
    let mut taken = BTreeSet::new();
    for (number, panel) in panels.iter().enumerate() {
        assert_eq!(panel["id"].as_u64(), Some(number as u64 + 1));
        assert!(["stat", "timeseries"].contains(&panel["type"].as_str().unwrap()) && panel["title"].is_string());
        let at = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        assert!(at("x") + at("w") <= 24);
        for cell in (at("x")..at("x") + at("w")).flat_map(|x| (at("y")..at("y") + at("h")).map(move |y| (x, y))) {
            assert!(taken.insert(cell), "{} lies over another panel", panel["title"]);
        }
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty());
        for target in targets {
            let expression = target["expr"].as_str().unwrap();
            assert!(expression.contains("instance=~\"$instance\""), "{expression}");
            assert_eq!((&target["datasource"]["uid"], target["refId"].is_string()), (&"${datasource}".into(), true));
        }
    }
    assert!(panels.len() >= 10);
}

#[test]
fn promtool_has_tried_the_alerts() {
    let Some(promtool) = needs::neighbour("promtool") else { return };
    let run = |arguments: &[&str]| {
        let output =
            Command::new(&promtool).args(arguments).current_dir(format!("{ROOT}/packaging/prometheus")).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&[output.stdout, output.stderr].concat()));
    };
    run(&["check", "rules", "virt-pin.rules.yml"]);
    run(&["test", "rules", "virt-pin.test.yml"]);
    // The dashboard's expressions are of the same language.
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let targets = dashboard["panels"].as_array().unwrap().iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let mut rules = String::from("groups:\n  - name: dashboard\n    rules:\n");
    for (number, target) in targets.enumerate() {
        let expression = target["expr"].as_str().unwrap().replace("$__rate_interval", "5m");
        rules.push_str(
            &format!("      - {{record: 'dashboard:{number}', expr: '{expression}'}}\n")
                .replace("'dashboard:", "'dashboard:n"),
        );
    }
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(rules.as_bytes()).unwrap();
    run(&["check", "rules", file.path().to_str().unwrap()]);
}
