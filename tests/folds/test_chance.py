"""What a traced function may not draw or read: numbers that would be one for all elements."""

from __future__ import annotations

import datetime
import functools
import logging
import math
import os
import random
import time
import types
from collections.abc import Callable
from random import gauss
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr

GENERATOR, NORMAL = np.random.default_rng(0), np.random.default_rng(0).normal
TORCHS = torch.Generator()
CONSTANT = torch.tensor(2.0)


def imports(score: Any) -> Any:
    import random as of_python

    return score * of_python.uniform(1, 2)


def helper() -> float:
    return random.random()


class Noisy:
    def __call__(self, score: Any) -> Any:
        return score + self.noise()

    def method(self, score: Any) -> Any:
        return score + self.noise()

    def noise(self) -> float:
        return random.random()


# By the name that the error has.
DRAWS: dict[str, list[Callable[..., Any]]] = {
    "torch.rand": [lambda s: s + torch.rand(())],
    "torch.rand:": [lambda s: s + torch.distributions.Gumbel(0.0, 1.0).sample()],
    "torch.randn": [lambda s: s + torch.randn((), generator=TORCHS), lambda s: s + torch.randn(3)[0]],
    "torch.randint": [lambda s: s + torch.randint(3, ())],
    "torch.rand_like": [lambda s: s + torch.rand_like(CONSTANT), lambda s: s + torch.rand_like(s)],
    "torch.randn_like": [lambda s: s * torch.randn_like(s)],
    "torch.bernoulli": [
        lambda s: s + torch.bernoulli(CONSTANT / 4),
        lambda s: torch.bernoulli(torch.sigmoid(s)),
    ],
    "torch.multinomial": [lambda s: s + torch.multinomial(torch.ones(3), 1)[0]],
    "torch.normal": [lambda s: s + torch.normal(CONSTANT, 1.0)],
    "torch.poisson": [lambda s: s + torch.poisson(CONSTANT)],
    "dropout": [
        lambda s: F.dropout(s),
        lambda s: s * F.dropout(CONSTANT),
        lambda s: torch.dropout(s, 0.5, True),
    ],
    "uniform_": [lambda s: s + torch.zeros(()).uniform_(), lambda s: s.uniform_()],
    "bernoulli:": [lambda s: s.bernoulli()],
    "torch.random.initial_seed": [lambda s: s + torch.initial_seed() % 7],
    "random.random": [lambda s: s + random.random(), lambda s: s + helper(), Noisy(), Noisy().method],
    "random.gauss": [lambda s: s + gauss(0, 1), functools.partial(lambda by, s: s * by * gauss(0, 1), 2.0)],
    "random.uniform": [imports],
    "numpy.random": [
        lambda s: s + np.random.rand(),
        lambda s: s + GENERATOR.normal(),
        lambda s: s + NORMAL(),
    ],
    "time.time": [lambda s: s + time.time()],
    "time.perf_counter": [lambda s: s + time.perf_counter()],
    "datetime.now": [lambda s: s + datetime.datetime.now().second],
    "os.environ": [lambda s: s + float(os.environ.get("NO_SUCH", "1"))],
    "os.getenv": [lambda s: s + float(os.getenv("NO_SUCH", "1"))],
}


@pytest.mark.parametrize("name", DRAWS)
def test_refused(name: str) -> None:
    """In every function that is traced, and again when it is called again."""
    q, a, b = torch.randn(1, 1, 3, 4), torch.randn(3, 2), torch.randn(4, 2)
    for function in DRAWS[name]:
        fold = mr.statistics(lambda score, function=function: dict(x=mr.stat.total(function(score))))
        for call in (
            lambda function=function: mr.attention(q, q, q, score_mod=lambda s, *_: function(s)),
            lambda function=function: mr.attend(q, q, q, weight=function),
            lambda function=function: mr.attend(q, q, q, weight=function),
            lambda fold=fold: fold(a, b),
        ):
            with pytest.raises(mr.TraceError, match=r"one number for all elements\. Make") as caught:
                call()
            first = str(caught.value).partition(": ")[2]
            assert first.startswith(name) or name in first.partition(":")[0] + ":", first
            assert caught.value.file == __file__


def test_what_a_log_reads_is_its_own() -> None:
    """A line of a log has a time, and numbers that are computed are no draws."""
    q = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    logger = logging.getLogger("of this test")

    def score_mod(score: Any, *_: Any) -> Any:
        logger.warning("traced")
        assert isinstance(logger, logging.Logger) and isinstance(math, types.ModuleType)
        return score * CONSTANT.sqrt() * math.sin(1.0) * float(np.sin(1.0))

    expected = F.scaled_dot_product_attention(q, q, q, scale=0.5 * 2**0.5 * math.sin(1.0) ** 2)
    torch.testing.assert_close(mr.attention(q, q, q, score_mod=score_mod), expected, rtol=1e-6, atol=1e-6)


def test_tensors_that_are_compared_are_no_draws() -> None:
    """torch.ops.aten has methods of the same names, such as __eq__, which are not ops."""
    q = torch.randn(1, 1, 3, 4, dtype=torch.float64)

    def score_mod(score: Any, *_: Any) -> Any:
        return score * (1.0 + float(CONSTANT == CONSTANT) + float(CONSTANT != CONSTANT))

    expected = F.scaled_dot_product_attention(q, q, q, scale=1.0)
    torch.testing.assert_close(mr.attention(q, q, q, score_mod=score_mod), expected, rtol=1e-6, atol=1e-6)


def test_torchs_generator_is_left_alone() -> None:
    """A refused draw is not drawn."""
    q = torch.randn(1, 1, 3, 4)
    state = torch.get_rng_state()
    with pytest.raises(mr.TraceError):
        mr.attention(q, q, q, score_mod=lambda s, *_: s + torch.rand(()))
    assert torch.equal(state, torch.get_rng_state())
