"""Each function of the vocabulary as the interpreter computes it: of one column its total is the function."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from monoidreduce import _C

stat = mr.stat
F64 = torch.float64
SPECIAL = (0.0, 1.0, -1.0, math.inf, -math.inf, math.nan)
FUNCTIONS: dict[str, Any] = {
    "abs": torch.abs,
    "clamp": lambda x: torch.clamp(x, -0.5, 0.75),
    "erf": torch.erf,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "gelu": F.gelu,
    "log": torch.log,
    "log1p": torch.log1p,
    "logsigmoid": F.logsigmoid,
    "maximum": lambda x: torch.maximum(x, 0.5 * x),
    "minimum": lambda x: torch.minimum(x, 0.5 * x),
    "power": lambda x: x**3,
    "reciprocal": torch.reciprocal,
    "relu": F.relu,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "sign": torch.sign,
    "silu": F.silu,
    "softplus": F.softplus,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
    "log of 1 + x": lambda x: torch.log(1 + x),
    "log of 1 + exp": lambda x: torch.log(1 + torch.exp(x)),
}
# Units in the last place of the result, where it may differ by more than 3. gelu is a product.
UNITS = {"erf": 8, "gelu": 16, "tanh": 6, "power": 4}


def values(dtype: torch.dtype) -> Tensor:
    """Of all sizes, both signs, and special ones. A score is never -0."""
    largest = 30 if dtype == torch.float32 else 200
    powers = torch.linspace(-largest, 6, 4000, dtype=F64).exp2()
    around_one = 1 + torch.linspace(-0.6, 0.6, 500, dtype=F64)
    near = torch.linspace(-25, 25, 1001, dtype=F64)
    return torch.cat([powers, -powers, around_one, near, torch.tensor(SPECIAL, dtype=F64)]).to(dtype)


def test_detached() -> None:
    """The value, and no gradient: of x * f(x) that leaves f(x)."""
    fold = mr.statistics(lambda score: dict(y=stat.total(score * torch.tanh(score).detach())))
    x = torch.randn(7, 1, dtype=F64, requires_grad=True)
    for call in (fold, fold.reference):
        y = call(x, torch.ones(1, 1, dtype=F64)).y
        torch.testing.assert_close(y, (x * x.tanh())[:, 0])
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], x.tanh().detach())


@pytest.mark.isa
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", (torch.float32, F64), ids=str)
def test_value(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    fold = mr.statistics(lambda score: dict(y=stat.total(function(score))))
    x = values(dtype)
    y = fold(x[:, None], torch.ones(1, 1, dtype=dtype)).y
    exact = _accurate(name, x.double())
    assert torch.equal(y.isnan(), exact.isnan())
    bounded = exact.isfinite() & (exact.abs() < torch.finfo(dtype).max)
    assert torch.equal(y[~bounded & ~exact.isnan()], exact[~bounded & ~exact.isnan()].to(dtype))
    unit = torch.finfo(dtype).eps * exact.abs()
    least = torch.finfo(dtype).tiny * 8  # results that small may be 0
    error = (y.double() - exact).abs()[bounded]
    bound = (UNITS.get(name, 3) * unit + least + _lost(name, x.double(), exact, dtype))[bounded]
    worst = (error - bound).argmax()
    assert (error <= bound).all(), (
        f"{name}({x[bounded][worst]}) = {y[bounded][worst]}, {exact[bounded][worst]}"
    )


def _accurate(name: str, x: Tensor) -> Tensor:
    """In float64; 1 + x is exact."""
    if name == "log of 1 + x":
        return torch.log1p(x)
    if name == "log of 1 + exp":
        return torch.logaddexp(x, torch.zeros_like(x))
    result: Tensor = FUNCTIONS[name](x)
    return result


def _lost(name: str, x: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """What 1 + erf loses where erf is near -1. Without a fused multiply-add exp rounds x log2(e)."""
    eps, size = torch.finfo(dtype).eps, x.abs().nan_to_num(0, 0, 0)
    if name == "gelu":
        return size * eps
    if _C.cpu_isa() == "baseline":
        return 1.5 * size.clamp(max=800) * eps * exact.abs().nan_to_num(0, 0, 0)
    return torch.zeros_like(x)


@pytest.mark.parametrize("name", ("index", "floor", "compare"))
@pytest.mark.parametrize("dtype", (torch.float32, F64), ids=str)
def test_integers(name: str, dtype: torch.dtype) -> None:
    """Integers are exact, also those that a float32 is not."""
    n = 1 << 25

    def function(column: Any, row: Any, label: Any) -> Any:
        j = column + n
        if name == "index":
            return (j * 3 - row) - 3 * n == 3 * column - row
        if name == "floor":
            return ((column - row) // 4) * 4 + (column - row) % 4 == column - row
        return (j + 1 > label) & (label > j - 1) & (j == label)

    fold = mr.statistics(lambda score, column, row, label: dict(x=stat.count(function(column, row, label))))
    a, b = torch.zeros(9, 1, dtype=dtype), torch.zeros(20, 1, dtype=dtype)
    found = fold(a, b, label=torch.arange(9) + n).x
    assert (found == (1 if name == "compare" else 20)).all()


def test_integer_division_rounds_down() -> None:
    fold = mr.statistics(
        lambda score, column, row: dict(
            q=stat.total((column - 3) // (row - 2)), r=stat.total((column - 3) % (row - 2))
        )
    )
    a, b = torch.zeros(1, 1), torch.zeros(7, 1)
    numerator = torch.arange(7) - 3
    for rows in (1, 2, 4, 5):  # the divisor is of the last row; a divisor of 0 gives anything
        s = fold(a.expand(rows, 1), b)
        assert s.q[-1] == (numerator // (rows - 3)).sum() if rows != 3 else True
        assert s.r[-1] == (numerator % (rows - 3)).sum() if rows != 3 else True
