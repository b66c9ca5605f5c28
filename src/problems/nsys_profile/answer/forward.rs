//! Parts (b) and (c): what takes the time of a forward pass, and what takes the rest beside its matrix products.

use anyhow::Result;
use serde::Serialize;

use super::super::summary::Kernel;
use super::{ProfileCase, Profiled, context, is_product, lines, n_of, named, of_class};
use crate::bench::kernels::Class;
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::format::{Style, listed};
use crate::harness::answer::{Cell, Column, Quantity, RecordSet, Table};

/// The kernels that the example's table names.
const SHOWN: usize = 9;

/// Of the example's forward pass, and how many of all passes a matmul leads.
#[derive(Serialize)]
pub struct Forward {
    top: String,
    top_count: String,
    top_share: Quantity,
    /// "$W_1$, $W_3$ and $QK^\top$ (48 each)"; empty where the launches do not tell.
    top_computes: String,
    /// "18 of 20".
    led: String,
    /// Of the classes beside the products: "copies (2.4%)".
    shares: String,
    /// Scale and mask of attention, as a share of the elementwise time.
    masking: Quantity,
}

/// Classes beside the products, the one that is expected to lead first.
const BESIDE: [(&str, Class); 4] = [
    ("elementwise kernels", Class::Elementwise),
    ("copies", Class::Copy),
    ("softmax", Class::Softmax),
    ("reductions", Class::Reduction),
];

impl Forward {
    /// None where the example lists no kernel.
    pub fn of(profiles: &[Profiled], example: Profiled, computed: &[(&str, String)]) -> Option<Self> {
        let work = example.inference();
        let top = example.top()?;
        let classes = BESIDE.map(|(name, class)| (name, example.over(of_class(work, class), work.seconds)));
        let share = |(name, share): &(&str, Quantity)| format!("{name} ({})", share.text(Style::Percent, 1));
        let led = profiles.iter().filter(|profile| profile.top().is_some_and(is_product)).count();
        let scores = &example.row.attention.scores;
        Some(Self {
            top: named(top),
            top_count: example.count(top.count),
            top_share: example.over(top.seconds, work.seconds),
            top_computes: computed
                .iter()
                .find(|(name, _)| *name == top.name)
                .map(|(_, what)| what.clone())
                .unwrap_or_default(),
            led: n_of(led, profiles.len()),
            shares: listed(&classes.iter().map(share).collect::<Vec<_>>()),
            masking: example.over(of_class(scores, Class::Elementwise), of_class(work, Class::Elementwise)),
        })
    }
}

/// What takes the most time in each case's forward pass, and in its forward and backward pass together.
pub fn top_table(set: &RecordSet, cases: &[&ProfileCase]) -> Result<Table> {
    fn both(p: &Profiled) -> Option<String> {
        let both = p.row.top_of_both.as_ref()?;
        let same = p.top().is_some_and(|top| top.name == both.name);
        Some(if same { "the same".into() } else { named(both) })
    }
    fn text(text: Option<String>) -> Cell {
        text.map_or(Cell::Missing, Cell::Text)
    }
    let share = Column::number("share", Style::Percent, 1);
    let launches = || Column::number("launches", Style::Grouped, 0);
    let table = lines(
        cases,
        [
            (Column::text("forward"), |p| text(p.top().map(named))),
            (launches(), |p| p.top().map(|top| p.number(top.count as f64)).into()),
            (share, |p| p.top().map(|top| p.over(top.seconds, p.inference().seconds)).into()),
            (Column::text("forward and backward"), |p| text(both(p))),
            (launches(), |p| p.row.top_of_both.as_ref().map(|top| p.number(top.count as f64)).into()),
        ],
    );
    Ok(table.captioned(format!(
        "The kernel with the most time in one forward pass under no_grad, and in the forward and backward pass of a training \
         step; names are shortened, and a split matmul counts with the kernel that adds up its parts; {}.",
        set.machine()?
    )))
}

/// The example's kernels by their time, the matmul kernels with what they compute.
pub fn kernel_table(set: &RecordSet, example: Profiled, computed: &[(&str, String)]) -> Result<Table> {
    let work = example.inference();
    let (shown, others) = work.kernels.split_at(SHOWN.min(work.kernels.len()));
    let names = others.len() as u64 + work.rest.names;
    let rest = [others.iter().map(|kernel| kernel.count).sum::<u64>() + work.rest.count, work.count];
    let rest_s = [others.iter().map(|kernel| kernel.seconds).sum::<f64>() + work.rest.seconds, work.seconds];
    let what = |kernel: &Kernel| {
        let what = computed.iter().find(|(name, _)| *name == kernel.name).map(|(_, what)| what.clone());
        what.unwrap_or_else(|| kernel.class.label().into())
    };
    let mut lines: Vec<(String, String, u64, f64)> =
        shown.iter().map(|kernel| (named(kernel), what(kernel), kernel.count, kernel.seconds)).collect();
    lines.push((format!("{names} others"), String::new(), rest[0], rest_s[0]));
    lines.push(("all".into(), String::new(), rest[1], rest_s[1]));
    let table = Table::of(lines)
        .text(example.noun(), |(name, ..)| name.clone())
        .text("computes", |(_, what, ..)| what.clone())
        .number("launches", Style::Grouped, 0, |(_, _, count, _)| example.number(*count as f64))
        .number("time (ms)", Style::Ms, 1, |(.., seconds)| example.seconds(*seconds))
        .number("share", Style::Percent, 1, |(.., seconds)| example.over(*seconds, work.seconds));
    let (place, machine) = (example.place(), set.machine()?);
    Ok(table.captioned(format!("The {}s of one forward pass of {place}, by time; {machine}.", example.noun())))
}

/// Bars of the classes beside the matmuls, for each size that was measured at the example's context.
pub fn figure(set: &RecordSet, profiles: &[Profiled], example: Profiled) -> Result<Figure> {
    const CLASSES: [(&str, &[Class]); 5] = [
        ("elementwise", &[Class::Elementwise]),
        ("copies", &[Class::Copy]),
        ("softmax", &[Class::Softmax]),
        ("reductions", &[Class::Reduction]),
        ("all others", &[Class::Indexing, Class::Optimizer, Class::Other]),
    ];
    let at_context = |profile: &&Profiled| profile.params().context_length == example.params().context_length;
    let series = CLASSES.map(|(name, classes)| {
        let bars = profiles.iter().filter(at_context).map(|profile| {
            let work = profile.inference();
            let part = classes.iter().map(|class| of_class(work, *class)).sum();
            (profile.size(), Some(100.0 * profile.over(part, work.seconds).value()))
        });
        Series::over_categories(name, bars)
    });
    let plot = Plot::new(PlotKind::Bar, "size", "share (%)", series.to_vec());
    let alt =
        format!("Bars by model size: the share of a forward pass of each class of {}s but matmuls.", example.noun());
    let caption = format!(
        "Share of the {}s other than matmuls in the time of a forward pass at context {}; {}.",
        example.noun(),
        context(example.params()),
        set.machine()?
    );
    Ok(Figure::plot(alt, plot).captioned(caption))
}
