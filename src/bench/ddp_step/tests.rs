//! Rules for made-up ranks: which measurements are refused, and how overlap is computed.

use super::*;
use crate::harness::stats::median;

fn steps(communication: f64, tail: f64) -> StepOutput {
    StepOutput {
        step: vec![1.0; 2],
        communication: vec![communication; 2],
        tail: vec![tail; 2],
        bytes: 1_000_000_000,
        calls: 3,
        bus_bytes: 1e9,
        summed_bus_bytes: 1e9,
        ..StepOutput::default()
    }
}

fn output(name: &str, steps: StepOutput) -> Output {
    // 10 GB/s at any size, and 10 us a call.
    let probe = |bytes: u64| Probe { bytes, seconds: vec![1e-5 + bytes as f64 / 1e10] };
    Output {
        probes: [1 << 16, 1 << 19, 1 << 30].map(probe).into(),
        single: vec![0.5; 2],
        strategies: [(name.to_string(), steps)].into(),
        ..Output::default()
    }
}

fn row_of(name: &str, ranks: [StepOutput; 2]) -> Result<Row> {
    let columns = Columns { strategies: &[name], pytorch_ddp: false };
    row(&Params::smallest(None), &columns, ranks.map(|rank| output(name, rank)).into())
}

fn refused(name: &str, ranks: [StepOutput; 2]) -> String {
    format!("{:#}", row_of(name, ranks).unwrap_err())
}

#[test]
fn overlap_is_the_share_of_communication_that_leaves_no_tail() {
    let row = row_of("overlapping", [steps(0.2, 0.05), steps(0.4, 0.1)]).unwrap();
    let column = &row.strategies["overlapping"];
    assert!((column.overlap - 0.75).abs() < 1e-9);
    assert!((median(&column.communication.mean.samples) - 0.3).abs() < 1e-12);
    assert_eq!((column.communication.by_rank.len(), column.calls, row.gradient_bytes), (2, 3, 4 * row.parameters));
    // A tail with gaps may be longer than its communication.
    assert_eq!(overlap(0.3, 0.2), 0.0);
    assert_eq!(overlap(0.0, 0.0), 0.0);
}

#[test]
fn communication_faster_than_the_link_is_refused() {
    // 1 GB at 10 GB/s takes 0.1 s, less a quarter for a faster moment.
    row_of("overlapping", [steps(0.082, 0.01), steps(0.1, 0.01)]).unwrap();
    let message = refused("overlapping", [steps(0.1, 0.01), steps(0.07, 0.01)]);
    assert!(message.contains("overlapping, rank 1: 1000.0 MB in 7.00e-2 s"), "{message}");
}

#[test]
fn overlap_without_communication_in_the_backward_pass_is_refused() {
    row_of("naive", [steps(0.2, 0.2), steps(0.2, 0.196)]).unwrap();
    let message = refused("naive", [steps(0.2, 0.1), steps(0.2, 0.1)]);
    assert!(message.contains("yet 50.0% of it was hidden"), "{message}");
}

#[test]
fn a_faster_probe_after_the_steps_counts_as_well() {
    let communication = 0.07;
    let mut outputs = [(); 2].map(|()| output("overlapping", steps(communication, 0.01)));
    let columns = Columns { strategies: &["overlapping"], pytorch_ddp: false };
    row(&Params::smallest(None), &columns, outputs.to_vec()).unwrap_err();
    // The link was twice as fast after the steps, on one rank.
    outputs[1].later_probes = vec![Probe { bytes: 1 << 30, seconds: vec![0.2, (1u64 << 30) as f64 / 2e10] }];
    let row = row(&Params::smallest(None), &columns, outputs.to_vec()).unwrap();
    assert!((row.link.fastest_bus_bytes_per_s / 2e10 - 1.0).abs() < 1e-9);
    assert_eq!(row.link.points.len(), 3, "the fit uses only the probes before the steps");
    let too_fast = [(); 2].map(|()| Output {
        later_probes: outputs[1].later_probes.clone(),
        ..output("overlapping", steps(communication / 2.0, 0.01))
    });
    super::row(&Params::smallest(None), &columns, too_fast.into()).unwrap_err();
}

#[test]
fn ranks_that_disagree_are_refused() {
    let other = |change: fn(&mut StepOutput)| {
        let mut steps = steps(0.2, 0.2);
        change(&mut steps);
        refused("naive", [self::steps(0.2, 0.2), steps])
    };
    assert!(other(|s| s.calls = 4).contains("bytes or calls of rank 1"));
    assert!(other(|s| s.step = vec![1.0]).contains("different numbers"));
}
