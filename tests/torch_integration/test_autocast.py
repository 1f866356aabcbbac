"""Under autocast, operands are cast as torch casts its own operators' operands; losses stay float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from specimens import ONE_EACH, Specimen, name_of
from tolerance import as_outputs
from torch import Tensor

import monoidreduce as mr

WITH_OPS = [specimen for specimen in ONE_EACH if specimen.operator != "merge_attention"]
WITH_MASTERS = ("linear_cross_entropy", "linear_log_probs", "linear_distillation")
STATISTICS_ONLY = ("linear_cross_entropy", "linear_distillation", "logsumexp_matmul")


def outputs_of(specimen: Specimen, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    result = getattr(mr, specimen.operator)(**inputs, **specimen.options)
    return as_outputs(result)


def cast(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in inputs.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("specimen", WITH_OPS, ids=name_of)
def test_equals_a_call_on_cast_operands(specimen: Specimen, dtype: torch.dtype, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    leaves = {n: t.requires_grad_() for n, t in inputs.items() if t.is_floating_point()}
    expected = outputs_of(specimen, cast(inputs, dtype))
    with torch.autocast(device.type, dtype):
        outputs = outputs_of(specimen, inputs)
    torch.manual_seed(0)
    upstream = [torch.randn_like(output) for output in outputs]
    for ours, theirs in zip(outputs, expected, strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    gradients = torch.autograd.grad(outputs, list(leaves.values()), upstream)
    rounded = torch.autograd.grad(expected, list(leaves.values()), upstream)
    for name, ours, theirs in zip(leaves, gradients, rounded, strict=True):
        assert ours.dtype == torch.float32
        if name == "weight" and specimen.operator in WITH_MASTERS:  # a sum that is not rounded
            assert not torch.equal(ours, ours.to(dtype).float())
            ours = ours.to(dtype).float()
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("specimen", WITH_OPS, ids=name_of)
def test_mixed_operands_are_fine(specimen: Specimen, device: torch.device) -> None:
    """float32 master weights and half activations, which would raise outside autocast."""
    inputs = specimen.inputs(torch.float32, device)
    first = next(iter(inputs))
    mixed = {**inputs, first: inputs[first].bfloat16()}
    with pytest.raises(TypeError, match=r"expected torch\.bfloat16"):
        outputs_of(specimen, mixed)
    with torch.autocast(device.type, torch.bfloat16):
        outputs = outputs_of(specimen, mixed)
    for ours, theirs in zip(outputs, outputs_of(specimen, cast(inputs, torch.bfloat16)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("specimen", WITH_OPS, ids=name_of)
def test_float64_is_not_cast(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float64, device)
    with torch.autocast(device.type, torch.bfloat16):
        outputs = outputs_of(specimen, inputs)
    for ours, theirs in zip(outputs, outputs_of(specimen, inputs), strict=True):
        assert ours.dtype == torch.float64 and torch.equal(ours, theirs)


def test_dtypes_are_those_of_torch(device: torch.device) -> None:
    q = torch.randn(1, 2, 5, 8, device=device)
    x, w1, w2 = (torch.randn(s, device=device) for s in ((7, 8), (16, 8), (8, 16)))
    target = torch.zeros(7, dtype=torch.int64, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        assert mr.attention(q, q, q).dtype == F.scaled_dot_product_attention(q, q, q).dtype
        assert mr.mlp(x, w1, w2).dtype == F.linear(F.relu(F.linear(x, w1)), w2).dtype
        assert mr.linear_cross_entropy(x, w1, target).dtype == torch.float32
        assert mr.attention(q, q, q, bias=torch.zeros(5, 5, device=device)).dtype == torch.bfloat16
        assert mr.attention(q, q, q, bias=torch.ones(5, 5, device=device).bool()).dtype == torch.bfloat16


def test_a_disabled_region_inside_is_respected(device: torch.device) -> None:
    x, w1, w2 = (torch.randn(s, device=device) for s in ((7, 8), (16, 8), (8, 16)))
    with torch.autocast(device.type, torch.bfloat16), torch.autocast(device.type, enabled=False):
        assert mr.mlp(x, w1, w2).dtype == torch.float32


def test_weights_receive_float32_gradients_in_training(device: torch.device) -> None:
    module = mr.nn.MLP(8, 24).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        loss = module(torch.randn(5, 8, device=device)).float().square().mean()
    loss.backward()
    for parameter in module.parameters():
        assert parameter.grad.dtype == torch.float32 and parameter.grad.abs().sum() > 0
