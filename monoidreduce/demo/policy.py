"""A policy-gradient loss over a vocabulary, implemented by a user-defined fold, by torch, and by built-in
ops.

Each implementation takes hidden [N, D], head [V, D] and token [N] integer, and returns each token's loss,
[N].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr

from .memory import Problem

ENTROPY = 0.01  # the weight of the entropy in the loss


@mr.statistics
def token_stats(score: Tensor, column: Tensor, label: Tensor) -> dict[str, Any]:
    p = mr.stat.softmax(score)
    target = mr.stat.total(torch.where(column == label, score, 0.0))
    return dict(lse=p.logsumexp, mean=p.mean(score), target=target)


def by_fold(hidden: Tensor, head: Tensor, token: Tensor) -> Tensor:
    """By token_stats above. The entropy is lse - mean."""
    s = token_stats(hidden, head, label=token)
    return _loss(s.target - s.lse, s.lse - s.mean)


def by_torch(hidden: Tensor, head: Tensor, token: Tensor) -> Tensor:
    """By torch, which stores all logits in the operands' dtype, and log-probabilities in float32 or
    float64."""
    logits = hidden @ head.T
    log_p = logits.log_softmax(1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return _loss(log_p.gather(1, token[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1))


def by_log_probs(hidden: Tensor, head: Tensor, token: Tensor) -> Tensor:
    """By the built-in operator that computes the same statistics."""
    s = mr.linear_log_probs(hidden, head, token, entropy=True)
    assert s.entropy is not None
    return _loss(s.log_probs, s.entropy)


def by_cross_entropy(hidden: Tensor, head: Tensor, token: Tensor) -> Tensor:
    """By linear_cross_entropy, without the entropy term."""
    return mr.linear_cross_entropy(hidden, head, token, reduction="none")


def _loss(log_prob: Tensor, entropy: Tensor) -> Tensor:
    return -log_prob - ENTROPY * entropy


BACKENDS = {
    "torch": by_torch,
    "token_stats": by_fold,
    "linear_log_probs": by_log_probs,
    "linear_cross_entropy": by_cross_entropy,
}


def tensors(
    tokens: int, vocabulary: int, dim: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [tokens, dim] and head [vocabulary, dim], which require gradients, and token [tokens]."""
    hidden = torch.randn(tokens, dim, device=device, dtype=dtype)
    head = torch.randn(vocabulary, dim, device=device, dtype=dtype) * dim**-0.5
    token = torch.randint(vocabulary, (tokens,), device=device)
    return hidden.requires_grad_(), head.requires_grad_(), token


def policy_problem(backend: str, vocabulary: int, tokens: int, dim: int, device: str, dtype: str) -> Problem:
    """The mean of an implementation's loss, in float32, for timing and memory."""
    place = torch.device(device)
    hidden, head, token = tensors(tokens, vocabulary, dim, place, getattr(torch, dtype))
    loss = BACKENDS[backend]
    return Problem(
        lambda: loss(hidden, head, token).float().mean(), (hidden, head), torch.ones((), device=place)
    )
