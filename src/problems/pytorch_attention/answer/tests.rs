//! The answer over made-up records: headline numbers, every claim both ways, and cases that did not run.

use serde_json::{Value, json};

use super::*;
use crate::harness::answer::figure::{Drawing, X};
use crate::harness::answer::made_up::MadeUp;
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
    answer.quoted()[key].clone()
}

#[test]
fn headline_numbers_are_those_of_the_records() {
    let answer = answered(full(Profile::Gpu, NONE));
    for (key, expected) in [
        ("ran", "6 of 6"),
        ("passes", "2 passes after 1 warm-up"),
        ("seq", "65,536"),
        ("row", r"8 \cdot 65,536 \cdot 16 \cdot 4 = 0.031"),
        ("scores", r"8 \cdot 65,536^2 \cdot 4 = 128.000"),
        ("longest", "8,192"),
        ("untried", "32.0 at 16,384, 72.1 at 24,576, 128.1 at 32,768"),
        ("five", "4 of the 4"),
        ("backward", "134.22 and 133.55"),
        ("launches", "1.049 and 1.043"),
        ("low", "4,096"),
        ("high", "8,192"),
    ] {
        assert_eq!(quoted(&answer, key), expected, "{key}");
    }
    let saved = |t: f64| 8.0 * 4.0 * (t * t + t * 64.0);
    assert_eq!(quoted(&answer, "growth")["value"], saved(8192.0) / saved(4096.0));
    assert_eq!(quoted(&answer, "slope"), (2.0 * 8192.0 + 64.0) / (8192.0 + 64.0));
    assert_eq!(quoted(&answer, "tiled")["times"], "10 and 10");
    assert_eq!(quoted(&answer, "tiled")["less"]["value"], 129.0);
    assert_eq!(quoted(&answer, "sdpa")["times"], "2.00 and 2.00");
    let Drawing::Plot(plot) = &answer.figures()["scaling"].drawing else { panic!("a plot") };
    let names: Vec<_> = plot.series.iter().map(|series| series.name.as_str()).collect();
    assert_eq!(names, ["forward, d = 16", "forward, d = 64", "backward, d = 16", "backward, d = 64"]);
    assert_eq!(plot.series[0].points[0], (X::Number(1024.0), Some(1e-9 * 1024.0_f64.powi(2) * 1e3)));
}

#[test]
fn a_claim_holds_on_sound_records_and_falls_with_the_figure_that_decides_it() {
    let sound = answered(full(Profile::Gpu, NONE));
    let broken: [(&str, Change); 10] = [
        ("accounting-holds", |_, row| row.backward_peak_bytes += 65),
        ("backward-slower", |p, row| row.backward = samples(1e-9 * f64::from(p.seq).powi(2))),
        ("host-and-device-agree", |_, row| row.backward_device = Some(samples(1e-3))),
        ("saved-is-quadratic", |_, row| row.saved_bytes = 1 << 30),
        ("tiled-keeps-less", |p, row| row.saved_bytes *= if p.implementation == Tiled { 40 } else { 1 }),
        ("tiled-slower", |p, row| row.forward = samples(if p.implementation == Tiled { 1.0 } else { 2.0 })),
        ("sdpa-keeps-less", |_, row| row.saved_bytes += 1 << 40),
        ("sdpa-faster", |_, row| row.backward = samples(1.0)),
        ("recomputing-ones-coincide", |p, row| {
            row.before_backward_bytes *= if p.implementation == Sdpa { 2 } else { 1 }
        }),
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
    let (long, short) = (of(8, 16, 65536), of(8, 64, 8));
    // The made-up allocation is of 1 GiB, a score matrix of batch 4 at T = 8192; at T = 65536 the forward pass fails.
    let fails = [of(4, 16, 8192), of(2, 16, 8192)].map(|answer| answer.holds("fails-at-a-score-matrix"));
    assert_eq!((fails, long.holds("fails-at-a-score-matrix")), ([Some(true), Some(false)], None));
    assert_eq!([&long, &short].map(|answer| answer.holds("one-score-matrix")), [Some(true), Some(false)]);
    assert_eq!(answered(full(Profile::Gpu, NONE)).holds("grid-fits"), Some(true));
    assert_eq!((long.holds("grid-fits"), long.holds("none-ran-out")), (Some(false), None));
    let failed = fitting(Profile::Gpu, NONE).failed("attention", &params(Naive, 32, 1024));
    assert_eq!(answered(fitting(Profile::Gpu, NONE)).holds("none-ran-out"), Some(true));
    assert_eq!(answered(failed).holds("none-ran-out"), Some(false));
}

#[test]
fn the_power_cap_is_that_of_every_cell_at_the_greatest_length() {
    let reading = json!({"sm_clock_hz": 1.98e9, "memory_clock_hz": 3.2e9, "power_w": 700.0, "temperature_c": 50.0});
    let range = |x: f64| json!({"min": x, "median": x, "max": x});
    let capped = |widths: &[u64]| {
        let mut records = full(Profile::Gpu, NONE).records();
        for case in &mut records.gpu.as_mut().unwrap().file.cases {
            let d = case.params["d_model"].as_u64().unwrap();
            let during = json!({"readings": 1, "sm_clock_hz": range(1.5e9 + 1e6 * d as f64), "power_w": range(700.0),
                "max_temperature_c": 50.0, "throttle": ["sw_power_cap"]});
            let conditions = json!({"before": reading, "during": during, "after": reading});
            case.conditions = widths.contains(&d).then(|| serde_json::from_value(conditions).unwrap());
        }
        answer(&records, Audience::Ours).unwrap()
    };
    let all = capped(&[16, 64]);
    assert_eq!((all.holds("power-cap-at-the-longest"), quoted(&all, "sm")), (Some(true), "1,516 to 1,564".into()));
    assert_eq!(capped(&[16]).holds("power-cap-at-the-longest"), Some(false));
    assert_eq!(capped(&[]).holds("power-cap-at-the-longest"), Some(false));
}

#[test]
fn a_cpu_answers_with_its_own_grid_and_stands_below_a_gpu() {
    let cpu = answered(full(Profile::Cpu, NONE));
    assert_eq!(
        (quoted(&cpu, "enough"), quoted(&cpu, "clock"), quoted(&cpu, "cpu")),
        (true.into(), false.into(), Value::Null)
    );
    for id in ["host-and-device-agree", "power-cap-at-the-longest", "a-fifth-block-is-held", "fails-at-a-score-matrix"]
    {
        assert_eq!(cpu.holds(id), None, "{id}");
    }
    let line = "| 16 | 65,536 | OOM |  |  |  |  | needs 384.2 GiB |";
    assert!(cpu.tables()["beyond"].markdown().contains(line), "{}", cpu.tables()["beyond"].markdown());
    let both = Records { cpu: Some(full(Profile::Cpu, NONE).set()), ..full(Profile::Gpu, NONE).records() };
    let both = answer(&both, Audience::Ours).unwrap();
    assert!(both.tables()["cpu"].markdown().contains(line));
    assert!(quoted(&both, "cpu").as_str().unwrap().contains("2 cores"));
}

#[test]
fn a_case_that_did_not_run_shows_how_it_ended() {
    let made_up = full(Profile::Gpu, |_, row| row.forward.samples.truncate(1))
        .failed("attention", &params(Naive, 128, 1024))
        .not_run("recompute", &params(Tiled, WIDTH, 16384))
        .out_of_memory("out_of_memory", &params(Naive, WIDTH, 32768));
    let answer = answered(made_up);
    let table = |id: &str| answer.tables()[id].markdown();
    assert!(table("grid").contains("| 128 | 1,024 | failed | failed |"), "{}", table("grid"));
    assert!(table("grid").contains("| 16 | 1,024 | 1.05 | – | 2.10 | 0.00 |"), "one sample: {}", table("grid"));
    assert!(table("beyond").contains("| 64 | 32,768 | ran |  | OOM |  |  | needs 128.4 GiB |"), "{}", table("beyond"));
    assert!(table("recompute").contains("| tiled | 64 | 16,384 | not run |"), "{}", table("recompute"));
}

#[test]
fn others_that_were_not_measured_at_the_greatest_length_are_not_compared() {
    let longer = params(Naive, WIDTH, 16384);
    let answer = answered(full(Profile::Gpu, NONE).measured("attention", &longer, &row(&longer, Profile::Gpu)));
    assert_eq!((quoted(&answer, "tiled"), quoted(&answer, "sdpa")), (Value::Null, Value::Null));
    assert_eq!((answer.holds("tiled-slower"), answer.holds("recomputing-ones-coincide")), (None, Some(true)));
    let p = params(Naive, WIDTH, 2048);
    let alone = [params(Naive, WIDTH, 1024), p]
        .iter()
        .fold(empty(Profile::Gpu), |made_up, p| made_up.measured("attention", p, &row(p, Profile::Gpu)));
    assert_eq!(answered(alone).holds("recomputing-ones-coincide"), Some(false));
}

#[test]
fn too_few_cases_leave_the_table_alone_and_no_record_is_an_error() {
    let one_length = || {
        let p = params(Naive, WIDTH, 1024);
        empty(Profile::Gpu).measured("attention", &p, &row(&p, Profile::Gpu))
    };
    let failed = empty(Profile::Gpu).failed("attention", &params(Naive, WIDTH, 1024));
    let narrow_never_ran = full(Profile::Gpu, NONE).out_of_memory("attention", &params(Naive, 8, 512));
    for made_up in [one_length(), failed, narrow_never_ran] {
        let answer = answered(made_up);
        assert_eq!(quoted(&answer, "enough"), false);
        assert_eq!((answer.claims().len(), answer.tables().len(), answer.figures().len()), (0, 1, 0));
    }
    let error = answer(&Records::default(), Audience::Ours).unwrap_err();
    assert!(format!("{error:#}").contains("cs336 measure"));
}
