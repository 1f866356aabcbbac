"""The gradient noise scale of a training loop (paper, Appendix E.3), measured without extra passes."""

from __future__ import annotations

import math
from types import TracebackType

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from monoidreduce._validate import check_finite, mismatch
from monoidreduce.theory.plan._positive import check_numbers
from monoidreduce.theory.plan.critical_batch import estimate_noise

__all__ = ["NoiseScale"]


class NoiseScale:
    """Estimates B_simple = tr(Sigma) / |g|^2, the batch size at which noise and gradient are equally large.

    It compares squared gradient norms before and after gradients are averaged: over the processes of a
    DistributedDataParallel model, over the backward passes that accumulate, or over both. A step costs one
    norm per gradient and, under DDP, one all-reduce of a scalar; the host does not wait for the device::

        noise = NoiseScale(model, small=8, big=64)
        for batches in data:                        # 8 sequences in each of 8 backward passes
            optimizer.zero_grad()
            with noise:
                for batch in batches:
                    (model(batch).mean() / 8).backward()
            optimizer.step()
        print(noise.b_simple)                       # in sequences; this waits for the device

    At the end of the block `.grad` must be the mean gradient of the whole step. So a loop that accumulates
    divides its loss by the number of passes, and clips after the block. A step with a gradient that is not
    finite is left out. A GradScaler must keep its scale, or the averages mix different scales.

    Raises:
        TypeError or ValueError: unless 0 < small < big, 0 <= average < 1, some parameter requires a gradient,
            and `big` is a multiple of the samples that all processes compute in one pass; and for sharded
            parameters (`fully_shard`, FullyShardedDataParallel, DTensors), of which no process has a whole
            gradient.
        ValueError: on entry, if a parameter has a gradient already.
        RuntimeError: at the end of the block, if the number of backward passes that reached the parameters is
            not the number that `big` needs.
    """

    def __init__(self, model: nn.Module, small: int, big: int, *, average: float = 0.99) -> None:
        """model: already wrapped by DDP and moved to its device.

        small: samples (sequences or tokens) in one backward pass of one process. big: samples in a step.
        average: decay per step of the moving averages of tr(Sigma) and |g|^2.
        """
        check_numbers(small=small, big=big)
        if not 0 <= check_finite("average", average) < 1:
            raise ValueError(mismatch("average", "a number from 0 to below 1", average))
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self._parameters:
            raise ValueError(mismatch("model", "a parameter that requires a gradient", "none"))
        if sharded := _sharding(model):
            expected = "whole parameters, with DistributedDataParallel or without"
            raise ValueError(mismatch("model", expected, sharded))
        self._group = model.process_group if isinstance(model, DistributedDataParallel) else None
        self._world = self._group.size() if self._group is not None else 1
        if small >= big or big % (small * self._world):
            at_once = f"{self._world} x {small}" if self._world > 1 else f"{small}"
            raise ValueError(mismatch("big", f"a multiple of {at_once}, more than small", big))
        self.small, self.big, self.average = small, big, average
        self._passes = big // (small * self._world)
        self._hooks: list[RemovableHandle] = []
        self._counts = [0] * len(self._parameters)
        self._device = self._parameters[0].device
        self._of_passes = self._zeros(())
        self._averages = self._zeros(3)  # moving averages of tr(Sigma), |g|^2 and 1; the last is the weight

    def _zeros(self, shape: int | tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._device)

    def _squared_norm(self, gradient: Tensor) -> Tensor:
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        norm: Tensor = torch.linalg.vector_norm(gradient.detach(), dtype=dtype)
        return norm.to(self._of_passes).square()

    def __enter__(self) -> NoiseScale:
        if any(parameter.grad is not None for parameter in self._parameters):
            raise ValueError(mismatch("model", "no gradients (zero_grad() before the block)", "some"))
        self._of_passes = self._zeros(())
        self._counts = [0] * len(self._parameters)

        def watch(number: int, parameter: nn.Parameter) -> RemovableHandle:
            def before_it_is_accumulated(gradient: Tensor) -> None:
                self._counts[number] += 1
                self._of_passes += self._squared_norm(gradient)

            hook: RemovableHandle = parameter.register_hook(before_it_is_accumulated)  # type: ignore[no-untyped-call]
            return hook

        self._hooks = [watch(number, parameter) for number, parameter in enumerate(self._parameters)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        if kind is None:
            if max(self._counts) != self._passes:
                expected = f"{self._passes} backward passes in the block (big / small / processes)"
                raise RuntimeError(mismatch("NoiseScale", expected, max(self._counts)))
            self._record()

    @torch.no_grad()
    def _record(self) -> None:
        # Each pass adds its gradient divided by the number of passes p, so the sum of squared norms has
        # 1/p^2; the mean over passes needs 1/p.
        small = self._of_passes * self._passes
        if self._group is not None:
            torch.distributed.all_reduce(small, group=self._group)
            small /= self._world
        big = self._zeros(())
        for parameter in self._parameters:
            if parameter.grad is not None:
                big += self._squared_norm(parameter.grad)
        step = torch.stack([*estimate_noise(small, big, self.small, self.big), torch.ones_like(big)])
        changed = self.average * self._averages + (1 - self.average) * step
        self._averages = torch.where(step.isfinite().all(), changed, self._averages)

    @property
    def covariance_trace(self) -> float:
        """The moving average of tr(Sigma); NaN before the first step. Waits for the device."""
        trace, _, weight = self._averages.tolist()
        return trace / weight if weight else math.nan

    @property
    def squared_gradient(self) -> float:
        """The moving average of |g|^2; NaN before the first step. Waits for the device."""
        _, squared, weight = self._averages.tolist()
        return squared / weight if weight else math.nan

    @property
    def b_simple(self) -> float:
        """The ratio of both averages, in the unit of `small` and `big`; NaN before the first step.

        It is infinite if the estimate of |g|^2 is 0 or less, and 0 if that of tr(Sigma) is negative. Then
        `big` is far below or far above the noise scale, or there were too few steps. Waits for the device.
        """
        trace, squared = self.covariance_trace, self.squared_gradient
        if math.isnan(trace):
            return math.nan
        return max(trace, 0.0) / squared if squared > 0 else math.inf

    def suggest(self, lambda_: float | None = None) -> float:
        """The batch size sqrt(lambda B_simple) (equation 26), in the unit of `small` and `big`.

        lambda_: a larger value gives fewer steps, a smaller one fewer samples. None returns B_simple, which
        balances both.
        """
        b_simple = self.b_simple
        if lambda_ is None:
            return b_simple
        check_numbers(lambda_=lambda_)
        return math.sqrt(lambda_ * b_simple)


def _sharding(model: nn.Module) -> str:
    """What shards parameters of the model; "" if nothing does. By names: imports of these take long."""
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            return "FSDP (FullyShardedDataParallel)"
        if hasattr(module, "set_requires_gradient_sync"):  # what fully_shard adds to a module
            return "FSDP2 (fully_shard)"
    return "DTensors" if any(hasattr(parameter, "placements") for parameter in model.parameters()) else ""
