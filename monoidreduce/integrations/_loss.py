"""The loss of a transformers causal language model, without its logits in memory.

A model's forward calls its head, may scale or cap the logits, and then calls `self.loss_function`. In
training with labels, the patched head returns DeferredLogits in place of logits. They hold the loss, which is
computed inside the head's forward because FSDP has gathered the weight there. They also record what the model
does to its logits afterwards: scale, tanh cap, a cut to the first classes.

The head has to compute the loss before it can see that record, so it assumes the record of the previous
forward (at first: no change). The loss function compares the two, and calls the head again if they differ.
So there is no table of what each model does to its logits.

If a model does anything else with its logits, the head computes them at that point, and the rest of the
forward runs as transformers wrote it. From the next step on the head returns plain logits, and a warning says
so.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput

from monoidreduce import _yards
from monoidreduce._validate import is_dtensor, mismatch
from monoidreduce.functional import linear_cross_entropy
from monoidreduce.ranks import Ranks

__all__ = ["fuse_loss", "fused_loss", "give_back_loss", "loss_error"]

log = logging.getLogger("monoidreduce.integrations.transformers")


class Squashing(NamedTuple):
    """What a model does to its logits z: inner * z or outer * tanh(inner * z), cut to the first classes."""

    inner: float = 1.0
    outer: float | None = None
    classes: int | None = None  # None: all

    def options(self) -> tuple[float, float | None]:
        """logit_scale and softcap of linear_cross_entropy."""
        return self.inner if self.outer is None else self.inner * self.outer, self.outer


class Targets(NamedTuple):
    """The arguments of `loss_function` other than logits."""

    labels: Tensor | None  # [B, T]; the label of token t is predicted at position t - 1
    shift_labels: Tensor | None  # [B, T]; replaces labels: the label that each position predicts
    num_items: Tensor | int | None  # divisor of the summed losses; None: the number of labels not ignored
    ignore_index: int

    def are(self, others: Targets) -> bool:
        """Whether both hold the same tensor objects and the same ignore_index."""
        same = (given is other for given, other in zip(self[:3], others[:3], strict=True))
        return all(same) and self.ignore_index == others.ignore_index

    def shifted(self) -> Tensor:
        """[B * T], the label that each position predicts."""
        if self.shift_labels is not None:
            return self.shift_labels.reshape(-1)
        assert self.labels is not None
        return pad(self.labels, (0, 1), value=self.ignore_index)[..., 1:].reshape(-1)


class DeferredLogits(NamedTuple):
    """Returned by the head in place of logits.

    It is a tuple so that hooks on module outputs (FSDP, DDP) find the loss tensor in it. Scaling and capping
    are recorded; any other operation makes the head compute the logits and applies to them.
    """

    loss: Tensor
    fused: FusedLoss
    squashing: Squashing = Squashing()  # what the model did to the logits since the head returned

    def logits(self, operation: str) -> Tensor:
        return self.fused.logits(self.squashing, operation)

    def __mul__(self, factor: Any) -> Any:
        if self._made() or not isinstance(factor, (int, float)):
            return self.logits("*") * factor
        return self._scaled(factor)

    def __rmul__(self, factor: Any) -> Any:
        return self.__mul__(factor)

    def __truediv__(self, divisor: Any) -> Any:
        if self._made() or not isinstance(divisor, (int, float)):
            return self.logits("/") / divisor
        return self._scaled(1 / divisor)

    def _made(self) -> bool:
        """Whether the logits were already computed; the model may have changed those in place."""
        return self.squashing in self.fused.made

    def _scaled(self, factor: Any) -> DeferredLogits:
        inner, outer, classes = self.squashing
        if outer is None:
            return self._replace(squashing=Squashing(inner * factor, None, classes))
        return self._replace(squashing=Squashing(inner, outer * factor, classes))

    def __getitem__(self, index: Any) -> Any:
        first = index[1] if isinstance(index, tuple) and len(index) == 2 and index[0] is ... else None
        if (
            not self._made()
            and isinstance(first, slice)
            and isinstance(first.stop, int)
            and first == slice(first.stop)
            and first.stop > 0
        ):
            classes = min(first.stop, self.shape[-1])
            return self._replace(squashing=self.squashing._replace(classes=classes))
        return self.logits("[...]")[index]

    def tanh(self) -> Any:
        if self._made() or self.squashing.outer is not None:
            return self.logits("tanh of tanh").tanh()
        return self._replace(squashing=self.squashing._replace(outer=1.0))

    def float(self) -> DeferredLogits:
        return self  # the loss is computed in float32 or float64

    def contiguous(self) -> DeferredLogits:
        return self

    def to(self, *target: Any, **options: Any) -> Any:
        given = (*target, *options.values())
        kinds = [t.dtype if isinstance(t, torch.Tensor) else t for t in given]
        dtype = next((kind for kind in kinds if isinstance(kind, torch.dtype)), None)
        return (
            self
            if dtype in (None, torch.float32, torch.float64)
            else self.logits("to").to(*target, **options)
        )

    @property
    def device(self) -> torch.device:
        return self.loss.device

    @property
    def shape(self) -> torch.Size:
        *tokens, classes = self.fused.shape
        return torch.Size((*tokens, self.squashing.classes or classes))

    @property
    def dtype(self) -> torch.dtype:
        return self.fused.dtype

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def dim(self) -> int:
        return len(self.shape)

    # Hooks of tensor parallel styles use these three as on a DTensor. The loss is the same on all ranks.
    @property
    def placements(self) -> None:
        return None

    def redistribute(self, *_: Any, **__: Any) -> DeferredLogits:
        return self

    def to_local(self) -> DeferredLogits:
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tanh and isinstance(args[0], DeferredLogits):
            return args[0].tanh()
        name = getattr(function, "__name__", str(function))

        def logits(given: Any) -> Any:
            if isinstance(given, DeferredLogits):
                return given.logits(name)
            return type(given)(map(logits, given)) if type(given) in (list, tuple) else given

        given = {option: logits(value) for option, value in (kwargs or {}).items()}
        return function(*logits(args), **given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"logits.{name}")
        return getattr(self.logits(name), name)


def _of_logits(name: str) -> Any:
    return lambda self, *others: getattr(self.logits(name), name)(*others)


for _name in ("add", "radd", "sub", "rsub", "rtruediv", "neg", "pow", "matmul", "setitem",
              "lt", "le", "gt", "ge", "abs", "invert"):  # fmt: skip
    setattr(DeferredLogits, f"__{_name}__", _of_logits(f"__{_name}__"))


class FusedLoss:
    """State of one model that its head and its loss function share while its forward runs."""

    def __init__(self, model: str) -> None:
        self.model = model  # class name
        self.squashing = Squashing()  # recorded in the previous forward
        self.targets: Targets | None = None  # None: the head returns logits
        self.head: nn.Module | None = None
        self.hidden: Tensor | None = None  # the head's input
        self.shape, self.dtype = torch.Size(), torch.float32  # of the logits
        self.made: dict[Squashing, Tensor] = {}  # logits computed because the model needs them
        self.given_up: str | None = None  # the reason why transformers computes the loss; None: it does not

    def give_up(self, reason: str) -> None:
        self.given_up = reason
        message = "%s: its loss is left to transformers, with all logits stored: %s"
        log.warning(message, self.model, reason)

    def at_head(self, head: nn.Module, hidden: Tensor) -> DeferredLogits | None:
        """Called in the head's forward: the loss of hidden [..., D]; None if this head is not supported."""
        assert self.targets is not None
        try:
            x, weight, bias = operands(head, hidden)
            classes = len(weight)
            x, weight, bias, ranks = _of_rank(x, weight, bias, self.targets, self.squashing.classes)
        except TypeError as error:
            self.give_up(str(error))
            return None
        self.hidden = hidden
        logit_scale, softcap = self.squashing.options()
        num_items = self.targets.num_items
        loss = linear_cross_entropy(
            x.flatten(0, -2).to(weight.device),  # a model's layers may be on several devices
            weight,
            self.targets.shifted().to(weight.device),
            bias=None if bias is None else bias * logit_scale,
            ignore_index=self.targets.ignore_index,
            reduction="mean" if num_items is None else "sum",
            softcap=softcap,
            logit_scale=logit_scale,
            ranks=ranks,
        )
        if num_items is not None:
            loss = loss / (num_items.to(loss.device) if isinstance(num_items, Tensor) else num_items)
        device = weight.device.type
        self.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        self.shape = torch.Size((*hidden.shape[:-1], classes))
        return DeferredLogits(loss, self)

    def logits(self, squashing: Squashing, operation: str) -> Tensor:
        """The logits that the unpatched model would have at this point of its forward."""
        if squashing not in self.made:
            if self.given_up is None:
                self.give_up(f"its forward does more with them than scale and cap them ({operation})")
            targets, self.targets = self.targets, None
            assert self.head is not None
            logits = self.head(self.hidden)
            self.targets = targets
            inner, outer, classes = squashing
            logits = logits[..., :classes]
            self.made[squashing] = logits * inner if outer is None else (logits * inner).tanh() * outer
        return self.made[squashing]

    def at_loss(self, logits: DeferredLogits, targets: Targets) -> Tensor:
        """Called in the loss function: the loss, recomputed if the model changed its logits or targets."""
        assert self.targets is not None and self.head is not None
        if logits.squashing != self.squashing or not targets.are(self.targets):
            self.squashing, self.targets = logits.squashing, targets
            logits = self.head(self.hidden)
        return logits.loss


def operands(head: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """x [..., D], weight [V, D] and bias [V] with which the head's logits are x @ weight^T + bias."""
    if hasattr(head, "modules_to_save"):  # PEFT trains copies of the head
        whole = head.disable_adapters or not head.active_adapters
        return operands(
            head.original_module if whole else head.modules_to_save[head.active_adapters[0]], hidden
        )
    if hasattr(head, "lora_A"):
        return _of_lora(head, hidden)
    if _is_linear(head):
        return hidden, head.weight, head.bias
    raise TypeError(_not_linear(head))


def _is_linear(head: Any) -> bool:
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward


def _not_linear(head: Any) -> str:
    return f"{mismatch('lm_head', 'a torch.nn.Linear or its LoRA', type(head).__name__)}"


def _of_rank(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, classes: int | None
) -> tuple[Tensor, Tensor, Tensor | None, Ranks | None]:
    """x, this rank's weight and bias cut to the first `classes`, and the ranks that share them if any."""
    if not is_dtensor(weight):
        return x, weight[:classes], None if bias is None else bias[:classes], None
    # The DTensor comes from tensor parallelism: FSDP has already gathered what it shards.
    dtensor = _yards.ranks().dtensor
    labels = targets.labels if targets.shift_labels is None else targets.shift_labels
    assert labels is not None
    try:
        own, bias, ranks = dtensor.of_plain_rows(weight, bias)
    except TypeError as error:
        raise TypeError(f"lm_head.{error}") from None
    x = dtensor.replicated_rows(x, weight, labels.shape[-1])
    if ranks is None:
        return x, own[:classes], None if bias is None else bias[:classes], None
    if classes is not None:  # later classes count as padding, which needs shards of equal size
        if len(weight) % ranks.group.size():
            expected = f"{classes} classes, or a number that the ranks divide, where they are split"
            raise TypeError(mismatch("lm_head", expected, len(weight)))
        ranks = replace(ranks, classes=classes)
    return x, own, bias, ranks


def _of_lora(head: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Operands of a head with LoRA: x @ W^T + s * a(x) @ B^T = [x, s * a(x)] @ [W, B]^T.

    The width becomes D plus the LoRA ranks of the active adapters.
    """
    x, weight, bias = operands(head.base_layer, hidden)
    if head.disable_adapters and head.merged:
        head.unmerge()
    if head.disable_adapters or head.merged:
        return x, weight, bias
    if is_dtensor(weight):
        raise TypeError(mismatch("lm_head", "no adapter where ranks have its classes", head))
    xs, weights = [x], [weight]
    for name in head.active_adapters:
        if name not in head.lora_A:
            continue
        a, b = head.lora_A[name], head.lora_B[name]
        if name in head.lora_variant or b.bias is not None:
            expected = f"a plain LoRA without a bias as adapter {name!r}"
            raise TypeError(f"{mismatch('lm_head', expected, head)}")
        narrow = a(head.lora_dropout[name](x.to(a.weight.dtype))) * head.scaling[name]
        xs.append(narrow.to(x.dtype))
        weights.append(b.weight.to(weight.dtype))
    return torch.cat(xs, -1), torch.cat(weights, -1), bias


def _head_forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor | DeferredLogits:
    fused: FusedLoss = self._fused_loss
    if fused.targets is None:
        return cast(Tensor, self._forward_to_logits(hidden, *args, **kwargs))
    deferred = None
    if args or kwargs:
        fused.give_up("its head is called with more than hidden states")
    else:
        deferred = fused.at_head(self, hidden)
    return self._forward_to_logits(hidden, *args, **kwargs) if deferred is None else deferred


_head_forward.is_of_fused_loss = True  # type: ignore[attr-defined]


def _loss_function(
    logits: Tensor | DeferredLogits,
    labels: Tensor | None,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """transformers' ForCausalLMLoss that also accepts deferred logits."""
    if isinstance(logits, DeferredLogits):
        fused = logits.fused
        if not fused.made and vocab_size in (None, logits.shape[-1]):
            return fused.at_loss(logits, Targets(labels, shift_labels, num_items_in_batch, ignore_index))
        logits = logits.logits("a loss of other classes")
    options = {"ignore_index": ignore_index, "shift_labels": shift_labels, **kwargs}
    return cast(Tensor, ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, **options))


def _model_forward(original: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """Wrap a model's unbound forward: with labels, in training, the loss is fused with the head.

    signature: of the bound forward. The result shows it, because trainers inspect it.
    """
    position = list(signature.parameters).index("labels")

    @functools.wraps(original)
    def forward(self: Any, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        labels = args[position] if len(args) > position else kwargs.get("labels")
        if labels is None or not (self.training if skip_logits is None else skip_logits):
            return original(self, *args, **kwargs)
        fused: FusedLoss = self._fused_loss
        if fused.given_up is not None:
            return original(self, *args, **kwargs)
        fused.head = _patched(self.get_output_embeddings(), fused)
        fused.targets = Targets(
            labels,
            kwargs.get("shift_labels"),
            kwargs.get("num_items_in_batch"),
            kwargs.get("ignore_index", -100),
        )
        try:
            output = original(self, *args, **kwargs)
        finally:
            fused.head = fused.targets = fused.hidden = None
            fused.made = {}
        return _without_logits(output)

    bound = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.is_of_fused_loss = True  # type: ignore[attr-defined]
    forward.__signature__ = signature.replace(parameters=[bound, *signature.parameters.values()])  # type: ignore[attr-defined]
    return forward


class WithoutLogits:
    """Mixin for model outputs without logits: output["logits"] raises a KeyError that says why."""

    def __getitem__(self, key: Any) -> Any:
        if key == "logits":
            raise KeyError(
                "logits: training computes none with a fused loss; skip_logits=False in the call does"
            )
        return super().__getitem__(key)  # type: ignore[misc]


@functools.cache
def _hinting(kind: Any) -> Any:
    return type(kind.__name__, (WithoutLogits, kind), {"__module__": kind.__module__})


def _without_logits(output: Any) -> Any:
    """The model's output without its deferred logits."""
    if isinstance(output, ModelOutput):
        kept = {name: value for name, value in output.items() if not isinstance(value, DeferredLogits)}
        if len(kept) == len(output):
            return output
        kind: Any = type(output)
        return (kind if torch.compiler.is_compiling() else _hinting(kind))(**kept)
    return tuple(value for value in output if not isinstance(value, DeferredLogits))


def _patched(head: Any, fused: FusedLoss) -> nn.Module:
    """Patch the head's forward so that it asks `fused` first; returns the head.

    An FSDP wrapper forwards attribute reads to the wrapped module, so `_fused_loss` is found through it.
    """
    if getattr(head, "_fused_loss", None) is not fused:
        head._fused_loss = fused
        head._forward_to_logits = head.forward
        head.forward = MethodType(_head_forward, head)
    return cast(nn.Module, head)


def loss_error(model: PreTrainedModel) -> TypeError | None:
    """The error that says why the model's loss cannot be fused; None if it can."""
    name = type(model).__name__
    head: Any = model.get_output_embeddings()
    if head is None or "labels" not in inspect.signature(model.forward).parameters:
        return TypeError(mismatch("model", "a head and labels, as a causal LM has", name))
    kinds = [
        kind for kind in type(model).__mro__ if issubclass(kind, PreTrainedModel) and "forward" in vars(kind)
    ]
    codes = [inspect.unwrap(vars(kind)["forward"]).__code__ for kind in kinds]
    if not any("loss_function" in code.co_names for code in codes):
        return TypeError(mismatch("model", "a forward that computes its loss by self.loss_function", name))
    if model.loss_function not in (ForCausalLMLoss, _loss_function):
        given = getattr(model.loss_function, "__name__", model.loss_function)
        return TypeError(mismatch("model.loss_function", "ForCausalLMLoss", given))
    while hasattr(head, "base_layer") or hasattr(head, "original_module"):  # PEFT's wrappers
        head = getattr(head, "base_layer", None) or head.original_module
    return None if _is_linear(head) else TypeError(_not_linear(head))


def fuse_loss(model: PreTrainedModel) -> None:
    """Patch a model (`loss_error` is None for it) so that it computes its training loss without logits."""
    forward = model.forward
    if isinstance(forward, MethodType) and forward.__self__ is model:
        unbound: Callable[..., Any] = forward.__func__  # a deep copy of the model then binds its own
    else:  # a hook replaced it by a function that is bound to this model
        unbound = functools.wraps(forward)(lambda _, *args, **kwargs: forward(*args, **kwargs))
    before = {name: vars(model)[name] for name in ("forward", "_loss_function") if name in vars(model)}
    model._before_fused_loss = before
    model._fused_loss = FusedLoss(type(model).__name__)
    model.loss_function = _loss_function
    model.forward = MethodType(_model_forward(unbound, inspect.signature(forward)), model)
    _patched(model.get_output_embeddings(), model._fused_loss)


def fused_loss(model: nn.Module) -> FusedLoss | None:
    """The state that `fuse_loss` attached to a model; None if it was not fused."""
    return vars(model).get("_fused_loss")


def give_back_loss(model: nn.Module) -> None:
    """Undo `fuse_loss`.

    Raises:
        RuntimeError: something else has replaced a forward since.
    """
    fused = fused_loss(model)
    if fused is None:
        return
    heads = [part for part in model.modules() if part is not model and vars(part).get("_fused_loss") is fused]
    for part in (model, *heads):
        if not getattr(part.forward, "is_of_fused_loss", False):
            raise RuntimeError(
                mismatch(
                    f"forward of {type(part).__name__}",
                    "that of apply: undo first what came after it",
                    part.forward,
                )
            )
    for head in heads:
        forward = vars(head).pop("_forward_to_logits")
        del head.forward, head._fused_loss
        if forward != head.forward:  # a hook had replaced it before
            head.forward = forward
    del model.forward, model._loss_function, model._fused_loss
    vars(model).update(vars(model).pop("_before_fused_loss"))
