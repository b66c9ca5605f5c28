//! Which cases of a problem are still to be measured, and how long each took last time.

use std::collections::BTreeMap;

use anyhow::Result;
use serde_json::Value;

use super::answer::machines::ran_elsewhere;
use super::problem::{Measured, Problem};
use super::record::{CaseRecord, Machine, Outcome, Profile, RecordFile};
use super::store::Layout;
use super::subject::Subject;
use super::suite::{Suite, load};

/// Which cases of a grid to measure.
#[derive(Debug, Clone, Copy)]
pub enum Scope<'a> {
    /// Every case.
    All,
    /// Missing, stale, failed and not-run cases, and those of another type of machine than this one, unless it lacks the profile's
    /// device: `measure --resume`. A case that this machine still cannot run ends at once.
    Unfinished { here: &'a Machine },
    /// Missing and stale cases: `writeup`.
    Outdated,
}

/// The cases to measure of one problem under one profile.
pub struct Plan<'a> {
    pub problem: &'a Problem,
    pub measured: &'a Measured,
    pub profile: Profile,
    pub suite: Suite,
    /// The present record, without the cases that are no longer in the suite.
    pub record: RecordFile,
    /// Why the file of the present record cannot be used, and what to do; every case is then pending.
    pub unreadable: Option<String>,
    /// How many cases of the record's file are no longer in the suite.
    pub left_suite: usize,
    pub pending: Vec<Pending>,
    /// [`code_hashes`] when the plan was made, which is before a subject's code is checked.
    pub code: BTreeMap<String, String>,
}

/// One case to measure, and how long it took last time, here or else in the accepted record.
#[derive(Debug, Clone, PartialEq)]
pub struct Pending {
    pub grid: String,
    pub params: Value,
    pub last_elapsed_s: Option<f64>,
}

impl Plan<'_> {
    /// Whether the record's file, if there is one, holds the suite's cases and no others.
    pub fn is_done(&self) -> bool {
        self.pending.is_empty() && self.left_suite == 0 && self.unreadable.is_none()
    }

    /// Seconds that the pending cases took last time, and how many cases have no known time.
    pub fn estimate(&self) -> (f64, usize) {
        let known = self.pending.iter().filter_map(|p| p.last_elapsed_s);
        // The sum of no numbers is minus zero.
        (known.sum::<f64>() + 0.0, self.pending.iter().filter(|p| p.last_elapsed_s.is_none()).count())
    }
}

/// Selects the cases of `scope`; `None` if the problem measures nothing under this profile and has no record of it.
pub fn plan<'a>(layout: &Layout, problem: &'a Problem, profile: Profile, scope: Scope<'_>) -> Result<Option<Plan<'a>>> {
    let (Some(measured), Some(suite)) = (&problem.measured, load(&layout.root, problem)?) else { return Ok(None) };
    let why_stale = staleness(layout, problem, &suite, profile)?;
    let (old, unreadable) = match layout.read_local(profile, problem) {
        Ok(old) => (old, None),
        Err(error) => (None, Some(format!("{error:#}"))),
    };
    // Of a record that is there, the cases have left the suite.
    if suite.cases(profile).next().is_none() && old.is_none() && unreadable.is_none() {
        return Ok(None);
    }
    let mut record = old.unwrap_or_else(|| RecordFile::new(problem.name, profile));
    // Only used for an estimate. Commands that need the figures report an unreadable accepted record.
    let accepted = layout.read_accepted(profile, problem).ok().flatten();
    let took = |file: Option<&RecordFile>, params: &Value| file?.case(params).map(|case| case.elapsed_s);
    let is_elsewhere = |case: &CaseRecord| match scope {
        Scope::Unfinished { here } if profile == Profile::Cpu || !here.gpus.is_empty() => {
            ran_elsewhere(&record, case, here)
        }
        _ => false,
    };
    let wanted = |case: &CaseRecord| match scope {
        Scope::All => true,
        _ if why_stale(&record, case).is_some() || is_elsewhere(case) => true,
        Scope::Unfinished { .. } => case.outcome.failure().is_some() || case.outcome.is_not_run(),
        Scope::Outdated => false,
    };
    let mut pending = Vec::new();
    for (grid, params) in suite.cases(profile) {
        if record.case(params).is_none_or(&wanted) {
            let last_elapsed_s = took(Some(&record), params).or_else(|| took(accepted.as_ref(), params));
            pending.push(Pending { grid: grid.into(), params: params.clone(), last_elapsed_s });
        }
    }
    drop(why_stale);
    let before = record.cases.len();
    record.retain(|case| suite.cases(profile).any(|(_, params)| params == &case.params));
    let left_suite = before - record.cases.len();
    let code = code_hashes(layout, measured, profile)?;
    Ok(Some(Plan { problem, measured, profile, suite, record, unreadable, left_suite, pending, code }))
}

/// Returns a function from a record and a case of it to the reason why the case is stale, or `None` if it is fresh. Kernel files
/// are read once, not for each case.
pub fn staleness<'a>(
    layout: &Layout,
    problem: &'a Problem,
    suite: &'a Suite,
    profile: Profile,
) -> Result<impl Fn(&RecordFile, &CaseRecord) -> Option<String> + use<'a>> {
    let measured = problem.measured.as_ref();
    let kernels = measured.map(|measured| code_hashes(layout, measured, profile)).transpose()?.unwrap_or_default();
    Ok(move |file: &RecordFile, case: &CaseRecord| {
        let Some(measured) = measured else { return Some("the problem measures nothing any more".into()) };
        if !suite.cases(profile).any(|(grid, params)| (grid, params) == (&*case.grid, &case.params)) {
            return Some("its grid or parameters have left the suite".into());
        }
        if case.revision != measured.revision {
            return Some(format!("it is of revision {}, the problem is at {}", case.revision, measured.revision));
        }
        let names = (measured.kernels_of)(&case.params);
        let needed = kernels.keys().filter(|name| is_of_case(name, &names));
        let differs = |name: &&String| case.kernels.get(*name) != kernels.get(*name);
        if let Some(name) = case.kernels.keys().chain(needed).find(differs) {
            let code = if name == SUBJECT { "the subject's code".into() } else { format!("kernels/{name}") };
            let is_named = case.kernels.contains_key(name);
            return Some(if is_named {
                format!("{code} has changed since")
            } else {
                format!("it does not say of which {code}")
            });
        }
        match &case.outcome {
            Outcome::Measured { row } => {
                let Some(run) = file.run(&case.run) else { return Some("its run is not in the record".into()) };
                (measured.check_row)(&case.params, row, &run.machine).err().map(|e| format!("{e:#}"))
            }
            _ => None,
        }
    })
}

/// The name of the subject's code among the hashes of a case.
pub const SUBJECT: &str = "subject";

/// The name of the emulator among them.
const EMULATOR: &str = "emulator";

/// Whether a case that runs these kernels depends on the code of this name.
pub fn is_of_case(name: &str, kernels: &[&str]) -> bool {
    name == SUBJECT || name == EMULATOR || kernels.contains(&name)
}

/// The kernels that a problem's figures depend on, the emulator where it runs them, and the subject's code, each with its present
/// hash.
pub fn code_hashes(layout: &Layout, measured: &Measured, profile: Profile) -> Result<BTreeMap<String, String>> {
    let is_emulated = profile == Profile::Cpu && measured.is_emulated;
    let kernels = if is_emulated || profile == Profile::Gpu { measured.kernels } else { &[] };
    let kernels = kernels.iter().map(|name| Ok((name.to_string(), layout.kernel_hash(name)?)));
    let emulator = is_emulated.then(|| Ok((EMULATOR.into(), layout.emulator_hash()?)));
    let subject = layout.subject.iter().map(|subject| Ok((SUBJECT.into(), subject.hash()?)));
    kernels.chain(emulator).chain(subject).collect()
}

/// Takes the cases out of `file` that were measured with other code than `subject` has now: their figures are not its own. Returns
/// a sentence about them, unless there are none.
pub fn leave_out_other_code(file: &mut RecordFile, subject: &Subject) -> Result<Option<String>> {
    let (hash, before) = (subject.hash()?, file.cases.len());
    file.retain(|case| case.kernels.get(SUBJECT) == Some(&hash));
    Ok((file.cases.len() < before).then(|| {
        let left_out = before - file.cases.len();
        format!(
            "{left_out} cases of {} on the {} are left out, since they were measured with other code than the subject has now",
            file.problem, file.profile
        )
    }))
}

#[cfg(test)]
mod tests {
    use std::marker::PhantomData;

    use anyhow::bail;
    use serde::de::DeserializeOwned;
    use serde::{Deserialize, Serialize};
    use serde_json::json;

    use super::super::answer::Answer;
    use super::super::answer::made_up::{MadeUp, machine};
    use super::super::problem::Measure;
    use super::super::store::write_atomically;
    use super::*;

    /// One version of a made-up problem's parameters and rows.
    struct Version<Params, Row>(PhantomData<(Params, Row)>);

    impl<P: Serialize + DeserializeOwned, R: Serialize + DeserializeOwned> Measure for Version<P, R> {
        type Params = P;
        type Row = R;
        const REVISION: u32 = 1;

        fn measure(_: &P, _: Profile) -> Result<R> {
            bail!("no test measures it")
        }
    }

    #[derive(Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct OldParams {
        n: u32,
    }

    #[derive(Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct NewParams {
        n: u32,
        #[serde(default)]
        fused: bool,
    }

    #[derive(Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct OldRow {
        sum: f64,
    }

    #[derive(Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct NewRow {
        sum: f64,
        error: Option<f64>,
    }

    #[derive(Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct RowWithRequiredField {
        sum: f64,
        error: f64,
    }

    fn problem<P: Serialize + DeserializeOwned, R: Serialize + DeserializeOwned>() -> Problem {
        let measured = Some(Measured::of::<Version<P, R>>());
        Problem { name: "toy", answers: &[], checks: &[], measured, answer: |_, _| Ok(Answer::default()), reads: &[] }
    }

    /// A tree with a suite, and with accepted and local records of two cases by the old version.
    fn tree(suite: &str) -> (tempfile::TempDir, Layout) {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout::at(folder.path().into());
        let row = json!({"sum": 0.5});
        let record = MadeUp::cpu("toy").measured("all", &json!({"n": 1}), &row).measured("all", &json!({"n": 2}), &row);
        let record = record.set().file;
        for path in [layout.local(Profile::Cpu, "toy"), layout.accepted(Profile::Cpu, "toy")] {
            write_atomically(&path, record.to_json().unwrap().as_bytes()).unwrap();
        }
        write_atomically(&layout.root.join("suites/toy.toml"), suite.as_bytes()).unwrap();
        (folder, layout)
    }

    /// Why each accepted case is stale, and how many cases of the local record are to be measured again.
    fn stale(problem: &Problem, suite: &str) -> (Vec<Option<String>>, usize) {
        let (_folder, layout) = tree(suite);
        let file = layout.read_accepted(Profile::Cpu, problem).unwrap().unwrap();
        let suite = load(&layout.root, problem).unwrap().unwrap();
        let why_stale = staleness(&layout, problem, &suite, Profile::Cpu).unwrap();
        let reasons = file.cases.iter().map(|case| why_stale(&file, case));
        let plan = plan(&layout, problem, Profile::Cpu, Scope::Outdated).unwrap().unwrap();
        (reasons.collect(), plan.pending.len())
    }

    #[test]
    fn a_new_parameter_with_a_default_and_a_new_optional_field_of_a_row_make_nothing_stale() {
        let fresh = (vec![None, None], 0);
        assert_eq!(stale(&problem::<OldParams, OldRow>(), "[cpu.all]\nn = [1, 2]\n"), fresh);
        assert_eq!(stale(&problem::<NewParams, NewRow>(), "[cpu.all]\nn = [1, 2]\n"), fresh);
        assert_eq!(stale(&problem::<NewParams, NewRow>(), "[cpu.all]\nn = [1, 2]\nfused = [false]\n"), fresh);
    }

    #[test]
    fn a_record_that_cannot_be_used_leaves_every_case_to_measure_and_says_what_to_do() {
        let (_folder, layout) = tree("[cpu.all]\nn = [1, 2]\n");
        write_atomically(&layout.local(Profile::Cpu, "toy"), b"{\"schema\": 0}").unwrap();
        let toy = problem::<OldParams, OldRow>();
        let plan = plan(&layout, &toy, Profile::Cpu, Scope::Unfinished { here: &machine(None) }).unwrap().unwrap();
        assert_eq!((plan.pending.len(), plan.record.cases.len()), (2, 0));
        let why = "report/records/cpu/toy.json has the old schema 0; this cs336 reads schema 1. \
                   Run `cs336 measure toy --profile cpu`, which moves it aside.";
        assert_eq!(plan.unreadable.as_deref(), Some(why));
    }

    #[test]
    fn a_machine_without_a_gpu_measures_nothing_of_a_gpus_record_again() {
        let (_folder, layout) = tree("[gpu.all]\nn = [1, 2]\n");
        let record = MadeUp::gpu("toy").measured("all", &json!({"n": 1}), &json!(1)).set().file;
        write_atomically(&layout.local(Profile::Gpu, "toy"), record.to_json().unwrap().as_bytes()).unwrap();
        let toy = problem::<OldParams, Value>();
        let pending = |gpu| {
            let scope = Scope::Unfinished { here: &machine(gpu) };
            plan(&layout, &toy, Profile::Gpu, scope).unwrap().unwrap().pending.len()
        };
        assert_eq!([None, Some("NVIDIA H200"), Some("NVIDIA H100")].map(pending), [1, 1, 2]);
    }

    #[test]
    fn a_case_with_a_failed_column_or_of_another_type_of_machine_is_measured_again() {
        let (_folder, layout) = tree("[cpu.all]\nn = [1, 2]\n");
        let failed = json!({"column": {"kind": "failed", "error": "boom"}});
        let measured = json!({"column": {"kind": "measured", "row": 1}});
        let record = MadeUp::cpu("toy").measured("all", &json!({"n": 1}), &failed);
        let record = record.measured("all", &json!({"n": 2}), &measured).set().file;
        write_atomically(&layout.local(Profile::Cpu, "toy"), record.to_json().unwrap().as_bytes()).unwrap();
        let toy = problem::<OldParams, Value>();
        let pending = |scope| plan(&layout, &toy, Profile::Cpu, scope).unwrap().unwrap().pending;
        let (here, elsewhere) = (machine(None), Machine { cores: 64, ..machine(None) });
        let resumed = pending(Scope::Unfinished { here: &here });
        assert_eq!(resumed.iter().map(|case| &case.params).collect::<Vec<_>>(), [&json!({"n": 1})]);
        // An answer is of one type of machine.
        let plan = plan(&layout, &toy, Profile::Cpu, Scope::Unfinished { here: &elsewhere }).unwrap().unwrap();
        assert_eq!(plan.pending.len(), 2);
        assert!(pending(Scope::Outdated).is_empty());
    }

    #[test]
    fn another_value_of_a_new_parameter_and_a_new_required_field_make_a_case_stale() {
        let (reasons, pending) = stale(&problem::<NewParams, NewRow>(), "[cpu.all]\nn = 2\nfused = [false, true]\n");
        assert_eq!((reasons, pending), (vec![Some("its grid or parameters have left the suite".into()), None], 1));
        let (reasons, pending) = stale(&problem::<OldParams, RowWithRequiredField>(), "[cpu.all]\nn = [1, 2]\n");
        assert!(reasons.iter().flatten().all(|why| why.contains("error")) && reasons.len() == pending, "{reasons:?}");
        let (reasons, _) = stale(&problem::<OldParams, OldRow>(), "[cpu.other]\nn = [1, 2]\n");
        assert_eq!(
            reasons,
            vec![Some("its grid or parameters have left the suite".to_string()); 2],
            "their grid is \"all\""
        );
    }
}
