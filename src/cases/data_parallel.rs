//! Cases of kind `data_parallel`.

use anyhow::{Result, bail};

use super::{CaseFile, Comparison};

pub fn run(_: &CaseFile) -> Result<Vec<Comparison>> {
    bail!("cases of kind \"data_parallel\" are not implemented in this build")
}
