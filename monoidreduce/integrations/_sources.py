"""How the classes of a transformers model use attention, read from their source code.

A model cannot be run when it is patched: it may be too large, or have no weights yet. Its source tells in
advance what a call would show later: that a layer passes attention an argument which eager attention does not
have, inspects its mask, or drops attention weights in training.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from monoidreduce._validate import mismatch

__all__ = ["AttentionCalls", "attention_calls", "dropout_error", "dropout_of"]

INTERFACE = "ALL_ATTENTION_FUNCTIONS"


class AttentionCalls(NamedTuple):
    """How a class of layers calls transformers' AttentionInterface."""

    keywords: frozenset[str]  # keyword arguments of its calls
    dropout: tuple[
        str, ...
    ]  # attributes of the layer that hold the dropout rate: "attention_dropout", "dropout.p"
    asks_for_tensor: bool  # whether it checks isinstance(mask, Tensor)
    module: str  # module that defines the class
    definition: ast.ClassDef | None  # None if the source is not available


def _functions(kind: type) -> Iterator[tuple[type, Any]]:
    """For each method of a layer's class: the base class that defines it, and its code object."""
    for base in kind.__mro__:
        if base in (nn.Module, PreTrainedModel):
            return
        for function in vars(base).values():
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            if code is not None:
                yield base, code


def attention_calls(layer: nn.Module) -> AttentionCalls | None:
    """How the layer's class calls the AttentionInterface; None if it does not."""
    kind: Any = type(layer)
    return _calls(kind)


@functools.cache
def _calls(kind: Any) -> AttentionCalls | None:
    defining = next((base for base, code in _functions(kind) if INTERFACE in code.co_names), None)
    if defining is None:
        return None
    definition = next((c for c in _classes(defining.__module__) if c.name == defining.__name__), None)
    if definition is None:
        return AttentionCalls(frozenset(), (), False, defining.__module__, None)
    nodes = list(ast.walk(definition))
    interfaces = {
        target.id
        for node in nodes
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and INTERFACE in ast.dump(node.value or node)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    calls = [
        node
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in interfaces
    ]
    keywords = {word.arg: word.value for call in calls for word in call.keywords if word.arg is not None}
    dropout = (
        ast.unparse(n)
        for n in ast.walk(keywords.get("dropout", ast.Constant(0.0)))
        if isinstance(n, ast.Attribute)
    )
    of_layer = [name.removeprefix("self.") for name in dropout if name.startswith("self.")]
    longest = [n for n in of_layer if n != "training" and not any(m.startswith(f"{n}.") for m in of_layer)]
    asks = any(
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "isinstance"
        and ast.unparse(node.args[0]).endswith("mask")
        and "Tensor" in ast.unparse(node.args[1])
        for node in nodes
    )
    return AttentionCalls(frozenset(keywords), tuple(longest), asks, defining.__module__, definition)


@functools.cache
def _classes(module: str) -> tuple[ast.ClassDef, ...]:
    """The class definitions in a module's source; () if the source is not available."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return ()
    return tuple(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))


def dropout_of(module: nn.Module) -> float:
    """The fraction of attention weights that a layer drops in training; 0.0 if none."""
    calls = attention_calls(module)
    for name in () if calls is None else calls.dropout:
        try:
            found = attrgetter(name)(module)
        except AttributeError:
            continue
        if isinstance(found, (int, float)) and found:
            return float(found)
    return 0.0


def dropout_error(module: nn.Module, given: float) -> str:
    kind: Any = type(module)
    keys = _dropout_keys(kind) or ("attention_dropout",)
    zeros = ", ".join(f"{key}=0.0" for key in keys)
    expected = f"0: give {zeros} to from_pretrained or to the config that the model is made of"
    return mismatch(" or ".join(keys), expected, given)


@functools.cache
def _dropout_keys(kind: Any) -> tuple[str, ...]:
    """The config keys that set a layer's attention dropout.

    They are found in `self.dropout = nn.Dropout(config.key)`, or in `Layer(dropout=config.key)` where another
    class of the module creates the layer.
    """
    calls = _calls(kind)
    if calls is None or calls.definition is None:
        return ()
    direct = tuple(name.removeprefix("config.") for name in calls.dropout if name.startswith("config."))
    found = set(direct)
    attributes = {name.split(".")[0] for name in calls.dropout}
    for node in ast.walk(calls.definition):
        if isinstance(node, ast.Assign) and any(
            ast.unparse(t) in {f"self.{a}" for a in attributes} for t in node.targets
        ):
            values = [node.value]
            for name in {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}:
                values += _given(calls.module, calls.definition.name, name)
            for value in values:
                found |= {
                    ast.unparse(n).split("config.")[-1]
                    for n in ast.walk(value)
                    if isinstance(n, ast.Attribute) and "config." in ast.unparse(n) and "drop" in n.attr
                }
    return tuple(sorted(found))


def _given(module: str, name: str, argument: str) -> list[ast.expr]:
    """The expressions that a module's classes pass for `argument` when they create the class `name`."""
    return [
        word.value
        for definition in _classes(module)
        for node in ast.walk(definition)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name
        for word in node.keywords
        if word.arg == argument
    ]
