//! Draws heat maps of ratios: a number in every field, and a colour for ratios above and below one.

use super::axis::label;
use super::canvas::{Canvas, WIDTH, mix, width_of};
use crate::harness::answer::figure::Heatmap;

const RIGHT: f64 = 10.0;
const ROW: f64 = 15.0;
const TITLE: f64 = 17.0;
const GAP: f64 = 6.0;
const NOTHING: &str = "#eeeeee";
/// Blue where ours is faster and vermilion where it is slower, pale enough for black letters.
const ENDS: [&str; 2] = ["#5ea6d1", "#e58e54"];
const SCALE: &str = "times as fast";
const STEP: f64 = 32.0;

/// The finished SVG.
pub fn svg(heatmap: &Heatmap) -> String {
    let mut canvas = Canvas::default();
    let left = 26.0 + heatmap.y.iter().map(|name| width_of(name)).fold(0.0, f64::max);
    let slot = (WIDTH - RIGHT - left) / heatmap.x.len() as f64;
    let full = full(heatmap);
    draw_scale(&mut canvas, full, ratios(heatmap).any(|ratio| ratio < 1.0));
    let mut top = 12.0;
    for panel in &heatmap.panels {
        canvas.text(left, top + TITLE - 5.0, "start", &panel.name);
        canvas.text(0.0, top + TITLE - 5.0, "start", &heatmap.y_label);
        top += TITLE;
        for (name, row) in heatmap.y.iter().zip(&panel.values) {
            canvas.text(left - 5.0, top + ROW / 2.0 + 2.8, "end", name);
            for (i, ratio) in row.iter().enumerate() {
                let (fill, words) = ratio.map_or((NOTHING.into(), "–".into()), |r| (colour(r, full), written(r)));
                let title = format!("{} = {name}, {}: {words}", heatmap.y_label, grouped(&heatmap.x[i]));
                field(&mut canvas, [left + slot * i as f64, top, slot], &fill, &words, &title);
            }
            top += ROW;
        }
        top += GAP;
    }
    for (i, name) in heatmap.x.iter().enumerate() {
        canvas.text(left + slot * (i as f64 + 0.5), top + 6.0, "middle", &grouped(name));
    }
    canvas.text((left + WIDTH - RIGHT) / 2.0, top + 19.0, "middle", &heatmap.x_label);
    canvas.file(top + 25.0)
}

/// The ratio of the strongest colour: the power of two that at most a fifth of the fields pass, up or down.
fn full(heatmap: &Heatmap) -> f64 {
    let mut factors: Vec<f64> = ratios(heatmap).map(|ratio| ratio.max(1.0 / ratio)).collect();
    factors.sort_by(f64::total_cmp);
    let most = factors.get(factors.len() * 4 / 5).copied().unwrap_or(2.0);
    2f64.powf(most.log2().ceil().max(1.0))
}

fn ratios(heatmap: &Heatmap) -> impl Iterator<Item = f64> {
    heatmap.panels.iter().flat_map(|panel| &panel.values).flatten().flatten().copied()
}

/// What the colours mean, with its title, at the right of the first line.
fn draw_scale(canvas: &mut Canvas, full: f64, is_any_below: bool) {
    let mut steps = vec![1.0 / full, 0.5, 1.0, 2.0, full];
    steps.dedup();
    steps.retain(|step| *step >= 1.0 || is_any_below);
    let left = WIDTH - RIGHT - STEP * steps.len() as f64;
    canvas.text(left - 6.0, ROW / 2.0 + 2.8, "end", SCALE);
    for (i, ratio) in steps.into_iter().enumerate() {
        let sign = if ratio == full {
            "≥ "
        } else if ratio == 1.0 / full {
            "≤ "
        } else {
            ""
        };
        let words = format!("{sign}{}", label(ratio, &[ratio]));
        field(canvas, [left + STEP * i as f64, 0.0, STEP], &colour(ratio, full), &words, "");
    }
}

fn field(canvas: &mut Canvas, [x, y, width]: [f64; 3], fill: &str, words: &str, title: &str) {
    canvas.rect([x + 0.4, y + 0.4, width - 0.8, ROW - 0.8], fill, title);
    canvas.text_on(fill, x + width / 2.0, y + ROW / 2.0 + 2.8, words);
}

/// Three digits, or two below one.
fn written(ratio: f64) -> String {
    let digits = match ratio {
        r if r < 9.995 => 2,
        r if r < 99.95 => 1,
        _ => 0,
    };
    format!("{ratio:.digits$}")
}

/// White at one, by the logarithm.
fn colour(ratio: f64, full: f64) -> String {
    let share = (ratio.ln() / full.ln()).clamp(-1.0, 1.0);
    mix("#ffffff", ENDS[usize::from(share < 0.0)], share.abs())
}

/// "16,384" for "16384"; words stay.
fn grouped(name: &str) -> String {
    name.parse().map_or(name.into(), |number: f64| label(number, &[number]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::answer::figure::Panel;

    fn heatmap(values: Vec<Option<f64>>) -> Heatmap {
        Heatmap {
            x_label: "length".into(),
            y_label: "d".into(),
            x: (0..values.len()).map(|i| (128usize << i).to_string()).collect(),
            y: vec!["16".into()],
            panels: vec![Panel { name: "forward".into(), values: vec![values] }],
        }
    }

    #[test]
    fn every_field_has_a_rectangle_and_its_number_and_a_missing_one_a_dash() {
        let drawn = svg(&heatmap(vec![Some(1.25), None, None, None]));
        // The scale from 1 to 2 and four fields.
        assert_eq!(drawn.matches("<rect").count(), 2 + 4, "{drawn}");
        for words in
            [">1.25</text>", ">–</text>", ">forward</text>", ">1,024</text>", ">length</text>", ">times as fast<"]
        {
            assert!(drawn.contains(words), "{words}: {drawn}");
        }
        assert!(drawn.contains("<title>d = 16, 128: 1.25</title>"));
    }

    #[test]
    fn the_scale_ends_where_nearly_all_fields_lie_inside() {
        assert_eq!(full(&heatmap(vec![Some(1.1), None])), 2.0);
        let mut ratios = vec![Some(5.0); 19];
        assert_eq!(full(&heatmap(ratios.clone())), 8.0);
        ratios.push(Some(40.0));
        assert_eq!(full(&heatmap(ratios.clone())), 8.0, "one of twenty");
        ratios.extend([Some(0.06); 8]);
        assert_eq!(full(&heatmap(ratios)), 32.0, "slower ones count too");
    }

    #[test]
    fn colours_lie_on_their_side_of_white() {
        assert_eq!(colour(1.0, 4.0), "#ffffff");
        assert_eq!(colour(4.0, 4.0), colour(40.0, 4.0));
        assert_ne!(colour(2.0, 4.0), colour(4.0, 4.0));
        let (faster, slower) = (colour(2.0, 4.0), colour(0.5, 4.0));
        assert!(faster[1..3] < faster[5..7] && slower[1..3] > slower[5..7], "{faster} {slower}");
        assert_eq!((written(0.5), written(12.34), written(123.4)), ("0.50".into(), "12.3".into(), "123".into()));
    }
}
