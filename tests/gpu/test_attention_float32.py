"""Float32 attention in planes of float16 (`mr.float32("emulated")`), beside torch in float32 and float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attention_calls import ALL_SIZES, OPTIONS, biased_inputs
from calls import assert_same_bits, results, upstreams
from paths import takes
from specimens import Inputs, Specimen, attention_inputs, varlen_inputs
from tolerance import check_operator
from torch import Tensor

import monoidreduce as mr
from monoidreduce import reference

pytestmark = pytest.mark.tiers("sm90")

FORWARD, BACKWARD = (f"attention_{way}/cuda/planes/float32" for way in ("forward", "backward"))
IN_ORDER = BACKWARD.replace("planes", "planes/deterministic")
PASSES = {FORWARD, BACKWARD}
# Sizes for the kernels for planes. Some have widths that are padded, some have unequal ones. Of widths over
# 128 each of two blocks has half.
SIZES = (
    "one_tile",
    "ragged",
    "grouped",
    "one_column_head",
    "long",
    "far_fewer_columns",
    "unequal",
    "padded_59",
    "padded_64_100",
    "wide",
    "wide_long",
    "wide_payload",
    "padded_250_7",
)


def inputs_of(size: str, gpu: torch.device) -> Inputs:
    return attention_inputs(*ALL_SIZES[size], dtype=torch.float32, device=gpu)


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    """What the tests compare with must not round to tf32."""
    assert not torch.backends.cuda.matmul.allow_tf32
    with mr.float32("emulated"):
        yield


def rows_times(factor: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Multiplies each row by a factor of its own, of a standard normal number."""
    return lambda t: t * factor(torch.randn(*t.shape[:-1], 1, device=t.device))


def as_it_is(t: Tensor) -> Tensor:
    return t


def of_far_apart(t: Tensor) -> Tensor:
    """Every second row is 2^-40 times as large."""
    factor = torch.ones(t.shape[2], 1, device=t.device)
    factor[1::2] = 2.0**-40
    return t * factor


def with_heavy_tails(t: Tensor) -> Tensor:
    return t.sign() * (3 * torch.randn_like(t)).exp()


# How q, k and v are made of normal numbers.
DRAWN: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "normal": (as_it_is,) * 3,
    "sharp": (lambda q: 3 * q, as_it_is, as_it_is),
    "lognormal_rows": (rows_times(lambda x: 0.1 * (3 * x).exp()),) * 2
    + (rows_times(lambda x: (3 * x).exp()),),
    "heavy_tails": (
        lambda q: 0.01 * with_heavy_tails(q),
        lambda k: 0.1 * with_heavy_tails(k),
        with_heavy_tails,
    ),
    "rows_of_v_far_apart": (lambda q: 4 * q, as_it_is, of_far_apart),
    "rows_of_k_far_apart": (as_it_is, of_far_apart, as_it_is),
    "denormal_v": (as_it_is, as_it_is, lambda v: 1e-39 * v),
    "denormal_k": (lambda q: 1e37 * q, lambda k: 1e-38 * k, as_it_is),
}


# Norms of gradients: elsewhere a few numbers decide, or numbers that have lost digits before any product.
WITH_GRADIENTS = ("normal", "sharp", "rows_of_v_far_apart", "rows_of_k_far_apart")


BOUND = 1.5


def error_norm(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def median_error_norm(found: Tensor, exact: Tensor) -> float:
    """Over batches and heads."""
    errors = (found.double() - exact).flatten(2).norm(dim=2) / exact.flatten(2).norm(dim=2)
    return float(errors.median())


def outputs_and_gradients(call: Callable[..., Any], inputs: Inputs, options: dict[str, Any]) -> list[Tensor]:
    """The output, and the gradients of the floating inputs."""
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in inputs.items()}
    out = call(**leaves, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
    return [out.detach(), *torch.autograd.grad(out, [t for t in leaves.values() if t.requires_grad], grad)]


@pytest.mark.parametrize("mask", ("full", "causal", "window"))
@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("width", (64, 128, 192, 256))
def test_error_norms(width: int, drawn: str, mask: str, gpu: torch.device) -> None:
    """At most 1.5 times those of torch's products in float32.

    Width 64, H200: 1.42 for log-normal rows and 1.26 for small rows of k under a window, 1.3 for heavy tails.

    Log-normal rows of wide heads: by the median over heads. A few queries with two large scores that are
    nearly equal decide the norm over all, which was 2.2 times torch's in one draw of width 256.
    """
    norm = median_error_norm if drawn == "lognormal_rows" and width > 128 else error_norm
    normal = attention_inputs(2, 12, 4, 500, 700, width, width, dtype=torch.float32, device=gpu)
    inputs = {name: make(t) for make, (name, t) in zip(DRAWN[drawn], normal.items(), strict=True)}
    in_double = _in_double(inputs)
    with takes(PASSES):
        found = outputs_and_gradients(mr.attention, inputs, OPTIONS[mask])
    exact = outputs_and_gradients(reference.attention, in_double, OPTIONS[mask])
    base = outputs_and_gradients(reference.attention, inputs, OPTIONS[mask])
    names = ("out", "d_q", "d_k", "d_v") if drawn in WITH_GRADIENTS else ("out",)
    for name, y, ref, of_torch in zip(names, found, exact, base, strict=False):
        ours, theirs = norm(y, ref), norm(of_torch, ref)
        assert ours <= BOUND * theirs, f"{name}: error norm {ours:.3g}, torch's {theirs:.3g}"


# Biases of scores: the shape for 2 batches, 12 heads, 500 queries and 700 keys.
BIASES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"bias": (2, 12, 500, 700)},
    "of_heads": {"bias": (12, 500, 700)},
    "of_batches": {"bias": (2, 1, 500, 700)},
    "of_columns": {"bias": (2, 1, 1, 700)},
    "keep": {"keep": (2, 1, 500, 700)},
}


@pytest.mark.parametrize("width", (64, 128, 256))
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("option", ("full", "causal", "softcap", "causal_softcap"))
def test_error_norms_of_softcaps_and_biases(width: int, option: str, bias: str, gpu: torch.device) -> None:
    """At most 1.25 times those of torch's products in float32, for normal numbers."""
    inputs = attention_inputs(
        2, 12, 4, 500, 700, width, width, dtype=torch.float32, device=gpu, **BIASES[bias]
    )
    with takes(PASSES):
        found = outputs_and_gradients(mr.attention, inputs, OPTIONS[option])
    exact = outputs_and_gradients(reference.attention, _in_double(inputs), OPTIONS[option])
    base = outputs_and_gradients(reference.attention, inputs, OPTIONS[option])
    for name, y, ref, of_torch in zip(("out", *inputs), found, exact, base, strict=False):
        ours, theirs = error_norm(y, ref), error_norm(of_torch, ref)
        assert ours <= 1.25 * theirs, f"{name}: error norm {ours:.3g}, torch's {theirs:.3g}"


# Names of `biased_inputs`. A bias that all keys share (of_rows) is added to the log-sum-exp instead.
KINDS = (
    "full",
    "of_rows_and_columns",
    "of_heads",
    "of_columns",
    "of_columns_in_float",
    "keep",
    "keep_rows_and_columns",
    "keep_columns",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", ("ragged", "grouped", "one_column_head", "padded_59", "wide"))
@pytest.mark.parametrize("option", ("full", "causal", "window", "causal_softcap"))
def test_biases(size: str, option: str, kind: str, gpu: torch.device) -> None:
    inputs = biased_inputs(size, kind, torch.float32, gpu)
    with takes(PASSES):
        check_operator("attention", inputs, {"return_lse": True, **OPTIONS[option]})


@pytest.mark.parametrize("kind", ("full", "of_rows_and_columns", "keep"))
@pytest.mark.parametrize("size", ("ragged", "one_column_head", "wide"))
@pytest.mark.parametrize("option", ("full", "softcap"))
def test_rows_that_a_bias_leaves_nothing(size: str, option: str, kind: str, gpu: torch.device) -> None:
    """Output 0, log-sum-exp -inf, no gradient; and a whole tile of keys without a query."""
    inputs = biased_inputs(size, kind, torch.float32, gpu)
    nothing = False if inputs["bias"].dtype == torch.bool else -torch.inf
    inputs["bias"][..., 70:90, :] = nothing
    inputs["bias"][..., 64:128] = nothing
    with takes(PASSES):
        found = check_operator("attention", inputs, {"return_lse": True, **OPTIONS[option]})
    assert (found["out0"][..., 70:90, :] == 0).all() and (found["out1"][..., 70:90] == -torch.inf).all()
    assert (found["d_k"][..., 64:128, :] == 0).all()


@pytest.mark.parametrize("width", (64, 128, 256))
def test_masked_scores_that_overflow(width: int, gpu: torch.device) -> None:
    """The weight of a masked key, exp(score - lse), is infinite until the mask is applied."""
    inputs = attention_inputs(
        1, 12, 12, 200, 300, width, width, dtype=torch.float32, device=gpu, keep=(200, 300)
    )
    inputs["bias"][:, 60] = False
    inputs["k"][:, :, 60] *= 1e4
    with takes(PASSES):
        found = check_operator("attention", inputs, {"return_lse": True})
    assert not found["d_k"][:, :, 60].any() and not found["d_v"][:, :, 60].any()


@pytest.mark.parametrize("layout", ("transposed", "unaligned", "every_third"))
@pytest.mark.parametrize("boolean", (False, True), ids=("float32", "bool"))
def test_biases_of_any_strides(boolean: bool, layout: str, gpu: torch.device) -> None:
    inputs = inputs_of("ragged", gpu)
    drawn = torch.randn(2, 18, 333, 1005, device=gpu)
    bias = {
        "transposed": drawn[..., :201].mT,
        "unaligned": drawn[:, :, :201, 1:334],
        "every_third": drawn[:, :, :201, :999:3],
    }[layout]
    with takes(PASSES):
        check_operator("attention", {**inputs, "bias": bias > -1 if boolean else bias}, {"causal": True})


@pytest.mark.parametrize("wanted", (["q"], ["k"], ["v"], ["bias"], ["k", "bias"], ["q", "bias"]), ids=str)
@pytest.mark.parametrize("kind", ("full", "of_rows_and_columns", "of_columns"))
@pytest.mark.parametrize("size", ("grouped", "wide"))
def test_some_gradients_with_a_bias(size: str, kind: str, wanted: list[str], gpu: torch.device) -> None:
    inputs = biased_inputs(size, kind, torch.float32, gpu)
    with takes(PASSES):
        check_operator("attention", inputs, {"softcap": 5.0, "causal": True}, differentiate=wanted)


@pytest.mark.parametrize("kind", ("full", "of_columns"))
def test_sinks_beside_a_bias(kind: str, gpu: torch.device) -> None:
    inputs = biased_inputs("grouped", kind, torch.float32, gpu)
    inputs["sinks"] = torch.randn(inputs["q"].shape[1], device=gpu)
    with takes(PASSES):
        check_operator("attention", inputs, {"return_lse": True, "softcap": 5.0})


@pytest.mark.parametrize("kind", ("full", "of_columns", "keep"))
@pytest.mark.parametrize("size", ("ragged", "wide"))
def test_same_bits_with_a_bias(size: str, kind: str, gpu: torch.device) -> None:
    """Only the gradient of a bias that scores share may differ by rounding."""
    inputs = biased_inputs(size, kind, torch.float32, gpu)
    with takes(PASSES):
        first, again = (outputs_and_gradients(mr.attention, inputs, {"causal": True}) for _ in range(2))
    repeated = first[:-1] if kind == "of_columns" else first
    for x, y in zip(repeated, again, strict=False):
        assert torch.equal(x, y)


def test_deterministic_mode_with_a_bias(gpu: torch.device, deterministic: None) -> None:
    """Has the same kernels and bits, if no scores share the bias."""
    inputs = biased_inputs("ragged", "full", torch.float32, gpu)
    with takes({FORWARD, IN_ORDER}):
        found = outputs_and_gradients(mr.attention, inputs, {"causal": True})
    torch.use_deterministic_algorithms(False)
    for x, y in zip(found, outputs_and_gradients(mr.attention, inputs, {"causal": True}), strict=True):
        assert torch.equal(x, y)


def test_small_rows_of_v_keep_their_digits(gpu: torch.device) -> None:
    """A query that sees one key returns its value, beside keys with values 2^40 times as large."""
    inputs = attention_inputs(2, 40, 40, 256, 256, 64, 64, dtype=torch.float32, device=gpu)
    v = inputs["v"] = of_far_apart(inputs["v"])
    with takes({FORWARD}):
        out = mr.attention(**inputs, window=(0, 0))
    allowed = 2.0**-21 * v.abs() + 2.0**-38 * v.abs().amax(-1, keepdim=True)
    assert bool(((out - v).abs() <= allowed).all())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_options_and_sizes(size: str, options: dict[str, Any], gpu: torch.device) -> None:
    inputs = inputs_of(size, gpu)
    with takes(PASSES):
        check_operator("attention", inputs, {"return_lse": True, **options})


@pytest.mark.parametrize(
    "widths",
    ((24, 64), (59, 40), (8, 8), (96, 96), (72, 128), (128, 16), (192, 128), (129, 8), (16, 256), (200, 250)),
)
def test_widths(widths: tuple[int, int], gpu: torch.device) -> None:
    inputs = attention_inputs(2, 36, 12, 201, 333, *widths, dtype=torch.float32, device=gpu)
    with takes(PASSES):
        check_operator("attention", inputs, {"return_lse": True, "causal": True})


@pytest.mark.parametrize("width", (59, 123, 187))
def test_padded_gradients_meet_no_other_row(width: int, gpu: torch.device) -> None:
    """The last query has NaN in its output. The gradient of the one before it does not read that."""
    inputs = attention_inputs(1, 68, 68, 128, 128, width, width, dtype=torch.float32, device=gpu)
    inputs["v"][:, :, -1] = torch.nan
    with takes(PASSES):
        out, d_q, *_ = outputs_and_gradients(mr.attention, inputs, {"causal": True})
    assert out[:, :, -1].isnan().all() and d_q[:, :, -1].isnan().all()
    assert out[:, :, :-1].isfinite().all() and d_q[:, :, :-1].isfinite().all()


@pytest.mark.parametrize("wanted", ("q", "k", "v"))
@pytest.mark.parametrize("size", ("one_tile", "ragged", "wide"))
def test_one_gradient_alone(size: str, wanted: str, gpu: torch.device) -> None:
    """Has the bits that it has beside the others: each gradient has a kernel of its own."""
    inputs = inputs_of(size, gpu)
    *_, d_q, d_k, d_v = outputs_and_gradients(mr.attention, inputs, {"causal": True})
    of_all = {"q": d_q, "k": d_k, "v": d_v}[wanted]
    leaf = inputs[wanted].requires_grad_()
    with takes(PASSES):
        out = mr.attention(**inputs, causal=True)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
        (found,) = torch.autograd.grad(out, leaf, grad)
    assert torch.equal(found, of_all)


@pytest.mark.parametrize("size", ("grouped", "wide"))
def test_sinks(size: str, gpu: torch.device) -> None:
    inputs = inputs_of(size, gpu)
    inputs["sinks"] = torch.randn(inputs["q"].shape[1], device=gpu)
    with takes(PASSES):
        check_operator("attention", inputs, {"return_lse": True, "causal": True})


@pytest.mark.parametrize("width", (64, 128, 192))
def test_packed_sequences(width: int, gpu: torch.device) -> None:
    lengths = (300, 1, 64, 0, 517, 128)
    inputs = varlen_inputs(lengths, None, 16, 4, width, width, dtype=torch.float32, device=gpu)
    with takes(PASSES):
        check_operator("attention_varlen", inputs, {"causal": True, "return_lse": True})


@pytest.mark.parametrize("layout", ("transposed", "every_second", "expanded"))
@pytest.mark.parametrize("width", (64, 256))
def test_strides(width: int, layout: str, gpu: torch.device) -> None:
    inputs = attention_inputs(2, 12, 12, 300, 400, width, width, dtype=torch.float32, device=gpu)
    if layout == "transposed":
        laid = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in inputs.items()}
    elif layout == "every_second":
        laid = {name: t.repeat_interleave(2, -1)[..., ::2] for name, t in inputs.items()}
    else:
        inputs["k"] = inputs["k"][:1].repeat(2, 1, 1, 1)
        laid = inputs | {"k": inputs["k"][:1].expand_as(inputs["k"])}
    with takes({FORWARD}):
        assert torch.equal(mr.attention(**laid), mr.attention(**inputs))


@pytest.mark.parametrize(
    "values",
    ([torch.inf], [-torch.inf], [torch.nan], [torch.inf, -torch.inf], [torch.inf, torch.inf]),
    ids=("inf", "-inf", "nan", "both", "twice"),
)
@pytest.mark.parametrize("place", ("q", "k", "v"))
@pytest.mark.parametrize("bias", (None, "full", "keep"))
@pytest.mark.parametrize("size", ("small", "small_wide"))
@pytest.mark.parametrize("option", ("full", "causal", "softcap"))
def test_what_is_not_finite(
    option: str, size: str, bias: str | None, place: str, values: list[float], gpu: torch.device
) -> None:
    """In its place: an element of v that is not finite spoils one column of the output.

    The last element of a wide row that is not finite is in the second block's half.
    Errors are compared with the reference's for the finite numbers that were there. For numbers that are not
    finite the reference switches to elementwise products under a mask, whose error is half as large.
    """
    options = OPTIONS[option]
    finite = biased_inputs(size, bias, torch.float32, gpu) if bias else inputs_of(size, gpu)
    inputs = {name: t.clone() for name, t in finite.items()}
    for line in ((len(finite["q"]) - 1, 2, 100), (0, 1, 60)):
        inputs[place][line][7 : 7 + len(values)] = torch.tensor(values)
        if size == "small_wide":
            inputs[place][line][150] = values[-1]
    with takes(PASSES):
        found = outputs_and_gradients(mr.attention, inputs, options)
    exact = outputs_and_gradients(reference.attention, _in_double(inputs), options)
    exact_of_finite = outputs_and_gradients(reference.attention, _in_double(finite), options)
    base = outputs_and_gradients(reference.attention, finite, options)
    for y, ref, of_torch, ref_of_torch in zip(found, exact, base, exact_of_finite, strict=True):
        there = ref.isfinite()
        assert there.any() and torch.equal(y.isfinite(), there)
        theirs = error_norm(of_torch[there], ref_of_torch[there])
        assert error_norm(y[there], ref[there]) <= BOUND * theirs


@pytest.mark.parametrize("width", (64, 192))
def test_an_early_infinity_where_queries_need_no_gradient(width: int, gpu: torch.device) -> None:
    """Beside more keys than a sum has before it is stored. The pass of the rows adds the bias's gradient. It
    stores no sums, and marks rows by them."""
    inputs = attention_inputs(1, 12, 12, 900, 4500, width, width, dtype=torch.float32, device=gpu)
    inputs["bias"] = torch.randn(1, 12, 900, 4500, device=gpu)
    inputs["k"][0, 5, 60, 7:9] = torch.tensor([torch.inf, -torch.inf])
    with takes(PASSES):
        check_operator("attention", inputs, differentiate=["k", "bias"])


def _in_double(inputs: Inputs) -> Inputs:
    return {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}


@pytest.mark.parametrize("size", ("one_column_head", "long", "wide_long"))
def test_same_bits(size: str, gpu: torch.device) -> None:
    """In every run, and in the deterministic mode."""
    inputs = inputs_of(size, gpu)
    call = Specimen("attention", "attention", attention_inputs, options={"causal": True})
    grads = upstreams(call, inputs)
    with takes(PASSES):
        first = results(call, inputs, grads)
        assert_same_bits(results(call, inputs, grads), first)
    torch.use_deterministic_algorithms(True)
    try:
        with takes({FORWARD, IN_ORDER}):
            assert_same_bits(results(call, inputs, grads), first)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("size", ("far_fewer_columns", "wide_long"))
def test_stages_are_released_after_they_are_read(size: str, gpu: torch.device) -> None:
    """100 calls have the same bits.

    A warp reads scales before TMA overwrites them (block/ring.cuh), and dot products before the other block
    does (block/shared_width_sm90.cuh).
    """
    inputs = inputs_of(size, gpu)
    call = Specimen("attention", "attention", attention_inputs)
    grads = upstreams(call, inputs)
    with takes(PASSES):
        first = results(call, inputs, grads)
        for _ in range(100):
            assert_same_bits(results(call, inputs, grads), first)


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    (
        ({"width": 264, "value_width": 64}, {}, "a width is 264, more than 256"),
        ({"keep": (200, 1)}, {}, "the bias of scores is the same for all columns"),
        ({"m": 1}, {}, "there are few rows"),
    ),
)
def test_other_calls_say_why(
    change: dict[str, Any], options: dict[str, Any], reason: str, gpu: torch.device
) -> None:
    sizes = {"m": 200, "n": 300, "width": 64, "value_width": 64} | change
    inputs = attention_inputs(2, 40, 40, dtype=torch.float32, device=gpu, **sizes)
    explanation = mr.explain("attention", *list(inputs.values())[:3], bias=inputs.get("bias"), **options)
    assert explanation.forward == "attention_forward/cuda/simt/float32"
    assert any(f"the inputs are float32, and {reason}" in text for text in explanation.reasons)


def test_is_explained(gpu: torch.device) -> None:
    inputs = inputs_of("ragged", gpu)
    explanation = mr.explain("attention", *inputs.values())
    assert {explanation.forward, explanation.backward} == PASSES
    assert any("float32 as planes of float16" in reason for reason in explanation.reasons)
    with mr.float32("auto"):
        explanation = mr.explain("attention", *inputs.values())
    assert explanation.backward == "attention_backward/cuda/simt/float32"
    assert any("mr.float32 does not say emulated" in reason for reason in explanation.reasons)
