"""Calls shorter than about 0.1 ms, bound by launches and latencies: ours and torch's only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from bench import attention, cross_entropy, distillation, log_probs, logsumexp, mlp
from bench.harness import Case

SIZES: list[tuple[Callable[..., Case], dict[str, Any]]] = [
    *(
        (attention.case, {"B": B, "H": H, "L": L, "d": d, "causal": causal})
        for B, H, L, d in (
            (1, 8, 512, 64),
            (1, 16, 1024, 64),
            (1, 16, 512, 128),
            (2, 16, 1024, 128),
            (1, 8, 512, 256),
        )
        for causal in (False, True)
    ),
    *(
        (mlp.case, {"B": B, "K": K, "d": d})
        for B, K, d in (
            (64, 4096, 128),
            (128, 8192, 128),
            (128, 8192, 256),
            (1024, 1024, 64),
            (1024, 4096, 128),
            (2048, 2048, 256),
            (1024, 1024, 512),
            (1024, 2048, 1024),
        )
    ),
    *(
        (loss.case, {"N": N, "V": V, "D": D})
        for loss in (cross_entropy, log_probs)
        for N, V, D in ((256, 2048, 512), (512, 4096, 512), (128, 8192, 1024))
    ),
    *(
        (distillation.case, {"N": N, "V": V, "D": D, "E": E})
        for N, V, D, E in ((256, 2048, 512, 1024), (512, 4096, 512, 512))
    ),
    *(
        (logsumexp.case, {"M": M, "N": N, "F": F})
        for M, N, F in ((1024, 1024, 64), (4096, 4096, 64), (256, 2048, 512), (512, 4096, 1024))
    ),
]
CONTENDERS = ("monoidreduce", "torch")


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Cases in bfloat16 of every operator with times in `mr.cost`."""
    sizes = SIZES[::8] if quick else SIZES
    if quick:
        sizes = [(make, {name: min(size, 256) for name, size in of.items()}) for make, of in sizes]
    found = [make(torch.bfloat16, device, **of) for make, of in sizes]
    return [replace(case, contenders={name: case.contenders[name] for name in CONTENDERS}) for case in found]
