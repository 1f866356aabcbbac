"""Collectives (paper, Table 2 and Appendix C): formulas, and a simulation of rings chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from monoidreduce._validate import check_choice, mismatch
from monoidreduce.theory.plan._positive import check_amounts, check_counts, check_numbers

__all__ = ["COLLECTIVES", "Ring", "ring", "seconds", "sent"]

# Bytes that a chip sends, as a fraction of the full (unsharded) object (Table 2).
COLLECTIVES = {"all-gather": 1.0, "reduce-scatter": 1.0, "all-reduce": 2.0, "all-to-all": 0.25}


def sent(collective: str, bytes: float) -> float:
    """Bytes that a chip sends for an object of `bytes` (Table 2); independent of the number of chips.

    Raises ValueError for a name that is not in `COLLECTIVES`, and for negative `bytes`.
    """
    check_choice("collective", collective, tuple(COLLECTIVES))
    check_amounts(bytes=bytes)
    return COLLECTIVES[collective] * bytes


def seconds(collective: str, bytes: float, bandwidth: float, axes: float = 1) -> float:
    """The time of a collective (Table 2).

    bandwidth: bytes/s that a chip sends along one of the `axes` axes.
    """
    check_numbers(bandwidth=bandwidth, axes=axes)
    return sent(collective, bytes) / (axes * bandwidth)


@dataclass(frozen=True)
class Ring:
    """The result of a simulation: number of steps, and bytes that each chip sent over bytes of the object."""

    steps: int
    sent: Fraction


def ring(collective: str, chips: int, dummy: bool = True) -> Ring:
    """Simulate a collective over a bidirectional ring and count what a chip sends (Appendix C).

    dummy: in the last step of an all-gather a chip sends to both sides, although one of these chunks is a
    duplicate. Table 2 counts it so (footnote 14). With dummy=False an all-gather sends 1 - 1/chips of the
    object.

    Raises ValueError for a name that is not in `COLLECTIVES`, or unless `chips` is even; TypeError unless it
    is an int.
    """
    check_choice("collective", collective, tuple(COLLECTIVES))
    check_counts(chips=chips)
    if chips % 2:
        raise ValueError(mismatch("chips", "an even number", chips))
    if collective == "all-reduce":
        parts = [ring(part, chips, dummy) for part in ("reduce-scatter", "all-gather")]
        return Ring(sum(part.steps for part in parts), sum(part.sent for part in parts) + Fraction(0))
    return {"all-gather": _all_gather, "reduce-scatter": _reduce_scatter, "all-to-all": _all_to_all}[
        collective
    ](chips, dummy)


def _all_gather(chips: int, dummy: bool) -> Ring:
    """C.1: in each step a chip forwards to the right what came from the left, and vice versa."""
    held = [{chip} for chip in range(chips)]
    sends = 0  # of each chip; all chips send equally much
    for step in range(chips // 2):
        last = step == chips // 2 - 1
        sends += 2 if dummy or not last else 1
        for chip in range(chips):
            held[(chip + 1) % chips].add((chip - step) % chips)
            if dummy or not last:
                held[(chip - 1) % chips].add((chip + step) % chips)
    assert all(len(shards) == chips for shards in held)
    return Ring(chips // 2, Fraction(sends, chips))


def _reduce_scatter(chips: int, dummy: bool) -> Ring:
    """C.2: an all-gather in reverse.

    Partial sums travel to their owner from both sides, the farthest first.
    """
    # sums[chip][shard]: the chips whose terms are in this chip's partial sum of the shard.
    sums = [[{chip} for _ in range(chips)] for chip in range(chips)]
    sends = 0
    for distance in range(chips // 2, 0, -1):
        far = (
            distance == chips // 2
        )  # the chip opposite sends its term one way; the other way it would be a dummy
        sends += 2 if dummy or not far else 1
        for owner in range(chips):
            for side in (1,) if far else (1, -1):
                sums[(owner + side * (distance - 1)) % chips][owner] |= sums[
                    (owner + side * distance) % chips
                ][owner]
    assert all(len(sums[chip][chip]) == chips for chip in range(chips))
    return Ring(chips // 2, Fraction(sends, chips))


def _all_to_all(chips: int, dummy: bool) -> Ring:
    """C.4: each chunk (1/chips^2 of the object) takes the shorter way to its chip.

    The opposite chip, left.
    """
    chunks = [(start, start, target) for start in range(chips) for target in range(chips)]  # where, from, to
    steps, sends = 0, [0] * chips
    while any(where != target for where, _, target in chunks):
        steps += 1
        for number, (where, start, target) in enumerate(chunks):
            if where != target:
                sends[where] += 1
                way = 1 if (target - start) % chips < chips / 2 else -1
                chunks[number] = ((where + way) % chips, start, target)
    assert len(set(sends)) == 1
    return Ring(steps, Fraction(sends[0], chips**2))
