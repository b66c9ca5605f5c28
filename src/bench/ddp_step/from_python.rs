//! Steps of a Python process on each rank, in turns with ours: the wheel's data parallelism, PyTorch's, and none.

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Params;
use super::beside::most_off;
use crate::bench::all_reduce::RankTimes;
use crate::bench::interleave::{ColumnOutcome, Laps};
use crate::bench::peer::{DEADLINE, Installed, Reply, TorchPeer};

/// The columns of `suites/peers/ddp.py`.
const SINGLE: &str = "single";
const PYTORCH: [&str; 2] = ["pytorch", "pytorch_sharded"];
const WHEEL: [&str; 2] = ["wheel", "wheel_sharded"];

/// Every column trains a new model in every turn, from the same values on the same tokens.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FromPython {
    /// Without communication.
    pub single: RankTimes,
    /// DistributedDataParallel whose buckets the gradients are views of, and ZeroRedundancyOptimizer.
    pub pytorch: Library,
    /// `cs336.DistributedDataParallel`, whose gradients are views of its buckets, and `cs336.ShardedOptimizer`.
    pub wheel: ColumnOutcome<Library>,
    /// The largest distance of a column's parameters after a turn from those under PyTorch's DDP, as a share of the way that
    /// these went; two digits.
    pub off: f64,
}

/// The data parallelism of one library.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Library {
    pub version: String,
    /// All-reduces of buckets within the backward pass, and an optimizer on every rank.
    pub buckets: RankTimes,
    /// The same with an optimizer whose state is shared between the ranks.
    pub sharded: RankTimes,
}

/// What one rank measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Output {
    pytorch_version: String,
    /// The wheel's version, or why there is none.
    wheel: ColumnOutcome<String>,
    seconds: Laps,
    off: f64,
}

impl Output {
    /// Before the first turn; `opened` is the peer's reply when it was asked for the wheel.
    pub fn of(peer: &TorchPeer, opened: Value) -> Result<Self> {
        let wheel = match serde_json::from_value(opened).context("the peer's reply about the wheel")? {
            Reply::Accepted(Installed { version }) => ColumnOutcome::Measured { row: version },
            Reply::Refused(reason) => ColumnOutcome::NotRun { reason },
        };
        Ok(Self { pytorch_version: peer.software.torch.clone(), wheel, seconds: Laps::new(), off: 0.0 })
    }

    /// A turn of each column; every second round goes the other way.
    pub fn round(&mut self, peer: &mut TorchPeer, params: &Params, round: usize) -> Result<()> {
        let wheel = self.wheel.measured().map_or(&[][..], |_| &WHEEL);
        let mut columns = [&[SINGLE], &PYTORCH[..], wheel].concat();
        if !round.is_multiple_of(2) {
            columns.reverse();
        }
        for column in columns {
            let laps = peer.turn(column, params.warmup, params.steps);
            for (name, seconds) in laps.with_context(|| format!("in a turn of {column} from Python"))? {
                self.seconds.entry(name).or_default().extend(seconds);
            }
        }
        Ok(())
    }

    /// After the last turn: asks how far the columns are apart.
    pub fn compare(&mut self, peer: &mut TorchPeer) -> Result<()> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Verified {
            off: f64,
        }
        self.off = peer.job_within::<Verified>(DEADLINE, "verify", json!({}))?.off;
        Ok(())
    }
}

impl FromPython {
    /// Of all ranks, in their order.
    ///
    /// Errors: a column whose parameters are further from those under PyTorch's DDP than rounding explains.
    pub fn of(ranks: &[&Output], params: &Params) -> Result<Self> {
        let first = ranks.first().context("no rank has measured steps from Python")?;
        let (off, most) = (ranks.iter().map(|rank| rank.off).fold(0.0, f64::max), most_off(params.dtype));
        ensure!(
            off <= most,
            "after steps from Python the parameters are off by {off:.1e} of the way that training under PyTorch's DDP goes, \
             more than {most}"
        );
        let times = |column: &str| {
            let of_ranks: Option<Vec<&Vec<f64>>> = ranks.iter().map(|rank| rank.seconds.get(column)).collect();
            let of_ranks = of_ranks.with_context(|| format!("a rank did not measure {column} from Python"))?;
            RankTimes::of(of_ranks.into_iter(), &params.work()).with_context(|| format!("{column} from Python"))
        };
        let library = |version: String, [buckets, sharded]: [&str; 2]| -> Result<Library> {
            Ok(Library { version, buckets: times(buckets)?, sharded: times(sharded)? })
        };
        Ok(Self {
            single: times(SINGLE)?,
            pytorch: library(first.pytorch_version.clone(), PYTORCH)?,
            wheel: first.wheel.clone().try_map(|version| library(version, WHEEL))?,
            off: format!("{off:.1e}").parse()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(off: f64, missing: &str) -> Output {
        let columns = [SINGLE].into_iter().chain(PYTORCH).chain(WHEEL).filter(|column| *column != missing);
        Output {
            pytorch_version: "2.11.0".into(),
            wheel: ColumnOutcome::Measured { row: "0.1.0".into() },
            seconds: columns.map(|column| (column.to_string(), vec![1.0, 2.0])).collect(),
            off,
        }
    }

    fn said(ranks: [Output; 2]) -> String {
        let error = FromPython::of(&ranks.each_ref(), &Params::smallest(Some(1.0))).unwrap_err();
        format!("{error:#}")
    }

    #[test]
    fn columns_that_train_another_way_than_pytorchs_are_refused() {
        let row = FromPython::of(&[&rank(0.0123, ""), &rank(0.0, "")], &Params::smallest(Some(1.0))).unwrap();
        assert_eq!((row.off, row.pytorch.version.as_str()), (0.012, "2.11.0"));
        assert_eq!(row.wheel.measured().unwrap().sharded.last_rank.samples, [1.0, 2.0]);
        let far = said([rank(0.0, ""), rank(0.2, "")]);
        assert!(far.contains("off by 2.0e-1 of the way") && far.contains("more than 0.05"), "{far}");
    }

    #[test]
    fn a_rank_without_a_column_is_named_by_it_and_a_missing_wheel_costs_no_other_column() {
        let ranks = |column| [rank(0.0, column), rank(0.0, "")];
        assert!(said(ranks("wheel_sharded")).contains("a rank did not measure wheel_sharded from Python"));
        let missing = ColumnOutcome::NotRun { reason: "cs336 is not installed".into() };
        let ranks = ranks("wheel").map(|rank| Output { wheel: missing.clone(), ..rank });
        let row = FromPython::of(&ranks.each_ref(), &Params::smallest(Some(1.0))).unwrap();
        assert!(matches!(&row.wheel, ColumnOutcome::NotRun { reason } if reason == "cs336 is not installed"));
        assert_eq!(row.single.by_rank.len(), 2);
    }
}
