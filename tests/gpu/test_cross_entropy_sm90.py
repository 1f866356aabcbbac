"""Linear cross entropy and logsumexp_matmul on Hopper: sizes, options, dtypes, and that its kernels ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import assert_same_bits
from specimens import Inputs, cross_entropy_inputs, name_of, normal
from tolerance import check_operator

import monoidreduce as mr

HALVES = (torch.bfloat16, torch.float16)
SIZES: dict[str, tuple[int, int, int]] = {  # rows, classes, width
    "one_tile": (128, 256, 64),
    "one_row": (1, 3000, 256),
    "one_class": (300, 1, 64),
    "narrow": (257, 67, 8),
    "ragged": (513, 1111, 200),
    "short": (300, 2000, 136),
    "deep": (300, 1500, 2056),
    "many_rows": (5000, 515, 72),
    "many_classes": (130, 70001, 64),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-3, "return_lse": True},
    "softcap": {"softcap": 5.0},
    "all": {"softcap": 8.0, "label_smoothing": 0.2, "z_loss": 1e-3, "logit_scale": 0.7},
}


@pytest.fixture(autouse=True)
def hopper(gpu: torch.device) -> None:
    if torch.cuda.get_device_capability(gpu) != (9, 0):
        pytest.skip("not a Hopper GPU")


def inputs_of(size: str, dtype: torch.dtype, device: torch.device, **options: Any) -> Inputs:
    return cross_entropy_inputs(*SIZES[size], dtype=dtype, device=device, **options)


def ran(before: dict[str, int]) -> set[str]:
    return {path for path, n in mr._C.path_counts().items() if n != before.get(path, 0)}


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_options(
    size: str, options: dict[str, Any], bias: bool, dtype: torch.dtype, gpu: torch.device
) -> None:
    before = mr._C.path_counts()
    check_operator(
        "linear_cross_entropy", inputs_of(size, dtype, gpu, bias=bias), {"reduction": "none", **options}
    )
    assert ran(before) == {
        f"cross_entropy_{way}/cuda/sm90/{name_of(dtype)}" for way in ("forward", "backward")
    }


@pytest.mark.parametrize("tiles", (1, 2, 3))
def test_workspaces(tiles: int, gpu: torch.device) -> None:
    """Five tiles of classes in parts of 1, 2 and 3, the last part with fewer classes."""
    inputs = inputs_of("ragged", torch.bfloat16, gpu, bias=True)
    before = mr._C.path_counts()
    check_operator("linear_cross_entropy", inputs, {"workspace": 513 * 256 * 2 * tiles})
    assert "cross_entropy_backward/cuda/sm90/bfloat16" in ran(before)


def test_a_workspace_that_holds_no_tile(gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    explanation = mr.explain(
        "linear_cross_entropy", inputs["x"], inputs["weight"], inputs["target"], workspace=513 * 256 * 2 - 1
    )
    assert "/simt/" in explanation.backward and "workspace" in str(explanation)
    check_operator("linear_cross_entropy", inputs, {"workspace": 0})


@pytest.mark.parametrize("name", ("x", "weight", "bias"))
def test_some_gradients(name: str, gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu, bias=True)
    check_operator("linear_cross_entropy", inputs, differentiate=[name])


@pytest.mark.parametrize("layout", ("contiguous", "expanded", "sliced"))
def test_upstream_gradients(layout: str, gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    options = {"reduction": "none", "return_lse": True}
    check_operator("linear_cross_entropy", inputs, options, upstream=layout)


@pytest.mark.parametrize("return_lse", (False, True))
def test_garbage_in_ignored_rows(return_lse: bool, gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    ignored = inputs["target"] == -100
    found = []
    for garbage in (0.0, torch.nan, torch.inf):
        x = inputs["x"].masked_fill(ignored[:, None], garbage).requires_grad_()
        weight = inputs["weight"].clone().requires_grad_()
        loss = mr.linear_cross_entropy(x, weight, inputs["target"], return_lse=return_lse)
        (loss[0] if isinstance(loss, tuple) else loss).backward()
        found.append({"x": x.grad, "weight": weight.grad})
    for gradients in found:
        assert_same_bits(gradients, found[0])


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("scale", (1.0, 0.3))
@pytest.mark.parametrize("size", SIZES)
def test_logsumexp_matmul(size: str, scale: float, dtype: torch.dtype, gpu: torch.device) -> None:
    rows, columns, width = SIZES[size]
    inputs = {
        "a": normal(rows, width, dtype=dtype, device=gpu),
        "b": normal(columns, width, dtype=dtype, device=gpu, scale=width**-0.5),
    }
    before = mr._C.path_counts()
    check_operator("logsumexp_matmul", inputs, {"scale": scale})
    assert ran(before) == {f"logsumexp_{way}/cuda/sm90/{name_of(dtype)}" for way in ("forward", "backward")}


@pytest.mark.parametrize("spread", (1.0, 30.0, 1000.0))
def test_large_scores(spread: float, gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    inputs["weight"] *= spread
    check_operator("linear_cross_entropy", inputs, {"reduction": "none"})


def test_layouts(gpu: torch.device) -> None:
    """Padded rows are read in place; transposed ones and rows of odd pitch are copied."""
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    padded = {name: torch.nn.functional.pad(inputs[name], (0, 8))[:, :-8] for name in ("x", "weight")}
    odd = {name: torch.nn.functional.pad(inputs[name], (0, 3))[:, :-3] for name in ("x", "weight")}
    transposed = {name: inputs[name].T.contiguous().T for name in ("x", "weight")}
    for changed in (padded, odd, transposed):
        check_operator("linear_cross_entropy", {**inputs, **changed})


@pytest.mark.parametrize("place", ("x", "weight"))
def test_nan_inputs(place: str, gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu, ignored=0.0)
    inputs[place][150, 7] = torch.nan
    check_operator("linear_cross_entropy", inputs, {"reduction": "none"})


def test_targets_out_of_range(gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    inputs["target"][:3] = torch.tensor([1111, -1, 2**32 + 5])
    loss = mr.linear_cross_entropy(**inputs, reduction="none")
    assert loss[:3].isnan().all() and loss[3:].isfinite().all()


def test_the_same_bits_every_time(gpu: torch.device) -> None:
    inputs = inputs_of("many_rows", torch.bfloat16, gpu)
    first = check_operator("linear_cross_entropy", inputs, upstream=[torch.tensor(2.0, device=gpu)])
    for _ in range(3):
        again = check_operator("linear_cross_entropy", inputs, upstream=[torch.tensor(2.0, device=gpu)])
        assert_same_bits(again, first)


def test_captured_in_a_graph(gpu: torch.device) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    expected = mr.linear_cross_entropy(**inputs, reduction="none")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mr.linear_cross_entropy(**inputs, reduction="none")
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)


def test_no_logits_are_stored(gpu: torch.device) -> None:
    inputs = cross_entropy_inputs(4096, 32000, 256, dtype=torch.bfloat16, device=gpu)
    x, weight = inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()
    mr.linear_cross_entropy(**inputs).backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = mr.linear_cross_entropy(**inputs, workspace=16 << 20)
    assert torch.cuda.max_memory_allocated() - before < 8 << 20
    torch.autograd.grad(loss, (x, weight))
    held = 16 * x.numel() + 2 * weight.numel()  # the copy, the sum and the gradient of x, that of the weight
    assert torch.cuda.max_memory_allocated() - before < held + (20 << 20)


def test_tier_can_be_named(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of("ragged", torch.bfloat16, gpu)
    tensors = (inputs["x"], inputs["weight"], inputs["target"])
    assert "/sm90/" in mr.explain("linear_cross_entropy", *tensors).forward
    monkeypatch.setenv("MONOIDREDUCE_CUDA_TIER", "simt")
    explanation = mr.explain("linear_cross_entropy", *tensors)
    assert "/simt/" in explanation.forward and "MONOIDREDUCE_CUDA_TIER=simt" in str(explanation)
    check_operator("linear_cross_entropy", inputs)
    assert "/simt/" in mr.explain("logsumexp_matmul", *tensors[:2]).forward
