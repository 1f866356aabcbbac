"""block_mask of statistics: the fold over the columns that are kept, against float64 torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from tables import normal
from torch import Tensor

import monoidreduce as mr

stat = mr.stat
F64 = torch.float64
ROWS, COLUMNS = 70, 90
DOCUMENTS = torch.arange(100) // 23
KEEP = normal(ROWS, COLUMNS, seed=3) > 0.3
CPU = torch.device("cpu")

Mask: TypeAlias = Callable[..., Any]


def masks(device: torch.device = CPU) -> dict[str, Mask]:
    """By name. device: of the tensors that they capture."""
    documents, keep = DOCUMENTS.to(device), KEEP.to(device)
    return {
        "causal": lambda b, h, i, j: i >= j,
        "window": lambda b, h, i, j: (i - j).abs() <= 9,
        "documents": lambda b, h, i, j: documents[i] == documents[j],
        "by row and column": lambda b, h, i, j: keep[i, j],
        "some rows keep nothing": lambda b, h, i, j: (i >= j + 5) & (i < 40),
    }


MASKS = masks()


def dense(mask: Mask, batch: int = 1, heads: int = 1, device: torch.device = CPU) -> Tensor:
    """bool [B, H, ROWS, COLUMNS]"""
    shapes = ((batch, 1, 1, 1), (heads, 1, 1), (ROWS, 1), (COLUMNS,))
    kept: Tensor = mask(*(torch.arange(shape[0], device=device).view(shape) for shape in shapes))
    return kept.expand(batch, heads, ROWS, COLUMNS)


@mr.statistics
def all_kinds(score: Any, w: Any, v: Any) -> dict[str, Any]:
    p = stat.softmax(score + w)
    return dict(
        lse=p.logsumexp,
        mean=p.mean(score * w),
        variance=p.variance(score),
        vector=p.mean(torch.tanh(score) * v),
        total=stat.total(score * w),
        force=stat.total(torch.exp(score) * v),
        count=stat.count(score > 0),
        best=stat.largest(score * w),
        least=stat.smallest(score),
        most=stat.largest(score, k=3),
        fewest=stat.smallest(score * w, k=2),
    )


def of_kept(score: Tensor, keep: Tensor, w: Tensor, v: Tensor) -> dict[str, Tensor]:
    """The same of scores [..., N, V] by torch."""
    log_weight = (score + w).masked_fill(~keep, -math.inf)
    nothing = ~keep.any(-1)
    p = log_weight.masked_fill(nothing[..., None], 0).softmax(-1).masked_fill(~keep, 0)
    mean = (p * score).sum(-1)

    def extreme(f: Tensor, sign: int, k: int) -> tuple[Tensor, Tensor]:
        found = (sign * f).masked_fill(~keep, -math.inf).sort(dim=-1, descending=True, stable=True)
        value, index = found.values[..., :k], found.indices[..., :k]
        return sign * value, index.masked_fill(value == -math.inf, -1)

    found = {
        "lse": log_weight.masked_fill(nothing[..., None], 0).logsumexp(-1).masked_fill(nothing, -math.inf),
        "mean": (p * score * w).sum(-1),
        "variance": (p * (score - mean[..., None]) ** 2).sum(-1),
        "vector": (p * score.tanh()) @ v,
        "total": (score * w).masked_fill(~keep, 0).sum(-1),
        "force": score.exp().masked_fill(~keep, 0) @ v,
        "count": (keep & (score > 0)).sum(-1),
    }
    for name, f, sign in (("best", score * w, 1), ("least", score, -1)):
        found[name], found[f"{name}.index"] = (t[..., 0] for t in extreme(f, sign, 1))
    for name, f, sign, k in (("most", score, 1, 3), ("fewest", score * w, -1, 2)):
        found[name], found[f"{name}.index"] = extreme(f, sign, k)
    return found


def by_name(found: Any) -> dict[str, Tensor]:
    named = {}
    for name, value in found._asdict().items():
        if isinstance(value, tuple):
            named[name], named[f"{name}.index"] = value.value, value.index
        else:
            named[name] = value
    return named


def with_gradients(found: dict[str, Tensor], leaves: list[Tensor]) -> dict[str, Tensor]:
    real = {name: t for name, t in found.items() if t.requires_grad}
    upstream = [
        3 * normal(*t.shape, seed=i).to(t.device).masked_fill(~t.isfinite(), 0)
        for i, t in enumerate(real.values())
    ]
    outputs = [t.masked_fill(~t.isfinite(), 0) for t in real.values()]
    gradients = torch.autograd.grad(outputs, leaves, upstream)
    return {**{k: t.detach() for k, t in found.items()}, **{f"d_{i}": g for i, g in enumerate(gradients)}}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        torch.testing.assert_close(
            found[name], theirs, rtol=1e-10, atol=1e-10, msg=partial("{}: {}".format, name)
        )


def leaves_of(*leading: int, batched: bool = False, device: torch.device = CPU) -> list[Tensor]:
    """a, b, w and v; a and b with strides."""
    of_columns = leading if batched else ()
    shapes = (
        (*leading, 5, ROWS),
        (*of_columns, COLUMNS, 10),
        (*of_columns, COLUMNS),
        (*of_columns, COLUMNS, 3),
    )
    a, b, w, v = (0.5 * normal(*shape, seed=i + 10).to(device) for i, shape in enumerate(shapes))
    return [t.detach().requires_grad_() for t in (a.mT, b[..., ::2], w, v)]


@pytest.mark.oldest
@pytest.mark.parametrize("block", (16, (128, 8)), ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_every_statistic(name: str, block: Any, device: torch.device) -> None:
    mask = masks(device)[name]
    blocks = mr.block_mask(mask, None, None, ROWS, COLUMNS, device=device, block_size=block)
    leaves = a, b, w, v = leaves_of(device=device)
    expected = with_gradients(of_kept(a @ b.mT, dense(mask, device=device)[0, 0], w, v), leaves)
    for fold in (all_kinds, all_kinds.reference):
        found = by_name(fold(a, b, column={"w": w, "v": v}, block_mask=blocks))
        assert_same(with_gradients(found, leaves), expected)


@pytest.mark.parametrize("batched", (False, True), ids=("one b", "batched"))
def test_batches_and_heads(batched: bool, device: torch.device) -> None:
    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j - 3 * h) & (j % (b + 2) != 1)

    blocks = mr.block_mask(mask, 2, 3, ROWS, COLUMNS, device=device, block_size=16)
    leaves = a, b, w, v = leaves_of(2, 3, batched=batched, device=device)
    of_rows = w[..., None, :] if batched else w
    expected = with_gradients(of_kept(a @ b.mT, dense(mask, 2, 3, device), of_rows, v), leaves)
    found = by_name(all_kinds(a, b, column={"w": w, "v": v}, block_mask=blocks))
    assert_same(with_gradients(found, leaves), expected)


def test_one_mask_for_all_batches() -> None:
    blocks = mr.block_mask(MASKS["causal"], None, None, ROWS, COLUMNS, block_size=16)
    leaves = a, b, w, v = leaves_of(4)
    expected = with_gradients(of_kept(a @ b.mT, dense(MASKS["causal"])[0], w, v), leaves)
    found = by_name(all_kinds(a, b, column={"w": w, "v": v}, block_mask=blocks))
    assert_same(with_gradients(found, leaves), expected)


@mr.statistics
def plain(score: Any, v: Any) -> dict[str, Any]:
    p = stat.softmax(score)
    return dict(out=p.mean(v), lse=p.logsumexp)


@pytest.mark.parametrize("leading, batched", (((), False), ((2, 3), False), ((2, 3), True), ((4,), True)))
def test_attention_skips_blocks(leading: tuple[int, ...], batched: bool, device: torch.device) -> None:
    """A function that is attention itself runs its kernels, with the mask's blocks."""
    mask = MASKS["some rows keep nothing"]
    blocks = mr.block_mask(mask, None, None, ROWS, COLUMNS, device=device, block_size=16)
    a, b, _, v = leaves_of(*leading, batched=batched, device=device)
    keep = dense(mask, device=device)[0, 0]
    of_all = of_kept(a @ b.mT, keep, torch.zeros(COLUMNS, dtype=F64, device=device), v)
    p = (a @ b.mT).masked_fill(~keep, -math.inf).softmax(-1).nan_to_num(0)
    expected = with_gradients({"out": p @ v, "lse": of_all["lse"]}, [a, b, v])
    found = plain(a, b, column={"v": v}, block_mask=blocks)
    assert_same(with_gradients(found._asdict(), [a, b, v]), expected)
    explained = plain.explain(a, b, column={"v": v}, block_mask=blocks)
    assert explained.forward.startswith(f"modified_attention_forward/{device.type}"), str(explained)


def test_second_derivatives(device: torch.device) -> None:
    @mr.statistics
    def f(score: Any, w: Any) -> dict[str, Any]:
        p = stat.softmax(score * w)
        return dict(lse=p.logsumexp, mean=p.mean(score**2), total=stat.total(torch.tanh(score)))

    mask = MASKS["causal"]
    blocks = mr.block_mask(mask, None, None, ROWS, COLUMNS, device=device, block_size=16)
    a, b, w, _ = leaves_of(device=device)
    keep, found = dense(mask, device=device)[0, 0], []
    score = a @ b.mT
    p = (score * w).masked_fill(~keep, -math.inf)
    stored = (
        p.logsumexp(-1),
        (p.softmax(-1) * score**2).sum(-1),
        score.tanh().masked_fill(~keep, 0).sum(-1),
    )
    for outputs in (tuple(f(a, b, column={"w": w}, block_mask=blocks)), stored):
        upstream = [normal(ROWS, seed=i).to(device) for i in range(3)]
        first = torch.autograd.grad(outputs, (a, b, w), upstream, create_graph=True)
        directions = [normal(*t.shape, seed=9).to(device) for t in first]
        found.append(torch.autograd.grad(first, (a, b, w), directions))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_a_mask_of_torch() -> None:
    """Its lists decide, as in attention: here they leave out blocks that its function keeps."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    given = flex.create_block_mask(MASKS["window"], None, None, ROWS, COLUMNS, device="cpu", BLOCK_SIZE=16)
    lists = given.kv_num_blocks.clone(), given.kv_indices
    lists[0][..., 2] = 0
    full = given.full_kv_num_blocks, given.full_kv_indices
    blocks = flex.BlockMask.from_kv_blocks(
        *lists, *full, BLOCK_SIZE=16, mask_mod=MASKS["window"], seq_lengths=(ROWS, COLUMNS)
    )
    keep = dense(MASKS["window"])[0, 0].clone()
    partly = given.to_dense()[0, 0].repeat_interleave(16, 0).repeat_interleave(16, 1)[:ROWS, :COLUMNS]
    keep &= partly.bool()
    keep[32:48] = False
    leaves = a, b, w, v = leaves_of()
    expected = with_gradients(of_kept(a @ b.mT, keep, w, v), leaves)
    found = by_name(all_kinds(a, b, column={"w": w, "v": v}, block_mask=blocks))
    assert_same(with_gradients(found, leaves), expected)


def test_another_mask_is_another_result() -> None:
    a, b, *_ = leaves_of()

    @mr.statistics
    def f(score: Any) -> dict[str, Any]:
        return dict(n=stat.count(score == score))

    def within(width: int) -> Callable[..., Any]:
        return lambda b, h, i, j: (i - j).abs() < width

    for width in (2, 3, 2):
        mask = within(width)
        blocks = mr.block_mask(mask, None, None, ROWS, COLUMNS)
        assert f(a, b, block_mask=blocks).n.sum() == dense(mask).sum()
    assert f(a, b).n.sum() == ROWS * COLUMNS


def test_compiled() -> None:
    blocks = mr.block_mask(MASKS["documents"], None, None, ROWS, COLUMNS, block_size=16)
    a, b, w, v = leaves_of()

    def f(a: Tensor, b: Tensor) -> Tensor:
        found: Tensor = all_kinds(a, b, column={"w": w, "v": v}, block_mask=blocks).total
        return found

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(a, b), f(a, b))


def test_refused() -> None:
    a, b, w, v = leaves_of()
    data = {"column": {"w": w, "v": v}}
    short = mr.block_mask(MASKS["causal"], None, None, ROWS, COLUMNS - 1)
    with pytest.raises(ValueError, match=f"block_mask: expected one of {ROWS} queries and {COLUMNS} keys"):
        all_kinds(a, b, block_mask=short, **data)
    of_heads = mr.block_mask(MASKS["causal"], 2, 3, ROWS, COLUMNS)
    with pytest.raises(ValueError, match="block_mask: expected one of B=1 or 1 and H=1 or 1, got"):
        all_kinds(a, b, block_mask=of_heads, **data)
    causal = mr.block_mask(MASKS["causal"], None, None, ROWS, COLUMNS)
    with pytest.raises(ValueError, match="block_mask: expected None over ranks"):
        all_kinds(a, b, block_mask=causal, ranks=object(), **data)
    with pytest.raises(TypeError, match="block_mask: expected the result of monoidreduce"):
        all_kinds(a, b, block_mask=KEEP, **data)


def test_explained() -> None:
    a, b, w, v = leaves_of()
    blocks = mr.block_mask(MASKS["causal"], None, None, ROWS, COLUMNS)
    found = mr.explain(all_kinds, a, b, column={"w": w, "v": v}, block_mask=blocks, hardware="h100")
    assert "blocks that it leaves out are computed" in str(found)
    assert "blocks that block_mask leaves out are skipped" in str(
        plain.explain(a, b, column={"v": v}, block_mask=blocks)
    )
