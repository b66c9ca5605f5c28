//! `cs336 nsys`: one step of the problem nsys_profile with NVTX ranges, for NVIDIA's nsys to profile.

use anyhow::{Context as _, Result};

use super::Ended;
use crate::bench::device::device_for;
use crate::harness::record::Profile;
use crate::harness::store::Layout;
use crate::harness::suite;
use crate::problems::nsys_profile::PROBLEM;
use crate::problems::nsys_profile::step::step_with_nvtx;

#[derive(clap::Args)]
#[command(after_help = "Start it under nsys: nsys profile --trace=cuda,nvtx -o step cs336 nsys")]
pub struct Arguments {
    /// Replace a key of the gpu grid's first case (repeatable)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
}

/// Errors: a setting that the case does not have, or a machine without a GPU.
pub fn run(layout: &Layout, arguments: &Arguments) -> Result<Ended> {
    let suite = suite::load(&layout.root, &PROBLEM)?.context("nsys_profile has no suite")?;
    let case = suite::override_case(&suite, Profile::Gpu, &arguments.settings, &PROBLEM)?;
    let device = device_for(Profile::Gpu)?;
    eprintln!("running {case}; its NVTX ranges are warm-up, then inference, forward, backward and optimizer");
    step_with_nvtx(&serde_json::from_value(case)?, device)?;
    Ok(Ended::Well)
}
