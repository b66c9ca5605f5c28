"""Tests of what a caller may get wrong: each is refused in words, or computed as PyTorch computes it."""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import cs336
from test_ranks import WORLD_SIZE, on_ranks


def raised(error: type[Exception], call: Callable[[], object]) -> str:
    """The words of the error that `call` must raise."""
    try:
        call()
    except error as expected:
        return str(expected)
    raise AssertionError(f"no {error.__name__} was raised")


def attention_refuses_inputs_of_two_devices_and_forward_derivatives() -> None:
    here, nowhere = torch.randn(1, 4, 8), torch.empty(1, 4, 8, device="meta")
    for inputs in [(here, nowhere, here), (here, here, nowhere), (nowhere, here, here)]:
        said = raised(RuntimeError, lambda inputs=inputs: cs336.flash_attention(*inputs))
        assert "needs them on one device" in said, said
    assert cs336.flash_attention(nowhere, nowhere, nowhere).shape == here.shape
    jvp = lambda: torch.func.jvp(lambda q: cs336.flash_attention(q, here, here), (here,), (here,))  # noqa: E731
    said = raised(NotImplementedError, jvp)
    assert "no forward-mode derivative" in said, said


def the_drop_in_takes_heads_of_no_width() -> None:
    empty = torch.ones(1, 4, 0)
    ours = cs336.scaled_dot_product_attention(empty, empty, empty, scale=1.0)
    assert ours.shape == F.scaled_dot_product_attention(empty, empty, empty, scale=1.0).shape


def _stepped(kind: Callable[..., torch.optim.Optimizer], **options: object) -> tuple[nn.Parameter, dict]:
    """A parameter after one step, and the optimizer's state."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = kind([parameter], **options)
    parameter.grad = torch.ones(3)
    optimizer.step()
    return parameter, copy.deepcopy(optimizer.state_dict())


def adamw_refuses_states_that_go_on_by_other_rules() -> None:
    optim = torch.optim
    for kind, options, words in [
        (optim.AdamW, {"amsgrad": True}, "amsgrad=True"),
        (optim.AdamW, {"maximize": True}, "maximize=True"),
        (optim.Adam, {"weight_decay": 0.5}, "another optimizer"),
        (optim.RAdam, {}, "another optimizer"),
        (optim.NAdam, {}, "another optimizer"),
        (optim.SGD, {"momentum": 0.9}, "another optimizer"),
    ]:
        parameter, state = _stepped(kind, **options)
        ours = cs336.AdamW([parameter])
        said = raised(ValueError, lambda ours=ours, state=state: ours.load_state_dict(state))
        assert words in said and not ours.state, said
    said = raised(ValueError, lambda: cs336.AdamW([{"params": [nn.Parameter(torch.ones(3))], "maximize": True}]))
    assert "maximize=True" in said, said
    for count in (-5.0, 0.5, torch.inf, torch.nan):
        parameter, state = _stepped(optim.AdamW)
        state["state"][0]["step"] = torch.tensor(count)
        ours = cs336.AdamW([parameter])
        said = raised(ValueError, lambda ours=ours, state=state: ours.load_state_dict(state))
        assert f"counts {count} steps" in said and not ours.state, said
    for kind in (optim.AdamW, cs336.AdamW):
        parameter, state = _stepped(kind)
        ours = cs336.AdamW([parameter])
        ours.load_state_dict(state)
        assert ours.state[parameter]["step"].tolist() == [1, 0]


def adamw_takes_real_numbers_and_steps_in_inference_mode() -> None:
    for dtype in (torch.complex64, torch.int64):
        parameter = torch.ones(3, dtype=dtype)
        said = raised(ValueError, lambda parameter=parameter: cs336.AdamW([parameter]))
        assert str(dtype) in said, said
    ours, theirs = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizers = [cs336.AdamW([ours]), torch.optim.AdamW([theirs], foreach=False)]
    for is_inference in (True, False):
        for parameter, optimizer, mode in zip((ours, theirs), optimizers, (is_inference, False), strict=True):
            with torch.inference_mode(mode):
                parameter.grad = torch.ones(3)
                optimizer.step()
    assert torch.equal(ours, theirs)
    with torch.inference_mode():
        made_within = torch.zeros(3)
    for moment, words in [(made_within, "outside inference mode"), (torch.zeros(1).expand(3), "single memory location")]:
        optimizers[0].state[ours]["exp_avg"] = moment
        said = raised(RuntimeError, optimizers[0].step)
        assert words in said and "panic" not in said, said


class Breaks(torch.autograd.Function):
    """The identity, whose backward pass may raise."""

    @staticmethod
    def forward(ctx, x: Tensor, breaks: bool) -> Tensor:
        ctx.breaks = breaks
        return x.clone()

    @staticmethod
    def backward(ctx, d_x: Tensor) -> tuple[Tensor, None]:
        if ctx.breaks:
            raise ValueError("as where memory runs out")
        return d_x, None


class Breakable(nn.Module):
    """Two layers, between which a backward pass may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, breaks: bool) -> Tensor:
        return self.b(Breaks.apply(self.a(x), breaks))


def _average_again(rank: int) -> None:
    x = torch.full((3, 4), 1.0 + rank)
    for strategy in cs336.STRATEGIES:
        for megabytes in (1e-5, 25):
            replica = cs336.DistributedDataParallel(Breakable(), strategy, megabytes)
            for again in (False, True):
                loss = replica(x, True).sum()
                raised(ValueError, lambda loss=loss: loss.backward(retain_graph=True))
                if again:
                    # Without another forward pass between.
                    raised(ValueError, loss.backward)
                replica.zero_grad()
                replica(x, False).sum().backward()
                weight = replica.module.a.weight.grad
                both = [torch.empty_like(weight) for _ in range(WORLD_SIZE)]
                dist.all_gather(both, weight)
                assert torch.equal(both[0], both[1]), (strategy, megabytes, again)


def gradients_are_averaged_again_after_a_backward_pass_that_raised() -> None:
    on_ranks(_average_again)


class Holds(nn.Module):
    """A layer beside a buffer."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("held", buffer)


def _broadcast_strided(rank: int) -> None:
    rows = torch.arange(64.0) + rank
    said = raised(RuntimeError, lambda: cs336.DistributedDataParallel(Holds(rows.expand(512, 64))))
    assert said.startswith("held cannot take rank 0's values: "), said
    every_other = rows.clone()
    cs336.DistributedDataParallel(Holds(every_other[::2]))
    assert torch.equal(every_other[::2], torch.arange(0.0, 64.0, 2.0)), every_other
    assert torch.equal(every_other[1::2], rows[1::2]), every_other
    wholes = [torch.full((16,), 1.0 + rank) for _ in range(2)]
    halves = [nn.Parameter(whole[::2]) for whole in wholes]
    optimizer = cs336.ShardedOptimizer(halves, torch.optim.SGD, lr=1.0)
    for half in halves:
        half.data.zero_()
        half.grad = torch.ones(8)
    optimizer.step()
    for whole in wholes:
        assert torch.equal(whole, torch.tensor([-1.0, 1.0 + rank]).repeat(8)), whole
    conv = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last if rank else torch.contiguous_format)
    said = raised(RuntimeError, lambda: cs336.DistributedDataParallel(conv))
    assert "strides" in said, said
    sparse = cs336.DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    said = raised(RuntimeError, lambda: sparse(torch.tensor([1])).sum().backward())
    assert "weight has a gradient of layout torch.sparse_coo" in said, said


def _differ(rank: int) -> None:
    model = nn.Identity() if rank == 0 else nn.Linear(2, 2)
    said = raised(RuntimeError, lambda: cs336.DistributedDataParallel(model))
    assert said.startswith(f"the model of rank {1 - rank} is not that of rank {rank}"), said
    parameters = [nn.Parameter(torch.zeros(2 + rank))]
    said = raised(RuntimeError, lambda: cs336.ShardedOptimizer(parameters, torch.optim.SGD, lr=1.0))
    assert said.startswith(f"the group of parameters of rank {1 - rank} is not that of rank {rank}"), said
    copied = copy.deepcopy(cs336.DistributedDataParallel(Breakable(), "naive"))
    copied(torch.full((3, 4), 1.0 + rank), False).sum().backward()
    weight = copied.module.a.weight.grad
    both = [torch.empty_like(weight) for _ in range(WORLD_SIZE)]
    dist.all_gather(both, weight)
    assert torch.equal(both[0], both[1]), "the copy does not average"


def models_that_differ_are_refused_and_a_copy_averages_too() -> None:
    on_ranks(_differ)


def only_memory_of_the_tensor_takes_rank_0s_values() -> None:
    on_ranks(_broadcast_strided)


TESTS = [
    attention_refuses_inputs_of_two_devices_and_forward_derivatives,
    the_drop_in_takes_heads_of_no_width,
    adamw_refuses_states_that_go_on_by_other_rules,
    adamw_takes_real_numbers_and_steps_in_inference_mode,
    gradients_are_averaged_again_after_a_backward_pass_that_raised,
    only_memory_of_the_tensor_takes_rank_0s_values,
    models_that_differ_are_refused_and_a_copy_averages_too,
]
