//! Standard output of commands that also write files, which must not be lost with it.

use std::io::Write as _;
use std::sync::Once;

#[derive(Debug, Clone, Copy)]
pub struct Printer {
    /// Whether the command goes on where nothing can be printed: its reader has ended, or the disk is full.
    pub outlives: bool,
}

impl Printer {
    /// Prints a line. Where that fails the program ends, or says so once and goes on.
    pub fn line(self, text: impl std::fmt::Display) {
        static SAID: Once = Once::new();
        if !self.outlives {
            return println!("{text}");
        }
        if let Err(error) = writeln!(std::io::stdout(), "{text}") {
            SAID.call_once(|| {
                // Nobody may read this either.
                let _ = writeln!(
                    std::io::stderr(),
                    "cs336: nothing more can be printed ({error}); the files are still written"
                );
            });
        }
    }
}
