"""Backward kernels of attention that sum the gradient of the tables that a function of scores reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from monoidreduce.folds.program_scores import ProgramScores

__all__ = ["with_table"]


def with_table(
    scores: ProgramScores, elements: int, run: Callable[[ProgramScores], list[Tensor]]
) -> tuple[Tensor, list[Tensor]]:
    """The gradient of the table of reals, and the other gradients, which `run` computes with these scores.

    In the deterministic mode the sums are integers of 64 bits. A first pass finds the largest addend, and so
    the unit in which they hold every sum.

    elements: number of scores, which is more than an entry has addends.
    """
    assert scores.table is not None
    scores = scores._replace(d_table=torch.zeros_like(scores.table))
    assert scores.d_table is not None
    if not torch.are_deterministic_algorithms_enabled():
        return scores.d_table, run(scores)
    largest = torch.zeros(1, dtype=torch.int64, device=scores.table.device)
    run(scores._replace(integers=largest))
    _, exponent = torch.frexp(largest.to(torch.int32).view(torch.float32))  # addends are below 2^exponent
    shift = (62 - elements.bit_length() - exponent).clamp(-126, 126)
    per_unit = torch.ldexp(torch.ones_like(scores.table[:1]), shift)
    integers = torch.zeros_like(scores.table, dtype=torch.int64)
    found = run(scores._replace(integers=integers, per_unit=per_unit))
    sums = torch.ldexp(integers.double(), -shift).to(scores.table.dtype)
    return scores.d_table + sums, found
