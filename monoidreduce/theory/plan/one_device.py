"""FLOPs and bytes of kernels on one device (paper, Table 1 and Appendix A), with two bytes per element."""

from __future__ import annotations

from dataclasses import dataclass

from monoidreduce.theory.plan._positive import check_numbers
from monoidreduce.theory.plan.roofline import Work

__all__ = [
    "Footprint",
    "attention_backward",
    "attention_forward",
    "fused_mlp",
    "gemm",
    "launch_overhead",
    "linear_backward",
    "linear_forward",
    "naive_attention_forward",
    "naive_gemm",
    "stored_mlp",
]

BF16 = 2


def gemm(d1: float, d2: float, d3: float) -> Work:
    """[d1, d2] @ [d2, d3], each matrix moved once (Table 1, A.1): I = 1 / (1/d1 + 1/d2 + 1/d3).

    A tiled kernel moves at least these bytes (A.1.2), so its intensity is at most this.
    """
    check_numbers(d1=d1, d2=d2, d3=d3)
    return Work(2 * d1 * d2 * d3, BF16 * (d1 * d2 + d2 * d3 + d1 * d3))


def naive_gemm(d1: float, d2: float, d3: float) -> Work:
    """The same product, reading both factors of every multiplication (A.1.1): I = 1 / (2 + 1/d2)."""
    check_numbers(d1=d1, d2=d2, d3=d3)
    return Work(2 * d1 * d2 * d3, BF16 * (2 * d1 * d2 * d3 + d1 * d3))


def launch_overhead(products: float, seconds: float, launch_seconds: float = 5e-6) -> float:
    """Time of `products` separate kernel launches over the time of one batched launch (footnote 10).

    seconds: of one product. launch_seconds: overhead of a launch.
    """
    check_numbers(products=products, seconds=seconds, launch_seconds=launch_seconds)
    return products * (launch_seconds + seconds) / (launch_seconds + products * seconds)


def linear_forward(tokens: float, width: float, factor: float) -> Work:
    """[tokens, width] @ [width, factor * width] (Table 1, A.2): I = 1 / (1/B + 1/d_F).

    d_F = F d / (F + 1).
    """
    check_numbers(tokens=tokens, width=width, factor=factor)
    return gemm(tokens, width, factor * width)


def linear_backward(tokens: float, width: float, factor: float, remat: bool = False) -> Work:
    """The products for the gradients of input and weight: twice the forward (Table 1, A.2).

    remat: the input is recomputed from the previous layer, which is assumed to have the same size: three
    times.
    """
    return (3 if remat else 2) * linear_forward(tokens, width, factor)


def attention_forward(sequences: float, length: float, width: float, causal: bool = True) -> Work:
    """Tiled attention (Table 1, A.3): 4 N T^2 d FLOPs, half of them if causal.

    Queries, keys, values and output are moved once; the paper writes Theta(N T d) bytes.
    """
    check_numbers(sequences=sequences, length=length, width=width)
    return Work(
        4 * sequences * length**2 * width / (2 if causal else 1), 4 * BF16 * sequences * length * width
    )


def attention_backward(
    sequences: float, length: float, width: float, causal: bool = True, remat: bool = False
) -> Work:
    """The four products of the gradients (Table 1, A.3): 8 N T^2 d FLOPs, half of them if causal.

    The forward's four tensors and their gradients are moved once, so bytes, like FLOPs, are twice the
    forward's. As in the paper, recomputing the scores is not counted; kernels that do it execute 10 N T^2 d.
    remat: the forward runs again: 12 N T^2 d.
    """
    return (3 if remat else 2) * attention_forward(sequences, length, width, causal)


def naive_attention_forward(sequences: float, heads: float, length: float, head_width: float) -> Work:
    """Attention that stores scores and probabilities (A.3): I = T d_H / (T + d_H) / 2.

    Both are written and read once; the paper writes Theta(N H T^2 + N T d) bytes. Masked scores are computed
    too.
    """
    check_numbers(sequences=sequences, heads=heads, length=length, head_width=head_width)
    scores, values = sequences * heads * length**2, sequences * heads * length * head_width
    return Work(4 * scores * head_width, 4 * BF16 * (scores + values))


@dataclass(frozen=True)
class Footprint:
    """FLOPs of a layer's forward and backward, and the number of elements it holds in memory."""

    flops: float
    elements: float


def stored_mlp(tokens: float, width: float, hidden: float) -> Footprint:
    """sigma(X W1) W2 with stored hidden values (MonoidReduce, section 4).

    12 B K D FLOPs, B D + 2 K D + B K elements.
    """
    check_numbers(tokens=tokens, width=width, hidden=hidden)
    return Footprint(12 * tokens * hidden * width, tokens * width + 2 * hidden * width + tokens * hidden)


def fused_mlp(tokens: float, width: float, hidden: float) -> Footprint:
    """The same layer as a fold that recomputes hidden values in backward (MonoidReduce, section 4).

    14 B K D FLOPs, B D + 2 K D elements.
    """
    check_numbers(tokens=tokens, width=width, hidden=hidden)
    return Footprint(14 * tokens * hidden * width, tokens * width + 2 * hidden * width)
