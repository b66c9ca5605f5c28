//! Measuring: runs the checks, then measures case by case and table by table, optionally within a time budget.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use super::answer::machines::ran_elsewhere;
use super::case::{CaseEnding, Measurement, MeasurementContext, Runner};
use super::grade::CheckStatus;
use super::manifest::peers_hash;
use super::plan::{Pending, Plan, code_hashes, is_of_case};
use super::problem::Problem;
use super::provenance::{Facts, open_run};
use super::record::{CaseRecord, Outcome, Run};
use super::schedule::{Clock, PendingTable, tables};
use super::store::{Layout, write_atomically};
use super::worker::Worker;
use crate::printable::indented;
use crate::root::read_text;

/// Receives the events of measuring, to display them.
pub trait Progress {
    fn table_started(&mut self, table: &PendingTable);
    fn checks_started(&mut self, problem: &Problem);
    fn case_started(&mut self, case: &Pending);
    fn case_ended(&mut self, case: &Pending, outcome: &Outcome, elapsed: Duration);
    fn table_ended(&mut self);
    /// Something that does not stop measuring, and that a person must know.
    fn noticed(&mut self, message: &str);
    /// The problem's measuring stops: a check failed, or its record cannot be written.
    fn refused(&mut self, error: &anyhow::Error);
}

/// How measuring ended.
#[derive(Debug, Default)]
pub struct MeasureSummary {
    pub tally: Tally,
    /// The tables that the budget had no time for, each with the cases that were not started or not finished.
    pub left: Vec<PendingTable>,
    /// Problems whose measuring stopped, with or without cases to measure.
    pub refused: usize,
}

impl MeasureSummary {
    pub fn has_faults(&self) -> bool {
        self.refused > 0 || self.tally.failed > 0
    }
}

/// The number of recorded cases by outcome; `failed` also counts those with a failed column, and those that a refused problem
/// left unmeasured.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Tally {
    pub measured: usize,
    pub out_of_memory: usize,
    pub not_run: usize,
    /// Of those not run, the ones that leave the record as it is.
    pub not_recorded: usize,
    pub failed: usize,
    /// Of the failed ones, those that a refused problem left unmeasured.
    pub unrecorded: usize,
    pub interrupted: bool,
}

/// One plan being measured. `context` is set once its checks have passed.
struct Session<'a> {
    plan: Plan<'a>,
    context: Option<MeasurementContext<'a>>,
    refused: bool,
    /// The text of the record's file, as it was read or written last.
    on_disk: Option<String>,
    /// Whether a copy holds what another type of machine measured.
    has_copy: bool,
}

/// Before the plan is measured: moves a record aside that cannot be read, and takes the cases out of another that have left the
/// suite, after a copy of it is kept. Says where that is.
fn tidy_record(layout: &Layout, plan: &Plan, progress: &mut dyn Progress) -> Result<()> {
    let path = layout.local(plan.profile, plan.problem.name);
    if let Some(why) = &plan.unreadable {
        progress.noticed(&format!("{}\n  {}", indented(why, 4), layout.set_aside(&path, "unreadable")?));
    }
    if plan.left_suite == 0 {
        return Ok(());
    }
    let kept = if plan.record.cases.is_empty() {
        layout.set_aside(&path, "earlier")?
    } else {
        let copy = layout.keep_copy(&path, "earlier", &read_text(&path)?)?;
        // Each try would leave another one.
        write_atomically(&path, plan.record.to_json()?.as_bytes()).inspect_err(|_| drop(fs::remove_file(&copy)))?;
        format!("their record is kept as {}", layout.display(&copy))
    };
    progress.noticed(&format!("{} cases of {} have left the suite; {kept}", plan.left_suite, plan.problem.name));
    Ok(())
}

impl Runner<'_> {
    /// Tidies the records of `plans` and measures their pending cases, writing the record after each one.
    ///
    /// Checks run first, in the same kind of process. A problem whose check fails is not timed: its cases count as
    /// failed, and the other problems continue.
    pub fn measure(&self, plans: Vec<Plan<'_>>, facts: &Facts, progress: &mut dyn Progress) -> MeasureSummary {
        let mut clock = Clock::start(self.budget);
        let tables = tables(&plans, self.budget);
        let mut sessions: Vec<Session> =
            plans.into_iter().map(|plan| Session::new(self.layout, plan, progress)).collect();
        let refused = sessions.iter().filter(|session| session.refused).count();
        let mut summary = MeasureSummary { refused, ..MeasureSummary::default() };
        for table in tables {
            // Only one problem at a time may hold device memory.
            let others = sessions.iter_mut().enumerate().filter(|(i, _)| *i != table.plan);
            others.flat_map(|(_, session)| &mut session.context).for_each(|context| context.worker.restart());
            let session = &mut sessions[table.plan];
            if session.refused {
                summary.tally.leave(table.pending.len());
                continue;
            }
            if !table.pending.iter().any(|case| clock.fits(&table, case)) {
                summary.left.push(table);
                continue;
            }
            let before = summary.tally;
            progress.table_started(&table);
            let ended = self.table(session, &table, facts, &mut clock, progress, &mut summary);
            progress.table_ended();
            if let Err(error) = ended {
                progress.refused(&error);
                session.refused = true;
                summary.refused += 1;
                summary.tally.leave(table.pending.len() - (summary.tally.cases() - before.cases()));
            }
            if summary.tally.interrupted {
                break;
            }
        }
        summary
    }

    fn table(
        &self,
        session: &mut Session,
        table: &PendingTable,
        facts: &Facts,
        clock: &mut Clock,
        progress: &mut dyn Progress,
        summary: &mut MeasureSummary,
    ) -> Result<()> {
        let mut left = Vec::new();
        for pending in &table.pending {
            let in_time = clock.fits(table, pending) && self.opened(session, facts, clock, progress)?;
            let Some(context) = session.context.as_mut().filter(|_| in_time) else {
                summary.tally.interrupted |= (self.interrupted)();
                left.push(pending.clone());
                continue;
            };
            progress.case_started(pending);
            match self.measure_case(context, &pending.params, clock)? {
                CaseEnding::Interrupted => summary.tally.interrupted = true,
                CaseEnding::OutOfTime => left.push(pending.clone()),
                CaseEnding::Ended(measurement) => {
                    clock.took(table, measurement.elapsed);
                    progress.case_ended(pending, &measurement.outcome, measurement.elapsed);
                    let mut counted = summary.tally.with(&measurement.outcome);
                    let is_recorded = self.keep(session, pending, *measurement, progress)?;
                    counted.not_recorded += usize::from(!is_recorded);
                    summary.tally = counted;
                    session.context.iter_mut().for_each(|context| context.worker.clean_up(self.interrupted));
                }
            }
            if summary.tally.interrupted {
                return Ok(());
            }
        }
        if !left.is_empty() {
            summary.left.push(PendingTable { pending: left, ..table.clone() });
        }
        Ok(())
    }

    /// Runs the checks before a problem's first case; false if there was no time for them.
    fn opened(&self, session: &mut Session, facts: &Facts, clock: &Clock, progress: &mut dyn Progress) -> Result<bool> {
        if session.context.is_some() {
            return Ok(true);
        }
        let plan = &session.plan;
        let Plan { problem, measured, profile, suite, .. } = plan;
        self.layout.require_graded(problem.name)?;
        let mut worker = Worker::new(self.layout);
        progress.checks_started(problem);
        for check in problem.checks {
            match self.check(&mut worker, problem, check, clock)? {
                Some(CheckStatus::Passed { .. } | CheckStatus::Skipped { .. }) => {}
                None => return Ok(false),
                Some(CheckStatus::Failed { .. }) if clock.is_over() => return Ok(false),
                Some(CheckStatus::Failed { error }) => {
                    bail!("{}::{} fails, so {0} is not timed: {error}", problem.name, check.name)
                }
            }
        }
        let run = match open_run(&self.layout.root, &suite.hash, facts, self.interrupted) {
            Err(_) if (self.interrupted)() => return Ok(false),
            run => run?,
        };
        // What was checked must be what is timed.
        require_same_code(self.layout, plan, &run)?;
        // Cases must not use caches that the checks have warmed.
        worker.restart();
        session.context = Some(MeasurementContext { problem, measured, profile: *profile, worker, run });
        Ok(true)
    }

    /// Adds one measured case to the record and writes the record. What somebody else has put in its place is moved aside, and what
    /// another type of machine measured is copied. False if the case cannot run here, and the record has how it ran before or is
    /// of another type of machine.
    fn keep(
        &self,
        session: &mut Session,
        pending: &Pending,
        measurement: Measurement,
        progress: &mut dyn Progress,
    ) -> Result<bool> {
        let Some(MeasurementContext { run, .. }) = &session.context else {
            bail!("a case was measured before its run was opened")
        };
        require_same_code(self.layout, &session.plan, run)?;
        let plan = &mut session.plan;
        let path = self.layout.local(plan.profile, plan.problem.name);
        let earlier = plan.record.case(&pending.params);
        let ran = |case: &CaseRecord| !case.outcome.is_not_run();
        let is_elsewhere = |case: &CaseRecord| ran_elsewhere(&plan.record, case, &run.machine);
        if measurement.outcome.is_not_run() && (earlier.is_some_and(ran) || plan.record.cases.iter().any(is_elsewhere))
        {
            return Ok(false);
        }
        let needs_copy = !session.has_copy && earlier.is_some_and(is_elsewhere);
        let replaced = session.on_disk.as_deref().filter(|_| needs_copy);
        let copy = replaced.map(|text| self.layout.keep_copy(&path, "elsewhere", text)).transpose()?;
        let names = (plan.measured.kernels_of)(&pending.params);
        let mut of_case = plan.code.clone();
        of_case.retain(|name, _| is_of_case(name, &names));
        let case = CaseRecord {
            grid: pending.grid.clone(),
            params: pending.params.clone(),
            run: run.id.clone(),
            revision: plan.measured.revision,
            kernels: of_case,
            elapsed_s: measurement.elapsed.as_secs_f64(),
            conditions: measurement.conditions,
            busy_processors: measurement.busy_processors,
            outcome: measurement.outcome,
        };
        plan.record.put(case, run);
        plan.record.sort_like(plan.suite.cases(plan.profile).map(|(_, params)| params));
        if path.symlink_metadata().is_ok() && read_text(&path).ok() != session.on_disk {
            let moved = self.layout.set_aside(&path, "changed")?;
            progress.noticed(&format!("the record was changed while it was measured: {moved}"));
        }
        let text = plan.record.to_json()?;
        write_atomically(&path, text.as_bytes()).inspect_err(|_| {
            let is_of_what_is_there = |_: &&_| read_text(&path).ok() == session.on_disk;
            copy.iter().filter(is_of_what_is_there).for_each(|copy| drop(fs::remove_file(copy)));
        })?;
        session.on_disk = Some(text);
        if let Some(copy) = copy {
            session.has_copy = true;
            progress.noticed(&format!(
                "another type of machine measured {}, and this one does so again; its record is kept as {}",
                plan.problem.name,
                self.layout.display(&copy)
            ));
        }
        Ok(true)
    }
}

/// Errors: code that a case may run is no longer that which was planned and checked, and which its record names.
fn require_same_code(layout: &Layout, plan: &Plan, run: &Run) -> Result<()> {
    let now = code_hashes(layout, plan.measured, plan.profile)?;
    let mut changed: Vec<&str> =
        plan.code.keys().filter(|name| now.get(*name) != plan.code.get(*name)).map(String::as_str).collect();
    if peers_hash(&layout.root)? != run.peers_hash {
        changed.push("suites/peers");
    }
    ensure!(
        changed.is_empty(),
        "{} changed during the measurement, so no more cases are recorded: run it again with --resume",
        changed.join(", ")
    );
    Ok(())
}

impl<'a> Session<'a> {
    fn new(layout: &Layout, plan: Plan<'a>, progress: &mut dyn Progress) -> Self {
        let name = plan.problem.name;
        let tidied = tidy_record(layout, &plan, progress).with_context(|| format!("{name} is not measured"));
        tidied.as_ref().err().into_iter().for_each(|error| progress.refused(error));
        let on_disk = read_text(&layout.local(plan.profile, name)).ok();
        Self { plan, context: None, refused: tidied.is_err(), on_disk, has_copy: false }
    }
}

impl Tally {
    /// "3 measured, 0 out of memory, 0 not run, 0 failed".
    pub fn words(&self) -> String {
        let Self { measured, out_of_memory, not_run, not_recorded, failed, unrecorded, .. } = self;
        let some = |count: &usize, words: String| if *count > 0 { words } else { String::new() };
        let without_trace = some(not_recorded, format!(" ({not_recorded} of them leave the record as it is)"));
        let without = some(unrecorded, format!(", {unrecorded} of them without a record"));
        format!(
            "{measured} measured, {out_of_memory} out of memory, {not_run} not run{without_trace}, {failed} failed{without}"
        )
    }

    fn cases(&self) -> usize {
        self.measured + self.out_of_memory + self.not_run + self.failed
    }

    /// Counts cases that are not measured, since their problem is refused.
    fn leave(&mut self, cases: usize) {
        self.failed += cases;
        self.unrecorded += cases;
    }

    fn with(mut self, outcome: &Outcome) -> Self {
        *match outcome {
            failed if failed.failure().is_some() => &mut self.failed,
            Outcome::Measured { .. } => &mut self.measured,
            Outcome::OutOfMemory { .. } => &mut self.out_of_memory,
            Outcome::NotRun { .. } => &mut self.not_run,
            Outcome::Failed { .. } => &mut self.failed,
        } += 1;
        self
    }
}
