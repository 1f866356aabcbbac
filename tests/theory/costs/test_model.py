"""The model of time: how long workers take for jobs, and the constants of kernels."""

from __future__ import annotations

from collections import Counter

import pytest

from monoidreduce.hardware import find
from monoidreduce.theory.costs.model import (
    GAP_SECONDS,
    PASS_SECONDS,
    START_SECONDS,
    STEP_SECONDS,
    Constants,
    constants_of,
    makespan,
    time_of,
)
from monoidreduce.theory.costs.work import Work

H100 = find("h100")


def test_equal_jobs_come_in_waves() -> None:
    assert makespan(Counter({3: 10}), 4, 2.0, 1.0) == 3 * (3 * 2 + 1)


def test_the_last_jobs_are_shared_evenly() -> None:
    """Two waves of whole jobs, then of two others a part for each worker."""
    assert makespan(Counter({3: 10}), 4, 2.0, 1.0, shared=2) == 2 * (3 * 2 + 1) + 2 * 3 * 2 / 4 + 1


def test_a_job_of_unknown_tiles_is_shared_by_all() -> None:
    assert makespan(Counter({1000: 1}), 4, 2.0, 1.0, shared=1) == 1000 * 2 / 4 + 1


def test_the_longest_jobs_go_first() -> None:
    """5 and 4 on one worker each; then 3 beside 4, 2 and 1 beside 5."""
    assert makespan(Counter({5: 1, 4: 1, 3: 1, 2: 1, 1: 1}), 2, 1.0, 0.0) == 8


def test_a_section_goes_before_the_next_one() -> None:
    """Two heads of a long and a short job each: together the long ones first, alone one after the other."""
    jobs = Counter({6: 2, 2: 2})
    assert makespan(jobs, 2, 1.0, 0.0, sections=(2, 2)) == 8
    assert makespan(jobs, 2, 1.0, 0.0, sections=(2, 1)) == 2 + 6


def test_three_heads_in_sections_of_two() -> None:
    """6 and 6, then 2 and 2; the third head's 6 and 2 come last."""
    assert makespan(Counter({6: 3, 2: 3}), 2, 1.0, 0.0, sections=(3, 2)) == 8 + 6


def test_no_jobs_take_no_time() -> None:
    assert makespan(Counter(), 4, 2.0, 0.0) == 0


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
    assert time.seconds == pytest.approx(time.compute + GAP_SECONDS + START_SECONDS)


def test_jobs_that_overlap_wait_once() -> None:
    jobs = Counter({2: 3 * 132})
    apart, together = (
        time_of(work(jobs=jobs, overlapped=overlapped), H100, Constants(128, 0.5, 1e-6, ("x",))).compute
        for overlapped in (False, True)
    )
    assert apart - together == pytest.approx(2e-6)


def test_arithmetic_hides_what_is_read_and_results_come_after_it() -> None:
    constants, alone = (
        Constants(128, 0.5, 0.0, ("x",)),
        time_of(work(), H100, Constants(128, 0.5, 0.0, ("x",))),
    )
    hidden = time_of(work(read=1000), H100, constants)
    assert 0 < hidden.read < hidden.compute and hidden.seconds == pytest.approx(alone.seconds)
    after = time_of(work(written=10**6), H100, constants)
    assert after.seconds == pytest.approx(alone.seconds + after.written) and after.written > 0


def test_jobs_of_few_rows_hide_nothing() -> None:
    constants = Constants(128, 0.5, 0.0, ("x",))
    hidden, exposed = (time_of(work(read=1000, exposed=each), H100, constants) for each in (False, True))
    assert exposed.seconds - hidden.seconds == pytest.approx(hidden.read) and hidden.read > 0


def test_splits_are_combined_one_after_another() -> None:
    few, many = (time_of(work(kernel="", jobs=Counter(), steps=steps), H100) for steps in (8, 64))
    assert many.seconds - few.seconds == pytest.approx(56 * STEP_SECONDS)


def test_the_first_kernel_of_a_pass_begins_it() -> None:
    first, other = (time_of(work(), H100, first=first) for first in (True, False))
    assert first.seconds - other.seconds == pytest.approx(PASS_SECONDS)


@pytest.mark.parametrize("moved", [0, 1 << 20, 1 << 30])
def test_bytes_of_torch_move_from_the_start_of_its_kernels(moved: int) -> None:
    moves = {"kernel": "", "jobs": Counter(), "read": moved}
    ours, torchs = (time_of(work(**moves, overlapped=overlapped), H100) for overlapped in (False, True))
    assert ours.seconds == pytest.approx(GAP_SECONDS + START_SECONDS + ours.read)
    assert torchs.seconds == pytest.approx(GAP_SECONDS + max(START_SECONDS, ours.read))


def test_bytes_take_the_measured_bandwidth() -> None:
    assert H100.measured is not None
    time = time_of(work(kernel="", jobs=Counter(), read=10**9, written=2 * 10**9), H100)
    assert time.memory == pytest.approx(3e9 / H100.measured.bandwidth) and time.bound == "dram"
