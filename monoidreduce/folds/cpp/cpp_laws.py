"""The law check of a C++ monoid, before its first use.

A kernel tests the laws on random elements: it writes pairs of numbers that must agree
(device/program/law_claims.h). The verdict is cached on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monoidreduce import _C
from monoidreduce._ops.memory import launch_on
from monoidreduce.folds.cpp.cpp_kernels import LAWS, fold_plan, key_of_verdict, loaded, no_operands
from monoidreduce.folds.cpp.cpp_source import CppSource, parse
from monoidreduce.folds.cuda import cache
from monoidreduce.laws import MonoidLawError

__all__ = ["Samples", "check", "count_of_numbers", "draw", "judge"]

_SAMPLES = 256
_ELEMENTS = 4
_EXACT, _ROUNDED = 0.0, torch.finfo(torch.float64).eps ** (2 / 3)
_DIFFERENCES = 1e-6  # tolerance of central differences; a wrong derivative is off by far more

# (law, claim, tolerance relative to the numbers of a sample)
_OF_STATES = (
    ("identity", "combine(identity, y) = y", _EXACT),
    ("identity", "combine(y, identity) = y", _EXACT),
    ("identity", "combine(combine(identity, identity), y) = y", _EXACT),
    ("commutativity", "combine(x, y) = combine(y, x)", _ROUNDED),
    ("commutativity", "combine(combine(x, y), z) = combine(combine(y, x), z)", _ROUNDED),
    ("associativity", "combine(combine(x, y), z) = combine(x, combine(y, z))", _ROUNDED),
    ("associativity", "combine(combine(x, identity), z) = combine(x, z)", _ROUNDED),
    ("tile fold", "y with two elements accumulated in one frame = their states combined", _ROUNDED),
)
_OF_GRADIENTS = tuple(
    ("local gradient", f"local_gradient(e0, project(fold of {these}), g) = difference quotient", _DIFFERENCES)
    for these in ("e0, e1", "e0, e1, e2, e3")
)


class Samples(NamedTuple):
    """Elements e0 to e3 for each sample. States: x of e0, y of e1 and e2, z of e3."""

    real: Tensor  # [scores of elements, then gradients by results; samples] float64
    label: Tensor  # [1, samples] int64: one of the columns 0 to 3, or -1


def draw(monoid: CppSource) -> Samples:
    """Random samples on the CPU.

    Scores differ from each other and from multiples of 1/8, which may be kinks.
    """
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64, device="cpu")
    wide = torch.arange(_SAMPLES, device="cpu") % 2 == 0
    spread = torch.where(wide, 30.0, 3.0)
    eighths = (8 * spread * normal((_ELEMENTS, monoid.scores, _SAMPLES))).floor()
    places = torch.arange(_ELEMENTS, dtype=torch.float64, device="cpu").view(-1, 1, 1)
    scores = (eighths + (2 * places + 1) / 8) / 8
    g = normal((monoid.count("real"), _SAMPLES))
    label = torch.randint(-1, _ELEMENTS, (1, _SAMPLES), generator=generator, device="cpu")
    return Samples(torch.cat((scores.flatten(0, 1), g)), label)


def count_of_numbers(monoid: CppSource) -> int:
    """Number of values that the kernel writes per sample: LawClaims::kNumbers."""
    return 2 * (len(_OF_STATES) * len(monoid.results) + len(_OF_GRADIENTS) * monoid.scores)


def judge(monoid: CppSource, samples: Samples, numbers: Tensor) -> dict[str, Any] | None:
    """The first broken law with a sample that breaks it, as JSON-compatible data; None if all laws hold.

    numbers: output of the kernel, [count_of_numbers, samples] float64, on the CPU.
    """
    finite = numbers.abs().masked_fill(~numbers.isfinite(), 0)
    scale = 1 + finite.amax(0)
    at = 0
    sizes = [len(monoid.results)] * len(_OF_STATES) + [monoid.scores] * len(_OF_GRADIENTS)
    for (law, claim, tolerance), size in zip(_OF_STATES + _OF_GRADIENTS, sizes, strict=True):
        found, expected = numbers[at : at + size], numbers[at + size : at + 2 * size]
        at += 2 * size
        agrees = (found == expected) | (found.isnan() & expected.isnan())
        if tolerance:
            agrees |= (found - expected).abs() <= tolerance * scale
        if not agrees.all():
            sample = int(agrees.all(0).logical_not().nonzero()[0])
            shown = {
                **_operands(monoid, samples, sample),
                "found": found[:, sample].tolist(),
                "expected": expected[:, sample].tolist(),
            }
            lines = [f"{monoid.name} breaks the law of {law}: {claim}"]
            lines += [f"  {name:<8} = {_text(value)}" for name, value in shown.items()]
            return {"message": "\n".join(lines), "law": law, "counterexample": shown}
    return None


def _operands(monoid: CppSource, samples: Samples, sample: int) -> dict[str, list[float]]:
    real, scores = samples.real[:, sample].tolist(), monoid.scores
    elements = {f"e{i}": real[scores * i : scores * (i + 1)] for i in range(_ELEMENTS)}
    return {**elements, "label": samples.label[:, sample].tolist(), "g": real[scores * _ELEMENTS :]}


def _text(numbers: list[float]) -> str:
    return ", ".join(f"{x:.17g}" if isinstance(x, float) else str(x) for x in numbers)


def _tried(monoid: str, device: torch.device) -> dict[str, Any] | None:
    """Test the laws by the kernel on a GPU; returns the verdict."""
    of = parse(monoid)
    samples = draw(of)
    operands = no_operands(_SAMPLES, device)
    a = operands[0]
    numbers = a.new_empty(count_of_numbers(of), _SAMPLES)
    real, label = samples.real.to(device), samples.label.to(device)
    none = a.new_empty(0, _SAMPLES)
    plan = fold_plan(operands)
    _C.statistics_fold(
        *operands,
        real,
        None,
        label,
        None,
        None,  # tables
        None,
        numbers,
        none,
        none.long(),
        a.new_empty(0),
        *(None,) * 4,  # planes
        loaded(LAWS, monoid, a.dtype, a.device.index),
        0,
        False,
        1.0,
        *launch_on(a),
        plan,
    )
    return judge(of, samples, numbers.cpu())


@lru_cache(1024)
def check(
    monoid: str,
    device: torch.device,
    tried: Callable[[str, torch.device], dict[str, Any] | None] = _tried,
) -> None:
    """Test the laws, unless the cache has a verdict.

    Args:
        monoid: `CppSource.text`.
        device: a GPU.
        tried: the function that tests and returns a verdict.

    Raises:
        MonoidLawError: a law is broken, by this test or an earlier one.
    """
    key = key_of_verdict(monoid)
    known = cache.load_fact(key)
    if known is None:
        known = {"broken": tried(monoid, device)}
        cache.store_fact(key, known)
    if known["broken"] is not None:
        broken, of = known["broken"], parse(monoid)
        message = f"{of.file}:{of.struct_line}: {broken['message']}"
        raise MonoidLawError(message, broken["law"], broken["counterexample"])
