"""The determinism contract (docs/numerics.md): forward always the same bits, backward when asked."""

from __future__ import annotations

import pytest
import torch
from calls import assert_same_bits, results, upstreams
from specimens import (
    Specimen,
    attention_inputs,
    cross_entropy_inputs,
    distillation_inputs,
    logsumexp_inputs,
    mlp_inputs,
    name_of,
)

# Many tiles add to every gradient, so that an order that is left to chance shows.
LARGE = (
    Specimen(
        "attention_bias_of_columns",
        "attention",
        attention_inputs,
        {"m": 700, "n": 900, "bias": (1, 4, 1, 900)},
        {"return_lse": True},
    ),
    Specimen(
        "attention_bias_softcap",
        "attention",
        attention_inputs,
        {"m": 300, "n": 500, "bias": (1, 1, 300, 500)},
        {"softcap": 3.0, "causal": True, "return_lse": True},
    ),
    Specimen(
        "cross_entropy",
        "linear_cross_entropy",
        cross_entropy_inputs,
        {"rows": 1500, "classes": 1100, "bias": True},
        {"reduction": "none", "return_lse": True},
    ),
    Specimen(
        "distillation",
        "linear_distillation",
        distillation_inputs,
        {"rows": 700, "classes": 900},
        {"reduction": "none", "teacher_grad": True},
    ),
    Specimen(
        "log_probs",
        "linear_log_probs",
        cross_entropy_inputs,
        {"rows": 1500, "classes": 1100, "bias": True},
        {"entropy": True, "top1": True},
    ),
    Specimen(
        "mlp",
        "mlp",
        mlp_inputs,
        {"rows": 1500, "hidden": 1100, "outputs": 150, "bias1": True, "bias2": True},
    ),
    Specimen("logsumexp", "logsumexp_matmul", logsumexp_inputs, {"rows": 1500, "columns": 1100}),
)
REPEATS = 20


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize("specimen", LARGE, ids=name_of)
def test_same_bits_in_every_run(
    specimen: Specimen, dtype: torch.dtype, gpu: torch.device, deterministic: None
) -> None:
    inputs = specimen.inputs(dtype, gpu)
    grads = upstreams(specimen, inputs)
    first = results(specimen, inputs, grads)
    for _ in range(REPEATS):
        assert_same_bits(results(specimen, inputs, grads), first)


@pytest.mark.parametrize("specimen", LARGE, ids=name_of)
def test_forward_needs_no_asking(specimen: Specimen, gpu: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, gpu)
    grads = upstreams(specimen, inputs)
    first = results(specimen, inputs, grads)
    outputs = {name: t for name, t in first.items() if name.startswith("out")}
    for _ in range(REPEATS):
        again = results(specimen, inputs, grads)
        assert_same_bits({name: again[name] for name in outputs}, outputs)


@pytest.mark.parametrize("specimen", LARGE, ids=name_of)
def test_both_modes_add_the_same_terms(specimen: Specimen, gpu: torch.device) -> None:
    inputs = specimen.inputs(torch.float64, gpu)
    grads = upstreams(specimen, inputs)
    default = results(specimen, inputs, grads)
    torch.use_deterministic_algorithms(True)
    try:
        ordered = results(specimen, inputs, grads)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, expected in ordered.items():
        error = (default[name] - expected).abs().max()
        assert error <= 1e-13 * expected.abs().max(), f"{name}: {error:.3g}"
