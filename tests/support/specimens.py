"""Inputs of the operator tests: random and exact values, memory layouts, small calls of every operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Inputs = dict[str, Tensor]


def normal(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, dtype=torch.float64, device=device)).to(dtype)


def integers(
    *shape: int, dtype: torch.dtype, device: torch.device, density: float = 0.3, bound: int = 2
) -> Tensor:
    """Integers in [-bound, bound], most of them 0. Products, and sums of a few, are exact in every dtype."""
    values = torch.randint(-bound, bound + 1, shape, device=device)
    return (values * (torch.rand(shape, device=device) < density)).to(dtype)


def _unit_products(width: int, draw: Callable[..., Tensor]) -> dict[str, float]:
    """The scale option that makes products of two normal vectors of `width` elements of unit size."""
    return {"scale": max(width, 1) ** -0.5} if draw is normal else {}


# Memory layouts. Memory between and around the elements is NaN.


def _transposed(t: Tensor) -> Tensor:
    """The last two axes swapped in memory."""
    return t.mT.contiguous().mT if t.dim() > 1 else _gaps(t)


def _gaps(t: Tensor) -> Tensor:
    """Every axis is a slice of a longer one; the last has step 2."""
    shape = [size + 3 for size in t.shape[:-1]] + [2 * t.shape[-1] + 1]
    buffer = torch.full(shape, torch.nan if t.is_floating_point() else 1, dtype=t.dtype, device=t.device)
    inner = tuple(slice(1, 1 + size) for size in t.shape[:-1])
    view = buffer[(*inner, slice(1, None, 2))]
    return view.copy_(t)


def _offset(elements: int) -> Callable[[Tensor], Tensor]:
    """Contiguous, but starting `elements` elements after an aligned address."""

    def place(t: Tensor) -> Tensor:
        buffer = torch.full(
            (t.numel() + 2 * elements,),
            torch.nan if t.is_floating_point() else 1,
            dtype=t.dtype,
            device=t.device,
        )
        return buffer[elements : elements + t.numel()].view(t.shape).copy_(t)

    return place


def _padded_rows(t: Tensor) -> Tensor:
    """The row stride exceeds the row length by an odd number of elements."""
    shape = [*t.shape[:-1], t.shape[-1] + 5]
    buffer = torch.full(shape, torch.nan if t.is_floating_point() else 1, dtype=t.dtype, device=t.device)
    return buffer[..., : t.shape[-1]].copy_(t)


def _outer_axes_permuted(t: Tensor) -> Tensor:
    """The first axis is innermost in memory."""
    return t.movedim(0, -1).contiguous().movedim(-1, 0) if t.dim() > 1 else _gaps(t)


def _junk_strides(t: Tensor) -> Tensor:
    """Arbitrary strides on axes of size 1. torch allows them, and makes such tensors itself."""
    t = t.contiguous()
    strides = [99990001 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)]
    return t.as_strided(t.shape, strides)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": _transposed,
    "gaps": _gaps,
    "offset1": _offset(1),
    "offset3": _offset(3),
    "padded_rows": _padded_rows,
    "outer_permuted": _outer_axes_permuted,
    "junk_strides": _junk_strides,
}


# Small calls


def attention_inputs(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    m: int = 37,
    n: int = 53,
    width: int = 17,
    value_width: int = 19,
    *,
    dtype: torch.dtype,
    device: torch.device,
    bias: Sequence[int] | None = None,
    bias_dtype: torch.dtype | None = None,
    keep: Sequence[int] | None = None,
    draw: Callable[..., Tensor] = normal,
) -> Inputs:
    """q, k, v and a bias, if any: floating of shape `bias`, or bool of shape `keep`, three quarters True."""
    place: Any = {"dtype": dtype, "device": device}
    inputs = {
        "q": draw(batch, heads, m, width, **place),
        "k": draw(batch, kv_heads, n, width, **place),
        "v": draw(batch, kv_heads, n, value_width, **place),
    }
    if bias is not None:
        inputs["bias"] = draw(*bias, dtype=bias_dtype or dtype, device=device)
    if keep is not None:
        inputs["bias"] = torch.rand(tuple(keep), device=device) < 0.75
    return inputs


def starts(lengths: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """Starts of sequences of these lengths, and the end of the last."""
    return torch.tensor(
        [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype, device=device
    )


def varlen_inputs(
    queries: Sequence[int] = (5, 0, 21, 3),
    keys: Sequence[int] | None = (9, 4, 17, 0),
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 17,
    value_width: int = 19,
    behind: int = 2,
    *,
    dtype: torch.dtype,
    device: torch.device,
    draw: Callable[..., Tensor] = normal,
) -> Inputs:
    """q, k and v of packed sequences, followed by `behind` rows of no sequence.

    keys: lengths of the sequences of keys; None, those of queries.
    """
    place: Any = {"dtype": dtype, "device": device}
    of_keys = sum(queries if keys is None else keys) + behind
    inputs = {
        "q": draw(sum(queries) + behind, heads, width, **place),
        "k": draw(of_keys, kv_heads, width, **place),
        "v": draw(of_keys, kv_heads, value_width, **place),
        "cu_seqlens_q": starts(queries, device),
    }
    return inputs if keys is None else inputs | {"cu_seqlens_k": starts(keys, device)}


def _raise_logits(x: Tensor, weight: Tensor, level: float) -> None:
    """Add a constant to all logits x @ weight^T, in place, through the last feature, if there is one."""
    if level and x.shape[-1]:
        x[..., -1], weight[:, -1] = level, 1


def cross_entropy_inputs(
    rows: int | tuple[int, ...] = 257,
    classes: int = 67,
    width: int = 19,
    *,
    dtype: torch.dtype,
    device: torch.device,
    bias: bool = False,
    ignored: float = 0.2,
    ignore_index: int = -100,
    level: float = 0,
    draw: Callable[..., Tensor] = normal,
) -> Inputs:
    """x, weight, target and bias.

    Logits are of unit size around `level`; target logits of every second row are about 8 above it.
    """
    place: Any = {"dtype": dtype, "device": device}
    shape = (rows,) if isinstance(rows, int) else rows
    target = torch.randint(0, max(classes, 1), shape, device=device)
    x, weight = draw(*shape, width, **place), draw(classes, width, **place, **_unit_products(width, draw))
    if classes > 1 and draw is normal:
        peaked = torch.rand(shape, device=device) < 0.5
        x = torch.where(peaked[..., None], 8 * weight[target], x)
    _raise_logits(x, weight, level)
    target[torch.rand(shape, device=device) < (ignored if classes else 1.0)] = ignore_index
    inputs = {"x": x, "weight": weight, "target": target}
    if bias:
        inputs["bias"] = draw(classes, **place)
    return inputs


def class_weights(classes: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Class weights [classes] in [0, 2); some are 0."""
    weights = 2 * torch.rand(classes, device=device)
    weights[3::11] = 0
    return weights.to(dtype)


def distillation_inputs(
    rows: int | tuple[int, ...] = 257,
    classes: int = 67,
    width: int = 19,
    teacher_width: int = 23,
    *,
    dtype: torch.dtype,
    device: torch.device,
    mask: bool = False,
    level: float = 0,
    teacher_level: float = 0,
    draw: Callable[..., Tensor] = normal,
) -> Inputs:
    """x, weight, teacher_x, teacher_weight and optionally a mask, three quarters True.

    Logits are of unit size around `level` and `teacher_level`.
    """
    place: Any = {"dtype": dtype, "device": device}
    shape = (rows,) if isinstance(rows, int) else rows
    inputs = {
        "x": draw(*shape, width, **place),
        "weight": draw(classes, width, **place, **_unit_products(width, draw)),
        "teacher_x": draw(*shape, teacher_width, **place),
        "teacher_weight": draw(classes, teacher_width, **place, **_unit_products(teacher_width, draw)),
    }
    _raise_logits(inputs["x"], inputs["weight"], level)
    _raise_logits(inputs["teacher_x"], inputs["teacher_weight"], teacher_level)
    if mask:
        inputs["mask"] = torch.rand(shape, device=device) < 0.75
    return inputs


def mlp_inputs(
    rows: int | tuple[int, ...] = 257,
    width: int = 19,
    hidden: int = 67,
    outputs: int = 23,
    *,
    dtype: torch.dtype,
    device: torch.device,
    bias1: bool = False,
    bias2: bool = False,
    gate: bool = False,
    gate_bias: bool = False,
    draw: Callable[..., Tensor] = normal,
) -> Inputs:
    """x, w1, w2, biases and a gate. Hidden values are of unit size, where activations are not linear."""
    place: Any = {"dtype": dtype, "device": device}
    shape = (rows,) if isinstance(rows, int) else rows
    inputs = {
        "x": draw(*shape, width, **place),
        "w1": draw(hidden, width, **place, **_unit_products(width, draw)),
        "w2": draw(outputs, hidden, **place),
    }
    if bias1:
        inputs["bias1"] = draw(hidden, **place)
    if bias2:
        inputs["bias2"] = draw(outputs, **place)
    if gate:
        inputs["gate"] = draw(hidden, width, **place, **_unit_products(width, draw))
    if gate_bias:
        inputs["gate_bias"] = draw(hidden, **place)
    return inputs


def logsumexp_inputs(
    rows: int | tuple[int, ...] = 257,
    columns: int = 67,
    width: int = 19,
    *,
    dtype: torch.dtype,
    device: torch.device,
    draw: Callable[..., Tensor] = normal,
) -> Inputs:
    shape = (rows,) if isinstance(rows, int) else rows
    return {
        "a": draw(*shape, width, dtype=dtype, device=device),
        "b": draw(columns, width, dtype=dtype, device=device, **_unit_products(width, draw)),
    }


def merge_inputs(
    batch: int = 2,
    heads: int = 3,
    m: int = 65,
    value_width: int = 11,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Inputs:
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "out_a": normal(batch, heads, m, value_width, dtype=dtype, device=device),
        "lse_a": normal(batch, heads, m, dtype=statistics, device=device, scale=3.0),
        "out_b": normal(batch, heads, m, value_width, dtype=dtype, device=device),
        "lse_b": normal(batch, heads, m, dtype=statistics, device=device, scale=3.0),
    }


@dataclass(frozen=True)
class Specimen:
    """A small call of an operator that covers one way of using it."""

    name: str
    operator: str
    make: Callable[..., Inputs]
    arguments: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self, dtype: torch.dtype, device: torch.device) -> Inputs:
        return self.make(dtype=dtype, device=device, **self.arguments)

    def differentiable(self, inputs: Inputs) -> list[str]:
        """The names of inputs that get gradients."""
        frozen = self.operator == "linear_distillation" and not self.options.get("teacher_grad")
        floating = [name for name, t in inputs.items() if t.is_floating_point()]
        return [name for name in floating if not (frozen and name.startswith("teacher"))]


WITH_ALL = {"entropy": True, "top1": True}  # all optional results of linear_log_probs
SPECIMENS = (
    Specimen("attention", "attention", attention_inputs, options={"return_lse": True}),
    Specimen("attention_causal", "attention", attention_inputs, options={"causal": True, "return_lse": True}),
    Specimen(
        "attention_bias_window_softcap",
        "attention",
        attention_inputs,
        {"bias": (1, 4, 1, 53)},
        {"window": (20, 9), "softcap": 2.0, "scale": 0.5, "return_lse": True},
    ),
    Specimen("attention_bool", "attention", attention_inputs, {"keep": (2, 1, 37, 53)}, {"return_lse": True}),
    Specimen(
        "attention_varlen",
        "attention_varlen",
        varlen_inputs,
        {"queries": (5, 0, 21, 3), "keys": (9, 4, 25, 7), "behind": 0},  # a key for each query
        {"causal": True, "return_lse": True},
    ),
    Specimen("merge_attention", "merge_attention", merge_inputs),
    Specimen("cross_entropy", "linear_cross_entropy", cross_entropy_inputs, options={"reduction": "none"}),
    Specimen(
        "cross_entropy_everything",
        "linear_cross_entropy",
        cross_entropy_inputs,
        {"bias": True},
        {
            "reduction": "none",
            "label_smoothing": 0.1,
            "z_loss": 0.01,
            "softcap": 5.0,
            "logit_scale": 0.7,
            "return_lse": True,
        },
    ),
    Specimen(
        "distillation",
        "linear_distillation",
        distillation_inputs,
        options={"reduction": "none", "teacher_grad": True},
    ),
    Specimen(
        "distillation_reverse_masked",
        "linear_distillation",
        distillation_inputs,
        {"mask": True},
        {"loss": "reverse_kl", "temperature": 2.0, "reduction": "none", "teacher_grad": True},
    ),
    Specimen("log_probs", "linear_log_probs", cross_entropy_inputs, options=WITH_ALL),
    Specimen(
        "log_probs_everything",
        "linear_log_probs",
        cross_entropy_inputs,
        {"bias": True},
        {"temperature": 0.6, "softcap": 5.0, "logit_scale": 0.7, **WITH_ALL},
    ),
    Specimen("mlp", "mlp", mlp_inputs, {"bias1": True, "bias2": True}),
    Specimen("mlp_relu2", "mlp", mlp_inputs, options={"activation": "relu2"}),
    Specimen("mlp_gated", "mlp", mlp_inputs, {"gate": True}, {"activation": "silu"}),
    Specimen(
        "mlp_gated_biases",
        "mlp",
        mlp_inputs,
        {"gate": True, "gate_bias": True, "bias1": True, "bias2": True},
        {"activation": "gelu"},
    ),
    Specimen("logsumexp", "logsumexp_matmul", logsumexp_inputs, options={"scale": 0.5}),
)
# One call of each operator, for tests over all operators and dtypes.
ONE_EACH = tuple({specimen.operator: specimen for specimen in reversed(SPECIMENS)}.values())


# Calls that run on tensor cores in 16-bit dtypes, forward and backward, each in a different way. Kernels read
# their operands in place, without padded copies.
_GROUPED = {"batch": 1, "heads": 36, "kv_heads": 12, "m": 150, "n": 272, "width": 128, "value_width": 128}
_HEAD = {"rows": 513, "classes": 1111, "width": 200}
TENSOR_CORE_SPECIMENS = (
    Specimen(
        "attention_causal_grouped",
        "attention",
        attention_inputs,
        _GROUPED,
        {"causal": True, "return_lse": True},
    ),
    Specimen(
        "attention_bias",
        "attention",
        attention_inputs,
        {**_GROUPED, "bias": (1, 36, 150, 272)},
        {"return_lse": True},
    ),
    Specimen(
        "attention_few_rows",
        "attention",
        attention_inputs,
        {"batch": 2, "heads": 8, "kv_heads": 2, "m": 5, "n": 4099, "width": 128, "value_width": 128},
        {"causal": True},
    ),
    Specimen("mlp_64", "mlp", mlp_inputs, {"rows": 301, "width": 64, "hidden": 1000, "outputs": 64}),
    Specimen(
        "mlp_128",
        "mlp",
        mlp_inputs,
        {"rows": 301, "width": 128, "hidden": 1000, "outputs": 128, "bias1": True, "bias2": True},
    ),
    Specimen(
        "mlp_256",
        "mlp",
        mlp_inputs,
        {"rows": 301, "width": 256, "hidden": 1000, "outputs": 256},
        {"activation": "silu"},
    ),
    Specimen(
        "mlp_in_parts",
        "mlp",
        mlp_inputs,
        {"rows": 301, "width": 520, "hidden": 1000, "outputs": 392, "bias1": True},
    ),
    Specimen(
        "cross_entropy_kept",
        "linear_cross_entropy",
        cross_entropy_inputs,
        _HEAD,
        {"reduction": "none", "workspace": 128 << 20},
    ),
    Specimen(
        "cross_entropy_in_parts",
        "linear_cross_entropy",
        cross_entropy_inputs,
        {**_HEAD, "bias": True},
        {"label_smoothing": 0.1, "workspace": 2 * 513 * 256 * 2},  # two tiles of classes
    ),
    Specimen(
        "distillation_kept",
        "linear_distillation",
        distillation_inputs,
        {**_HEAD, "teacher_width": 328, "mask": True},
        {"reduction": "none", "workspace": 128 << 20},
    ),
    Specimen(
        "distillation_of_both",
        "linear_distillation",
        distillation_inputs,
        {**_HEAD, "teacher_width": 328},
        {"loss": "reverse_kl", "temperature": 2.0, "reduction": "none", "teacher_grad": True},
    ),
    Specimen("log_probs", "linear_log_probs", cross_entropy_inputs, _HEAD, WITH_ALL),
    Specimen(
        "log_probs_in_parts",
        "linear_log_probs",
        cross_entropy_inputs,
        _HEAD,
        {"temperature": 1.7, "workspace": 2 * 513 * 256 * 2, **WITH_ALL},  # two tiles of classes
    ),
    Specimen(
        "logsumexp",
        "logsumexp_matmul",
        logsumexp_inputs,
        {"rows": 513, "columns": 1111, "width": 200},
        {"scale": 0.5},
    ),
)


def name_of(value: Any) -> str | None:
    """The id of a test's parameter."""
    if isinstance(value, Specimen):
        return value.name
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None
