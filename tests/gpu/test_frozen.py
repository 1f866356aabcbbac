"""Gradients that nobody needs cost neither a matrix product nor memory, on tensor cores."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from calls import peak, reset_peak, scaled_mlp_inputs
from paths import takes, tensor_core_paths
from specimens import TENSOR_CORE_SPECIMENS, Inputs, Specimen, cross_entropy_inputs, name_of
from tolerance import as_outputs, run
from torch import Tensor

import monoidreduce as mr
from monoidreduce._ops import dlogits, mlp_parts

pytestmark = pytest.mark.tiers("sm80", "sm90")

HEADS = [s for s in TENSOR_CORE_SPECIMENS if s.operator not in ("attention", "mlp")]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of how many columns a backward pass multiplied local gradients, for gradients by rows and by columns.

    It counts products by Hopper's kernels, and elsewhere by torch.
    """
    counts: Counter[str] = Counter()
    of_rows, of_columns = dlogits._rows_product, dlogits._columns_product
    add = dlogits.add_product

    def rows_product(local: Tensor, *others: Any) -> None:
        counts["rows"] += local.shape[1]
        of_rows(local, *others)

    def columns_product(local: Tensor, *others: Any) -> None:
        counts["columns"] += local.shape[1]
        of_columns(local, *others)

    def add_product(total: Tensor, local: Tensor, columns: Tensor, **first: bool) -> None:
        counts["rows"] += local.shape[1]
        add(total, local, columns, **first)

    def write_product(out: Tensor, transposed_local: Tensor, rows: Tensor) -> None:
        counts["columns"] += len(transposed_local)
        out.copy_(transposed_local.float() @ rows.float())

    for function in (rows_product, columns_product, add_product, write_product):
        name = function.__name__
        monkeypatch.setattr(dlogits, name if hasattr(dlogits, name) else f"_{name}", function)
    return counts


def gradients(
    specimen: Specimen, inputs: Inputs, grads: list[torch.Tensor], names: list[str]
) -> dict[str, torch.Tensor]:
    """By these inputs alone; all others are frozen."""
    return run(getattr(mr, specimen.operator), inputs, specimen.options, names, grads)[1]


def upstream_of(specimen: Specimen, inputs: Inputs) -> list[torch.Tensor]:
    with torch.no_grad():
        results = as_outputs(getattr(mr, specimen.operator)(**inputs, **specimen.options))
        return [torch.randn_like(result) for result in results]


@pytest.mark.parametrize("specimen", HEADS, ids=name_of)
def test_products_of_a_head(specimen: Specimen, products: Counter[str], tier: str, gpu: torch.device) -> None:
    """Rows and columns of the student, or of the only head."""
    inputs = specimen.inputs(torch.bfloat16, gpu)
    rows, columns, *_ = names = specimen.differentiable(inputs)[:2]
    grads = upstream_of(specimen, inputs)
    paths = tensor_core_paths(specimen, inputs, tier)
    products.clear()  # of the dry run that told the paths
    with takes(paths):
        of_both = gradients(specimen, inputs, grads, names)
    classes = len(inputs[columns])
    assert products == {"rows": classes, "columns": classes}
    for name, of in ((rows, "rows"), (columns, "columns")):
        products.clear()
        alone = gradients(specimen, inputs, grads, [name])[name]
        assert products == {of: classes}
        # In other parts: how many columns come at a time depends on what gradients there is room in.
        largest = float(of_both[name].abs().max())
        torch.testing.assert_close(alone, of_both[name], rtol=0.01, atol=0.005 * largest)


def test_a_bias_needs_no_product(products: Counter[str], tier: str, gpu: torch.device) -> None:
    (specimen,) = (s for s in HEADS if s.name == "cross_entropy_in_parts")
    inputs = specimen.inputs(torch.bfloat16, gpu)
    paths = tensor_core_paths(specimen, inputs, tier)
    products.clear()  # of the dry run that told the paths
    with takes(paths):
        gradients(specimen, inputs, upstream_of(specimen, inputs), ["bias"])
    assert not products


def test_a_frozen_student_and_a_frozen_teacher(products: Counter[str], tier: str, gpu: torch.device) -> None:
    """A teacher that may have gradients and needs none costs what one does that may not."""
    (specimen,) = (s for s in HEADS if s.name == "distillation_of_both")
    inputs = specimen.inputs(torch.bfloat16, gpu)
    grads = upstream_of(specimen, inputs)
    with takes(tensor_core_paths(specimen, inputs, tier)):
        for names, expected in (
            (["x", "weight"], {"rows": 1, "columns": 1}),
            (["teacher_x", "teacher_weight"], {"rows": 1, "columns": 1}),
            (["teacher_x"], {"rows": 1}),
            (["teacher_weight"], {"columns": 1}),
            (["x", "teacher_weight"], {"rows": 1, "columns": 1}),
            (["x", "weight", "teacher_x", "teacher_weight"], {"rows": 2, "columns": 2}),
        ):
            products.clear()
            gradients(specimen, inputs, grads, names)
            classes = len(inputs["weight"])
            assert products == {of: heads * classes for of, heads in expected.items()}, names


def backward_bytes(inputs: Inputs, name: str, workspace: int) -> int:
    """The peak of a backward pass of cross entropy by one input, beyond what was there before."""
    leaf = inputs[name].requires_grad_()
    options = {"workspace": workspace}
    torch.autograd.grad(mr.linear_cross_entropy(**inputs, **options), leaf)  # cuBLAS's own workspace stays
    loss = mr.linear_cross_entropy(**inputs, **options)
    before = reset_peak()
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert gradient.shape == leaf.shape
    return peak() - before


def test_memory_of_a_frozen_head(tier: str, gpu: torch.device) -> None:
    inputs = cross_entropy_inputs(512, 32000, 1024, dtype=torch.bfloat16, device=gpu)
    x, weight, workspace = inputs["x"], inputs["weight"], 16 << 20
    specimen = Specimen(
        "head", "linear_cross_entropy", cross_entropy_inputs, options={"workspace": workspace}
    )
    with takes(tensor_core_paths(specimen, inputs, tier)):
        used = backward_bytes(inputs, "x", workspace)
    assert used <= workspace + 8 * x.numel() + (1 << 20)  # the copy, the sum in float32 and the gradient
    assert workspace + 8 * x.numel() + (1 << 20) < 2 * weight.numel() / 2


def test_memory_of_frozen_rows(tier: str, gpu: torch.device) -> None:
    inputs = cross_entropy_inputs(16384, 512, 1024, dtype=torch.bfloat16, device=gpu)
    x, weight, workspace = inputs["x"], inputs["weight"], 16384 * 256 * 2
    specimen = Specimen(
        "rows", "linear_cross_entropy", cross_entropy_inputs, options={"workspace": workspace}
    )
    with takes(tensor_core_paths(specimen, inputs, tier)):
        used = backward_bytes(inputs, "weight", workspace)
    # The copy, the gradient, and half of it in float32: torch's products of few elements are.
    assert used <= workspace + 2 * x.numel() + 4 * weight.numel() + (1 << 20)


@pytest.mark.parametrize("name", ("x", "w1", "w2", "bias1", "bias2"))
def test_products_of_an_mlp_in_parts(
    name: str, tier: str, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two parts: a matrix has one product each, a bias none. bias2 needs no backward kernel at all."""
    added: list[tuple[int, ...]] = []
    add = mlp_parts.Total.add

    def counted(self: Any, to: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, first: bool) -> None:
        added.append(self.value.shape)
        add(self, to, a, b, first=first)

    monkeypatch.setattr(mlp_parts.Total, "add", counted)
    inputs = scaled_mlp_inputs((700, 600, 264, 320), torch.bfloat16, gpu, biases=True)
    leaf = inputs[name].requires_grad_()
    paths = {f"mlp_{way}/cuda/{tier}/bfloat16" for way in ("forward", "backward")}
    with (
        mr.workspace(2 * 4 * 192 * 700),
        takes({path for path in paths if "forward" in path or name != "bias2"}),
    ):
        (gradient,) = torch.autograd.grad(mr.mlp(**inputs).sum(), leaf)
    assert gradient.shape == leaf.shape
    assert added == ([] if name.startswith("bias") else [leaf.shape] * 2)
