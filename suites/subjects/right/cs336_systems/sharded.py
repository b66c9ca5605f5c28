"""An optimizer whose state is divided over the ranks: each steps its own parameters and broadcasts them."""

from collections.abc import Callable

import torch
import torch.distributed as dist


class ShardedOptimizer(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls: type[torch.optim.Optimizer], **kwargs) -> None:
        self.optimizer_cls = optimizer_cls
        self.kwargs = kwargs
        self.optimizer: torch.optim.Optimizer | None = None
        self.owner: dict[torch.nn.Parameter, int] = {}
        self.owned = [0] * dist.get_world_size()
        super().__init__(params, dict(kwargs))

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        # The largest first, each to the rank that owns least.
        for parameter in sorted(group["params"], key=lambda p: -p.numel()):
            rank = self.owned.index(min(self.owned))
            self.owner[parameter] = rank
            self.owned[rank] += parameter.numel() if parameter.requires_grad else 0
        mine = [p for p in group["params"] if self.owner[p] == dist.get_rank()]
        if not mine:
            return
        own = {name: value for name, value in group.items() if name != "params"} | {"params": mine}
        if self.optimizer is None:
            self.optimizer = self.optimizer_cls([own], **self.kwargs)
        else:
            self.optimizer.add_param_group(own)

    def step(self, closure: Callable | None = None, **kwargs):
        loss = self.optimizer.step(closure, **kwargs) if self.optimizer is not None else None
        for parameter, rank in self.owner.items():
            dist.broadcast(parameter.data, src=rank)
        return loss
