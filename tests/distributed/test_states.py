"""What the states of several ranks combine to. Here ranks are slices of a tensor: any number, no process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from monoidreduce.distributed import states

RANKS = (1, 2, 7, 16)
NONE = -100  # no target


def _parts(scores: Tensor, ranks: int) -> list[Tensor]:
    """[rows, columns] -> a slice for each rank; the last slices may be empty."""
    size = -(-scores.shape[1] // ranks)
    return [scores[:, i * size : (i + 1) * size] for i in range(ranks)]


def _words(lse: Tensor) -> tuple[Tensor, Tensor]:
    """A log-sum-exp in two words of float32, which hold one of 1e4 to 1e-9 or so: they have 48 bits."""
    high, low = states.two_words(lse, torch.float32)
    return high.double(), low.double()


def _sum(words: tuple[Tensor, ...]) -> Tensor:
    high, low = words
    return torch.where(high.isinf(), high, high + low)


def _of_targets(scores: Tensor, target: Tensor, ranks: int, smoothing: float = 0.0) -> Tensor:
    """The states of cross entropy: [ranks, 4, rows]."""
    weights = torch.zeros_like(scores).scatter_(1, target[:, None], 1 - smoothing)
    weights += smoothing / scores.shape[1]
    found = []
    for part, weight in zip(_parts(scores, ranks), _parts(weights, ranks), strict=True):
        lse = part.logsumexp(1)
        loss = torch.where(weight > 0, weight * (lse[:, None] - part), 0.0).sum(1)
        found.append(torch.stack((loss, weight.sum(1), *_words(lse))))
    return torch.stack(found)


def _cross_entropy(scores: Tensor, target: Tensor, ranks: int, smoothing: float = 0.0) -> states.Loss:
    given = _of_targets(scores, target, ranks, smoothing)
    return states.cross_entropy(given, target, None, "none", NONE, 0.0)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("level", (0.0, 1e4, -1e4))
@pytest.mark.parametrize("smoothing", (0.0, 0.3))
def test_cross_entropy(smoothing: float, level: float, ranks: int) -> None:
    scores, target = torch.randn(9, 33).double() + level, torch.randint(33, (9,))
    found = _cross_entropy(scores, target, ranks, smoothing)
    torch.testing.assert_close(_sum(found[1:3]), scores.logsumexp(1), rtol=1e-13, atol=0)
    options: dict[str, Any] = {"reduction": "none", "label_smoothing": smoothing}
    expected = torch.nn.functional.cross_entropy(scores, target, **options)
    torch.testing.assert_close(found.loss, expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize(
    "at, value, target, expected",
    (
        (0, math.inf, 3, math.inf),  # on another rank than the target
        (0, math.inf, 0, math.nan),  # the target itself
        (0, -math.inf, 0, math.inf),
        (slice(0, 2), -math.inf, 0, math.inf),  # all of a rank
        (slice(0, 2), -math.inf, 3, None),
        (slice(0, 4), -math.inf, 3, math.nan),
        (slice(0, 4), math.inf, 3, math.nan),
        (1, math.nan, 3, math.nan),
    ),
)
def test_infinite_scores_are_as_on_one_device(
    ranks: int, at: int | slice, value: float, target: int, expected: float | None
) -> None:
    scores = torch.tensor([[0.5, -1.0, 2.0, 0.25]]).double()
    scores[0, at] = value
    found = _cross_entropy(scores, torch.tensor([target]), ranks)
    of_torch = torch.nn.functional.cross_entropy(scores, torch.tensor([target]))
    wanted = of_torch if expected is None else torch.tensor(expected).double()
    torch.testing.assert_close(found.loss[0], wanted, equal_nan=True, rtol=1e-6, atol=0)
    lse = _sum(found[1:3])
    torch.testing.assert_close(lse, scores.logsumexp(1), equal_nan=True, rtol=1e-12, atol=0)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("level", (0.0, 1e4))
def test_the_share_of_a_target_less_one(level: float, ranks: int) -> None:
    """What kept weights need of a target's own. Near 1 it is as precise as the words of log-sum-exps."""
    scores, target = 3 * torch.randn(40, 33).double() + level, torch.randint(33, (40,))
    scores[0, target[0]] += 30
    ignored = torch.arange(40) % 5 == 1
    given = _of_targets(scores, target, ranks)
    miss = torch.full((40,), math.nan).double()
    target[ignored] = NONE
    states.cross_entropy(given, target, None, "none", NONE, 0.0, miss)
    others = scores.masked_fill(torch.nn.functional.one_hot(target.clamp(0), 33).bool(), -math.inf)
    expected = -(others.logsumexp(1) - scores.logsumexp(1)).exp().masked_fill(ignored, 0.0)
    torch.testing.assert_close(miss, expected, rtol=1e-6, atol=1e-10 if level else 1e-13)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("level", (0.0, 1e4))
def test_log_probs(level: float, ranks: int) -> None:
    scores, target = torch.randn(9, 33).double() + level, torch.randint(33, (9,))
    target[4] = NONE
    found = []
    of_targets = _of_targets(scores, target.clamp(0), ranks)
    for (loss, here, *words), part in zip(of_targets, _parts(scores, ranks), strict=True):
        log_p = part.log_softmax(1)
        log_prob = torch.where(here > 0, -loss, math.inf)  # of other ranks' targets
        found.append(torch.stack((log_prob, -(log_p.exp() * log_p).sum(1), *words)))
    log_probs, entropy, *words = states.log_probs(torch.stack(found), target, NONE)
    whole = scores.log_softmax(1)
    expected = whole.gather(1, target.clamp(0)[:, None])[:, 0], -(whole.exp() * whole).sum(1)
    results = log_probs, entropy, _sum(tuple(words))
    for given, wanted in zip(results, (*expected, scores.logsumexp(1)), strict=True):
        torch.testing.assert_close(given, wanted.masked_fill(target == NONE, 0.0), rtol=1e-7, atol=0)


@pytest.mark.parametrize("level", (0.0, 1e6))
def test_a_small_loss_of_one_rank(level: float) -> None:
    """Beside it a log-sum-exp of 1e6 has no digits left."""
    high, loss = (
        torch.tensor([level, level - 60.0, -math.inf]).double()[:, None],
        torch.tensor([1e-12, 0.0, 0.0]),
    )
    low, weight = torch.zeros(3, 1).double(), torch.tensor([1.0, 0.0, 0.0]).double()[:, None]
    given = torch.stack((loss.double()[:, None], weight, high, low), 1)
    target = torch.zeros(1, dtype=torch.int64)
    found = states.cross_entropy(given, target, None, "none", NONE, 0.0).loss
    torch.testing.assert_close(found, loss[:1].double(), rtol=1e-9, atol=0)
    given = torch.stack(
        (torch.where(weight > 0, -loss.double()[:, None], math.inf), loss.double()[:, None], high, low), 1
    )
    log_prob, entropy, *_ = states.log_probs(given, target, NONE)
    torch.testing.assert_close(-log_prob, loss[:1].double(), rtol=1e-9, atol=0)
    torch.testing.assert_close(entropy, loss[:1].double(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", ("cross_entropy", "forward_kl"))
def test_distillation(kind: str, ranks: int) -> None:
    """P is the student, Q the teacher; the level of each row of scores cancels in the divergence."""
    p, q = torch.randn(9, 33).double() + 1e3, torch.randn(9, 33).double() - 1e3

    def of(p: Tensor, q: Tensor) -> Tensor:
        log_q = q.log_softmax(1) if kind == "forward_kl" else torch.zeros_like(q)
        return (q.softmax(1) * (log_q - p.log_softmax(1))).sum(1)

    parts = zip(_parts(p, ranks), _parts(q, ranks), strict=True)
    given = torch.stack(
        [torch.stack((of(a, b), *_words(a.logsumexp(1)), *_words(b.logsumexp(1)))) for a, b in parts]
    )
    loss, found = states.distillation(given, kind)
    torch.testing.assert_close(loss, of(p, q), rtol=1e-6, atol=1e-9)
    for words, expected in zip(found.view(3, 2, 9), (p.logsumexp(1), q.logsumexp(1)), strict=False):
        torch.testing.assert_close(_sum(tuple(words)), expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(_sum(tuple(found[4:])), p.logsumexp(1) - of(p, q), rtol=1e-9, atol=0)


@pytest.mark.parametrize("ranks", RANKS)
def test_log_sum_exp(ranks: int) -> None:
    """Also of rows that are empty, infinite or NaN on some ranks."""
    scores = torch.randn(9, 33).double()
    scores[0, 2:], scores[1], scores[2, 7], scores[3, 5] = -math.inf, -math.inf, math.inf, math.nan
    given = torch.stack([torch.stack(_words(part.logsumexp(1))) for part in _parts(scores, ranks)])
    found = _sum(states.log_sum_exp(given))
    torch.testing.assert_close(found, scores.logsumexp(1), rtol=1e-13, atol=0, equal_nan=True)
