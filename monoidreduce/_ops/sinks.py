"""The sinks of attention by torch, for the ways of a call that no kernel with sinks takes.

A sink is one more element of each row's fold, of a score of its head and value 0. Its derivative is that of
any element, P (dP - delta), where dP is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monoidreduce._ops.memory import accumulation_dtype

__all__ = ["join_sinks", "score_sinks", "sink_gradient"]


def score_sinks(q: Tensor, sinks: Tensor | None) -> Tensor | None:
    """[H] as kernels read them, in the accumulation dtype."""
    return None if sinks is None else sinks.to(accumulation_dtype(q.dtype)).contiguous()


def join_sinks(lse: Tensor, lse_low: Tensor, sinks: Tensor) -> None:
    """Add the sinks [H] to log-sum-exps of rows [H, M], in both words."""
    total = torch.logaddexp(lse.double() + lse_low, sinks.double()[:, None])
    lse.copy_(total)
    lse_low.copy_((total - lse).nan_to_num_(0.0))


def sink_gradient(sinks: Tensor, lse: Tensor, lse_low: Tensor, centre: Tensor) -> Tensor:
    """The gradient by sinks [H], from the log-sum-exps of rows [B, H, M] with them.

    centre: the gradient by a row's lse, less the product of its output and the gradient by that.
    """
    share = ((sinks[:, None] - lse.masked_fill(lse == -torch.inf, 0.0)) - lse_low).exp()
    return (share * centre).sum((0, 2), dtype=torch.float64).to(sinks.dtype)
