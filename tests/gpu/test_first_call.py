"""The first call of a user's function compiles the kernels of both passes at the same time, each once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import stat
from monoidreduce.folds.cuda import ahead, compiler, kernels


@mr.statistics
def lse_target(score: Any, column: Any, label: Any) -> Any:
    return dict(
        lse=stat.softmax(score).logsumexp, target=stat.total(torch.where(column == label, score, 0.0))
    )


def of_fold(a: Tensor, b: Tensor, *_: Tensor) -> Tensor:
    s = lse_target(a, b, label=torch.arange(len(a), device=a.device))
    loss: Tensor = s.lse - s.target
    return loss


def of_attention(a: Tensor, b: Tensor, gates: Tensor) -> Tensor:
    def forgets(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
        return score + gates[head, row] - gates[head, column]

    return mr.attention(a[None, None], b[None, None], b[None, None], score_mod=forgets, causal=True)


@pytest.mark.parametrize("call", [of_fold, of_attention])
def test_both_passes_compile_at_the_same_time(
    gpu: torch.device, call: Callable[..., Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONOIDREDUCE_CACHE_DIR", str(tmp_path))
    kernels._loaded.cache_clear()
    of_others = set(ahead._images)  # kernels of backward passes that earlier tests did not run
    compiled: list[tuple[tuple[Any, ...], float, float]] = []
    compile_unit = compiler.Compiler.compile

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        image = compile_unit(*args)
        compiled.append((args[1:3], start, time.perf_counter()))
        return image

    monkeypatch.setattr(compiler.Compiler, "compile", timed)
    a, b = (torch.randn(n, 64, device=gpu, dtype=torch.bfloat16, requires_grad=True) for n in (256, 256))
    gates = torch.randn(1, 256, device=gpu, requires_grad=True)

    def gradients() -> tuple[Tensor, ...]:
        inputs = (a, b) if call is of_fold else (a, b, gates)
        return torch.autograd.grad(call(a, b, gates).float().sum(), inputs)

    first = gradients()
    assert len(compiled) == len({unit for unit, *_ in compiled}) >= 2
    assert max(start for _, start, _ in compiled) < min(end for *_, end in compiled)
    assert set(ahead._images) <= of_others
    count = len(compiled)
    for ours, again in zip(first, gradients(), strict=True):
        torch.testing.assert_close(ours, again)
    assert len(compiled) == count
