//! `cs336 rank`: one rank of a launch; hidden, because the supervisor (or torchrun) calls it and people do not.

use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result};

use crate::collective::ranks::{Environment, die_with_supervisor};
use crate::collective::{Shared, gloo::Gloo};
use crate::problems::RANK_TASKS;

/// Runs `task` as the rank that the environment names: its input is the JSON file `input`, its result goes to `output`.
///
/// # Errors
/// An unknown task, a broken environment, and whatever the task or the process group fails with.
pub fn run(task: &str, input: &Path, output: &Path) -> Result<()> {
    die_with_supervisor()?;
    let known = || RANK_TASKS.iter().map(|task| task.name).collect::<Vec<_>>().join(", ");
    let task = RANK_TASKS
        .iter()
        .find(|known| known.name == task)
        .with_context(|| format!("no rank task {task:?}; there are: {}", known()))?;
    let bytes = std::fs::read(input).with_context(|| format!("reading {}", input.display()))?;
    let input = serde_json::from_slice(&bytes).with_context(|| format!("{} is not JSON", input.display()))?;
    let collective: Shared = Arc::new(Gloo::connect(&Environment::read()?)?);
    // Leaked unless all goes well: connections that close while this rank is still failing make its peers fail before
    // it has exited, and the supervisor would read their words instead of ours.
    let held = ManuallyDrop::new(collective.clone());
    let result = (task.run)(&collective, input)?;
    // Rank 0 holds the store that the others still talk to: nobody leaves before all are done.
    collective.barrier().context("waiting for the other ranks to be done")?;
    std::fs::write(output, serde_json::to_vec(&result)?).with_context(|| format!("writing {}", output.display()))?;
    drop(ManuallyDrop::into_inner(held));
    Ok(())
}
