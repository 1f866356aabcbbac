"""NoiseScale in real training loops: one process that accumulates, and processes that average."""

from __future__ import annotations

import math
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel

from monoidreduce.plan import NoiseScale, estimate_noise


class Quadratic(nn.Module):
    """The loss of samples x: (p - x)^T H (p - x) / 2, whose gradient H (p - x) has covariance H Cov(x) H."""

    def __init__(self, hessian: Tensor, start: Tensor) -> None:
        super().__init__()
        self.register_buffer("hessian", hessian)
        self.first = nn.Parameter(start[:3].clone())
        self.rest = nn.Parameter(start[3:].clone())
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, samples: Tensor) -> Tensor:
        away = torch.cat([self.first, self.rest]) - samples
        return (away @ self.hessian * away).sum(-1).mean() / 2


def accumulate(model: nn.Module, noise: NoiseScale, passes: list[Tensor]) -> None:
    model.zero_grad()
    with noise:
        for samples in passes:
            (model(samples) / len(passes)).backward()


def gradient_of(model: Quadratic, samples: Tensor) -> Tensor:
    return (torch.cat([model.first, model.rest]).detach() - samples.mean(0)) @ model.hessian


def quadratic() -> Quadratic:
    factor = torch.randn(8, 8)
    return Quadratic(factor @ factor.T / 8 + torch.eye(8), torch.full((8,), 0.5))


def test_known_noise_is_found_in_a_quadratic() -> None:
    model = quadratic()
    hessian = model.hessian
    gradient = gradient_of(model, torch.zeros(1, 8))
    exact = (
        torch.trace(hessian @ hessian).item() / gradient.dot(gradient).item()
    )  # of samples of covariance 1
    noise = NoiseScale(model, small=8, big=16, average=0.999)
    for _ in range(2000):
        accumulate(model, noise, list(torch.randn(2, 8, 8)))
    assert noise.b_simple == pytest.approx(exact, rel=0.05)
    assert noise.squared_gradient == pytest.approx(gradient.dot(gradient).item(), rel=0.05)
    assert noise.covariance_trace == pytest.approx(torch.trace(hessian @ hessian).item(), rel=0.05)
    assert noise.suggest() == noise.b_simple
    assert noise.suggest(400) == pytest.approx(20 * math.sqrt(noise.b_simple))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_step_is_the_estimate_of_both_norms(dtype: torch.dtype) -> None:
    model = quadratic().to(dtype)
    noise = NoiseScale(model, small=4, big=12)
    passes = [torch.randn(4, 8).to(dtype) for _ in range(3)]
    accumulate(model, noise, passes)
    small = sum(gradient_of(model, samples).double().square().sum() for samples in passes) / 3
    big = gradient_of(model, torch.cat(passes)).double().square().sum()
    trace, squared = estimate_noise(small.item(), big.item(), 4, 12)
    tolerance = 0.1 if dtype is torch.bfloat16 else 1e-4
    assert noise.covariance_trace == pytest.approx(trace, rel=tolerance)
    assert noise.squared_gradient == pytest.approx(squared, rel=tolerance)


def test_averages_are_of_the_terms_and_not_of_the_ratios() -> None:
    model = quadratic()
    noise, steps = NoiseScale(model, small=4, big=8, average=0.5), []
    for _ in range(3):
        passes = list(torch.randn(2, 4, 8))
        accumulate(model, noise, passes)
        small = sum(gradient_of(model, samples).square().sum() for samples in passes) / 2
        big = gradient_of(model, torch.cat(passes)).square().sum()
        steps.append(estimate_noise(small.item(), big.item(), 4, 8))
    traces, squares = (
        sum(weight * step[term] for weight, step in zip((1, 2, 4), steps, strict=True)) for term in (0, 1)
    )
    assert noise.covariance_trace == pytest.approx(traces / 7, rel=1e-4)
    assert noise.b_simple == pytest.approx(max(traces, 0) / squares if squares > 0 else math.inf, rel=1e-4)


def test_no_step_and_steps_that_are_not_finite() -> None:
    model = quadratic()
    noise = NoiseScale(model, small=4, big=8)
    assert math.isnan(noise.b_simple) and math.isnan(noise.suggest(2.0))
    accumulate(model, noise, list(torch.full((2, 4, 8), math.inf)))
    assert math.isnan(noise.b_simple)
    accumulate(model, noise, list(torch.randn(2, 4, 8)))
    before = noise.covariance_trace
    accumulate(model, noise, list(torch.full((2, 4, 8), math.nan)))
    assert noise.covariance_trace == before and not math.isnan(before)


def test_noise_that_is_too_large_or_too_small_to_tell() -> None:
    model = quadratic()
    opposite = NoiseScale(model, small=4, big=8)
    here = torch.cat([model.first, model.rest]).detach()
    accumulate(model, opposite, [(here + 1).expand(4, 8), (here - 1).expand(4, 8)])  # gradients that cancel
    assert opposite.b_simple == math.inf
    equal = NoiseScale(model, small=4, big=8)
    accumulate(model, equal, [torch.ones(4, 8)] * 2)
    assert equal.b_simple == pytest.approx(0, abs=1e-5)


def test_the_gradients_are_those_without_it() -> None:
    model, passes = quadratic(), list(torch.randn(2, 4, 8))
    for samples in passes:
        (model(samples) / 2).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    accumulate(model, NoiseScale(model, small=4, big=8), passes)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert gradient is None if parameter.grad is None else torch.equal(parameter.grad, gradient)


def test_blocks_that_are_refused() -> None:
    model = quadratic()
    noise = NoiseScale(model, small=4, big=8)
    with pytest.raises(RuntimeError, match=r"NoiseScale: expected 2 backward passes in the block .* got 1"):
        accumulate(model, noise, [torch.randn(4, 8)])
    with pytest.raises(ValueError, match="model: expected no gradients"), noise:
        pass
    # An error inside the block is that error, and its step is not counted.
    model.zero_grad()
    with pytest.raises(KeyError), noise:
        raise KeyError
    assert math.isnan(noise.b_simple) and not model.first._backward_hooks


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"small": 8, "big": 8}, "big: expected a multiple of 8, more than small, got 8"),
        ({"small": 3, "big": 8}, "big: expected a multiple of 3, more than small, got 8"),
        ({"small": 0, "big": 8}, "small: expected a finite number > 0, got 0"),
        ({"small": 4, "big": 8, "average": 1}, "average: expected a number from 0 to below 1, got 1"),
    ],
)
def test_sizes_that_are_refused(options: dict[str, float], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        NoiseScale(quadratic(), **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model: expected a parameter that requires a gradient"):
        NoiseScale(nn.ReLU(), small=1, big=2)


def test_sharded_parameters_are_refused_by_name(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        fully_shard(sharded, mesh=mesh)
        with pytest.raises(
            ValueError, match=r"model: expected whole parameters, .*, got FSDP2 \(fully_shard\)"
        ):
            NoiseScale(sharded, small=1, big=2)
        whole = distribute_module(nn.Linear(4, 4), mesh)
        with pytest.raises(ValueError, match=r"expected whole parameters, .*, got DTensors"):
            NoiseScale(whole, small=1, big=2)
    finally:
        torch.distributed.destroy_process_group()


def _rank(rank: int, port: int, samples: Tensor, start: Quadratic) -> None:
    """Two processes, each of two passes of 4 samples, against the estimate of all four gradients."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    try:
        model = DistributedDataParallel(start, find_unused_parameters=True)
        noise = NoiseScale(model, small=4, big=16)
        with noise:
            with model.no_sync():
                (model(samples[rank, 0]) / 2).backward()
            (model(samples[rank, 1]) / 2).backward()
        gradients = [gradient_of(start, part) for part in samples.flatten(0, 1)]
        small = sum(gradient.square().sum().item() for gradient in gradients) / 4
        big = gradient_of(start, samples.flatten(0, 2)).square().sum().item()
        expected = estimate_noise(small, big, 4, 16)
        assert (noise.covariance_trace, noise.squared_gradient) == pytest.approx(expected, rel=1e-4)
        with pytest.raises(ValueError, match="big: expected a multiple of 2 x 4, more than small, got 12"):
            NoiseScale(model, small=4, big=12)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.release
def test_processes_that_average_and_accumulate() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (port, torch.randn(2, 2, 4, 8), quadratic()), nprocs=2)
