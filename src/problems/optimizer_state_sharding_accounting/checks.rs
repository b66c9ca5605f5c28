//! Counts what each rank keeps and sends, before it is measured.

use anyhow::{Result, ensure};

use super::memory::{self, RankMemory};
use super::{BESIDE_SHARDED, SCHEMES, TIMED};
use crate::bench::ddp_step::Params;
use crate::checks::ddp_step::small_columns;
use crate::harness::problem::Verdict;
use crate::parallel::trainer::ZERO1;

/// Counted to the byte on the CPU: each rank's state is two moments of what it owns, and all own everything once.
pub fn state_is_that_of_what_is_owned() -> Result<Verdict> {
    let params = Params::smallest(None);
    let (memory, all) = (memory::measure(&params, &SCHEMES)?, params.config().num_parameters());
    for (scheme, ranks) in &memory {
        let owned: u64 = ranks.iter().map(|rank| rank.owned_values).sum();
        let expected = if scheme == BESIDE_SHARDED { all * params.world_size as u64 } else { all };
        // Shards of ZeRO-1 are padded to equal and aligned lengths.
        let padding = if scheme == ZERO1 { 1024 } else { 0 };
        ensure!((expected..=expected + padding).contains(&owned), "{scheme}: {owned} values are owned, of {expected}");
        for (rank, RankMemory { owned_values, moments, .. }) in ranks.iter().enumerate() {
            for moment in moments {
                let is_before = moment.name == "after init" || moment.name == "before the first step";
                let state = if is_before { 0 } else { 8 * owned_values };
                let (measured, name) = (moment.optimizer_state, &moment.name);
                ensure!(measured == state, "{scheme}, rank {rank}, {name}: {measured} bytes of state, not {state}");
                // Tokens and tables are all that is not counted by name; ZeRO-1 has buffers of its own.
                let explained = scheme == ZERO1 || moment.other < 64 << 10;
                ensure!(explained, "{scheme}, rank {rank}, {name}: {} bytes of unknown use", moment.other);
            }
        }
    }
    Verdict::passed(format!("{} schemes on {} ranks", memory.len(), params.world_size))
}

/// An all-reduce moves every gradient; the shared optimizer broadcasts every parameter as well; ZeRO-1 splits one all-reduce.
pub fn volumes_are_what_each_scheme_sends() -> Result<Verdict> {
    let columns = small_columns(&TIMED, None)?;
    let gradients = Params::smallest(None).gradient_bytes() as f64;
    let times = [(1.0, 1.0), (1.0, 1.0), (2.0, 2.0), (2.0, 1.0), (2.0, 1.0)];
    for (scheme, (handed, carried)) in TIMED.into_iter().zip(times) {
        let column = &columns[scheme];
        for (what, counted, share) in
            [("handed over", column.bytes as f64, handed), ("carried", column.bus_bytes, carried)]
        {
            let expected = share * gradients;
            // Two ranks: an all-reduce carries each byte once. Shards are padded.
            ensure!(
                (expected..expected * 1.001).contains(&counted),
                "{scheme}: {counted} bytes {what}, not {expected}"
            );
        }
    }
    Verdict::passed(format!("{} schemes, handed over and carried", TIMED.len()))
}
