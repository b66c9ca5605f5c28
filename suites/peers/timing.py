"""The timing routine: the same as the other side's, a monotonic clock between two synchronisations of the device."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def lap(device: torch.device, body: Callable[[], T]) -> tuple[T, float]:
    """Runs `body`; returns its value and the seconds until the device has finished."""
    synchronize(device)
    start = time.perf_counter()
    value = body()
    synchronize(device)
    return value, time.perf_counter() - start


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Disables the garbage collector, whose pauses must not be measured (as `timeit` does)."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
