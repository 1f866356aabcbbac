"""Attention of few rows on Hopper: query heads that share a key head in one tile, and columns in splits."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from calls import assert_same_bits, results, upstreams
from specimens import Inputs, Specimen, attention_inputs, name_of
from tolerance import check_operator

import monoidreduce as mr

pytestmark = pytest.mark.tiers("sm90")

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (3000, 20)},
    "left_window": {"window": (1500, None), "causal": True},
    "softcap": {"softcap": 5.0},
    "causal_softcap": {"causal": True, "softcap": 3.0, "scale": 0.3},
}
KEY_HEADS = 2


def inputs_of(
    group: int,
    rows: int,
    columns: int,
    device: torch.device,
    *,
    batch: int = 1,
    widths: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    **bias: Any,
) -> Inputs:
    """`group` query heads to each of KEY_HEADS."""
    heads = (group * KEY_HEADS, KEY_HEADS)
    return attention_inputs(batch, *heads, rows, columns, *widths, dtype=dtype, device=device, **bias)


def splits(inputs: Inputs, options: dict[str, Any]) -> int | None:
    """In how many splits explain says that the columns are; None where rows are not few."""
    q, k, v, *bias = inputs.values()
    explanation = mr.explain("attention", q, k, v, bias=bias[0] if bias else None, **options)
    assert explanation.forward == f"attention_forward/cuda/sm90/{name_of(q.dtype)}"
    (reason,) = (reason for reason in explanation.reasons if reason.startswith("forward: "))
    found = re.search(r"few rows: .*, columns (?:in (\d+) splits|not split)$", reason)
    return int(found[1] or 1) if found else None


def are_split(inputs: Inputs, options: dict[str, Any]) -> bool:
    return (splits(inputs, options) or 1) > 1


def check_split(inputs: Inputs, options: dict[str, Any], **checks: Any) -> dict[str, torch.Tensor]:
    assert are_split(inputs, options)
    path = f"attention_forward/cuda/sm90/{name_of(inputs['q'].dtype)}"
    before = mr._C.path_counts().get(path, 0)
    found = check_operator("attention", inputs, {"return_lse": True, **options}, **checks)
    assert mr._C.path_counts()[path] == before + 1
    return found


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("rows", (1, 2, 7, 16, 33, 64))
@pytest.mark.parametrize("group", (1, 4, 8))
def test_groups_and_rows(group: int, rows: int, options: dict[str, Any], gpu: torch.device) -> None:
    check_split(inputs_of(group, rows, 4099, gpu), options)


@pytest.mark.parametrize("options", (OPTIONS["full"], OPTIONS["causal"]), ids=("full", "causal"))
@pytest.mark.parametrize("columns", (1, 5, 63, 64, 129, 777, 1023, 2048, 9001, 20011))
@pytest.mark.parametrize("group", (1, 4))
def test_columns(group: int, columns: int, options: dict[str, Any], gpu: torch.device) -> None:
    inputs = inputs_of(group, 5, columns, gpu)
    if columns > 4000:
        check_split(inputs, options)
    else:
        check_operator("attention", inputs, {"return_lse": True, **options})


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=name_of)
@pytest.mark.parametrize("options", ("full", "left_window", "causal_softcap"))
@pytest.mark.parametrize("widths", ((8, 16), (64, 64), (104, 56), (64, 128), (256, 256), (136, 200)), ids=str)
def test_widths(widths: tuple[int, int], options: str, dtype: torch.dtype, gpu: torch.device) -> None:
    check_split(inputs_of(4, 3, 5003, gpu, widths=widths, dtype=dtype), OPTIONS[options])


@pytest.mark.parametrize("group", (3, 5, 16, 64, 65, 96, 128))
def test_groups_of_any_size(group: int, gpu: torch.device) -> None:
    """Heads that do not fill a tile, and groups of several tiles, beside a next group."""
    check_split(inputs_of(group, 1, 8200, gpu, widths=(64, 64)), {"causal": True})
    check_operator("attention", inputs_of(group, 3, 300, gpu, batch=2, widths=(64, 64)), {"causal": True})


@pytest.mark.parametrize("options", (OPTIONS["causal"], {"window": (40, 7)}), ids=("causal", "window"))
def test_splits_without_columns(options: dict[str, Any], gpu: torch.device) -> None:
    """The first rows keep fewer tiles of columns than there are splits."""
    inputs = inputs_of(1, 500, 1400, gpu)
    if "causal" in options:
        inputs = {name: t if name == "q" else t[:, :, :500] for name, t in inputs.items()}
    check_operator("attention", inputs, {"return_lse": True, **options})
    check_split(inputs_of(1, 100, 6000, gpu), OPTIONS["causal"])


def test_rows_without_a_column(gpu: torch.device) -> None:
    """More queries than keys, causal: the first keep none."""
    found = check_operator("attention", inputs_of(4, 60, 41, gpu), {"causal": True, "return_lse": True})
    assert (found["out0"][..., :19, :] == 0).all() and (found["out1"][..., :19] == -torch.inf).all()


@pytest.mark.parametrize("options", ("full", "causal", "causal_softcap"))
@pytest.mark.parametrize(
    "kind", ("full", "of_heads", "of_columns", "of_columns_in_float", "keep", "keep_columns")
)
@pytest.mark.parametrize("group, rows", ((1, 1), (4, 1), (8, 9), (4, 64)))
def test_biases(group: int, rows: int, kind: str, options: str, gpu: torch.device) -> None:
    columns, heads = 4099, group * KEY_HEADS
    bias: dict[str, Any] = {
        "full": {"bias": (2, heads, rows, columns)},
        "of_heads": {"bias": (heads, rows, columns)},
        "of_columns": {"bias": (2, 1, 1, columns)},
        "of_columns_in_float": {"bias": (columns,), "bias_dtype": torch.float32},
        "keep": {"keep": (2, heads, rows, columns)},
        "keep_columns": {"keep": (2, 1, 1, columns)},
    }[kind]
    check_split(
        inputs_of(group, rows, columns, gpu, batch=2, **bias), OPTIONS[options], differentiate=["q", "k", "v"]
    )


@pytest.mark.parametrize("widths", ((64, 64), (256, 256)), ids=str)
@pytest.mark.parametrize("kind", ("bias", "float", "keep"))
def test_biases_of_other_widths(kind: str, widths: tuple[int, int], gpu: torch.device) -> None:
    shape = (4 * KEY_HEADS, 3, 4099)
    bias: dict[str, Any] = {"keep": shape} if kind == "keep" else {"bias": shape}
    if kind == "float":
        bias["bias_dtype"] = torch.float32
    check_split(inputs_of(4, 3, 4099, gpu, widths=widths, **bias), {}, differentiate=["q", "k", "v"])


@pytest.mark.parametrize("options", ("full", "window"))
def test_a_float_bias_with_a_gradient(options: str, gpu: torch.device) -> None:
    """It takes the output unrounded, and one split or several."""
    for columns in (300, 4099):
        shape = (4 * KEY_HEADS, 9, columns)
        inputs = inputs_of(4, 9, columns, gpu, bias=shape, bias_dtype=torch.float32)
        assert are_split(inputs, OPTIONS[options]) == (columns > 300)
        check_operator("attention", inputs, {"return_lse": True, **OPTIONS[options]})


@pytest.mark.parametrize("kind", ("bias", "keep"))
def test_rows_and_splits_that_a_bias_leaves_nothing(kind: str, gpu: torch.device) -> None:
    """Output 0 and log-sum-exp -inf. There are whole splits where no row keeps a column."""
    shape = (8, 6, 5000)
    inputs = inputs_of(4, 6, 5000, gpu, **{kind: shape})
    nothing = False if kind == "keep" else -torch.inf
    inputs["bias"][..., 2:4, :] = nothing
    inputs["bias"][3] = nothing
    inputs["bias"][..., 1000:4000] = nothing
    found = check_split(inputs, {}, differentiate=["q", "k", "v"])
    assert (found["out0"][..., 2:4, :] == 0).all() and (found["out1"][:, 3] == -torch.inf).all()


@pytest.mark.parametrize("place", ("q", "k", "v"))
@pytest.mark.parametrize("value", (torch.nan, torch.inf))
@pytest.mark.parametrize("options", (OPTIONS["causal"], {"window": (2000, 5)}), ids=("causal", "window"))
def test_non_finite_inputs(options: dict[str, Any], value: float, place: str, gpu: torch.device) -> None:
    """They reach the rows that keep them, in value and gradient, and no others of their tile."""
    inputs = inputs_of(4, 30, 4099, gpu)
    inputs[place][-1, -1, {"q": 12}.get(place, 4080), 7] = value
    found = check_split(inputs, options)
    assert not found["out0"][-1, -1].isfinite().all() and found["out0"][-1, -1].isfinite().any()
    assert found["out0"][-1, 0].isfinite().all()


def test_scores_far_from_zero(gpu: torch.device) -> None:
    """Splits whose frames lie far apart."""
    inputs = inputs_of(4, 2, 8192, gpu)
    inputs["k"][:, :, 3000:3010] *= 40
    inputs["k"][:, :, 7000] *= 200
    check_split(inputs, {})


def test_transposed_views(gpu: torch.device) -> None:
    """[B, N, H, D] in memory, which TMA reads in place; rows of odd pitch are copied."""
    inputs = inputs_of(4, 6, 4099, gpu, batch=2)
    views = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in inputs.items()}
    check_split(views, {"causal": True})
    padded = {name: torch.nn.functional.pad(t, (0, 3))[..., :-3] for name, t in inputs.items()}
    check_split(padded, {"causal": True})


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_bits_are_reproducible(options: dict[str, Any], gpu: torch.device, deterministic: None) -> None:
    options = {"return_lse": True, **options}
    inputs = inputs_of(4, 3, 9001, gpu)
    assert are_split(inputs, options)
    call = Specimen("attention", "attention", attention_inputs, options=options)
    grads = upstreams(call, inputs)
    first = results(call, inputs, grads)
    for _ in range(5):
        assert_same_bits(first, results(call, inputs, grads))


def test_a_full_grid_is_not_split(gpu: torch.device) -> None:
    """And gives what its parts give, each of them split."""
    inputs = inputs_of(4, 1, 4096, gpu, batch=66)
    assert splits(inputs, {}) == 1
    alone = {name: t[:1] for name, t in inputs.items()}
    assert are_split(alone, {})
    whole, part = mr.attention(**inputs), mr.attention(**alone)
    torch.testing.assert_close(whole[:1], part, rtol=1e-2, atol=1e-3)


def test_many_rows_are_not_packed(gpu: torch.device) -> None:
    assert splits(inputs_of(4, 128, 8192, gpu, batch=20), {}) is None
    assert splits(inputs_of(4, 64, 8192, gpu, batch=33), {}) == 1
    assert are_split(inputs_of(4, 128, 8192, gpu), {})


def test_graph_capture(gpu: torch.device) -> None:
    """Captured once, replayed on other values; the scratch of the call belongs to the graph."""
    inputs = inputs_of(4, 1, 9001, gpu)
    assert are_split(inputs, {"causal": True})
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        mr.attention(**inputs, causal=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mr.attention(**inputs, causal=True)
    for t in inputs.values():
        t.copy_(torch.randn_like(t))
    graph.replay()
    assert torch.equal(captured, mr.attention(**inputs, causal=True))


def test_scratch_that_is_too_small_is_refused(gpu: torch.device) -> None:
    q, k, v = inputs_of(4, 1, 9001, gpu).values()
    out, (lse, low) = torch.empty_like(q), torch.empty(2, *q.shape[:3], device=gpu)
    absent = dict.fromkeys(("bias", "sinks", "row_spans", "column_spans"))
    options = {"out_low": None, "scale": 1.0, "softcap": 0.0, "left": -1, "right": -1}
    plan = mr._C.plan_attention_forward(q, k, v, **absent, **options)
    needed = plan.scratch
    for elements in (0, needed - 1):
        scratch = torch.empty(elements, device=gpu)
        with pytest.raises(ValueError, match=f"scratch: expected {needed} elements, got {elements}"):
            mr._C.attention_forward(
                *(q, k, v),
                **absent,
                out=out,
                lse=lse,
                lse_low=low,
                scratch=scratch,
                **options,
                threads=1,
                stream=0,
                plan=plan,
            )
