"""The protocol: one object of JSON a line; standard input is a socket that brings jobs and takes replies.

The first line is a greeting: {"protocol": 1, "python": .., "torch": .., "triton": .., "device": .., ...}. A job is
{"id": 7, "job": "turn", "settings": {..}}; its reply is {"id": 7, "result": {..}} or
{"id": 7, "error": {"kind": "out_of_memory" | "not_available" | "failed", "message": .., "needs": "a GPU"}}, where `needs` is there
if a GPU is what is not available.
Standard output and standard error are one pipe of text, of which the other side quotes the last lines in an error.
"""

import gc
import importlib.metadata
import json
import os
import platform
import queue
import signal
import threading
import traceback
from collections.abc import Callable

import torch

VERSION = 1
# Only the end of a traceback names the cause, and messages must fit a table's note.
LAST_LINES = 6


class Refused(Exception):
    """A failure whose words need no name of an exception before them; `needs_gpu`: a GPU could change it."""

    def __init__(self, words: str, needs_gpu: bool = False) -> None:
        super().__init__(words)
        self.needs_gpu = needs_gpu


class Channel:
    """Takes the socket from standard input, before any library can use it."""

    def __init__(self) -> None:
        # A library that was loaded before may have made it non-blocking; reading would then fail.
        os.set_blocking(0, True)
        # It moves to descriptors that children do not inherit.
        self.jobs = os.fdopen(os.dup(0), "r", encoding="utf-8")
        self.replies = os.fdopen(os.dup(0), "w", encoding="utf-8")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)

    def serve(self, table: dict[str, Callable[..., dict]], greeting: dict) -> None:
        """Answers jobs until the socket closes, which also means that the other side has died."""
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()
        self._send(greeting)
        while True:
            job = json.loads(lines.get())
            self._send({"id": job["id"]} | perform(table, job))

    def _read(self, lines: "queue.SimpleQueue[str]") -> None:
        for line in self.jobs:
            lines.put(line)
        # Not sys.exit: the main thread may be deep inside a compilation, and have helpers that compile.
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)

    def _send(self, message: dict) -> None:
        self.replies.write(json.dumps(message, allow_nan=False) + "\n")
        self.replies.flush()


def perform(table: dict[str, Callable[..., dict]], job: dict) -> dict:
    """The job's result, or its error with a kind that the other side can branch on."""
    try:
        return {"result": table[job["job"]](**job["settings"])}
    except Exception as error:  # noqa: BLE001 - every failure is a reply
        needs = {"needs": "a GPU"} if getattr(error, "needs_gpu", False) else {}
        reply = {"error": {"kind": kind_of(error), "message": words_of(error)} | needs}
        traceback.print_exc()
    # The frames of the traceback keep tensors alive, so release them.
    free_memory()
    return reply


def hello(device: torch.device) -> dict:
    """The versions and settings that the figures depend on, from the libraries."""
    return {
        "protocol": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
    }


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def free_memory() -> None:
    """Frees cached device memory for the other process."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def text_of(value: object, of: Callable[[object], str] = str) -> str:
    """Its text, whatever its own code does, with halves of surrogate pairs, which are in no UTF-8, as escapes."""
    try:
        return str.encode(of(value), "utf-8", "backslashreplace").decode("utf-8")
    except BaseException as error:  # noqa: BLE001 - a subject's class may raise anything
        return f"(its text raises {type(error).__name__})"


def causes(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        at = pending.pop()
        if at is not None and all(at is not known for known in chain):
            chain.append(at)
            pending += [at.__cause__, at.__context__, getattr(at, "inner_exception", None)]
    return chain


def kind_of(error: BaseException) -> str:
    chain = causes(error)
    words = ("out of memory", "you tried to allocate")
    if any(isinstance(e, torch.OutOfMemoryError) or any(w in text_of(e) for w in words) for e in chain):
        return "out_of_memory"
    if getattr(error, "needs_gpu", False):
        return "not_available"
    # By name: importing the compiler's own modules takes seconds, and where they are not loaded nothing compiled. A
    # compiler that fails on our code is a failure, and not a missing tool.
    missing = {"InvalidCxxCompiler", "TritonMissing"}
    if any(missing & {c.__name__ for c in type(e).__mro__ if c.__module__.startswith("torch.")} for e in chain):
        return "not_available"
    return "failed"


def words_of(error: BaseException) -> str:
    texts = [text_of(e) for e in causes(error)]
    memory = [text for text in texts if "tried to allocate" in text.lower()]
    named = text_of(error) if isinstance(error, Refused) else f"{type(error).__name__}: {text_of(error)}"
    text = memory[-1] if memory else named
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return "\n".join(lines[:LAST_LINES])
