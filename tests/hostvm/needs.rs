//! Whether the tests of the host VM run here and now. They take minutes, so they have to be asked for.

use std::io::Write as _;
use std::sync::OnceLock;

/// Unset: no test runs. `required`: all must. Anything else: those run that can.
const SWITCH: &str = "VIRT_PIN_HOSTVM";

/// Whether the tests were asked for and can run, as far as is known before anything is built.
pub(crate) fn met() -> bool {
    static MISSING: OnceLock<Option<String>> = OnceLock::new();
    match MISSING.get_or_init(missing) {
        None => true,
        Some(why) => skip(why),
    }
}

/// Says why a test does not run, on the terminal, past the test runner's capture; `false`, for the caller to return.
///
/// # Panics
/// Where tests are required: a run that must test must not pass by skipping.
pub(crate) fn skip(why: &str) -> bool {
    assert!(std::env::var_os(SWITCH).is_none_or(|value| value != "required"), "host VMs are required, but {why}");
    say(&format!("skipped: {}: {why}", std::thread::current().name().unwrap_or("host VM")));
    false
}

/// A line on the terminal, past the test runner's capture: what takes a minute says so.
pub(crate) fn say(line: &str) {
    // Nobody may be there to read it.
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn missing() -> Option<String> {
    if std::env::var_os(SWITCH).is_none() {
        return Some(format!("it takes minutes: run `make test-host`, or set {SWITCH}"));
    }
    if !nix::unistd::geteuid().is_root() {
        return Some("only root can build a host VM and end it for sure".to_owned());
    }
    if !cfg!(target_arch = "x86_64") {
        return Some("the host VM is an x86-64 machine, and runs this build's binaries".to_owned());
    }
    None
}
