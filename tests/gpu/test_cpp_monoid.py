"""Monoids that users write in C++, on a GPU: results and gradients against float64, and their laws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_monoids import BAD, GOOD, NONE_FIRES, Specimen, options_of_bad, tried_on_the_host
from specimens import name_of
from torch import Tensor

import monoidreduce as mr
from monoidreduce import _C
from monoidreduce.folds.cpp import cpp_laws
from monoidreduce.folds.cuda import compiler, kernels

SCALE = 0.3
TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
    torch.float16: torch.finfo(torch.float16).eps,
}
SHAPES = (((400,), 1300, 72), ((2, 3, 67), 513, 19), ((1,), 1, 1), ((5,), 64, 8))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MONOIDREDUCE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def drawn(
    specimen: Specimen, shape: tuple[int, ...], columns: int, width: int, dtype: torch.dtype, gpu: Any
) -> tuple[list[Tensor], Tensor]:
    """Operands, also of a second score, and labels. Some labels are no column."""
    sizes = [(*shape, width), (columns, width)]
    if specimen.options.get("scores") == 2:
        sizes += [(*shape, width + 3), (columns, width + 3)]
    operands = [torch.randn(size, device=gpu).to(dtype).requires_grad_() for size in sizes]
    return operands, torch.randint(-1, columns + 1, shape, device=gpu)


def by_torch(specimen: Specimen, operands: list[Tensor], label: Tensor) -> tuple[Tensor, ...]:
    """The results with all scores stored."""
    rows, columns = ([t.flatten(0, -2) for t in operands[i::2]] for i in (0, 1))
    scores = [SCALE * a @ b.T for a, b in zip(rows, columns, strict=True)]
    found = specimen.reference(scores[0], scores[-1], label.flatten())
    return tuple(t.view(label.shape) for t in found)


def with_gradients(results: tuple[Tensor, ...], operands: list[Tensor]) -> list[Tensor]:
    """Results, then the gradients of a random combination of them."""
    generator = torch.Generator().manual_seed(0)
    real = [t for t in results if t.is_floating_point()]
    upstream = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in real]
    return [*results, *torch.autograd.grad(real, operands, upstream)]


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16), ids=name_of)
@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize(("shape", "columns", "width"), SHAPES)
def test_accuracy(
    name: str, shape: tuple[int, ...], columns: int, width: int, dtype: torch.dtype, gpu: torch.device
) -> None:
    """Sums of a monoid without a frame are added one by one, so the bound is not by torch's errors."""
    specimen = GOOD[name]
    monoid = mr.cpp_monoid(specimen.source, **specimen.options)
    before = _C.path_counts()
    operands, label = drawn(specimen, shape, columns, width, dtype, gpu)
    ours = with_gradients(tuple(monoid(*operands, label=label, scale=SCALE)), operands)
    exact = [t.detach().double().requires_grad_() for t in operands]
    for y, expected in zip(ours, with_gradients(by_torch(specimen, exact, label), exact), strict=True):
        if not y.is_floating_point():
            assert torch.equal(y, expected)
            continue
        bound = TOLERANCE[y.dtype]
        atol = bound * expected.abs().max().item()
        torch.testing.assert_close(y.double(), expected, rtol=bound, atol=atol)
    for path in ("statistics_fold", "statistics_local_gradient"):
        key = f"{path}/cuda/simt/{name_of(dtype)}"
        assert _C.path_counts()[key] > before.get(key, 0)


@pytest.mark.parametrize("name", GOOD)
def test_any_strides_and_parts_of_the_columns(name: str, gpu: torch.device) -> None:
    """The same as of dense operands; and with a workspace for few columns at a time."""
    specimen = GOOD[name]
    monoid = mr.cpp_monoid(specimen.source, **specimen.options)
    operands, label = drawn(specimen, (70,), 700, 33, torch.float64, gpu)
    strided = [t.detach().mT.contiguous().mT.requires_grad_() for t in operands]
    results = [
        with_gradients(tuple(monoid(*given, label=label, workspace=workspace)), given)
        for given, workspace in ((operands, None), (strided, None), (operands, 0))
    ]
    for dense, other, in_parts in zip(*results, strict=True):
        torch.testing.assert_close(other, dense, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(in_parts, dense, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", GOOD)
def test_rows_and_columns_that_are_not_there(name: str, gpu: torch.device) -> None:
    specimen = GOOD[name]
    monoid = mr.cpp_monoid(specimen.source, **specimen.options)
    operands, label = drawn(specimen, (0,), 5, 4, torch.float32, gpu)
    found = with_gradients(tuple(monoid(*operands, label=label)), operands)
    assert all(t.shape == (0,) for t in found[: -len(operands)])
    assert all(not t.any() for t in found[-len(operands) :])
    a, b = drawn(specimen, (3,), 5, 4, torch.float32, gpu)[0][:2]
    pairs = [a, b[:0]] * (len(operands) // 2)
    grads = torch.autograd.grad(monoid(*pairs)[0].nan_to_num().sum(), a, allow_unused=True)
    assert grads[0] is not None and not grads[0].any()


@pytest.mark.parametrize("name", GOOD)
def test_the_kernel_tries_what_the_host_tries(name: str, gpu: torch.device, tmp_path: Path) -> None:
    monoid = mr.cpp_monoid(GOOD[name].source, **GOOD[name].options)._source
    samples = cpp_laws.draw(monoid)
    expected = tried_on_the_host(monoid, samples, tmp_path)
    seen: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpp_laws, "judge", lambda monoid, samples, numbers: seen.append(numbers))
        assert cpp_laws._tried(monoid.text, gpu) is None
    scale = 1 + expected.abs().amax(0)
    assert ((seen[0] - expected).abs() <= 1e-9 * scale).all()


@pytest.mark.parametrize("name", BAD)
def test_bad_monoids_are_refused(name: str, gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    law, source = BAD[name]
    monoid = mr.cpp_monoid(source, **options_of_bad(name))
    a, b = torch.randn(3, 4, device=gpu), torch.randn(5, 4, device=gpu)
    with pytest.raises(mr.MonoidLawError, match=f"breaks the law of {law}") as caught:
        monoid(a, b)
    assert caught.value.law == law
    # Another process reads the verdict.
    cpp_laws.check.cache_clear()
    monkeypatch.setattr(cpp_laws, "loaded", lambda *_: pytest.fail("tried again"))
    with pytest.raises(mr.MonoidLawError, match=f"breaks the law of {law}"):
        monoid(a, b)


def test_errors_of_the_compiler_reach_the_caller(gpu: torch.device) -> None:
    monoid = mr.cpp_monoid(NONE_FIRES.replace("e.score", "e.scores", 1), filename="fold.h")
    with pytest.raises(mr.CppMonoidError, match=r"fold\.h:\d+: .*has no member"):
        monoid(torch.randn(3, 4, device=gpu), torch.randn(5, 4, device=gpu))


def test_explain_names_the_path(gpu: torch.device) -> None:
    monoid = mr.cpp_monoid(NONE_FIRES)
    a, b = torch.randn(3, 4, device=gpu).half(), torch.randn(5, 4, device=gpu).half()
    explained = mr.explain(monoid, a, b)
    assert explained == monoid.explain(a, b)
    assert explained.forward == "statistics_fold/cuda/simt/float16"
    assert "NVRTC" in str(explained) and "laws" in str(explained)


def test_compiled_by_torch_and_in_a_graph(gpu: torch.device) -> None:
    monoid = mr.cpp_monoid(GOOD["log mean exp"].source, **GOOD["log mean exp"].options)
    a, b = torch.randn(130, 16, device=gpu), torch.randn(300, 16, device=gpu)
    expected = monoid(a, b).value
    compiled = torch.compile(lambda a, b: monoid(a, b).value, fullgraph=True)
    assert torch.equal(compiled(a, b), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = monoid(a, b).value
    a.copy_(torch.randn_like(a))
    graph.replay()
    assert torch.equal(captured, monoid(a, b).value)


def test_kernels_of_this_gpu_are_kept(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monoid = mr.cpp_monoid(NONE_FIRES.replace("NoneFires", "NoneFiresKept"))
    a, b = torch.randn(3, 4, device=gpu, requires_grad=True), torch.randn(5, 4, device=gpu)
    monoid(a, b).value.sum().backward()
    cpp_laws.check.cache_clear()
    kernels._loaded.cache_clear()
    monkeypatch.setattr(compiler.Compiler, "compile", lambda *_: pytest.fail("compiled"))
    monoid(a, b).value.sum().backward()
