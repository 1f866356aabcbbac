"""Allocation of results and gradients, and copies of operands in the layout that tensor-core kernels need.

Row statistics, losses and gradient accumulators have the accumulation dtype: float32, or float64 for float64
inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from monoidreduce import _torch_private
from monoidreduce._ops.engine import _C, streams
from monoidreduce.precision import float32_products


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def allows_tf32(x: Tensor) -> bool:
    """Whether torch allows a GPU to round x to tf32 in matrix products."""
    return x.dtype == torch.float32 and float32_products().tf32 and _torch_private.allows_tf32()


def allows_planes() -> bool:
    """Whether a GPU may multiply float32 operands in planes of float16 (planes.py)."""
    return float32_products().planes


def empty_statistics(like: Tensor, *shape: int) -> Tensor:
    # Sizes as separate arguments: torch parses a tuple of them 1.5 times as slowly.
    return like.new_empty(*shape, dtype=accumulation_dtype(like.dtype))


def empty_dense(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def new_gradient(of: Tensor, needed: bool, unrounded: bool = False) -> Tensor | None:
    """Memory for a gradient; None if it is not needed. On the CPU kernels write each element once, so it is
    empty. On a GPU kernels add to it, so it is zeros in the accumulation dtype."""
    if not needed:
        return None
    return accumulator(of) if of.is_cuda or unrounded else empty_dense(of)


def weight_sums(of: Tensor, needed: bool, sum_to: Tensor | None, unrounded: bool) -> Tensor | None:
    """Memory for the gradient of a weight, for kernels that compute it whole; None if it is not needed.

    sum_to: from a caller who wants the gradient added to it (UNROUNDED_WEIGHT in registry.py). Kernels of a
    GPU add to it themselves; `add_to` adds what a CPU kernel wrote. unrounded: in the accumulation dtype.
    """
    if sum_to is not None and of.is_cuda:
        return sum_to
    return new_gradient(of, needed or sum_to is not None, unrounded or sum_to is not None)


def add_to(sum_to: Tensor | None, gradient: Tensor | None) -> None:
    """Add a gradient, unless it has been summed there already. It may be padded to more columns."""
    if sum_to is not None and gradient is not None and gradient is not sum_to:
        sum_to += gradient[:, : sum_to.shape[1]]


def new_bias_gradient(of: Tensor | None, needed: bool) -> Tensor | None:
    """Zeros, to which kernels add the gradient of a bias; None if it is not needed."""
    return accumulator(of) if of is not None and needed else None


def empty_sums(of: Tensor) -> Tensor:
    """Memory for a gradient of `of`, in the accumulation dtype. Kernels clear it before they add to it."""
    return empty_statistics(of, *of.shape)


def accumulator(of: Tensor) -> Tensor:
    return torch.zeros_like(of, dtype=accumulation_dtype(of.dtype), memory_format=torch.contiguous_format)


def all_contiguous(*tensors: Tensor | None) -> list[Any]:
    """Contiguous versions of the tensors: themselves, or copies."""
    return [None if t is None else t.contiguous() for t in tensors]


def in_16_byte_words(t: Tensor) -> Tensor:
    """A view in elements of 16 bytes, if the last axis is made of whole ones; otherwise the tensor itself.

    torch copies strided tensors element by element, so larger elements are faster.
    """
    step = 16 // t.element_size()
    *others, last = t.stride() or (0,)
    traced = torch.compiler.is_compiling() or type(t) is not Tensor  # such a tensor may have no address
    if traced or last != 1 or t.numel() == 0 or t.data_ptr() % 16:
        return t
    distances = (t.shape[-1], t.storage_offset(), *others)
    return t if any(distance % step for distance in distances) else t.view(torch.complex128)


def contiguous(t: Tensor) -> Tensor:
    """A contiguous version of the tensor: itself, or a fast copy."""
    return t if t.is_contiguous() else in_16_byte_words(t).contiguous().view(t.dtype)


def is_aligned(t: Tensor) -> bool:
    """Whether TMA and cp.async can read the tensor in place: the last axis has stride 1, the address is a
    multiple of 16 bytes, and the other strides are multiples of 8 elements."""
    if t.data_ptr() % 16 != 0:
        return False
    if t.is_contiguous() and t.shape[-1] % 8 == 0:
        return True
    *strides, last = t.stride()
    for stride, size in zip(strides, t.shape, strict=False):
        if size > 1 and (stride <= 0 or stride % 8 != 0):
            return False
    return last == 1


def aligned(t: Tensor) -> Tensor:
    """The tensor, or an aligned copy (is_aligned)."""
    return t if is_aligned(t) else t.clone(memory_format=torch.contiguous_format)


def copy_fitted(t: Tensor, out: Tensor) -> Tensor:
    """Copies t into out and returns out. The last two axes are cut, or padded with zeros, to the sizes of
    out."""
    leading = (None,) * (4 - t.dim())
    _C.copy_fitted(t[leading], out[leading], 1, streams.current(t.device.index))
    return out


def padded(t: Tensor, axes: int = 1) -> Tensor:
    """The tensor, or a copy, aligned and with the last `axes` axes padded with zeros to multiples of 8, as
    tensor-core kernels need. The zeros do not change a product."""
    short = [axis for axis in range(-axes, 0) if t.shape[axis] % 8]
    if not short:
        return aligned(t)
    sizes = [*t.shape]
    for axis in short:
        sizes[axis] += -sizes[axis] % 8
    return copy_fitted(t, t.new_empty(*sizes))


def is_aligned_weight(t: Tensor, plan: _C.Plan) -> bool:
    """Whether the plan's kernels can read weights [V, D] in place, row-major or (some) column-major."""
    return is_aligned(t) or (plan.transposed and is_aligned(t.mT))


def padded_weight(t: Tensor, plan: _C.Plan) -> Tensor:
    """The weights, or a copy, in a layout that the plan's kernels can read."""
    return t if t.shape[1] % 8 == 0 and is_aligned_weight(t, plan) else padded(t)


def is_aligned_bias(bias: Tensor) -> bool:
    """Whether kernels can read tiles of a bias [B, H, M, N] in place: like is_aligned, but broadcast axes
    (stride 0) are allowed."""
    step = 16 // bias.element_size()
    strides = [stride for stride, size in zip(bias.stride()[:-1], bias.shape[:-1], strict=True) if size > 1]
    dense = bias.stride(-1) == 1 or bias.shape[-1] == 1
    return bias.data_ptr() % 16 == 0 and dense and all(s % step == 0 for s in strides)


def aligned_bias(bias: Tensor) -> Tensor:
    """The bias, or an aligned copy. Broadcast axes stay broadcast."""
    if is_aligned_bias(bias):
        return bias
    step = 16 // bias.element_size()
    given = bias[tuple(slice(None if stride else 1) for stride in bias.stride())]
    copy = bias.new_empty(*given.shape[:-1], -(-given.shape[-1] // step) * step)[..., : given.shape[-1]]
    return copy.copy_(given).expand(bias.shape)


def rounded_gradients(
    gradients: Iterable[Tensor | None],
    of: Sequence[Tensor | None],
    needed: Iterable[bool],
    unrounded: bool = False,
    unrounded_weight: bool = False,
) -> list[Tensor]:
    """The gradients, cut to the shape and rounded to the dtype of their inputs.

    Where one is not needed, the result is an empty tensor (no_gradient).

    unrounded: gradients that need no cut keep the dtype in which they were summed. unrounded_weight: the
    second one keeps it in any case.
    """
    found = []
    for i, (gradient, t, wanted) in enumerate(zip(gradients, of, needed, strict=True)):
        if not wanted or gradient is None or t is None:
            found.append(no_gradient(of))
        elif i == 1 and unrounded_weight:
            found.append(gradient if gradient.shape == t.shape else gradient[:, : t.shape[1]].contiguous())
        elif gradient.shape != t.shape:  # cut and rounded in one kernel
            found.append(copy_fitted(gradient, t.new_empty(t.shape)))
        else:
            found.append(gradient if unrounded or gradient.dtype == t.dtype else gradient.to(t.dtype))
    return found


def no_gradient(of: Sequence[Tensor | None]) -> Tensor:
    """An empty tensor, which an op returns for a gradient that is not needed: torch.func.vmap requires a
    fixed number of results."""
    assert of[0] is not None
    return of[0].new_empty(0)


def cut_to_width(width: int, out: Tensor) -> Tensor:
    """A copy of out[..., :width]."""
    return copy_fitted(out, out.new_empty(*out.shape[:-1], width))


def launch_on(on: Tensor) -> tuple[int, int]:
    """The last arguments of a `_C` call: (number of CPU threads, handle of the CUDA stream)."""
    return (1, streams.current(on.device.index)) if on.is_cuda else (torch.get_num_threads(), 0)
