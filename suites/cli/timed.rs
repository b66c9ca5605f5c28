//! `cs336 measure --subject` and `writeup --subject`: a right subject has times and a report, and no trick makes one seem fast.

use std::io::{BufRead as _, BufReader};

use super::subject::Graded;
use super::*;

const FLASH: &str = "flash_benchmarking";
const INDIVIDUAL: &str = "ddp_overlap_individual_parameters_benchmarking";

/// One cell of 128 positions for each width, in one round of few calls.
fn cells(widths: &str) -> String {
    format!(
        "[cpu.grid]\nmeasure = \"cell\"\ndtype = \"float32\"\nd_model = {widths}\nseq = 128\nbatch = 1\ncache = \"warm\"\n\
         launch = \"eager\"\nrounds = 1\nwarmup_ms = 1.0\nrep_ms = 5.0\nmost_repeats = 4\n"
    )
}

const STEPS: &str = "[cpu.step]\nbackend = \"gloo\"\nworld_size = 2\nsize = \"tiny\"\ncontext_length = 16\nbatch_size = 1\n\
                     vocab_size = 500\ndtype = \"float32\"\nrounds = 1\nwarmup = 1\nsteps = 1\n";

impl Graded {
    fn with_small_grids(widths: &str) -> Self {
        let graded = Self::new();
        fs::write(graded.tree.path(format!("suites/{FLASH}.toml")), cells(widths)).unwrap();
        fs::write(graded.tree.path(format!("suites/{INDIVIDUAL}.toml")), STEPS).unwrap();
        graded
    }

    /// Runs a verb on a subject in the Python of this checkout; gives what it said.
    fn said(&self, arguments: &[&str], folder: &Path) -> String {
        let arguments = [arguments, &["--subject", folder.to_str().unwrap()]].concat();
        output_text(&self.with_python(&mut self.tree.command(&arguments)).output().unwrap())
    }

    /// The folder of the records and the report of the only subject of this name.
    fn report(&self, name: &str) -> PathBuf {
        let folders = fs::read_dir(self.tree.path("report/subjects")).unwrap().map(|entry| entry.unwrap().path());
        let is_its = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(&format!("{name}-"));
        let found: Vec<PathBuf> = folders.filter(is_its).collect();
        assert_eq!(found.len(), 1, "{found:?}");
        found[0].clone()
    }

    /// The rows of the measured cases of a subject's record.
    pub fn rows(&self, name: &str, problem: &str) -> Vec<Value> {
        let path = self.report(name).join(format!("records/cpu/{problem}.json"));
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let file: Value = serde_json::from_str(&text).unwrap();
        file["cases"].as_array().unwrap().iter().map(|case| case["outcome"]["row"].clone()).collect()
    }
}

#[test]
fn a_right_subject_is_measured_beside_ours_and_has_a_report_of_its_own() {
    let graded = Graded::with_small_grids("16");
    let folder = graded.add("right", "ada", "", "");
    let said = graded.said(&["measure", FLASH, INDIVIDUAL], &folder);
    let folder_of_report = graded.report("ada");
    let shown = folder_of_report.strip_prefix(graded.tree.path("")).unwrap().display();
    let tally = format!("2 measured, 0 out of memory, 0 not run, 0 failed: {shown}/records/cpu");
    assert!(said.contains(&tally), "{said}");
    let [cell, steps] = [FLASH, INDIVIDUAL].map(|problem| graded.rows("ada", problem).remove(0));
    for pass in ["forward", "backward", "both"] {
        assert_eq!(cell["columns"]["subject_pytorch"]["passes"][pass]["kind"], "measured", "{cell}");
        assert_eq!(cell["columns"]["subject_triton"]["passes"][pass]["kind"], "not_run", "{cell}");
        assert_eq!(cell["columns"]["sdpa_flash"]["passes"][pass]["kind"], "measured", "{cell}");
    }
    assert_eq!(steps["theirs"]["kind"], "measured", "{steps}");
    assert!(!graded.tree.path("report/records").exists(), "a subject's records are among ours");

    let said = graded.said(&["writeup", "--no-measure"], &folder);
    assert!(said.contains(&format!("{shown}/writeup.pdf, writeup.html and writeup.md are ready")), "{said}");
    let report = fs::read_to_string(folder_of_report.join("writeup.md")).unwrap();
    for words in [
        "The implementation of **ada**, measured by cs336.",
        "their PyTorch function takes",
        "theirs, PyTorch (ms) | plain (ms) | tiled (ms)",
        "a step that overlaps single gradients by their code takes",
        "theirs, Triton in float32: it needs a GPU: here Triton's interpreter would run it",
        "`naive_ddp_benchmarking`",
        "the starter code has no adapter for it",
    ] {
        assert!(report.contains(words), "{words:?} is not in {report}");
    }
    assert!(graded.said(&["measure", FLASH, "--resume"], &folder).contains("nothing to measure"));
    fs::write(folder.join("cs336_systems/more.py"), "").unwrap();
    let said = graded.said(&["measure", FLASH, "--resume", "--dry-run"], &folder);
    assert!(said.contains("1 cases, all measured before"), "changed code leaves the record fresh: {said}");
    let said = graded.said(&["writeup", "--no-measure"], &folder);
    let left_out = "are left out, since they were measured with other code than the subject has now";
    let of_flash = format!("1 cases of {FLASH} on the cpu {left_out}");
    assert!(said.contains(&of_flash) && said.contains("0 points answered"), "{said}");
    let report = fs::read_to_string(folder_of_report.join("writeup.md")).unwrap();
    assert!(report.contains(left_out) && !report.contains("their PyTorch function takes"), "{report}");
}

/// Its checks may take minutes.
#[test]
fn a_subject_that_is_edited_while_it_is_checked_is_not_timed() {
    let graded = Graded::with_small_grids("16");
    let folder = graded.add("right", "ada", "", "");
    let arguments = ["measure", FLASH, INDIVIDUAL, "--subject", folder.to_str().unwrap()];
    let mut command = graded.tree.command(&arguments);
    let mut child = graded.with_python(&mut command).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("  checking ")), "no check was named");
    add_to(&folder.join("tests/adapters.py"), "\n# edited\n");
    let said: Vec<String> = lines.collect();
    assert_eq!(child.wait().unwrap().code(), Some(1), "{said:?}");
    let refused = said.iter().filter(|line| line.contains("subject changed during the measurement")).count();
    assert_eq!(refused, 2, "of two problems: {said:?}");
    assert!(!graded.report("ada").join("records/cpu").exists(), "a case was recorded");
    let said = graded.said(&["measure", FLASH, INDIVIDUAL, "--resume"], &folder);
    assert!(said.contains("2 measured, 0 out of memory, 0 not run, 0 failed"), "{said}");
}

#[test]
fn functions_that_were_never_called_are_not_timed_and_answer_nothing() {
    let graded = Graded::with_small_grids("16");
    let folder = graded.add("broken", "fails", "way.txt", "import_error");
    graded.said(&["measure", FLASH, INDIVIDUAL], &folder);
    let said = graded.said(&["writeup", "--no-measure"], &folder);
    assert!(said.contains(" 0 points answered"), "{said}");
    let report = fs::read_to_string(graded.report("fails").join("writeup.md")).unwrap();
    assert!(report.contains("| not timed |") && !report.contains("| wrong |"), "{report}");
    let reason = "theirs, PyTorch in float32: not timed, since it fails a check: ";
    assert!(report.contains(reason) && report.contains("importing adapters.py raises ValueError"), "{report}");
    assert!(report.contains(&format!("-{FLASH}-5-points): not answered")), "{report}");
}

/// Tricks of `GamesTheClock`, by the width of the head, and a part of why it has no time.
const TRICKS: [(&str, &str); 4] = [
    ("caches", "is off by"),
    ("changes_inputs", "a timed call of get_flashattention_autograd_function_pytorch changed q"),
    ("computes_later", "o is off by"),
    ("is_lazy", "o is Lazy, must be torch.Tensor"),
];

#[test]
fn no_trick_makes_a_function_seem_fast() {
    let graded = Graded::with_small_grids("[8, 16, 24, 32, 40, 48, 56, 64, 72]");
    let folder = graded.add("cheats", "mallory", "trick.txt", "games_the_clock");
    let said = graded.said(&["measure", FLASH], &folder);
    let passes =
        graded.rows("mallory", FLASH).into_iter().map(|row| row["columns"]["subject_pytorch"]["passes"].clone());
    let passes: Vec<Value> = passes.collect();
    for ((trick, words), passes) in TRICKS.iter().zip(&passes) {
        for (pass, ended) in passes.as_object().unwrap() {
            let error = ended["error"].as_str().unwrap_or_default();
            assert!(ended["kind"] == "failed" && error.contains(words), "{trick}, {pass}: {ended}\n{said}");
        }
    }
    // Whatever it makes of its clocks, or has seen in other turns and in files, ours counts the 30 ms that it sleeps. The last
    // of these computes for 0.2 s in the check before its turns too, which is in nobody's turn.
    for passes in &passes[4..8] {
        for pass in ["forward", "both"] {
            let samples = passes[pass]["row"]["samples"].as_array().unwrap_or_else(|| panic!("{passes}\n{said}"));
            assert!(samples.iter().all(|seconds| seconds.as_f64().unwrap() >= 0.03), "{samples:?}");
        }
    }
    // What it has started is stopped while others are timed, and goes on for its next call.
    for ended in passes[8].as_object().unwrap().values() {
        assert_eq!(ended["kind"], "measured", "{said}");
    }
    graded.said(&["writeup", "--no-measure"], &folder);
    let report = fs::read_to_string(graded.report("mallory").join("writeup.md")).unwrap();
    assert!(report.contains("Not timed: ") && report.contains("o is Lazy, must be torch.Tensor"), "{report}");
}

#[rstest]
#[case::fails_its_checks("none", "not timed, since it fails a check: ddp_overlap_individual_parameters::toy_model: ")]
#[case::trains_alone_while_timed("games_the_clock", "the parameters are off by")]
fn a_module_that_trains_wrong_has_no_time_and_the_other_columns_have_theirs(#[case] trick: &str, #[case] words: &str) {
    let graded = Graded::with_small_grids("16");
    let folder = graded.add("cheats", trick, "trick.txt", trick);
    let said = graded.said(&["measure", INDIVIDUAL], &folder);
    let row = graded.rows(trick, INDIVIDUAL).remove(0);
    let error = row["theirs"]["error"].as_str().unwrap_or_default();
    assert!(row["theirs"]["kind"] == "failed" && error.contains(words), "{row}\n{said}");
    assert!(row["pytorch_ddp"]["last_rank"]["samples"].is_array(), "{row}");
}

/// Attention that is right up to 1,024 positions, and computes the last 256 of more.
const OF_THE_END: &str = "

class OfTheEnd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        n = q.shape[-2]
        at = 0 if n <= 1024 else n - 256
        s = q[..., at:, :] @ k.mT * q.shape[-1] ** -0.5
        if is_causal:
            s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(at + 1), float('-inf'))
        lse = q.new_zeros(q.shape[:-1])
        lse[..., at:] = s.logsumexp(-1)
        p = torch.exp(s - lse[..., at:, None])
        o = torch.zeros_like(q)
        o[..., at:, :] = p @ v
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.p, ctx.at = p, at
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, _ = ctx.saved_tensors
        end = (..., slice(ctx.at, None), slice(None))
        ds = ctx.p * (do[end] @ v.mT - (do[end] * o[end]).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dq[end] = ds @ k
        dk[end], dv[end] = (ds.mT @ q[end])[end], (ctx.p.mT @ do[end])[end]
        return dq, dk, dv, None


get_flashattention_autograd_function_pytorch = lambda: OfTheEnd
";

#[test]
fn a_function_that_computes_the_end_of_a_sequence_alone_has_no_time() {
    let graded = Graded::with_small_grids("16");
    fs::write(graded.tree.path(format!("suites/{FLASH}.toml")), cells("16").replace("seq = 128", "seq = 1280"))
        .unwrap();
    let folder = graded.add("right", "end", "", "");
    add_to(&folder.join("tests/adapters.py"), OF_THE_END);
    let said = graded.said(&["measure", FLASH], &folder);
    let passes = graded.rows("end", FLASH).remove(0)["columns"]["subject_pytorch"]["passes"].clone();
    for ended in passes.as_object().unwrap().values() {
        let error = ended["error"].as_str().unwrap_or_default();
        assert!(ended["kind"] == "failed" && error.contains("is off by"), "{ended}\n{said}");
    }
    let said = graded.said(&["measure", FLASH, "--set", "rounds=1"], &folder);
    assert!(said.contains("  a column failed: o is off by "), "{said}");
}

/// Averages every n-th value of a gradient, those that a sample of the parameters could be compared at.
const OF_A_SAMPLE: &str = "

class OfASample(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            torch.distributed.broadcast(parameter.data, src=0)

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_synchronization(self):
        for parameter in filter(lambda p: p.grad is not None, self.module.parameters()):
            values = parameter.grad.view(-1)[:: max(1, parameter.numel() // 256) | 1]
            sums = values.clone()
            torch.distributed.all_reduce(sums)
            values.copy_(sums / torch.distributed.get_world_size())


get_ddp_individual_parameters = OfASample
";

#[test]
fn a_module_that_averages_only_a_sample_of_each_gradient_has_no_time() {
    let graded = Graded::with_small_grids("16");
    let steps = STEPS.replace("float32", "bfloat16").replace("vocab_size = 500", "vocab_size = 2000");
    fs::write(graded.tree.path(format!("suites/{INDIVIDUAL}.toml")), steps).unwrap();
    let folder = graded.add("right", "sample", "", "");
    add_to(&folder.join("tests/adapters.py"), OF_A_SAMPLE);
    let said = graded.said(&["measure", INDIVIDUAL], &folder);
    let row = graded.rows("sample", INDIVIDUAL).remove(0);
    let error = row["theirs"]["error"].as_str().unwrap_or_default();
    assert!(row["theirs"]["kind"] == "failed" && error.contains("the parameters are off by"), "{row}\n{said}");
}

fn add_to(file: &Path, text: &str) {
    fs::write(file, fs::read_to_string(file).unwrap() + text).unwrap();
}

#[test]
fn what_a_step_leaves_to_the_release_of_its_gradients_is_timed() {
    let graded = Graded::with_small_grids("16");
    let folder = graded.add("cheats", "mallory", "trick.txt", "works_between_steps");
    let said = graded.said(&["measure", INDIVIDUAL], &folder);
    let row = graded.rows("mallory", INDIVIDUAL).remove(0);
    let samples = row["theirs"]["row"]["step"]["last_rank"]["samples"].as_array();
    let samples = samples.unwrap_or_else(|| panic!("{row}\n{said}"));
    assert!(!samples.is_empty() && samples.iter().all(|seconds| seconds.as_f64().unwrap() >= 0.05), "{samples:?}");
}

#[test]
fn a_problem_without_an_adapter_is_not_measured_and_the_message_names_those_with_one() {
    let graded = Graded::with_small_grids("16");
    let folder = graded.add("right", "right", "", "");
    let said = graded.said(&["measure", "naive_ddp_benchmarking"], &folder);
    assert!(said.contains("naive_ddp_benchmarking measures nothing of a subject; flash_benchmarking, "), "{said}");
}
