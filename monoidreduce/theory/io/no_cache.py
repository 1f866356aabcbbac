"""Algorithm 1: the gradient with an unlimited cache."""

from __future__ import annotations

import torch

from .two_level import COLUMN, Memory

__all__ = ["no_cache"]


def no_cache(memory: Memory) -> None:
    """Algorithm 1: reads every input once, holds n x n matrices in the cache, writes g once.

    Its I/O is the compulsory 4 n d + 3 d^2, with a cache of more than 3 n^2 words; Lemma C.3 bounds its
    space. The paper's line 8 prints g as n x n; its size is d x d (Definition 3.2).
    """
    n, d = memory.shape("A1")
    rows, width = slice(0, n), slice(0, d)
    a1, a2, x = memory.read("A1"), memory.read("A2"), memory.read("X")
    s, a = memory.zeros(rows, width), memory.zeros(rows, rows)
    memory.add_product(s, a1, x)
    memory.add_product(a, s, a2.T)
    memory.delete(x, s)
    memory.update(a, torch.exp)
    sums = memory.zeros(rows, COLUMN)
    memory.add_row_sums(sums, a)
    f = memory.compute(torch.div, a, sums)
    memory.delete(a, sums)
    a3, y = memory.read("A3"), memory.read("Y")
    h = memory.zeros(rows, width)
    memory.add_product(h, a3, y)
    memory.delete(a3, y)
    upstream, q = memory.read("dO"), memory.zeros(rows, rows)
    memory.add_product(q, upstream, h.T)
    memory.delete(upstream, h)
    v = memory.zeros(rows, COLUMN)
    memory.add_row_sums(v, f, q)
    p = memory.compute(lambda f, q, v: f * q - v * f, f, q, v)
    memory.delete(f, q, v)
    t, g = memory.zeros(width, rows), memory.zeros(width, width)
    memory.add_product(t, a1.T, p)
    memory.add_product(g, t, a2)
    memory.delete(a1, a2, p, t)
    memory.create("g", d, d)
    memory.write(g, "g")
    memory.delete(g)
