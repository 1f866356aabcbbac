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
    "acos": torch.acos,
    "acosh": torch.acosh,
    "asin": torch.asin,
    "asinh": torch.asinh,
    "atan": torch.atan,
    "atanh": torch.atanh,
    "ceil": torch.ceil,
    "cos": torch.cos,
    "celu": lambda x: F.celu(x, 0.5),
    "cosh": torch.cosh,
    "elu": F.elu,
    "erfc near 0": lambda x: torch.erfc(torch.clamp(x, -1.0, 0.5)),
    "floor": torch.floor,
    "floor_divide": lambda x: torch.floor_divide(x, 0.75),
    "fmod": lambda x: torch.fmod(x, 0.75),
    "frac": torch.frac,
    "hardtanh": F.hardtanh,
    "isnan": lambda x: torch.where(torch.isnan(x), 1.0, torch.where(torch.isinf(x), 2.0, 3.0)),
    "leaky_relu": F.leaky_relu,
    "lerp": lambda x: torch.lerp(x, torch.clamp(x, -0.5, 0.75), 0.25),
    "log10": torch.log10,
    "logaddexp": lambda x: torch.logaddexp(torch.abs(x), 0.5 * x),
    "masked_fill": lambda x: x.masked_fill(x > 1, -2.0),
    "mish": F.mish,
    "pow 0.3": lambda x: x**0.3,
    "pow -1.5": lambda x: x**-1.5,
    "pow of itself": lambda x: torch.pow(torch.clamp(x, -8.0, 8.0), torch.clamp(x, -8.0, 8.0)),
    "relu6": F.relu6,
    "remainder": lambda x: torch.remainder(x, -0.75),
    "round": torch.round,
    "selu": F.selu,
    "sin": torch.sin,
    "sinh": torch.sinh,
    "softsign": F.softsign,
    "tan": torch.tan,
    "trunc": torch.trunc,
    "xlogy": lambda x: torch.xlogy(torch.abs(x), torch.abs(x)),
    "log of 1 + x": lambda x: torch.log(1 + x),
    "log of 1 + exp": lambda x: torch.log(1 + torch.exp(x)),
}
# Units in the last place of the result, where it may differ by more than 3. gelu is a product.
UNITS = {
    "sinh": 8,
    "cosh": 8,
    "mish": 24,
    "tan": 6,
    "logaddexp": 6,
    "erfc near 0": 24,
    "erf": 8,
    "gelu": 16,
    "tanh": 6,
    "power": 4,
}


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


# Not finite, of a difference that cancels, or without a derivative in torch.
@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - {"floor_divide", "isnan"}))
def test_gradient(name: str) -> None:
    """As autograd's, at kinks too."""
    function = FUNCTIONS[name]
    fold = mr.statistics(lambda score: dict(y=stat.total(function(score))))
    x = torch.cat([torch.linspace(-8, 8, 257, dtype=F64), torch.tensor([0.1, -0.3, 1e-3], dtype=F64)])
    a = x[:, None].clone().requires_grad_()
    (found,) = torch.autograd.grad(fold(a, torch.ones(1, 1, dtype=F64)).y.sum(), a)
    x = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    defined = function(x).isfinite() & expected.isfinite()
    torch.testing.assert_close(found[defined, 0], expected[defined], rtol=1e-9, atol=1e-9)


def test_floor_of_a_quotient_of_integers_is_exact() -> None:
    fold = mr.statistics(lambda score, row, column: dict(n=stat.count(torch.floor(row / 7) == column)))
    found = fold(torch.zeros(10_000, 1), torch.zeros(2000, 1)).n
    assert (found == 1).all()


def test_rounding_by_python() -> None:
    fold = mr.statistics(
        lambda score: dict(
            r=stat.total(round(score)), f=stat.total(math.floor(score)), c=stat.total(math.ceil(score))
        )
    )
    x = torch.tensor([[2.5], [-2.5], [0.4], [3.5]])
    found = fold(x, torch.ones(1, 1))
    for ours, of in zip(found, (torch.round, torch.floor, torch.ceil), strict=True):
        assert torch.equal(ours, of(x[:, 0]))


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
