//! What libvirt runs at each event of a VM. No libvirt is linked in.

fn main() -> std::process::ExitCode {
    virt_pin::hook::main()
}
