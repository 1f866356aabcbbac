"""Checks of operands are made once for tensors that are alike, and never miss one that is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import monoidreduce as mr
from monoidreduce import _validate
from monoidreduce._validate import remembering

Changed = Callable[[Tensor], Any]
WRONG: dict[str, Changed] = {
    "dtype": lambda t: t.double(),
    "integers": lambda t: t.long(),
    "shape": lambda t: t[..., :-1],
    "axes": lambda t: t[None, None, None],
    "device": lambda t: t.to("meta"),
    "layout": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "type": lambda t: t.tolist(),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("changed", WRONG.values(), ids=WRONG)
def test_a_wrong_call_after_a_right_one_raises(changed: Changed) -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind()
    x, w = torch.randn(5, 8), torch.randn(16, 8)
    packed, starts = q[0].transpose(0, 1), torch.tensor([0, 2, 5])
    target = torch.arange(5)
    calls: list[tuple[Callable[..., Any], list[Any]]] = [
        (mr.attention, [q, k, v]),
        (mr.attention_varlen, [packed, packed, packed, starts]),
        (mr.linear_cross_entropy, [x, w, target]),
        (mr.linear_log_probs, [x, w, target]),
        (mr.mlp, [x, w, w.mT]),
        (mr.logsumexp_matmul, [x, w]),
    ]
    for call, right in calls:
        call(*right)
        call(*right)
        with pytest.raises((TypeError, ValueError)):
            call(right[0], changed(right[1]), *right[2:])


def test_only_tensors_that_are_alike_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[Any, ...]] = []

    @remembering
    def check(*tensors: Any) -> tuple[Any, dict[str, int]]:
        checked.append(tensors)
        return tensors, {"N": len(checked)}

    x = torch.randn(5, 8)
    assert [check(x, None)[1]["N"] for _ in range(3)] == [1, 1, 1]
    given, sizes = check(torch.nn.Parameter(x), None)
    sizes["N"] = 7  # of this call alone
    assert isinstance(given[0], torch.nn.Parameter) and check(x, None)[1] == {"N": 1}
    others = [(x,), (x, x), (x.T, None), (x.bfloat16(), None), (x.to("meta"), None)]
    assert [check(*tensors)[1]["N"] for tensors in others] == [2, 3, 4, 5, 6]
    with torch.autocast("cpu"):
        assert [check(x, None)[1]["N"] for _ in range(2)] == [7, 8]
    monkeypatch.setattr(_validate, "_REMEMBERED", 2)
    for n in range(5):
        check(x[:n])
    assert check(x[:4])[1] == check(x[:4])[1]


def test_autocast_after_a_call_without_it() -> None:
    x, w = torch.randn(5, 8), torch.randn(16, 8)
    assert mr.mlp(x, w, w.mT).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert mr.mlp(x, w, w.mT).dtype == torch.bfloat16
    assert mr.mlp(x, w, w.mT).dtype == torch.float32


def test_symbolic_sizes_are_not_remembered() -> None:
    a, b = torch.randn(5, 8), torch.randn(7, 8)
    gradient = torch.func.grad(lambda a, b: mr.logsumexp_matmul(a, b).sum())
    traced = make_fx(gradient, tracing_mode="symbolic")(a, b)
    torch.testing.assert_close(traced(a, b), gradient(a, b))
