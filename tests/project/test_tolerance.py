"""The acceptance rule itself: what it takes for bad luck."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from tolerance import MayBeLuck, Unlucky, accuracy_failures, check_draws


@pytest.mark.parametrize(
    ("draws", "raised"),
    (
        (("kept",), None),
        (("unlucky", "kept", "unlucky", "kept", "kept"), None),
        (("unlucky", "kept", "kept", "unlucky", "unlucky"), Unlucky),
        (("unlucky", "unlucky", "unlucky"), Unlucky),
        (("unlucky", "another unlucky", "another unlucky", "unlucky", "kept"), None),
        (("unlucky", "kept", "broken"), AssertionError),
    ),
)
def test_the_median_of_draws_is_held_to_the_rule(
    draws: tuple[str, ...], raised: type[AssertionError] | None
) -> None:
    """Of five of one result, where the first is unlucky; what breaks another bound is no matter of luck."""
    left = list(draws)

    def check() -> None:
        drawn = left.pop(0)
        if "unlucky" in drawn:
            raise Unlucky(drawn, [drawn])
        assert drawn == "kept"

    with nullcontext() if raised is None else pytest.raises(AssertionError) as caught:
        check_draws(check)
    assert not left and (raised is None or caught.type is raised)


@pytest.mark.parametrize("of_draws", ({"generated": True}, {"drawn_again": True}, {}))
@pytest.mark.parametrize("excess", (1.0, 3.0, 5.0))
def test_what_may_be_luck(excess: float, of_draws: dict[str, bool]) -> None:
    """An error of one float32 element beyond twice the base's, and not beyond four times."""
    ref = torch.ones(512, 64, dtype=torch.float64)
    base = torch.full((512, 64), 1.125)
    y = base.clone()
    y[3, 5] = 1 + excess / 8
    failures = accuracy_failures("y", y, ref, base, torch.bfloat16, 512, **of_draws)
    assert len(failures) == (excess > 2)
    assert [isinstance(failure, MayBeLuck) for failure in failures] == [
        bool(of_draws) and excess < 4 for _ in failures
    ]
