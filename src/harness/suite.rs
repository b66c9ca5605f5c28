//! Suites: axes declared in TOML, expanded to cases. The problem's own types validate each case.
//!
//! ```toml
//! [cpu.sweep]                      # profile, then the grid's name
//! size = ["tiny", "small"]         # an array is an axis
//! context_length = [64, 128]       # the last axis varies fastest
//! steps = 10                       # a scalar is fixed
//! ```

use std::collections::{BTreeSet, HashSet};
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Map, Value};

use super::manifest::restoring;
use super::problem::Problem;
use super::record::Profile;
use super::store::sha256;
use crate::json::refusal;
use crate::printable::one_line;
use crate::root::read_text;

/// More cases are probably a mistake in the file.
pub const MAX_CASES: usize = 10_000;
/// A suite file larger than this is not read.
const MAX_FILE_BYTES: usize = 1 << 20;

/// All grids of one problem.
#[derive(Debug, Clone, PartialEq)]
pub struct Suite {
    /// SHA-256 of the file's text.
    pub hash: String,
    pub grids: Vec<Grid>,
}

/// One grid, its cases in order.
#[derive(Debug, Clone, PartialEq)]
pub struct Grid {
    pub profile: Profile,
    pub name: String,
    /// Canonical parameters: what the problem's `Params` serialises to.
    pub cases: Vec<Value>,
}

impl Suite {
    /// The cases of one profile with their grid's name, in order.
    pub fn cases(&self, profile: Profile) -> impl Iterator<Item = (&str, &Value)> {
        let grids = self.grids.iter().filter(move |g| g.profile == profile);
        grids.flat_map(|g| g.cases.iter().map(|case| (g.name.as_str(), case)))
    }
}

/// Reads `suites/<problem>.toml` under `root`; `None` for a problem without measurements.
pub fn load(root: &Path, problem: &Problem) -> Result<Option<Suite>> {
    let Some(measured) = &problem.measured else { return Ok(None) };
    let path = root.join("suites").join(format!("{}.toml", problem.name));
    let origin = format!("suites/{}.toml", problem.name);
    let text = read_text(&path).with_context(|| {
        let (name, restored) = (problem.name, restoring(root, &origin));
        format!("{origin} cannot be read: it declares what {name} measures; restore it: {restored}")
    })?;
    parse(&text, &origin, &measured.parse).map(Some)
}

/// Makes one case of a profile canonical.
type ParseCase<'a> = &'a dyn Fn(&Value, Profile) -> Result<Value>;

/// Parses a suite's text; `origin` is what messages call the file.
pub fn parse(text: &str, origin: &str, parse_case: ParseCase<'_>) -> Result<Suite> {
    ensure!(
        text.len() <= MAX_FILE_BYTES,
        "{origin} is {} bytes long; a suite has at most {MAX_FILE_BYTES}",
        text.len()
    );
    let document: toml::Table = toml::from_str(text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        let line = 1 + before.matches('\n').count();
        refusal(error.message()).context(format!("{origin}, line {line}: not valid TOML; correct or restore it"))
    })?;
    let mut grids: Vec<Grid> = Vec::new();
    for (profile_name, tables) in &document {
        let profile = Profile::ALL.into_iter().find(|p| p.name() == profile_name);
        let profile = profile.with_context(|| {
            format!(
                "{origin} has the unknown profile {profile_name:?}; a suite holds [cpu.<grid>] and [gpu.<grid>] tables"
            )
        })?;
        let toml::Value::Table(tables) = tables else {
            bail!("{origin}: {profile_name} must hold grids, as in [{profile_name}.sweep]")
        };
        for (grid_name, axes) in tables {
            ensure!(
                *grid_name == one_line(grid_name) && !grid_name.trim().is_empty(),
                "{origin} calls a grid {grid_name:?}, which is not one printable line; rename it"
            );
            let place = format!("{origin} [{profile_name}.{grid_name}]");
            let toml::Value::Table(axes) = axes else {
                bail!(
                    "{origin}: {profile_name}.{grid_name} is not a table; write the key under a grid, as in [{profile_name}.sweep]"
                )
            };
            let before: usize = grids.iter().map(|grid| grid.cases.len()).sum();
            let cases = expand(axes, &place, MAX_CASES - before, &|case| parse_case(case, profile))?;
            grids.push(Grid { profile, name: grid_name.clone(), cases });
        }
    }
    ensure!(!grids.is_empty(), "{origin} declares no grid; add a [cpu.<grid>] or [gpu.<grid>] table");
    refuse_duplicates(&grids, origin)?;
    Ok(Suite { hash: sha256(text.as_bytes()), grids })
}

/// The product of a grid's axes, the last one varying fastest.
///
/// Errors: it has more than `most` cases.
fn expand(
    axes: &toml::Table,
    place: &str,
    most: usize,
    parse_case: &dyn Fn(&Value) -> Result<Value>,
) -> Result<Vec<Value>> {
    let axes: Vec<(&str, Vec<Value>)> = axes
        .iter()
        .map(|(key, value)| Ok((key.as_str(), axis_values(value).with_context(|| format!("{place}, key {key:?}"))?)))
        .collect::<Result<_>>()?;
    let count = axes.iter().try_fold(1usize, |n, (_, values)| n.checked_mul(values.len()));
    let count = count.filter(|n| *n <= most);
    let count =
        count.with_context(|| format!("{place} makes more than {MAX_CASES} cases of the file; shorten an axis"))?;
    (0..count)
        .map(|index| {
            let case = case_at(&axes, index);
            parse_case(&case).with_context(|| format!("{place}, case {case}"))
        })
        .collect()
}

fn case_at(axes: &[(&str, Vec<Value>)], mut index: usize) -> Value {
    let mut fields: Vec<(String, Value)> = Vec::with_capacity(axes.len());
    for (key, values) in axes.iter().rev() {
        fields.push((key.to_string(), values[index % values.len()].clone()));
        index /= values.len();
    }
    Value::Object(fields.into_iter().rev().collect::<Map<_, _>>())
}

fn axis_values(value: &toml::Value) -> Result<Vec<Value>> {
    let toml::Value::Array(items) = value else { return Ok(vec![scalar(value)?]) };
    ensure!(!items.is_empty(), "an axis needs at least one value, this one is empty");
    let values: Vec<Value> = items.iter().map(scalar).collect::<Result<_>>()?;
    let mut seen = HashSet::new();
    for value in &values {
        ensure!(seen.insert(value), "the value {value} occurs twice on this axis");
    }
    Ok(values)
}

fn scalar(value: &toml::Value) -> Result<Value> {
    Ok(match value {
        toml::Value::String(s) => Value::from(s.as_str()),
        toml::Value::Integer(i) => Value::from(*i),
        toml::Value::Boolean(b) => Value::from(*b),
        toml::Value::Float(x) => {
            ensure!(x.is_finite(), "{x} is not a parameter; use a finite number");
            Value::from(*x)
        }
        other => {
            bail!("a {} cannot be a parameter; use a string, number, boolean, or an array of those", other.type_str())
        }
    })
}

/// Two cases of a profile with equal parameters would overwrite each other's record.
fn refuse_duplicates(grids: &[Grid], origin: &str) -> Result<()> {
    let mut seen = std::collections::HashMap::new();
    for grid in grids {
        for case in &grid.cases {
            if let Some(other) = seen.insert((grid.profile, case.to_string()), &grid.name) {
                bail!("{origin}: the {} grids {other:?} and {:?} both hold the case {case}", grid.profile, grid.name);
            }
        }
    }
    Ok(())
}

/// One case for `measure --set key=value`: the suite's first case of the profile, with these keys of any case replaced.
pub fn override_case(suite: &Suite, profile: Profile, settings: &[String], problem: &Problem) -> Result<Value> {
    let first = suite.cases(profile).next().map(|(_, case)| case.clone());
    let mut case =
        first.with_context(|| format!("suites/{}.toml has no {profile} grid to start from", problem.name))?;
    let objects =
        Profile::ALL.into_iter().flat_map(|profile| suite.cases(profile)).filter_map(|(_, case)| case.as_object());
    let known: BTreeSet<&str> = objects.flat_map(|case| case.keys().map(String::as_str)).collect();
    for setting in settings {
        let (key, text) = setting
            .split_once('=')
            .with_context(|| format!("--set {setting:?} lacks a value: write key=value, as in attention=flash"))?;
        let fields = case.as_object_mut().context("a case is an object")?;
        let names = || Vec::from_iter(known.iter().copied()).join(", ");
        ensure!(known.contains(key), "{} has no parameter {key:?}; it has {}", problem.name, names());
        let value = serde_json::from_str(text).unwrap_or_else(|_| Value::from(text));
        fields.insert(key.to_string(), value);
    }
    let measured = problem.measured.as_ref().context("the problem measures nothing")?;
    (measured.parse)(&case, profile)
        .with_context(|| format!("{} cannot measure the case {case}; change the --set options", problem.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn any(case: &Value, _profile: Profile) -> Result<Value> {
        Ok(case.clone())
    }

    #[test]
    fn the_last_axis_varies_fastest_and_scalars_are_fixed() {
        let suite = parse("[cpu.sweep]\nsize = [\"a\", \"b\"]\nn = [1, 2]\nsteps = 3\n", "x.toml", &any).unwrap();
        let cases: Vec<_> = suite.cases(Profile::Cpu).map(|(_, c)| c.clone()).collect();
        let case = |s: &str, n: i64| json!({"size": s, "n": n, "steps": 3});
        assert_eq!(cases, [case("a", 1), case("a", 2), case("b", 1), case("b", 2)]);
        assert_eq!(suite.cases(Profile::Gpu).count(), 0);
    }

    fn refused(text: &str) -> String {
        format!("{:#}", parse(text, "x.toml", &any).unwrap_err())
    }

    #[test]
    fn every_mistake_names_its_place() {
        for (text, expected) in [
            ("", "declares no grid"),
            ("[tpu.a]\nn = 1", "unknown profile \"tpu\""),
            ("cpu = 3", "must hold grids"),
            ("[cpu]\nn = 1", "cpu.n is not a table"),
            ("[cpu.a]\nn = []", "key \"n\": an axis needs at least one value"),
            ("[cpu.a]\nn = [1, 1]", "occurs twice on this axis"),
            ("[cpu.a]\nn = nan", "use a finite number"),
            ("[cpu.a]\nn = [[1]]", "array cannot be a parameter"),
            ("[cpu.a]\nn = 2020-01-01", "datetime cannot be a parameter"),
            ("[cpu.a]\nn = [1, 2]\n[cpu.b]\nn = [2, 3]", "both hold the case"),
            ("[cpu.a]\nn = 1\n[cpu.a]\nn = 2", "not valid TOML"),
            ("[cpu.a]\nn = \n", "line 2: not valid TOML"),
            ("[cpu.\"\"]\nn = 1", r#"calls a grid "", which is not one printable line"#),
            ("[cpu.\"a\\npassed\"]\nn = 1", r#"calls a grid "a\npassed", which is not one printable line"#),
        ] {
            let message = refused(text);
            assert!(message.contains(expected) && message.contains("x.toml"), "{text:?} gave {message}");
        }
    }

    #[test]
    fn a_huge_grid_is_refused_before_it_is_built() {
        let values = |n: u32| (0..n).map(|i| i.to_string()).collect::<Vec<_>>().join(",");
        let axis = |k: &str| format!("{k} = [{}]\n", values(1000));
        let text = format!("[gpu.a]\n{}", ["a", "b", "c", "d", "e", "f", "g"].map(axis).concat());
        assert!(refused(&text).contains("more than 10000 cases"));
        // Comparing each value with each takes minutes.
        assert!(refused(&format!("[gpu.a]\na = [{}]", values(100_000))).contains("more than 10000 cases"));
        let grids: Vec<String> = (0..11).map(|grid| format!("[cpu.g{grid}]\n{}", axis(&format!("n{grid}")))).collect();
        assert!(refused(&grids.concat()).contains("[cpu.g10] makes more than 10000 cases of the file"));
    }

    proptest::proptest! {
        #[test]
        fn a_grid_is_the_product_of_its_axes(lengths in proptest::collection::vec(1usize..6, 1..5)) {
            let axis = |(i, n): (usize, &usize)| format!("k{i} = {:?}\n", (0..*n).collect::<Vec<_>>());
            let text = format!("[cpu.a]\n{}", lengths.iter().enumerate().map(axis).collect::<String>());
            let suite = parse(&text, "x.toml", &any).unwrap();
            let cases: Vec<_> = suite.cases(Profile::Cpu).map(|(_, c)| c.to_string()).collect();
            proptest::prop_assert_eq!(cases.len(), lengths.iter().product::<usize>());
            let distinct: std::collections::BTreeSet<_> = cases.iter().collect();
            proptest::prop_assert_eq!(distinct.len(), cases.len());
        }

        #[test]
        fn no_text_panics_and_a_refusal_names_the_file(text in "[\\[\\]cpugs.a=0-9\\\"\n ,{}]*") {
            if let Err(error) = parse(&text, "x.toml", &any) {
                let message = format!("{:#}", error);
                proptest::prop_assert!(message.contains("x.toml"));
            }
        }
    }
}
