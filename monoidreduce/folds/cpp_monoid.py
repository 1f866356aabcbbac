"""`cpp_monoid`: folds of monoids that a user writes in C++, for cases that `statistics` cannot express."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Mapping
from keyword import iskeyword
from typing import Any

from torch import Tensor

from monoidreduce._ops.registry import call_op
from monoidreduce._results import RESULTS, result_name
from monoidreduce._validate import check_axes, check_choice, check_factor, check_int, check_tensor, mismatch
from monoidreduce.explanation import Explanation
from monoidreduce.folds.cpp.cpp_source import KINDS, CppSource
from monoidreduce.folds.explain import explain_fold
from monoidreduce.folds.statistics_call import checked_label, checked_operands
from monoidreduce.functional import _like_rows, workspace_bytes

__all__ = ["CppMonoid", "cpp_monoid"]

_STRUCT = re.compile(r"template\s*<\s*(?:class|typename)\s+\w+\s*>\s*struct\s+(\w+)")


def cpp_monoid(
    source: str,
    *,
    results: Mapping[str, str] | None = None,
    name: str | None = None,
    scores: int = 1,
    filename: str | None = None,
) -> CppMonoid:
    """A fold of scores on a GPU, by a monoid written in C++ (the struct template of
    docs/writing_a_monoid.md).

        noisy_or = mr.cpp_monoid(source)  # template <class R> struct NoisyOr { ... };
        p = noisy_or(a, b).value  # [...], differentiable in a and b

    NVRTC compiles the library's kernels for the struct at the first call. Before that, the laws are tested in
    float64: identity, commutativity, associativity, and the local gradient against finite differences of the
    fold. The verdict is cached with the kernels, so later processes do not test again.

    Args:
        source: C++20 text. It is placed in a namespace inside `monoidreduce`, after all headers of monoids.
            Constants must be part of the text, because the struct has no members of its own.
        results: names of the members of `Output`, in order, each with its kind. "real": a result with a
            gradient; `Upstream` has one number for each of these, in this order. "index": an Index<R> without
            a gradient. "kept": a real that `local_gradient` reads and that is not returned. The default is
            {"value": "real"}, which also describes an Output that is a plain R.
        name: name of the struct; by default the last struct template in the text.
        scores: kScores of the struct, 1 or 2.
        filename: the file that `source` was read from, for errors. By default errors point into the caller's
            file, if it contains the text literally.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    if not isinstance(source, str):
        raise TypeError(mismatch("source", "C++ as text", repr(source)))
    if name is None:
        structs = _STRUCT.findall(source)
        if not structs:
            raise ValueError(mismatch("source", "template <class R> struct ..., or its name=", repr(source)))
        name = structs[-1]
    elif not isinstance(name, str) or not re.fullmatch(r"\w+(::\w+)*", name):
        raise ValueError(mismatch("name", "the name of a struct", repr(name)))
    if check_int("scores", scores, "1 or 2") not in (1, 2):
        raise ValueError(mismatch("scores", "1 or 2", scores))
    file, line = _place(source) if filename is None else (str(filename), 1)
    return CppMonoid(CppSource(source, name, _results(results), scores, file, line))


def _results(results: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    if results is None:
        return (("value", "real"),)
    if not isinstance(results, Mapping):
        raise TypeError(mismatch("results", "a dict of names and kinds", repr(results)))
    for name, kind in results.items():
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or iskeyword(name):
            raise ValueError(mismatch("results", "names of attributes, without _ in front", repr(name)))
        check_choice(f"results[{name!r}]", kind, KINDS)
    if "real" not in results.values():
        raise ValueError(mismatch("results", 'a result that is "real"', dict(results)))
    return tuple(results.items())


def _place(source: str) -> tuple[str, int]:
    """File and line of the text for errors: in the caller's file, nearest to the call.

    Else a made-up name.
    """
    frame = sys._getframe(2)
    file, call = frame.f_code.co_filename, frame.f_lineno
    content = "".join(linecache.getlines(file))
    lines = [content[: at.start()].count("\n") + 1 for at in re.finditer(re.escape(source), content)]
    if not source or not lines:
        return f"<cpp_monoid of {file}:{call}>", 1
    return file, min(lines, key=lambda line: abs(line - call))


class CppMonoid:
    """The result of `cpp_monoid`; see there."""

    def __init__(self, source: CppSource) -> None:
        self._source, self._text = source, source.text
        returned = [(name, kind) for name, kind in source.results if kind != "kept"]
        self._result = result_name(source.name.rpartition("::")[2], tuple(name for name, _ in returned))
        # For each result: whether it is an index, and its number among the results of its kind.
        kinds = [kind for _, kind in returned]
        self._places = [(kind == "index", kinds[:at].count(kind)) for at, kind in enumerate(kinds)]

    def __repr__(self) -> str:
        return f"<cpp_monoid {self._source.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._source,)

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        other_a: Tensor | None = None,
        other_b: Tensor | None = None,
        *,
        label: Tensor | None = None,
        scale: float = 1.0,
        workspace: int | None = None,
    ) -> Any:
        """Fold the scores scale * a @ b^T of each row, without storing them.

        Args:
            a: [..., D], one row per result, on a GPU.
            b: [V, D], the columns, which are folded.
            other_a, other_b: [..., E] and [V, E]; scale times their product is Element::other.
            label: [...] integers, Element::label; -1 if not given.
            scale: factor of the scores.
            workspace: bytes for local gradients in backward; `get_workspace()` by default.

        Returns:
            A NamedTuple of [...] tensors with the names of results. Reals are in the accumulation dtype and
            differentiable in the operands; indices are int64.

        Raises:
            CppMonoidError: the text does not compile.
            MonoidLawError: the struct breaks a law (tested now or in an earlier process).
            RuntimeError: the tensors are not on a GPU, the build has no CUDA, or NVRTC is not available.
            TypeError, ValueError: an argument is not as above.
        """
        operands = self._operands(a, b, other_a, other_b)
        labels = None if label is None else checked_label(label, a)
        values, _, indices = call_op(
            "cpp_monoid",
            *operands,
            labels,
            self._text,
            check_factor("scale", scale),
            workspace_bytes(workspace),
        )
        return getattr(RESULTS, self._result)(
            *[_like_rows((indices if index else values).select(0, at), a) for index, at in self._places]
        )

    def explain(
        self,
        a: Tensor,
        b: Tensor,
        other_a: Tensor | None = None,
        other_b: Tensor | None = None,
        *,
        label: Tensor | None = None,
        scale: float = 1.0,
        workspace: int | None = None,
    ) -> Explanation:
        """The kernels that a call would run, and why. Nothing is computed or compiled, and no law is tried.

        Raises RuntimeError, TypeError and ValueError as the call would.
        """
        call = {"a": a, "b": b, "other_a": other_a, "other_b": other_b, "label": label}
        return explain_fold(self, {**call, "scale": scale, "workspace": workspace})

    def _operands(
        self, a: Tensor, b: Tensor, other_a: Tensor | None, other_b: Tensor | None
    ) -> tuple[Any, ...]:
        scores = self._source.scores
        wanted = 2 * (scores - 1)
        given = sum(t is not None for t in (other_a, other_b))
        if given != wanted:
            expected = f"{wanted} tensors, since scores is {scores}"
            raise ValueError(mismatch("other_a, other_b", expected, given))
        check_axes("b", check_tensor("b", b), ("V", "D"), {})  # all rows have the same columns
        return checked_operands(a, b, other_a, other_b)
