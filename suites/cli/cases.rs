//! `cs336 grade --cases`: each file of a folder has one result, whatever it is, and no name reaches a terminal raw.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;

use super::*;

/// A name that clears the screen, forges a line of its own, and turns the rest around.
const HOSTILE: &str = "a\npassed forged\u{1b}[2J\u{202e}.safetensors";

fn sound() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("suites/cases/rmsnorm.safetensors")
}

/// A tree with a folder `cases` of these files: five sound ones, seven that are no case, and one that is not graded.
fn hostile_cases() -> Tree {
    let tree = Tree::new();
    let cases = tree.path("cases");
    fs::create_dir(&cases).unwrap();
    for name in ["sound.safetensors", "UPPER.SAFETENSORS", ".safetensors", HOSTILE] {
        fs::copy(sound(), cases.join(name)).unwrap();
    }
    fs::copy(sound(), cases.join(OsStr::from_bytes(b"not-\xff-utf8.safetensors"))).unwrap();
    symlink("nowhere", cases.join("dangling.safetensors")).unwrap();
    symlink("/dev/null", cases.join("device.safetensors")).unwrap();
    fs::create_dir(cases.join("folder.safetensors")).unwrap();
    assert!(Command::new("mkfifo").arg(cases.join("pipe.safetensors")).status().unwrap().success());
    let whole = fs::read(sound()).unwrap();
    fs::write(cases.join("shrunk.safetensors"), &whole[..whole.len() - 1]).unwrap();
    let header = "{\"__metadata__\":{\"kind\":\"x\\npassed forged\\u001b[2J\u{202e}\",\"rtol\":\"0\",\"atol\":\"0\"}}";
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    fs::write(cases.join("kind.safetensors"), bytes).unwrap();
    symlink("/proc/self/mem", cases.join("unreadable.safetensors")).unwrap();
    fs::write(cases.join("README.txt"), "no case").unwrap();
    tree
}

fn assert_printable(text: &str) {
    let raw = |c: char| c.is_control() && c != '\n' || c == '\u{202e}';
    assert!(!text.chars().any(raw) && !text.lines().any(|line| line == "passed forged"), "{text:?}");
}

#[test]
fn every_file_of_a_folder_has_a_result_and_the_summary_is_printed() {
    let said = hostile_cases().refused(&["grade", "--cases", "cases"]);
    assert_printable(&said);
    for expected in [
        "passed sound.safetensors\n    passed rms_norm: y: largest absolute error ",
        "(rtol 1.0e-5)\n",
        "passed UPPER.SAFETENSORS\n",
        "passed .safetensors\n",
        "passed not-\\xff-utf8.safetensors\n",
        "passed a\\npassed forged\\u001b[2J\\u202e.safetensors\n",
        "FAILED dangling.safetensors\n    the file is a link to \"nowhere\", which cannot be opened",
        "FAILED device.safetensors\n    this is a device, not a regular file",
        "FAILED folder.safetensors\n    this is a folder, not a regular file",
        "FAILED pipe.safetensors\n    this is a pipe, not a regular file",
        "FAILED shrunk.safetensors\n    the file is not a valid case: ",
        "FAILED kind.safetensors\n    no kind of case is called \"x\\npassed forged\\u{1b}[2J\\u{202e}\"",
        "FAILED unreadable.safetensors\n    the file cannot be read: ",
        "5 of 12 cases passed\n",
        "names do not end in .safetensors: 1 of 13 files\n",
    ] {
        assert!(said.contains(expected), "{expected:?} is not in: {said}");
    }
}

#[test]
fn files_whose_names_cannot_be_printed_stay_apart() {
    let tree = Tree::new();
    fs::create_dir(tree.path("cases")).unwrap();
    for (right, wrong) in [(&b"a\xff"[..], &b"a\xfe"[..]), (b"b\n", b"b\\n")] {
        let path = |name: &[u8]| tree.path("cases").join(OsStr::from_bytes(&[name, b".safetensors"].concat()));
        fs::copy(sound(), path(right)).unwrap();
        fs::write(path(wrong), "no case").unwrap();
    }
    let said = tree.refused(&["grade", "--cases", "cases"]);
    for expected in ["passed a\\xff.", "FAILED a\\xfe.", "passed b\\n.", "FAILED b\\\\n."] {
        assert!(said.contains(expected), "{expected} is not in: {said}");
    }
}

#[test]
fn json_and_junit_are_written_where_cases_fail() {
    let tree = hostile_cases();
    let output = tree.run(&["grade", "--cases", "cases", "--json", "--junit", "j.xml"]);
    assert_eq!(output.status.code(), Some(1), "{}", output_text(&output));
    assert_printable(&String::from_utf8(output.stdout.clone()).unwrap());
    let results = json(&output);
    let results = results.as_array().unwrap();
    let failed = results.iter().filter(|result| result["error"].is_string()).count();
    assert_eq!((results.len(), failed), (12, 7), "{results:?}");
    assert!(results.iter().all(|result| result["passed"].as_bool() == Some(!result["error"].is_string())));
    let xml = fs::read_to_string(tree.path("j.xml")).unwrap();
    assert_printable(&xml);
    assert!(xml.contains("tests=\"12\"") && xml.contains("failures=\"7\"") && xml.contains("this is a pipe"), "{xml}");
}

#[test]
fn the_committed_cases_all_pass() {
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("suites/cases");
    let output = Tree::new().run(&["grade", "--cases", cases.to_str().unwrap()]);
    assert!(output.status.success(), "{}", output_text(&output));
}

#[rstest]
#[case::empty("empty.safetensors", b"", "truncated")]
#[case::text("text.safetensors", b"not a case at all, only words", "safetensors")]
#[case::no_metadata("bare.safetensors", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ", "metadata")]
fn a_malformed_case_is_one_failed_case_with_its_reason(
    #[case] name: &str,
    #[case] bytes: &[u8],
    #[case] expected: &str,
) {
    let tree = Tree::new();
    fs::create_dir(tree.path("cases")).unwrap();
    fs::write(tree.path("cases").join(name), bytes).unwrap();
    let sound = Path::new(env!("CARGO_MANIFEST_DIR")).join("suites/cases/rmsnorm.safetensors");
    fs::copy(sound, tree.path("cases/sound.safetensors")).unwrap();
    let said = tree.refused(&["grade", "--cases", "cases"]);
    assert!(
        said.contains(expected) && said.contains("passed sound.safetensors") && said.contains("1 of 2 cases passed"),
        "{said}"
    );
}

#[test]
fn no_cases_at_all_is_a_failure() {
    let tree = Tree::new();
    fs::create_dir(tree.path("cases")).unwrap();
    assert!(tree.refused(&["grade", "--cases", "cases"]).contains("nothing was graded"));
    assert!(tree.refused(&["grade", "--cases", "nowhere"]).contains("nowhere"));
}

/// /proc/kmsg says that it is a regular file, and waits for the kernel's next message.
#[test]
fn a_file_that_would_be_waited_for_is_one_failed_case() {
    if fs::File::open("/proc/kmsg").is_err() {
        eprintln!("skipped: only root can open /proc/kmsg");
        return;
    }
    let tree = Tree::new();
    fs::create_dir(tree.path("cases")).unwrap();
    symlink("/proc/kmsg", tree.path("cases/kernel.safetensors")).unwrap();
    let said = tree.refused(&["grade", "--cases", "cases"]);
    assert!(said.contains("FAILED kernel.safetensors\n") && said.contains("0 of 1 cases passed"), "{said}");
}

#[test]
fn a_case_is_not_overwritten_by_results() {
    let tree = Tree::new();
    fs::create_dir(tree.path("cases")).unwrap();
    fs::copy(sound(), tree.path("cases/sound.safetensors")).unwrap();
    symlink("cases/sound.safetensors", tree.path("link")).unwrap();
    for junit in ["cases/sound.safetensors", "link"] {
        for subject in [&[][..], &["--subject", "nowhere"]] {
            let said = tree.refused(&[&["grade", "--cases", "cases", "--junit", junit], subject].concat());
            assert!(said.contains("--cases and --junit both name the file"), "{said}");
        }
    }
    assert_eq!(fs::read(tree.path("cases/sound.safetensors")).unwrap(), fs::read(sound()).unwrap());
}

#[test]
fn a_tensor_of_more_dimensions_than_pytorch_takes_is_refused_without_a_word_of_c_plus_plus() {
    let tree = Tree::new();
    fs::create_dir(tree.path("cases")).unwrap();
    let whole = fs::read(sound()).unwrap();
    let length = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&whole[8..][..length]).unwrap();
    for name in ["x", "y"] {
        let shape = header[name]["shape"].as_array_mut().unwrap();
        shape.splice(..0, (0..70).map(|_| 1.into()));
    }
    let header = serde_json::to_vec(&header).unwrap();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], &header, &whole[8 + length..]].concat();
    fs::write(tree.path("cases/deep.safetensors"), bytes).unwrap();
    let said = tree.refused(&["grade", "--cases", "cases"]);
    assert!(said.contains("dimensions, and PyTorch computes with at most 64") && !said.contains("frame #"), "{said}");
}
