"""User functions (score_mod, mask_mod, statistics) that reach an operator inside a graph of torch.compile.

Tracing such a function gives a program, which becomes a constant of the graph. So there are two requirements:
the graph must not be reused for a function that gives another program, and tensors that the function captures
must be inputs of the graph.

The compiler (Dynamo) represents each object by a *variable*, and for objects that exist before the call it
knows a *source*, an expression that finds the object again. `Reading` opens a function: its code is used as
it is, and what its closure and defaults hold becomes the compiler's own variables, with the compiler's own
guards. Tensors among them become graph inputs; so do numbers, once they have changed between calls. Other
objects, and globals, are read in place, and a guard re-traces the function to see that it still gives the
same program.

All this uses private names of torch. If one is missing, the call runs outside of the graph.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial, reduce
from importlib import import_module
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from monoidreduce._torch_private import mark_constant, mark_untraced

__all__ = [
    "are_symbols",
    "as_input",
    "as_tensor",
    "at_compile_time",
    "found",
    "names_in",
    "outside_of_graphs",
    "read",
]

# A step from an object to something it holds: ("closure", i), ("default", i), ("named default", name),
# ("global", name), ("attribute", name), ("item", i), ("key", dict key).
Step = tuple[str, Any]
Scope = Mapping[str, Any]  # local variables of the compiled frame, by name
Make = Callable[[Scope], Any]

_WAY_OUT = "Without fullgraph=True this call runs outside of the graph. See docs/compile.md"
_OF_FUNCTIONS = {"default": "__defaults__", "named default": "__kwdefaults__", "global": "__globals__"}


class Unreadable(Exception):
    """A function cannot be part of a graph; the message says why."""


class _Changed(Exception):
    """A function has other code than when the graph was compiled."""


def _compiler(module: str) -> Any:
    """A module of torch._dynamo."""
    return import_module(f"torch._dynamo.{module}")


# Called inside functions that the compiler traces


def at_compile_time(function: Callable[[Any], None]) -> None:
    """Call `function` while the compiler traces, with the context that `Frame` takes."""
    from torch._dynamo.comptime import comptime

    comptime(function)


_found: list[Any] = [None, ()]  # result of the last `read`
_symbols: list[bool] = []  # result of the last `are_symbols`


def found() -> tuple[Any, tuple[int, ...]]:
    """The result of the last `read`: what `trace` returned, and for each tensor its index in of_call, or -1.

    The first is None if the functions cannot be part of a graph.
    """
    result, which = _found
    _found[:] = None, ()
    return result, which


def are_symbols(numbers: tuple[Any, ...]) -> tuple[bool, ...]:
    """Whether each number is a symbol of the graph, because it changed from call to call."""
    at_compile_time(_look_for_symbols)
    return _found_symbols()


def _look_for_symbols(context: Any) -> None:
    kind = _compiler("variables").SymNodeVariable
    _symbols[:] = [isinstance(number.realize(), kind) for number in Frame(context)["numbers"].items]


def _found_symbols() -> tuple[bool, ...]:
    return tuple(_symbols)


def as_tensor(number: float) -> Tensor:
    """The number as a float64 CPU tensor. A product with ones is traced correctly even if it is a symbol."""
    return torch.ones((), dtype=torch.float64, device="cpu") * number


def as_input(value: Any, like: Tensor) -> Tensor:
    """A tensor or number that a function read, as a tensor.

    A number becomes a 0-d tensor on like's device.
    """
    if isinstance(value, Tensor):
        return value
    dtype = torch.float64 if isinstance(value, float) else torch.int64
    result: Tensor = torch.ones((), dtype=dtype, device=like.device) * value
    return result


def outside_of_graphs(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function outside of the graph.

    With fullgraph=True the compiler raises an error that says why.
    """
    return torch.compiler.disable(function)(*args)  # type: ignore[no-untyped-call]


mark_constant(found)
mark_constant(_found_symbols)
mark_untraced(outside_of_graphs, "a function of monoidreduce cannot be part of a graph")


# Called by the compiler


class Frame:
    """The frame of a function that the compiler traces."""

    def __init__(self, context: Any) -> None:
        """context: the argument that `comptime` passes, in a function called by the frame's function."""
        self.tx = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().parent

    def __getitem__(self, name: str) -> Any:
        """The compiler's variable for a local variable of the frame."""
        return self.tx.symbolic_locals[name].realize()

    def __setitem__(self, name: str, variables: list[Any]) -> None:
        """Assign a tuple of compiler variables to a local variable of the frame."""
        self.tx.symbolic_locals[name] = _compiler("variables").TupleVariable(variables)


def read(
    context: Any,
    names: Sequence[str],
    trace: Callable[..., tuple[Any, Any, Sequence[Tensor]]],
    of_call: Sequence[Tensor] = (),
) -> None:
    """Trace the user functions in local variables of a compiled frame; `found` then returns the result.

    The frame's local variable `captured` becomes the tuple of the tensors that the functions read, as graph
    values: None for a tensor of `of_call`, and a number for a number that changed from call to call.

    Args:
        context: the argument that `at_compile_time` passes.
        names: names of the local variables, which are functions or hold some.
        trace: called with the values of these variables. Returns a result; a key, equal for equal programs;
            and the tensors that the functions read.
        of_call: tensors that stand for tensor arguments of the call, in what `trace` returns.
    """
    frame = Frame(context)
    for opens_numbers in (True, False):
        reading = Reading(frame, opens_numbers)
        try:
            makers = [reading.value(frame[name]) for name in names]
            result, which, variables = reading.program(makers, trace, of_call)
        except _compiler("exc").RestartAnalysis:
            raise
        except Exception as error:  # from the user's function, or a private name of torch is missing
            if not reading.has_numbers:
                _found[:] = None, ()
                mark_untraced(outside_of_graphs, f"{reading.where}{_summary(error)}. {_WAY_OUT}")
                return
        else:
            _found[:] = result, which
            frame["captured"] = variables
            return


def _summary(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return text if isinstance(error, (Unreadable, TypeError)) else f"{type(error).__name__}: {text}"


class Reading:
    """Opens user functions for a graph: how to rebuild them in each call, and where their tensors come from.

    inputs: pairs of a stand-in tensor, which functions see while traced, and the compiler's variable for it.
    has_numbers: whether one of the inputs is a number.
    """

    def __init__(self, frame: Frame, opens_numbers: bool) -> None:
        """opens_numbers: whether a number that changed from call to call may become a graph input."""
        self.tx, self.opens_numbers = frame.tx, opens_numbers
        self.inputs: list[tuple[Tensor, Any]] = []
        self.has_numbers = False
        self._roots: list[tuple[Make, Any]] = []  # objects that are read in place, with their sources
        self._held: list[tuple[Make, float]] = []  # numbers, with their values in this graph
        self._reached: list[int] = []  # ids of functions being opened, to detect recursion
        self._codes: list[types.CodeType] = []  # code of the functions that were opened

    @property
    def where(self) -> str:
        """File and line of the first function, as a prefix for errors."""
        return "".join(f"{code.co_filename}:{code.co_firstlineno}: " for code in self._codes[:1])

    @property
    def scope(self) -> Scope:
        """The scope of the call that is being compiled."""
        scope: Scope = self.tx.output.root_tx.f_locals
        return scope

    def value(self, variable: Any) -> Make:
        """A maker, which rebuilds in any call the object that a compiler variable stands for.

        variable: stands for a function, or for something that a function holds.
        """
        known, variable = _compiler("variables"), variable.realize()
        if isinstance(variable, known.NestedUserFunctionVariable):
            return self._made_in_frame(variable)
        if type(variable) is known.UserFunctionVariable:
            return self._found(variable)
        if isinstance(variable, known.UserMethodVariable) and variable.source is None:
            return self._method(variable)
        if isinstance(variable, known.FunctoolsPartialVariable):
            of, given = self.value(variable.func), [self.value(v) for v in variable.args]
            named = {name: self.value(v) for name, v in variable.keywords.items()}
            return _once(partial, of, *given, **named)
        if isinstance(variable, known.SymNodeVariable):
            return self._number(variable)
        if isinstance(variable, known.TensorVariable):
            return self._input(_stand_in(variable.as_proxy().node.meta["example_value"]), variable)
        if isinstance(variable, known.ConstantVariable):
            constant = variable.as_python_constant()
            return lambda _: constant
        if isinstance(variable, (known.TupleVariable, known.ListVariable)):
            kind = variable.python_type()
            if kind in (tuple, list):
                return _once(lambda *items: kind(items), *map(self.value, variable.items))
        if variable.source is not None:
            return self._object(variable.source)
        if variable.is_python_constant():  # for example a function of torch
            constant = variable.as_python_constant()
            return lambda _: constant
        raise Unreadable(f"it holds {variable.python_type().__name__} made in the compiled function")

    def _made_in_frame(self, variable: Any) -> Make:
        """A maker of a function that is defined inside the compiled function."""
        self._reach(id(variable))
        code, variables, load = variable.get_code(), variable.f_globals, self.tx.output.side_effects.load_cell
        self._codes.append(code)
        cells = [self.value(load(cell)) for cell in (variable.closure.items if variable.closure else ())]
        defaults = [self.value(v) for v in (variable.defaults.items if variable.defaults else ())]
        if variable.kwdefaults:
            raise Unreadable("it has arguments after * that have defaults")
        self._reached.remove(id(variable))
        module = sys.modules.get(variables.get("__name__", ""))
        if module is not None and vars(module) is variables:
            self._roots.append((lambda _: module, self.tx.import_source(module.__name__)))
        return _once(partial(_function, code, variables, len(cells), None), *cells, *defaults)

    def _found(self, variable: Any) -> Make:
        """A maker of a function that existed before: its code, with compiler variables as its closure."""
        function, source = variable.get_function(), variable.source
        self._codes.append(function.__code__)
        cells, defaults = function.__closure__ or (), function.__defaults__ or ()
        if source is None:
            return lambda _: function
        if not cells and not defaults:
            return self._object(source)
        self._reach(id(function))
        code, variables, read = function.__code__, function.__globals__, self._at(source)
        parts = [self._content(cell, source, i) for i, cell in enumerate(cells)]
        parts += [self._build(value, _after(source, ("default", i))) for i, value in enumerate(defaults)]
        self._reached.remove(id(function))
        self._roots.append((read, source))
        of_code = code, variables, len(cells), len(defaults)

        def named_defaults(scope: Scope) -> Any:
            now = read(scope)
            sizes = len(now.__closure__ or ()), len(now.__defaults__ or ())
            if now.__code__ is not code or now.__globals__ is not variables or sizes != of_code[2:]:
                raise _Changed
            return now.__kwdefaults__

        return _once(partial(_function, code, variables, len(cells)), named_defaults, *parts)

    def _reach(self, function: int) -> None:
        if function in self._reached:
            raise Unreadable("it calls itself")
        self._reached.append(function)

    def _content(self, cell: Any, source: Any, number: int) -> Make:
        side_effects = self.tx.output.side_effects
        if cell in side_effects:  # the compiled function may have assigned to this closure variable
            return self.value(side_effects.load_cell(side_effects[cell]))
        return self._build(cell.cell_contents, _after(source, ("closure", number)))

    def _method(self, variable: Any) -> Make:
        """A maker of a bound method for which the compiler has no source."""
        function, owner = variable.fn, self.value(variable.obj)
        kind = type(owner(self.scope))

        def make(scope: Scope) -> Any:
            of = owner(scope)
            if type(of) is not kind:
                raise _Changed
            return types.MethodType(function, of)

        return _Read(make)

    def _number(self, variable: Any) -> Make:
        """A maker of a number that is a symbol: an input, or its value in this call with a guard."""
        kind = variable.python_type()
        if self.opens_numbers and kind in (int, float):
            self.has_numbers = True
            dtype = torch.int64 if kind is int else torch.float64
            return self._input(torch.zeros((), dtype=dtype, device="meta"), variable)
        if kind is float:  # torch drops some guards on float values, so `_held` has one of our own
            if variable.source is None:
                raise Unreadable("it holds a number that is computed of one that changes")
            read = self._at(variable.source)
            number = read(self.scope)
            self._held.append((read, number))
        else:
            number = variable.evaluate_expr()
        return lambda _: number

    def _input(self, stand_in: Tensor, variable: Any) -> Make:
        self.inputs.append((stand_in, variable))
        return lambda _: stand_in

    def _object(self, source: Any) -> Make:
        make = self._at(source)
        self._roots.append((make, source))
        return make

    def _build(self, value: Any, source: Any) -> Make:
        return self.value(self._variable(value, source))

    def _variable(self, value: Any, source: Any) -> Any:
        return _compiler("variables.builder").VariableBuilder(self.tx, source)(value).realize()

    def _at(self, source: Any) -> Make:
        """A maker that evaluates a source in the scope of a call."""
        name = source.name if isinstance(source.name, str) else source.name()  # a method before torch 2.10
        variables = {**_compiler("guards")._get_closure_vars(), "G": self.tx.output.root_tx.f_globals}
        code = compile(name, "<source>", "eval")
        return _Read(lambda scope: eval(code, variables, {"L": scope}))

    def program(
        self, makers: Sequence[Make], trace: Callable[..., Any], of_call: Sequence[Tensor]
    ) -> tuple[Any, tuple[int, ...], list[Any]]:
        """Trace the functions, and guard the graph so that it serves only calls with the same program.

        Args:
            makers: makers of the arguments of trace.
            trace, of_call: as in `read`.

        Returns:
            The two results of `found`, and the compiler's variable for each tensor.

        Raises:
            Unreadable: it cannot be determined what the graph depends on.
        """
        self._check_unchanged()
        result, key, tensors = trace(*[make(self.scope) for make in makers])
        places = [self._place(tensor, of_call) for tensor in tensors]
        none = _compiler("variables").ConstantVariable.create(None)
        variables = [
            none if kind == "call" else self._variable_at(kind, which, tensor)
            for (kind, which), tensor in zip(places, tensors, strict=True)
        ]
        # The guard lives as long as the graph, so it must not keep objects of this call alive.
        roots, numbers = [make for make, _ in self._roots], self._held
        stand_ins = {"call": list(of_call), "input": [stand_in for stand_in, _ in self.inputs]}

        def tensor_at(place: tuple[str, Any], scope: Scope) -> Any:
            kind, which = place
            if kind != "root":
                return stand_ins[kind][which]
            number, steps = which
            return reduce(_followed, steps, roots[number](scope))

        def holds(scope: Scope) -> bool:
            if not all(make(scope) == number for make, number in numbers):
                return False
            _, key_now, now = trace(*[make(scope) for make in makers])
            same: bool = key_now == key and len(now) == len(places)
            return same and all(tensor_at(place, scope) is t for place, t in zip(places, now, strict=True))

        _guard(holds)
        return result, tuple(which if kind == "call" else -1 for kind, which in places), variables

    def _place(self, tensor: Tensor, of_call: Sequence[Tensor]) -> tuple[str, Any]:
        """Where a tensor that a function read comes from.

        ("call", index in of_call), ("input", index in inputs), or ("root", (index of the root, steps from
        it)).
        """
        for kind, known in (("call", of_call), ("input", [t for t, _ in self.inputs])):
            for number, t in enumerate(known):
                if t is tensor:
                    return kind, number
        for number, (make, _) in enumerate(self._roots):
            for value, steps in self._reads(make(self.scope))[0]:
                if value is tensor:
                    return "root", (number, steps)
        raise Unreadable("the function computes a tensor: compute it before, and index the result")

    def _variable_at(self, kind: str, which: Any, tensor: Tensor) -> Any:
        """The compiler's variable for a tensor; this makes the tensor an input of the graph."""
        if kind == "input":
            return self.inputs[which][1]
        number, steps = which
        return self._variable(tensor, reduce(_after, steps, self._roots[number][1]))

    def _reads(self, root: Any) -> tuple[list[tuple[Any, tuple[Step, ...]]], dict[str, None]]:
        """The objects that are reachable from a root through names in the user functions' code, with the
        steps to each; and these names."""
        names = dict.fromkeys(name for code in self._codes for name in names_in(code))
        size = -1
        found: list[tuple[Any, tuple[Step, ...]]] = []
        while size != len(names):  # a newly found function may use attribute names of objects found before
            size, found, seen = len(names), [(root, ())], {id(root)}
            for value, steps in found:
                for inner, step in _held(value, names):
                    if isinstance(inner, Tensor) or id(inner) not in seen:
                        seen.add(id(inner))
                        found.append((inner, (*steps, step)))
        return found, names

    def _check_unchanged(self) -> None:
        """Raise Unreadable if the compiled function has changed an object that a user function reads."""
        side_effects = self.tx.output.side_effects
        for make, _ in self._roots:
            found, names = self._reads(make(self.scope))
            for value, _ in found:
                if isinstance(value, Tensor) or value not in side_effects:
                    continue
                variable = side_effects[value]
                attributes = side_effects.store_attr_mutations.get(variable)
                if names.keys() & attributes if attributes else side_effects.is_modified(variable):
                    kind = type(value).__name__
                    raise Unreadable(f"it reads a {kind} that the compiled function has changed before")


def _guard(holds: Callable[[Scope], bool]) -> None:
    """Install a guard: the graph being compiled serves only calls whose scope satisfies `holds`."""

    def checked(scope: Any) -> bool:
        try:
            return holds(scope)
        except Exception:  # the function cannot be traced; recompiling raises the error
            return False

    def PROGRAM_MATCH(builder: Any, guard: Any) -> None:
        root = builder.guard_manager.root
        try:
            root.add_lambda_guard(checked, ["the program of a function"], None)
        except TypeError:  # torch before 2.10 has no third argument
            root.add_lambda_guard(checked, ["the program of a function"])

    _compiler("guards").install_guard(_compiler("source").GlobalStateSource().make_guard(PROGRAM_MATCH))


def _stand_in(fake: Tensor) -> Tensor:
    """A meta tensor, which functions see in place of a graph tensor; if a size is a symbol, the fake
    tensor."""
    if all(type(size) is int for size in fake.shape):
        return torch.empty(fake.shape, dtype=fake.dtype, device="meta")
    return fake


class _Read:
    """A maker that reads an object in place."""

    def __init__(self, read: Make) -> None:
        self.read = read

    def __call__(self, scope: Scope) -> Any:
        return self.read(scope)


def _once(build: Callable[..., Any], *parts: Make, **named: Make) -> Make:
    """A maker that builds again only if a part is another object, so that caches keyed by the result still
    hit.

    If a part is read in place, nothing is cached, because a graph would then keep models alive.
    """
    makers = [*parts, *named.values()]
    keeps = not any(isinstance(maker, _Read) for maker in makers)
    last: list[Any] = []

    def make(scope: Scope) -> Any:
        values = [maker(scope) for maker in makers]
        if last and all(x is y for x, y in zip(last[0], values, strict=True)):
            return last[1]
        built = build(*values[: len(parts)], **dict(zip(named, values[len(parts) :], strict=True)))
        if keeps:
            last[:] = values, built
        return built

    return make if keeps else _Read(make)


def _function(code: Any, variables: Any, cells: int, named_defaults: Any, *parts: Any) -> Any:
    """A function with this code. variables: its globals. parts: contents of its cells, then its defaults."""
    closure = tuple(map(types.CellType, parts[:cells]))
    made = types.FunctionType(code, variables, code.co_name, tuple(parts[cells:]) or None, closure)
    made.__kwdefaults__ = named_defaults
    return made


def _held(value: Any, names: dict[str, None]) -> Iterator[tuple[Any, Step]]:
    """The objects that an object holds, each with the step to it.

    names: names of variables and attributes that code uses; names that a function's code uses are added.
    """
    if isinstance(value, types.FunctionType):
        if _is_library(value):
            return
        of_code = names_in(value.__code__)
        names.update(dict.fromkeys(of_code))
        for i, cell in enumerate(value.__closure__ or ()):
            try:
                yield cell.cell_contents, ("closure", i)
            except ValueError:  # an empty cell
                continue
        for i, default in enumerate(value.__defaults__ or ()):
            yield default, ("default", i)
        for name, default in (value.__kwdefaults__ or {}).items():
            yield default, ("named default", name)
        for name in of_code:
            if name in value.__globals__:
                yield value.__globals__[name], ("global", name)
    elif isinstance(value, types.MethodType):
        yield value.__func__, ("attribute", "__func__")
        yield value.__self__, ("attribute", "__self__")
    elif isinstance(value, partial):
        for name in ("func", "args", "keywords"):
            yield getattr(value, name), ("attribute", name)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield item, ("item", i)
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, (str, int)):
                yield item, ("key", key)
    elif not isinstance(value, (Tensor, type)) and not _is_library(value):
        held: dict[str, Any] = dict(getattr(value, "__dict__", {}))
        if isinstance(value, nn.Module):
            held = {**held, **value._parameters, **value._buffers, **value._modules}
        for name in ("__call__", *names):
            method = getattr(type(value), name, None)
            is_property = isinstance(method, property)
            method = getattr(method, "fget", method)
            if name in held:
                yield held[name], ("attribute", name)
            elif isinstance(method, types.FunctionType):
                names.update(dict.fromkeys(names_in(method.__code__)))
                if not is_property:
                    yield getattr(value, name), ("attribute", name)


@lru_cache(1024)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in a function's code, and in that of functions within it."""
    within = (names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return (*code.co_names, *chain.from_iterable(within))


def _is_library(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
    return name.partition(".")[0] in ("torch", "math", "builtins", "monoidreduce") and not isinstance(
        value, nn.Module
    )


def _followed(value: Any, step: Step) -> Any:
    kind, which = step
    if kind == "closure":
        return value.__closure__[which].cell_contents
    if kind in _OF_FUNCTIONS:
        return getattr(value, _OF_FUNCTIONS[kind])[which]
    return getattr(value, which) if kind == "attribute" else value[which]


def _after(source: Any, step: Step) -> Any:
    """The source of the object that a step leads to, given the source of the object that holds it."""
    of = _compiler("source")
    kind, which = step
    if kind == "attribute":
        return of.AttrSource(source, which)
    if kind == "closure":
        cell = of.GetItemSource(of.AttrSource(source, "__closure__"), which)
        return of.AttrSource(cell, "cell_contents")
    if kind in _OF_FUNCTIONS:
        source = of.AttrSource(source, _OF_FUNCTIONS[kind])
    if kind in ("item", "default"):
        return of.GetItemSource(source, which)
    return getattr(of, "DictGetItemSource", of.GetItemSource)(source, which)  # torch before 2.7 has only one
