"""Calls described by sizes, with the names of the command line and of bench/results."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from monoidreduce._validate import mismatch

__all__ = ["OPERATORS", "SIZES", "call_of"]

MOST = 1 << 50  # bytes of a tensor; torch cannot represent sizes of 2^63 bytes

# For each operator: the required sizes, and the optional ones.
SIZES = {
    "attention": ("B H L d", "Hkv N causal window softcap bias"),
    "linear_cross_entropy": ("N V D", ""),
    "linear_distillation": ("N V D E", "loss"),
    "linear_log_probs": ("N V D", "entropy top1"),
    "mlp": ("B K d", "gated"),
    "logsumexp_matmul": ("M N F", ""),
}
# Operators by their names in bench/results.
OPERATORS = {
    "attention": "attention",
    "cross_entropy": "linear_cross_entropy",
    "distillation": "linear_distillation",
    "log_probs": "linear_log_probs",
    "mlp": "mlp",
    "logsumexp": "logsumexp_matmul",
}


def call_of(operator: str, sizes: dict[str, Any], dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    """The tensors of a call, on the meta device, and its options.

    sizes: as named in `SIZES`. "window" is the number of keys on either side; "bias" adds a bias [1, H, L,
    N].

    Raises ValueError for a tensor of more than 2^50 bytes.
    """

    def t(*shape: int, of: torch.dtype = dtype) -> Tensor:
        if math.prod(shape) * of.itemsize > MOST:
            raise ValueError(
                mismatch("sizes", "tensors of at most 2^50 bytes", f"one of shape {list(shape)}")
            )
        return torch.empty(shape, dtype=of, device="meta")

    if operator == "attention":
        B, H, L, d = (sizes[name] for name in "BHLd")
        heads, keys, window = sizes.get("Hkv", H), sizes.get("N", L), sizes.get("window")
        options = {
            "causal": bool(sizes.get("causal")),
            "softcap": sizes.get("softcap"),
            "window": None if window is None else (window, window),
            "bias": t(1, H, L, keys) if sizes.get("bias") else None,
        }
        return [t(B, H, L, d), t(B, heads, keys, d), t(B, heads, keys, d)], options
    if operator == "mlp":
        B, K, d = (sizes[name] for name in "BKd")
        gate = {"gate": t(K, d), "activation": "silu"} if sizes.get("gated") else {}
        return [t(B, d), t(K, d), t(d, K)], gate
    if operator == "logsumexp_matmul":
        M, N, F = (sizes[name] for name in "MNF")
        return [t(M, F), t(N, F)], {}
    N, V, D = (sizes[name] for name in "NVD")
    if operator == "linear_cross_entropy":
        return [t(N, D), t(V, D), t(N, of=torch.int64)], {}
    if operator == "linear_log_probs":
        asked = {name: bool(sizes.get(name)) for name in ("entropy", "top1")}
        return [t(N, D), t(V, D), t(N, of=torch.int64)], asked
    options = {"loss": sizes["loss"]} if "loss" in sizes else {}
    return [t(N, D), t(V, D), t(N, sizes["E"]), t(V, sizes["E"])], options
