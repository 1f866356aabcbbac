"""Sums of Gaussian kernels over pairs of points, compared with KeOps, torch and torch.compile (in chunks).

out_i = sum_j mass_j exp(-|x_i - y_j|^2 / 2D), for points with D coordinates, where |x_i - y_j|^2 is about 2D.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import monoidreduce as mr
from bench.harness import Case, Contender

CHUNK = 4000  # rows at a time; their kernel values with 100000 columns take 1.6 GB
FEW = 8  # coordinates up to which torch.compile adds them in registers


@mr.statistics
def gaussian(score: Any, half: Any, other_half: Any, mass: Any) -> Any:
    return dict(sum=mr.stat.total(mass * torch.exp(score - half - other_half)))


def half_square(x: Tensor) -> Tensor:
    """Half the squared norms of x [N, D], divided by D: [N], in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().sum(1) / (2 * x.shape[1])


def own(x: Tensor, y: Tensor, mass: Tensor) -> Tensor:
    """The sums [N] for x [N, D], y [M, D] and mass [M]."""
    columns = {"other_half": half_square(y), "mass": mass}
    sums = gaussian(x, y, row={"half": half_square(x)}, column=columns, scale=1 / x.shape[1])
    return sums.sum  # type: ignore[no-any-return]


def of_products(x: Tensor, y: Tensor, mass: Tensor) -> Tensor:
    """The sums from inner products, all computed by one matrix product."""
    exponents = (x @ y.mT) / x.shape[1] - half_square(x)[:, None] - half_square(y)
    return (mass * exponents.exp()).sum(1)


def of_differences(x: Tensor, y: Tensor, mass: Tensor) -> Tensor:
    """The sums from differences of all coordinates. torch.compile stores no differences."""
    exponents = (x[:, None] - y).square().sum(2) / (-2 * x.shape[1])
    return (mass * exponents.exp()).sum(1)


def in_chunks(formula: Contender) -> Contender:
    """The formula for CHUNK rows at a time; kernel values are recomputed in the backward pass."""
    again = functools.partial(checkpoint, formula, use_reentrant=False, preserve_rng_state=False)

    def run(x: Tensor, y: Tensor, mass: Tensor) -> Tensor:
        return torch.cat([again(rows, y, mass) for rows in x.split(CHUNK)])

    return run


torch_sums = in_chunks(of_products)


def keops(x: Tensor, y: Tensor, mass: Tensor) -> Tensor:
    from pykeops.torch import LazyTensor

    square = ((LazyTensor(x[:, None]) - LazyTensor(y[None])) ** 2).sum(-1)
    out: Tensor = (square / (-2 * x.shape[1])).exp() @ mass[:, None]
    return out[:, 0]


def case(dtype: torch.dtype, device: torch.device, *, N: int, M: int, D: int) -> Case:
    """N and M points with D coordinates of unit variance."""
    products = 2 * N * M * D

    def inputs() -> tuple[Tensor, ...]:
        x, y = (torch.randn(n, D, device=device).to(dtype) for n in (N, M))
        return x, y, torch.rand(M, device=device).to(dtype)

    contenders: dict[str, Contender] = {"monoidreduce": own, "torch": torch_sums}
    if device.type == "cuda":
        contenders["torch.compile"] = in_chunks(torch.compile(of_products, dynamic=False))
        if D <= FEW:
            contenders["torch.compile, differences"] = in_chunks(torch.compile(of_differences, dynamic=False))
        contenders["KeOps"] = keops
    return Case(
        op="kernel_sums",
        dtype=dtype,
        device=device,
        parameters={"N": N, "M": M, "D": D},
        inputs=inputs,
        leaves=3,
        output=(N,),
        contenders=contenders,
        flops={"forward": products, "backward": 2 * products, "total": 3 * products},
        targets={},
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Cases in float32 with three coordinates and with many."""
    points = 300 if quick else 100_000 if device.type == "cuda" else 8_000
    return [case(torch.float32, device, N=points, M=points, D=D) for D in (3, 64)]
