//! What every figure keeps: words that can be read and do not touch, colours with fixed meanings, one ink for all pages.

use super::canvas::{BRIGHTNESS, SIZE, WIDTH, brightened, contrast, edge, width_of};
use super::svg;
use crate::harness::answer::figure::{
    Drawing, Heatmap, Lane, Panel, Phase, Plot, PlotKind, Role, Series, SmallMultiples, Span, Timeline, Tone,
};

const OURS: &str = "#0072b2";
const PYTORCH: &str = "#e69f00";

fn lines(names: &[&str]) -> Plot {
    let series = names.iter().enumerate().map(|(i, name)| {
        // All end within a few points of each other, and every third one ends early.
        let last = if i % 3 == 2 { 11 } else { 14 };
        let points = (8..=last).map(|e| (2f64.powi(e), Some(2f64.powi(e) * (1.0 + 0.02 * i as f64))));
        let points: Vec<_> = points.collect();
        let ranges: Vec<_> = points.iter().map(|point| point.1.map(|y| [0.8 * y, 1.3 * y])).collect();
        Series::over_numbers(*name, points).ranged(ranges)
    });
    let plot = Plot::new(PlotKind::Line, "sequence length T (tokens)", "time (ms)", series.collect());
    Plot { log_x: true, log_y: true, ..plot }
}

fn bars(kind: PlotKind, series: &[&str], categories: &[&str]) -> Plot {
    let values = |i: usize| categories.iter().enumerate().map(move |(c, name)| (*name, Some(1.2 + (c * i) as f64)));
    let series = series.iter().enumerate().map(|(i, name)| Series::over_categories(*name, values(i)));
    Plot::new(kind, "size", "times as fast as eager", series.collect())
}

fn area() -> Plot {
    let series = ["parameters", "optimizer state", "gradients", "saved activations", "working tensors"];
    let series = series.iter().enumerate().map(|(i, name)| {
        let points = (0..400).map(|k| (f64::from(k), Some(10.0 / (1 + i) as f64 * (1.0 + (0.1 * f64::from(k)).sin()))));
        Series::over_numbers(*name, points)
    });
    let phases = [("forward", 0.0, 380.0), ("backward", 380.0, 395.0), ("optimizer", 395.0, 399.0)];
    let phases = phases.map(|(name, from, to)| Phase { name: name.into(), from, to }).to_vec();
    Plot { phases, ..Plot::new(PlotKind::Area, "time (ms)", "memory (GiB)", series.collect()) }
}

fn timeline() -> Timeline {
    let span = |name: &str, start_s, end_s| Span { name: name.into(), start_s, end_s };
    let compute = vec![span("forward", 0.0, 0.1), span("backward", 0.1, 0.3), span("synchronisation", 0.3, 0.302)];
    let lane = |name: &str, spans| Lane { name: name.into(), spans };
    let lanes = vec![lane("computing", compute), lane("communicating", vec![span("all_reduce", 0.2, 0.302)])];
    Timeline { x_label: "time (ms)".into(), end_s: 0.31, lanes }
}

/// One figure of each kind, crowded as far as the report's are.
fn samples() -> Vec<(&'static str, Drawing)> {
    let attention = ["plain", "ours", "portable", "SDPA flash", "cuDNN", "efficient"];
    let panels = || (0..8).map(|i| (format!("d = {i}"), lines(&attention))).collect();
    let strategies = ["naive", "one call", "overlapped, a call for each parameter", "PyTorch's DDP, 25 MB"];
    let ratios = (0..10).map(|i| (i != 3).then(|| 2f64.powi(i - 4))).collect();
    let heatmap = Heatmap {
        x_label: "sequence length T (tokens)".into(),
        y_label: "d".into(),
        x: (7..17).map(|e| (1 << e).to_string()).collect(),
        y: vec!["128".into()],
        panels: vec![Panel { name: "forward, over the best of PyTorch".into(), values: vec![ratios] }],
    };
    vec![
        ("lines", Drawing::Plot(lines(&attention).reference("bandwidth of the link", 9e3))),
        ("legend", Drawing::Plot(lines(&[&"a name that is too long for the margin of the figure".repeat(2), "ours"]))),
        ("bars", Drawing::Plot(bars(PlotKind::Bar, &["forward", "backward"], &["small", "medium", "2.7B"]))),
        ("long names", Drawing::Plot(bars(PlotKind::Bar, &["beyond"], &strategies))),
        ("two rows", Drawing::Plot(bars(PlotKind::Bar, &["forward", "backward"], &strategies))),
        ("horizontal", Drawing::Plot(bars(PlotKind::HorizontalBar, &["waiting", "optimizer"], &strategies))),
        ("area", Drawing::Plot(area())),
        ("multiples", Drawing::SmallMultiples(SmallMultiples { columns: 4, plots: panels() })),
        ("timelines", Drawing::Timelines(vec![("naive".into(), timeline()), ("overlapped".into(), timeline())])),
        ("heatmap", Drawing::Heatmap(heatmap)),
    ]
}

/// Left, top, right and bottom of each text, with its words.
fn boxes(drawn: &str) -> Vec<([f64; 4], &str)> {
    drawn
        .split("<text ")
        .skip(1)
        .map(|text| {
            let value = |name: &str| text.split(&format!("{name}=\"")).nth(1).unwrap().split('"').next().unwrap();
            let (x, y): (f64, f64) = (value("x").parse().unwrap(), value("y").parse().unwrap());
            let words = text.split('>').nth(1).unwrap().split('<').next().unwrap();
            let width = width_of(words);
            let left = x - width
                * match value("text-anchor") {
                    "start" => 0.0,
                    "middle" => 0.5,
                    _ => 1.0,
                };
            ([left, y - 0.65 * SIZE, left + width, y + 0.15 * SIZE], words)
        })
        .collect()
}

#[test]
fn words_stand_inside_the_figure_and_do_not_touch() {
    for (name, drawing) in samples() {
        let drawn = svg(&drawing);
        let view = drawn.split("viewBox=\"").nth(1).unwrap().split('"').next().unwrap();
        let height: f64 = view.rsplit(' ').next().unwrap().parse().unwrap();
        let boxes = boxes(&drawn);
        for (i, ([left, top, right, bottom], words)) in boxes.iter().enumerate() {
            let inside = *left >= -0.5 && *top >= 0.0 && *right <= WIDTH + 0.5 && *bottom <= height;
            assert!(inside, "{name}: {words:?} leaves the figure: {left} {top} {right} {bottom}");
            for ([l, t, r, b], other) in &boxes[..i] {
                let apart = right <= l || r <= left || bottom <= t || b <= top;
                assert!(apart, "{name}: {words:?} touches {other:?}");
            }
        }
    }
}

#[test]
fn no_words_are_below_eight_points_and_ink_is_the_pages() {
    const { assert!(SIZE >= 8.0) };
    for (name, drawing) in samples() {
        let drawn = svg(&drawing);
        assert_eq!(drawn.matches("font-size").count(), 1, "{name}: one size for all words");
        assert!(drawn.contains("fill=\"currentColor\" color=\"#222222\""), "{name}");
        let ground = format!(r#"width="{WIDTH}.00""#);
        assert!(!drawn.contains(&ground) && !drawn.contains("NaN") && !drawn.contains("inf"), "{name}");
        assert!(drawn.contains("<title>"), "{name} says nothing on hover");
    }
}

/// The colour of the mark whose title begins with `name`.
fn colour_of(drawn: &str, name: &str) -> String {
    let before = drawn.split(&format!("><title>{name}")).next().unwrap();
    let mark = &before[before.rfind('<').unwrap()..];
    let at = mark.rfind('#').unwrap_or_else(|| panic!("{name} is drawn without a colour: {mark}"));
    mark[at..at + 7].into()
}

#[test]
fn a_role_has_one_colour_in_lines_bars_and_panels() {
    let names = ["plain", "ours", "cuDNN"];
    let plot = bars(PlotKind::Bar, &names, &["a", "b"]);
    let multiples =
        SmallMultiples { columns: 1, plots: vec![("x".into(), lines(&["ours"])), ("y".into(), lines(&names))] };
    for drawing in [Drawing::Plot(lines(&names)), Drawing::Plot(plot), Drawing::SmallMultiples(multiples)] {
        let drawn = svg(&drawing);
        assert_eq!([colour_of(&drawn, "ours"), colour_of(&drawn, "cuDNN")], [OURS, PYTORCH]);
        assert_eq!(colour_of(&drawn, "plain"), "#8c8c8c");
    }
    let single = svg(&Drawing::Plot(bars(PlotKind::HorizontalBar, &["beyond"], &["PyTorch's DDP", "ours"])));
    assert_eq!([colour_of(&single, "beyond, PyTorch"), colour_of(&single, "beyond, ours")], [PYTORCH, OURS]);
}

#[test]
fn forward_is_light_and_backward_is_dark_and_an_answer_can_say_otherwise() {
    let drawn =
        svg(&Drawing::Plot(lines(&["torch.compile, forward", "torch.compile, backward", "forward", "backward"])));
    let bright = |name: &str| super::canvas::luminance(&colour_of(&drawn, name));
    assert!(bright("torch.compile, forward") > bright("torch.compile, backward") + 0.2);
    assert!(bright("forward") > bright("backward") + 0.2);
    let drawn = svg(&Drawing::Plot(lines(&["ours", "cuDNN"])));
    let grey = ["ours", "cuDNN"].map(|name| super::canvas::luminance(&colour_of(&drawn, name)));
    assert!(grey[1] > grey[0] + 0.2, "they differ in greyscale too: {grey:?}");
    let mut plot = lines(&["forward"]);
    plot.series = plot.series.into_iter().map(|series| series.role(Role::PyTorch, Tone::Full)).collect();
    assert_eq!(colour_of(&svg(&Drawing::Plot(plot)), "forward"), PYTORCH);
}

/// Each attribute `name` of the elements that open so.
fn values<'a>(drawn: &'a str, element: &'a str, name: &'a str) -> impl Iterator<Item = &'a str> {
    let opening = format!(" {name}=\"");
    let elements = drawn.split(element).skip(1).map(|rest| rest.split('>').next().unwrap_or_default());
    elements.filter_map(move |tag| tag.split(opening.as_str()).nth(1)?.split('"').next())
}

#[test]
fn shapes_and_words_stand_out_in_light_and_dark() {
    const DARK_PAPER: &str = "#14171a";
    let style = include_str!("../html/style.css");
    assert!(style.contains(&format!("--paper: {DARK_PAPER}")) && style.contains(&format!("brightness({BRIGHTNESS})")));
    let colours = ["forward", "backward", "ours", "PyTorch", "plain", "optimizer", "communication", "Gloo"];
    let palette =
        colours.map(|name| [name.to_string(), format!("{name}, forward"), format!("{name}, backward")]).concat();
    let drawings = samples().into_iter().map(|(name, drawing)| (name.to_string(), drawing));
    let bars = palette.iter().map(|name| (name.clone(), Drawing::Plot(bars(PlotKind::Bar, &[name], &["small"]))));
    let others =
        ["a", "b", "c", "d"].map(|name| [format!("{name}, forward"), name.into(), format!("{name}, backward")]);
    let others = (0..3)
        .map(|tone| others.each_ref().map(|names| names[tone].as_str()))
        .map(|names| (names.join("; "), Drawing::Plot(self::bars(PlotKind::Bar, &names, &["small"]))));
    for (name, drawing) in drawings.chain(bars).chain(others).filter(|(name, _)| name != "heatmap") {
        let drawn = svg(&drawing);
        let is_colour = |value: &&str| value.starts_with('#');
        let strokes: Vec<&str> = values(&drawn, "<path ", "stroke").filter(is_colour).collect();
        // a line joins markers, which have an outline
        let markers: String =
            drawn.split('<').filter(|tag| tag.contains(" fill=\"#")).map(|tag| format!("<{tag}")).collect();
        for outline in values(&markers, "<path ", "stroke") {
            let light = contrast(outline, "#ffffff");
            assert!(
                light >= 3.0,
                "{name}: a marker's outline of {outline} has a contrast of {light:.2} with white paper"
            );
        }
        // a marker has its own line around it
        let unlined = drawn.split('<').filter(|tag| tag.starts_with("rect ") || !tag.contains(" stroke=\"#"));
        let unlined = unlined.collect::<Vec<_>>().join("<");
        for fill in values(&unlined, "<rect ", "fill").chain(values(&unlined, "<path ", "fill")).filter(is_colour) {
            let (light, edge) = (contrast(fill, "#ffffff"), edge(fill));
            assert!(light >= 3.0 || strokes.contains(&edge.as_str()), "{name}: {fill} has no outline on white paper");
            let dark = contrast(&brightened(fill), DARK_PAPER);
            assert!(dark >= 3.0, "{name}: {fill} has a contrast of {dark:.2} with dark paper");
        }
    }
    for fill in ["#0072b2", "#009e73", "#b35900", "#767676", "#ffffff"] {
        let drawn = {
            let mut canvas = super::canvas::Canvas::default();
            canvas.text_on(fill, 0.0, 0.0, "words");
            canvas.file(9.0)
        };
        let ink = values(&drawn, "<text ", "fill").next().unwrap();
        let dark = if drawn.contains("class=\"flip\"") { "#000000" } else { ink };
        let found = [contrast(ink, fill), contrast(dark, &brightened(fill))];
        assert!(found.iter().all(|contrast| *contrast >= 4.5), "words on {fill}: {found:?}");
    }
}

#[test]
fn ratios_have_a_line_at_one_and_bars_begin_at_zero() {
    let drawn = svg(&Drawing::Plot(bars(PlotKind::Bar, &["ours"], &["a", "b"])));
    let zero = boxes(&drawn).into_iter().find(|(_, words)| words.parse() == Ok(0.0)).expect("a tick at zero");
    let [_, top, ..] = zero.0;
    let bottom = drawn.split("<rect ").skip(1).map(|rect| {
        let value = |name: &str| {
            rect.split(&format!(" {name}=\"")).nth(1).unwrap().split('"').next().unwrap().parse::<f64>().unwrap()
        };
        value("y") + value("height")
    });
    bottom.for_each(|y| assert!((y + 2.8 - 0.65 * SIZE - top).abs() < 0.3, "{y} {top}"));
    let ink = |plot: Plot| svg(&Drawing::Plot(plot)).matches("stroke-width=\".7\"").count();
    let ratios = bars(PlotKind::Bar, &["ours"], &["a", "b"]);
    let times = Plot { y_label: "time (ms)".into(), ..ratios.clone() };
    assert_eq!(ink(ratios), ink(times) + 1);
}
