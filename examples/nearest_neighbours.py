"""The nearest of many points: the loss of k-means, its gradient and its assignment."""

from typing import Any

import torch
from compare import compare, compare_memory
from torch import Tensor

import monoidreduce as mr


@mr.statistics
def nearest(score: Tensor, half: Tensor) -> dict[str, Any]:
    # |x - c|^2 / 2 = |x|^2 / 2 - (score - half)
    return dict(best=mr.stat.largest(score - half))


def fused(point: Tensor, centre: Tensor) -> Tensor:
    """[N] squared distances of points [N, D] to the nearest of the centres [K, D]."""
    # Distances from it are shorter, so that their squares lose fewer digits.
    origin = centre.mean(0)
    point, centre = point - origin, centre - origin
    best = nearest(point, centre, column={"half": 0.5 * centre.square().sum(1)}).best
    return point.square().sum(1) - 2 * best.value


def plain(point: Tensor, centre: Tensor) -> Tensor:
    return (point[:, None] - centre).square().sum(2).min(1).values


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    inputs = {"point": torch.randn(600, 8), "centre": torch.randn(150, 8)}
    compare(fused, plain, inputs)
    compare_memory(fused, plain, inputs)
    half = 0.5 * inputs["centre"].square().sum(1)
    index = nearest(*inputs.values(), column={"half": half}).best.index
    same = index == torch.cdist(inputs["point"], inputs["centre"]).argmin(1)
    agree = f"{int(same.sum())} of {len(same)}"
    print(f"{agree} points have the centre that torch.cdist says")
