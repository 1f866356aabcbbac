"""Memory of the demo's MLP layer against sequence length, and of its loss layer against vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .memory import Problem, measure
from .model import BACKENDS, ModelSize


@dataclass(frozen=True)
class Sweep:
    """Peak bytes of a layer beyond inputs, outputs and gradients, by backend, at `sizes` along `axis`."""

    layer: str
    axis: str
    sizes: list[int]
    growth: dict[str, list[int]]


def mlp_problem(backend: str, tokens: int, dim: int, hidden: int, device: str, dtype: str) -> Problem:
    """The MLP layer over one sequence of `tokens` tokens."""
    real, place = getattr(torch, dtype), torch.device(device)
    up, down = (
        nn.Linear(dim, hidden, device=place, dtype=real),
        nn.Linear(hidden, dim, device=place, dtype=real),
    )
    x, grad = _randn(place, real, tokens, dim), _randn(place, real, tokens, dim)
    inputs = (x.requires_grad_(), *up.parameters(), *down.parameters())
    return Problem(lambda: BACKENDS[backend].mlp(x, up, down), inputs, grad)


def loss_problem(backend: str, vocabulary: int, tokens: int, dim: int, device: str, dtype: str) -> Problem:
    """The output projection and its cross entropy over `tokens` tokens."""
    real, place = getattr(torch, dtype), torch.device(device)
    x = _randn(place, real, tokens, dim).requires_grad_()
    weight = (_randn(place, real, vocabulary, dim) * dim**-0.5).requires_grad_()
    target = torch.randint(vocabulary, (tokens,), device=place)
    loss = BACKENDS[backend].loss
    return Problem(lambda: loss(x, weight, target), (x, weight), torch.ones((), device=place, dtype=real))


def _randn(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


def sweep_mlp(size: ModelSize, lengths: list[int], device: torch.device, dtype: torch.dtype) -> Sweep:
    """Memory of the MLP layer at each sequence length."""
    common = {"dim": size.dim, "hidden": size.hidden, "device": str(device), "dtype": dtype_name(dtype)}
    measured = _of_layer("mlp_problem", [common | {"tokens": length} for length in lengths])
    return Sweep("MLP", "sequence length", lengths, measured)


def sweep_loss(
    size: ModelSize, tokens: int, vocabularies: list[int], device: torch.device, dtype: torch.dtype
) -> Sweep:
    """Memory of the loss layer at each vocabulary."""
    common = {"tokens": tokens, "dim": size.dim, "device": str(device), "dtype": dtype_name(dtype)}
    measured = _of_layer("loss_problem", [common | {"vocabulary": vocabulary} for vocabulary in vocabularies])
    return Sweep("loss", "vocabulary", vocabularies, measured)


def _of_layer(build: str, sizes: list[dict[str, Any]]) -> dict[str, list[int]]:
    tiny = {name: 16 if isinstance(value, int) else value for name, value in sizes[0].items()}
    return growth(f"{__name__}:{build}", BACKENDS, tiny, sizes)


def growth(
    build: str, backends: Iterable[str], warm_up: dict[str, Any], sizes: list[dict[str, Any]]
) -> dict[str, list[int]]:
    """`measure` of the problems that `build` makes with each `backend`, in a process of its own."""
    measured = {}
    for backend in backends:
        own = {"backend": backend}
        measured[backend] = measure(build, warm_up | own, [size | own for size in sizes])
    return measured


def dtype_name(dtype: torch.dtype) -> str:
    """As in "float32"."""
    return str(dtype).removeprefix("torch.")
