"""A consistency model: a network that jumps from any time of a flow to its end.

Its loss needs how the network's output moves along the flow, a derivative in the
direction (dx/dt, 1) of its inputs: one forward pass of forward mode (Lu and Song,
"Simplifying, stabilizing and scaling continuous-time consistency models").
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from compare import compare
from torch import Tensor

import monoidreduce as mr

Layer = Callable[..., Tensor]


def network(
    attention: Layer, mlp: Layer, x: Tensor, t: Tensor, weights: dict[str, Tensor]
) -> Tensor:
    """One block of a transformer. x [tokens, D], t []"""
    x = x + t * weights["of_time"]
    q, k, v = (x @ weights["qkv"]).view(len(x), 3, 2, -1).permute(1, 2, 0, 3)
    mixed = attention(q[None], k[None], v[None])[0].transpose(0, 1).flatten(1)
    x = x + mixed @ weights["out"]
    return x + mlp(x, weights["w1"], weights["w2"])


def loss(attention: Layer, mlp: Layer, x: Tensor, noise: Tensor, **w: Tensor) -> Tensor:
    t = torch.tensor(0.3)
    speed = noise - x
    out, moved = torch.func.jvp(
        lambda x, t: network(attention, mlp, x, t, w),
        (x + t * speed, t),
        (speed, torch.ones(())),
    )
    return F.mse_loss(out, (speed - t * moved).detach())


def fused(**inputs: Tensor) -> Tensor:
    return loss(mr.attention, mr.mlp, **inputs)


def plain(**inputs: Tensor) -> Tensor:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / q.shape[3] ** 0.5).softmax(3) @ v

    return loss(
        attention,
        lambda x, w1, w2: F.gelu(x @ w1.T, approximate="tanh") @ w2.T,
        **inputs,
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    shapes = {
        "x": (48, 16),
        "noise": (48, 16),
        "of_time": (16,),
        "qkv": (16, 48),
        "out": (16, 16),
        "w1": (64, 16),
        "w2": (16, 64),
    }
    compare(fused, plain, {name: torch.randn(s) / 4 for name, s in shapes.items()})
