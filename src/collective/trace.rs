//! One Chrome trace of all ranks on rank 0's clock, with the ranks that keep others waiting.
//!
//! Every rank profiles itself and passes barriers, the anchors, before and after its work. No rank leaves a barrier before
//! each has entered it: that bounds the offset between two clocks from both sides, however late a rank was scheduled.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use super::Shared;
use crate::printable::shown_path;
use crate::root::read_at_most;
use crate::torch::nvtx::range;
use crate::torch::profiler::profile;

/// Barriers before the work, and as many after it.
const ANCHORS: usize = 8;
const ANCHOR: &str = "clock anchor";
/// Before the name of a collective in the range of its launch.
pub(super) const LAUNCH: &str = "launch ";
/// A trace of minutes on many ranks has some hundred megabytes.
const MOST_BYTES: u64 = 4 << 30;
/// By how much anchors may contradict each other: clocks drift by some 20 us a second, and more means that one was set.
const MOST_CONTRADICTION_US: f64 = 1000.0;

/// Runs `body`, this rank's work, under the profiler; rank 0 gets the trace of all ranks too, gzipped.
///
/// # Errors
/// Those of `body` and of `gather`, which gives rank 0 every rank's bytes; clocks that cannot be related.
pub fn traced<T>(
    collective: &Shared,
    gather: impl FnOnce(&[u8]) -> Result<Vec<Vec<u8>>>,
    body: impl FnOnce() -> Result<T>,
) -> Result<(T, Option<Vec<u8>>)> {
    let anchors = || (0..ANCHORS).try_for_each(|_| range(ANCHOR, || collective.barrier()));
    let (value, profile) = profile(collective.device(), || {
        anchors()?;
        let value = body()?;
        anchors().map(|()| value)
    })?;
    let traces = gather(&zipped(profile.json())?)?;
    if collective.rank() != 0 {
        return Ok((value, None));
    }
    let traces = traces.iter().enumerate();
    let traces = traces.map(|(rank, bytes)| unzipped(bytes).with_context(|| format!("reading rank {rank}'s trace")));
    let bytes = zipped(&serde_json::to_vec(&merge(traces.collect::<Result<_>>()?)?)?)?;
    Ok((value, Some(bytes)))
}

/// What a merged trace says of the clocks and of late ranks, a sentence each. A device or a pipe keeps no trace to read.
pub fn findings(path: &Path) -> Result<Vec<String>> {
    if path.metadata().is_ok_and(|found| !found.is_file()) {
        return Ok(Vec::new());
    }
    let trace = read_at_most(path, MOST_BYTES).map_err(Into::into).and_then(|bytes| unzipped(&bytes));
    let mut trace = trace.with_context(|| format!("reading the trace {}", shown_path(path)))?;
    Ok(serde_json::from_value(trace["otherData"]["findings"].take())?)
}

fn zipped(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes)?;
    Ok(encoder.finish()?)
}

fn unzipped(bytes: &[u8]) -> Result<Value> {
    let mut json = Vec::new();
    GzDecoder::new(bytes).read_to_end(&mut json)?;
    Ok(serde_json::from_slice(&json)?)
}

/// One rank's trace, in microseconds of its own clock.
#[derive(Debug, Default, Clone, PartialEq)]
struct RankTrace {
    events: Vec<Value>,
    /// When the rank entered each anchor and left it.
    anchors: Vec<(f64, f64)>,
    /// When the rank launched each collective, by its number.
    launches: BTreeMap<u64, f64>,
}

/// What is added to a rank's clock to give rank 0's, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Clock {
    offset: f64,
    /// The offset is right to this much.
    uncertainty: f64,
}

impl RankTrace {
    fn of(trace: &mut Value) -> Result<Self> {
        let events = trace["traceEvents"].take();
        let events: Vec<Value> = serde_json::from_value(events).context("it has no list of events")?;
        let mut own = Self { events, ..Self::default() };
        for event in own.events.iter().filter(|event| event["cat"] == "user_annotation") {
            let (Some(name), Some(start)) = (event["name"].as_str(), event["ts"].as_f64()) else { continue };
            if name == ANCHOR {
                own.anchors.push((start, start + event["dur"].as_f64().unwrap_or(0.0)));
            } else if let Some(call) = name.strip_prefix(LAUNCH) {
                let sequence = call.split(' ').nth(1).and_then(|number| number.parse().ok());
                own.launches.extend(sequence.map(|sequence| (sequence, start)));
            }
        }
        own.anchors.sort_by(|a, b| a.0.total_cmp(&b.0));
        let anchors = &own.anchors;
        own.launches.retain(|_, at| !anchors.iter().any(|(enter, leave)| (enter..=leave).contains(&&*at)));
        Ok(own)
    }
}

impl Clock {
    /// Of a rank whose clock showed `own` at the anchors that rank 0 entered and left at `zero`.
    fn between(zero: &[(f64, f64)], own: &[(f64, f64)]) -> Result<Self> {
        let (have, wanted) = (own.len(), zero.len());
        ensure!(have == wanted && have > 0, "its trace has {have} clock anchors, rank 0's has {wanted}; trace again");
        let anchors = || zero.iter().zip(own);
        let least = anchors().map(|(zero, own)| zero.0 - own.1).fold(f64::NEG_INFINITY, f64::max);
        let most = anchors().map(|(zero, own)| zero.1 - own.0).fold(f64::INFINITY, f64::min);
        ensure!(
            least - most <= MOST_CONTRADICTION_US,
            "the anchors contradict each other by {:.3} ms; at most {} ms are allowed. Trace less work, without setting a clock",
            (least - most) / 1e3,
            MOST_CONTRADICTION_US / 1e3
        );
        Ok(Self { offset: f64::midpoint(least, most), uncertainty: (most - least).abs() / 2.0 })
    }
}

/// One trace of all ranks, given in rank order.
fn merge(mut traces: Vec<Value>) -> Result<Value> {
    let read = |(rank, trace)| RankTrace::of(trace).with_context(|| format!("rank {rank}'s trace"));
    let mut ranks = traces.iter_mut().enumerate().map(read).collect::<Result<Vec<_>>>()?;
    let related = |(rank, own): (usize, &RankTrace)| match rank {
        0 => Ok(Clock { offset: 0.0, uncertainty: 0.0 }),
        _ => Clock::between(&ranks[0].anchors, &own.anchors)
            .with_context(|| format!("the clock of rank {rank} cannot be related to rank 0's")),
    };
    let clocks = ranks.iter().enumerate().map(related).collect::<Result<Vec<_>>>()?;
    let mut findings: Vec<String> = clocks.iter().enumerate().skip(1).map(sentence).collect();
    findings.extend(stragglers(&ranks.iter().map(|rank| &rank.launches).collect::<Vec<_>>(), &clocks));
    let mut processes = BTreeMap::new();
    let mut events = Vec::new();
    for (rank, (own, clock)) in ranks.iter_mut().zip(&clocks).enumerate() {
        for event in &mut own.events {
            relate(event, rank, clock, &mut processes);
        }
        events.append(&mut own.events);
    }
    let mut merged = traces.into_iter().next().context("there is no trace")?;
    let offsets: Vec<_> =
        clocks.iter().map(|c| json!({"offset_us": c.offset, "uncertainty_us": c.uncertainty})).collect();
    merged["traceEvents"] = events.into();
    merged["otherData"] = json!({"clock": "rank 0's", "ranks": offsets, "findings": findings});
    Ok(merged)
}

fn sentence((rank, clock): (usize, &Clock)) -> String {
    let way = if clock.offset > 0.0 { "behind" } else { "ahead of" };
    let (offset, uncertainty) = (clock.offset.abs() / 1e3, clock.uncertainty / 1e3);
    format!("rank {rank}'s clock is {offset:.3} ms {way} rank 0's, to within {uncertainty:.3} ms")
}

/// Moves an event to rank 0's clock, and gives its process and its arrow to another event names of their own.
fn relate(event: &mut Value, rank: usize, clock: &Clock, processes: &mut BTreeMap<(usize, String), usize>) {
    let (number, process) = (processes.len(), event["pid"].to_string());
    event["pid"] = (*processes.entry((rank, process)).or_insert(number)).into();
    if event["ph"] == "M" {
        if event["name"] == "process_name" {
            event["args"]["name"] =
                format!("rank {rank}: {}", event["args"]["name"].as_str().unwrap_or_default()).into();
        }
        return;
    }
    if let Some(at) = event["ts"].as_f64() {
        event["ts"] = (at + clock.offset).into();
    }
    if !event["id"].is_null() {
        event["id"] = format!("{rank}.{}", event["id"]).into();
    }
}

/// Who launched a collective last, how often, and how long after the rank before it, at the median.
fn stragglers(launches: &[&BTreeMap<u64, f64>], clocks: &[Clock]) -> Vec<String> {
    let (mut late, mut total) = (vec![Vec::new(); launches.len()], 0);
    for sequence in launches[0].keys() {
        let arrival =
            |(rank, own): (usize, &&BTreeMap<u64, f64>)| Some((own.get(sequence)? + clocks[rank].offset, rank));
        let Some(mut arrivals) = launches.iter().enumerate().map(arrival).collect::<Option<Vec<_>>>() else { continue };
        arrivals.sort_by(|a, b| a.0.total_cmp(&b.0));
        total += 1;
        if let [.., before, last] = arrivals[..]
            && last.0 - before.0 > clocks[last.1].uncertainty + clocks[before.1].uncertainty
        {
            late[last.1].push(last.0 - before.0);
        }
    }
    let named = late.iter_mut().enumerate().filter(|(_, by)| !by.is_empty()).map(|(rank, by)| {
        by.sort_by(f64::total_cmp);
        let (count, median) = (by.len(), by[by.len() / 2] / 1e3);
        format!("rank {rank} arrives last at {count} of {total} collectives, {median:.3} ms late at the median")
    });
    let named: Vec<_> = named.collect();
    if named.is_empty() { vec![format!("no rank is measurably late at any of {total} collectives")] } else { named }
}

#[cfg(test)]
mod tests;
