"""Which rounding the errors of 16-bit attention come from: tensor-core arithmetic, emulated on a CPU.

    python scripts/emulate_attention_rounding.py

A fused kernel in bfloat16 rounds three things: the weights before the product with the values, the output,
and the local gradients. It rounds the local gradients dS = P (dP - delta) before the products with q and k.
delta = sum_j P_j dP_j, which fused kernels take as <grad_out, out>. Where a row is saturated (one weight is
nearly 1), dS is a small difference of dP and delta, and shows what delta has lost.

The script prints errors against float64, over the errors of torch's math path (float32 inside, results
rounded once). For each of four ways to delta it prints ratios for out, d_q, d_k and d_v. They are the mean
error's ratio and the maximum's.
"""

import math

import torch
from torch import Tensor

WIDTH, HEADS, QUERIES = 128, 4, 1024
# Keys, and the standard deviation of the scores.
CASES = ((1024, 1), (1024, 6), (1024, 36), (6, 36), (64, 36), (128, 36))


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def eager(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> list[Tensor]:
    """out, d_q, d_k, d_v of attention as it is written, in the dtype of the inputs."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    weights = (leaves[0] @ leaves[1].mT / math.sqrt(q.shape[-1])).softmax(-1)
    out = weights @ leaves[2]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def fused(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> dict[str, list[Tensor]]:
    """The same as tensor cores compute it, for each way to delta."""
    scale = 1 / math.sqrt(q.shape[-1])
    scores = q @ k.mT * scale
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    mass = exponentials.sum(-1, keepdim=True)
    weights, exact = exponentials / mass, rounded(exponentials) @ v / mass
    out, grad_weights = rounded(exact), grad_out @ v.mT

    def of(vectors: Tensor) -> Tensor:
        return (grad_out * vectors).sum(-1, keepdim=True)

    deltas = {
        "of the rounded output": of(out),
        "of the output and what rounding lost, in 16 bits": of(out + rounded(exact - out)),
        "of the output in float32": of(exact),
        "of weights and grad_out @ v": (weights * grad_weights).sum(-1, keepdim=True),
    }
    d_v = rounded(rounded(weights).mT @ grad_out)
    results = {}
    for name, delta in deltas.items():
        local = rounded(weights * (grad_weights - delta))
        results[name] = [out, rounded(local @ k * scale), rounded(local.mT @ q * scale), d_v]
    return results


def main() -> None:
    torch.manual_seed(0)
    for keys, std in CASES:
        q, k = (rounded(math.sqrt(std) * torch.randn(HEADS, n, WIDTH)) for n in (QUERIES, keys))
        v, grad_out = (rounded(torch.randn(HEADS, n, WIDTH)) for n in (keys, QUERIES))
        inputs = (q, k, v, grad_out)
        exact = eager(*(t.double() for t in inputs))
        base = [(rounded(y) - ref).abs() for y, ref in zip(eager(*inputs), exact, strict=True)]
        print(f"{QUERIES} queries, {keys} keys, scores of standard deviation {std}")
        for name, results in fused(*inputs).items():
            errors = [(y - ref).abs() for y, ref in zip(results, exact, strict=True)]
            ratios = [
                f"{float(e.mean() / b.mean()):.2f}/{float(e.max() / b.max()):.2f}"
                for e, b in zip(errors, base, strict=True)
            ]
            print(f"  delta {name:<50}{'  '.join(ratios)}")


if __name__ == "__main__":
    main()
