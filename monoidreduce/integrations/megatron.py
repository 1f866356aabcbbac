"""Cross entropy fused with a Megatron model's output layer, also vocabulary-parallel.

Megatron is not imported.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from monoidreduce import functional
from monoidreduce._validate import INTEGERS, check_tensor, mismatch
from monoidreduce.distributed import shard, unshard
from monoidreduce.distributed.group import Group, together
from monoidreduce.distributed.messages import Facts
from monoidreduce.ranks import Ranks

__all__ = ["linear_cross_entropy", "vocab_parallel_linear_cross_entropy"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    sequence_parallel: bool = False,
) -> Tensor:
    """Cross entropy of the output of Megatron's `ColumnParallelLinear`, without logits in memory.

    Args:
        hidden: [s, b, h] or [tokens, h]. With sequence_parallel, this rank's shard of the first axis.
        weight: [V, h], or with a group this rank's shard of the classes, of equal size on each rank. If it
            has a float32 `main_grad`, its gradient is added there, as by Megatron's own layers with
            `gradient_accumulation_fusion`.
        labels: [s, b] or [tokens] class indices of all tokens, the same on all ranks.
        tp_group: the ranks that the classes are sharded over.
        reduction: "none", "sum" or "mean". The mean is over labels that are not ignored.
        ignore_index: a label with loss 0 that does not count in the mean.
        sequence_parallel: whether the rows of hidden are sharded too, in shards of equal size.

    Returns:
        The loss of all tokens, [tokens] or a scalar, in the accumulation dtype and the same on all ranks. The
        gradient of hidden is already summed over ranks.

    Raises:
        TypeError, ValueError, IndexError: as `monoidreduce.linear_cross_entropy`.
    """
    own_rows = sequence_parallel and tp_group is not None
    _check(hidden, labels, tp_group, own_rows)
    loss = functional.linear_cross_entropy(
        hidden,
        weight,
        shard(labels, 0, tp_group) if own_rows else labels,
        reduction=reduction,
        ignore_index=ignore_index,
        ranks=None if tp_group is None else Ranks(tp_group, sequence_parallel=own_rows),
    )
    if reduction != "none":
        return loss
    return (unshard(loss, 0, tp_group) if own_rows else loss).flatten()


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    ignore_index: int = -100,
    sequence_parallel: bool = False,
) -> Tensor:
    """The loss of each token, as from `LanguageModule.compute_language_model_loss`, without logits.

    Args:
        hidden: [s, b, h]. With sequence_parallel, this rank's shard of the first axis.
        weight, tp_group, ignore_index, sequence_parallel: as in `linear_cross_entropy`.
        labels: [b, s] class indices, the same on all ranks.

    Returns:
        [b, s], the same on all ranks, in the accumulation dtype.

    Raises:
        TypeError, ValueError, IndexError: as `monoidreduce.linear_cross_entropy`.
    """
    _check(hidden, labels, tp_group, sequence_parallel and tp_group is not None, batch_first=True)
    labels = labels.transpose(0, 1)
    loss = linear_cross_entropy(hidden, weight, labels, tp_group, "none", ignore_index, sequence_parallel)
    return loss.view(labels.shape).transpose(0, 1).contiguous()


def _check(
    hidden: Any, labels: Any, tp_group: dist.ProcessGroup | None, own_rows: bool, batch_first: bool = False
) -> None:
    """Raise TypeError or ValueError unless labels are class indices for the tokens of hidden.

    own_rows: hidden is this rank's shard of the first axis. batch_first: labels are [b, s].
    """
    group = None if tp_group is None else Group.of(tp_group)

    def prepare() -> tuple[bool, Facts]:
        check_tensor("hidden", hidden)
        check_tensor("labels", labels)
        if labels.dtype not in INTEGERS:
            raise TypeError(mismatch("labels", "class indices of an integer dtype", labels.dtype))
        if hidden.dim() != 3 and (batch_first or hidden.dim() != 2):
            expected = "[s, b, h]" if batch_first else "[s, b, h] or [tokens, h]"
            raise ValueError(mismatch("hidden", f"shape {expected}", list(hidden.shape)))
        of_all, *others = hidden.shape[:-1]
        if own_rows and group is not None:
            of_all *= group.size
        sizes = [*others, of_all] if batch_first else [of_all, *others]
        if list(labels.shape) != sizes:
            of = "hidden of each rank" if own_rows else "hidden"
            expected = f"shape {sizes} as {of} is {list(hidden.shape)}"
            raise ValueError(mismatch("labels", expected, list(labels.shape)))
        return True, Facts(None, dict)

    if group is None:
        prepare()
    else:
        together(group, "megatron", prepare)
