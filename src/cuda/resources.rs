//! The resources of each kernel, from ptxas's log; register spills and warnings of lost performance are errors.

use std::fmt;

use anyhow::{Context as _, Result, ensure};

/// The resources of a multiprocessor that one kernel uses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Resources {
    /// The entry point's name.
    pub kernel: String,
    /// Registers a thread.
    pub registers: u32,
    /// Static shared memory a block.
    pub shared_bytes: u32,
    /// Local memory a thread: arrays that are indexed at run time, and what calls push.
    pub stack_bytes: u32,
    /// Bytes of register spills, stores and loads; [`accept`] refuses any.
    pub spill_bytes: u32,
}

impl fmt::Display for Resources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, registers, shared_bytes, stack_bytes, spill_bytes } = self;
        write!(
            f,
            "{kernel}: {registers} registers, {shared_bytes} B shared, {stack_bytes} B stack, {spill_bytes} B spilled"
        )
    }
}

/// The resources of every kernel in the log of a compilation with `--ptxas-options=-v`.
///
/// Errors: a spill, a performance warning of ptxas, or a log without the numbers; each with the log.
pub(super) fn accept(log: &str) -> Result<Vec<Resources>> {
    let check = || {
        let kernels = parse(log)?;
        for kernel in &kernels {
            ensure!(kernel.spill_bytes == 0, "{kernel}: registers spill to memory");
        }
        let warning = log.lines().find(|line| warns_of_lost_performance(line));
        ensure!(warning.is_none(), "ptxas warns of lost performance: {}", warning.unwrap_or_default().trim());
        Ok(kernels)
    };
    check().with_context(|| format!("the compiler's log is\n{}", log.trim_end()))
}

/// C7508 and C7510 to C7517: wgmma serialised, setmaxnreg ignored, and their like.
fn warns_of_lost_performance(line: &str) -> bool {
    let codes = line.match_indices("C75").filter_map(|(at, _)| line.get(at + 1..at + 5)?.parse::<u32>().ok());
    codes.into_iter().any(|code| code == 7508 || (7510..=7517).contains(&code))
}

fn parse(log: &str) -> Result<Vec<Resources>> {
    let mut kernels: Vec<Resources> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default().to_string();
            kernels.push(Resources { kernel, ..Resources::default() });
        }
        let Some(kernel) = kernels.last_mut() else { continue };
        // A function that was not inlined has its own report, after the kernel that calls it; the reports are added up.
        kernel.stack_bytes += amount(line, " bytes stack frame").unwrap_or(0);
        kernel.spill_bytes += amount(line, " bytes spill stores").unwrap_or(0);
        kernel.spill_bytes += amount(line, " bytes spill loads").unwrap_or(0);
        if let Some(registers) = amount(line, " registers") {
            kernel.registers = registers;
            kernel.shared_bytes = amount(line, " bytes smem").unwrap_or(0);
        }
    }
    ensure!(!kernels.is_empty(), "it names no kernel: a file needs an extern \"C\" __global__ function");
    let missing = kernels.iter().find(|kernel| kernel.registers == 0);
    ensure!(missing.is_none(), "it does not give the registers of {}", missing.map_or("", |k| &k.kernel));
    Ok(kernels)
}

/// The number in front of `what`.
fn amount(line: &str, what: &str) -> Option<u32> {
    let (before, _) = line.split_once(what)?;
    before.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'update' for 'sm_90a'
ptxas info    : Function properties for update
ptxas         .     16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes smem, 38016 bytes cmem[0]
ptxas info    : Compile time = 61.492 ms
ptxas info    : Compiling entry function 'advance' for 'sm_90a'
ptxas info    : Function properties for advance
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers
";

    #[test]
    fn both_formats_of_the_report_are_read() {
        let kernels: Vec<String> = accept(LOG).unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(
            kernels,
            [
                "update: 40 registers, 1024 B shared, 16 B stack, 0 B spilled",
                "advance: 30 registers, 0 B shared, 0 B stack, 0 B spilled"
            ]
        );
    }

    #[test]
    fn a_spill_a_warning_or_a_missing_report_is_an_error_that_shows_the_log() {
        let spilled =
            LOG.replace("16 bytes stack frame, 0 bytes spill stores", "16 bytes stack frame, 8 bytes spill stores");
        let serialised = format!(
            "{LOG}ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
        );
        let silent = "ptxas info    : 0 bytes gmem\n".to_string();
        let missing = LOG.replace("Used 30 registers", "Used them");
        for (log, expected) in [
            (spilled, "update: 40 registers, 1024 B shared, 16 B stack, 8 B spilled"),
            (serialised, "lost performance: ptxas info    : (C7510)"),
            (silent, "names no kernel"),
            (missing, "does not give the registers of advance"),
        ] {
            let error = format!("{:#}", accept(&log).unwrap_err());
            assert!(error.contains(expected) && error.contains("0 bytes gmem"), "{error}");
        }
    }

    #[test]
    fn other_codes_of_ptxas_are_accepted() {
        assert!(["(C7508)", "C7511", "x (C7517) y"].into_iter().all(warns_of_lost_performance));
        assert!(!["(C7509)", "C7518", "C75", "C7600"].into_iter().any(warns_of_lost_performance));
    }
}
