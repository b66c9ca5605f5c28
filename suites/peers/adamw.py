"""torch.optim.AdamW over tensors of given shapes, by its fused and its foreach implementation."""

import torch

from . import timing
from .protocol import free_memory
from .tensors import read, relative_error


def optimizer(parameters: list[torch.Tensor], column: str) -> torch.optim.AdamW:
    """With PyTorch's own hyperparameters; the names of the columns are those of its options."""
    return torch.optim.AdamW(parameters, **{column: True})


class AdamW:
    """Parameters and gradients in float32; the state lives from the start of a turn to its end."""

    def __init__(self, device: torch.device, shapes: list[list[int]], steps_in_a_row: int = 1) -> None:
        self.device = device
        self.steps_in_a_row = steps_in_a_row
        self.parameters = [torch.randn(shape, device=device).requires_grad_() for shape in shapes]
        for parameter in self.parameters:
            parameter.grad = torch.randn_like(parameter)

    def verify(self, column: str, file: str) -> dict:
        """The largest error after the steps of `file`: `param.i`, `grad.i.step`, and `after.i` to be reached."""
        given = {name: value.to(self.device) for name, value in read(file)}
        count = sum(name.startswith("param.") for name in given)
        parameters = [given[f"param.{i}"].requires_grad_() for i in range(count)]
        stepper = optimizer(parameters, column)
        for step in range(sum(name.startswith("grad.0.") for name in given)):
            for i, parameter in enumerate(parameters):
                parameter.grad = given[f"grad.{i}.{step}"]
            stepper.step()
        errors = [relative_error(p, given[f"after.{i}"]) for i, p in enumerate(parameters)]
        return {"errors": {"parameters": max(errors)}}

    def turn(self, column: str, warmup: int, iterations: int) -> dict:
        """Seconds of a step, each the mean of so many in a row; the untimed ones make the state."""
        stepper = optimizer(self.parameters, column)
        seconds: list[float] = []
        try:
            with timing.undisturbed():
                for _ in range(warmup + iterations):
                    row = timing.lap(self.device, lambda: [stepper.step() for _ in range(self.steps_in_a_row)])[1]
                    seconds.append(row / self.steps_in_a_row)
        finally:
            del stepper
            free_memory()
        return {"step": seconds[warmup:]}

    def close(self) -> dict:
        self.parameters.clear()
        free_memory()
        return {"counts": None}
