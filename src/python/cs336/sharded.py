"""Optimizer state sharding: each rank steps the parameters that it owns and broadcasts them (src/parallel/sharded_optimizer.rs)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from .parallel import Broadcast, require_equal, require_process_group


class ShardedOptimizer(Optimizer):
    """`optimizer_cls` over all ranks of the default process group; each keeps state for its own parameters alone.

    Args:
        params: parameters or groups, the same in the same order on every rank.
        optimizer_cls: an optimizer whose update of a parameter depends on that parameter and its gradient alone.
        kwargs: the options of `optimizer_cls`.

    Before a step each rank's own parameters must have the gradients that the step is to use, as DistributedDataParallel
    leaves them. Afterwards every rank holds every parameter's new value, bit for bit that of its owner. Options of
    `param_groups`, such as a scheduler's learning rate, count from the next step on. `state_dict` is of this rank alone.

    Raises:
        RuntimeError: no process group; parameters that differ between ranks.
        ValueError: a parameter that is in a group already.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        optimizer_cls: type[Optimizer],
        **kwargs: Any,
    ) -> None:
        require_process_group()
        self._optimizer_cls, self._kwargs = optimizer_cls, kwargs
        self._local: Optimizer | None = None
        self._owners: list[list[int]] = []
        # The group of the local optimizer, if this rank owns a parameter of the group.
        self._local_groups: list[int | None] = []
        self._owned_numel = [0] * dist.get_world_size()
        super().__init__(params, kwargs)

    @property
    def owned_numel(self) -> int:
        """Values that this rank keeps state for."""
        return self._owned_numel[dist.get_rank()]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Distributes the parameters of one more group, also during training; every rank must add the same."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        facts = [(tuple(t.shape), t.dtype, t.requires_grad) for t in group["params"]]
        require_equal("the group of parameters", facts, group["params"][0].device if group["params"] else None)
        owners = self._assign(group["params"])
        mine = [parameter for parameter, owner in zip(group["params"], owners, strict=True) if owner == dist.get_rank()]
        self._owners.append(owners)
        self._local_groups.append(None)
        if not mine:
            return
        local_group = {**group, "params": mine}
        if self._local is None:
            self._local = self._optimizer_cls([local_group], **self._kwargs)
            self.state = self._local.state
        else:
            self._local.add_param_group(local_group)
        self._local_groups[-1] = len(self._local.param_groups) - 1

    def _assign(self, parameters: list[Tensor]) -> list[int]:
        """The owner of each: the largest first, each to the rank that owns least so far.

        No rank then owns more than an equal share and one parameter.
        """
        owners = [0] * len(parameters)
        for i in sorted(range(len(parameters)), key=lambda i: -parameters[i].numel()):
            owner = min(range(len(self._owned_numel)), key=lambda rank: self._owned_numel[rank])
            self._owned_numel[owner] += parameters[i].numel()
            owners[i] = owner
        return owners

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Steps this rank's parameters, then receives the others from their owners; gives what `closure` gives."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._local is not None:
            self._pass_options_on()
            self._local.step(**kwargs)
        # All broadcasts start before the first wait, so that the owners send at the same time.
        works = [
            Broadcast(parameter, owner)
            for group, owners in zip(self.param_groups, self._owners, strict=True)
            for parameter, owner in zip(group["params"], owners, strict=True)
            if parameter.requires_grad
        ]
        for work in works:
            work.wait()
        return loss

    def _pass_options_on(self) -> None:
        for group, index in zip(self.param_groups, self._local_groups, strict=True):
            if index is not None:
                options = {name: value for name, value in group.items() if name != "params"}
                self._local.param_groups[index].update(options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave on this rank."""
        super().load_state_dict(state_dict)
        if self._local is not None:
            self._local.state = self.state
