"""The reference model's forward pass and training step, eager and compiled, over one set of parameters."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from . import timing
from .compiled import Cold
from .model import Model, cross_entropy
from .protocol import free_memory
from .tensors import read, relative_error, sample

# The number of elements of each gradient that are compared individually. For the rest, only the norm is compared.
SAMPLED = 1 << 16


class Transformer:
    """One model of one precision: float32, or bfloat16 by autocast with everything kept in float32."""

    def __init__(self, device: torch.device, config: dict, weights: str, dtype: str, batch_size: int) -> None:
        self.device = device
        self.autocast = dtype == "bfloat16"
        self.vocab_size = config["vocab_size"]
        self.batch_shape = (batch_size, config["context_length"])
        with device:
            self.model = Model(**config)
        self._load(weights)
        # On the CPU the other side's optimizer is a loop over tensors, and so is this one.
        fused = {"fused": True} if device.type == "cuda" else {"foreach": False}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **fused)
        self.cold: Cold | None = None
        self.columns: dict[str, Callable] = {"eager": self._loss}

    def _load(self, weights: str) -> None:
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in read(weights):
                parameters.pop(name).copy_(value)
        if parameters:
            raise ValueError(f"{weights} lacks {', '.join(parameters)}")

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.model(tokens), targets)

    def _compile(self) -> None:
        self.cold = Cold()
        self.columns["compiled"] = self.cold.compile(self._loss)

    def _precision(self) -> contextlib.AbstractContextManager:
        if self.autocast:
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def _forward(self, function: Callable, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss, recorded for a backward pass."""
        with self._precision():
            return function(tokens, targets)

    def _step(self, function: Callable, tokens: Tensor, targets: Tensor) -> None:
        self._forward(function, tokens, targets).backward()
        self.optimizer.step()

    def verify(self, column: str, file: str) -> dict:
        """Errors of the losses, the logits and the gradients against those in `file`; the first calls' seconds.

        Logits can be asked of the eager column alone: the compiled functions give only their loss.
        """
        if column == "compiled":
            self._compile()
        function = self.columns[column]
        given = {name: value.to(self.device) for name, value in read(file)}
        tokens, targets = given["tokens"], given["targets"]
        loss, forward_s = timing.lap(self.device, lambda: self._forward(function, tokens, targets))
        _, backward_s = timing.lap(self.device, loss.backward)
        if self.cold:
            self.cold.settle()
        errors = {"loss": relative_error(loss, given["loss"]), **self._gradient_errors(given)}
        if column == "eager":
            with torch.no_grad(), self._precision():
                errors["logits"] = relative_error(self.model(tokens), given["logits"])
        del given, tokens, targets, loss
        self._rest()
        return {"errors": errors, "first_call_s": {"forward": forward_s, "backward": backward_s}}

    def _gradient_errors(self, given: dict[str, Tensor]) -> dict:
        worst, worst_name, difference, whole = -1.0, "", 0.0, 0.0
        norms = given["gradient_norms"].tolist()
        for (name, parameter), norm in zip(self.model.named_parameters(), norms, strict=True):
            ours, expected = sample(parameter.grad, SAMPLED), given[f"grad.{name}"]
            own_norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)
            errors = [relative_error(ours, expected), relative_error(own_norm, torch.tensor(norm).double())]
            difference += (errors[0] * norm) ** 2
            whole += norm**2
            if max(errors) > worst:
                worst, worst_name = max(errors), name
        together = (difference / whole) ** 0.5
        return {"gradients": together, "worst_gradient": worst, "worst_gradient_name": worst_name}

    def turn(self, column: str, warmup: int, iterations: int) -> dict:
        """Seconds of forward passes with the loss, then of training steps, each on fresh tokens.

        A forward pass is recorded as a step's is: both then run one compiled function. A step is forward, backward and
        optimizer; the gradients' release is outside its clock.
        """
        function, forward, step = self.columns[column], [], []
        try:
            with timing.undisturbed():
                for _ in range(warmup + iterations):
                    batch = self._batch()
                    # The loss and its graph are freed at the end of the expression.
                    forward.append(timing.lap(self.device, lambda: self._forward(function, *batch))[1])
                step += self._steps(function, warmup + iterations)
        finally:
            self._rest()
        return {"forward": forward[warmup:], "step": step[warmup:]}

    def _steps(self, function: Callable, count: int) -> list[float]:
        """Seconds of each of `count` steps."""
        seconds = []
        for _ in range(count):
            batch = self._batch()
            seconds.append(timing.lap(self.device, lambda: self._step(function, *batch))[1])
            self.optimizer.zero_grad()
        return seconds

    def _batch(self) -> tuple[Tensor, Tensor]:
        tokens, targets = (torch.randint(self.vocab_size, self.batch_shape, device=self.device) for _ in range(2))
        return tokens, targets

    def _rest(self) -> None:
        """Frees all memory except parameters and optimizer state, for the other process."""
        self.optimizer.zero_grad()
        free_memory()

    def close(self) -> dict:
        counts = self.cold.close() if self.cold else None
        del self.model, self.optimizer
        self.columns.clear()
        free_memory()
        return {"counts": counts}
