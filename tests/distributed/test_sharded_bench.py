"""bench/distributed.py measures every operator of its list over ranks, and its efficiency is what it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks

ROOT = str(Path(__file__).resolve().parents[2])
PEERS = {
    "cross_entropy": ["torch, gathered logits", "torch, loss_parallel"],
    "distillation": ["torch, gathered logits"],
    "mlp": ["torch, sequence parallel"],
}


def _rows(group: Any) -> tuple[list[dict[str, Any]], str]:
    sys.path.append(ROOT)
    from bench import distributed, report

    rows = list(distributed.measure(group, torch.device("cpu"), quick=True, seconds=0.0))
    return rows, report.ranks_table(rows)


def test_every_operator_has_a_row() -> None:
    """No time is asserted. Results that differ from one rank's would raise, in torch's ways too."""
    for rows, text in on_ranks(2, _rows):
        assert json.loads(json.dumps(rows)) == rows
        assert [row["op"] for row in rows] == [
            "cross_entropy",
            "cross_entropy",
            "log_probs",
            "distillation",
            "attention",
            "attention",
            "attention_varlen",
            "attention_varlen",
            "mlp",
        ]
        assert all(row["op"] in line for row, line in zip(rows, text.splitlines()[2:], strict=True))
        for row in rows:
            others = [name for name in row["difference"] if name != "over ranks"]
            peers = [] if "kept" in row["parameters"] else PEERS.get(row["op"], [])
            assert others == peers and row["difference"].keys() < row["rounds"].keys()
            for phase in row["phases"].values():
                assert list(phase["milliseconds"]) == ["alone", "over ranks", *others]
                alone, over = (phase["milliseconds"][name]["median"] for name in ("alone", "over ranks"))
                assert phase["efficiency"] == pytest.approx(alone / (2 * over))


def test_predictions_stand_beside_measurements() -> None:
    """On a GPU whose links are known, of the same call."""
    sys.path.append(ROOT)
    from bench import distributed, report

    for case in distributed.cases(torch.device("cuda"), quick=False):
        row = {
            "op": case.op,
            "parameters": case.parameters,
            "dtype": "bfloat16",
            "ranks": 2,
            "target": case.target,
            "target_phase": case.phase,
            "phases": {
                phase: {
                    "milliseconds": {name: {"median": 1.0} for name in ("alone", "over ranks")},
                    "efficiency": 0.5,
                }
                for phase in distributed.PHASES
            },
        }
        row["predicted"] = found = distributed.predicted(row, "NVIDIA H200")
        if case.op == "attention_varlen":  # which has no model
            assert found is None
            continue
        assert found is not None
        alone, over = found["alone"], found["over ranks"]
        assert over < alone < 2.2 * over
        line = report.ranks_table([row]).splitlines()[2]
        assert f"{alone:.3g} / {over:.3g}" in line and f"{alone / (2 * over):.2f}" in line
        assert distributed.predicted(row, "CPU") is None


def _overlap(group: Any) -> tuple[list[dict[str, Any]], str]:
    sys.path.append(ROOT)
    from bench import overlap, report

    rows = list(overlap.measure(group, torch.device("cpu"), quick=True, rounds=2))
    return rows, report.overlap_table(rows)


def test_what_is_hidden_is_the_time_saved() -> None:
    for rows, text in on_ranks(2, _overlap):
        assert json.loads(json.dumps(rows)) == rows and len(rows) == 3
        for row in rows:
            apart, together, exchange = (
                row["milliseconds"][way]["median"] for way in ("one after the other", "together", "exchange")
            )
            assert row["hidden"] == pytest.approx((apart - together) / exchange)
            assert row["kernel"] in text and f"| {row['hidden']:.0%}" in text


def test_kernels_are_told_apart_by_their_names() -> None:
    sys.path.append(ROOT)
    from bench.distributed import kind_of

    names = {
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096>)": "collectives",
        "void monoidreduce::contraction_kernel<CrossEntropyGradientRows, 128>": "local gradients",
        "void monoidreduce::contraction_kernel<CrossEntropyRows, 128>": "folds",
        "void monoidreduce::contraction_kernel<Elements, Tile<64>, AddEpilogue<float>>": "matrix products",
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTN": "matrix products",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>": "matrix products",
        "void at::native::vectorized_elementwise_kernel<4>": "others",
    }
    assert {name: kind_of(name) for name in names} == names


def test_profiles_of_those_who_are_faster_stand_beside_ours() -> None:
    sys.path.append(ROOT)
    from bench import report

    own = {"folds": {"milliseconds": 5.0, "kernels": 1}, "others": {"milliseconds": 0.25, "kernels": 4}}
    peer = {"matrix products": {"milliseconds": 3.0, "kernels": 8}}
    rows = [{"op": "mlp", "profile": {"over ranks": own, "a peer": peer}}, {"op": "attention", "profile": {}}]
    lines = [" ".join(line.split()) for line in report.ranks_profile_table(rows).splitlines()]
    assert lines[0] == "| operator | over ranks | folds, ms | matrix products, ms | others, ms |"
    assert lines[2] == "| mlp | over ranks | 5.00 in 1 | - | 0.25 in 4 |"
    assert lines[3] == "| mlp | a peer | - | 3.00 in 8 | - |"
    assert len(lines) == 4
