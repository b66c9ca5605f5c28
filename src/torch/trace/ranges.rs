//! Which range each piece of work belongs to: the one that was open when it was launched.

use std::collections::HashMap;

use anyhow::{Result, ensure};

use super::{Event, Source, Trace};

/// The ranges of one trace: they nest, and one thread opened them all.
#[derive(Debug)]
pub struct Ranges {
    spans: Vec<Span>,
    /// From each time on, the innermost open span.
    innermost: Vec<(i64, Option<usize>)>,
}

/// One range as it ran.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    pub name: String,
    pub parent: Option<usize>,
    pub start_ns: i64,
    pub end_ns: i64,
}

/// A kernel, copy or operator, and the range that it belongs to.
#[derive(Debug, Clone, Copy)]
pub struct Placed<'a> {
    pub event: &'a Event,
    /// Of an operator, without the operators that it called; of GPU work, its duration.
    pub own_ns: i64,
    /// The innermost range that was open at its launch, an index of [`Ranges::spans`].
    pub span: Option<usize>,
    /// False if the trace lacks the call that launched this GPU work.
    pub launch_seen: bool,
}

/// A trace's times are rounded, so that a range may seem to outlive the one around it by this much.
const ROUNDING_NS: i64 = 4;

impl Ranges {
    /// Errors: ranges of two threads, or ranges that overlap without nesting.
    pub fn of(trace: &Trace) -> Result<Self> {
        let mut events: Vec<&Event> = trace.events.iter().filter(|e| e.source == Source::Range).collect();
        events.sort_by_key(|e| (e.start_ns, std::cmp::Reverse(e.end_ns())));
        let mut ranges = Self { spans: Vec::new(), innermost: Vec::new() };
        let mut open: Vec<usize> = Vec::new();
        for event in &events {
            let first = events[0];
            ensure!(
                event.thread == first.thread,
                "the ranges {:?} and {:?} are of two threads: only the thread that drives a step may open them",
                first.name,
                event.name
            );
            ranges.close(&mut open, event.start_ns);
            let mut end_ns = event.end_ns();
            if let Some(&outer) = open.last() {
                let outer = &ranges.spans[outer];
                let late = end_ns - outer.end_ns;
                ensure!(
                    late <= ROUNDING_NS,
                    "the range {:?} ends {late} ns after {:?} around it",
                    event.name,
                    outer.name
                );
                end_ns = end_ns.min(outer.end_ns);
            }
            let span = ranges.spans.len();
            let parent = open.last().copied();
            ranges.spans.push(Span { name: event.name.clone(), parent, start_ns: event.start_ns, end_ns });
            ranges.innermost.push((event.start_ns, Some(span)));
            open.push(span);
        }
        ranges.close(&mut open, i64::MAX);
        Ok(ranges)
    }

    /// Closes the spans that have ended by `now`.
    fn close(&mut self, open: &mut Vec<usize>, now: i64) {
        while let Some(&span) = open.last() {
            if self.spans[span].end_ns > now {
                break;
            }
            open.pop();
            self.innermost.push((self.spans[span].end_ns, open.last().copied()));
        }
    }

    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// The innermost span that is open at `time_ns`.
    pub fn at(&self, time_ns: i64) -> Option<usize> {
        let after = self.innermost.partition_point(|(from, _)| *from <= time_ns);
        self.innermost[..after].last().and_then(|(_, span)| *span)
    }

    /// The innermost of `span` and those around it that is called `name`.
    pub fn enclosing(&self, span: Option<usize>, name: &str) -> Option<usize> {
        std::iter::successors(span, |&span| self.spans[span].parent).find(|&span| self.spans[span].name == name)
    }

    /// Whether `span`, or one around it, is called `name`.
    pub fn inside(&self, span: Option<usize>, name: &str) -> bool {
        self.enclosing(span, name).is_some()
    }

    /// The spans called `name`.
    pub fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Span> {
        self.spans.iter().filter(move |span| span.name == name)
    }

    /// Every kernel, copy and fill of the GPU, by the time of the call that launched it, whichever thread called: while
    /// libtorch's own threads launch a backward pass, the driving thread waits inside its range.
    ///
    /// Work whose call the trace lacks belongs to the outermost range that was open when it ran: the host waits for the
    /// device at the end of an outermost range, but not at the end of the ranges inside it.
    pub fn place_gpu_work<'a>(&self, trace: &'a Trace) -> Vec<Placed<'a>> {
        let calls = trace.events.iter().filter(|event| event.source == Source::Call);
        let calls: HashMap<i64, &Event> = calls.filter_map(|call| Some((call.correlation?, call))).collect();
        let work = trace.events.iter().filter(|event| event.source.is_gpu());
        work.map(|event| {
            let call = event.correlation.and_then(|correlation| calls.get(&correlation));
            let span = match call {
                Some(call) => self.at(call.start_ns),
                None => std::iter::successors(self.at(event.start_ns), |&span| self.spans[span].parent).last(),
            };
            Placed { event, own_ns: event.duration_ns, span, launch_seen: call.is_some() }
        })
        .collect()
    }

    /// Every operator of the CPU, by the time of its start, with the time that was its own.
    pub fn place_operators<'a>(&self, trace: &'a Trace) -> Vec<Placed<'a>> {
        let mut operators: Vec<&Event> = trace.events.iter().filter(|e| e.source == Source::Operator).collect();
        operators.sort_by_key(|e| (e.thread, e.start_ns, std::cmp::Reverse(e.end_ns())));
        let mut placed: Vec<Placed> = Vec::with_capacity(operators.len());
        let mut callers: Vec<usize> = Vec::new();
        for event in operators {
            let is_over = |caller: &Event| caller.thread != event.thread || caller.end_ns() <= event.start_ns;
            while callers.last().is_some_and(|&caller| is_over(placed[caller].event)) {
                callers.pop();
            }
            if let Some(&caller) = callers.last() {
                placed[caller].own_ns -= event.duration_ns.min(placed[caller].own_ns);
            }
            callers.push(placed.len());
            placed.push(Placed { event, own_ns: event.duration_ns, span: self.at(event.start_ns), launch_seen: true });
        }
        placed
    }
}

/// Nanoseconds in which at least one of the intervals (start, end) ran.
pub fn covered_ns(intervals: impl IntoIterator<Item = (i64, i64)>) -> i64 {
    let mut intervals: Vec<(i64, i64)> = intervals.into_iter().collect();
    intervals.sort_unstable();
    let (mut covered, mut until) = (0, i64::MIN);
    for (start, end) in intervals {
        covered += (end - start.max(until)).max(0);
        until = until.max(end);
    }
    covered
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(source: Source, name: &str, start_ns: i64, end_ns: i64, thread: i64, correlation: Option<i64>) -> Event {
        Event { source, name: name.into(), start_ns, duration_ns: end_ns - start_ns, thread, correlation }
    }

    fn range(name: &str, start_ns: i64, end_ns: i64) -> Event {
        event(Source::Range, name, start_ns, end_ns, 1, None)
    }

    /// A forward range with a softmax in it, and a backward range whose kernel another thread launches.
    fn trace() -> Trace {
        let call =
            |at, thread, correlation| event(Source::Call, "cudaLaunchKernel", at, at + 2, thread, Some(correlation));
        let kernel = |name, start, end, correlation| event(Source::Kernel, name, start, end, 7, Some(correlation));
        Trace {
            events: vec![
                range("backward", 100, 200),
                range("softmax", 20, 31),
                range("forward", 10, 30),
                call(25, 1, 1),
                call(29, 1, 2),
                call(150, 2, 3),
                call(210, 1, 4),
                // Kernels run later than they are launched.
                kernel("softmax", 120, 130, 1),
                kernel("mm", 130, 180, 2),
                kernel("mm backward", 300, 400, 3),
                kernel("random", 400, 410, 4),
                kernel("call missing", 160, 165, 99),
            ],
        }
    }

    #[test]
    fn gpu_work_belongs_to_the_range_that_was_open_when_any_thread_launched_it() {
        let trace = trace();
        let ranges = Ranges::of(&trace).unwrap();
        let name = |placed: &Placed| placed.span.map(|span| ranges.spans()[span].name.as_str());
        let placed = ranges.place_gpu_work(&trace);
        let names: Vec<_> = placed.iter().map(name).collect();
        assert_eq!(names, [Some("softmax"), Some("softmax"), Some("backward"), None, Some("backward")]);
        assert_eq!(placed.iter().filter(|p| !p.launch_seen).count(), 1);
        assert!(ranges.inside(placed[0].span, "forward") && !ranges.inside(placed[2].span, "forward"));
        assert_eq!(ranges.named("softmax").map(|span| span.end_ns).collect::<Vec<_>>(), [30]);
    }

    #[test]
    fn the_innermost_range_is_known_at_every_boundary() {
        let ranges = Ranges::of(&trace()).unwrap();
        let name = |time| ranges.at(time).map(|span| ranges.spans()[span].name.as_str());
        assert_eq!([9, 10, 20, 29].map(name), [None, Some("forward"), Some("softmax"), Some("softmax")]);
        assert_eq!([30, 99, 100, 199, 200].map(name), [None, None, Some("backward"), Some("backward"), None]);
    }

    #[test]
    fn ranges_that_do_not_nest_or_have_two_threads_are_refused() {
        let crossing = Trace { events: vec![range("a", 0, 100), range("b", 50, 150)] };
        assert!(Ranges::of(&crossing).unwrap_err().to_string().contains("\"b\" ends 50 ns after \"a\""));
        let mut threads = Trace { events: vec![range("a", 0, 100), range("b", 50, 60)] };
        threads.events[1].thread = 2;
        assert!(Ranges::of(&threads).unwrap_err().to_string().contains("two threads"));
    }

    #[test]
    fn an_operators_own_time_excludes_the_operators_it_called() {
        let operator = |name, start, end, thread| event(Source::Operator, name, start, end, thread, None);
        let trace = Trace {
            events: vec![
                range("forward", 0, 50),
                operator("linear", 10, 40, 1),
                operator("t", 11, 13, 1),
                operator("matmul", 13, 39, 1),
                operator("mm", 14, 38, 1),
                operator("elsewhere", 12, 20, 2),
            ],
        };
        let ranges = Ranges::of(&trace).unwrap();
        let placed = ranges.place_operators(&trace);
        let own: Vec<_> = placed.iter().map(|p| (p.event.name.as_str(), p.own_ns)).collect();
        assert_eq!(own, [("linear", 2), ("t", 2), ("matmul", 2), ("mm", 24), ("elsewhere", 8)]);
        assert!(placed.iter().all(|p| ranges.inside(p.span, "forward")));
    }

    #[test]
    fn overlapping_intervals_are_covered_once() {
        assert_eq!(covered_ns([(0, 10), (5, 12), (20, 30), (22, 25)]), 22);
        assert_eq!(covered_ns([]), 0);
    }
}
