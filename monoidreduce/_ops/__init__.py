"""The operators as `torch.library` ops, one file an operator: `torch.ops.monoidreduce.*`."""

from monoidreduce._ops import (
    attention,
    attention_varlen,
    cpp_monoid,
    gated_mlp,
    log_probs,
    losses,
    mlp,
    modified_attention,
    statistics,
    stored_scores,
)
from monoidreduce.flops import register_when_counted

__all__ = [
    "attention",
    "attention_varlen",
    "cpp_monoid",
    "gated_mlp",
    "log_probs",
    "losses",
    "mlp",
    "modified_attention",
    "statistics",
    "stored_scores",
]

register_when_counted()
