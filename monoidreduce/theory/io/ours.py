"""The two passes of this library's attention on tensor cores, with the tile sizes of its own plans.

The model is one multiprocessor: its cache holds a stationary tile and a streamed tile. `monoidreduce.cost`
simulates the same tiles with the L2 cache that all multiprocessors share.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .flash import compute_gradients, forward_by_tiles
from .masks import keeps
from .tiles import gradient_from, outer, probabilities, write_v
from .two_level import Memory, blocks

__all__ = ["OurTiles", "ours_backward", "ours_forward"]


@dataclass(frozen=True)
class OurTiles:
    """Tile sizes of the kernels of one call.

    Attributes:
        forward: (stationary rows, streamed columns).
        backward: with `adds_rows`: (rows, columns) of a tile, columns being stationary. Otherwise
            (stationary, streamed) lines of each of three passes.
        adds_rows: whether one pass computes all gradients and adds to dQ in memory; otherwise each gradient
            has a pass of its own.
    """

    forward: tuple[int, int]
    backward: tuple[int, int]
    adds_rows: bool


def ours_forward(memory: Memory, *, tiles: OurTiles, kept: Tensor | None = None) -> None:
    """The forward pass: O and l. Rows are stationary; K and V are streamed, a tile at a time."""
    forward_by_tiles(memory, kept, *tiles.forward)


def ours_backward(memory: Memory, *, tiles: OurTiles, kept: Tensor | None = None) -> None:
    """The backward pass: dQ, dK, dV. v is computed first, as in FlashAttention-2.

    Up to a width of 128 one pass with stationary columns follows: dQ is cleared before it, every tile adds to
    dQ in memory, and dQ is rounded after it. Wider heads have one pass for each gradient.
    """
    rows, columns = tiles.backward
    write_v(memory, rows)
    memory.end_phase("v")
    if not tiles.adds_rows:
        for name in ("dQ", "dK", "dV"):
            compute_one(memory, name, tiles.backward, kept)
            memory.end_phase(name)
        return
    n, d = memory.shape("Q")
    memory.create("dQ", n, d)
    for i in blocks(n, rows):
        zeros = memory.zeros(i, slice(0, d))
        memory.write(zeros, "dQ", i)
        memory.delete(zeros)
    memory.end_phase("dQ = 0")
    compute_gradients(memory, kept, columns, rows=rows, v_in_memory=True, cleared=True)
    memory.end_phase("dQ, dK, dV")
    for i in blocks(n, rows):
        total = memory.read("dQ", i)
        memory.write(total, "dQ", i)
        memory.delete(total)
    memory.end_phase("dQ rounded")


def compute_one(memory: Memory, name: str, tile: tuple[int, int], kept: Tensor | None) -> None:
    """Compute one gradient: dQ with stationary rows, or dK or dV with stationary columns.

    tile: (stationary lines, streamed lines).
    """
    n, d = memory.shape("Q")
    needs = ["Q", "dO", "l", "K"] if name == "dV" else ["Q", "dO", "l", "v", "K", "V"]
    by_rows = name == "dQ"
    of_columns = [of for of in needs if of in "KV"]
    of_rows = [of for of in needs if of not in of_columns]
    stay, stream = (of_rows, of_columns) if by_rows else (of_columns, of_rows)
    memory.create(name, n, d)
    for stays in blocks(n, tile[0]):
        staying = {of: memory.read(of, stays) for of in stay}
        total = memory.zeros(stays, slice(0, d))
        for streams in blocks(n, tile[1]):
            i, j = (stays, streams) if by_rows else (streams, stays)
            if not keeps(kept, i, j):
                continue
            streaming = {of: memory.read(of, streams) for of in stream}
            held = staying | streaming
            f = probabilities(memory, held["Q"], held["K"], held["l"], kept, i, j)
            if name == "dV":
                memory.add_product(total, f.T, held["dO"])
                memory.delete(f)
            else:
                p = outer(memory, held["dO"], held["V"])
                gradient_from(memory, p, f, held["v"])
                memory.delete(f)
                memory.add_product(total, *((p, held["K"]) if by_rows else (p.T, held["Q"])))
                memory.delete(p)
            memory.delete(*streaming.values())
        memory.write(total, name, stays)
        memory.delete(total, *staying.values())
