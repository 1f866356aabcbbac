"""The algebra of wide heads whose queries see a band of the keys.

Its kernels run on a GPU alone (tests/gpu/test_attention_wide.py). Here the CPU engine folds, and torch
evaluates and multiplies local gradients. So masks, slices and what is not finite are tested.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from monoidreduce import reference
from monoidreduce._ops import attention_wide
from monoidreduce._ops.attention_mask import Mask
from monoidreduce.folds import wide_attention
from monoidreduce.folds.cuda import cuda_passes
from monoidreduce.folds.operands import ProgramCall
from monoidreduce.folds.program.derivative import gradient
from monoidreduce.folds.torch.reader import evaluate, scores, with_scores
from monoidreduce.folds.wide_attention import Band
from monoidreduce.functional import bounds

# Queries, keys, heads of queries and of keys.
SIZES = {
    "square": (40, 40, 2, 2),
    "more_keys": (21, 50, 4, 2),
    "more_queries": (50, 21, 6, 2),
    "few_keys": (30, 7, 1, 1),
    "slices": (30, 600, 2, 1),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (5, 9)},
    "left": {"window": (5, None)},
    "causal_window": {"causal": True, "window": (3, None)},
    "diagonal": {"window": (0, 0)},
}


def local_gradients(
    call: ProgramCall, counts: Any, bytes: int, of_other: bool
) -> tuple[Any, Callable[..., None], Any]:
    """In place of `cuda_passes._local_gradients`: of all columns, by torch."""
    score, *others = [scores(a, b, a.dtype, call.scale) for a, b in call.scores]
    of, other = gradient(call.program, *counts[:2]), others[0] if others else None
    data: dict[str, Any] = {"row": call.data[0], "row_index": call.data[2]}

    def leaf(node: Any) -> Tensor:
        return other if node[0] == "other" else data[node[0]][node[1]][:, None]

    numbers = [of.score] if other is None else [of.score, of.other]
    nodes: Any = of.nodes.nodes
    found = evaluate(nodes, numbers, with_scores(score, leaf), score)

    def store(part: slice, out: Tensor, other_out: Tensor | None, _planes: Any = None) -> None:
        wanted = [t for t in (out, other_out) if t is not None]
        assert len(wanted) == (2 if of_other else 1)
        for number, to in zip(numbers, wanted, strict=False):
            to.copy_(found[number][:, part] * call.scale)

    plan = SimpleNamespace(tensor_cores=True, clusters=0, transposed=False, planes=False)
    return plan, store, call.operands


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_passes, "_local_gradients", local_gradients)


def inputs_of(size: str) -> tuple[Tensor, Tensor, Tensor]:
    m, n, heads, key_heads = SIZES[size]
    shapes = ((2, heads, m, 8), (2, key_heads, n, 8), (2, key_heads, n, 16))
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return q, k, v


def check(
    inputs: tuple[Tensor, ...],
    options: dict[str, Any],
    grad_out: Tensor | None = None,
    needed: tuple[bool, bool, bool] = (True, True, True),
    sinks: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Outputs and gradients equal the reference's, and are not finite exactly where the reference's are not.

    Sums of products are in float32. needed: the gradients of q, k and v; that of sinks is, if there are any.
    """
    q, k, v = inputs
    scale = 0.3
    mask = Mask(*bounds(options.get("causal", False), options.get("window")))
    out, lse = q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3])
    low, out_low = torch.empty_like(lse), torch.empty_like(out)
    wide_attention.forward(q, k, v, sinks, scale, mask, (out, lse, low, out_low))
    leaves = [t.detach().requires_grad_() for t in (*inputs, *([] if sinks is None else [sinks]))]
    given = {} if sinks is None else {"sinks": leaves[3]}
    expected = reference.attention(*leaves[:3], scale=scale, return_lse=True, **given, **options)
    close = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}
    torch.testing.assert_close((out, lse), tuple(t.detach() for t in expected), **close)
    assert out_low[out.isfinite()].abs().max() < 1e-5
    grad_out = torch.randn_like(out) if grad_out is None else grad_out
    grad_lse = torch.randn_like(lse)
    of_rows = (out, lse, torch.zeros_like(lse))
    wanted_of_all = [*needed, False, sinks is not None]
    *found, of_bias, of_sinks = wide_attention.backward(
        grad_out, grad_lse, q, k, v, sinks, of_rows, scale, mask, wanted_of_all
    )
    assert of_bias is None and (of_sinks is None) == (sinks is None)
    found = found if sinks is None else [*found, of_sinks]
    gradients = torch.autograd.grad(expected, leaves, (grad_out, grad_lse))
    for got, correct, wanted in zip(found, gradients, (*needed, True)[: len(found)], strict=True):
        if wanted:
            torch.testing.assert_close(got, correct, **close)
        else:
            assert got is None
    return out, found


@pytest.mark.parametrize("options", [{}, *OPTIONS.values()], ids=["whole", *OPTIONS])
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients(size: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for the local gradients of 256 keys at a time."""
    rows = SIZES[size][0] * SIZES[size][2] // SIZES[size][3]
    monkeypatch.setattr(attention_wide, "WORKSPACE", 2 * 2 * 256 * rows)
    check(inputs_of(size), options)


@pytest.mark.parametrize("options", [{}, *OPTIONS.values()], ids=["whole", *OPTIONS])
@pytest.mark.parametrize("size", ("square", "more_queries", "slices"))
def test_sinks(size: str, options: dict[str, Any]) -> None:
    """Also of rows that see no key, and one that is no sink."""
    sinks = torch.randn(SIZES[size][2], dtype=torch.float64)
    sinks[0] = -torch.inf
    check(inputs_of(size), options, sinks=sinks)


@pytest.mark.parametrize("needed", [*itertools.product((False, True), repeat=3)][1:], ids=str)
def test_some_gradients(needed: tuple[bool, bool, bool]) -> None:
    check(inputs_of("more_keys"), {"causal": True}, needed=needed)


def test_rows_that_see_no_key() -> None:
    """The first ones of more queries than keys."""
    q, k, v = inputs_of("more_queries")
    out, (d_q, _, _) = check((q, k, v), {"causal": True})
    assert d_q is not None and not out[:, :, :29].any() and not d_q[:, :, :29].any()


@pytest.mark.parametrize(
    ("place", "value"),
    [*itertools.product("qkv", (torch.nan, torch.inf, -torch.inf)), ("grad_out", torch.nan)],
    ids=str,
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", ("square", "more_keys", "more_queries"))
def test_not_finite(size: str, options: dict[str, Any], place: str, value: float) -> None:
    """It reaches the rows and keys that see it, and no others."""
    q, k, v = inputs_of(size)
    tensors = {"q": q, "k": k, "v": v, "grad_out": torch.randn(*q.shape[:3], v.shape[3]).double()}
    tensors[place][-1, -1, -8, 3] = value
    k[-1, 0, 9, 1] = torch.nan  # in another head: the reference then leaves excluded pairs out
    out, gradients = check((q, k, v), options, tensors["grad_out"])
    assert out[0].isfinite().all() and all(t is not None and t[0].isfinite().all() for t in gradients)


def test_several_lines_that_are_not_finite() -> None:
    """In a row that sees one of them, NaN may be in elements of another. Rows that see none have no NaN."""
    q, k, v = inputs_of("square")
    v[0, 0, 30, 3], v[0, 0, 20, 5] = torch.nan, torch.nan
    out, low, lse = (
        torch.empty(2, 2, 40, 16).double(),
        torch.empty(0, 0, 0, 0),
        torch.empty(2, 2, 40).double(),
    )
    wide_attention.forward(q, k, v, None, 0.3, Mask(5, 0), (out, lse, torch.empty_like(lse), low))
    expected = reference.attention(q, k, v, scale=0.3, causal=True, window=(5, None))
    assert isinstance(expected, Tensor)
    rows = expected.isnan().any(-1)
    assert torch.equal(out.isnan().any(-1), rows) and bool(out[expected.isnan()].isnan().all())
    torch.testing.assert_close(out[~rows], expected[~rows])


def test_bands() -> None:
    """Bounds and what sees a column, beside the mask."""
    for rows, columns, left, right in itertools.product((1, 9, 30), (1, 8, 30), (-1, 0, 4), (-1, 0, 4)):
        at = torch.arange(rows)[:, None] + columns - rows - torch.arange(columns)
        mask = (at <= (left if left >= 0 else 99)) & (-at <= (right if right >= 0 else 99))
        band = Band.of(torch.empty(1, 1, rows, 1), torch.empty(1, 1, columns, 1), Mask(left, right))
        assert (band is None) == bool(mask.all())
        if band is None:
            continue
        first, stop = band.bounds(mask.device)
        numbers = torch.arange(columns)
        assert torch.equal((numbers >= first[:, None]) & (numbers < stop[:, None]), mask)
        marked = torch.rand(2, 4, columns) < 0.2
        of_pairs = marked[:, 0::2] | marked[:, 1::2]
        assert torch.equal(band.sees(marked, 2), (mask & of_pairs[:, :, None]).any(-1))
        assert torch.equal(band.transposed.sees(torch.ones(1, 1, rows).bool(), 1)[0, 0], mask.any(0))
