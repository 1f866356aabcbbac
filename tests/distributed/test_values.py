"""Values that are hard to combine: infinite and NaN scores, ranks without classes, certain targets, scores
around 1e6.

Each row of scores is a call of its own: x is 1, and the weights are the scores.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import on_ranks, same_bits, split
from torch import Tensor

import monoidreduce as mr

INF, NAN = math.inf, math.nan
CLASSES, TARGET = 7, 1
SMOOTHING = 0.25
# Multiples of 1/16, which float32 holds around 1e6 too.
PLAIN = (0.5, 1.25, -2.0, 0.0625, 3.0, -0.75, 1.0)
TEACHER = (1.0, -0.5, 0.75, 2.0, -3.0, 0.125, 0.25)
CERTAIN = (0.5, 28.0, -2.0, 0.0625, 3.0, -0.75, 1.0)
CLASS_WEIGHTS = (0.5, 2.0, 1.0, 0.125, 3.0, 1.5, 0.25)


def _replaced(row: tuple[float, ...], value: float, *at: int) -> tuple[float, ...]:
    return tuple(value if i in at else score for i, score in enumerate(row))


def _raised(row: tuple[float, ...], level: float) -> tuple[float, ...]:
    return tuple(score + level for score in row)


def _row(scores: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    return torch.tensor(scores, dtype=dtype)[:, None]


def _of_student(group: Any, scores: tuple[float, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """What the operators of one head find. group: None for one device."""
    weight, class_weight = _row(scores, dtype), torch.tensor(CLASS_WEIGHTS[: len(scores)], dtype=dtype)
    ranks: dict[str, Any] = {}
    if group is not None:
        ranks = {"ranks": mr.Ranks(group, classes=len(scores))}
        weight, class_weight = (split(t, 0, group.size())[group.rank()] for t in (weight, class_weight))
    x, target = torch.ones(1, 1, dtype=dtype), torch.tensor([TARGET])
    options: dict[str, Any] = {"reduction": "none", **ranks}
    loss, lse = mr.linear_cross_entropy(x, weight, target, return_lse=True, **options)
    smooth = mr.linear_cross_entropy(x, weight, target, label_smoothing=SMOOTHING, **options)
    weighted = mr.linear_cross_entropy(
        x, weight, target, label_smoothing=SMOOTHING, class_weight=class_weight, z_loss=2**-20, **options
    )
    log_probs, entropy, *_ = mr.linear_log_probs(x, weight, target, entropy=True, **ranks)
    total = mr.logsumexp_matmul(x, weight, **ranks)
    names = ("loss", "lse", "smooth", "weighted", "log_prob", "entropy", "total")
    found = (loss, lse, smooth, weighted, log_probs, entropy, total)
    return {name: t.double() for name, t in zip(names, found, strict=True)}


def _of_both(
    group: Any, student: tuple[float, ...], teacher: tuple[float, ...], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The losses of distillation."""
    weights, ranks = (_row(student, dtype), _row(teacher, dtype)), {}
    if group is not None:
        weights = tuple(split(t, 0, group.size())[group.rank()] for t in weights)
        ranks = {"ranks": mr.Ranks(group, classes=len(student))}
    x = torch.ones(1, 1, dtype=dtype)
    return {
        kind: mr.linear_distillation(
            x, weights[0], x, weights[1], loss=kind, reduction="none", **ranks
        ).double()
        for kind in ("cross_entropy", "forward_kl", "reverse_kl")
    }


def _over_ranks(ranks: int, function: Any, *args: Any) -> dict[str, Tensor]:
    found = on_ranks(ranks, function, *args)
    return {name: same_bits([of_rank[name] for of_rank in found]) for name in found[0]}


def _expected(scores: tuple[float, ...]) -> dict[str, float]:
    """By float64, from differences of scores."""
    largest, share = max(scores), 1 / len(scores)
    above_target = math.log1p(sum(math.exp(s - scores[TARGET]) for i, s in enumerate(scores) if i != TARGET))
    from_largest = math.log(sum(math.exp(s - largest) for s in scores))
    below = [from_largest + (largest - s) for s in scores]
    lse = largest + from_largest
    weights = CLASS_WEIGHTS[: len(scores)]
    return {
        "loss": above_target,
        "lse": lse,
        "smooth": (1 - SMOOTHING) * above_target + SMOOTHING * share * sum(below),
        "weighted": (1 - SMOOTHING) * weights[TARGET] * above_target
        + SMOOTHING * share * sum(w * b for w, b in zip(weights, below, strict=True))
        + 2**-20 * lse * lse,
        "log_prob": -above_target,
        "entropy": sum(b * math.exp(-b) for b in below),
        "total": lse,
    }


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)
@pytest.mark.parametrize("ranks", (1, 2, 4))
@pytest.mark.parametrize("level", (0.0, 1e6))
@pytest.mark.parametrize(
    "scores", (PLAIN, CERTAIN, PLAIN[:3], CERTAIN[:2]), ids=("plain", "certain", "three", "two")
)
def test_finite_scores(scores: tuple[float, ...], level: float, ranks: int, dtype: torch.dtype) -> None:
    """With two or three classes, some of four ranks have none."""
    raised = _raised(scores, level)
    found = _over_ranks(ranks, _of_student, raised, dtype)
    # Numbers relative to the log-sum-exp. Between ranks a log-sum-exp has the digits of float64.
    atol = {torch.float64: 4e-10 if level else 4e-15, torch.float32: 2e-6}[dtype]
    rtol = {torch.float64: 1e-14, torch.float32: 1e-6}[dtype]
    for name, expected in _expected(raised).items():
        torch.testing.assert_close(
            found[name],
            torch.tensor([expected], dtype=torch.float64),
            rtol=rtol,
            atol=atol,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("level", (0.0, 1e6))
def test_a_certain_target(level: float, ranks: int) -> None:
    """One rank has nearly all of the softmax. Its small loss is not lost in its log-sum-exp."""
    certain = _replaced(_raised((0.0, 28.0, *(-900.0,) * 5), level), -INF, 6)
    for dtype in (torch.float64, torch.float32):
        found, alone = _over_ranks(ranks, _of_student, certain, dtype), _of_student(None, certain, dtype)
        for name in ("loss", "log_prob", "entropy"):
            torch.testing.assert_close(found[name], alone[name], rtol=1e-12, atol=0)
        if dtype == torch.float64:
            torch.testing.assert_close(found["loss"].item(), math.exp(-28), rtol=1e-3, atol=0)


NOT_FINITE = {
    "+inf with another rank": _replaced(PLAIN, INF, 6),
    "+inf with the target's rank": _replaced(PLAIN, INF, 0),
    "+inf of the target": _replaced(PLAIN, INF, TARGET),
    "two +inf": _replaced(PLAIN, INF, 0, 5),
    "all +inf": (INF,) * CLASSES,
    "-inf of the target": _replaced(PLAIN, -INF, TARGET),
    "-inf of another class": _replaced(PLAIN, -INF, 5),
    "-inf of the target's rank": _replaced(PLAIN, -INF, 0, 1, 2, 3),
    "-inf of another rank": _replaced(PLAIN, -INF, 4, 5, 6),
    "all -inf": (-INF,) * CLASSES,
    "-inf and +inf": _replaced(_replaced(PLAIN, -INF, 0, 1, 2, 3), INF, 5),
    "NaN with another rank": _replaced(PLAIN, NAN, 6),
    "NaN of the target": _replaced(PLAIN, NAN, TARGET),
    "NaN and +inf": _replaced(_replaced(PLAIN, NAN, 6), INF, 0),
}


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)
@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("case", NOT_FINITE)
def test_scores_that_are_not_finite_are_as_on_one_device(case: str, ranks: int, dtype: torch.dtype) -> None:
    found = _over_ranks(ranks, _of_student, NOT_FINITE[case], dtype)
    alone = _of_student(None, NOT_FINITE[case], dtype)
    for name, expected in alone.items():
        torch.testing.assert_close(
            found[name], expected, rtol=2e-6, atol=1e-7, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


PAIRS = {
    "plain": (PLAIN, TEACHER),
    "around 1e6": (_raised(PLAIN, 1e6), _raised(TEACHER, -1e6)),
    "equal": (_raised(PLAIN, 1e6), PLAIN),
    "student's -inf of a rank": (_replaced(PLAIN, -INF, 0, 1, 2, 3), TEACHER),
    "teacher's -inf of a rank": (PLAIN, _replaced(TEACHER, -INF, 4, 5, 6)),
    "all of the student -inf": ((-INF,) * CLASSES, TEACHER),
    "NaN": (_replaced(PLAIN, NAN, 3), TEACHER),
    "NaN of the teacher": (PLAIN, _replaced(TEACHER, NAN, 6)),
    "+inf": (_replaced(PLAIN, INF, 3), TEACHER),
    "+inf of the teacher": (PLAIN, _replaced(TEACHER, INF, 6)),
}


def _of_classes_that_count(student: tuple[float, ...], teacher: tuple[float, ...]) -> dict[str, Tensor]:
    """The losses in float64, as sums over the classes that have a probability under Q."""
    log_s, log_t = (_row(scores, torch.float64).log_softmax(0) for scores in (student, teacher))

    def expectation(log_q: Tensor, value: Tensor) -> Tensor:
        return torch.where(log_q.isneginf(), 0.0, log_q.exp() * value).sum(0)

    return {
        "cross_entropy": expectation(log_t, -log_s),
        "forward_kl": expectation(log_t, log_t - log_s),
        "reverse_kl": expectation(log_s, log_s - log_t),
    }


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)
@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("case", PAIRS)
def test_distillation(case: str, ranks: int, dtype: torch.dtype) -> None:
    found = _over_ranks(ranks, _of_both, *PAIRS[case], dtype)
    alone = _of_both(None, *PAIRS[case], dtype)
    if "of a rank" in case:  # one device multiplies the probability 0 by its infinite logarithm
        alone = _of_classes_that_count(*PAIRS[case])
    atol = {torch.float64: 1e-9 if "1e6" in case or case == "equal" else 1e-14, torch.float32: 2e-6}[dtype]
    for name, expected in alone.items():
        torch.testing.assert_close(
            found[name], expected, rtol=1e-6, atol=atol, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
