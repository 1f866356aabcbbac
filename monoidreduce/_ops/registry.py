"""Registers each operator as two `torch.library` ops: schemas, fake implementations for tracing, autograd.

An operator is a forward op and a backward op in the namespace `monoidreduce`. Their implementations allocate
results with torch, and `_C` fills them. So the caching allocator, CUDA graphs and streams behave as for any
torch op. Autograd saves inputs and row statistics, never scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from operator import itemgetter
from typing import Annotated, Any, NamedTuple, NoReturn, TypeAlias, get_type_hints

import torch
from torch import Tensor

from monoidreduce import _C, _yards
from monoidreduce._dynamo import are_symbols, as_tensor
from monoidreduce._ops.engine import user_kernels
from monoidreduce._ops.memory import no_gradient
from monoidreduce._torch_private import (
    PLAIN,
    SingleLevelFunction,
    are_plain,
    autograd_is_next,
    backend_is_next,
    below_autograd,
    forward_ad_on,
    frees_saved,
    gradients_are_differentiated,
    has_tangent,
    is_observed,
    mark_constant,
    modes_are_active,
    primal_of,
    single_level,
    transforms_are_active,
)
from monoidreduce.precision import float32, get_float32

__all__ = [
    "OPERATORS",
    "UNROUNDED",
    "UNROUNDED_WEIGHT",
    "Fold",
    "Operator",
    "SymInt",
    "any_requires_grad",
    "call_op",
    "choices",
    "no_forward_mode",
    "refuse_forward_mode",
    "register",
    "unrecorded",
]

# An option of backward ops: return the rows' gradient in the dtype in which it was summed.
UNROUNDED = "bool unrounded=False"
# And an option of the linear losses: the same for the gradient of the weight. Their implementations have one
# more argument, sum_to: a tensor in the accumulation dtype, to which that gradient is added instead of being
# returned; then `needed` is False for the weight. The ops do not have it: torch.vmap makes no loop of an op
# that writes to an argument.
UNROUNDED_WEIGHT = "bool unrounded_weight=False"

# torch unregisters the ops when this object is garbage-collected, so the module keeps it.
_library: Any = torch.library.Library("monoidreduce", "DEF")  # type: ignore[no-untyped-call]


class Fold(NamedTuple):
    """Which inputs of an op are the rows, the columns and the data of its fold, by name.

    FLOP counts (flops.py), `explain` and the cost model know an op by it. The names are those of
    `_C.cpu_tiles` and fold.h.

    Attributes:
        a, b: rows [..., M, F] and columns [..., N, F], whose products are the scores.
        other_a, other_b: rows and columns of a second score for each pair.
        payload: [..., N, D], what functions of the scores weigh.
        sums: the name of the output that the payload adds up to.
        transposed: whether the payload is stored as [D, N].
        data: values of rows or columns that only the function of the scores reads. The gradient of one is a
            fold of its own.
        joined: what is joined to the results of rows. Its gradient needs no scores.
    """

    a: str
    b: str
    other_a: str | None = None
    other_b: str | None = None
    payload: str | None = None
    sums: str = "out"
    transposed: bool = False
    data: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()

    @property
    def operands(self) -> dict[str, str]:
        """The matrices: "a", "b", "other_a", "other_b" or "payload" -> the name of the input."""
        roles = ("a", "b", "other_a", "other_b", "payload")
        return {role: name for role in roles if (name := getattr(self, role)) is not None}


class Operator(NamedTuple):
    """The functions of a registered operator, for callers that run them without autograd.

    The arguments of `backward` are, in this order: the gradient of each differentiable output, or None; the
    inputs; the residuals; the options; and for each input whether its gradient is needed.
    """

    forward: Callable[..., Any]
    backward: Callable[..., list[Tensor]]
    freeing: Callable[..., list[Tensor]]  # like `backward`, but may overwrite the residuals
    residuals: Callable[..., Any]  # picks the residuals from the outputs
    inputs: int  # the number of inputs
    saved: int  # the number of inputs and residuals
    differentiable: int  # the number of differentiable outputs
    constants: int  # the number of inputs without a gradient, which are the last ones
    fold: Fold
    flops: tuple[Callable[..., int], Callable[..., int]] | None  # see `_register`, like the next one
    of_shard: Callable[[dict[str, Any]], dict[str, Any]]
    directly: Callable[[tuple[Any, ...]], Any]  # the op without the dispatcher: forward, recorded by autograd


OPERATORS: dict[str, Operator] = {}


# For each op, the number of its tensor inputs, and the positions of its float options among its arguments.
# Not a NamedTuple: torch 2.11's compiler cannot unpack one that a constant function returns.
_numbers: dict[str, tuple[int, tuple[int, ...]]] = {}


def _numbers_of(name: str) -> tuple[int, tuple[int, ...]]:
    return _numbers[name]


mark_constant(_numbers_of)  # torch.compile calls it while tracing, instead of tracing it


def call_op(name: str, *args: Any) -> Any:
    """Calls the op `name`, without the dispatcher if that would have nothing to do.

    torch.compile replaces a Python float that changes between calls by a symbol. A custom op that gets a
    symbol is compiled again for each value, or keeps the first one (pytorch#197889). So such floats become a
    tensor here, which goes to the op `NAME_symbolic`; that op reads the values when it runs.
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
    elif autograd_is_next(args[: OPERATORS[name].inputs]):
        return OPERATORS[name].directly(args)
    return getattr(ops, name).default(*args)


_PLAIN_OR_NONE = frozenset((*PLAIN, type(None)))


def unrecorded(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward and the backward op, for an autograd function of its own that calls them.

    If no dispatch mode is active, they are the implementations themselves, which saves the dispatcher's 20
    us.
    """
    if modes_are_active():
        ops = torch.ops.monoidreduce
        return getattr(ops, name).default, getattr(ops, f"{name}_backward").default
    return OPERATORS[name][:2]


def choices(call: str, option: str) -> tuple[str, ...]:
    """The names of the values that an enumeration option of a `_C` call can have, in order."""
    return next(field.choices for field in _C.CALLS[call] if field.name == option)


def _names(arguments: str) -> list[str]:
    return [argument.split()[-1] for argument in arguments.split(", ")]


def _picker(indices: list[int]) -> Callable[[Any], Any]:
    """A function that returns the elements of a sequence at these indices, faster than a loop in Python."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return itemgetter(slice(indices[0], indices[0] + 1)) if indices else lambda _: ()


def refuse_forward_mode(name: str, arguments: Iterable[Any]) -> None:
    """Raises NotImplementedError if an argument has a tangent of forward-mode AD."""
    if has_tangent(arguments):
        raise no_forward_mode(name)


def no_forward_mode(name: str, why: str | None = None) -> NotImplementedError:
    reason = f": {why}" if why else ""
    return NotImplementedError(
        f"{name} cannot be differentiated in forward mode (torch.func.jvp, jacfwd, hessian, forward_ad)"
        f"{reason}. Do so in reverse mode: torch.func.vjp, jacrev, grad, or backward()"
    )


def any_requires_grad(args: tuple[Any, ...]) -> bool:
    for argument in args:  # noqa: SIM110 - half the time of any()
        if isinstance(argument, Tensor) and argument.requires_grad:
            return True
    return False


_calls: dict[str, str] = {}  # op -> what runs it, if it does not have the name of an operator


def _title(name: str) -> str:
    """An op in an error."""
    calls = _calls.get(name.removesuffix("_backward"))
    return f"monoidreduce::{name}" + (f" ({calls})" if calls else "")


def _class_name(op_name: str) -> str:
    return "".join(word.capitalize() for word in op_name.split("_"))


def _autograd(
    name: str,
    op: Callable[..., Any],
    tensors: int,
    backend: Callable[..., Any],
    save: Callable[..., None],
    differentiate: Callable[..., Any],
    obstacle: Callable[..., str | None],
    move: Callable[..., Any] | None,
    rewritten: Callable[..., Any] | None = None,
    moves: Callable[..., bool] | None = None,
    compiles: bool = False,
) -> tuple[Callable[..., Any], Callable[[tuple[Any, ...]], Any]]:
    """Two functions: the Autograd kernel of `op`, which takes half the time of what
    `torch.library.register_autograd` makes; and a shortcut past the dispatcher, which takes the arguments of
    a call and is right if nothing else would intercept that (`autograd_is_next`).

    When the dispatcher calls this kernel inside torch.func, the transform level is already chosen.
    `Function.apply` would choose it again; SingleLevelFunction records at the current level only.

    name: the op's name. Profilers, anomaly mode and `grad_fn` show it with "Backward" appended.
    tensors: how many of the op's arguments are tensors; they come first. A Function takes the others as one
        argument, because each costs it time.
    backend: the implementation of the op, called directly if nothing else is to intercept the call.
    save: save(ctx, tensors, options, result) is what `setup_context` of an autograd Function does.
    differentiate: what `backward` of an autograd Function does, without the gradients of the options.
    obstacle: why a call has neither of the next two, from its arguments; None if it has.
    move: forward mode. From tangents or None of the arguments, the results, and the arguments, it returns
        tangents or None of the results.
    rewritten: a call written with ops that have forward mode and gradients of gradients. It is used for
        tangents, and where torch.func differentiates gradients.
    moves: for an op with both: whether `move` serves a call that autograd does not record.
    compiles: as in `_register`.

    Inside, `plain` is whether nothing else is to intercept the call.
    """

    def below(plain: bool, args: tuple[Any, ...]) -> Any:
        if plain:
            result = backend(*args)
        else:
            with below_autograd():
                result = op(*args)
        return tuple(result) if isinstance(result, list) else result  # a Function ignores tensors in a list

    def noted(ctx: Any, plain: bool, args: tuple[Any, ...]) -> Any:
        if not (plain and compiles):
            return below(plain, args)
        user_kernels.recorded = name, args, ctx.needs_input_grad[2:]  # after `plain` and the options
        try:
            return below(plain, args)
        finally:
            user_kernels.recorded = None

    class Recorded(SingleLevelFunction):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, plain: bool, options: tuple[Any, ...], *given: Any) -> Any:
            result = noted(ctx, plain, given + options)
            ctx.plain = plain
            save(ctx, given, options, result)
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return None, None, *differentiate(ctx, *grads)

    class Transformed(Recorded):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            with torch.enable_grad(), forward_ad_on(True):  # for the levels below
                return Recorded.forward(ctx, *args)

    class Moved(Transformed):
        @staticmethod
        def forward(ctx: Any, plain: bool, options: tuple[Any, ...], *given: Any) -> Any:
            result = Transformed.forward(ctx, plain, options, *given)
            ctx.moving = given + options, result if isinstance(result, tuple) else (result,)
            return result

        @staticmethod
        def jvp(ctx: Any, plain: Any, options: Any, *tangents: Tensor | None) -> Any:
            assert move is not None
            args, result = ctx.moving
            del ctx.moving  # it would keep them alive until backward
            with forward_ad_on(True):  # for the levels below: torch turns it off here
                found = move(tangents, result, [primal_of(argument) for argument in args])
            tangent_of = [t if t is None else t.to(of.dtype) for t, of in zip(found, result, strict=True)]
            return tuple(tangent_of) if len(result) > 1 else tangent_of[0]

    def applied(function: type) -> Callable[..., Any]:
        # torch names nodes after the class, when it is made.
        named: Any = type(function)(_class_name(name), (function,), {})
        apply: Callable[..., Any] = named.apply
        return apply

    record, transform, along = applied(Recorded), applied(Transformed), applied(Moved)

    def recorded(plain: bool, args: tuple[Any, ...]) -> Any:
        given = args[:tensors]
        if torch.is_grad_enabled() and any_requires_grad(given):
            return record(plain, args[tensors:], *given)
        return below(plain, args)

    def kernel(keys: Any, *args: Any) -> Any:
        if has_tangent(args):
            why = obstacle(*args)
            if why is not None:
                raise no_forward_mode(_title(name), why)
            recorded_too = torch.is_grad_enabled() and any_requires_grad(args)
            if rewritten is not None and (moves is None or recorded_too or not moves(*args)):
                return rewritten(*args)
            with single_level():
                return along(False, args[tensors:], *args[:tensors])
        if transforms_are_active():
            if rewritten is not None and gradients_are_differentiated() and obstacle(*args) is None:
                return rewritten(*args)
            with single_level():
                return transform(False, args[tensors:], *args[:tensors])
        return recorded(backend_is_next(keys), args)

    return kernel, partial(recorded, True)


# The type of an int option that may depend on a shape, so that torch.compile may pass a symbol for it.
SymInt: TypeAlias = Annotated[int, "SymInt"]

# The types of fields of an options record, and the types that a schema has for them.
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
    """The arguments of `_register`, with options as a schema's text instead of a record.

    described: the arguments of `register`, where `options` is a NamedTuple type, and `forward`, `fake` and
    `backward` take one argument of that type. In the result they take the options one by one.
    """
    record: Any = described["options"]
    types = get_type_hints(record, include_extras=True)
    options = ", ".join(types)
    inputs = len(_names(described["inputs"]))
    before = len(_names(described["differentiable"])) + inputs
    before += len(_names(described["residuals"])) if described["residuals"] else 0

    def packed(function: Callable[..., Any], tensors: int, rest: str = "") -> Callable[..., Any]:
        # A generated lambda has a parameter for each argument. Slicing *args would take a microsecond more.
        names = ", ".join(f"tensor_{i}" for i in range(tensors))
        code = f"lambda {names}, {options}{rest}: function({names}, new(record, ({options},)){rest})"
        flat: Callable[..., Any] = eval(code, {"function": function, "new": tuple.__new__, "record": record})
        return flat

    def packed_backward(function: Callable[..., Any]) -> Callable[..., Any]:
        return packed(function, before, ", *rest")  # rest: `needed`, and the backward op's own options

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
    """Registers an operator and, if it has float options, a second op `NAME_symbolic` (call_op).

    The arguments are those of `_register`. `options` may also be a NamedTuple type; forward, fake and
    backward then take one argument of that type.

    `NAME_symbolic` has one more constant input, the tensor `numbers`: the values of the float options that
    are not None, in their order. It saves no dlogits for backward, because whether it may can depend on these
    values, which are not known when shapes are traced.
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
        """The options `given`, with floats taken from `numbers`. numbers: None while tracing shapes."""
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
            "second": None,
            "tangents": None,
            "moves": None,
            "obstacle": lambda *args: "",
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
    fold: Fold,
    flops: tuple[Callable[..., int], Callable[..., int]] | None = None,
    of_shard: Callable[[dict[str, Any]], dict[str, Any]] = lambda given: {},
    constants: str = "",
    backward_options: str = "",
    in_place: Callable[..., list[Tensor]] | None = None,
    second: Callable[..., list[Tensor | None]] | None = None,
    tangents: Callable[..., Sequence[Tensor]] | None = None,
    moves: Callable[..., bool] | None = None,
    obstacle: Callable[..., str | None] | None = None,
    calls: str | None = None,
    compiles: bool = False,
) -> None:
    """Defines the ops `name` and `name_backward`:

        name(inputs, options) -> outputs
        name_backward(gradients, inputs, residuals, options, needed, backward_options) -> gradients of inputs

    Args:
        inputs, options: the schema's text of the arguments.
        outputs: names of the results.
        differentiable: the outputs that get gradients. The backward op takes a gradient or None for each.
        residuals: the outputs that the backward op reads.
        forward, backward: the implementations, on the CPU and on CUDA.
        fake: like forward, but only allocates the results, for tracing.
        fold: which inputs are rows, columns and so on.
        flops: the FLOPs of the forward and of the backward op, from their arguments by name with shapes in
            place of tensors. None: they are those of the fold (flops.py).
        of_shard: the options that differ where the columns are one rank's shard, from the arguments by name:
            forward may save less there.
        constants: the last inputs, which have no gradient. The backward op returns the gradients of the
            others; one whose entry in `needed` is False is an empty tensor.
        backward_options: more options of the backward op. Autograd calls it with their defaults.
        in_place: like backward, but may overwrite the residuals or return them. Autograd calls it if it frees
            them afterwards.
        second: the gradients of the backward op. It is called with a gradient or None for each of its
            results, with whether the gradient of each upstream gradient and input is wanted, then with its
            arguments, and returns a gradient or None for each argument. It serves forward mode too, as a
            Hessian is symmetric: then it is called with the tangents of the inputs, and as `moved` with those
            of the upstream gradients and of the residuals, and returns the tangents of the results in the
            places of the inputs. Without it, they are those of the operator as folds of statistics
            (folds/as_statistics.py), if it is there; otherwise a second derivative is a RuntimeError.
        tangents: forward mode, for an operator with `second` or `moves`. It is called with a tangent or None
            for each input, then with the results, then with the arguments, and returns the tangents of the
            differentiable outputs. Without it, forward mode is that of the operator as folds of statistics,
            if it is there; otherwise forward mode is a NotImplementedError.
        moves: whether `tangents` serves a call, from its arguments. Otherwise, and where the call also has
            gradients, forward mode is that of the operator as folds of statistics.
        obstacle: why a call has no forward mode, from its arguments; None if it has. Given with `second`.
        calls: the calls that run the op, for errors, if it does not have the name of one.
        compiles: the op's kernels are compiled for a user's function. Those of the backward pass are compiled
            beside those of the forward pass (folds/cuda/ahead.py).
    """
    if calls is not None:
        _calls[name] = calls
    results = _names(outputs)
    saved = _picker([results.index(residual) for residual in _names(residuals)] if residuals else [])
    fixed = _picker([i for i, result in enumerate(results) if result not in _names(differentiable)])
    input_count, grad_count = len(_names(inputs)), len(_names(differentiable))
    constant_count = len(_names(constants) if constants else [])
    of_constants = (None,) * constant_count
    residual_count = len(_names(residuals) if residuals else [])
    read_count = grad_count + input_count + residual_count  # the tensors that the backward op takes

    upstream = ", ".join(f"Tensor? grad_{result}" for result in _names(differentiable))
    read = "".join(f"Tensor {result}, " for result in saved(results))
    returns = ", ".join("Tensor" for _ in results)
    gradients = ", ".join(["Tensor"] * (input_count - constant_count))
    tags = (torch.Tag.pt2_compliant_tag,)
    _library.define(f"{name}({inputs}, {options}) -> ({returns})", tags=tags)
    arguments = f"{upstream}, {inputs}, {read}{options}, bool[] needed"
    arguments += f", {backward_options}" if backward_options else ""
    needed_at = read_count + len(_names(options))
    _library.define(f"{name}_backward({arguments}) -> ({gradients})", tags=tags)
    op = getattr(torch.ops.monoidreduce, name).default
    backward_op = getattr(torch.ops.monoidreduce, f"{name}_backward").default

    def backward_fake(*args: Any) -> tuple[Tensor, ...]:
        of = args[grad_count : grad_count + input_count - constant_count]
        return tuple(
            t.new_empty(t.shape) if wanted else no_gradient(of)
            for t, wanted in zip(of, args[needed_at], strict=False)
        )

    def save(ctx: Any, given: tuple[Any, ...], options: tuple[Any, ...], result: Any) -> None:
        result = result if isinstance(result, tuple) else (result,)
        ctx.save_for_backward(*given, *saved(result))
        ctx.mark_non_differentiable(*fixed(result))
        ctx.set_materialize_grads(False)
        ctx.options, ctx.float32 = options, get_float32()

    def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]  # after `plain` and the options
        if all(grad is None for grad in grads):
            return (None,) * input_count
        upstream, read = grads[:grad_count], ctx.saved_tensors
        differentiated: Callable[..., Any] = backward_op
        # Saved tensors were plain, but hooks on them may have returned others.
        if (
            ctx.plain
            and not is_observed()
            and are_plain(upstream)
            and _PLAIN_OR_NONE.issuperset(map(type, read))
        ):
            differentiated = in_place if in_place is not None and frees_saved() else backward
        # The thread of a backward pass is outside of the blocks around its forward pass.
        if ctx.float32 == get_float32():
            found = differentiated(*upstream, *read, *ctx.options, needed)
        else:
            with float32(ctx.float32):
                found = differentiated(*upstream, *read, *ctx.options, needed)
        return *[g if wanted else None for g, wanted in zip(found, needed, strict=False)], *of_constants

    def save_arguments(ctx: Any, given: tuple[Any, ...], options: tuple[Any, ...], result: Any) -> None:
        ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)
        ctx.options = options

    def differentiate_again(ctx: Any, *cotangents: Tensor | None) -> Any:
        differentiated = second or _yards.folds().second_derivative(name)
        if differentiated is None:
            refuse()
        wanted = ctx.needs_input_grad[2 : 2 + grad_count + input_count]  # after `plain` and the options
        return differentiated(cotangents, wanted, *ctx.saved_tensors, *ctx.options)[:read_count]

    def move(moved: Sequence[Tensor | None], result: Sequence[Tensor], args: Sequence[Any]) -> Any:
        assert tangents is not None
        found = tangents(moved[:input_count], result, *args)
        of = dict(zip(_names(differentiable), found, strict=True))
        return [of.get(each) for each in results]

    def move_gradients(moved: Sequence[Tensor | None], result: Sequence[Tensor], args: Sequence[Any]) -> Any:
        last = grad_count + input_count
        upstream, along = moved[:grad_count], moved[grad_count:last]
        if all(t is None for t in along):  # gradients are linear in the upstream ones
            found = backward_op(*upstream, *args[grad_count:])
        else:
            assert second is not None
            given, wanted = [*args], [*[False] * grad_count, *args[needed_at]]
            given[needed_at] = [t is not None for t in along]
            of_arguments = second(along, wanted, *given, moved=(*upstream, *moved[last:]))
            found = of_arguments[grad_count : last - constant_count]
        of = zip(found, result, args[needed_at], strict=False)
        return [t if wanted and t is not None else torch.zeros_like(like) for t, like, wanted in of]

    def rewritten(*args: Any) -> Any:
        return _yards.folds().by_statistics(name, *args)

    def obstacle_of(*args: Any) -> str | None:
        if obstacle is None:
            of_call: str | None = _yards.folds().obstacle(name, *args)
            return of_call
        return obstacle(*args)

    def obstacle_of_backward(*args: Any) -> str | None:
        last = grad_count + input_count
        inputs, options = args[grad_count:last], args[last + residual_count : needed_at]
        if not has_tangent(inputs):
            return None
        return "" if obstacle is None else obstacle(*inputs, *options)

    def refuse() -> NoReturn:
        instead = "Do without create_graph=True"
        if hasattr(import_module("monoidreduce.reference"), name):
            instead += f", or `import monoidreduce.reference` and call its {name}"
        raise RuntimeError(
            f"{_title(name)} can be differentiated once: its backward has no derivative. {instead}."
        )

    kernel, directly = _autograd(
        name,
        op,
        input_count,
        forward,
        save,
        differentiate,
        obstacle_of,
        move if tangents else None,
        None if second else rewritten,
        moves,
        compiles,
    )
    backward_kernel, _ = _autograd(
        f"{name}_backward",
        backward_op,
        read_count,
        backward,
        save_arguments,
        differentiate_again,
        obstacle_of_backward,
        move_gradients,
    )
    counts = input_count, input_count + residual_count, grad_count, constant_count
    rest = fold, flops, of_shard, directly
    OPERATORS[name] = Operator(forward, backward, in_place or backward, saved, *counts, *rest)
    for of, implementation, autograd, faked in (
        (name, forward, kernel, fake),
        (f"{name}_backward", backward, backward_kernel, backward_fake),
    ):
        for device in ("CPU", "CUDA"):
            _library.impl(of, implementation, device)
        torch.library.register_fake(f"monoidreduce::{of}", faked, lib=_library)
        _library.impl(of, autograd, "Autograd", with_keyset=True)
