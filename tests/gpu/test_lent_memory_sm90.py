"""Local gradients that a forward pass on Hopper keeps in the memory of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import HALVES, check_captured
from specimens import Inputs, cross_entropy_inputs, name_of
from test_cross_entropy_sm90 import Kept, check_reduced
from tolerance import check_operator
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import monoidreduce as mr
from monoidreduce import local_gradients, ops

ROWS, CLASSES, WIDTH = 513, 6111, 2056
OF_A_TILE = ROWS * 256 * 2  # bytes of the workspace
LENT_FOR = CLASSES - 1280  # the gradients of 5 tiles are as large as the local gradients of the others
SOME: dict[str, Any] = {"workspace": OF_A_TILE, "logit_scale": 0.8}


def wide(gpu: torch.device, dtype: torch.dtype = torch.bfloat16, ignored: float = 0.3) -> Inputs:
    return cross_entropy_inputs(ROWS, CLASSES, WIDTH, dtype=dtype, device=gpu, ignored=ignored)


def leaves_of(inputs: Inputs) -> list[Tensor]:
    return [inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()]


def close(actual: Tensor, expected: Tensor) -> None:
    steps = 4 * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=steps, atol=steps * float(expected.abs().max()))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many columns each backward pass computed local gradients again."""
    counts: list[int] = []
    multiply = local_gradients.multiply_local_gradients

    def counting(store: object, columns: int, heads: list[local_gradients.Head]) -> None:
        counts.append(heads[0].stop - heads[0].first)
        multiply(store, columns, heads)  # type: ignore[arg-type]

    monkeypatch.setattr(ops, "multiply_local_gradients", counting)
    return counts


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("ignored", (0.0, 0.4, 1.0))
@pytest.mark.parametrize("smoothing", (0.0, 0.1))
def test_against_float64(
    smoothing: float, ignored: float, dtype: torch.dtype, computed: list[int], gpu: torch.device
) -> None:
    options = {**SOME, "reduction": "none", "label_smoothing": smoothing}
    with Kept() as kept:
        check_operator("linear_cross_entropy", wide(gpu, dtype, ignored), options)
    assert (kept.classes, kept.lent) == ([256], [CLASSES])
    assert computed == [CLASSES - LENT_FOR - 256]


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_reduced_losses(reduction: str, dtype: torch.dtype, computed: list[int], gpu: torch.device) -> None:
    check_reduced(wide(gpu, dtype), reduction, OF_A_TILE)
    assert computed == [CLASSES - LENT_FOR - 256, 0]  # in the gradient of x there is room for the rest


@pytest.mark.parametrize("tiles", (5, 6))
def test_with_the_workspace_all_may_be_kept(tiles: int, computed: list[int], gpu: torch.device) -> None:
    options = {"workspace": tiles * OF_A_TILE, "reduction": "none"}
    with Kept() as kept:
        check_operator("linear_cross_entropy", wide(gpu), options)
    assert (kept.classes, kept.lent) == ([256 * tiles], [CLASSES])
    assert computed == [0]


@pytest.mark.parametrize(
    ("changed", "differentiate"),
    (
        ({"workspace": 0}, None),
        ({"workspace": OF_A_TILE - 1}, None),  # the SIMT kernels have no local gradients
        ({"softcap": 5.0}, None),
        ({"return_lse": True}, None),
        ({"workspace": 24 * OF_A_TILE}, None),
        ({}, ["x"]),
        ({}, []),
    ),
    ids=(
        "no_workspace",
        "less_than_a_tile",
        "softcap",
        "lse",
        "all_in_the_workspace",
        "frozen_weight",
        "no_gradients",
    ),
)
def test_nothing_is_lent(
    changed: dict[str, float], differentiate: list[str] | None, gpu: torch.device
) -> None:
    with Kept() as kept:
        check_operator(
            "linear_cross_entropy",
            wide(gpu),
            {**SOME, "reduction": "none", **changed},
            differentiate=differentiate,
        )
    assert kept.lent == [0]


def test_frozen_rows(computed: list[int], gpu: torch.device) -> None:
    options = {**SOME, "reduction": "none"}
    check_operator("linear_cross_entropy", wide(gpu), options, differentiate=["weight"])
    assert computed == [CLASSES - LENT_FOR]


@pytest.mark.parametrize("reduction", ("none", "mean"))
def test_a_second_backward_computes_what_the_first_wrote_over(
    reduction: str, computed: list[int], gpu: torch.device
) -> None:
    inputs = wide(gpu)
    leaves = leaves_of(inputs)
    loss = mr.linear_cross_entropy(**inputs, **SOME, reduction=reduction)
    upstream = torch.randn_like(loss)
    first = torch.autograd.grad(loss, leaves, upstream, retain_graph=True)
    copies = [g.clone() for g in first]
    for _ in range(2):
        for again, expected in zip(
            torch.autograd.grad(loss, leaves, upstream, retain_graph=True), copies, strict=True
        ):
            close(again, expected)
    assert all(torch.equal(g, copy) for g, copy in zip(first, copies, strict=True))
    rest = CLASSES - LENT_FOR - 256 if reduction == "none" else 0
    assert computed == [rest, CLASSES - 256, CLASSES - 256]


@pytest.mark.parametrize("name", ("x", "weight"))
def test_a_gradient_that_is_not_asked_for_in_the_end(name: str, gpu: torch.device) -> None:
    inputs = wide(gpu)
    leaves = leaves_of(inputs)
    both = torch.autograd.grad(mr.linear_cross_entropy(**inputs, **SOME), leaves)
    (alone,) = torch.autograd.grad(mr.linear_cross_entropy(**inputs, **SOME), inputs[name])
    close(alone, both[0 if name == "x" else 1])


def test_memory_of_a_step_is_that_of_gradients(gpu: torch.device) -> None:
    """Its peak lies as high as without the loan, and autograd takes the gradients as they are."""
    inputs = cross_entropy_inputs(4096, 32000, 2048, dtype=torch.bfloat16, device=gpu)
    x, weight = leaves = leaves_of(inputs)
    call = {**inputs, "workspace": 64 << 20}
    mr.linear_cross_entropy(**call).backward()
    x.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = mr.linear_cross_entropy(**call)
    held = torch.cuda.memory_allocated() - before
    gradients = sum(2 * t.numel() for t in leaves)
    assert 0 <= held - (64 << 20) - gradients < 1 << 20
    loss.backward()
    del loss
    assert torch.cuda.memory_allocated() - before - gradients < 1 << 20
    sums_and_copy = 6 * x.numel()  # float32, and rows in their order
    assert torch.cuda.max_memory_allocated() - before < gradients + sums_and_copy + (68 << 20)


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpoint(reentrant: bool, gpu: torch.device) -> None:
    inputs = wide(gpu)
    leaves = leaves_of(inputs)

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return mr.linear_cross_entropy(x, weight, inputs["target"], **SOME)

    expected = torch.autograd.grad(loss(*leaves), leaves)
    with Kept() as kept:
        result = checkpoint(loss, *leaves, use_reentrant=reentrant)  # type: ignore[no-untyped-call]
    result.backward()
    assert kept.lent == [0]  # it works without gradients, or with hooks
    for leaf, gradient in zip(leaves, expected, strict=True):
        close(leaf.grad, gradient)


def test_saved_on_the_cpu(gpu: torch.device) -> None:
    inputs = wide(gpu)
    leaves = leaves_of(inputs)
    expected = torch.autograd.grad(mr.linear_cross_entropy(**inputs, **SOME), leaves)
    with torch.autograd.graph.save_on_cpu(), Kept() as kept:
        loss = mr.linear_cross_entropy(**inputs, **SOME)
    assert kept.lent == [0]
    for got, wanted in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        close(got, wanted)


def test_captured_in_a_graph(gpu: torch.device) -> None:
    inputs = wide(gpu)
    leaves = leaves_of(inputs)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(mr.linear_cross_entropy(**inputs, **SOME), leaves)

    check_captured(step)


def test_transforms_and_traces_lend_nothing(gpu: torch.device) -> None:
    inputs = wide(gpu)
    target = inputs["target"]

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return mr.linear_cross_entropy(x, weight, target, **SOME)

    leaves = leaves_of(inputs)
    expected = torch.autograd.grad(loss(*leaves), leaves)
    with Kept() as kept:
        transformed = torch.func.grad(loss, argnums=(0, 1))(*(t.detach() for t in leaves))
    assert kept.lent == [0]
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    for found in (transformed, compiled):
        for got, wanted in zip(found, expected, strict=True):
            close(got, wanted)


def test_a_backward_that_fails_leaves_no_loan(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = wide(gpu)
    leaves = leaves_of(inputs)
    loss = mr.linear_cross_entropy(**inputs, **SOME)
    with monkeypatch.context() as failing, pytest.raises(RuntimeError, match="on purpose"):

        def fail(*args: object) -> None:
            raise RuntimeError("on purpose")

        failing.setattr(ops, "multiply_local_gradients", fail)
        torch.autograd.grad(loss, leaves, retain_graph=True)
    assert ops._loan.tensors is None
    again = torch.autograd.grad(loss, leaves)  # what was lent may have been written to
    for got, wanted in zip(
        again, torch.autograd.grad(mr.linear_cross_entropy(**inputs, **SOME), leaves), strict=True
    ):
        close(got, wanted)


def test_frozen_rows_need_no_copy(gpu: torch.device) -> None:
    """Where all have one upstream gradient there is the copy in their order, and no other."""
    inputs = cross_entropy_inputs(4096, 32000, 2048, dtype=torch.bfloat16, device=gpu, ignored=0.0)
    weight = inputs["weight"].requires_grad_()
    call = {**inputs, "workspace": 64 << 20}
    torch.autograd.grad(mr.linear_cross_entropy(**call), weight)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(mr.linear_cross_entropy(**call), weight)
    gathered = 2 * inputs["x"].numel()
    assert torch.cuda.max_memory_allocated() - before < 2 * weight.numel() + gathered + (68 << 20)


def test_explained(gpu: torch.device) -> None:
    inputs = wide(gpu)
    for frozen, reduction, lent in (
        ([], "none", LENT_FOR),
        ([], "mean", CLASSES - 256),
        (["x"], "mean", LENT_FOR),
        (["weight"], "mean", 0),
    ):
        for name in ("x", "weight"):
            inputs[name].requires_grad_(name not in frozen)
        kept = 0 if frozen == ["x"] else 256
        also = f", and of {lent} in the memory of gradients" if lent else ""
        explained = mr.explain("linear_cross_entropy", *inputs.values(), **SOME, reduction=reduction)
        assert (
            f"of {kept} of {CLASSES} classes{also}; the backward pass computes those of "
            f"{CLASSES - kept - lent} again" in str(explained)
        )
    plain = mr.explain("linear_cross_entropy", *(t.detach() for t in inputs.values()), **SOME)
    assert f"of {CLASSES - 256} in the memory of gradients" in str(plain)


def test_no_tokens(gpu: torch.device) -> None:
    """As a batch of nothing but padding, once it is packed, has."""
    weight = torch.randn(CLASSES, WIDTH, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    x = weight.new_empty((0, WIDTH)).requires_grad_()
    target = torch.empty(0, dtype=torch.int64, device=gpu)
    loss = mr.linear_cross_entropy(x, weight, target, **SOME)
    dx, dweight = torch.autograd.grad(loss, (x, weight))
    assert loss == 0 and dx.shape == x.shape and not dweight.any()
