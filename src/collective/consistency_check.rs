//! Checks that all ranks hold bitwise equal parameters, as they must after every data-parallel step.

use anyhow::{Context as _, Result, bail};
use tch::{Device, Kind, Tensor};

use super::Collective;

/// Compares every rank's parameters bit by bit, through a hash of each that is computed on its device.
///
/// A collective: every rank must call it, with the same parameters in the same order. All ranks get the same answer. A
/// change of one element always changes the hash. A change of several elements is missed with a probability of about
/// 2^-64.
///
/// # Errors
/// Names each rank that differs from rank 0 and the first parameter in which it does.
pub fn require_equal_parameters(collective: &dyn Collective, parameters: &[(String, Tensor)]) -> Result<()> {
    if parameters.is_empty() {
        return Ok(());
    }
    let hashes: Result<Vec<Tensor>> = tch::no_grad(|| {
        parameters.iter().map(|(name, tensor)| hash(tensor).with_context(|| format!("hashing {name}"))).collect()
    });
    let hashes = Tensor::f_stack(&hashes?, 0)?.f_to_device(collective.device())?;
    let of_ranks = collective.all_gather(&hashes)?;
    let of_ranks = of_ranks.iter().map(|hashes| Ok(Vec::<i64>::try_from(hashes.f_to_device(Device::Cpu)?)?));
    let differences = differences(&of_ranks.collect::<Result<Vec<_>>>()?, parameters);
    if !differences.is_empty() {
        bail!("the parameters differ between ranks: {}", differences.join("; "));
    }
    Ok(())
}

/// How each rank's hashes differ from rank 0's.
fn differences(of_ranks: &[Vec<i64>], parameters: &[(String, Tensor)]) -> Vec<String> {
    let Some((first, others)) = of_ranks.split_first() else { return Vec::new() };
    let one = |(i, hashes): (usize, &Vec<i64>)| {
        let differs = |&at: &usize| hashes.get(at) != first.get(at);
        let mut which = (0..parameters.len()).filter(differs);
        let (name, _) = &parameters[which.next()?];
        let more = match which.count() {
            0 => String::new(),
            more => format!(" and in {more} more"),
        };
        Some(format!("rank {} differs from rank 0 in {name}{more}", i + 1))
    };
    others.iter().enumerate().filter_map(one).collect()
}

/// Elements hashed at a time: each needs some temporary integers of 8 bytes.
const CHUNK: i64 = 1 << 24;

/// An odd number without a pattern (2^64 over the golden ratio).
const FACTOR: i64 = 0x9e37_79b9_7f4a_7c15_u64 as i64;

/// The sum modulo 2^64 of the elements' bits, each times an odd factor of its index; the same in any order of summation.
fn hash(tensor: &Tensor) -> Result<Tensor> {
    let kind = match tensor.kind().elt_size_in_bytes() {
        1 => Kind::Uint8,
        2 => Kind::Int16,
        4 => Kind::Int,
        _ => Kind::Int64,
    };
    let bits = tensor.f_detach()?.f_contiguous()?.f_view([-1])?.f_view_dtype(kind)?;
    let mut sum = Tensor::f_zeros([], (Kind::Int64, tensor.device()))?;
    for start in (0..bits.size()[0]).step_by(CHUNK as usize) {
        let length = CHUNK.min(bits.size()[0] - start);
        let indices = Tensor::f_arange_start(start, start + length, (Kind::Int64, tensor.device()))?;
        let factors = indices.f_mul_scalar(2)?.f_add_scalar(1)?.f_mul_scalar(FACTOR)?;
        sum =
            sum.f_add(&bits.f_narrow(0, start, length)?.f_to_kind(Kind::Int64)?.f_mul(&factors)?.f_sum(Kind::Int64)?)?;
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(tensor: &Tensor) -> i64 {
        hash(tensor).unwrap().int64_value(&[])
    }

    #[test]
    fn a_changed_element_and_a_changed_order_change_the_hash() {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half, Kind::Int64, Kind::Double, Kind::Uint8] {
            let tensor = Tensor::arange(12, (Kind::Float, Device::Cpu)).to_kind(kind).view([3, 4]);
            assert_eq!(number(&tensor), number(&tensor.copy()), "{kind:?}");
            assert_ne!(number(&tensor), number(&tensor.flip([0])), "{kind:?}: elements in another order");
            let changed = tensor.copy();
            let _ = changed.view([-1]).get(7).fill_(100);
            assert_ne!(number(&tensor), number(&changed), "{kind:?}");
        }
        let zero = Tensor::from_slice(&[0.0f32]);
        assert_ne!(number(&zero), number(&-zero.copy()), "0 and -0 are equal numbers with different bits");
    }

    #[test]
    fn chunks_add_up_to_one_hash_and_strides_do_not_change_it() {
        let tensor = Tensor::ones([CHUNK + 3], (Kind::Uint8, Device::Cpu));
        let n = CHUNK + 3;
        // The sum of the first n odd numbers is n squared.
        assert_eq!(number(&tensor), (n * n).wrapping_mul(FACTOR));
        let matrix = Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]);
        assert_eq!(number(&matrix.transpose(0, 1)), number(&matrix.transpose(0, 1).contiguous()));
    }

    #[test]
    fn each_differing_rank_is_named_with_its_first_differing_parameter() {
        let parameters = ["a", "b", "c"].map(|name| (name.to_string(), Tensor::zeros([1], (Kind::Float, Device::Cpu))));
        let found = differences(&[vec![1, 2, 3], vec![1, 2, 3], vec![1, 0, 3], vec![0, 0, 0]], &parameters);
        assert_eq!(found, ["rank 2 differs from rank 0 in b", "rank 3 differs from rank 0 in a and in 2 more"]);
    }
}
