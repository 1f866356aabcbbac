"""MonoidReduce in models of transformers (5.4 or later).

    from monoidreduce.integrations.transformers import apply

    model = apply(AutoModelForCausalLM.from_pretrained(name))

`apply` patches one model: its attention, its loss in training, and its layers in training on GPUs. `register`
makes the attention known by name, for `from_pretrained(name, attn_implementation="monoidreduce")`.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from monoidreduce._validate import check_bool, mismatch
from monoidreduce.integrations._attention import attention_forward, attention_mask
from monoidreduce.integrations._layers import compile_in_training, layers_of
from monoidreduce.integrations._loss import check_fusible, fuse_loss
from monoidreduce.integrations._mlp import replace_gated_mlps

__all__ = ["apply", "register"]

NAME = "monoidreduce"

Model = TypeVar("Model", bound=nn.Module)


def register() -> None:
    """Make `attn_implementation="monoidreduce"` known to transformers: the attention and its masks.

    A model that is loaded with this name, or `model.set_attn_implementation("monoidreduce")`, then computes
    attention by `monoidreduce.attention`. Its layers raise ValueError or TypeError for what that has not:
    dropout, the weights (`output_attentions`), paged caches and arguments that it does not know.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def apply(
    model: Model, attention: bool = True, loss: bool = True, compile_layers: bool | None = None
) -> Model:
    """Let a model of transformers compute its attention and its training loss by MonoidReduce, in place.

    Args:
        model: a `PreTrainedModel`, or PEFT's model of one. Apply it before FSDP, DDP or torch.compile.
        attention: see `register`. Every part of the model must take attention from transformers' interface.
        loss: of a causal language model whose loss function is transformers' `ForCausalLMLoss`. In training,
            calls with labels return a loss by `monoidreduce.linear_cross_entropy` and None for logits. Calls
            without labels, or in evaluation, are as before. The argument `skip_logits` of the model's call
            overrides this: False for logits in training, True for none in evaluation.
        compile_layers: let torch.compile fuse, in training, what its layers do between matrix products. The
            first step then takes seconds more, and so may one of another length. By default (None) layers
            that train on a GPU are compiled, if torch can and nothing has replaced the forward of one. True
            also compiles layers on a CPU. Since transformers 5.23, MLPs like Llama's in compiled layers that
            are recomputed are computed by `monoidreduce.mlp`. A later call with False leaves layers compiled.

    Returns:
        The model.

    Raises:
        TypeError: the model is none of transformers, or has no such attention, loss or layers. A call of the
            model raises if it does something else with its logits than scale and cap them. It also raises if
            the model's head is no linear layer.

    Warns:
        UserWarning: in training on a GPU, where by default layers are compiled and Triton is not installed.
    """
    unwrapped = getattr(model, "get_base_model", None)  # of PEFT
    base = model if unwrapped is None else unwrapped()
    if not isinstance(base, PreTrainedModel):
        raise TypeError(mismatch("model", "a PreTrainedModel or PEFT's model of one", type(base).__name__))
    if check_bool("loss", loss):
        check_fusible(base)
    by_default = compile_layers is None
    try:
        layers = layers_of(base) if by_default or check_bool("compile_layers", compile_layers) else []
    except TypeError:
        if not by_default:
            raise
        layers = []
    if check_bool("attention", attention):
        register()
        base.set_attn_implementation(NAME)
        for part in base.modules():
            if isinstance(part, PreTrainedModel) and part.config._attn_implementation != NAME:
                expected = "attention by transformers' AttentionInterface (attention=False leaves it)"
                raise TypeError(mismatch("model", expected, type(part).__name__))
    if loss:
        fuse_loss(base)
    compile_in_training(layers, on_gpus_alone=by_default)
    replace_gated_mlps(layers)
    return model
