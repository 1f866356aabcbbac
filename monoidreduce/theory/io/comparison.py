"""A comparison of all algorithms and bounds, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .algorithms import ALGORITHMS, best_algorithm, words_or_none
from .bounds import lower_bounds
from .two_level import check_sizes

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True)
class Comparison:
    """Words moved by every algorithm, and bounds on them, for several cache sizes.

    Attributes:
        n, d: rows and columns of A1, A2, A3 and dO.
        cache: the cache sizes M.
        algorithms: for each algorithm, the words it moves for each M; None if the cache is too small.
        bounds: the lower bounds for the gradient g, for each M. "theta" is asymptotic.
        best: for each M, the algorithm for g that moves the fewest words; None if the cache is too small for
            all.
    """

    n: int
    d: int
    cache: tuple[int, ...]
    algorithms: dict[str, tuple[int | None, ...]]
    bounds: dict[str, tuple[float, ...]]
    best: tuple[str | None, ...]

    def __str__(self) -> str:
        lines = [
            f"words moved / n^2 for n = {self.n}, d = {self.d}",
            _line("M", "computes", [str(words) for words in self.cache]),
            _line("M / d^2", "", [f"{words / self.d**2:.4g}" for words in self.cache]),
        ]
        for name, counts in self.algorithms.items():
            lines.append(_line(name, ALGORITHMS[name].computes, [self._per_pair(count) for count in counts]))
        for name, bounds in self.bounds.items():
            kind = "asymptotic" if name == "theta" else "g"
            lines.append(_line(f"bound: {name}", kind, [self._per_pair(bound) for bound in bounds]))
        return "\n".join(lines)

    def _per_pair(self, words: float | None) -> str:
        return "-" if words is None else f"{words / self.n**2:.2f}"

    def to_json(self) -> str:
        """All attributes, in words."""
        return json.dumps(asdict(self), indent=2)


def _line(name: str, computes: str, values: Sequence[str]) -> str:
    return f"{name:<28}{computes:<12}" + "".join(f"{value:>10}" for value in values)


def compare(n: int, d: int, cache: Sequence[int]) -> Comparison:
    """Compare all algorithms by their closed forms.

    Args:
        n, d: rows and columns of A1, A2, A3 and dO.
        cache: the sizes M of the cache, in words.

    Raises:
        ValueError: a size is below 1.
    """
    check_sizes(n=n, d=d, **{f"cache[{place}]": words for place, words in enumerate(cache)})
    algorithms = {name: tuple(words_or_none(name, n, d, words) for words in cache) for name in ALGORITHMS}
    by_size = [lower_bounds(n, d, words) for words in cache]
    bounds = {row[0].name: tuple(bound.words for bound in row) for row in zip(*by_size, strict=True)}
    best = tuple(best_algorithm(n, d, words) if words >= 4 else None for words in cache)
    return Comparison(n, d, tuple(cache), algorithms, bounds, best)
