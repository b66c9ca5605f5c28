//! The machines that measured cases: their names, and records that hold cases of several types.

use super::CaseId;
use super::format::{distinct, listed, markdown};
use super::records::runs_by_age;
use crate::harness::record::{CaseRecord, Machine, Outcome, Profile, RecordFile, Run};

/// "AMD EPYC 7B13, 2 cores" or "2 × NVIDIA H200", without trademark symbols.
pub fn machine_name(machine: &Machine, profile: Profile) -> String {
    match (profile, &machine.gpus[..]) {
        (Profile::Gpu, [gpu]) => plain(&gpu.name),
        (Profile::Gpu, [gpu, ..]) => format!("{} × {}", machine.gpus.len(), plain(&gpu.name)),
        _ => {
            let plural = if machine.cores == 1 { "" } else { "s" };
            format!("{}, {} core{plural}", plain(&machine.cpu), machine.cores)
        }
    }
}

fn plain(name: &str) -> String {
    let name = name.replace("(R)", " ").replace("(TM)", " ").replace("(tm)", " ").replace(" CPU", " ");
    let name = name.split(" @ ").next().unwrap_or_default();
    name.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The machines of cases as captions name them, in Markdown: "NVIDIA H200 and 2 × NVIDIA H200".
pub fn machines_of<'a>(cases: impl IntoIterator<Item = &'a CaseId>) -> String {
    named(cases.into_iter().map(|case| (case.machine(), case.profile)))
}

/// As [`machines_of`], of machines.
pub fn named<'a>(machines: impl IntoIterator<Item = (&'a Machine, Profile)>) -> String {
    listed(&distinct(machines.into_iter().map(|(machine, profile)| markdown(&machine_name(machine, profile)))))
}

/// Memory of the device that the profile measures on.
pub fn memory_bytes(machine: &Machine, profile: Profile) -> u64 {
    match (profile, machine.gpus.first()) {
        (Profile::Gpu, Some(gpu)) => gpu.memory_bytes,
        _ => machine.memory_bytes,
    }
}

/// What machines of one type have in common: the GPU, or the processor with its cores.
pub fn type_of(machine: &Machine, profile: Profile) -> String {
    let gpus = machine.gpus.iter().take(1).cloned().collect();
    machine_name(&Machine { gpus, ..machine.clone() }, profile)
}

/// Whether a machine of another type than `here` ran the case; one that could not run it does not count.
pub fn ran_elsewhere(file: &RecordFile, case: &CaseRecord, here: &Machine) -> bool {
    let other = |run: &Run| type_of(&run.machine, file.profile) != type_of(here, file.profile);
    !case.outcome.is_not_run() && file.runs.iter().any(|run| run.id == case.run && other(run))
}

/// Takes the cases out of `file` that another type of machine ran than measured most, since what an answer says is of one type.
/// Returns a sentence about them, unless there are none.
pub fn leave_out_others(file: &mut RecordFile) -> Option<String> {
    let types: Vec<(String, String)> =
        runs_by_age(&file.runs).into_iter().map(|run| (run.id.clone(), type_of(&run.machine, file.profile))).collect();
    let is_of = |case: &CaseRecord, name: &String| types.iter().any(|(id, of)| *id == case.run && of == name);
    let measured = |name: &String| {
        file.cases.iter().filter(|case| matches!(case.outcome, Outcome::Measured { .. }) && is_of(case, name)).count()
    };
    // Of equal ones the newest.
    let most = types.iter().map(|(_, name)| name).max_by_key(|name| measured(name))?.clone();
    let is_kept = |case: &CaseRecord| case.outcome.is_not_run() || is_of(case, &most);
    let ran = |name: &String| file.cases.iter().any(|case| is_of(case, name) && !is_kept(case));
    let others: Vec<String> = distinct(types.iter().map(|(_, name)| name).filter(|name| ran(name)).cloned());
    if others.is_empty() {
        return None;
    }
    let before = file.cases.len();
    file.retain(is_kept);
    Some(format!(
        "{} of {before} cases of {} on the {} are left out, since they ran on {} and the others on {most}",
        before - file.cases.len(),
        file.problem,
        file.profile,
        listed(&others)
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::made_up::{MadeUp, machine};
    use super::*;

    #[test]
    fn a_machine_name_has_no_trademark_symbols() {
        let machine = Machine { cpu: "Intel(R) Xeon(R) CPU @ 2.20GHz".into(), cores: 2, ..machine(None) };
        assert_eq!(machine_name(&machine, Profile::Cpu), "Intel Xeon, 2 cores");
    }

    #[test]
    fn a_record_of_two_types_of_machines_keeps_the_cases_of_that_which_measured_most() {
        let case = |n: i64| json!({"n": n});
        let made_up = MadeUp::gpu("p").measured("g", &case(1), &1).measured("g", &case(2), &1).failed("g", &case(3));
        let mut file = made_up.run("20260102T000000Z-new0", Some("NVIDIA H100")).measured("g", &case(4), &1).set().file;
        let said = leave_out_others(&mut file).unwrap();
        assert_eq!(
            said,
            "1 of 4 cases of p on the gpu are left out, since they ran on NVIDIA H100 and the others on NVIDIA H200"
        );
        assert_eq!((file.cases.len(), file.runs.len()), (3, 1));
        assert_eq!(leave_out_others(&mut file), None);
        let made_up = MadeUp::gpu("p").measured("g", &case(1), &1);
        let without = made_up.run("20260102T000000Z-new0", None).not_run("g", &case(2)).set();
        assert_eq!(leave_out_others(&mut without.file.clone()), None, "of what was not run nothing is said");
        assert_eq!(without.machine().unwrap(), "NVIDIA H200");
    }

    #[test]
    fn machines_with_other_numbers_of_the_same_gpu_are_of_one_type_and_both_are_named() {
        let case = |n: i64| json!({"n": n});
        let mut set = MadeUp::gpu("p").measured("g", &case(1), &1).set();
        let mut of_two = set.file.runs[0].clone();
        of_two.id = "20260102T000000Z-two0".into();
        of_two.machine.gpus.push(of_two.machine.gpus[0].clone());
        set.file.put(CaseRecord { params: case(2), run: of_two.id.clone(), ..set.file.cases[0].clone() }, &of_two);
        assert_eq!(leave_out_others(&mut set.file), None);
        assert_eq!(set.machine().unwrap(), "NVIDIA H200 and 2 × NVIDIA H200");
    }
}
