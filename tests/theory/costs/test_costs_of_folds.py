"""mr.cost of statistics and of map_reduce: FLOPs, bytes and memory by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import monoidreduce as mr
from monoidreduce.monoids import LogWSum

ROWS, COLUMNS, WIDTH = 4096, 8192, 1024
PRODUCT = 2 * ROWS * COLUMNS * WIDTH


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@mr.statistics
def token_stats(score: Any, column: Any, label: Any) -> dict[str, Any]:
    p = mr.stat.softmax(score)
    return dict(lse=p.logsumexp, target=mr.stat.total(torch.where(column == label, score, 0.0)))


@mr.statistics
def weighted(score: Any, t: Any, v: Any, w: Any) -> dict[str, Any]:
    return dict(sum=mr.stat.total(torch.tanh(score * t + w) * v))


def test_products_of_a_fold_and_its_gradients() -> None:
    """The scores, and the scores again with two products."""
    a, b = meta(ROWS, WIDTH), meta(COLUMNS, WIDTH)
    found = mr.cost(token_stats, a, b, hardware="h100")
    assert found.operator == "token_stats" and found.useful_flops == 3 * PRODUCT
    assert found.executed_flops == 4 * PRODUCT  # tiles divide these sizes
    forward = mr.cost(token_stats, a, b, hardware="h100", needed=())
    assert forward.useful_flops == forward.executed_flops == PRODUCT
    assert not any(p.backward for p in forward.passes)
    assert found.compulsory > forward.compulsory >= a.nbytes + b.nbytes
    assert found.peak_memory >= ROWS * COLUMNS * 2  # all local gradients fit in the workspace
    limited = mr.cost(token_stats, a, b, hardware="h100", workspace=16 << 20)
    assert limited.peak_memory < 60 << 20 and limited.executed_flops >= found.executed_flops
    assert any("not measured" in sentence and "statistics_fold" in sentence for sentence in found.advice)
    assert "token_stats on h100" in str(found) and found.to_json()


@pytest.mark.parametrize("hardware", ("h100", "cpu"))
@pytest.mark.parametrize("name, products", (("row['t']", 1), ("column['w']", 1), ("column['v']", 1)))
def test_gradients_of_data(name: str, products: int, hardware: str) -> None:
    """That of data of rows or columns is a fold with the payload's score, that of a payload a product."""
    a, b, data = meta(512, 64), meta(1024, 64), {"row": {"t": meta(512)}}
    data["column"] = {"w": meta(1024), "v": meta(1024, 128)}
    forward, found = (
        mr.cost(weighted, a, b, hardware=hardware, needed=needed, **data) for needed in ((), name)
    )
    assert forward.executed_flops > 0 and found.executed_flops > forward.executed_flops
    scores = 2 * 512 * 1024 * 64
    assert forward.useful_flops == scores + 2 * 512 * 1024 * 128
    assert found.useful_flops >= forward.useful_flops + products * scores


def test_a_fold_that_is_attention_has_its_model() -> None:
    @mr.statistics
    def attends(score: Any, v: Any) -> dict[str, Any]:
        return dict(out=mr.stat.softmax(score).mean(v))

    q, k, v = meta(2048, 64), meta(2048, 64), meta(2048, 64)
    found = mr.cost(attends, q, k, column={"v": v}, hardware="h100")
    expected = mr.cost("attention", *(t[None, None] for t in (q, k, v)), hardware="h100", needed=("q", "k"))
    assert found.executed_flops == expected.executed_flops
    blocks = mr.block_mask(lambda b, h, i, j: i >= j, None, None, 2048, 2048, device="meta")
    with pytest.raises(ValueError, match=r"^block_mask: expected None: kernels of"):
        mr.cost(attends, q, k, column={"v": v}, block_mask=blocks, hardware="h100")


def test_narrow_operands_and_processors() -> None:
    a, b = (meta(n, 3, dtype=torch.float32) for n in (1000, 2000))
    on_gpu, on_cpu = (mr.cost(token_stats, a, b, hardware=name) for name in ("h100", "cpu"))
    scores = 2 * 1000 * 2000 * 3
    assert on_gpu.useful_flops == on_cpu.useful_flops == 3 * scores
    assert on_cpu.executed_flops == 4 * scores and on_gpu.executed_flops == 5 * scores
    assert on_gpu.peak_memory < 1000 * 2000 * 4


def test_what_is_needed_is_a_tensor_of_the_call() -> None:
    with pytest.raises(ValueError, match="needed: expected names among a, b, got row"):
        mr.cost(token_stats, meta(8, 8), meta(8, 8), hardware="h100", needed="row")


def attended(q: Tensor, k: Tensor) -> LogWSum.State:
    scores = q @ k.T
    return LogWSum.State(scores.logsumexp(1), scores.softmax(1) @ k)


@pytest.mark.parametrize("hardware", ("h100", "cpu"))
def test_map_reduce(hardware: str) -> None:
    """As many FLOPs as torch counts in the call itself."""
    q, k = (torch.randn(n, 16, requires_grad=True) for n in (50, 70))
    call = partial(mr.map_reduce, LogWSum(), attended, q, k, a_chunk=16, b_chunk=32)
    with FlopCounterMode(display=False) as forward:
        out = call()
    with FlopCounterMode(display=False) as backward:
        sum(t.sum() for t in out).backward()
    found = mr.cost(call, hardware=hardware)
    by_direction = [sum(p.flops for p in found.passes if p.backward is way) for way in (False, True)]
    assert by_direction == [forward.get_total_flops(), backward.get_total_flops()]
    assert found.useful_flops == found.executed_flops == sum(by_direction)
    only_k = mr.cost("map_reduce", LogWSum(), attended, q, k, hardware=hardware, needed="b")
    assert (
        only_k.executed_flops
        < mr.cost(mr.map_reduce, LogWSum(), attended, q, k, hardware=hardware).executed_flops
    )


def test_map_reduce_of_tuples_and_what_it_refuses() -> None:
    def project(a: Any, b: Any) -> Any:
        return attended(a[0] * a[1], b)

    a, b = (meta(8, 4, dtype=torch.float32), meta(8, 1, dtype=torch.float32)), meta(8, 4, dtype=torch.float32)
    assert mr.cost("map_reduce", LogWSum(), project, a, b, hardware="h100", needed="a[1]").executed_flops > 0
    with pytest.raises(ValueError, match=r"needed: expected names among a\[0\], a\[1\], b, got a"):
        mr.cost("map_reduce", LogWSum(), project, a, b, hardware="h100", needed="a")
    with pytest.raises(TypeError, match="expected a tensor"):
        mr.cost("map_reduce", LogWSum(), project, None, None, hardware="h100")
