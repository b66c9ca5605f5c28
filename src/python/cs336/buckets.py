"""Buckets: flat buffers that gradients are views of. The rules are those of src/parallel/bucket.rs."""

from collections.abc import Sequence

import torch
from torch import Tensor

Named = tuple[str, Tensor]

# In bytes: kernels load 16 bytes in one instruction where the address is aligned.
ALIGNMENT = 16


def assign(parameters: Sequence[Named], capacity: float) -> list[list[Named]]:
    """Which parameters share a bucket of at most `capacity` bytes, padding included.

    They are taken in reverse, about the order in which backward completes them. A parameter joins the open bucket of its
    dtype and device, unless that would exceed the capacity; a larger one has a bucket to itself. Buckets come in the order
    of their last members, so that none delays those that are complete before it.
    """
    unfinished: dict[tuple[torch.dtype, torch.device], tuple[float, list[int]]] = {}
    done: list[list[int]] = []
    for i in reversed(range(len(parameters))):
        parameter = parameters[i][1]
        key = (parameter.dtype, parameter.device)
        size = _aligned_numel(parameter) * parameter.element_size()
        held, members = unfinished.get(key, (0.0, []))
        if members and held + size > capacity:
            done.append(members)
            held, members = 0.0, []
        unfinished[key] = (held + size, [*members, i])
    done.extend(members for _, members in unfinished.values())
    done.sort(key=lambda members: -members[-1])
    return [[parameters[i] for i in members] for members in done]


def gradient_of(name: str, parameter: Tensor) -> Tensor:
    """The gradient that backward left; a rank that left out a collective would pair the others' calls wrongly."""
    if parameter.grad is None:
        raise RuntimeError(
            f"{name} has no gradient: the loss of every rank must use it, or it must be frozen on all of them; "
            "checkpoints need use_reentrant=False"
        )
    if parameter.grad.layout != torch.strided:
        raise RuntimeError(f"{name} has a gradient of layout {parameter.grad.layout}; only dense ones are averaged")
    return parameter.grad


class Bucket:
    """Gradients of one dtype on one device, end to end in `flat` (numel,), which is allocated once."""

    def __init__(self, members: Sequence[Named]) -> None:
        self.members = members
        first = members[0][1]
        numel = sum(_aligned_numel(parameter) for _, parameter in members)
        self.flat = torch.zeros(numel, dtype=first.dtype, device=first.device)
        self._views = []
        start = 0
        for _, parameter in members:
            self._views.append(self.flat[start : start + parameter.numel()].view(parameter.shape))
            start += _aligned_numel(parameter)

    @torch.no_grad()
    def collect(self) -> None:
        """Makes each member's gradient its view of the bucket; copies those that backward allocated elsewhere."""
        elsewhere = []
        for (name, parameter), view in zip(self.members, self._views, strict=True):
            gradient = gradient_of(name, parameter)
            if gradient.data_ptr() != view.data_ptr():
                elsewhere.append((parameter, view, gradient))
        if elsewhere:
            parameters, views, gradients = zip(*elsewhere, strict=True)
            torch._foreach_copy_(views, gradients)
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view


def _aligned_numel(parameter: Tensor) -> int:
    alignment = ALIGNMENT // parameter.element_size()
    return -(-parameter.numel() // alignment) * alignment
