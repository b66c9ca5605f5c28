//! A declarative test-and-report harness for Stanford CS336 Assignment 2; the modules stand in the order to read them.

pub mod error;
pub mod root;
pub mod units;

pub mod torch;

pub mod cuda;

pub mod attention;
pub mod model;

pub mod collective;
pub mod parallel;

pub mod harness;
pub mod report;

pub mod problems;

pub mod cases;

pub mod cli;
