"""Users' folds of vectors: attention as a statistic, and sums of vectors weighted by Gaussian kernels.

Attention by `mr.stat.softmax(score).mean(v)`, plain, with a penalty for distance (ALiBi) and with a learned
table of relative positions, is compared with the operator `mr.attention` without these, and with torch's
attention, which reads them as a matrix. Gaussian sums are compared with KeOps and with torch.compile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from bench.harness import Case, Contender
from bench.kernel_sums import half_square, in_chunks

SLOPE = 0.01  # ALiBi's penalty for each position
FARTHEST = 128  # distance from which the table has one entry for all
PLAIN, TORCH_PLAIN = "monoidreduce, attention", "torch, plain"


@mr.statistics
def plain(score: Any, v: Any) -> Any:
    return dict(mean=mr.stat.softmax(score).mean(v))


@mr.statistics
def alibi(score: Any, row: Any, column: Any, v: Any) -> Any:
    return dict(mean=mr.stat.softmax(score - SLOPE * (row - column).abs()).mean(v))


@functools.cache
def relative(table: Tensor) -> Any:
    """The fold with a learned addend for each distance, from a table [2 FARTHEST + 1]."""

    @mr.statistics
    def f(score: Any, row: Any, column: Any, v: Any) -> Any:
        at = torch.clamp(column - row, -FARTHEST, FARTHEST) + FARTHEST
        return dict(mean=mr.stat.softmax(score + table[at]).mean(v))

    return f


def distances(q: Tensor) -> Tensor:
    position = torch.arange(q.shape[1], device=q.device)
    return position - position[:, None]


# Contenders, of q, k and v [heads, length, width] and the table if there is one.


def of_fold(fold: Any, q: Tensor, k: Tensor, v: Tensor, *table: Tensor) -> Tensor:
    fold = fold(*table) if table else fold
    mean: Tensor = fold(q, k, column={"v": v}, scale=q.shape[2] ** -0.5).mean
    return mean


def by_operator(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    return mr.attention(q[None], k[None], v[None])[0]


def by_torch(bias: Callable[..., Tensor | None], q: Tensor, k: Tensor, v: Tensor, *table: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=bias(q, *table))[0]


def no_bias(q: Tensor, *_: Tensor) -> None:
    return None


def alibi_bias(q: Tensor) -> Tensor:
    return (-SLOPE * distances(q).abs()).to(q.dtype)


def table_bias(q: Tensor, table: Tensor) -> Tensor:
    return table[distances(q).clamp(-FARTHEST, FARTHEST) + FARTHEST].to(q.dtype)


ATTENTION: dict[str, tuple[Any, Callable[..., Tensor | None]]] = {
    "plain": (plain, no_bias),
    "alibi": (alibi, alibi_bias),
    "relative": (relative, table_bias),
}


def attention_case(
    dtype: torch.dtype, device: torch.device, *, H: int, L: int, d: int, name: str = "plain"
) -> Case:
    """H heads, of L queries and keys of width d."""
    fold, bias = ATTENTION[name]
    products = 4 * H * L * L * d
    learned = name == "relative"

    def inputs() -> tuple[Tensor, ...]:
        drawn = [torch.randn(H, L, d, device=device).to(dtype) for _ in range(3)]
        return *drawn, *([torch.randn(2 * FARTHEST + 1, device=device)] if learned else [])

    contenders: dict[str, Contender] = {
        "monoidreduce": functools.partial(of_fold, fold),
        "torch": functools.partial(by_torch, bias),
    }
    checked_by = {}
    if not learned:  # the operator has no gradient for the table
        contenders[PLAIN] = by_operator
        if name != "plain":
            contenders[TORCH_PLAIN] = functools.partial(by_torch, no_bias)
            checked_by = {PLAIN: TORCH_PLAIN, TORCH_PLAIN: TORCH_PLAIN}
    return Case(
        op=f"payload {name}",
        dtype=dtype,
        device=device,
        parameters={"H": H, "L": L, "d": d},
        inputs=inputs,
        leaves=4 if learned else 3,
        output=(H, L, d),
        contenders=contenders,
        flops={"forward": products, "backward": 2 * products, "total": 3 * products},
        targets={},
        checked_by=checked_by,
    )


@mr.statistics
def gaussian(score: Any, half: Any, other_half: Any, v: Any) -> Any:
    return dict(sum=mr.stat.total(torch.exp(score - half - other_half) * v))


def own(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """sum_j exp(-|x_i - y_j|^2 / 2D) v_j, [N, E], for x [N, D], y [M, D] and v [M, E]."""
    columns = {"other_half": half_square(y), "v": v}
    sums: Tensor = gaussian(x, y, row={"half": half_square(x)}, column=columns, scale=1 / x.shape[1]).sum
    return sums


def of_products(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """The sums from inner products."""
    return ((x @ y.mT) / x.shape[1] - half_square(x)[:, None] - half_square(y)).exp() @ v


def of_differences(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """The sums from differences of all coordinates, none of which torch.compile stores."""
    weights = ((x[:, None] - y).square().sum(2) / (-2 * x.shape[1])).exp()
    return (weights[:, :, None] * v).sum(1)


def keops(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    from pykeops.torch import LazyTensor

    square = ((LazyTensor(x[:, None]) - LazyTensor(y[None])) ** 2).sum(-1)
    out: Tensor = (square / (-2 * x.shape[1])).exp() @ v
    return out


def gaussian_case(dtype: torch.dtype, device: torch.device, *, N: int, M: int, D: int, E: int) -> Case:
    """N and M points with D coordinates of unit variance, and vectors of E numbers."""
    products = 2 * N * M * (D + E)

    def inputs() -> tuple[Tensor, ...]:
        return tuple(torch.randn(*size, device=device).to(dtype) for size in ((N, D), (M, D), (M, E)))

    contenders: dict[str, Contender] = {"monoidreduce": own, "torch": in_chunks(of_products), "KeOps": keops}
    if device.type == "cuda":
        for name, formula in ("products", of_products), ("differences", of_differences):
            contenders[f"torch.compile, {name}"] = in_chunks(torch.compile(formula, dynamic=False))
    return Case(
        op="payload gaussian",
        dtype=dtype,
        device=device,
        parameters={"N": N, "M": M, "D": D, "E": E},
        inputs=inputs,
        leaves=3,
        output=(N, E),
        contenders=contenders,
        flops={"forward": products, "backward": 2 * products, "total": 3 * products},
        targets={},
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Attention of long sequences on a GPU, Gaussian sums of points in space anywhere."""
    points, size = 32768, {"H": 32, "L": 4096, "d": 128}
    if quick or device.type == "cpu":
        points, size = 300 if quick else 8000, {"H": 2, "L": 64 if quick else 512, "d": 64}
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    of_attention = [attention_case(dtype, device, **size, name=name) for name in ATTENTION]
    return [*of_attention, gaussian_case(torch.float32, device, N=points, M=points, D=3, E=3)]
