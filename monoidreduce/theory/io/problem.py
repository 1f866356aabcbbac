"""Inputs of the paper's problem, and reference results by autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from monoidreduce._validate import check_axes, check_tensor, mismatch

from .two_level import Memory, check_sizes

__all__ = ["attention_problem", "reference", "simulate"]

Matrices = dict[str, Tensor]


def attention_problem(n: int, d: int, *, seed: int = 0, kept: Tensor | None = None) -> Matrices:
    """Random inputs of attention and of its backward pass, float64.

    Args:
        n: rows of A1, A2, A3 and dO: the sequence length.
        d: their columns: the head width.
        seed: seed of the random numbers.
        kept: bool [n, n], the pairs that the mask keeps, at least one per row (default: all).

    Returns:
        A1, A2, A3 [n, d] and X, Y [d, d] of Definition 3.1; dO [n, d] (Definition B.8). From the forward
        pass, O [n, d] (Definition B.7) and l [n, 1] (Definition B.4). For algorithms that start from a head's
        queries, keys and values: Q = A1 X, K = A2 and V = A3 Y.

    Raises:
        TypeError: `kept` is not a bool tensor.
        ValueError: `n` or `d` is below 1, or `kept` is not [n, n], or it keeps no pair of some row.
    """
    check_sizes(n=n, d=d)
    if kept is not None:
        _check_kept(kept, n)
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int) -> Tensor:
        numbers = torch.randn(rows, d, generator=generator, dtype=torch.float64)
        return numbers / math.sqrt(d)

    problem = {name: random(n) for name in ("A1", "A2", "A3", "dO")}
    problem |= {name: random(d) for name in ("X", "Y")}
    problem |= {"Q": problem["A1"] @ problem["X"], "K": problem["A2"], "V": problem["A3"] @ problem["Y"]}
    results = reference(problem, kept)
    return problem | {"O": results["O"], "l": results["l"]}


def _check_kept(kept: Tensor, n: int) -> None:
    if check_tensor("kept", kept).dtype is not torch.bool:
        raise TypeError(mismatch("kept", "torch.bool", kept.dtype))
    check_axes("kept", kept, ("n", "n"), {"n": n})
    if not (some := kept.any(1)).all():
        raise ValueError(mismatch("kept", "a pair of every row", f"none of row {int(some.int().argmin())}"))


def reference(problem: Mapping[str, Tensor], kept: Tensor | None = None) -> Matrices:
    """The results of all schedules by autograd: O and l; g (Definition 3.2); dQ, dK, dV of a head."""
    x, k, v = (problem[name].clone().requires_grad_() for name in ("X", "K", "V"))
    with torch.enable_grad():
        q = problem["A1"] @ x
        scores = q @ k.T if kept is None else (q @ k.T).masked_fill(~kept, -math.inf)
        out = scores.softmax(1) @ v
        g, dq, dk, dv = torch.autograd.grad(out, (x, q, k, v), problem["dO"])
    sums = scores.detach().logsumexp(1, keepdim=True).exp()
    return {"O": out.detach(), "l": sums, "g": g, "dQ": dq, "dK": dk, "dV": dv}


def simulate(
    schedule: Callable[..., None],
    *,
    n: int,
    d: int,
    words: int,
    seed: int = 0,
    strict: bool = True,
    **options: Any,
) -> Memory:
    """Run a schedule on random inputs with a cache of `words`; return the memory with its counts.

    Args:
        schedule: `small_cache`, `large_cache`, `flash_forward`, ...
        n, d, seed: see `attention_problem`.
        words, strict: see `Memory`.
        options: options of the schedule; `kept` is also the mask of the inputs.

    Raises:
        TypeError, ValueError: as `attention_problem`; or the cache is too small for the schedule.
        CacheOverflow: the schedule holds more than `words`, and `strict` is True.
    """
    memory = Memory(words, attention_problem(n, d, seed=seed, kept=options.get("kept")), strict=strict)
    schedule(memory, **options)
    return memory
