"""The numbers within packed sequences that programs gather by."""

from __future__ import annotations

import pytest
import torch

from monoidreduce.folds.program.sequences import line_numbers


def test_numbers_of_lines() -> None:
    numbers = line_numbers(torch.tensor([0, 2, 2, 5]), torch.tensor([0, 1, 4, 6]), 7)
    assert numbers[:5, :2].tolist() == [[0, 0], [0, 1], [2, 0], [2, 1], [2, 2]]
    assert numbers[:6, 2:].tolist() == [[0, 0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1]]


@pytest.mark.parametrize("values", ([1, 5, 9], [0, 7, 5], [0, 5, 12], [-1, 0, 3], [0, 2**40, 9]), ids=str)
def test_no_number_is_negative(values: list[int]) -> None:
    """Not with starts that are wrong: what kernels gather by these numbers would lie before the table."""
    right = torch.tensor([0, 4, 9])
    for starts in ((torch.tensor(values), right), (right, torch.tensor(values))):
        assert int(line_numbers(*starts, 12).min()) == 0
