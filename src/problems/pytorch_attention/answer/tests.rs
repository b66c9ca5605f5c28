//! The answer over made-up records: headline numbers, every claim both ways, and cases that did not run.

use serde_json::Value;

use super::*;
use crate::harness::answer::made_up::{MadeUp, printed};
use crate::harness::record::Profile;
use crate::harness::samples::Samples;

fn params(implementation: ImplementationName, d_model: u32, seq: u32) -> Params {
    Params { implementation, batch: 8, d_model, seq, dtype: Dtype::Float32, warmup: 1, iterations: 2 }
}

fn samples(seconds: f64) -> Samples {
    Samples::seconds_unbounded(vec![seconds; 2]).unwrap()
}

/// A forward pass of T^2 nanoseconds and a backward pass of twice that; the tiled version takes 10 times as long, PyTorch's
/// operator half.
fn row(p: &Params, profile: Profile) -> Row {
    let needs = accounting_of(p, profile);
    let (times, saved, before) = match p.implementation {
        Naive => (1.0, needs.saved_bytes, needs.before_backward_bytes),
        Tiled => (10.0, needs.row_bytes, needs.input_bytes + needs.row_bytes),
        _ => (0.5, needs.row_bytes, needs.input_bytes + needs.row_bytes),
    };
    let time = 1e-9 * f64::from(p.seq).powi(2) * times;
    let device = |seconds: f64| (profile == Profile::Gpu).then(|| samples(seconds));
    Row {
        forward: samples(time),
        forward_device: device(0.995 * time),
        backward: samples(2.0 * time),
        backward_device: device(1.99 * time),
        before_backward_bytes: before,
        saved_bytes: saved,
        forward_peak_bytes: needs.forward_peak_bytes,
        backward_peak_bytes: needs.backward_peak_bytes,
        held_bytes: needs.held_bytes,
    }
}

type Change = fn(&Params, &mut Row);

const NONE: Change = |_, _| {};

fn empty(profile: Profile) -> MadeUp {
    match profile {
        Profile::Cpu => MadeUp::cpu("pytorch_attention"),
        Profile::Gpu => MadeUp::gpu("pytorch_attention"),
    }
}

/// The widths 16 and 64 over three lengths, and the other implementations at the greatest; nothing runs out of memory.
fn fitting(profile: Profile, change: Change) -> MadeUp {
    let plain =
        [16, WIDTH].into_iter().flat_map(|d| [1024, 4096, 8192].map(|seq| ("attention", params(Naive, d, seq))));
    let others = [Tiled, Sdpa].map(|name| ("recompute", params(name, WIDTH, 8192)));
    plain.chain(others).fold(empty(profile), |made_up, (grid, p)| {
        let mut row = row(&p, profile);
        change(&p, &mut row);
        made_up.measured(grid, &p, &row)
    })
}

/// And T = 65,536 runs out of memory.
fn full(profile: Profile, change: Change) -> MadeUp {
    fitting(profile, change).out_of_memory("out_of_memory", &params(Naive, 16, 65536))
}

fn answered(made_up: MadeUp) -> Answer {
    answer(&made_up.records(), Audience::Ours).unwrap()
}

fn quoted(answer: &Answer, key: &str) -> Value {
    printed(answer)[key].clone()
}

#[test]
fn headline_numbers_are_those_of_the_records() {
    let answer = answered(full(Profile::Gpu, NONE));
    let oom = quoted(&answer, "oom");
    for (key, expected) in [
        ("seq", "65,536"),
        ("row", r"8 \cdot 65,536 \cdot 16 \cdot 4 = 0.031"),
        ("scores", r"8 \cdot 65,536^2 \cdot 4 = 128.0"),
        ("five", "4 of the 4"),
    ] {
        assert_eq!(oom[key], expected, "{key}");
    }
    assert_eq!((&oom["matrices"], &oom["fits"], &oom["decides"]), (&4.into(), &false.into(), &false.into()));
    assert_eq!(quoted(&answer, "ran"), "6 of 6");
    assert_eq!((quoted(&answer, "low"), quoted(&answer, "high")), ("4,096".into(), "8,192".into()));
    let saved = |t: f64| 8.0 * 4.0 * (t * t + t * 64.0);
    assert_eq!(quoted(&answer, "growth")["value"], saved(8192.0) / saved(4096.0));
    assert_eq!(quoted(&answer, "tiled")["times"], "0.10 and 0.10");
    assert_eq!(quoted(&answer, "sdpa")["times"], "2.00 and 2.00");
}

#[test]
fn a_claim_holds_on_sound_records_and_falls_with_the_figure_that_decides_it() {
    let sound = answered(full(Profile::Gpu, NONE));
    let broken: [(&str, Change); 2] = [
        ("accounting-holds", |_, row| row.backward_peak_bytes += 65),
        ("a-fifth-block-is-held", |_, row| row.held_bytes = Some(1)),
    ];
    for (id, change) in broken {
        assert_eq!(sound.holds(id), Some(true), "{id}");
        assert_eq!(answered(full(Profile::Gpu, change)).holds(id), Some(false), "{id}");
    }
}

#[test]
fn what_ran_out_of_memory_decides_the_claims_on_it() {
    let of = |batch: u32, d_model: u32, seq: u32| {
        let p = Params { batch, ..params(Naive, d_model, seq) };
        answered(fitting(Profile::Gpu, NONE).out_of_memory("attention", &p))
    };
    let long = of(8, 16, 65536);
    // The made-up allocation is of 1 GiB, a score matrix of batch 4 at T = 8192; at T = 65536 the forward pass fails.
    let fails = [of(4, 16, 8192), of(2, 16, 8192)].map(|answer| answer.holds("fails-at-a-score-matrix"));
    assert_eq!((fails, long.holds("fails-at-a-score-matrix")), ([Some(true), Some(false)], None));
    assert_eq!(answered(full(Profile::Gpu, NONE)).holds("grid-fits"), Some(true));
    assert_eq!(long.holds("grid-fits"), Some(false));
    let none_ran_out = answered(fitting(Profile::Gpu, NONE));
    assert_eq!((none_ran_out.holds("grid-fits"), quoted(&none_ran_out, "oom")), (Some(true), Value::Null));
}

#[test]
fn a_cpu_answers_with_its_own_grid_and_stands_below_a_gpu() {
    let cpu = answered(full(Profile::Cpu, NONE));
    assert_eq!((quoted(&cpu, "enough"), quoted(&cpu, "cpu")), (true.into(), Value::Null));
    for id in ["a-fifth-block-is-held", "fails-at-a-score-matrix"] {
        assert_eq!(cpu.holds(id), None, "{id}");
    }
    let line = "| 65,536 | OOM | – | – | needs 384 GiB |";
    assert!(cpu.tables()["times"].markdown().contains(line), "{}", cpu.tables()["times"].markdown());
    let both = Records { cpu: Some(full(Profile::Cpu, NONE).set()), ..full(Profile::Gpu, NONE).records() };
    let both = answer(&both, Audience::Ours).unwrap();
    assert!(both.tables()["cpu"].markdown().contains(line));
    assert!(quoted(&both, "cpu").as_str().unwrap().contains("2 cores"));
}

#[test]
fn a_case_that_did_not_run_shows_how_it_ended() {
    let made_up = full(Profile::Gpu, NONE)
        .failed("attention", &params(Naive, 128, 1024))
        .not_run("recompute", &params(Tiled, WIDTH, 16384))
        .out_of_memory("out_of_memory", &params(Naive, WIDTH, 32768));
    let answer = answered(made_up);
    let table = |id: &str| answer.tables()[id].markdown();
    let line = "| 1,024 | 1.05 / 2.10 | 1.05 / 2.10 | failed | 34.5–42.0 | 131–140 |";
    assert!(table("times").contains(line), "{}", table("times"));
    assert!(table("times").contains("| 32,768 | – | ran / OOM | – | – | needs 128 GiB |"), "{}", table("times"));
    assert!(table("cells").contains("| 16 | 1,024 | 0 | 0 | 66.5 | 34.5 | 131 |"), "{}", table("cells"));
    assert!(table("recompute").contains("| tiled | 16,384 | not run |"), "{}", table("recompute"));
}

#[test]
fn unstable_passes_are_marked_and_have_no_ratio() {
    let answer = answered(full(Profile::Gpu, |p, row| {
        if p.implementation == Sdpa || p.seq == 1024 {
            row.forward = Samples::seconds_unbounded(vec![0.001, 0.002]).unwrap();
        }
    }));
    let [times, recompute] = ["times", "recompute"].map(|id| answer.tables()[id].markdown());
    assert!(times.contains("| 1,024 | 1.50 † / 2.10 | 1.50 † / 2.10 |"), "{times}");
    assert!(recompute.contains("| sdpa | 8,192 | 1.0–2.0 |"), "{recompute}");
    assert_eq!(quoted(&answer, "sdpa")["times"], Value::Null);
}

#[test]
fn others_that_were_not_measured_at_the_greatest_length_are_not_compared() {
    let longer = params(Naive, WIDTH, 16384);
    let answer = answered(full(Profile::Gpu, NONE).measured("attention", &longer, &row(&longer, Profile::Gpu)));
    assert_eq!((quoted(&answer, "tiled"), quoted(&answer, "sdpa")), (Value::Null, Value::Null));
}

#[test]
fn too_few_cases_leave_the_table_alone_and_no_record_is_an_error() {
    let one_length = || {
        let p = params(Naive, WIDTH, 1024);
        empty(Profile::Gpu).measured("attention", &p, &row(&p, Profile::Gpu))
    };
    let failed = empty(Profile::Gpu).failed("attention", &params(Naive, WIDTH, 1024));
    for made_up in [one_length(), failed] {
        let answer = answered(made_up);
        assert_eq!(quoted(&answer, "enough"), false);
        assert_eq!((answer.claims().len(), answer.tables().len(), answer.figures().len()), (0, 1, 0));
    }
    let error = answer(&Records::default(), Audience::Ours).unwrap_err();
    assert!(format!("{error:#}").contains("cs336 measure"));
}
