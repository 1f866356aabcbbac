"""Folds over ranks without communication: one rank after another, in this process."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from monoidreduce import functional, varlen
from monoidreduce._ops.cross_entropy import CrossEntropyNumbers
from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce.distributed import operators
from monoidreduce.distributed.attention_folds import POSITIONS, Fold, fold_gradients, fold_rows
from monoidreduce.distributed.fold import ShardedFold
from monoidreduce.distributed.group import Group, Sharding
from monoidreduce.distributed.split import Split

HANDLE: Any = None
OPTIONS = {"causal": False, "scale": None, "window": None, "softcap": None, "compensated": False}


class _Virtual(torch.autograd.Function):
    """out and lse of q, k and v [B, H, positions, ...].

    The backward pass adds all ranks' gradients of k and v, as the reduction over ranks would.
    """

    @staticmethod
    def forward(ctx: Any, ranks: int, layout: str, options: Any, *tensors: Tensor) -> Any:
        q, k, v, *starts = tensors
        ctx.splits = [
            tuple(Split.of(Group(HANDLE, rank, ranks), t.shape[POSITIONS], layout) for t in (q, k))
            for rank in range(ranks)
        ]
        ctx.folds = [Fold.of_rank(*splits, options, packed=len(starts) > 0) for splits in ctx.splits]
        found = [
            fold_rows(folds, queries.part(q, POSITIONS), k, v, None, *starts)
            for folds, (queries, _) in zip(ctx.folds, ctx.splits, strict=True)
        ]
        ctx.save_for_backward(*tensors, *(t for results in found for t in results))
        return tuple(_joined(ctx.splits, [results[i] for results in found]) for i in (0, 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        given = len(ctx.needs_input_grad) - 3
        (q, k, v, *starts), saved = ctx.saved_tensors[:given], ctx.saved_tensors[given:]
        parts, dk, dv = [], 0, 0
        for rank, (folds, (queries, keys)) in enumerate(zip(ctx.folds, ctx.splits, strict=True)):
            upstream = tuple(queries.part(g, POSITIONS) for g in grads)
            inputs = (queries.part(q, POSITIONS), k, v, None, *starts)
            results = tuple(saved[4 * rank : 4 * rank + 4])
            arguments = (upstream, inputs, results, [True] * 3 + [False])
            dq, *of_ranks, _ = fold_gradients(folds, keys, *arguments)
            of_keys, of_values = (keys.joined(t, POSITIONS) for t in of_ranks)
            parts.append(dq)
            assert of_keys.dtype == of_values.dtype == accumulation_dtype(k.dtype)
            dk, dv = dk + of_keys, dv + of_values
        none = (None,) * len(starts)
        return None, None, None, _joined(ctx.splits, parts), dk.to(k.dtype), dv.to(v.dtype), *none


def _joined(splits: Any, parts: list[Tensor]) -> Tensor:
    split = splits[0][0]
    return split.joined(torch.stack([split.padded(t, POSITIONS) for t in parts]), POSITIONS)


def attention_over_virtual_ranks(ranks: int, layout: str) -> Callable[..., Any]:
    """mr.attention with all-gathered keys and values."""

    def attention(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False, **options: Any) -> Any:
        _, of_op, _ = functional.check_attention(q, k, v, None, None, **OPTIONS | options)
        out, lse = _Virtual.apply(ranks, layout, of_op, q, k, v)
        return (out, lse) if return_lse else out

    return attention


def varlen_over_virtual_ranks(ranks: int, layout: str) -> Callable[..., Any]:
    """mr.attention_varlen with all-gathered keys and values."""

    def attention_varlen(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Any = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        given = (q, k, v, cu_seqlens_q, cu_seqlens_k, None)
        tensors, of_op = varlen.check_varlen(*given, **OPTIONS | options)
        out, lse = _Virtual.apply(ranks, layout, of_op, *tensors)
        out = out[0].transpose(0, 1)
        return (out, lse[0]) if return_lse else out

    return attention_varlen


class _OverVirtualRanks:
    """A vocabulary-parallel linear loss. kept: for how many columns each rank saved local gradients."""

    operator: str
    results: int

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.kept: list[int] = []

    def fold(self, x: Tensor, weight: Tensor, inputs: list[tuple[Any, ...]], options: Any, call: Any) -> Any:
        """The results of `call` with a `Sharded` operator for each rank's inputs."""
        folds: list[ShardedFold] = []

        def capture(fold: ShardedFold, *_: Any) -> tuple[Tensor, ...]:
            folds.append(fold)
            return (x,) * self.results

        of_ranks: Any = SimpleNamespace(classes=len(weight), sequence_parallel=False, grad_dtype=None)
        with mock.patch.object(operators, "fold_over_ranks", capture):
            for rank, tensors in enumerate(inputs):
                sharding = Sharding(Group(HANDLE, rank, self.ranks), of_ranks)
                columns = sharding.columns("weight", tensors[1])
                with mock.patch.object(operators.Sharded, "_own_rows", lambda _, t: t):
                    call(operators.Sharded(tensors, options, columns, sharding))
        return _VirtualFolds.apply(self, folds, inputs, x, weight)


class CrossEntropyOverVirtualRanks(_OverVirtualRanks):
    """mr.linear_cross_entropy."""

    operator, results = "linear_cross_entropy", 2

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        reduction: str = "mean",
        ignore_index: int = -100,
        logit_scale: float = 1.0,
        z_loss: float = 0.0,
        return_lse: bool = False,
        workspace: int | None = None,
    ) -> Any:
        options = CrossEntropyNumbers(reduction, logit_scale, 0.0, ignore_index, 0.0, z_loss)
        inputs = [(x.detach(), part, None, target, None) for part in weight.detach().chunk(self.ranks)]
        loss, lse = self.fold(
            x,
            weight,
            inputs,
            options,
            lambda sharded: sharded.linear_cross_entropy(return_lse, (True, True), workspace, None, weight),
        )
        return (loss, lse) if return_lse else loss


class DistillationOverVirtualRanks(_OverVirtualRanks):
    """mr.linear_distillation, whose teacher has no gradient."""

    operator, results = "linear_distillation", 1

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        teacher_x: Tensor,
        teacher_weight: Tensor,
        mask: Tensor | None = None,
        loss: str = "cross_entropy",
        temperature: float = 1.0,
        reduction: str = "mean",
        workspace: int | None = None,
    ) -> Tensor:
        parts = zip(*(t.detach().chunk(self.ranks) for t in (weight, teacher_weight)), strict=True)
        inputs = [(x.detach(), own, teacher_x, of_teacher, mask) for own, of_teacher in parts]
        (found,) = self.fold(
            x,
            weight,
            inputs,
            (reduction, loss, temperature),
            lambda sharded: sharded.linear_distillation((True, True, False), workspace, None, weight),
        )
        return found  # type: ignore[no-any-return]


class _VirtualFolds(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        of: _OverVirtualRanks,
        folds: list[ShardedFold],
        inputs: list[tuple[Any, ...]],
        *_: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.folds, ctx.inputs, ctx.operator = folds, inputs, of.operator
        op, first = getattr(torch.ops.monoidreduce, of.operator), folds[0]
        found = [(fold.run or op)(*own, *fold.forward) for fold, own in zip(folds, inputs, strict=True)]
        assert first.pack is not None
        states = torch.stack([first.pack(each[: first.gathered]) for each in found])
        combined = [
            fold.combine(states, *each[first.gathered :]) for fold, each in zip(folds, found, strict=True)
        ]
        of.kept = [each[first.gathered].shape[1] for each in found]
        ctx.residuals = [residuals for _, residuals in combined]
        ctx.set_materialize_grads(False)
        return combined[0][0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        d_x, d_weight, needed = 0, [], [True, True, False, False, False]
        op = getattr(torch.ops.monoidreduce, f"{ctx.operator}_backward")
        for fold, inputs, residuals in zip(ctx.folds, ctx.inputs, ctx.residuals, strict=True):
            found = op(*grads, *inputs, *residuals, *fold.backward, needed, True)
            assert found[0].dtype == torch.float32
            d_x = d_x + found[0]
            d_weight.append(found[1])
        return None, None, None, d_x.to(ctx.inputs[0][0].dtype), torch.cat(d_weight)
