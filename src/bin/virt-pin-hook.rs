//! What libvirt runs.

fn main() {}
