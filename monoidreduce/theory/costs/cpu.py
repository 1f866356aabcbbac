"""The time of kernels on a CPU: matrix products of tiles, plus a time per score.

Both are expressed in FLOPs at the rate that torch reaches on this CPU in large products of the same dtype.
The constants depend on dtype and direction. bench/cost.py fits them to log-sum-exp and cross entropy (folds
without a payload) and to the MLP (a fold with a payload). Attention and distillation are held out, to test
the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from monoidreduce import _C
from monoidreduce._ops.dry_run import DryRun, Launch
from monoidreduce._validate import mismatch
from monoidreduce.inspection import fold_of, tiles_of
from monoidreduce.theory.costs.model import Time
from monoidreduce.theory.costs.work import Band, Work
from monoidreduce.theory.hardware import Processor

__all__ = ["CONSTANTS", "Constants", "Fold", "folds", "timed"]


class Constants(NamedTuple):
    """Costs in FLOPs at the rate of large products.

    product: cost of a FLOP in a tile's product. score: cost of a score in a fold without payload. weighing:
    cost of a score in a fold that weighs a payload (values of attention, second matrix of the MLP).
    """

    product: float
    score: float
    weighing: float


# (dtype, whether backward) -> constants, fitted to the times in bench/results/amd_epyc_cpu.json.
CONSTANTS = {
    ("float32", False): Constants(0.4854, 17.17, 40.1),
    ("float32", True): Constants(0.534, 5.141, 0.0),
    ("bfloat16", False): Constants(0.9716, 106.6, 182.5),
    ("bfloat16", True): Constants(1.105, 155.9, 270.6),
}


class Fold(NamedTuple):
    """A pass of the CPU engine. flops, scores: numbers over all tiles. weighing: the fold has a payload."""

    launch: Launch
    flops: float
    scores: float
    weighing: bool

    def seconds(self, constants: Constants, rate: float) -> float:
        """rate: FLOP/s of large products."""
        of_score = constants.weighing if self.weighing else constants.score
        return (constants.product * self.flops + of_score * self.scores) / rate


def _pairs(band: Band, by_rows: bool, staying: int, streamed: int) -> int:
    """Number of pairs in the tiles that the band touches; tiles at the ends are cut to the operands."""
    lines, others = (band.rows, band.columns) if by_rows else (band.columns, band.rows)
    if not (lines and others):
        return 0  # the tile sizes are 0 then
    return sum(
        min(staying, lines - staying * i) * (min(passed.stop * streamed, others) - passed.start * streamed)
        for i, passed in enumerate(band.passed(by_rows, staying, streamed))
        if passed
    )


def _fold(launch: Launch, operator: str, tile: tuple[int, int]) -> Fold:
    a, fold = launch.arguments, fold_of(operator)
    roles = fold.operands
    rows, columns = (a[roles[of]].shape for of in "ab")
    band = Band(rows[-2], columns[-2], a.get("left", -1), a.get("right", -1))
    of_scores = rows[-1] + (a[roles["other_a"]].shape[-1] if "other_a" in roles else 0)
    payload = a[fold.payload].shape[-2 if fold.transposed else -1] if fold.payload else 0
    weighed = [of_scores, payload]
    if launch.backward:  # one more product for each gradient; the payload's has the output's width
        gradients = {role: a[f"d{name}"].shape[-1] for role, name in roles.items() if f"d{name}" in a}
        weighed += [payload if role == "payload" else width for role, width in gradients.items()]
    staying, streamed = (tile[1], tile[0]) if launch.backward else tile
    pairs = math.prod(rows[:-2]) * _pairs(band, not launch.backward, staying, streamed)
    return Fold(launch, 2.0 * sum(weighed) * pairs, pairs * (1 + ("other_a" in roles)), payload > 0)


def folds(operator: str, call: dict[str, Any], run: DryRun) -> Iterator[Fold]:
    """The passes of the CPU engine in a dry run."""
    tiles = tiles_of(operator, call, next(iter(call.values())).dtype)
    for launch in run.launches:
        if launch.name in _C.CALLS:
            yield _fold(launch, operator, tiles[launch.backward])


def timed(
    operator: str, call: dict[str, Any], run: DryRun, processor: Processor
) -> list[tuple[bool, Work, Time]]:
    """(backward, work, time) of each kernel. Operands are counted as read once, results as written once.

    Raises ValueError for a dtype whose products were not measured, or for an MLP with a gate.
    """
    if call.get("gate") is not None:
        raise ValueError(
            mismatch("gate", "None: on a CPU an MLP with a gate has no model", call["gate"].shape)
        )
    dtype = next(iter(call.values())).dtype
    rate, bandwidth = processor.reached(dtype)
    found = []
    for fold in folds(operator, call, run):
        launch, a = fold.launch, fold.launch.arguments
        read, written = (
            sum(a[f.name].bytes for f in _C.CALLS[launch.name] if f.kind in kinds and f.name in a)
            for kinds in (("tensor",), ("result", "gradient"))
        )
        work = Work(launch.name, launch.name, 1, fold.flops, Counter({1: 1}), read, written)
        constants = CONSTANTS[str(dtype).removeprefix("torch."), launch.backward]
        moved = (read + written) / bandwidth  # the constants already include the time to write
        time = Time(fold.seconds(constants, rate), moved, 0.0, 0.0, True)
        found.append((launch.backward, work, time))
    return found
