"""Calls of linear_log_probs with kept classes."""

from __future__ import annotations

import torch
from specimens import Inputs
from torch import Tensor


def words_of(keeps: Tensor) -> Tensor:
    """The definition: bit c % 32 of word c // 32 is keeps[..., c]."""
    *leading, classes = keeps.shape
    padded = torch.nn.functional.pad(keeps, (0, -classes % 32)).view(*leading, -1, 32)
    bits = torch.arange(32, device=keeps.device)
    return (padded.long() << bits).sum(-1).to(torch.int32)


def with_kept(inputs: Inputs, share: float = 0.3, lost: float = 0.1) -> tuple[Inputs, Tensor]:
    """The inputs with kept classes, and these as a mask. lost: the share of targets that are not kept."""
    target, classes = inputs["target"], len(inputs["weight"])
    keeps = torch.rand(*target.shape, classes, device=target.device) < share
    own = torch.rand(target.shape, device=target.device) >= lost
    keeps.scatter_(-1, target.clamp(min=0)[..., None], own[..., None])
    return {**inputs, "kept": words_of(keeps)}, keeps
