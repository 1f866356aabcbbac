"""Time and memory of this library's operators on one chip of a mesh, by `monoidreduce.cost`."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

import torch

from monoidreduce.theory.costs.cost import cost, cost_of_shard
from monoidreduce.theory.costs.sizes import call_of
from monoidreduce.theory.hardware import Hardware
from monoidreduce.theory.plan.mesh import Mesh
from monoidreduce.theory.plan.transformer import Model
from monoidreduce.workspace import get_workspace, workspace

__all__ = ["Taken", "check_operators", "operators_of"]


class Taken(NamedTuple):
    """Seconds of forward and backward, and peak bytes besides inputs, outputs and gradients."""

    forward: float
    backward: float
    memory: int


def check_operators(hardware: Hardware) -> None:
    """Raise ValueError unless `mr.cost` knows the hardware."""
    hardware.facts()


def operators_of(model: Model, mesh: Mesh, tokens: float, length: float) -> dict[str, Taken]:
    """Cost of a layer's attention and feedforward, and of the loss, on the slowest chip.

    Sizes that do not divide evenly are rounded up, so a chip has whole sequences. If sequences are sharded, a
    chip has all keys and values and a zigzag shard of the queries, as in `monoidreduce.distributed`.
    Communication is not counted.

    Args:
        model, mesh: as in `Plan`.
        tokens: tokens of a chip in one forward pass.
        length: tokens of a sequence.
    """
    tp, context, classes = mesh.size("tp"), mesh.size("context"), mesh.size("tp", "vocab")
    heads, whole = model.heads // tp, ceil(length)
    # The least number of key heads that a chip needs and that divides its query heads; chips may share one.
    key_heads = next(n for n in range(ceil(model.kv_heads / tp), heads + 1) if heads % n == 0)
    chunk = ceil(whole / (2 * context))
    folds = [(whole, whole)] if context == 1 else [(chunk, chunk), (chunk, whole)]
    rows = ceil(tokens)

    def taken(operator: str, shard: bool = False, **sizes: int) -> Taken:
        return _taken(operator, mesh.hardware, torch.bfloat16, shard, get_workspace(), **sizes)

    attention = [
        taken(
            "attention",
            B=ceil(tokens * context / length),
            H=heads,
            Hkv=key_heads,
            L=queries,
            N=keys,
            d=model.head_columns,
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


@lru_cache(maxsize=4096)  # plans of one batch ask for the same sizes many times
def _taken(
    operator: str, hardware: Hardware, dtype: torch.dtype, shard: bool, held: int, **sizes: int
) -> Taken:
    """Cost of one operator. shard: its columns are sharded over chips. held: bytes of the workspace."""
    tensors, options = call_of(operator, sizes, dtype)
    with workspace(held):
        found = (cost_of_shard if shard else cost)(operator, *tensors, hardware=hardware, **options)
    backward = sum(each.seconds for each in found.passes if each.backward)
    return Taken(found.seconds - backward, backward, found.peak_memory)
