//! A problem as the harness sees it: a name, checks, a measuring routine and an answer, all as plain data.

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;

use super::answer::AnswerFn;
use super::record::{Machine, Profile, check_ranks};
use super::subject::Subject;
use crate::json;

/// One registry entry. `suites/tidy.rs` tests the rules for all entries.
pub struct Problem {
    /// The handout's name; also the name of the module, suite, template and record.
    pub name: &'static str,
    /// The parts that the template answers: the handout's letters "a", "b", or "" for a problem without letters.
    pub answers: &'static [&'static str],
    /// Correctness checks; run under `cargo test`, under `cs336 grade`, and before `cs336 measure`.
    pub checks: &'static [Check],
    /// The measuring routine, for problems that have one.
    pub measured: Option<Measured>,
    /// What the problem concludes from its records.
    pub answer: AnswerFn,
    /// The other problems whose records the answer reads.
    pub reads: &'static [&'static str],
}

/// One correctness check of one part of a problem.
pub struct Check {
    pub name: &'static str,
    pub part: &'static str,
    pub run: fn() -> Result<Verdict>,
}

/// How a check ended without a failure. A failure is an `Err`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// `note` holds a result, such as the largest error and its tolerance.
    Passed { note: String },
    /// The check could not run here; the reason says why.
    Skipped { reason: String },
}

impl Verdict {
    pub fn passed(note: impl Into<String>) -> Result<Self> {
        Ok(Self::Passed { note: note.into() })
    }

    pub fn skipped(reason: impl Into<String>) -> Result<Self> {
        Ok(Self::Skipped { reason: reason.into() })
    }
}

/// A typed measuring routine; `Measured::of::<M>()` erases the types for the registry.
pub trait Measure {
    /// One case of the suite's grid; derive `Deserialize` with `deny_unknown_fields`, and use enums for closed sets.
    type Params: Serialize + DeserializeOwned;
    /// What one case gives: `Samples` for what is noisy, a number `seconds` or `.._s` for what was timed once, other plain values
    /// for what must repeat exactly.
    type Row: Serialize + DeserializeOwned;
    /// Bump it when the meaning of a measured value changes, or a rule of [`Self::validate_row`] or [`Self::validate_on`] that earlier rows
    /// do not keep. Records of an older revision are stale; others that break a rule are not read.
    const REVISION: u32;
    /// File names under `kernels/` whose change makes a record stale.
    const KERNELS: &'static [&'static str] = &[];
    /// Whether its cases run these kernels in the emulator on a CPU. Those of other problems run none there.
    const IS_EMULATED: bool = false;

    /// The kernels of [`Self::KERNELS`] that a case runs.
    fn kernels(_params: &Self::Params) -> &'static [&'static str] {
        Self::KERNELS
    }

    /// Default values that depend on the device. serde fills in the other defaults.
    fn defaults(_profile: Profile) -> Vec<(&'static str, Value)> {
        Vec::new()
    }

    /// Rejects invalid combinations of parameters. The message names the key.
    fn validate(_params: &Self::Params) -> Result<()> {
        Ok(())
    }

    /// Rejects a row that contradicts itself or its parameters. The message names the value.
    fn validate_row(_params: &Self::Params, _row: &Self::Row) -> Result<()> {
        Ok(())
    }

    /// Rejects a row that the machine cannot have given. That no timing is below its floor is checked of every row.
    fn validate_on(_params: &Self::Params, _row: &Self::Row, _machine: &Machine) -> Result<()> {
        Ok(())
    }

    /// Peak bytes that the case is predicted to need on the profile's device, where a formula exists.
    fn predicted_bytes(_params: &Self::Params, _profile: Profile) -> Option<u64> {
        None
    }

    /// Whether the case must be the first in its process because it measures start-up costs. Other cases share a process.
    fn fresh_process(_params: &Self::Params) -> bool {
        false
    }

    /// As [`Self::measure`], for a subject's functions beside ours.
    fn measure_subject(_params: &Self::Params, _profile: Profile, _subject: &Subject) -> Result<Self::Row> {
        bail!("it measures no subject")
    }

    /// Measures one case in this process. An out-of-memory or a missing device is an `Err` holding an
    /// [`crate::error::Fault`]; the harness turns it into a typed outcome.
    fn measure(params: &Self::Params, profile: Profile) -> Result<Self::Row>;
}

/// A [`Measure`] with its types erased to JSON.
pub struct Measured {
    pub revision: u32,
    pub kernels: &'static [&'static str],
    pub is_emulated: bool,
    pub kernels_of: fn(&Value) -> Vec<&'static str>,
    /// Parses and validates one case of a profile, and returns its canonical form with every default filled in.
    pub parse: fn(&Value, Profile) -> Result<Value>,
    /// Checks that the stored row of a case still has the shape that the template expects, and is possible.
    pub check_row: fn(&Value, &Value, &Machine) -> Result<()>,
    /// As `check_row`, of a row and parameters that have the fields of their types; others pass, since they are stale.
    pub require_possible: fn(&Value, &Value, &Machine) -> Result<()>,
    pub predicted_bytes: fn(&Value, Profile) -> Option<u64>,
    pub fresh_process: fn(&Value) -> bool,
    pub measure: fn(&Value, Profile, Option<&Subject>) -> Result<Value>,
}

impl Measured {
    pub const fn of<M: Measure>() -> Self {
        Self {
            revision: M::REVISION,
            kernels: M::KERNELS,
            is_emulated: M::IS_EMULATED,
            kernels_of: kernels_of::<M>,
            parse: parse::<M>,
            check_row: check_row::<M>,
            require_possible: require_possible::<M>,
            predicted_bytes: predicted_bytes::<M>,
            fresh_process: fresh_process::<M>,
            measure: measure::<M>,
        }
    }
}

/// For a case that cannot be parsed, all kernels: a change of any makes it stale.
fn kernels_of<M: Measure>(params: &Value) -> Vec<&'static str> {
    M::Params::deserialize(params).map_or(M::KERNELS, |params| M::kernels(&params)).to_vec()
}

fn parse<M: Measure>(params: &Value, profile: Profile) -> Result<Value> {
    let mut params = params.clone();
    if let Value::Object(fields) = &mut params {
        for (key, value) in M::defaults(profile) {
            fields.entry(key).or_insert(value);
        }
    }
    let typed: M::Params = json::from_value(&params)?;
    M::validate(&typed)?;
    Ok(serde_json::to_value(typed)?)
}

fn check_row<M: Measure>(params: &Value, row: &Value, machine: &Machine) -> Result<()> {
    let _: M::Row = json::from_value(row).context("the row does not have the fields of this problem's Row type")?;
    M::Params::deserialize(params)?;
    require_possible::<M>(params, row, machine)
}

fn require_possible<M: Measure>(params: &Value, row: &Value, machine: &Machine) -> Result<()> {
    let (Ok(typed), Ok(of_type)) = (M::Params::deserialize(params), json::from_value::<M::Row>(row)) else {
        return Ok(());
    };
    // First, since the rules reckon with what a case can be.
    M::validate(&typed).context("no suite can have this case")?;
    check_ranks(params, row, machine)?;
    M::validate_row(&typed, &of_type)?;
    M::validate_on(&typed, &of_type, machine)
}

fn predicted_bytes<M: Measure>(params: &Value, profile: Profile) -> Option<u64> {
    M::predicted_bytes(&M::Params::deserialize(params).ok()?, profile)
}

fn fresh_process<M: Measure>(params: &Value) -> bool {
    M::Params::deserialize(params).is_ok_and(|params| M::fresh_process(&params))
}

fn measure<M: Measure>(params: &Value, profile: Profile, subject: Option<&Subject>) -> Result<Value> {
    let params = M::Params::deserialize(params)?;
    let row = match subject {
        Some(subject) => M::measure_subject(&params, profile, subject)?,
        None => M::measure(&params, profile)?,
    };
    let row = serde_json::to_value(row)?;
    let _: M::Row =
        json::from_value(&row).context("no record can hold these results, of which NaN and infinity are null")?;
    Ok(row)
}
