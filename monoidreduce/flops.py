"""FLOP formulas of the ops, from shapes, for `torch.utils.flop_counter.FlopCounterMode`.

They follow torch's own formulas for `scaled_dot_product_attention`:

- Only matrix products count; a multiplication and an addition are two FLOPs.
- Excluded elements count as if they were computed: keys that a causal mask, a window or a bias excludes, and
  tokens that a loss ignores.
- Backward counts the recomputed scores, and the products for the gradients that are needed. It counts scores
  as recomputed even if forward saved their dlogits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

__all__ = ["FORMULAS", "register_when_counted"]

Shape = Sequence[int]


def _needed(rest: Sequence[Any]) -> Sequence[bool]:
    """The backward op's list of bools that tells which gradients are needed; options may follow it."""
    lists = (each for each in reversed(rest) if isinstance(each, (list, tuple)) and each)
    found: Sequence[bool] = next(each for each in lists if isinstance(each[0], bool))
    return found


def attention(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """q [B, H, M, F], k [B, Hkv, N, F], v [B, Hkv, N, D]: scores, and probabilities times values."""
    return _pairs(q, k) * (q[3] + v[3])


def attention_backward(
    grad_out: Shape | None, grad_lse: Shape | None, q: Shape, k: Shape, v: Shape, *rest: Any, **_: Any
) -> int:
    """Recomputed scores, grad_out times v^T, and three gradients; without a grad_out there is none of v."""
    needed = _needed(rest)
    of_values = [needed[0] or needed[1] or needed[3], needed[2]] if grad_out is not None else []
    return _pairs(q, k) * (q[3] * (1 + sum(needed[:2])) + v[3] * sum(of_values))


def _pairs(q: Shape, k: Shape) -> int:
    return 2 * q[0] * q[1] * q[2] * k[2]


def linear_cross_entropy(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    """x [N, D], weight [V, D]: logits."""
    return 2 * x[0] * weight[0] * x[1]


def linear_cross_entropy_backward(
    grad_loss: Shape | None, grad_lse: Shape | None, x: Shape, weight: Shape, *rest: Any, **_: Any
) -> int:
    """Recomputed logits, and two gradients."""
    needed = _needed(rest)
    return linear_cross_entropy(x, weight) * (1 + sum(needed[:2]))


def linear_distillation(
    x: Shape, weight: Shape, teacher_x: Shape, teacher_weight: Shape, *_: Any, **__: Any
) -> int:
    """x [N, D], weight [V, D], teacher_x [N, E], teacher_weight [V, E]: logits of student and teacher."""
    return 2 * x[0] * weight[0] * (x[1] + teacher_x[1])


def linear_distillation_backward(
    grad_loss: Shape, x: Shape, weight: Shape, teacher_x: Shape, *rest: Any, **_: Any
) -> int:
    """Recomputed logits of student and teacher, and up to four gradients."""
    needed = _needed(rest)
    return 2 * x[0] * weight[0] * (x[1] * (1 + sum(needed[:2])) + teacher_x[1] * (1 + sum(needed[2:4])))


def linear_jsd(x: Shape, weight: Shape, teacher_x: Shape, teacher_weight: Shape, *rest: Any, **_: Any) -> int:
    """Logits of student and teacher, and the gradients of x and weight, which this forward computes."""
    scores = 2 * x[0] * weight[0]
    return scores * (x[1] * (1 + sum(_needed(rest))) + teacher_x[1])


def linear_jsd_backward(*_: Any, **__: Any) -> int:
    """No products: forward computed the gradients, backward scales them."""
    return 0


def linear_log_probs(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    """x [N, D], weight [V, D]: logits."""
    return linear_cross_entropy(x, weight)


def linear_log_probs_backward(
    grad_log_probs: Shape | None,
    grad_entropy: Shape | None,
    grad_lse: Shape | None,
    x: Shape,
    weight: Shape,
    *rest: Any,
    **_: Any,
) -> int:
    """Recomputed logits, and two gradients."""
    return linear_cross_entropy_backward(None, None, x, weight, *rest)


def mlp(x: Shape, w1: Shape, w2: Shape, *_: Any, **__: Any) -> int:
    """x [R, M], w1 [K, M], w2 [N, K]: hidden values and the result."""
    return 2 * x[0] * w1[0] * (w1[1] + w2[0])


def mlp_backward(grad_out: Shape, x: Shape, w1: Shape, w2: Shape, *rest: Any, **_: Any) -> int:
    """Recomputed hidden values, their gradient, and three gradients."""
    needed = _needed(rest)
    of_x, of_w1, of_w2, of_bias1 = needed[:4]
    of_hidden = of_x or of_w1 or of_bias1
    inwards = (of_hidden or of_w2) + of_x + of_w1
    return 2 * x[0] * w1[0] * (w1[1] * inwards + w2[0] * (of_hidden + of_w2))


def gated_mlp(x: Shape, w1: Shape, w2: Shape, *_: Any, **__: Any) -> int:
    """x [R, M], w1 and gate [K, M], w2 [N, K]: two products for hidden values, and the result."""
    return 2 * x[0] * w1[0] * (2 * w1[1] + w2[0])


def gated_mlp_backward(grad_out: Shape, x: Shape, w1: Shape, w2: Shape, *rest: Any, **_: Any) -> int:
    """Recomputed hidden values (two products), their gradient, two products for x, one for each weight."""
    of_x, of_w1, of_w2, of_gate, of_bias1, of_gate_bias = _needed(rest)[:6]
    of_hidden = of_x or of_w1 or of_gate or of_bias1 or of_gate_bias
    inwards = 2 * (of_hidden or of_w2) + 2 * of_x + of_w1 + of_gate
    return 2 * x[0] * w1[0] * (w1[1] * inwards + w2[0] * (of_hidden + of_w2))


def logsumexp_matmul(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    """a [M, F], b [N, F]: scores."""
    return 2 * a[0] * b[0] * a[1]


def logsumexp_matmul_backward(grad_lse: Shape, a: Shape, b: Shape, *rest: Any, **_: Any) -> int:
    """Recomputed scores, and two gradients."""
    needed = _needed(rest)
    return logsumexp_matmul(a, b) * (1 + sum(needed))


def statistics(a: Shape, b: Shape, other_a: Shape | None, *_: Any, **__: Any) -> int:
    """a [N, D], b [V, D], other_a [N, E] or None: one or two products of scores."""
    return 2 * a[0] * b[0] * (a[1] + (other_a[1] if other_a else 0))


def statistics_backward(
    grad_values: Shape, a: Shape, b: Shape, other_a: Shape | None, *rest: Any, **_: Any
) -> int:
    """Recomputed scores, up to four gradients, and scores once more each for row data and for column data."""
    needed = _needed(rest)
    of_operands = statistics(a, b, None) * sum(needed[:2])
    if other_a:
        of_operands += statistics(other_a, b, None) * sum(needed[2:4])
    return of_operands + statistics(a, b, other_a) * (any(needed[:4]) + sum(needed[4:6]))


def cpp_monoid(*args: Any, **options: Any) -> int:
    """The FLOPs of `statistics`."""
    return statistics(*args, **options)


def cpp_monoid_backward(*args: Any, **options: Any) -> int:
    """The FLOPs of `statistics_backward`: labels have no gradient."""
    return statistics_backward(*args, **options)


def attention_varlen(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """The FLOPs of attention of all queries to all keys, since the lengths are known only on the device."""
    return attention(q, k, v)


def attention_varlen_backward(
    grad_out: Shape | None, grad_lse: Shape | None, q: Shape, k: Shape, v: Shape, *rest: Any, **_: Any
) -> int:
    """The FLOPs of `attention_backward` without a bias."""
    return attention_backward(grad_out, grad_lse, q, k, v, [*_needed(rest)[:3], False])


def modified_attention(*args: Any, **options: Any) -> int:
    """The FLOPs of attention; elements that the mask excludes count too."""
    return attention(*args, **options)


def modified_attention_backward(*args: Any, **options: Any) -> int:
    """The FLOPs of attention, without the products for gradients of captured tensors."""
    return attention_backward(*args, **options)


FORMULAS: dict[str, Callable[..., int]] = {
    formula.__name__: formula
    for formula in (
        attention,
        attention_backward,
        attention_varlen,
        attention_varlen_backward,
        modified_attention,
        modified_attention_backward,
        linear_cross_entropy,
        linear_cross_entropy_backward,
        linear_distillation,
        linear_distillation_backward,
        linear_jsd,
        linear_jsd_backward,
        linear_log_probs,
        linear_log_probs_backward,
        mlp,
        mlp_backward,
        gated_mlp,
        gated_mlp_backward,
        logsumexp_matmul,
        logsumexp_matmul_backward,
        statistics,
        statistics_backward,
        cpp_monoid,
        cpp_monoid_backward,
    )
}

_COUNTER = "torch.utils.flop_counter"


def _register(counter: ModuleType) -> None:
    ops = torch.ops.monoidreduce
    for name, formula in FORMULAS.items():
        counter.register_flop_formula(getattr(ops, name))(formula)
        operator = name.removesuffix("_backward")
        in_graphs = f"{operator}_symbolic{name[len(operator) :]}"  # has one more input, behind the others
        if hasattr(ops, in_graphs):
            counter.register_flop_formula(getattr(ops, in_graphs))(formula)


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
