"""What the other side times of a subject: calls of an autograd function, and training steps under its module or optimizer.

A call lasts from the other side's message to the reply: no clock of this process is read. What is copied at its end, the other
side compares with the definition.
"""

import contextlib
import random
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from . import tensors
from .adapters import Calling, copies, forget_compiled, required, states
from .group import Group
from .model import Model, cross_entropy

RANDOM = random.SystemRandom()


class TimedAttention:
    """Calls of an autograd function that the other side times: from the message that starts one to its reply.

    Each call has inputs of its own. Its results are copied before it replies, so that what is lazy or under way elsewhere is
    computed within the time; the other side compares the copies. The function is made before its inputs are there.
    """

    def __init__(self, adapter: Callable, calling: Calling, on_gpu: bool, attention_pass: str) -> None:
        self.calling = calling
        self.device = torch.device("cuda:0" if on_gpu else "cpu")
        self.attention_pass = attention_pass
        self.function = adapter()
        self.results: dict[str, Tensor] = {}

    def prepare(self, inputs: str) -> dict:
        """Reads q, k and v of the next call; before a backward pass also runs the forward pass."""
        given = copies(inputs)
        self.leaves = {name: given[name].to(self.device).requires_grad_() for name in "qkv"}
        forget_compiled(list(self.leaves.values()))
        if self.attention_pass == "backward":
            with self.calling():
                self.o = required(self.function.apply(*self.leaves.values(), True), "o")
        tensors.synchronize()
        return {}

    def gradient(self, inputs: str) -> dict:
        """Reads do."""
        self.do = copies(inputs)["do"].to(self.device)
        tensors.synchronize()
        return {}

    def run(self) -> dict:
        """The call that is timed."""
        with self.calling():
            if self.attention_pass != "backward":
                self.o = self.function.apply(*self.leaves.values(), True)
                self.results["o"] = tensors.copy(self.o, "o")
            if self.attention_pass != "forward":
                self.o.backward(self.do)
                self.results |= {f"d{name}": tensors.copy(leaf.grad, f"d{name}") for name, leaf in self.leaves.items()}
            # Of all streams.
            tensors.synchronize()
        return {}

    def give(self, outputs: str) -> dict:
        """The results, and the inputs as they are now."""
        tensors.write(outputs, self.results | self.leaves | {"do": self.do})
        return {}


class TimedSteps:
    """Whole training steps of the reference model: under the subject's module, or with its optimizer under PyTorch's DDP."""

    def __init__(self, adapter: Callable, hooks: list[Callable], calling: Calling, group: Group) -> None:
        self.adapter = adapter
        # After backward; and, where there are two, at the start of a batch. An optimizer has none.
        self.after_backward, self.at_start = hooks[:1], hooks[1:]
        self.calling = calling
        self.group = group

    def begin(
        self, inputs: str, config: dict, dtype: str, adamw: dict, shards: bool, bucket_size_mb: float | None
    ) -> dict:
        """Makes the model and a new state of the optimizer; the wrapper must broadcast rank 0's values, which are given."""
        device = self.group.device
        self.autocast = dtype == "bfloat16"
        torch.manual_seed(self.group.rank)
        with device:
            # The adapters may have set another default type.
            model = Model(**config).float()
        # One value at a time: all of them are as large as the model, whose process has a limit on memory.
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, given in tensors.read(inputs):
                if name in parameters:
                    parameters.pop(name).copy_(given)
            for parameter in parameters.values():
                parameter.normal_()
        # As the other columns: a loop over tensors on the CPU.
        kind = {"fused": True} if device.type == "cuda" else {"foreach": False}
        betas = (adamw.pop("beta1"), adamw.pop("beta2"))
        if shards:
            places = {"device_ids": [device.index]} if device.type == "cuda" else {}
            self.wrapped = DistributedDataParallel(model, **places)
            self.optimizer = self.adapter(self.wrapped.parameters(), torch.optim.AdamW, betas=betas, **adamw, **kind)
        else:
            named = {} if bucket_size_mb is None else {"bucket_size_mb": bucket_size_mb}
            self.wrapped = self.adapter(model, **named)
            with self.calling():
                wrapped = list(self.wrapped.parameters())
            self.optimizer = torch.optim.AdamW(wrapped, betas=betas, **adamw, **kind)
        self.parameters = dict(model.named_parameters())
        tensors.synchronize()
        return {}

    def prepare(self, inputs: str) -> dict:
        """Reads the tokens of the next step."""
        given = copies(inputs)
        self.tokens, self.targets = (given[name].to(self.group.device) for name in ("tokens", "targets"))
        tensors.synchronize()
        return {}

    def run(self, names: list[str]) -> dict:
        """The step that is timed, from the release of the last one's gradients to a copy of some values of these parameters."""
        with self.calling():
            self.optimizer.zero_grad()
        for hook in self.at_start:
            hook(self.wrapped, self.optimizer)
        with self.calling():
            with self._precision():
                loss = cross_entropy(self.wrapped(self.tokens), self.targets)
            loss.backward()
        for hook in self.after_backward:
            hook(self.wrapped, self.optimizer)
        with self.calling():
            self.optimizer.step()
            # Drawn now: nobody can have computed these values alone.
            self.phase = RANDOM.random()
            self.copies = {name: self._sample(name) for name in names}
            # Of all streams.
            tensors.synchronize()
        return {}

    def give(self, outputs: str) -> dict:
        """Those copies, samples of all other parameters as they are now, and the bytes of state that this rank keeps."""
        now = {name: self._sample(name) for name in self.parameters if name not in self.copies}
        tensors.write(outputs, self.copies | now)
        moments = {id(t): t for _, moments in states() for t in moments}
        return {"state_bytes": sum(t.nbytes for t in moments.values()), "phase": self.phase}

    def _sample(self, name: str) -> Tensor:
        return tensors.copy(tensors.sample(self.parameters[name], 256, self.phase), name)

    def _precision(self) -> contextlib.AbstractContextManager:
        if self.autocast:
            return torch.autocast(self.group.device.type, torch.bfloat16)
        return contextlib.nullcontext()
