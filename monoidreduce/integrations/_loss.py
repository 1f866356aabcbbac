"""The loss of a causal language model of transformers without its logits.

The forward of a model calls its head, may scale or cap the logits, and calls `self.loss_function`. In
training with labels, the head returns DeferredLogits in place of logits. They hold the loss, which is
computed inside the head's forward, where FSDP has gathered the weight. They also record what the model does
to its logits. The loss function compares that with what the loss was computed for: the record of the forward
before, at first no change. If they differ, it calls the head once more. So no table says what each model does
to its logits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput

from monoidreduce._validate import mismatch
from monoidreduce.functional import linear_cross_entropy

INSTEAD = "apply(model, loss=False) leaves the loss to transformers"


class Squashing(NamedTuple):
    """What a model does to its logits z: inner * z, or outer * tanh(inner * z)."""

    inner: float = 1.0
    outer: float | None = None

    def options(self) -> tuple[float, float | None]:
        """logit_scale and softcap of linear_cross_entropy."""
        return self.inner if self.outer is None else self.inner * self.outer, self.outer


class Targets(NamedTuple):
    """What `loss_function` is given beside logits."""

    labels: Tensor | None  # [B, T], that of token t is predicted at t - 1
    shift_labels: Tensor | None  # [B, T], in place of labels, those predicted at each token
    num_items: Tensor | int | None  # what the sum of losses is divided by; None: how many are not ignored
    ignore_index: int

    def are(self, others: Targets) -> bool:
        """Are they the same objects."""
        same = (given is other for given, other in zip(self[:3], others[:3], strict=True))
        return all(same) and self.ignore_index == others.ignore_index

    def shifted(self) -> Tensor:
        """[tokens], what each token predicts."""
        if self.shift_labels is not None:
            return self.shift_labels.reshape(-1)
        assert self.labels is not None
        return pad(self.labels, (0, 1), value=self.ignore_index)[..., 1:].reshape(-1)


class DeferredLogits(NamedTuple):
    """What the head returns in place of logits.

    A tuple, so that what hooks into the outputs of modules finds the loss in it. Only scaling and capping are
    recorded. All else raises.
    """

    loss: Tensor
    fused: FusedLoss
    squashing: Squashing = Squashing()  # what the model did since

    def __mul__(self, factor: Any) -> DeferredLogits:
        if not isinstance(factor, (int, float)):
            self._refuse(f"* {type(factor).__name__}")
        inner, outer = self.squashing
        scaled = Squashing(inner * factor) if outer is None else Squashing(inner, outer * factor)
        return self._replace(squashing=scaled)

    def __rmul__(self, factor: Any) -> DeferredLogits:
        return self.__mul__(factor)

    def __truediv__(self, divisor: Any) -> DeferredLogits:
        if not isinstance(divisor, (int, float)):
            self._refuse(f"/ {type(divisor).__name__}")
        inner, outer = self.squashing
        scaled = Squashing(inner / divisor) if outer is None else Squashing(inner, outer / divisor)
        return self._replace(squashing=scaled)

    def tanh(self) -> DeferredLogits:
        if self.squashing.outer is not None:
            self._refuse("tanh of tanh")
        return self._replace(squashing=Squashing(self.squashing.inner, 1.0))

    def float(self) -> DeferredLogits:
        return self  # the loss is computed in float32 or float64

    def contiguous(self) -> DeferredLogits:
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> DeferredLogits:
        if function is torch.tanh and isinstance(args[0], DeferredLogits):
            return args[0].tanh()
        cls._refuse(getattr(function, "__name__", str(function)))

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse(f"[{index}]")

    def __add__(self, other: Any) -> NoReturn:
        self._refuse(f"+ {type(other).__name__}")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"logits.{name}: the head computes a loss, not logits; {INSTEAD}")

    @staticmethod
    def _refuse(operation: str) -> NoReturn:
        expected = "scaling by numbers and a softcap of the logits before the loss"
        raise TypeError(f"{mismatch('logits', expected, operation)}; {INSTEAD}")


class FusedLoss:
    """Of one model: what its head and its loss function need while its forward runs."""

    def __init__(self) -> None:
        self.squashing = Squashing()  # that of the forward before
        self.targets: Targets | None = None  # None: the head returns logits
        self.head: nn.Module | None = None
        self.hidden: Tensor | None = None  # the head's input
        self.used = False

    def at_head(self, head: nn.Module, hidden: Tensor) -> DeferredLogits:
        """In the head's forward: the loss of the hidden states [..., D]."""
        assert self.targets is not None
        self.hidden = hidden
        logit_scale, softcap = self.squashing.options()
        x, weight, bias = operands(head, hidden)
        num_items = self.targets.num_items
        loss = linear_cross_entropy(
            x.flatten(0, -2).to(weight.device),  # of a model whose layers are on several devices
            weight,
            self.targets.shifted().to(weight.device),
            bias=None if bias is None else bias * logit_scale,
            ignore_index=self.targets.ignore_index,
            reduction="mean" if num_items is None else "sum",
            softcap=softcap,
            logit_scale=logit_scale,
        )
        if num_items is not None:
            loss = loss / (num_items.to(loss.device) if isinstance(num_items, Tensor) else num_items)
        return DeferredLogits(loss, self)

    def at_loss(self, logits: DeferredLogits, targets: Targets) -> Tensor:
        """In the loss function: the loss for these targets, of the logits as the model has changed them."""
        assert self.targets is not None and self.head is not None
        if logits.squashing != self.squashing or not targets.are(self.targets):
            self.squashing, self.targets = logits.squashing, targets
            logits = self.head(self.hidden)
        self.used = True
        return logits.loss


def operands(head: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """x [..., D], weight [V, D] and bias [V]: the head's logits are x @ weight^T + bias."""
    if hasattr(head, "modules_to_save"):  # copies of the head that PEFT trains
        whole = head.disable_adapters or not head.active_adapters
        return operands(
            head.original_module if whole else head.modules_to_save[head.active_adapters[0]], hidden
        )
    if hasattr(head, "lora_A"):
        return _of_lora(head, hidden)
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        return hidden, head.weight, head.bias
    raise TypeError(f"{mismatch('lm_head', 'a torch.nn.Linear or its LoRA', type(head).__name__)}; {INSTEAD}")


def _of_lora(head: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """x @ W^T + s * a(x) @ B^T is [x, s * a(x)] @ [W, B]^T, of width D and the ranks."""
    x, weight, bias = operands(head.base_layer, hidden)
    if head.disable_adapters and head.merged:
        head.unmerge()
    if head.disable_adapters or head.merged:
        return x, weight, bias
    xs, weights = [x], [weight]
    for name in head.active_adapters:
        if name not in head.lora_A:
            continue
        a, b = head.lora_A[name], head.lora_B[name]
        if name in head.lora_variant or b.bias is not None:
            expected = f"a plain LoRA without a bias as adapter {name!r}"
            raise TypeError(f"{mismatch('lm_head', expected, head)}; {INSTEAD}")
        narrow = a(head.lora_dropout[name](x.to(a.weight.dtype))) * head.scaling[name]
        xs.append(narrow.to(x.dtype))
        weights.append(b.weight.to(weight.dtype))
    return torch.cat(xs, -1), torch.cat(weights, -1), bias


def _head_forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor | DeferredLogits:
    fused: FusedLoss = self._fused_loss
    if fused.targets is None:
        return cast(Tensor, self._forward_to_logits(hidden, *args, **kwargs))
    if args or kwargs:
        raise TypeError(f"{mismatch('lm_head', 'one argument', [*args, *kwargs])}; {INSTEAD}")
    return fused.at_head(self, hidden)


def _loss_function(
    logits: Tensor | DeferredLogits,
    labels: Tensor | None,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """ForCausalLMLoss, also of deferred logits."""
    if isinstance(logits, DeferredLogits):
        return logits.fused.at_loss(logits, Targets(labels, shift_labels, num_items_in_batch, ignore_index))
    options = {"ignore_index": ignore_index, "shift_labels": shift_labels, **kwargs}
    return cast(Tensor, ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, **options))


def _model_forward(original: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """The forward of a model, unbound, with a fused loss where there are labels in training.

    signature is that of the bound forward, which trainers read.
    """
    position = list(signature.parameters).index("labels")

    @functools.wraps(original)
    def forward(self: Any, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        labels = args[position] if len(args) > position else kwargs.get("labels")
        if labels is None or not (self.training if skip_logits is None else skip_logits):
            return original(self, *args, **kwargs)
        fused: FusedLoss = self._fused_loss
        fused.head = _patched(self.get_output_embeddings(), fused)
        fused.targets = Targets(
            labels,
            kwargs.get("shift_labels"),
            kwargs.get("num_items_in_batch"),
            kwargs.get("ignore_index", -100),
        )
        fused.used = False
        try:
            output = original(self, *args, **kwargs)
        finally:
            fused.head = fused.targets = fused.hidden = None
        if not fused.used:
            raise TypeError(f"model: its forward does not call self.loss_function; {INSTEAD}")
        return _without_logits(output)

    bound = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = signature.replace(parameters=[bound, *signature.parameters.values()])  # type: ignore[attr-defined]
    return forward


def _without_logits(output: Any) -> Any:
    """The output of a model, with None for deferred logits."""
    if isinstance(output, ModelOutput):
        kept = {name: value for name, value in output.items() if not isinstance(value, DeferredLogits)}
        return type(output)(**kept)
    return tuple(value for value in output if not isinstance(value, DeferredLogits))


def _patched(head: Any, fused: FusedLoss) -> nn.Module:
    """The head, whose forward asks `fused` first. FSDP's wrapper shows the attribute of what it wraps."""
    if getattr(head, "_fused_loss", None) is not fused:
        head._fused_loss = fused
        head._forward_to_logits = head.forward
        head.forward = MethodType(_head_forward, head)
    return cast(nn.Module, head)


def check_fusible(model: PreTrainedModel) -> None:
    """Raise TypeError for a model whose loss is not one of causal language models."""
    name = type(model).__name__
    if model.get_output_embeddings() is None or "labels" not in inspect.signature(model.forward).parameters:
        raise TypeError(f"{mismatch('model', 'a head and labels, as a causal LM has', name)}; {INSTEAD}")
    if model.loss_function not in (ForCausalLMLoss, _loss_function):
        given = getattr(model.loss_function, "__name__", model.loss_function)
        raise TypeError(f"{mismatch('model.loss_function', 'ForCausalLMLoss', given)}; {INSTEAD}")


def fuse_loss(model: PreTrainedModel) -> None:
    """Let a fusible model compute its loss without logits in training."""
    if "_fused_loss" in vars(model):
        return
    forward = model.forward
    if isinstance(forward, MethodType) and forward.__self__ is model:
        unbound: Callable[..., Any] = forward.__func__  # so that a copy of the model has its own
    else:  # of a hook, bound to this model
        unbound = functools.wraps(forward)(lambda _, *args, **kwargs: forward(*args, **kwargs))
    model._fused_loss = FusedLoss()
    model.loss_function = _loss_function
    model.forward = MethodType(_model_forward(unbound, inspect.signature(forward)), model)
    _patched(model.get_output_embeddings(), model._fused_loss)
