"""The operators as `torch.library` ops, `torch.ops.monoidreduce.*`, with one file for each operator."""

from monoidreduce._ops import (  # noqa: F401  # each registers its op
    attention,
    attention_varlen,
    cross_entropy,
    cross_entropy_parts,
    distillation,
    distillation_parts,
    gated_mlp,
    log_probs,
    logsumexp,
    mlp,
    stored_scores,
    target_logits,
)
