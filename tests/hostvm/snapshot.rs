//! A machine saved just after its first boot, for clones to go on from.
//!
//! What libvirtd and systemd do only once is done before: QEMU's capabilities are probed, one VM has been started and stopped.

use std::path::{Path, PathBuf};

use crate::cache;
use crate::guest::Guest;
use crate::image::Image;
use crate::shape::Shape;
use crate::vm::Vm;

/// Run on the machine before it is saved. libvirtd is started anew so that it counts its VMs from one, as on every host.
const WARM_UP: &str = "
    virsh define /run/domain.xml && virsh start warm-up && virsh destroy warm-up && virsh undefine warm-up || exit
    rm /run/domain.xml /var/log/libvirt/qemu/*
    systemctl daemon-reload && systemctl restart libvirtd && virsh capabilities >/dev/null && sync";

/// How often a machine is booted until it comes up.
const ATTEMPTS: u32 = 3;

/// Where the state of a machine of that shape is saved: `disk.img`, `memory.N` and `state`.
pub(crate) fn of(qemu: &Image, image: &Image, shape: Shape) -> Result<PathBuf, String> {
    // All that goes into it: the two images, the shape, how QEMU is called, and what is done here.
    let recipe = (
        [qemu, image].map(|image| image.file("")),
        (shape.arguments(|_| String::new()), shape.kernel()),
        [include_str!("vm.rs"), include_str!("snapshot.rs")],
    );
    cache::entry(&shape.name(), recipe, "booting it for the first time, which takes most of a minute", |state| {
        // An emulated machine that hangs in its boot (a timer that never fires, under load) says nothing of virt-pin.
        let mut attempts = 1..=ATTEMPTS;
        attempts
            .find(|_| std::panic::catch_unwind(|| boot(qemu, image, shape, state)).is_ok())
            .map(drop)
            .ok_or_else(|| format!("{} did not come up in {ATTEMPTS} attempts", shape.name()))
    })
}

fn boot(qemu: &Image, image: &Image, shape: Shape, state: &Path) {
    // What a failed attempt has left.
    let _ = std::fs::remove_dir_all(state);
    std::fs::create_dir(state).unwrap();
    let vm = Vm::boot(qemu, image, shape, state);
    vm.put("/run/domain.xml", 0o600, Guest::new("warm-up").xml().as_bytes());
    vm.exec(&["bash", "-c", WARM_UP]).ok();
    vm.save(state);
}
