"""Calls over ranks: an example by hand, and what has to hold whatever the constants are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import monoidreduce as mr
from monoidreduce import plan
from monoidreduce.plan import HARDWARE, SPLITS, Link
from monoidreduce.theory.costs.cost import cost_of_shard

HEAD = {"N": 8192, "V": 128256, "D": 4096}
CALLS: dict[str, dict[str, Any]] = {
    "linear_cross_entropy": HEAD,
    "linear_distillation": {"N": 4096, "V": 128256, "D": 2048, "E": 4096},
    "linear_log_probs": HEAD | {"entropy": True},
    "mlp": {"B": 16384, "K": 16384, "d": 4096, "gated": True},
    "attention": {"B": 1, "H": 32, "Hkv": 8, "L": 32768, "d": 128, "causal": True},
}
EVERY = [(operator, split) for operator, names in SPLITS.items() for split in names]
# 1e9 bytes/s and 1 ms in a node; a tenth of the rate, and 10 ms a step, between nodes.
ROUND = replace(HARDWARE["h200"], within=Link(1e9, 1e-3, "round"), between=Link(1e8, 1e-2, "round"))


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]


def passes(cost: mr.Cost) -> tuple[float, float]:
    backward = sum(p.seconds for p in cost.passes if p.backward)
    return cost.seconds - backward, backward


def test_cross_entropy_of_two_ranks_by_hand() -> None:
    N, V, D = 64, 1024, 256
    found = plan.over_ranks("linear_cross_entropy", {"N": N, "V": V, "D": D}, 2, ROUND, split="columns")
    x, whole, shard = tensors((N, D), (V, D), (V // 2, D))
    target = torch.empty(N, dtype=torch.int64, device="meta")
    fold = cost_of_shard("linear_cross_entropy", x, shard, target, hardware=ROUND)
    assert (found.forward.fold, found.backward.fold) == passes(fold)
    assert found.alone == mr.cost("linear_cross_entropy", x, whole, target, hardware=ROUND).seconds
    # Four floats a token to the other rank; half of the gradient in float32, and a summed half in bfloat16.
    sends = [*found.forward.sends, *found.backward.sends]
    assert [s.bytes for s in sends] == [4 * 4 * N, 4 * N * D / 2, 2 * N * D / 2] == [1024, 32768, 16384]
    assert [s.seconds for s in sends] == pytest.approx([1.001024e-3, 1.032768e-3, 1.016384e-3], rel=1e-12)
    assert found.forward.sent == 1024 and found.backward.sent == 49152
    # Summed: half of the gradient added to another half, and rounded by that.
    moved = (2 * 4 + 2) * N * D / 2
    assert found.backward.copying == pytest.approx(moved / 4.277e12, rel=1e-12)
    seconds = sum(s.seconds for s in sends) + found.forward.copying + found.backward.copying
    assert found.seconds == pytest.approx(fold.seconds + seconds, rel=1e-12)
    assert found.efficiency == pytest.approx(found.alone / (2 * found.seconds), rel=1e-12)


def test_a_network_between_nodes_by_hand() -> None:
    """16 ranks are two nodes: a node's keys come through the networks of its 8 devices."""
    sizes = {"B": 1, "H": 16, "L": 1600, "d": 64}
    found = plan.over_ranks("attention", sizes, 16, ROUND, split="all_gather", layout="contiguous")
    k, _ = found.forward.sends
    whole = 2 * 1600 * 16 * 64
    assert k.bytes == whole * 15 / 16
    assert k.seconds == pytest.approx(1e-3 + 1e-2 + max(k.bytes / 1e9, whole / 2 / 8 / 1e8), rel=1e-12)
    q = plan.over_ranks("attention", sizes, 16, ROUND, split="ulysses").forward.sends[0]
    # An all-to-all: 8 of 16 parts of the own buffer go through the own part of the network.
    buffer = 2 * 100 * 16 * 64
    assert q.bytes == buffer * 15 / 16
    assert q.seconds == pytest.approx(1.1e-2 + buffer / 2 / 1e8, rel=1e-12)


def test_a_ring_by_hand() -> None:
    """Of 4 ranks: own keys, then three parts of half of the scores each; 3 steps, and gradients go home."""
    sizes = {"B": 1, "H": 4, "L": 4096, "d": 64, "causal": True}
    found = plan.over_ranks("attention", sizes, 4, ROUND, split="ring")
    q, half = tensors((1, 4, 1024, 64), (1, 4, 512, 64))
    own = passes(mr.cost("attention", q, q, q, causal=True, hardware=ROUND))
    other = passes(mr.cost("attention", q, half, half, hardware=ROUND))
    assert found.forward.fold == pytest.approx(own[0] + 3 * other[0], rel=1e-12)
    assert found.backward.fold == pytest.approx(own[1] + 3 * other[1], rel=1e-12)
    elements = 2 * 4 * 1024 * 64
    assert [s.bytes for s in found.forward.sends] == [2 * elements] * 3
    assert [s.bytes for s in found.backward.sends] == [6 * elements] * 3 + [4 * elements]
    # Steps of 1 ms and more hide all kernels but the last one.
    assert found.forward.hidden == pytest.approx(found.forward.fold - other[0], rel=1e-12)


@pytest.mark.parametrize(("operator", "split"), EVERY)
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_slower_link_is_never_faster(operator: str, split: str, ranks: int) -> None:
    h200 = HARDWARE["h200"]
    assert h200.within is not None
    slower = replace(h200.within, rate=h200.within.rate / 4)
    later = replace(h200.within, latency=10 * h200.within.latency)
    found, *others = (
        plan.over_ranks(operator, CALLS[operator], ranks, gpu, split=split)
        for gpu in (h200, replace(h200, within=slower), replace(h200, within=later))
    )
    for other in others:
        assert other.seconds >= found.seconds
        if found.forward.sends:  # data parallel attention sends nothing
            assert other.forward.seconds >= found.forward.seconds


@pytest.mark.release
@pytest.mark.parametrize(("operator", "split"), EVERY)
def test_more_ranks_take_less_time_each_less_well_used(operator: str, split: str) -> None:
    """In a node. A batch of one sequence is not split. No workspace: more ranks keep more in theirs."""
    sizes = CALLS[operator] | ({"B": 8} if operator == "attention" else {})
    usual = [plan.over_ranks(operator, sizes, n, "h200", split=split).seconds for n in (2, 4, 8)]
    assert usual == sorted(usual, reverse=True)
    with mr.workspace(0):
        found = [plan.over_ranks(operator, sizes, n, "h200", split=split) for n in (2, 4, 8)]
    seconds, efficiencies = ([getattr(f, name) for f in found] for name in ("seconds", "efficiency"))
    assert seconds == sorted(seconds, reverse=True)
    if split != "data" or operator != "attention":
        assert efficiencies == sorted(efficiencies, reverse=True)
    assert efficiencies[0] < 1.1  # smaller parts may fit a GPU's waves better


@pytest.mark.parametrize("ranks", [2, 8, 64, 1024])
@pytest.mark.parametrize("operator", SPLITS)
def test_the_split_to_take_is_the_fastest(operator: str, ranks: int) -> None:
    found = plan.splits(operator, CALLS[operator], ranks, "h200")
    assert [f.seconds for f in found] == sorted(f.seconds for f in found)
    names = {f.split for f in found}
    expected = {*SPLITS[operator]} - {"ring"}
    assert names == (expected - {"ulysses"} if ranks > 32 else expected)


def test_classes_win_while_tokens_are_few() -> None:
    """Columns send 6 N D bytes a rank, in float32 and bfloat16; all-reduced gradients of weights 4 V D."""
    best = {
        n: plan.splits("linear_cross_entropy", HEAD | {"N": n}, 8, "h200")[0].split for n in (8192, 2**20)
    }
    assert best == {8192: "columns", 2**20: "data"}


def test_zigzag_halves_the_longest_part() -> None:
    found = {
        layout: plan.over_ranks("attention", CALLS["attention"], 8, "h200", split="all_gather", layout=layout)
        for layout in ("zigzag", "contiguous")
    }
    assert found["zigzag"].forward.fold < 0.65 * found["contiguous"].forward.fold


def test_a_table() -> None:
    text = str(plan.over_ranks("attention", CALLS["attention"], 2, "h200", split="ring"))
    assert text.startswith("attention by ring over 2 x h200: ")
    assert "step of k and v" in text and "behind kernels" in text and "67.11 MB" in text


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"operator": "attend"}, "operator: expected one of linear_cross_entropy"),
        ({"split": "ulysses"}, "split: expected one of columns, data, got 'ulysses'"),
        ({"ranks": 1}, "ranks: expected an int >= 2, got 1"),
        ({"ranks": 12}, "ranks: expected at most 8, or whole nodes of as many, got 12"),
        ({"hardware": "b200"}, "hardware: expected a GPU whose links were measured, got b200"),
        ({"hardware": "h300"}, "hardware: expected one of"),
        ({"sizes": {"N": 8}}, "sizes: expected N, V, D, got N"),
        ({"sizes": HEAD | {"window": 8}}, "sizes: expected N, V, D, got N, V, D, window"),
        ({"sizes": HEAD | {"N": 0}}, "N: expected an int >= 1, got 0"),
        ({"layout": "striped"}, "layout: expected one of contiguous, zigzag, got 'striped'"),
        (
            {"operator": "attention", "sizes": CALLS["attention"] | {"Hkv": 5}},
            "Hkv: expected a divisor of H=32",
        ),
        (
            {"operator": "attention", "sizes": CALLS["attention"], "ranks": 64, "split": "ulysses"},
            "split: expected one of all_gather, data where 64 ranks cannot share the heads evenly",
        ),
    ],
)
def test_wrong_arguments(changed: dict[str, Any], complaint: str) -> None:
    given: dict[str, Any] = {
        "operator": "linear_cross_entropy",
        "sizes": HEAD,
        "ranks": 2,
        "hardware": "h200",
        "split": "all_gather" if changed.get("operator") == "attention" else "columns",
    } | changed
    operator, sizes, ranks, hardware = (given.pop(n) for n in ("operator", "sizes", "ranks", "hardware"))
    with pytest.raises(ValueError, match=complaint.replace("(", r"\(")):
        plan.over_ranks(operator, sizes, ranks, hardware, **given)


@pytest.mark.parametrize(
    ("operator", "switch"), [("attention", "causal"), ("mlp", "gated"), ("linear_log_probs", "entropy")]
)
@pytest.mark.parametrize("given", ["no", 1])
def test_a_switch_is_true_or_false(operator: str, switch: str, given: Any) -> None:
    sizes = CALLS[operator] | {switch: given}
    with pytest.raises(TypeError, match=f"{switch}: expected True or False, got {given!r}"):
        plan.over_ranks(operator, sizes, 2, "h200", split="data")
    with pytest.raises(TypeError, match=f"{switch}: expected True or False, got {given!r}"):
        plan.splits(operator, sizes, 2, "h200")


def test_types() -> None:
    with pytest.raises(TypeError, match="dtype: expected float64"):
        plan.over_ranks("mlp", CALLS["mlp"], 2, "h200", split="data", dtype=torch.int64)
    with pytest.raises(TypeError, match="hardware: expected a Hardware or the name of one, got 7"):
        plan.over_ranks("mlp", CALLS["mlp"], 2, 7, split="data")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ranks: expected an int >= 1"):
        plan.splits("mlp", CALLS["mlp"], 2.0, "h200")  # type: ignore[arg-type]
