"""MonoidReduce in models of transformers (4.57 or later).

    from monoidreduce.integrations.transformers import apply

    model = apply(AutoModelForCausalLM.from_pretrained(name))

`apply` patches one model: its attention, its training loss, and on GPUs it compiles its layers for training.
`replaced` lists what is patched, and `undo` restores it. `register` makes the attention available by name,
for `from_pretrained(name, attn_implementation="monoidreduce")`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from monoidreduce.integrations import _transformers_version  # noqa: F401  # first, as others would fail

# isort: split
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from monoidreduce._validate import check_bool, mismatch
from monoidreduce.integrations._attention import (
    BY_POSITION,
    CAPTURES,
    KEYWORDS,
    attention_forward,
    attention_mask,
    attention_mask_by_position,
    refuse_weights,
)
from monoidreduce.integrations._layers import compile_in_training, give_back_layers, layers_of
from monoidreduce.integrations._loss import fuse_loss, fused_loss, give_back_loss, loss_error
from monoidreduce.integrations._mlp import give_back_gated_mlps, replace_gated_mlps, replaced_gated_mlps
from monoidreduce.integrations._sources import attention_calls

__all__ = ["Replaced", "apply", "register", "replaced", "undo"]

NAME = "monoidreduce"

log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)


class Replaced(NamedTuple):
    """The parts of a model that MonoidReduce computes, by module name."""

    attention: tuple[str, ...]  # attention layers that MonoidReduce computes
    attention_left: tuple[str, ...]  # attention layers that are unchanged
    loss: bool  # the loss in training
    mlps: tuple[str, ...]  # MLPs, replaced only in training while their layer is compiled and recomputed


def register() -> None:
    """Register `attn_implementation="monoidreduce"` with transformers: the attention and its masks.

    A model that is loaded with this name, or set to it by `model.set_attn_implementation("monoidreduce")`,
    computes attention by `monoidreduce.attention`. Its layers raise ValueError or TypeError for what is not
    supported: returned weights (`output_attentions`), paged caches, and sparse attention by indices.
    `apply` detects such layers before the first call.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask_by_position if BY_POSITION else attention_mask)


def apply(
    model: Model, attention: bool = True, loss: bool = True, compile_layers: bool | None = None
) -> Model:
    """Patch a transformers model, in place, so that MonoidReduce computes its attention and training loss.

    It logs what it replaces (`logging`, logger "monoidreduce.integrations.transformers"). Replacements of an
    earlier call are undone first.

    Args:
        model: a `PreTrainedModel`, or a PEFT model of one. Call `apply` before FSDP, DDP or torch.compile.
        attention: replace the attention; see `register`. Every part of the model must use transformers'
            AttentionInterface.
        loss: replace the loss of a causal language model, which must be transformers' `ForCausalLMLoss`. In
            training, calls with labels return a loss by `monoidreduce.linear_cross_entropy`, and None for
            logits. Calls without labels, or in evaluation, are unchanged. The argument `skip_logits` of the
            model's call overrides this: False asks for logits in training, True for none in evaluation. If
            the model does more with its logits than scale and cap them, it keeps transformers' loss from its
            first step on, and a warning is logged.
        compile_layers: let torch.compile fuse, in training, what the layers do between matrix products. The
            first step then takes seconds more, and so may a step with another sequence length. By default
            (None), layers that train on a GPU are compiled if torch can compile there and nothing has
            replaced a layer's forward. True also compiles layers on a CPU. With transformers 5.23 or later,
            `monoidreduce.mlp` computes MLPs like Llama's in compiled layers under gradient checkpointing.

    Returns:
        The model.

    Raises:
        TypeError: this is not a transformers model, or it has no such attention, loss or layers. The message
            names the model's class and which argument leaves that part unchanged.
        ValueError: the model's config asks to return attention weights.
        RuntimeError: see `undo`.

    Warns:
        UserWarning: in training on a GPU with compile_layers=None, if Triton is not installed.
    """
    base = _base(model)
    refusals = {"attention": attention_error(base), "loss": loss_error(base)}
    for part, asked in {"attention": attention, "loss": loss}.items():
        error = refusals[part]
        if check_bool(part, asked) and error is not None:
            other = "loss" if part == "attention" else "attention"
            works = f"apply(model, {part}=False) replaces its {other}"
            instead = works if refusals[other] is None else f"nor can its {other} be replaced"
            raise type(error)(f"{type(base).__name__}: {error}; {instead}")
    by_default = compile_layers is None
    try:
        layers = layers_of(base) if by_default or check_bool("compile_layers", compile_layers) else []
    except TypeError:
        if not by_default:
            raise
        layers = []
    undo(model)
    if attention:
        _set_attention(base)
    if loss:
        fuse_loss(base)
    compile_in_training(layers, on_gpus_alone=by_default)
    replace_gated_mlps(layers)
    _log(type(base).__name__, replaced(model), attention)
    return model


def replaced(model: nn.Module) -> Replaced:
    """The parts of a model that `apply` has replaced."""
    base = _base(model)
    ours, left = [], []
    for name, part in base.named_modules():
        if attention_calls(part) is not None and _implementation(base, part) == NAME:
            ours.append(name)
        elif _is_attention(part):
            left.append(name)
    fused = fused_loss(base)
    return Replaced(
        tuple(ours), tuple(left), fused is not None and fused.given_up is None, replaced_gated_mlps(base)
    )


def undo(model: Model) -> Model:
    """Restore everything that `apply` has replaced in a model, in place.

    Returns:
        The model.

    Raises:
        RuntimeError: something else has replaced a forward of the model since `apply`.
    """
    base = _base(model)
    give_back_loss(base)
    give_back_gated_mlps(base)
    give_back_layers(base)
    if "_refuses_weights" in vars(base):
        vars(base).pop("_refuses_weights").remove()
    for config, implementation in vars(base).pop("_before_monoidreduce", ()):
        config._attn_implementation_internal = implementation
    return model


def _base(model: nn.Module) -> PreTrainedModel:
    unwrapped = getattr(model, "get_base_model", None)  # a PEFT model has it
    base = model if unwrapped is None else unwrapped()
    if not isinstance(base, PreTrainedModel):
        raise TypeError(mismatch("model", "a PreTrainedModel or PEFT's model of one", type(base).__name__))
    return base


def attention_error(model: PreTrainedModel) -> Exception | None:
    """The error that says why `attention_forward` cannot replace a model's attention; None if it can."""
    if getattr(model.config, "output_attentions", False):
        return ValueError(mismatch("output_attentions", "False in the config: no weights are stored", True))
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and not part._can_set_attn_implementation():
            expected = "attention by transformers' AttentionInterface"
            return TypeError(mismatch("model", expected, type(part).__name__))
    for name, part in model.named_modules():
        calls = attention_calls(part)
        if calls is None:
            continue
        layer = f"{type(part).__name__} ({name})"
        if unknown := sorted(calls.keywords - KEYWORDS):
            return TypeError(mismatch("model", f"attention without {', '.join(unknown)}", layer))
        if calls.asks_for_tensor:
            return TypeError(mismatch("model", "attention that leaves its mask alone", layer))
    return None


def _configs(config: Any) -> Iterator[Any]:
    """A config and its nested sub-configs."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        if getattr(config, name, None) is not None:
            yield from _configs(getattr(config, name))


def _set_attention(model: PreTrainedModel) -> None:
    register()
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    found = {id(config): config for part in parts for config in _configs(part.config)}
    before = [(config, config._attn_implementation) for config in found.values()]
    model._before_monoidreduce = before
    if not CAPTURES:
        model._refuses_weights = model.register_forward_pre_hook(refuse_weights, with_kwargs=True)
    model.set_attn_implementation(NAME)
    for part in parts:
        if part.config._attn_implementation != NAME:
            undo(model)
            raise TypeError(
                mismatch("model", f"a model that takes {NAME} for attention", type(part).__name__)
            )


def _implementation(model: PreTrainedModel, layer: nn.Module) -> Any:
    config = getattr(layer, "config", None)
    return getattr(model.config if config is None else config, "_attn_implementation", None)


def _is_attention(module: nn.Module) -> bool:
    """Whether its class name says attention, and that of no submodule does."""
    names = [type(part).__name__ for part in module.modules()]
    of_others = isinstance(module, (GradientCheckpointingLayer, nn.MultiheadAttention))
    return "Attention" in names[0] and not of_others and not any("Attention" in name for name in names[1:])


def _log(model: str, found: Replaced, attention: bool) -> None:
    parts = [f"attention in {len(found.attention)} layers"] if found.attention else []
    parts += ["the loss"] if found.loss else []
    parts += [f"{len(found.mlps)} MLPs"] if found.mlps else []
    left = f"; left as it is: {', '.join(found.attention_left[:3])}" if found.attention_left else ""
    left += f" and {len(found.attention_left) - 3} more" if len(found.attention_left) > 3 else ""
    partly = attention and (left or not found.attention)
    message = "%s: replaced %s%s%s"
    none = "" if found.attention or not attention else " (it has no attention that can be)"
    log.log(
        logging.WARNING if partly else logging.INFO, message, model, ", ".join(parts) or "nothing", none, left
    )
