"""Plain-torch definitions of every operator, in any precision and on any device.

Each function computes the same as the fused operator of its name (same arguments, without ``workspace``), but
stores the whole score matrix. In float64 it is the oracle of the tests. In lower precision (products in the
operands' dtype, statistics in float32) it is the eager composition with which accuracy and speed are
compared. Gradients come from autograd.

Edge cases are those of the operators: an empty fold or a fully masked row gives output 0, log-sum-exp -inf
and gradients of exactly 0. Masked elements have no influence, even if they are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "ACTIVATIONS",
    "attention",
    "attention_varlen",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_log_probs",
    "linear_topk",
    "logsumexp_matmul",
    "merge_attention",
    "mlp",
]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda z: F.relu(z).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda z: z,
}


def _statistics_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64, else float32: the dtype of scores, sums and log-sum-exps."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _empty_rows(scores: Tensor) -> Tensor:
    """[..., N] -> [...]: True for rows without a score above -inf; also if N = 0."""
    return (scores == -math.inf).all(-1)


def _logsumexp(scores: Tensor) -> Tensor:
    """[..., N] -> [...]; an empty row gives -inf and passes no gradient."""
    empty = _empty_rows(scores)
    return scores.masked_fill(empty[..., None], 0.0).logsumexp(-1).masked_fill(empty, -math.inf)


def _softmax(scores: Tensor) -> Tensor:
    """[..., N] -> [..., N]; an empty row gives zeros and passes no gradient."""
    empty = _empty_rows(scores)[..., None]
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


def _softcap(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _reduce(loss: Tensor, used: Tensor, reduction: str, weights: Tensor | None = None) -> Tensor:
    """Reduce the per-token loss by "none", "sum" or "mean" over the used tokens; a mean over no tokens is 0.

    weights [...]: weights of the tokens. The mean then divides by their sum, and is NaN if all are 0.
    """
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    if reduction == "mean":
        if weights is None:
            total = used.sum()
        else:  # as in torch, the mean is NaN if all weights are 0, even with label smoothing
            weights = torch.where(used, weights, 0.0)
            total = torch.where(weights.any(), weights.sum(), math.nan)
        return loss.sum() / torch.where(used.any(), total, 1)
    raise ValueError(f"reduction: expected 'none', 'mean' or 'sum', got {reduction!r}")


def _window_mask(
    m: int, n: int, causal: bool, window: tuple[int | None, int | None] | None, device: torch.device
) -> Tensor | None:
    """[m, n] bool, True if the query sees the key; None if all are seen.

    The last query and key are aligned.
    """
    left, right = (None, None) if window is None else window
    if causal:
        right = 0 if right is None else min(right, 0)
    if left is None and right is None:
        return None
    distance = torch.arange(n, device=device) - (torch.arange(m, device=device)[:, None] + (n - m))
    keep = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        keep &= distance >= -left
    if right is not None:
        keep &= distance <= right
    return keep


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(mask(softcap(scale * q @ k^T) + bias)) @ v.

    q [B, H, M, F], k [B, Hkv, N, F], v [B, Hkv, N, D] -> out [B, H, M, D] in the dtype of q, and the
    natural-log lse [B, H, M] in the statistics dtype if return_lse. Query head h uses key head h // (H //
    Hkv). sinks [H]: for each head, the score of one more key with value 0.
    """
    statistics = _statistics_dtype(q)
    (heads, m, width), n = q.shape[1:], k.shape[-2]
    scale = 1.0 / math.sqrt(max(width, 1)) if scale is None else scale
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    keep = _window_mask(m, n, causal, window, q.device)
    if bias is not None and bias.dtype == torch.bool:
        keep = bias if keep is None else keep & bias

    # Excluded keys must not matter even if they are NaN, but a matrix product multiplies them by 0, and 0 *
    # NaN is NaN. So non-finite inputs use elementwise products over [B, H, M, N, width], with zeros for
    # excluded pairs.
    pairwise = keep is not None and not all(bool(t.isfinite().all()) for t in (q, k, v))
    if pairwise:
        pair = keep.expand(*q.shape[:2], m, n)[..., None]  # type: ignore[union-attr]
        q_pairs, k_pairs, v_pairs = (
            torch.where(pair, t.to(statistics), 0.0)
            for t in (q[..., :, None, :], k[..., None, :, :], v[..., None, :, :])
        )
        scores = ((q_pairs * k_pairs).sum(-1) * scale).to(q.dtype).to(statistics)
    else:
        scores = (q @ (k * scale).mT).to(statistics)

    scores = _softcap(scores, softcap)
    if bias is not None and bias.dtype != torch.bool:
        scores = scores + bias.to(statistics)
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf)
    if sinks is not None:
        sink = sinks.to(statistics)[:, None, None].expand(*q.shape[:3], 1)
        scores = torch.cat((scores, sink), -1)
    weights = _softmax(scores)[..., :n].to(q.dtype)
    out = (weights[..., None].to(statistics) * v_pairs).sum(-2).to(q.dtype) if pairwise else weights @ v
    return (out, _logsumexp(scores)) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of each packed sequence, with its options.

    q [T, H, F], k [S, Hkv, F], v [S, Hkv, D] -> out [T, H, D], lse [H, T]. cu_seqlens_*: [sequences + 1], the
    start of each sequence, and the end of the last. Queries behind that end see no key.
    """
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    of_queries = (cu_seqlens_q.diff().tolist(), len(q), q)
    of_keys = [(cu_seqlens_k.diff().tolist(), len(k), t) for t in (k, v)]
    split = (
        torch.split(t.transpose(0, 1)[None], [*lengths, all_of_them - sum(lengths)], 2)
        for lengths, all_of_them, t in (of_queries, *of_keys)
    )
    *sequences, (q_behind, k_behind, v_behind) = zip(*split, strict=True)
    sequences.append((q_behind, k_behind[:, :, :0], v_behind[:, :, :0]))
    parts = [attention(*each, return_lse=True, **options) for each in sequences]
    out, lse = (torch.cat(part, 2)[0] for part in zip(*parts, strict=True))
    return (out.transpose(0, 1), lse) if return_lse else out.transpose(0, 1)


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint sets of keys: out_* [B, H, M, D], lse_* [B, H, M] -> (out, lse)."""
    lse = _logsumexp(torch.stack((lse_a, lse_b), -1))
    weight_a, weight_b = _softmax(torch.stack((lse_a, lse_b), -1)).unbind(-1)
    out = weight_a[..., None] * out_a.to(lse.dtype) + weight_b[..., None] * out_b.to(lse.dtype)
    return out.to(out_a.dtype), lse


def _logits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """x [..., D], weight [V, D], bias [V], temperature a number or [...] -> [..., V].

    In the statistics dtype.
    """
    logits = (x @ weight.mT).to(_statistics_dtype(x)) * logit_scale
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    divisor = temperature.to(logits.dtype)[..., None] if isinstance(temperature, Tensor) else temperature
    return _softcap(logits, softcap) / divisor


def _used_and_outside(target: Tensor, ignore_index: int, classes: int) -> tuple[Tensor, Tensor]:
    """Two masks of the tokens: the target is not ignored; it is not ignored and lies outside [0, classes).

    Raises IndexError on the CPU if a token is in the second.
    """
    used = target != ignore_index
    outside = used & ((target < 0) | (target >= classes))
    if outside.device.type == "cpu" and bool(outside.any()):
        raise IndexError(f"target: expected class indices in [0, {classes}), got {int(target[outside][0])}")
    return used, outside


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    target_probs: Tensor | None = None,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross entropy of softcap(logit_scale * x @ weight^T + bias) against class indices.

    x [..., D], weight [V, D], bias [V], class_weight [V], target [...] -> the loss ([...] for
    reduction="none", otherwise a scalar) and, if return_lse, the lse [...], in the statistics dtype. With
    target_probs [..., K] there are K targets [..., K]. A target outside [0, V) that is not ignore_index
    raises IndexError on the CPU; on other devices its token is NaN.
    """
    logits = _logits(x, weight, bias, logit_scale, softcap)
    classes = logits.shape[-1]
    if target_probs is not None:
        return _soft_cross_entropy(
            logits, target, target_probs, class_weight, ignore_index, reduction, z_loss, return_lse
        )
    used, outside = _used_and_outside(target, ignore_index, classes)

    lse = _logsumexp(logits)
    is_target = torch.arange(classes, device=target.device) == target[..., None]
    # lse - logit is computed before summing, so that a large constant in all logits cancels.
    weights = logits.new_ones(classes) if class_weight is None else class_weight.to(logits.dtype)
    of_target = torch.where(is_target, weights, 0.0).sum(-1)
    loss = (1.0 - label_smoothing) * of_target * (lse - torch.where(is_target, logits, 0.0).sum(-1))
    if label_smoothing:
        loss = loss + label_smoothing / max(classes, 1) * (weights * (lse[..., None] - logits)).sum(-1)
    if z_loss:
        loss = loss + z_loss * lse.square()
    loss = torch.where(used, loss, 0.0).masked_fill(outside, math.nan)
    loss = _reduce(loss, used, reduction, None if class_weight is None else of_target)
    return (loss, lse) if return_lse else loss


def _soft_cross_entropy(
    logits: Tensor,
    target: Tensor,
    target_probs: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    z_loss: float,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross entropy against soft targets: target and target_probs [..., K], logits [..., V]."""
    used, outside = _used_and_outside(target, ignore_index, logits.shape[-1])
    lse, index = _logsumexp(logits), torch.where(used & ~outside, target, 0)
    probs = torch.where(used, target_probs.to(logits.dtype), 0.0)
    if class_weight is not None:
        probs = probs * class_weight.to(logits.dtype)[index]
    cost = lse[..., None] - logits.gather(-1, index)
    loss = torch.where(used, probs * cost, 0.0).sum(-1)
    if z_loss:
        loss = loss + z_loss * lse.square()
    some = used.any(-1)
    loss = torch.where(some, loss, 0.0).masked_fill(outside.any(-1), math.nan)
    loss = _reduce(loss, some, reduction, None)
    return (loss, lse) if return_lse else loss


def linear_distillation(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    loss: str = "cross_entropy",
    beta: float = 0.5,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    target: Tensor | None = None,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    teacher_grad: bool = False,
) -> Tensor:
    """Loss between two distributions over V classes: the student's softmax(x @ weight^T / T) and the
    teacher's.

    x [..., D], weight [V, D], teacher_x [..., E], teacher_weight [V, E], biases [V], mask [...] bool, target
    [...] -> the loss in the statistics dtype.
    """
    logits = _logits(x, weight, bias, 1.0, None)
    teacher_logits = _logits(teacher_x, teacher_weight, teacher_bias, 1.0, None)
    teacher_logits = teacher_logits if teacher_grad else teacher_logits.detach()
    log_s, log_t = ((scores / temperature).log_softmax(-1) for scores in (logits, teacher_logits))
    if loss == "cross_entropy":
        per_token = -(log_t.exp() * log_s).sum(-1)
    elif loss == "forward_kl":
        per_token = (log_t.exp() * (log_t - log_s)).sum(-1)
    elif loss == "reverse_kl":
        per_token = (log_s.exp() * (log_s - log_t)).sum(-1)
    elif loss == "jsd":
        log_m = torch.logaddexp(math.log(beta) + log_t, math.log1p(-beta) + log_s)
        per_token = beta * (log_t.exp() * (log_t - log_m)).sum(-1)
        per_token = per_token + (1 - beta) * (log_s.exp() * (log_s - log_m)).sum(-1)
    else:
        raise ValueError(f"loss: expected 'cross_entropy', 'forward_kl', 'reverse_kl' or 'jsd', got {loss!r}")
    used = torch.ones_like(per_token, dtype=torch.bool) if mask is None else mask
    if target is not None:
        used = used & (target != ignore_index)
        _, outside = _used_and_outside(torch.where(used, target, ignore_index), ignore_index, len(weight))
        chosen = torch.where(used & ~outside, target, 0)[..., None]
        hard = -logits.log_softmax(-1).gather(-1, chosen)[..., 0].masked_fill(outside, math.nan)
        per_token = (1 - hard_weight) * per_token + hard_weight * hard if hard_weight else per_token
    return _reduce(torch.where(used, per_token, 0.0), used, reduction)


def linear_log_probs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
    top1: bool = False,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Log-probabilities of targets under softmax(softcap(logit_scale * x @ weight^T + bias) / temperature).

    x [..., D], weight [V, D], bias [V], target [...], temperature a number or [...], kept
    [..., ceil(V / 32)] int32 words -> log_probs, entropy, top1 and lse, [...] each, in the statistics dtype;
    entropy and top1 are None unless asked for. A target outside [0, V) that is not ignore_index raises
    IndexError on the CPU; on other devices its log_probs is NaN.
    """
    scores = _logits(x, weight, bias, logit_scale, softcap, temperature)
    used, outside = _used_and_outside(target, ignore_index, scores.shape[-1])
    # Ignored tokens have no influence, even if they hold NaN.
    scores = torch.where(used[..., None], scores, 0.0)
    classes = torch.arange(scores.shape[-1], device=target.device)
    is_target, empty = classes == target[..., None], torch.zeros_like(used)
    if kept is not None:
        keeps = (kept[..., classes // 32] >> classes % 32 & 1).bool() | ~used[..., None]
        scores = torch.where(keeps, scores, -math.inf)
        empty = ~keeps.any(-1)
    lse = _logsumexp(scores)
    log_probs = torch.where(is_target, scores, 0.0).sum(-1) - lse
    if kept is not None:
        log_probs = log_probs.masked_fill((is_target & ~keeps).any(-1), -math.inf)
    log_probs = torch.where(used, log_probs, 0.0).masked_fill(outside, math.nan)
    shares = _softmax(scores)
    surprise = torch.where(shares > 0, lse[..., None] - scores, 0.0)
    entropies = torch.where(used, (shares * surprise).sum(-1), 0.0)
    best = torch.where(used, scores.argmax(-1), -1).masked_fill(empty, -1) if top1 else None
    return log_probs, entropies if entropy else None, best, torch.where(used, lse, 0.0)


def linear_topk(
    x: Tensor,
    weight: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The k most likely classes under softmax(softcap(logit_scale * x @ weight^T + bias) / temperature).

    x [..., D], weight [V, D], bias [V], temperature a number or [...] -> log_probs and index [..., k], and
    lse [...]. Of equal logits the lower class comes first; beyond the last class -inf and -1.
    """
    scores = _logits(x, weight, bias, logit_scale, softcap, temperature)
    lse = _logsumexp(scores)
    best, index = scores.sort(descending=True, stable=True)
    log_probs = torch.where(best == -math.inf, best, best - lse[..., None])
    missing = (0, max(k - scores.shape[-1], 0))
    log_probs, index = (t[..., :k] for t in (log_probs, index))
    return F.pad(log_probs, missing, value=-math.inf), F.pad(index, missing, value=-1), lse


def mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    activation: str = "gelu_tanh",
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    gate: Tensor | None = None,
    gate_bias: Tensor | None = None,
) -> Tensor:
    """act(x @ w1^T + bias1) @ w2^T + bias2, or with a gate
    (act(x @ gate^T + gate_bias) * (x @ w1^T + bias1)) @ w2^T + bias2.

    x [..., M], w1 and gate [K, M], w2 [N, K], bias1 and gate_bias [K], bias2 [N] -> [..., N] in the dtype of
    x.
    """
    act, values = ACTIVATIONS[activation], F.linear(x, w1, bias1)
    hidden = act(values) if gate is None else act(F.linear(x, gate, gate_bias)) * values
    return F.linear(hidden, w2, bias2)


def logsumexp_matmul(a: Tensor, b: Tensor, *, scale: float = 1.0) -> Tensor:
    """log sum_j exp(scale * <a_i, b_j>).

    a [..., M, F], b [N, F] -> [..., M] in the statistics dtype; -inf if N = 0.
    """
    return _logsumexp((a @ b.mT).to(_statistics_dtype(a)) * scale)
