//! One step as two lanes: computation and communication of the rank.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::collective::timeline::{Mark, TimelineEntry};

/// Seconds since the forward pass began, on the device's clock if it has one.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timeline {
    /// "forward", "backward", "synchronisation", which only waits, and "optimizer", in this order.
    pub compute: Vec<Span>,
    pub communication: Vec<Span>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    pub name: String,
    pub start_s: f64,
    pub end_s: f64,
}

/// The phases of a step. There is a mark before the first phase and after each.
pub const PHASES: [&str; 4] = ["forward", "backward", "synchronisation", "optimizer"];

impl Timeline {
    /// From the marks around [`PHASES`] and the recorded collectives of the same step.
    pub fn of(marks: &[Mark; PHASES.len() + 1], entries: &[TimelineEntry]) -> Result<Self> {
        let at = marks.iter().map(Mark::seconds).collect::<Result<Vec<f64>>>()?;
        Ok(Self::between(&at, entries))
    }

    fn between(at: &[f64], entries: &[TimelineEntry]) -> Self {
        let span =
            |name: &str, start: f64, end: f64| Span { name: name.into(), start_s: start - at[0], end_s: end - at[0] };
        Self {
            compute: PHASES.iter().zip(at.windows(2)).map(|(name, ends)| span(name, ends[0], ends[1])).collect(),
            communication: entries.iter().map(|e| span(e.operation.name(), e.started_s, e.ended_s)).collect(),
        }
    }

    /// Communication that the backward pass does not hide: how long the optimizer waited for gradients, and the collectives
    /// of a sharded optimizer itself.
    pub fn tail_s(&self) -> f64 {
        let waited = self.compute.iter().filter(|span| span.name == PHASES[2]);
        let ready = waited.clone().map(|span| span.end_s).fold(0.0, f64::max);
        let after = self.communication.iter().map(|call| (call.end_s - call.start_s.max(ready)).max(0.0));
        waited.map(|span| span.end_s - span.start_s).sum::<f64>() + after.sum::<f64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::Operation;

    #[test]
    fn lanes_share_their_zero_and_the_tail_is_what_lies_between_backward_and_optimizer() {
        let entry = |started_s, ended_s| TimelineEntry {
            sequence: 1,
            operation: Operation::AllReduce,
            bytes: 4,
            launched_s: 2.5,
            started_s,
            ended_s,
        };
        let timeline = Timeline::between(&[1.0, 2.0, 5.0, 7.0, 8.0], &[entry(3.0, 6.5)]);
        let spans: Vec<_> = timeline.compute.iter().map(|s| (s.name.as_str(), s.start_s, s.end_s)).collect();
        assert_eq!(
            spans,
            [("forward", 0.0, 1.0), ("backward", 1.0, 4.0), ("synchronisation", 4.0, 6.0), ("optimizer", 6.0, 7.0)]
        );
        assert_eq!((timeline.communication[0].start_s, timeline.communication[0].end_s), (2.0, 5.5));
        assert_eq!(timeline.tail_s(), 2.0);
        // The optimizer's collectives: a quarter of a second across the moment when gradients were ready, and half a second after.
        let sharing = Timeline::between(&[1.0, 2.0, 5.0, 7.0, 8.0], &[entry(6.5, 7.25), entry(7.25, 7.75)]);
        assert_eq!(sharing.tail_s(), 2.75);
    }
}
