"""Float32 attention and MLPs through tf32 where torch allows it, and exactly where it does not.

The rule is that of the other tests (tolerance.py), for a base whose products are in tf32 too. Torch takes
some sizes to kernels that multiply exactly, so the base's factors are rounded before.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from attention_calls import OPTIONS, PADDED_SIZES, biased_inputs
from attention_calls import SIZES as ATTENTION_SIZES
from attention_calls import inputs_of as attention_inputs_of
from calls import assert_same_bits, graphed, results, scaled_mlp_inputs, upstreams
from mlp_calls import PADDED_SIZES as PADDED_MLP_SIZES
from mlp_calls import SIZES as MLP_SIZES
from mlp_calls import SPLIT_SIZES, many_rows, split_inputs
from mlp_calls import inputs_of as mlp_inputs_of
from paths import takes
from specimens import Inputs, Specimen, attention_inputs, mlp_inputs, name_of
from tolerance import check_operator, kernels_of
from torch.utils._python_dispatch import TorchDispatchMode

import monoidreduce as mr
from monoidreduce._ops.mlp import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("tf32")


def rounded(x: Any) -> Any:
    """x as a factor of a product in tf32, 11 significant bits."""
    if not isinstance(x, torch.Tensor) or x.dtype != torch.float32:
        return x
    nearest = ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(x.isfinite(), nearest, x)


class RoundedProducts(TorchDispatchMode):
    """Rounds the factors of torch's products of float32 matrices, forward and backward.

    Attention beside numbers that are not finite multiplies pairs instead, of five axes (reference.py).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        of_pairs = func is aten.mul.Tensor and all(isinstance(x, torch.Tensor) and x.dim() == 5 for x in args)
        if of_pairs or func in (aten.mm.default, aten.bmm.default):
            args = tuple(map(rounded, args))
        elif func in (aten.addmm.default, aten.baddbmm.default):
            args = (args[0], *map(rounded, args[1:]))
        return func(*args, **(kwargs or {}))


def check(operator: str, inputs: Inputs, options: dict[str, Any], tier: str = "sm80") -> dict[str, Any]:
    before = mr._C.path_counts()
    with RoundedProducts() if tier == "sm80" else nullcontext():
        found = check_operator(operator, inputs, options)
    ran = {path for path, n in mr._C.path_counts().items() if n != before.get(path, 0)}
    kernel = kernels_of(operator)
    assert ran == {f"{kernel}_{way}/cuda/{tier}/float32" for way in ("forward", "backward")}
    return found


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", ATTENTION_SIZES)
def test_attention(size: str, options: dict[str, Any], gpu: torch.device) -> None:
    """Scaled by a power of two: the base, which multiplies keys by it, then rounds the same numbers."""
    inputs = attention_inputs_of(size, torch.float32, gpu)
    check("attention", inputs, {"return_lse": True, "scale": 0.125, **options})


@pytest.mark.parametrize("option", ("full", "causal", "softcap"))
@pytest.mark.parametrize("kind", ("full", "of_rows_and_columns", "of_columns", "keep", "keep_columns"))
@pytest.mark.parametrize("size", ("narrow", "one_column_head", "ragged", "wide"))
def test_biases(size: str, kind: str, option: str, gpu: torch.device) -> None:
    """Scaled by a power of two, as above."""
    options = {"return_lse": True, "scale": 0.125, **OPTIONS[option]}
    check("attention", biased_inputs(size, kind, torch.float32, gpu), options)


@pytest.mark.parametrize("options", (OPTIONS["full"], OPTIONS["causal"]), ids=("full", "causal"))
@pytest.mark.parametrize("size", PADDED_SIZES)
def test_padded_widths(size: str, options: dict[str, Any], gpu: torch.device) -> None:
    inputs = attention_inputs_of(size, torch.float32, gpu)
    check("attention", inputs, {"return_lse": True, "scale": 0.125, **options})


@pytest.mark.parametrize("size", PADDED_MLP_SIZES)
def test_padded_mlp(size: str, gpu: torch.device) -> None:
    check("mlp", scaled_mlp_inputs(PADDED_MLP_SIZES[size], torch.float32, gpu, biases=True), {})


@pytest.mark.parametrize("biases", (False, True), ids=("plain", "biases"))
@pytest.mark.parametrize("size", MLP_SIZES)
def test_mlp(size: str, biases: bool, gpu: torch.device) -> None:
    check("mlp", mlp_inputs_of(size, torch.float32, gpu, biases), {"activation": "gelu_tanh"})


@pytest.mark.parametrize("size", SPLIT_SIZES)
def test_mlp_of_few_rows(size: str, gpu: torch.device) -> None:
    check("mlp", split_inputs(size, gpu, torch.float32), {"activation": "gelu_tanh"})


@pytest.mark.parametrize("width", (64, 128, 256))
def test_mlp_of_many_rows(width: int, gpu: torch.device) -> None:
    check("mlp", many_rows(width, torch.float32, gpu), {"activation": "gelu_tanh"})


def test_fewer_columns_than_blocks(gpu: torch.device) -> None:
    """Blocks share the rows of a tile of columns, and add to its gradients."""
    attention = attention_inputs(1, 4, 2, 3000, 100, 128, 128, dtype=torch.float32, device=gpu)
    check("attention", attention, {"window": (900, 700), "scale": 0.125, "return_lse": True})
    check("mlp", scaled_mlp_inputs((5000, 72, 128, 120), torch.float32, gpu, biases=True), {})


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, gpu: torch.device) -> None:
    check("mlp", mlp_inputs_of("ragged", torch.float32, gpu, biases=True), {"activation": activation})


GRAPHED = (
    Specimen(
        "attention",
        "attention",
        attention_inputs,
        {"batch": 1, "heads": 36, "kv_heads": 12, "m": 150, "n": 270, "width": 128, "value_width": 128},
        {"causal": True, "return_lse": True, "scale": 0.125},
    ),
    Specimen(
        "mlp",
        "mlp",
        mlp_inputs,
        {"rows": 301, "width": 128, "hidden": 1000, "outputs": 128, "bias1": True, "bias2": True},
    ),
)


@pytest.mark.parametrize("specimen", GRAPHED, ids=name_of)
def test_replays(specimen: Specimen, gpu: torch.device) -> None:
    """Captured on some inputs, forward and backward, as accurate on others."""
    with takes({f"{specimen.operator}_{way}/cuda/sm80/float32" for way in ("forward", "backward")}):
        function = graphed(specimen, specimen.inputs(torch.float32, gpu))
    for _ in range(2):
        inputs = specimen.inputs(torch.float32, gpu)
        with RoundedProducts(), takes(set()):
            check_operator(specimen.operator, inputs, specimen.options, function=function)


def test_views(gpu: torch.device) -> None:
    """Rows that are not dense, or not on 16 bytes, are copied."""
    inputs = attention_inputs_of("grouped", torch.float32, gpu)
    views = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in inputs.items()}
    check("attention", views, {"causal": True})
    padded = {name: torch.nn.functional.pad(t, (0, 3))[..., :-3] for name, t in inputs.items()}
    check("attention", padded, {"causal": True})
    mlp = mlp_inputs_of("ragged", torch.float32, gpu)
    mlp["w1"], mlp["w2"] = mlp["w1"].t().contiguous().t(), mlp["w2"].t().contiguous().t()
    check("mlp", mlp, {"activation": "silu"})


@pytest.mark.parametrize("place", ("q", "k", "v"))
@pytest.mark.parametrize("value", (torch.nan, torch.inf))
def test_non_finite_inputs(value: float, place: str, gpu: torch.device) -> None:
    """They reach the rows that keep them, in value and gradient; a NaN of any bits stays one in tf32."""
    inputs = attention_inputs_of("small", torch.float32, gpu)
    all_ones = torch.tensor(2**31 - 1, dtype=torch.int32, device=gpu).view(torch.float32)
    inputs[place][-1, -1, 100, 7] = all_ones if value != value else value
    found = check("attention", inputs, {"causal": True, "return_lse": True})
    assert not found["out0"][-1, -1].isfinite().all() and found["out0"][-1, -1].isfinite().any()


@pytest.mark.parametrize("operator", ("attention", "mlp"))
def test_is_exact_where_torch_does_not_allow_tf32(operator: str, gpu: torch.device) -> None:
    inputs_of = attention_inputs_of if operator == "attention" else mlp_inputs_of
    inputs = inputs_of("ragged", torch.float32, gpu)
    torch.backends.cuda.matmul.allow_tf32 = False
    check(operator, inputs, {}, tier="simt")
    explanation = mr.explain(operator, *inputs.values())
    assert explanation.forward.endswith("/cuda/simt/float32")
    assert any("the inputs are float32, not multiplied in tf32" in reason for reason in explanation.reasons)


@pytest.mark.parametrize(("precision", "tier"), (("highest", "simt"), ("high", "sm80"), ("medium", "sm80")))
def test_precision_by_its_name(precision: str, tier: str, gpu: torch.device) -> None:
    torch.set_float32_matmul_precision(precision)  # the fixture's setting by another name
    path = mr.explain("attention", *attention_inputs_of("ragged", torch.float32, gpu).values()).forward
    assert path == f"attention_forward/cuda/{tier}/float32"


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9")
@pytest.mark.parametrize(("precision", "tier"), (("ieee", "simt"), ("tf32", "sm80")))
def test_precision_of_products(precision: str, tier: str, gpu: torch.device) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        path = mr.explain("attention", *attention_inputs_of("ragged", torch.float32, gpu).values()).forward
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert path == f"attention_forward/cuda/{tier}/float32"


def test_is_explained(gpu: torch.device) -> None:
    explanation = mr.explain("attention", *attention_inputs_of("ragged", torch.float32, gpu).values())
    assert explanation.forward == "attention_forward/cuda/sm80/float32"
    assert explanation.backward == "attention_backward/cuda/sm80/float32"
    assert any("mma.sync" in reason and "multiplied in tf32" in reason for reason in explanation.reasons)


def test_deterministic_mode_is_honoured(gpu: torch.device, deterministic: None) -> None:
    call = Specimen("attention", "attention", attention_inputs, options={"causal": True})
    inputs = attention_inputs_of("ragged", torch.float32, gpu)
    grads = upstreams(call, inputs)
    assert_same_bits(results(call, inputs, grads), results(call, inputs, grads))
    assert (
        mr.explain("attention", *inputs.values()).backward
        == "attention_backward/cuda/sm80/deterministic/float32"
    )


@pytest.mark.parametrize("dtype", (torch.float64,))
def test_float64_is_never_rounded(dtype: torch.dtype, gpu: torch.device) -> None:
    explanation = mr.explain("attention", *attention_inputs_of("ragged", dtype, gpu).values())
    assert explanation.forward == "attention_forward/cuda/simt/float64"
