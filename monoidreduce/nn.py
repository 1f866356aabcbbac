"""The operators as modules: the constructor takes an operator's options, `forward` takes its tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, overload

import torch
from torch import Tensor, nn

from monoidreduce import _yards, functional
from monoidreduce._keywords import refuse
from monoidreduce._ops.mlp import ACTIVATIONS
from monoidreduce._validate import (
    check_bool,
    check_choice,
    check_floating,
    check_int,
    check_like,
    is_dtensor,
    mismatch,
)
from monoidreduce.functional import autocast_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from monoidreduce.functional import (
        AttentionOptions,
        AttentionTensors,
        CrossEntropyOptions,
        CrossEntropyTensors,
        DistillationOptions,
        DistillationTensors,
    )

__all__ = ["MLP", "Attention", "LinearCrossEntropyHead", "LinearCrossEntropyLoss", "LinearDistillationLoss"]


def __dir__() -> list[str]:
    """The public names, and the module's dunder names."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


Result = TypeVar("Result")  # type of a call's result: a tensor, or two with return_lse


def _no_elements(axes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty((0,) * axes, dtype=dtype, device="meta")


class _HasOptions(nn.Module):
    """A module with the options of an operator in a dict, from which each call reads them."""

    options: dict[str, Any]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("options", ()):  # as an attribute no call would read it
            raise AttributeError(f"{name}: an option; write options[{name!r}] = {value!r}")
        super().__setattr__(name, value)


class _Operator(_HasOptions):
    """A module without parameters that holds an operator's options."""

    _function: ClassVar[Callable[..., Any]]
    _defaults: ClassVar[dict[str, Any]]

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        if others := options.keys() - self._defaults.keys():
            refuse(self._function.__name__, others)
        self.options = {**self._defaults, **options}
        positional, named = self._without_elements()
        self._function(*positional, **named, **self.options)  # a call on empty tensors checks the options

    def _without_elements(self) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Empty tensors with which the function can be called: positional ones, and those by name."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


Module = TypeVar("Module", bound=type[_Operator])


def _of(function: Callable[..., Any], options: type, tensors: type) -> Callable[[Module], Module]:
    """Class decorator that makes a module of a function: it gets the function's signatures and defaults.

    options: TypedDict of the keywords that the constructor takes. tensors: TypedDict of those that a call
    takes.
    """
    parameters = inspect.signature(function).parameters

    def taken(names: set[str]) -> list[inspect.Parameter]:
        return [p for name, p in parameters.items() if name in names or p.kind is p.VAR_KEYWORD]

    def decorate(module: Module) -> Module:
        operands = {name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
        held, given = (
            taken({*options.__annotations__, "return_lse"}),
            taken(operands | {*tensors.__annotations__}),
        )
        this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        methods: tuple[tuple[Any, Any], ...] = (module.__init__, held), (module.forward, given)
        for method, of_method in methods:
            method.__signature__ = inspect.Signature([this, *of_method])
        forward: Any = module.forward
        forward.function = function  # which `explain` explains
        module._function = staticmethod(function)
        module._defaults = {p.name: p.default for p in held if p.kind is not p.VAR_KEYWORD}
        return module

    return decorate


@_of(functional.attention, functional.AttentionOptions, functional.AttentionTensors)
class Attention(_Operator, Generic[Result]):
    """`monoidreduce.attention`: q [B, H, M, F], k [B, Hkv, N, F], v [B, Hkv, N, D] -> [B, H, M, D].

    Options, and what a call passes by name, are the keywords of the function. There is dropout in training
    alone, as in `torch.nn.Dropout`.
    """

    @overload
    def __init__(
        self: Attention[Tensor],
        *,
        return_lse: Literal[False] = False,
        **options: Unpack[AttentionOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: Attention[tuple[Tensor, Tensor]],
        *,
        return_lse: Literal[True],
        **options: Unpack[AttentionOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: Attention[Tensor | tuple[Tensor, Tensor]],
        *,
        return_lse: bool,
        **options: Unpack[AttentionOptions],
    ) -> None: ...
    def __init__(self, **options: Any) -> None:
        super().__init__(options)

    def _without_elements(self) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return (_no_elements(4),) * 3, {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **named: Unpack[AttentionTensors]) -> Result:
        options = self.options if self.training else {**self.options, "dropout_p": 0.0}
        result: Any = self._function(q, k, v, **named, **options)
        return result  # type: ignore[no-any-return]

    if TYPE_CHECKING:

        def __call__(self, q: Tensor, k: Tensor, v: Tensor, **named: Unpack[AttentionTensors]) -> Result: ...


@_of(functional.linear_cross_entropy, functional.CrossEntropyOptions, functional.CrossEntropyTensors)
class LinearCrossEntropyLoss(_Operator, Generic[Result]):
    """`monoidreduce.linear_cross_entropy`: x [..., D], weight [V, D], target [...] -> the loss.

    Options, and tensors that are passed by name, are the keywords of the function.
    """

    @overload
    def __init__(
        self: LinearCrossEntropyLoss[Tensor],
        *,
        return_lse: Literal[False] = False,
        **options: Unpack[CrossEntropyOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: LinearCrossEntropyLoss[tuple[Tensor, Tensor]],
        *,
        return_lse: Literal[True],
        **options: Unpack[CrossEntropyOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: LinearCrossEntropyLoss[Tensor | tuple[Tensor, Tensor]],
        *,
        return_lse: bool,
        **options: Unpack[CrossEntropyOptions],
    ) -> None: ...
    def __init__(self, **options: Any) -> None:
        super().__init__(options)

    def _without_elements(self) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return (_no_elements(2), _no_elements(2), _no_elements(1, torch.int64)), {}

    def forward(
        self, x: Tensor, weight: Tensor, target: Tensor, **named: Unpack[CrossEntropyTensors]
    ) -> Result:
        result: Any = self._function(x, weight, target, **named, **self.options)
        return result  # type: ignore[no-any-return]

    if TYPE_CHECKING:

        def __call__(
            self, x: Tensor, weight: Tensor, target: Tensor, **named: Unpack[CrossEntropyTensors]
        ) -> Result: ...


@_of(functional.linear_distillation, functional.DistillationOptions, functional.DistillationTensors)
class LinearDistillationLoss(_Operator):
    """`monoidreduce.linear_distillation`.

    x [..., D], weight [V, D], teacher_x [..., E], teacher_weight [V, E] -> the loss. Options, and tensors
    that are passed by name, are the keywords of the function.
    """

    def __init__(self, **options: Unpack[DistillationOptions]) -> None:
        super().__init__({**options})

    def _without_elements(self) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        hard = {"target": _no_elements(1, torch.int64)} if self.options["hard_weight"] else {}
        return (_no_elements(2),) * 4, hard

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        teacher_x: Tensor,
        teacher_weight: Tensor,
        **named: Unpack[DistillationTensors],
    ) -> Tensor:
        result: Any = self._function(x, weight, teacher_x, teacher_weight, **named, **self.options)
        return result  # type: ignore[no-any-return]

    if TYPE_CHECKING:

        def __call__(
            self,
            x: Tensor,
            weight: Tensor,
            teacher_x: Tensor,
            teacher_weight: Tensor,
            **named: Unpack[DistillationTensors],
        ) -> Tensor: ...


class LinearCrossEntropyHead(_HasOptions):
    """A linear layer over classes that returns the loss from its own forward.

    So wrappers such as FSDP work: FSDP gathers parameters only during the forward of the module that owns
    them. A loss that reads the weight elsewhere would see one rank's shard, and `full_tensor()` there gives
    wrong gradients if ranks have different tokens. With `monoidreduce.distributed.VocabParallel` the classes
    are sharded over ranks.

    Attributes:
        weight: [classes, in_features], bias: [classes] or None; initialised as in `torch.nn.Linear`.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        classes: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        """options: those of `LinearCrossEntropyLoss`.

        Raises:
            TypeError, ValueError: a size is not an int >= 0, bias is not a bool, or an option is wrong.
        """
        super().__init__()
        for name, size in {"in_features": in_features, "classes": classes}.items():
            if check_int(name, size, "an int >= 0") < 0:
                raise ValueError(mismatch(name, "an int >= 0", size))
        self.options = LinearCrossEntropyLoss(**options).options
        self.weight = nn.Parameter(torch.empty((classes, in_features), device=device, dtype=dtype))
        of_bias = torch.empty(classes, device=device, dtype=dtype) if check_bool("bias", bias) else None
        self.register_parameter("bias", None if of_bias is None else nn.Parameter(of_bias))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters again, for example after `to_empty`, which leaves them undefined."""
        nn.Linear.reset_parameters(self)  # type: ignore[arg-type]

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        """The loss of x [..., in_features] and target [...], by `linear_cross_entropy` with this module's
        options.

        Without a target it returns the logits [..., classes] of torch's linear; no option applies to them.
        """
        if is_dtensor(self.weight):
            dtensor = _yards.ranks().dtensor
            return dtensor.logits(self, x) if target is None else dtensor.loss_of_head(self, x, target)
        if target is None:
            return nn.functional.linear(x, self.weight, self.bias)
        return functional.linear_cross_entropy(x, self.weight, target, bias=self.bias, **self.options)

    def extra_repr(self) -> str:
        classes, inputs = self.weight.shape
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"{inputs}, {classes}, bias={self.bias is not None}{options}"


class MLP(nn.Module):
    """`monoidreduce.mlp` with its parameters, initialised as in `torch.nn.Linear`.

    Attributes:
        w1: [hidden_features, in_features], bias1: [hidden_features] or None.
        w2: [out_features, hidden_features], bias2: [out_features] or None.
        gate: like w1, gate_bias: like bias1; None if the MLP is not gated.

    With `monoidreduce.distributed.MLPParallel` the hidden units are sharded over ranks.
    """

    gate: nn.Parameter | None
    gate_bias: nn.Parameter | None
    bias1: nn.Parameter | None
    bias2: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: str = "gelu_tanh",
        bias: bool = True,
        gated: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """out_features: in_features by default. gated: multiply x @ w1^T + bias1 by
        activation(x @ gate^T + gate_bias).

        Raises:
            TypeError, ValueError: a size is not an int >= 0, the activation is unknown, or bias or gated is
                not a bool.
        """
        super().__init__()
        check_choice("activation", activation, ACTIVATIONS)
        bias, gated = check_bool("bias", bias), check_bool("gated", gated)
        sizes = {
            "in_features": in_features,
            "hidden_features": hidden_features,
            "out_features": in_features if out_features is None else out_features,
        }
        for name, size in sizes.items():
            sizes[name] = check_int(name, size, "an int >= 0")
            if size < 0:
                raise ValueError(mismatch(name, "an int >= 0", size))
        inputs, hidden, outputs = sizes.values()
        self.activation = activation

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.w1 = parameter(hidden, inputs)
        self.register_parameter("bias1", parameter(hidden) if bias else None)
        self.w2 = parameter(outputs, hidden)
        self.register_parameter("bias2", parameter(outputs) if bias else None)
        self.register_parameter("gate", parameter(hidden, inputs) if gated else None)
        self.register_parameter("gate_bias", parameter(hidden) if gated and bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters again, for example after `to_empty`, which leaves them undefined."""
        layers = (self.w1, self.bias1), (self.w2, self.bias2), (self.gate, self.gate_bias)
        for weight, bias in layers:
            if weight is not None:
                linear: Any = SimpleNamespace(weight=weight, bias=bias)  # the only attributes that it reads
                nn.Linear.reset_parameters(linear)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        w1 = self.w1
        if is_dtensor(w1):
            found: Tensor = _yards.ranks().dtensor.mlp_of_module(self, x)
            return found
        fits = isinstance(x, Tensor) and x.dtype == w1.dtype and x.device == w1.device
        if not fits or x.shape[-1:] != w1.shape[1:]:
            self._check_input(x)
        return functional.mlp(
            x,
            w1,
            self.w2,
            activation=self.activation,
            bias1=self.bias1,
            bias2=self.bias2,
            gate=self.gate,
            gate_bias=self.gate_bias,
        )

    def _check_input(self, x: Tensor) -> None:
        """Raise an error that names x. Checked here because the parameters fit each other, so x is the wrong
        one.

        Autocast casts all dtypes except float64.
        """
        check_floating("x", x)
        is_cast = autocast_dtype(x) is not None and x.dtype != torch.float64
        check_like("x", x, "w1", self.w1, (x.dtype if is_cast else self.w1.dtype,))
        if x.shape[-1:] != self.w1.shape[1:]:
            raise ValueError(mismatch("x", f"shape [..., {self.w1.shape[1]}]", list(x.shape)))

    if TYPE_CHECKING:

        def __call__(self, x: Tensor) -> Tensor: ...

    def extra_repr(self) -> str:
        (hidden, inputs), outputs = self.w1.shape, self.w2.shape[0]
        gated = ", gated=True" if self.gate is not None else ""
        options = f"activation={self.activation!r}, bias={self.bias1 is not None}{gated}"
        return f"{inputs}, {hidden}, {outputs}, {options}"
