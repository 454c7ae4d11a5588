//! The command line; see `virt-pin help`.

fn main() -> std::process::ExitCode {
    virt_pin::cli::main()
}
