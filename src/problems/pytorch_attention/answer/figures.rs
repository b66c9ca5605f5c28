//! The figures of the answer: times and kept memory against the length, both axes logarithmic.

use super::{Ran, Sdpa, Tiled};
use crate::attention::ImplementationName;
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::{Quantity, Style};

/// Both passes at the narrowest and the widest shape.
pub(super) fn scaling(fitting: &[Ran]) -> Figure {
    let widths = fitting.iter().map(|ran| ran.case.params.d_model);
    let mut ends: Vec<u32> = widths.clone().min().into_iter().chain(widths.max()).collect();
    ends.dedup();
    let of_width = |d: u32| fitting.iter().filter(move |ran| ran.case.params.d_model == d).copied().collect::<Vec<_>>();
    let lines = |pass: &str, time: fn(&Ran) -> Quantity| -> Vec<Series> {
        ends.iter().map(|d| line(format!("{pass}, d = {d}"), &of_width(*d), time, Style::Ms)).collect()
    };
    let lines = [lines("forward", |ran| ran.forward()), lines("backward", |ran| ran.backward())].concat();
    let alt = "Log-log plot of the forward and backward time of plain attention against sequence length, at the smallest \
               and the largest width d.";
    Figure::plot(alt, plot("time (ms)", lines))
}

/// What is in use before the backward pass, by plain attention and by those that recompute.
pub(super) fn kept(wide: &[Ran], others: &[Ran]) -> Figure {
    let of = |implementation: ImplementationName| -> Vec<Ran> {
        others.iter().filter(|ran| ran.case.params.implementation == implementation).copied().collect()
    };
    let named = [("plain", wide.to_vec()), ("tiled", of(Tiled)), ("scaled_dot_product_attention", of(Sdpa))];
    let measured = named.into_iter().filter(|(_, ran)| !ran.is_empty());
    let lines = measured.map(|(name, ran)| line(name.into(), &ran, |ran| ran.before_backward(), Style::Mib));
    let alt = "Log-log plot of the memory in use before the backward pass against sequence length, for plain attention \
               and for the implementations that recompute, at d = 64.";
    Figure::plot(alt, plot("before backward (MiB)", lines.collect()))
}

fn line(name: String, ran: &[Ran], y: fn(&Ran) -> Quantity, style: Style) -> Series {
    Series::over_numbers(name, ran.iter().map(|ran| (f64::from(ran.seq()), Some(y(ran).value() * style.scale()))))
}

fn plot(y_label: &str, lines: Vec<Series>) -> Plot {
    let mut plot = Plot::new(PlotKind::Line, "sequence length T", y_label, lines);
    (plot.log_x, plot.log_y) = (true, true);
    plot
}
