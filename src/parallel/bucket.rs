//! Buckets: flat buffers that gradients are views of, so that one message carries many gradients.

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Kind, Tensor};

use super::gradient_of;
use crate::torch::autograd::{copy_all, set_grad};

/// Gradients of one dtype on one device, end to end in memory that is allocated once.
pub struct Bucket {
    /// (numel,): the members' gradients in order, each from a multiple of [`ALIGNMENT`] on, with zeros between.
    pub flat: Tensor,
    /// The members.
    pub parameters: Vec<(String, Tensor)>,
    /// Each member's place in `flat`, of its shape.
    views: Vec<Tensor>,
}

/// In bytes: kernels load 16 bytes in one instruction where the address is aligned, and are slower elsewhere.
pub const ALIGNMENT: usize = 16;

impl Bucket {
    /// A bucket of zeros for the gradients of `parameters`, which can be cut into `shards` equal and aligned parts.
    ///
    /// # Errors
    /// Names a parameter whose dtype or device is not the first one's.
    pub fn new(parameters: Vec<(String, Tensor)>, shards: usize) -> Result<Self> {
        let (name, first) = parameters.first().context("a bucket of no parameters")?;
        let key = key_of(first);
        for (other, parameter) in &parameters {
            let has = key_of(parameter);
            ensure!(has == key, "{other} is {has:?}, but {name} of the same bucket is {key:?}");
        }
        let numel: usize = parameters.iter().map(|(_, parameter)| aligned_numel(parameter)).sum();
        let numel = numel.next_multiple_of(shards * alignment_of(key.0));
        let flat = Tensor::f_zeros([numel as i64], key)?;
        let views = views_of(&flat, parameters.iter().map(|(_, parameter)| parameter.size()))?;
        Ok(Self { flat, parameters, views })
    }

    /// Makes every member's gradient its view of the bucket. A gradient that backward accumulated in the bucket stays.
    /// One that backward allocated elsewhere, because the last step's gradients were released, is copied here; all
    /// copies take a few launches.
    ///
    /// # Errors
    /// Names a member without a gradient.
    pub fn collect(&self) -> Result<()> {
        let mut elsewhere = Vec::new();
        for ((name, parameter), view) in self.parameters.iter().zip(&self.views) {
            let gradient = gradient_of(name, parameter)?;
            if gradient.data_ptr() != view.data_ptr() {
                elsewhere.push((parameter, view, gradient));
            }
        }
        copy_all(elsewhere.iter().map(|(_, view, gradient)| (*view, gradient)))?;
        elsewhere.iter().try_for_each(|(parameter, view, _)| set_grad(parameter, view))
    }
}

impl AsRef<[(String, Tensor)]> for Bucket {
    fn as_ref(&self) -> &[(String, Tensor)] {
        &self.parameters
    }
}

/// Slices of `flat` in the given shapes, one after the other as [`Bucket::flat`] has them.
pub fn views_of(flat: &Tensor, shapes: impl Iterator<Item = Vec<i64>>) -> Result<Vec<Tensor>> {
    let alignment = alignment_of(flat.kind());
    let mut start = 0usize;
    shapes
        .map(|shape| {
            let numel: i64 = shape.iter().product();
            // Detached: tch's `zero_grad` detaches in place, which autograd refuses for a view that it tracks.
            let view = flat.f_narrow(0, start as i64, numel)?.f_view(shape.as_slice())?.f_detach()?;
            start += (numel as usize).next_multiple_of(alignment);
            Ok(view)
        })
        .collect()
}

/// Buckets of at most `capacity` bytes, in the order in which backward is expected to complete them.
pub fn buckets(parameters: &[(String, Tensor)], capacity: f64) -> Result<Vec<Bucket>> {
    planned(parameters, capacity).into_iter().map(|members| Bucket::new(members, 1)).collect()
}

/// The members of each bucket of at most `capacity` bytes, as [`assign`] has them.
pub fn planned(parameters: &[(String, Tensor)], capacity: f64) -> Vec<Vec<(String, Tensor)>> {
    let member = |i: usize| (parameters[i].0.clone(), parameters[i].1.shallow_clone());
    let plan = assign(&parameters.iter().map(|(_, parameter)| parameter).collect::<Vec<_>>(), capacity);
    plan.into_iter().map(|bucket| bucket.into_iter().map(member).collect()).collect()
}

/// Which parameters share a bucket. They are taken in reverse, which is about the order in which their gradients become
/// ready. A parameter joins the open bucket of its dtype and device unless that would exceed `capacity` bytes, padding
/// included. A parameter larger than that has a bucket to itself.
///
/// Buckets come in the order of their last members. A bucket that spans the model, such as that of a mixed model's few
/// float32 parameters, must not delay the buckets that are complete before it.
pub fn assign(parameters: &[&Tensor], capacity: f64) -> Vec<Vec<usize>> {
    struct Open {
        key: (Kind, Device),
        bytes: f64,
        members: Vec<usize>,
    }
    let (mut open, mut done): (Vec<Open>, Vec<Vec<usize>>) = (Vec::new(), Vec::new());
    for (i, parameter) in parameters.iter().enumerate().rev() {
        let (key, bytes) = (key_of(parameter), bytes_of(parameter));
        let bucket = match open.iter_mut().position(|bucket| bucket.key == key) {
            Some(at) => &mut open[at],
            None => {
                open.push(Open { key, bytes: 0.0, members: Vec::new() });
                open.last_mut().expect("just pushed")
            }
        };
        if bucket.bytes + bytes > capacity && !bucket.members.is_empty() {
            done.push(std::mem::take(&mut bucket.members));
            bucket.bytes = 0.0;
        }
        bucket.bytes += bytes;
        bucket.members.push(i);
    }
    done.extend(open.into_iter().map(|bucket| bucket.members));
    done.sort_by_key(|members| std::cmp::Reverse(members.last().copied()));
    done
}

fn key_of(tensor: &Tensor) -> (Kind, Device) {
    (tensor.kind(), tensor.device())
}

fn bytes_of(tensor: &Tensor) -> f64 {
    (aligned_numel(tensor) * tensor.kind().elt_size_in_bytes()) as f64
}

fn aligned_numel(tensor: &Tensor) -> usize {
    tensor.numel().next_multiple_of(alignment_of(tensor.kind()))
}

/// [`ALIGNMENT`] in elements.
pub fn alignment_of(kind: Kind) -> usize {
    ALIGNMENT / kind.elt_size_in_bytes()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::toy::{Blueprint, Toy};
    use crate::parallel::trained;
    use crate::torch::Generator;
    use crate::torch::autograd::{backward, release_grad};
    use crate::torch::random::SEED;

    fn leaf(numel: i64, kind: Kind) -> Tensor {
        Tensor::f_ones([numel], (kind, Device::Cpu)).unwrap().set_requires_grad(true)
    }

    #[test]
    fn the_official_bucket_sizes_give_the_official_numbers_of_buckets() {
        let generator = Generator::new(Device::Cpu, SEED).unwrap();
        for (blueprint, expected) in [(Blueprint::toy(), [3, 3, 1]), (Blueprint::tied(), [4, 4, 1])] {
            let parameters = trained(Toy::new(&blueprint, &generator).unwrap().named_parameters());
            for (bucket_size_mb, count) in [0.0016, 0.0001, 0.01].into_iter().zip(expected) {
                let buckets = buckets(&parameters, bucket_size_mb * 1e6).unwrap();
                assert_eq!(buckets.len(), count, "{} at {bucket_size_mb} MB", blueprint.name);
            }
        }
    }

    #[test]
    fn a_bucket_of_another_dtype_does_not_delay_complete_buckets() {
        let kinds = [Kind::Float, Kind::BFloat16, Kind::BFloat16, Kind::BFloat16, Kind::Float];
        let parameters = kinds.map(|kind| leaf(8, kind));
        let plan = assign(&parameters.iter().collect::<Vec<_>>(), 32.0);
        assert_eq!(plan, [vec![4], vec![3, 2], vec![1], vec![0]]);
        let plan = assign(&parameters.iter().collect::<Vec<_>>(), 64.0);
        assert_eq!(plan, [vec![3, 2, 1], vec![4, 0]]);
    }

    #[test]
    fn gradients_become_views_of_the_bucket_and_backward_accumulates_in_place() {
        let parameters = [("a".to_string(), leaf(3, Kind::Float)), ("b".to_string(), leaf(2, Kind::Float))];
        let bucket = &buckets(&parameters, f64::INFINITY).unwrap()[0];
        let loss = || (&parameters[0].1 * 2.0).sum(Kind::Float) + (&parameters[1].1 * 3.0).sum(Kind::Float);
        let flat = || Vec::<f32>::try_from(&bucket.flat).unwrap();
        for _ in 0..2 {
            parameters.iter().for_each(|(_, parameter)| release_grad(parameter).unwrap());
            backward(&loss()).unwrap();
            bucket.collect().unwrap();
            assert_eq!(flat(), [3.0, 3.0, 0.0, 0.0, 2.0, 2.0, 2.0, 0.0]);
        }
        backward(&loss()).unwrap();
        assert_eq!(flat(), [6.0, 6.0, 0.0, 0.0, 4.0, 4.0, 4.0, 0.0]);
        parameters.iter().for_each(|(_, parameter)| parameter.shallow_clone().zero_grad());
        assert_eq!(flat(), [0.0; 8]);
        release_grad(&parameters[1].1).unwrap();
        let message = bucket.collect().unwrap_err().to_string();
        assert!(message.contains("b has no gradient"), "{message}");
    }

    #[test]
    fn a_bucket_is_padded_with_zeros_and_refuses_two_dtypes() {
        let bucket = Bucket::new(vec![("a".into(), leaf(5, Kind::Float))], 3).unwrap();
        assert_eq!(Vec::<f32>::try_from(&bucket.flat).unwrap(), [0.0; 12]);
        let mixed = vec![("a".into(), leaf(5, Kind::Float)), ("b".into(), leaf(5, Kind::Half))];
        let message = Bucket::new(mixed, 1).err().unwrap().to_string();
        assert!(message.contains("b is (Half, Cpu)"), "{message}");
    }

    proptest! {
        #[test]
        fn every_parameter_is_in_one_bucket_of_its_dtype_within_the_size_limit(
            shapes in proptest::collection::vec((1..50i64, prop_oneof![Just(Kind::Float), Just(Kind::BFloat16)]), 1..20),
            capacity in 1.0..300.0f64,
        ) {
            let parameters: Vec<Tensor> = shapes.into_iter().map(|(numel, kind)| leaf(numel, kind)).collect();
            let parameters: Vec<&Tensor> = parameters.iter().collect();
            let plan = assign(&parameters, capacity);
            let mut all: Vec<usize> = plan.iter().flatten().copied().collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..parameters.len()).collect::<Vec<_>>());
            for bucket in &plan {
                prop_assert!(bucket.windows(2).all(|pair| pair[0] > pair[1]), "not in reverse order: {:?}", bucket);
                prop_assert!(bucket.iter().all(|&i| parameters[i].kind() == parameters[bucket[0]].kind()));
                let bytes: f64 = bucket.iter().map(|&i| bytes_of(parameters[i])).sum();
                prop_assert!(bytes <= capacity || bucket.len() == 1);
            }
            prop_assert!(plan.windows(2).all(|pair| pair[0].last() > pair[1].last()));
        }
    }
}
