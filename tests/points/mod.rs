//! Which failpoints are walked over where. Those that are named nowhere here are for `crash.rs`.
#![allow(dead_code, reason = "each test program uses its part")]

/// On real libvirt, with the kernel's own cgroups (`live/crash.rs`).
pub(crate) const LIVE: &[&str] = &[
    "tree.create",
    "tree.remove",
    "kernel.tree",
    "kernel.binding",
    "kernel.passage",
    "affinity",
    "sync.start",
    "recorded",
    "begun",
    "grown",
    "seated",
    "bound",
    "shrunk",
    "settled",
    "committed",
];

/// On a whole host with nodes (`hostvm/relocate.rs`).
pub(crate) const HOST: &[&str] = &["memory", "dissolved", "isolated"];
