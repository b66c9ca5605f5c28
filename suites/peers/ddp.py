"""Data parallelism over the reference model, PyTorch's and the wheel's: whole training steps, a process a rank."""

import contextlib

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from . import packages, timing
from .compiled import empty_cache
from .group import Group
from .model import Model, cross_entropy
from .protocol import free_memory
from .tensors import sample


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
        form: str = "default",
        attention: str = "plain",
        wheel: bool = False,
        **group,
    ) -> None:
        """`wheel`: import it; `opened` then holds its version, or why there is none.

        `form`, of PyTorch's DDP in the column "ddp": "default"; "eager", with buckets as gradients and a static graph;
        "compiled", with buckets as gradients under torch.compile; or "compiled_bfloat16", which sends gradients in bfloat16
        besides.
        """
        self.device = device
        self.autocast = dtype == "bfloat16"
        self.vocab_size = config["vocab_size"]
        self.batch_shape = (batch_size, config["context_length"])
        self.bucket_cap_mib = bucket_cap_mib
        self.form = form
        self.compiled = None
        self.cache = contextlib.ExitStack()
        self.cs336, self.opened = packages.wheel() if wheel else (None, {})
        self.group = Group(device, **group)
        self.make_model = lambda: Loss(Model(**config, attention=attention))
        self.model = self._draw_model()
        # Of the parameters before the first step of a column, and by column after the last.
        self.before = torch.empty(0)
        self.after: dict[str, Tensor] = {}

    def _draw_model(self) -> Loss:
        """Every rank draws other values and then other tokens, each time the same; the wrapper broadcasts rank 0's values."""
        torch.manual_seed(self.group.rank)
        with self.device:
            model = self.make_model()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                torch.nn.init.ones_(parameter)
            else:
                torch.nn.init.normal_(parameter, std=1.0 if "embedding" in name else parameter.shape[1] ** -0.5)
        return model

    def _pytorch(self, model: Loss, **options) -> DistributedDataParallel:
        places = {"device_ids": [self.device.index]} if self.device.type == "cuda" else {}
        caps = {} if self.bucket_cap_mib is None else {"bucket_cap_mb": self.bucket_cap_mib}
        return DistributedDataParallel(model, **places, **caps, **options)

    def _wrap(self) -> torch.nn.Module:
        """As `form` says."""
        if self.compiled is not None:
            return self.compiled
        if self.form == "default":
            return self._pytorch(self.model)
        is_static = self.form == "eager"
        wrapped = self._pytorch(self.model, gradient_as_bucket_view=True, static_graph=is_static)
        if is_static:
            return wrapped
        if self.form == "compiled_bfloat16":
            wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
        # Kept over the turns, since it compiles for minutes.
        self.cache.enter_context(empty_cache())
        self.compiled = torch.compile(wrapped)
        return self.compiled

    def _trainer(self, column: str, model: Loss) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        if column == "ddp":
            wrapped = self._wrap()
        elif column == "single":
            wrapped = model
        elif column.startswith("wheel"):
            bucket_size_mb = None if self.bucket_cap_mib is None else self.bucket_cap_mib * 2**20 / 1e6
            wrapped = self.cs336.DistributedDataParallel(model, "overlap_bucketed", bucket_size_mb=bucket_size_mb)
        else:
            wrapped = self._pytorch(model, gradient_as_bucket_view=True)
        # On the CPU the other side's optimizer is a loop over tensors, and so is this one.
        fused = {"fused": True} if self.device.type == "cuda" else {"foreach": False}
        if column == "wheel_sharded":
            return wrapped, self.cs336.ShardedOptimizer(wrapped.parameters(), torch.optim.AdamW, **fused)
        if column == "pytorch_sharded":
            # Here, because its import takes seconds.
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, **fused)
        return wrapped, torch.optim.AdamW(wrapped.parameters(), **fused)

    def _precision(self) -> contextlib.AbstractContextManager:
        if self.autocast:
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def turn(self, column: str, warmup: int, iterations: int) -> dict:
        """Seconds of training steps from a new state of the optimizer, each on fresh tokens and begun together.

        "ddp" goes on with one model in every turn. "single" (no communication), "pytorch", "pytorch_sharded", "wheel" and
        "wheel_sharded" each train a new one, from the same values on the same tokens. The gradients' release is outside the
        clock.
        """
        model = self.model if column == "ddp" else self._draw_model()
        wrapped, optimizer = self._trainer(column, model)
        before = self._sample(model)

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
        if column != "single":
            self._require_equal(column, model)
        if column not in ("ddp", "single"):
            self.before, self.after[column] = before, self._sample(model)
        del model, wrapped, optimizer, step
        free_memory()
        return {column: seconds[warmup:]}

    def verify(self) -> dict:
        """The largest distance of a column's parameters from those of "pytorch", as a share of the way that these went."""
        pytorch = self.after["pytorch"]
        way = (pytorch - self.before).norm()
        # The maximum of tensors keeps a NaN.
        return {"off": torch.stack([(after - pytorch).norm() / way for after in self.after.values()]).max().item()}

    def _sample(self, model: Loss) -> Tensor:
        return torch.cat([sample(parameter, 256).double() for parameter in model.parameters()])

    def _require_equal(self, column: str, model: Loss) -> None:
        """Every rank must hold the same parameters after a turn; otherwise it trained without communication."""
        sums = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()])
        least, most = sums.clone(), sums.clone()
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        if not torch.equal(least, most):
            raise ValueError(f"the replicas of the column {column} differ after a turn")

    def close(self) -> dict:
        self.cache.close()
        del self.model, self.compiled
        self.group.close()
        return {"counts": None}
