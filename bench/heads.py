"""What trainers and samplers ask of a head beside its loss: the k best classes, a sample, kept classes and
soft targets, beside torch with stored logits or the same call without them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr
from bench.derivatives import Call, measure_calls

DTYPE = torch.bfloat16
BEST = 64  # classes of linear_topk, and of a soft target
KEPT = 50  # classes that a sampler keeps of a token
Calls = dict[str, Call]


def head(size: dict[str, Any], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows [N, D] and classes [V, D], with logits of unit variance."""
    x = torch.randn(size["N"], size["D"], device=device)
    weight = torch.randn(size["V"], size["D"], device=device) * size["D"] ** -0.5
    return x.to(DTYPE), weight.to(DTYPE)


def topk_calls(size: dict[str, Any], device: torch.device) -> Calls:
    x, weight = head(size, device)

    def stored() -> Any:
        return (x @ weight.mT).topk(BEST)

    return {"torch": stored, "monoidreduce": functools.partial(mr.linear_topk, x, weight, BEST)}


def topk_step_calls(size: dict[str, Any], device: torch.device) -> Calls:
    x, weight = head(size, device)
    return {
        "torch": step(lambda x, w: (x @ w.mT).log_softmax(1).topk(BEST).values.sum(), x, weight),
        "monoidreduce": step(lambda x, w: mr.linear_topk(x, w, BEST).log_probs.sum(), x, weight),
    }


def sample_calls(size: dict[str, Any], device: torch.device) -> Calls:
    x, weight = head(size, device)
    seed = torch.zeros((), dtype=torch.int64, device=device)

    def stored(x: Tensor, weight: Tensor) -> Tensor:
        return torch.multinomial((x @ weight.mT).float().softmax(1), 1)

    compiled = torch.compile(stored, dynamic=False)
    calls: Calls = {
        "torch.compile": lambda: compiled(x, weight),
        "torch": lambda: stored(x, weight),
        "monoidreduce": functools.partial(mr.linear_sample, x, weight, seed=seed),
    }
    if device.type == "cuda":
        graphs = ("torch.compile", "monoidreduce")
        calls |= {f"{name}, graph": in_graph(calls[name]) for name in graphs}
    return calls


def in_graph(call: Call) -> Call:
    """The call as a CUDA graph, as servers of models record it: without its host time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def step(call: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Call:
    """A forward and a backward pass, with gradients to both operands."""
    x, weight = x.requires_grad_(), weight.requires_grad_()

    def run() -> object:
        with torch.enable_grad():
            return torch.autograd.grad(call(x, weight), (x, weight))

    return run


def kept_calls(size: dict[str, Any], device: torch.device) -> Calls:
    x, weight = head(size, device)
    classes = torch.randint(size["V"], (size["N"], KEPT), device=device)
    kept = mr.pack_classes(classes, size["V"])

    def of(**options: Any) -> Call:
        return step(
            lambda x, w: mr.linear_log_probs(x, w, classes[:, 0], **options).log_probs.sum(), x, weight
        )

    return {"all classes": of(), "kept": of(kept=kept)}


def soft_calls(size: dict[str, Any], device: torch.device) -> Calls:
    x, weight = head(size, device)
    classes = torch.randint(size["V"], (size["N"], BEST), device=device)
    shares = torch.rand(size["N"], BEST, device=device).softmax(1)
    return {
        "class indices": step(lambda x, w: mr.linear_cross_entropy(x, w, classes[:, 0]), x, weight),
        "soft targets": step(
            lambda x, w: mr.linear_cross_entropy(x, w, classes, target_probs=shares), x, weight
        ),
    }


def cases(device: torch.device, quick: bool) -> Iterator[tuple[str, dict[str, Any], Calls]]:
    small = quick or device.type == "cpu"
    width = {"V": 1000, "D": 64} if small else {"V": 128256, "D": 4096}
    many = {"N": 64 if small else 8192, **width}
    yield "linear_topk", many | {"k": BEST}, topk_calls(many, device)
    yield "linear_topk, step", many | {"k": BEST}, topk_step_calls(many, device)
    for rows in (16,) if small else (64, 256, 8192):
        size = {"N": rows, **width}
        yield "linear_sample", size, sample_calls(size, device)
    yield "linear_log_probs", many, kept_calls(many, device)
    yield "linear_cross_entropy", many | {"K": BEST}, soft_calls(many, device)


def measure_heads(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """For each size, the milliseconds and the peak memory of each call."""
    return [measure_calls(op, size, calls, device) for op, size, calls in cases(device, quick)]
