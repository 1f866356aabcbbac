"""Attention of one query per head over many keys, as in generating token by token.

It has to read keys and values once, so it is measured against memory bandwidth.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

import monoidreduce as mr
from bench.attention import through
from bench.harness import AGREEMENT, Contender, Stopwatch, differences, dtype_name, in_turn, summary

ROUNDS = 20
DTYPE = torch.bfloat16


def _torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def contenders(device: torch.device) -> dict[str, Contender]:
    """Ours, torch's default and its fused backends."""
    named: dict[str, Contender] = {"monoidreduce": mr.attention, "torch": _torch_attention}
    if device.type == "cuda":
        named["cuDNN"] = through(SDPBackend.CUDNN_ATTENTION, _torch_attention)
        named["FlashAttention-2"] = through(SDPBackend.FLASH_ATTENTION, _torch_attention)
    return named


def sizes(device: torch.device, quick: bool) -> list[dict[str, int]]:
    """8 to 64 sequences of 8k to 32k keys, and a single sequence; 32 query heads over 8 key heads."""
    if quick:
        return [{"B": 2, "H": 4, "Hkv": 2, "N": 300, "d": 64}]
    heads = {"H": 32, "Hkv": 8, "d": 128}
    batches = [(1, 16384), (8, 8192), (8, 32768), (16, 16384), (32, 16384), (64, 8192)]
    return [
        {"B": batch, "N": length, **heads} for batch, length in batches[: 6 if device.type == "cuda" else 1]
    ]


@torch.no_grad()
def measure_decode(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """For each size, milliseconds of all contenders, timed in turn, and the bytes that each has to read."""
    watch, rows = Stopwatch(device), []
    for size in sizes(device, quick):
        print(f"measuring decode {size}", file=sys.stderr)
        B, H, Hkv, N, d = (size[name] for name in ("B", "H", "Hkv", "N", "d"))
        torch.manual_seed(0)
        shapes = ((B, H, 1, d), (B, Hkv, N, d), (B, Hkv, N, d))
        inputs = [torch.randn(shape, device=device, dtype=DTYPE) for shape in shapes]
        expected = _torch_attention(*inputs)
        running, absent = {}, {}
        for name, call in contenders(device).items():
            try:
                found = differences([call(*inputs)], [expected])[0]
                if not found <= AGREEMENT[DTYPE]:
                    raise ValueError(f"its result differs from torch's by {found:.1e}")
                running[name] = call
            except Exception as error:
                if name == "monoidreduce":
                    raise
                absent[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        times: dict[str, list[float]] = {name: [] for name in running}
        for name in in_turn(list(running), ROUNDS):
            watch.time(functools.partial(running[name], *inputs))
            times[name] += watch.milliseconds()
        rows.append(
            {
                "op": "attention",
                "dtype": dtype_name(DTYPE),
                "parameters": size,
                "bytes": sum(tensor.nbytes for tensor in inputs),
                "milliseconds": {name: summary(measured) for name, measured in times.items()},
                "absent": absent,
            }
        )
    return rows
