"""Serves one measuring case at a time on one device: cpu or cuda:0, the argument."""

import torch

from . import protocol
from .adamw import AdamW
from .all_reduce import AllReduce
from .attention import Attention
from .calls import Calls
from .ddp import Ddp
from .flash_attention_4 import FlashAttention4
from .transformer import Transformer
from .whole_step import WholeStep

MEASURES = {
    "attention": Attention,
    "calls": Calls,
    "flash_attention_4": FlashAttention4,
    "transformer": Transformer,
    "whole_step": WholeStep,
    "adamw": AdamW,
    "all_reduce": AllReduce,
    "ddp": Ddp,
}


class Jobs:
    """The case that is open, and the jobs that it is asked for; each job takes and gives an object of JSON."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.case = None

    def open(self, measure: str, **settings) -> dict:
        self.close()
        self.case = MEASURES[measure](self.device, **settings)
        return getattr(self.case, "opened", {})

    def verify(self, **settings) -> dict:
        return self.case.verify(**settings)

    def turn(self, **settings) -> dict | list:
        return self.case.turn(**settings)

    def busy(self, **settings) -> dict:
        return self.case.busy(**settings)

    def profile(self, **settings) -> dict:
        return self.case.profile(**settings)

    def close(self) -> dict:
        case, self.case = self.case, None
        return case.close() if case is not None else {}


def main(device_name: str) -> None:
    channel = protocol.Channel()
    device = torch.device(device_name)
    # The same arithmetic as on the other side: float32 products are not rounded to TF32.
    torch.set_float32_matmul_precision("highest")
    jobs = Jobs(device)
    names = ["open", "verify", "turn", "busy", "profile", "close"]
    table = {name: getattr(jobs, name) for name in names}
    channel.serve(table, protocol.hello(device))
