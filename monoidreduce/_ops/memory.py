"""What ops allocate and copy: results, gradients, and operands as tensor-core kernels read them.

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


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def allows_tf32(x: Tensor) -> bool:
    """Whether torch would let a GPU round x to tf32, as the factor of a matrix product."""
    return x.dtype == torch.float32 and _torch_private.allows_tf32()


def empty_statistics(like: Tensor, *shape: int) -> Tensor:
    # Here and elsewhere torch parses sizes as arguments in 2/3 of the time that it takes for a tuple.
    return like.new_empty(*shape, dtype=accumulation_dtype(like.dtype))


def empty_dense(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def new_gradient(of: Tensor, needed: bool, unrounded: bool = False) -> Tensor | None:
    """Memory for a gradient: empty on the CPU, where a kernel writes each element once; on a GPU zeros in the
    accumulation dtype, to which kernels add."""
    if not needed:
        return None
    return accumulator(of) if of.is_cuda or unrounded else empty_dense(of)


def new_bias_gradient(of: Tensor | None, needed: bool) -> Tensor | None:
    """What a kernel adds a bias gradient to."""
    return accumulator(of) if of is not None and needed else None


def accumulator(of: Tensor) -> Tensor:
    return torch.zeros_like(of, dtype=accumulation_dtype(of.dtype), memory_format=torch.contiguous_format)


def all_contiguous(*tensors: Tensor | None) -> list[Any]:
    """The tensors, or copies, that lie in one piece in the order of their axes."""
    return [None if t is None else t.contiguous() for t in tensors]


def in_16_byte_words(t: Tensor) -> Tensor:
    """The tensor in elements of 16 bytes, where its lines are made of such: torch copies strided tensors by
    elements."""
    step = 16 // t.element_size()
    *others, last = t.stride() or (0,)
    traced = torch.compiler.is_compiling() or type(t) is not Tensor  # which have no address
    if traced or last != 1 or t.numel() == 0 or t.data_ptr() % 16:
        return t
    distances = (t.shape[-1], t.storage_offset(), *others)
    return t if any(distance % step for distance in distances) else t.view(torch.complex128)


def contiguous(t: Tensor) -> Tensor:
    """The tensor, or a copy, that lies in one piece in the order of its axes."""
    return t if t.is_contiguous() else in_16_byte_words(t).contiguous().view(t.dtype)


def is_aligned(t: Tensor) -> bool:
    """Do tensor-core kernels read the tensor as it lies: rows dense, all else on 16 bytes."""
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
    """The tensor, or a copy, as tensor-core kernels read it."""
    return t if is_aligned(t) else t.clone(memory_format=torch.contiguous_format)


def copy_fitted(t: Tensor, out: Tensor) -> Tensor:
    """out, with t in it: the last two axes cut or filled up with zeros to out's sizes."""
    leading = (None,) * (4 - t.dim())
    _C.copy_fitted(t[leading], out[leading], 1, streams.current(t.device.index))
    return out


def padded(t: Tensor, axes: int = 1) -> Tensor:
    """The tensor as tensor-core kernels read it: as it is, or a copy whose last axes have sizes that are
    multiples of 8. Zeros do not change a product."""
    short = [axis for axis in range(-axes, 0) if t.shape[axis] % 8]
    if not short:
        return aligned(t)
    sizes = [*t.shape]
    for axis in short:
        sizes[axis] += -sizes[axis] % 8
    return copy_fitted(t, t.new_empty(*sizes))


def is_aligned_weight(t: Tensor, plan: _C.Plan) -> bool:
    """Do a plan's kernels read weights [V, D] as they lie: row by row or, where they can, as [D, V]."""
    return is_aligned(t) or (plan.transposed and is_aligned(t.mT))


def padded_weight(t: Tensor, plan: _C.Plan) -> Tensor:
    """The weights, or a copy, as a plan's kernels read them."""
    return t if t.shape[1] % 8 == 0 and is_aligned_weight(t, plan) else padded(t)


def is_aligned_bias(bias: Tensor) -> bool:
    """Are the rows of a bias [B, H, M, N] dense and all else on 16 bytes, as kernels read it in tiles."""
    step = 16 // bias.element_size()
    strides = [stride for stride, size in zip(bias.stride()[:-1], bias.shape[:-1], strict=True) if size > 1]
    dense = bias.stride(-1) == 1 or bias.shape[-1] == 1
    return bias.data_ptr() % 16 == 0 and dense and all(s % step == 0 for s in strides)


def aligned_bias(bias: Tensor) -> Tensor:
    """The bias, or a copy, as kernels read it in tiles."""
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
) -> list[Tensor]:
    """The gradients, each in the dtype of its input, and in its shape if that was padded; or _no_gradient.

    unrounded: those that need not be cut stay in the dtype in which they were summed.
    """
    return [
        (gradient if unrounded and gradient.shape == t.shape else _cut(gradient, t))
        if wanted and gradient is not None and t is not None
        else no_gradient(of)
        for gradient, t, wanted in zip(gradients, of, needed, strict=True)
    ]


def no_gradient(of: Sequence[Tensor | None]) -> Tensor:
    """What an op returns for a gradient that is not needed: vmap wants a fixed number of results."""
    assert of[0] is not None
    return of[0].new_empty(0)


def _cut(result: Tensor, like: Tensor) -> Tensor:
    """The first elements of the last axes, in the shape and dtype of `like`, in one pass."""
    if result.shape == like.shape:
        return result if result.dtype == like.dtype else result.to(like.dtype)
    return copy_fitted(result, like.new_empty(like.shape))


def cut_to_width(width: int, out: Tensor) -> Tensor:
    """The first elements of a result's rows, in memory of their own."""
    return copy_fitted(out, out.new_empty(*out.shape[:-1], width))


def launch_on(on: Tensor) -> tuple[int, int]:
    """The threads of the CPU engine, or a GPU's stream."""
    return (1, streams.current(on.device.index)) if on.is_cuda else (torch.get_num_threads(), 0)
