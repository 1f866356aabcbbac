"""How fast the interpreter of the CPU engine is beside the same monoid compiled by g++.

    python -m bench.interpreter

Each pass is of 1024 rows and 4096 columns in float32 on one thread: the best of 15 turns, taken by turns.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce.program.bytecode import backward_code, forward_code
from monoidreduce.program.tracing import trace

SOURCE = Path(__file__).with_suffix(".cpp")
WIDTHS = (64, 256, 1024)
ROWS, COLUMNS = 1024, 4096


def token_stats(score: Tensor, column: Tensor, label: Tensor) -> dict[str, Any]:
    p = mr.stat.softmax(score)
    target = mr.stat.total(torch.where(column == label, score, 0.0))
    return dict(lse=p.logsumexp, mean=p.mean(score), target=target, best=mr.stat.largest(score))


def main() -> None:
    traced = trace(token_stats, {}, {})
    codes = (forward_code(traced.text, 0, 1, 0, 0), backward_code(traced.text, 0, 1, 0, 0))
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "interpreter"
        options = ["-std=c++20", "-O3", "-march=native", f"-I{mr.get_include()}"]
        subprocess.run(["g++", *options, str(SOURCE), "-o", str(program), "-pthread", "-ldl"], check=True)
        print("width    forward: compiled, interpreted    backward: compiled, interpreted    (ms)")
        for width in WIDTHS:
            sizes = [str(ROWS), str(COLUMNS), str(width)]
            printed = subprocess.run(
                [program, *sizes, *codes], check=True, capture_output=True, text=True
            ).stdout
            times = [1e3 * float(number) for number in printed.split()]
            forward, backward = times[0] / times[1], times[2] / times[3]
            print(
                f"{width:5}    {times[0]:8.2f} {times[1]:8.2f} {forward:6.3f}x"
                f"           {times[2]:8.2f} {times[3]:8.2f} {backward:6.3f}x"
            )


if __name__ == "__main__":
    sys.exit(main())
