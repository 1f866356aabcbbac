"""The operators as `torch.library` ops, one file an operator: `torch.ops.monoidreduce.*`."""

from monoidreduce._ops import attention, losses, mlp
from monoidreduce.flops import register_when_counted

__all__ = ["attention", "losses", "mlp"]

register_when_counted()
