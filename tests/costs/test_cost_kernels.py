"""The jobs of kernels beside an enumeration of rows and columns."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from monoidreduce.costs.kernels import Band

BANDS = [
    Band(rows, columns, left, right)
    for rows, columns in ((7, 7), (5, 12), (12, 5), (1, 9))
    for left in (-1, 0, 3)
    for right in (-1, 0, 2)
]


def kept(band: Band) -> torch.Tensor:
    """[rows, columns]: is a pair kept; the last row sees the last column in the middle of its window."""
    aligned = torch.arange(band.rows)[:, None] + band.columns - band.rows
    distance = torch.arange(band.columns) - aligned
    mask = torch.ones(band.rows, band.columns, dtype=torch.bool)
    if band.left >= 0:
        mask &= distance >= -band.left
    if band.right >= 0:
        mask &= distance <= band.right
    return mask


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_pairs(band: Band) -> None:
    assert band.pairs() == int(kept(band).sum())


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_jobs_reach_from_the_first_to_the_last_tile_that_is_kept(band: Band, by_rows: bool) -> None:
    mask = kept(band) if by_rows else kept(band).T
    staying, streamed = 2, 3
    expected: Counter[int] = Counter()
    for lines in mask.split(staying):
        tiles = [i for i, part in enumerate(lines.any(0).split(streamed)) if part.any()]
        expected[tiles[-1] - tiles[0] + 1 if tiles else 0] += 1
    assert band.jobs(by_rows, staying, streamed) == expected
