"""Python floats that change from call to call under torch.compile: the right value, and no new graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monoidreduce as mr
from monoidreduce import stat

F64 = torch.float64
NUMBERS = (0.5, 0.7, 1.3, 2.0, 0.25, 0.9, 1.1, 1.9, 0.3, 0.45)  # more than graphs that torch makes


@pytest.fixture(autouse=True)
def no_graphs_of_earlier_tests() -> Iterator[None]:
    torch.compiler.reset()
    torch.manual_seed(0)
    yield


def log_softmax(x: Tensor, weight: Tensor, number: float) -> Tensor:
    return (x * number @ weight.T / (number + 0.1)).log_softmax(-1)


def cross_entropy(x: Tensor, weight: Tensor, number: float) -> Tensor:
    logits = number * x @ weight.T
    logits = 9 * number * torch.tanh(logits / (9 * number))
    loss = nn.functional.cross_entropy(logits, TARGET, label_smoothing=number / 4)
    return loss + number * logits.logsumexp(-1).square().mean()


def divergence(x: Tensor, weight: Tensor, beta: float) -> Tensor:
    s, t = (x @ weight.T / (1 + beta)).log_softmax(-1), (weight[:8] @ weight.T / (1 + beta)).log_softmax(-1)
    m = (beta * t.exp() + (1 - beta) * s.exp()).log()
    soft = (beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)).sum(-1).mean()
    return (1 - beta) * soft + beta * nn.functional.cross_entropy(x @ weight.T, TARGET)


TARGET = torch.arange(8) * 3
# What is called with x [8, 16], weight [30, 16] and a number; and the same by torch.
Call = Callable[[Tensor, Tensor, float], Tensor]
CALLS: dict[str, tuple[Call, Call]] = {
    "temperature": (
        lambda x, w, n: mr.linear_log_probs(x * n, w, TARGET, temperature=n + 0.1).log_probs,
        lambda x, w, n: log_softmax(x, w, n)[torch.arange(8), TARGET],
    ),
    "losses": (
        lambda x, w, n: mr.linear_cross_entropy(
            x, w, TARGET, z_loss=n, label_smoothing=n / 4, softcap=9 * n, logit_scale=n
        ),
        cross_entropy,
    ),
    "distillation": (
        lambda x, w, n: mr.linear_distillation(x, w, x.detach() * n, w.detach(), temperature=n),
        lambda x, w, n: (
            (-((x.detach() * n) @ w.detach().T / n).softmax(-1) * (x @ w.T / n).log_softmax(-1))
            .sum(-1)
            .mean()
        ),
    ),
    "divergence": (
        lambda x, w, n: mr.linear_distillation(
            *(x, w, w[:8], w),
            loss="jsd",
            beta=n / 2.5,
            temperature=1 + n / 2.5,
            target=TARGET,
            hard_weight=n / 2.5,
            teacher_grad=True,
        ),
        lambda x, w, n: divergence(x, w, n / 2.5),
    ),
    "log-sum-exp": (
        lambda x, w, n: mr.logsumexp_matmul(x, w, scale=n),
        lambda x, w, n: (n * x @ w.T).logsumexp(-1),
    ),
    "attention": (
        lambda x, w, n: mr.attention(*[x[None, None]] * 2, x[None, None] * n, scale=n, softcap=5 * n),
        lambda x, w, n: (5 * n * torch.tanh(n * x @ x.T / (5 * n))).softmax(-1) @ (x * n),
    ),
    "modified attention": (
        lambda x, w, n: mr.attend(*[x[None, None]] * 3, weight=lambda s: torch.sigmoid(s - n), scale=n),
        lambda x, w, n: torch.sigmoid(n * x @ x.T - n) @ x,
    ),
    "statistics": (
        lambda x, w, n: mean_square(x, w, scale=n).x,
        lambda x, w, n: (n * x @ w.T).square().sum(-1),
    ),
}


@mr.statistics
def mean_square(score: Any) -> dict[str, Any]:
    return dict(x=stat.total(score**2))


def check(step: Call, expected: Call) -> None:
    x, weight = (torch.randn(n, 16, dtype=F64, requires_grad=True) for n in (8, 30))
    for number in NUMBERS:
        found, wanted = step(x, weight, number), expected(x, weight, number)
        torch.testing.assert_close(found.squeeze(), wanted.squeeze())
        of = [torch.autograd.grad(t.sin().sum(), (x, weight), allow_unused=True) for t in (found, wanted)]
        for ours, theirs in zip(*of, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs)
        with torch.no_grad():
            torch.testing.assert_close(step(x, weight, number).squeeze(), wanted.squeeze())


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_for_all_values(name: str) -> None:
    """After the first value, which torch takes for a constant. A graph without gradients is another."""
    call, expected = CALLS[name]
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    check(torch.compile(call, fullgraph=True, backend="aot_eager"), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 4


@pytest.mark.release
@pytest.mark.slow
def test_inductor() -> None:
    """It has taken the first value for all (pytorch#197889)."""

    def call(x: Tensor, weight: Tensor, number: float) -> Tensor:
        return CALLS["temperature"][0](x, weight, number).sum() + CALLS["losses"][0](x, weight, number)

    def expected(x: Tensor, weight: Tensor, number: float) -> Tensor:
        return CALLS["temperature"][1](x, weight, number).sum() + CALLS["losses"][1](x, weight, number)

    check(torch.compile(call, fullgraph=True), expected)


def test_options_of_modules_that_change() -> None:
    """torch takes an attribute of a module for a constant: a graph for each value, which is the right one."""
    loss = mr.nn.LinearCrossEntropyLoss(z_loss=0.0)
    x, weight = torch.randn(8, 16, dtype=F64), torch.randn(30, 16, dtype=F64)
    step = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for number in NUMBERS[:4]:
        loss.options["z_loss"] = number
        logits = x @ weight.T
        expected = nn.functional.cross_entropy(logits, TARGET) + number * logits.logsumexp(-1).square().mean()
        torch.testing.assert_close(step(x, weight, TARGET), expected)


def test_a_number_out_of_range_is_refused_in_a_graph() -> None:
    x, weight = torch.randn(8, 16), torch.randn(30, 16)
    step = torch.compile(CALLS["log-sum-exp"][0], backend="aot_eager")
    for number in (1.0, 2.0):
        step(x, weight, number)
    with pytest.raises(ValueError, match="scale: expected 0 or a magnitude"):
        step(x, weight, 1e38)


def test_a_scale_of_a_size() -> None:
    """A number that is computed of sizes which a graph keeps open, and of one that changes."""

    def call(q: Tensor, number: float) -> Tensor:
        return mr.attention(q, q, q, scale=number * q.shape[2] ** -0.5)

    step = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for length, number in ((9, 0.5), (5, 0.7), (12, 1.5)):
        q = torch.randn(1, 2, length, 4, dtype=F64)
        expected = (q @ q.mT * number * length**-0.5).softmax(-1) @ q
        torch.testing.assert_close(step(q, number), expected)
