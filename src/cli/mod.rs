//! The command line: one file for each verb.
//!
//! Exit codes: 0 success; 1 a check or a case failed, a record drifted, or an error was printed; 2 invalid command line; 130 interrupted
//! (a rank is ended by its signal).

use std::ffi::OsString;
use std::io::Write as _;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Parser, Subcommand};
use rustix::fs::Mode;
use rustix::process::{Resource, getrlimit, umask};

use crate::bench::machine;
use crate::error::without_frames;
use crate::harness::handout::{HANDOUT, HandoutProblem, by_name};
use crate::harness::problem::Problem;
use crate::harness::record::Profile;
use crate::harness::store::Layout;
use crate::harness::worker::{Abilities, THIS_PROGRAM, serve};
use crate::json;
use crate::printable::{indented, one_line};
use crate::problems::{DEVICE_CHECKS, REGISTRY, SUBJECT_PROBLEMS};
use crate::process::confinement::Confinement;

// What a verb prints may quote names and messages from outside, which must not act on a terminal. These hide the standard
// macros from the modules below.
macro_rules! println {
    ($($text:tt)*) => { std::println!("{}", $crate::printable::printable(&format!($($text)*))) };
}
macro_rules! print {
    ($($text:tt)*) => { std::print!("{}", $crate::printable::printable(&format!($($text)*))) };
}
// Where standard error is full or closed, what is said there is lost, and nothing else.
macro_rules! eprintln {
    ($($text:tt)*) => {{
        let line = $crate::printable::printable(&format!($($text)*)) + "\n";
        let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
    }};
}

mod accept;
mod bundle;
mod cases;
mod device;
mod diff;
mod doctor;
pub mod document;
mod explain;
mod export;
mod grade;
mod install;
mod interrupt;
mod list;
mod measure;
mod printer;
// The example's whole walk; here, since only this room uses both problems and the report.
#[cfg(test)]
#[path = "../../suites/newcomer/walk.rs"]
mod newcomer;
mod nsys;
mod official;
mod progress;
mod rank;
mod subject;
mod subjects;
pub mod writeup;

use interrupt::{EXIT_CODE, end_at_an_interrupt, handle_signals_that_would_harm, interrupted, watch_for_interrupt};

#[derive(Parser)]
#[command(
    name = "cs336",
    version,
    about = "Checks, measures and reports Stanford CS336 Assignment 2 (Systems, Spring 2025)"
)]
#[command(
    after_help = "Exit codes: 0 success; 1 a check or a case failed, a record drifted, or an error was printed; 2 invalid command line; 130 interrupted (a rank is ended by its signal).\n\nCS336_DEADLINE_S: the seconds that a rank waits for other ranks at most, in a collective for each transfer; 1800 by default."
)]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// List the handout's problems: points, parts, and which have an answer
    List {
        #[arg(long)]
        json: bool,
    },
    /// Explain one problem: questions, checks, grids, records and files
    Explain { problem: String },
    /// Run the checks; print the points earned and why points are lost
    Grade(grade::Arguments),
    /// Run the checks, then measure into report/records; uses the gpu grids if there is a GPU
    Measure(measure::Arguments),
    /// Build report/writeup.pdf, writeup.html and writeup.md, measure missing and stale cases, and build again
    Writeup(writeup::Arguments),
    /// Print one table or figure of an answer, with its provenance as a comment
    Export(export::Arguments),
    /// Compare this machine's records with the accepted ones
    Diff {
        #[command(flatten)]
        chosen: Chosen,
        #[arg(long)]
        json: bool,
    },
    /// Promote this machine's records to snapshots/, after showing the difference; of `device`, the results of `grade --device`
    Accept {
        #[command(flatten)]
        chosen: Chosen,
        /// Show what would be accepted and write nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Show what this machine has and what it can run; with --ranks, what the network between ranks gives
    Doctor {
        #[arg(long, conflicts_with = "ranks")]
        json: bool,
        #[command(flatten)]
        network: doctor::ranks::Arguments,
    },
    /// Pack dist/cs336.tar.gz for a machine with PyTorch and no Rust
    Bundle,
    /// Run one training step with NVTX ranges, for NVIDIA's nsys to profile
    Nsys(nsys::Arguments),
    /// Run the official tests of a checkout against the wheel that `make wheel` packs
    Official(official::Arguments),
    /// Serve jobs for `measure` and `grade` in a separate process
    #[command(hide = true)]
    Worker,
    /// Start a program confined, and end all that it has started when it ends
    #[command(hide = true)]
    Confine {
        /// What it may do, as JSON
        confinement: String,
        #[arg(last = true, required = true)]
        program: Vec<OsString>,
    },
    /// Run one rank of a distributed task, as torchrun's variables name it
    Rank(rank::Task),
    /// Run a distributed task on ranks of this machine
    Launch(rank::LaunchArguments),
}

/// The problems and grids that a verb applies to.
#[derive(clap::Args)]
struct Chosen {
    /// Problems; all by default
    problems: Vec<String>,
    /// Only the grids of this profile
    #[arg(long, value_enum)]
    profile: Option<Profile>,
}

impl Chosen {
    /// Both profiles, unless one is named.
    fn profiles(&self) -> Vec<Profile> {
        self.profile.map_or(Profile::ALL.to_vec(), |profile| vec![profile])
    }
}

/// How a verb ended without an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    Well,
    /// A check or a case failed, or a record drifted; it has been reported.
    WithFindings,
    Interrupted,
}

/// Parses the command line, runs the verb, and returns the exit code.
pub fn main() -> ExitCode {
    end_without_a_panic_where_output_fails();
    handle_signals_that_would_harm();
    deny_others_to_write();
    let arguments = arguments();
    // Who starts one of these reads the signal that ended it. The first process of a container must handle a signal to end by it.
    let by_its_signal = matches!(arguments.verb, Verb::Worker | Verb::Confine { .. } | Verb::Rank(_));
    if !by_its_signal || std::process::id() == 1 {
        end_at_an_interrupt();
    }
    // Must precede any other use of libtorch. A machine without a GPU is not an error here.
    let _ = crate::torch::load_cuda();
    match run(arguments) {
        Ok(Ended::Well) => ExitCode::SUCCESS,
        Ok(Ended::WithFindings) => ExitCode::from(1),
        Ok(Ended::Interrupted) => {
            eprintln!("cs336: interrupted");
            ExitCode::from(EXIT_CODE)
        }
        Err(error) => {
            eprintln!("cs336: {}", indented(&without_frames(&format!("{error:#}")), 4));
            ExitCode::from(if interrupted() { EXIT_CODE } else { 1 })
        }
    }
}

/// The command line. clap quotes a wrong argument as it is, and a shell makes arguments of file names, so the error is about
/// the arguments as they can be printed.
fn arguments() -> Arguments {
    Arguments::try_parse().unwrap_or_else(|error| {
        let shown = std::env::args_os().map(|argument| one_line(&argument.to_string_lossy()));
        Arguments::try_parse_from(shown).err().unwrap_or(error).exit()
    })
}

/// Whatever the umask, other users cannot write to files that this process and its children make, since some are loaded as code.
/// This user can read and write them.
fn deny_others_to_write() {
    let others = Mode::WGRP | Mode::WOTH;
    umask((umask(others) | others) - Mode::RWXU);
}

/// `cs336 list | head` closes our output early, which Rust's print macros turn into a panic, as they do a full disk.
fn end_without_a_panic_where_output_fails() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let message = crate::harness::worker::panic_message(panic.payload());
        if message.starts_with("failed printing to stdout") {
            if message.contains("(os error 32)") {
                std::process::exit(141);
            }
            let why = message.trim_start_matches("failed printing to stdout: ");
            let _ = writeln!(std::io::stderr(), "cs336: standard output cannot be written: {why}");
            std::process::exit(1);
        }
        report(panic);
    }));
}

/// A rank needs 20 to reach others, and the rest are for its pipes and files.
const LEAST_OPEN_FILES: u64 = 64;

/// Errors: this process may open too few files, where libtorch would abort without a word.
fn require_open_files() -> Result<()> {
    let allowed = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    ensure!(
        allowed >= LEAST_OPEN_FILES,
        "a process may open {allowed} files here, and cs336 needs {LEAST_OPEN_FILES}: raise the limit (`ulimit -n 1024`)"
    );
    Ok(())
}

fn run(arguments: Arguments) -> Result<Ended> {
    require_open_files()?;
    crate::collective::ranks::set_program(THIS_PROGRAM.into());
    match arguments.verb {
        Verb::List { json } => list::run(json),
        Verb::Explain { problem } => explain::run(&Layout::find()?, &problem),
        Verb::Grade(arguments) => grade::run(&arguments),
        Verb::Measure(arguments) => measure::run(&Layout::find()?, &arguments),
        Verb::Writeup(arguments) => writeup::run(&Layout::find()?, &arguments),
        Verb::Export(arguments) => export::run(&Layout::find()?, &arguments),
        Verb::Diff { chosen, json } => diff::run(&Layout::find()?, &chosen, json),
        Verb::Accept { chosen, dry_run } => accept::run(&Layout::find()?, &chosen, dry_run),
        Verb::Doctor { network, .. } if network.asks() => doctor::ranks::run(&network),
        Verb::Doctor { json, .. } => doctor::run(json),
        Verb::Bundle => bundle::run(&Layout::find()?),
        Verb::Nsys(arguments) => nsys::run(&Layout::find()?, &arguments),
        Verb::Official(arguments) => official::run(&Layout::find()?, &arguments),
        Verb::Worker => serve(ABILITIES).map(|()| Ended::Well),
        Verb::Confine { confinement, program } => {
            let confinement: Confinement = json::from_str(&confinement).context("the confinement")?;
            confinement.execute(&program).map(|()| Ended::Well)
        }
        Verb::Rank(task) => rank::run(&task).map(|()| Ended::Well),
        Verb::Launch(arguments) => rank::run_launch(&arguments),
    }
}

/// Of more names the list is clearer.
const MOST_SUGGESTIONS: usize = 4;

/// A problem of the handout by name, with the names nearest to a misspelt one.
fn handout_problem(name: &str) -> Result<&'static HandoutProblem> {
    if let Some(problem) = by_name(name) {
        return Ok(problem);
    }
    let near: Vec<&str> =
        HANDOUT.iter().map(|p| p.name).filter(|n| n.contains(name) || shared_words(n, name) > 0).collect();
    // One letter is part of nearly every name.
    let hint = match near.len() {
        1..=MOST_SUGGESTIONS => format!("did you mean {}?", near.join(" or ")),
        _ => "see `cs336 list`".to_string(),
    };
    bail!("the handout has no problem {name:?}; {hint}")
}

fn shared_words(a: &str, b: &str) -> usize {
    a.split('_').filter(|word| word.len() > 3 && b.split('_').any(|other| other == *word)).count()
}

/// The registry entry of a problem; the error says that it is not answered yet.
fn registered(name: &str) -> Result<&'static Problem> {
    entry(handout_problem(name)?).with_context(|| format!("{name} is not answered yet: it has no code"))
}

/// The registry entry of a problem; `None` while its code does not exist.
fn entry(problem: &HandoutProblem) -> Option<&'static Problem> {
    REGISTRY.iter().find(|entry| entry.name == problem.name)
}

/// The named problems, or all of the registry.
fn selected(names: &[String]) -> Result<Vec<&'static Problem>> {
    if names.is_empty() {
        return Ok(REGISTRY.iter().collect());
    }
    once_each(names).map(registered).collect()
}

/// The names without repetitions.
fn once_each(names: &[String]) -> impl Iterator<Item = &str> {
    names.iter().enumerate().filter(|(i, name)| !names[..*i].contains(name)).map(|(_, name)| name.as_str())
}

/// The profile to measure: the requested one, else `gpu` if there is a GPU.
fn profile_or_default(asked: Option<Profile>) -> Profile {
    asked.unwrap_or(if crate::torch::cuda_device(0).is_ok() { Profile::Gpu } else { Profile::Cpu })
}

/// What this program's workers serve.
const ABILITIES: Abilities = Abilities {
    registry: REGISTRY,
    subject_problems: SUBJECT_PROBLEMS,
    device_checks: DEVICE_CHECKS,
    run_case: cases::run_one,
    check_subject: subject::check,
    clean_up: machine::clean_up,
};
