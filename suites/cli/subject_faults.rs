//! Subjects that attack what grades them, or break in ways that are no fault of theirs: nobody else loses points for it.

use std::net::TcpListener;

use super::subject::{Graded, is_confined};
use super::*;

const FORWARD: &str = "flash_forward";

/// The Python of this checkout.
pub fn python() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/python")
}

impl Graded {
    /// A subject of this one file, whose folder is `subjects/<name>`.
    pub fn write(&self, name: &str, adapters: &str) -> PathBuf {
        let folder = self.tree.path("subjects").join(name);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("adapters.py"), adapters).unwrap();
        folder
    }

    /// `cs336 grade` by the Python of this checkout, with temporary files in the tree's folder `tmp`.
    pub fn grading(&self, arguments: &[&str]) -> Command {
        let mut command = self.tree.command(&[&["grade"][..], arguments].concat());
        fs::create_dir_all(self.tree.path("tmp")).unwrap();
        command.env("PYTHON", python()).env("TMPDIR", self.tree.path("tmp"));
        command
    }

    /// The names in the folder of temporary files.
    pub fn left(&self) -> Vec<String> {
        let entries = fs::read_dir(self.tree.path("tmp")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
    }

    /// What a refused command said.
    pub fn refusal(&self, arguments: &[&str]) -> String {
        let output = self.grading(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", output_text(&output));
        output_text(&output)
    }
}

#[test]
fn no_setting_of_its_environment_lets_a_subject_read_another_folder() {
    if !is_confined() {
        return;
    }
    let graded = Graded::new();
    fs::create_dir_all(graded.tree.path("secret/bin")).unwrap();
    let secret = graded.tree.path("secret/case.safetensors");
    fs::write(&secret, "hidden").unwrap();
    let reads = format!("import pathlib\npathlib.Path({:?}).read_bytes()\n", secret.to_str().unwrap());
    let folder = graded.write("reader", &reads);
    fs::create_dir_all(folder.join(".venv/bin")).unwrap();
    let real = python().canonicalize().unwrap();
    std::os::unix::fs::symlink(&real, folder.join(".venv/bin/python")).unwrap();
    // Python takes the first one, in any case of letters.
    let homes =
        [real.parent().unwrap(), &graded.tree.path("secret/bin")].map(|home| home.to_str().unwrap().to_string());
    fs::write(folder.join(".venv/pyvenv.cfg"), format!("HOME = {}\nhome = {}\n", homes[0], homes[1])).unwrap();
    let libraries = fs::read_dir(python().parent().unwrap().with_file_name("lib")).unwrap();
    let packages: Vec<_> = libraries.map(|entry| entry.unwrap().path().join("site-packages")).collect();
    let mut command = graded.grading(&[FORWARD, "--subject", folder.to_str().unwrap()]);
    let output =
        command.env_remove("PYTHON").env("PYTHONPATH", std::env::join_paths(&packages).unwrap()).output().unwrap();
    let said = output_text(&output);
    assert!(said.contains("importing adapters.py raises PermissionError (adapters.py, line 2)"), "{said}");
}

#[test]
fn cases_that_a_subject_could_read_are_refused_before_it_starts() {
    let graded = Graded::new();
    let folder = graded.write("any", "");
    for cases in ["/usr/share", folder.to_str().unwrap()] {
        let said = graded.refusal(&["--subject", folder.to_str().unwrap(), "--cases", cases]);
        assert!(said.contains("where it can read them; move them"), "{said}");
    }
    // So are the golden ones, where a link leads to the subject.
    std::os::unix::fs::symlink(&folder, graded.tree.path("suites/cases")).unwrap();
    let said = graded.refusal(&[FORWARD, "--subject", folder.to_str().unwrap()]);
    assert!(said.contains("not graded: ") && said.contains("lie in the subject's folder"), "{said}");
}

#[test]
fn no_file_of_a_subject_outlives_its_grading_also_after_an_interrupt() {
    let graded = Graded::new();
    let writes = "import os, pathlib, time\npathlib.Path(os.environ['TMPDIR'], 'large').write_bytes(bytes(1 << 20))\n";
    let folder = graded.write("ends", &format!("{writes}raise ValueError('the end')\n"));
    let output = graded.grading(&[FORWARD, "--subject", folder.to_str().unwrap()]).output().unwrap();
    assert!(
        output_text(&output).contains("raises ValueError (adapters.py, line 3): the end"),
        "{}",
        output_text(&output)
    );
    assert_eq!(graded.left(), [""; 0]);
    let folder = graded.write("hangs", &format!("{writes}time.sleep(3600)\n"));
    let mut grading = graded.grading(&[FORWARD, "--subject", folder.to_str().unwrap()]).spawn().unwrap();
    wait_until(Duration::from_secs(60), || !graded.left().is_empty());
    assert!(!graded.left().is_empty());
    rustix::process::kill_process(rustix::process::Pid::from_child(&grading), rustix::process::Signal::INT).unwrap();
    assert_eq!(grading.wait().unwrap().code(), Some(130));
    assert_eq!(graded.left(), [""; 0]);
}

/// `command`, run by a shell after `before`, with what follows it.
pub fn through_sh(graded: &Graded, before: &str, command: &Command, after: &str) -> Output {
    let mut sh = Command::new("sh");
    sh.args(["-c", &format!("{before} \"$0\" \"$@\" {after}")]).arg(command.get_program()).args(command.get_args());
    sh.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?)))).current_dir(graded.tree.path(""));
    sh.output().unwrap()
}

#[rstest]
#[case::of_a_file(
    "ulimit -f 64; exec",
    "a process may write files of 32.00 KiB at most: raise that limit (`ulimit -f`)"
)]
#[case::of_time(
    "ulimit -t 600; exec",
    "a process may compute for 600 s at most: raise that limit (`ulimit -t`), or lower --limit to 4"
)]
#[case::of_addresses("ulimit -v 1000000; exec", "raise that limit (`ulimit -v`)")]
fn a_limit_of_the_machine_costs_no_subject_its_points(#[case] limit: &str, #[case] words: &str) {
    let graded = Graded::new();
    let folder = graded.add("right", "right", "", "");
    let grading = graded.grading(&[FORWARD, "--subject", folder.to_str().unwrap()]);
    let output = through_sh(&graded, limit, &grading, "");
    let said = output_text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("not graded: ") && said.contains(words) && !said.contains("earned"), "{said}");
}

#[rstest]
#[case::a_full_disk("> /dev/full")]
#[case::a_reader_that_ends("| true")]
fn grades_are_written_where_nothing_can_be_printed(#[case] output: &str) {
    let graded = Graded::new();
    graded.write("ada", "");
    graded.write("bob", "");
    fs::create_dir(graded.tree.path("cases")).unwrap();
    fs::write(graded.tree.path("cases/empty.safetensors"), "").unwrap();
    let one = [FORWARD, "--subject", "subjects/ada", "--junit", "ada.xml", "--gradescope", "ada.json"];
    for arguments in [&one[..], &[FORWARD, "--subjects", "subjects"], &["--cases", "cases", "--junit", "cases.xml"]] {
        let grading = graded.grading(arguments);
        let said = output_text(&through_sh(&graded, "", &grading, output));
        assert!(said.contains("the files are still written"), "{said}");
    }
    for file in ["ada.xml", "ada.json", "cases.xml"] {
        assert!(graded.tree.path(file).is_file(), "{file} is missing");
    }
    let table = fs::read_to_string(graded.tree.path("grades/grades.csv")).unwrap();
    assert!(table.contains("\nada,0,15,") && table.contains("\nbob,0,15,"), "{table}");
    let said = graded.refusal(&[FORWARD, "--subject", "subjects/ada", "--junit", "subjects"]);
    assert!(said.contains("--junit subjects is a folder: name a file in it"), "{said}");
}

#[test]
fn a_disk_that_takes_no_more_costs_no_subject_its_points() {
    let graded = Graded::new();
    graded.add("right", "right", "", "");
    graded.write("other", "");
    let output = graded.grading(&[FORWARD, "--subjects", "subjects"]).env("TMPDIR", "/nowhere").output().unwrap();
    let table = fs::read_to_string(graded.tree.path("grades/grades.csv")).unwrap();
    for name in ["right", "other"] {
        assert!(table.contains(&format!("\n{name},0,0,,\"not graded: ")), "{table}{}", output_text(&output));
    }
}

#[rstest]
#[case::ranks_first(&["ddp_overlap_individual_parameters", FORWARD], 2)]
#[case::attention_first(&[FORWARD, "ddp_overlap_individual_parameters"], 1)]
fn adapters_whose_import_hangs_are_imported_once_and_the_true_limit_is_named(
    #[case] problems: &[&str],
    #[case] imports: usize,
) {
    let graded = Graded::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    let hangs = format!("import socket, time\nsocket.create_connection(('127.0.0.1', {port}))\ntime.sleep(3600)\n");
    let folder = graded.write("hangs", &hangs);
    let arguments = [problems, &["--subject", folder.to_str().unwrap(), "--limit", "2", "--json"]].concat();
    let grades = json(&graded.grading(&arguments).output().unwrap()).to_string();
    let words = "importing the adapters: no answer within 2 s, the limit that --limit sets";
    assert!(grades.matches(words).count() >= 14, "{grades}");
    assert_eq!(std::iter::from_fn(|| listener.accept().ok()).count(), imports, "{grades}");
}

#[test]
fn a_subject_named_as_the_table_costs_no_other_one_its_grades() {
    let graded = Graded::new();
    for name in ["alice", "grades.csv", "results.json", "zoe"] {
        fs::create_dir_all(graded.tree.path("subjects").join(name)).unwrap();
    }
    let (table, said) = graded.grade_all(&[FORWARD], &[]);
    assert_eq!(table.lines().count(), 5, "{table}{said}");
    for name in ["alice", "results.json", "zoe"] {
        assert!(graded.tree.path("grades").join(name).join("results.json").is_file(), "{name}: {said}");
    }
    assert!(said.contains("grades.csv: its folder has the name of the table"), "{said}");
}

#[test]
fn the_output_and_a_subject_must_not_lie_in_each_other() {
    let graded = Graded::new();
    for name in ["subjects/alice", "elsewhere/in", "subjects/grades"] {
        fs::create_dir_all(graded.tree.path(name)).unwrap();
    }
    std::os::unix::fs::symlink("../elsewhere/in", graded.tree.path("subjects/linked")).unwrap();
    fs::write(graded.tree.path("victim"), "mine").unwrap();
    for name in ["subjects/grades.csv", "subjects/grades/grades.csv", "subjects/alice/results.json"] {
        std::os::unix::fs::symlink(graded.tree.path("victim"), graded.tree.path(name)).unwrap();
    }
    for output in ["subjects", "subjects/alice", "subjects/alice/new/folder", "subjects/grades", ".", "elsewhere"] {
        let said = graded.refusal(&[FORWARD, "--subjects", "subjects", "--output", output]);
        assert!(said.contains(&format!("--output {output} and ")) && said.contains("name another folder"), "{said}");
    }
    let mut within = graded.grading(&[FORWARD, "--subjects", "."]);
    let said = output_text(&within.current_dir(graded.tree.path("subjects")).output().unwrap());
    assert!(said.contains("--output grades and ") && said.contains("name another folder"), "{said}");
    assert_eq!(fs::read_to_string(graded.tree.path("victim")).unwrap(), "mine");
}

/// A subject of `before`, whose function does what the `cases` of Python's `match` say of the number of its call.
fn by_call(before: &str, cases: &str) -> String {
    format!(
        "
import torch
{before}
calls = 0

class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        global calls
        calls += 1
        match calls:
{cases}
        return q.clone()

def get_flashattention_autograd_function_pytorch():
    return Attention

get_flashattention_autograd_function_triton = get_flashattention_autograd_function_pytorch
"
    )
}

/// Raises another error, or gives another wrong o, at each call.
const WAYS: [&str; 2] = [
    "
class Unreadable(Exception):
    def __str__(self):
        raise ValueError('no text')
",
    "            case 1: raise RuntimeError('A' * 20_000_000)
            case 2: raise RuntimeError('\\ud800')
            case 3: raise Unreadable
            case 4: return q > 0
            case 5: return q.int()
            case _: return q[:, :, :-1].contiguous()",
];

#[test]
fn a_subjects_words_are_bounded_and_readable_and_a_wrong_output_is_named() {
    let graded = Graded::new();
    let folder = graded.write("ways", &by_call(WAYS[0], WAYS[1]));
    let output = graded.grading(&[FORWARD, "--subject", folder.to_str().unwrap(), "--json"]).output().unwrap();
    let (length, said) = (output.stdout.len(), json(&output).to_string());
    assert!(length < 100_000, "{length} bytes are printed");
    for words in [
        "AAAA (... 199",
        r"raises RuntimeError (adapters.py, line 17): \\ud800",
        "raises Unreadable (adapters.py, line 18): (its text raises ValueError)",
        "o is Bool, must be Float",
        "o is Int, must be Float",
        "o has shape [4, 128, 63], must have [4, 128, 64]",
    ] {
        assert!(said.contains(words), "{words:?} is not in {said}");
    }
}

/// Leaves or sends something else than a result at each call; after the last one a new process begins anew.
const INSTEAD: [&str; 2] = [
    "import sys

def send_deep(self, message):
    self.replies.write('[' * 200_000 + '\\n')
    self.replies.flush()
",
    "            case 1: return q.to('meta')
            case 2: return q.to_sparse()
            case 3: sys.modules['cs336_peers.tensors'].write = lambda path, tensors: None
            case _: sys.modules['cs336_peers.protocol'].Channel._send = send_deep",
];

#[test]
fn what_a_subject_leaves_or_sends_instead_of_a_result_is_named() {
    let graded = Graded::new();
    let folder = graded.write("instead", &by_call(INSTEAD[0], INSTEAD[1]));
    let said = json(&graded.grading(&[FORWARD, "--subject", folder.to_str().unwrap(), "--json"]).output().unwrap())
        .to_string();
    for words in [
        "o is a tensor on meta with layout torch.strided, whose values cannot be copied: ",
        "o is a tensor on cpu with layout torch.sparse_coo, whose values cannot be copied: ",
        "left no readable result: No such file or directory",
        "which is not JSON that can be read: ",
    ] {
        assert!(said.contains(words), "{words:?} is not in {said}");
    }
    assert!(!said.contains("safetensors"), "{said}");
}

#[rstest]
#[case::function("    return Raises")]
#[case::adapter("    raise PermissionError('no')")]
fn a_case_that_needs_a_gpu_says_so_in_one_sentence(#[case] adapter: &str) {
    let graded = Graded::new();
    let folder = graded.add("right", "right", "", "");
    let raises = "
class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        raise PermissionError('no')

def get_flashattention_autograd_function_triton():
";
    let adapters = fs::read_to_string(folder.join("tests/adapters.py")).unwrap();
    fs::write(folder.join("tests/adapters.py"), format!("{adapters}\nimport torch\n{raises}{adapter}\n")).unwrap();
    fs::create_dir(graded.tree.path("cases")).unwrap();
    let case = "attention_float32_heads.safetensors";
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("suites/cases").join(case);
    fs::copy(from, graded.tree.path("cases").join(case)).unwrap();
    let said = graded.refusal(&["--subject", folder.to_str().unwrap(), "--cases", "cases"]);
    assert!(
        said.contains("may need a GPU")
            && said.contains("raises PermissionError")
            && !said.contains(", has the function of"),
        "{said}"
    );
    assert!(said.contains("0 of 1 cases passed"), "{said}");
}
