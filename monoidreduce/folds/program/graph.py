"""A graph of scalar operations, and the expressions that build it.

A node is a tuple: (name of a leaf, payload...) or (name of an operation, numbers of its arguments...). Equal
nodes are shared, and arguments come before the nodes that use them.
"""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch

from monoidreduce.folds.program.errors import TraceError, user_line
from monoidreduce.folds.program.operations import LEAVES, OPERATIONS

__all__ = ["Expression", "Graph", "Part", "Payload", "Vector"]

Node = tuple[Any, ...]
CONDITION = "expected a number, got a condition: write torch.where(condition, 1., 0.)"


class Graph:
    def __init__(self, nodes: tuple[Node, ...] = ()) -> None:
        self.nodes: list[Node] = list(nodes)
        self._numbers = {node: number for number, node in enumerate(self.nodes)}

    def kind(self, number: int) -> str:
        operation = self.nodes[number][0]
        return LEAVES[operation] if operation in LEAVES else OPERATIONS[operation].kinds[-1]

    def leaf(self, name: str, *payload: Any) -> Expression:
        return self._node((name, *payload))

    def apply(self, name: str, *args: Expression) -> Expression:
        """An operation on expressions; with constant arguments it is folded to its value."""
        constants = [arg.constant for arg in args]
        if None not in constants:
            return self.constant(_evaluate(name, constants))
        return self._node((name, *(arg.number for arg in args)))

    def raw(self, name: str, *args: Expression) -> Expression:
        """An operation as it is, without constant folding."""
        return self._node((name, *(arg.number for arg in args)))

    def constant(self, value: float | int | bool) -> Expression:
        if isinstance(value, bool):
            return self.leaf("boolean", int(value))
        if isinstance(value, int):
            return self.leaf("integer", value)
        return self.leaf("real", float(value).hex())

    def expression(self, value: Any) -> Expression:
        """The expression for an operand in user code: an expression or a number."""
        if isinstance(value, Expression):
            return value
        if isinstance(value, (Part, Payload, Vector)):
            value.refuse()
        if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
            value = value.item()
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise TraceError("an integer of more than 64 bits: write a float")
        if isinstance(value, (bool, int, float)):
            return self.constant(value)
        kind = type(value).__name__
        if hasattr(value, "__len__") and not isinstance(value, str):
            instead = "make it a tensor outside of the function, and index that"
            raise TraceError(f"expected a number, got many of type {kind}: {instead}")
        raise TraceError(f"expected a number, got {value!r} of type {kind}")

    def real(self, value: Any) -> Expression:
        """The operand as a real expression: an integer is converted; a condition raises TraceError."""
        of = self.expression(value)
        if of.kind == "bool":
            raise TraceError(CONDITION)
        if of.kind == "real":
            return of
        constant = of.constant
        return self.apply("to_real", of) if constant is None else self.constant(float(constant))

    def _node(self, node: Node) -> Expression:
        number = self._numbers.setdefault(node, len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append(node)
        return Expression(self, number)


def _evaluate(name: str, constants: list[Any]) -> Any:
    operation = OPERATIONS[name]
    if name == "to_real":
        return float(constants[0])
    dtypes = {"real": torch.float64, "index": torch.int64, "bool": torch.bool}
    tensors = [torch.tensor(x, dtype=dtypes[k]) for x, k in zip(constants, operation.kinds, strict=False)]
    return operation.evaluate(*tensors).item()


class Expression:
    """A per-element number or condition in a function that is being traced.

    Operators build the graph: arithmetic and comparisons of numbers; &, |, ^, ~ of conditions and of the bits
    of integers, which shifts by constants move.
    """

    __slots__ = ("graph", "number")
    # The module `vocabulary`, which maps torch's functions and methods to nodes. It sets this attribute
    # itself, so that this module need not import it.
    vocabulary: ClassVar[Any]
    __array_ufunc__ = None  # numpy numbers then defer their operators to this class

    def __init__(self, graph: Graph, number: int) -> None:
        self.graph, self.number = graph, number

    def __repr__(self) -> str:
        return "a value of one element"

    @property
    def kind(self) -> str:
        return self.graph.kind(self.number)

    @property
    def constant(self) -> float | int | bool | None:
        name, *payload = self.graph.nodes[self.number]
        if name == "real":
            return float.fromhex(payload[0])
        if name in ("integer", "boolean"):
            value: int = payload[0]
            return bool(value) if name == "boolean" else value
        return None

    @property
    def device(self) -> torch.device:
        """For functions that create constants on the device of their arguments."""
        return torch.device("cpu")

    # Arithmetic. It is integer arithmetic if both operands are integers, otherwise real.

    def _arithmetic(self, name: str, other: Any, *, reflected: bool = False) -> Expression:
        graph = self.graph
        x, y = self, graph.expression(other)
        if reflected:
            x, y = y, x
        x, y = x._beside(y), y._beside(x)
        if x.kind == y.kind == "index" and f"index_{name}" in OPERATIONS and name != "div":
            return graph.apply(f"index_{name}", x, y)
        x, y = graph.real(x), graph.real(y)
        left, right = x.constant, y.constant
        if right == 0 and name in ("add", "sub") and left is None:
            return x
        if left == 0 and right is None and name in ("add", "sub"):
            return y if name == "add" else graph.apply("neg", y)
        if right == 1 and name in ("mul", "div") and left is None:
            return x
        if left == 1 and name == "mul" and right is None:
            return y
        if name == "mul" and -1 in (left, right) and None in (left, right):
            return graph.apply("neg", x if right == -1 else y)
        return graph.apply(name, x, y)

    def _beside(self, other: Expression) -> Expression:
        """In an operation with a number, a condition becomes 1 or 0, as in torch."""
        if self.kind != "bool" or other.kind == "bool":
            return self
        return self.where(self, *(self.graph.constant(1 if other.kind == "index" else 1.0), 0))

    def __add__(self, other: Any) -> Expression:
        return self._arithmetic("add", other)

    def __radd__(self, other: Any) -> Expression:
        return self._arithmetic("add", other, reflected=True)

    def __sub__(self, other: Any) -> Expression:
        return self._arithmetic("sub", other)

    def __rsub__(self, other: Any) -> Expression:
        return self._arithmetic("sub", other, reflected=True)

    def __mul__(self, other: Any) -> Expression:
        return NotImplemented if isinstance(other, Payload) else self._arithmetic("mul", other)

    def __rmul__(self, other: Any) -> Expression:
        return self._arithmetic("mul", other, reflected=True)

    def __truediv__(self, other: Any) -> Expression:
        return self._arithmetic("div", other)

    def __rtruediv__(self, other: Any) -> Expression:
        return self._arithmetic("div", other, reflected=True)

    def __floordiv__(self, other: Any) -> Expression:
        return self._integers("div", self, other)

    def __rfloordiv__(self, other: Any) -> Expression:
        return self._integers("div", other, self)

    def __mod__(self, other: Any) -> Expression:
        return self._integers("mod", self, other)

    def __rmod__(self, other: Any) -> Expression:
        return self._integers("mod", other, self)

    def _integers(self, name: str, x: Any, y: Any) -> Expression:
        """Quotient or remainder, rounded down as in Python and torch."""
        graph = self.graph
        left, right = graph.expression(x), graph.expression(y)
        if right.constant == 0:
            raise TraceError("a number divided by 0")
        if left.kind == right.kind == "index":
            return graph.apply(f"index_{name}", left, right)
        left, right = graph.real(left), graph.real(right)
        rest = graph.apply("fmod", left, right)
        rest = rest.where((rest != 0.0) & ((rest < 0.0) ^ (right < 0.0)), rest + right, rest)
        return rest if name == "mod" else graph.apply("round", (left - rest) / right)

    def __neg__(self) -> Expression:
        if self.kind == "index":
            return 0 - self
        return self.graph.apply("neg", self.graph.real(self))

    def __pos__(self) -> Expression:
        return self

    def __abs__(self) -> Expression:
        if self.kind == "index":
            return self.where(self < 0, -self, self)
        return self.graph.apply("abs", self.graph.real(self))

    def __pow__(self, exponent: Any) -> Expression:
        graph = self.graph
        power = graph.expression(exponent)
        n: Any = power.constant
        if isinstance(n, float) and n.is_integer() and self.kind != "index":
            n = int(n)
        if isinstance(n, int) and not isinstance(n, bool) and abs(n) <= 64:
            return self._to_the(n)
        if isinstance(n, float) and abs(n) == 0.5:
            root = graph.apply("sqrt", graph.real(self))
            return root if n > 0 else 1.0 / root
        return graph.apply("pow", graph.real(self), graph.real(power))

    def _to_the(self, n: int) -> Expression:
        if n < 0:
            return 1.0 / self.graph.real(self)._to_the(-n)
        power, square = self.graph.expression(1 if self.kind == "index" else 1.0), self
        while n:
            if n % 2:
                power = square if power.constant == 1 else power * square
            square, n = square * square if n > 1 else square, n // 2
        return power

    def __rpow__(self, base: Any) -> Expression:
        base = self.graph.real(base)
        if base.constant is None or base.constant <= 0:
            return self.graph.apply("pow", base, self.graph.real(self))
        return (self * math.log(base.constant)).exp()

    # Comparisons.

    def _compare(self, name: str, x: Any, y: Any) -> Expression:
        graph = self.graph
        left, right = graph.expression(x), graph.expression(y)
        if left.kind == right.kind == "bool" and name == "eq":
            return (left & right) | ~(left | right)
        left, right = left._beside(right), right._beside(left)
        if left.kind == right.kind == "index":
            return graph.apply(f"index_{name}", left, right)
        return graph.apply(name, graph.real(left), graph.real(right))

    def __lt__(self, other: Any) -> Expression:
        return self._compare("lt", self, other)

    def __gt__(self, other: Any) -> Expression:
        return self._compare("lt", other, self)

    def __le__(self, other: Any) -> Expression:
        return self._compare("le", self, other)

    def __ge__(self, other: Any) -> Expression:
        return self._compare("le", other, self)

    def __eq__(self, other: Any) -> Expression:  # type: ignore[override]
        return self._compare("eq", self, other)

    def __ne__(self, other: Any) -> Expression:  # type: ignore[override]
        return ~self._compare("eq", self, other)

    # Conditions.

    def _logical(self, name: str, x: Any, y: Any) -> Expression:
        """An operation of two conditions, or of the bits of two integers."""
        left, right = self.graph.expression(x), self.graph.expression(y)
        left, right = left._beside(right), right._beside(left)
        if left.kind == right.kind == "index":
            return self.graph.apply(f"index_{name}", left, right)
        if (left.kind, right.kind) != ("bool", "bool"):
            raise TraceError("&, | and ^ are of conditions and of integers: write comparisons in parentheses")
        return self.graph.apply(name, left, right)

    def __and__(self, other: Any) -> Expression:
        return self._logical("and", self, other)

    def __rand__(self, other: Any) -> Expression:
        return self._logical("and", other, self)

    def __or__(self, other: Any) -> Expression:
        return self._logical("or", self, other)

    def __ror__(self, other: Any) -> Expression:
        return self._logical("or", other, self)

    def __xor__(self, other: Any) -> Expression:
        both: Expression = self & other
        either: Expression = self | other
        return either & ~both if both.kind == "bool" else either - both

    __rxor__ = __xor__

    def _power_of_shift(self, bits: Any) -> int:
        by = self.graph.expression(bits).constant
        if self.kind == "real" or isinstance(by, (bool, float)):
            raise TraceError("<< and >> are of integers")
        if by is None:
            raise TraceError(
                "a shift by a number of bits that differs from element to element: write i * powers[n] for "
                "i << n and i // powers[n] for i >> n, with powers = 2 ** torch.arange(63)"
            )
        if not 0 <= by <= 62:
            raise TraceError(f"a shift by {by} bits: expected 0 to 62")
        return 1 << by

    def __lshift__(self, bits: Any) -> Expression:
        return self * self._power_of_shift(bits)

    def __rlshift__(self, other: Any) -> Expression:
        return self.graph.expression(other) << self

    def __rshift__(self, bits: Any) -> Expression:
        return self // self._power_of_shift(bits)

    def __rrshift__(self, other: Any) -> Expression:
        return self.graph.expression(other) >> self

    def __invert__(self) -> Expression:
        if self.kind == "real":
            raise TraceError("~ is of a condition or of an integer")
        return -1 - self if self.kind == "index" else self.graph.apply("not", self)

    def where(self, condition: Any, x: Any, y: Any) -> Expression:
        """x if the condition holds, else y."""
        graph = self.graph
        holds, left, right = graph.expression(condition), graph.expression(x), graph.expression(y)
        if holds.kind != "bool":
            raise TraceError("torch.where: expected a condition first, got a number")
        if holds.constant is not None:
            return left if holds.constant else right
        if left.kind == right.kind == "bool":
            return (holds & left) | (~holds & right)
        left, right = left._beside(right), right._beside(left)
        if left.number == right.number:
            return left
        if left.kind == right.kind == "index":
            return graph.apply("index_where", holds, left, right)
        return graph.apply("where", holds, graph.real(left), graph.real(right))

    def exp(self) -> Expression:
        return self.graph.apply("exp", self.graph.real(self))

    def sigmoid(self) -> Expression:
        return self.graph.apply("sigmoid", self.graph.real(self))

    # Operations that make no sense for a value that differs between elements.

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise TraceError(
            "a branch on a value that differs from element to element: write torch.where(condition, a, b) "
            "for if, a & b, a | b and ~a for and, or and not, (a < b) & (b < c) for a < b < c, torch.minimum "
            "for min"
        )

    def __float__(self) -> float:
        file, line = user_line()
        called = re.search(r"\bmath\.(\w+)", linecache.getline(file, line))
        if called:
            name = called.group(1)
            raise TraceError(f"math.{name} is of plain numbers: write torch.{name}")
        raise TraceError(
            "float() of a value that differs from element to element: leave it out. For math's functions "
            "write torch's"
        )

    def __int__(self) -> int:
        raise TraceError("int() of a value that differs from element to element: leave it out")

    def __index__(self) -> int:
        raise TraceError(
            "a list, an array or a slice, indexed by a value that differs from element to element: make it a "
            "tensor outside of the function, and index that with single values"
        )

    def __round__(self, digits: int | None = None) -> Expression:
        return self.round() if digits is None else self.round(decimals=digits)  # type: ignore[no-any-return]

    def __floor__(self) -> Expression:
        return self.floor()  # type: ignore[no-any-return]

    def __ceil__(self) -> Expression:
        return self.ceil()  # type: ignore[no-any-return]

    def __trunc__(self) -> Expression:
        return self.trunc()  # type: ignore[no-any-return]

    def __getitem__(self, _: Any) -> Any:
        raise TraceError("a value of one element is a single number: it has no elements")

    def __iter__(self) -> Any:
        raise TraceError("a loop over a value of one element: it is a single number")

    def __len__(self) -> int:
        raise TraceError("len() of a value of one element: it is a single number")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.vocabulary.method(self, name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.vocabulary.call(function, args, kwargs or {})


class Part:
    """A captured tensor indexed on only some of its axes, such as `table[i]` in `table[i][j]`.

    gather: function of the tensor and all indices.
    """

    def __init__(self, tensor: Any, indices: tuple[Any, ...], gather: Callable[..., Any]) -> None:
        self._tensor, self._indices, self._gather = tensor, indices, gather

    def __getitem__(self, index: Any) -> Any:
        return self._gather(
            self._tensor, (*self._indices, *(index if isinstance(index, tuple) else (index,)))
        )

    def refuse(self, *_: Any) -> NoReturn:
        indexed = f"{len(self._indices)} of {self._tensor.dim()} axes"
        raise TraceError(
            f"a tensor of shape {list(self._tensor.shape)} indexed by {indexed}: a function sees single "
            "numbers, so index all of them, as table[i, j] or table[i][j]"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = refuse
    __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __neg__ = __abs__ = __bool__ = __float__ = refuse
    __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __invert__ = __len__ = __iter__ = refuse
    __eq__ = __ne__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __xor__ = __lshift__ = (
        __rshift__
    ) = refuse
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse_vectors(name)

    @staticmethod
    def _refuse_vectors(name: str) -> NoReturn:
        raise TraceError(
            f"{name}: a function sees single numbers, no vectors. A product of vectors that is added to the "
            "score is a part of the score: pass torch.cat((q, q_pe), -1) and torch.cat((k, k_pe), -1), with "
            "the scale of q alone"
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls._refuse_vectors(torch.overrides.resolve_name(function) or getattr(function, "__name__", "torch"))


class _Vectors:
    """A datum with a vector for each row or column.

    Every operation that a subclass does not have calls `refuse`, which raises TraceError.
    """

    name: str

    def refuse(self, *_: Any) -> NoReturn:
        raise NotImplementedError

    def _refused(self, *_: Any) -> NoReturn:
        self.refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refused
    __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __neg__ = __abs__ = __bool__ = __float__ = _refused
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __and__ = __or__ = __invert__ = _refused
    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __xor__ = __lshift__ = __rshift__ = _refused
    __getitem__ = __len__ = __iter__ = _refused
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls)).refuse()


class Payload(_Vectors):
    """A column's vector [E], times a number of the element: what `mean` and `total` fold to a vector.

    name: of the datum of columns. factor: the number, an expression.
    """

    def __init__(self, name: str, factor: Expression) -> None:
        self.name, self.factor = name, factor

    def __mul__(self, number: Any) -> Payload:  # type: ignore[override]
        return self._times(number, "mul")

    __rmul__ = __mul__  # type: ignore[assignment]

    def __truediv__(self, number: Any) -> Payload:  # type: ignore[override]
        return self._times(number, "div")

    def __neg__(self) -> Payload:  # type: ignore[override]
        return Payload(self.name, -self.factor)

    def _times(self, number: Any, name: str) -> Payload:
        graph = self.factor.graph
        by = graph.expression(number)
        return Payload(self.name, graph.real(self.factor * by if name == "mul" else self.factor / by))

    def refuse(self, *_: Any) -> NoReturn:
        raise TraceError(
            f"{self.name} has a vector for each column, which is only multiplied or divided by numbers of "
            f"the element, in mean(...) or total(...): write torch.where(condition, w, 0.0) * {self.name} to "
            "select, and two statistics for a sum"
        )


class Vector(_Vectors):
    """A row's vector [D], which `mr.stat.distance` reads.

    name: of the datum of rows. width: D.
    """

    def __init__(self, name: str, width: int) -> None:
        self.name, self.width = name, width

    def refuse(self, *_: Any) -> NoReturn:
        raise TraceError(
            f"{self.name} has a vector for each row, which is only for mr.stat.distance({self.name}, y), "
            "with y a datum of columns. A product of vectors is a score: pass them as a and b, or as other_a "
            "and other_b"
        )
