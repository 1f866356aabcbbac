"""What the tests of `linear_topk` and `linear_sample` share: inputs, bits of kept classes, and oracles."""

from __future__ import annotations

import math
from typing import Any

import torch
from specimens import Inputs, cross_entropy_inputs
from torch import Tensor

from monoidreduce import reference
from monoidreduce.folds.program import streams


def head_inputs(*sizes: Any, **options: Any) -> Inputs:
    """x, weight and bias of `cross_entropy_inputs`."""
    inputs = cross_entropy_inputs(*sizes, **options)
    return {name: t for name, t in inputs.items() if name != "target"}


def kept_classes(shape: tuple[int, ...], classes: int, device: torch.device) -> Tensor:
    """[*shape, classes] bool: of the first token none, of the second all, of others about a third."""
    kept = torch.rand(*shape, classes, device=device) < 0.35
    lines = kept.view(-1, classes)
    lines[:1], lines[1:2] = False, True
    return kept


def packed(kept: Tensor) -> Tensor:
    """[..., ceil(classes / 32)] int32: bit c % 32 of word c // 32 is that of class c."""
    classes = kept.shape[-1]
    padded = torch.nn.functional.pad(kept, (0, -classes % 32)).unflatten(-1, (-1, 32))
    return (padded.long() << torch.arange(32, device=kept.device)).sum(-1).to(torch.int32)


def scores_of(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    kept: Tensor | None = None,
) -> Tensor:
    """Logits over temperatures; those over 0 are logits. kept: bool."""
    logits = reference._logits(x, weight, bias, logit_scale, softcap)
    divisor = torch.as_tensor(temperature, dtype=logits.dtype, device=x.device)
    divisor = torch.where(divisor == 0, 1.0, divisor)
    scores = logits / (divisor[..., None] if divisor.dim() else divisor)
    return scores if kept is None else scores.masked_fill(~kept, -math.inf)


def gumbel(seed: int, shape: tuple[int, ...], classes: int, device: torch.device) -> Tensor:
    """[*shape, classes] float64: the random numbers of a sample."""
    tokens = torch.arange(math.prod(shape), device=device)[:, None]
    stream = streams.stream(torch.tensor(seed, device=device), torch.zeros_like(tokens))
    uniform = streams.uniform(stream, tokens, torch.arange(classes, device=device)).double()
    return (-(-uniform.log()).log()).view(*shape, classes)


def sampled(seed: int, scores: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """The samples of float64 scores; and by how much the best sum exceeds the next one."""
    noise = gumbel(seed, tuple(scores.shape[:-1]), scores.shape[-1], scores.device)
    at_zero = torch.as_tensor(temperature, device=scores.device) == 0
    noise = noise.masked_fill(at_zero[..., None] if at_zero.dim() else at_zero, 0)
    best, index = (scores + noise).sort(descending=True, stable=True)
    index = torch.where(best[..., 0] == -math.inf, -1, index[..., 0])
    margin = best[..., 0] - best[..., 1] if scores.shape[-1] > 1 else torch.full_like(best[..., 0], math.inf)
    return index, margin.nan_to_num(math.inf, math.inf)


def sample_oracle(index: Tensor, **options: Any) -> Any:
    """A function of x, weight and bias: log-probabilities of these samples, and entropies."""
    temperature = options.get("temperature", 1.0)

    def oracle(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scores = scores_of(x, weight, bias, **options)
        none = (scores == -math.inf).all(-1, keepdim=True)
        shares = scores.masked_fill(none, 0.0).log_softmax(-1)
        log_prob = shares.gather(-1, index.clamp(min=0)[..., None])[..., 0]
        log_prob = torch.where(none[..., 0], -math.inf, log_prob)
        kept = shares > -math.inf
        terms = torch.where(kept, shares.exp(), 0.0) * torch.where(kept, shares, 0.0)
        entropy = torch.where(none[..., 0], 0.0, -terms.sum(-1))
        settled = torch.as_tensor(temperature, device=x.device) == 0
        entropy = torch.where(settled | none[..., 0], 0.0, entropy)
        return torch.where(settled & ~none[..., 0], 0.0, log_prob), entropy

    return oracle
