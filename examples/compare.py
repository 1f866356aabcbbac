"""Runs two implementations on one input and prints how far they are apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


def compare(
    ours: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
    inputs: dict[str, Tensor],
) -> None:
    """Print the largest difference of outputs, and of gradients of floating inputs.

    Raises:
        AssertionError: a difference is larger than float64 inputs explain, relative to
            the largest entry.
    """
    leaves = {
        name: x.requires_grad_() for name, x in inputs.items() if x.is_floating_point()
    }
    upstream: Tensor | None = None
    results = []
    for implementation in (ours, theirs):
        output = implementation(**inputs)
        upstream = torch.randn_like(output) if upstream is None else upstream
        gradients = torch.autograd.grad(output, list(leaves.values()), upstream)
        results.append((output.detach(), *gradients))
    compare_results(("output", *(f"gradient of {name}" for name in leaves)), *results)


def compare_results(
    names: Iterable[str], ours: Sequence[Tensor], theirs: Sequence[Tensor]
) -> None:
    """Print the largest difference of each result. Raises as `compare`."""
    for name, our, their in zip(names, ours, theirs, strict=True):
        difference = float((our - their).abs().max() / their.abs().max())
        print(f"{name:<27} largest relative difference {difference:.1e}")
        assert difference < 1e-10, f"{name} differs by {difference:.1e}"


def compare_memory(
    ours: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
    inputs: dict[str, Tensor],
) -> None:
    """Print the bytes that each keeps for its backward pass beside its inputs."""
    for name, implementation in (("monoidreduce", ours), ("plain torch", theirs)):
        saved: dict[int, int] = {}

        def keep(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            implementation(**inputs)
        own = {x.untyped_storage().data_ptr() for x in inputs.values()}
        kept = sum(n for at, n in saved.items() if at not in own)
        print(f"{name:<27} keeps {kept:,} bytes")
