//! virt-pin.toml(5), virt-pin-policy(7) and virt-pin-hook(8), from the tables of keys, attributes, codes and events.

use super::roff::Page;
use crate::alloc::policy::{ATTRIBUTES, Attribute};
use crate::config::keys::{self, Doc};
use crate::config::settings::{DROP_IN_DIR, MAIN_FILE};
use crate::error::Code;
use crate::hook::call::Operation;
use crate::lock::{LEASES_FILE, STATE_DIR};

const PAGES: [&str; 5] =
    ["virt-pin(1)", "virt-pin.toml(5)", "virt-pin-codes(7)", "virt-pin-policy(7)", "virt-pin-hook(8)"];

/// virt-pin.toml(5)
pub(super) fn configuration() -> String {
    let mut page = Page::new("virt-pin.toml", "5", "which CPUs virtual machines may have for their own");
    page.heading("SYNOPSIS");
    page.text(&format!("`{MAIN_FILE}`, `{DROP_IN_DIR}/*.toml`"));
    page.heading("DESCRIPTION");
    page.text(
        "What the operator of a host says, in TOML. The main file is read first, then the drop-ins in the order of their names; the last \
         file that says a thing counts, sections add up. There is nothing to be restarted after a change: the files are read at each \
         event of a VM.",
    );
    page.paragraph(
        "A file that cannot be understood is an error that names file, line and key (`config.invalid`), and until it is corrected \
         dedicated VMs are refused rather than started with a guess. VMs that run keep what they have.",
    );
    for (section, docs) in keys::all() {
        page.heading(if section.is_empty() { "KEYS".to_owned() } else { format!("[[{section}]]") }.as_str());
        for doc in docs {
            key(&mut page, &doc);
        }
        if section == "domain" {
            let names: Vec<_> = ATTRIBUTES.iter().map(|attribute| format!("`{}`", attribute.name)).collect();
            page.paragraph(&format!(
                "The policy's attributes, each with a string (or a number) as in XML: {}.",
                names.join(", ")
            ));
        }
    }
    page.heading("EXAMPLE");
    page.example(
        "pinnable_cpus = \"2-15\"\n\n[[domain]]\nmatch = \"db-*\"\npolicy = \"dedicated\"\nthreads_per_core = 1\n\n\
         [[limit]]\nmatch = \"ci-*\"\nmax_vcpus = 4",
    );
    see_also(&mut page, "virt-pin.toml(5)");
    page.finish()
}

fn key(page: &mut Page, doc: &Doc) {
    if doc.is_section() {
        return page.term(&format!("`[[{}]]`", doc.name), doc.meaning);
    }
    page.term(&format!("`{}`", doc.name), doc.meaning);
    let default = doc.default.map(|default| format!(" Default: `{default}`.")).unwrap_or_default();
    page.more(&format!("Value: {}.{default}", doc.value));
}

/// virt-pin-policy(7)
pub(super) fn policy() -> String {
    let mut page = Page::new("virt-pin-policy", "7", "what a virtual machine may ask of virt-pin");
    page.heading("SYNOPSIS");
    page.example("<metadata>\n  <pin:cpu xmlns:pin=\"urn:virt-pin:domain:1\" policy=\"dedicated\"/>\n</metadata>");
    page.heading("DESCRIPTION");
    page.text(
        "A VM asks for CPUs of its own with one element in its XML, or its host's configuration asks for it in a `[[domain]]` section \
         (virt-pin.toml(5)). `virt-pin enable DOMAIN` writes the element; its options are these attributes. Nothing is asked for without \
         `policy=\"dedicated\"`.",
    );
    page.paragraph(
        "An unknown attribute or value refuses the start, naming it: unknown never means default. What is asked for and cannot be had \
         refuses the start with a reason, except where the text says \"prefer\".",
    );
    page.heading("ATTRIBUTES");
    for attribute in ATTRIBUTES {
        let Attribute { name, values, unsupported, meaning } = attribute;
        page.term(&format!("`{name}`"), &format!("{meaning}."));
        let done = |value: &&&str| !unsupported.contains(value);
        let values: Vec<_> = values.iter().filter(done).map(|value| format!("`{value}`")).collect();
        let default = values.first().map_or("not given".to_owned(), Clone::clone);
        let values = if values.is_empty() { String::new() } else { format!("Values: {}. ", values.join(", ")) };
        page.more(&format!("{values}Default: {default}."));
    }
    page.heading("EXAMPLE");
    page.text("Four vCPUs on two cores of one node, QEMU's own threads on another core, no device interrupts there:");
    page.example("<pin:cpu xmlns:pin=\"urn:virt-pin:domain:1\" policy=\"dedicated\"\n         numa=\"single\" emulator=\"isolate\" irqs=\"away\"/>");
    see_also(&mut page, "virt-pin-policy(7)");
    page.finish()
}

/// virt-pin-hook(8)
pub(super) fn hook() -> String {
    let mut page = Page::new("virt-pin-hook", "8", "what libvirt runs at each event of a virtual machine");
    page.heading("SYNOPSIS");
    page.text("`virt-pin-hook` NAME OPERATION SUB-OPERATION EXTRA < DOMAIN.xml");
    page.heading("DESCRIPTION");
    page.text(
        "libvirt runs every executable in `/etc/libvirt/hooks/qemu.d/` (before libvirt 6.5: `/etc/libvirt/hooks/qemu` alone) at each event \
         of a VM. `virt-pin install` puts the hook there as `10-virt-pin`, and never overwrites somebody else's script. The daemon looks \
         for hooks when it starts and when it reloads.",
    );
    page.paragraph(
        "The hook reads the domain's XML on stdin, never calls libvirt, and waits for nothing without a limit. On stdout there is XML for \
         `migrate` and `restore`. On stderr there is one error, which `virsh start` prints. Called by a session daemon \
         (not root) it does nothing.",
    );
    page.heading("OPERATIONS");
    for operation in Operation::ALL {
        let refuses = if operation.may_refuse() { "May refuse." } else { "Never fails." };
        page.term(&format!("`{}`", operation.name()), &format!("{} {refuses}", operation.meaning()));
    }
    codes(&mut page);
    page.heading("FILES");
    page.term(&format!("`{MAIN_FILE}`"), "The configuration; see virt-pin.toml(5).");
    page.term(
        &format!("`{LEASES_FILE}`"),
        &format!("The leases. `{STATE_DIR}` belongs to root and goes with a reboot."),
    );
    page.term("`/usr/lib/virt-pin/virt-pin-hook`", "The program of which `virt-pin install` makes a copy.");
    page.heading("JOURNAL");
    page.text(
        "Every decision is there: `journalctl -t virt-pin`, with the fields `DOMAIN`, `UUID`, `CODE` and `CPUS`.",
    );
    see_also(&mut page, "virt-pin-hook(8)");
    page.finish()
}

/// The exit statuses.
pub(super) fn codes(page: &mut Page) {
    page.heading("EXIT STATUS");
    page.text("0 is success. Each other status is one code, which the message names; virt-pin-codes(7) shows each as it is printed, and says more:");
    for code in Code::all() {
        let retry = if code.retry() { " May succeed later with nobody changing anything." } else { "" };
        page.term(&format!("{} `{code}`", code.exit()), &format!("{}.{retry}", code.meaning()));
        page.more(&format!("What to do: {}.", code.advice()));
    }
}

/// The other pages.
pub(super) fn see_also(page: &mut Page, this: &str) {
    page.heading("SEE ALSO");
    let others: Vec<_> = PAGES.into_iter().filter(|other| *other != this).chain(["virsh(1)"]).collect();
    page.text(&(others.join(", ") + "; the README and docs/ of the package."));
}
