"""What the operators of this library take on a chip of a mesh, by `monoidreduce.cost`."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

import torch

from monoidreduce._validate import mismatch
from monoidreduce.theory.costs.cost import cost, cost_of_shard
from monoidreduce.theory.costs.sizes import call_of
from monoidreduce.theory.hardware import Hardware
from monoidreduce.theory.plan.mesh import Mesh
from monoidreduce.theory.plan.transformer import Model
from monoidreduce.workspace import get_workspace, workspace

__all__ = ["Taken", "check_operators", "operators_of"]

_DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by bytes of an element


class Taken(NamedTuple):
    """Seconds of a forward and of a backward pass, and the most bytes beside inputs, outputs, gradients."""

    forward: float
    backward: float
    memory: int


def check_operators(hardware: Hardware, activations: float) -> None:
    """Raises ValueError unless `mr.cost` has a model of the hardware and of elements of so many bytes."""
    hardware.facts()
    if activations not in _DTYPES:
        raise ValueError(mismatch("precision", "activations of 2 or 4 bytes beside cost", activations))


def operators_of(
    model: Model, mesh: Mesh, tokens: float, length: float, activations: float
) -> dict[str, Taken]:
    """Attention and feedforward of a layer, and the loss, on the chip that takes longest.

    Sizes that do not come out even are rounded up, so a chip has whole sequences. Keys and values of a
    sharded sequence are there whole, and its queries are a zigzag, as in `monoidreduce.distributed`. Nothing
    that is sent counts.

    Args:
        model, mesh: as of a `Plan`.
        tokens: of a chip.
        length: tokens of a sequence.
        activations: bytes of an element.
    """
    tp, context, classes = mesh.size("tp"), mesh.size("context"), mesh.size("tp", "vocab")
    heads, whole = model.heads // tp, ceil(length)
    # So many heads of keys that they divide the chip's heads: chips may share one.
    key_heads = next(n for n in range(ceil(model.kv_heads / tp), heads + 1) if heads % n == 0)
    chunk = ceil(whole / (2 * context))
    folds = [(whole, whole)] if context == 1 else [(chunk, chunk), (chunk, whole)]
    rows = ceil(tokens)

    def taken(operator: str, shard: bool = False, **sizes: int) -> Taken:
        return _taken(operator, mesh.hardware, _DTYPES[int(activations)], shard, get_workspace(), **sizes)

    attention = [
        taken(
            "attention",
            B=ceil(tokens * context / length),
            H=heads,
            Hkv=key_heads,
            L=queries,
            N=keys,
            d=model.width // model.heads,
            causal=True,
        )
        for queries, keys in folds
    ]
    hidden, width = model.hidden // tp, model.width
    return {
        "attention": Taken(
            sum(part.forward for part in attention),
            sum(part.backward for part in attention),
            max(part.memory for part in attention),
        ),
        "feedforward": taken("mlp", tp > 1, B=rows, K=hidden, d=width, gated=model.gated),
        "loss": taken(
            "linear_cross_entropy", classes > 1, N=rows, V=ceil(model.vocabulary / classes), D=width
        ),
    }


@lru_cache(maxsize=4096)  # plans of one batch ask for the same parts over and over
def _taken(
    operator: str, hardware: Hardware, dtype: torch.dtype, shard: bool, held: int, **sizes: int
) -> Taken:
    """shard: of columns over chips. held: the workspace, bytes."""
    tensors, options = call_of(operator, sizes, dtype)
    with workspace(held):
        found = (cost_of_shard if shard else cost)(operator, *tensors, hardware=hardware, **options)
    backward = sum(each.seconds for each in found.passes if each.backward)
    return Taken(found.seconds - backward, backward, found.peak_memory)
