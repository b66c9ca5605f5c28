//! Cases of kind `attention`.

use anyhow::{Result, bail};

use super::{CaseFile, Comparison};

pub fn run(_: &CaseFile) -> Result<Vec<Comparison>> {
    bail!("cases of kind \"attention\" are not implemented in this build")
}
