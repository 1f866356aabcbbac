"""The pages docs/statistics.md, derivatives.md and score_mod.md: their code runs, and the tables are true."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce.folds.program.vocabulary import BUILDERS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "statistics.md").read_text("utf-8")


def run_code_of(page: str) -> dict[str, Any]:
    """The variables after all blocks of a page, which run one after another."""
    text = (DOCS / page).read_text("utf-8")
    variables: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, f"docs/{page}", "exec"), variables)
    return variables


def test_code() -> None:
    torch.manual_seed(0)
    variables = run_code_of("statistics.md")
    for name in ("hidden", "head", "temperature"):
        assert variables[name].grad.isfinite().all()
    x, y = variables["x"].detach(), variables["y"]
    weight = torch.exp(-0.5 * torch.cdist(x, y) ** 2)
    force = (weight[..., None] * (y - x[:, None])).sum(1)
    torch.testing.assert_close(variables["force"], force, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(variables["shifted"], weight @ y / weight.sum(1, keepdim=True))
    p, q = (variables[name].detach() for name in ("hidden", "head"))
    p, q = p @ q.T, variables["teacher_hidden"] @ variables["teacher_head"].T
    kl = F.kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(variables["reverse_kl"], kl, rtol=1e-4, atol=1e-4)
    check_recipes(variables)


def check_recipes(page: dict[str, Any]) -> None:
    """Errors in float32 are as the table says, within twice: as they are, and with digits kept."""
    x, y = 99 + 2 * torch.rand(200, 3), 99 + 2 * torch.rand(700, 3)
    exact = (x.double()[:, None] - y.double()).square().sum(2)
    products = x.square().sum(1)[:, None] + y.square().sum(1) - 2 * x @ y.T
    centred = (x - y.mean(0)), (y - y.mean(0))
    by_centre = (
        centred[0].square().sum(1)[:, None] + centred[1].square().sum(1) - 2 * centred[0] @ centred[1].T
    )
    assert (products - exact).abs().max() > 1e-3
    assert (by_centre - exact).abs().max() < 4e-6
    found = page["nearest"](x, y)
    assert (found.value - exact.min(1).values).abs().max() < 1e-8
    assert torch.equal(found.index, exact.argmin(1))

    a, b = torch.randn(100, 64), torch.randn(1000, 64)
    a[:, 0], b[:, 0] = 1, b[:, 0] + 300
    logits = (a.double() @ b.double().T).requires_grad_()
    p = logits.softmax(1)
    expected = (p * (logits - (p * logits).sum(1, keepdim=True)) ** 2).sum(1)
    leaf = a.clone().requires_grad_()
    found = page["varentropy"](leaf, b)
    assert (found - expected).abs().max() < 1e-5
    upstream = torch.randn(100)
    (gradient,) = torch.autograd.grad(found, leaf, upstream)
    (of_logits,) = torch.autograd.grad(expected, logits, upstream.double())
    of_a = of_logits @ b.double()
    assert (gradient - of_a).norm() < 1e-4 * of_a.norm()


def test_code_of_score_mod() -> None:
    torch.manual_seed(0)
    variables = run_code_of("score_mod.md")
    assert variables["slopes"].grad.isfinite().all()
    assert (variables["blocks"].kinds == 0).any()
    assert variables["out_packed"].shape == (256, 4, 64)


def test_of_no_column() -> None:
    @mr.statistics
    def every(score):  # type: ignore[no-untyped-def]
        p = mr.stat.softmax(score)
        return dict(
            lse=p.logsumexp,
            mean=p.mean(score),
            total=mr.stat.total(score),
            largest=mr.stat.largest(score),
            smallest=mr.stat.smallest(score),
            count=mr.stat.count(score > 0),
        )

    s = every(torch.ones(1, 3), torch.ones(0, 3))
    found = (s.lse, s.mean, s.total, *s.largest, *s.smallest, s.count)
    assert [float(x) for x in found] == [-math.inf, 0, 0, -math.inf, -1, math.inf, -1, 0]


def test_vocabulary() -> None:
    """Each name of the list is one that functions may use, and all but operators are in the list."""
    listed = re.search(r"Of torch, as functions and as methods:\s+(.*?), and conversions", PAGE, re.S)
    assert listed is not None
    names = set(re.findall(r"\w+", listed[1]))
    operators = {"add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "floor_divide"}
    operators |= {f"{kind}_{name}" for kind in ("bitwise", "logical") for name in ("and", "or", "not", "xor")}
    operators |= {"bitwise_left_shift", "bitwise_right_shift"}
    conversions = {"bool", "double", "float", "int", "long", "to"}
    assert names <= BUILDERS.keys()
    assert BUILDERS.keys() - operators - conversions - {"clamp_max", "clamp_min"} == names


def test_code_of_derivatives() -> None:
    variables = run_code_of("derivatives.md")
    assert variables["hidden"].grad.isfinite().all()
    hidden, direction = variables["hidden"].detach(), variables["direction"][0]
    (along,) = torch.autograd.functional.vhp(
        lambda x: mr.linear_cross_entropy(x, variables["weight"], variables["token"]), (hidden,), (direction,)
    )[1]
    assert along.isfinite().all()
