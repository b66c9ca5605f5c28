//! Problems whose cases fail in different ways. The test program serves them as its own worker.

use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use cs336::checks::faulty_runs::LIMIT;
use cs336::error::Fault;
use cs336::harness::answer::Answer;
use cs336::harness::device::DeviceCheck;
use cs336::harness::peer::Peer;
use cs336::harness::problem::{Check, Measure, Measured, Problem, Verdict};
use cs336::harness::provenance::available_memory_bytes;
use cs336::harness::record::Profile;
use cs336::harness::samples::{Samples, Work};
use serde::{Deserialize, Serialize};
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGKILL, SIGSTOP, SIGTERM};
use signal_hook::low_level::emulate_default_handler;

use super::processes::{SUITES, python};

/// What a case reports: above the floor of the tests' machine, and below what its case takes.
const TIME_S: f64 = 2e-6;

/// What a case does to the process that measures it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Action {
    Works,
    Fails,
    Panics,
    PanicsInLibtorchsWords,
    Aborts,
    KillsItself,
    TerminatesItself,
    HangsUp,
    InterruptsItself,
    StopsItself,
    /// Waits for a Python peer that never returns from native code and writes its process id to the file `hanging`.
    HangsInItsPeer,
    /// Never ends. Writes to the file `hanging` at the start.
    Hangs,
    LacksMemory,
    LacksGpu,
    BeatsPhysics,
    Chatters,
    StartsFresh,
    /// Works, but makes the worker's clean-up fail.
    Litters,
    /// Works for 300 ms or until a sensor reading, and writes its start and end to the file `attempts`.
    Dawdles,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    action: Action,
}

#[derive(Serialize, Deserialize)]
struct Row {
    time: Samples,
    process: u32,
    /// Whether a clean-up ran between the previous case, if any, and this one.
    clean: bool,
}

/// State that a case leaves behind in its process.
static LITTER: AtomicBool = AtomicBool::new(false);
static DIRTY: AtomicBool = AtomicBool::new(false);

/// Cleans the process up, unless a case made that impossible.
pub fn clean_up() -> Result<()> {
    ensure!(!LITTER.load(Ordering::Relaxed), "this cannot be cleaned up");
    DIRTY.store(false, Ordering::Relaxed);
    Ok(())
}

/// Appends to a file of the worker's tree.
fn add_to(file: &str, text: &str) -> Result<()> {
    let path = Path::new(&std::env::var("CS336_ROOT")?).join(file);
    Ok(std::fs::File::options().create(true).append(true).open(path)?.write_all(text.as_bytes())?)
}

/// The number of sensor readings, from the sensor's file.
fn looks() -> Result<u64> {
    Ok(std::fs::metadata(Path::new(&std::env::var("CS336_ROOT")?).join("looks")).map_or(0, |file| file.len()))
}

/// PyDLL keeps the interpreter's lock while it calls `system`.
const HANGING_PEER: &str = "
import ctypes, os, sys
sys.path.insert(0, os.environ['SUITES'])
from peers import protocol
def hang():
    ctypes.PyDLL(None).system(b'echo $PPID > $CS336_ROOT/hanging; sleep 600')
protocol.Channel().serve({'hang': hang}, {'protocol': 1})
";

fn hang() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(60));
    }
}

/// Also where it is ignored, as SIGHUP is under nohup and SIGINT in the background of a script.
fn send_itself(signal: i32) -> Result<Row> {
    eprintln!("the last output");
    emulate_default_handler(signal)?;
    hang()
}

struct Actions;

impl Measure for Actions {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 3;

    fn fresh_process(params: &Params) -> bool {
        params.action == Action::StartsFresh
    }

    fn predicted_bytes(_: &Params, _: Profile) -> Option<u64> {
        Some(77)
    }

    fn measure(params: &Params, _: Profile) -> Result<Row> {
        let row = |seconds: f64| {
            let work = Work { flops: 1e6, bytes: 0.0, precision: "float32".into() };
            let clean = !DIRTY.swap(true, Ordering::Relaxed);
            Ok(Row { time: Samples::seconds(vec![seconds], work)?, process: std::process::id(), clean })
        };
        match params.action {
            Action::Works | Action::StartsFresh => row(TIME_S),
            Action::Litters => {
                LITTER.store(true, Ordering::Relaxed);
                row(TIME_S)
            }
            Action::Dawdles => {
                add_to("attempts", ".")?;
                let seen = looks()?;
                std::thread::sleep(Duration::from_millis(300));
                // A sensor has taken a reading before the case began.
                while seen > 0 && looks()? == seen {
                    std::thread::sleep(Duration::from_millis(10));
                }
                add_to("attempts", ",")?;
                row(TIME_S)
            }
            Action::Fails => bail!("the reason of the failure"),
            Action::Panics => panic!("the message of the panic"),
            Action::PanicsInLibtorchsWords => panic!("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0"),
            Action::Aborts => std::process::abort(),
            Action::KillsItself => send_itself(SIGKILL),
            Action::TerminatesItself => send_itself(SIGTERM),
            Action::HangsUp => send_itself(SIGHUP),
            Action::InterruptsItself => send_itself(SIGINT),
            Action::StopsItself => send_itself(SIGSTOP),
            Action::HangsInItsPeer => {
                let mut command = python();
                command.args(["-B", "-c", HANGING_PEER]).env("SUITES", SUITES);
                let mut peer = Peer::start(command, 1, 2 * LIMIT)?;
                peer.call("hang", json!({}), 10 * LIMIT)
            }
            Action::Hangs => {
                add_to("hanging", ".")?;
                hang()
            }
            Action::LacksMemory => {
                Err(Fault::OutOfMemory { requested_bytes: Some(available_memory_bytes()?), message: "refused".into() }
                    .into())
            }
            Action::LacksGpu => Err(Fault::NotAvailable { needs: "a GPU".into(), has: "none".into() }.into()),
            Action::BeatsPhysics => row(1e-9),
            Action::Chatters => {
                // As libraries do: many lines, bytes that are not text, half a line right before the reply.
                (0..150).for_each(|i| println!("a library prints line {i}"));
                std::io::stdout().write_all(b"\xff\xfe half a line")?;
                std::io::stdout().flush()?;
                row(TIME_S)
            }
        }
    }
}

const ACTIONS: Problem = Problem {
    name: "actions",
    answers: &[""],
    checks: &[Check { name: "sound", part: "", run: || Verdict::passed("fine") }],
    measured: Some(Measured::of::<Actions>()),
    answer: |_, _| Ok(Answer::default()),
    reads: &[],
};

const UNSOUND: Problem = Problem {
    name: "unsound",
    answers: &[""],
    checks: &[Check { name: "wrong", part: "", run: || bail!("0.5 is not 0.25") }],
    measured: Some(Measured::of::<Actions>()),
    answer: |_, _| Ok(Answer::default()),
    reads: &[],
};

pub const TEST_REGISTRY: &[Problem] = &[ACTIONS, UNSOUND];

/// Device checks that crash, panic, need a missing device, and return their process id.
pub const TEST_DEVICE_CHECKS: &[DeviceCheck] = &[
    DeviceCheck::new("aborts", "Nothing.", || std::process::abort()),
    DeviceCheck::new("panics", "Nothing.", || panic!("a deliberate error")),
    DeviceCheck::new("lacks", "Nothing.", || {
        Err(Fault::NotAvailable { needs: "a second GPU".into(), has: "one".into() }.into())
    }),
    DeviceCheck::new("works", "Nothing.", || Verdict::passed(std::process::id().to_string())),
];
