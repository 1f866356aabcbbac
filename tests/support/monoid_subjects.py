"""Every monoid of `mr.monoids`, with random elements and its fold in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monoidreduce.monoids import (
    ArgMax,
    ArgMin,
    CrossEntropy,
    Distillation,
    LogSumExp,
    LogWSum,
    Max,
    Min,
    Monoid,
    Product,
    Sum,
    WSum,
)

PRODUCT = Product(total=LogWSum(), best=ArgMax(), lse=LogSumExp())


@dataclass(frozen=True)
class Subject:
    monoid: Monoid[Any]
    sample: Callable[[torch.Generator, tuple[int, ...]], Any]  # float64, payloads of 3 elements
    definition: Callable[
        [Any, int], tuple[Tensor, ...]
    ]  # (elements, batch axis >= 0) -> the fields of the fold

    def __repr__(self) -> str:
        return type(self.monoid).__name__


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return 2.0 * torch.randn(shape, generator=generator, dtype=torch.float64)


def _ones(shape: tuple[int, ...]) -> Tensor:
    return torch.ones(shape, dtype=torch.int64)


def _positions(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(2**40, shape, generator=generator)


def _weighted_mean(x: Any, dim: int) -> tuple[Tensor, Tensor]:
    weight = x.weight.sum(dim)
    return weight, (x.weight[..., None] * x.value).sum(dim) / weight[..., None]


def _softmax_mean(x: Any, dim: int) -> tuple[Tensor, Tensor]:
    return x.log_weight.logsumexp(dim), (x.log_weight.softmax(dim)[..., None] * x.value).sum(dim)


def _distillation(x: Any, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    expectation = (x.teacher_lse.softmax(dim) * x.expectation).sum(dim)
    return x.student_lse.logsumexp(dim), x.teacher_lse.logsumexp(dim), expectation


def _extremum(function: Callable[..., Tensor]) -> Callable[[Any, int], tuple[Tensor, Tensor]]:
    def definition(x: Any, dim: int) -> tuple[Tensor, Tensor]:
        value = function(x.value, dim)
        return value, (x.value == value.unsqueeze(dim)).sum(dim)

    return definition


def _arg_extremum(function: Callable[..., Any]) -> Callable[[Any, int], tuple[Tensor, Tensor]]:
    def definition(x: Any, dim: int) -> tuple[Tensor, Tensor]:
        value, at = function(x.value, dim)
        return value, x.position.gather(dim, at.unsqueeze(dim)).squeeze(dim)

    return definition


def _product(x: Any, dim: int) -> tuple[Tensor, ...]:
    softmax_mean = _softmax_mean(LogWSum.State(x.total_log_weight, x.total_value), dim)
    best = _arg_extremum(torch.max)(ArgMax.State(x.best_value, x.best_position), dim)
    return *softmax_mean, *best, x.lse.logsumexp(dim)


SUBJECTS = (
    Subject(Sum(), lambda g, s: Sum.State(_normal(g, *s, 3)), lambda x, dim: (x.value.sum(dim),)),
    Subject(WSum(), lambda g, s: WSum.State(_normal(g, *s).exp(), _normal(g, *s, 3)), _weighted_mean),
    Subject(LogWSum(), lambda g, s: LogWSum.State(_normal(g, *s), _normal(g, *s, 3)), _softmax_mean),
    Subject(
        LogSumExp(), lambda g, s: LogSumExp.State(_normal(g, *s)), lambda x, dim: (x.lse.logsumexp(dim),)
    ),
    Subject(
        CrossEntropy(),
        lambda g, s: CrossEntropy.State(_normal(g, *s), _normal(g, *s)),
        lambda x, dim: (x.lse.logsumexp(dim), x.target.sum(dim)),
    ),
    Subject(
        Distillation(),
        lambda g, s: Distillation.State(_normal(g, *s), _normal(g, *s), _normal(g, *s)),
        _distillation,
    ),
    Subject(Max(), lambda g, s: Max.State(_normal(g, *s), _ones(s)), _extremum(torch.amax)),
    Subject(Min(), lambda g, s: Min.State(_normal(g, *s), _ones(s)), _extremum(torch.amin)),
    Subject(ArgMax(), lambda g, s: ArgMax.State(_normal(g, *s), _positions(g, s)), _arg_extremum(torch.max)),
    Subject(ArgMin(), lambda g, s: ArgMin.State(_normal(g, *s), _positions(g, s)), _arg_extremum(torch.min)),
    Subject(
        PRODUCT,
        lambda g, s: PRODUCT.State(
            _normal(g, *s), _normal(g, *s, 3), _normal(g, *s), _positions(g, s), _normal(g, *s)
        ),
        _product,
    ),
)


def elements(subject: Subject, *shape: int, device: torch.device | str = "cpu", seed: int = 0) -> Any:
    """Random elements whose floating fields require gradients."""
    state = subject.sample(torch.Generator().manual_seed(seed), shape)
    return type(state)._make(field.to(device).requires_grad_(field.is_floating_point()) for field in state)


def floating(state: Any) -> list[Tensor]:
    return [field for field in state if field.is_floating_point()]
