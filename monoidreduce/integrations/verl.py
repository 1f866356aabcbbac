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
) -> tuple[Tensor, Tensor]:
    """`verl.utils.kernel.linear_cross_entropy.linear_cross_entropy` over `monoidreduce.linear_log_probs`.

    Args:
        hidden: [..., D]. With a group it is the same on all ranks.
        weight: [V, D], or with a group this rank's part of the classes, equally many on each rank.
        labels: [...] class indices. One of -100 has results 0 and no gradient.
        temperature: of the logits, or [...] one of each token. None is 1.
        reduction: "none", "sum" or "mean", of the log-probabilities over all tokens. None is "none".
        dist_process_group: the ranks that have the classes. As in verl the gradient of hidden is then the sum
            of what the ranks have. Megatron's layers, which gather hidden, take that sum.

    Returns:
        The log-probabilities, [tokens] or a scalar, and the entropies [tokens]. Both are differentiable, and
        have the accumulation dtype.

    Raises:
        TypeError, ValueError, IndexError: as `monoidreduce.linear_log_probs`.
    """
    reduction = "none" if reduction is None else reduction
    check_choice("reduction", reduction, ("none", "sum", "mean"))
    if dist_process_group is not None and hidden.requires_grad:
        # All ranks have the whole gradient.
        ranks = dist.get_world_size(dist_process_group)
        hidden = hidden.view_as(hidden)  # for a hook that the caller's tensor has not
        hidden.register_hook(lambda grad: grad / ranks)  # type: ignore[no-untyped-call]
    found = linear_log_probs(
        hidden,
        weight,
        labels,
        temperature=1.0 if temperature is None else temperature,
        entropy=True,
        process_group=dist_process_group,
    )
    assert found.entropy is not None
    log_probs = found.log_probs.flatten()
    if reduction != "none":
        log_probs = log_probs.sum() if reduction == "sum" else log_probs.mean()
    return log_probs, found.entropy.flatten()
