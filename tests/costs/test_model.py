"""The model of time: how long workers take for jobs, and the constants of kernels."""

from __future__ import annotations

from collections import Counter

import pytest

from monoidreduce.costs.kernels import Work
from monoidreduce.costs.model import LAUNCH_SECONDS, Constants, constants_of, makespan, time_of
from monoidreduce.hardware import find

H100 = find("h100")


def test_equal_jobs_come_in_waves() -> None:
    assert makespan(Counter({3: 10}), 4, 2.0, 1.0, shared=False) == 3 * (3 * 2 + 1)


def test_shared_jobs_end_together() -> None:
    assert makespan(Counter({3: 10}), 4, 2.0, 1.0, shared=True) == 10 * (3 * 2 + 1) / 4


def test_the_longest_jobs_go_first() -> None:
    """5 and 4 on one worker each; then 3 beside 4, 2 and 1 beside 5."""
    assert makespan(Counter({5: 1, 4: 1, 3: 1, 2: 1, 1: 1}), 2, 1.0, 0.0, shared=False) == 8


def test_no_jobs_take_no_time() -> None:
    assert makespan(Counter(), 4, 2.0, 0.0, shared=False) == 0


def test_constants_are_those_of_the_next_width() -> None:
    rows = {"a kernel": (Constants(64, 0.5, 0.0, ("x",)), Constants(128, 0.7, 0.0, ("y",)))}
    found = [constants_of("a kernel", width, rows).share for width in (8, 64, 65, 128, 256)]
    assert found == [0.5, 0.5, 0.7, 0.7, 0.7]
    assert constants_of("another", 64, rows).fitted == ()


def work(**changes: object) -> Work:
    given = {"name": "a", "kernel": "k", "width": 100, "flops": 1e9, "jobs": Counter({2: 132})}
    return Work(**{**given, "read": 0, "written": 0, **changes})  # type: ignore[arg-type]


def test_a_tile_takes_its_products_at_a_share_of_the_measured_rate() -> None:
    assert H100.measured is not None
    tile = 1e9 * 128 * 132 / (0.5 * H100.measured.peak)  # padded to the width of the constants
    time = time_of(work(), H100, Constants(128, 0.5, 1e-6, ("x",)))
    assert time.compute == pytest.approx(2 * tile + 1e-6) and time.known and time.bound == "tensor"
    assert time.seconds == time.compute + LAUNCH_SECONDS


def test_bytes_take_the_measured_bandwidth() -> None:
    assert H100.measured is not None
    time = time_of(work(kernel="", jobs=Counter(), read=10**9, written=2 * 10**9), H100)
    assert time.memory == pytest.approx(3e9 / H100.measured.bandwidth) and time.bound == "dram"
