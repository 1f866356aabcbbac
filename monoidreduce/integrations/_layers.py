"""torch.compile for the layers of transformers models, in training only.

torch.compile fuses what lies between the matrix products: norms, rotary embeddings, activations, residual
sums. It recomputes cheap results in backward instead of saving them. Layers of one class share the compiled
code. Evaluation and generation run uncompiled: their caches and lengths change from call to call, and each
change would compile again.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import warnings
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from monoidreduce._torch_private import inductor_keeping
from monoidreduce._validate import mismatch

__all__ = ["compile_in_training", "give_back_layers", "layers_of"]

# Fraction of the activations that torch.compile may save for backward, relative to what it saves by default.
# Below 1 it recomputes the outputs of activation functions, which are cheap.
KEPT = 0.9


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of the model: those that support gradient checkpointing.

    Raises:
        TypeError: the model has none, or something else has replaced the forward of one.
    """
    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    expected = "layers that transformers can checkpoint (compile_layers=False leaves them)"
    if not layers:
        raise TypeError(mismatch("model", expected, type(model).__name__))
    for layer in layers:
        replaced = vars(layer).get("forward")
        if replaced is not None and getattr(replaced, "__func__", None) not in (_forward, _forward_on_gpus):
            name = type(layer).__name__
            raise TypeError(
                mismatch("model", f"{name} with the forward of its class", f"one with {replaced}")
            )
    return layers


def compile_in_training(layers: list[nn.Module], on_gpus_alone: bool = False) -> None:
    """Patch the layers so that they are compiled when they first run in training.

    on_gpus_alone: compile only where a layer's inputs are on a GPU and Triton works there.
    """
    for layer in layers:
        layer.forward = MethodType(_forward_on_gpus if on_gpus_alone else _forward, layer)


def give_back_layers(model: nn.Module) -> None:
    """Undo `compile_in_training`."""
    for layer in model.modules():
        if getattr(vars(layer).get("forward"), "__func__", None) in (_forward, _forward_on_gpus):
            del layer.forward


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    kind: Any = type(layer)
    # Under gradient checkpointing a layer first runs without grad mode, then again with it, and both runs
    # must take the same path. The first run shows by inputs that require gradients and by having no cache;
    # generation has one.
    recorded = torch.is_grad_enabled() or (
        kwargs.get("past_key_values") is None
        and any(t.requires_grad for t in _tensors(*args, *kwargs.values()))
    )
    trains = layer.training and recorded and not torch.compiler.is_compiling()
    return (_compiled(kind) if trains else kind.forward)(layer, *args, **kwargs)


def _forward_on_gpus(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    given = [] if torch.compiler.is_compiling() else _tensors(*args, *kwargs.values())
    on_gpu = any(t.is_cuda for t in given)
    forward = _forward if on_gpu and _compiles_for_gpus() else type(layer).forward
    return forward(layer, *args, **kwargs)


def _tensors(*values: Any) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


@functools.cache
def _compiles_for_gpus() -> bool:
    """Whether Triton and the C compiler that it needs are installed. Warns if not."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler and importlib.util.find_spec("triton"):
        return True
    warnings.warn(
        "the layers of a model run as they are: torch compiles them for a GPU with Triton and a C compiler, "
        "and one is not installed (apply(model, compile_layers=False) asks for this)",
        stacklevel=2,
    )
    return False


@functools.cache
def _compiled(kind: Any) -> Any:
    return torch.compile(kind.forward, backend=inductor_keeping(KEPT))
