"""Gated MLPs in layers that are compiled by torch and recomputed by gradient checkpointing.

`monoidreduce.mlp` saves nothing for backward and holds hidden values in slices of the workspace. In a
recomputed layer it takes 11 matrix products, two of which recompute hidden values, and so does the model's
own MLP. Without recomputation the model's own takes 9, so it stays.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP

from monoidreduce._torch_private import has_hooks
from monoidreduce.functional import mlp as gated_mlp

__all__ = ["give_back_gated_mlps", "replace_gated_mlps", "replaced_gated_mlps"]

_OF_LLAMA = LlamaMLP.forward.__code__
_ACTIVATIONS = {
    ACT2CLS["silu"]: "silu",
    nn.SiLU: "silu",
    ACT2CLS["gelu"]: "gelu",
    ACT2CLS["gelu_pytorch_tanh"]: "gelu_tanh",
}
# Since transformers 5.23 gradient checkpointing happens inside a layer's forward. Before, it happened in the
# layer's __call__, outside the compiled code: the recomputation would compute the MLP's output, which nobody
# reads.
_WITHIN_FORWARD = "__call__" not in vars(GradientCheckpointingLayer)


def replace_gated_mlps(layers: list[nn.Module]) -> None:
    """Patch MLPs like Llama's so that `monoidreduce.mlp` computes them in compiled, recomputed layers."""
    for layer in layers if _WITHIN_FORWARD else ():
        for part in layer.modules():
            if _is_like_llamas(part) and "forward" not in vars(part):
                part.forward = MethodType(_forward, (layer, part))


def replaced_gated_mlps(model: nn.Module) -> tuple[str, ...]:
    """Module names of the MLPs that `replace_gated_mlps` has patched."""
    forwards = {name: vars(part).get("forward") for name, part in model.named_modules()}
    return tuple(name for name, forward in forwards.items() if getattr(forward, "__func__", None) is _forward)


def give_back_gated_mlps(model: nn.Module) -> None:
    """Undo `replace_gated_mlps`."""
    for name in replaced_gated_mlps(model):
        del model.get_submodule(name).forward


def _is_like_llamas(module: nn.Module) -> bool:
    """Whether the bytecode of its class's forward equals LlamaMLP's."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and (code.co_code, code.co_names) == (_OF_LLAMA.co_code, _OF_LLAMA.co_names)


def _forward(layer_and_mlp: tuple[Any, Any], x: Tensor) -> Tensor:
    layer, mlp = layer_and_mlp
    recomputed = layer.training and layer.gradient_checkpointing and torch.compiler.is_compiling()
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    activation = _ACTIVATIONS.get(type(mlp.act_fn))
    if not recomputed or activation is None or not (_is_plain(gate) and _is_plain(up) and _is_plain(down)):
        own: Tensor = type(mlp).forward(mlp, x)
        return own
    return gated_mlp(
        x,
        up.weight,
        down.weight,
        gate=gate.weight,
        activation=activation,
        bias1=up.bias,
        gate_bias=gate.bias,
        bias2=down.bias,
    )


def _is_plain(linear: nn.Module) -> bool:
    """Whether it is a plain nn.Linear: no adapter, not quantized, not sharded, and without hooks."""
    return type(linear) is nn.Linear and type(linear.weight) is nn.Parameter and not has_hooks(linear)
