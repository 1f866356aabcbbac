"""Cross entropy against class indices, whose logits never exist all at once.

The element of class j is (its logit, its logit if j is the target, else 0), in the
monoid CrossEntropy.
"""

import torch
from compare import compare
from torch import Tensor

import monoidreduce as mr
from monoidreduce.monoids import CrossEntropy


def project_fold(
    tokens: tuple[Tensor, Tensor], classes: tuple[Tensor, Tensor]
) -> CrossEntropy.State:
    """x [n, D], target [n], weight [v, D], index [v] -> the n folds of v classes."""
    (x, target), (weight, index) = tokens, classes
    logits = x @ weight.T
    of_target = torch.where(target[:, None] == index, logits, 0.0)
    return CrossEntropy.State(lse=logits.logsumexp(1), target=of_target.sum(1))


def cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    index = torch.arange(len(weight), device=weight.device)
    state = mr.map_reduce(
        CrossEntropy(),
        project_fold,
        (x, target),
        (weight, index),
        a_chunk=256,
        b_chunk=1024,
    )
    return state.lse - state.target


def fused(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return mr.linear_cross_entropy(x, weight, target, reduction="none")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    inputs = {
        "x": torch.randn(500, 64),
        "weight": torch.randn(5000, 64) / 8,
        "target": torch.randint(5000, (500,)),
    }
    compare(cross_entropy, fused, inputs)
