//! Optimizer state sharding as the handout describes it: each rank steps the parameters that it owns, and so holds state
//! for these alone, then broadcasts them to the others.

use anyhow::{Context as _, Result, ensure};
use tch::Tensor;

use super::shared;
use crate::collective::Shared;
use crate::model::optim::Optimizer;

/// Parameters and the optimizer that steps them. The optimizer must create a parameter's state at that parameter's
/// first step, as all of [`crate::model::optim`] do. A parameter's update may depend only on that parameter and its
/// gradient.
pub struct ParamGroup {
    pub parameters: Vec<(String, Tensor)>,
    pub optimizer: Box<dyn Optimizer>,
}

impl ParamGroup {
    pub fn new(parameters: &[(String, Tensor)], optimizer: Box<dyn Optimizer>) -> Self {
        Self { parameters: shared(parameters), optimizer }
    }
}

/// An optimizer over all ranks.
///
/// It does not communicate gradients: before a step, each rank's own parameters must have the gradients that the step
/// is to use, as every data-parallel strategy leaves them. The ranks must start from equal parameters.
pub struct ShardedOptimizer {
    groups: Vec<Group>,
    collective: Shared,
    /// Values that each rank owns, over all groups.
    owned_numel: Vec<usize>,
}

struct Group {
    parameters: Vec<(String, Tensor)>,
    /// The rank of each parameter.
    owners: Vec<usize>,
    /// The parameters whose owner is this rank.
    shard: Vec<(String, Tensor)>,
    optimizer: Box<dyn Optimizer>,
}

impl ShardedOptimizer {
    /// # Errors
    /// As [`ShardedOptimizer::add_param_group`].
    pub fn new(groups: Vec<ParamGroup>, collective: &Shared) -> Result<Self> {
        let owned_numel = vec![0; collective.world_size()];
        let mut sharded = Self { groups: Vec::new(), collective: collective.clone(), owned_numel };
        groups.into_iter().try_for_each(|group| sharded.add_param_group(group))?;
        Ok(sharded)
    }

    /// Distributes the parameters of one more group, also during training, as when layers are unfrozen one by one.
    /// Every rank must add the same groups in the same order. Earlier parameters keep their owners and their state.
    ///
    /// # Errors
    /// Names a parameter that is in a group already, under this name or another.
    pub fn add_param_group(&mut self, group: ParamGroup) -> Result<()> {
        let ParamGroup { parameters, optimizer } = group;
        for (i, (name, parameter)) in parameters.iter().enumerate() {
            let known = self.groups.iter().flat_map(|group| &group.parameters).chain(&parameters[..i]);
            for (other, theirs) in known {
                ensure!(other != name, "{name} is in a parameter group already");
                ensure!(!is_same(theirs, parameter), "{name} is the tensor of {other}, which is in a group already");
            }
        }
        let owners = self.assign(&parameters);
        let mine = owners.iter().zip(&parameters).filter(|(owner, _)| **owner == self.collective.rank());
        let shard = mine.map(|(_, (name, parameter))| (name.clone(), parameter.shallow_clone())).collect();
        self.groups.push(Group { parameters, owners, shard, optimizer });
        Ok(())
    }

    /// The owner of each parameter: the largest first, each to the rank that owns least so far. No rank then owns more
    /// than an equal share and one parameter.
    fn assign(&mut self, parameters: &[(String, Tensor)]) -> Vec<usize> {
        let mut largest_first: Vec<usize> = (0..parameters.len()).collect();
        // Stable, so that equal sizes keep the model's order on every rank.
        largest_first.sort_by_key(|&i| std::cmp::Reverse(parameters[i].1.numel()));
        let mut owners = vec![0; parameters.len()];
        for i in largest_first {
            let ranks = self.owned_numel.iter_mut().enumerate();
            let (owner, owned) = ranks.min_by_key(|(rank, owned)| (**owned, *rank)).expect("a group has a rank");
            *owned += parameters[i].1.numel();
            owners[i] = owner;
        }
        owners
    }

    /// Steps this rank's parameters, then receives the others from their owners. A frozen parameter stays unchanged.
    ///
    /// # Errors
    /// Names the parameter; after one the ranks no longer agree and the run must end.
    pub fn step(&mut self) -> Result<()> {
        for group in &mut self.groups {
            group.optimizer.step(&group.shard)?;
        }
        // All broadcasts start before the first wait, so that the owners send at the same time.
        let mut works = Vec::new();
        for group in &self.groups {
            for ((name, parameter), &owner) in group.parameters.iter().zip(&group.owners) {
                // The ranks agree on which parameters train, but not always on which have a gradient.
                if parameter.requires_grad() {
                    let work = self.collective.broadcast_async(&parameter.f_detach()?, owner);
                    works.push((name, work.with_context(|| format!("broadcasting {name} from rank {owner}"))?));
                }
            }
        }
        works.into_iter().try_for_each(|(name, work)| work.wait().with_context(|| format!("broadcasting {name}")))
    }

    /// Values that this rank keeps state for.
    pub fn owned_numel(&self) -> usize {
        self.owned_numel[self.collective.rank()]
    }
}

fn is_same(a: &Tensor, b: &Tensor) -> bool {
    a.numel() > 0 && a.data_ptr() == b.data_ptr()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use tch::{Device, Kind};

    use super::*;
    use crate::collective::{Backend, Collective, Group, Request, Work};
    use crate::model::optim::Sgd;

    /// One rank whose collectives do nothing, which is enough to distribute parameters.
    struct Silent(Group);

    impl Collective for Silent {
        fn group(&self) -> &Group {
            &self.0
        }

        fn start(&self, _: Request) -> Result<Box<dyn Work>> {
            Ok(Box::new(()))
        }
    }

    fn silent(rank: usize, world_size: usize) -> Shared {
        Arc::new(Silent(Group::new(Backend::Gloo, Device::Cpu, rank, world_size).unwrap()))
    }

    fn group(numels: &[i64], prefix: &str) -> ParamGroup {
        let leaf = |numel: &i64| Tensor::zeros([*numel], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let named = numels.iter().enumerate().map(|(i, numel)| (format!("{prefix}{i}"), leaf(numel)));
        ParamGroup::new(&named.collect::<Vec<_>>(), Box::new(Sgd::new(0.1).unwrap()))
    }

    #[test]
    fn a_parameter_may_be_in_only_one_group_whatever_its_name() {
        let first = group(&[3, 4], "p");
        let again = ParamGroup::new(&first.parameters[1..], Box::new(Sgd::new(0.1).unwrap()));
        let tensor = first.parameters[0].1.shallow_clone();
        let renamed = ParamGroup::new(&[("other".into(), tensor)], Box::new(Sgd::new(0.1).unwrap()));
        let mut sharded = ShardedOptimizer::new(vec![first], &silent(0, 2)).unwrap();
        let message = |sharded: &mut ShardedOptimizer, group| sharded.add_param_group(group).unwrap_err().to_string();
        assert!(message(&mut sharded, again).contains("p1 is in a parameter group already"));
        assert!(message(&mut sharded, renamed).contains("other is the tensor of p0"));
    }

    proptest! {
        #[test]
        fn ranks_agree_on_owners_and_the_shares_are_balanced(
            first in proptest::collection::vec(1..200i64, 1..12),
            second in proptest::collection::vec(1..200i64, 0..6),
            world_size in 1..5usize,
        ) {
            let shards = |rank| {
                let groups = vec![group(&first, "first"), group(&second, "second")];
                let sharded = ShardedOptimizer::new(groups, &silent(rank, world_size)).unwrap();
                let owners: Vec<_> = sharded.groups.iter().map(|group| group.owners.clone()).collect();
                let mine: usize = sharded.groups.iter().flat_map(|g| &g.shard).map(|(_, p)| p.numel()).sum();
                assert_eq!(sharded.owned_numel(), mine);
                (owners, sharded.owned_numel)
            };
            let (owners, owned) = shards(0);
            let numels = first.iter().chain(&second).map(|&numel| numel as usize);
            let (total, largest) = (numels.clone().sum::<usize>(), numels.max().unwrap());
            prop_assert_eq!(owned.iter().sum::<usize>(), total);
            prop_assert!(owned.iter().all(|&owned| owned <= total / world_size + largest));
            for rank in 0..world_size {
                prop_assert_eq!(shards(rank), (owners.clone(), owned.clone()));
            }
        }
    }
}
