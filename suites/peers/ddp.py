"""PyTorch's DistributedDataParallel over the reference model: whole training steps, a process a rank."""

import contextlib

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from . import timing
from .group import Group
from .model import Model, cross_entropy
from .protocol import free_memory


class Loss(torch.nn.Module):
    """The model with its loss, so that the wrapper's forward pass gives what is differentiated."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.model(tokens), targets)


class Ddp:
    """One replica; float32, or bfloat16 by autocast with parameters and gradients kept in float32."""

    def __init__(
        self,
        device: torch.device,
        config: dict,
        dtype: str,
        batch_size: int,
        bucket_cap_mib: float | None,
        **group,
    ) -> None:
        self.device = device
        self.autocast = dtype == "bfloat16"
        self.vocab_size = config["vocab_size"]
        self.batch_shape = (batch_size, config["context_length"])
        self.bucket_cap_mib = bucket_cap_mib
        self.group = Group(device, **group)
        # Every rank draws other values and other tokens; the wrapper broadcasts rank 0's values.
        torch.manual_seed(self.group.rank)
        with device:
            self.model = Loss(Model(**config))
        for name, parameter in self.model.named_parameters():
            if parameter.dim() == 1:
                torch.nn.init.ones_(parameter)
            else:
                torch.nn.init.normal_(parameter, std=1.0 if "embedding" in name else parameter.shape[1] ** -0.5)

    def _wrap(self) -> DistributedDataParallel:
        places = {"device_ids": [self.device.index]} if self.device.type == "cuda" else {}
        caps = {} if self.bucket_cap_mib is None else {"bucket_cap_mb": self.bucket_cap_mib}
        return DistributedDataParallel(self.model, **places, **caps)

    def _precision(self) -> contextlib.AbstractContextManager:
        if self.autocast:
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def turn(self, column: str, warmup: int, iterations: int) -> dict:
        """Seconds of training steps from a new state of the optimizer, each on fresh tokens and begun together.

        The gradients' release is outside the clock.
        """
        wrapped = self._wrap()
        # On the CPU the other side's optimizer is a loop over tensors, and so is this one.
        fused = {"fused": True} if self.device.type == "cuda" else {"foreach": False}
        optimizer = torch.optim.AdamW(wrapped.parameters(), **fused)

        def step(tokens: Tensor, targets: Tensor) -> None:
            with self._precision():
                loss = wrapped(tokens, targets)
            loss.backward()
            optimizer.step()

        seconds: list[float] = []
        with timing.undisturbed():
            for _ in range(warmup + iterations):
                tokens, targets = (
                    torch.randint(self.vocab_size, self.batch_shape, device=self.device) for _ in range(2)
                )
                timing.synchronize(self.device)
                self.group.barrier()
                seconds.append(timing.lap(self.device, lambda: step(tokens, targets))[1])
                optimizer.zero_grad()
        self._require_equal()
        del wrapped, optimizer, step
        free_memory()
        return {column: seconds[warmup:]}

    def _require_equal(self) -> None:
        """Every rank must hold the same parameters after a turn; otherwise it trained without communication."""
        sums = torch.stack([parameter.detach().double().sum() for parameter in self.model.parameters()])
        least, most = sums.clone(), sums.clone()
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        if not torch.equal(least, most):
            raise ValueError("the replicas of PyTorch's DDP differ after a turn")

    def close(self) -> dict:
        del self.model
        self.group.close()
        return {"counts": None}
