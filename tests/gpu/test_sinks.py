"""The sinks of attention in the kernels of every tier."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_calls import OPTIONS, biased_inputs, inputs_of
from calls import HALVES, assert_same_bits, results, upstreams
from paths import takes
from specimens import Inputs, Specimen, attention_inputs, name_of
from tolerance import check_operator
from torch import Tensor

import monoidreduce as mr

pytestmark = pytest.mark.tiers("sm80", "sm90")

SIZES = (
    "one_tile",
    "ragged",
    "grouped",
    "narrow",
    "long",
    "far_fewer_columns",
    "wide",
    "wide_payload",
    "padded_59",
    "padded_250_7",
)


def with_sinks(inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    q = inputs["q"]
    return inputs | {"sinks": (2 * torch.randn(q.shape[1], device=q.device)).to(dtype or q.dtype)}


def kernels(tier: str, dtype: torch.dtype) -> set[str]:
    return {f"attention_{way}/cuda/{tier}/{name_of(dtype)}" for way in ("forward", "backward")}


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_options(
    size: str, options: dict[str, Any], dtype: torch.dtype, tier: str, gpu: torch.device
) -> None:
    with takes(kernels(tier, dtype)):
        inputs = with_sinks(inputs_of(size, dtype, gpu))
        check_operator("attention", inputs, {"return_lse": True, **options})


@pytest.mark.parametrize("kind", ("full", "of_columns_in_float", "keep_rows_and_columns"))
@pytest.mark.parametrize("size", ("ragged", "wide"))
def test_beside_a_bias(size: str, kind: str, gpu: torch.device) -> None:
    inputs = with_sinks(biased_inputs(size, kind, torch.bfloat16, gpu))
    check_operator("attention", inputs, {"return_lse": True, "causal": True})


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_float32_sinks_keep_the_second_word(dtype: torch.dtype, gpu: torch.device) -> None:
    inputs = attention_inputs(1, 96, 48, 150, 300, 64, 64, dtype=dtype, device=gpu)
    check_operator("attention", with_sinks(inputs, torch.float32), {"return_lse": True})


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("columns", (70, 777, 9001))
@pytest.mark.parametrize("rows", (1, 5))
@pytest.mark.parametrize("width", (64, 128, 256))
def test_few_rows(width: int, rows: int, columns: int, options: dict[str, Any], gpu: torch.device) -> None:
    """Where blocks share the columns of a row, its sink is joined once."""
    inputs = attention_inputs(1, 8, 2, rows, columns, width, width, dtype=torch.bfloat16, device=gpu)
    explanation = str(mr.explain("attention", *inputs.values(), **options))
    split = columns > 9000 and "window" not in options  # which leaves too few columns
    assert "few rows" in explanation and ("splits" in explanation) >= split
    check_operator("attention", with_sinks(inputs), {"return_lse": True, **options})


def queries_before_the_first_key(dtype: torch.dtype, gpu: torch.device) -> Inputs:
    return attention_inputs(1, 24, 24, 500, 130, 64, 64, dtype=dtype, device=gpu)


@pytest.mark.parametrize("few", (False, True))
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_rows_without_a_key(dtype: torch.dtype, few: bool, gpu: torch.device) -> None:
    """Their lse is the sink, to the last bit, and their output 0."""
    inputs = queries_before_the_first_key(dtype, gpu)
    if few:
        inputs = attention_inputs(1, 4, 4, 20, 12, 64, 64, dtype=dtype, device=gpu)
    inputs = with_sinks(inputs, torch.float32)
    out, lse = mr.attention(**inputs, causal=True, return_lse=True)
    alone = inputs["q"].shape[2] - inputs["k"].shape[2]
    assert not out[:, :, :alone].any()
    assert torch.equal(lse[:, :, :alone], inputs["sinks"][None, :, None].expand_as(lse[:, :, :alone]))
    check_operator("attention", inputs, {"return_lse": True, "causal": True})


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", ("ragged", "one_row", "wide"))
def test_a_sink_of_minus_infinity_is_none(size: str, options: dict[str, Any], gpu: torch.device) -> None:
    inputs = inputs_of(size, torch.bfloat16, gpu)
    sinks = torch.full((inputs["q"].shape[1],), -math.inf, device=gpu, requires_grad=True)
    found = mr.attention(**inputs, sinks=sinks, return_lse=True, **options)
    assert all(map(torch.equal, found, mr.attention(**inputs, return_lse=True, **options)))
    (gradient,) = torch.autograd.grad(found[0].float().sum(), sinks)
    assert not gradient.any()


@pytest.mark.parametrize("options", (OPTIONS["full"], OPTIONS["causal"]), ids=("full", "causal"))
@pytest.mark.parametrize("bad", (math.inf, math.nan))
def test_a_sink_that_is_no_number(bad: float, options: dict[str, Any], gpu: torch.device) -> None:
    inputs = with_sinks(inputs_of("ragged", torch.bfloat16, gpu))
    inputs["sinks"][1] = bad
    leaves = [t.requires_grad_() for t in inputs.values()]
    out, lse = mr.attention(**inputs, return_lse=True, **options)
    others = torch.arange(18, device=gpu) != 1
    assert bool(out[:, 1].isnan().all()) and bool(out[:, others].isfinite().all())
    assert bool(lse[:, others].isfinite().all()) and not lse[:, 1].isfinite().any()
    *by_heads, of_sinks = torch.autograd.grad(out.float().sum(), leaves)
    assert all(bool(t[:, 1].isnan().all()) and bool(t[:, others].isfinite().all()) for t in by_heads)
    assert bool(of_sinks[1].isnan()) and bool(of_sinks[others].isfinite().all())


@pytest.mark.parametrize("place", ("q", "k", "v"))
@pytest.mark.parametrize("size", ("small", "small_wide"))
def test_rows_that_are_computed_again(size: str, place: str, gpu: torch.device) -> None:
    """Beside what is not finite in keys that they do not see."""
    inputs = with_sinks(inputs_of(size, torch.bfloat16, gpu))
    inputs[place][-1, -1, 100, 7] = torch.inf
    check_operator("attention", inputs, {"return_lse": True, "causal": True})


def test_same_bits(deterministic: None, gpu: torch.device) -> None:
    inputs = with_sinks(inputs_of("long", torch.bfloat16, gpu))
    call = Specimen("attention", "attention", attention_inputs, options={"return_lse": True, "causal": True})
    grads = upstreams(call, inputs)
    assert_same_bits(results(call, inputs, grads), results(call, inputs, grads))


@pytest.mark.parametrize("wanted", (["sinks"], ["q", "sinks"], ["k", "v"]), ids=str)
def test_some_gradients(wanted: list[str], gpu: torch.device) -> None:
    inputs = with_sinks(inputs_of("ragged", torch.bfloat16, gpu))
    check_operator("attention", inputs, {"return_lse": True}, differentiate=wanted)


def test_only_lse_has_a_gradient(gpu: torch.device) -> None:
    inputs = with_sinks(inputs_of("ragged", torch.bfloat16, gpu))
    of_lse = torch.randn(inputs["q"].shape[:3], device=gpu)
    check_operator("attention", inputs, {"return_lse": True}, upstream=[None, of_lse])


@pytest.mark.tiers("simt")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16), ids=name_of)
def test_without_tensor_cores(dtype: torch.dtype, options: dict[str, Any], gpu: torch.device) -> None:
    """Widths beyond a slice of the values, and rows that see no key."""
    inputs = with_sinks(attention_inputs(2, 4, 2, 190, 150, 40, 200, dtype=dtype, device=gpu))
    with takes(kernels("simt", dtype)):
        check_operator("attention", inputs, {"return_lse": True, **options})


@pytest.mark.tiers("sm80")
@pytest.mark.parametrize("options", (OPTIONS["full"], OPTIONS["causal"]), ids=("full", "causal"))
def test_tf32(options: dict[str, Any], gpu: torch.device, tf32: None) -> None:
    """As the kernels of float32 with a key more: one of score s for queries (1, ...), and value 0."""
    inputs = attention_inputs(1, 8, 2, 200, 300, 56, 64, dtype=torch.float32, device=gpu)
    sinks = torch.randn(8, device=gpu)
    with takes({"attention_forward/cuda/sm80/float32"}):
        out, lse = mr.attention(**inputs, sinks=sinks, return_lse=True, **options)
    with takes({"attention_forward/cuda/sm80/float32"}):
        bare, bare_lse = mr.attention(**inputs, return_lse=True, **options)
    torch.testing.assert_close(lse, torch.logaddexp(bare_lse, sinks[:, None]))
    torch.testing.assert_close(out, bare * (bare_lse - lse).exp()[..., None])


@pytest.mark.parametrize("options", ({}, {"causal": True}, {"window": (70, 20)}), ids=str)
def test_wide_heads(options: dict[str, Any], tier: str, gpu: torch.device) -> None:
    inputs = with_sinks(attention_inputs(2, 6, 2, 190, 150, 576, 512, dtype=torch.bfloat16, device=gpu))
    check_operator("attention", inputs, {"return_lse": True, **options}, function=mr.attention)
    q, k, v, sinks = inputs.values()
    assert "torch joins the sinks" in str(mr.explain("attention", q, k, v, sinks=sinks, **options))


@pytest.mark.parametrize("scale", (None, -0.2, 0.0))
@pytest.mark.parametrize("size", ("ragged", "wide", "narrow"))
def test_beside_a_function_of_scores(size: str, scale: float | None, tier: str, gpu: torch.device) -> None:
    """A mask as a function is a mask."""

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, causal: bool, **options: Any) -> Any:
        shift = k.shape[2] - q.shape[2]
        mask = lambda batch, head, i, j: j <= i + shift  # noqa: E731
        return mr.attention(q, k, v, sinks=sinks, mask_mod=mask, **options)

    inputs = with_sinks(inputs_of(size, torch.bfloat16, gpu))
    options = {"return_lse": True, "causal": True, "scale": scale}
    check_operator("attention", inputs, options, function=call)


@pytest.mark.tiers("simt")
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=name_of)
def test_beside_a_function_of_scores_on_simt(dtype: torch.dtype, gpu: torch.device) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, causal: bool, **options: Any) -> Any:
        shift = k.shape[2] - q.shape[2]
        mask = lambda batch, head, i, j: j <= i + shift  # noqa: E731
        return mr.attention(q, k, v, sinks=sinks, mask_mod=mask, **options)

    inputs = with_sinks(attention_inputs(2, 4, 2, 190, 150, 40, 200, dtype=dtype, device=gpu))
    check_operator("attention", inputs, {"return_lse": True, "causal": True}, function=call)


def test_a_function_of_scores_without_keys(gpu: torch.device) -> None:
    q, k = torch.randn(1, 2, 3, 64, device=gpu).bfloat16(), torch.randn(1, 2, 0, 64, device=gpu).bfloat16()
    sinks = torch.tensor([1.0, -2.0], device=gpu, requires_grad=True)
    out, lse = mr.attention(q, k, k, sinks=sinks, mask_mod=lambda b, h, i, j: i >= j, return_lse=True)
    assert not out.any() and torch.equal(lse, sinks[None, :, None].expand(1, 2, 3))
    (found,) = torch.autograd.grad(lse.sum(), sinks)
    assert found.tolist() == [3.0, 3.0]
