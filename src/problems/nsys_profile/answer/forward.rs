//! Parts (b) and (c): what takes the time of a forward pass, and what takes the rest beside its matrix products.

use serde::Serialize;

use super::super::kernels::Class;
use super::super::summary::Kernel;
use super::{ProfileCase, Profiled, is_product, lines, n_of, named, of_class};
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::format::{Style, grouped, print};
use crate::harness::answer::{Cell, Claim, Column, Quantity, Table};

/// Of the example's forward pass, and how many of all passes a product leads.
#[derive(Serialize)]
pub struct Forward {
    top: String,
    top_count: String,
    top_share: Quantity,
    /// "18 of 20".
    led: String,
    /// Of the classes beside the products: "copies (2.4%)".
    shares: Vec<String>,
    /// The largest beside the products, with share and count.
    largest: Vec<String>,
    /// Scale and mask of attention, as a share of the elementwise time.
    masking: Quantity,
    #[serde(skip)]
    pub claims: [Claim; 2],
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
    pub fn of(profiles: &[Profiled], example: Profiled) -> Option<Self> {
        let work = example.inference();
        let top = example.top()?;
        let classes = BESIDE.map(|(name, class)| (name, example.over(of_class(work, class), work.seconds)));
        let share = |(name, share): &(&str, Quantity)| format!("{name} ({})", print(share.value(), Style::Percent, 1));
        let words = |kernel: &Kernel| {
            let share = print(example.over(kernel.seconds, work.seconds).value(), Style::Percent, 1);
            let times = if kernel.count == 1 { "time" } else { "times" };
            format!("{} ({share}, {} {times})", named(kernel), count(kernel))
        };
        let led = profiles.iter().filter(|profile| profile.top().is_some_and(is_product)).count();
        let scores = &example.row.attention.scores;
        let [(_, elementwise), others @ ..] = &classes;
        let leads = others.iter().all(|(_, share)| share.value() <= elementwise.value());
        let leads = Claim::new("elementwise-leads-the-rest", leads);
        Some(Self {
            top: named(top),
            top_count: count(top),
            top_share: example.over(top.seconds, work.seconds),
            led: n_of(led, profiles.len()),
            shares: classes.iter().map(share).collect(),
            largest: work.kernels.iter().filter(|kernel| !is_product(kernel)).take(3).map(words).collect(),
            masking: example.over(of_class(scores, Class::Elementwise), of_class(work, Class::Elementwise)),
            claims: [
                Claim::all("top-is-a-product", "forward passes led by a product", led, profiles.len()),
                classes.iter().fold(leads, |claim, (name, share)| claim.operand(name, share)),
            ],
        })
    }
}

/// What takes the most time in each case's forward pass, and in its forward and backward pass together.
pub fn top_table(cases: &[&ProfileCase]) -> Table {
    fn both(p: &Profiled) -> Option<String> {
        let both = p.row.top_of_both.as_ref()?;
        let same = p.top().is_some_and(|top| top.name == both.name);
        Some(if same { "the same".into() } else { named(both) })
    }
    fn text(text: Option<String>) -> Cell {
        text.map_or(Cell::Missing, Cell::Text)
    }
    let share = Column::number("share", Style::Percent, 1);
    lines(
        cases,
        [
            (Column::text("forward"), |p| text(p.top().map(named))),
            (Column::right("count"), |p| text(p.top().map(count))),
            (share, |p| p.top().map(|top| p.over(top.seconds, p.inference().seconds)).into()),
            (Column::text("both passes"), |p| text(both(p))),
            (Column::right("count"), |p| text(p.row.top_of_both.as_ref().map(count))),
        ],
    )
}

fn count(kernel: &Kernel) -> String {
    grouped(kernel.count as f64, 0)
}

/// The example's kernels by their time.
pub fn kernel_table(example: Profiled) -> Table {
    let mut table = Table::new(vec![
        Column::text(example.noun()),
        Column::text("class"),
        Column::right("count"),
        Column::number("time (ms)", Style::Ms, 3),
        Column::number("share", Style::Percent, 1),
    ]);
    let work = example.inference();
    let share = |seconds| Cell::from(example.over(seconds, work.seconds));
    let mut line = |name: String, class: &str, count: u64, seconds: f64, share: Cell| {
        let count = grouped(count as f64, 0).into();
        table.row(vec![name.into(), class.into(), count, example.seconds(seconds).into(), share]);
    };
    for kernel in &work.kernels {
        line(named(kernel), kernel.class.label(), kernel.count, kernel.seconds, share(kernel.seconds));
    }
    if work.rest.count > 0 {
        line(format!("{} others", work.rest.names), "", work.rest.count, work.rest.seconds, share(work.rest.seconds));
    }
    line("all".into(), "", work.count, work.seconds, "".into());
    table
}

/// Bars of the classes beside the products, for each size that was measured at the example's context.
pub fn figure(profiles: &[Profiled], example: Profiled) -> Figure {
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
    let alt = format!(
        "Bars of the share of a forward pass that each class of {}s but the matrix products takes, one group for each \
         model size.",
        example.noun()
    );
    Figure::plot(alt, plot)
}
