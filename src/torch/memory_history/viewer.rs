//! Writes a history as the pickle of `torch.cuda.memory._dump_snapshot`, which pytorch.org/memory_viz draws.

use std::io::Write;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use serde_pickle::SerOptions;

use super::{Action, Event, History, Segment, SegmentBlock, Source};

/// Beyond this the viewer becomes slow; the last steps are kept.
const MAX_EVENTS: usize = 100_000;

/// The names of [`Action`]s, in their order.
const ACTIONS: [&str; 9] = [
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
];

/// Writes `history` to `out`, with the keys that the viewer and `torch/cuda/_memory_viz.py` read. What the allocator
/// calls a Python stack is the operators and, outside them, the ranges.
pub fn write(history: &History, out: &mut impl Write) -> Result<()> {
    let recent = history.events.len().saturating_sub(MAX_EVENTS);
    let snapshot = json!({
        "segments": history.segments.iter().map(segment).collect::<Vec<_>>(),
        "device_traces": [history.events[recent..].iter().map(step).collect::<Vec<_>>()],
        "allocator_settings": { "expandable_segments": false },
        "external_annotations": [],
    });
    serde_pickle::to_writer(out, &snapshot, SerOptions::new()).context("failed to write a memory snapshot")
}

fn step(event: &Event) -> Value {
    let mut step = json!({
        "action": ACTIONS[event.action.repr as usize],
        "addr": event.address,
        "size": event.bytes,
        "stream": 0,
        "time_us": event.time_us,
        "frames": frames(&event.source),
    });
    if event.action == Action::OutOfMemory {
        step["device_free"] = event.address.into();
    }
    step
}

fn segment(segment: &Segment) -> Value {
    let sum = |of: fn(&SegmentBlock) -> u64| segment.blocks.iter().map(of).sum::<u64>();
    let mut address = segment.address;
    let block = |block| place(block, &mut address);
    json!({
        "device": 0,
        "address": segment.address,
        "total_size": segment.bytes,
        "allocated_size": sum(|b| if b.allocated { b.bytes } else { 0 }),
        "active_size": sum(|b| if b.active { b.bytes } else { 0 }),
        "requested_size": sum(|b| if b.active { b.requested_bytes } else { 0 }),
        "stream": 0,
        "segment_type": if segment.is_large { "large" } else { "small" },
        "segment_pool_id": (0, 0),
        "is_expandable": false,
        "frames": [],
        "blocks": segment.blocks.iter().map(block).collect::<Vec<_>>(),
    })
}

/// A block at the next free `address` of its segment.
fn place(block: &SegmentBlock, address: &mut u64) -> Value {
    let at = *address;
    *address += block.bytes;
    let state = match (block.allocated, block.active) {
        (true, _) => "active_allocated",
        (false, true) => "active_pending_free",
        (false, false) => "inactive",
    };
    json!({
        "address": at,
        "size": block.bytes,
        // The size asked for by a block's last tensor stays with it after that tensor's end.
        "requested_size": if block.active { block.requested_bytes } else { 0 },
        "state": state,
        "frames": frames(&block.source),
    })
}

/// The innermost first, as in a stack.
fn frames(source: &Source) -> Vec<Value> {
    let of = |filename, names| {
        let names = str::rsplit(names, '/').filter(|name: &&str| !name.is_empty());
        names.map(move |name| json!({ "filename": filename, "name": name, "line": 0 }))
    };
    of("operator", &source.operators).chain(of("range", &source.range)).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use super::*;
    use crate::torch::memory_history::tests::event;

    fn example() -> History {
        let source = Source { range: "forward/attention".into(), operators: "aten::softmax/aten::_softmax".into() };
        let block = |bytes, requested_bytes, allocated, active| SegmentBlock {
            bytes,
            requested_bytes,
            allocated,
            active,
            source: source.clone(),
        };
        const BASE: u64 = 0x7f00_0000_0000;
        let blocks = vec![block(1024, 1000, true, true), block(512, 500, false, true), block(512, 77, false, false)];
        let softmax = "aten::softmax/aten::_softmax";
        History {
            before_bytes: 0,
            events: vec![
                event(Action::SegmentAlloc, BASE, 2048, 10, "", ""),
                event(Action::Alloc, BASE, 1000, 11, "forward/attention", softmax),
                event(Action::Alloc, BASE + 1024, 500, 12, "forward", "aten::mm"),
                event(Action::FreeRequested, BASE + 1024, 500, 13, "forward", ""),
                event(Action::FreeCompleted, BASE + 1024, 500, 14, "forward", ""),
                event(Action::OutOfMemory, 4096, 1 << 40, 15, "backward", "MmBackward0"),
                event(Action::Snapshot, 0, 0, 16, "", ""),
            ],
            segments: vec![Segment { address: BASE, bytes: 2048, is_large: false, blocks }],
        }
    }

    /// PyTorch's own reader of snapshots, run without the rest of PyTorch.
    const READ: &str = r#"
import importlib.util, json, pickle, sys
spec = importlib.util.spec_from_file_location("memory_viz", sys.argv[1])
viz = importlib.util.module_from_spec(spec)
spec.loader.exec_module(viz)
data = pickle.load(open(sys.argv[2], "rb"))
text = [viz.segsum(data), viz.trace(data), viz.segments(data, lambda lines: lines), viz.memory(data, lambda lines: lines)]
for page in (viz.trace_plot(data), viz.segment_plot(data)):
    assert "snapshot.pickle" in page
print(json.dumps({"data": data, "text": text}))
"#;

    #[test]
    fn pytorchs_memory_viewer_reads_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("snapshot.pickle");
        write(&example(), &mut std::fs::File::create(&file).unwrap()).unwrap();
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let reader = root.join(".venv/libtorch/cuda/_memory_viz.py");
        let mut python = Command::new(root.join(".venv/bin/python"));
        let output = python.args(["-c", READ]).args([&reader, &file]).output().expect("run `make setup` first");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let read: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();

        let trace = &read["data"]["device_traces"][0];
        assert_eq!(trace[1]["addr"].as_u64(), Some(0x7f00_0000_0000));
        let names: Vec<_> =
            trace[1]["frames"].as_array().unwrap().iter().map(|f| f["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["aten::_softmax", "aten::softmax", "attention", "forward"]);
        assert_eq!(trace[5]["device_free"], 4096);
        let blocks = &read["data"]["segments"][0]["blocks"];
        assert_eq!(
            (&blocks[1]["state"], &blocks[1]["address"]),
            (&"active_pending_free".into(), &139_637_976_728_576_u64.into())
        );
        let text = read["text"].to_string();
        for expected in
            ["total_reserved: 2.0KiB", "total_allocated: 1000.0B", "1.0TiB requested, 4.0KiB free", "range:0:forward"]
        {
            assert!(text.contains(expected), "{expected} in {text}");
        }
    }

    #[test]
    fn a_long_history_keeps_its_latest_events() {
        let step = |i| event(Action::Alloc, i, 1, i as i64, "", "");
        let history =
            History { before_bytes: 0, events: (0..MAX_EVENTS as u64 + 9).map(step).collect(), segments: vec![] };
        let mut out = Vec::new();
        write(&history, &mut out).unwrap();
        let value: serde_json::Value = serde_pickle::from_slice(&out, Default::default()).unwrap();
        let trace = value["device_traces"][0].as_array().unwrap();
        assert_eq!((trace.len(), &trace[0]["addr"]), (MAX_EVENTS, &9.into()));
    }
}
