"""torch.export: programs that return results of this library are saved, and load in another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monoidreduce as mr
from monoidreduce import stat


@mr.statistics
def token_stats(score: Any, label: Any) -> dict[str, Any]:
    weights = stat.softmax(score)
    return dict(lse=weights.logsumexp, mean=weights.mean(score), best=stat.largest(score))


def nearer(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s - (i - j).abs()


class Results(nn.Module):
    def forward(self, x: Tensor, weight: Tensor, target: Tensor) -> tuple[Any, ...]:
        heads = x[None, None]
        log_sum_exp = mr.monoids.LogSumExp()
        lses = (x @ weight.T)[..., None]
        return (
            mr.linear_log_probs(x, weight, target, entropy=True, top1=True),
            mr.linear_log_probs(x, weight, target),
            mr.attention(
                heads, heads, heads, return_lse=True, score_mod=lambda s, b, h, i, j: s - (i - j).abs()
            ),
            token_stats(x, weight, label=target),
            mr.fold(log_sum_exp, log_sum_exp.State(lses), 1),
        )


LOAD = """
import sys, torch
import monoidreduce
given, expected, kinds = torch.load(sys.argv[1] + ".pt")
found = torch.export.load(sys.argv[1] + ".pt2").module()(*given)
assert [(type(r).__name__, getattr(r, "_fields", None)) for r in found] == kinds, found
for ours, theirs in zip(torch.utils._pytree.tree_leaves(found), expected, strict=True):
    if theirs is not None:
        torch.testing.assert_close(ours, theirs)
"""


@pytest.mark.oldest
@pytest.mark.parametrize("strict", [False, True])
def test_all_results_are_saved_and_loaded(strict: bool, tmp_path: Path) -> None:
    given = torch.randn(4, 8), torch.randn(6, 8), torch.tensor([0, 5, 2, 1])
    module = Results()
    with torch.no_grad():
        program, expected = torch.export.export(module, given, strict=strict), module(*given)
    file = str(tmp_path / "program")
    torch.export.save(program, f"{file}.pt2")
    kinds = [(type(result).__name__, getattr(result, "_fields", None)) for result in expected]
    torch.save((given, torch.utils._pytree.tree_leaves(expected), kinds), f"{file}.pt")
    ended = subprocess.run([sys.executable, "-c", LOAD, file], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def gradient(module: nn.Module, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(module(x), x)
    return found


class Losses(nn.Module):
    """The sum of the results of all operators that export in training."""

    def forward(self, x: Tensor) -> Tensor:
        heads, log_sum_exp = x[None, None], mr.monoids.LogSumExp()
        results = (
            mr.logsumexp_matmul(x, x),
            mr.attention(heads, heads, heads, score_mod=nearer),
            mr.attend(heads, heads, heads, weight=torch.sigmoid),
            *token_stats(x, x, label=torch.arange(4))[:2],
            mr.fold(log_sum_exp, log_sum_exp.State(x @ x.T)).lse,
            mr.fold(mr.monoids.Max(), mr.monoids.Max.State(x, torch.ones_like(x, dtype=torch.int64))).value,
        )
        return torch.stack([result.sin().sum() for result in results]).sum()


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_have_gradients(strict: bool) -> None:
    """torch drops the backward pass of an autograd.Function in a strict export: that of `fold` was lost."""
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    program = torch.export.export(Losses(), (x,), strict=strict).module()
    torch.testing.assert_close(gradient(program, x), gradient(Losses(), x))


class MapReduce(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        fold = mr.monoids.LogSumExp()
        result = mr.map_reduce(
            fold, lambda a, b: fold.State((a @ b.T).logsumexp(1)), x, x, a_chunk=3, b_chunk=2
        )
        return result.lse.sum()


def test_map_reduce_is_exported_without_gradients() -> None:
    """A program with gradients would lose those of its pairs, without an error."""
    x = torch.randn(5, 8)
    program = torch.export.export(MapReduce(), (x,), strict=False).module()
    torch.testing.assert_close(program(x), (x @ x.T).logsumexp(1).sum())
    with pytest.raises(
        RuntimeError, match=r"map_reduce: expected no gradient in torch\.export, .*no_grad\(\)"
    ):
        torch.export.export(MapReduce(), (x.requires_grad_(),), strict=False)
    with torch.no_grad():
        program = torch.export.export(MapReduce(), (x,), strict=False).module()
    torch.testing.assert_close(program(x), (x @ x.T).logsumexp(1).sum())


def test_names_of_results_may_stand_in_a_raw_string() -> None:
    """AOTInductor writes the structure of results into C++, between R\"( and )\"."""
    results = Results()(torch.randn(4, 8), torch.randn(6, 8), torch.tensor([0, 5, 2, 1]))
    assert ')"' not in torch.utils._pytree.treespec_dumps(torch.utils._pytree.tree_structure(results))


@pytest.mark.release
@pytest.mark.slow
def test_ahead_of_time_compilation(tmp_path: Path) -> None:
    """By AOTInductor, which gives ops None for an empty list of sizes."""
    given = torch.randn(4, 8), torch.randn(6, 8), torch.tensor([0, 5, 2, 1])
    with torch.no_grad():
        program, expected = torch.export.export(Results(), given), Results()(*given)
    file = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "program.pt2"))
    found = torch._inductor.aoti_load_package(file)(*given)
    assert [type(result).__name__ for result in found] == [type(result).__name__ for result in expected]
    leaves = (torch.utils._pytree.tree_leaves(results) for results in (found, expected))
    for ours, theirs in zip(*leaves, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)
