"""Matrix products by torch that are summed in float32 and rounded once; cuBLAS alone may round more often."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import matmul

__all__ = [
    "ELEMENTS_OF_A_WHOLE_GPU",
    "SUMS_IN_FLOAT32",
    "add_product",
    "fills_a_gpu",
    "multipliable",
    "without_autocast",
    "write_product",
    "write_products",
]

# Whether torch multiplies 16-bit matrices into a float32 sum that is never rounded: from 2.8 on.
SUMS_IN_FLOAT32 = hasattr(torch.ops.aten.addmm, "dtype_out")
# A product of this size has a tile of 128 x 128 for every multiprocessor of the largest GPUs.
ELEMENTS_OF_A_WHOLE_GPU = 1 << 22


def without_autocast(on: Tensor) -> AbstractContextManager[Any]:
    """A context in which torch multiplies in the dtype of the operands, on the device of `on`."""
    device = "cuda" if on.is_cuda else "cpu"  # torch.autocast takes no meta tensor's device, as a dry run has
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def multipliable(matrix: Tensor) -> Tensor:
    """The matrix, or a copy if its strides do not fit 32 bits, as cuBLAS needs them."""
    return matrix if matrix.stride(0) < 1 << 31 else matrix.contiguous()


def fills_a_gpu(product: Tensor) -> bool:
    """Whether a product is large enough that cuBLAS does not use split-K."""
    return product.numel() >= ELEMENTS_OF_A_WHOLE_GPU


def add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool = False) -> None:
    """total += a @ b, computed in total's dtype. a and b have that dtype, or are 16-bit if total is float32.

    first: total = a @ b; what total holds is not read.

    With split-K, cuBLAS 13.0 on an H100 may lose the last term of each sum: seen for 248 x 264 elements with
    25345 terms. So for small products the terms beyond a multiple of 8 are added by a second product.
    """
    beta = 0 if first else 1  # if it is 0, torch does not read total
    if total.dtype == a.dtype or total.is_cpu:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)
        return
    terms, whole = b.shape[0], b.shape[0] // 8 * 8
    products = [(a, b)]
    if not fills_a_gpu(total) and 0 < whole < terms:
        products = [(a[:, :whole], b[:whole]), (a[:, whole:], b[whole:])]
    for factors in products:
        if SUMS_IN_FLOAT32:
            torch.addmm(total, *factors, beta=beta, out_dtype=total.dtype, out=total)
        else:  # torch before 2.8: each product is rounded
            product = torch.mm(*factors)
            total.copy_(product) if beta == 0 else total.add_(product)
        beta = 1


def write_products(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out[i] = a[i] @ b[i], for 16-bit a and b on a GPU, summed in float32. out: 16-bit or float32.

    As in `add_product`, the terms beyond a multiple of 8 are products of their own.
    """
    terms, whole = b.shape[1], b.shape[1] // 8 * 8
    total = _sums_of_products(a[..., :whole], b[:, :whole]) if whole else None
    if whole < terms:
        rest = _sums_of_products(a[..., whole:], b[:, whole:])
        total = rest if total is None else total.add_(rest)
    if total is None:
        out.zero_()
    else:
        out.copy_(total)


def _sums_of_products(a: Tensor, b: Tensor) -> Tensor:
    with without_autocast(a):
        if hasattr(torch.ops.aten.bmm, "dtype"):
            return torch.bmm(a, b, out_dtype=torch.float32)
        return torch.bmm(a.float(), b.float())  # torch before 2.8


class _RoundedOnce:
    """A context in which cuBLAS adds the parts of a split product of this 16-bit dtype in float32.

    torch's setting for it, `allow_bf16_reduced_precision_reduction` or that of fp16, is one for all threads.
    The first thread to enter changes it, and the last one to leave restores it.
    """

    def __init__(self, name: str) -> None:
        self.name = f"allow_{name}_reduced_precision_reduction"
        self.lock, self.inside, self.allowed = Lock(), 0, False

    def __enter__(self) -> None:
        with self.lock:
            self.inside += 1
            if self.inside == 1:
                self.allowed = getattr(matmul, self.name)
                if self.allowed:
                    setattr(matmul, self.name, False)

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0 and self.allowed:
                setattr(matmul, self.name, True)


_ROUNDED_ONCE = {torch.bfloat16: _RoundedOnce("bf16"), torch.float16: _RoundedOnce("fp16")}


# Whether products with a bias obey the setting too: in torch where split-K can be forbidden as well.
_BIASED_OBEY = hasattr(matmul, "allow_bf16_reduced_precision_reduction_split_k")


def write_product(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    """out = a @ b + bias, in out's dtype, summed in float32. a and b have that dtype, or are 16-bit.

    A 16-bit product goes through a float32 tensor (add_product) in three cases. A small one on a GPU whose
    last terms need a product of their own. A small one with a bias, by an older torch. Any on a CPU: torch
    may give NaN beside an infinity.
    """
    of_16_bits = out.element_size() == 2
    may_split = of_16_bits and not out.is_cpu and not fills_a_gpu(out)
    obeys = b.shape[0] % 8 == 0 and (bias is None or _BIASED_OBEY)
    apart = of_16_bits and (out.is_cpu or (may_split and not obeys))
    if apart or not out.dtype == a.dtype == b.dtype:
        total = out.new_empty(out.shape, dtype=torch.float32) if apart else out
        if bias is not None:
            total.copy_(bias)
        add_product(total, a, b, first=bias is None)
        if apart:
            out.copy_(total)
        return
    with _ROUNDED_ONCE[out.dtype] if may_split else nullcontext():
        if bias is None:
            torch.mm(a, b, out=out)
        else:
            torch.addmm(bias, a, b, out=out)
