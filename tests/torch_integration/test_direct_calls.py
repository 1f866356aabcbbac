"""Which calls of ops skip the dispatcher: those that nothing would intercept or see."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import monoidreduce as mr
from monoidreduce._torch_private import autograd_is_next, below_autograd


def crossings(call: Callable[[], Any]) -> list[str]:
    """The ops that a call gives to the dispatcher."""
    names = []

    def noting(op: Any, *args: Any, **how: Any) -> Any:
        names.append(op._opname)
        return dispatch(op, *args, **how)

    dispatch = torch._ops.OpOverload.__call__
    with patch.object(torch._ops.OpOverload, "__call__", noting):
        call()
    return names


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, partial(torch.autocast, "cpu")])
def test_ordinary_calls_skip_it(context: Callable[[], AbstractContextManager[Any]], recorded: bool) -> None:
    x, w = torch.randn(5, 8, requires_grad=recorded), torch.nn.Parameter(torch.randn(16, 8))
    with context():
        assert crossings(lambda: mr.mlp(x, w, w.mT)) == []


def with_profiler() -> AbstractContextManager[Any]:
    return torch.profiler.profile()


def with_profiler_of_all_threads() -> AbstractContextManager[Any]:
    config = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    return torch.profiler.profile(experimental_config=config)


@pytest.mark.parametrize(
    "context",
    [
        partial(FlopCounterMode, display=False),
        FakeTensorMode,
        TorchFunctionMode,
        torch.inference_mode,
        torch.autograd.forward_ad.dual_level,
        below_autograd,
        with_profiler,
        with_profiler_of_all_threads,
    ],
)
def test_what_looks_on_sees_a_call(context: Callable[[], AbstractContextManager[Any]]) -> None:
    x = torch.randn(5, 8)
    assert autograd_is_next((x, None))
    with context():
        assert not autograd_is_next((x, None))
    assert autograd_is_next((x, None))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_transforms_and_tracers_see_a_call() -> None:
    answers = []

    def square(x: Tensor) -> Tensor:
        answers.append(autograd_is_next((torch.ones(2),)))
        return x * x

    x = torch.randn(5)
    torch.vmap(square)(x)
    torch.func.grad(square)(x[0])
    torch.jit.trace(square, (x,), check_trace=False)
    assert answers == [False] * 3


def escaped() -> Tensor:
    """A tensor that left the transform which wrapped it."""
    kept = []
    torch.func.grad(lambda x: (kept.append(x), x * x)[1])(torch.tensor(3.0))
    return kept[0]


def inferred() -> Tensor:
    with torch.inference_mode():
        return torch.randn(2)


class Subclass(Tensor):
    """Has the `__torch_function__` of all tensors."""


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch._neg_view(torch.randn(2)),
        lambda: torch._efficientzerotensor(2),
        lambda: torch.randn(2, device="meta"),
        lambda: torch.randn(2).to_sparse(),
        lambda: torch.randn(2).as_subclass(Subclass),
        escaped,
        inferred,
    ],
)
def test_tensors_that_are_more_than_memory_go_through_it(made: Callable[[], Tensor]) -> None:
    assert not autograd_is_next((torch.randn(2), made()))


def test_nothing_is_recorded_inside_of_a_custom_op() -> None:
    """There torch has excluded autograd, which the op's own derivative replaces."""
    graphs = []

    @torch.library.custom_op("monoidreduce_test::log_partition", mutates_args=())
    def log_partition(a: Tensor, b: Tensor) -> Tensor:
        found = mr.logsumexp_matmul(a, b)
        graphs.append(found.grad_fn)
        return found

    a, b = torch.randn(5, 8, requires_grad=True), torch.randn(7, 8)
    torch.testing.assert_close(log_partition(a, b), mr.logsumexp_matmul(a, b).detach())
    assert graphs == [None]
