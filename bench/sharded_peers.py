"""Peers for calls over ranks, which bench/distributed.py compares with ours.

"Gathered logits" is a model with a sharded head and a loss that is not sharded: all ranks gather all logits.
`loss_parallel` is torch's vocabulary-parallel loss, on DTensors. Liger's loss takes a rank's logits too. The
MLP is Megatron's: an all-gather of rows, and a reduce-scatter of results. Attention is torch's
`context_parallel`, with the same load balancing as "zigzag".

Peers use torch's collectives, which add in an order that depends on the algorithm. Ours add in the order of
ranks; peers with ours would be further contenders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import loss_parallel

__all__ = ["ATTENTION", "CROSS_ENTROPY", "DISTILLATION", "LIGER", "MLP", "Peer", "in_torch_parallel"]

Peer = Callable[[Any], Callable[..., Tensor]]  # process group -> function of a rank's shards


class _Replicated(torch.autograd.Function):
    """The identity, for tensors that all ranks have. Its gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Gathered(torch.autograd.Function):
    """An all-gather along an axis.

    summed: whether the whole's gradient is the sum of all ranks' gradients.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: int, summed: bool, group: Any) -> Tensor:
        ctx.axis, ctx.summed, ctx.group = axis, summed, group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.summed:
            return _scattered(grad, ctx.axis, ctx.group), None, None, None
        part = grad.chunk(dist.get_world_size(ctx.group), ctx.axis)[dist.get_rank(ctx.group)]
        return part.contiguous(), None, None, None


class _Scattered(torch.autograd.Function):
    """A reduce-scatter: this rank's part of the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: int, group: Any) -> Tensor:
        ctx.axis, ctx.group = axis, group
        return _scattered(whole, axis, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Gathered.apply(grad, ctx.axis, False, ctx.group), None, None


def _scattered(whole: Tensor, axis: int, group: Any) -> Tensor:
    parts = [part.contiguous() for part in whole.chunk(dist.get_world_size(group), axis)]
    found = torch.empty_like(parts[0])
    dist.reduce_scatter(found, parts, group=group)
    return found


def _gathered_logits(x: Tensor, weight: Tensor, group: Any) -> Tensor:
    logits = F.linear(_Replicated.apply(x, group), weight)
    whole: Tensor = _Gathered.apply(logits, 1, False, group)
    return whole.float()


def _cross_entropy(group: Any) -> Callable[..., Tensor]:
    return lambda x, weight, target: F.cross_entropy(_gathered_logits(x, weight, group), target)


def _loss_parallel(group: Any) -> Callable[..., Tensor]:
    mesh = DeviceMesh.from_group(group, "cuda" if "nccl" in dist.get_backend(group) else "cpu")

    def call(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        rows, classes = (
            DTensor.from_local(x, mesh, [Replicate()]),
            DTensor.from_local(weight, mesh, [Shard(0)]),
        )
        loss: Any = F.cross_entropy(F.linear(rows, classes).float(), target)
        whole: Tensor = loss.to_local()
        return whole

    return call


def _liger(group: Any) -> Callable[..., Tensor]:
    from liger_kernel.transformers.vocab_parallel_cross_entropy import LigerVocabParallelCrossEntropy

    loss = LigerVocabParallelCrossEntropy()

    def call(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(_Replicated.apply(x, group), weight)
        found: Tensor = loss(logits[:, None], target[:, None], group).mean()
        return found

    return call


@contextmanager
def in_torch_parallel(group: Any) -> Iterator[None]:
    """Let forward and backward passes of `loss_parallel` and `context_parallel` run in the block."""
    with ExitStack() as stack:
        stack.enter_context(loss_parallel())
        if "nccl" in dist.get_backend(group):
            mesh, ranks = DeviceMesh.from_group(group, "cuda"), dist.get_world_size(group)
            positions = torch.zeros(2 * ranks, device="cuda")  # it needs a buffer to shard
            stack.enter_context(context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]))
        yield


def _context_parallel(_: Any) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return call


def _distillation(group: Any) -> Callable[..., Tensor]:
    def call(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
        log_q = F.log_softmax(_gathered_logits(x, weight, group), 1)
        with torch.no_grad():
            p = F.softmax(_gathered_logits(teacher_x, teacher_weight, group), 1)
        return -(p * log_q).sum(1).mean()

    return call


def _mlp(group: Any) -> Callable[..., Tensor]:
    def call(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        rows = _Gathered.apply(x, 0, True, group)
        part = F.linear(F.gelu(F.linear(rows, w1), approximate="tanh"), w2)
        result: Tensor = _Scattered.apply(part, 0, group)
        return result

    return call


CROSS_ENTROPY: dict[str, Peer] = {
    "torch, gathered logits": _cross_entropy,
    "torch, loss_parallel": _loss_parallel,
}
LIGER: dict[str, Peer] = {"Liger, vocabulary parallel": _liger}  # if installed
DISTILLATION: dict[str, Peer] = {"torch, gathered logits": _distillation}
ATTENTION: dict[str, Peer] = {"torch, context_parallel": _context_parallel}
MLP: dict[str, Peer] = {"torch, sequence parallel": _mlp}
