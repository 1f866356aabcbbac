"""Cross entropy of a student's logits under a teacher's softmax, neither ever stored.

The element of class j is (student logit, teacher logit, student logit), in the monoid
Distillation.
"""

import torch
from compare import compare
from torch import Tensor

import monoidreduce as mr
from monoidreduce.monoids import Distillation


def project_fold(
    tokens: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor]
) -> Distillation.State:
    """x [n, D], teacher_x [n, E], weights [v, D] and [v, E] -> n folds of v classes."""
    (x, teacher_x), (weight, teacher_weight) = tokens, weights
    student, teacher = x @ weight.T, teacher_x @ teacher_weight.T
    expectation = (teacher.softmax(1) * student).sum(1)
    return Distillation.State(student.logsumexp(1), teacher.logsumexp(1), expectation)


def distillation(
    x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor
) -> Tensor:
    tokens, weights = (x, teacher_x), (weight, teacher_weight)
    state = mr.map_reduce(
        Distillation(), project_fold, tokens, weights, a_chunk=256, b_chunk=1024
    )
    return state.student_lse - state.expectation


def fused(
    x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor
) -> Tensor:
    return mr.linear_distillation(
        x, weight, teacher_x, teacher_weight, teacher_grad=True, reduction="none"
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    inputs = {
        "x": torch.randn(500, 64),
        "weight": torch.randn(5000, 64) / 8,
        "teacher_x": torch.randn(500, 96),
        "teacher_weight": torch.randn(5000, 96) / 8,
    }
    compare(distillation, fused, inputs)
