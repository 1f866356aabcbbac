"""Attention with modified scores, held to the rule of tolerance.py; and packed sequences, one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mods import Case, Mod, dense
from tolerance import accuracy_failures
from torch import Tensor

import monoidreduce as mr
from monoidreduce._ops.memory import accumulation_dtype

Results = dict[str, tuple[Tensor, ...]]  # of each output and gradient: ours, exact, torch's
# B, H, Hkv, M, N, F, D
SHAPES = (
    (2, 4, 2, 200, 333, 64, 64),
    (1, 2, 2, 130, 257, 128, 96),
    (1, 2, 1, 100, 140, 256, 160),
    (1, 3, 1, 5, 70, 59, 8),
)
# The same for the SIMT kernels: ragged tiles, and widths that tensor cores do not take.
RAGGED = (
    (2, 2, 1, 70, 133, 1, 3),
    (1, 2, 2, 3, 64, 3, 1),
    (1, 3, 1, 5, 70, 59, 8),
    (2, 4, 2, 130, 65, 64, 64),
    (1, 2, 1, 66, 90, 300, 130),
)


def operands(shape: tuple[int, ...], dtype: torch.dtype, gpu: torch.device) -> list[Tensor]:
    """q, k and v, two of them transposed in memory, with gradients."""
    B, H, Hkv, M, N, F, D = shape
    q, k, v = torch.randn(B, M, H, F), torch.randn(B, Hkv, N, F), torch.randn(B, N, Hkv, D)
    placed = (q.transpose(1, 2), k, v.transpose(1, 2))
    return [t.to(gpu, dtype).detach().requires_grad_() for t in placed]


def results(call: Any, leaves: list[Tensor]) -> list[Tensor]:
    """out, lse, and the gradients of a random linear combination of both."""
    out, lse = call(*leaves[:3])
    seen = lse.masked_fill(lse == -math.inf, 0)
    torch.manual_seed(1)
    upstream = [torch.randn(t.shape, dtype=torch.float64).to(t) for t in (out, seen)]
    gradients = torch.autograd.grad((out, seen), leaves, upstream, allow_unused=True, materialize_grads=True)
    return [out, lse, *gradients]


def drawn(leaves: list[Tensor], case_in: Callable[[torch.dtype], Case], ours: Any, of_torch: Any) -> Results:
    """The tensors that the rule compares.

    For gradients of captured tensors, the base is a backward pass that computes a row's delta from out, as
    all attention kernels do (docs/numerics.md, functions of scores).

    ours(case) and of_torch(case, recomputed=) return functions of q, k and v.
    """
    case, exact = case_in(accumulation_dtype(leaves[0].dtype)), case_in(torch.float64)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    narrow = [*leaves, *case.captured]
    found = results(ours(case), narrow)
    truth, base = results(of_torch(exact), [*wide, *exact.captured]), results(of_torch(case), narrow)
    if case.captured:
        base[5:] = results(of_torch(case, recomputed=True), narrow)[5:]
    names = ["out", "lse", "d_q", "d_k", "d_v", *(f"d_captured{n}" for n in range(len(case.captured)))]
    return dict(zip(names, zip(found, truth, base, strict=True), strict=True))


def assert_rule(draw: Callable[[int], Results], dtype: torch.dtype, rows: int) -> None:
    """Assert that results keep the rule. `draw` takes a seed.

    Captured tensors have few elements, and errors of few numbers depend on luck. So the errors of their
    gradients are taken over 8 draws together.
    """
    draws = [draw(0)]
    few = [name for name in draws[0] if name.startswith("d_captured")]
    if few:
        draws += [draw(seed) for seed in range(1, 8)]
    pooled = {
        name: tuple(map(torch.stack, zip(*(draw[name] for draw in draws), strict=True))) for name in few
    }
    failures: list[str] = []
    for name, (y, ref, torchs) in (draws[0] | pooled).items():
        if name == "lse":
            assert torch.equal(y == -math.inf, ref == -math.inf)
            y, ref, torchs = (t.masked_fill(ref == -math.inf, 0) for t in (y, ref, torchs))
        tested = y.dtype if name == "lse" else dtype
        failures += accuracy_failures(name, y, ref, torchs.to(y.dtype), tested, rows)
    assert not failures, "\n".join(failures)


def check(
    make: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    gpu: torch.device,
    blocked: bool = False,
    **options: Any,
) -> None:
    """Hold a call with the functions that `make` makes to the rule. blocked: the mask is a block mask."""
    B, H, _, M, N, *_ = shape

    def draw(seed: int) -> Results:
        torch.manual_seed(seed)
        leaves = operands(shape, dtype, gpu)

        def case_in(of: torch.dtype) -> Case:
            torch.manual_seed(100 + seed)
            return make(B, H, M, N, dtype=of, device=gpu)

        def ours(case: Case) -> Any:
            masks: dict[str, Any] = {"mask_mod": case.mask_mod}
            if blocked:
                masks = {"block_mask": mr.block_mask(case.mask_mod, B, H, M, N, device=gpu, block_size=64)}
            given = {"score_mod": case.score_mod, "return_lse": True, **masks, **options}
            return lambda q, k, v: mr.attention(q, k, v, **given)

        def of_torch(case: Case, **how: Any) -> Any:
            return lambda q, k, v: dense(q, k, v, case.score_mod, case.mask_mod, **options, **how)

        return drawn(leaves, case_in, ours, of_torch)

    assert_rule(draw, dtype, max(M, N))


def _of_sequence(mod: Mod | None, number: int) -> Mod | None:
    """The function for a call with one sequence as batch 0: it adds the sequence's number to `batch`."""
    if mod is None:
        return None
    return lambda *of: mod(*of[:-4], of[-4] + number, *of[-3:])


def per_sequence(
    attend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[Sequence[int], Sequence[int]],
    case: Case,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and lse [H, T] of packed sequences, by a call of `attend` for each sequence with queries.

    attend: takes q, k, v of batch size 1, score_mod, mask_mod and options; returns out and lse. Queries after
    the last sequence see no key.
    """
    of_queries, of_keys = lengths
    behind = [len(q) - sum(of_queries)]
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    queries = q.split([*of_queries, *behind], 2)
    keys, values = (t.split([*of_keys, t.shape[2] - sum(of_keys)], 2) for t in (k, v))
    keys, values = ((*parts[:-1], parts[-1][:, :, :0]) for parts in (keys, values))
    outs, lses = [], []
    for number, (rows, *columns) in enumerate(zip(queries, keys, values, strict=True)):
        if rows.shape[2]:
            of = case[:2] if number < len(of_queries) else (None, None)
            mods = (_of_sequence(mod, number) for mod in of)
            out, lse = attend(rows, *columns, *mods, **options)
            outs.append(out), lses.append(lse)
    out = torch.cat(outs, 2) if outs else v.new_zeros((1, q.shape[1], 0, v.shape[3]))
    lse = torch.cat(lses, 2) if lses else v.new_zeros((1, q.shape[1], 0))
    return out[0].transpose(0, 1), lse[0]


def dense_per_sequence(*given: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return per_sequence(dense, *given, **options)
