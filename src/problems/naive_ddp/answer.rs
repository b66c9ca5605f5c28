//! What the checks and the fault tests show: how the strategy was verified, and how a run ends when a rank fails.

use anyhow::Result;
use serde::Serialize;

use super::CHECKS;
use super::measure::{FaultTests, Params, Row, accusation};
use crate::checks::data_parallel::ProtocolFacts;
use crate::checks::fault_test::RankFault;
use crate::collective::Backend;
use crate::harness::answer::format::markdown;
use crate::harness::answer::{Answer, Audience, Case, CaseOutcome, Claim, RecordSet, Records, Style, Table, Unit};

type FaultCase = Case<Params, Row>;

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    #[serde(flatten)]
    protocol: ProtocolFacts,
    /// Whether a fault test was measured on either machine.
    tested: bool,
    runs: usize,
    unnamed: usize,
    left: usize,
    broken: usize,
    /// Tests that ended without a result of any kind.
    failed: usize,
}

pub fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let sets = records.sets().map(|set| Ok((set, set.cases::<FaultTests>()?))).collect::<Result<Vec<_>>>()?;
    let rows: Vec<&Row> = sets.iter().flat_map(|(_, cases)| cases).filter_map(Case::row).collect();
    let quoted = Quoted {
        protocol: ProtocolFacts::of(CHECKS),
        tested: !rows.is_empty(),
        runs: rows.len(),
        unnamed: rows.iter().filter(|row| !(row.names_rank && row.names_call)).count(),
        left: rows.iter().map(|row| row.left).sum(),
        broken: rows.iter().filter(|row| !row.next_run_works).count(),
        failed: sets
            .iter()
            .flat_map(|(_, cases)| cases)
            .filter(|case| matches!(case.outcome, CaseOutcome::Failed { .. } | CaseOutcome::OutOfMemory { .. }))
            .count(),
    };
    let mut answer = Answer::new(&quoted)?;
    let Quoted { tested, runs, unnamed, left, broken, failed, .. } = quoted;
    if tested {
        answer.claim(
            Claim::new("drill-ends-and-names", unnamed + left + broken + failed == 0)
                .count("runs", runs)
                .count("without rank or collective", unnamed)
                .count("processes left", left)
                .count("next runs that failed", broken)
                .count("tests that failed", failed),
        )?;
        for (set, cases) in &sets {
            answer.table(format!("faults-{}", set.profile()), fault_table(set, cases)?)?;
        }
    }
    Ok(answer)
}

/// How each fault of the last rank ended.
fn fault_table(set: &RecordSet, cases: &[FaultCase]) -> Result<Table> {
    let table = Table::of(cases)
        .text("last rank", |case| does(case.params.fault))
        .right("of ranks", |case| case.params.world_size.to_string())
        .number("ended after (s)", Style::Sec, 1, |case| case.cell(|row| case.quantity(row.seconds, Unit::Seconds)))
        .text("error", |case| case.row().map_or_else(|| markdown(case.outcome.reason()), |row| said_first(&row.words)));
    let Some(first) = cases.first() else { return Ok(table.into()) };
    let Params { patience_s, deadline_s, .. } = first.params;
    let over = match first.params.backend {
        Backend::Nccl => "on GPUs over NCCL",
        Backend::Gloo => "in CPU processes over Gloo",
    };
    Ok(table.captioned(format!(
        "How a run ends when its last rank fails, {over}: the time until all ranks have ended, and the start of the error. \
         An idle rank is given {patience_s:.0} s, the whole run {deadline_s:.0} s. {}.",
        set.machine()?
    )))
}

/// The accusation in fewer words, and whether the deadline passed.
fn said_first(message: &str) -> String {
    let first = accusation(message).split(" (").next().unwrap_or_default();
    let passed = if message.contains("the deadline of ") { "the deadline passed; " } else { "" };
    let words = format!("{passed}{first}");
    let words = words.split("; its last output").next().unwrap_or(&words);
    words.replace(" Float, sum", "").replace(" Float from rank 0", "")
}

/// What the last rank does, in words.
fn does(fault: RankFault) -> &'static str {
    match fault {
        RankFault::Exit => "exits with status 7",
        RankFault::Leave => "exits as if all were well",
        RankFault::Fail => "returns an error",
        RankFault::Panic => "panics",
        RankFault::PanicInBackward => "panics in a gradient hook",
        RankFault::Stall | RankFault::SuperviseStalled => "sleeps",
        RankFault::Work => "computes on and on",
        RankFault::NeverReady => "waits for a gradient that never comes",
        RankFault::WrongCount => "all-reduces 8 values, not 4",
        RankFault::WrongOrder => "calls broadcast first",
        RankFault::None | RankFault::SumForever => "does nothing wrong",
        RankFault::Late => "comes late",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::answer::made_up::MadeUp;

    fn params(fault: RankFault) -> Params {
        Params { backend: Backend::Gloo, world_size: 2, fault, patience_s: 5.0, deadline_s: 30.0 }
    }

    fn row(words: &str, left: usize) -> Row {
        Row { words: words.into(), names_rank: true, names_call: true, seconds: 1.25, left, next_run_works: true }
    }

    #[test]
    fn a_run_that_leaves_a_process_breaks_the_claim() {
        for (left, holds) in [(0, true), (1, false)] {
            let records =
                MadeUp::cpu("naive_ddp").measured("faults", &params(RankFault::Exit), &row("rank 1 exited", left));
            let answer = answer(&records.records(), Audience::Ours).unwrap();
            assert_eq!(answer.holds("drill-ends-and-names"), Some(holds));
            assert_eq!(answer.quoted()["runs"], 1);
        }
    }

    #[test]
    fn a_test_that_fails_breaks_the_claim_of_the_others() {
        let records = MadeUp::cpu("naive_ddp")
            .measured("faults", &params(RankFault::Exit), &row("rank 1 exited", 0))
            .failed("faults", &params(RankFault::Stall));
        let answer = answer(&records.records(), Audience::Ours).unwrap();
        assert_eq!((answer.holds("drill-ends-and-names"), &answer.quoted()["failed"]), (Some(false), &1.into()));
    }

    #[test]
    fn faults_that_were_not_measured_show_their_reason_and_without_any_there_is_no_claim() {
        let records = MadeUp::cpu("naive_ddp").failed("faults", &params(RankFault::Stall));
        let none = answer(&records.records(), Audience::Ours).unwrap();
        assert_eq!((none.holds("drill-ends-and-names"), &none.quoted()["tested"]), (None, &false.into()));
        assert!(answer(&Records::default(), Audience::Ours).unwrap().tables().is_empty());
        let records = MadeUp::cpu("naive_ddp")
            .measured("faults", &params(RankFault::Exit), &row("rank 1 exited", 0))
            .not_run("faults", &params(RankFault::Stall));
        let answer = answer(&records.records(), Audience::Ours).unwrap();
        let table = answer.tables()["faults-cpu"].markdown();
        assert!(table.contains("| exits with status 7 | 2 | 1.2 | rank 1 exited |"), "{table}");
        assert!(table.contains("| sleeps | 2 | not run | needs 6 GPUs, has 2 |"), "{table}");
    }

    #[test]
    fn of_a_message_its_first_line_is_quoted_and_after_a_deadline_the_second_too() {
        assert_eq!(said_first("task fault_test on 2 ranks: rank 1 exited (status 7)\nmore"), "rank 1 exited");
        let loud = "rank 1 of 2 exited with status 1; its last was barrier 1; its last output:\ncs336: no";
        assert_eq!(said_first(loud), "rank 1 of 2 exited with status 1; its last was barrier 1");
        let late = "the deadline of 30 s passed (x)\nrank 0 waits in all-reduce 2 of 4 Float, sum (since 3 s)";
        assert_eq!(said_first(late), "the deadline passed; rank 0 waits in all-reduce 2 of 4");
    }
}
