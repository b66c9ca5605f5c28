//! Records that look possible and are worse than the accepted ones: `cs336 accept` refuses them.

use super::*;

/// Divides the times by a thousand, and the work that bounds them.
fn scaled_with_their_work(record: &mut Value) {
    scaled(record, 1e-3);
    each_leaf(record, "", &mut |path, leaf| {
        if path.ends_with("work.flops") || path.ends_with("work.bytes") {
            *leaf = json!(1e-3 * leaf.as_f64().unwrap());
        }
    });
}

fn in_bytes(record: &mut Value) {
    each_leaf(record, "", &mut |path, leaf| {
        if path.ends_with("unit") && leaf == "s" {
            *leaf = json!("B");
        }
    });
}

fn without_kernels(record: &mut Value) {
    cases(record).iter_mut().for_each(|case| case["kernels"] = json!({}));
}

fn out_of_memory(record: &mut Value) {
    outcomes(record, &json!({"kind": "out_of_memory", "requested_bytes": 1, "predicted_bytes": 1, "message": ""}));
}

/// Each outcome within the rows.
fn inner_outcomes(value: &mut Value) {
    match value {
        Value::Object(fields) if fields.get("kind").is_some_and(|kind| kind == "measured") => {
            *value = json!({"kind": "failed", "error": "it died"});
        }
        Value::Object(fields) => fields.values_mut().for_each(inner_outcomes),
        Value::Array(items) => items.iter_mut().for_each(inner_outcomes),
        _ => {}
    }
}

fn failed_within(record: &mut Value) {
    cases(record).iter_mut().for_each(|case| inner_outcomes(&mut case["outcome"]["row"]));
}

#[rstest]
#[case(without_kernels, "does not say of which kernels/")]
#[case(out_of_memory, "was measured before and ran out of memory here")]
#[case(failed_within, " before and is \"failed\" there now")]
#[case(scaled_with_their_work, "has another work or unit in ")]
#[case(in_bytes, "has another work or unit in ")]
fn a_record_that_looks_possible_is_not_accepted(#[case] damage: fn(&mut Value), #[case] words: &str) {
    let entry = REGISTRY.iter().find(|entry| entry.name == "flash_benchmarking").unwrap();
    let suite = suite::load(&layout().root, entry).unwrap().unwrap();
    let sound = layout().read_accepted(Profile::Gpu, entry).unwrap().unwrap();
    assert_eq!(acceptable(&layout(), entry, &suite, &sound, Some(&sound)).map_err(|error| error.to_string()), Ok(()));
    let (_, mut record) = records(entry).into_iter().find(|(profile, _)| *profile == Profile::Gpu).unwrap();
    damage(&mut record);
    let copy = Copy::new();
    copy.write(entry, &[(Profile::Gpu, record)]);
    let damaged = copy.layout.read_local(Profile::Gpu, entry).unwrap().unwrap();
    let said = acceptable(&layout(), entry, &suite, &damaged, Some(&sound)).unwrap_err().to_string();
    assert!(said.contains(words), "{said}");
}

/// Changes the memory of the ranks in a record of two: `change` gets what is under ZeRO stage 1.
fn with_memory(change: fn(&mut Value)) -> Result<(), String> {
    let entry = REGISTRY.iter().find(|entry| entry.name == "optimizer_state_sharding_accounting").unwrap();
    let suite = suite::load(&layout().root, entry).unwrap().unwrap();
    let (_, mut record) = records(entry).into_iter().find(|(profile, _)| *profile == Profile::Gpu).unwrap();
    cases(&mut record).iter_mut().for_each(|case| change(&mut case["outcome"]["row"]["memory"]["zero1"]));
    let record = RecordFile::parse(&record.to_string(), "a record").unwrap();
    acceptable(&layout(), entry, &suite, &record, None).map_err(|error| format!("{error:#}"))
}

#[test]
fn a_record_that_lacks_a_rank_or_its_moments_is_not_accepted() {
    assert_eq!(with_memory(|_| ()), Ok(()));
    let said = |change: fn(&mut Value)| with_memory(change).unwrap_err();
    assert!(said(|ranks| *ranks = json!([])).contains("the memory of 0 ranks is there, of 2"));
    assert!(said(|ranks| drop(ranks.as_array_mut().unwrap().pop())).contains("the memory of 1 ranks is there, of 2"));
    assert!(said(|ranks| ranks[0]["moments"] = json!([])).contains("its moments are [], and must be "));
    // As many values as records may count, on more ranks than a sum of them can have.
    let many = said(|ranks| {
        ranks[0]["owned_values"] = json!(1u64 << 53);
        *ranks = vec![ranks[0].clone(); 2049].into();
    });
    assert!(many.contains("the memory of 2049 ranks is there, of 2"), "{many}");
}

const PEBIBYTES: u64 = 1 << 52;

/// Bytes, and counts that the case's parameters fix: those of the fields with one of these endings become `value` in each case.
#[rstest]
#[case("memory_profiling", &["bytes", "reserved_bytes"], PEBIBYTES, "and its machine has ")]
#[case("memory_profiling", &["parameters_bytes"], 0, "parameters_bytes is 0, and the model's have ")]
#[case("memory_profiling", &["optimizer_state_bytes"], 0, "optimizer_state_bytes is 0, less than the ")]
#[case("memory_profiling", &["forward.peak.requested_bytes"], 1, "and the highest of the phases ")]
#[case("memory_profiling", &["requested_bytes", "allocated_bytes", "active_bytes"], 0, "and the peak 0")]
#[case("memory_profiling", &["allocated_bytes"], 0, "a part is larger than what holds it")]
#[case("memory_profiling", &["forward.at_peak.working"], 1, "the components of the peak are ")]
#[case("memory_profiling", &["saved_bytes"], 1 << 38, " bytes are saved, of ")]
#[case("memory_profiling", &["bytes_each"], 1 << 38, "an allocation is ")]
#[case("memory_profiling", &["timeline.working.*"], 1 << 38, "the timeline reaches ")]
#[case("pytorch_attention", &["saved_bytes"], 0, "saved_bytes is 0, less than the ")]
#[case("pytorch_attention", &["before_backward_bytes"], 0, "before_backward_bytes is 0, less than the ")]
#[case("pytorch_attention", &["forward_peak_bytes"], 0, "forward_peak_bytes is 0, less than the ")]
#[case("pytorch_attention", &["held_bytes"], 0, "held_bytes is 0, less than ")]
#[case("pytorch_attention", &["backward_peak_bytes"], PEBIBYTES, "and its machine has ")]
#[case("optimizer_state_sharding_accounting", &["other"], 1, "and the parts add up to ")]
#[case("optimizer_state_sharding_accounting", &["peak"], 1, "the peak is 1 bytes, less than ")]
#[case("optimizer_state_sharding_accounting", &["owned_values"], 1, "the ranks keep state for 2 of ")]
#[case("optimizer_state_sharding_accounting", &["peak"], PEBIBYTES, "and its machine has ")]
#[case("memory_profiling", &["at_peak.saved"], PEBIBYTES, "and its machine has ")]
#[case("memory_profiling", &["timeline.saved.*"], PEBIBYTES, "and its machine has ")]
#[case("benchmarking_script", &["row.parameters"], 1, "the row is of 1 parameters, ")]
#[case("benchmarking_mixed_precision", &["row.parameters"], 1, "the row is of 1 parameters, ")]
#[case("naive_ddp_benchmarking", &["row.gradient_bytes"], 1, "the gradients are 1 bytes, ")]
#[case("naive_ddp_benchmarking", &["naive.bytes"], 1, "naive sends 1 bytes, fewer than ")]
#[case("naive_ddp_benchmarking", &["naive.bytes"], PEBIBYTES, "bytes, more than 3 times the ")]
#[case("naive_ddp_benchmarking", &["naive.calls"], 1000, "naive makes 1000 calls, must be one to two for each of ")]
#[case("naive_ddp_benchmarking", &["naive.calls"], 0, "naive makes 0 calls, must be ")]
#[case("naive_ddp_benchmarking", &["naive.bus_bytes"], 1 << 38, "naive's links carry ")]
#[case("naive_ddp_benchmarking", &["naive.overlap"], 2, "naive hides 2 of its communication, by its times ")]
#[case("naive_ddp_benchmarking", &["naive.bus_bytes"], 1, "naive's links carry 1 bytes, and for ")]
#[case("naive_ddp_benchmarking", &["link.bytes_per_s"], 1 << 50, "the link has ")]
#[case("ddp_bucketed_benchmarking", &["link.overhead_s"], 1, "the link has 1e0 s a call and ")]
#[case("optimizer_state_sharding_accounting", &["owned_values"], 1 << 40, "a rank keeps state for ")]
#[case("optimizer_state_sharding_accounting", &["predicted.parameters"], 1, " bytes are predicted, and by ")]
#[case("ddp_bucketed_benchmarking", &["points.*.bytes"], 1, "the link was probed with [1, 1, ")]
#[case("distributed_communication_single_node", &["row.bytes"], 1, "each rank holds 1 bytes, and by ")]
#[case("distributed_communication_single_node", &["row.bus_factor"], 3, "the bus factor is 3, and of ")]
#[case("torch_compile", &["row.gradient_bytes"], 1, "a rank sends 1 bytes of gradients")]
#[case("torch_compile", &["peak.samples.*"], 1, "a peak is 1 bytes, and parameters and moments alone have ")]
#[case("torch_compile", &["peak.samples.*"], 0, "it must be finite and above 0")]
#[case("torch_compile", &["peak.samples.*"], PEBIBYTES, "and its machine has ")]
fn a_record_of_impossible_bytes_is_not_accepted(
    #[case] problem: &str,
    #[case] endings: &[&str],
    #[case] value: u64,
    #[case] words: &str,
) {
    let is_changed = |path: &str| endings.iter().any(|ending| path.ends_with(ending));
    let said = why_refused(problem, is_changed, |_| value.into());
    assert!(said.contains(words), "{said}");
}

/// Times that contradict those of the ranks beside them, or the link: those below one of these places, by a factor.
#[rstest]
#[case("distributed_communication_single_node", &["last_rank.samples"], 0.3, "a time of last_rank is ")]
#[case("distributed_communication_single_node", &["last_rank.samples", "by_rank.*.samples"], 0.3, "B at 450 GB/s of NVLink")]
#[case("naive_ddp_benchmarking", &["communication.mean.samples", "tail.mean.samples"], 0.05, "a time of mean is ")]
#[case("naive_ddp_benchmarking", &["naive.step.last_rank.samples"], 2.0, "a time of last_rank is ")]
#[case("optimizer_state_sharding_accounting", &["link.fastest_bus"], 0.5, "the fastest probe has ")]
#[case("ddp_bucketed_benchmarking", &["link.fastest_bus"], 2.0, "B at 450 GB/s of NVLink")]
#[case("nsys_profile", &["classes.matmul.seconds"], 3.0, " kernels of ")]
#[case("nsys_profile", &["busy_s"], 3.0, "busy for ")]
#[case("benchmarking_script", &["row.total.samples"], 0.9, "a step takes ")]
#[case("naive_ddp", &["row.seconds"], 0.1, " s, and the case waits 3 s")]
#[case("naive_ddp_benchmarking", &["communication.*.start_s"], 10.0, "'s timeline has a span of all_reduce that ends before it starts")]
fn times_that_contradict_their_ranks_or_their_link_are_refused(
    #[case] problem: &str,
    #[case] places: &[&str],
    #[case] factor: f64,
    #[case] words: &str,
) {
    let is_changed = |path: &str| places.iter().any(|place| path.contains(place));
    let said = why_refused(problem, is_changed, |number| (factor * number).into());
    assert!(said.contains(words), "{said}");
}

#[test]
fn each_rank_of_nccl_has_a_gpu_of_the_machine() {
    let entry = REGISTRY.iter().find(|entry| entry.name == "distributed_communication_single_node").unwrap();
    let said = why_refused_with(entry, |record| {
        runs(record).iter_mut().for_each(|run| run["machine"]["gpus"].as_array_mut().unwrap().truncate(1));
    });
    assert!(said.contains("2 ranks ran over NCCL, each on a GPU, and the machine has 1"), "{said}");
}

#[test]
fn communication_lies_within_the_step_of_its_rank() {
    let entry = REGISTRY.iter().find(|entry| entry.name == "naive_ddp_benchmarking").unwrap();
    let said = why_refused_with(entry, |record| {
        for case in cases(record) {
            let column = &mut case["outcome"]["row"]["strategies"]["naive"];
            let longer = |list: &mut Vec<Value>| list.iter_mut().for_each(|x| *x = json!(15.0 * x.as_f64().unwrap()));
            ["communication", "tail"].into_iter().for_each(|part| samples(&mut column[part], &longer));
            make_consistent(case);
        }
    });
    assert!(said.contains("naive's communication takes longer than a step of its rank"), "{said}");
}

#[test]
fn a_drill_must_say_what_it_is_said_to_say() {
    let entry = REGISTRY.iter().find(|entry| entry.name == "naive_ddp").unwrap();
    let said = why_refused_with(entry, |record| {
        for case in record["cases"].as_array_mut().unwrap() {
            case["outcome"]["row"]["words"] = "all went well".into();
        }
    });
    assert!(said.contains("its words name rank and collective: (false, false), and not (true, true)"), "{said}");
}

/// Why the GPU's record of a problem cannot be accepted, once `change` has changed some numbers of its outcomes.
fn why_refused(problem: &str, is_changed: impl Fn(&str) -> bool, change: impl Fn(f64) -> Value) -> String {
    let entry = REGISTRY.iter().find(|entry| entry.name == problem).unwrap();
    let mut changed = 0;
    let said = why_refused_with(entry, |record| {
        each_leaf(record, "", &mut |path, leaf| {
            if let Some(number) = leaf.as_f64().filter(|_| path.contains("outcome") && is_changed(path)) {
                *leaf = change(number);
                changed += 1;
            }
        });
    });
    assert!(changed > 0, "nothing was changed");
    said
}

fn why_refused_with(entry: &Problem, change: impl FnOnce(&mut Value)) -> String {
    let suite = suite::load(&layout().root, entry).unwrap().unwrap();
    let (_, mut record) = records(entry).into_iter().find(|(profile, _)| *profile == Profile::Gpu).unwrap();
    change(&mut record);
    let refused = RecordFile::parse(&record.to_string(), "a record")
        .and_then(|record| acceptable(&layout(), entry, &suite, &record, None));
    format!("{:#}", refused.unwrap_err())
}
