"""Log-probabilities and entropies with the signature of verl's fused kernel. verl is not imported."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from monoidreduce._validate import check_choice
from monoidreduce.functional import linear_log_probs

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor | None = 1.0,
    reduction: str | None = "none",
    dist_process_group: dist.ProcessGroup | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`verl.utils.kernel.linear_cross_entropy.linear_cross_entropy`, by `monoidreduce.linear_log_probs`.

    Args:
        hidden: [..., D]. With a group, the same on all ranks.
        weight: [V, D], or with a group this rank's shard of the classes, of equal size on each rank.
        labels: [...] class indices. A token with label -100 has results 0 and no gradient.
        temperature: a number, or a tensor [...] with one temperature for each token. None means 1.
        reduction: "none", "sum" or "mean" of the log-probabilities over all tokens. None means "none".
        dist_process_group: the ranks that the classes are sharded over. As in verl, each rank's gradient of
            hidden is then a part, and the gradient is the sum over ranks. Megatron's layers, which gather
            hidden, take that sum.
        kept: the classes that the sampler kept, int32 [..., ceil(V / 32)], as of
            `monoidreduce.linear_log_probs`; with a group those of all classes. verl has no such argument.

    Returns:
        The log-probabilities, [tokens] or a scalar, and the entropies [tokens]. Both are differentiable and
        in the accumulation dtype.

    Raises:
        TypeError, ValueError, IndexError: as `monoidreduce.linear_log_probs`.
    """
    reduction = "none" if reduction is None else reduction
    check_choice("reduction", reduction, ("none", "sum", "mean"))
    if dist_process_group is not None and hidden.requires_grad:
        # linear_log_probs gives every rank the whole gradient, so each takes an equal part of it.
        ranks = dist.get_world_size(dist_process_group)
        hidden = hidden.view_as(hidden)  # the hook must not stay on the caller's tensor
        hidden.register_hook(lambda grad: grad / ranks)  # type: ignore[no-untyped-call]
    found = linear_log_probs(
        hidden,
        weight,
        labels,
        temperature=1.0 if temperature is None else temperature,
        entropy=True,
        kept=kept,
        ranks=dist_process_group,
    )
    assert found.entropy is not None
    log_probs = found.log_probs.flatten()
    if reduction != "none":
        log_probs = log_probs.sum() if reduction == "sum" else log_probs.mean()
    return log_probs, found.entropy.flatten()
