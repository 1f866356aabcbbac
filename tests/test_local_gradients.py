"""How many classes' local gradients a forward pass keeps, by the bytes that it may."""

from __future__ import annotations

import pytest

from monoidreduce.local_gradients import columns_to_keep

TILE = 256  # classes
RESERVE = 128 << 20  # bytes that the others are computed in
ROWS = 8192


@pytest.mark.parametrize("scores", (1, 2))
@pytest.mark.parametrize("columns", (128256, 50257, 256, 1))
def test_all_are_kept_where_they_fit(columns: int, scores: int) -> None:
    whole = 2 * ROWS * columns * scores
    assert columns_to_keep(ROWS, columns, whole, scores) == columns
    assert columns_to_keep(ROWS, columns, whole - 1, scores) < columns


def test_others_have_room_to_be_computed_in() -> None:
    """Beyond the reserve, each tile that fits is a tile that is not computed again."""
    of_tile = 2 * ROWS * TILE
    assert columns_to_keep(ROWS, 128256, RESERVE) == 0
    kept = [columns_to_keep(ROWS, 128256, RESERVE + n * of_tile) for n in range(100)]
    assert kept == [n * TILE for n in range(100)]


@pytest.mark.parametrize("scores", (1, 2))
@pytest.mark.parametrize("workspace", (0, 1, 1 << 20, 100 << 20, 300 << 20, 1 << 30, 2 << 30, 5 << 30))
def test_either_pass_stays_within_the_workspace(workspace: int, scores: int) -> None:
    columns = 128256
    kept = columns_to_keep(ROWS, columns, workspace, scores)
    assert 2 * ROWS * kept * scores <= workspace  # of the forward pass
    if 0 < kept < columns:
        assert kept % TILE == 0
        left = workspace - 2 * ROWS * kept  # of the backward pass
        assert left >= RESERVE - 2 * ROWS * TILE


@pytest.mark.parametrize(("rows", "columns"), ((0, 10), (10, 0)))
def test_nothing_is_kept_of_nothing(rows: int, columns: int) -> None:
    assert columns_to_keep(rows, columns, 1 << 40) == 0
