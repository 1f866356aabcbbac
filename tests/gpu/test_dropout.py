"""Random numbers of elements, and dropout of attention by them, on a GPU: those of the CPU and of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import HALVES
from dropout import dropped, factors
from modified_calls import Results, assert_rule
from specimens import name_of
from torch import Tensor

import monoidreduce as mr
from monoidreduce.folds.program import streams

stat = mr.stat
TIERS = pytest.mark.tiers("simt", "sm80", "sm90")
TENSOR_CORES = pytest.mark.tiers("sm80", "sm90")
SEED = 2**40 + 7


def numbers(seed: int, rows: int, columns: int, device: torch.device) -> Tensor:
    row, column = (torch.arange(n, device=device) for n in (rows, columns))
    stream = streams.stream(torch.tensor(seed, device=device), torch.tensor(0, device=device))
    return streams.uniform(stream, row[:, None], column)


def test_numbers_of_torch_are_those_of_the_cpu(gpu: torch.device) -> None:
    for seed in (0, SEED, -3):
        assert torch.equal(numbers(seed, 70, 90, gpu).cpu(), numbers(seed, 70, 90, torch.device("cpu")))


@TIERS
@pytest.mark.parametrize("dtype", (*HALVES, torch.float32, torch.float64), ids=name_of)
@pytest.mark.parametrize("width", (3, 64))
def test_numbers_of_folds(width: int, dtype: torch.dtype, gpu: torch.device) -> None:
    """Also where threads own rows, for narrow operands."""
    rows, columns = 300, 515
    seed = torch.tensor(SEED, device=gpu)

    @mr.statistics
    def drawn(score: Any, column: Any) -> dict[str, Any]:
        u = stat.uniform(seed)
        return dict(
            most=stat.largest(u),
            least=stat.smallest(u),
            few=stat.count(u < 0.25),
            at=stat.count(u * column < 7),
        )

    expected = numbers(SEED, rows, columns, gpu)
    a, b = (torch.zeros(n, width, dtype=dtype, device=gpu) for n in (rows, columns))
    found = drawn(a, b)
    assert torch.equal(found.most.value.float(), expected.amax(1))
    assert torch.equal(found.most.index, expected.argmax(1))
    assert torch.equal(found.least.value.float(), expected.amin(1))
    assert torch.equal(found.few, (expected < 0.25).sum(1))
    at = (expected.double() if dtype == torch.float64 else expected) * torch.arange(columns, device=gpu)
    assert torch.equal(found.at, (at < 7).sum(1))


@TIERS
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64), ids=name_of)
def test_gradients_of_folds(dtype: torch.dtype, gpu: torch.device) -> None:
    """Backward passes see the same numbers, also those that exchange rows and columns."""

    @mr.statistics
    def noisy(score: Any, x: Any, y: Any) -> dict[str, Any]:
        keep = torch.where(stat.uniform(SEED) < 0.5, 2.0, 0.0)
        return dict(t=stat.total(keep * score * x * y))

    rows, columns, width = 260, 390, 64
    shapes = ((rows, width), (columns, width), (rows,), (columns,))
    leaves = [torch.randint(-1, 2, shape, device=gpu).to(dtype).requires_grad_() for shape in shapes]
    a, b, x, y = leaves
    keep = (numbers(SEED, rows, columns, gpu) < 0.5) * 2.0
    found = noisy(a, b, row={"x": x}, column={"y": y}).t
    wide = [t.detach().double().requires_grad_() for t in leaves]
    expected = (keep * (wide[0] @ wide[1].T) * wide[2][:, None] * wide[3]).sum(1)
    upstream = torch.randint(-1, 2, (rows,), device=gpu).to(found.dtype)
    assert torch.equal(found.double(), expected)  # all are small integers
    for ours, theirs in zip(
        torch.autograd.grad(found, leaves, upstream),
        torch.autograd.grad(expected, wide, upstream.double()),
        strict=True,
    ):
        torch.testing.assert_close(
            ours.double(), theirs, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=0
        )


@TIERS
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("width", (64, 128, 200))
@pytest.mark.parametrize("group", (1, 2))
def test_dropped_elements(group: int, width: int, dtype: torch.dtype, gpu: torch.device) -> None:
    """Forward, and of the gradient of v, element by element: all scores are 0, and values a unit matrix."""
    B, H, M, N, p = 2, 4, 150, 130, 0.3
    q = torch.zeros(B, H, M, width, dtype=dtype, device=gpu)
    k = torch.zeros(B, H // group, N, width, dtype=dtype, device=gpu)
    eye = torch.zeros(N, 136, dtype=dtype, device=gpu)
    eye[:, :N] = torch.eye(N, dtype=dtype, device=gpu)
    v = eye.expand(B, H // group, N, 136).clone().requires_grad_()
    out = mr.attention(q, k, v, dropout_p=p, seed=SEED)
    expected = factors(p, SEED, B, H, M, N, gpu) != 0
    assert torch.equal(out[..., :N] != 0, expected)
    for row in (0, 77, M - 1):
        upstream = torch.zeros_like(out)
        upstream[:, :, row] = 1
        (found,) = torch.autograd.grad(out, v, upstream, retain_graph=True)
        of_row = expected[:, :, row].view(B, H // group, group, N).sum(2)
        assert torch.equal(found[..., 0] != 0, of_row != 0)


def slopes(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score + (j - i) * 0.03125 * (h + 1)


def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i // 90 == j // 90


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (40, 3)},
    "softcap": {"softcap": 5.0, "causal": True},
    "score_mod": {"score_mod": slopes},
    "mask_mod": {"mask_mod": documents, "causal": True},
}
SHAPES = ((2, 4, 2, 300, 333, 64, 64), (1, 4, 4, 300, 300, 128, 128), (1, 2, 1, 300, 280, 200, 160))


def check(options: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, gpu: torch.device) -> None:
    B, H, Hkv, M, N, F, D = shape
    given = {"dropout_p": 0.2, "seed": SEED, "return_lse": True, **options}

    def draw(seed: int) -> Results:
        torch.manual_seed(seed)
        shapes = ((B, H, M, F), (B, Hkv, N, F), (B, Hkv, N, D))
        leaves = [torch.randn(size, device=gpu).to(dtype) for size in shapes]
        upstream = [torch.randn(size, device=gpu) for size in ((B, H, M, D), (B, H, M))]
        found = []
        for function, of in ((mr.attention, dtype), (dropped, torch.float64), (dropped, dtype)):
            inputs = [t.to(of).requires_grad_() for t in leaves]
            out, lse = function(*inputs, **given)
            by = [upstream[0].to(dtype).to(out.dtype), upstream[1].to(lse.dtype)]
            lse_or_0 = torch.where(lse.isinf(), 0, lse)
            gradients = torch.autograd.grad((out, lse_or_0), inputs, by)
            found.append([out.detach(), lse_or_0.detach(), *gradients])
        names = ("out", "lse", "d_q", "d_k", "d_v")
        return dict(zip(names, zip(*found, strict=True), strict=True))  # type: ignore[return-value]

    assert_rule(draw, dtype, max(M, N))


@TENSOR_CORES
@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention(options: dict[str, Any], dtype: torch.dtype, gpu: torch.device) -> None:
    check(options, SHAPES[0], dtype, gpu)


@TENSOR_CORES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_widths(shape: tuple[int, ...], gpu: torch.device) -> None:
    check({"causal": True}, shape, torch.bfloat16, gpu)


@pytest.mark.tiers("simt")
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=name_of)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_without_tensor_cores(
    options: dict[str, Any], dtype: torch.dtype, gpu: torch.device
) -> None:
    check(options, SHAPES[0], dtype, gpu)


@TENSOR_CORES
def test_deterministic_and_packed(gpu: torch.device) -> None:
    """The same bits in each run, and as of one batch where there is one sequence."""
    q, k, v = (torch.randn(1, 4, 500, 64, device=gpu).bfloat16().requires_grad_() for _ in range(3))
    starts = torch.tensor([0, 500], device=gpu)
    upstream = torch.randn_like(q)
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            out = mr.attention(q, k, v, dropout_p=0.3, seed=1)
            runs.append([out, *torch.autograd.grad(out, (q, k, v), upstream)])
        for one, two in zip(*runs, strict=True):
            assert torch.equal(one, two)
    finally:
        torch.use_deterministic_algorithms(False)
    packed = (t[0].transpose(0, 1) for t in (q, k, v))
    out = mr.attention_varlen(*packed, starts, dropout_p=0.3, seed=1)
    gradients = torch.autograd.grad(out, (q, k, v), upstream[0].transpose(0, 1))
    for ours, theirs in zip((out.transpose(0, 1)[None], *gradients), runs[0], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_seed_is_drawn_without_a_wait(gpu: torch.device) -> None:
    q = torch.randn(1, 2, 256, 64, device=gpu).bfloat16()
    mr.attention(q, q, q, dropout_p=0.5)
    torch.cuda.manual_seed(5)
    with_mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = mr.attention(q, q, q, dropout_p=0.5)
        second = mr.attention(q, q, q, dropout_p=0.5, seed=3)
    finally:
        torch.cuda.set_sync_debug_mode(with_mode)
    torch.cuda.manual_seed(5)
    assert torch.equal(mr.attention(q, q, q, dropout_p=0.5), first)
    assert not torch.equal(first, second)


def test_graph(gpu: torch.device) -> None:
    """A replayed graph draws new elements if its seed is changed."""
    q = torch.randn(1, 2, 256, 64, device=gpu).bfloat16()
    seed = torch.tensor(1, device=gpu)
    mr.attention(q, q, q, dropout_p=0.5, seed=seed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mr.attention(q, q, q, dropout_p=0.5, seed=seed)
    for value in (1, 2):
        seed.fill_(value)
        graph.replay()
        assert torch.equal(out, mr.attention(q, q, q, dropout_p=0.5, seed=value))
