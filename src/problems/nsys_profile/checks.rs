//! What must hold of a profile's analysis before its figures are believed.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use rusqlite::Connection;
use tch::Device;

use super::kernels::{Class, is_matmul_operator};
use super::measure::{Collector, OptimizerName, Params, Pass};
use super::nsys;
use super::step::{BACKWARD, FORWARD, INFERENCE, OPTIMIZER, ProfiledBench};
use super::summary::{Counted, RangeWork, Summary, Tally};
use crate::attention::naive::{FINAL_MATMUL, SCORES, SOFTMAX};
use crate::harness::problem::Verdict;
use crate::model::{Precision, SizeName};
use crate::torch::profiler::profile;
use crate::torch::trace::ranges::Ranges;
use crate::torch::trace::{Event, Source, Trace};

fn tiny() -> Params {
    Params {
        size: SizeName::Tiny,
        context_length: 16,
        batch_size: 1,
        vocab_size: 100,
        pass: Pass::TrainingStep,
        dtype: Precision::Float32,
        optimizer: OptimizerName::Plain,
        warmup: 1,
        steps: 1,
    }
}

/// A real profile on the CPU: 9 L + 1 products in a forward pass, two for each in the backward pass, the three ranges
/// of attention in every layer, and no operator lost.
pub fn a_profiled_step_adds_up() -> Result<Verdict> {
    let params = tiny();
    let layers = params.config().num_layers as usize;
    let mut bench = ProfiledBench::new(&params, Device::Cpu)?;
    let (_, profile) = profile(Device::Cpu, || bench.step())?;
    let trace = profile.trace()?;
    let summary = Summary::of(&trace, Counted::Operators, Collector::Kineto)?;
    let ranges = Ranges::of(&trace)?;
    let products = |name| {
        let inside = |event: &&Event| ranges.inside(ranges.at(event.start_ns), name);
        trace.events.iter().filter(|event| is_matmul_operator(event)).filter(inside).count()
    };
    let forward = 9 * layers + 1;
    for (name, expected) in [(INFERENCE, forward), (FORWARD, forward), (BACKWARD, 2 * forward), (OPTIMIZER, 0)] {
        ensure!(products(name) == expected, "{} products in {name}, expected {expected}", products(name));
    }
    for name in [SCORES, SOFTMAX, FINAL_MATMUL] {
        let spans = ranges.named(name).count();
        ensure!(spans == 2 * layers, "{spans} ranges {name:?} in two forward passes of {layers} layers");
    }
    ensure!(summary.attention.products.count == 2 * layers as u64, "{:?}", summary.attention.products);
    let operators = trace.events.iter().filter(|event| event.source == Source::Operator).count();
    Verdict::passed(format!("{operators} operators in their ranges, {forward} products in a forward pass"))
}

/// One step of a GPU as a trace, with the answer known: launches on two threads, late kernels, a stray, a split product.
fn known_trace() -> Trace {
    let mut events = Vec::new();
    let mut range = |name: &str, start, end| events.push(event(Source::Range, name, start, end, 1, None));
    range("warm-up", 0, 900);
    range("inference", 100, 800);
    range("inference", 1000, 2000);
    range("attn", 1100, 1900);
    for (name, start) in [(SCORES, 1200), (SOFTMAX, 1400), (FINAL_MATMUL, 1600)] {
        range(name, start, start + 100);
    }
    range("forward", 3000, 4000);
    range("backward", 4000, 5000);
    range("optimizer", 5000, 6000);
    let work = [
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_ffma", 150, 1, 10),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_ffma", 1250, 1, 400),
        ("void at::native::elementwise_kernel<4, at::native::masked_fill_kernel(int)>(int)", 1260, 1, 30),
        ("void softmax_warp_forward<float>(float*)", 1450, 1, 50),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_ffma", 1650, 1, 300),
        ("void cublasLt::splitKreduce_kernel<32>(int)", 1660, 1, 20),
        ("ampere_sgemm_128x64_nn", 3500, 1, 700),
        ("ampere_sgemm_128x64_nt", 4500, 2, 1400),
        ("adamw_float32", 5500, 1, 80),
        ("what_is_this", 7000, 1, 5),
    ];
    let mut free = 10_000;
    for (i, (name, launched, thread, duration)) in work.into_iter().enumerate() {
        let correlation = Some(i as i64 + 1);
        events.push(event(Source::Call, "cudaLaunchKernel", launched, launched + 5, thread, correlation));
        events.push(event(Source::Kernel, name, free, free + duration, 7, correlation));
        free += duration + 1;
    }
    Trace { events }
}

fn event(source: Source, name: &str, start_ns: i64, end_ns: i64, thread: i64, correlation: Option<i64>) -> Event {
    Event { source, name: name.into(), start_ns, duration_ns: end_ns - start_ns, thread, correlation }
}

/// The analysis of the known trace, kernel by kernel.
pub fn every_kernel_finds_its_range() -> Result<Verdict> {
    let summary = Summary::of(&known_trace(), Counted::Kernels, Collector::Kineto)?;
    let pass = |work: &RangeWork| (work.count, (work.seconds * 1e9).round() as i64);
    let all: Vec<_> = summary.passes.all().into_iter().map(pass).collect();
    ensure!(all == [(5, 800), (1, 700), (1, 1400), (1, 80)], "the passes hold {all:?}");
    let attention = &summary.attention;
    let parts: Vec<_> = [&attention.scores, &attention.softmax, &attention.final_matmul].map(pass).to_vec();
    ensure!(parts == [(2, 430), (1, 50), (2, 320)], "the ranges of attention hold {parts:?}");
    ensure!(nanoseconds(attention.products) == (3, 720), "its products are {:?}", attention.products);
    // The warm-up's product and the stray.
    ensure!(nanoseconds(summary.outside) == (2, 15), "outside of the passes are {:?}", summary.outside);
    let classes = &summary.passes.inference.classes;
    let matmul = classes.get(&Class::Matmul).context("no class matmul")?;
    ensure!(nanoseconds(*matmul) == (2, 700) && summary.matmuls.helpers == 1, "{classes:?}");
    let span = (summary.passes.inference.span_s * 1e9).round() as i64;
    ensure!(span == 804, "the inference pass spans {span} ns, not its 800 and four gaps");
    let optimizer = summary.passes.optimizer.as_ref().context("no optimizer pass")?;
    ensure!(optimizer.kernels[0].class == Class::Optimizer, "{:?}", optimizer.kernels);
    Verdict::passed("ten kernels of two launching threads")
}

fn nanoseconds(tally: Tally) -> (u64, i64) {
    (tally.count, (tally.seconds * 1e9).round() as i64)
}

/// The known trace written as nsys exports it, and read back, gives the same summary.
pub fn nsys_and_kineto_agree() -> Result<Verdict> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("step.sqlite");
    let (params, trace) = (serde_json::to_value(tiny())?, known_trace());
    write_export(&path, &trace, &params.to_string()).context("writing a synthetic export")?;
    let imported = nsys::read(&path)?;
    ensure!(imported.params == params, "the parameters came back as {}", imported.params);
    ensure!(imported.gpus == ["NVIDIA H200"], "{:?}", imported.gpus);
    let ours = Summary::of(&trace, Counted::Kernels, Collector::Nsys)?;
    let theirs = Summary::of(&imported.trace, Counted::Kernels, Collector::Nsys)?;
    ensure!(ours == theirs, "the imported trace gives {theirs:?}, the trace itself {ours:?}");
    Verdict::passed(format!("{} events through SQLite", imported.trace.events.len()))
}

/// The documented tables of an export, with the columns that the import reads and what must not disturb it.
fn write_export(path: &Path, trace: &Trace, params: &str) -> Result<()> {
    const PROCESS: i64 = 0x0012_3456 << 24;
    let database = Connection::open(path)?;
    database.execute_batch(
        "CREATE TABLE StringIds (id INTEGER, value TEXT);
         CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT);
         INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H200');
         CREATE TABLE NVTX_EVENTS (start INTEGER, \"end\" INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER,
             domainId INTEGER, textId INTEGER);
         CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, \"end\" INTEGER, globalTid INTEGER,
             correlationId INTEGER, nameId INTEGER);
         CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, \"end\" INTEGER, deviceId INTEGER, streamId INTEGER,
             correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER);
         INSERT INTO NVTX_EVENTS VALUES (1300, 9000, 59, 'cub::DeviceRadixSort', 1, 3, NULL);",
    )?;
    let nvtx = |name: &str, start: i64, end: i64| {
        let values = (start, end, 59, name, PROCESS + 1, 0);
        database.execute("INSERT INTO NVTX_EVENTS VALUES (?1, ?2, ?3, ?4, ?5, ?6, NULL)", values)
    };
    nvtx(&format!("cs336 nsys_profile {params}, op_id = 3"), -10, 20_000)?;
    for (id, event) in trace.events.iter().enumerate() {
        let (id, start, end) = (id as i64, event.start_ns, event.end_ns());
        database.execute("INSERT INTO StringIds VALUES (?1, ?2)", (id, &event.name))?;
        let correlation = event.correlation;
        match event.source {
            Source::Range => nvtx(&format!("{}, op_id = {id}", event.name), start, end)?,
            Source::Call => database.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?1, ?2, ?3, ?4, ?5)",
                (start, end, PROCESS + event.thread, correlation, id),
            )?,
            _ => database.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?1, ?2, 0, ?3, ?4, ?5, ?6, NULL)",
                (start, end, event.thread, correlation, PROCESS, id),
            )?,
        };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_pass_here() {
        for check in [a_profiled_step_adds_up, every_kernel_finds_its_range, nsys_and_kineto_agree] {
            assert!(matches!(check().unwrap(), Verdict::Passed { .. }));
        }
    }

    #[test]
    fn a_file_that_is_no_export_of_a_step_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.sqlite");
        std::fs::write(&path, "no database").unwrap();
        assert!(format!("{:#}", nsys::read(&path).unwrap_err()).contains("no SQLite export"));
        let empty = folder.path().join("empty.sqlite");
        Connection::open(&empty).unwrap().execute_batch("CREATE TABLE t (x INTEGER)").unwrap();
        assert!(format!("{:#}", nsys::read(&empty).unwrap_err()).contains("StringIds"));
        let other = folder.path().join("other.sqlite");
        let text = "CREATE TABLE StringIds (id INTEGER, value TEXT); INSERT INTO StringIds VALUES (1, 'x')";
        Connection::open(&other).unwrap().execute_batch(text).unwrap();
        assert!(format!("{:#}", nsys::read(&other).unwrap_err()).contains("cs336 nsys step"));
    }

    #[test]
    fn copies_and_fills_of_an_export_are_named_as_kineto_names_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("step.sqlite");
        write_export(&path, &known_trace(), &serde_json::to_string(&tiny()).unwrap()).unwrap();
        let tables = "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, \"end\" INTEGER, copyKind INTEGER);
            INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (1, 2, 1), (2, 3, 2), (3, 4, 8), (4, 5, 99), (5, 6, NULL);
            CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER, \"end\" INTEGER, value INTEGER);
            INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (6, 7, 0);";
        Connection::open(&path).unwrap().execute_batch(tables).unwrap();
        let events = nsys::read(&path).unwrap().trace.events;
        let moved = events.iter().filter(|event| matches!(event.source, Source::Memcpy | Source::Memset));
        let names: Vec<&str> = moved.map(|event| event.name.as_str()).collect();
        assert_eq!(names, ["Memcpy HtoD", "Memcpy DtoH", "Memcpy DtoD", "Memcpy", "Memcpy", "Memset"]);
    }

    #[test]
    fn a_trace_without_the_ranges_of_a_step_is_refused_by_name() {
        let mut trace = known_trace();
        trace.events.retain(|event| event.name != "optimizer");
        let error = Summary::of(&trace, Counted::Kernels, Collector::Kineto).unwrap_err();
        assert!(format!("{error:#}").contains("\"optimizer\""), "{error:#}");
    }
}
