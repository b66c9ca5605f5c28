//! The runs that a table's numbers come from.

use std::collections::BTreeSet;

use crate::harness::answer::machines::machine_name;
use crate::harness::answer::mark::{self, CaseKey};
use crate::harness::answer::{Cell, RecordSet, Records, Table};
use crate::harness::record::Run;
use crate::report::ProblemInput;

/// The cases that a table's numbers come from, those in words among them.
fn cases_of(table: &Table) -> BTreeSet<CaseKey> {
    let marks = |cell: &Cell| match cell {
        Cell::Number(quantity, _) => mark::key(quantity.sources()),
        Cell::Text(text) => mark::keys(text).collect::<Vec<_>>().join(";"),
        Cell::Missing => String::new(),
    };
    table.rows.iter().flatten().flat_map(|cell| mark::cases(&marks(cell))).collect()
}

/// A line for each run that the table's numbers come from; for a figure, and for a table of which no number names its case, each
/// run of the answer.
pub fn provenance(input: &ProblemInput, table: Option<&Table>) -> String {
    let wanted = table.map(cases_of).unwrap_or_default();
    let is_of = |(problem, profile, case): &CaseKey, set: &RecordSet, run: &Run| {
        let found = set.file.cases.get(*case).filter(|_| *problem == set.file.problem && *profile == set.profile());
        found.is_some_and(|found| found.run == run.id)
    };
    let mut lines = String::new();
    for (set, run) in runs(&input.records) {
        if wanted.is_empty() || wanted.iter().any(|case| is_of(case, set, run)) {
            let dirty = run.changes().map(|changes| format!(", with {changes}")).unwrap_or_default();
            let machine = machine_name(&run.machine, set.profile());
            let stale = match set.stale.len() {
                0 => String::new(),
                count => format!(", of whose records {count} cases are stale"),
            };
            lines += &format!("{}: {machine}, run {}, commit {}{dirty}{stale}\n", set.file.problem, run.id, run.commit);
        }
    }
    match table {
        _ if lines.is_empty() => "computed, not measured\n".into(),
        Some(_) if wanted.is_empty() => {
            format!("no number in it is of one case; the answer that it belongs to is from:\n{lines}")
        }
        _ => lines,
    }
}

/// The runs of an answer's own records and of those that it also reads.
fn runs(records: &Records) -> Vec<(&RecordSet, &Run)> {
    let own = records.sets().flat_map(|set| set.runs().into_iter().map(move |run| (set, run)));
    own.chain(records.others.values().flat_map(runs)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::document::{RecordSource, problem_input};
    use crate::harness::handout::by_name;
    use crate::harness::record::Profile;
    use crate::harness::store::Layout;

    /// The machines of the lines.
    fn machines(lines: &str) -> BTreeSet<&str> {
        lines.lines().filter_map(|line| Some(line.split_once(": ")?.1.split_once(", run ")?.0)).collect()
    }

    #[test]
    fn the_runs_of_a_table_are_those_of_its_cells_also_where_these_are_words() {
        let layout = Layout::at(env!("CARGO_MANIFEST_DIR").into());
        let input = problem_input(&layout, by_name("benchmarking_script").unwrap(), RecordSource::Accepted);
        let of = |id: &str| provenance(&input, Some(&input.answer.tables()[id]));
        // Steps by autograd, which are words with their spread, and fused steps are of different runs.
        assert!(input.answer.tables()["fused"].markdown().contains("more than one run"));
        assert!(of("fused").lines().count() > 1, "{}", of("fused"));
        let of_cpu = of("cpu-passes");
        let gpus = input.records.of(Profile::Gpu).unwrap().machine().unwrap();
        assert!(!machines(&of_cpu).is_empty() && !of_cpu.contains(&gpus), "{of_cpu}");
        assert!(!of_cpu.contains("the answer"), "{of_cpu}");
        let of_answer = provenance(&input, None);
        assert!(machines(&of_answer).len() > machines(&of_cpu).len(), "{of_answer}");
        let mixed = problem_input(&layout, by_name("benchmarking_mixed_precision").unwrap(), RecordSource::Accepted);
        let computed = provenance(&mixed, Some(&mixed.answer.tables()["layer-norm"]));
        assert!(computed.starts_with("no number in it is of one case; the answer"), "{computed}");
    }
}
