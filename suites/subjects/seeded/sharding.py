"""An optimizer with its state divided over the ranks, with the mistakes that `src/checks/mutants` makes of its calls."""

import torch
import torch.distributed as dist

from bug import has


class Sharded(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, **kwargs):
        params = list(params)
        if has("decay_forgotten"):
            kwargs["weight_decay"] = 0.0
        if has("betas_forgotten"):
            del kwargs["betas"]
        if has("eps_forgotten"):
            del kwargs["eps"]
        if has("always_adamw"):
            optimizer_cls = torch.optim.AdamW
        super().__init__(params, kwargs)
        self.owner = {parameter: number % dist.get_world_size() for number, parameter in enumerate(params)}
        mine = [parameter for parameter in params if self.owner[parameter] == dist.get_rank()]
        self.optimizer = optimizer_cls(params if has("unsharded") else mine, **kwargs)

    def step(self, closure=None):
        before = {parameter: parameter.data.clone() for parameter in self.owner}
        self.optimizer.step(closure)
        for parameter, owner in self.owner.items():
            if has("updates_not_broadcast"):
                continue
            root = (owner + 1) % dist.get_world_size() if has("wrong_root") else owner
            if has("broadcast_in_bfloat16"):
                narrow = parameter.data.to(torch.bfloat16)
                dist.broadcast(narrow, src=root)
                parameter.data.copy_(narrow)
            elif has("differences_broadcast"):
                # Right but for the last bits of a sum.
                difference = parameter.data - before[parameter]
                dist.broadcast(difference, src=root)
                parameter.data.copy_(before[parameter] + difference)
            else:
                dist.broadcast(parameter.data, src=root)
