"""Meshes for a number of chips: those of published runs, or better ones."""

from __future__ import annotations

from typing import Any

import pytest

from monoidreduce import plan
from monoidreduce.plan import HARDWARE, MODELS, RUNS, Axis, Batch, Plan, Run

H100 = HARDWARE["h100"]


def sizes(found: Plan) -> dict[str, int]:
    return {axis.strategy: axis.size for axis in found.mesh.axes if axis.size > 1}


@pytest.mark.parametrize(
    ("model", "hardware", "chips", "tokens", "sequence", "expected"),
    [
        ("palm-540b", "v4", 3072, 2**21, 2048, {"fsdp": 256, "tp": 12}),
        ("palm-540b", "v4", 6144, 2**22, 2048, {"dp": 2, "fsdp": 256, "tp": 12}),
        ("llama3-8b", "h100", 8, 2**17, 8192, {"fsdp": 8}),
    ],
)
def test_meshes_of_published_runs(
    model: str, hardware: str, chips: int, tokens: float, sequence: float, expected: dict[str, int]
) -> None:
    found = plan.propose(MODELS[model], Batch(tokens, sequence), HARDWARE[hardware], chips)
    assert sizes(found.best) == expected


KEPT = [
    "precision",
    "dispatch",
    "overlap",
    "stored_scores",
    "dropout",
    "fused_loss",
    "sequence_parallel",
    "schedule",
]
FITTING = [run for run in RUNS if run.plan.memory.total <= run.plan.mesh.hardware.memory]


def is_no_slower(run: Run) -> bool:
    theirs = run.plan
    found = plan.propose(
        theirs.model,
        Batch(theirs.batch.tokens, theirs.batch.sequence),
        theirs.mesh.hardware,
        theirs.mesh.chips,
        network=theirs.mesh.network,
        **{name: getattr(theirs, name) for name in KEPT},
    )
    assert found.best.memory.total <= theirs.mesh.hardware.memory
    return found.best.step_seconds <= 1.001 * theirs.step_seconds


@pytest.mark.parametrize("run", FITTING[::14], ids=lambda run: run.name)
def test_proposals_are_no_slower_than_published_meshes(run: Run) -> None:
    assert is_no_slower(run)


@pytest.mark.release
def test_all_proposals_are_no_slower_than_published_meshes() -> None:
    assert [run.name for run in FITTING if not is_no_slower(run)] == []


def test_proposals_say_why() -> None:
    found = plan.propose(MODELS["llama3-70b"], Batch(2**22, 8192), H100, 256)
    times = [each.step_seconds for each in found.plans]
    assert times == sorted(times) and found.best is found.plans[0]
    assert all(each.memory.total <= H100.memory for each in found.plans)
    assert all(each.memory.total > H100.memory for each in found.unfit)
    why = "\n".join(found.why)
    tp = found.best.mesh.size("tp")
    assert f"tp {tp}: " in why and "% longer (" in why


def test_long_sequences_are_shared() -> None:
    few = plan.propose(MODELS["llama3-8b"], Batch(4 * 131072, 131072), H100, 64)
    assert few.best.mesh.size("context") > 1
    assert few.best.microbatch_tokens <= 131072


def test_experts_are_shared() -> None:
    found = plan.propose(MODELS["qwen3-30b-a3b"], Batch(2**20, 4096), H100, 64)
    assert {each.mesh.size("expert") for each in found.plans} > {1, 8}


def test_no_mesh_fits() -> None:
    with pytest.raises(ValueError, match=r"memory: expected at least \S+ bytes, which 8 x h100"):
        plan.propose(MODELS["llama3-405b"], Batch(2**20, 8192), H100, 8)
    with pytest.raises(
        ValueError, match="chips: expected chips that strategies for 1 sequences can share, got 8191"
    ):
        plan.propose(MODELS["llama3-405b"], Batch(8192, 8192), H100, 8191)


# All meshes of some strategies


def test_the_best_mesh() -> None:
    model, batch = MODELS["llama3-70b"], Batch(4.19e6, 1024)
    v5p = HARDWARE["v5p"]
    found = plan.plans(model, batch, v5p, 8960, (Axis("fsdp", 1, 2), Axis("tp", 1)), recompute="full")
    tp = sorted(each.mesh.size("tp") for each in found)
    assert tp == [1, 2, 4, 8, 16, 32, 64]  # divisors of 64 heads, 28672 and 8960
    assert all(each.mesh.chips == 8960 for each in found)
    times = [each.step_seconds for each in found]
    assert times == sorted(times)
    assert plan.best(found) is found[0]
    least = min(found, key=lambda each: each.memory.total)
    assert plan.best(found, memory=1.001 * least.memory.total) is least
    with pytest.raises(ValueError, match=r"memory: expected at least \S+ bytes, which 8960 x v5p"):
        plan.best(found, memory=1)
    with pytest.raises(ValueError, match="candidates: expected at least one plan, got none"):
        plan.best([])


@pytest.mark.parametrize(
    ("chips", "strategies", "complaint"),
    [
        (7, ("tp",), r"mesh: expected strategies that share the chips \(tp: expected a divisor of heads 32"),
        (16, ("expert",), r"mesh: expected strategies that share the chips \(expert: expected a divisor"),
        (0, ("tp",), "chips: expected an int >= 1, got 0"),
        (8, ("ep",), "strategy: expected one of dp"),
    ],
)
def test_meshes_of_which_none_can_be(chips: int, strategies: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        plan.plans(MODELS["llama3-8b"], Batch(1e6, 4096), H100, chips, strategies)
