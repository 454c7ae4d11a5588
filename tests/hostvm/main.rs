#![allow(
    clippy::tests_outside_test_module,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "integration tests"
)]
//! virt-pin on whole hosts: emulated machines of chosen shapes with systemd, cgroup v2, machined, libvirt and QEMU.
//!
//! `image` builds the disk (by `image.sh`), `shape` says what the machine is, `vm` runs QEMU, `snapshot` boots it once, `host` is
//! a clone for a test, `cache` keeps what is slow, `wire` is how one talks with them, `needs` knows whether to run at all.
//! `leases` holds what virt-pin promises there; this file tests the test bed. `make test-host` runs it; a plain `cargo test` only
//! says so.

mod cache;
#[allow(dead_code, reason = "each test program uses its part")]
#[path = "../live/guest.rs"]
mod guest;
mod host;
mod image;
mod leases;
mod needs;
mod shape;
mod snapshot;
mod vm;
mod wire;

use std::time::Instant;

use host::Host;
use shape::Shape;

#[test]
fn a_clone_answers() {
    let began = Instant::now();
    let Some(host) = Host::start(Shape::default()) else { return };
    eprintln!("clone {:.2}", began.elapsed().as_secs_f64());
    for script in [
        "true",
        "uname -a; echo no >&2; exit 3",
        "nproc; free -m; systemd-analyze; systemctl --failed; virsh list --all; machinectl; ls /sys/fs/cgroup /dev",
    ] {
        let began = Instant::now();
        let output = host.sh(script);
        eprintln!("{:.2} {output:?}", began.elapsed().as_secs_f64());
        eprintln!("{}", output.stdout);
    }
}
