"""Tile sizes of this library's attention, read from its plans. The algorithms of `io/ours.py` take them."""

from __future__ import annotations

import torch

from monoidreduce._validate import mismatch
from monoidreduce.inspection import resolved
from monoidreduce.theory.costs.modelled import modelled_run
from monoidreduce.theory.costs.sizes import call_of
from monoidreduce.theory.hardware import find
from monoidreduce.theory.io.ours import OurTiles
from monoidreduce.theory.io.two_level import check_sizes

__all__ = ["our_tiles"]


def our_tiles(
    n: int, d: int, *, hardware: str = "h100", dtype: torch.dtype = torch.bfloat16, heads: int = 256
) -> OurTiles:
    """The tile sizes of a call of `monoidreduce.attention`, from its plan. Nothing runs.

    Args:
        n: number of queries and of keys.
        d: width of a head.
        hardware: name of a GPU in `monoidreduce.hardware`; it need not be present.
        dtype: dtype of the operands.
        heads: number of heads; enough that no head is split between multiprocessors.

    Raises:
        ValueError: `n`, `d` or `heads` is below 1; or the call has no such tiles: in float32, except for
            heads up to 128 wide on Hopper; for heads wider than 256; or for so few heads that they are split.
    """
    check_sizes(n=n, d=d, heads=heads)
    tensors, options = call_of("attention", {"B": 1, "H": heads, "L": n, "d": d}, dtype)
    operator, call = resolved("attention", tuple(tensors), options)
    run = modelled_run(operator, call, ("q", "k", "v"), find(hardware).facts())
    plans = {launch.name: launch.plan for launch in run.launches if launch.plan is not None}
    forward, backward = plans["attention_forward"], plans["attention_backward"]
    backward_tile = backward.streamed_tile or backward.tile
    if forward.packing is not None or forward.tile is None or backward_tile is None:
        expected = "a call of many heads on tensor cores"
        got = f"{heads} heads of width {d} in {dtype} on {hardware}: {forward.tier}"
        raise ValueError(mismatch("n, d, heads", expected, got))
    return OurTiles(forward.tile, backward_tile, backward.adds_rows)
