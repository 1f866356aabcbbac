"""Linear cross entropy, compared with torch's linear layer and cross entropy, eager, compiled and fused."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from bench.harness import Case, Contender, compiled, on_tier

# In addition to the default, 352 MiB.
WORKSPACES = {f"monoidreduce, {size} MiB": size << 20 for size in (32, 128, 1024)}
SMOOTHING = 0.1


def torch_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The loss in torch, which stores the logits."""
    return F.cross_entropy(F.linear(x, weight), target)


def torch_smoothed(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target, label_smoothing=SMOOTHING)


def torch_chunked(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """torch's chunked linear cross entropy (torch 2.13 and later)."""
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(x, weight, target, options=options)


def cut_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Cut cross entropy without its filter, which drops small gradients: up to 3 % of the result here."""
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(x, weight, target, filter_eps=None)


def liger(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Liger's default, on chunks of logits: CuTe DSL on Hopper with nvidia-cutlass-dsl, or Triton."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight, x, target)


def liger_scaled(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Liger's kernels for Hopper that recompute, in CuTe DSL. They return each token's loss."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    return LigerFusedLinearScaledCrossEntropyFunction.apply(x, weight, target).mean()


def liger_sm90(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Liger's kernels for Hopper that compute the gradients in the forward pass, in CuTe DSL."""
    from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90 as sm90

    return sm90.liger_fused_linear_cross_entropy_sm90(x, weight, target)


def quack(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Quack's default: gradients computed in the forward pass, in chunks of tokens.

    The default is 4096 tokens; quack 0.6.4 rejects as many tokens as the width.
    """
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy(x, weight, target, chunk_size=2048 if x.shape[1] == 4096 else 4096)


# A float32 gradient of the weight


def under_autocast(contender: Contender) -> Contender:
    """The contender on a float32 weight: autocast casts it in every call."""

    def call(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        with torch.autocast(x.device.type, x.dtype):
            return contender(x, weight, target)

    return call


class _Accumulated(torch.autograd.Function):
    """A step of `accumulating`. The gradient of the float32 weight is the sum over all steps so far."""

    @staticmethod
    def forward(
        ctx: Any, contender: Contender, x: Tensor, _: Tensor, target: Tensor, weight: Tensor, sums: Tensor
    ) -> Tensor:
        with torch.enable_grad():
            rows = x.detach().requires_grad_()
            loss = contender(rows, weight, target, sums)
        ctx.step = rows, weight, sums, loss
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weight, sums, loss = ctx.step
        loss.backward(grad)
        if weight.grad is not None:
            sums += weight.grad
            weight.grad = None
        return None, rows.grad, sums, None, None, None


def accumulating(contender: Contender) -> Contender:
    """The contender on a 16-bit weight, which is not cast in every call, and a float32 sum of its gradients.

    contender: takes x, the 16-bit weight, target and the sum. If it leaves a 16-bit gradient, that is added.
    """
    kept: list[Tensor] = []

    def call(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        if not kept:
            kept.extend((weight.detach().to(x.dtype).requires_grad_(), torch.zeros_like(weight)))
        result: Tensor = _Accumulated.apply(contender, x, weight, target, *kept)  # type: ignore[no-untyped-call]
        return result

    return call


def with_weight_grad(
    workspace: int | None, x: Tensor, weight: Tensor, target: Tensor, sums: Tensor
) -> Tensor:
    return mr.linear_cross_entropy(x, weight, target, weight_grad=sums, workspace=workspace)


def float32_case(dtype: torch.dtype, device: torch.device, *, N: int, V: int, D: int) -> Case:
    """N tokens of width D over V classes, in 16 bits, with a float32 gradient of the weight [V, D].

    The weight is float32 under autocast; or, as of trainers with a `main_grad`, 16-bit with a float32 sum.
    torch rounds the gradient to 16 bits before it casts or adds it.
    """
    products = 2 * N * V * D  # FLOPs of the logits

    def inputs() -> tuple[Tensor, ...]:
        x = torch.randn(N, D, device=device).to(dtype)
        weight = (torch.randn(V, D, device=device) * D**-0.5).to(dtype).float()
        return x, weight, torch.randint(V, (N,), device=device)

    contenders = {
        "monoidreduce": under_autocast(mr.linear_cross_entropy),
        "monoidreduce, weight_grad": accumulating(functools.partial(with_weight_grad, None)),
        "torch": under_autocast(torch_loss),
    }
    if device.type == "cuda":
        by_compiler = torch.compile(torch_loss, dynamic=False)
        contenders["torch.compile"] = under_autocast(by_compiler)
        contenders["torch.compile, added"] = accumulating(
            lambda x, weight, target, _: by_compiler(x, weight, target)
        )
        for size in (384, 512, 1536):
            own = functools.partial(mr.linear_cross_entropy, workspace=size << 20)
            contenders[f"monoidreduce, {size} MiB"] = under_autocast(own)
            summed = functools.partial(with_weight_grad, size << 20)
            contenders[f"monoidreduce, weight_grad, {size} MiB"] = accumulating(summed)
    added = [name for name in contenders if "weight_grad" in name or "added" in name]
    return Case(
        op="cross_entropy",
        dtype=dtype,
        device=device,
        parameters={"N": N, "V": V, "D": D, "weight": "float32"},
        inputs=inputs,
        leaves=2,
        output=(),
        contenders=contenders,
        flops={"forward": products, "backward": 2 * products, "total": 3 * products},
        targets={},
        sums=dict.fromkeys(added, 4 * V * D),
    )


def case(
    dtype: torch.dtype,
    device: torch.device,
    *,
    N: int,
    V: int,
    D: int,
    std: float = 1.0,
    ignored: float = 0.0,
    smoothing: bool = False,
    target: float | None = None,
) -> Case:
    """N tokens of width D over V classes.

    std: standard deviation of logits. ignored: share of tokens that are ignored. smoothing: label smoothing
    of 0.1, for ours and torch's only.
    """
    products = 2 * N * V * D  # FLOPs of the logits

    def inputs() -> tuple[Tensor, ...]:
        x = torch.randn(N, D, device=device).to(dtype)
        weight = (torch.randn(V, D, device=device) * std * D**-0.5).to(dtype)
        classes = torch.randint(V, (N,), device=device)
        return x, weight, torch.where(torch.rand(N, device=device) < ignored, -100, classes)

    own = functools.partial(mr.linear_cross_entropy, label_smoothing=SMOOTHING if smoothing else 0.0)
    theirs = torch_smoothed if smoothing else torch_loss
    contenders: dict[str, Contender] = {"monoidreduce": own, "torch": theirs}
    if hasattr(torch.nn, "LinearCrossEntropyOptions") and not smoothing:
        contenders["torch chunked"] = torch_chunked
    if device.type == "cuda" and (smoothing or dtype == torch.float32):
        # Trials of float32 products of this size would take minutes.
        contenders |= compiled(theirs, tuned=dtype != torch.float32)
        if dtype == torch.float32:
            contenders["monoidreduce, emulated"] = mr.float32("emulated")(own)
    elif device.type == "cuda":
        workspaces = {**WORKSPACES, "monoidreduce, 2NV": 2 * N * V}
        for name, size in workspaces.items():
            contenders[name] = functools.partial(own, workspace=size)
        contenders["monoidreduce, sm80"] = on_tier(own, "sm80")
        contenders |= compiled(theirs)
        contenders |= {
            "cut-cross-entropy": cut_cross_entropy,
            "Liger": liger,
            "Liger scaled": liger_scaled,
            "Liger sm90": liger_sm90,
            "QuACK": quack,
        }
    return Case(
        op="cross_entropy",
        dtype=dtype,
        device=device,
        parameters={"N": N, "V": V, "D": D}
        | ({} if std == 1.0 else {"std": std})
        | ({"ignored": ignored} if ignored else {})
        | ({"smoothing": SMOOTHING} if smoothing else {}),
        inputs=inputs,
        leaves=2,
        output=(),
        contenders=contenders,
        flops={"forward": products, "backward": 2 * products, "total": 3 * products},
        targets={} if target is None else {"total": target},
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Cases in float32 and bfloat16; on a GPU, the heads of three models, one with several vocabularies."""
    if quick:
        small = {"N": 64, "V": 1000, "D": 64}
        plain = [case(dtype, device, **small) for dtype in (torch.float32, torch.bfloat16)]
        return [*plain, float32_case(torch.bfloat16, device, **small)]
    if device.type == "cuda":
        sizes = [
            {"N": 8192, "V": 128256, "D": 4096},
            {"N": 8192, "V": 256000, "D": 2304},
            {"N": 16384, "V": 32000, "D": 4096},
            *({"N": 8192, "V": V, "D": 4096} for V in (32768, 65536, 262144)),
        ]
        all_count = [case(torch.bfloat16, device, **size) for size in sizes]
        options: list[dict[str, Any]] = [{"ignored": 0.5}, {"smoothing": True}]
        others = [case(torch.bfloat16, device, **sizes[0], **option) for option in options]
        others += [float32_case(torch.bfloat16, device, **size) for size in (sizes[0], sizes[2])]
        others += [
            case(torch.float32, device, **size) for size in (sizes[0], {"N": 4096, "V": 32000, "D": 2048})
        ]
        return [*all_count, *others]
    return [
        case(torch.float32, device, N=1024, V=32000, D=512, target=1.2),
        case(torch.bfloat16, device, N=1024, V=32000, D=512, target=1.0),
    ]
