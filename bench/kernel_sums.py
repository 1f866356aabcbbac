"""Folds over pairs of points in float32, compared with KeOps, torch and torch.compile (in chunks).

For points with D coordinates, where d_ij = |x_i - y_j|^2 / 2D is about 1:

    kernel_sums  sum_j mass_j exp(-d_ij)
    sinkhorn     -log sum_j mass_j exp(-d_ij), as a round of Sinkhorn's algorithm
    nearest      min_j (d_ij - mass_j), as an assignment to the nearest of centres
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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


@mr.statistics
def soft_minimum(score: Any, half: Any, other_half: Any, mass: Any) -> Any:
    return dict(lse=mr.stat.softmax(score - half - other_half + torch.log(mass)).logsumexp)


@mr.statistics
def nearest(score: Any, half: Any, other_half: Any, mass: Any) -> Any:
    return dict(best=mr.stat.largest(score - half - other_half + mass))


class Kind(NamedTuple):
    """A function of x [N, D], y [M, D] and mass [M], with a result for each row of x.

    fold: of scores <x, y> / D, with half the squared norms over D and the masses as data.
    result: the result [N], from what the fold returns.
    of_exponents: the same by torch, from exponents -d [N, M] and the masses.
    """

    fold: Any
    result: Callable[[Any], Tensor]
    of_exponents: Callable[[Tensor, Tensor], Tensor]


KINDS = {
    "kernel_sums": Kind(gaussian, lambda s: s.sum, lambda e, mass: (mass * e.exp()).sum(1)),
    "sinkhorn": Kind(soft_minimum, lambda s: -s.lse, lambda e, mass: -(e + mass.log()).logsumexp(1)),
    "nearest": Kind(nearest, lambda s: -s.best.value, lambda e, mass: -(e + mass).amax(1)),
}


def own(kind: Kind, x: Tensor, y: Tensor, mass: Tensor) -> Tensor:
    columns = {"other_half": half_square(y), "mass": mass}
    found = kind.fold(x, y, row={"half": half_square(x)}, column=columns, scale=1 / x.shape[1])
    return kind.result(found)


def of_products(kind: Kind, x: Tensor, y: Tensor, mass: Tensor) -> Tensor:
    """From inner products, all computed by one matrix product."""
    return kind.of_exponents((x @ y.mT) / x.shape[1] - half_square(x)[:, None] - half_square(y), mass)


def of_differences(kind: Kind, x: Tensor, y: Tensor, mass: Tensor) -> Tensor:
    """From differences of all coordinates. torch.compile stores no differences."""
    return kind.of_exponents((x[:, None] - y).square().sum(2) / (-2 * x.shape[1]), mass)


def in_chunks(formula: Contender) -> Contender:
    """The formula for CHUNK rows at a time; kernel values are recomputed in the backward pass."""
    again = functools.partial(checkpoint, formula, use_reentrant=False, preserve_rng_state=False)

    def run(x: Tensor, y: Tensor, mass: Tensor) -> Tensor:
        return torch.cat([again(rows, y, mass) for rows in x.split(CHUNK)])

    return run


def keops(x: Tensor, y: Tensor, mass: Tensor) -> Tensor:
    from pykeops.torch import LazyTensor

    square = ((LazyTensor(x[:, None]) - LazyTensor(y[None])) ** 2).sum(-1)
    out: Tensor = (square / (-2 * x.shape[1])).exp() @ mass[:, None]
    return out[:, 0]


def case(
    dtype: torch.dtype, device: torch.device, *, N: int, M: int, D: int, name: str = "kernel_sums"
) -> Case:
    """N and M points with D coordinates of unit variance."""
    products, kind = 2 * N * M * D, KINDS[name]
    torch_of, by_differences = (functools.partial(of, kind) for of in (of_products, of_differences))
    fused = functools.partial(own, kind)

    def inputs() -> tuple[Tensor, ...]:
        x, y = (torch.randn(n, D, device=device).to(dtype) for n in (N, M))
        return x, y, torch.rand(M, device=device).to(dtype)

    contenders: dict[str, Contender] = {"monoidreduce": fused, "torch": in_chunks(torch_of)}
    if device.type == "cuda":
        contenders["torch.compile"] = in_chunks(torch.compile(torch_of, dynamic=False))
        if D <= FEW:
            contenders["torch.compile, differences"] = in_chunks(torch.compile(by_differences, dynamic=False))
        else:
            contenders["monoidreduce, emulated"] = mr.float32("emulated")(fused)
        if name == "kernel_sums":
            contenders["KeOps"] = keops
    return Case(
        op=name,
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
    if quick or device.type == "cpu":
        points = 300 if quick else 8_000
        sizes: list[tuple[str, int, int]] = [(name, points, D) for name in KINDS for D in (3, 64)]
    else:
        sizes = [("kernel_sums", 100_000, 3), ("kernel_sums", 100_000, 64), ("kernel_sums", 32_768, 64)]
        sizes += [("sinkhorn", 32_768, 64), ("nearest", 32_768, 128)]
    return [case(torch.float32, device, N=points, M=points, D=D, name=name) for name, points, D in sizes]
