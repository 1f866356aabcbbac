"""Headers of messages between two GPUs: what later calls that differ raise, and when."""

from __future__ import annotations

import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

import monoidreduce as mr

RANKS = 2


def _rank(rank: int, store: str, results: Any) -> None:
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 64, generator=generator).bfloat16().cuda() for n in (96, 128))
    target = torch.arange(96, device="cuda")
    x.requires_grad_(), weight.requires_grad_()

    def loss(**options: Any) -> torch.Tensor:
        return mr.linear_cross_entropy(x, weight, target, ranks=dist.group.WORLD, **options)

    def caught(call: Any) -> str:
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    different = {"z_loss": 0.5} if rank == 1 else {}
    found: list[Any] = [caught(lambda: loss(**different))]  # the first call, which compares all
    for _ in range(3):
        loss().backward()
    found.append(float(loss()))
    differing = loss(**different)
    torch.cuda.synchronize()
    found += [caught(differing.backward), caught(lambda: loss().backward())]
    results.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="fewer than two GPUs")
def test_a_later_call_that_differs() -> None:
    context = get_context("spawn")
    results = context.Queue()
    store = str(Path(tempfile.mkdtemp()) / "store")
    processes = [context.Process(target=_rank, args=(rank, store, results)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    of_ranks = dict(results.get(timeout=300) for _ in range(RANKS))
    for process in processes:
        process.join()
    first, loss, later, behind = of_ranks[0]
    assert first == "ValueError: rank 1: z_loss: expected 0.0 as on rank 0, got 0.5" == of_ranks[1][0]
    assert loss == of_ranks[1][1] and behind == of_ranks[1][3] == ""
    assert later == "ValueError: rank 1: z_loss: expected 0.0 as on rank 0, got another value"
    assert of_ranks[1][2] == "ValueError: rank 1: z_loss: expected another value as on rank 0, got 0.5"
