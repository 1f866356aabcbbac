"""The registration of an operator as two `torch.library` ops: schemas, shapes for tracing, autograd.

Every operator is one forward op and one backward op in the namespace `monoidreduce`. The kernels allocate
their results with torch, and `_C` fills them. So the caching allocator, CUDA graphs and streams behave as for
any torch op. Autograd keeps the inputs and the row statistics of the forward, never a score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from operator import itemgetter
from typing import Annotated, Any, NamedTuple, TypeAlias, get_type_hints

import torch
from torch import Tensor

from monoidreduce import _C
from monoidreduce._dynamo import are_symbols, as_tensor
from monoidreduce._ops.memory import no_gradient
from monoidreduce._torch_private import (
    SingleLevelFunction,
    backend_is_next,
    below_autograd,
    forward_ad_on,
    frees_saved,
    has_tangent,
    mark_constant,
    modes_are_active,
    single_level,
    transforms_are_active,
)

__all__ = [
    "OPERATORS",
    "UNROUNDED",
    "Operator",
    "SymInt",
    "any_requires_grad",
    "call_op",
    "choices",
    "refuse_forward_mode",
    "register",
    "unrecorded",
]

# An option of backward ops: gradients of rows may stay in the dtype in which they were summed.
UNROUNDED = "bool unrounded=False"

# Collecting the Library object would unregister the ops, so it lives as long as the module.
_library: Any = torch.library.Library("monoidreduce", "DEF")  # type: ignore[no-untyped-call]


class Operator(NamedTuple):
    """The functions of a registered operator, for who runs them without autograd.

    backward takes a gradient or None for each of the differentiable outputs, the inputs, the residuals, the
    options and which gradients are needed.
    """

    forward: Callable[..., Any]
    backward: Callable[..., list[Tensor]]
    freeing: Callable[..., list[Tensor]]  # `backward` of a pass that frees what was saved
    residuals: Callable[..., Any]  # picks the residuals from the outputs
    inputs: int
    saved: int  # inputs and residuals
    differentiable: int  # outputs
    constants: int  # the last inputs, which have no gradient


OPERATORS: dict[str, Operator] = {}


# How many tensors an op takes, and where among its arguments the real numbers are. Plain tuples: torch 2.11's
# compiler cannot unpack a NamedTuple that a constant function returns.
_numbers: dict[str, tuple[int, tuple[int, ...]]] = {}


def _numbers_of(name: str) -> tuple[int, tuple[int, ...]]:
    return _numbers[name]


mark_constant(_numbers_of)  # a compiler calls it while it traces


def call_op(name: str, *args: Any) -> Any:
    """A call of the op `name`.

    torch.compile makes a symbol of a Python float that changes from call to call. An op of ours that got the
    symbol would be compiled again for each value, or keep the first one (pytorch#197889): only torch's own
    arithmetic of tensors carries it. So it becomes a tensor here, and `NAME_symbolic` reads it when it runs.
    """
    ops = torch.ops.monoidreduce
    if torch.compiler.is_dynamo_compiling():
        inputs, at = _numbers_of(name)
        if any(are_symbols(tuple([args[i] for i in at]))):
            values = [as_tensor(args[i]) for i in at if args[i] is not None]
            options = [
                1.0 if i in at and argument is not None else argument
                for i, argument in enumerate(args)
                if i >= inputs
            ]
            symbolic = getattr(ops, f"{name}_symbolic").default
            return symbolic(*args[:inputs], torch.stack(values), *options)
    return getattr(ops, name).default(*args)


def unrecorded(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward and the backward op, for an autograd function that records them itself.

    Where nobody looks on at ops these are their kernels, without the dispatcher's 20 us (on a CPU).
    """
    if modes_are_active():
        ops = torch.ops.monoidreduce
        return getattr(ops, name).default, getattr(ops, f"{name}_backward").default
    return OPERATORS[name][:2]


def choices(call: str, option: str) -> tuple[str, ...]:
    """The names of the values that an option of a call has, in the order of its enumeration."""
    return next(field.choices for field in _C.CALLS[call] if field.name == option)


def _names(arguments: str) -> list[str]:
    return [argument.split()[-1] for argument in arguments.split(", ")]


def _picker(indices: list[int]) -> Callable[[Any], Any]:
    """The elements at these indices of what it is given, faster than any loop in Python."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return itemgetter(slice(indices[0], indices[0] + 1)) if indices else lambda _: ()


def refuse_forward_mode(name: str, arguments: Iterable[Any]) -> None:
    """Raises NotImplementedError if forward-mode AD differentiates by a tensor among the arguments."""
    if has_tangent(arguments):
        raise NotImplementedError(
            f"{name} cannot be differentiated in forward mode (torch.func.jvp, jacfwd, hessian, forward_ad). "
            "Do so in reverse mode: torch.func.vjp, jacrev, grad, or backward()"
        )


def any_requires_grad(args: tuple[Any, ...]) -> bool:
    for argument in args:  # noqa: SIM110 - half the time of any()
        if isinstance(argument, Tensor) and argument.requires_grad:
            return True
    return False


def _class_name(op_name: str) -> str:
    return "".join(word.capitalize() for word in op_name.split("_"))


def _autograd(
    name: str,
    op: Callable[..., Any],
    backend: Callable[..., Any],
    save: Callable[..., None],
    differentiate: Callable[..., Any],
) -> Callable[..., Any]:
    """The Autograd kernel of `op`, at half the cost of what `torch.library.register_autograd` makes.

    When this kernel runs, torch.func has chosen the level of its transforms to work at. `Function.apply`
    would ask it again; its base class, when allowed to, records that one level.

    name: of the op. Profilers, anomaly mode and `grad_fn` show it with "Backward" behind it.
    keys: the dispatch keys of the call; None where torch.func works at one of its levels.
    """

    def below(keys: Any, args: tuple[Any, ...]) -> Any:
        if keys is not None and backend_is_next(keys):
            result = backend(*args)
        else:
            with below_autograd():
                result = op(*args)
        return tuple(result) if isinstance(result, list) else result  # a Function sees no tensors in a list

    class Recorded(SingleLevelFunction):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, keys: Any, *args: Any) -> Any:
            result = below(keys, args)
            save(ctx, args, result)
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return None, *differentiate(ctx, *grads)

    class Transformed(Recorded):
        @staticmethod
        def forward(ctx: Any, keys: Any, *args: Any) -> Any:
            with torch.enable_grad(), forward_ad_on(True):  # for the levels below
                return Recorded.forward(ctx, keys, *args)

    def applied(function: type) -> Callable[..., Any]:
        # torch names nodes after the class, when it is made.
        named: Any = type(function)(_class_name(name), (function,), {})
        apply: Callable[..., Any] = named.apply
        return apply

    record, transform = applied(Recorded), applied(Transformed)

    def kernel(keys: Any, *args: Any) -> Any:
        refuse_forward_mode(f"monoidreduce::{name}", args)
        if transforms_are_active():
            with single_level():
                return transform(None, *args)
        if torch.is_grad_enabled() and any_requires_grad(args):
            return record(keys, *args)
        return below(keys, args)

    return kernel


# An int of a record that torch.compile may make a symbol of, where shapes are dynamic.
SymInt: TypeAlias = Annotated[int, "SymInt"]

# The types of a schema for those of an options' record.
_SCHEMA_TYPES: dict[Any, str] = {
    str: "str",
    bool: "bool",
    int: "int",
    SymInt: "SymInt",
    float: "float",
    int | None: "int?",
    float | None: "float?",
    list[bool]: "bool[]",
}


def _with_record(described: dict[str, Any]) -> dict[str, Any]:
    """An operator whose options are a record, as one whose functions take them one by one.

    described: `options` is a NamedTuple; `forward` and the others have one argument of that type.
    """
    record: Any = described["options"]
    types = get_type_hints(record, include_extras=True)
    options = ", ".join(types)
    inputs = len(_names(described["inputs"]))
    before = len(_names(described["differentiable"])) + inputs
    before += len(_names(described["residuals"])) if described["residuals"] else 0

    def packed(function: Callable[..., Any], tensors: int, rest: str = "") -> Callable[..., Any]:
        # All arguments have parameters: to slice one tuple of them would take a microsecond.
        names = ", ".join(f"tensor_{i}" for i in range(tensors))
        code = f"lambda {names}, {options}{rest}: function({names}, new(record, ({options},)){rest})"
        flat: Callable[..., Any] = eval(code, {"function": function, "new": tuple.__new__, "record": record})
        return flat

    def packed_backward(function: Callable[..., Any]) -> Callable[..., Any]:
        return packed(function, before, ", *rest")  # needed, and options of the backward op

    in_place = described.get("in_place")
    return {
        **described,
        "options": ", ".join(f"{_SCHEMA_TYPES[kind]} {option}" for option, kind in types.items()),
        "forward": packed(described["forward"], inputs),
        "fake": packed(described["fake"], inputs),
        "backward": packed_backward(described["backward"]),
        "in_place": None if in_place is None else packed_backward(in_place),
    }


def register(name: str, **described: Any) -> None:
    """`_register` an operator and, if it has real numbers among its options, `NAME_symbolic`.

    Its options may be a record, a NamedTuple, which its functions then take as one argument.

    That has one more constant input, `numbers`, which holds the values of these options in their order, None
    left out. It keeps nothing for its backward pass that its numbers decide on: their values are not known
    while shapes are traced.
    """
    if not isinstance(described["options"], str):
        described = _with_record(described)
    _register(name, **described)
    inputs, options = len(_names(described["inputs"])), described["options"].split(", ")
    real = tuple(i for i, option in enumerate(options) if option.startswith("float"))
    _numbers[name] = (inputs, tuple(inputs + i for i in real))
    if not real:
        return
    keep = next((i for i, option in enumerate(options) if option.startswith("bool keep")), None)

    def valued(numbers: Tensor | None, given: Sequence[Any]) -> list[Any]:
        """The options. numbers: None where only shapes are asked for."""
        values = None if numbers is None else iter(numbers.tolist())
        found = list(given)
        for i in real:
            if found[i] is not None and values is not None:
                found[i] = next(values)
        if keep is not None:
            found[keep] = False
        return found

    def forward(*args: Any) -> Any:
        return described["forward"](*args[:inputs], *valued(args[inputs], args[inputs + 1 :]))

    def fake(*args: Any) -> Any:
        return described["fake"](*args[:inputs], *valued(None, args[inputs + 1 :]))

    def of_backward(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        at = len(_names(described["differentiable"])) + inputs
        first = at + 1 + len(_names(described["residuals"]) if described["residuals"] else [])
        last = first + len(options)

        def backward(*args: Any) -> list[Tensor]:
            needed, *rest = args[last:]
            given = (*args[:at], *args[at + 1 : first], *valued(args[at], args[first:last]))
            return function(*given, needed[:inputs], *rest)

        return backward

    in_place = described.get("in_place")
    _register(
        f"{name}_symbolic",
        **{
            **described,
            "inputs": described["inputs"] + ", Tensor numbers",
            "constants": ", ".join(filter(None, (described.get("constants"), "numbers"))),
            "forward": forward,
            "fake": fake,
            "backward": of_backward(described["backward"]),
            "in_place": None if in_place is None else of_backward(in_place),
        },
    )


def _register(
    name: str,
    *,
    inputs: str,
    options: str,
    outputs: str,
    differentiable: str,
    residuals: str,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., list[Tensor]],
    constants: str = "",
    backward_options: str = "",
    in_place: Callable[..., list[Tensor]] | None = None,
) -> None:
    """Define the ops `name` and `name_backward`.

    name(inputs, options) -> outputs
    name_backward(a gradient or None for each differentiable output, inputs, residuals, options, needed,
                  backward_options)
        -> the gradients of the inputs apart from the last ones, the `constants`; a gradient whose entry in
           `needed` is false is empty
    `residuals` are the outputs that the backward reads. `backward_options` have defaults, with which autograd
    calls. `in_place` is `backward` where it may change the residuals, or return them: autograd calls it if it
    frees them afterwards.
    """
    results = _names(outputs)
    saved = _picker([results.index(residual) for residual in _names(residuals)] if residuals else [])
    fixed = _picker([i for i, result in enumerate(results) if result not in _names(differentiable)])
    input_count, grad_count = len(_names(inputs)), len(_names(differentiable))
    constant_count = len(_names(constants) if constants else [])
    of_options = (None,) * (constant_count + len(_names(options)))
    residual_count = len(_names(residuals) if residuals else [])

    upstream = ", ".join(f"Tensor? grad_{result}" for result in _names(differentiable))
    kept = "".join(f"Tensor {result}, " for result in saved(results))
    returns = ", ".join("Tensor" for _ in results)
    gradients = ", ".join(["Tensor"] * (input_count - constant_count))
    tags = (torch.Tag.pt2_compliant_tag,)
    _library.define(f"{name}({inputs}, {options}) -> ({returns})", tags=tags)
    given = f"{upstream}, {inputs}, {kept}{options}, bool[] needed"
    given += f", {backward_options}" if backward_options else ""
    needed_at = grad_count + input_count + residual_count + len(_names(options))
    _library.define(f"{name}_backward({given}) -> ({gradients})", tags=tags)
    op = getattr(torch.ops.monoidreduce, name).default
    backward_op = getattr(torch.ops.monoidreduce, f"{name}_backward").default

    def backward_fake(*args: Any) -> tuple[Tensor, ...]:
        of = args[grad_count : grad_count + input_count - constant_count]
        return tuple(
            t.new_empty(t.shape) if wanted else no_gradient(of)
            for t, wanted in zip(of, args[needed_at], strict=False)
        )

    def save(ctx: Any, args: tuple[Any, ...], result: Any) -> None:
        result = result if isinstance(result, tuple) else (result,)
        ctx.save_for_backward(*args[:input_count], *saved(result))
        ctx.mark_non_differentiable(*fixed(result))
        ctx.set_materialize_grads(False)
        ctx.options = args[input_count:]

    def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1 : 1 + input_count]  # after the keys
        if all(grad is None for grad in grads):  # what followed the op has no gradient either
            return (None,) * (input_count + len(ctx.options))
        operands = (*grads[:grad_count], *ctx.saved_tensors)
        differentiated = backward_op
        if in_place is not None and frees_saved(*operands):
            differentiated = in_place
        found = differentiated(*operands, *ctx.options, needed)
        return *[g if wanted else None for g, wanted in zip(found, needed, strict=False)], *of_options

    def save_nothing(ctx: Any, args: tuple[Any, ...], result: Any) -> None:
        pass

    def refuse(ctx: Any, *grads: Tensor | None) -> None:
        instead = "Do without create_graph=True"
        if hasattr(import_module("monoidreduce.reference"), name):
            instead += f", or `import monoidreduce.reference` and call its {name}"
        raise RuntimeError(
            f"monoidreduce::{name} can be differentiated once: its backward has no derivative. {instead}."
        )

    counts = input_count, input_count + residual_count, grad_count, constant_count
    OPERATORS[name] = Operator(forward, backward, in_place or backward, saved, *counts)
    for device in ("CPU", "CUDA"):
        _library.impl(name, forward, device)
        _library.impl(f"{name}_backward", backward, device)
    torch.library.register_fake(f"monoidreduce::{name}", fake, lib=_library)
    torch.library.register_fake(f"monoidreduce::{name}_backward", backward_fake, lib=_library)
    for kernel_name, kernel in (
        (name, _autograd(name, op, forward, save, differentiate)),
        (f"{name}_backward", _autograd(f"{name}_backward", backward_op, backward, save_nothing, refuse)),
    ):
        _library.impl(kernel_name, kernel, "Autograd", with_keyset=True)
