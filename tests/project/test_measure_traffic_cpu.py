"""scripts/measure_traffic_cpu.py and its model: caches, schedules and counts of callgrind."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import measure_traffic_cpu
from cpu_schedule import LINE, Cache, Shape, Tile, backward, compulsory, forward
from measure_traffic_cpu import CALIBRATION, Counted, Run, counts, measured

from bench.report import met_traffic

pytestmark = pytest.mark.release  # a test of tools

SHAPE = Shape(128, 256, 32, 48)
PASSES = {"forward": (forward, Tile(16, 120, 16, 6)), "backward": (backward, Tile(64, 240, 16, 6))}


def moved(cache: int, phase: str) -> Cache:
    """Attention through a cache of so many bytes."""
    played = Cache(cache)
    play, tile = PASSES[phase]
    play(played, SHAPE, tile)
    return played


def test_a_full_cache_drops_the_line_that_was_used_least_recently() -> None:
    cache = Cache(2 * LINE)
    cache.touch(1, True)
    cache.touch(2, False)
    cache.touch(1, False)  # stays to be written
    assert (cache.read, cache.written) == (2 * LINE, 0)
    cache.touch(3, False)  # drops 2, which was only read
    assert (cache.read, cache.written) == (3 * LINE, 0)
    cache.touch(4, False)  # drops 1
    assert (cache.read, cache.written) == (4 * LINE, LINE)
    cache.flush()
    assert cache.written == LINE


def test_what_fits_a_cache_is_read_and_written_once() -> None:
    cache = Cache(1 << 20)
    read, written = cache.buffer(1000), cache.buffer(500)
    for _ in range(3):
        read.load(0, 1000)
        written.store(0, 500)
    cache.flush()
    assert (cache.read, cache.written) == (63 * LINE + 32 * LINE, 32 * LINE)


def test_floats_of_a_line_are_one_access() -> None:
    cache = Cache(1 << 20)
    cache.buffer(1)  # has a line of its own
    cache.buffer(64).load(15, 2)
    assert cache.read == 2 * LINE


@pytest.mark.parametrize("phase", PASSES)
def test_a_smaller_cache_moves_no_fewer_bytes(phase: str) -> None:
    caches = [moved(size, phase) for size in (64 << 10, 256 << 10, 1 << 20, 4 << 20)]
    totals = [cache.read + cache.written for cache in caches]
    assert totals == sorted(totals, reverse=True) and totals[0] > 1.5 * totals[-1]
    assert totals[-1] >= compulsory(SHAPE, phase)


def test_a_pass_reads_its_operands_and_writes_its_results_if_all_fits() -> None:
    q, k, v, out = (4 * size for size in (128 * 32, 256 * 32, 256 * 48, 128 * 48))
    scratch = 4 * (8 * 16 * (32 + 48) + 120 * (32 + 48) + 120 * 16)  # packed rows, sums, tiles, scores
    cache = moved(4 << 20, "forward")
    assert cache.written == out + scratch
    assert cache.read == q + k + v + cache.written  # writes take lines in


def test_compulsory_bytes_are_those_of_operands_and_results() -> None:
    q, k, v, out = 128 * 32, 256 * 32, 256 * 48, 128 * 48
    assert compulsory(SHAPE, "forward") == 4 * (q + k + v + out)
    assert compulsory(SHAPE, "backward") == 4 * (2 * (q + k + v) + 2 * out)  # out and its gradient are read
    assert compulsory(Shape(128, 256, 32), "backward") == 4 * 2 * (q + k)


def test_counts_are_those_of_the_pass_alone() -> None:
    text = "==7== Events    : Ir Dr\n==7== Collected : 9 8 7 6 5 4 3 1100 50 2 30 4\n"
    assert counts(text, flushed=1000 * LINE) == Counted(150 * LINE, 36 * LINE)
    without_zeros = text.replace(" 2 30 4", " 0 30")
    assert counts(without_zeros, flushed=1000 * LINE) == Counted(150 * LINE, 30 * LINE)


@pytest.mark.parametrize("text", ["", "==7== Collected : " + "1 " * 13, "Collected : 1\nCollected : 1\n"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected one line Collected"):
        counts(text, 0)


def test_every_cache_and_pass_is_counted() -> None:
    first, *rest = measure_traffic_cpu.runs()
    assert first.op == "copy"
    cases = {(run.op, run.phase, run.cache) for run in rest}
    assert len(cases) == len(rest) == 2 * 2 * 3


@pytest.mark.parametrize("missing", ["valgrind", "no-such-compiler"])
def test_missing_tools_are_told(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == missing else f"/bin/{tool}")
    with pytest.raises(SystemExit) as stop:
        measure_traffic_cpu.main([])
    assert stop.value.code == 2
    assert f"error: {missing}: expected on PATH" in capsys.readouterr().err


def test_a_compiler_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="false: cannot be compiled: 1"):
        measure_traffic_cpu.build("false", tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("valgrind") and shutil.which("g++")), reason="needs valgrind and a C++ compiler"
)
def test_the_model_holds_for_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled in half of the time: what the compiler keeps on the stack never leaves the first cache."""
    flags = tuple("-O1" if flag == "-O3" else flag for flag in measure_traffic_cpu.FLAGS)
    monkeypatch.setattr(measure_traffic_cpu, "FLAGS", flags)
    program = measure_traffic_cpu.build("g++", tmp_path)
    for run in (
        Run("copy", "forward", CALIBRATION, 1 << 20),
        Run("attention", "backward", Shape(256, 384, 128, 128), 512 << 10),
    ):
        assert met_traffic(measured(program, run)), run
