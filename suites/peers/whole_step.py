"""A whole training step as a PyTorch user runs it at its best: SDPA, torch.compile in one of its modes, fused AdamW."""

import torch
from torch import Tensor
from torch.nn import functional

from . import timing
from .compiled import Cold
from .tensors import read, relative_error
from .transformer import Transformer

# torch.compile records a CUDA graph in the second pass and replays it from the third on.
PASSES = 2
STEPS = 3


class WholeStep(Transformer):
    """One compiled column, named after its mode. It holds all memory of its CUDA graphs until it is closed."""

    def __init__(
        self, device: torch.device, config: dict, weights: str, dtype: str, batch_size: int, mode: str
    ) -> None:
        super().__init__(device, config | {"attention": "sdpa"}, weights, dtype, batch_size)
        self.mode = mode

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())

    def verify(self, column: str, file: str) -> dict:
        """Errors of the loss and the gradients of the third pass against those in `file`; the first calls' seconds; the
        greatest memory of later passes and steps; how often CUDA graphs were skipped."""
        self.cold = Cold()
        function = self.columns[column] = self.cold.compile(self._loss, self.mode)
        # What is expected stays on the host, outside the peak.
        given = dict(read(file))
        tokens, targets = (given[name].to(self.device) for name in ("tokens", "targets"))
        self._make_state()
        loss, forward_s = timing.lap(self.device, lambda: self._forward(function, tokens, targets))
        _, backward_s = timing.lap(self.device, loss.backward)
        self.cold.settle()
        del loss
        self._rest()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(PASSES):
            self.optimizer.zero_grad()
            loss = self._forward(function, tokens, targets)
            loss.backward()
            # A loss of an earlier pass would keep the memory that the next one writes to.
            found = loss.detach().clone()
            del loss
        errors = {"loss": relative_error(found, given["loss"]), **self._gradient_errors(given)}
        self.optimizer.zero_grad()
        self._steps(function, STEPS)
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        self._rest()
        return {
            "errors": errors,
            "first_call_s": {"forward": forward_s, "backward": backward_s},
            "peak_bytes": peak,
            "graphs_skipped": self.cold.counters["inductor"]["cudagraph_skips"],
        }

    def _make_state(self) -> None:
        """AdamW's moments, by a step at rate 0 that leaves the weights as they are: the peak must count them."""
        (group,) = self.optimizer.param_groups
        rate, group["lr"] = group["lr"], 0.0
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        group["lr"] = rate

    def turn(self, column: str, warmup: int, iterations: int) -> dict:
        """Seconds of whole steps, each on fresh tokens; the gradients' release is outside the clock."""
        try:
            with timing.undisturbed():
                return {"step": self._steps(self.columns[column], warmup + iterations)[warmup:]}
        finally:
            self._rest()

    def busy(self, column: str, seconds: float) -> dict:
        """Steps back to back on one batch. It replies at once, since the busy time ends with the reply."""
        function, batch = self.columns[column], self._batch()
        with timing.undisturbed():
            clear, call = self.optimizer.zero_grad, lambda: self._step(function, *batch)
            return timing.busy(self.device, seconds, clear, call)

    def profile(self, column: str, file: str) -> dict:
        """Writes Kineto's trace of one step to `file`; the step's seconds under the profiler."""
        function, batch = self.columns[column], self._batch()
        timing.synchronize(self.device)
        with torch.profiler.profile() as profiler, timing.undisturbed():
            _, seconds = timing.lap(self.device, lambda: self._step(function, *batch))
        profiler.export_chrome_trace(file)
        self.optimizer.zero_grad()
        return {"seconds": seconds}
