"""The operators as `torch.library` ops, `torch.ops.monoidreduce.*`, with one file for each operator."""

from monoidreduce._ops import (
    attention,
    attention_varlen,
    cross_entropy,
    distillation,
    gated_mlp,
    log_probs,
    logsumexp,
    mlp,
    stored_scores,
)

__all__ = [
    "attention",
    "attention_varlen",
    "cross_entropy",
    "distillation",
    "gated_mlp",
    "log_probs",
    "logsumexp",
    "mlp",
    "stored_scores",
]
