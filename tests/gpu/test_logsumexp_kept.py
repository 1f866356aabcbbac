"""logsumexp_matmul on Hopper if its forward pass saves the local gradients of the first columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import HALVES, Kept, assert_same_bits, check_captured, peak, requested, reset_peak
from paths import takes
from specimens import Inputs, name_of, normal
from tolerance import check_operator

import monoidreduce as mr
from monoidreduce._ops import slices

pytestmark = pytest.mark.tiers("sm90")

SIZES = {  # rows, columns, width
    "one_tile": (128, 256, 136),
    "one_row": (1, 3000, 256),
    "one_column": (300, 1, 192),
    "ragged": (513, 1111, 200),
    "short": (300, 2000, 136),
    "deep": (300, 1500, 2056),
    "odd_width": (300, 1111, 141),
    "many_rows": (5000, 515, 136),
    "many_columns": (130, 70001, 64),
}
EVERYTHING = 128 << 20  # bytes that hold the local gradients of every call here
TILE = 513 * 256 * 2  # those of a tile of columns of the size "ragged"


@pytest.fixture(autouse=True)
def small_calls_keep_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "_NARROWEST_TO_SAVE", 0)
    monkeypatch.setattr(slices, "_FEWEST_TERMS_TO_SAVE", 0)


def inputs_of(rows: int, columns: int, width: int, dtype: torch.dtype, gpu: torch.device) -> Inputs:
    return {
        "a": normal(rows, width, dtype=dtype, device=gpu),
        "b": normal(columns, width, dtype=dtype, device=gpu, scale=width**-0.5),
    }


def paths(dtype: torch.dtype) -> set[str]:
    return {f"logsumexp_{way}/cuda/sm90/{name_of(dtype)}" for way in ("forward", "backward")}


def check(inputs: Inputs, workspace: int, options: dict[str, Any] | None = None, **more: Any) -> list[int]:
    """For how many columns the forward pass kept local gradients, rounded up to 8."""
    with mr.workspace(workspace), Kept() as kept:
        check_operator("logsumexp_matmul", inputs, options or {}, **more)
    return kept.classes


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("scale", (1.0, 0.3))
@pytest.mark.parametrize("size", SIZES)
def test_all(size: str, scale: float, dtype: torch.dtype, gpu: torch.device) -> None:
    columns = SIZES[size][1]
    with takes(paths(dtype)):
        kept = check(inputs_of(*SIZES[size], dtype, gpu), EVERYTHING, {"scale": scale})
    assert kept == [-(-columns // 8) * 8]


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("tiles", (2, 3, 4, 5))
def test_some(tiles: int, dtype: torch.dtype, gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five tiles of columns all are kept, or one less than the workspace holds."""
    monkeypatch.setattr(slices, "_BYTES_TO_RECOMPUTE_IN", 0)
    inputs = inputs_of(*SIZES["ragged"], dtype, gpu)
    wanted: tuple[list[str], ...] = (["a", "b"], ["a"], ["b"], [])
    kept = [check(inputs, tiles * TILE, {"scale": 0.8}, differentiate=names) for names in wanted]
    some = [1112 if tiles == 5 else 256 * (tiles - 1)]
    assert kept == [some, some, some, [0]]


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("tiles", (1, 3))
def test_some_beside_wide_rows(tiles: int, dtype: torch.dtype, gpu: torch.device) -> None:
    """The whole workspace holds kept local gradients: the gradient of a has room for the others."""
    inputs = inputs_of(513, 6111, 2056, dtype, gpu)
    kept = [check(inputs, tiles * TILE, differentiate=names) for names in (["a", "b"], ["a"], ["b"])]
    assert kept == [[256 * tiles], [256 * tiles], [0]]  # without a gradient of a there is no such room


@pytest.mark.parametrize("layout", ("strided", "sliced", "expanded", "contiguous"))
@pytest.mark.parametrize("workspace", (3 * TILE, EVERYTHING), ids=("some", "all"))
def test_upstream_gradients(workspace: int, layout: str, gpu: torch.device) -> None:
    inputs = inputs_of(513, 3000, 2056, torch.float16, gpu)
    kept = check(inputs, workspace, upstream=layout)
    assert kept == [768 if workspace < EVERYTHING else 3000]


def test_upstream_gradients_that_float16_cannot_hold(gpu: torch.device) -> None:
    """They multiply rows of a, with a power of two taken out. The gradients themselves are below 65504."""
    inputs = inputs_of(*SIZES["ragged"], torch.float16, gpu)
    inputs["b"] *= 1e-3
    grad = 1e6 * torch.randn(513, device=gpu)
    leaves = [t.requires_grad_() for t in inputs.values()]
    with mr.workspace(EVERYTHING):
        found = torch.autograd.grad(mr.logsumexp_matmul(*leaves), leaves, grad)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = torch.autograd.grad((wide[0] @ wide[1].mT).logsumexp(1), wide, grad.double())
    for got, expected in zip(found, exact, strict=True):
        assert (got.double() - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("workspace", (2 * TILE, EVERYTHING), ids=("some", "all"))
def test_layouts(workspace: int, dtype: torch.dtype, gpu: torch.device) -> None:
    """Padded rows are read in place, and a transposed b; odd ones are copied."""
    rows, columns, width = 513, 1112, 2056
    inputs = inputs_of(rows, columns, width, dtype, gpu)
    padded = {name: torch.nn.functional.pad(t, (0, 8))[:, :-8] for name, t in inputs.items()}
    odd = {name: torch.nn.functional.pad(t, (0, 3))[:, :-3] for name, t in inputs.items()}
    transposed = inputs | {"b": inputs["b"].T.contiguous().T}
    some = 1112 if workspace == EVERYTHING else 512
    with takes(paths(dtype)):
        for changed in (padded, odd, transposed):
            assert check(changed, workspace) == [some]


@pytest.mark.parametrize("value", (torch.nan, torch.inf, -torch.inf))
@pytest.mark.parametrize("place", ("a", "b"))
def test_non_finite_inputs(place: str, value: float, gpu: torch.device) -> None:
    inputs = inputs_of(*SIZES["ragged"], torch.bfloat16, gpu)
    inputs[place][150, 7] = value
    assert check(inputs, EVERYTHING) == [1112]


@pytest.mark.parametrize("spread", (30.0, 1000.0))
def test_large_scores(spread: float, gpu: torch.device) -> None:
    inputs = inputs_of(*SIZES["ragged"], torch.bfloat16, gpu)
    assert check(inputs, EVERYTHING, {"scale": spread}) == [1112]


@pytest.mark.parametrize("workspace", (3 * TILE, EVERYTHING), ids=("some", "all"))
def test_they_serve_twice(workspace: int, gpu: torch.device) -> None:
    leaves = [t.requires_grad_() for t in inputs_of(513, 6111, 2056, torch.bfloat16, gpu).values()]
    with mr.workspace(workspace), Kept() as kept:
        lse = mr.logsumexp_matmul(*leaves)
    assert kept.classes == [768 if workspace < EVERYTHING else 6112]
    upstream = torch.randn_like(lse)
    first, again, doubled = (
        torch.autograd.grad(lse, leaves, g, retain_graph=True) for g in (upstream, upstream, 2 * upstream)
    )
    assert_same_bits(dict(enumerate(again)), dict(enumerate(first)))
    for got, expected in zip(doubled, first, strict=True):
        torch.testing.assert_close(got, 2 * expected, rtol=0, atol=0)
    for leaf, expected in zip(leaves, first, strict=True):
        (alone,) = torch.autograd.grad(lse, leaf, upstream, retain_graph=True)
        torch.testing.assert_close(alone, expected, rtol=0.01, atol=0.01 * float(expected.abs().max()))


@pytest.mark.parametrize("workspace", (2 * TILE, EVERYTHING), ids=("some", "all"))
def test_deterministic_mode(workspace: int, gpu: torch.device, deterministic: None) -> None:
    leaves = [t.requires_grad_() for t in inputs_of(513, 3000, 2056, torch.bfloat16, gpu).values()]
    upstream, found = torch.randn(513, device=gpu), []
    for _ in range(3):
        with mr.workspace(workspace), Kept() as kept:
            lse = mr.logsumexp_matmul(*leaves)
        assert kept.classes == [512 if workspace < EVERYTHING else 3000]
        found.append(dict(enumerate(torch.autograd.grad(lse, leaves, upstream))))
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])


def test_captured_in_a_graph(gpu: torch.device) -> None:
    leaves = [t.requires_grad_() for t in inputs_of(513, 3000, 2056, torch.bfloat16, gpu).values()]
    upstream = torch.randn(513, device=gpu)

    def call() -> tuple[torch.Tensor, ...]:
        with mr.workspace(2 * TILE):
            lse = mr.logsumexp_matmul(*leaves)
            return (lse.detach(), *torch.autograd.grad(lse, leaves, upstream))

    check_captured(call)


@pytest.mark.parametrize("names", (("a", "b"), ("a",)), ids=str)
def test_memory_of_a_step(names: tuple[str, ...], gpu: torch.device) -> None:
    """Between the passes the workspace; at the peak also the gradients, and sums of the rows'."""
    inputs = inputs_of(4096, 32000, 2048, torch.bfloat16, gpu)
    leaves = [inputs[name].requires_grad_() for name in names]
    upstream = torch.randn(4096, device=gpu)
    with mr.workspace(64 << 20):
        torch.autograd.grad(mr.logsumexp_matmul(**inputs), leaves, upstream)
        before = reset_peak()
        lse = mr.logsumexp_matmul(**inputs)
        assert 64 << 20 <= requested() - before < 65 << 20
        torch.autograd.grad(lse, leaves, upstream)
    gradients = 2 * sum(t.numel() for t in leaves)
    assert peak() - before < gradients + 4 * inputs["a"].numel() + (68 << 20)


@pytest.mark.parametrize(
    ("rows", "columns", "width", "kept"),
    ((512, 4096, 1024, 0), (2048, 16384, 512, 16384), (2048, 16384, 504, 0), (2048, 16384, 64, 0)),
)
def test_small_and_narrow_calls_keep_nothing(
    rows: int, columns: int, width: int, kept: int, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They compute their scores again in less time."""
    monkeypatch.undo()
    assert check(inputs_of(rows, columns, width, torch.bfloat16, gpu), EVERYTHING) == [kept]
