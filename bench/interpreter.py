"""Speed of the CPU engine's interpreter relative to the same monoid compiled by g++.

Each pass has 1024 rows and 4096 columns, in float32 on one thread. Its time is processor time, the least of
15 rounds; both take turns in each round.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce.folds.cpu.bytecode import backward_code, forward_code
from monoidreduce.folds.program.tracing import trace

SOURCE = Path(__file__).with_suffix(".cpp")
ROWS, COLUMNS = 1024, 4096
TARGETS = {64: 0.85, 256: None, 1024: 0.97}  # width -> share of the compiled monoid's rate
OPTIONS = ("-std=c++20", "-O3", "-march=native", f"-I{mr.get_include()}")


def token_stats(score: Tensor, column: Tensor, target: Tensor) -> dict[str, Any]:
    p = mr.stat.softmax(score)
    at_target = mr.stat.total(torch.where(column == target, score, 0.0))
    return dict(lse=p.logsumexp, mean=p.mean(score), target=at_target, best=mr.stat.largest(score))


def measure_interpreter(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """The milliseconds of each pass, compiled and interpreted; nothing on a GPU."""
    if device.type != "cpu":
        return []
    traced = trace(token_stats, {"target": "int64"}, {})  # not "label": the compiled monoid ignores no row
    counts = [len(traced.sources[kind]) for kind in ("row", "row_index", "column", "column_index")]
    codes = (forward_code(traced.text, *counts), backward_code(traced.text, *counts))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "interpreter"
        subprocess.run(["g++", *OPTIONS, str(SOURCE), "-o", str(program), "-pthread", "-ldl"], check=True)
        for width, target in [*TARGETS.items()][: 1 if quick else None]:
            command = [str(program), str(ROWS), str(COLUMNS), str(width), *codes]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            times = [1e3 * float(number) for number in printed.split()[:4]]
            phases = {"forward": times[:2], "backward": times[2:]}
            rows.append({"width": width, "milliseconds": phases, "target": target})
    return rows
