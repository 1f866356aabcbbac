"""Calls shorter than about 0.1 ms, bound by launches and latencies: ours and torch's only.

On a GPU both also stand as CUDA graphs, which take the host's time away from both.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench import attention, cross_entropy, distillation, log_probs, logsumexp, mlp
from bench.harness import Case, Contender

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


def in_graphs(contender: Contender) -> Contender:
    """The contender with its passes as two CUDA graphs, which its first call records for its inputs."""
    made: list[Contender] = []

    def call(*inputs: Tensor) -> Tensor:
        if not made:
            gc.disable()  # collecting a graph while another is recorded makes the recording fail
            try:
                made.append(torch.cuda.make_graphed_callables(contender, inputs))
            finally:
                gc.enable()
        return made[0](*inputs)

    return call


def contenders_of(case: Case) -> dict[str, Contender]:
    """Ours and torch's; on a GPU also in graphs."""
    kept = {name: case.contenders[name] for name in CONTENDERS}
    if case.device.type == "cuda":
        kept |= {f"{name}, graphs": in_graphs(contender) for name, contender in kept.items()}
    return kept


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Cases in bfloat16 of every operator with times in `mr.cost`."""
    sizes = SIZES[::8] if quick else SIZES
    if quick:
        sizes = [(make, {name: min(size, 256) for name, size in of.items()}) for make, of in sizes]
    found = [make(torch.bfloat16, device, **of) for make, of in sizes]
    return [replace(case, contenders=contenders_of(case)) for case in found]
