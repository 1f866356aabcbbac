"""Matrix products by torch that are summed in float32 and rounded once, whatever cuBLAS does on its own."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_product", "fills_a_gpu", "multipliable", "write_product"]

# With so many elements a product has a tile of 128 x 128 for every multiprocessor of the largest GPUs.
_ELEMENTS_OF_A_WHOLE_GPU = 1 << 22


def multipliable(matrix: Tensor) -> Tensor:
    """The matrix, or a copy if its strides do not fit 32 bits, as cuBLAS needs them."""
    return matrix if matrix.stride(0) < 1 << 31 else matrix.contiguous()


def fills_a_gpu(product: Tensor) -> bool:
    """Whether it has so many elements that cuBLAS does not split it along its sum."""
    return product.numel() >= _ELEMENTS_OF_A_WHOLE_GPU


def add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool = False) -> None:
    """total += a @ b, in total's dtype: from matrices of it, or in float32 from 16-bit ones.

    first: total = a @ b, and what total holds is not read.

    A product of cuBLAS (13.0, on an H100) that is split over multiprocessors along its sum may lose the last
    term. It did for 248 x 264 elements of 25345 terms. There whole eights of terms are one product, and the
    remaining terms another.
    """
    kept = 0 if first else 1  # times total; at 0 torch reads none of it
    if total.dtype == a.dtype or total.is_cpu:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=kept, out=total)
        return
    terms, whole = b.shape[0], b.shape[0] // 8 * 8
    products = [(a, b)]
    if not fills_a_gpu(total) and 0 < whole < terms:
        products = [(a[:, :whole], b[:whole]), (a[:, whole:], b[whole:])]
    for factors in products:
        if hasattr(torch.ops.aten.addmm, "dtype_out"):
            torch.addmm(total, *factors, beta=kept, out_dtype=total.dtype, out=total)
        else:  # torch before 2.8: each product is rounded
            product = torch.mm(*factors)
            total.copy_(product) if kept == 0 else total.add_(product)
        kept = 1


def write_product(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    """out = a @ b + bias, in out's dtype, from matrices of it or of 16 bits.

    torch splits a product of few elements over multiprocessors along its sum. Unless told otherwise it adds
    the parts in 16 bits. See add_product too. On a CPU the product may be NaN beside an infinity in 16 bits.
    """
    apart = out.element_size() == 2 and (out.is_cpu or not fills_a_gpu(out))
    if apart or not out.dtype == a.dtype == b.dtype:
        total = out.new_empty(out.shape, dtype=torch.float32) if apart else out
        if bias is not None:
            total.copy_(bias)
        add_product(total, a, b, first=bias is None)
        if apart:
            out.copy_(total)
    elif bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)
