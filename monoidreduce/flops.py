"""FLOPs of the ops, from shapes, for `torch.utils.flop_counter.FlopCounterMode`.

They follow from what an op folds (`Fold` in _ops/registry.py), and agree with torch's own formulas for
`scaled_dot_product_attention`:

- Only matrix products count; a multiplication and an addition are two FLOPs.
- Excluded elements count as if they were computed: keys that a causal mask, a window or a bias excludes, and
  tokens that a loss ignores. All tokens of packed sequences count as if they were of one sequence, since only
  the device knows the lengths.
- Forward counts the scores, and the product of their weights with the payload.
- Backward counts the recomputed scores, and the products for the gradients that are needed. It counts scores
  as recomputed even if forward saved their dlogits. It does not count the products for gradients of tensors
  that a user's function captured.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

from monoidreduce._ops.registry import OPERATORS, Fold

__all__ = ["backward_flops", "forward_flops", "register_when_counted"]

Shape = Sequence[int]
Given = dict[str, Any]  # the arguments of an op by name, with shapes in place of tensors


def forward_flops(name: str, *arguments: Any) -> int:
    """FLOPs of the forward op `name`. arguments: all that it takes, with shapes in place of tensors."""
    given, operator = _by_name(name, arguments), OPERATORS[name]
    if operator.flops is not None:
        return operator.flops[0](given)
    return sum(_score_flops(operator.fold, given)) + _payload_flops(operator.fold, given)


def backward_flops(name: str, *arguments: Any, recomputed: bool = True) -> int:
    """FLOPs of the backward op of `name`, from its arguments. recomputed: with the scores that it computes
    once more."""
    given, operator = _by_name(f"{name}_backward", arguments), OPERATORS[name]
    if operator.flops is not None:
        return operator.flops[1](given)
    fold, first = operator.fold, operator.differentiable
    inputs = [*given][first : first + operator.inputs - operator.constants]
    needed = {each for each, is_needed in zip(inputs, given["needed"], strict=False) if is_needed}
    scores, other_scores = _score_flops(fold, given)
    flops = scores * len(needed & {fold.a, fold.b})
    flops += other_scores * len(needed & {fold.other_a, fold.other_b})
    of_scores = bool(needed - {fold.payload, *fold.data, *fold.joined})  # local gradients are needed
    if given.get(f"grad_{fold.sums}") is not None:
        flops += _payload_flops(fold, given) * (of_scores + (fold.payload in needed))
    if recomputed and (of_scores or fold.payload in needed):
        flops += scores + other_scores
    return flops + (scores + other_scores) * len(needed & {*fold.data})


def _by_name(op: str, arguments: Sequence[Any]) -> Given:
    schema = getattr(torch.ops.monoidreduce, op).default._schema
    return dict(zip((argument.name for argument in schema.arguments), arguments, strict=False))


def _score_flops(fold: Fold, given: Given) -> tuple[int, int]:
    """FLOPs of the scores, and of the second scores."""

    def of(rows: Shape | None, columns: Shape | None) -> int:
        if rows is None or columns is None:
            return 0
        return 2 * math.prod(rows) * _columns_of_row(columns, given)

    others = (None if name is None else given[name] for name in (fold.other_a, fold.other_b))
    return of(given[fold.a], given[fold.b]), of(*others)


def _payload_flops(fold: Fold, given: Given) -> int:
    """FLOPs of the product of the weights with the payload."""
    if fold.payload is None or given[fold.payload] is None:
        return 0
    rows, columns, payload = (given[name] for name in (fold.a, fold.b, fold.payload))
    pairs = math.prod(rows[:-1]) * _columns_of_row(columns, given)
    flops: int = 2 * pairs * payload[-2 if fold.transposed else -1]
    return flops


def _columns_of_row(columns: Shape, given: Given) -> int:
    """The number of columns that a row is folded with. With several batches these are its own batch's."""
    batches: int = given.get("batches", 1)
    return columns[-2] // max(batches, 1)


_COUNTER = "torch.utils.flop_counter"


def _register(counter: ModuleType) -> None:
    def formula(flops: Callable[..., int], name: str) -> Callable[..., int]:
        return lambda *arguments, **_: flops(name, *arguments)

    for name in OPERATORS:
        for op, flops in ((name, forward_flops), (f"{name}_backward", backward_flops)):
            counter.register_flop_formula(getattr(torch.ops.monoidreduce, op))(formula(flops, name))


class _AfterImport(MetaPathFinder):
    """An import hook that registers the formulas when torch's flop counter is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _COUNTER:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        sys.meta_path.remove(self)
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_when_counted() -> None:
    """Register the formulas with torch's flop counter now, or as soon as it is imported.

    Importing it here would also import Triton, if installed, and take that much time.
    """
    if _COUNTER in sys.modules:
        _register(sys.modules[_COUNTER])
    else:
        sys.meta_path.insert(0, _AfterImport())
