"""The statistics of programs as monoids: their laws, and the same results from any split of the columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from folds import FOLDS, fold_inputs, leaves_of, outputs_of, program_of
from torch import Tensor

import monoidreduce as mr
from monoidreduce.folds import number_passes
from monoidreduce.folds.program.program import parse
from monoidreduce.folds.torch.monoid import StatisticsMonoid


# States of the k largest are in order: test_most.py has their laws.
@pytest.mark.parametrize("name", [name for name in FOLDS if not parse(program_of(name)[0]).most])
def test_laws(name: str) -> None:
    monoid = StatisticsMonoid(program_of(name)[0])
    columns = iter(range(1 << 30))

    def sample(generator: torch.Generator, shape: tuple[int, ...]) -> Any:
        def field(name: str) -> Tensor:
            if name.startswith("at"):  # elements of a row have columns of their own
                return torch.full(shape, next(columns))
            if name.startswith("count"):
                return torch.randint(5, shape, generator=generator)
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        return monoid.State(*map(field, monoid.State._fields))

    mr.check_monoid(monoid, sample)


@pytest.mark.parametrize("name", FOLDS)
def test_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on devices that have no kernel: with room for few columns at a time, values and gradients."""
    monkeypatch.setattr(number_passes, "has_kernels", lambda a: False)
    fold, call = fold_inputs(name, (3,), 700)
    results = []
    for function, options in ((fold, {"workspace": 0}), (fold.reference, {})):
        outputs = outputs_of(function(**call, **options))
        real = [t.square().sum() for t in outputs if t.requires_grad]
        results.append([*outputs, *torch.autograd.grad(real, leaves_of(call))])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
