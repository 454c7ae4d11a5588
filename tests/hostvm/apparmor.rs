//! AppArmor enforced, as Debian and Ubuntu have it: the daemon, and so the hook, under libvirt's own profile.

use crate::guest::Guest;
use crate::host::Host;
use crate::leases::CONFIG;
use crate::shape::{Debian, Shape};

/// Everything that virt-pin does under the daemon's profile, and what the kernel said of it.
fn nothing_of_ours_is_denied(shape: Shape, machined: bool) {
    let Some(host) = Host::with_virt_pin(shape.apparmor(), CONFIG) else { return };
    if !machined {
        host.without_machined();
    }
    let daemon = host.sh("cat /proc/$(pidof libvirtd)/attr/current").ok();
    assert_eq!(daemon, "libvirtd (enforce)\n");
    // Every word of the kernel's is kept, however much it says.
    host.sh("sysctl kernel.printk_ratelimit=0 && dmesg --clear").ok();
    host.run(&Guest::new("shared"));
    host.run(&Guest::new("web").vcpus(4).policy("policy='dedicated' isolation='slices' irqs='away'"));
    host.assert_bound("web", &["2", "3", "4", "5"]);
    let confined = host.sh("cat /proc/$(cat /run/libvirt/qemu/web.pid)/attr/current").ok();
    assert!(confined.starts_with("libvirt-") && confined.ends_with(" (enforce)\n"), "{confined}");
    // A command of the hook's own; a daemon that goes now would take what it says along.
    host.wait_until("the live XML shows the lease", |host| {
        host.virsh(&["dumpxml", "web"]).ok().contains("<vcpupin vcpu='3' cpuset='5'/>")
    });
    host.exec(&["systemctl", "restart", "libvirtd"]).ok();
    assert!(host.virsh(&["list", "--name"]).ok().contains("web\n"));
    host.assert_bound("web", &["2", "3", "4", "5"]);
    // The agent's work.
    host.exec(&["virt-pin", "agent", "--once"]).ok();
    let check = host.exec(&["virt-pin", "check"]).ok();
    assert!(!check.contains("FAIL"), "{check}");
    host.virsh(&["destroy", "web"]).ok();
    host.wait_until("the lease has ended", |host| !host.exec(&["virt-pin", "list"]).ok().contains("web"));
    // Nobody else's denials: QEMU's and the daemon's own are the same without virt-pin.
    let denied = host.sh("dmesg | grep 'apparmor=\"DENIED\"' || true").ok();
    eprintln!("denied: {denied}");
    let ours = denied.lines().filter(|line| ["virt-pin", "hooks"].iter().any(|word| line.contains(word)));
    assert_eq!(ours.collect::<Vec<_>>(), Vec::<&str>::new());

    // What is documented: the profile lets nothing outside its directories be executed, and a link is judged by its target.
    host.sh("mkdir -p /opt/x && mv /etc/libvirt/hooks/qemu.d/10-virt-pin /opt/x/hook &&
             ln -s /opt/x/hook /etc/libvirt/hooks/qemu.d/10-virt-pin")
        .ok();
    host.virsh(&["start", "web"]).refused();
    assert!(host.exec(&["virt-pin", "check"]).ok().contains("WARN"), "check says nothing of the link");
    // Which shows that denials are seen.
    let denied = host.sh("dmesg | grep 'apparmor=\"DENIED\"'").ok();
    assert!(denied.contains("operation=\"exec\"") && denied.contains("/opt/x/hook"), "{denied}");
}

#[test]
fn on_debian_13() {
    nothing_of_ours_is_denied(Shape::default(), true);
}

#[test]
fn on_debian_12_without_machined() {
    nothing_of_ours_is_denied(Shape::default().debian(Debian::Bookworm), false);
}
