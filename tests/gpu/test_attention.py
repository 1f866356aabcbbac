"""Attention on tensor cores: every size, option and dtype that they cover, and that they ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_calls import (
    ALL_SIZES,
    OPTIONS,
    PADDED_SIZES,
    SIZES,
    SMALL_SIZES,
    biased_inputs,
    inputs_of,
)
from calls import HALVES, assert_same_bits, peak, reset_peak, results, upstreams
from paths import takes
from specimens import Specimen, attention_inputs, name_of
from tolerance import check_operator

import monoidreduce as mr
from monoidreduce._ops import attention_passes

pytestmark = pytest.mark.tiers("sm80", "sm90")


def paths() -> dict[str, int]:
    return {path: n for path, n in mr._C.path_counts().items() if path.startswith("attention")}


@pytest.mark.parametrize("options", ({}, {"causal": True}, {"window": (50, 7)}), ids=str)
@pytest.mark.parametrize("width", (40, 64, 128))
def test_kernels_clear_what_they_add_to(
    width: int, options: dict[str, Any], gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of the queries' gradient lie in memory that holds anything."""

    def filled(of: torch.Tensor) -> torch.Tensor:
        return torch.full(of.shape, torch.nan, dtype=torch.float32, device=of.device)

    monkeypatch.setattr(attention_passes, "empty_sums", filled)
    inputs = attention_inputs(2, 6, 2, 201, 333, width, width, dtype=torch.bfloat16, device=gpu)
    check_operator("attention", inputs, options)


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("size", ALL_SIZES)
def test_few_rows_are_those_of_one_row(size: str, gpu: torch.device) -> None:
    """All other sizes have their own kernels."""
    explanation = mr.explain("attention", *inputs_of(size, torch.bfloat16, gpu).values())
    assert any("few rows" in reason for reason in explanation.reasons) == size.endswith("one_row")


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_options(
    size: str, options: dict[str, Any], dtype: torch.dtype, gpu: torch.device, tier: str
) -> None:
    before = paths()
    check_operator("attention", inputs_of(size, dtype, gpu), {"return_lse": True, **options})
    ran = {path for path, n in paths().items() if n != before.get(path, 0)}
    assert ran == {f"attention_{way}/cuda/{tier}/{name_of(dtype)}" for way in ("forward", "backward")}


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", PADDED_SIZES)
def test_padded_widths(
    size: str, options: dict[str, Any], dtype: torch.dtype, gpu: torch.device, tier: str
) -> None:
    """Their scale, unless one is given, is that of the width that they have."""
    with takes({f"attention_{way}/cuda/{tier}/{name_of(dtype)}" for way in ("forward", "backward")}):
        check_operator("attention", inputs_of(size, dtype, gpu), {"return_lse": True, **options})


@pytest.mark.parametrize("kind", ("full", "of_columns_in_float", "keep_rows_and_columns"))
@pytest.mark.parametrize("size", ("padded_7_59", "padded_59", "padded_one_row"))
def test_padded_widths_with_a_bias(size: str, kind: str, gpu: torch.device, tier: str) -> None:
    inputs = biased_inputs(size, kind, torch.bfloat16, gpu)
    with takes({f"attention_{way}/cuda/{tier}/bfloat16" for way in ("forward", "backward")}):
        check_operator("attention", inputs, {"return_lse": True, "causal": True})


@pytest.mark.parametrize("size", ("padded_59", "padded_250_7"))
def test_gradient_of_the_log_sum_exp_alone_of_padded_widths(size: str, gpu: torch.device, tier: str) -> None:
    inputs = inputs_of(size, torch.bfloat16, gpu)
    grad = torch.randn(inputs["q"].shape[:3], device=gpu)
    with takes({f"attention_{way}/cuda/{tier}/bfloat16" for way in ("forward", "backward")}):
        found = check_operator("attention", inputs, {"return_lse": True}, upstream=[None, grad])
    assert not found["d_v"].any()


@pytest.mark.parametrize("place", ("q", "k", "v"))
def test_non_finite_inputs_of_padded_widths(place: str, gpu: torch.device) -> None:
    """The zeros beside them become NaN, and are not seen."""
    inputs = attention_inputs(2, 17, 17, 130, 200, 59, 100, dtype=torch.bfloat16, device=gpu)
    inputs[place][-1, -1, 100, 7] = torch.inf
    check_operator("attention", inputs, {"return_lse": True, "causal": True})


def test_padded_widths_in_the_deterministic_mode(gpu: torch.device, tier: str, deterministic: None) -> None:
    inputs, options = inputs_of("padded_59", torch.bfloat16, gpu), {"causal": True, "return_lse": True}
    explanation = mr.explain("attention", *inputs.values(), **options)
    assert explanation.backward == f"attention_backward/cuda/{tier}/deterministic/bfloat16"
    call = Specimen("attention", "attention", attention_inputs, options=options)
    grads = upstreams(call, inputs)
    assert_same_bits(results(call, inputs, grads), results(call, inputs, grads))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_deterministic_mode(
    size: str, options: dict[str, Any], gpu: torch.device, tier: str, deterministic: None
) -> None:
    """As accurate, on its own kernels, with the same bits in every run."""
    inputs, options = inputs_of(size, torch.bfloat16, gpu), {"return_lse": True, **options}
    before = paths()
    check_operator("attention", inputs, options)
    ran = {path for path, n in paths().items() if n != before.get(path, 0)}
    assert f"attention_backward/cuda/{tier}/deterministic/bfloat16" in ran and len(ran) == 2
    call = Specimen("attention", "attention", attention_inputs, options=options)
    grads = upstreams(call, inputs)
    assert_same_bits(results(call, inputs, grads), results(call, inputs, grads))


@pytest.mark.parametrize("layout", ("contiguous", "expanded", "sliced"))
def test_upstream_gradients(layout: str, gpu: torch.device) -> None:
    check_operator("attention", inputs_of("ragged", torch.bfloat16, gpu), {"causal": True}, upstream=layout)


# What Hopper's kernels compute where some gradients are wanted: up to a width of 128, and above it.
COMPUTED = {
    "q": ("q", "q"),
    "k": ("k and v", "k"),
    "v": ("k and v", "v"),
    "kv": ("k and v", "k and v"),
    "qk": (None, "q and k"),
    "qv": (None, "q and v"),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("names", COMPUTED)
@pytest.mark.parametrize("size", ("grouped", "one_column_head", "wide", "far_fewer_columns", "padded_59"))
def test_some_gradients(size: str, names: str, options: dict[str, Any], tier: str, gpu: torch.device) -> None:
    inputs = inputs_of(size, torch.bfloat16, gpu)
    leaves = [t.detach().requires_grad_(name in names) for name, t in inputs.items()]
    alone = COMPUTED[names][size == "wide"] if tier == "sm90" else None
    said = [s for s in mr.explain("attention", *leaves, **options).reasons if s.startswith("backward: ")]
    of = f" of {alone} alone" if alone else ""
    assert of in said[0] and ("alone" in said[0]) == bool(alone)
    with takes({f"attention_{way}/cuda/{tier}/bfloat16" for way in ("forward", "backward")}):
        check_operator("attention", inputs, {"return_lse": True, **options}, differentiate=[*names])


@pytest.mark.parametrize("names", ("q", "kv"))
@pytest.mark.parametrize("size", ("long", "one_tile", "wide_long"))
def test_some_gradients_in_every_dtype_and_mode(
    size: str, names: str, gpu: torch.device, deterministic: None
) -> None:
    """Where the gradient of q is alone, or not wanted, no block adds to it."""
    for dtype in HALVES:
        inputs = inputs_of(size, dtype, gpu)
        options = {"causal": True}
        check_operator("attention", inputs, options, differentiate=[*names])
        leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
        out = mr.attention(**leaves, **options)
        grad = torch.randn_like(out)
        of_all = dict(zip("qkv", torch.autograd.grad(out, list(leaves.values()), grad), strict=True))
        leaves = {name: t.detach().requires_grad_(name in names) for name, t in inputs.items()}
        wanted = [leaves[name] for name in names]
        runs = [torch.autograd.grad(mr.attention(**leaves, **options), wanted, grad) for _ in range(3)]
        for run in runs[1:]:
            assert_same_bits(dict(zip(names, run, strict=True)), dict(zip(names, runs[0], strict=True)))
        for name, found in zip(names, runs[0], strict=True):
            largest = float(of_all[name].abs().max())
            torch.testing.assert_close(found, of_all[name], rtol=2e-2, atol=1e-2 * largest)


@pytest.mark.parametrize("names", ("q", "k", "v", "kv"))
@pytest.mark.parametrize("size", ("small", "small_wide"))
def test_some_gradients_beside_numbers_that_are_not_finite(size: str, names: str, gpu: torch.device) -> None:
    """What is computed again is written only where it is wanted."""
    inputs = inputs_of(size, torch.bfloat16, gpu)
    inputs["k"][..., -3, 5] = torch.nan
    inputs["v"][..., 100, 7] = torch.inf
    check_operator("attention", inputs, {"causal": True}, differentiate=[*names])


def test_memory_of_some_gradients(tier: str, gpu: torch.device) -> None:
    """Without a sum of q's gradient in float32, where Hopper's kernels leave it out or have it alone."""
    inputs = inputs_of("long", torch.bfloat16, gpu)

    def most_of(names: str) -> int:
        """What a backward pass holds at most, with all that is there. Now and then autograd's thread still
        holds the gradients of the pass before, so it is the least of several."""
        leaves = {name: t.detach().requires_grad_(name in names) for name, t in inputs.items()}
        wanted, peaks = [leaves[name] for name in names], []
        for _ in range(4):
            out = mr.attention(**leaves)
            grad = torch.ones_like(out)
            reset_peak()
            torch.autograd.grad(out, wanted, grad)
            peaks.append(peak())
            del out, grad
        return min(peaks)

    q, k = inputs["q"].nbytes, inputs["k"].nbytes
    whole = most_of("qkv")
    assert whole >= sum(t.nbytes for t in inputs.values()) + 2 * q + 2 * k
    if tier == "sm90":
        assert most_of("q") <= whole - 2 * q - 2 * k + (1 << 20)
        assert most_of("kv") <= whole - 2 * q + (1 << 20)


@pytest.mark.parametrize("options", (OPTIONS["causal"], OPTIONS["softcap"]), ids=("causal", "softcap"))
@pytest.mark.parametrize("size", ("ragged", "wide"))
def test_gradient_of_the_log_sum_exp_alone(
    size: str, options: dict[str, Any], gpu: torch.device, tier: str
) -> None:
    """It does not depend on the values, whatever they are."""
    inputs = inputs_of(size, torch.bfloat16, gpu)
    inputs["v"][..., 3, 5] = torch.nan
    grad = torch.randn(inputs["q"].shape[:3], device=gpu)
    before = paths()
    found = check_operator("attention", inputs, {"return_lse": True, **options}, upstream=[None, grad])
    ran = {path for path, n in paths().items() if n != before.get(path, 0)}
    assert f"attention_backward/cuda/{tier}/bfloat16" in ran and len(ran) == 2
    assert not found["d_v"].any()


def test_transposed_views(gpu: torch.device, tier: str) -> None:
    """[B, N, H, D] in memory, which TMA reads in place; rows of odd pitch are copied."""
    inputs = inputs_of("grouped", torch.bfloat16, gpu)
    views = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in inputs.items()}
    padded = {name: torch.nn.functional.pad(t, (0, 3))[..., :-3] for name, t in inputs.items()}
    with takes({f"attention_{way}/cuda/{tier}/bfloat16" for way in ("forward", "backward")}):
        check_operator("attention", views, {"causal": True})
        check_operator("attention", padded, {"causal": True})


@pytest.mark.parametrize("size", SMALL_SIZES)
@pytest.mark.parametrize("place", ("q", "k", "v"))
@pytest.mark.parametrize("value", (torch.nan, torch.inf))
@pytest.mark.parametrize("options", (OPTIONS["causal"], OPTIONS["window"]), ids=("causal", "window"))
def test_non_finite_inputs(
    options: dict[str, Any], value: float, place: str, size: str, gpu: torch.device
) -> None:
    """They reach the rows that keep them, in value and gradient, and no others of their tile."""
    inputs = inputs_of(size, torch.bfloat16, gpu)
    inputs[place][-1, -1, 100, 7] = value
    found = check_operator("attention", inputs, {"return_lse": True, **options})
    assert not found["out0"][-1, -1].isfinite().all() and found["out0"][-1, -1].isfinite().any()


def test_non_finite_upstream_gradient(gpu: torch.device) -> None:
    """A NaN in the gradient of query 77 reaches the keys that it keeps and no others, as in no query."""
    inputs = {name: t.requires_grad_() for name, t in inputs_of("ragged", torch.bfloat16, gpu).items()}
    out = mr.attention(**inputs, causal=True)
    grad = torch.randn_like(out)
    finite = torch.autograd.grad(out, list(inputs.values()), grad, retain_graph=True)
    grad[0, 1, 77, 5] = torch.nan
    d_q, d_k, d_v = torch.autograd.grad(out, list(inputs.values()), grad)
    kept = 77 + (333 - 201) + 1
    lost = [(d_q, (0, 1, 77)), (d_k, (0, 1, slice(kept))), (d_v, (0, 1, slice(kept), 5))]
    for (got, where), expected in zip(lost, finite, strict=True):
        assert got[where].isnan().all()
        got[where] = expected[where]
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_forward_is_bitwise_reproducible(gpu: torch.device) -> None:
    call = Specimen("attention", "attention", attention_inputs, options={"causal": True, "return_lse": True})
    inputs = inputs_of("long", torch.bfloat16, gpu)
    grads = upstreams(call, inputs)
    first, second = (results(call, inputs, grads) for _ in range(2))
    for name in ("out0", "out1", "d_k", "d_v"):  # d_q is added atomically
        assert_same_bits({name: first[name]}, {name: second[name]})


def test_deterministic_mode_is_explained(gpu: torch.device, tier: str, deterministic: None) -> None:
    explanation = mr.explain("attention", *inputs_of("ragged", torch.bfloat16, gpu).values(), causal=True)
    assert explanation.backward == f"attention_backward/cuda/{tier}/deterministic/bfloat16"


@pytest.mark.tiers("sm90")
def test_gradients_of_wide_rows_are_written_once(gpu: torch.device) -> None:
    """Over a width of 128 each gradient has a pass of its own: the same bits in any mode."""
    call = Specimen("attention", "attention", attention_inputs, options={"causal": True, "return_lse": True})
    inputs = inputs_of("wide_long", torch.bfloat16, gpu)
    explanation = mr.explain("attention", *inputs.values(), causal=True)
    assert explanation.deterministic and not any("atomically" in reason for reason in explanation.reasons)
    grads = upstreams(call, inputs)
    assert_same_bits(*(results(call, inputs, grads) for _ in range(2)))

    narrow = mr.explain("attention", *inputs_of("long", torch.bfloat16, gpu).values(), causal=True)
    assert not narrow.deterministic and any("atomically" in reason for reason in narrow.reasons)


@pytest.mark.parametrize("option", ("full", "causal", "window"))
@pytest.mark.parametrize("width", (64, 128, 256))
def test_deterministic_mode_with_many_tiles(
    width: int, option: str, gpu: torch.device, deterministic: None
) -> None:
    """More tiles of columns add to a row's gradient than blocks run at a time."""
    inputs = attention_inputs(1, 4, 2, 4000, 20000, width, width, dtype=torch.bfloat16, device=gpu)
    call = Specimen("attention", "attention", attention_inputs, options=OPTIONS[option])
    grads = upstreams(call, inputs)
    first = results(call, inputs, grads)
    for _ in range(3):
        assert_same_bits(results(call, inputs, grads), first)
    torch.use_deterministic_algorithms(False)
    for name, expected in results(call, inputs, grads).items():
        torch.testing.assert_close(first[name], expected, rtol=2e-2, atol=2e-3)


def test_blocks_that_take_turns_have_memory_for_them(gpu: torch.device, tier: str) -> None:
    """Where a tile adds to the rows' gradient: not where each gradient has a pass of its own."""
    for size, turns in (("ragged", True), ("wide", tier == "sm80")):
        q, k, v = inputs_of(size, torch.bfloat16, gpu).values()
        default = _backward_plan(q, k, v, deterministic=False)
        in_order = _backward_plan(q, k, v, deterministic=True)
        assert in_order.tier == tier
        assert (in_order.scratch > default.scratch) == turns == in_order.adds_rows


def _backward_plan(*tensors: torch.Tensor, deterministic: bool) -> mr._C.Plan:
    q, _, v = tensors
    grad_out = v.new_empty(()).expand(*q.shape[:3], v.shape[3])
    return mr._C.plan_attention_backward(
        *tensors, bias=None, row_spans=None, column_spans=None, grad_out=grad_out, deterministic=deterministic
    )


@pytest.mark.tiers("sm90")
def test_tier_can_be_named(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    fast = mr.attention(**inputs)
    assert mr.explain("attention", *inputs.values()).forward == "attention_forward/cuda/sm90/bfloat16"
    monkeypatch.setenv("MONOIDREDUCE_CUDA_TIER", "simt")
    explanation = mr.explain("attention", *inputs.values())
    assert explanation.forward == "attention_forward/cuda/simt/bfloat16"
    assert any("MONOIDREDUCE_CUDA_TIER" in reason for reason in explanation.reasons)
    before = paths()
    exact = mr.attention(**inputs)
    assert paths()[explanation.forward] == before.get(explanation.forward, 0) + 1
    torch.testing.assert_close(fast, exact, rtol=2e-2, atol=2e-2)


@pytest.mark.tiers("sm80")
def test_is_explained(gpu: torch.device) -> None:
    explanation = mr.explain("attention", *inputs_of("ragged", torch.bfloat16, gpu).values())
    assert explanation.forward == "attention_forward/cuda/sm80/bfloat16"
    assert explanation.backward == "attention_backward/cuda/sm80/bfloat16"
    assert any("mma.sync" in reason for reason in explanation.reasons)


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize(
    ("change", "reason"),
    (
        ({"dtype": torch.float32}, "float32"),
        ({"width": 257}, "264"),
        ({"value_width": 264}, "264"),
        ({"scale": -1.0}, "scale"),
    ),
    ids=lambda p: next(iter(p)) if isinstance(p, dict) else "",
)
def test_what_is_not_covered_says_why(change: dict[str, Any], reason: str, gpu: torch.device) -> None:
    options = {name: change.pop(name) for name in ("scale",) if name in change}
    change = {"dtype": torch.bfloat16, "width": 64, "value_width": 64, **change}
    inputs = attention_inputs(1, 2, 2, 190, 300, device=gpu, **change)
    explanation = mr.explain("attention", *inputs.values(), **options)
    assert "simt" in explanation.forward
    assert any(text.startswith("forward: not sm90") and reason in text for text in explanation.reasons)


BIASES = ("full", "of_heads", "of_columns", "keep", "keep_rows_and_columns", "keep_columns")


def check_biased(
    size: str, kind: str, options: dict[str, Any], dtype: torch.dtype, gpu: torch.device
) -> None:
    """Gradients wider than 128 have the sm80 tier's kernels."""
    before = paths()
    check_operator("attention", biased_inputs(size, kind, dtype, gpu), {"return_lse": True, **options})
    ran = {path for path, n in paths().items() if n != before.get(path, 0)}
    tiers = {"forward": "sm90", "backward": "sm80" if max(ALL_SIZES[size][5:]) > 128 else "sm90"}
    assert ran == {f"attention_{way}/cuda/{tier}/{name_of(dtype)}" for way, tier in tiers.items()}


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "kind", ("full", "of_heads", "of_columns", "keep", "keep_rows_and_columns", "keep_columns")
)
@pytest.mark.parametrize("size", ("one_tile", "one_row", "narrow", "one_column_head", "ragged", "wide"))
def test_biases(size: str, kind: str, options: dict[str, Any], dtype: torch.dtype, gpu: torch.device) -> None:
    check_biased(size, kind, options, dtype, gpu)


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", ("of_rows_and_columns", "of_columns_in_float"))
@pytest.mark.parametrize("size", ("one_tile", "one_row", "narrow", "one_column_head", "ragged", "wide"))
def test_float_biases(
    size: str, kind: str, options: dict[str, Any], dtype: torch.dtype, gpu: torch.device
) -> None:
    """Their gradients are not rounded again: whatever else is rounded shows in them."""
    check_biased(size, kind, options, dtype, gpu)


@pytest.mark.tiers("sm80")
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("option", ("full", "causal", "softcap", "causal_softcap"))
@pytest.mark.parametrize(
    "kind", ("full", "of_rows_and_columns", "of_columns", "of_rows", "keep", "keep_columns")
)
@pytest.mark.parametrize("size", ("one_row", "narrow", "one_column_head", "ragged", "wide"))
def test_biases_of_every_kind(
    size: str, kind: str, option: str, dtype: torch.dtype, gpu: torch.device
) -> None:
    before = paths()
    inputs = biased_inputs(size, kind, dtype, gpu)
    check_operator("attention", inputs, {"return_lse": True, **OPTIONS[option]})
    ran = {path for path, n in paths().items() if n != before.get(path, 0)}
    assert ran == {f"attention_{way}/cuda/sm80/{name_of(dtype)}" for way in ("forward", "backward")}


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("kind", ("full", "of_heads", "keep"))
@pytest.mark.parametrize("size", ("one_column", "grouped", "unequal", "long", "wide_long"))
def test_biases_of_other_sizes(size: str, kind: str, gpu: torch.device) -> None:
    check_biased(size, kind, {"causal": True}, torch.bfloat16, gpu)


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("kind", ("full", "of_rows_and_columns", "keep"))
@pytest.mark.parametrize("options", (OPTIONS["full"], OPTIONS["softcap"]), ids=("full", "softcap"))
def test_rows_that_a_bias_leaves_nothing(kind: str, options: dict[str, Any], gpu: torch.device) -> None:
    """Output 0, log-sum-exp -inf, no gradient; and whole tiles of columns without a row."""
    inputs = biased_inputs("ragged", kind, torch.bfloat16, gpu)
    nothing = False if inputs["bias"].dtype == torch.bool else -torch.inf
    inputs["bias"][..., 70:90, :] = nothing
    inputs["bias"][..., 128:270] = nothing
    found = check_operator("attention", inputs, {"return_lse": True, **options})
    assert (found["out0"][..., 70:90, :] == 0).all() and (found["out1"][..., 70:90] == -torch.inf).all()
    assert (found["d_k"][..., 128:270, :] == 0).all()


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("softcap", (None, 1e4))
def test_masked_scores_that_overflow(softcap: float | None, gpu: torch.device) -> None:
    """The weight of a masked column, exp(score - lse), is infinite until the mask is applied."""
    inputs = biased_inputs("ragged", "keep", torch.bfloat16, gpu)
    inputs["bias"][..., 60] = False
    inputs["k"][:, :, 60] *= 1e4
    options = {} if softcap is None else {"softcap": softcap}
    found = check_operator("attention", inputs, {"return_lse": True, **options})
    assert not found["d_k"][:, :, 60].any() and not found["d_v"][:, :, 60].any()


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("layout", ("contiguous", "expanded", "sliced"))
def test_upstream_gradients_with_a_bias(layout: str, gpu: torch.device) -> None:
    inputs = biased_inputs("ragged", "of_heads", torch.bfloat16, gpu)
    check_operator("attention", inputs, {"causal": True}, upstream=layout)


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("name", ("q", "v", "bias"))
def test_some_gradients_with_a_bias(name: str, gpu: torch.device) -> None:
    inputs = biased_inputs("grouped", "of_rows_and_columns", torch.bfloat16, gpu)
    check_operator("attention", inputs, {"softcap": 5.0}, differentiate=[name])


def test_bias_of_any_strides(gpu: torch.device, tier: str) -> None:
    inputs = biased_inputs("ragged", "full", torch.bfloat16, gpu)
    transposed = inputs["bias"].transpose(2, 3).contiguous().transpose(2, 3)
    repeated = torch.randn(201, 333 + 3, device=gpu, dtype=torch.bfloat16)[:, 1:-2].expand(2, 18, 201, 333)
    with takes({f"attention_{way}/cuda/{tier}/bfloat16" for way in ("forward", "backward")}):
        for bias in (transposed, repeated):
            check_operator("attention", {**inputs, "bias": bias}, {"causal": True})


@pytest.mark.parametrize("kind", ("keep", "keep_columns"))
@pytest.mark.parametrize("place", ("q", "k", "v"))
def test_non_finite_inputs_beside_excluded_columns(place: str, kind: str, gpu: torch.device) -> None:
    """They reach the rows that keep them, in value and gradient, and no others."""
    inputs = biased_inputs("small", kind, torch.bfloat16, gpu)
    inputs["bias"][..., 60] = False
    inputs[place][1, 2, 100, 7] = torch.nan
    if place != "q":
        inputs[place][0, 1, 60] = torch.nan
    found = check_operator("attention", inputs, {"return_lse": True})
    assert found["out0"][0, 1].isfinite().all()
    if kind == "keep":
        assert found["out0"][1, 2].isnan().any() and found["out0"][1, 2].isfinite().all(-1).any()


@pytest.mark.parametrize("kind", ("full", "of_rows_and_columns", "of_columns"))
def test_non_finite_biases(kind: str, gpu: torch.device) -> None:
    """Of lse and output they make what torch's logsumexp and softmax do, beside a key that is NaN too."""
    inputs = biased_inputs("ragged", kind, torch.bfloat16, gpu)
    inputs["bias"][..., 20] = -torch.inf
    if kind != "of_columns":
        for row, value in ((3, torch.inf), (5, torch.nan), (7, -torch.inf)):
            inputs["bias"][..., row, 100] = value
    else:
        inputs["bias"][0, ..., 100] = torch.inf
    inputs["k"][-1, -1, 20] = torch.nan
    found = check_operator("attention", inputs, {"return_lse": True}, differentiate=[])
    assert (found["out1"] == torch.inf).any() and found["out1"].isfinite().any()


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", ("ragged", "grouped", "wide"))
def test_biases_that_columns_share(size: str, options: dict[str, Any], gpu: torch.device) -> None:
    """They shift lse, and the kernels see none."""
    inputs = biased_inputs(size, "full", torch.bfloat16, gpu)
    inputs["bias"] = inputs["bias"][..., :1].clone()
    inputs["bias"][0, 0, 5:9] = -torch.inf
    before = paths()
    found = check_operator("attention", inputs, {"return_lse": True, **options})
    ran = {path for path, n in paths().items() if n > before.get(path, 0)}
    assert ran == {"attention_forward/cuda/sm90/bfloat16", "attention_backward/cuda/sm90/bfloat16"}
    assert not found["out0"][0, 0, 5:9].any()


@pytest.mark.tiers("sm90")
def test_biases_that_are_not_covered_say_why(gpu: torch.device) -> None:
    inputs = biased_inputs("ragged", "full", torch.bfloat16, gpu)
    bias = inputs.pop("bias")
    of_rows = mr.explain("attention", *inputs.values(), bias=bias[..., :1] > 0)
    assert of_rows.forward == "attention_forward/cuda/sm80/bfloat16"
    assert any(text.endswith("the same for all columns") for text in of_rows.reasons)
    wide = biased_inputs("wide", "full", torch.bfloat16, gpu)
    bias = wide.pop("bias")
    explanation = mr.explain("attention", *wide.values(), bias=bias)
    assert explanation.forward == "attention_forward/cuda/sm90/bfloat16"
    assert explanation.backward == "attention_backward/cuda/sm80/bfloat16"
    assert any("a bias of scores, and a width" in text for text in explanation.reasons)


@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", ("one_row", "narrow", "one_column_head", "ragged", "grouped", "wide"))
def test_deterministic_mode_with_a_bias(
    size: str, options: dict[str, Any], kind: str, gpu: torch.device, tier: str, deterministic: None
) -> None:
    """A gradient that scores share is added on other kernels; one that is not wanted is no obstacle."""
    inputs = biased_inputs(size, kind, torch.bfloat16, gpu)
    bias, (q, k, v) = inputs["bias"], list(inputs.values())[:3]
    options = {"return_lse": True, **options}
    shared = bias.is_floating_point() and bias.numel() < q.shape[:3].numel() * k.shape[2]
    for wanted in (["q", "k", "v"], ["q", "k", "v", "bias"])[: 2 if bias.is_floating_point() else 1]:
        ran = "simt" if shared and "bias" in wanted else "sm80" if size == "wide" else tier
        before = paths()
        check_operator("attention", inputs, options, differentiate=wanted)
        path = f"attention_backward/cuda/{ran}/deterministic/bfloat16"
        assert paths()[path] == before.get(path, 0) + 1
        leaf = bias.detach().requires_grad_("bias" in wanted)
        explanation = mr.explain("attention", q, k, v, bias=leaf, **options)
        assert explanation.backward == path
        assert any("scores share a bias" in text for text in explanation.reasons) == (ran == "simt")
    call = Specimen("attention", "attention", attention_inputs, options=options)
    grads = upstreams(call, inputs)
    assert_same_bits(results(call, inputs, grads), results(call, inputs, grads))


def test_graph_capture(gpu: torch.device) -> None:
    """Captured once, replayed on other values."""
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    grad = torch.randn(2, 18, 201, 128, device=gpu, dtype=torch.bfloat16)

    def step() -> tuple[torch.Tensor, ...]:
        out = mr.attention(**leaves, causal=True)
        return out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for t in leaves.values():
            t.copy_(torch.randn_like(t))
    graph.replay()
    for got, expected in zip(captured, step(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.tiers("sm90")
@pytest.mark.slow
@pytest.mark.parametrize("memory", (40,), indirect=True)
def test_offsets_past_32_bits(gpu: torch.device, memory: None) -> None:
    """The last of 2**31 + elements' heads are what they are without the others."""
    heads, rows, width, last = 2200, 8192, 128, 64
    many = [torch.randn(1, heads, rows, width, device=gpu, dtype=torch.bfloat16) for _ in range(3)]
    out = mr.attention(*many, causal=True)
    assert torch.equal(out[:, -last:], mr.attention(*(t[:, -last:].clone() for t in many), causal=True))


@pytest.mark.parametrize("keys", [6, 128])
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_saturated_rows_of_few_keys(dtype: torch.dtype, keys: int, tier: str, gpu: torch.device) -> None:
    """Where one weight is almost 1 the rounding of the output would be most of the gradients of q and k."""
    inputs = attention_inputs(1, 4, 4, 300, keys, 64, 64, dtype=torch.float32, device=gpu)
    inputs = {name: (t * 6 if name in "qk" else t).to(dtype) for name, t in inputs.items()}
    with takes({f"attention_{way}/cuda/{tier}/{name_of(dtype)}" for way in ("forward", "backward")}):
        check_operator("attention", inputs)


@pytest.mark.parametrize("size", ALL_SIZES)
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_compensated(dtype: torch.dtype, size: str, tier: str, gpu: torch.device) -> None:
    """Of every kernel that stores an output. The low word is what rounding lost: at most half a unit."""
    inputs = inputs_of(size, dtype, gpu)
    with takes({f"attention_{way}/cuda/{tier}/{name_of(dtype)}" for way in ("forward", "backward")}):
        check_operator("attention", inputs, {"compensated": True, "return_lse": True})
    for options in ((-1, -1), (30, 0)):  # all keys, and a window: its rows may be computed again
        arguments = (*inputs.values(), None, None, None, 0.0, *options, True)
        out, _, _, low = torch.ops.monoidreduce.attention(*arguments)
        unit = torch.finfo(dtype).eps * out.abs().float()
        assert (low.float().abs() <= 0.51 * unit + torch.finfo(dtype).smallest_normal).all()
        assert low.any() or size == "one_column"  # the value itself


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_compensated_without_tensor_cores(
    dtype: torch.dtype, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONOIDREDUCE_CUDA_TIER", "simt")
    inputs = attention_inputs(1, 4, 2, 150, 300, 40, 72, dtype=dtype, device=gpu)
    with takes({f"attention_{way}/cuda/simt/{name_of(dtype)}" for way in ("forward", "backward")}):
        check_operator("attention", inputs, {"compensated": True, "return_lse": True})


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("options", ({}, {"causal": True, "window": (100, 0)}), ids=("all", "window"))
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
def test_sinks(bias: bool, options: dict[str, Any], dtype: torch.dtype, gpu: torch.device) -> None:
    shape = {"bias": (1, 8, 1, 300), "bias_dtype": torch.float32} if bias else {}
    inputs = attention_inputs(1, 8, 2, 300, 300, 128, 128, dtype=dtype, device=gpu, **shape)
    inputs["sinks"] = 2 * torch.randn(8, dtype=dtype, device=gpu)
    check_operator("attention", inputs, {"return_lse": True, **options})
