"""What the official tests do with a subject's adapters, one class a kind: attention, a replica, a sharded optimizer."""

import collections
import contextlib
import copy
import gc
import numbers
import sys
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed
from torch import Tensor, nn

from . import tensors
from .protocol import Refused

Calling = Callable[[], contextlib.AbstractContextManager[None]]

# Bound before any code of a subject is imported.
_FORGET_COMPILED = torch.compiler.reset
# The sizes and types of a function's last inputs.
_LAST: list[tuple[torch.Size, torch.dtype, torch.device]] = []


def forget_compiled(leaves: list[Tensor]) -> None:
    """Where these inputs have other sizes or types than the last ones, drops what `torch.compile` has made, as a new process has
    none: it keeps eight versions of a function and then fails or runs it uncompiled, and takes sizes that have changed for variables.
    """
    now = [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
    if now != _LAST and "torch._dynamo" in sys.modules:
        _FORGET_COMPILED()
    _LAST[:] = now


class Attention:
    """One call of an autograd function, and its graph until the backward pass."""

    def __init__(self, adapter: Callable, calling: Calling, on_gpu: bool) -> None:
        self.adapter = adapter
        self.calling = calling
        self.device = torch.device("cuda:0" if on_gpu and torch.cuda.is_available() else "cpu")

    def forward(self, inputs: str, outputs: str, is_causal: bool) -> dict:
        """Gives o, and each tensor that its node saved under `saved.<number>`."""
        self.function = self.adapter()
        self.is_causal = is_causal
        given = copies(inputs)
        self.leaves = [given[name].to(self.device).requires_grad_() for name in "qkv"]
        forget_compiled(self.leaves)
        with self.calling():
            self.o = self.function.apply(*self.leaves, is_causal)
            saved = getattr(getattr(self.o, "grad_fn", None), "saved_tensors", ())
            stored = {f"saved.{i}": storable(tensor) for i, tensor in enumerate(saved) if tensor is not None}
        results = {"o": required(self.o, "o")} | stored
        tensors.write(outputs, results)
        return {}

    def backward(self, inputs: str, outputs: str) -> dict:
        given = copies(inputs)
        with self.calling():
            self.o.backward(given["do"].to(self.device))
        results = {f"d{name}": required(leaf.grad, f"d{name}") for name, leaf in zip("qkv", self.leaves, strict=True)}
        tensors.write(outputs, results)
        return {}

    def another(self, turned: bool) -> dict:
        """One more forward pass, as of another layer: what belongs to the first must not lie on the function. What it gives or
        raises does not count, since other checks see that.
        """
        with contextlib.suppress(BaseException):
            leaves = [torch.randn_like(leaf).requires_grad_() for leaf in self.leaves]
            self.function.apply(*leaves, self.is_causal != turned)
        return {}


def storable(saved: Tensor) -> Tensor:
    """A saved tensor as a file can hold it; of what is not the log-sum-exp, the shape counts."""
    if saved.is_meta:
        return torch.zeros(saved.shape)
    dense = saved if saved.layout == torch.strided else saved.to_dense()
    # A mask of bytes or a product of eight bits is in no file as it is.
    return dense if dense.dtype in tensors.DTYPES.values() else dense.to(torch.float64)


class Replica:
    """A network under the subject's data-parallel wrapper, trained by plain gradient descent."""

    def __init__(self, wrap: Callable, hooks: list[Callable], calling: Calling) -> None:
        self.wrap = wrap
        # After backward; and, where there are two, at the start of a batch.
        self.after_backward, *self.at_start = hooks
        self.calling = calling

    def start(self, blueprint: dict, inputs: str, outputs: str, lr: float, bucket_size_mb: float | None) -> dict:
        self.network = Network(blueprint, inputs)
        named = {} if bucket_size_mb is None else {"bucket_size_mb": bucket_size_mb}
        self.wrapped = self.wrap(self.network, **named)
        with self.calling():
            parameters, self.module = list(self.wrapped.parameters()), self.wrapped.module
            own = list(self.module.parameters())
        if list(map(id, own)) != list(map(id, parameters)):
            raise Refused("the wrapped module's parameters() are not those of its .module in the same order")
        self.optimizer = torch.optim.SGD(parameters, lr=lr)
        self._write(outputs)
        return {}

    def step(self, inputs: str, outputs: str) -> dict:
        """One step as the official test makes it: mean squared error on this rank's rows."""
        given = copies(inputs)
        for hook in self.at_start:
            hook(self.wrapped, self.optimizer)
        self.optimizer.zero_grad()
        with self.calling():
            nn.functional.mse_loss(self.wrapped(given["x"]), given["y"]).backward()
        self.after_backward(self.wrapped, self.optimizer)
        self.optimizer.step()
        self._write(outputs)
        return {}

    def _write(self, outputs: str) -> None:
        names = [name for name, _ in self.network.named_parameters()]
        tensors.write(outputs, dict(zip(names, self.module.parameters(), strict=True)))


# Bound before any code of a subject is imported.
_OBJECTS, _UNFREEZE, _OPTIMIZER = gc.get_objects, gc.unfreeze, torch.optim.Optimizer


def states(besides: torch.optim.Optimizer | None = None) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Each parameter and what an optimizer of this process keeps for it: of all optimizers but `besides`, whoever made them, since
    an adapter need not use the class that it is given.
    """
    # Objects that are frozen are in no list.
    _UNFREEZE()
    for found in _OBJECTS():
        if issubclass(type(found), _OPTIMIZER) and found is not besides:
            kept_by = vars(found).get("state", {})
            if not isinstance(kept_by, Mapping):
                raise Refused(f"the state of {type(found).__name__} is {type(kept_by).__name__}, must be a mapping")
            for parameter, state in list(kept_by.items()):
                # PyTorch's state_dict takes entries that are no parameter's. A step is a number, or a tensor without dimensions.
                yield parameter, [tensor for tensor in tensors_in(state, type(found).__name__) if tensor.dim() > 0]


# What a state may hold beside tensors: it says how the values lie, and has none.
PLAIN = (numbers.Number, str, type(None), slice, range, torch.dtype, torch.device, torch.distributed.Work)
MOST_PLAIN = 64


def tensors_in(state: object, owner: str) -> Iterator[Tensor]:
    """The tensors of a state, also in containers. Refuses other objects, and many numbers, in which moments could lie that nothing
    counts.
    """
    waiting, seen, plain = [state], set(), 0
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        if isinstance(found, Tensor):
            seen.add(id(found))
            plain += found.dim() == 0
            yield found
        elif isinstance(found, Mapping):
            seen.add(id(found))
            waiting.extend(found.values())
        elif isinstance(found, (list, tuple, set, frozenset, collections.deque)):
            seen.add(id(found))
            waiting.extend(found)
        elif isinstance(found, PLAIN):
            plain += 1
        else:
            raise Refused(f"the state of {owner} holds {type(found).__name__}: must be tensors, numbers and containers of them")
        if plain > MOST_PLAIN:
            raise Refused(f"the state of {owner} holds more than {MOST_PLAIN} numbers for one parameter: must be tensors")


def values_of(moments: list[Tensor]) -> int:
    """The values that have this state: AdamW keeps two tensors of a parameter's size, and a copy may lie beside them."""
    sizes = [moment.numel() for moment in moments]
    return max(*sizes, sum(sizes) // 3)


class Sharded:
    """A network and the subject's sharded optimizer around one of PyTorch's, and beside them, as in the official test, a copy of
    the network and an optimizer that is not sharded: in one process the two must agree in nearly every bit.
    """

    def __init__(self, adapter: Callable, calling: Calling) -> None:
        self.adapter = adapter
        self.calling = calling

    def start(self, blueprint: dict, inputs: str, outputs: str, optimizer: str, arguments: dict) -> dict:
        self.network = Network(blueprint, inputs)
        wrapped = getattr(torch.optim, optimizer)
        arguments["betas"] = tuple(arguments["betas"])
        self.whole = copy.deepcopy(self.network)
        self.whole_optimizer = wrapped(self.whole.parameters(), **arguments)
        self.optimizer = self.adapter(self.network.parameters(), wrapped, **arguments)
        self._write(outputs)
        return {}

    def step(self, inputs: str, outputs: str) -> dict:
        """One step on all rows: the sum of squared errors. Gives the number of values that this rank keeps state for."""
        given = copies(inputs)
        self._step(self.whole, self.whole_optimizer, given)
        with self.calling():
            self._step(self.network, self.optimizer, given)
        self._write(outputs)
        # An optimizer may show the state of another one as its own.
        kept: dict[int, dict[int, Tensor]] = {}
        for parameter, moments in states(self.whole_optimizer):
            kept.setdefault(id(parameter), {}).update((id(moment), moment) for moment in moments)
        return {"stepped_numel": sum(values_of(list(moments.values())) for moments in kept.values() if moments)}

    @staticmethod
    def _step(network: nn.Module, optimizer: torch.optim.Optimizer, given: dict[str, Tensor]) -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(network(given["x"]), given["y"], reduction="sum").backward()
        optimizer.step()

    def _write(self, outputs: str) -> None:
        whole = {f"unsharded.{name}": value for name, value in self.whole.named_parameters()}
        tensors.write(outputs, whole | dict(self.network.named_parameters()))


class Network(nn.Module):
    """The network of a blueprint (`model/toy.rs`), with the values `init.<parameter>` of a file."""

    def __init__(self, blueprint: dict, file: str) -> None:
        super().__init__()
        if blueprint["fixed_parameter"]:
            self.no_grad_fixed_param = nn.Parameter(torch.zeros(2, dtype=torch.float32), requires_grad=False)
        self.layers = [layer["name"] for layer in blueprint["layers"]]
        for layer in blueprint["layers"]:
            *path, name = layer["name"].split(".")
            parent: nn.Module = self
            for folder in path:
                if not hasattr(parent, folder):
                    parent.add_module(folder, nn.Module())
                parent = getattr(parent, folder)
            # Whatever type a subject has made the default.
            linear = nn.Linear(layer["d_in"], layer["d_out"], bias=layer["bias"] != "none", dtype=torch.float32)
            linear.weight.requires_grad_(layer["weight"] != "frozen")
            if layer["bias"] == "frozen":
                linear.bias.requires_grad_(False)
            parent.add_module(name, linear)
            if isinstance(layer["weight"], dict):
                linear.weight = self.get_submodule(layer["weight"]["tied_to"]).weight
        values = copies(file)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(values[f"init.{name}"])

    def forward(self, x: Tensor) -> Tensor:
        for i, name in enumerate(self.layers):
            x = self.get_submodule(name)(x if i == 0 else torch.relu(x))
        return x


def copies(file: str) -> dict[str, Tensor]:
    """The file's tensors in memory of their own: the other side writes its next inputs to the same file."""
    return {name: tensor.clone() for name, tensor in tensors.read(file)}


def required(value: object, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise Refused(f"{name} is {type(value).__name__}, must be a tensor")
    return value
