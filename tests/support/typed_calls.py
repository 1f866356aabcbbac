"""Users' calls, as input of a type checker: mypy reads this file (test_types.py); it never runs."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import assert_type

import monoidreduce as mr

Pair = tuple[Tensor, Tensor]


def attention(q: Tensor, flag: bool, sides: list[int], scale: float) -> None:
    assert_type(mr.attention(q, q, q), Tensor)
    assert_type(mr.attention(q, q, q, window=sides, scale=scale, return_lse=False), Tensor)
    assert_type(mr.attention(q, q, q, window=(3, None), return_lse=True), Pair)
    assert_type(mr.attention(q, q, q, window=[None, 3], return_lse=flag), Tensor | Pair)
    assert_type(mr.attention(q, q, q, sinks=q, return_lse=True), Pair)
    mr.attention(q, q, q, is_causal=True)  # type: ignore[call-overload]
    mr.attention(q, q, q, window=3)  # type: ignore[call-overload]
    assert_type(mr.attention_varlen(q, q, q, q, causal=True), Tensor)
    assert_type(mr.attention_varlen(q, q, q, q, q, sinks=q, return_lse=True), Pair)
    assert_type(mr.attention_varlen(q, q, q, q, return_lse=flag), Tensor | Pair)
    mr.attention_varlen(q, q, q, q, bias=q)  # type: ignore[call-overload]


def over_ranks(x: Tensor, group: ProcessGroup, mesh: DeviceMesh) -> None:
    for ranks in (group, mesh, mr.Ranks(group, classes=4), mr.Ranks(mesh), None):
        assert_type(mr.linear_cross_entropy(x, x, x, ranks=ranks), Tensor)
        assert_type(mr.attention(x, x, x, ranks=ranks, return_lse=True), Pair)
        assert_type(mr.mlp(x, x, x, ranks=ranks), Tensor)
    mr.attention(x, x, x, ranks=3)  # type: ignore[call-overload]
    mr.linear_cross_entropy(x, x, x, process_group=group)  # type: ignore[call-overload]
    mr.Ranks(group, 4)  # type: ignore[call-arg]


def merge_attention(outs: list[Tensor], lses: tuple[Tensor, ...], out: Tensor, lse: Tensor) -> None:
    assert_type(mr.merge_attention(out, lse, out, lse), Pair)
    assert_type(mr.merge_attention(out_a=out, lse_a=lse, out_b=out, lse_b=lse), Pair)
    assert_type(mr.merge_attention(outs, lses), Pair)
    assert_type(mr.merge_attention(out, lse), Pair)
    assert_type(mr.merge_attention(outs=outs, lses=lses), Pair)
    mr.merge_attention(out, lse, out)  # type: ignore[call-overload]


def losses(x: Tensor, weight: Tensor, target: Tensor, flag: bool) -> None:
    assert_type(mr.linear_cross_entropy(x, weight, target), Tensor)
    assert_type(mr.linear_cross_entropy(x, weight, target, return_lse=True), Pair)
    assert_type(mr.linear_cross_entropy(x, weight, target, return_lse=flag), Tensor | Pair)
    assert_type(mr.linear_distillation(x, weight, x, weight, mask=None), Tensor)
    assert_type(mr.linear_log_probs(x, weight, target, temperature=x), mr.LogProbs)
    assert_type(mr.linear_log_probs(x, weight, target, kept=mr.pack_classes(target, 5)), mr.LogProbs)
    assert_type(mr.linear_cross_entropy(x, weight, target, target_probs=x), Tensor)
    assert_type(mr.linear_log_probs(x, weight, target, entropy=flag).entropy, Tensor | None)
    assert_type(mr.linear_topk(x, weight, 8, temperature=x), mr.TopK)
    assert_type(mr.linear_sample(x, weight, seed=target, kept=target), mr.Sample)
    assert_type(mr.linear_sample(x, weight, seed=3, entropy=flag).entropy, Tensor | None)
    mr.linear_sample(x, weight)  # type: ignore[call-arg]
    mr.linear_cross_entropy(x, weight, target, ce_weight=x)  # type: ignore[call-overload]
    assert_type(
        mr.linear_distillation(x, weight, x, weight, loss="jsd", target=target, hard_weight=0.5), Tensor
    )
    mr.linear_distillation(x, weight, x, weight, label_smoothing=0)  # type: ignore[arg-type]
    mr.mlp(x, weight, weight, bias=x)  # type: ignore[arg-type]


def modules(x: Tensor, flag: bool) -> None:
    assert_type(mr.nn.MLP(8, 24)(x), Tensor)
    assert_type(mr.nn.Attention(causal=True)(x, x, x), Tensor)
    assert_type(mr.nn.Attention(return_lse=True)(x, x, x, bias=x), Pair)
    assert_type(mr.nn.Attention(return_lse=flag)(x, x, x), Tensor | Pair)
    assert_type(mr.nn.LinearCrossEntropyLoss()(x, x, x), Tensor)
    assert_type(mr.nn.LinearCrossEntropyLoss(return_lse=True)(x, x, x), Pair)
    assert_type(mr.nn.LinearDistillationLoss()(x, x, x, x, mask=x), Tensor)
    mr.nn.Attention()(x)  # type: ignore[call-arg]


class Block(torch.nn.Module):
    """Calls of attributes that are modules keep their return types."""

    def __init__(self, loss: mr.nn.LinearDistillationLoss) -> None:
        super().__init__()
        self.attention = mr.nn.Attention(window=(128, 0))
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention(x, x, x).transpose(1, 2)
        return self.loss(heads, x, heads, x)


@mr.workspace(1 << 20)
def limited(x: Tensor) -> Tensor:
    with mr.workspace(bytes=0):
        return mr.logsumexp_matmul(x, x)


assert_type(limited(torch.ones(2, 2)), Tensor)


class Total(NamedTuple):
    value: Tensor


class Add(mr.Monoid[Total]):
    State = Total

    def identity(self, like: Total) -> Total:
        return Total(torch.zeros_like(like.value))

    def combine(self, a: Total, b: Total) -> Total:
        return Total(a.value + b.value)

    def local_gradient(self, c: Total, a: Total, g: Total) -> Total:
        return g


total = mr.fold(Add(), Total(torch.ones(4)))
assert_type(total, Total)
