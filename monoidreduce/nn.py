"""The operators as modules: options go to the constructor, tensors to `forward`, as in `functional`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar, overload

import torch
from torch import Tensor, nn

from monoidreduce import functional
from monoidreduce._keywords import refuse
from monoidreduce._ops.mlp import ACTIVATIONS
from monoidreduce._validate import check_bool, check_choice, check_floating, check_int, check_like, mismatch
from monoidreduce.functional import MaskMod, ScoreMod, Window, autocast_dtype, is_dtensor

if TYPE_CHECKING:
    from monoidreduce.block_mask import BlockMask

__all__ = ["MLP", "Attention", "LinearCrossEntropyHead", "LinearCrossEntropyLoss", "LinearDistillationLoss"]

Result = TypeVar("Result")  # of a call: a tensor or, with return_lse, two


def _no_elements(axes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty((0,) * axes, dtype=dtype, device="meta")


class _Operator(nn.Module):
    """A module without parameters that holds an operator's options."""

    def __init__(
        self,
        operator: Callable[..., Any],
        tensors: tuple[Tensor, ...],
        others: dict[str, NoReturn],
        named: Mapping[str, Tensor] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        """tensors, named: any that the operator takes. It checks the options, when it is called with them."""
        super().__init__()
        if others:
            refuse(operator.__name__, others)
        operator(*tensors, **named, **options)
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class Attention(_Operator, Generic[Result]):
    """`monoidreduce.attention`: q [B, H, M, F], k [B, Hkv, N, F], v [B, Hkv, N, D] -> [B, H, M, D]."""

    @overload
    def __init__(
        self: Attention[Tensor],
        *,
        causal: bool = False,
        scale: float | None = None,
        window: Window | None = None,
        softcap: float | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        compensated: bool = False,
        return_lse: Literal[False] = False,
    ) -> None: ...
    @overload
    def __init__(
        self: Attention[tuple[Tensor, Tensor]],
        *,
        causal: bool = False,
        scale: float | None = None,
        window: Window | None = None,
        softcap: float | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        compensated: bool = False,
        return_lse: Literal[True],
    ) -> None: ...
    @overload
    def __init__(
        self: Attention[Tensor | tuple[Tensor, Tensor]],
        *,
        causal: bool = False,
        scale: float | None = None,
        window: Window | None = None,
        softcap: float | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        compensated: bool = False,
        return_lse: bool,
    ) -> None: ...
    def __init__(
        self,
        *,
        causal: bool = False,
        scale: float | None = None,
        window: Window | None = None,
        softcap: float | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        compensated: bool = False,
        return_lse: bool = False,
        **others: NoReturn,
    ) -> None:
        super().__init__(
            functional.attention,
            (_no_elements(4),) * 3,
            others,
            causal=causal,
            scale=scale,
            window=window,
            softcap=softcap,
            score_mod=score_mod,
            mask_mod=mask_mod,
            compensated=compensated,
            return_lse=return_lse,
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
        block_mask: BlockMask | None = None,
        **others: NoReturn,
    ) -> Result:
        call: Any = functional.attention
        result: Result = call(
            q, k, v, bias=bias, sinks=sinks, block_mask=block_mask, **self.options, **others
        )
        return result

    if TYPE_CHECKING:

        def __call__(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            *,
            bias: Tensor | None = None,
            sinks: Tensor | None = None,
            block_mask: BlockMask | None = None,
        ) -> Result: ...


class LinearCrossEntropyLoss(_Operator, Generic[Result]):
    """`monoidreduce.linear_cross_entropy`.

    x [..., D], weight [V, D], target [...], bias [V], class_weight [V] -> the loss.
    """

    @overload
    def __init__(
        self: LinearCrossEntropyLoss[Tensor],
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        return_lse: Literal[False] = False,
        workspace: int | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self: LinearCrossEntropyLoss[tuple[Tensor, Tensor]],
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        return_lse: Literal[True],
        workspace: int | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self: LinearCrossEntropyLoss[Tensor | tuple[Tensor, Tensor]],
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        return_lse: bool,
        workspace: int | None = None,
    ) -> None: ...
    def __init__(
        self,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        return_lse: bool = False,
        workspace: int | None = None,
        **others: NoReturn,
    ) -> None:
        super().__init__(
            functional.linear_cross_entropy,
            (_no_elements(2), _no_elements(2), _no_elements(1, torch.int64)),
            others,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            logit_scale=logit_scale,
            return_lse=return_lse,
            workspace=workspace,
        )

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        class_weight: Tensor | None = None,
        **others: NoReturn,
    ) -> Result:
        result: Any = functional.linear_cross_entropy(
            x, weight, target, bias=bias, class_weight=class_weight, **self.options, **others
        )
        return result  # type: ignore[no-any-return]

    if TYPE_CHECKING:

        def __call__(
            self,
            x: Tensor,
            weight: Tensor,
            target: Tensor,
            *,
            bias: Tensor | None = None,
            class_weight: Tensor | None = None,
        ) -> Result: ...


class LinearDistillationLoss(_Operator):
    """`monoidreduce.linear_distillation`.

    x [..., D], weight [V, D], teacher_x [..., E], teacher_weight [V, E], biases [V], mask and target [...] ->
    the loss.
    """

    def __init__(
        self,
        *,
        loss: str = "cross_entropy",
        beta: float = 0.5,
        temperature: float = 1.0,
        hard_weight: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
        teacher_grad: bool = False,
        workspace: int | None = None,
        **others: NoReturn,
    ) -> None:
        super().__init__(
            functional.linear_distillation,
            (_no_elements(2),) * 4,
            others,
            {"target": _no_elements(1, torch.int64)} if hard_weight else {},
            loss=loss,
            beta=beta,
            temperature=temperature,
            hard_weight=hard_weight,
            ignore_index=ignore_index,
            reduction=reduction,
            teacher_grad=teacher_grad,
            workspace=workspace,
        )

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        teacher_x: Tensor,
        teacher_weight: Tensor,
        *,
        bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        mask: Tensor | None = None,
        target: Tensor | None = None,
        **others: NoReturn,
    ) -> Tensor:
        named: Any = {"bias": bias, "teacher_bias": teacher_bias, "mask": mask, "target": target}
        return functional.linear_distillation(
            x, weight, teacher_x, teacher_weight, **named, **self.options, **others
        )

    if TYPE_CHECKING:

        def __call__(
            self,
            x: Tensor,
            weight: Tensor,
            teacher_x: Tensor,
            teacher_weight: Tensor,
            *,
            bias: Tensor | None = None,
            teacher_bias: Tensor | None = None,
            mask: Tensor | None = None,
            target: Tensor | None = None,
        ) -> Tensor: ...


class LinearCrossEntropyHead(nn.Module):
    """A linear layer over classes whose forward gives the loss, so that wrappers see the parameters' use.

    FSDP, for one, gathers parameters for the forward of the module that has them: a loss that reads them
    elsewhere meets a part of them, and `full_tensor()` there has wrong gradients where ranks have other
    tokens. Under `monoidreduce.distributed.VocabParallel` the classes are split over ranks.

    Attributes:
        weight: [classes, in_features], bias: [classes] or None, initialised as those of `torch.nn.Linear`.
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
        """options: of `LinearCrossEntropyLoss`.

        Raises:
            TypeError, ValueError: a size that is no int >= 0, bias not a bool, or a wrong option.
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
        """Initialise the parameters anew, as after `to_empty`, which leaves them undefined."""
        nn.Linear.reset_parameters(self)  # type: ignore[arg-type]

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        """The loss of x [..., in_features] and target [...] as `linear_cross_entropy` has it.

        Without a target the logits [..., classes] of torch's linear, which no option changes.
        """
        if is_dtensor(self.weight):
            from monoidreduce.distributed import dtensor

            return dtensor.logits(self, x) if target is None else dtensor.loss_of_head(self, x, target)
        if target is None:
            return nn.functional.linear(x, self.weight, self.bias)
        return functional.linear_cross_entropy(x, self.weight, target, bias=self.bias, **self.options)

    def extra_repr(self) -> str:
        classes, inputs = self.weight.shape
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"{inputs}, {classes}, bias={self.bias is not None}{options}"


class MLP(nn.Module):
    """`monoidreduce.mlp` with its parameters, which are initialised as those of `torch.nn.Linear` are.

    Attributes:
        w1: [hidden_features, in_features], bias1: [hidden_features] or None.
        w2: [out_features, hidden_features], bias2: [out_features] or None.
        gate: as w1, gate_bias: as bias1, or None where the MLP is not gated.
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
        """out_features is in_features by default. gated: activation(x @ gate^T + gate_bias) multiplies
        x @ w1^T + bias1.

        Raises:
            TypeError, ValueError: a size that is no int >= 0, an unknown activation, or bias or gated not a
                bool.
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
        """Initialise the parameters anew, as after `to_empty`, which leaves them undefined."""
        layers = (self.w1, self.bias1), (self.w2, self.bias2), (self.gate, self.gate_bias)
        for weight, bias in layers:
            if weight is not None:
                linear: Any = SimpleNamespace(weight=weight, bias=bias)  # all that this method reads
                nn.Linear.reset_parameters(linear)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        w1 = self.w1
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
        """The parameters fit each other: what does not fit is x. Autocast casts all dtypes but float64."""
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
