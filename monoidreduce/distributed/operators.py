"""The operators of `functional` with columns sharded over ranks. `functional` has checked their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from monoidreduce._ops.cross_entropy import (
    CrossEntropyNumbers,
    CrossEntropyOpOptions,
    SavedWeights,
    fold_cross_entropy,
    rank_may_save,
)
from monoidreduce._ops.distillation import DistillationOpOptions, fold_distillation
from monoidreduce._ops.registry import unrecorded
from monoidreduce._soft_targets import SoftTargets
from monoidreduce._torch_private import mark_untraced, modes_are_active
from monoidreduce.classes import check_words, has_class
from monoidreduce.distributed import states
from monoidreduce.distributed.collectives import sum_over_ranks
from monoidreduce.distributed.fold import ShardedFold, Sums, fold_over_ranks, summed_gradient
from monoidreduce.distributed.group import (
    COLUMN_OPTIONS,
    UNTRACED,
    Columns,
    Group,
    Sharding,
    facts_of,
    key_of,
    together,
)
from monoidreduce.distributed.messages import Facts
from monoidreduce.distributed.once import differentiable_once
from monoidreduce.distributed.split import shard, unshard
from monoidreduce.ranks import RanksOrGroup

__all__ = ["COLUMN_AXES", "Sharded"]

# The inputs of ops that are sharded along columns (classes or hidden units), and the sharded axis.
COLUMN_AXES = {
    "weight": 0,
    "bias": 0,
    "class_weight": 0,
    "teacher_weight": 0,
    "b": 0,
    "w1": 0,
    "bias1": 0,
    "gate": 0,
    "gate_bias": 0,
    "w2": 1,
}


# Names of op arguments that differ from the public names, for error messages.
ARGUMENTS = {"kind": "loss", "temperatures": "temperature (a tensor)", "mask": "kept"}


def _may_keep(x: Tensor) -> bool:
    """Whether forward may save dlogits. Those of float32 operands are saved in parts of tokens only.

    The function that saves them is not a registered op, so torch dispatch modes could not see it.
    """
    return x.is_cuda and x.dtype != torch.float32 and not modes_are_active()


def _run(fold: Callable[..., Any], record: Any, *args: Any) -> Any:
    """The fold of a rank's classes. args: the op's five tensors, then its options."""
    return fold(*args[:5], record(*args[5:]), of_rank=True)


@cache
def _argument_names(operator: str) -> list[str]:
    return [argument.name for argument in getattr(torch.ops.monoidreduce, operator).default._schema.arguments]


@dataclass(frozen=True)
class Sharded:
    """A call over several ranks. tensors, options: the first arguments of the op; tensors have no padding."""

    tensors: tuple[Any, ...]
    options: tuple[Any, ...]
    columns: Columns
    sharding: Sharding

    @classmethod
    def of(
        cls,
        operator: str,
        check: Callable[[], tuple[tuple[Any, ...], tuple[Any, ...]]],
        ranks: RanksOrGroup,
    ) -> Sharded:
        """Check a call on all ranks. check: checks the other arguments; returns tensors and options of the
        op.
        """
        sharding, names = Sharding.of(ranks), _argument_names(operator)
        is_mlp = operator in ("mlp", "gated_mlp")  # which takes shards of any length
        used = ("sequence_parallel", "grad_dtype") if is_mlp else COLUMN_OPTIONS

        def prepare() -> tuple[Sharded, Facts]:
            sharding.check("mlp" if is_mlp else operator, *used)
            tensors, options = check()
            sharding.refuse_forward_mode(operator, tensors)
            name = names[1]
            columns = sharding.columns(name, tensors[1])
            if operator == "linear_log_probs":
                check_words(tensors[5], columns.all)
            own = tensors
            if columns.count < len(tensors[1]):  # padding
                named = zip(names, tensors, strict=False)
                own = tuple(columns.own(t) if COLUMN_AXES.get(n) == 0 else t for n, t in named)

            def facts() -> dict[str, Any]:
                values = (*tensors, *options)
                given = ((ARGUMENTS.get(n, n), value) for n, value in zip(names, values, strict=False))
                found = facts_of(given, COLUMN_AXES) | sharding.facts
                if not is_mlp:
                    found |= {"ranks.classes": columns.all, f"rows of {name}": columns.stride}
                return found

            key = (key_of((*tensors, *options)), sharding.key, columns.all, columns.stride)
            return cls(own, options, columns, sharding), Facts(key, facts)

        return together(sharding.group, operator, prepare)

    @property
    def group(self) -> Group:
        return self.sharding.group

    def _all_rows(self, t: Tensor) -> Tensor:
        """[rows, ...] -> [rows of all ranks, ...], for a tensor without gradient."""
        return self.group.gather(t).flatten(0, 1) if self.sharding.ranks.sequence_parallel else t

    def _own_rows(self, t: Tensor) -> Tensor:
        """[rows of all ranks] -> [rows of this rank]."""
        return shard(t, 0, self.group.handle) if self.sharding.ranks.sequence_parallel else t

    def _sums(self, sum_to: Tensor | None, weight: Tensor) -> Sums | None:
        """Where the gradient of weight is added (`functional._sum_of_gradients`), without its padding."""
        own = self.columns.own(sum_to)
        return None if own is None else Sums(own, weight)

    def linear_cross_entropy(
        self,
        return_lse: bool,
        differentiated: tuple[bool, bool],
        workspace: int | None,
        sum_to: Tensor | None,
        parameter: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The loss, and lse [rows]. differentiated: whether x and weight need gradients. sum_to: the gradient
        of the weight `parameter` is added to it; as in `_ops.summed_weights`, like the next two."""
        x, weight, bias, target, class_weight = self.tensors
        numbers: CrossEntropyNumbers = self.options  # type: ignore[assignment]
        z_loss, columns = numbers.z_loss, self.columns
        target, class_weight = self._all_rows(target), columns.gathered(class_weight)
        keep = _may_keep(x) and any(differentiated) and rank_may_save(class_weight, numbers.label_smoothing)

        # Only `combine` needs these, so the host prepares them while the device runs the fold.
        def combine(
            gathered: Tensor, kept: Tensor, weights: SavedWeights | None = None
        ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            of_loss = (numbers.reduction, numbers.ignore_index, z_loss, weights and weights.miss)
            found = states.cross_entropy(gathered, target, class_weight, *of_loss)
            if weights:
                weights.to_gradients(found.lse, found.lse_low, z_loss)
            return (found.loss, found.lse), (found.lse, found.lse_low, kept)

        options = CrossEntropyOpOptions(
            *numbers, columns.first, columns.all, return_lse, keep, differentiated[0], workspace
        )
        fold = ShardedFold(
            "linear_cross_entropy",
            forward=options._replace(reduction="none", z_loss=0.0),
            backward=options,
            rows=(0,),
            gathered=3,
            # The loss and its weight, and the log-sum-exp in two words.
            pack=lambda found: torch.cat((found[0], found[1].unsqueeze(0), found[2].unsqueeze(0))),
            combine=combine,
            sharding=self.sharding,
            differentiable=2,
            run=partial(_run, fold_cross_entropy, CrossEntropyOpOptions) if keep else None,
            sums=self._sums(sum_to, parameter),
        )
        loss, lse = fold_over_ranks(fold, x, weight, bias, target, class_weight)
        return self._own_rows(loss) if numbers.reduction == "none" else loss, self._own_rows(lse)

    def soft_cross_entropy(
        self,
        probs: Tensor,
        class_weight: Tensor | None,
        return_lse: bool,
        workspace: int | None,
        sum_to: Tensor | None,
        parameter: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The loss, and lse [rows], for targets [rows, K] with probabilities. class_weight: of this rank."""
        x, weight, bias, target = self.tensors
        numbers, columns = CrossEntropyNumbers(*self.options), self.columns
        target = self._all_rows(target)
        if self.sharding.ranks.sequence_parallel:
            probs = unshard(probs, 0, self.group.handle)
        of_classes = columns.gathered(columns.own(class_weight))
        soft = SoftTargets.of(target, probs, numbers.ignore_index, columns.all, of_classes)

        def combine(
            gathered: Tensor, log_probs: Tensor, frames: Tensor, kept: Tensor
        ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            lse, lse_low = states.log_sum_exp(gathered[:, :2].contiguous())
            logits = gathered[:, 2:].sum(0).T.contiguous()  # each is of one rank, and 0 on the others
            return (lse, logits), (lse, logits, lse_low, log_probs, frames, kept)

        given = (numbers.logit_scale, numbers.softcap, 1.0, columns.first, columns.all, return_lse)
        options = (*given, False, False, workspace)
        fold = ShardedFold(
            "linear_target_logits",
            options,
            options,
            (0,),
            3,
            combine,
            self.sharding,
            2,
            pack=lambda found: torch.cat((found[0][None], found[2][None], found[1].T)),
            sums=self._sums(sum_to, parameter),
        )
        lse, logits = fold_over_ranks(fold, x, weight, bias, soft.label, None)
        loss = soft.reduced(lse, logits, numbers.z_loss, numbers.reduction)
        return self._own_rows(loss) if numbers.reduction == "none" else loss, self._own_rows(lse)

    def linear_distillation(
        self,
        differentiated: tuple[bool, bool, bool],
        workspace: int | None,
        sum_to: Tensor | None,
        parameter: Tensor,
    ) -> Tensor:
        """The loss. differentiated: whether x, weight, and a tensor of the teacher need gradients."""
        x, weight, teacher_x, teacher_weight, mask = self.tensors
        reduction, kind, temperature = self.options
        mask = None if mask is None else self._all_rows(mask)
        of_x, of_weight, of_teacher = differentiated
        keep = _may_keep(x) and (of_x or of_weight) and not of_teacher

        def combine(
            gathered: Tensor, kept: Tensor, to_gradients: Callable[[Tensor], None] | None = None
        ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            loss, stats = states.distillation(gathered, kind, mask, reduction)
            if to_gradients:
                to_gradients(stats)
            return (loss,), (stats, kept)

        options = DistillationOpOptions(reduction, kind, temperature, keep, of_x, workspace)
        fold = ShardedFold(
            "linear_distillation",
            forward=options._replace(reduction="none"),
            backward=options,
            rows=(0, 2),
            gathered=2,
            # The loss and the four log-sum-exp words. narrow() and unsqueeze() take half the time of
            # indexing.
            pack=lambda found: torch.cat((found[0].unsqueeze(0), found[1].narrow(0, 0, 4))),
            combine=combine,
            sharding=self.sharding,
            run=partial(_run, fold_distillation, DistillationOpOptions) if keep else None,
            sums=self._sums(sum_to, parameter),
        )
        (loss,) = fold_over_ranks(fold, x, weight, teacher_x, teacher_weight, mask)
        return self._own_rows(loss) if reduction == "none" else loss

    def linear_log_probs(
        self, workspace: int | None, sum_to: Tensor | None, parameter: Tensor
    ) -> tuple[Tensor, ...]:
        """log_probs, entropies and log-sum-exps, [rows] each."""
        x, weight, bias, target, temperatures, mask = self.tensors
        columns = self.columns
        target = self._all_rows(target)
        temperatures = None if temperatures is None else self._all_rows(temperatures)
        mask = None if mask is None else self._all_rows(mask)

        def combine(
            gathered: Tensor, _top1: Tensor, frames: Tensor, kept: Tensor
        ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            found = states.log_probs(gathered, target, self.options[3])
            if mask is not None:  # NaN in a row that keeps no class of any rank
                lost = (target != self.options[3]) & ~has_class(mask, target)
                found[0] = found[0].masked_fill(lost & (found[2] == -math.inf), -math.inf)
            return (*found[:3],), (*found, frames, kept)

        options = (*self.options, columns.first, columns.all, False, False, workspace)
        fold = ShardedFold(
            "linear_log_probs",
            options,
            options,
            (0,),
            4,
            combine,
            self.sharding,
            3,
            pack=torch.stack,
            sums=self._sums(sum_to, parameter),
        )
        results: tuple[Tensor, ...] = fold_over_ranks(fold, x, weight, bias, target, temperatures, mask)
        return tuple(map(self._own_rows, results)) if self.sharding.ranks.sequence_parallel else results

    def logsumexp_matmul(self, workspace: int | None) -> Tensor:
        """The log-sum-exps [rows]."""

        def combine(
            gathered: Tensor, mean: Tensor, kept: Tensor
        ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            words = states.log_sum_exp(gathered)
            return words[:1], (*words, mean, kept)

        # False: no dlogits and no mean for backward, because they would be of this rank's columns only.
        options = (*self.options, False, False, workspace)
        fold = ShardedFold(
            "logsumexp_matmul", options, options, (0,), 2, combine, self.sharding, pack=torch.stack
        )
        (lse,) = fold_over_ranks(fold, *self.tensors)
        return self._own_rows(lse)

    def mlp(self, operator: str, workspace: int | None) -> Tensor:
        """The result [rows, N] of mlp or gated_mlp. Each rank's part of a row is summed over ranks.

        The tensor-core kernels of `mlp` return 16-bit results rounded. So parts of 16-bit calls are rounded
        on every GPU, even on a rank that has no hidden units and therefore runs another kernel: all ranks
        must send the same dtype.
        """
        x = self.tensors[0]
        unrounded = operator == "gated_mlp" or not x.is_cuda or x.element_size() != 2
        options = (*self.options, unrounded, workspace)
        result: Tensor = _Mlp.apply(operator, self.sharding, options, *self.tensors)  # type: ignore[no-untyped-call]
        return result


mark_untraced(Sharded.of.__func__, UNTRACED)  # type: ignore[attr-defined]


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, operator: str, sharding: Sharding, options: Any, x: Tensor, *weights: Any
    ) -> Tensor:
        if sharding.ranks.sequence_parallel:
            x = sharding.group.gather(x).flatten(0, 1)
        *hidden, bias2 = weights
        ctx.operator, ctx.sharding, ctx.options = operator, sharding, options
        ctx.save_for_backward(x, *weights)
        # All ranks hold bias2, but only rank 0 adds it.
        with sharding.group.failing_together():
            part = unrecorded(operator)[0](x, *hidden, bias2 if sharding.group.rank == 0 else None, *options)
        own = sharding.ranks.sequence_parallel
        return sum_over_ranks(part, sharding.group, x.dtype, sent=part.dtype, own=own, headed=not own)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> Any:
        sharding, needed = ctx.sharding, ctx.needs_input_grad[3:]
        if sharding.ranks.sequence_parallel:
            grad = sharding.group.gather(grad).flatten(0, 1)
        with sharding.group.failing_together(needed[0]):
            found = unrecorded(ctx.operator)[1](grad, *ctx.saved_tensors, *ctx.options, needed, True)
        dx = summed_gradient(found[0], ctx.saved_tensors[0], sharding) if needed[0] else None
        others = (g if wanted else None for g, wanted in zip(found[1:], needed[1:], strict=True))
        return None, None, None, dx, *others
