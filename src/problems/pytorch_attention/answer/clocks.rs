//! The host's clock beside CUDA's events, and what held the device's clock down.

use serde::Serialize;

use super::{AttentionCase, Ran, both, length};
use crate::harness::answer::format::range;
use crate::harness::answer::{Claim, Quantity, Range, Style, Unit};
use crate::harness::conditions::Throttle;
use crate::harness::samples::Samples;

#[derive(Serialize)]
pub(super) struct Clocks {
    /// The greatest length, a width, and the backward pass there: "63.06 and 63.03" by the host and between events.
    long: String,
    width: u32,
    backward: String,
    /// The shortest length, and the forward pass there.
    short: String,
    launches: String,
    /// The clocks of the cases that the power cap held down: "1,875 to 1,950".
    sm: String,
    #[serde(skip)]
    pub claims: [Claim; 2],
}

impl Clocks {
    /// None on a CPU, whose clock is the host's.
    pub fn of(fitting: &[Ran]) -> Option<Self> {
        let (first, last) = (fitting.first()?, fitting.last()?);
        let timed = |ran: &Ran, host: &Samples, device: &Option<Samples>| {
            Some([ran.case.median(host), ran.case.median(device.as_ref()?)])
        };
        let shortest = timed(first, &first.row.forward, &first.row.forward_device)?;
        let longest = timed(last, &last.row.backward, &last.row.backward_device)?;
        let cells: Vec<&Ran> = fitting.iter().filter(|ran| ran.seq() == last.seq()).collect();
        let capped: Vec<Quantity> = cells.iter().filter_map(|ran| capped_clock(ran.case)).collect();
        let [host, device] = &longest;
        let words = |Range { low, high }: Range| range(low.value(), high.value(), Style::Mhz, 0);
        Some(Self {
            long: length(last.seq()),
            width: last.case.params.d_model,
            backward: both(&longest, Style::Ms, 2),
            short: length(first.seq()),
            launches: both(&shortest, Style::Ms, 3),
            sm: Range::of(&capped).map(words).unwrap_or_default(),
            claims: [
                Claim::new("host-and-device-agree", host.value() < 1.02 * device.value())
                    .operand("by the host's clock", host)
                    .operand("between events", device)
                    .operand_text("wanted", "below 1.02 times"),
                Claim::all("power-cap-at-the-longest", "cells at the cap", capped.len(), cells.len()),
            ],
        })
    }
}

/// The median clock of a case that met the power cap.
fn capped_clock(case: &AttentionCase) -> Option<Quantity> {
    let during = case.conditions.as_ref()?.during.as_ref()?;
    let capped = during.throttle.contains(&Throttle::SwPowerCap);
    capped.then(|| case.quantity(during.sm_clock_hz.median, Unit::Hertz))
}
