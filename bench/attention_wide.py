"""Attention with heads wider than 256, compared with torch's."""

from __future__ import annotations

from dataclasses import replace

import torch

from bench import attention
from bench.harness import Case


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Full and causal cases in bfloat16."""
    if device.type == "cuda" and not quick:
        sizes = [{"B": 1, "H": 16, "L": 8192, "d": d} for d in (320, 512, 1024)]
    else:
        sizes = [{"B": 1, "H": 2, "L": 256, "d": 512}]
    found = [
        attention.case(torch.bfloat16, device, **size, causal=causal)
        for causal in (False, True)
        for size in sizes
    ]
    return [
        replace(
            case,
            op="attention_wide",
            contenders={name: case.contenders[name] for name in ("monoidreduce", "torch")},
        )
        for case in found
    ]
