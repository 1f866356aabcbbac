"""The operators as `torch.library` ops, one file an operator: `torch.ops.monoidreduce.*`."""

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
