"""What ops share that compute gradients in the forward pass, for an upstream gradient of 1.

Their backward pass multiplies these gradients by the upstream gradient. Only kernels for Hopper do so.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import increment_version

from monoidreduce._ops.engine import _C, streams
from monoidreduce._ops.memory import empty_dense
from monoidreduce._ops.slices import TILE_COLUMNS
from monoidreduce._torch_private import mark_constant

__all__ = ["has_kernels", "scaled", "scaled_in_place"]


def has_kernels(device: int) -> bool:
    """Whether a GPU has kernels that multiply scores and dlogits, for operands of any width."""
    return bool(_C.can_keep(device, TILE_COLUMNS, TILE_COLUMNS, 1.0))


mark_constant(has_kernels)  # a compiler calls it while it traces


def scaled(gradients: Sequence[Tensor], by: Tensor, needed: Sequence[bool]) -> list[Tensor]:
    """by * each gradient that is needed. by: a number, on the device."""
    found = zip(gradients, needed, strict=False)
    return [_write_scaled(t, by, empty_dense(t)) if wanted else t.new_empty(0) for t, wanted in found]


def scaled_in_place(gradients: Sequence[Tensor], by: Tensor, needed: Sequence[bool]) -> list[Tensor]:
    """As `scaled`, in the memory of the gradients: for a pass after which nobody reads them.

    That of a weight is as large as the weight. Multiplying by 1 reads and writes nothing.
    """
    increment_version(gradients)  # torch refuses to read them again, where memory runs out on the way
    found = zip(gradients, needed, strict=False)
    return [_write_scaled(t, by, t) if wanted else t for t, wanted in found]


def _write_scaled(gradient: Tensor, by: Tensor, out: Tensor) -> Tensor:
    """Write by * gradient to `out`, which may be the gradient itself. It is rounded once, from float32."""
    factors = by.expand(len(gradient)).contiguous()
    _C.scale_rows(gradient, factors, out, None, False, 1, streams.current(out.device.index))
    return out
