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
