"""The operators as `torch.library` ops, one file an operator: `torch.ops.monoidreduce.*`."""

from monoidreduce._ops import attention, attention_varlen, gated_mlp, log_probs, losses, mlp, stored_scores

__all__ = ["attention", "attention_varlen", "gated_mlp", "log_probs", "losses", "mlp", "stored_scores"]
