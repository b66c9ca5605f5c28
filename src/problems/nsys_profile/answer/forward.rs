//! Parts (b) and (c): what takes the time of a forward pass, and what takes the rest beside its matrix products.

use anyhow::Result;
use serde::Serialize;

use super::super::kernels::Class;
use super::super::summary::Kernel;
use super::{ProfileCase, Profiled, is_product, lines, n_of, named, noun, of_class};
use crate::harness::answer::figure::{Figure, Plot, PlotKind, Series};
use crate::harness::answer::format::{Style, grouped, print};
use crate::harness::answer::{Answer, Cell, Claim, Column, Quantity, Table};

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
    led_and_all: (usize, usize),
    #[serde(skip)]
    classes: Vec<(&'static str, Quantity)>,
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
        let top = work.kernels.first()?;
        let classes = BESIDE.map(|(name, class)| (name, example.over(of_class(work, class), work.seconds)));
        let share = |(name, share): &(&str, Quantity)| format!("{name} ({})", print(share.value(), Style::Percent, 1));
        let words = |kernel: &Kernel| {
            let share = print(example.over(kernel.seconds, work.seconds).value(), Style::Percent, 1);
            let times = if kernel.count == 1 { "time" } else { "times" };
            format!("{} ({share}, {} {times})", named(kernel), grouped(kernel.count as f64, 0))
        };
        let led = |profile: &&Profiled| profile.inference().kernels.first().is_some_and(is_product);
        let led = profiles.iter().filter(led).count();
        let scores = &example.row.attention.scores;
        Some(Self {
            top: named(top),
            top_count: grouped(top.count as f64, 0),
            top_share: example.over(top.seconds, work.seconds),
            led: n_of(led, profiles.len()),
            shares: classes.iter().map(share).collect(),
            largest: work.kernels.iter().filter(|kernel| !is_product(kernel)).take(3).map(words).collect(),
            masking: example.over(of_class(scores, Class::Elementwise), of_class(work, Class::Elementwise)),
            led_and_all: (led, profiles.len()),
            classes: classes.to_vec(),
        })
    }

    pub fn claims(&self, answer: &mut Answer) -> Result<()> {
        let (led, all) = self.led_and_all;
        answer.claim(Claim::all("top-is-a-product", "forward passes led by a product", led, all))?;
        let most = self.classes.iter().map(|(_, share)| share.value()).fold(0.0, f64::max);
        let leads = self.classes.first().is_some_and(|(_, elementwise)| elementwise.value() >= most);
        let claim = Claim::new("elementwise-leads-the-rest", leads);
        answer.claim(self.classes.iter().fold(claim, |claim, (name, share)| claim.operand(name, share)))
    }
}

/// What takes the most time in each case's forward pass, and in its forward and backward pass together.
pub fn top_table(cases: &[&ProfileCase]) -> Table {
    let count = || Column::right("count");
    let share = Column::number("share", Style::Percent, 1);
    let columns = vec![Column::text("forward"), count(), share, Column::text("both passes"), count()];
    lines(columns, cases, |profile| {
        let work = profile.inference();
        let Some(top) = work.kernels.first() else { return Vec::new() };
        let counted = |kernel: &Kernel| Cell::from(grouped(kernel.count as f64, 0));
        let both = profile.row.top_of_both.as_ref();
        let name = both.map(|both| if both.name == top.name { "the same".into() } else { named(both) });
        vec![
            named(top).into(),
            counted(top),
            profile.over(top.seconds, work.seconds).into(),
            name.map_or(Cell::Missing, Cell::from),
            both.map_or(Cell::Missing, counted),
        ]
    })
}

/// The example's kernels by their time.
pub fn kernel_table(example: Profiled, gpu: bool) -> Table {
    let mut table = Table::new(vec![
        Column::text(noun(gpu)),
        Column::text("class"),
        Column::right("count"),
        Column::number("time (ms)", Style::Ms, 3),
        Column::number("share", Style::Percent, 1),
    ]);
    let work = example.inference();
    let mut line = |name: String, class: &str, count: u64, seconds: f64, share: Cell| {
        let count = grouped(count as f64, 0).into();
        table.row(vec![name.into(), class.into(), count, example.seconds(seconds).into(), share]);
    };
    let share = |seconds| Cell::from(example.over(seconds, work.seconds));
    for kernel in &work.kernels {
        line(named(kernel), kernel.class.label(), kernel.count, kernel.seconds, share(kernel.seconds));
    }
    let rest = work.rest;
    if rest.count > 0 {
        line(format!("{} others", rest.names), "", rest.count, rest.seconds, share(rest.seconds));
    }
    line("all".into(), "", work.count, work.seconds, "".into());
    table
}

/// Bars of the classes beside the products, for each size that was measured at the example's context.
pub fn figure(profiles: &[Profiled], example: Profiled, gpu: bool) -> Figure {
    let context = example.params().context_length;
    const CLASSES: [(&str, &[Class]); 5] = [
        ("elementwise", &[Class::Elementwise]),
        ("copies", &[Class::Copy]),
        ("softmax", &[Class::Softmax]),
        ("reductions", &[Class::Reduction]),
        ("all others", &[Class::Indexing, Class::Optimizer, Class::Other]),
    ];
    let percent = |profile: &Profiled, classes: &[Class]| {
        let work = profile.inference();
        let part = classes.iter().map(|class| of_class(work, *class)).sum();
        100.0 * profile.over(part, work.seconds).value()
    };
    let series = CLASSES.map(|(name, classes)| {
        let shown = profiles.iter().filter(|profile| profile.params().context_length == context);
        let bars = shown.map(|profile| (profile.size(), Some(percent(profile, classes))));
        Series::over_categories(name, bars)
    });
    let plot = Plot::new(PlotKind::Bar, "size", "share (%)", series.to_vec());
    let alt = format!(
        "Bars of the share of a forward pass that each class of {}s but the matrix products takes, one group for each \
         model size.",
        noun(gpu)
    );
    Figure::plot(alt, plot)
}
