//! Hand-written histories, consistent and inconsistent ones.

use super::*;

pub(super) fn event(action: Action, address: u64, bytes: u64, time_us: i64, range: &str, operators: &str) -> Event {
    let source = Source { range: range.into(), operators: operators.into() };
    Event { action, address, bytes, time_us, source }
}

fn alloc(address: u64, bytes: u64, time_us: i64, range: &str) -> Event {
    event(Action::Alloc, address, bytes, time_us, range, "aten::linear/aten::empty")
}

fn free(address: u64, bytes: u64, time_us: i64) -> Event {
    event(Action::FreeCompleted, address, bytes, time_us, "", "")
}

fn history(before_bytes: u64, events: Vec<Event>) -> History {
    History { before_bytes, events, segments: Vec::new() }
}

/// 100 bytes before; a and b in "forward"; an older block of 40 ends; a's address is used again.
fn example() -> History {
    history(
        100,
        vec![
            alloc(0xa, 10, 1, "forward/attention"),
            alloc(0xb, 30, 2, "forward"),
            event(Action::FreeRequested, 0xa, 10, 3, "", ""),
            free(0xa, 10, 3),
            free(0xc, 40, 4),
            event(Action::SegmentAlloc, 0xf00, 4096, 5, "", ""),
            alloc(0xa, 10, 5, "backward"),
        ],
    )
}

#[test]
fn a_block_lives_from_its_allocation_until_its_free_completes() {
    let block = |bytes, born, died| Block { bytes, born, died };
    let expected =
        [block(10, Some(0), Some(3)), block(30, Some(1), None), block(40, None, Some(4)), block(10, Some(6), None)];
    assert_eq!(example().blocks().unwrap(), expected, "a free that is only requested ends nothing");
}

#[test]
fn a_history_that_contradicts_itself_is_refused() {
    let message = |events: Vec<Event>| history(8, events).blocks().unwrap_err().to_string();
    assert!(message(vec![alloc(0xa, 4, 0, ""), alloc(0xa, 4, 1, "")]).contains("0xa, which is in use"));
    assert!(message(vec![alloc(0xa, 4, 0, ""), free(0xa, 5, 1)]).contains("5 bytes of a block of 4"));
    assert!(message(vec![free(0xa, 6, 0), free(0xa, 6, 1)]).contains("12 bytes that are older"));
    assert!(message(vec![free(0xa, u64::MAX, 0), free(0xb, 1, 1)]).contains("older"));
}

#[test]
fn the_curve_starts_at_the_bytes_in_use_and_is_split_by_class_of_block() {
    let history = example();
    let blocks = history.blocks().unwrap();
    let class = |block: &Block| match block.born.map(|step| history.events[step].source.phase()) {
        None => 0,
        Some("forward") => 1,
        Some(_) => 2,
    };
    let curve = history.curve(&blocks, [100, 0, 0], class).unwrap();
    let points: Vec<_> = curve.points.iter().map(|p| (p.step, p.time_us, p.bytes)).collect();
    let expected = [(0, 1, [100, 10, 0]), (1, 2, [100, 40, 0]), (3, 3, [100, 30, 0]), (4, 4, [60, 30, 0])];
    assert_eq!(points[..4], expected);
    assert_eq!(points[4], (6, 5, [60, 30, 10]));
    assert_eq!(curve.peak().map(|p| (p.step, p.total())), Some((1, 140)));

    let wrong = |before, class: fn(&Block) -> usize| history.curve(&blocks, before, class).unwrap_err().to_string();
    assert!(wrong([99, 0, 0], |_| 0).contains("99 bytes"));
    assert!(wrong([0, 100, 0], |b| usize::from(b.born.is_some())).contains("frees more of a class"));
}

#[test]
fn a_history_of_frees_only_has_no_peak() {
    let empty = history(7, Vec::new());
    assert_eq!(empty.curve(&empty.blocks().unwrap(), [7], |_| 0).unwrap().peak(), None);
    let shrinking = history(7, vec![free(0xa, 7, 0)]);
    let curve = shrinking.curve(&shrinking.blocks().unwrap(), [7], |_| 0).unwrap();
    assert_eq!((curve.peak(), curve.thinned(10).len()), (None, 1));
}

#[test]
fn thinning_keeps_the_peaks_and_the_order() {
    // A saw of 10,000 teeth with one tall one, 500 steps in the same microsecond, and a clock that once steps back.
    let mut events = Vec::new();
    for tooth in 0..10_000i64 {
        let bytes = if tooth == 7_777 { 1_000_000 } else { 10 + (tooth as u64 * 37) % 100 };
        let time = if (4_000..4_500).contains(&tooth) { 8_000 } else { 2 * tooth };
        let time = if tooth == 6_000 { time - 50 } else { time };
        events.extend([alloc(0xa, bytes, time, "forward"), free(0xa, bytes, time + 1)]);
    }
    let history = history(5, events);
    let curve = history.curve(&history.blocks().unwrap(), [5], |_| 0).unwrap();
    let thinned = curve.thinned(600);
    assert!((400..=620).contains(&thinned.len()), "{}", thinned.len());
    assert!(thinned.windows(2).all(|pair| pair[0].step < pair[1].step));
    let highest = |points: &[Point<1>]| points.iter().map(Point::total).max();
    assert_eq!((highest(&thinned), highest(&curve.points)), (Some(1_000_005), Some(1_000_005)));
    let one = Curve { before: [0], points: vec![curve.points[0]; 3] };
    assert!(one.thinned(2).len() <= 2);
}

#[test]
fn groups_are_by_size_and_source_and_the_largest_come_first() {
    let history = example();
    let groups = history.groups(&history.blocks().unwrap());
    let shown: Vec<_> = groups.iter().map(|g| (g.bytes_each, g.count, g.source.range.as_str())).collect();
    assert_eq!(shown, [(40, 1, ""), (30, 1, "forward"), (10, 1, "backward"), (10, 1, "forward/attention")]);
    assert_eq!(groups[1].source.call(), "aten::linear");
    assert_eq!(groups[3].source.phase(), "forward");
}

#[test]
fn a_nodes_name_omits_the_prefix_of_the_engine() {
    let source = Source {
        range: String::new(),
        operators: "autograd::engine::evaluate_function: MmBackward0/MmBackward0/aten::mm".into(),
    };
    assert_eq!((source.call(), source.phase()), ("MmBackward0", ""));
}
