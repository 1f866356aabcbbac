"""Attention with and without sinks and dropout, and backward passes with some and with all gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

import monoidreduce as mr
from bench import attention
from bench.harness import Case, Contender

WITHOUT, TORCH_WITHOUT = "monoidreduce, without sinks", "torch, without sinks"
WHOLE = "monoidreduce, all gradients"
UNDROPPED, TORCH_UNDROPPED = "monoidreduce, without dropout", "torch, without dropout"


class _Beside(torch.autograd.Function):
    """Returns `result`, and gives `other`, on which the result does not depend, a gradient of ones."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, other: Tensor) -> Tensor:
        ctx.other = other
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.ones_like(ctx.other)


_beside: Contender = _Beside.apply


def with_sinks(case: Case) -> Case:
    """The case with a learned sink per head. "torch" adds it as one more score, and stores all scores."""
    heads = case.parameters["H"]

    def inputs() -> tuple[Tensor, ...]:
        return *case.inputs(), torch.randn(heads, device=case.device).to(case.dtype)

    def own(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return mr.attention(q, k, v, causal=True, sinks=sinks)

    def without(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return _beside(mr.attention(q, k, v, causal=True), sinks)

    def without_in_torch(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return _beside(case.contenders["torch"](q, k, v), sinks)

    def theirs(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        column = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores.masked_fill(~seen, -torch.inf), column), -1).softmax(-1)
        return weights[..., :-1] @ v

    return replace(
        case,
        op="attention_options",
        parameters=case.parameters | {"sinks": True},
        inputs=inputs,
        leaves=4,
        contenders={
            "monoidreduce": own,
            "torch": theirs,
            WITHOUT: without,
            TORCH_WITHOUT: without_in_torch,
        },
        checked_by=dict.fromkeys((WITHOUT, TORCH_WITHOUT), TORCH_WITHOUT),
    )


def with_dropout(case: Case, p: float) -> Case:
    """The case with dropout; torch's by its FlashAttention on a GPU.

    Each library drops elements of its own, so results with dropout are compared with those of the same
    contender, from the same seed (tests/gpu/test_dropout.py compares them with a definition).
    """
    causal = case.parameters["causal"]

    def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(0)
        return mr.attention(q, k, v, causal=causal, dropout_p=p)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(0)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=causal)

    of_torch = case.contenders["torch"]
    if case.device.type == "cuda":
        flash = SDPBackend.FLASH_ATTENTION
        theirs, of_torch = attention.through(flash, theirs), attention.through(flash, of_torch)
    return replace(
        case,
        op="attention_options",
        parameters=case.parameters | {"dropout": p},
        contenders={
            "monoidreduce": own,
            "torch": theirs,
            UNDROPPED: case.contenders["monoidreduce"],
            TORCH_UNDROPPED: of_torch,
        },
        checked_by={
            "monoidreduce": "monoidreduce",
            **dict.fromkeys((UNDROPPED, TORCH_UNDROPPED), TORCH_UNDROPPED),
        },
    )


def with_gradients(case: Case, names: str) -> Case:
    """The case with gradients of only the inputs named, and a contender with the gradients of all three."""
    order = names + "".join(name for name in "qkv" if name not in names)

    def inputs() -> tuple[Tensor, ...]:
        given = dict(zip("qkv", case.inputs(), strict=True))
        return tuple(given[name] for name in order)

    def of(contender: Contender) -> Contender:
        def run(*tensors: Tensor) -> Tensor:
            given = dict(zip(order, tensors, strict=True))
            return contender(*(given[name] for name in "qkv"))

        return run

    def whole(*tensors: Tensor) -> Tensor:
        learned = (t if t.requires_grad else t.detach().requires_grad_() for t in tensors)
        return of(case.contenders["monoidreduce"])(*learned)

    products = case.flops["forward"] / 2
    return replace(
        case,
        op="attention_options",
        parameters=case.parameters | {"gradients": " and ".join(names)},
        inputs=inputs,
        leaves=len(names),
        contenders={name: of(case.contenders[name]) for name in ("monoidreduce", "torch")} | {WHOLE: whole},
        flops={  # dP, and a product for each gradient
            "forward": 2 * products,
            "backward": (1 + len(names)) * products,
            "total": (3 + len(names)) * products,
        },
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Cases in bfloat16: causal ones, and with dropout full ones too."""
    small = device.type != "cuda" or quick
    size: dict[str, Any] = (
        {"B": 1, "H": 2, "L": 256, "d": 64} if small else {"B": 2, "H": 16, "L": 8192, "d": 128}
    )
    case = attention.case(torch.bfloat16, device, **size, causal=True)
    found = [with_sinks(case), with_gradients(case, "q"), with_gradients(case, "kv")]
    for d in (64,) if small else (64, 128):
        for causal in (False, True):
            size |= {"L": 256 if small else 4096, "d": d, "causal": causal}
            found.append(with_dropout(attention.case(torch.bfloat16, device, **size), 0.1))
    return found
