"""What the states of several ranks combine to. Here ranks are slices of a tensor: any number, no process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from monoidreduce.distributed import states

RANKS = (1, 2, 7, 16)


def _parts(scores: Tensor, ranks: int) -> list[Tensor]:
    """[rows, columns] -> a slice for each rank, of which the last ones may be empty."""
    size = -(-scores.shape[1] // ranks)
    return [scores[:, i * size : (i + 1) * size] for i in range(ranks)]


def _words(lse: list[Tensor]) -> tuple[Tensor, Tensor]:
    words = [states.two_words(x, torch.float32) for x in lse]
    return torch.stack([high for high, _ in words]), torch.stack([low for _, low in words])


def _cross_entropy(scores: Tensor, weights: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    parts, of_parts = _parts(scores, ranks), _parts(weights, ranks)
    lse = [p.logsumexp(1) for p in parts]
    losses = [(w * (x[:, None] - p)).sum(1) for x, p, w in zip(lse, parts, of_parts, strict=True)]
    return _combined(torch.stack(losses), torch.stack([w.sum(1) for w in of_parts]), lse)


def _combined(losses: Tensor, weights: Tensor, lse: list[Tensor]) -> tuple[Tensor, Tensor]:
    of_ranks, whole = states.log_sum_exp(*_words(lse))
    return states.cross_entropy(losses, weights, states.raised(of_ranks, whole)), whole


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("level", (0.0, 1e4, -1e4))
def test_cross_entropy(ranks: int, level: float) -> None:
    """Float32 words hold a log-sum-exp of 1e4 to 1e-9 or so: two of them have 48 bits."""
    scores, weights = torch.randn(9, 33).double() + level, torch.rand(9, 33).double()
    lse = scores.logsumexp(1)
    loss, found = _cross_entropy(scores, weights, ranks)
    torch.testing.assert_close(found, lse, rtol=1e-13, atol=0)
    torch.testing.assert_close(loss, (weights * (lse[:, None] - scores)).sum(1), rtol=1e-7, atol=0)


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
        (1, math.nan, 3, math.nan),
    ),
)
def test_infinite_scores_are_as_on_one_device(
    ranks: int, at: int | slice, value: float, target: int, expected: float | None
) -> None:
    scores = torch.tensor([[0.5, -1.0, 2.0, 0.25]]).double()
    scores[0, at] = value
    weights = torch.zeros_like(scores)
    weights[0, target] = 1.0
    parts, of_parts = _parts(scores, ranks), _parts(weights, ranks)
    lse = [p.logsumexp(1) for p in parts]
    losses = [
        torch.where(w > 0, x[:, None] - p, 0.0).sum(1) for x, p, w in zip(lse, parts, of_parts, strict=True)
    ]
    given = (torch.stack(losses), torch.stack([w.sum(1) for w in of_parts]))
    loss, found = _combined(*given, lse)
    of_torch = torch.nn.functional.cross_entropy(scores, torch.tensor([target]))
    wanted = of_torch if expected is None else torch.tensor(expected).double()
    torch.testing.assert_close(loss[0], wanted, equal_nan=True, rtol=1e-6, atol=0)
    torch.testing.assert_close(found, scores.logsumexp(1), equal_nan=True, rtol=1e-12, atol=0)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", ("cross_entropy", "forward_kl"))
def test_distillation(kind: str, ranks: int) -> None:
    """P is the student, Q the teacher; the level of each row of scores cancels in the divergence."""
    p, q = torch.randn(9, 33).double() + 1e3, torch.randn(9, 33).double() - 1e3

    def of(p: Tensor, q: Tensor) -> Tensor:
        log_q = q.log_softmax(1) if kind == "forward_kl" else torch.zeros_like(q)
        return (q.softmax(1) * (log_q - p.log_softmax(1))).sum(1)

    parts = list(zip(_parts(p, ranks), _parts(q, ranks), strict=True))
    losses = torch.stack([of(a, b) for a, b in parts])
    words = [_words([t.logsumexp(1) for t in side]) for side in zip(*parts, strict=True)]
    stats = torch.stack((*words[0], *words[1], *torch.zeros(2, *words[0][0].shape)), 1)
    loss, found = states.distillation(losses, stats, kind)
    torch.testing.assert_close(loss, of(p, q), rtol=1e-6, atol=1e-9)
    centre = found[4].double() + found[5].double()
    torch.testing.assert_close(centre, p.logsumexp(1) - of(p, q), rtol=1e-9, atol=0)
