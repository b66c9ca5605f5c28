"""Data parallelism that waits for each call, with the mistakes of `src/checks/mutants`."""

import torch
import torch.distributed as dist

from bug import has


class Replica(torch.nn.Module):
    def __init__(self, module, bucket_size_mb):
        super().__init__()
        self.module = module
        self.steps = 0
        root = 1 if has("last_rank_leads") else 0
        for parameter in module.parameters():
            if has("no_broadcast") or has("frozen_apart") and not parameter.requires_grad:
                continue
            dist.broadcast(parameter.data, src=root)
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.buckets = [[]]
        for parameter in reversed(self.trained):
            size = sum(member.numel() for member in [*self.buckets[-1], parameter]) * 4e-6
            if self.buckets[-1] and size > bucket_size_mb:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
        self.previous = [torch.zeros_like(parameter) for parameter in self.trained]
        if has("stale_view"):
            self.flat = torch.zeros(sum(parameter.numel() for parameter in self.trained))
            views = self.flat.split([parameter.numel() for parameter in self.trained])
            for parameter, view in zip(self.trained, views, strict=True):
                parameter.grad = view.view_as(parameter)
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda p, number=number: self.arrived(p, number))

    def forward(self, *inputs):
        self.ready = [0] * len(self.buckets)
        return self.module(*inputs)

    def arrived(self, parameter, number):
        """Averages the bucket once all of its gradients are there."""
        self.ready[number] += 1
        if has("bucket_early"):
            if self.ready[number] == 1:
                self.average([parameter])
        elif has("wrong_hook"):
            if self.ready[number] == len(self.buckets[number]) and number + 1 < len(self.buckets):
                self.average(self.buckets[number + 1])
            if number == 0:
                self.average([parameter])
        elif self.ready[number] == len(self.buckets[number]) and not has("stale_view", "stale"):
            self.average(self.buckets[number])

    def average(self, parameters):
        if has("local") or has("first_step_only") and self.steps > 0:
            return
        if has("only_first"):
            parameters = [parameter for parameter in parameters if parameter is self.trained[0]]
        for parameter in parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                if not has("summed"):
                    parameter.grad /= dist.get_world_size()

    def finish(self):
        if has("stale_view"):
            dist.all_reduce(self.flat)
            self.flat /= dist.get_world_size()
        if has("stale"):
            for parameter, previous in zip(self.trained, self.previous, strict=True):
                current = parameter.grad.clone()
                parameter.grad.copy_(previous)
                previous.copy_(current)
            self.average(self.trained)
        shared = dict(self.module.named_parameters(remove_duplicate=False))
        if has("tied_twice") and "fc4.weight" in shared:
            shared["fc4.weight"].grad /= dist.get_world_size()
        self.steps += 1
