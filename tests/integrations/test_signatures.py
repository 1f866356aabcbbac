"""Functions with the signatures of verl, Megatron-LM and torchtitan, beside torch's composition in float64.

The libraries are not needed. Their signatures were read in their public sources.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kept_classes import words_of
from ranks import Each, on_ranks, same_bits
from torch import Tensor

import monoidreduce as mr
from monoidreduce.integrations import megatron, torchtitan, verl

S, B, D, V = 6, 2, 8, 22  # positions, sequences, width, classes
REQUIRED = inspect.Parameter.empty


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """hidden [S, B, D], weight [V, D], labels [S, B]; one label is ignored."""
    torch.manual_seed(0)
    labels = torch.randint(V, (S, B))
    labels[2, 1] = -100
    hidden = torch.randn(S, B, D, dtype=torch.float64)
    return hidden.requires_grad_(), torch.randn(V, D, dtype=torch.float64).requires_grad_(), labels


def log_probs_by_torch(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Any
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [tokens]; 0 at ignored labels."""
    logits = (hidden @ weight.T / temperature).flatten(0, -2)
    log_p, counted = logits.log_softmax(-1), labels.flatten() != -100
    chosen = -F.cross_entropy(logits, labels.flatten(), reduction="none")
    return chosen, (-(log_p.exp() * log_p).sum(-1)).masked_fill(~counted, 0)


def compare(ours: Any, theirs: Any, leaves: list[Tensor]) -> None:
    """Values and gradients, with an upstream gradient that differs at each element."""
    torch.testing.assert_close(ours, theirs)
    upstream = [torch.randn_like(y) for y in theirs]
    found, expected = (torch.autograd.grad(ys, leaves, upstream) for ys in (ours, theirs))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "function, signature",
    (
        (
            verl.linear_cross_entropy,
            {
                "hidden": REQUIRED,
                "weight": REQUIRED,
                "labels": REQUIRED,
                "temperature": 1.0,
                "reduction": "none",
                "dist_process_group": None,
                "kept": None,
            },
        ),
        (
            megatron.linear_cross_entropy,
            {
                "hidden": REQUIRED,
                "weight": REQUIRED,
                "labels": REQUIRED,
                "tp_group": None,
                "reduction": "mean",
                "ignore_index": -100,
                "sequence_parallel": False,
            },
        ),
        (
            torchtitan.LinearCrossEntropyLoss().__call__,
            {
                "pred": REQUIRED,
                "labels": REQUIRED,
                "global_valid_tokens": None,
                "loss_inputs": REQUIRED,
            },
        ),
    ),
    ids=("verl", "megatron", "torchtitan"),
)
def test_signatures(function: Callable[..., Any], signature: dict[str, Any]) -> None:
    """Names, order and defaults, since callers pass arguments by position."""
    found = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    assert list(found.items()) == list(signature.items())


# verl


@pytest.mark.parametrize("temperature", (0.7, None, "of tokens"))
@pytest.mark.parametrize("reduction", ("none", "sum", "mean", None))
def test_verl(reduction: str | None, temperature: Any) -> None:
    hidden, weight, labels = operands()
    if temperature == "of tokens":
        temperature = torch.rand(S, B, dtype=torch.float64) + 0.5
    found = verl.linear_cross_entropy(hidden, weight, labels, temperature, reduction)
    divisor = temperature[..., None] if isinstance(temperature, Tensor) else temperature or 1.0
    chosen, entropy = log_probs_by_torch(hidden, weight, labels, divisor)
    if reduction in ("sum", "mean"):
        chosen = chosen.sum() if reduction == "sum" else chosen.mean()
    compare(found, (chosen, entropy), [hidden, weight])


def test_verl_with_kept_classes() -> None:
    """A class that is not kept is as one whose logit is -inf."""
    hidden, weight, labels = operands()
    keeps = torch.rand(S, B, V) < 0.5
    keeps.scatter_(-1, labels.clamp(min=0)[..., None], True)
    found = verl.linear_cross_entropy(hidden, weight, labels, 0.7, kept=words_of(keeps))
    logits = (hidden @ weight.T / 0.7).masked_fill(~keeps, -torch.inf).flatten(0, -2)
    counted, keeps = labels.flatten() != -100, keeps.flatten(0, -2)
    log_p = torch.where(keeps, logits.log_softmax(-1), 0)
    entropy = -torch.where(keeps, log_p.exp() * log_p, 0).sum(-1).masked_fill(~counted, 0)
    chosen = log_p.gather(1, labels.flatten().clamp(min=0)[:, None])[:, 0].masked_fill(~counted, 0)
    compare(found, (chosen, entropy), [hidden, weight])


def _verl_of_rank(group: Any, hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Any) -> list[Tensor]:
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    found = verl.linear_cross_entropy(hidden, weight, labels, 0.7, "none", group)
    torch.autograd.backward(found, upstream)
    assert hidden.grad is not None and weight.grad is not None
    return [*(y.detach() for y in found), hidden.grad, weight.grad]


def test_verl_over_ranks() -> None:
    """The gradient of hidden is the sum of what ranks have, as where verl gathers it."""
    hidden, weight, labels = operands()
    expected = log_probs_by_torch(hidden, weight, labels, 0.7)
    upstream = [torch.randn_like(y) for y in expected]
    gradients = torch.autograd.grad(expected, [hidden, weight], upstream)
    shards = Each([part.clone() for part in weight.detach().chunk(2)])
    of_ranks = on_ranks(2, _verl_of_rank, hidden.detach(), shards, labels, upstream)
    chosen, entropy, of_hidden, of_weight = (list(parts) for parts in zip(*of_ranks, strict=True))
    torch.testing.assert_close((same_bits(chosen), same_bits(entropy)), tuple(y.detach() for y in expected))
    torch.testing.assert_close((sum(of_hidden), torch.cat(of_weight)), gradients)


def test_verl_refuses_another_reduction() -> None:
    with pytest.raises(ValueError, match=r"reduction: expected one of .*got 'batchmean'"):
        verl.linear_cross_entropy(*operands(), 1.0, "batchmean")


# Megatron


@pytest.mark.parametrize("reduction", ("none", "sum", "mean"))
def test_megatron(reduction: str) -> None:
    hidden, weight, labels = operands()
    found = megatron.linear_cross_entropy(hidden, weight, labels, None, reduction)
    expected = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction=reduction)
    compare([found], [expected], [hidden, weight])


def test_megatron_of_tokens() -> None:
    hidden, weight, labels = operands()
    found = megatron.vocab_parallel_linear_cross_entropy(hidden, weight, labels.T)
    expected = F.cross_entropy((hidden @ weight.T).permute(1, 2, 0), labels.T, reduction="none")
    assert found.shape == (B, S)
    compare([found], [expected], [hidden, weight])


@pytest.mark.parametrize("batch_first", (False, True), ids=("s_b", "b_s"))
def test_megatron_names_its_own_arguments(batch_first: bool) -> None:
    hidden, weight, labels = operands()
    function, sizes, other = megatron.linear_cross_entropy, [S, B], labels.T
    if batch_first:
        function, sizes, other = megatron.vocab_parallel_linear_cross_entropy, [B, S], labels
    expected = f"labels: expected shape {sizes} as hidden is {[S, B, D]}, got "
    for wrong in (other, labels.flatten(), other.T[:-1], other.T[:, :-1]):
        with pytest.raises(ValueError, match=re.escape(f"{expected}{list(wrong.shape)}")):
            function(hidden, weight, wrong)
    with pytest.raises(ValueError, match=r"hidden: expected shape \[s, b, h\]"):
        function(hidden[0, 0], weight, labels)
    for wrong_type in (labels.tolist(), labels.float()):
        with pytest.raises(TypeError, match="labels: expected "):
            function(hidden, weight, wrong_type)


def _megatron_refused(group: Any, hidden: Tensor, weight: Tensor, labels: Tensor, batch_first: bool) -> str:
    """The error of a call that compares its arguments across ranks, as a first call does."""
    os.environ["MONOIDREDUCE_DEBUG"] = "1"
    function = megatron.linear_cross_entropy
    if batch_first:
        function, labels = megatron.vocab_parallel_linear_cross_entropy, labels.T
    try:
        function(hidden, weight, labels, group, sequence_parallel=True)
    except ValueError as error:
        return str(error)
    finally:
        del os.environ["MONOIDREDUCE_DEBUG"]
    return ""


@pytest.mark.parametrize("batch_first", (False, True), ids=("s_b", "b_s"))
def test_megatron_names_its_own_arguments_on_all_ranks(batch_first: bool) -> None:
    """Where one rank has other labels than of all tokens."""
    hidden, weight, labels = (t.detach() for t in operands())
    given = Each([*hidden.chunk(2)]), Each([*weight.chunk(2)]), Each([labels, labels[:-1]])
    found = on_ranks(2, _megatron_refused, *given, batch_first)
    sizes = [B, S] if batch_first else [S, B]
    expected = f"labels: expected shape {sizes} as hidden of each rank is {[S // 2, B, D]}"
    assert expected in found[1] and found[0].startswith(f"rank 1: {expected}")


def _megatron_of_rank(
    group: Any, hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, own: bool, upstream: Any
) -> list[Tensor]:
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    if reduction == "of tokens":
        loss = megatron.vocab_parallel_linear_cross_entropy(
            hidden, weight, labels.T, group, sequence_parallel=own
        )
    else:
        loss = megatron.linear_cross_entropy(hidden, weight, labels, group, reduction, sequence_parallel=own)
    loss.backward(upstream)
    assert hidden.grad is not None and weight.grad is not None
    return [loss.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("own", (False, True), ids=("replicated", "sequence_parallel"))
@pytest.mark.parametrize("reduction", ("none", "mean", "of tokens"))
def test_megatron_over_ranks(reduction: str, own: bool) -> None:
    """The loss of all tokens is on all ranks. The gradient of hidden is whole on each, or of its own rows."""
    hidden, weight, labels = operands()
    logits = hidden @ weight.T
    if reduction == "of tokens":
        expected = F.cross_entropy(logits.permute(1, 2, 0), labels.T, reduction="none")
    else:
        expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, [hidden, weight], upstream)
    shards = Each([part.clone() for part in weight.detach().chunk(2)])
    rows = Each([part.clone() for part in hidden.detach().chunk(2)]) if own else hidden.detach()
    of_ranks = on_ranks(2, _megatron_of_rank, rows, shards, labels, reduction, own, upstream)
    loss, of_hidden, of_weight = (list(parts) for parts in zip(*of_ranks, strict=True))
    torch.testing.assert_close(same_bits(loss), expected.detach())
    whole = torch.cat(of_hidden) if own else same_bits(of_hidden)
    torch.testing.assert_close((whole, torch.cat(of_weight)), gradients)


# torchtitan


def test_torchtitan() -> None:
    hidden, weight, labels = operands()
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    head = mr.nn.LinearCrossEntropyHead(D, V, reduction="sum", dtype=torch.float64)
    head.weight.data.copy_(weight)
    loss = torchtitan.LinearCrossEntropyLoss()
    loss.set_lm_head(head)
    tokens = torch.tensor(37)
    found, metrics = loss(hidden, labels, tokens)
    summed, _ = loss(hidden, labels)
    expected = F.cross_entropy(hidden @ head.weight.T, labels, reduction="sum")
    compare([found, summed], [expected / tokens, expected], [hidden, head.weight])
    assert metrics == {}


def _torchtitan_of_rank(group: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    """The loss of its own tokens, and the gradients. FSDP takes the weight's as the mean over ranks."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    head: Any = mr.nn.LinearCrossEntropyHead(D, V, reduction="sum", dtype=torch.float64)
    head.weight.data.copy_(weight)
    fully_shard(head, mesh=DeviceMesh.from_group(group, "cpu"))
    loss = torchtitan.LinearCrossEntropyLoss()
    loss.set_lm_head(head)
    hidden = hidden.requires_grad_()
    found, _ = loss(hidden, labels, (labels != -100).sum())
    found.backward()
    assert hidden.grad is not None
    return [found.detach(), hidden.grad, head.weight.grad.full_tensor()]


def test_torchtitan_under_fsdp() -> None:
    hidden, weight, labels = operands()
    parts = [Each([t.clone() for t in whole.detach().flatten(0, 1).chunk(2)]) for whole in (hidden, labels)]
    of_ranks = on_ranks(2, _torchtitan_of_rank, parts[0], weight.detach(), parts[1])
    losses, of_hidden, of_weight = (list(found) for found in zip(*of_ranks, strict=True))
    logits = (hidden @ weight.T).flatten(0, 1)
    expected = [
        F.cross_entropy(z, target)
        for z, target in zip(logits.chunk(2), labels.flatten().chunk(2), strict=True)
    ]
    torch.testing.assert_close(losses, [loss.detach() for loss in expected])
    gradients = torch.autograd.grad(sum(expected), [hidden, weight])
    torch.testing.assert_close(torch.cat(of_hidden), gradients[0].flatten(0, 1))
    torch.testing.assert_close(2 * same_bits(of_weight), gradients[1])


def test_torchtitan_refuses() -> None:
    loss = torchtitan.LinearCrossEntropyLoss()
    hidden, _, labels = operands()
    with pytest.raises(ValueError, match="lm_head: expected a head from set_lm_head"):
        loss(hidden, labels)
    with pytest.raises(
        TypeError, match=r"lm_head: expected a monoidreduce.nn.LinearCrossEntropyHead, got Linear"
    ):
        loss.set_lm_head(torch.nn.Linear(D, V))
    with pytest.raises(ValueError, match='lm_head: expected a head with reduction="sum", got mean'):
        loss.set_lm_head(mr.nn.LinearCrossEntropyHead(D, V))
    loss.set_lm_head(mr.nn.LinearCrossEntropyHead(D, V, reduction="sum"))
    with pytest.raises(TypeError, match=r"loss_inputs: .*'advantages'"):
        loss(hidden, labels, advantages=labels)
