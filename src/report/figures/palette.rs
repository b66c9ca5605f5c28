//! One palette for all figures: a role has one colour and one marker, and a tone is its lightness.

use super::canvas::{Canvas, edge, mix};
use crate::harness::answer::figure::{Plot, Role, Tone};

/// How one series is drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct Paint {
    pub colour: String,
    /// Of a line; series of equal colour differ in it.
    pub dash: &'static str,
    role: Role,
    /// The marker of every other series of a role is pale inside.
    hollow: bool,
}

/// The paints of a figure's series or spans, by name.
pub struct Palette(Vec<(String, Paint)>);

/// What a name says of its role where the answer does not. Of several words the first one in the name counts.
const NAMED: &[(Role, &[&str])] = &[
    (Role::Ours, &["ours", "our ", "rust", "tiled", "portable", "hopper"]),
    (Role::PyTorch, &["pytorch", "torch.compile", "python", "sdpa", "scaled_dot_product", "cudnn", "efficient"]),
    (Role::Plain, &["plain", "naive", "predicted", "parameters", "others"]),
    (Role::Optimizer, &["optimizer"]),
    (Role::Communication, &["communicat", "synchroni", "waiting", "reduce", "gather", "nccl"]),
    (Role::Other(0), &["gloo", "working"]),
];

/// Names that say what was computed and not by whom: ours, unless a word of [`NAMED`] is there too.
const OURS: &[&str] = &["forward", "backward", "step", "measured", "saved", "gradients"];
const SIZES: [&str; 5] = ["small", "medium", "large", "xl", "2.7B"];

const LIGHT: &[&str] = &["forward", "saved", "synchroni", "parameters", "working"];
const DARK: &[&str] = &["backward", "gradients"];

const DASHES: [&str; 4] = ["none", "4 2", "1.5 1.5", "6 2 1.5 2"];

impl Palette {
    /// In the order of the first appearance of each name.
    pub fn new<'a>(series: impl IntoIterator<Item = (&'a str, Option<(Role, Tone)>)>) -> Self {
        let mut named: Vec<(&str, Option<(Role, Tone)>)> = Vec::new();
        for (name, role) in series {
            if named.iter().all(|(other, _)| *other != name) {
                named.push((name, role));
            }
        }
        let roles = roles(&named);
        let mut paints: Vec<(String, Paint)> = Vec::new();
        for (at, ((name, _), (role, tone))) in named.iter().zip(&roles).enumerate() {
            let toneless = |among: &[(Role, Option<Tone>)]| {
                among.iter().filter(|(other, tone)| other == role && tone.is_none()).count()
            };
            let share = tone.map_or_else(|| ramp(toneless(&roles[..at]), toneless(&roles)), Tone::share);
            let colour = colour(*role, share);
            let same = paints.iter().filter(|(_, paint)| paint.colour == colour).count();
            let of_role = paints.iter().filter(|(_, paint)| paint.role == *role).count();
            let paint = Paint { colour, dash: DASHES[same % DASHES.len()], role: *role, hollow: of_role % 2 == 1 };
            paints.push((name.to_string(), paint));
        }
        Self(paints)
    }

    pub fn of<'a>(plots: impl IntoIterator<Item = &'a Plot>) -> Self {
        Self::new(plots.into_iter().flat_map(|plot| &plot.series).map(|series| (series.name.as_str(), series.role)))
    }

    /// The paint of a name that the palette was made for.
    pub fn paint(&self, name: &str) -> &Paint {
        &self.0[self.0.iter().position(|(other, _)| other == name).unwrap_or(0)].1
    }

    pub fn entries(&self) -> impl Iterator<Item = (&str, &Paint)> {
        self.0.iter().map(|(name, paint)| (name.as_str(), paint))
    }
}

impl Paint {
    /// The paint of a name alone, if it says whose work it is.
    pub fn of_owner(name: &str) -> Option<Self> {
        let role = first_role(name).filter(|role| matches!(role, Role::Ours | Role::PyTorch | Role::Plain))?;
        Some(Self { colour: colour(role, 0.5), dash: DASHES[0], role, hollow: false })
    }

    /// The role's shape, so that colour is never the only difference.
    pub fn marker(&self, canvas: &mut Canvas, x: f64, y: f64, title: &str) {
        let d = match self.role {
            Role::Ours => format!("M{:.1} {y:.1}a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0-5 0z", x - 2.5),
            Role::PyTorch => format!("M{:.1} {:.1}h4.6v4.6h-4.6z", x - 2.3, y - 2.3),
            Role::Plain => format!("M{x:.1} {:.1}l3 5.2h-6z", y - 3.4),
            Role::Optimizer => format!("M{x:.1} {:.1}l3.2 3.2l-3.2 3.2l-3.2-3.2z", y - 3.2),
            Role::Communication => format!("M{x:.1} {:.1}l3-5.2h-6z", y + 3.4),
            Role::Other(i) if i % 2 == 0 => format!("M{:.1} {:.1}l5 5m0-5l-5 5", x - 2.5, y - 2.5),
            Role::Other(_) => format!("M{:.1} {y:.1}h6m-3-3v6", x - 3.0),
        };
        let fill = if self.hollow { mix(&self.colour, "#ffffff", 0.8) } else { self.colour.clone() };
        canvas.path(&d, &format!(r#"fill="{fill}" stroke="{}" stroke-width="1""#, edge(&self.colour)), title);
    }
}

impl Tone {
    fn share(self) -> f64 {
        match self {
            Self::Light => 0.0,
            Self::Full => 0.5,
            Self::Dark => 1.0,
        }
    }
}

/// The tone of one of several series of a role: a single one is full, two are full and light, more go from light to dark.
fn ramp(at: usize, of: usize) -> f64 {
    match of {
        0..=2 => 0.5 - 0.5 * at as f64,
        _ => at as f64 / (of - 1) as f64,
    }
}

/// The role and the tone of each name, as the answer or the name itself says. What no word names is ours if it is alone.
fn roles(named: &[(&str, Option<(Role, Tone)>)]) -> Vec<(Role, Option<Tone>)> {
    let mut roles: Vec<(Role, Option<Tone>)> = Vec::new();
    for (name, role) in named {
        let others = roles.iter().filter(|(role, _)| matches!(role, Role::Other(_))).count();
        let unnamed = if named.len() == 1 { Role::Ours } else { Role::Other(others) };
        roles.push(match role {
            Some((role, tone)) => (*role, Some(*tone)),
            None => (role_of(name).unwrap_or(unnamed), tone_of(name)),
        });
    }
    roles
}

fn role_of(name: &str) -> Option<Role> {
    let ours = OURS.iter().any(|word| name.to_lowercase().contains(word)) || SIZES.contains(&name);
    first_role(name).or(ours.then_some(Role::Ours))
}

fn first_role(name: &str) -> Option<Role> {
    let name = name.to_lowercase();
    let places = NAMED.iter().flat_map(|(role, words)| words.iter().map(move |word| (role, word)));
    let found = places.filter_map(|(role, word)| Some((name.find(word)?, *role)));
    found.min_by_key(|(at, _)| *at).map(|(_, role)| role)
}

fn tone_of(name: &str) -> Option<Tone> {
    let is = |words: &[&str]| words.iter().any(|word| name.to_lowercase().contains(word));
    match (is(LIGHT), is(DARK)) {
        (true, false) => Some(Tone::Light),
        (false, true) => Some(Tone::Dark),
        _ => None,
    }
}

/// Okabe and Ito's hues, which colour-blind readers tell apart, each light, full and dark.
fn tones(role: Role) -> [&'static str; 3] {
    match role {
        Role::Ours => ["#8ccaf0", "#0072b2", "#005a8e"],
        Role::PyTorch => ["#f7c96b", "#e69f00", "#b35900"],
        Role::Plain => ["#bdbdbd", "#8c8c8c", "#666666"],
        Role::Optimizer => ["#66c4a6", "#009e73", "#007353"],
        Role::Communication => ["#e5bfd6", "#cc79a7", "#a3547f"],
        Role::Other(i) => OTHERS[i % OTHERS.len()],
    }
}

const OTHERS: [[&str; 3]; 4] = [
    ["#ef9b66", "#d55e00", "#a84a00"],
    ["#f0e442", "#c9bd1f", "#8f8600"],
    ["#a58ad6", "#643db8", "#5f3ab1"],
    ["#d9c4ad", "#c2a383", "#8c6d4f"],
];

fn colour(role: Role, share: f64) -> String {
    let [light, full, dark] = tones(role);
    if share < 0.5 { mix(light, full, 2.0 * share) } else { mix(full, dark, 2.0 * share - 1.0) }
}
