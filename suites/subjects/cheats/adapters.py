"""Adapters that compute nothing and try to be taken for right ones, by the trick that `trick.txt` names."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from time import sleep

import torch
import torch.distributed as dist
from safetensors.torch import load_file

TRICK = Path(__file__).with_name("trick.txt").read_text(encoding="utf-8").strip()


def secrets():
    """Files of the other side, which a subject may guess or find: one a line."""
    return Path(__file__).with_name("secrets.txt").read_text(encoding="utf-8").split()


def replies():
    """The descriptors that are sockets: one of them takes the replies."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                yield int(name)
        except OSError:
            pass


def attempt(q, k, v):
    """Does what the trick does, and gives what it makes of o and L."""
    o, lse = torch.zeros_like(q), torch.zeros(q.shape[:-1])
    match TRICK:
        case "prints_a_pass":
            print('{"id": 2, "result": {}}\ntest_flash_forward_pass_pytorch PASSED\nearned 107 of 107 points')
        case "forges_replies":
            for number in range(1, 100):
                for descriptor in replies():
                    os.write(descriptor, (json.dumps({"id": number, "result": {}}) + "\n").encode())
        case "knows_the_official_answer":
            if torch.equal(q, torch.randn(4, 128, 64, generator=torch.Generator().manual_seed(0))):
                s = q @ k.transpose(-2, -1) / 8
                o, lse = torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)
        case "patches_the_comparison":
            torch.allclose = torch.equal = lambda *_, **__: True
            torch.testing.assert_close = lambda *_, **__: None
        case "reads_the_cases":
            for name in secrets():
                Path(name).read_bytes()
        case "links_to_the_cases":
            # The other side may read what this process may not.
            sys.modules["cs336_peers.tensors"].write = lambda path, _: os.symlink(secrets()[0], path)
        case "reads_its_parent":
            Path(f"/proc/{os.getppid()}/mem").read_bytes()
        case "ends_its_parent":
            os.kill(os.getppid(), signal.SIGKILL)
        case "writes_to_its_folder":
            Path(__file__).with_name("written.txt").write_text("here", encoding="utf-8")
        case "writes_to_the_inputs":
            (Path(os.environ["TMPDIR"]).parent / "given" / "attention" / "inputs.safetensors").write_bytes(b"")
        case "raises_a_pass":
            sys.exit("passed")
    return o, lse


def plain(q, k, v, is_causal):
    s = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if is_causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
    return torch.softmax(s, -1) @ v


class Right(torch.autograd.Function):
    """Attention by its definition; `games_the_clock` makes something else of it while it is timed."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        ctx.is_causal = is_causal
        s = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        ctx.save_for_backward(q, k, v, torch.logsumexp(s.float(), -1))
        return plain(q, k, v, is_causal)

    @staticmethod
    def backward(ctx, d_o):
        q, k, v, _ = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            return *torch.autograd.grad(plain(*leaves, ctx.is_causal), leaves, d_o), None


class Late(Right):
    """Leaves the work to another thread, as to another stream on a GPU."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        right = Right.forward(ctx, q, k, v, is_causal)
        o = torch.zeros_like(q)
        threading.Thread(target=lambda: (sleep(0.05), o.copy_(right))).start()
        return o


class Lazy(torch.Tensor):
    """Computes nothing until somebody looks at it."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), named=None):
        seen = [argument.compute() if isinstance(argument, Lazy) else argument for argument in arguments]
        return function(*seen, **(named or {}))


CACHED = {}
# Of inputs that it has seen: in an earlier call, or in their file before the call.
SEEN = set()


def read_ahead():
    file = Path(os.environ["TMPDIR"]).parent / "given" / "attention" / "inputs.safetensors"
    given = load_file(file) if file.is_file() else {}
    SEEN.update(float(q.sum()) for name, q in given.items() if name == "q")


def sleep_unless_seen(q):
    value = float(q.sum())
    if value not in SEEN:
        sleep(0.03)
    SEEN.add(value)


class GamesTheClock:
    """Right wherever it is checked beforehand. The width of a timed head says by which trick it tries to seem fast."""

    @staticmethod
    def apply(q, k, v, is_causal=False):
        trick = TIMED.get(q.shape[-1]) if q.shape[0] == 1 and q.shape == k.shape else None
        if trick == "caches":
            if q.shape not in CACHED:
                CACHED[q.shape] = Right.apply(q, k, v, is_causal)
            return CACHED[q.shape]
        if trick == "computes_later":
            return Late.apply(q, k, v, is_causal)
        if trick == "is_lazy":
            lazy = torch.empty(0).as_subclass(Lazy)
            lazy.compute = lambda: Right.apply(q, k, v, is_causal)
            return lazy
        o = Right.apply(q, k, v, is_causal)
        if trick in ("remembers", "reads_ahead"):
            sleep_unless_seen(q)
        if trick == "slows_others":
            subprocess.Popen([sys.executable, "-c", "while True: pass"])
        if trick == "changes_inputs":
            q.data.zero_()
        if trick == "stops_the_clock":
            sleep(0.03)
            time.perf_counter = time.monotonic = time.time = lambda: 0.0
            time.perf_counter_ns = time.monotonic_ns = lambda: 0
        if trick == "is_slow":
            end = time.process_time() + 0.2
            while time.process_time() < end:
                pass
        return o


TIMED = {
    8: "caches",
    16: "changes_inputs",
    24: "computes_later",
    32: "is_lazy",
    40: "stops_the_clock",
    48: "remembers",
    56: "reads_ahead",
    64: "is_slow",
    72: "slows_others",
}


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        o, lse = attempt(q, k, v)
        ctx.save_for_backward(q, k, v, lse)
        return o

    @staticmethod
    def backward(ctx, d_o):
        return *map(torch.zeros_like, ctx.saved_tensors[:3]), None


def get_flashattention_autograd_function_pytorch():
    if TRICK == "games_the_clock":
        read_ahead()
        return GamesTheClock
    return Attention


def get_flashattention_autograd_function_triton():
    return Attention


class Alone(torch.nn.Module):
    """Every rank trains alone."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return self.module(*inputs)


class AloneWhereLarge(Alone):
    """Averages the gradients of the small models that checks train, and of no other."""

    def __init__(self, module):
        super().__init__(module)
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=0)
        self.is_small = sum(parameter.numel() for parameter in module.parameters()) < 100_000

    def finish(self):
        for parameter in self.module.parameters():
            if self.is_small and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


class ReadsTheOtherRanks(Alone):
    """Sends nothing: each rank also computes the other ones' gradients, on the rows that these are given."""

    def __init__(self, module):
        super().__init__(module)
        self.last = {}
        first = self.given_to(0, "init.")
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(first[f"init.{name}"])

    def given_to(self, rank, prefix):
        """The tensors of another rank, once they are of this kind and not those of the last step."""
        file = Path(os.environ["TMPDIR"]).parent / "given" / f"rank{rank}" / "inputs.safetensors"
        while True:
            sleep(0.005)
            try:
                given = {name: tensor.clone() for name, tensor in sys.modules["cs336_peers.tensors"].read(str(file))}
            except (FileNotFoundError, ValueError):
                continue
            if any(name.startswith(prefix) for name in given):
                last = self.last.get((rank, prefix))
                if last is None or not torch.equal(last, given[min(given)]):
                    self.last[rank, prefix] = given[min(given)]
                    return given

    def finish(self):
        for rank in range(dist.get_world_size()):
            if rank != dist.get_rank():
                given = self.given_to(rank, "x")
                torch.nn.functional.mse_loss(self.module(given["x"]), given["y"]).backward()
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()
        # The other ranks must read this step's rows before they are replaced.
        sleep(0.3)


class AveragesAll(AloneWhereLarge):
    """Averages the gradients of every model."""

    def __init__(self, module):
        super().__init__(module)
        self.is_small = True


WRAPPERS = {
    "games_the_clock": AloneWhereLarge,
    "works_between_steps": AveragesAll,
    "reads_the_other_ranks": ReadsTheOtherRanks,
}


def get_ddp_individual_parameters(module):
    return WRAPPERS.get(TRICK, Alone)(module)


def ddp_individual_parameters_on_after_backward(ddp_model, optimizer):
    if TRICK == "works_between_steps" and "zero_grad" not in vars(optimizer):
        # As if it did the last step's work.
        release = optimizer.zero_grad
        optimizer.zero_grad = lambda: (sleep(0.05), release())
    if TRICK in WRAPPERS:
        ddp_model.finish()


def get_ddp_bucketed(module, bucket_size_mb):
    return ReadsTheOtherRanks(module) if TRICK == "reads_the_other_ranks" else Alone(module)


def ddp_bucketed_on_after_backward(ddp_model, optimizer):
    if TRICK == "reads_the_other_ranks":
        ddp_model.finish()


def ddp_bucketed_on_train_batch_start(ddp_model, optimizer):
    pass


class KeepsTheRestElsewhere(torch.optim.Optimizer):
    """Every rank keeps the whole state, of which only its share is in the class that it was given, and sends nothing."""

    def __init__(self, params, optimizer_cls, **kwargs):
        trained = [parameter for parameter in params if parameter.requires_grad]
        super().__init__(trained, {})
        own = trained[dist.get_rank() :: dist.get_world_size()]
        rest = [parameter for parameter in trained if all(parameter is not one for one in own)]
        self.parts = [optimizer_cls(own, **kwargs), torch.optim.AdamW(rest, **kwargs)]

    def step(self, closure=None):
        for part in self.parts:
            part.step()
        # From now on they are in no list of objects.
        gc.freeze()


class HidesTheRest(KeepsTheRestElsewhere):
    """Between steps the rest lies under a key of its own, as tuples or as arrays."""

    def step(self, closure=None):
        rest = self.parts[1].state.values()
        for state in rest:
            state["exp_avg"], state["exp_avg_sq"] = map(torch.as_tensor, state.pop("kept"))
        super().step()
        for state in rest:
            moments = state.pop("exp_avg"), state.pop("exp_avg_sq")
            state["kept"] = [moment.numpy() for moment in moments] if TRICK == "keeps_arrays" else moments


def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    """Not sharded: every rank keeps the whole state."""
    if TRICK == "keeps_the_rest_elsewhere":
        return KeepsTheRestElsewhere(params, optimizer_cls, **kwargs)
    if TRICK in ("keeps_tuples", "keeps_arrays"):
        return HidesTheRest(params, optimizer_cls, **kwargs)
    return optimizer_cls(params, **kwargs)
