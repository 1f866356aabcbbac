"""How the classes of a transformers model use attention, read from their source code.

A model cannot be run when it is patched: it may be too large, or have no weights yet. Its source tells in
advance what a call would show later: that a layer passes attention an argument which eager attention does not
have, or inspects its mask.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

__all__ = ["AttentionCalls", "attention_calls"]

INTERFACE = "ALL_ATTENTION_FUNCTIONS"


class AttentionCalls(NamedTuple):
    """How a class of layers calls transformers' AttentionInterface."""

    keywords: frozenset[str]  # keyword arguments of its calls
    asks_for_tensor: bool  # whether it checks isinstance(mask, Tensor)


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
        return AttentionCalls(frozenset(), False)
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
    keywords = {word.arg for call in calls for word in call.keywords if word.arg is not None}
    asks = any(
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "isinstance"
        and ast.unparse(node.args[0]).endswith("mask")
        and "Tensor" in ast.unparse(node.args[1])
        for node in nodes
    )
    return AttentionCalls(frozenset(keywords), asks)


@functools.cache
def _classes(module: str) -> tuple[ast.ClassDef, ...]:
    """The class definitions in a module's source; () if the source is not available."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return ()
    return tuple(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
