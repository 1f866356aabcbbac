"""A byte-level transformer language model whose three memory-hungry layers come from a chosen backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import monoidreduce as mr

VOCABULARY = 256  # one token per byte


class Backend(NamedTuple):
    """The three layers in which the two models of the demo differ; everything else is shared."""

    attention: Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [B, H, L, d] -> [B, H, L, d]
    mlp: Callable[[Tensor, nn.Linear, nn.Linear], Tensor]  # x [..., D] -> [..., D] through the hidden width
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]  # x [N, D], weight [V, D], target [N] -> mean loss


BACKENDS = {
    "torch": Backend(
        attention=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        mlp=lambda x, up, down: down(F.gelu(up(x), approximate="tanh")),
        loss=lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target),
    ),
    "monoidreduce": Backend(
        attention=lambda q, k, v: mr.attention(q, k, v, causal=True),
        mlp=lambda x, up, down: mr.mlp(x, up.weight, down.weight, bias1=up.bias, bias2=down.bias),
        loss=lambda x, weight, target: mr.linear_cross_entropy(x, weight, target),
    ),
}


@dataclass(frozen=True)
class ModelSize:
    """Widths of the model: `length` tokens of width `dim`, `hidden` units in each MLP."""

    layers: int
    dim: int
    heads: int
    hidden: int
    length: int


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, size: ModelSize, backend: Backend) -> None:
        super().__init__()
        self.heads = size.heads
        self.backend = backend
        self.attention_norm = nn.LayerNorm(size.dim)
        self.qkv = nn.Linear(size.dim, 3 * size.dim, bias=False)
        self.out = nn.Linear(size.dim, size.dim, bias=False)
        self.mlp_norm = nn.LayerNorm(size.dim)
        self.up = nn.Linear(size.dim, size.hidden)
        self.down = nn.Linear(size.hidden, size.dim)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, L, D] -> [B, L, D]."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.backend.attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.backend.mlp(self.mlp_norm(x), self.up, self.down)


class Transformer(nn.Module):
    """Next-byte model; forward returns the mean cross entropy. Its weights do not depend on `backend`."""

    def __init__(self, size: ModelSize, backend: str) -> None:
        super().__init__()
        self.backend = BACKENDS[backend]
        self.token = nn.Embedding(VOCABULARY, size.dim)
        self.position = nn.Parameter(torch.zeros(size.length, size.dim))
        self.blocks = nn.Sequential(*(Block(size, self.backend) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.dim)
        self.head = nn.Linear(size.dim, VOCABULARY, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        """tokens [B, L] and target [B, L] integer -> loss []."""
        x = self.norm(self.blocks(self.token(tokens) + self.position))
        return self.backend.loss(x.flatten(0, 1), self.head.weight, target.flatten())
