"""What a function reads is that of the call, also where no variable of the function shows it."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import stat
from monoidreduce.folds.program import tracing
from monoidreduce.stat import largest, softmax, total

LIMIT = 2


def reads_globals(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return torch.where(i - j <= globals()["LIMIT"], s, s * 2)


def reads_a_setting(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * (2.0 if torch.get_default_dtype() == torch.float64 else 3.0)


def reads_another_setting(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * (2.0 if torch.is_grad_enabled() else 3.0)


@pytest.mark.parametrize("compiles", [False, True])
def test_what_no_variable_shows_is_read_in_every_call(compiles: bool) -> None:
    global LIMIT
    q = torch.randn(1, 1, 6, 4, dtype=torch.float64)
    distance = torch.arange(6)[:, None] - torch.arange(6)
    scores = q @ q.mT / 2

    def call(mod: Any) -> Any:
        step = lambda q: mr.attention(q, q, q, score_mod=mod)  # noqa: E731
        return torch.compile(step, fullgraph=True, backend="eager") if compiles else step

    step = call(reads_globals)
    for limit in (2, 0, 1):
        LIMIT = limit
        expected = torch.where(distance <= limit, scores, scores * 2).softmax(-1) @ q
        torch.testing.assert_close(step(q), expected)
    step = call(reads_a_setting)
    for dtype, factor in ((torch.float32, 3), (torch.float64, 2), (torch.float32, 3)):
        torch.set_default_dtype(dtype)
        try:
            torch.testing.assert_close(step(q), (scores * factor).softmax(-1) @ q)
        finally:
            torch.set_default_dtype(torch.float32)
    step = call(reads_another_setting)
    for on, factor in ((True, 2), (False, 3), (True, 2)):
        with torch.set_grad_enabled(on):
            torch.testing.assert_close(step(q), (scores * factor).softmax(-1) @ q)


class Fold(torch.nn.Module):
    """Holds functions that hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.rand(7))
        self.fold = mr.statistics(lambda score, column: {"x": stat.total(score + self.bias[column])})
        self.score = lambda s, b, h, i, j: s + self.bias[j]

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.fold(a, b).x
        return x + mr.attention(*[b[None, None]] * 3, score_mod=self.score).sum()


@pytest.mark.parametrize("compiles", [False, True])
def test_traces_keep_no_module_alive(compiles: bool) -> None:
    module = Fold()
    step = lambda module, a, b: module(a, b)  # noqa: E731
    step = torch.compile(step, fullgraph=True, backend="eager") if compiles else step
    step(module, torch.randn(5, 3), torch.randn(7, 3)).sum().backward()
    alive = weakref.ref(module), weakref.ref(module.bias)
    del module
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def every_statistic(score: Any, column: Any, label: Any) -> Any:
    p = stat.softmax(score)
    return dict(
        lse=p.logsumexp,
        mean=p.mean(math.sqrt(2.0) * score),
        total=stat.total(torch.where(column == label, F.softplus(score), 0.0)),
        best=stat.largest(score),
        least=stat.smallest(torch.tanh(score)),
        over=stat.count(score > 0),
    )


def by_the_package(score: Any, label: Any) -> Any:
    return dict(
        lse=mr.stat.softmax(score).logsumexp, total=mr.stat.total(score), over=mr.stat.count(score > 0)
    )


def by_names(score: Any, label: Any) -> Any:
    return dict(lse=softmax(score).logsumexp, total=total(score), best=largest(score))


@pytest.mark.parametrize("function", [every_statistic, by_the_package, by_names])
def test_a_function_of_the_vocabulary_is_traced_once(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, calls = tracing.trace, []
    monkeypatch.setattr(tracing, "trace", lambda *args: calls.append(args) or trace(*args))
    fold, a, b = mr.statistics(function), torch.randn(3, 4), torch.randn(5, 4)
    for label in (0, 1, 2):
        fold(a, b, label=torch.full((3,), label))
    assert len(calls) == 1
