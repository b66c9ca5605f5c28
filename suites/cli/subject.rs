//! `cs336 grade --subject`: the subjects of `suites/subjects`, each graded as its name says, whatever it does.

use std::net::{TcpListener, TcpStream};

use super::*;

/// A tree with the Python peers, and a copy of one of the committed subjects.
pub struct Graded {
    pub tree: Tree,
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        match path.is_dir() {
            true => copy_folder(&path, &to),
            false => drop(fs::copy(&path, to).unwrap()),
        }
    }
}

impl Graded {
    /// Copies the subject into `name` below the folder `subjects`, with `text` in its file `file`.
    pub fn add(&self, subject: &str, name: &str, file: &str, text: &str) -> PathBuf {
        let folder = self.tree.path("subjects").join(name);
        copy_folder(&root().join("suites/subjects").join(subject), &folder);
        if !file.is_empty() {
            fs::write(folder.join(file), text).unwrap();
        }
        folder
    }

    pub fn new() -> Self {
        let tree = Tree::new();
        copy_folder(&root().join("suites/peers"), &tree.path("suites/peers"));
        Self { tree }
    }

    /// With the Python of this checkout.
    pub fn with_python<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        let python = root().join(".venv/bin/python");
        command.env("CS336_PYTHON", &python).env("PYTHON", python)
    }

    /// The grades of one subject on these problems, as JSON, by the Python of this checkout.
    pub fn grade(&self, folder: &Path, problems: &[&str], more: &[&str]) -> Value {
        let arguments = [&["grade"], problems, &["--subject", folder.to_str().unwrap(), "--json"], more].concat();
        let mut command = self.tree.command(&arguments);
        json(&self.with_python(&mut command).output().unwrap())
    }

    /// The table of all subjects on these problems (of these checks, where any are named), and what the command said.
    pub fn grade_all(&self, problems: &[&str], checks: &[&str]) -> (String, String) {
        let checks: Vec<&str> = checks.iter().flat_map(|check| ["--check", check]).collect();
        let mut command = self.tree.command(&[&["grade"], problems, &["--subjects", "subjects"], &checks[..]].concat());
        let output = self.with_python(&mut command).output().unwrap();
        let table = fs::read_to_string(self.tree.path("grades/grades.csv"));
        (table.unwrap_or_else(|error| panic!("{error}: {}", output_text(&output))), output_text(&output))
    }

    /// The text that each check of these grades ended with, by name, and whether it passed.
    pub fn checks(grades: &Value) -> Vec<(String, String, String)> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        let parts = grades.as_array().unwrap().iter().flat_map(|grade| grade["parts"].as_array().unwrap());
        let checks = parts.flat_map(|part| part["checks"].as_array().unwrap());
        let words = |ending: &Value| ["error", "reason", "note"].map(|key| text(&ending[key])).concat();
        checks.map(|c| (text(&c["name"]), text(&c["ending"]["status"]), words(&c["ending"]))).collect()
    }
}

/// Whether this kernel confines a process wholly; where it does not, a test of that is skipped, but not in CI.
pub fn is_confined() -> bool {
    let lacks = cs336::process::confinement::lacks();
    assert!(lacks.is_none() || std::env::var_os("CI").is_none(), "{lacks:?}");
    lacks.iter().for_each(|lacks| eprintln!("skipped: {lacks}"));
    lacks.is_none()
}

/// The first connection, whose reads have a limit.
pub fn accepted(listener: &TcpListener) -> TcpStream {
    listener.set_nonblocking(true).unwrap();
    let mut first = None;
    wait_until(Duration::from_secs(120), || {
        first = listener.accept().ok();
        first.is_some()
    });
    let (connection, _) = first.expect("nobody connects");
    connection.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    connection
}

/// The problem whose points are earned by the forward pass alone, and its first check.
const FORWARD: &str = "flash_forward";

#[test]
fn a_kernel_in_triton_earns_its_points_under_the_interpreter() {
    let graded = Graded::new();
    let folder = graded.add("interpreted", "interpreted", "", "");
    let grades = graded.grade(&folder, &[FORWARD], &[]);
    let parts = grades[0]["parts"].as_array().unwrap();
    let earned: Vec<f64> = parts.iter().map(|part| part["earned"].as_f64().unwrap()).collect();
    // It lacks the function of part (a).
    assert_eq!(earned, [0.0, 8.0, 2.0], "{grades}");
}

/// Triton puts compiled code into its cache by such a rename.
#[test]
fn a_subject_moves_what_it_has_made_from_folder_to_folder() {
    let graded = Graded::new();
    let folder = graded.add("right", "moves", "", "");
    let adapters = folder.join("tests/adapters.py");
    let moves = "import os

os.makedirs('cache/new/folder', exist_ok=True)
open('cache/new/file', 'w').close()
os.replace('cache/new/file', 'cache/file')
os.rename('cache/new/folder', f'cache/{os.getpid()}')
";
    fs::write(&adapters, fs::read_to_string(&adapters).unwrap() + moves).unwrap();
    let grades = graded.grade(&folder, &[FORWARD], &[]);
    assert_eq!(grades[0]["earned"], grades[0]["points"], "{grades}");
}

#[test]
fn a_right_subject_in_plain_pytorch_earns_all_points_of_the_adapters() {
    let graded = Graded::new();
    let folder = graded.add("right", "right", "", "");
    // pytest reads no nested project, and an optimizer's state may have an entry that is no parameter's.
    for (name, project) in [("words", &b"# \xe9"[..]), ("list", b"[project]\nname = ['x']")] {
        fs::create_dir(folder.join(name)).unwrap();
        fs::write(folder.join(name).join("pyproject.toml"), project).unwrap();
    }
    let edit = |file: &str, from: &str, to: &str| {
        let file = folder.join("cs336_systems").join(file);
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.contains(from), "{text}");
        fs::write(&file, text.replace(from, to)).unwrap();
    };
    let made = "super().__init__(params, dict(kwargs))\n";
    edit("sharded.py", made, &format!("{made}        self.state['steps'] = 0\n"));
    // It may save what a file of tensors cannot hold.
    let more = "(q > 0).to(torch.uint8), q.to_sparse(), q.to('meta')";
    edit("flash.py", "(q, k, v, o, lse)", &format!("(q, k, v, o, lse, {more})"));
    edit("flash.py", "*ctx.saved_tensors, d_o", "*ctx.saved_tensors[:5], d_o");
    let grades = graded.grade(&folder, &[], &[]);
    let lost: Vec<_> = Graded::checks(&grades).into_iter().filter(|(_, status, _)| status != "passed").collect();
    assert!(lost.is_empty(), "{lost:?}");
    let earned: f64 = grades.as_array().unwrap().iter().map(|grade| grade["earned"].as_f64().unwrap()).sum();
    assert_eq!(earned, 48.0);
}

/// Each way of `suites/subjects/broken`, and a part of the sentence that the first check says.
const BROKEN: &[(&str, &str)] = &[
    ("import_error", "importing adapters.py raises ValueError (adapters.py, line"),
    ("missing_module", "needs the module einops_that_nobody_installed"),
    ("exit_on_import", "importing adapters.py calls sys.exit(0)"),
    ("not_implemented", "raises NotImplementedError (adapters.py, line"),
    ("crash", "was ended by signal 11 (SIGSEGV)"),
    ("hang", "no answer within 5 s, the limit that --limit sets"),
    ("infinite_loop", "no answer within 5 s, the limit that --limit sets"),
    ("exit", "calls sys.exit(0)"),
    ("exit_at_once", "its process exited with status 0"),
    ("memory", "allocate"),
    ("wrong_shape", "o has shape [4, 127, 64], must have [4, 128, 64]"),
    ("wrong_dtype", "o is Double, must be Float"),
    ("nan", "o is off by up to NaN, beyond rtol = atol = 1e-2: it is NaN at [0, 0, 7]"),
    ("no_tensor", "o is list, must be a tensor"),
];

#[test]
fn each_way_to_break_is_an_outcome_with_words() {
    let graded = Graded::new();
    for (way, words) in BROKEN {
        let folder = graded.add("broken", way, "way.txt", way);
        let grades = graded.grade(&folder, &[FORWARD], &["--limit", "5", "--check", "official_protocol"]);
        let checks = Graded::checks(&grades);
        assert_eq!(checks[0].0, "official_protocol");
        assert!(checks[0].1 == "failed" && checks[0].2.contains(words), "{way}: {words:?} is not in {checks:?}");
    }
}

#[test]
fn a_missing_adapter_costs_its_own_part_alone_and_is_named() {
    let graded = Graded::new();
    let folder = graded.add("broken", "missing", "way.txt", "missing_adapter");
    let checks = Graded::checks(&graded.grade(&folder, &[FORWARD], &[]));
    let of = |name: &str| checks.iter().find(|check| check.0 == name).unwrap();
    assert_eq!(of("official_protocol").1, "passed", "{checks:?}");
    let (_, status, words) = of("triton_official_protocol");
    assert!(status == "failed" && words == "the adapters lack get_flashattention_autograd_function_triton", "{words}");
}

#[test]
fn what_a_subject_prints_is_no_result_and_is_mentioned() {
    let graded = Graded::new();
    let folder = graded.add("broken", "prints", "way.txt", "prints");
    let checks = Graded::checks(&graded.grade(&folder, &[FORWARD], &[]));
    assert!(checks[0].1 == "passed" && checks[0].2.ends_with("also printed text, which is not read"), "{checks:?}");
}

#[rstest]
#[case::crash("one_rank_crashes", "its process was ended by signal 11 (SIGSEGV)")]
#[case::hang("one_rank_hangs", "a training step of get_ddp_individual_parameters: no answer within 5 s")]
fn a_rank_that_ends_alone_is_named_with_its_end(#[case] way: &str, #[case] words: &str) {
    let graded = Graded::new();
    let folder = graded.add("broken", way, "way.txt", way);
    let grades =
        graded.grade(&folder, &["ddp_overlap_individual_parameters"], &["--limit", "5", "--check", "toy_model"]);
    let checks = Graded::checks(&grades);
    assert!(checks[0].1 == "failed" && checks[0].2.contains(words), "{checks:?}");
}

/// Each trick of `suites/subjects/cheats`, and a part of the sentence of the first check, which must see through it.
const TRICKS: &[(&str, &str)] = &[
    ("prints_a_pass", "o is off by up to"),
    ("forges_replies", "answered job 1, expected was job 2"),
    ("knows_the_official_answer", "it is 0.000000 at"),
    ("patches_the_comparison", "o is off by up to"),
    ("reads_the_cases", "raises PermissionError"),
    ("links_to_the_cases", "left no readable result"),
    ("reads_its_parent", "raises PermissionError"),
    ("ends_its_parent", "raises PermissionError"),
    ("writes_to_its_folder", "raises PermissionError"),
    ("writes_to_the_inputs", "raises PermissionError"),
    ("raises_a_pass", "calls sys.exit('passed')"),
];

#[test]
fn no_trick_earns_a_point_or_leaves_a_file() {
    if !is_confined() {
        return;
    }
    let graded = Graded::new();
    let case = graded.tree.path("secret.safetensors");
    fs::copy(root().join("suites/cases/attention_float32.safetensors"), &case).unwrap();
    for (trick, words) in TRICKS {
        let folder = graded.add("cheats", trick, "trick.txt", trick);
        fs::write(folder.join("secrets.txt"), case.to_str().unwrap()).unwrap();
        let grades = graded.grade(&folder, &[FORWARD], &[]);
        let checks = Graded::checks(&grades);
        assert!(checks[0].1 == "failed" && checks[0].2.contains(words), "{trick}: {words:?} is not in {checks:?}");
        assert_eq!(grades[0]["earned"], 0.0, "{trick} earns points: {checks:?}");
        assert!(!folder.join("written.txt").exists(), "{trick} wrote into its folder");
    }
}

#[test]
fn a_subject_that_trains_alone_and_shards_nothing_earns_nothing_for_it() {
    let graded = Graded::new();
    let folder = graded.add("cheats", "alone", "trick.txt", "none");
    let problems = ["ddp_overlap_individual_parameters", "ddp_overlap_bucketed", "optimizer_state_sharding"];
    let grades = graded.grade(&folder, &problems, &[]);
    let said = grades.to_string();
    for words in ["fc1.weight is not that of rank 1 after construction", "the ranks step [850, 850] of 850 values"] {
        assert!(said.contains(words), "{words:?} is not in {said}");
    }
    let earned: Vec<_> = grades.as_array().unwrap().iter().map(|grade| grade["earned"].as_f64().unwrap()).collect();
    assert_eq!(earned, [0.0, 0.0, 0.0], "{said}");
}

#[test]
fn hidden_cases_run_on_the_subject_and_one_without_an_adapter_says_so() {
    let graded = Graded::new();
    let folder = graded.add("right", "right", "", "");
    fs::create_dir(graded.tree.path("cases")).unwrap();
    for name in ["attention_float32_heads.safetensors", "rmsnorm.safetensors"] {
        fs::copy(root().join("suites/cases").join(name), graded.tree.path("cases").join(name)).unwrap();
    }
    let arguments = ["grade", "--subject", folder.to_str().unwrap(), "--cases", "cases"];
    let output = graded.with_python(&mut graded.tree.command(&arguments)).output().unwrap();
    let said = output_text(&output);
    for words in [
        "passed attention_float32_heads.safetensors\n    passed get_flashattention_autograd_function_triton: o: largest",
        "FAILED rmsnorm.safetensors\n    the assignment has no adapter for cases of kind \"rmsnorm\"",
        "1 of 2 cases passed",
    ] {
        assert!(said.contains(words), "{words:?} is not in: {said}");
    }
}

#[test]
fn what_cannot_be_graded_is_refused_with_the_remedy() {
    let graded = Graded::new();
    let folder = graded.add("right", "right", "", "");
    let folder = folder.to_str().unwrap();
    fs::create_dir(graded.tree.path("subjects/right/cases")).unwrap();
    fs::create_dir(graded.tree.path("empty")).unwrap();
    for (arguments, words) in [
        (vec!["--subject", "nowhere"], "the subject nowhere cannot be opened"),
        (vec!["--subject", "empty"], "the subject empty has neither tests/adapters.py nor adapters.py"),
        (
            vec!["--subject", folder, "--cases", "subjects/right/cases"],
            "lie in the subject's folder, where it can read",
        ),
        (
            vec!["naive_ddp", "--subject", folder],
            "naive_ddp has no adapter, so no subject; adapters have flash_forward",
        ),
        (vec!["--subject", "empty", "--install"], "empty has no pyproject.toml, so --install cannot tell"),
        (vec!["--subjects", "empty"], "empty holds no folder, so nothing was graded"),
        (vec!["--check", "toy_model"], "--check chooses among the checks of a subject"),
        (
            vec!["flash_forward", "--subject", folder, "--check", "toy_model"],
            "no check of these problems is called \"toy_model\"; they have causal_drawn_inputs, ",
        ),
    ] {
        let said = graded.tree.refused(&[&["grade"][..], &arguments].concat());
        assert!(said.contains(words), "{words:?} is not in: {said}");
    }
}

#[test]
fn a_folder_that_is_no_subject_has_a_row_with_the_reason_and_files_for_graders_name_the_seed() {
    let graded = Graded::new();
    graded.add("broken", "broken", "way.txt", "not_implemented");
    fs::create_dir(graded.tree.path("subjects/notes")).unwrap();
    let (table, said) = graded.grade_all(&[FORWARD], &[]);
    assert!(table.starts_with("subject,earned,of,flash_forward,reasons\nbroken,0,15,0,"), "{table}");
    assert!(table.contains("\nnotes,0,0,,the subject ") && table.contains("has neither tests/adapters.py"), "{table}");
    assert!(said.contains("not graded  notes") && said.contains("2 subjects"), "{said}");
    let results = fs::read_to_string(graded.tree.path("grades/broken/results.json")).unwrap();
    assert!(results.contains("(seed ") && results.contains("raises NotImplementedError"), "{results}");
}
