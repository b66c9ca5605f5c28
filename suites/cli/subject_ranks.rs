//! Subjects whose ranks do not do their part: what they compute is right, and earns nothing.

use super::subject::{Graded, is_confined};
use super::*;

const SHARDING: &str = "optimizer_state_sharding";

/// The grades of a copy of `suites/subjects/cheats` with this trick: the points of each problem, and all that was said.
fn graded(trick: &str, problems: &[&str]) -> (Vec<f64>, String) {
    let graded = Graded::new();
    let folder = graded.add("cheats", trick, "trick.txt", trick);
    let grades = graded.grade(&folder, problems, &["--limit", "20"]);
    let earned = grades.as_array().unwrap().iter().map(|grade| grade["earned"].as_f64().unwrap());
    (earned.collect(), grades.to_string())
}

#[test]
fn ranks_that_compute_from_the_inputs_of_others_earn_nothing() {
    if !is_confined() {
        return;
    }
    let problems = ["ddp_overlap_individual_parameters", "ddp_overlap_bucketed"];
    let (earned, said) = graded("reads_the_other_ranks", &problems);
    assert_eq!(earned, [0.0, 0.0], "{said}");
    assert!(said.contains("raises PermissionError") && !said.contains("no answer"), "{said}");
}

#[test]
fn an_optimizer_that_keeps_the_rest_of_the_state_in_another_one_earns_nothing() {
    let (earned, said) = graded("keeps_the_rest_elsewhere", &[SHARDING]);
    assert_eq!(earned, [0.0], "{said}");
    for words in ["the ranks step [850, 850] of 850 values", "the ranks step [1350, 1350] of 1350 values"] {
        assert!(said.contains(words), "{words:?} is not in {said}");
    }
}

#[rstest]
#[case::tuples("keeps_tuples", "the ranks step [850, 850] of 850 values")]
#[case::arrays("keeps_arrays", "the state of AdamW holds ndarray: must be tensors, numbers and containers of them")]
fn an_optimizer_that_hides_the_rest_of_the_state_in_a_state_earns_nothing(#[case] trick: &str, #[case] words: &str) {
    let (earned, said) = graded(trick, &[SHARDING]);
    assert_eq!(earned, [0.0], "{said}");
    assert!(said.contains(words), "{said}");
}

/// Each rank steps its slice of one vector, in which the last values belong to no parameter.
const PADDED: &str = "
import torch
import torch.distributed as dist


class ShardedOptimizer(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, **kwargs):
        self.trained = [p for p in params if p.requires_grad]
        super().__init__(self.trained, {})
        self.sizes = [p.numel() for p in self.trained]
        self.share = -(-sum(self.sizes) // (64 * dist.get_world_size())) * 64
        self.own = torch.nn.Parameter(self.share_of(self.trained))
        self.optimizer = optimizer_cls([self.own], **kwargs)

    def share_of(self, tensors):
        flat = torch.zeros(self.share * dist.get_world_size())
        flat[: sum(self.sizes)] = torch.cat([t.detach().flatten() for t in tensors])
        return flat.split(self.share)[dist.get_rank()].clone()

    def step(self, closure=None):
        self.own.grad = self.share_of([torch.zeros_like(p) if p.grad is None else p.grad for p in self.trained])
        self.optimizer.step()
        shares = [torch.empty(self.share) for _ in range(dist.get_world_size())]
        dist.all_gather(shares, self.own.detach())
        for p, values in zip(self.trained, torch.cat(shares)[: sum(self.sizes)].split(self.sizes)):
            p.data.copy_(values.view_as(p))
";

#[test]
fn an_optimizer_that_pads_its_shards_earns_all_points() {
    let graded = Graded::new();
    let folder = graded.add("right", "padded", "cs336_systems/sharded.py", PADDED);
    let grades = graded.grade(&folder, &[SHARDING], &[]);
    assert_eq!(grades[0]["earned"], grades[0]["points"], "{grades}");
}

/// It is measured although a check before another problem finds no compiler.
#[test]
fn the_state_of_a_right_optimizer_is_measured_on_every_rank() {
    const UNGRADED: &str = "ddp_bucketed_benchmarking";
    const PROBLEM: &str = "optimizer_state_sharding_accounting";
    let graded = Graded::new();
    let suite = "[cpu.step]\nbackend = \"gloo\"\nworld_size = 2\nsize = \"tiny\"\ncontext_length = 16\nbatch_size = 1\n\
                 vocab_size = 500\ndtype = \"float32\"\nrounds = 1\nwarmup = 1\nsteps = 1\n";
    fs::write(graded.tree.path(format!("suites/{PROBLEM}.toml")), suite).unwrap();
    let folder = graded.add("right", "ada", "", "");
    let adapters = folder.join("tests/adapters.py");
    let without = "\nclass InvalidCxxCompiler(RuntimeError):\n    __module__ = 'torch._inductor.exc'\n\n\n\
                   def get_ddp_bucketed(*_, **__):\n    raise InvalidCxxCompiler('no C++ compiler')\n";
    fs::write(&adapters, fs::read_to_string(&adapters).unwrap() + without).unwrap();
    let mut command = graded.tree.command(&["measure", UNGRADED, PROBLEM, "--subject", folder.to_str().unwrap()]);
    let output = graded.with_python(&mut command).output().unwrap();
    let said = output_text(&output);
    let reason = format!("{UNGRADED} is not measured, since a check before it is not graded: ");
    assert!(!output.status.success() && said.contains(&reason) && said.contains("no C++ compiler"), "{said}");
    let row = &graded.rows("ada", PROBLEM)[0];
    let bytes = row["theirs"]["row"]["state_bytes"].as_array().unwrap_or_else(|| panic!("{row}\n{said}"));
    let bytes: Vec<u64> = bytes.iter().map(|bytes| bytes.as_u64().unwrap()).collect();
    // Two moments of four bytes for each parameter.
    assert_eq!(bytes.iter().sum::<u64>(), 8 * row["parameters"].as_u64().unwrap(), "{row}");
    assert!(bytes.len() == 2 && bytes.iter().all(|&bytes| bytes > 0), "{row}");
}
