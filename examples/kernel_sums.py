"""Sums of Gaussian kernels, and entropic optimal transport, between two point clouds.

|x - y|^2 = |x|^2 - 2 <x, y> + |y|^2: the product is the score, the squares are data of
rows and columns.
"""

from typing import Any

import torch
from compare import compare, compare_memory
from torch import Tensor

import monoidreduce as mr

WIDTH, BLUR, ROUNDS = 1.5, 2.0, 5


@mr.statistics
def gaussian(
    score: Tensor, half: Tensor, other_half: Tensor, mass: Tensor
) -> dict[str, Any]:
    return dict(sum=mr.stat.total(mass * torch.exp(score - half - other_half)))


@mr.statistics
def soft_minimum(score: Tensor, potential: Tensor) -> dict[str, Any]:
    return dict(lse=mr.stat.softmax(score + potential).logsumexp)


def half_square(x: Tensor) -> Tensor:
    return 0.5 * x.square().sum(1)


def fused(x: Tensor, y: Tensor, mass: Tensor) -> Tensor:
    """[N + 1] kernel sums at x [N, D] of y [M, D] with mass [M], and the cost."""
    # Distances from it are shorter, so that their squares lose fewer digits.
    origin = y.mean(0)
    x, y = x - origin, y - origin
    squares = {"other_half": half_square(y) / WIDTH**2, "mass": mass}
    sums = gaussian(
        x, y, row={"half": half_square(x) / WIDTH**2}, column=squares, scale=WIDTH**-2
    ).sum

    def dual(a: Tensor, b: Tensor, of_b: Tensor) -> Tensor:
        potential = (of_b - half_square(b)) / BLUR
        lse = soft_minimum(a, b, column={"potential": potential}, scale=1 / BLUR).lse
        return half_square(a) - BLUR * (lse - torch.log(torch.tensor(float(len(b)))))

    return torch.cat([sums, transport_cost(dual, x, y)])


def plain(x: Tensor, y: Tensor, mass: Tensor) -> Tensor:
    cost = 0.5 * (x[:, None] - y).square().sum(2)

    def dual(a: Tensor, b: Tensor, of_b: Tensor) -> Tensor:
        of_pairs = cost if a is x else cost.T
        return -BLUR * (
            ((of_b - of_pairs) / BLUR).logsumexp(1)
            - torch.log(torch.tensor(float(len(b))))
        )

    return torch.cat([(-cost / WIDTH**2).exp() @ mass, transport_cost(dual, x, y)])


def transport_cost(dual: Any, x: Tensor, y: Tensor) -> Tensor:
    """[1] of uniform masses, after some rounds of Sinkhorn's algorithm."""
    of_x, of_y = x.new_zeros(len(x)), y.new_zeros(len(y))
    for _ in range(ROUNDS):
        of_x = dual(x, y, of_y)
        of_y = dual(y, x, of_x)
    return (of_x.mean() + of_y.mean())[None]


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    inputs = {
        "x": torch.randn(400, 3),
        "y": 0.5 + torch.randn(500, 3),
        "mass": torch.rand(500),
    }
    compare(fused, plain, inputs)
    compare_memory(fused, plain, inputs)
