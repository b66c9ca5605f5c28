//! A subject's words and files have bounds, and its faults are told from ours.

use super::*;
use crate::collective::RanksFault;
use crate::process::{Cause, Death};

#[test]
fn words_are_cut_once_with_the_number_of_bytes_that_are_left_out() {
    let long = SubjectFault::new("é".repeat(30_000_000)).to_string();
    assert!(long.len() < 2 * MOST_WORDS && long.ends_with("é (... 59995904 more bytes)"), "{}", &long[4000..]);
    assert_eq!(SubjectFault::new(format!("before: {long}")).to_string(), format!("before: {long}"));
    assert!(words_of(&anyhow::anyhow!("a".repeat(1 << 20))).len() < 2 * MOST_WORDS);
    assert_eq!(SubjectFault::new("short").to_string(), "short");
}

#[test]
fn a_failed_call_on_a_full_disk_is_no_fault_of_the_subject() {
    let full = anyhow::Error::from(std::io::Error::from(std::io::ErrorKind::StorageFull)).context("starting the peer");
    assert!(NotGraded::of(&fault(&full, "starting", STARTING)).is_some());
}

#[test]
fn a_process_that_the_kernel_ends_for_want_of_memory_is_no_fault_of_the_subject() {
    let ended = |out_of_memory| {
        let cause = Cause::Exited { status: std::os::unix::process::ExitStatusExt::from_raw(9), out_of_memory };
        fault(&PeerDied(Death { cause, last_output: String::new() }).into(), "calling forward", STARTING)
    };
    let error = ended(true);
    assert!(NotGraded::of(&error).is_some_and(|NotGraded(words)| words.contains("or lower --memory")), "{error:#}");
    assert!(ended(false).is::<SubjectFault>());
    let error = launched(|_| ranks_fault(true));
    assert!(NotGraded::of(&error).is_some_and(|NotGraded(words)| words.contains("or lower --memory")), "{error:#}");
}

#[test]
fn a_tree_whose_path_is_no_text_is_named() {
    use std::os::unix::ffi::OsStrExt as _;

    let folder = tempfile::tempdir().unwrap();
    let (submission, work) = (folder.path().join("submission"), folder.path().join("work"));
    std::fs::create_dir_all(&submission).unwrap();
    std::fs::create_dir_all(&work).unwrap();
    std::fs::write(submission.join("adapters.py"), "").unwrap();
    let subject = Subject::find(&submission, 1, 1, 0).unwrap();
    let folders = Folders::make(&work).unwrap();
    let suites = folder.path().join(std::ffi::OsStr::from_bytes(b"tree\xff/suites"));
    let error = confined::command(&subject, &folders, &suites).unwrap_err();
    let NotGraded(words) = NotGraded::of(&error).unwrap();
    assert!(words.contains("peers, which the subject must read, is not UTF-8: rename or move it"), "{words}");
}

fn ranks_fault(out_of_memory: bool) -> anyhow::Error {
    let words = "rank 1 of 2 exited with status 1".to_string();
    anyhow::Error::from(RanksFault { words, out_of_memory }).context("training")
}

/// What becomes of the error of a launch.
fn launched(fail: impl FnOnce(&rank::Trainee) -> anyhow::Error) -> anyhow::Error {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("adapters.py"), "").unwrap();
    let subject = Subject::find(folder.path(), 1, 1, 0).unwrap();
    let launch = |trainee: &rank::Trainee| Err(fail(trainee));
    rank::Trainee::launch::<()>(&subject, rank::Adapter::Individual { lr: 0.1 }, launch).unwrap_err()
}

#[test]
fn ranks_that_fail_without_words_of_a_subject_cost_it_no_points() {
    let error = launched(|_| ranks_fault(false));
    let NotGraded(words) = NotGraded::of(&error).unwrap();
    assert!(words.contains("training: rank 1 of 2 exited with status 1") && !words.contains("--memory"), "{words}");
    let error = launched(|trainee| {
        let fault = Err::<(), _>(SubjectFault::new("its process ended").into());
        assert!(rank::left(&trainee.faults.join("rank 1"), fault).is_err());
        ranks_fault(false)
    });
    assert!(error.is::<SubjectFault>() && error.to_string() == "its process ended", "{error:#}");
    let error = launched(|_| Fault::NotAvailable { needs: "2 GPUs".into(), has: "none".into() }.into());
    assert!(NotGraded::of(&error).is_none(), "{error:#}");
    assert_eq!(unavailable(&error).as_deref(), Some("needs 2 GPUs, has none"));
}

#[test]
fn a_python_that_does_not_start_or_gets_no_threads_is_no_fault_of_the_subject() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("adapters.py"), "").unwrap();
    let ours = Subject::find(folder.path(), 1, 1, 0).unwrap();
    let own = Subject { python: ours.folder.join("python"), has_own_python: true, ..ours.clone() };
    let fault = |subject, has_started, words: &str| {
        let cause =
            Cause::Exited { status: std::os::unix::process::ExitStatusExt::from_raw(1 << 8), out_of_memory: false };
        starting_fault(subject, has_started, &PeerDied(Death { cause, last_output: words.into() }).into())
    };
    for (has_started, words) in [(false, "why"), (true, "RuntimeError: can't start new thread")] {
        let error = fault(&own, has_started, words);
        assert!(NotGraded::of(&error).is_some() && error.to_string().contains(words), "{error:#}");
    }
    assert!(fault(&own, true, "why").is::<SubjectFault>());
    // Of a Python that is not the subject's only our code has run by then.
    assert!(NotGraded::of(&fault(&ours, true, "why")).is_some());
    let hung = NoAnswer { limit: STARTING.time, last_output: String::new() }.into();
    assert!(NotGraded::of(&starting_fault(&ours, true, &hung)).is_some());
    assert!(starting_fault(&own, true, &hung).is::<SubjectFault>());
}

#[test]
fn the_limit_that_passed_is_named_with_what_sets_it() {
    let hung = || NoAnswer { limit: STARTING.time, last_output: String::new() }.into();
    let call = Limit { time: Duration::from_secs(7), set_by: "the limit that --limit sets" };
    assert_eq!(fault(&hung(), "a", STARTING).to_string(), "a: no answer within 300 s, the limit for starting");
    assert_eq!(fault(&hung(), "a", call).to_string(), "a: no answer within 7 s, the limit that --limit sets");
}

#[test]
fn cases_that_lie_in_what_a_subject_may_read_are_refused_with_the_place() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().canonicalize().unwrap().join(name);
    for name in ["subject/own", "elsewhere", "linked"] {
        std::fs::create_dir_all(at(name)).unwrap();
    }
    std::fs::write(at("subject/adapters.py"), "").unwrap();
    std::fs::write(at("subject/own/x.safetensors"), "").unwrap();
    std::os::unix::fs::symlink(at("subject/own/x.safetensors"), at("linked/x.safetensors")).unwrap();
    let subject = Subject::find(&at("subject"), 1, 1, 0).unwrap();
    let said = |cases: &Path| require_hidden(&subject, cases, &at("suites")).err().map(|error| error.to_string());
    assert_eq!(said(&at("elsewhere")), None);
    for cases in ["subject/own", "linked"] {
        assert!(said(&at(cases)).unwrap().contains("lie in the subject's folder, where it can read them; move them"));
    }
    assert!(said(Path::new("/usr/lib")).unwrap().contains("lie in /usr, where it can read them; move them"));
}

#[test]
fn a_fault_at_the_start_lasts_unless_the_folder_is_away() {
    let folder = tempfile::tempdir().unwrap();
    let adapters = folder.path().join("adapters.py");
    std::fs::write(&adapters, "").unwrap();
    let subject = Subject::find(folder.path(), 1, 1, 0).unwrap();
    let at_start = SubjectFault { at_start: true, ..SubjectFault::new("the adapters lack the module tests") };
    assert!(attention::lasting(&subject, &at_start).is_some());
    assert!(attention::lasting(&subject, &SubjectFault::new("a wrong shape")).is_none());
    std::fs::remove_file(&adapters).unwrap();
    assert!(attention::lasting(&subject, &at_start).is_none(), "it is imported again once it is back");
}

#[test]
fn what_a_gpu_could_change_is_said_in_one_sentence() {
    let has = "the function of f raises ValueError under Triton's interpreter: no".to_string();
    let lacking =
        |needs: &str| fault(&Fault::NotAvailable { needs: needs.into(), has: has.clone() }.into(), "a", STARTING);
    assert_eq!(NotGraded::of(&lacking("a tool")).unwrap().0, format!("a: {has}; install what is missing"));
    let error = lacking("a GPU");
    assert_eq!(unavailable(&error), Some(format!("may need a GPU: {has}")));
    assert_eq!(error.to_string(), format!("may need a GPU: {has}"));
}
