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


def _rows(group: Any) -> tuple[list[dict[str, Any]], str]:
    sys.path.append(ROOT)
    from bench import distributed

    rows = list(distributed.measure(group, torch.device("cpu"), quick=True, seconds=0.0))
    return rows, distributed.report(rows)


def test_every_operator_has_a_row() -> None:
    """No time is asserted. Results that differ from those of one rank would raise."""
    for rows, text in on_ranks(2, _rows):
        assert json.loads(json.dumps(rows)) == rows
        assert [row["op"] for row in rows] == [
            "cross_entropy",
            "distillation",
            "attention",
            "attention",
            "mlp",
        ]
        assert all(row["op"] in line for row, line in zip(rows, text.splitlines()[2:], strict=True))
        for row in rows:
            for phase in row["phases"].values():
                alone, over = (phase["milliseconds"][name]["median"] for name in ("alone", "over ranks"))
                assert phase["efficiency"] == pytest.approx(alone / (2 * over))
