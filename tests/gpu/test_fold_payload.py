"""Programs with payload sums in one pass (fold_payload_sm90.cuh), against torch in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from calls import HALVES
from specimens import name_of
from tensor_core_scores import tensor_core_scores
from tolerance import accuracy_failures, check_draws, raise_failures
from torch import Tensor

import monoidreduce as mr
from monoidreduce import stat
from monoidreduce.folds.cuda import cuda_passes, cuda_payload
from monoidreduce.folds.torch import reader

pytestmark = pytest.mark.tiers("sm90")


@mr.statistics
def of_one_score(score: Any, shift: Any, v: Any) -> Any:
    p = stat.softmax(score + shift)
    return dict(
        mean=p.mean(v), scaled=p.mean(torch.tanh(score) * v), mean_score=p.mean(score), lse=p.logsumexp
    )


@mr.statistics
def of_two_scores(score: Any, other: Any, u: Any, v: Any) -> Any:
    p = stat.softmax(score)
    return dict(mean=p.mean(u), slope=p.mean(other * v), mean_slope=p.mean(other), lse=p.logsumexp)


@mr.statistics
def of_two_softmaxes(score: Any, other: Any, v: Any) -> Any:
    p, q = stat.softmax(score), stat.softmax(other - score)
    top = stat.largest(score)
    return dict(first=p.mean(v), second=q.mean(v), top=top, far=stat.count(score > other), lse=q.logsumexp)


@mr.statistics
def of_total(score: Any, weight: Any, v: Any) -> Any:
    w = torch.sigmoid(score) * weight
    return dict(force=stat.total(w * v), mass=stat.total(w))


@mr.statistics
def without_payload(score: Any, row: Any, column: Any, w: Any) -> Any:
    p = stat.softmax(score)
    best = stat.largest(score + w)
    return dict(
        lse=p.logsumexp, mean=p.mean(w), own=stat.total(torch.where(row == column, score, 0.0)), best=best
    )


@mr.statistics
def windowed(score: Any, row: Any, column: Any, w: Any, v: Any) -> Any:
    """Rows have bounds on both sides; some have no columns."""
    p = stat.softmax(torch.where((column > row - 70) & (column < row * 2), score * w, -math.inf))
    return dict(mean=p.mean(v), w=p.mean(w), lse=p.logsumexp)


@mr.statistics
def masked(score: Any, row: Any, column: Any, v: Any) -> Any:
    p = stat.softmax(torch.where(column <= row, score, -math.inf))
    return dict(mean=p.mean(v), lse=p.logsumexp)


@mr.statistics
def scores(score: Any, row: Any, column: Any) -> Any:
    p = stat.softmax(score - 0.1 * (row - column).abs())
    return dict(lse=p.logsumexp, mean=p.mean(score), total=stat.total(torch.tanh(score)))


@mr.statistics
def score_pairs(score: Any, other: Any) -> Any:
    p = stat.softmax(score)
    return dict(lse=p.logsumexp, gap=p.mean(other - score))


FOLDS = {
    "scores": scores,
    "pairs": score_pairs,
    "one": of_one_score,
    "two": of_two_scores,
    "softmaxes": of_two_softmaxes,
    "total": of_total,
    "masked": masked,
    "windowed": windowed,
    "numbers": without_payload,
}
# batches, rows, columns, widths of both scores, width of the payload
SHAPES = [
    (1, 1, 1, 8, 8, 8),
    (1, 130, 257, 64, 128, 64),
    (3, 64, 64, 40, 24, 100),
    (2, 129, 63, 128, 256, 128),
    (5, 133, 165, 256, 64, 3),
    (1, 300, 1000, 65, 70, 192),
]


def call_of(name: str, shape: tuple[int, ...], dtype: torch.dtype, gpu: torch.device) -> dict[str, Any]:
    batches, rows, columns, width, other_width, of_payload = shape

    def normal(*size: int) -> Tensor:
        t = torch.randn(batches, *size, device=gpu, dtype=torch.float64)
        return (t[0] if batches == 1 else t).to(dtype)

    scale = width**-0.25
    call: dict[str, Any] = dict(a=normal(rows, width) * scale, b=normal(columns, width) * scale)
    if name in ("two", "softmaxes", "pairs"):
        of_other = other_width**-0.25
        call |= dict(
            other_a=normal(rows, other_width) * of_other, other_b=normal(columns, other_width) * of_other
        )
    call["column"] = {"v": normal(columns, of_payload)}
    if name == "two":
        call["column"]["u"] = normal(columns, of_payload // 2 + 1)
    if name == "one":
        call["column"]["shift"] = normal(columns, 1)[..., 0]
    if name in ("numbers", "scores", "pairs"):
        del call["column"]["v"]
    if name in ("windowed", "numbers"):
        call["column"]["w"] = normal(columns, 1)[..., 0]
    if name == "total":
        call["row"] = {"weight": normal(rows, 1)[..., 0]}
    return call


def is_taken(name: str, shape: tuple[int, ...]) -> bool:
    """Whether rows fit into shared memory, and at most two kernels add up the payload."""
    width, other_width, of_payload = (-(-size // 64) for size in shape[3:])
    if name in ("numbers", "scores"):
        return shape[0] > 1  # batches
    if name == "pairs":
        return shape[0] > 1 and width + other_width <= 6
    two = name in ("two", "softmaxes")
    slabs = of_payload * (2 if name in ("one", "softmaxes") else 1)
    if name == "two":
        slabs += -(-(shape[5] // 2 + 1) // 64)
    return width + two * other_width <= 6 and slabs <= 2 * (2 if two else 3)


def leaves_of(call: dict[str, Any]) -> list[Tensor]:
    data = [t for name in ("row", "column") for t in call.get(name, {}).values()]
    return [*(t for t in call.values() if isinstance(t, Tensor)), *data]


def mapped(call: dict[str, Any], change: Any) -> dict[str, Any]:
    def of(given: Any) -> Any:
        if isinstance(given, dict):
            return mapped(given, change)
        return change(given) if isinstance(given, Tensor) else given

    return {name: of(given) for name, given in call.items()}


def outputs_of(results: Any) -> dict[str, Tensor]:
    found = {}
    for name, value in results._asdict().items():
        if isinstance(value, stat.Extremum):
            found |= {f"{name}.value": value.value, f"{name}.index": value.index}
        else:
            found[name] = value
    return found


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that the kernels fold."""
    programs: list[str] = []
    fold = cuda_payload.fold
    monkeypatch.setattr(
        cuda_payload, "fold", lambda call, *rest: (programs.append(call.program), fold(call, *rest))[1]
    )
    return programs


def check(name: str, shape: tuple[int, ...], dtype: torch.dtype, gpu: torch.device, **options: Any) -> None:
    fold, call = FOLDS[name], call_of(name, shape, dtype, gpu) | options
    results = []
    for function, inputs, scores in (
        (fold, call, reader.scores),
        (fold.reference, mapped(call, lambda t: t.double()), reader.scores),
        (fold.reference, call, tensor_core_scores),
    ):
        inputs = mapped(inputs, lambda t: t.detach().requires_grad_())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader, "scores", scores)
            outputs = outputs_of(function(**inputs))
        real = [t for t in outputs.values() if t.is_floating_point()]
        if not results:
            upstream = [torch.randn_like(t, dtype=torch.float64) for t in real]
        given = [g.to(t.dtype) for g, t in zip(upstream, real, strict=True)]
        gradients = torch.autograd.grad(real, leaves_of(inputs), given)
        results.append((outputs, dict(enumerate(gradients))))
    failures = []
    for ours, exact, base in zip(*results, strict=True):
        for key in ours:
            if ours[key].is_floating_point():
                of = ours[key], exact[key], base[key]
                rows = max(shape[1], shape[2])
                failures += accuracy_failures(str(key), *of, dtype, rows, drawn_again=True)
            elif shape[1] * shape[2] < 5000:  # of more elements, some differ by rounding alone
                assert torch.equal(ours[key], exact[key])
    raise_failures(name, failures)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FOLDS)
def test_accuracy(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    gpu: torch.device,
    folded: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together: list[int] = []
    backward = cuda_passes.backward_of_batches
    monkeypatch.setattr(
        cuda_passes, "backward_of_batches", lambda *args: (together.append(args[-1]), backward(*args))[1]
    )
    check_draws(lambda: check(name, shape, dtype, gpu))
    assert bool(folded) == is_taken(name, shape)
    # Gradients of data, and those of payloads beside two scores, are computed one batch after the other.
    assert set(together) == ({shape[0]} if shape[0] > 1 and name in ("scores", "pairs", "masked") else set())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ("one", "softmaxes"))
def test_block_mask(name: str, shape: tuple[int, ...], gpu: torch.device, folded: list[str]) -> None:
    """Of documents. Some rows are in documents that no column is in, or columns in documents without rows."""
    document = torch.arange(1000, device=gpu) // 37
    mask = mr.block_mask(
        lambda b, h, i, j: document[i] == document[j], None, None, shape[1], shape[2], block_size=64
    )
    check_draws(lambda: check(name, shape, torch.bfloat16, gpu, block_mask=mask))
    assert bool(folded) == is_taken(name, shape)


@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_vectors_that_are_not_finite_reach_their_rows_alone(
    value: float, gpu: torch.device, folded: list[str]
) -> None:
    call = call_of("masked", (1, 100, 100, 64, 0, 64), torch.bfloat16, gpu)
    call["column"]["v"][70, 3] = value
    mean = masked(**call).mean
    assert folded and mean[:70].isfinite().all() and mean[70:, 3].isnan().all()


@pytest.mark.parametrize("moving", ("qkv", "q", "v"))
@pytest.mark.parametrize("width", (40, 64, 128))
def test_forward_mode_of_attention(width: int, moving: str, gpu: torch.device, folded: list[str]) -> None:
    """By attention's own kernel, and one pass for all heads: with and without a mask."""
    inputs = [torch.randn(2, 3, 200, width, device=gpu, dtype=torch.bfloat16) for _ in "qkv"]
    x = [t for t, name in zip(inputs, "qkv", strict=True) if name in moving]
    directions = [torch.randn_like(t) for t in x]
    failures = []
    for causal in (False, True):
        results = []
        for of, dtype in (
            (mr.attention, torch.bfloat16),
            (mr.reference.attention, torch.float64),
            (mr.reference.attention, torch.bfloat16),
        ):

            def along(*moved: Tensor, of: Any = of, dtype: Any = dtype, causal: bool = causal) -> Any:
                left = iter(moved)
                q, k, v = (
                    next(left) if name in moving else t.to(dtype)
                    for t, name in zip(inputs, "qkv", strict=True)
                )
                return of(q, k, v, causal=causal, return_lse=True)

            given = (tuple(t.to(dtype) for t in each) for each in (x, directions))
            found = torch.func.jvp(along, *given)
            results.append([t for pair in found for t in pair])
        for name, *of_name in zip(("out", "lse", "d_out", "d_lse"), *results, strict=True):
            if of_name[1].any():  # v moves no log-sum-exp
                failures += accuracy_failures(f"{name}, causal {causal}", *of_name, torch.bfloat16, 200)
            else:
                assert not of_name[0].any()
    assert not failures, "\n".join(failures)
    assert len(folded) == 2  # how it moves each time
