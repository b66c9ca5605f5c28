//! The shares that ranks have of a fused step's storage where each steps only its own (ZeRO stage 1: Rajbhandari et al., 2020).

use std::ops::Range;

use anyhow::Result;
use tch::Tensor;

/// What one rank steps: the parameters of each unit (a layer, the head, the embedding with the gains) in as many shares as
/// there are ranks, of which it has one. AdamW's moments are allocated for that share alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    pub rank: i64,
    pub ranks: i64,
}

impl Shard {
    /// Every parameter.
    pub const ALL: Self = Self { rank: 0, ranks: 1 };

    /// Elements by which AdamW's kernel and the collectives want a share to begin.
    const ALIGNMENT: i64 = 8;

    /// This rank's elements of a unit of so many: all, where they do not divide into equal shares.
    pub fn of(self, elements: i64) -> Range<i64> {
        let Self { rank, ranks } = self;
        if elements % (ranks * Self::ALIGNMENT) != 0 {
            return 0..elements;
        }
        let share = elements / ranks;
        rank * share..(rank + 1) * share
    }

    /// How many they are.
    pub fn len(self, elements: i64) -> i64 {
        let Range { start, end } = self.of(elements);
        end - start
    }
}

/// Values that all ranks have, and this rank's share of them, in the same storage.
pub struct Piece {
    /// (n,)
    pub whole: Tensor,
    /// (n / ranks,), or (n,) where every rank steps all.
    pub share: Tensor,
}

impl Piece {
    /// `elements` of `values` from `start`, whose share is `share` of them.
    pub fn of(values: &Tensor, start: i64, elements: i64, share: &Range<i64>) -> Result<Self> {
        let whole = values.f_narrow(0, start, elements)?;
        Ok(Self { share: whole.f_narrow(0, share.start, share.end - share.start)?, whole })
    }

    pub fn is_cut(&self) -> bool {
        self.share.numel() < self.whole.numel()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shares_of_all_ranks_are_the_unit_and_what_does_not_divide_belongs_to_every_rank() {
        let of = |elements, ranks| (0..ranks).map(|rank| Shard { rank, ranks }.of(elements)).collect::<Vec<_>>();
        assert_eq!(of(48, 3), [0..16, 16..32, 32..48]);
        assert_eq!(of(48, 4), vec![0..48; 4], "shares of 12 do not begin at multiples of 8");
        assert_eq!(of(50, 1)[0], 0..50);
    }
}
