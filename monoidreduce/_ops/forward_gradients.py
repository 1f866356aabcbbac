"""What ops share that compute gradients in the forward pass, for an upstream gradient of 1.

Their backward pass multiplies these gradients by the upstream gradient. Only kernels for Hopper do so.

The ops `linear_cross_entropy_parts` and `linear_distillation_parts` are for a float32 weight beside a 16-bit
x, as under autocast. That of cross entropy is also for float32 operands in planes of float16 (planes.py). The
gradient of such a weight is a float32 sum that may be added to. So the forward pass can finish some tokens
before it begins the next: their logits, for all classes, become dlogits in the workspace, and these the two
products for dX and dW. No logit is computed twice: cross entropy has three products, where slices of classes
(dlogits.py) have up to four. Beyond dX and dW it takes the workspace and a 16-bit copy of the weight, or its
planes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from monoidreduce._ops.engine import _C, streams
from monoidreduce._ops.memory import allows_planes, empty_dense
from monoidreduce._ops.mlp_parts import parts_of
from monoidreduce._ops.slices import TILE_COLUMNS, enough_planes_fit, fewest_tokens_fit
from monoidreduce._torch_private import mark_constant

__all__ = [
    "FEWEST_ROWS",
    "add_parts",
    "can_take_parts",
    "has_float32_gradient",
    "has_kernels",
    "new_results",
    "planned_workspace",
    "scaled",
    "scaled_in_place",
]

# float32 operands that are smaller take no products of planes, or are multiplied in no time.
FEWEST_ROWS, _FEWEST_CLASSES, _NARROWEST = 64, 1024, 128
_BYTES_OF_A_TILE = 8 * TILE_COLUMNS  # of one token's dlogits, as float32 planes, which are largest


def has_kernels(device: int) -> bool:
    """Whether a GPU has kernels that multiply scores and dlogits, for operands of any width."""
    return bool(_C.can_keep(device, TILE_COLUMNS, TILE_COLUMNS, 1.0))


mark_constant(has_kernels)  # a compiler calls it while it traces


def has_float32_gradient(x: Tensor, weight: Tensor) -> bool:
    """Whether tensor cores may sum the gradient of the weight in float32, so that parts can be added."""
    if weight.dtype != x.dtype:
        return True
    return x.dtype == torch.float32 and not torch.compiler.is_compiling() and allows_planes()


def can_take_parts(x: Tensor, weight: Tensor, reduction: str, workspace: int | None, heads: int = 1) -> bool:
    """Whether an op computes the loss and its gradients in parts of tokens, as far as these decide.

    x, weight: has_float32_gradient says yes. heads: 2 for distillation.
    """
    if x.dtype not in (torch.bfloat16, torch.float32) or not x.is_cuda or workspace is None:
        return False
    if reduction == "none" or x.shape[1] % 8 or 0 in x.shape or torch.compiler.is_compiling():
        return False
    rows, (columns, width) = len(x), weight.shape
    if x.dtype == torch.float32:
        fit = rows >= FEWEST_ROWS and columns >= _FEWEST_CLASSES and width >= _NARROWEST
        fit = fit and enough_planes_fit(rows, columns, width, workspace)
    else:
        fit = fewest_tokens_fit(rows, columns, workspace, heads)
    return fit and has_kernels(x.device.index)


def planned_workspace(tokens: int, workspace: int) -> int:
    """The workspace to plan the backward pass of all tokens with.

    Each part has room for all classes of its tokens. `workspace` may not hold one tile of classes for all
    tokens, and a plan for so little has no tensor cores.
    """
    return max(workspace, _BYTES_OF_A_TILE * tokens)


def new_results(x: Tensor, weight: Tensor, of_x: bool, of_weight: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the loss and the gradients of x and weight; a gradient that is not wanted is empty."""
    wanted = zip((x, weight), (of_x, of_weight), strict=True)
    dx, dweight = (t.new_empty(t.shape if is_wanted else 0) for t, is_wanted in wanted)
    return x.new_empty((), dtype=torch.float32), dx, dweight


def add_parts(
    results: tuple[Tensor, Tensor, Tensor],
    at_once: int,
    losses: Tensor,
    step: Callable[[slice, Tensor | None], tuple[Tensor, Tensor]],
) -> None:
    """Write the gradients and each token's loss, for at_once tokens at a time.

    results: from `new_results`. losses: [tokens]. step: step(part, sum_to) computes a part of the tokens,
        adds their gradient of the weight to sum_to, and returns their losses and their dx.
    """
    _, dx, dweight = results
    sum_to = dweight.zero_() if dweight.numel() else None
    for part in parts_of(len(losses), at_once):
        losses[part], of_rows = step(part, sum_to)
        if dx.numel():
            dx[part] = of_rows


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
