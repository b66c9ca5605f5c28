"""AdamW whose step is one kernel over all parameters."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with the semantics and defaults of `torch.optim.AdamW`.

    Args:
        params: parameters or groups. On a GPU contiguous float32, all of a group on one device; on a CPU any
            of float64, float32, bfloat16 and float16.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`; a group may have its own.

    State of each parameter of shape S: `exp_avg` S, `exp_avg_sq` S, and `step` (2,) int64, whose first element counts the
    steps on the parameter's own device, so that a captured CUDA graph counts on at each replay. A parameter without a
    gradient is left alone.

    Raises:
        ValueError: an option out of its range, or one that this class has not; a parameter that is no real number.
        RuntimeError: a parameter that the kernel cannot read, by its number in the group; on a GPU, memory shared by two.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, also during training; ValueError: an option of the group out of its range."""
        group = {**self.defaults, **param_group}
        _require_known(group)
        for name, value in [("lr", group["lr"]), ("eps", group["eps"]), ("weight_decay", group["weight_decay"])]:
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"{name} is {value}: it must be zero or positive, and finite")
        for name, value in zip(("beta1", "beta2"), group["betas"], strict=True):
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name} is {value}: it must lie in [0, 1)")
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                self.param_groups.pop()
                raise ValueError(f"a parameter is {parameter.dtype}: it must be of a real floating-point type")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient; gives what `closure` gives."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return
        states = [self._state_of(parameter) for parameter in parameters]
        beta1, beta2 = group["betas"]
        torch.ops.cs336.fused_adamw_(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["step"] for state in states],
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            # What is made in inference mode cannot change outside it.
            with torch.inference_mode(False):
                state["step"] = torch.zeros(2, dtype=torch.int64, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class or of `torch.optim.AdamW`, whose step counts are single numbers.

        Raises:
            ValueError: a state of another optimizer, or one made with an option that this class has not.
        """
        _require_own(state_dict)
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            count = int(torch.as_tensor(state["step"]).reshape(-1)[0])
            state["step"] = torch.tensor([count, 0], dtype=torch.int64, device=parameter.device)


def _require_own(state_dict: dict[str, Any]) -> None:
    """ValueError: the state would go on by other rules than those that made it."""
    needed = {"step", "exp_avg", "exp_avg_sq"}
    groups = state_dict["param_groups"]
    # Ours names no option of PyTorch's; Adam, of which AdamW is a kind, says which decay it has.
    is_own = all(
        "betas" in group and ("maximize" not in group or "amsgrad" in group) and group.get("decoupled_weight_decay", True)
        for group in groups
    )
    if not is_own or not all(needed <= state.keys() for state in state_dict["state"].values()):
        raise ValueError("the state is that of another optimizer: load one of cs336.AdamW or torch.optim.AdamW")
    for state in state_dict["state"].values():
        count = float(torch.as_tensor(state["step"]).reshape(-1)[0])
        if not (count >= 0.0 and count.is_integer()):
            raise ValueError(f"the state counts {count} steps: it must be a whole number from 0 on")
    for group in groups:
        _require_known(group)


def _require_known(group: dict[str, Any]) -> None:
    for option in ("amsgrad", "maximize"):
        if group.get(option):
            raise ValueError(f"a group has {option}=True, which cs336.AdamW does not have")
