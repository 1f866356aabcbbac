"""The check of a program of `statistics`, before its first use.

Parts of a row combine in any order whatever the function is. States and their combine are the library's, and
its tests hold them to the laws. What follows from the function is tried here, on a few elements in float64.
The CPU engine's results are compared with plain torch's, and the derived gradients with autograd's.
"""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from monoidreduce import _C
from monoidreduce._results import RESULTS
from monoidreduce._version import __version__
from monoidreduce.laws import MonoidLawError
from monoidreduce.program import cache, passes
from monoidreduce.program.derivative import count
from monoidreduce.program.errors import TraceError, user_line
from monoidreduce.program.graph import Node
from monoidreduce.program.program import Program, parse
from monoidreduce.program.reader import evaluate, statistics
from monoidreduce.program.tracing import Traced, living

__all__ = ["Broken", "check", "tried"]

# The values of leaves, or what is known of a row: of ("value", k), ("index", k) and gradients by leaves.
Numbers: TypeAlias = dict[Node, Tensor]

_ROWS, _COLUMNS = 4, 20  # columns of three blocks of the CPU engine
_SPREADS = (3.0, 1.0, 0.3, 0.1)  # of scores, one for each draw
_MOVE = 1e-12  # relative, of scores: a result that it moves by more than _MOVED is at a kink, or cancels
_MOVED, _WRONG = 1e-7, 1e-6  # relative to the largest of the same kind; a wrong rule is off by far more
_ROUNDED = 1e-10  # relative to the largest of all kinds, and to 1
_SCORES: tuple[Node, ...] = (("score",), ("other",))


class Broken(NamedTuple):
    """What differs.

    of: a ("value", k) or ("index", k), or the leaf by which a gradient is. elements: where, and its scores.
    """

    of: Node
    elements: dict[str, float]
    found: float
    expected: float


class _NoAutograd(Exception):
    """This process cannot differentiate: it was forked from one that did."""


def check(text: str) -> None:
    """Try a program, unless this process or the cache remembers that it held.

    Raises:
        MonoidLawError: the CPU engine differs from plain torch, or a derived gradient from autograd.
    """
    if not torch.is_anomaly_enabled():  # which would refuse the numbers that are not finite
        _check_once(text)


@lru_cache(1024)
def _check_once(text: str) -> None:
    key = cache.key("statistics", text, __version__, torch.__version__, _hash_of_library())
    if cache.load_fact(key) is not None:
        return
    try:
        # In a thread of its own no mode of torch's is on, and autograd records inside of an op.
        with ThreadPoolExecutor(1) as thread:
            verdict = thread.submit(tried, text).result()
    except (_NoAutograd, TraceError):  # or the gradient is too large for the engine: a call for it says so
        return
    if isinstance(verdict, Broken):
        raise _error(text, verdict)
    if verdict:
        cache.store_fact(key, {"held": True})


@lru_cache(1)
def _hash_of_library() -> str:
    """Of what a verdict is about: the derivatives, and the engine as it was built."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    engine = Path(_C.__file__).stat()
    facts = (_C.cpu_isa(), engine.st_size, engine.st_mtime_ns, *(path.read_bytes() for path in sources))
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def tried(text: str) -> Broken | bool:
    """What differs; or whether there was anything to compare, elements where the function is smooth."""
    program = parse(text)
    for draw, spread in enumerate(_SPREADS):
        generator = torch.Generator().manual_seed(draw)
        leaves = _smooth(program, _drawn(program, draw, spread, generator))
        if leaves is None:
            continue
        upstream = torch.randn(
            (program.values, len(leaves["score",])), generator=generator, dtype=torch.float64
        )
        moved = {
            leaf: t * (1 + _MOVE * torch.randn(t.shape, generator=generator, dtype=t.dtype))
            for leaf, t in leaves.items()
            if leaf in _SCORES
        }
        expected, beside = _by_torch(program, leaves, leaves | moved, upstream)
        largest = max(map(_largest, expected.values()))
        rounded = _ROUNDED * (1 + largest)
        if any(_differ(beside[of], t, _MOVED * _largest(t) + rounded).any() for of, t in expected.items()):
            continue
        found = _by_engine(text, program, leaves, upstream)
        for of, t in expected.items():
            wrong = _differ(found[of], t, _WRONG * _largest(t) + rounded)
            if not wrong.any():
                continue
            if _is_tie(program, leaves, of, found[of], rounded):
                break
            return _shown(of, wrong, leaves, found[of], t)
        else:
            return True
    return False


def _drawn(program: Program, draw: int, spread: float, generator: torch.Generator) -> Numbers:
    """Values of leaves, [rows, columns]; of scores [candidates, rows, columns].

    Reals of data are normal; in later draws from 0.1 to 0.9, from 1.4 to 4.6, and from -0.9 to -0.1.
    """
    shape = (_ROWS, _COLUMNS)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    def unit(*sizes: int) -> Tensor:
        return 0.1 + 0.8 * torch.rand(sizes, generator=generator, dtype=torch.float64)

    def real(*sizes: int) -> Tensor:
        return (normal(*sizes), unit(*sizes), 1 + 4 * unit(*sizes), -unit(*sizes))[draw]

    def integer(*sizes: int) -> Tensor:
        """Half of them are numbers of columns, or of none, and half are flags. Odd draws have no 0."""
        numbers = torch.randint(1 if draw % 2 else -1, _COLUMNS + 1, sizes, generator=generator)
        flags = torch.randint(draw % 2, 2, sizes, generator=generator)
        return torch.where(torch.rand(sizes, generator=generator) < 0.5, numbers, flags)

    leaves: Numbers = {("position",): torch.arange(_COLUMNS).expand(shape)}
    for leaf in _SCORES[: program.scores]:
        others = (unit(*shape) * factor for factor in (1, -1, 5, -5, 1000, -1000))
        leaves[leaf] = torch.stack([spread * normal(*shape), *others])
    for name, drawn in (("row", real), ("column", real), ("row_index", integer), ("column_index", integer)):
        sizes = (_ROWS, 1) if name.startswith("row") else (1, _COLUMNS)
        for k in range(count(program, name)):
            leaves[name, k] = drawn(*sizes).expand(shape)
    return leaves


def _smooth(program: Program, drawn: Numbers) -> Numbers | None:
    """Of each element the first candidate with finite gradients and numbers, which may be -inf.

    Rows where an element has none are left out; None where all are.
    """
    candidates = drawn["score",].shape
    reals = {
        leaf: t.expand(candidates).clone().requires_grad_()
        for leaf, t in drawn.items()
        if t.is_floating_point()
    }
    given = drawn | reals
    try:
        values = evaluate(program.nodes, program.roots, given.__getitem__, given["score",])
    except RuntimeError:  # an integer divided by 0
        return None
    numbers = [values[i] for i in program.roots if values[i].is_floating_point()]
    finite = torch.ones(candidates, dtype=torch.bool)
    for number in numbers:
        finite = finite & (number < math.inf)
    total = sum((number.expand(candidates).sum() for number in numbers), torch.zeros(()))
    for gradient in _gradients(total, reals):
        finite = finite & gradient.isfinite()
    rows = finite.any(0).all(1)
    if not rows.any():
        return None
    chosen = finite.to(torch.uint8).argmax(0, keepdim=True)
    return {leaf: (t.gather(0, chosen)[0] if leaf in _SCORES else t)[rows] for leaf, t in drawn.items()}


def _gradients(of: Tensor, by: Numbers) -> tuple[Tensor, ...]:
    """Of a number: with gradients of the results given, torch imports sympy the first time, 0.25 s."""
    if not of.requires_grad:
        return tuple(torch.zeros_like(t) for t in by.values())
    try:
        return torch.autograd.grad(of, [*by.values()], allow_unused=True, materialize_grads=True)
    except RuntimeError as error:
        if "fork" in str(error):
            raise _NoAutograd from error
        raise


def _by_torch(
    program: Program, leaves: Numbers, beside: Numbers, upstream: Tensor
) -> tuple[Numbers, Numbers]:
    """Results and gradients of some elements, and of others beside them, with the same upstream gradients."""
    both = {leaf: torch.cat((t, beside[leaf])) for leaf, t in leaves.items()}
    reals = {leaf: t.requires_grad_() for leaf, t in both.items() if t.is_floating_point()}
    values, indices = statistics(program, both["score",], both.__getitem__)
    by_element = _gradients((values * torch.cat((upstream, upstream), 1)).sum(), reals)
    found = []
    for part in (0, 1):
        of_part = [t.detach().chunk(2, -1)[part] for t in (values, indices)]
        gradients = [t.chunk(2)[part] for t in by_element]
        sums = {
            leaf: t if leaf in _SCORES else t.sum(1 if leaf[0] == "row" else 0)
            for leaf, t in zip(reals, gradients, strict=True)
        }
        found.append(_results(*of_part) | (sums if program.values else {}))
    return found[0], found[1]


def _by_engine(text: str, program: Program, leaves: Numbers, upstream: Tensor) -> Numbers:
    """The same by the CPU engine. Its first operands are a unit matrix, so that the second are the scores."""
    unit = torch.eye(len(leaves["score",]), dtype=torch.float64)
    other = leaves["other",].T if program.scores == 2 else None
    operands = (unit, leaves["score",].T, None if other is None else unit, other)

    def datum(name: str, axis: int) -> Tensor | None:
        number = count(program, name)
        return torch.stack([leaves[name, k].select(axis, 0) for k in range(number)]) if number else None

    row, column = datum("row", 1), datum("column", 0)
    data = (row, column, datum("row_index", 1), datum("column_index", 0))
    values, low, indices = passes.fold(text, operands, data, 1.0)
    results = _results(values, indices)
    if program.values:
        needed = [False, True, False, other is not None, row is not None, column is not None]
        _, score, _, other, row, column = passes.backward(
            upstream, *operands, *data, values, low, indices, text, 1.0, None, needed
        )
        results["score",] = score.T
        if program.scores == 2:
            results["other",] = other.T
        results |= {("row", k): t for k, t in enumerate(row)}
        results |= {("column", k): t for k, t in enumerate(column)}
    return results


def _results(values: Tensor, indices: Tensor) -> Numbers:
    numbers = {("value", k): t for k, t in enumerate(values)}
    return numbers | {("index", k): t.double() for k, t in enumerate(indices)}


def _largest(t: Tensor) -> float:
    return float(t.abs().masked_fill(~t.isfinite(), 0).amax())


def _differ(found: Tensor, expected: Tensor, tolerance: float) -> Tensor:
    """Where: NaN agrees with all."""
    return ~((found == expected) | ((found - expected).abs() <= tolerance) | expected.isnan())


def _is_tie(program: Program, leaves: Numbers, of: Node, at: Tensor, tolerance: float) -> bool:
    """Are these columns of a largest as good as the expected ones: up to rounding, which may choose."""
    name, number = of[0], of[-1]
    if name != "index" or number >= len(program.largest) or not ((at >= 0) & (at < _COLUMNS)).all():
        return False
    root = program.largest[number]
    values = evaluate(program.nodes, [root], leaves.__getitem__, leaves["score",])[root]
    values = values.expand(leaves["score",].shape)
    there = values.gather(1, at.long()[:, None])
    return bool((there >= values.amax(1, keepdim=True) - tolerance).all())


def _shown(of: Node, wrong: Tensor, leaves: Numbers, found: Tensor, expected: Tensor) -> Broken:
    """The first number that differs, and the row and column that it is of, or one of them."""
    at = tuple(wrong.nonzero()[0].tolist())
    by_column = of[0] == "column"
    places = dict(zip(("column",) if by_column else ("row", "column"), at, strict=False))
    elements: dict[str, float] = dict(places)
    if of in _SCORES:
        elements |= {leaf[0]: float(leaves[leaf][at]) for leaf in _SCORES if leaf in leaves}
    return Broken(of, elements, float(found[at]), float(expected[at]))


def _error(text: str, broken: Broken) -> MonoidLawError:
    traced = living.get(text)
    name, (file, line) = "a function of statistics", user_line()
    if traced is not None:
        name, (file, line) = getattr(RESULTS, traced.result).__name__, traced.at
    kind, *number = broken.of
    if kind in ("value", "index"):
        law = "values"
        what = _name_of(traced, kind, number[0])
        claim = f"{what} by the CPU engine = {what} by plain torch"
    else:
        law, what = "gradients", " ".join(map(str, broken.of))
        claim = f"the derived gradient by {what} = autograd's, of the function in plain torch"
    shown = {**broken.elements, "found": broken.found, "expected": broken.expected}
    lines = [f"{file}:{line}: {name} breaks the law of {law}: {claim}"]
    lines += [f"  {key:<8} = {value:.17g}" for key, value in shown.items()]
    lines += ["This is a mistake of monoidreduce, not of the function: please report it with the function."]
    return MonoidLawError("\n".join(lines), law, shown)


def _name_of(traced: Traced | None, kind: str, number: int) -> str:
    """Of a value or an index of a program, what the function calls it."""
    if traced is None:
        return f"{kind} {number}"
    for name, (of, *at) in zip(getattr(RESULTS, traced.result)._fields, traced.outputs, strict=True):
        if at == [number] and ("index" if of == "index" else "value") == kind:
            return str(name)
        if of in ("largest", "smallest") and at[kind == "index"] == number:
            return f"{name}.{kind}"
    return f"{kind} {number}"
