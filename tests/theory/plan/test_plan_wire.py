"""What ranks send, counted by a transport, is what the planner's formulas and its ring say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[3]))
sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))

import counted_rings
from counted_rings import Wire
from measure_collectives import COUNTED, NO_LINK, count, sends

from monoidreduce import plan
from monoidreduce.theory.plan.collectives import COLLECTIVES

SIZES = (24, 23, 5)  # elements: parts are even for 2, 3 and 4 ranks, or some longer by one
PLAYED = [*COLLECTIVES, "ring-all-to-all"]


def _played(group: Any, name: str, elements: int) -> tuple[int, list[Tensor]]:
    """Bytes that a rank sent, and its parts afterwards. Its object has its rank added to each element."""
    wire = Wire(group)
    parts = [*(torch.arange(1.0, elements + 1) + 100 * wire.rank).tensor_split(wire.ranks)]
    if name == "all-gather":
        parts = [part if rank == wire.rank else torch.zeros_like(part) for rank, part in enumerate(parts)]
    found = getattr(counted_rings, name.replace("-", "_"))(wire, parts)
    return wire.sent, [part.clone() for part in found or parts]


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", PLAYED)
def test_bytes_on_the_wire(name: str, ranks: int, elements: int) -> None:
    """Of all ranks together. Where parts are even, each rank sends as much."""
    answers = on_ranks(ranks, _played, name, elements)
    whole = 4 * elements * (ranks if name.endswith("all-to-all") else 1)
    counted = [sent for sent, _ in answers]
    if name in COLLECTIVES:
        assert sum(counted) == pytest.approx(ranks * sends(NO_LINK, ranks, whole)[name].bytes, rel=1e-12)
    if ranks % 2 == 0 and (name != "all-to-all" or ranks == 2):
        ring = plan.ring(name.removeprefix("ring-"), ranks, dummy=False).sent
        assert sum(counted) == ranks * ring * whole
    assert elements % ranks or len(set(counted)) == 1


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", PLAYED)
def test_the_rings_are_the_collectives(name: str, ranks: int, elements: int) -> None:
    """So the bytes that are counted suffice, and none is left out."""
    objects = [torch.arange(1.0, elements + 1) + 100 * rank for rank in range(ranks)]
    split = [each.tensor_split(ranks) for each in objects]
    total = torch.stack(objects).sum(0).tensor_split(ranks)
    for rank, (_, found) in enumerate(on_ranks(ranks, _played, name, elements)):
        if name.endswith("all-to-all"):
            expected = [parts[rank] for parts in split]
        elif name == "all-gather":
            expected = [parts[source] for source, parts in enumerate(split)]
        else:
            expected = [*total]
        if name == "reduce-scatter":
            found, expected = found[rank : rank + 1], expected[rank : rank + 1]
        assert all(map(torch.equal, found, expected)) and len(found) == len(expected)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_script_counts_the_same(ranks: int) -> None:
    first, *others = on_ranks(ranks, count)
    assert all(found == first for found in others)
    assert [name for name, *_ in first] == [*COLLECTIVES] * len(COUNTED)
    for name, bytes, sent, said in first:
        assert bytes // 4 in (*COUNTED, *(ranks * elements for elements in COUNTED))
        assert sent == round(said) == round(ranks * sends(NO_LINK, ranks, bytes)[name].bytes) > 0
