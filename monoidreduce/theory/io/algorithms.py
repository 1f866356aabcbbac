"""All schedules by name, with what each computes and the closed form of its I/O."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from .counts import (
    flash1_backward_words,
    flash2_backward_words,
    flash_forward_words,
    flash_rows_words,
    large_cache_words,
    no_cache_words,
    small_cache_words,
)
from .flash import flash1_backward, flash2_backward, flash_forward, flash_rows
from .large_cache import large_cache
from .no_cache import no_cache
from .small_cache import small_cache
from .two_level import check_least, check_sizes

__all__ = ["ALGORITHMS", "Algorithm", "best_algorithm", "words_or_none"]


class Algorithm(NamedTuple):
    """A schedule and the closed form of its I/O.

    Attributes:
        computes: "g", the paper's gradient (Definition 3.2); or, from a head's Q, K and V, "O" (with l) or
            "dQ, dK, dV".
        schedule: the function that `simulate` runs.
        words: (n, d, M) -> number of words moved; raises ValueError if a size is below 1 or the cache too
            small.
        fits: whether it holds at most M words in the cache. If not, run it with `strict=False`.
    """

    computes: Literal["g", "O", "dQ, dK, dV"]
    schedule: Callable[..., None]
    words: Callable[[int, int, int], int]
    fits: bool = True


def _large(fits: bool, **options: str | bool) -> Algorithm:
    schedule, words = partial(large_cache, **options), partial(large_cache_words, **options)  # type: ignore[arg-type]
    return Algorithm("g", schedule, words, fits)


ALGORITHMS = {
    "Algorithm 1": Algorithm("g", no_cache, no_cache_words),
    "Algorithm 6": Algorithm("g", small_cache, small_cache_words),
    "Algorithm 9": _large(False, policy="paper"),
    "Algorithm 9, swapped": _large(False, policy="swapped"),
    "Algorithm 9, fit": _large(True, policy="fit"),
    "Algorithm 9, fit, dQ first": _large(True, policy="fit", sum_first=True),
    "Algorithm 9, fit, columns": _large(True, policy="fit", order="columns", sum_first=True),
    "flash rows": Algorithm("g", flash_rows, flash_rows_words),
    "FlashAttention-1 backward": Algorithm("dQ, dK, dV", flash1_backward, flash1_backward_words),
    "FlashAttention-2 backward": Algorithm("dQ, dK, dV", flash2_backward, flash2_backward_words),
    "FlashAttention-2 forward": Algorithm("O", flash_forward, flash_forward_words),
}


def words_or_none(name: str, n: int, d: int, words: int) -> int | None:
    """The number of words that an algorithm moves; None if the cache is too small for it.

    Raises:
        ValueError: a size is below 1.
    """
    check_sizes(n=n, d=d, words=words)
    try:
        return ALGORITHMS[name].words(n, d, words)
    except ValueError:
        return None


def best_algorithm(n: int, d: int, words: int) -> str:
    """The name of the algorithm for g that moves the fewest words, among those that hold at most M words.

    Raises:
        ValueError: a size is below 1, or the cache is too small for all of them.
    """
    check_sizes(n=n, d=d)
    check_least("words", words, 4)  # enough for Algorithm 6
    counts = {
        name: count
        for name, algorithm in ALGORITHMS.items()
        if algorithm.computes == "g" and algorithm.fits
        if (count := words_or_none(name, n, d, words)) is not None
    }
    return min(counts, key=counts.__getitem__)
