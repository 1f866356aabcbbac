"""statistics by kernels that are compiled for the function: against torch in float64, on every tier."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import HALVES
from folds import FOLDS, fold_inputs, leaves_of, moved, outputs_of, random_folds, with_gradients
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from integers import CASES, captured, kept
from specimens import name_of
from tensor_core_scores import tensor_core_scores
from tolerance import accuracy_failures, check_draws, raise_failures
from torch import Tensor

import monoidreduce as mr
from monoidreduce import _C, stat
from monoidreduce.folds.torch import reader

Call = dict[str, Any]
TENSOR_CORES = ("sm80", "sm90")
PARTS = 8  # of the random functions


def measured(fold: Any, call: Call, gpu: torch.device) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Each real output and gradient: ours, torch's in float64, and torch's in the same dtype."""
    before = _C.path_counts()
    ours = with_gradients(fold, moved(call, gpu))
    counts = _C.path_counts()
    on_tensor_cores = any(
        counts[path] > before.get(path, 0)
        for path in counts
        if path.startswith(("statistics_fold/cuda/sm", "attention_forward/cuda/sm"))
    )
    exact = with_gradients(fold.reference, moved(call, gpu, torch.float64))
    with pytest.MonkeyPatch.context() as patch:
        if on_tensor_cores:
            patch.setattr(reader, "scores", tensor_core_scores)
        base = with_gradients(fold.reference, moved(call, gpu))
    count = len(ours) - len(leaves_of(call))
    names = [*(f"out{i}" for i in range(count)), *(f"d_{i}" for i in range(len(ours) - count))]
    found = zip(names, zip(ours, exact, base, strict=True), strict=True)
    return {name: results for name, results in found if results[0].is_floating_point()}


def assert_accurate(
    draw: Callable[[], tuple[Any, Call]], dtype: torch.dtype, gpu: torch.device, rows: int, pooled: int = 1
) -> None:
    """The outputs and gradients are as accurate as torch's in the same dtype, on tensor cores if ours are.

    There are hundreds of cases of up to ten results: `check_draws` holds float32 sums to the rule.
    pooled: the rule is about the errors of this many draws together. Where scores have a standard deviation
    of 8, a few elements are far larger than all others, and their rounding decides the largest error. So it
    does where a result has 150 elements in float32.
    """
    draws = [measured(*draw(), gpu) for _ in range(pooled)]
    failures: list[str] = []
    for name in draws[0]:
        y, ref, base = map(torch.stack, zip(*(found[name] for found in draws), strict=True))
        failures += accuracy_failures(name, y, ref, base, dtype, pooled * rows, generated=True)
    raise_failures(f"{pooled} draws", failures)


@pytest.mark.tiers(*TENSOR_CORES)
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize(("shape", "columns", "width"), (((400,), 1300, 72), ((2, 3, 67), 513, 64)))
def test_accuracy(
    name: str,
    shape: tuple[int, ...],
    columns: int,
    width: int,
    dtype: torch.dtype,
    tier: str,
    gpu: torch.device,
) -> None:
    """Also of widths that are no multiple of 8 (the second score's, 70 and 62)."""
    before = _C.path_counts()
    check_draws(
        lambda: assert_accurate(
            lambda: fold_inputs(name, shape, columns, width, dtype), dtype, gpu, 400, pooled=8
        )
    )
    path = f"{'attention_forward' if name == 'attention' else 'statistics_fold'}/cuda/{tier}/{name_of(dtype)}"
    assert _C.path_counts()[path] > before.get(path, 0)


@pytest.mark.tiers("sm90")
@pytest.mark.parametrize("rows", (1, 128))
@pytest.mark.parametrize("name", ("token_stats", "ranked", "renyi", "entropies"))
def test_few_rows(name: str, rows: int, gpu: torch.device, tier: str) -> None:
    """Their clusters are single blocks."""
    draw = functools.partial(fold_inputs, name, (rows,), 9001, 200, torch.bfloat16)
    check_draws(lambda: assert_accurate(draw, torch.bfloat16, gpu, rows, pooled=8))


@pytest.mark.tiers("simt")
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=name_of)
@pytest.mark.parametrize("rows", (1, 130))
@pytest.mark.parametrize("name", ("token_stats", "ranked", "renyi", "entropies"))
def test_few_rows_of_wide_operands(name: str, rows: int, dtype: torch.dtype, gpu: torch.device) -> None:
    """On ordinary cores their columns are split between blocks. Threads own the rows of narrow operands."""
    draw = functools.partial(fold_inputs, name, (rows,), 9001, 264, dtype)
    check_draws(lambda: assert_accurate(draw, dtype, gpu, rows, pooled=8))
    fold, call = draw()
    call = moved(call, gpu)
    operands = (call["a"], call["b"], call.get("other_a"), call.get("other_b"))
    plan = _C.plan_statistics_fold(*operands, state_words=8)
    assert plan.owned_rows is None and plan.packing is not None and plan.packing[2] > 1
    first, second = (outputs_of(fold(**call)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def row_gradients(dtype: torch.dtype) -> int:
    """How many times threads that own rows have summed their gradients."""
    return _C.path_counts().get(f"statistics_row_gradient/cuda/simt/{name_of(dtype)}", 0)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize("width", (9, 30, 83))
@pytest.mark.parametrize("name", FOLDS)
def test_accuracy_without_tensor_cores(
    name: str, width: int, dtype: torch.dtype, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads own rows of up to 64 numbers, or 32 doubles; wider ones are multiplied in tiles."""
    monkeypatch.setenv("MONOIDREDUCE_CUDA_TIER", "simt")
    before = row_gradients(dtype)

    def draw() -> tuple[Any, Call]:
        return fold_inputs(name, (130,), 300, width, dtype)

    if dtype != torch.float64:
        check_draws(lambda: assert_accurate(draw, dtype, gpu, 130))
    else:
        fold, call = draw()
        expected = with_gradients(fold.reference, moved(call, gpu))
        for found, exact in zip(with_gradients(fold, moved(call, gpu)), expected, strict=True):
            torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-11)
    if any(isinstance(datum, tuple) for datum in FOLDS[name][3]):
        return  # each payload sum has kernels of its own
    bytes = (8 if dtype == torch.float64 else 4) * (2 * width - 2 if FOLDS[name][1] == 2 else width)
    assert (row_gradients(dtype) > before) == (bytes <= 256)


@pytest.mark.parametrize(
    ("rows", "columns", "workspace"),
    (
        (130, 60, 64 << 20),
        (130, 3000, 1),
        (130, 3000, 64 << 20),
        (1, 5000, 64 << 20),
        (600_000, 70, 64 << 20),
    ),
)
def test_parts_of_columns(rows: int, columns: int, workspace: int, gpu: torch.device) -> None:
    """Of one block or several; a part of one stage, and of so many that gradients are added to memory."""
    before = row_gradients(torch.float32)

    def draw() -> tuple[Any, Call]:
        return fold_inputs("distances", (rows,), columns, 3, torch.float32)

    with mr.workspace(workspace):
        check_draws(lambda: assert_accurate(draw, torch.float32, gpu, rows))
    assert row_gradients(torch.float32) > before


def test_no_sum_depends_on_the_order_of_blocks(gpu: torch.device) -> None:
    fold, call = fold_inputs("distances", (3000,), 3000, 3, torch.float32)
    first, second = (with_gradients(fold, moved(call, gpu)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.tiers(*TENSOR_CORES, "simt")
@pytest.mark.parametrize("part", range(PARTS))
def test_random_functions(part: int, tier: str, gpu: torch.device) -> None:
    """40 functions, or 300 (tests/conftest.py). Each part checks its share, lest one process compile all:
    long ones take 10 s each."""
    dtype = torch.float32 if tier == "simt" else torch.bfloat16

    @settings(deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
    @given(fold=random_folds(scaled_data=True), seed=st.integers(0, 1000))
    def run(fold: Any, seed: int) -> None:
        if zlib.crc32(f"{fold} {seed}".encode()) % PARTS != part:
            return
        generator = torch.Generator().manual_seed(seed)

        def leaf(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

        def draw() -> tuple[Any, Call]:
            call: Call = {"a": leaf(150, 16), "b": leaf(390, 16), "scale": 0.3}
            if fold.scores == 2:
                call |= {"other_a": leaf(150, 8), "other_b": leaf(390, 8)}
            call["label"] = torch.randint(-1, 391, (150,), generator=generator)
            call |= {"row": {"t": leaf(150, dtype=torch.float32)}}
            call |= {"column": {"w": leaf(390, dtype=torch.float32)}}
            return mr.statistics(fold.function), call

        check_draws(lambda: assert_accurate(draw, dtype, gpu, 150, pooled=8))

    run()


@pytest.mark.tiers(*TENSOR_CORES)
def test_gradient_of_a_mean_by_data(tier: str, gpu: torch.device) -> None:
    """A total of shares: what the rounding of a log-sum-exp lost is the same part of each of them."""

    def mean(score, t):  # type: ignore[no-untyped-def]
        return {"mean": stat.softmax(score / 64 + 12).mean(t * (1 + score / 64))}

    def draw() -> tuple[Any, Call]:
        call: Call = {"a": torch.randn(300, 16).bfloat16(), "b": torch.randn(4000, 16).bfloat16()}
        return mr.statistics(mean), {**call, "row": {"t": torch.randn(300, requires_grad=True)}}

    check_draws(lambda: assert_accurate(draw, torch.bfloat16, gpu, 300))


@pytest.mark.tiers(*TENSOR_CORES)
@pytest.mark.parametrize("name", ("token_stats", "reference_kl"))
def test_slices_of_columns(name: str, tier: str, gpu: torch.device) -> None:
    """With a workspace of one tile, and with one that holds all."""
    for bytes in (2 * 2 * 300 * 256, 64 << 20):
        with mr.workspace(bytes):
            check_draws(
                lambda: assert_accurate(
                    lambda: fold_inputs(name, (300,), 1100, 64, torch.bfloat16), torch.bfloat16, gpu, 300
                )
            )


@pytest.mark.tiers("sm90")
def test_weights_as_they_lie(tier: str, gpu: torch.device) -> None:
    """Columns [D, V], which Hopper's kernels read without a copy."""
    fold, call = fold_inputs("token_stats", (100,), 520, 64, torch.bfloat16)
    call = moved(call, gpu)
    expected = fold(**call)
    call["b"] = call["b"].detach().T.contiguous().T
    torch.testing.assert_close(fold(**call).lse, expected.lse, rtol=0, atol=0)


@pytest.mark.tiers(*TENSOR_CORES)
def test_the_same_bits_every_time(tier: str, gpu: torch.device, deterministic: None) -> None:
    fold, call = fold_inputs("reference_kl", (300,), 1100, 64, torch.bfloat16)
    call = moved(call, gpu)
    first, again = with_gradients(fold, call), with_gradients(fold, call)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.tiers(*TENSOR_CORES)
def test_graph_and_streams(tier: str, gpu: torch.device) -> None:
    fold, call = fold_inputs("token_stats", (64,), 300, 64, torch.bfloat16)
    call = {name: t.detach() for name, t in moved(call, gpu).items()}
    expected = fold(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fold(**call)
    graph.replay()
    torch.testing.assert_close(outputs_of(captured), outputs_of(expected), rtol=0, atol=0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = fold(**call)
    torch.cuda.current_stream().wait_stream(side)
    torch.testing.assert_close(outputs_of(found), outputs_of(expected), rtol=0, atol=0)


@pytest.mark.tiers("simt", *TENSOR_CORES)
@pytest.mark.parametrize("width", (4, 128))  # threads own rows, or not
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, *HALVES), ids=name_of)
def test_integers(dtype: torch.dtype, width: int, gpu: torch.device) -> None:
    """All cases in one program, of torch's int64."""
    rows, columns = 150, 300
    t = captured(rows, columns, gpu)
    names = [name for name in CASES if name != "table"]  # which rows and columns index together
    fold = mr.statistics(
        lambda score, row, column: {
            f"n{k}": stat.count(CASES[name](row, column, t)) for k, name in enumerate(names)
        }
    )
    a, b = (torch.ones(n, width, dtype=dtype, device=gpu) for n in (rows, columns))
    for name, found in zip(names, fold(a, b), strict=True):
        assert torch.equal(found, kept(name, rows, columns, gpu).sum(1)), name


@pytest.mark.tiers("simt", *TENSOR_CORES)
@pytest.mark.parametrize("width", (4, 128))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
def test_gradients_by_integers_of_64_bits(dtype: torch.dtype, width: int, gpu: torch.device) -> None:
    """Of operands, rows and columns, where labels and captured classes do not fit in 32 bits."""
    classes = (torch.arange(300, device=gpu) % 7) + 2**33
    of_row, of_column = (torch.randn(300, device=gpu, requires_grad=True) for _ in range(2))
    fold = mr.statistics(
        lambda score, row, column, label: dict(
            x=stat.total(
                torch.where(classes[row] == classes[column], of_column[column] * of_row[row] * score, 0.0)
            ),
            y=stat.total(torch.where(label - 2**40 == column, score, 0.0)),
        )
    )
    a, b = (torch.randn(300, width, dtype=dtype, device=gpu, requires_grad=True) for _ in range(2))
    label = torch.randint(300, (300,), device=gpu) + 2**40
    leaves = (a, b, of_row, of_column)
    found, exact = (
        torch.autograd.grad((f(x, y, label=label).x + f(x, y, label=label).y).sum(), (x, y, *leaves[2:]))
        for f, x, y in (
            (fold, a, b),
            (fold.reference, a.detach().double().requires_grad_(), b.detach().double().requires_grad_()),
        )
    )
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for ours, theirs in zip(found, exact, strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
def test_a_step_in_a_graph(dtype: torch.dtype, gpu: torch.device, deterministic: None) -> None:
    """With gradients by data of rows and of columns: nothing is copied from the host."""
    fold, call = fold_inputs("distances", (300,), 500, 16, dtype)
    call = moved(call, gpu)
    leaves = leaves_of(call)

    def step() -> list[Tensor]:
        totals = [t.sum() for t in outputs_of(fold(**call)) if t.requires_grad]
        return list(torch.autograd.grad(totals, leaves))

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.testing.assert_close(captured, expected, rtol=0, atol=0)


def test_no_rows_and_no_columns(gpu: torch.device) -> None:
    for rows, columns in ((0, 5), (4, 0)):
        fold, call = fold_inputs("token_stats", (rows,), columns, 16, torch.bfloat16)
        found = with_gradients(fold, moved(call, gpu))
        expected = with_gradients(fold, call)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, equal_nan=True)


def test_explain_names_the_kernels(gpu: torch.device) -> None:
    fold, call = fold_inputs("token_stats", (64,), 300, 64, torch.bfloat16)
    call = moved(call, gpu)
    explanation = fold.explain(**call)
    before = _C.path_counts()
    fold(**call).lse.sum().backward()
    for path in (explanation.forward, explanation.backward):
        assert _C.path_counts()[path] > before.get(path, 0)


def test_without_a_compiler_torch_computes(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from monoidreduce.folds.cuda import compiler

    monkeypatch.setattr(compiler, "find", lambda: None)
    fold, call = fold_inputs("reference_kl", (20,), 70, 16, torch.float32)
    call = moved(call, gpu)
    assert "pip install nvidia-cuda-nvrtc" in str(fold.explain(**call))
    assert_accurate(lambda: (fold, call), torch.float32, gpu, 20)
