//! Measures declared cases into records: problems, their grids, the outcomes, and changes between records.
//!
//! This code names no tensor, device library or problem. The registry passes those in as function pointers.

pub mod answer;
pub mod case;
pub mod conditions;
pub mod device;
pub mod drift;
pub mod floor;
pub mod grade;
pub mod grade_files;
pub mod handout;
pub mod host_load;
pub mod manifest;
pub mod named_files;
pub mod partial;
pub mod peer;
pub mod plan;
pub mod problem;
pub mod provenance;
pub mod python;
pub mod record;
pub mod records_lock;
pub mod run;
pub mod samples;
pub mod schedule;
pub mod stats;
pub mod store;
pub mod subject;
pub mod suite;
pub mod target;
pub mod worker;
