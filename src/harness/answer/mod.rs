//! Answers: what a problem concludes from records, as plain data that the report prints.
//!
//! An answer holds four things: values that sentences quote, claims that sentences make, tables and figures. It is a pure
//! function of the records; `templates/<problem>.md` puts it into words.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;
use serde_json::Value;

pub mod claim;
pub mod comparison;
pub mod figure;
pub mod format;
pub mod machines;
#[cfg(test)]
pub mod made_up;
pub mod mark;
pub mod quantity;
pub mod records;
pub mod table;
pub mod turns;

pub use claim::{Claim, Operand};
pub use comparison::{SameMachine, SameRun};
pub use figure::{Drawing, Figure};
pub use format::Style;
pub use quantity::{Quantity, Range, Unit};
pub use records::{Case, CaseId, CaseOutcome, RecordSet, Records};
pub use table::{Cell, Column, Emphasis, Table, TableBuilder};
pub use turns::{Paired, Turns};

/// The readers for whom the report is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Audience {
    /// Readers of this repository's own implementation.
    Ours,
}

/// What a problem concludes from its records.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    quoted: Value,
    claims: BTreeMap<String, Claim>,
    tables: BTreeMap<String, Table>,
    /// The ids of the tables in the order in which they were added.
    table_order: Vec<String>,
    figures: BTreeMap<String, Figure>,
    /// The ids of the figures in the order in which they were added.
    figure_order: Vec<String>,
    /// Whether nothing has a time of what the answer is about, so that no part counts as answered.
    pub is_untimed: bool,
}

impl Answer {
    /// An answer whose template sees the fields of `quoted` as `answer.<field>`.
    ///
    /// Errors: `quoted` is not an object, or holds a number that is not finite.
    pub fn new(quoted: &impl Serialize) -> Result<Self> {
        let quoted = serde_json::to_value(quoted).context("an answer's quoted values do not serialise")?;
        ensure!(quoted.is_object(), "an answer's quoted values must be a struct, so that each one has a name");
        Ok(Self { quoted, ..Self::default() })
    }

    /// [`Self::new`] from records: the template also sees `answer.gpu`, `answer.machine` and `answer.source`, the records'
    /// machines with their runs.
    ///
    /// Errors: as of [`Self::new`]; the records name no run.
    pub fn of(set: &RecordSet, quoted: &impl Serialize) -> Result<Self> {
        let mut answer = Self::new(quoted)?;
        answer.quoted["gpu"] = set.is_gpu().into();
        answer.quoted["machine"] = set.machine()?.into();
        answer.quoted["source"] = set.source().into();
        Ok(answer)
    }

    /// Adds a claim; the template asks for it by its id.
    pub fn claim(&mut self, claim: Claim) -> Result<()> {
        let id = claim.id.clone();
        ensure!(self.claims.insert(id.clone(), claim).is_none(), "there are two claims {id:?}; give each its own id");
        Ok(())
    }

    /// Adds a table. The template prints it with `table("<id>")`, or all with a common prefix with `tables("<prefix>")`.
    ///
    /// Errors: another table of this id; a row with more or fewer cells than there are columns.
    pub fn table(&mut self, id: impl Into<String>, table: impl Into<Table>) -> Result<()> {
        let (id, table) = (id.into(), table.into());
        table.validate().with_context(|| format!("table {id:?}"))?;
        ensure!(self.tables.insert(id.clone(), table).is_none(), "there are two tables {id:?}; give each its own id");
        self.table_order.push(id);
        Ok(())
    }

    /// Adds a figure; the template prints it with `figure("<id>")`, or all that begin alike with `figures("<prefix>")`. Its
    /// file is `<problem>-<id>.svg`.
    ///
    /// Errors: another figure of this id, an id that is no file name, a drawing without data.
    pub fn figure(&mut self, id: impl Into<String>, figure: Figure) -> Result<()> {
        let id = id.into();
        let fine = !id.is_empty() && id.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
        ensure!(fine, "figure id {id:?} is not a file name: use letters, digits, - and _");
        figure.validate().with_context(|| format!("figure {id:?}"))?;
        ensure!(
            self.figures.insert(id.clone(), figure).is_none(),
            "there are two figures {id:?}; give each its own id"
        );
        self.figure_order.push(id);
        Ok(())
    }

    /// What the template sees as `answer`.
    pub fn quoted(&self) -> &Value {
        &self.quoted
    }

    pub fn claims(&self) -> &BTreeMap<String, Claim> {
        &self.claims
    }

    pub fn tables(&self) -> &BTreeMap<String, Table> {
        &self.tables
    }

    /// The ids that begin with `prefix`, in the order in which their tables were added.
    pub fn tables_of(&self, prefix: &str) -> Vec<String> {
        self.table_order.iter().filter(|id| id.starts_with(prefix)).cloned().collect()
    }

    /// The ids that begin with `prefix`, in the order in which their figures were added.
    pub fn figures_of(&self, prefix: &str) -> Vec<String> {
        self.figure_order.iter().filter(|id| id.starts_with(prefix)).cloned().collect()
    }

    pub fn figures(&self) -> &BTreeMap<String, Figure> {
        &self.figures
    }

    /// Whether the claim with this id holds; `None` if there is no such claim.
    pub fn holds(&self, id: &str) -> Option<bool> {
        self.claims.get(id).map(|claim| claim.held)
    }
}

/// How a problem answers: `answer(records, audience)`.
pub type AnswerFn = fn(&Records, Audience) -> Result<Answer>;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::made_up::MadeUp;
    use super::*;

    #[test]
    fn a_template_sees_what_is_quoted_and_the_machine_of_the_records() {
        let records = MadeUp::gpu("x").failed("a", &json!({})).records();
        let answer = Answer::of(records.main().unwrap(), &json!({"n": 1})).unwrap();
        let run = "NVIDIA H200, run 20260101T000000Z-gpu0";
        assert_eq!(*answer.quoted(), json!({"n": 1, "gpu": true, "machine": "NVIDIA H200", "source": run}));
    }
}
