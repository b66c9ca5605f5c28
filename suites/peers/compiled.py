"""torch.compile from an empty cache, with what it compiled counted: a fallback to eager must not pass for a gain."""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator

import torch

# The vector instructions are read from the processor's flags; without this, each is tried by building and loading a
# test library, half a minute before the first kernel. Only CPU code asks.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def require_own_headers() -> None:
    """TorchInductor keeps compiled headers in a folder of known name among the temporary files. It must be this user's."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = default_cache_dir()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise RuntimeError(f"{folder} is a link or belongs to user {found.st_uid}: set TMPDIR to a folder of yours")
    os.chmod(folder, 0o700)


@contextlib.contextmanager
def empty_cache() -> Iterator[None]:
    """Compiled code goes into a new folder of this user's, and comes from there alone."""
    from torch._inductor.utils import fresh_cache

    require_own_headers()
    # Our side removes what a killed process leaves in this folder.
    with fresh_cache(dir=os.environ.get("CS336_WORKER_FOLDER")):
        yield


class Cold:
    """A compiler without caches of earlier shapes, in memory or on disk.

    One shape is compiled per instance: after eight shapes of one function the compiler would stop compiling, and from
    the second on it would make general kernels for every length.
    """

    def __init__(self, workers: bool = True) -> None:
        """Without workers everything is compiled in this process: quick for a few kernels, and no process is left over."""
        import torch._dynamo
        import torch._inductor.config
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        torch._dynamo.config.error_on_recompile = True
        if not workers:
            torch._inductor.config.compile_threads = 1
        counters.clear()
        self.counters = counters
        self.functions = 0
        self.cache = contextlib.ExitStack()
        self.cache.enter_context(empty_cache())

    def settle(self) -> None:
        """Ends the processes that compiled: what is timed next must not share the machine with them."""
        from torch._inductor.async_compile import shutdown_compile_workers

        shutdown_compile_workers()

    def compile(self, function: Callable, mode: str = "default") -> Callable:
        """Compiles `function` as one graph for the shapes of its first call; two functions must have separate code objects."""
        self.functions += 1
        return torch.compile(function, fullgraph=True, dynamic=False, mode=mode)

    def counts(self) -> dict:
        """Graphs against functions compiled, breaks in them, and hits in a cache that must have been empty."""
        hits = self.counters["inductor"]["fxgraph_cache_hit"] + self.counters["aot_autograd"]["autograd_cache_hit"]
        return {
            "functions": self.functions,
            "graphs": self.counters["stats"]["unique_graphs"],
            "graph_breaks": sum(self.counters["graph_break"].values()),
            "cache_hits": hits,
        }

    def close(self) -> dict:
        counts = self.counts()
        self.cache.close()
        torch._dynamo.reset()
        return counts
