//! Variants of one computation, timed in interleaved turns, and the outcome of each.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::error::{Fault, fault_of};
use crate::harness::samples::{Samples, Work};
use crate::subject::{SubjectFault, words_of};

/// How one column of a case ended. Other columns of the case may end differently.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ColumnOutcome<T> {
    Measured {
        row: T,
    },
    OutOfMemory {
        requested_bytes: Option<u64>,
        message: String,
    },
    NotRun {
        reason: String,
    },
    /// It must not be timed: its results are wrong, or its inputs cannot be made.
    Failed {
        error: String,
    },
}

/// Seconds of each timed pass, by its name.
pub type Laps = BTreeMap<String, Vec<f64>>;

/// The number of rounds, and the passes of each column's turn in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Turns {
    pub rounds: usize,
    /// Untimed passes at the start of every turn. They restore memory and clocks after the previous turn.
    pub warmup: usize,
    /// Timed passes of every turn.
    pub iterations: usize,
}

impl Turns {
    pub fn validate(&self) -> Result<()> {
        let Self { rounds, warmup, iterations } = *self;
        for (key, value) in [("rounds", rounds), ("warmup", warmup), ("iterations", iterations)] {
            ensure!((1..=10_000).contains(&value), "{key} is {value}: it must lie in 1..10000");
        }
        Ok(())
    }
}

/// One column while it is measured: its turn function, and its laps so far.
pub struct Variant<'a> {
    turn: Box<dyn FnMut() -> Result<Laps> + 'a>,
    ended: ColumnOutcome<Laps>,
    /// Whether an error of a turn ends this variant alone.
    is_alone: bool,
}

impl<'a> Variant<'a> {
    pub fn new(turn: impl FnMut() -> Result<Laps> + 'a) -> Self {
        Self { turn: Box::new(turn), ended: ColumnOutcome::Measured { row: Laps::new() }, is_alone: false }
    }

    /// A variant whose preparation may have failed; then it takes no turns.
    pub fn prepared<T>(preparation: &'a ColumnOutcome<T>, mut turn: impl FnMut(&T) -> Result<Laps> + 'a) -> Self {
        match preparation {
            ColumnOutcome::Measured { row } => Self::new(move || turn(row)),
            ColumnOutcome::OutOfMemory { requested_bytes, message } => {
                Self::out(ColumnOutcome::OutOfMemory { requested_bytes: *requested_bytes, message: message.clone() })
            }
            ColumnOutcome::NotRun { reason } => Self::out(ColumnOutcome::NotRun { reason: reason.clone() }),
            ColumnOutcome::Failed { error } => Self::out(ColumnOutcome::Failed { error: error.clone() }),
        }
    }

    /// The same, but any error of a turn ends this variant and no other.
    pub fn alone(self) -> Self {
        Self { is_alone: true, ..self }
    }

    /// A variant that ended before its first turn.
    pub fn out(ended: ColumnOutcome<Laps>) -> Self {
        Self { ended, ..Self::new(|| Ok(Laps::new())) }
    }

    fn take_turn(&mut self) -> Result<()> {
        if self.ended.measured().is_some() {
            let result = (self.turn)();
            let turn = if self.is_alone { ColumnOutcome::of_any(result) } else { ColumnOutcome::of(result)? };
            self.ended.extend(turn);
        }
        Ok(())
    }

    /// The outcome of all turns.
    pub fn ended(self) -> ColumnOutcome<Laps> {
        self.ended
    }
}

/// Gives every variant a turn in every round, so that drift of the machine affects all alike. Every second round is
/// reversed, so that no variant always follows the same one.
///
/// A variant that runs out of memory takes no more turns. Any other error ends the case, but for [`Variant::alone`].
pub fn interleave<const N: usize>(turns: Turns, mut variants: [Variant; N]) -> Result<[ColumnOutcome<Laps>; N]> {
    take_turns(turns.rounds, &mut variants)?;
    Ok(variants.map(Variant::ended))
}

/// As [`interleave`], for a slice.
pub fn take_turns(rounds: usize, variants: &mut [Variant]) -> Result<()> {
    for round in 0..rounds {
        let mut variants: Vec<_> = variants.iter_mut().collect();
        if round % 2 == 1 {
            variants.reverse();
        }
        variants.into_iter().try_for_each(Variant::take_turn)?;
    }
    Ok(())
}

impl ColumnOutcome<Laps> {
    /// Adds more laps, or takes over their outcome if they failed.
    pub fn extend(&mut self, more: Self) {
        match (self, more) {
            (Self::Measured { row: laps }, Self::Measured { row }) => {
                row.into_iter().for_each(|(pass, seconds)| laps.entry(pass).or_default().extend(seconds));
            }
            (column @ Self::Measured { .. }, ended) => *column = ended,
            (_, _) => {}
        }
    }
}

impl<T> ColumnOutcome<T> {
    /// A fault of the device or of a subject becomes the column's outcome. Any other error stays an error.
    pub fn of(result: Result<T>) -> Result<Self> {
        match result {
            Ok(row) => Ok(Self::Measured { row }),
            Err(error) => match fault_of(&error) {
                Some(Fault::OutOfMemory { requested_bytes, message }) => {
                    Ok(Self::OutOfMemory { requested_bytes, message })
                }
                Some(Fault::NotAvailable { needs, has }) => {
                    Ok(Self::NotRun { reason: format!("needs {needs}, has {has}") })
                }
                None => match error.downcast_ref::<SubjectFault>() {
                    Some(_) => Ok(Self::Failed { error: words_of(&error) }),
                    None => Err(error),
                },
            },
        }
    }

    /// As [`Self::of`], where any other error fails the column, so that it does not cost the case the others.
    pub fn of_any(result: Result<T>) -> Self {
        match result {
            Ok(row) => Self::Measured { row },
            Err(error) => {
                let words = format!("{error:#}");
                Self::of(Err(error)).unwrap_or(Self::Failed { error: words })
            }
        }
    }

    /// The same outcome with another row.
    pub fn try_map<U>(self, change: impl FnOnce(T) -> Result<U>) -> Result<ColumnOutcome<U>> {
        Ok(match self {
            Self::Measured { row } => ColumnOutcome::Measured { row: change(row)? },
            Self::OutOfMemory { requested_bytes, message } => ColumnOutcome::OutOfMemory { requested_bytes, message },
            Self::NotRun { reason } => ColumnOutcome::NotRun { reason },
            Self::Failed { error } => ColumnOutcome::Failed { error },
        })
    }

    pub fn measured(&self) -> Option<&T> {
        match self {
            Self::Measured { row } => Some(row),
            _ => None,
        }
    }

    /// The outcome in a table, as in [`crate::harness::answer::CaseOutcome::label`].
    pub fn label(&self) -> &'static str {
        match self {
            Self::Measured { .. } => "measured",
            Self::OutOfMemory { .. } => "OOM",
            Self::NotRun { .. } => "not run",
            Self::Failed { .. } => "failed",
        }
    }
}

/// The samples of one pass out of a column's laps.
pub fn samples(laps: &Laps, pass: &str, work: Work) -> Result<Samples> {
    let seconds = laps.get(pass).with_context(|| format!("no turn timed the pass {pass:?}"))?;
    Samples::seconds(seconds.clone(), work).with_context(|| format!("the pass {pass:?}"))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use anyhow::bail;

    use super::*;

    const TURNS: Turns = Turns { rounds: 3, warmup: 1, iterations: 2 };

    fn laps(seconds: f64) -> Laps {
        [("forward".to_string(), vec![seconds])].into()
    }

    #[test]
    fn turns_alternate_and_their_laps_add_up() {
        let order = RefCell::new(String::new());
        let turn = |name: char| {
            order.borrow_mut().push(name);
            Ok(laps(order.borrow().len() as f64))
        };
        let [a, b] = interleave(TURNS, [Variant::new(|| turn('a')), Variant::new(|| turn('b'))]).unwrap();
        assert_eq!(order.into_inner(), "abbaab");
        assert_eq!(a.measured().unwrap()["forward"], [1.0, 4.0, 5.0]);
        assert_eq!(b.measured().unwrap()["forward"], [2.0, 3.0, 6.0]);
    }

    #[test]
    fn out_of_memory_ends_only_its_own_column() {
        let mut count = 0;
        let runs_out = || {
            count += 1;
            if count == 2 { bail!("CUDA out of memory. Tried to allocate 1.00 KiB. GPU 0") } else { Ok(laps(1.0)) }
        };
        let [a, b] = interleave(TURNS, [Variant::new(runs_out), Variant::new(|| Ok(laps(2.0)))]).unwrap();
        assert!(matches!(a, ColumnOutcome::OutOfMemory { requested_bytes: Some(1024), .. }), "{a:?}");
        assert_eq!((count, b.measured().unwrap()["forward"].len()), (2, 3));
        let missing = ColumnOutcome::<()>::NotRun { reason: "no compiler".into() };
        let [c] = interleave(TURNS, [Variant::prepared(&missing, |()| bail!("not asked"))]).unwrap();
        assert_eq!(c, ColumnOutcome::NotRun { reason: "no compiler".into() });
        assert!(interleave(TURNS, [Variant::new(|| bail!("a bug"))]).is_err());
    }

    #[test]
    fn an_error_of_a_variant_that_is_alone_ends_no_other() {
        let fails = Variant::new(|| bail!("late")).alone();
        let [a, b] = interleave(TURNS, [fails, Variant::new(|| Ok(laps(2.0))).alone()]).unwrap();
        assert_eq!(a, ColumnOutcome::Failed { error: "late".into() });
        assert_eq!(b.measured().unwrap()["forward"].len(), 3);
    }

    #[test]
    fn a_column_reads_back_with_its_kind() {
        for column in [
            ColumnOutcome::Measured { row: 3 },
            ColumnOutcome::OutOfMemory { requested_bytes: None, message: "full".into() },
            ColumnOutcome::NotRun { reason: "no".into() },
            ColumnOutcome::Failed { error: "wrong".into() },
        ] {
            let json = serde_json::to_value(&column).unwrap();
            assert_eq!(serde_json::from_value::<ColumnOutcome<i32>>(json).unwrap(), column);
        }
    }
}
