//! The command `cs336`; everything it does lives in the library.

fn main() -> std::process::ExitCode {
    cs336::cli::main()
}
