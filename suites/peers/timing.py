"""The timing routines, the same as the other side's: a call between two synchronisations, and Triton's `do_bench`."""

import contextlib
import gc
import math
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


# As in src/bench/timing.rs.
FLUSHED_BYTES = 256 << 20
ESTIMATES = 5
REST_S = 0.5e-3
REST_CYCLES = 1_000_000


class Interval:
    """A stretch of the device's work: between CUDA events, or on the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None
        self.times = [0.0, 0.0]

    def mark(self, end: int) -> None:
        """Its start (0) or its end (1)."""
        if self.events:
            self.events[end].record()
        else:
            self.times[end] = time.perf_counter()

    def seconds(self) -> float:
        if self.events:
            return self.events[0].elapsed_time(self.events[1]) / 1e3
        return self.times[1] - self.times[0]


class Bench:
    """`TimingBench` of src/bench/timing.rs; `clear` runs before each call and is not timed."""

    def __init__(
        self, device: torch.device, cache: str, pace: str, warmup_ms: float, rep_ms: float, most_repeats: int
    ) -> None:
        self.device = device
        self.rested = pace == "rested"
        self.warmup_ms, self.rep_ms, self.most_repeats = warmup_ms, rep_ms, most_repeats
        words = FLUSHED_BYTES // 4
        self.flushed = torch.zeros(words, dtype=torch.int32, device=device) if cache == "cold" else None

    def turn(self, clear: Callable[[], None], call: Callable[[], object]) -> list[float]:
        """Seconds of each timed call: a first call, five for the estimate, warm-up, timed calls."""
        clear()
        call()
        synchronize(self.device)
        warmup, repeats = self.counts(self._estimate(clear, call))
        for _ in range(warmup):
            clear()
            self._rest()
            call()
        intervals = [Interval(self.device) for _ in range(repeats)]
        for interval in intervals:
            clear()
            self._flush()
            self._rest()
            interval.mark(0)
            call()
            interval.mark(1)
        synchronize(self.device)
        return [max(interval.seconds(), 1e-9) for interval in intervals]

    def counts(self, estimate_s: float) -> tuple[int, int]:
        """Warm-up and timed calls that fit into the protocol's times."""
        warmup, repeats = (max(1, int(ms / (1e3 * estimate_s))) for ms in (self.warmup_ms, self.rep_ms))
        return warmup, min(repeats, self.most_repeats) if self.most_repeats else repeats

    def _estimate(self, clear: Callable[[], None], call: Callable[[], object]) -> float:
        interval = Interval(self.device)
        interval.mark(0)
        for _ in range(ESTIMATES):
            clear()
            self._flush()
            self._rest()
            call()
        interval.mark(1)
        synchronize(self.device)
        return max(interval.seconds() / ESTIMATES, 1e-9)

    def _flush(self) -> None:
        if self.flushed is not None:
            self.flushed.zero_()

    def _rest(self) -> None:
        if self.rested and self.device.type == "cuda":
            torch.cuda._sleep(REST_CYCLES)
        elif self.rested:
            time.sleep(REST_S)


def busy(device: torch.device, seconds: float, clear: Callable[[], None], call: Callable[[], object]) -> dict:
    """As many calls back to back as fill about `seconds`, by the time of five."""

    def calls(count: int) -> dict:
        def body() -> None:
            for _ in range(count):
                clear()
                call()

        return {"calls": count, "seconds": lap(device, body)[1]}

    calls(1)
    five = calls(ESTIMATES)["seconds"]
    return calls(min(max(math.ceil(seconds * ESTIMATES / max(five, 1e-9)), 1), 1_000_000))
