"""The jobs of kernels beside an enumeration of rows and columns, and constants beside the C++ sources."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import monoidreduce as mr
from monoidreduce._ops import slices
from monoidreduce.costs import dry_run, kernels
from monoidreduce.costs.kernels import Band
from monoidreduce.hardware import HARDWARE

CSRC = Path(__file__).resolve().parents[2] / "csrc"

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


@pytest.mark.parametrize(
    ("length", "steps", "options"),
    [
        (1 << 22, kernels._STEPS_OF_HEAD, {"causal": True}),  # jobs differ in length: it takes many
        (1 << 19, 1 << 17, {}),
        (1 << 19, 1 << 14, {"window": (1023, 0)}),
        (1 << 22, kernels._STEPS_OF_HEAD, {"window": (2**14, 0)}),
    ],
    ids=str,
)
def test_jobs_that_are_taken_together_read_as_they_do_apart(
    length: int, steps: int, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.empty(1, 1, length, 128, dtype=torch.bfloat16, device="meta")
    found = []
    for most in (1 << 24, steps):
        monkeypatch.setattr(kernels, "_STEPS_OF_HEAD", most)
        kernels._streamed.cache_clear()
        cost = mr.cost("attention", q, q, q, hardware="h100", **options)
        found.append([p.dram_read for p in cost.passes if p.tiles])
    kernels._streamed.cache_clear()
    apart, together = found
    assert together == pytest.approx(apart, rel=0.05)


def test_groups_of_a_contraction_that_are_left_out_read_as_the_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = (1 << 16, 1 << 15, 1024, (256, 256), HARDWARE["h100"])
    whole = kernels._contraction_read(*sizes)
    monkeypatch.setattr(kernels, "_TILES", 1 << 11)
    assert kernels._contraction_read.__wrapped__(*sizes) == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize("hardware", ["h100", "a100", "cpu"])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (1023, 0)}, {}], ids=str)
def test_a_longest_call_has_a_cost(hardware: str, options: dict[str, object]) -> None:
    """Of pairs that are counted in closed form, it has all."""
    length = dry_run.MOST
    q = torch.empty(1, 1, length, 128, dtype=torch.bfloat16, device="meta")
    found = mr.cost("attention", q, q, q, hardware=hardware, **options)
    pairs = {1: length**2, 2: length * (length + 1) // 2, 3: 1024 * length - 1023 * 1024 // 2}
    kept = pairs[1 if not options else 2 if "causal" in options else 3]
    assert found.useful_flops == pytest.approx(12 * 128 * kept, rel=1e-12) and found.seconds > 0


@pytest.mark.parametrize("hardware", ["h100", "cpu"])
def test_a_longer_call_is_refused(hardware: str) -> None:
    q = torch.empty(1, 1, 64, 64, device="meta")
    k = torch.empty(1, 1, 1 << 40, 64, device="meta")
    complaint = rf"^k: expected at most {dry_run.MOST} along each axis, .*, got \[1, 1, {1 << 40}, 64\]$"
    with pytest.raises(ValueError, match=complaint):
        mr.cost("attention", q, k, k, hardware=hardware)


def in_source(file: str, pattern: str) -> list[str]:
    """What the groups of a pattern are in a C++ source that has it once."""
    (found,) = re.finditer(pattern, (CSRC / file).read_text("utf-8"))
    return [*found.groups()]


def test_sections_are_those_of_the_launch() -> None:
    (megabytes,) = in_source("include/monoidreduce/launch/fold_shape.cuh", r"kCacheBytes = (\d+) << 20;")
    assert int(megabytes) << 20 == kernels._SECTION


def test_tiles_of_contractions_are_those_of_the_plan() -> None:
    """ContractionSizes: blocks of a cluster, rows and columns of its tile."""
    blocks, rows, columns = map(int, in_source("plan/tiles.h", r"kSm90Loss\{(\d+), (\d+), (\d+), "))
    assert (blocks, rows, columns) == (kernels._CLUSTER, slices.TILE_ROWS, slices.TILE_COLUMNS)


def test_tiles_of_products_are_those_of_the_kernel() -> None:
    """Of 256 columns, or of 192 where that is done first."""
    source = "cuda/sm90/loss_gradients.cu"
    wide, narrow = (
        int(*in_source(source, rf"using {name} = ContractionTile<(\d+), 4, 1, kRowsTransposed>;"))
        for name in ("Wide", "Narrow")
    )
    (factor,) = map(float, in_source(source, r"cost\(Narrow\{\}\) \* ([\d.]+) < cost\(Wide"))
    columns, clusters = 1920, 2  # 7.5 wide tiles, 10 narrow ones
    assert slices.product_waves(1, columns, clusters) == (factor * 5 * narrow, narrow)
    assert slices.product_waves(1, 8 * wide, clusters) == (4 * wide, wide)
